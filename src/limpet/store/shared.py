"""Values that tasks share: tallies, registers, high-water marks. None of them is a row that every commit waits for.

A tally has a row for each shard, written under the fence that is held anyway, and is summed on reading. A register is a
history: a write is the next version, on the condition that the version which the handler read is still the last; where it
is not, the task runs again, and no other. A high-water mark moves once, when its sweep is complete and nothing of it is
dead: until then there are candidates, for each shard. Invariant: I9.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from limpet.batch import Part, RegisterWrite, Result, Seen
from limpet.mark import decode, less
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.task import Outcome, TaskId

#: In a ledger row's deltas: "~tally/<name>": [how much it changed].
TALLY = "~tally/"


class RegistersLost(Exception):
    """Some tasks' writes met another's: they run again, and their batch is built anew without them. Never leaves the store."""

    def __init__(self, tasks: Iterable[TaskId]) -> None:
        super().__init__("registers were written by others meanwhile")
        self.tasks = frozenset(tasks)


# -- tallies ------------------------------------------------------------------------------------


def add_tallies(db: Database, part: Part) -> dict[str, list[int]]:
    """Add what the tries of a part counted; the deltas for its ledger row."""
    sums: dict[str, int] = defaultdict(int)
    for result in writing(part.results):
        for name, more in result.tallies:
            sums[name] += more
    for name, more in sorted(sums.items()):
        db.run("add_tally", job=part.job, shard=part.shard, name=name, more=more, n=part.n)
    return {f"{TALLY}{name}": [more] for name, more in sums.items() if more}


def writing(results: Iterable[Result]) -> Iterable[Result]:
    """The tries whose writes count: done, and dead ones for which a handler for final failures wrote."""
    return (result for result in results if result.outcome is Outcome.DONE or result.is_final)


# -- registers ----------------------------------------------------------------------------------


def write_registers(db: Database, spider: str, alive: Sequence[Part]) -> None:
    """Write every register of a commit, by name; RegistersLost names the tasks whose version was no longer the last."""
    writes = [(write, part, result) for part in alive for result in writing(part.results) for write in result.registers]
    lost = set()
    for write, part, result in sorted(writes, key=lambda w: (w[0].name, w[0].before, w[2].claim.id)):
        if not _wrote(db, spider, write, part, result):
            lost.add(result.claim.id)
    if lost:
        raise RegistersLost(lost)


def _wrote(db: Database, spider: str, write: RegisterWrite, part: Part, result: Result) -> bool:
    version = write.before + 1
    if db.one("last_version", spider=spider, name=write.name) != (write.before,):
        return False
    claim = result.claim
    db.run(
        "put_register", spider=spider, name=write.name, version=version, value=write.value, job=part.job, shard=part.shard, n=part.n,
        task=claim.id, **{"try": claim.tries},
    )  # fmt: skip
    writer = db.one("writer_of_register", spider=spider, name=write.name, version=version)
    return writer is not None and tuple(writer) == (part.job, part.shard, part.n, claim.id, claim.tries)


# -- high-water marks ---------------------------------------------------------------------------


def put_candidates(db: Database, part: Part) -> None:
    """Note what the tries of a part saw: the owner alone writes its shard's rows, so they are read, compared and written."""
    for (name, handler), seen in sorted(_merged(writing(part.results)).items()):
        row = db.one("read_candidate", job=part.job, shard=part.shard, name=name, handler=handler)
        if row is not None:
            seen = merge(seen, Seen(name, handler, str(row[0]), str(row[1]), int(row[2]), bool(row[3])))
        db.run(
            "put_candidate", job=part.job, shard=part.shard, name=name, handler=handler, low=seen.low, high=seen.high, seen=seen.count,
            gaps=int(seen.gaps), n=part.n,
        )  # fmt: skip


def _merged(results: Iterable[Result]) -> dict[tuple[str, str], Seen]:
    found: dict[tuple[str, str], Seen] = {}
    for result in results:
        for seen in result.seen:
            at = (seen.name, seen.handler)
            found[at] = merge(found[at], seen) if at in found else seen
    return found


def merge(one: Seen, other: Seen) -> Seen:
    """Both together: the lower low and the higher high."""
    low = other.low if less(other.low, one.low) else one.low
    high = other.high if less(one.high, other.high) else one.high
    return Seen(one.name, one.handler, low, high, one.count + other.count, one.gaps or other.gaps)


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of one mark when its sweep was complete."""

    name: str
    value: str = ""  # where it is now; "" where it did not move
    gap: str = ""  # what lies between this sweep and the one before, unseen
    held_back: int = 0  # dead tasks that keep it where it was


def move_marks(db: Database, job: Job) -> list[Moved]:
    """Move the marks of a job that is complete, once: to the largest candidate, unless a task of its handlers is dead.

    Any number of workers may call this at once: a version is written by whoever is first.
    """
    sweeps: dict[str, tuple[Seen, set[str]]] = {}
    for name, handler, low, high, count, gaps in db.rows("candidates_of_job", job=job.id):
        seen = Seen(name, handler, low, high, count, bool(gaps))
        if name in sweeps:
            sweeps[name] = (merge(sweeps[name][0], seen), sweeps[name][1] | {handler})
        else:
            sweeps[name] = (seen, {handler})
    return [_move(db, job, seen, handlers) for _, (seen, handlers) in sorted(sweeps.items())]


def _move(db: Database, job: Job, seen: Seen, handlers: set[str]) -> Moved:
    dead = sum(int((db.one("dead_of_handler", job=job.id, handler=handler) or (0,))[0]) for handler in sorted(handlers))
    if dead:
        return Moved(seen.name, held_back=dead)
    before = {str(name): str(value) for name, value in db.rows("marks_before", spider=job.spider, at_ms=job.created_ms, job=job.id)}
    since = before.get(seen.name, "")
    gap = f"nothing between {decode(since)} and {decode(seen.low)} was seen" if seen.gaps and since and less(since, seen.low) else ""
    while True:
        row = db.one("last_mark", spider=job.spider, name=seen.name)
        version, last = (int(row[0]), str(row[1])) if row else (0, "")
        if last and not less(last, seen.high):
            return Moved(seen.name, value=last, gap=gap)
        db.begin()
        try:
            db.run("put_mark", spider=job.spider, name=seen.name, version=version + 1, value=seen.high, low=seen.low, gap=gap, job=job.id)
            db.commit()
        except BaseException:
            db.rollback()
            raise


# -- reading ------------------------------------------------------------------------------------


def tallies(db: Database, job: int) -> dict[str, int]:
    """Every tally of a job, summed over its shards."""
    return {str(name): int(value) for name, value in db.rows("sum_tallies", job=job)}


def registers(db: Database, spider: str) -> dict[str, tuple[int, object]]:
    """Every register of a spider: name -> (version, value)."""
    return {str(name): (int(version), json.loads(value)) for name, version, value in db.rows("list_registers", spider=spider)}
