"""Which database a command means, and which of its jobs.

`--db`, else LIMPET_DB, else limpet.toml, else the only job database in the folder. A wrong one is a
usage error that names what is there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from limpet.cli.configuration import Resolved, read_file, resolve
from limpet.errors import UsageError
from limpet.store import Store, jobs, open_store
from limpet.store.dialect import public_dsn, sqlite_path
from limpet.store.migrate import NoJobYet
from limpet.store.sqlite import is_sqlite_file
from limpet.store.views import is_job_database, reading

#: Names that a job database is looked for under.
_ENDINGS = (".db", ".sqlite", ".sqlite3")
#: Files that are looked into: a folder with more of them is no place to guess in.
_CANDIDATES_MAX = 200


def choose(resolved: Resolved, *, default: str = "", folder: str = ".") -> str:
    """The address of the database; `default` is a file that may be made. UsageError where it is nowhere said."""
    if resolved.extras["db"]:
        _refuse_other_files(resolved.extras["db"])
        return resolved.extras["db"]
    found = job_databases(folder)
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise UsageError(f"{len(found)} job databases are here ({', '.join(found[:10])}): name one with --db")
    if default:
        _refuse_other_files(default)
        return default
    raise UsageError("no job database is here: name one with --db, or start a crawl to make one")


def job_databases(folder: str) -> list[str]:
    """The names of the job databases in a folder."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(_ENDINGS) and entry.is_file())
    return [name for name in names[:_CANDIDATES_MAX] if is_job_database(os.path.join(folder, name))]


def _refuse_other_files(address: str) -> None:
    """Say it in plain words where the file is no SQLite database at all; opening it would call it damaged."""
    if not file_of(address):
        return
    path = Path(sqlite_path(address))
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected the file of a database")
    if path.is_file() and path.stat().st_size and not is_sqlite_file(str(path)):
        raise UsageError(f"{path} is no SQLite database: name another file with --db")


def of(args: argparse.Namespace) -> str:
    """The address of a database that has to be there."""
    return choose(resolve({"db": args.db}, os.environ, read_file(args.config)))


@contextmanager
def read(args: argparse.Namespace) -> Iterator[Store]:
    """The database that the arguments mean, for reading alone."""
    with reading(of(args)) as store:
        yield store


def place(address: str) -> str:
    """How messages name a database.

    >>> place("sqlite:///a/b.db"), place("postgresql://me:secret@db/x")
    ('a/b.db', 'postgresql://me:***@db/x')
    """
    return sqlite_path(address) if file_of(address) else public_dsn(address)


def file_of(address: str) -> str:
    """The absolute path of a database that is a file; "" for one on a server."""
    is_file = address.startswith("sqlite:") or "://" not in address
    return os.path.abspath(sqlite_path(address)) if is_file else ""


def jobs_of(store: Store, args: argparse.Namespace) -> list[jobs.Job]:
    """The jobs that --spider and --slot leave; UsageError, naming what is there, where that is none."""
    every = jobs.every(store.db)
    found = [job for job in every if args.spider in (None, job.spider)]
    if args.slot is not None:
        from limpet.cli.slots import meant_in

        slot_of = {spider: meant_in(store.db, spider, args.slot) for spider in {job.spider for job in found}}
        found = [job for job in found if job.slot == slot_of[job.spider]]
    if not found:
        if not every:
            raise NoJobYet(f"{store.db.place} holds no job yet: start one with `limpet crawl` or `limpet run`")
        raise UsageError(f"{store.db.place} has no such job; it has {', '.join(job.name for job in every[-20:])}")
    return found


def job_of(store: Store, args: argparse.Namespace) -> jobs.Job:
    """The one job that is meant; UsageError where there are several."""
    found = jobs_of(store, args)
    if len(found) > 1:
        named = ", ".join(job.name for job in found[-20:])
        raise UsageError(f"{store.db.place} has {len(found)} jobs ({named}): name one with --spider and --slot")
    return found[0]


@contextmanager
def of_job(args: argparse.Namespace) -> Iterator[tuple[Store, jobs.Job]]:
    """The one job that is meant, joined for writing, under the settings that its own runs would have."""
    address = of(args)
    with reading(address) as store:
        job = job_of(store, args)
    settings = resolve({}, os.environ, read_file(args.config), spider=job.spider).settings
    store = open_store(address, create=False, settings=settings)
    try:
        store.job = job
        yield store, job
    finally:
        store.close()


@contextmanager
def of_database(args: argparse.Namespace) -> Iterator[Store]:
    """The database that is meant, opened for writing, with no job joined."""
    store = open_store(of(args), create=False)
    try:
        yield store
    finally:
        store.close()
