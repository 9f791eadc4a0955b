"""Finds what may be claimed by now and no claim has met: links that other workers put into our shards, hosts whose wait is over.

A claim that got less than it asked for shows that its shard has nothing more for the moment, so nobody asks again until
something of our own leads there. What others discover leads there too, and they tell nobody: so the index of open tasks is
looked at, a few times a second, by reading alone. A commit that claims nothing is a transaction and a row in the ledger; a
worker without work made 40 of them a second when it looked by claiming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from limpet.engine.committer import LOWEST_HOST, Committer, Owned
from limpet.engine.hand import Hand
from limpet.engine.onethread import OneThread
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.task import ShardId

#: Seconds between two looks; and a look that took long is followed by a rest of so many times as long.
LOOK_S = 0.25
LOOK_SHARE = 10
#: Seconds that one look may take: the next goes on where it ended. A server on which somebody holds an old snapshot open must step
#: over an entry of the index for every task that was ever ready.
SPEND_S = 0.05
#: Hosts that one look asks about, over all shards: the next look goes on from there.
HOSTS_MAX = 64
#: A host that has nothing in hand and may be asked within so many seconds is short of claims.
SOON_S = 0.5


@dataclass(slots=True)
class Lookout:
    """Looks on behalf of one worker."""

    reader: Store
    reading: OneThread
    job: Job
    committer: Committer
    hand: Hand
    clock: Callable[[], float]
    _next_s: float = 0.0
    _last: int = -1  # shard at which the last look ended
    _went_on_at: dict[ShardId, int] = field(default_factory=dict)

    async def look(self) -> None:
        """Note the shards of ours in which a claim would find something; nothing where it is not yet time, or the hand is full."""
        now = self.clock()
        if now < self._next_s or self.committer.room() <= 0:
            return
        asleep = {shard: owned for shard, owned in self.committer.owned.items() if not owned.may_claim(now) and not owned.is_leaving}
        if not asleep:
            return
        steps = HOSTS_MAX
        for shard in await self.reading.call(self._ready_among, sorted(asleep, key=lambda shard: (shard <= self._last, shard)), now):
            steps = await self._ask(asleep[shard], now, steps)
        self._next_s = now + max(LOOK_S, LOOK_SHARE * (self.clock() - now))

    def _ready_among(self, shards: Sequence[ShardId], began_s: float) -> list[ShardId]:
        """Those of some shards in which something may start at once, as far as the time goes; for the thread that reads."""
        found = []
        for shard in shards:
            self._last = shard
            if self.reader.db.one("ready_in_shard", job=self.job.id, shard=shard):
                found.append(shard)
            if self.clock() - began_s > SPEND_S:
                break
        return found

    async def _ask(self, owned: Owned, now: float, steps: int) -> int:
        """Go round the shard's hosts that have something ready, until one is short of it; the steps that are left."""
        after = self._went_on_at.get(owned.shard, LOWEST_HOST)
        while steps > 0:
            steps -= 1
            row = await self.reading.call(self.reader.db.one, "ready_host_after", job=self.job.id, shard=owned.shard, after=after)
            if row is None or row[0] is None:
                self._went_on_at[owned.shard] = LOWEST_HOST
                break
            after = self._went_on_at[owned.shard] = row[0]
            if self.hand.is_short_of(after, now, SOON_S):
                owned.is_ready = True
                self.committer.is_fed = True
                break
            if self.clock() - now > SPEND_S:
                break
        return steps
