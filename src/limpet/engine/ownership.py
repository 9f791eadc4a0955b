"""Which shards a worker has: it takes the free ones, proves them, shares them with others, and brings their paces back.

Workers balance by giving up, never by taking from the living: each has the same number of shards, rounded
up, and half of its surplus leaves at each heartbeat, drained first. Nothing is claimed in a shard before
what is not yet proved of it has been.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from limpet.batch import Claim, Result
from limpet.engine.committer import Committer, Owned
from limpet.engine.hand import Hand
from limpet.engine.heart import Heart
from limpet.engine.onethread import OneThread
from limpet.engine.tally import Tally
from limpet.errors import InvariantBroken, StoreBusy
from limpet.store import alerts, lease
from limpet.store.commit import Committed
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.store.verify import verify_shard
from limpet.task import Outcome, ShardId

log = logging.getLogger("limpet.worker")

#: Seconds that shards may be free and not to be had, since others keep the database busy; then somebody is told.
BUSY_S = 20.0
#: A shard that another session holds is let alone for so many times as long as it was waited for: the loop stands still meanwhile.
HELD_FACTOR = 4.0


@dataclass(slots=True)
class Ownership:
    """The shards of one worker, and how they come and go."""

    store: Store
    desk: OneThread
    reader: Store
    reading: OneThread
    job: Job
    me: lease.Worker
    heart: Heart
    committer: Committer
    hand: Hand
    tally: Tally
    code: bytes
    clock: Callable[[], float]
    sources_are_old: bool = False  # others may have read on, or added some, since this worker last looked
    _busy_s: float | None = None  # since when a free shard cannot be taken, as the database is busy
    _held: dict[ShardId, float] = field(default_factory=dict)  # shards that another session holds -> when to try again

    async def take_free(self) -> str:
        """Take over every shard without a living owner, proving what is not yet proved before its first claim; why it has none.

        A shard that another session holds is tried again later: what this worker has goes on.
        """
        had = dict(self.store.acknowledged)  # before the rows are read: what commits meanwhile is no loss
        rows = await self.reading.call(lease.shards, self.reader.db, self.job.id)
        if gone := self._gone_back(had, rows):
            await self.desk.call(self.store.known.clear)
            await self.desk.call_when_free(alerts.raise_went_back, self.store.db, self.job, gone)
        fair = await self._fair_share()
        others = 0
        for row in rows:
            if row.shard in self.committer.owned:
                continue
            if row.owner_lives and row.owner != self.me.id:
                others += 1
                continue
            if len(self.committer.owned) >= fair:
                continue  # another worker has too few: it takes this one
            began = self.clock()
            if self._held.get(row.shard, began) > began:
                continue
            try:
                taken = await self.desk.call(self.store.take_over, row, self.me, self.code)
            except StoreBusy as error:
                return self._busy(row.shard, began, error)
            self._held.pop(row.shard, None)
            if taken is None:
                continue
            self.tally.lost += taken.lost
            self.tally.dead += taken.dead
            self.heart.sent(self.clock())
            await self.prove(taken.shard, taken.verified, taken.watermark)
            await self._restore_paces(taken.shard)
            self.committer.owned[taken.shard] = owned = Owned.of(taken)
            owned.verified_to = taken.watermark
            self.sources_are_old = True
        return f"another worker has the job: {others} shards" if others and not self.committer.owned else ""

    def _gone_back(self, had: Mapping[ShardId, int], rows: Sequence[lease.ShardRow]) -> int:
        """How many batches that the database had acknowledged it no longer has; said once."""
        found = {row.shard: row.watermark for row in rows}
        lost = {shard: n - found.get(shard, 0) for shard, n in had.items() if found.get(shard, 0) < n}
        if lost:
            log.error(
                "the database went back: %d acknowledged batches of %d shards are gone (a replica that lagged, or a backup?);"
                " their pages are collected again", sum(lost.values()), len(lost),
            )  # fmt: skip
            for shard in lost:
                self.store.acknowledged.pop(shard, None)
        return sum(lost.values())

    def _busy(self, shard: ShardId, began: float, error: StoreBusy) -> str:
        """Why nothing more was taken. A file that stays locked raises the error; one shard of a server is no reason to drop the others."""
        now = self.clock()
        self._busy_s = began if self._busy_s is None or not self._held else self._busy_s
        self._held[shard] = now + HELD_FACTOR * (now - began)
        if now - self._busy_s > BUSY_S:
            if self.store.db.name == "sqlite":
                raise error
            log.warning("shard %d cannot be taken over, as another session holds it: %s", shard, error)
            self._busy_s = now
        return str(error)

    async def _fair_share(self) -> int:
        """Shards of a worker, where all that live have the same number, rounded up."""
        row = await self.reading.call(self.reader.db.one, "count_workers", job=self.job.id)
        return -(-self.job.shards // max(1, int(row[0]) if row else 1))

    async def give_up_surplus(self) -> None:
        """Half of what is more than a fair share leaves, drained first; nobody takes from the living."""
        leaving = [o for o in self.committer.owned.values() if o.is_leaving]
        surplus = len(self.committer.owned) - len(leaving) - await self._fair_share()
        if surplus <= 0:
            return
        staying = sorted((o for o in self.committer.owned.values() if not o.is_leaving), key=lambda o: self.hand.holds(o.shard))
        for owned in staying[: -(-surplus // 2)]:
            owned.is_leaving = True
            for claim in self.hand.drop(owned.shard):
                self.committer.add(released(claim, "its shard is handed over"), self.clock())

    async def _restore_paces(self, shard: ShardId) -> None:
        now = self.clock()
        for host, authority, delay_ms, wait_ms, pause, errors, held in await self.reading.call(
            self.reader.db.rows, "hosts_of_shard", job=self.job.id, shard=shard, most=1000
        ):
            self.hand.restore(
                host,
                authority,
                shard,
                delay_s=delay_ms / 1000,
                wait_s=max(0, wait_ms) / 1000,
                pause=pause,
                errors=errors,
                held=held,
                now=now,
            )

    def heed(self, committed: Iterable[Committed]) -> None:
        """Hosts that people paused, or let go on, by what a definite commit applied: unstarted claims go back."""
        now = self.clock()
        for hold in (hold for done in committed for hold in done.holds):
            for claim in self.hand.heed(hold.host, hold.authority, hold.shard, hold.reason, now):
                self.committer.add(released(claim, "its host is on hold"), now)
            if not hold.reason and hold.shard in self.committer.owned:
                self.committer.owned[hold.shard].is_ready = True

    async def prove(self, shard: ShardId, after: int, upto: int) -> None:
        """Prove some batches of a shard; where anything is wrong, halt the job and raise InvariantBroken."""
        findings = await self.reading.call(verify_shard, self.reader.db, self.job, shard, after, upto)
        if findings:
            first = findings[0]
            await self.desk.call(self.store.halt, f"{first.invariant}: {first.message}")
            raise InvariantBroken(first.message, invariant=first.invariant)

    async def prove_on(self, owned: Owned) -> None:
        """Prove what was committed in a shard since it was last proved."""
        upto = owned.watermark
        await self.prove(owned.shard, owned.verified, upto)
        owned.verified_to = upto


def released(claim: Claim, reason: str, *, due_in_ms: int = 0) -> Result:
    """A try that was given back: no strike; its task is pending again."""
    return Result(claim, Outcome.RELEASED, reason=reason, due_in_ms=due_in_ms)
