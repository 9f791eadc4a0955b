"""What people ask of a database: workers, dead letters, one task's story. Nothing here writes.

How far a job is, is in `overview.py`. The statements are in `sql/core.sql` below "Views".
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from limpet.errors import LimpetError
from limpet.store import jobs, lease
from limpet.store.dialect import Database, Value, quote
from limpet.store.frontier import reason_matches
from limpet.store.opening import Store, open_store
from limpet.store.tables import load_tables
from limpet.url import authority_of, digest16, host_id, shard_of

#: Rows read at a time.
PAGE_ROWS = 500
#: Keys of records that a task's story names, of each dataset.
KEYS_MAX = 100
#: Time over which the present rate is counted.
WINDOW_MS = 60_000
#: Batches of a shard that its worker's rate is counted from, at the most: more than come in that time.
RATE_BATCHES_MAX = 3000


@contextmanager
def reading(dsn: str) -> Iterator[Store]:
    """A store that cannot write."""
    store = open_store(dsn, create=False, readonly=True)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def snapshot(db: Database) -> Iterator[Database]:
    """Everything that is read inside is of one moment."""
    db.begin_read()
    try:
        yield db
    finally:
        db.rollback()


# -- workers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker, and how many shards of the job it has."""

    worker: str
    host: str
    pid: int
    is_living: bool
    lease_until_ms: int
    started_ms: int
    shards: int
    lock_path: str = ""
    dead_reason: str = ""
    heard_ms: int = 0  # when its lease was last renewed
    tasks_per_s: float = 0.0  # ended, over the last minute


def workers(db: Database) -> list[WorkerRow]:
    """Every worker that this database has known."""
    return workers_of(db, "view_all_workers", int(db.rows("clock")[0][0]))


def workers_of(db: Database, statement: str, now_ms: int, **values: Value) -> list[WorkerRow]:
    """The workers that a statement finds."""
    rows = []
    for worker, host, pid, boot, path, device, inode, dead, why, until_ms, started_ms, shards, lease_ms in db.rows(statement, **values):
        is_gone = bool(dead) or lease.lock_is_free(host, boot, path, device, inode)
        is_living = not is_gone and until_ms > now_ms
        rows.append(WorkerRow(worker, host, pid, is_living, until_ms, started_ms, shards, path, why, heard_ms=until_ms - lease_ms))
    return rows


def workers_of_job(db: Database, job: int, now_ms: int) -> list[WorkerRow]:
    """The workers of a job, with what each ended in the last minute."""
    ended = {owner: int(tasks or 0) for owner, tasks in db.rows("view_rates", job=job, window_ms=WINDOW_MS, most=RATE_BATCHES_MAX)}
    found = workers_of(db, "view_workers", now_ms, job=job)
    return [replace(w, tasks_per_s=ended.get(w.worker, 0) * 1000 / min(WINDOW_MS, max(1000, now_ms - w.started_ms))) for w in found]


# -- dead letters -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that gave up."""

    task: int
    text: str
    url: str
    depth: int
    tries: int
    strikes: int
    outcome: str
    reason: str
    status: int
    at_ms: int
    detail: str
    handler: str


def dead_letters(db: Database, job: jobs.Job, *, reason: str = "") -> Iterator[DeadLetter]:
    """The dead letters of a job, shard by shard, a few rows at a time; `reason`: those of one, or of its family."""
    for shard in range(job.shards):
        after = 0
        while rows := db.rows("view_dead_letters", job=job.id, shard=shard, after=after, most=PAGE_ROWS):
            after = rows[-1][0]
            letters = (DeadLetter(*row) for row in rows)
            yield from (letter for letter in letters if not reason or reason_matches(letter.reason, reason))


# -- one task ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Try:
    """How one try of a task ended."""

    number: int
    outcome: str
    reason: str
    status: int
    strike: bool
    solo: bool
    links: int
    records: int
    url: str
    detail: str
    at_ms: int
    shard: int
    batch: int


