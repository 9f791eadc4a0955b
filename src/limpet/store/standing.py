"""How a job stands: complete or not, and if not, what it waits for. Read-only, one snapshot each.

Complete is one statement over all shards: read shard by shard it is wrong in two of six interleavings.
It is written nowhere. Tasks that moved to each other at once are found here before a job counts as
complete. Invariants: the end of section 3 of ARCHITECTURE.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from limpet.batch import canonical_json
from limpet.store.dialect import Database
from limpet.store.sealing import sealed_of

#: Rows of moved tasks that are looked at in one step.
MOVED_CHUNK = 1000

#: Keys that are looked for by one statement.
KEYS_CHUNK = 16

#: A walk along moved tasks ends here at the latest: a longer chain has no circle that a task could be in.
CHAIN_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Standing:
    """What is still open of a job."""

    shards_with_work: int
    open_sources: int
    open_requests: int
    has_tasks: bool

    @property
    def is_complete(self) -> bool:
        """Nothing pending, running or failed, no source open, no request of a person not yet applied."""
        return self.has_tasks and not (self.shards_with_work or self.open_sources or self.open_requests)

    @property
    def is_nothing(self) -> bool:
        """A job without a single task, and none to come: nothing to do, never complete."""
        return not (self.has_tasks or self.open_sources or self.open_requests)


def standing(db: Database, job: int) -> Standing:
    """How the job stands, in one statement."""
    row = db.one("open_work", job=job)
    assert row is not None, "a query of counts has a row"
    return Standing(row[0], row[1], row[2], bool(row[3]))


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the open tasks of some shards are waiting for."""

    ready: bool = False
    waiting: bool = False
    suspect: bool = False
    running: bool = False
    parked: bool = False


def open_lanes(db: Database, job: int, shards: int) -> Lanes:
    """Which lanes hold anything, over all shards."""
    rows = [db.one("open_lanes", job=job, shard=shard) or (0,) * 5 for shard in range(shards)]
    return Lanes(*(any(row[place] for row in rows) for place in range(5)))


def moved_among(db: Database, job: int, keys: Sequence[bytes]) -> set[bytes]:
    """Those of some keys whose task has ended as moved."""
    found: set[bytes] = set()
    sql = f"SELECT key FROM moved WHERE job = ? AND key IN ({','.join('?' * KEYS_CHUNK)})"
    for start in range(0, len(keys), KEYS_CHUNK):
        asked = list(keys[start : start + KEYS_CHUNK])
        asked += asked[-1:] * (KEYS_CHUNK - len(asked))  # always as many, so that it is one statement
        found.update(bytes(row[0]) for row in db.rows_text(sql, (job, *asked)))
    return found


def circles(db: Database, job: int) -> list[tuple[int, int]]:
    """(shard, task) of the lowest key of every circle of tasks that moved to one another."""
    found: dict[bytes, tuple[int, int]] = {}
    after = b""
    while True:
        rows = db.rows("moved_on", job=job, after=after, most=MOVED_CHUNK)
        for key, _target, _shard, _task in rows:
            circle = _circle_from(db, job, bytes(key))
            if circle:
                lowest = min(circle)
                found[lowest] = circle[lowest]
        if len(rows) < MOVED_CHUNK:
            return sorted(found.values())
        after = bytes(rows[-1][0])


def _circle_from(db: Database, job: int, key: bytes) -> dict[bytes, tuple[int, int]]:
    """The circle that a task is in: key -> (shard, task); empty where its moves lead out to a page."""
    walked: dict[bytes, tuple[int, int]] = {}
    at = key
    while len(walked) < CHAIN_MAX:
        row = db.one("moved_to", job=job, key=at)
        if row is None:
            return {}
        walked[at] = (row[1], row[2])
        at = bytes(row[0])
        if at == key:
            return walked
        if at in walked:
            return {}  # a circle further on, that is found from its own members
    return {}


def put_back(db: Database, job: int, tasks: list[tuple[int, int]], who: str) -> None:
    """Ask the owners of these (shard, task) to put them back."""
    db.begin()
    try:
        for shard, task in tasks:
            db.run("put_request", job=job, shard=shard, what="retry", argument=canonical_json({"tasks": [task]}), who=who)
        db.commit()
    except BaseException:
        db.rollback()
        raise


@dataclass(frozen=True, slots=True)
class Counts:
    """Tasks of a job by what became of them, and its records; from the books, not by counting tasks."""

    known: int
    done: int
    skipped: int
    dead: int
    records: dict[str, int]  # dataset -> rows that this job's batches added, less those they removed

    @property
    def open(self) -> int:
        """Tasks that have not ended."""
        return self.known - self.done - self.skipped - self.dead


def counts_of(db: Database, job: int) -> Counts:
    """Sums over the ledger, less what people put back: exact, and as fast for 20 million tasks as for a thousand."""
    sums = [int(each) for each in db.one("ledger_sums", job=job) or (0, 0, 0)]  # sums are decimals on some servers
    back = {str(outcome): int(tasks) for outcome, tasks in db.rows("put_back_by_outcome", job=job)}
    dead = db.one("count_dead", job=job) or (0,)
    seal = sealed_of(db, job)
    records: dict[str, int] = {}
    for (deltas,) in db.rows("ledger_deltas", job=job):
        for name, counts in json.loads(deltas).items():
            if not name.startswith("~"):  # else a note on money, tallies, or a repair's on tasks
                records[name] = records.get(name, 0) + counts[0] - counts[3]
    if seal is not None:
        return Counts(seal.tasks, seal.done, seal.skipped, seal.dead, dict(sorted(records.items())))
    return Counts(sums[0], sums[1] - back.get("done", 0), sums[2] - back.get("skipped", 0), dead[0], dict(sorted(records.items())))
