"""The loop: take shards, claim, start, collect, commit, and give the shards up again.

One `Worker` is one incarnation: a UUID, a lease, and what it owns. Whatever costs it its lease, or
shows that the database is not the one it knew, ends it whole, results in hand and all; the caller
then starts another, which takes the shards over. At most one commit is under way; while it is, tasks
go on. Nothing of a commit is acted on before it is definite.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from limpet.batch import Claim, Grant, Result, RobotsRow
from limpet.engine.attempt import LeaseOver, Tries
from limpet.engine.calls import Prices
from limpet.engine.committer import Committer
from limpet.engine.ends import End
from limpet.engine.heart import Heart, boottime_s
from limpet.engine.lookout import LOOK_S, Lookout
from limpet.engine.onethread import OneThread
from limpet.engine.ownership import Ownership, released
from limpet.engine.paying import Paying
from limpet.engine.sources import SourceReader
from limpet.engine.starting import start
from limpet.engine.tally import Tally
from limpet.errors import (
    InvariantBroken,
    OutcomeUnknown,
    OwnershipLost,
    RightMissing,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    UsageError,
)  # fmt: skip
from limpet.failpoint import failpoint
from limpet.settings import Settings
from limpet.store import jobs, lease, standing
from limpet.store.commit import Committed
from limpet.store.opening import Store
from limpet.task import Outcome, ShardId

log = logging.getLogger("limpet.worker")

#: Seconds that a database which cannot take a commit is waited for, before the run stops, resumable.
PATIENCE_S = 3.0

#: Seconds that requests under way have to end in, after the first signal to stop.
GRACE_S = 5.0

#: Batches of a shard that may be unproved before it is proved on, while the crawl goes on.
VERIFY_EVERY = 200

#: Longest sleep of the loop: what happens elsewhere (links into our shards, requests of people, a freed shard) is seen this soon.
IDLE_S = LOOK_S

#: Seconds between two looks at what a job waits for: each asks about every shard.
STANDSTILL_S = 1.0


class Worker:
    """One incarnation, from its registration to its end."""

    def __init__(
        self, *, store: Store, desk: OneThread, reader: Store, reading: OneThread, tries: Tries, sources: SourceReader,
        settings: Settings, code: bytes, tally: Tally, on_beat: Callable[[Worker], None] | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:  # fmt: skip
        assert store.job is not None, "a worker works on a job"
        self.store = store
        self.job = store.job
        self.desk = desk
        self.reader = reader
        self.reading = reading
        self.tries = tries
        self.sources = sources
        self.settings = settings
        self.code = code
        self.tally = tally
        self.on_beat = on_beat
        self.clock = clock
        self.hand = tries.hand
        self.stop_asked = 0  # signals so far
        self.why = ""  # for people: what ended it, or what it waits for
        self.breaker_tripped = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._commit: asyncio.Task[None] | None = None
        self._proof: asyncio.Task[None] | None = None
        self._end: End | None = None
        self._wake: asyncio.Event = asyncio.Event()
        self._beat_s = 0.0
        self._is_retired = False
        self._finished = 0
        self._rate_s = 0.0
        self._stood_s = 0.0  # when it was last asked what the job waits for

    # -- life ------------------------------------------------------------------------------

    async def live(self) -> End:
        """Take shards, crawl, give up. Never raises what a lost lease or a full disk causes: `End` says it."""
        try:
            me = await self.desk.call_when_free(self.store.register)
        except (StoreUnavailable, StoreBusy, OutcomeUnknown) as error:
            self.why = str(error)
            return End.UNAVAILABLE
        self.me = me
        self.heart = Heart(self.store, me, self.settings, clock=self.clock)
        self.tries.heart = self.heart
        self.committer = Committer(self.settings, self.job.id, me.id, self.code, self.hand)
        self.shards = Ownership(
            self.store, self.desk, self.reader, self.reading, self.job, me, self.heart, self.committer, self.hand, self.tally, self.code,
            self.clock,
        )  # fmt: skip
        self.committer.prices = Prices.of(self.tries.spider.costs(), self.job.shards)
        self.paying = Paying(
            self.settings, self.job, self.reader, self.reading, self.committer, self.clock, self._wake.set, self.tries.spider.zone
        )
        self.tries.calls.keep = self.paying.keep
        self.lookout = Lookout(self.reader, self.reading, self.job, self.committer, self.hand, self.clock)
        self.heart.start()
        try:
            self._end = None
            end = await self._until_the_end()
            if end not in (End.FENCED, End.UNAVAILABLE):
                end = await self._give_up(end)
            return end
        except (OwnershipLost, LeaseOver) as error:
            log.warning("ownership lost, starting again: %s", error)
            return End.FENCED
        except InvariantBroken as error:
            self.why = f"{error.invariant}: {error}"
            return End.HALTED
        except (StoreUnavailable, StoreBusy, OutcomeUnknown) as error:
            self.why = str(error)
            return End.UNAVAILABLE
        except (StoreCorrupt, RightMissing):
            raise  # no words of ours: the command line has an exit code for it
        except StoreError as error:  # too much of a batch is refused: a broken release, not poison
            self.why = str(error)
            return End.STALLED
        finally:
            await self._drop_everything()

    def ask_to_stop(self) -> None:
        """A signal: stop cleanly; a second one: sooner."""
        self.stop_asked += 1
        self._wake.set()
        if self.stop_asked > 1:
            self._cancel_tasks()

    async def _pages_left(self) -> int | None:
        """This worker's share of the pages until the limit, rounded up: several may go beyond it by what they have in hand."""
        if not self.settings.max_pages:
            return None
        row = await self.reading.call(self.reader.db.one, "done_so_far", job=self.job.id)
        workers = await self.reading.call(self.reader.db.one, "count_workers", job=self.job.id)
        left = max(0, self.settings.max_pages - int(row[0] if row else 0))
        return -(-left // max(1, int(workers[0]) if workers else 1))

    async def _until_the_end(self) -> End:
        self.committer.pages_left = await self._pages_left()
        # A predecessor on this machine whose process is gone is told by its file lock, at once.
        await self.desk.call_when_free(lease.Watch(self.clock).look, self.store.db, self.me.id)
        self.why = await self.shards.take_free()
        while self._end is None:
            now = self.clock()
            self._check_lease()
            self._start_tasks(now)
            await self._feed()
            await self.lookout.look()
            if self.hand.in_doubt:
                self.tries.outages.settle(at_rest=self._is_at_rest() and not self.committer.wants_more(now))
                self._keep(None)
            if self._commit is None and (asked := self.paying.next_grant(now)) is not None:
                self._begin_commit(asked=asked)
            elif self._commit is None and self.committer.due(now, resting=self._is_resting()):
                self._begin_commit()
            if self._is_at_rest():
                await self._at_rest()
            if now - self._beat_s > self.settings.heartbeat_s / 2:
                self._beat_s = now
                await self._beat()
            if self._end is None:
                await self._sleep()
            self._note_signals()
        return self._end

    def _note_signals(self) -> None:
        if self.stop_asked and self._end is None:
            self._end = End.STOPPED

    def _check_lease(self) -> None:
        if not self.heart.may_send:
            raise OwnershipLost("this worker's lease ran out" if not self.heart.is_dead else "this worker was taken for dead")
        if self._commit is not None and self._commit.done():
            task, self._commit = self._commit, None
            task.result()
        if self._proof is not None and self._proof.done():
            task, self._proof = self._proof, None
            task.result()

    # -- tasks -----------------------------------------------------------------------------

    def _start_tasks(self, now: float) -> None:
        while len(self._tasks) < self.settings.concurrency and (claim := self.hand.take(now)) is not None:
            start(self._tasks, claim.id, self._run(claim), partial(self._give_back, claim))

    def _give_back(self, claim: Claim) -> None:
        """A try that was cancelled before its first step."""
        self._keep(released(claim, "stopped"))
        self.hand.ended(claim, self.clock())
        self._wake.set()

    async def _run(self, claim: Claim) -> None:
        """One try from start to end; its result waits for the next commit."""
        failed = False
        try:
            result = await self.tries.outages.weigh(await self.tries.perform(claim))
            failed = result is None or result.strike or result.outcome is Outcome.THROTTLED
            self._keep(result)
        except asyncio.CancelledError:
            self._keep(replace(released(claim, "stopped"), charge=self.tries.calls.charge_of(claim)))
        except LeaseOver:
            pass  # dropped: whoever takes the shard over ends this try
        except Exception as error:
            log.exception("task %s: an internal error", claim.text)
            died = Result(claim, Outcome.DEAD, reason=f"internal:{type(error).__name__}", detail=str(error)[:8000])
            self._keep(replace(died, charge=self.tries.calls.charge_of(claim)))
        finally:
            now = self.clock()
            self.hand.ended(claim, now, failed=failed)
            self.tries.calls.forget(claim)
            del self._tasks[claim.id]
            self._finished += 1
            self._wake.set()

    def _keep(self, result: Result | None) -> None:
        """A try's result, if it is not in doubt whether its host is away, and those that no longer are."""
        for one in [*([result] if result else []), *self.tries.outages.take()]:
            self.committer.add(one, self.clock())
        for claim in self.tries.take_given_back():
            self.committer.add(released(claim, "its host paused", due_in_ms=self.tries.pause_ms(claim)), self.clock())
        if self._end is None and (over := self.tries.why_over()) is not None:
            self._end, self.why = over
            self.breaker_tripped = self._end is End.PAUSED

    def keep_robots(self, shard: int, row: RobotsRow) -> None:
        """What a robots.txt said goes into the shard's next batch."""
        if ShardId(shard) in self.committer.owned:
            self.committer.robots.setdefault(ShardId(shard), []).append(row)

    def _cancel_tasks(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    # -- sources ---------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Read on in a source while there is room, if it is ours to read."""
        if self.committer.sources or self._end is not None or self.hand.unstarted >= self.committer.window.pages:
            return
        if self._commit is not None or (self.committer.pages_left is not None and self.committer.room() <= 0):
            return
        if self.shards.sources_are_old:
            self.shards.sources_are_old = False
            self.sources.refresh(await self.reading.call(jobs.sources, self.reader.db, self.job.id))
        shard = self.sources.turn_to(self.job.shards, self.committer.owned)
        if shard is not None and not self.committer.owned[shard].is_leaving:
            try:
                if (move := await self.sources.next_move(self.reading)) is not None:
                    self.committer.add_source(shard, move)
            except UsageError as error:
                self.why, self._end = str(error), End.FAULTY

    # -- commits ---------------------------------------------------------------------------

    def _begin_commit(self, solo: ShardId | None = None, asked: tuple[ShardId, Grant] | None = None) -> None:
        self._commit = asyncio.create_task(self._commit_now(solo, asked))
        self._commit.add_done_callback(lambda _: self._wake.set())

    async def _commit_now(self, solo: ShardId | None, asked: tuple[ShardId, Grant] | None) -> None:
        now = self.clock()
        self._measure(now)
        claiming = self._end is None and not self.stop_asked
        failpoint("before_freeze")
        if asked is not None:
            parts, wants = self.committer.freeze_one(*asked, now)
        else:
            parts, wants = self.committer.freeze(now, claiming=claiming, solo=solo)
        if not parts:
            return
        moves = {part.shard: part.sources[0] for part in parts if part.sources}
        committed = await self._patiently(lambda: self.store.commit(parts, wants))
        self.heart.sent(now)
        for done in committed:
            self.tally.add(done)
            self._note_fenced(done)
            for part in done.parts:
                if part.shard in moves and part.sources:
                    self.sources.moved(moves[part.shard])
            if done.stopped and self._end is None:
                self.why = done.stopped
                self._end = End.HALTED if done.stopped.startswith("halted") else End.PAUSED
        if self.committer.pages_left is not None:
            self.committer.pages_left -= sum(r.outcome is Outcome.DONE for d in committed for p in d.parts for r in p.results)
        self.committer.absorb(committed, wants, self.clock())
        self.paying.heed(committed, asked)
        if any(part.results for part in parts):
            self.committer.window.grow()
        self.hand.add((claim for done in committed for claim in done.claims), self.clock())
        self.shards.heed(committed)
        failpoint("after_acknowledge")

    def _measure(self, now: float) -> None:
        spent_s = now - self._rate_s
        if spent_s > 0.01:
            rate = self._finished / spent_s
            self.committer.rate = rate if not self.committer.rate else 0.5 * self.committer.rate + 0.5 * rate
            self._finished, self._rate_s = 0, now

    async def _patiently(self, action: Callable[[], list[Committed]]) -> list[Committed]:
        """The same commit again while the database takes nothing, for a few seconds: nobody is to blame."""
        began, told = self.clock(), ""
        while True:
            try:
                return await self.desk.call(action)
            except (StoreUnavailable, OutcomeUnknown, StoreBusy) as error:
                if self.clock() - began > PATIENCE_S:
                    raise
                if str(error) != told:  # the same is not said a dozen times
                    told = str(error)
                    log.warning("the database takes no commit now, trying again for %g s: %s", PATIENCE_S, told)
                await asyncio.sleep(0.25)

    def _note_fenced(self, done: Committed) -> None:
        for shard in done.fenced:
            log.warning("shard %d has another owner: its results are dropped", shard)
            self.committer.drop_shard(shard)
            self.hand.drop(shard)

    # -- once a heartbeat ------------------------------------------------------------------

    async def _beat(self) -> None:
        """What is looked after once a heartbeat: free shards, requests of people, proofs, progress."""
        if len(self.committer.owned) < self.job.shards:
            self.why = await self.shards.take_free() or self.why
        await self.shards.give_up_surplus()
        self.shards.sources_are_old = True
        for asked in ("shards_with_requests", "shards_with_settlements"):
            for shard, _count in await self.reading.call(self.reader.db.rows, asked, job=self.job.id):
                if shard in self.committer.owned:
                    self.committer.owned[shard].poked = True
        if self.committer.pages_left is not None and self._commit is None:  # else what is being committed would count twice
            self.committer.pages_left = await self._pages_left()
        if self._proof is None:
            behind = [o for o in self.committer.owned.values() if o.watermark - max(o.verified, o.verified_to) >= VERIFY_EVERY]
            if behind:
                self._proof = asyncio.create_task(self.shards.prove_on(max(behind, key=lambda o: o.watermark - o.verified)))
        if self.on_beat:
            self.on_beat(self)

    # -- rest ------------------------------------------------------------------------------

    def _is_resting(self) -> bool:
        """Nothing is running, and nothing in hand may start now."""
        return not self._tasks and not self.hand.startable(self.clock())

    def _is_at_rest(self) -> bool:
        """Nothing in hand, nothing to commit: the job is complete, or waits for something."""
        return (
            not self._tasks and self._commit is None and not self.hand.unstarted and not self.committer.count and not self.committer.sources
        )

    async def _at_rest(self) -> None:
        now = self.clock()
        if self.committer.pages_left is not None and self.committer.pages_left <= 0:
            self.committer.pages_left = await self._pages_left()
        if self.committer.pages_left is not None and self.committer.pages_left <= 0:
            self.why, self._end = f"the page limit of {self.settings.max_pages} is reached", End.PAGE_LIMIT
            return
        if self.committer.wants_more(now) or any(o.poked for o in self.committer.owned.values()):
            return  # a commit that claims is due, and will begin
        if self.sources.turn_to(self.job.shards, self.committer.owned) is None:
            suspect = min(
                (o for o in self.committer.owned.values() if o.suspect_s is not None),
                key=lambda o: o.suspect_s or 0.0,
                default=None,
            )
            if suspect is not None and (suspect.suspect_s or 0.0) <= now:
                self._begin_commit(solo=suspect.shard)
                return
            await self._end_or_wait()

    async def _end_or_wait(self) -> None:
        found = await self.reading.call(standing.standing, self.reader.db, self.job.id)
        self.shards.sources_are_old |= found.open_sources > 0  # `seed` may have put one in
        if found.is_nothing:
            self._end = End.NOTHING
        elif found.is_complete:
            circles = await self.reading.call(standing.circles, self.reader.db, self.job.id)
            if not circles:
                self._end = End.COMPLETE
                return
            await self.desk.call_when_free(standing.put_back, self.store.db, self.job.id, circles, "limpet: moved to each other")
            for shard, _task in circles:
                if ShardId(shard) in self.committer.owned:
                    self.committer.owned[ShardId(shard)].poked = True
        elif self.clock() - self._stood_s > STANDSTILL_S:
            self._stood_s = self.clock()
            if reached := await self.paying.reached():
                self.why, self._end = reached, End.BUDGET
                return
            await self._stalled()

    async def _stalled(self) -> None:
        """Only what nobody will ever claim is left: say so and stop; else wait, and say for what."""
        lanes = await self.reading.call(standing.open_lanes, self.reader.db, self.job.id, self.job.shards)
        if (lanes.parked or self.sources.trouble) and not (lanes.ready or lanes.waiting or lanes.suspect or lanes.running):
            parked = "only parked tasks are left: no handler of this spider knows them (`limpet status` names the handlers)"
            self.why, self._end = self.sources.trouble or parked, End.STALLED
            return
        now = self.clock()
        due = [o.due_s for o in self.committer.owned.values() if o.due_s is not None]
        alone = [o.suspect_s for o in self.committer.owned.values() if o.suspect_s is not None]
        if due:
            self.why = f"only retries are left; the next is due in {max(0.0, min(due) - now):.0f} s"
        elif alone:
            self.why = f"only suspects are left, to be run alone; the next in {max(0.0, min(alone) - now):.0f} s"

    async def _sleep(self) -> None:
        """Until something ends, or a time comes."""
        now = self.clock()
        if self._commit is None and self.committer.due(now, resting=self._is_resting()):
            await asyncio.sleep(0)
            return
        commit_s = self.committer.next_due_s(now, resting=self._is_resting()) if self._commit is None else None
        times = [t for t in (self.hand.next_start_s(), commit_s) if t is not None]
        times += [o.suspect_s for o in self.committer.owned.values() if o.suspect_s is not None and self._is_at_rest()]
        wait_s = min([IDLE_S, *(max(0.001, t - now) for t in times if t > now)])
        timer = asyncio.get_running_loop().call_later(wait_s, self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        timer.cancel()

    # -- the end ---------------------------------------------------------------------------

    async def _give_up(self, end: End) -> End:
        """Let what runs end, commit it, give back what was not started, and release every shard."""
        deadline = self.clock() + GRACE_S
        while self._tasks and self.clock() < deadline and self.stop_asked < 2:
            if self._commit is not None and self._commit.done():
                self._commit.result()
                self._commit = None
            if self._commit is None and self.committer.kept:  # tasks wait for an answer that was paid for to be kept
                self._begin_commit()
            await asyncio.wait(self._tasks.values(), timeout=0.1)
        self._cancel_tasks()
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        if self._commit is not None:
            await self._commit
            self._commit = None
        if self._proof is not None:
            await asyncio.wait([self._proof])
        for claim in self.hand.drop():
            self.committer.add(released(claim, "stopped"), self.clock())
        if self.committer.owned:
            parts = self.committer.release(self.clock())
            for done in await self._patiently(lambda: self.store.commit(parts)):
                self.tally.add(done)
        failpoint("before_retire")
        await self.desk.call_when_free(lease.retire, self.store.db, self.me)
        self._is_retired = True
        return end

    async def _drop_everything(self) -> None:
        """Forget what is in hand: a database that still holds it as running gives it to the next owner."""
        self.heart.stop()
        self._cancel_tasks()
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        for task in (self._commit, self._proof):
            if task is not None:
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()
        self._commit = self._proof = None
        self.hand.drop()
        self.hand.hosts.clear()
        if not self._is_retired:
            try:
                await self.desk.call(lease.retire, self.store.db, self.me)
            except StoreError as error:
                log.debug("this worker could not be retired: %s", error)
        self.store.known.clear()
