"""What people ask of a job, and how it is done: never by writing into a shard that somebody owns.

A request is a row for each shard. The owner of a shard applies it in its next batch; where nobody who
lives owns the shard, `apply` takes it over, applies in numbered batches, and gives it up again. Both go
through the one transaction, so a request is fenced, counted and sealed like everything else (I1, I7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from limpet.batch import Kind, Part, canonical_json
from limpet.errors import OwnershipLost, UsageError
from limpet.store import jobs, lease
from limpet.store.opening import Store
from limpet.store.sealing import refuse_sealed, sealed_of
from limpet.task import ShardId

#: Bytes of a request's argument: it is read with each batch until it is done with.
ARGUMENT_BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """The request rows that were written, by their ids; first > last where there was nothing to ask."""

    first: int = 1
    last: int = 0

    @property
    def shards(self) -> int:
        """How many shards were asked."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Applied:
    """What was done here, and what others have yet to do."""

    shards: int  # taken over, applied, given up
    put_back: int  # tasks
    left: tuple[int, ...]  # shards whose owner applies it in its next batch


def ask(store: Store, what: str, argument: Mapping[str, object], *, shards: Iterable[int], who: str, resume: bool = False) -> Asked:
    """Write a request for each of the shards, and with `resume` take a pause back, in one transaction."""
    job = _job(store)
    text = canonical_json(argument)
    if len(text) > ARGUMENT_BYTES_MAX:
        raise UsageError(f"a request of {len(text):,} bytes; expected at most {ARGUMENT_BYTES_MAX:,}: ask for fewer tasks at once")
    store.db.begin()
    try:
        refuse_sealed(store.db, job)
        before = int(store.db.rows("view_last_request")[0][0])
        for shard in shards:
            store.db.run("put_request", job=job.id, shard=shard, what=what, argument=text, who=who)
        last = int(store.db.rows("view_last_request")[0][0])
        if resume:
            store.db.run("resume", job=job.id)
        store.db.commit()
    except BaseException:
        store.db.rollback()
        raise
    return Asked(before + 1, last)


def apply(store: Store, *, clock: Callable[[], float] = time.monotonic) -> Applied:
    """Apply what waits in shards without a living owner, as a worker that is there for nothing else.

    Raises OwnershipLost where a shard is lost meanwhile: what was committed before stays, the rest is still asked.
    """
    job = _job(store)
    return _take(store, job, _waiting(store, job), clock)


def free_money(store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Give back what shards of a complete job hold unused, whose owner is dead: other jobs on that day can have it."""
    job = _job(store)
    held = {ShardId(row[0]) for row in store.db.rows("held_allowances", job=job.id)}
    if held and sealed_of(store.db, job.id) is None:
        _take(store, job, held, clock)


def _take(store: Store, job: jobs.Job, waiting: set[ShardId], clock: Callable[[], float]) -> Applied:
    if not waiting:
        return Applied(0, 0, ())
    lease.Watch(clock).look(store.db, "")
    if all(row.owner_lives for row in lease.shards(store.db, job.id) if row.shard in waiting):
        return Applied(0, 0, tuple(map(int, sorted(waiting))))  # a further worker would only make the others share anew
    me = store.register()
    taken, put_back, left = 0, 0, []
    try:
        for row in lease.shards(store.db, job.id):
            if row.shard not in waiting:
                continue
            mine = None if row.owner_lives else store.take_over(row, me)
            if mine is None:
                left.append(int(row.shard))
                continue
            taken += 1
            put_back += _apply_to(store, job, mine, me)
    finally:
        lease.retire(store.db, me)
    return Applied(taken, put_back, tuple(left))


def _apply_to(store: Store, job: jobs.Job, mine: lease.Taken, me: lease.Worker) -> int:
    """Batches until nothing waits in the shard, and one that gives it up; the tasks that were put back."""
    n, put_back = mine.watermark + 1, 0
    while mine.shard in _waiting(store, job):
        put_back += _commit(store, Part(job=job.id, shard=mine.shard, owner=me.id, epoch=mine.epoch, n=n, kind=Kind.REQUEST))
        n += 1
    put_back += _commit(store, Part(job=job.id, shard=mine.shard, owner=me.id, epoch=mine.epoch, n=n, kind=Kind.RELEASE))
    return put_back


def _commit(store: Store, part: Part) -> int:
    (done,) = store.commit([part])
    if done.fenced:
        raise OwnershipLost(
            f"shard {part.shard} of job {part.job} has another owner now, who applies the rest of the request in its next batch"
        )
    return done.revisited


def _waiting(store: Store, job: jobs.Job) -> set[ShardId]:
    asked = store.db.rows("view_open_request_shards", job=job.id) + store.db.rows("shards_with_settlements", job=job.id)
    return {ShardId(row[0]) for row in asked}


def shards_with_dead(store: Store) -> list[int]:
    """The shards that have dead letters: the others need not be asked to put any back."""
    return [row[0] for row in store.db.rows("view_shards_with_dead", job=_job(store).id)]


def _job(store: Store) -> jobs.Job:
    if store.job is None:
        raise UsageError("a request is made of a job: the store has joined none")
    return store.job


def present_code(store: Store) -> bytes:
    """The digest of the spider's code in the newest batch that has one; empty before the first."""
    row = store.db.one("view_code", job=_job(store).id)
    return bytes(row[0]) if row else b""
