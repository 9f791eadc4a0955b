"""From ended tries to frozen parts: when a commit is due, what it holds, and what it asks to claim.

The window starts small after each start and doubles to its full size, so that even a crash loop moves
on. Claimed is what will be started before the next commit is through, never more than two windows.
Nothing here waits, sends or writes: the worker does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from limpet.batch import Claim, Grant, Kept, Kind, Link, Part, Result, RobotsRow, SourceMove, Want, rank_of
from limpet.engine.calls import Prices
from limpet.engine.hand import Hand
from limpet.settings import Settings
from limpet.store.commit import Committed
from limpet.store.lease import Taken
from limpet.task import Epoch, ShardId

#: A host without a delay may take this many windows' worth of claims at once: all that is asked for.
LOWEST_HOST = -(2**63)

#: Claims of one host after which it is claimed from behind those, and seconds between two looks from its beginning. On a server
#: whose oldest snapshot is held open, all that was ever claimed of a host leaves dead entries at its beginning.
FLOOR_AFTER, FLOOR_S = 1000, 1.0
#: Hosts of a shard that are counted.
HEADS_MAX = 10_000

#: Seconds between two commits that are due only because little is left to start.
HUNGRY_S = 0.02


@dataclass(slots=True)
class Head:
    """How far one host was claimed, in the order of its tasks, since it was last looked at from the beginning."""

    since_s: float
    claimed: int = 0
    at: tuple[int, int] = (-(2**63), 0)  # rank and id of the last


@dataclass(slots=True)
class Owned:
    """A shard that this worker owns, and what it knows of it."""

    shard: ShardId
    epoch: Epoch
    watermark: int
    verified: int
    round: int = LOWEST_HOST  # host after which the next claim goes on
    is_ready: bool = True  # it may have tasks that could be claimed
    due_s: float | None = None  # when its next retry is due
    suspect_s: float | None = None  # when its next suspect may run; None where it has none
    poked: bool = False  # somebody asked something of it: it wants a batch, even an empty one
    verified_to: int = 0  # proved up to here since the last commit
    heads: dict[int, Head] = field(default_factory=dict)  # host -> how far it was claimed
    short_of: int = 0  # micro-credits of the cheapest ready task that its allowance does not pay for; 0 where it pays for all
    is_leaving: bool = False  # to be given up, once nothing of it runs: other workers have too few

    def may_claim(self, now: float) -> bool:
        """Whether a claim may find something here."""
        return not self.is_leaving and (self.is_ready or (self.due_s is not None and self.due_s <= now))

    def note(self, claims: Iterable[Claim], now: float) -> None:
        """Claims of this shard: each host goes on behind them."""
        for claim in claims:
            head = self.heads.get(claim.host)
            if head is None:
                if len(self.heads) >= HEADS_MAX:
                    self.heads.clear()
                head = self.heads[claim.host] = Head(now)
            head.claimed += 1
            head.at = max(head.at, (rank_of(claim.priority, claim.depth), claim.id))

    def floors(self, now: float) -> dict[int, tuple[int, int]]:
        """Hosts to be claimed from behind what was claimed: busy ones, but from the beginning once a second.

        What came in below a floor meanwhile (a retry, a link of greater priority) waits so long at the most.
        """
        found = {}
        for host, head in self.heads.items():
            if head.claimed >= FLOOR_AFTER:
                if now - head.since_s < FLOOR_S:
                    found[host] = head.at
                else:
                    head.since_s, head.at = now, (-(2**63), 0)
        return found

    @classmethod
    def of(cls, taken: Taken) -> Owned:
        """A shard that was just taken over."""
        return cls(taken.shard, taken.epoch, taken.watermark, taken.verified)


@dataclass(slots=True)
class Window:
    """How much a commit holds: doubled by each commit up to its full size."""

    pages: int
    ms: int
    pages_max: int
    ms_max: int

    @classmethod
    def of(cls, settings: Settings) -> Window:
        """The window of a process that has just started."""
        return cls(
            min(settings.commit_pages_first, settings.commit_pages), min(settings.commit_ms_first, settings.commit_ms),
            settings.commit_pages, settings.commit_ms,
        )  # fmt: skip

    def grow(self) -> None:
        """Double, up to the full size."""
        self.pages = min(self.pages * 2, self.pages_max)
        self.ms = min(self.ms * 2, self.ms_max)


@dataclass(slots=True)
class Committer:
    """Ended tries that wait for a commit, and the shards that they belong to."""

    settings: Settings
    job: int
    owner: str
    code: bytes
    hand: Hand
    owned: dict[ShardId, Owned] = field(default_factory=dict)
    results: dict[ShardId, list[Result]] = field(default_factory=dict)
    robots: dict[ShardId, list[RobotsRow]] = field(default_factory=dict)
    sources: dict[ShardId, SourceMove] = field(default_factory=dict)
    kept: dict[ShardId, list[Kept]] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)  # what tries cost
    day: str = ""  # the day whose purse pays too
    window: Window = field(init=False)
    count: int = 0
    size: int = 0
    oldest_s: float = 0.0
    committed_s: float = 0.0  # when the last commit began
    rate: float = 0.0  # tasks per second, smoothed
    is_fed: bool = True  # the last commit that asked for claims got some
    pages_left: int | None = None  # until the page limit; None for none

    def __post_init__(self) -> None:
        self.window = Window.of(self.settings)

    # -- in --------------------------------------------------------------------------------

    def add(self, result: Result, now: float) -> None:
        """An ended try; dropped where its shard is no longer ours."""
        shard = result.claim.shard
        if shard not in self.owned:
            return
        if not self.count:
            self.oldest_s = now
        self.results.setdefault(shard, []).append(result)
        self.count += 1
        self.size += result.size
        self._expect(result.links)

    def add_source(self, shard: ShardId, move: SourceMove) -> None:
        """A piece of a source that was read; its tasks come with the shard's next batch."""
        self.sources[shard] = move
        self._expect(move.links)

    def add_kept(self, shard: ShardId, kept: Kept) -> None:
        """An answer that was paid for: a commit is due at once."""
        self.kept.setdefault(shard, []).append(kept)

    def _expect(self, links: Iterable[Link]) -> None:
        """These shards may have something to claim once the links are in."""
        for shard in {link.shard for link in links}:
            if shard in self.owned:
                self.owned[shard].is_ready = True

    def drop_shard(self, shard: ShardId) -> None:
        """The shard is another's: forget what was collected for it."""
        self.owned.pop(shard, None)
        self.count -= len(self.results.pop(shard, ()))
        self.robots.pop(shard, None)
        self.sources.pop(shard, None)
        self.kept.pop(shard, None)

    # -- when ------------------------------------------------------------------------------

    def due(self, now: float, *, resting: bool) -> bool:
        """Whether a commit is due: by size, age or bytes, or since little is left to start."""
        if self.kept or self.count >= self.window.pages or self.size >= self.settings.commit_bytes:
            return True
        if self.count and (now - self.oldest_s) * 1000 >= self.window.ms:
            return True
        if any(o.poked or (o.is_leaving and not self.hand.holds(o.shard)) for o in self.owned.values()):
            return True
        if (self.sources and self.hand.unstarted < self.window.pages) or (self.count and resting):
            return True
        return self._is_hungry(now, resting=resting) and now - self.committed_s >= HUNGRY_S

    def _is_hungry(self, now: float, *, resting: bool) -> bool:
        """Whether little is left to start while more could be claimed."""
        return self.hand.unstarted < self.settings.concurrency and (self.is_fed or resting) and self.wants_more(now)

    def wants_more(self, now: float) -> bool:
        """Whether there is room in the hand, and a shard that may fill it."""
        return self.room() > 0 and any(o.may_claim(now) for o in self.owned.values())

    def next_due_s(self, now: float, *, resting: bool) -> float | None:
        """When the next commit is due by age, or the next retry; None where nothing waits."""
        times = [o.due_s for o in self.owned.values() if o.due_s is not None]
        if self.count:
            times.append(self.oldest_s + self.window.ms / 1000)
        if self._is_hungry(now, resting=resting):
            times.append(self.committed_s + HUNGRY_S)
        return min(times, default=None)

    def room(self) -> int:
        """How many further tasks may be claimed: what will be started before the next commit is through."""
        soon = int(self.rate * self.window.ms / 1000) + self.settings.concurrency + self.window.pages // 2
        room = min(2 * self.window.pages, soon) - self.hand.unstarted - self.hand.running
        if self.prices.of_handlers:  # what is reserved and not started would be unknown after a crash: claim just in time
            room = min(room, self.settings.concurrency - self.hand.unstarted - self.hand.running)
        if self.pages_left is not None:
            room = min(room, self.pages_left - self.hand.unstarted - self.hand.running - self.count)
        return max(0, room)

    # -- out -------------------------------------------------------------------------------

    def freeze(self, now: float, *, claiming: bool = True, solo: ShardId | None = None) -> tuple[list[Part], dict[ShardId, Want]]:
        """The parts of the next commit, and what each would like to claim. What is frozen is no longer held here."""
        wants = self._wants(now) if claiming and solo is None else {}
        if solo is not None:
            wants = {solo: self._want(self.owned[solo], 1, now, solo=True)}
        touched = set(self.results) | set(self.robots) | set(self.sources) | set(self.kept) | set(wants)
        touched |= {o.shard for o in self.owned.values() if o.poked or o.verified_to}
        leaving = {o.shard for o in self.owned.values() if o.is_leaving and not self.hand.holds(o.shard)}
        parts = [
            self._part(self.owned[shard], now, Kind.RELEASE if shard in leaving else Kind.WORK)
            for shard in sorted(touched | leaving)
            if shard in self.owned
        ]
        self.results, self.robots, self.sources, self.kept = {}, {}, {}, {}
        self.count = self.size = 0
        self.committed_s = now
        return parts, wants

    def freeze_one(self, shard: ShardId, grant: Grant, now: float) -> tuple[list[Part], dict[ShardId, Want]]:
        """The part of one shard alone, which asks its purse for money, and what it would like to claim with that."""
        owned = self.owned[shard]
        part = replace(self._part(owned, now), grant=grant)
        results = self.results.pop(shard, [])
        self.count -= len(results)
        self.size -= sum(result.size for result in results)
        for held in (self.robots, self.sources, self.kept):
            held.pop(shard, None)
        room = self.room() if grant.cost else 0
        return [part], {shard: self._want(owned, room, now)} if room else {}

    def _part(self, owned: Owned, now: float, kind: Kind = Kind.WORK) -> Part:
        shard = owned.shard
        move = self.sources.get(shard)
        part = Part(
            job=self.job, shard=shard, owner=self.owner, epoch=owned.epoch, n=owned.watermark + 1, kind=kind,
            results=tuple(self.results.get(shard, ())), hosts=self.hand.rows(shard, now), robots=tuple(self.robots.get(shard, ())),
            sources=(move,) if move else (), kept=tuple(self.kept.get(shard, ())), verified=owned.verified_to, code=self.code,
        )  # fmt: skip
        owned.poked, owned.verified_to = False, 0
        return part

    def release(self, now: float) -> list[Part]:
        """The last part of each shard: what is held commits, and the shard is given up."""
        parts = [self._part(owned, now, Kind.RELEASE) for owned in sorted(self.owned.values(), key=lambda o: o.shard)]
        self.results, self.robots, self.sources, self.kept = {}, {}, {}, {}
        self.count = self.size = 0
        return parts

    def _wants(self, now: float) -> dict[ShardId, Want]:
        room = self.room()
        ready = [o for o in self.owned.values() if o.may_claim(now)]
        if not room or not ready:
            return {}
        each = -(-room // len(ready))
        wants: dict[ShardId, Want] = {}
        for owned in ready:
            if room <= 0:
                break
            tasks = min(each, room)
            room -= tasks
            wants[owned.shard] = replace(self._want(owned, tasks, now), floors=owned.floors(now))
        return wants

    def _want(self, owned: Owned, tasks: int, now: float, *, solo: bool = False) -> Want:
        prices = self.prices.of_hosts.get(owned.shard, {})
        return Want(
            tasks, 1 if solo else self._per_host(tasks), self._busy(owned.shard, now), solo=solo, after_host=owned.round,
            costs=self.prices.of_handlers, prices=prices, day=self.day,
        )  # fmt: skip

    def _per_host(self, tasks: int) -> int:
        """Claims of a host that is not in hand: as its pace would be, were it met now."""
        delay_s = self.settings.delay_s
        if delay_s <= 0:
            return tasks
        return max(1, int(self._horizon_s() / delay_s) + 1)

    def _busy(self, shard: ShardId, now: float) -> dict[int, int]:
        return {h.id: self.hand.may_take(h, now, self._horizon_s()) for h in self.hand.hosts.values() if h.shard == shard}

    def _horizon_s(self) -> float:
        return 2 * self.window.ms / 1000

    # -- what came of it -------------------------------------------------------------------

    def absorb(self, committed: Iterable[Committed], wants: Mapping[ShardId, Want], now: float) -> None:
        """Take note of a definite commit: watermarks, what each shard still has, the window."""
        claimed = 0
        for done in committed:
            for part in done.parts:
                if part.kind is Kind.RELEASE:
                    self.owned.pop(part.shard, None)
                owned = self.owned.get(part.shard)
                if owned is not None:
                    owned.watermark = part.n
                    owned.verified = max(owned.verified, part.verified)
                    self._note_claims(owned, done, wants.get(part.shard), now)
            claimed += len(done.claims)
        if wants:
            self.is_fed = claimed > 0

    def _note_claims(self, owned: Owned, done: Committed, want: Want | None, now: float) -> None:
        due_ms = done.next_due_ms.get(owned.shard)
        owned.due_s = None if due_ms is None else now + max(0, due_ms) / 1000
        suspect_ms = done.suspects_due_ms.get(owned.shard)
        owned.suspect_s = None if suspect_ms is None else now + suspect_ms / 1000
        if want is None:
            owned.is_ready = owned.is_ready or bool(done.revisited)
            return
        owned.short_of = done.unpaid.get(owned.shard, 0)
        owned.round = done.rounds.get(owned.shard, LOWEST_HOST)
        mine = [claim for claim in done.claims if claim.shard == owned.shard]
        owned.note(mine, now)
        if owned.short_of or done.revisited:
            owned.heads.clear()
        got = len(mine)
        owned.is_ready = (got >= want.tasks and not want.solo) or bool(done.revisited)