@dataclass(frozen=True, slots=True)
class TaskStory:
    """Everything that the database knows of one task."""

    task: int
    state: str
    lane: str | None
    due_ms: int
    tries: int
    strikes: int
    lost: int
    solo: int
    throttled: int
    revisits: int
    source_shard: int
    source_batch: int
    text: str
    url: str
    handler: str
    priority: int
    depth: int
    hops: int
    chain: bytes
    found_ms: int
    attempts: list[Try]
    records: dict[str, list[str]]  # dataset -> key texts


@dataclass(frozen=True, slots=True)
class RobotsStory:
    """What an origin's robots.txt said when it was last asked."""

    outcome: str
    status: int
    body: bytes
    until_ms: int
    now_ms: int


def find_task(db: Database, job: jobs.Job, text: str) -> TaskStory | None:
    """The task of a key text, or None where there is none."""
    authority = authority_of(text)
    place = {"job": job.id, "shard": shard_of(authority, job.shards), "host": host_id(authority), "key": digest16(text)}
    row = db.one("view_task", **place)
    if row is None:
        return None
    (task, state, lane, due_ms, tries, strikes, lost, solo, throttled, revisits, source_shard, source_n,
     text, url, handler, priority, depth, hops, chain) = row  # fmt: skip
    found = db.one("view_discovered_at", task=task)
    return TaskStory(
        task=task, state=state, lane=lane, due_ms=due_ms, tries=tries, strikes=strikes, lost=lost, solo=solo, throttled=throttled,
        revisits=revisits, source_shard=source_shard, source_batch=source_n, text=text, url=url or text, handler=handler,
        priority=priority, depth=depth, hops=hops, chain=bytes(chain), found_ms=found[0] if found else 0,
        attempts=[_try(*attempt) for attempt in db.rows("view_attempts", task=task)], records=_emitted(db, job, task),
    )  # fmt: skip


def _try(number: int, outcome: str, reason: str, status: int, strike: int, solo: int, *rest: Value) -> Try:
    return Try(number, outcome, reason, status, bool(strike), bool(solo), *rest)


def _emitted(db: Database, job: jobs.Job, task: int) -> dict[str, list[str]]:
    tables = load_tables(db, job.spider)
    sql = "SELECT _key_text FROM {} WHERE _task = ? AND _job = ? ORDER BY _key_text LIMIT {}"
    found = {
        table.type.name: [row[0] for row in db.rows_text(sql.format(quote(name), KEYS_MAX), (task, job.id))]
        for name, table in tables.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def find_robots(db: Database, job: jobs.Job, origin: str, authority: str) -> RobotsStory | None:
    """What the database has of an origin's robots.txt."""
    row = db.one("view_robots", job=job.id, shard=shard_of(authority, job.shards), origin=origin)
    return RobotsStory(row[0], row[1], bytes(row[2]), row[3], row[4]) if row else None


# -- databases --------------------------------------------------------------------------------


def is_job_database(path: str) -> bool:
    """Whether a file is a database of Limpet's. What cannot be opened is none."""
    from limpet.store.sqlite import APPLICATION_ID, Sqlite

    with suppress(LimpetError, OSError):
        db = Sqlite(path, create=False, readonly=True)
        try:
            return bool(db.rows_text("PRAGMA application_id")[0][0] == APPLICATION_ID)
        finally:
            db.close()
    return False


def wait_for_request(db: Database, job: int, first: int, last: int, *, patience_s: float) -> tuple[int, int]:
    """Look until requests are applied by those who own the shards, or patience ends: (tasks put back, shards that wait)."""
    until = time.monotonic() + patience_s
    while True:
        changed, waiting = db.rows("view_request", job=job, first=first, last=last)[0]
        if not waiting or time.monotonic() >= until:
            return int(changed or 0), int(waiting or 0)
        time.sleep(0.05)
