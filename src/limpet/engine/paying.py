"""Money in the loop of one worker: allowances for its shards, answers that were paid for, and when the budget is reached.

A shard whose allowance does not pay for what it has ready asks its purse for more, in a commit of its own. Where the purse has
nothing left, what the shard cannot use goes back for others, and what costs less or nothing is still claimed. The budget is reached
when less is left to grant than the cheapest task costs that waits for money, no shard holds anything, and nothing reserved can come
back. Decisions and books only: the worker commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from limpet.batch import CREDIT, Grant, Kept
from limpet.engine.attempt import LeaseOver
from limpet.engine.committer import Committer
from limpet.engine.onethread import OneThread
from limpet.settings import Settings
from limpet.store import charges
from limpet.store.commit import Committed
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.task import ShardId

#: Seconds until a purse that had nothing is asked again, since others may have given back: doubled up to the most, while free
#: tasks keep the job going.
BROKE_S, BROKE_S_MAX = 1.0, 16.0

#: Credits of the largest budget, in a 64-bit number of micro-credits.
BUDGET_MAX = 10**12


@dataclass(slots=True)
class Paying:
    """What a worker knows of its shards' money."""

    settings: Settings
    job: Job
    reader: Store
    reading: OneThread
    committer: Committer
    clock: Callable[[], float]
    wake: Callable[[], None]
    zone: str = ""
    _broke: dict[ShardId, tuple[float, float]] = field(default_factory=dict)  # shard -> (when its purse may be asked again, the wait)
    _give_back: set[ShardId] = field(default_factory=set)
    _kept: dict[tuple[ShardId, int, bytes], asyncio.Future[None]] = field(default_factory=dict)

    # -- allowances ------------------------------------------------------------------------

    @property
    def costs(self) -> Mapping[str, int]:
        """Micro-credits of a try, by handler."""
        return self.committer.prices.of_handlers

    def day(self) -> str:
        """The day whose purse pays; "" where no budget of a day was set."""
        if self.settings.budget_day < 0:
            return ""
        return datetime.now(ZoneInfo(self.zone) if self.zone else UTC).date().isoformat()

    def next_grant(self, now: float) -> tuple[ShardId, Grant] | None:
        """What to ask of a purse now, for which shard; nothing while tasks wait for an answer that was paid for to be kept."""
        if not self.costs or self.committer.kept:
            return None
        day = self.day()
        self.committer.day = day
        purse = charges.day_purse(self.job.spider, day) if day else ""
        while self._give_back:
            shard = self._give_back.pop()
            if shard in self.committer.owned:
                return shard, Grant(0, day, purse, budget_micro(self.settings.budget_day))
        for owned in self.committer.owned.values():
            if owned.short_of and not owned.is_leaving and self._broke.get(owned.shard, (0.0, 0.0))[0] <= now:
                return owned.shard, Grant(owned.short_of, day, purse, budget_micro(self.settings.budget_day))
        return None

    def heed(self, committed: Iterable[Committed], asked: tuple[ShardId, Grant] | None) -> None:
        """Take note of what a definite commit did about money."""
        for done in committed:
            for part in done.parts:
                for kept in part.kept:
                    self._settle((part.shard, kept.task, kept.request))
            for shard in done.fenced:
                for at in [at for at in self._kept if at[0] == shard]:
                    self._settle(at, LeaseOver("the shard of a kept answer has another owner"))
            if asked is not None and asked[1].cost:
                self._note_answer(asked[0], done)

    def _note_answer(self, shard: ShardId, done: Committed) -> None:
        """What came of asking a purse."""
        if shard not in done.unpaid:  # it has money, or nobody has claimed with it yet: the next claim tells
            self._broke.clear()
            if (owned := self.committer.owned.get(shard)) is not None:
                owned.short_of, owned.is_ready = 0, True
        elif any(claim.shard == shard and self.costs.get(claim.handler) for claim in done.claims):
            self._broke.clear()  # it was paid for some, and asks again for the rest
        else:
            wait_s = min(2 * self._broke.get(shard, (0.0, BROKE_S / 2))[1], BROKE_S_MAX)
            self._broke[shard] = self.clock() + wait_s, wait_s

    async def reached(self) -> str:
        """Why nothing more can be paid for, now that nothing is left to do without money; "" where something may come yet.

        What shards of this worker hold that need none goes back first, whoever is short: others may be.
        """
        purses = [(name, row) for name, purse in self._purses() if (row := await self._left(purse)) is not None]
        if not purses:
            return ""
        held = await self.reading.call(self.reader.db.rows, "held_allowances", job=self.job.id)
        mine = self.committer.owned
        if idle := {shard for row in held if (shard := ShardId(row[0])) in mine and not mine[shard].short_of}:
            self._give_back |= idle
            self.wake()
            return ""
        least = min((owned.short_of for owned in mine.values() if owned.short_of), default=0)
        if not least:
            return ""
        if any(owned.due_s is not None or owned.suspect_s is not None for owned in mine.values()):
            return ""  # retries may need no money
        for name, (budget, left, reserved) in purses:
            if left < least and not held and not reserved:
                return f"{name} of {credits_text(budget)} credits is reached"
        return ""  # another worker spends it, or gives it back

    async def _left(self, purse: str) -> tuple[int, int, int] | None:
        """Of a purse its budget, what is left of it, and the tries of the job that have reserved something; None without a limit."""
        row = await self.reading.call(self.reader.db.one, "money_left", name=purse, job=self.job.id)
        if row is None or row[0] is None:
            return None
        return int(row[0]), int(row[0]) - int(row[1]), int(row[2])

    def _purses(self) -> list[tuple[str, str]]:
        day = self.day()
        of_day = [(f"the budget of the day {day}", charges.day_purse(self.job.spider, day))] if day else []
        return [("the budget", charges.job_purse(self.job.id)), *of_day]

    # -- answers that were paid for ----------------------------------------------------------

    async def keep(self, shard: int, kept: Kept) -> None:
        """Return once an answer is committed. Raises LeaseOver where its shard is lost."""
        at = (ShardId(shard), int(kept.task), kept.request)
        if at[0] not in self.committer.owned:
            raise LeaseOver("the shard of a kept answer has another owner")
        self._kept[at] = asyncio.get_running_loop().create_future()
        self.committer.add_kept(at[0], kept)
        self.wake()
        await self._kept[at]

    def _settle(self, at: tuple[ShardId, int, bytes], error: Exception | None = None) -> None:
        future = self._kept.pop(at, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def credits_text(micro: int) -> str:
    """Micro-credits as credits, for people.

    >>> credits_text(137_000_000), credits_text(1_250_000)
    ('137', '1.25')
    """
    whole, rest = divmod(abs(micro), CREDIT)
    text = f"{whole:,}" + (f".{rest:06}".rstrip("0") if rest else "")
    return f"-{text}" if micro < 0 else text


def budget_micro(credits: float) -> int | None:
    """Micro-credits of a budget as it is set; None for no limit."""
    return None if credits < 0 or credits == float("inf") else round(min(credits, BUDGET_MAX) * CREDIT)
