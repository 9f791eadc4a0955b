"""`limpet retry`, `pause`, `resume`, `migrate`, `backup`: what people change, never by writing into a shard."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
from collections import defaultdict

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import count, note, say, say_json, size
from limpet.engine.load import load
from limpet.engine.spider import table_name
from limpet.errors import UsageError
from limpet.store import Store, jobs, requests
from limpet.store import migrate as migrations
from limpet.store.backup import backup as copy_database
from limpet.store.opening import connect
from limpet.store.script import script
from limpet.store.tables import ensure, load_tables
from limpet.store.views import find_task, reading, wait_for_request
from limpet.task import ENDED, State
from limpet.url import authority_of, canonicalise, shard_of

#: Seconds that a living owner is given to apply a request, before the command says that it will.
PATIENCE_S = 5.0


def who() -> str:
    """Who asks, for the request's row: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "somebody"
    return f"{user}@{socket.gethostname()}"


# -- retry ------------------------------------------------------------------------------------


def retry(args: argparse.Namespace) -> int:
    """Put tasks back, and end a pause. 6 where nothing was to be put back, 9 where a shard was lost meanwhile."""
    with database.of_job(args) as (store, job):
        before = jobs.read(store.db, job.id)
        asked = _ask_for_urls(args, store, job) if args.urls or args.task else _ask_for_states(args, store)
        applied = requests.apply(store)
        put_back, waiting = applied.put_back, 0
        if asked.shards:
            put_back, waiting = wait_for_request(store.db, job.id, asked.first, asked.last, patience_s=PATIENCE_S if applied.left else 0)
    if args.json:
        say_json({"job": job.name, "put_back": put_back, "shards_waiting": waiting, "resumed": bool(before.paused)})
    else:
        if before.paused:
            say(f"{job.name}: no longer paused ({before.paused})")
        say(
            f"{job.name}: {count(put_back, 'task')} put back" + ("; `limpet run` tries them again" if put_back and not applied.left else "")
        )
        if waiting:
            say(f"{count(waiting, 'shard')} of a worker that is alive: it applies the request in its next batch")
    return Exit.COMPLETE if put_back or waiting or before.paused else Exit.NOTHING_TO_DO


def _ask_for_states(args: argparse.Namespace, store: Store) -> requests.Asked:
    """Ask every shard that may have such tasks."""
    assert store.job is not None, "the job was chosen"
    states = sorted(set(args.state or [str(State.DEAD)]))
    argument: dict[str, object] = {"states": states} | ({"reason": args.reason} if args.reason else {})
    shards = requests.shards_with_dead(store) if states == [State.DEAD] else range(store.job.shards)
    return requests.ask(store, "retry", argument, shards=shards, who=who(), resume=True)


def _ask_for_urls(args: argparse.Namespace, store: Store, job: jobs.Job) -> requests.Asked:
    """Ask the shards of some tasks; UsageError where one is unknown or has not ended."""
    if args.reason or args.state:
        raise UsageError("retry: named tasks are put back whatever they ended in, so --reason and --state do not go with them")
    tasks: dict[int, list[int]] = defaultdict(list)
    for text in [*(canonicalise(url, job.profile).text for url in args.urls), *args.task]:
        found = find_task(store.db, job, text)
        if found is None:
            raise UsageError(f"{job.name} has no task with the key {text}")
        if found.state not in ENDED:
            raise UsageError(f"{text} is {found.state}: only what has ended can be put back")
        tasks[shard_of(authority_of(text), job.shards)].append(found.task)
    first = last = 0
    for shard, ids in sorted(tasks.items()):
        asked = requests.ask(store, "retry", {"tasks": sorted(set(ids))}, shards=[shard], who=who(), resume=True)
        first, last = first or asked.first, asked.last
    return requests.Asked(first, last)


# -- pause and resume -------------------------------------------------------------------------


def pause(args: argparse.Namespace) -> int:
    """Let a job claim nothing more. What is in flight commits; the worker ends with 7."""
    with database.of_job(args) as (store, job):
        # Under the present code, as the breaker does: a run with the same spider leaves it paused.
        store.pause(args.reason, requests.present_code(store))
        now = jobs.read(store.db, job.id)
    _say_state(args, job, f"paused: {now.paused}", now)
    return Exit.COMPLETE


def resume(args: argparse.Namespace) -> int:
    """End a pause; 6 where there was none."""
    with database.of_job(args) as (store, job):
        store.resume()
    _say_state(args, job, f"no longer paused ({job.paused})" if job.paused else "was not paused", job)
    return Exit.COMPLETE if job.paused else Exit.NOTHING_TO_DO


def _say_state(args: argparse.Namespace, job: jobs.Job, words: str, now: jobs.Job) -> None:
    if args.json:
        say_json({"job": job.name, "paused": now.paused if args.command == "pause" else ""})
    else:
        say(f"{job.name}: {words}")


# -- migrate and backup -----------------------------------------------------------------------


def migrate(args: argparse.Namespace) -> int:
    """Bring a database to this release's schema, and a spider's tables with it, or print the SQL that would; 6 where all is there."""
    spider = load(args.file, name=args.spider).spider if args.file else None
    name = spider.name if spider else ""
    records = {table_name(name, kind): record for kind, record in spider.record_types().items()} if spider else {}
    db = connect(database.of(args), readonly=args.printed)
    try:
        found = migrations.version(db)
        if args.printed:
            sys.stdout.write(script(db, name, records))
            return Exit.COMPLETE
        applied = migrations.migrate(db)
        before = {table: made.type.definition() for table, made in load_tables(db, name).items()}
        for table, record in sorted(records.items()):
            ensure(db, name, table, record)
            applied += [table] if before.get(table) != record.definition() else []
        now = migrations.version(db)
    finally:
        db.close()
    if args.json:
        say_json({"before": found, "schema": now, "applied": applied})
    else:
        say(f"schema {found} -> {now}: {', '.join(applied)}" if applied else f"schema {now}: nothing to do")
    return Exit.COMPLETE if applied else Exit.NOTHING_TO_DO


def backup(args: argparse.Namespace) -> int:
    """Copy the database while it is in use, and check the copy."""
    address = database.of(args)
    source = database.file_of(address)
    if not source:
        raise UsageError(f"{database.place(address)}: a server has its own backups (pg_dump, mysqldump); this copies SQLite files")
    with reading(address):  # it is one of Limpet's, of this release
        pass
    copy = copy_database(source, args.output, force=args.force)
    if args.json:
        say_json({"file": copy.path, "bytes": copy.bytes, "schema": copy.schema})
    else:
        say(f"{args.output}: {size(copy.bytes)}, checked by SQLite")
        note(f"`limpet verify --full --db {args.output}` proves what is in it")
        if len(here := database.job_databases(".")) > 1 and args.output in here:
            note(f"this folder has {len(here)} job databases now ({', '.join(here[:10])}): name one with --db, or keep the copy elsewhere")
    return Exit.COMPLETE
