"""`limpet doctor`: versions, files, locks, disk and database, each with a verdict."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from limpet.cli import database
from limpet.cli.arguments import installed_version
from limpet.cli.exits import Exit
from limpet.cli.printing import count, moment, say, say_json, size, table
from limpet.errors import LimpetError, StoreCorrupt, UsageError
from limpet.store import jobs, migrate
from limpet.store.dialect import Database
from limpet.store.examine import FileFacts, file_facts, sqlite_version
from limpet.store.examine_server import facts as server_facts
from limpet.store.opening import connect
from limpet.store.views import workers

Verdict = Literal["ok", "note", "warning", "fault"]

LIBRARIES = ("apsw", "aiohttp", "lxml", "parsel", "ada-url", "protego", "charset-normalizer")
EXTRAS = ("apprise", "brotli", "zstandard", "uvloop", "pyarrow")

#: A WAL beyond this means that somebody reads all the time, or that nobody checkpoints: 16 times the usual one.
WAL_BYTES_WARN = 256 * 2**20
#: Less space than this may end within minutes.
FREE_BYTES_WARN = 2**30
FREE_BYTES_FAULT = 64 * 2**20
#: Larger files are not read whole here: a gigabyte takes some seconds.
CHECK_BYTES_MAX = 8 * 2**30
#: File descriptors below which a crawl of many hosts may run short.
FILES_MIN = 256


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Verdict
    message: str


def doctor(args: argparse.Namespace) -> int:
    """Look at everything; 8 where the database is damaged, 7 where something else must be mended first."""
    findings = [*_system()]
    try:
        address = database.of(args)
    except UsageError as error:
        if args.db:
            raise
        findings.append(Finding("database", "note", str(error)))
    else:
        findings += _database(address)
    if args.json:
        say_json({"findings": [asdict(finding) for finding in findings]})
    else:
        say(table([(f.verdict if f.verdict != "ok" else "", f.what, f.message) for f in findings], indent=""))
    faults = [finding for finding in findings if finding.verdict == "fault"]
    if any(finding.what == "integrity" for finding in faults):
        return Exit.VERIFY_FAILED
    return Exit.STALLED if faults else Exit.COMPLETE


def _system() -> Iterator[Finding]:
    yield Finding("limpet", "ok", installed_version())
    yield Finding("python", "ok", f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}")
    text, is_safe = sqlite_version()
    yield Finding("sqlite", "ok" if is_safe else "fault", text if is_safe else f"{text} can corrupt a WAL file: upgrade apsw")
    yield Finding("libraries", "ok", ", ".join(f"{name} {_version(name)}" for name in LIBRARIES))
    there = [name for name in EXTRAS if _version(name) != "missing"]
    yield Finding("extras", "ok", ", ".join(f"{name} {_version(name)}" for name in there) or "none")
    yield from _file_limit()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _file_limit() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows has none
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FILES_MIN
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft:,}"
    yield Finding("open files", "warning" if few else "ok", shown + (": raise it (ulimit -n) before crawling many hosts" if few else ""))


def _database(address: str) -> Iterator[Finding]:
    path = database.file_of(address)
    if path and not os.path.exists(path):
        raise UsageError(f"no database at {path}: check --db, or start a crawl to make one")
    facts = file_facts(path) if path else None
    yield Finding("database", "ok", f"{path}, {size(facts.bytes)}" if facts else database.place(address))
    if facts:
        yield from _file(facts)
    try:
        db = connect(address, readonly=True)
    except StoreCorrupt as error:
        yield Finding("integrity", "fault", str(error))
        return
    try:
        yield from _inside(db, facts)
    except StoreCorrupt as error:
        yield Finding("integrity", "fault", str(error))
    except LimpetError as error:
        yield Finding("database", "fault", str(error))
    finally:
        db.close()


def _file(facts: FileFacts) -> Iterator[Finding]:
    large = facts.wal_bytes > WAL_BYTES_WARN
    yield Finding("wal", "warning" if large else "ok", size(facts.wal_bytes) + (": some reader holds it; end long reads" if large else ""))
    kind = facts.file_system or "unknown"
    wrong = facts.is_on_unsafe_file_system
    yield Finding("file system", "fault" if wrong else "ok", f"{kind}: SQLite's WAL is not safe on it; move the file" if wrong else kind)
    free: Verdict = "fault" if facts.free_bytes < FREE_BYTES_FAULT else "warning" if facts.free_bytes < FREE_BYTES_WARN else "ok"
    yield Finding("disk", free, f"{size(facts.free_bytes)} free")
    if not facts.is_writable:
        yield Finding("access", "fault", "the file or its folder cannot be written by this user")


def _inside(db: Database, facts: FileFacts | None) -> Iterator[Finding]:
    if facts is None:
        yield from (Finding(fact.what, fact.verdict, fact.message) for fact in server_facts(db))
    found, latest = migrate.version(db), migrate.latest()
    if found > latest:
        yield Finding("schema", "fault", f"{found}, and this Limpet knows up to {latest}: upgrade Limpet")
        return
    if found < latest:
        yield Finding("schema", "warning", f"{found} of {latest}: `limpet migrate` brings it up to date" if found else "none yet")
        return
    yield Finding("schema", "ok", str(found))
    if facts is None:
        yield Finding("integrity", "note", "the server's own business; `limpet verify` proves what Limpet wrote")
    elif facts.bytes <= CHECK_BYTES_MAX:
        flaws: list[str] = getattr(db, "integrity_check", list)()
        yield Finding(
            "integrity",
            "fault" if flaws else "ok",
            "; ".join(flaws) or "sound, as SQLite sees it; `limpet verify` proves the rest",
        )
    else:
        yield Finding("integrity", "note", f"not checked: larger than {size(CHECK_BYTES_MAX)}")
    holder = getattr(db, "lock_holder", str)()
    yield Finding("write lock", "note" if holder else "ok", f"held by {holder}" if holder else "free")
    yield from _workers(db, facts.lock_files if facts else ())
    for job in jobs.every(db):
        state = f"halted: {job.halted}" if job.halted else f"paused: {job.paused}" if job.paused else f"begun {moment(job.created_ms)}"
        yield Finding("job", "fault" if job.halted else "warning" if job.paused else "ok", f"{job.name}: {state}")


def _workers(db: Database, lock_files: tuple[str, ...]) -> Iterator[Finding]:
    living = [worker for worker in workers(db) if worker.is_living]
    named = ", ".join(f"process {worker.pid} on {worker.host}" for worker in living)
    yield Finding("workers", "ok", named or "none is running")
    held = {worker.lock_path for worker in living}
    left = [path for path in lock_files if path not in held]
    if left:
        yield Finding(
            "lock files",
            "note",
            f"{count(len(left), 'file')} of workers that are gone; the next run removes those of this database",
        )
