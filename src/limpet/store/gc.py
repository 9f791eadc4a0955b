"""`limpet gc`: jobs that are long finished and proved give their tasks and tries back; datasets and ledgers stay.

First the job is sealed, in one transaction that looks again at all of its shards: `sealed` says what its tasks came to.
From then on nothing of it is claimed, put back or repaired, and `verify` holds its ledger against the seal instead of
against its rows. Then the rows are removed in small transactions, so that other jobs go on beside it; killed at any
moment, the next `gc` goes on. The space is used again by what comes after; a file gets smaller by VACUUM alone.

What stays beside datasets and ledger: sources, tallies, registers, marks, purses; offers of `history` datasets, since
what counts in a slot next to this one is decided by them; and the task with the highest id of the database, so that
SQLite gives no id a second time. Other offers go: only a task of the same job that ran again could still need them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from limpet.errors import UsageError
from limpet.failpoint import failpoint
from limpet.store import frontier, jobs
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.sealing import sealed_of
from limpet.store.standing import standing
from limpet.store.verify import is_verified

#: Tasks whose rows are removed in one transaction: some 20 ms, in which nobody else can write to a file.
TASKS = 500
#: Rows of a job's other tables that are removed in one transaction.
ROWS = 2000
#: Seconds between two of these transactions, so that other writers get their turn.
PAUSE_S = 0.005

#: Statements that remove what belongs to some tasks; the tasks themselves last of all.
_OF_TASKS = ("gc_attempts", "gc_revisits", "gc_moved", "gc_charges", "gc_settlements", "gc_kept", "gc_offers")
#: Statements that remove what a shard has beside its tasks, so many rows at once.
_OF_SHARDS = ("gc_hosts", "gc_robots", "gc_requests")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that was looked at: what it holds, and why it stays as it is, "" where it does not."""

    job: Job
    last_ms: int
    tasks: int
    is_sealed: bool
    why_not: str


def candidates(db: Database, found: Sequence[Job], older_s: float) -> list[Candidate]:
    """What can be removed of some jobs, and why not."""
    return [_candidate(db, job, older_s) for job in found]


def _candidate(db: Database, job: Job, older_s: float) -> Candidate:
    last_ms, now_ms = map(int, db.rows("gc_last_batch", job=job.id)[0])
    seal = sealed_of(db, job.id)
    tasks = seal.tasks if seal else int((db.one("ledger_sums", job=job.id) or (0,))[0])
    if seal is not None:
        return Candidate(job, last_ms, tasks, True, "" if _leftover(db, job) else "sealed already")
    return Candidate(job, last_ms, tasks, False, _why_not(db, job, (now_ms - last_ms) / 1000, older_s))


def _why_not(db: Database, job: Job, age_s: float, older_s: float) -> str:
    if age_s < older_s:
        return "its last batch is not so old"
    if not standing(db, job.id).is_complete:
        return "it is not complete"
    if not is_verified(db, job):
        return "it is not proved since its last batch; `limpet verify --full` proves it"
    if int((db.one("count_workers", job=job.id) or (0,))[0]):
        return "a worker of it is alive"
    if int(db.rows("gc_open_charges", job=job.id)[0][0]):
        return "it has charges of unknown outcome; `limpet cost settle` settles them"
    return ""


def seal(db: Database, job: Job, older_s: float) -> str:
    """Seal a job, in one transaction that locks its shards and looks again; why it could not be, "" where it was."""
    db.begin()
    try:
        for shard in range(job.shards):
            db.rows("lock_shard", job=job.id, shard=shard)
        candidate = _candidate(db, jobs.read(db, job.id), older_s)
        states: dict[str, int] = {state: int(count) for state, count in db.rows("gc_states", job=job.id)}
        why = candidate.why_not or _mismatch(candidate.tasks, states)
        if not why and not candidate.is_sealed:
            charged = int(db.rows("gc_charged", job=job.id)[0][0])
            db.run(
                "gc_seal", job=job.id, tasks=sum(states.values()), done=states.get("done", 0), skipped=states.get("skipped", 0),
                dead=states.get("dead", 0), charged=charged, vector=candidate.job.verified,
            )  # fmt: skip
        db.commit()
    except BaseException:
        db.rollback()
        raise
    failpoint("gc_sealed")
    return why


def _mismatch(booked: int, states: dict[str, int]) -> str:
    found = sum(states.values())
    return "" if booked == found else f"its ledger counts {booked} tasks, and {found} are there; `limpet verify --full` says more"


def remove(db: Database, job: Job, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[int]:
    """Remove the rows of a sealed job, a transaction at a time: yields how many tasks each of them removed."""
    if sealed_of(db, job.id) is None:
        raise UsageError(f"job {job.name} is not sealed")
    for shard in range(job.shards):
        while ids := [row[0] for row in db.rows("gc_tasks", job=job.id, shard=shard, most=TASKS)]:
            _remove_tasks(db, job, shard, ids)
            yield len(ids)
            sleep(PAUSE_S)
        last = [row[0] for row in db.rows("gc_last_task", job=job.id, shard=shard)]
        if last and any(db.one("gc_has_tries", task=one) for one in last):
            _remove_tasks(db, job, shard, last, keep=True)
        for statement in _OF_SHARDS:
            while _alone(db, lambda name=statement, at=shard: db.run(name, job=job.id, shard=at, most=ROWS)):  # type: ignore[misc]
                sleep(PAUSE_S)


def _remove_tasks(db: Database, job: Job, shard: int, ids: Sequence[int], *, keep: bool = False) -> None:
    def write() -> int:
        frontier.stage_ids(db, ids)
        for statement in _OF_TASKS:
            db.run(statement, job=job.id, shard=shard)
        if not keep:
            db.run("gc_texts")
            db.run("gc_remove_tasks", job=job.id)
        failpoint("gc_batch")
        return len(ids)

    _alone(db, write)


def _alone(db: Database, write: Callable[[], int]) -> int:
    db.unstage()
    try:
        db.begin()
        changed = write()
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return changed


def _leftover(db: Database, job: Job) -> bool:
    """Whether a sealed job still has rows to be removed."""
    for shard in range(job.shards):
        if db.rows("gc_tasks", job=job.id, shard=shard, most=1) or db.one("gc_rest", job=job.id, shard=shard):
            return True
        if any(db.one("gc_has_tries", task=row[0]) for row in db.rows("gc_last_task", job=job.id, shard=shard)):
            return True
    return False


def check_vacuum(db: Database) -> None:
    """Return where there is a file to be made smaller. UsageError on a server, which does that in its own way."""
    if db.name != "sqlite":
        raise UsageError(f"{db.place}: --vacuum is for files; a server uses the space again by itself")


def vacuum(db: Database) -> None:
    """Give a file's free pages back to the disk. UsageError where there is none."""
    check_vacuum(db)
    db.run_text("VACUUM")
