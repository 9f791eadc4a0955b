"""`limpet hosts`, and `pause` and `resume` of a host or of the whole job, from any machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from limpet import policy
from limpet.cli import database, mend
from limpet.cli.exits import Exit
from limpet.cli.printing import count, cut, duration, note, say, say_json, table
from limpet.errors import UsageError
from limpet.store import Store, jobs, requests
from limpet.store.hosts import HostState, ask_hold, authority_meant, busiest, one
from limpet.store.views import snapshot, wait_for_request

#: Characters of a reason in a line.
REASON_CHARS = 60


# -- look -------------------------------------------------------------------------------------


def hosts(args: argparse.Namespace) -> int:
    """List hosts with what waits of them, their pace, and why they wait."""
    with database.read(args) as store:
        for number, job in enumerate(database.jobs_of(store, args)):
            with snapshot(store.db) as db:
                now_ms = int(db.rows("clock")[0][0])
                found = [one(db, job, authority_meant(text, job)) for text in args.hosts] or busiest(db, job, most=args.limit)
            if args.json:
                say_json({"job": job.name, "now_ms": now_ms, "hosts": [asdict(host) for host in found]})
            else:
                say(("\n" if number else "") + _table(job, found, now_ms, limit=0 if args.hosts else args.limit))
    return Exit.COMPLETE


def _table(job: jobs.Job, found: list[HostState], now_ms: int, *, limit: int) -> str:
    if not found:
        return f"{job.name}: no host has an open task"
    rows: list[tuple[object, ...]] = [("host", "open", "ready", "running", "later", "delay", "next", "")]
    for host in found:
        delay = "" if host.delay_ms is None else duration(host.delay_ms / 1000)
        rows.append((host.authority, host.open, host.ready, host.running, host.later, delay, _next(host, now_ms), _why(host)))
    more = f"\n  the {limit} hosts with the most open tasks; --limit shows more" if limit and len(found) >= limit else ""
    return f"{job.name}:\n{table(rows)}{more}"


def _next(host: HostState, now_ms: int) -> str:
    if host.held:
        return "on hold"
    return f"in {duration((host.next_ms - now_ms) / 1000)}" if host.next_ms > now_ms else "now"


def _why(host: HostState) -> str:
    failures = f"{count(host.errors, 'failure')} in a row" if host.errors else ""
    return "; ".join(cut(words, REASON_CHARS) for words in (host.held, host.pause, failures) if words)


# -- pause and resume -------------------------------------------------------------------------


def pause(args: argparse.Namespace) -> int:
    """Let hosts be asked nothing more, or without any let the job claim nothing more, until resume."""
    if _of_job(args):
        return mend.pause(args)
    return _hold(args, args.reason or "by hand")


def resume(args: argparse.Namespace) -> int:
    """End the pause of hosts, or without any that of the job; 6 where there was none."""
    if _of_job(args):
        return mend.resume(args)
    return _hold(args, "")


def _of_job(args: argparse.Namespace) -> bool:
    if args.hosts and args.job:
        raise UsageError(f"{args.command}: name hosts, or --job for the whole job, and not both")
    return not args.hosts


def _hold(args: argparse.Namespace, reason: str) -> int:
    """Ask the owners of the hosts' shards, and where nobody owns one do it here."""
    changed = 0
    with database.of_job(args) as (store, job):
        for authority in dict.fromkeys(authority_meant(text, job) for text in args.hosts):
            before = one(store.db, job, authority)
            is_changed = bool(reason or before.held or policy.outage_since_ms(before.pause))
            waiting = _asked(store, job, authority, reason) if is_changed else 0
            changed += is_changed
            _say(args, job, before, reason, waiting)
    return Exit.COMPLETE if changed else Exit.NOTHING_TO_DO


def _asked(store: Store, job: jobs.Job, authority: str, reason: str) -> int:
    """Shards whose owner has yet to apply it."""
    asked = ask_hold(store, authority, reason, mend.who())
    applied = requests.apply(store)
    return wait_for_request(store.db, job.id, asked.first, asked.last, patience_s=mend.PATIENCE_S if applied.left else 0)[1]


def _say(args: argparse.Namespace, job: jobs.Job, before: HostState, reason: str, waiting: int) -> None:
    if args.json:
        say_json({"job": job.name, "host": before.authority, "held": reason, "held_before": before.held, "shards_waiting": waiting})
        return
    why = before.held or (before.pause if policy.outage_since_ms(before.pause) else "")
    said = f"on hold: {reason}" if reason else f"goes on ({why})" if why else "was not on hold"
    say(f"{job.name}: {before.authority} {said}")
    if reason and not before.open and before.delay_ms is None:
        note(f"no task of {before.authority} is known yet: the pause holds for those that come")
    if waiting:
        note("its owner is alive, and applies it in its next batch")
