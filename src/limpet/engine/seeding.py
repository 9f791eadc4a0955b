"""Put a CSV file into a job without working on it: the source is read to its end, batch by batch, in constant memory.

The source is a row of the job's first of all, so that whoever comes after reads on where this was ended. Its batches go through
the one transaction like every other: this process takes one free shard for as long as it reads. Where all shards have living
owners, they read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from limpet.batch import Kind, Part
from limpet.engine.links import Linker
from limpet.engine.sources import SourceReader
from limpet.engine.spider import Spider
from limpet.errors import OwnershipLost
from limpet.scope import Scope
from limpet.store import lease
from limpet.store.jobs import Source, SourceRow, sources
from limpet.store.opening import Store
from limpet.task import ShardId


@dataclass(frozen=True, slots=True)
class Seeded:
    """What became of a source."""

    new: int = 0  # tasks that were not known
    rejected: int = 0  # rows that are no task
    is_whole: bool = True  # read to its end; else the workers that are there read it
    was_known: bool = False  # it had been read to its end before


def seed(store: Store, spider: Spider, slot: str, source: Source, *, told: Callable[[int], None] = lambda new: None) -> Seeded:
    """Make or join the job, and read the source. Raises UsageError for a file that cannot be read and a sealed job, and StoreError."""
    job = store.join(spider=spider.name, slot=slot, profile=spider.profile, sources=[source])
    row = _row_of(store, job.id, source)
    if row.closed:
        return Seeded(was_known=True)
    lease.Watch(time.monotonic).look(store.db, "")
    me = store.register()
    try:
        mine = next(
            (taken for free in lease.shards(store.db, job.id) if not free.owner_lives and (taken := store.take_over(free, me)) is not None),
            None,
        )
        if mine is None:
            return Seeded(is_whole=False)
        linker = Linker(spider.profile, Scope.of(spider.scope, [], hosts=spider.hosts), shards=job.shards)
        reader = SourceReader(linker, [row], spider, slot)
        n, new = mine.watermark, 0
        while not reader.is_done:
            n += 1
            move = reader.read()
            new += _commit(store, Part(job=job.id, shard=mine.shard, owner=me.id, epoch=mine.epoch, n=n, sources=(move,)), mine.shard)
            reader.moved(move)
            told(new)
        _commit(store, Part(job=job.id, shard=mine.shard, owner=me.id, epoch=mine.epoch, n=n + 1, kind=Kind.RELEASE), mine.shard)
        return Seeded(new, reader.rejected)
    finally:
        lease.retire(store.db, me)


def _row_of(store: Store, job: int, source: Source) -> SourceRow:
    return next(row for row in sources(store.db, job) if (row.kind, row.digest) == (source.kind, source.digest))


def _commit(store: Store, part: Part, shard: ShardId) -> int:
    (done,) = store.commit([part])
    if done.fenced:
        raise OwnershipLost(f"shard {shard} has another owner now: run the same command again, it goes on where this was ended")
    return done.discovered
