"""Running a job from what is there to what it ends in: open, join, work, verify, report.

A run joins a job that is under way, says so where one is finished, and proves one that is finished but
not yet proved. It starts another worker in the same process for as long as one loses its lease. The
exit code follows from the rows alone: it is computed after the work, from what the database says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from limpet.engine.alerting import Alarms
from limpet.engine.asking import Asking
from limpet.engine.attempt import Lookups, Tries
from limpet.engine.contact import USER_AGENT, missing_contact
from limpet.engine.ends import End
from limpet.engine.hand import Hand
from limpet.engine.heart import boottime_s
from limpet.engine.links import Linker
from limpet.engine.load import code_of
from limpet.engine.marks import settle_marks
from limpet.engine.onethread import OneThread, Together
from limpet.engine.oversight import Crew, Ended, Gauge, verdict
from limpet.engine.paying import budget_micro
from limpet.engine.report import (
    EXIT_COMPLETE,
    EXIT_DEAD,
    EXIT_LIMIT,
    EXIT_NOTHING,
    EXIT_STALLED,
    EXIT_STOPPED,
    EXIT_UNVERIFIED,
    EXIT_USAGE,
    Progress,
    Report,
)
from limpet.engine.sources import SourceReader, nothing_in, sources_of, wanted
from limpet.engine.spider import Spider, table_name
from limpet.engine.stopping import Stopping
from limpet.engine.tally import Tally
from limpet.engine.threads import HandlerThreads
from limpet.engine.tuning import tuned
from limpet.engine.tx import Terms
from limpet.engine.watchdog import Watchdog
from limpet.engine.worker import Worker
from limpet.errors import StoreError, StoreUnavailable, UrlRejected
from limpet.fetch.http import Client
from limpet.fetch.robots import product_token
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.store import jobs, standing
from limpet.store.joining import has_jobs, job_to_join
from limpet.store.opening import Store, open_store
from limpet.store.repair import is_mendable
from limpet.store.requests import free_money
from limpet.store.standing import Counts, counts_of
from limpet.store.verify import is_verified, verify_job
from limpet.url import Canonical, canonicalise

log = logging.getLogger("limpet.run")

#: Incarnations that may follow each other without one commit between them: more is no bad luck.
INCARNATIONS_MAX = 50


async def run(
    spider: Spider,
    *,
    db: str,
    slot: str = "",
    starts: Sequence[str] | None = None,
    starts_from: str | None = None,
    settings: Settings | None = None,
    params: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    handle_signals: bool = True,
    crew: Crew | None = None,
    alerts: Sequence[str] = (),
) -> Report:
    """Run the job (spider, slot) in the database at `db` until it is complete, or stopped; its report.

    `starts` stands in for the spider's own; a job that was begun with others goes on without those. With a
    `crew`, its processes do the work. `alerts`: addresses of people to be told (docs/alerts.md). Raises UsageError
    for what the caller must mend, and StoreError where the database cannot be opened.
    """
    settings = settings or Settings()
    spider.params.update(params or {})
    desk, reading = OneThread("limpet-store"), OneThread("limpet-read")
    store: Store | None = None
    reader: Store | None = None
    try:
        sources = await reading.call(sources_of, spider, starts, starts_from, slot)
        store = await desk.call(open_store, db, settings=settings)
        sources = await desk.call(wanted, store.db, spider.name, slot, sources)
        job = await desk.call_when_free(store.join, spider=spider.name, slot=slot, profile=spider.profile, sources=sources)
        reader = await reading.call(store.again, readonly=True)
        run_of = await _Run.of(spider, settings, job, store, reader, desk, reading, on_progress)
        async with Alarms(store, job, alerts) as run_of.alarms:
            return run_of.alarms.ended(await run_of.whole(crew, handle_signals=handle_signals))
    finally:
        await _close(store, reader, desk, reading)


async def join(
    spider: Spider,
    *,
    db: str,
    slot: str | None = None,
    settings: Settings | None = None,
    params: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    handle_signals: bool = True,
    parent: int | None = None,
    alerts: Sequence[str] = (),
) -> Report:
    """Work on a job that is there, beside whoever else does; the oldest of the spider's that is not finished, or that of a slot.

    Nothing is begun: where there is no such job, or no database yet, the report says "nothing to do". `parent`: a descriptor
    by which whoever started this process asks it to stop, and who proves the job once it is complete.
    """
    settings = settings or Settings()
    spider.params.update(params or {})
    desk, reading = OneThread("limpet-store"), OneThread("limpet-read")
    store: Store | None = None
    reader: Store | None = None
    try:
        if not await desk.call(has_jobs, db):
            return Report(EXIT_NOTHING, "nothing to do: the database holds no job yet; `limpet run` begins one", spider.name)
        store = await desk.call(open_store, db, create=False, settings=settings)
        job = await desk.call(job_to_join, store.db, spider.name, slot)
        if job is None:
            return Report(EXIT_NOTHING, "nothing to do: no job of this spider waits for workers; `limpet run` begins one", spider.name)
        store.job = job
        jobs.refuse_other_keys(job, spider.profile)
        reader = await reading.call(store.again, readonly=True)
        run_of = await _Run.of(spider, settings, job, store, reader, desk, reading, on_progress)
        run_of.parent, run_of.is_guest = parent, True
        async with Alarms(store, job, alerts) as run_of.alarms:
            report = await run_of.whole(None, handle_signals=handle_signals)
            return run_of.alarms.ended(report, alone=parent is None and not await run_of.others())
    finally:
        await _close(store, reader, desk, reading)


async def _close(store: Store | None, reader: Store | None, desk: OneThread, reading: OneThread) -> None:
    if reader is not None:
        await reading.call(reader.close)
    if store is not None:
        await desk.call(store.close)
    desk.close()
    reading.close()


@dataclass(slots=True)
class _Run:
    """One run of one job, over as many incarnations of the worker as it takes."""

    spider: Spider
    settings: Settings
    job: jobs.Job
    store: Store
    reader: Store
    desk: OneThread
    reading: OneThread
    tables: dict[str, str]
    on_progress: Callable[[Progress], None] | None
    parent: int | None = None  # started as one of a crew, by a process that is heard there and proves the job
    is_guest: bool = False  # one of many that come and go: the last one proves the job
    tally: Tally = field(default_factory=Tally)
    worker: Worker | None = None
    crew: Crew | None = None
    alarms: Alarms | None = None
    stopping: Stopping = field(init=False)
    gauge: Gauge = field(init=False)
    is_warned: bool = False  # that whoever asks gives no contact
    away_s: float | None = None  # since when the database takes nothing
    elsewhere: Counts | None = None  # what the job has beside what this run tallied
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.stopping = Stopping(self._stop)
        self.gauge = Gauge(self.counts)

    @classmethod
    async def of(
        cls, spider: Spider, settings: Settings, job: jobs.Job, store: Store, reader: Store, desk: OneThread, reading: OneThread,
        on_progress: Callable[[Progress], None] | None,
    ) -> _Run:  # fmt: skip
        """A run whose datasets have their tables."""
        tables = {name: table_name(spider.name, name) for name in spider.record_types()}
        if settings.budget >= 0:
            await desk.call(store.set_budget, budget_micro(settings.budget))
        await desk.call(store.ensure_datasets, spider.name, {tables[name]: kind for name, kind in spider.record_types().items()})
        return cls(spider, settings, job, store, reader, desk, reading, tables, on_progress)

    @property
    def stops(self) -> int:
        """Wishes to stop so far."""
        return self.stopping.count

    async def counts(self) -> Counts:
        """What the job has, by its books."""
        try:
            return await self.reading.call(counts_of, self.reader.db, self.job.id)
        except StoreUnavailable:
            if self.crew is not None:  # its workers look after their own connections, and nobody after this one
                await self.reading.call(self.reader.db.reopen)
            raise

    async def whole(self, crew: Crew | None, *, handle_signals: bool) -> Report:
        """What there is to say without working, or what the work, here or a crew's, came to."""
        early = await self.before()
        if early is not None:
            return early
        return await (self.work(handle_signals=handle_signals) if crew is None else self.oversee(crew, handle_signals=handle_signals))

    # -- before the work -------------------------------------------------------------------

    async def before(self) -> Report | None:
        """What can be said without working: halted, paused, finished. None where there is work."""
        code = code_of(self.spider)
        if self.job.halted:
            return await self.report(
                EXIT_UNVERIFIED,
                f"the job is halted: {self.job.halted}. `limpet verify --full` says whether `limpet repair` or a backup helps",
            )
        if self.job.paused:
            if not self.job.paused_code or code == self.job.paused_code:  # a person's pause ends by `limpet resume` alone
                return await self.report(EXIT_STALLED, f"the job is paused: {self.job.paused}")
            log.warning("the spider's code has changed since the job was paused: going on")
            await self.desk.call(self.store.resume)
        found = await self.reading.call(standing.standing, self.reader.db, self.job.id)
        if found.is_nothing:
            none = "nothing to do: the job has no start; give some with --start or --from"
            return await self.report(EXIT_NOTHING, nothing_in(self.spider) if self.spider.generators else none)
        if found.is_complete and not await self.reading.call(standing.circles, self.reader.db, self.job.id):
            await self.desk.call(free_money, self.store)
            if await self.reading.call(is_verified, self.reader.db, self.job.id):
                await self.desk.call(settle_marks, self.store.db, self.job, self.spider)  # a kill may have come before it
                return await self.report(
                    EXIT_NOTHING,
                    "the job is finished and verified: nothing to do. A new slot (--slot) collects again",
                    verified=True,
                )
            return await self.finish()
        return None

    # -- the work --------------------------------------------------------------------------

    async def work(self, *, handle_signals: bool) -> Report:
        """Worker after worker, until one ends for another reason than a lost lease."""
        with tuned(), self.stopping.listening(to_signals=handle_signals, to_parent=self.parent), self._counting():
            async with Client(self.settings, user_agent=self.spider.user_agent or USER_AGENT) as client:
                with Watchdog(self.settings.handler_timeout_s) as watchdog:
                    threads = HandlerThreads(self.settings.concurrency)
                    tries = await self._tries(client, watchdog, threads)
                    try:
                        end, why = await self._incarnations(tries)
                    finally:
                        await tries.close()
                        threads.close()
        return await self._patiently(lambda: self._ended(end, why, tries.requests))

    async def _patiently(self, saying: Callable[[], Awaitable[Report]]) -> Report:
        """What is said in the end, where a server may just be away: it is asked again when it is back."""
        while True:
            try:
                return await saying()
            except StoreUnavailable as error:
                if not await self._server_is_back(str(error)):
                    raise

    async def _tries(self, client: Client, watchdog: Watchdog, threads: HandlerThreads) -> Tries:
        linker = Linker(
            self.spider.profile, await self._scope(), shards=self.job.shards, url_bytes_max=self.settings.url_bytes_max,
            depth_max=self.settings.max_depth,
        )  # fmt: skip
        hand = Hand(delay_s=self.settings.delay_s, slots=self.settings.per_host, slots_with_delay=1)
        asking = Asking(self.reading, self.reader, self.job)
        lookups = Lookups(Together(self.reading, asking.moved_among).ask, asking.robots_of, asking.has_worked)
        terms = Terms.of(self.spider, linker, self.settings, marks=await asking.marks(), read_register=asking.register)
        tries = Tries(
            spider=self.spider, settings=self.settings, client=client,
            terms=terms, tables=self.tables, hand=hand,
            lookups=lookups, watchdog=watchdog, threads=threads, clock=boottime_s,
            token=product_token(self.spider.user_agent or USER_AGENT),
        )  # fmt: skip
        tries.calls.job, tries.calls.read_kept = self.job.name, asking.kept
        if self.alarms is not None:
            tries.outages.on_outage = self.alarms.host_is_away
        return tries

    async def _scope(self) -> Scope:
        """The places of all starts that the job's row holds; a file of starts brings no places of its own."""
        starts: list[Canonical] = []
        for row in await self.reading.call(jobs.sources, self.reader.db, self.job.id):
            for start in row.starts():
                with contextlib.suppress(UrlRejected):
                    starts.append(canonicalise(start, self.spider.profile))
        return Scope.of(self.spider.scope, starts, hosts=self.spider.hosts)

    async def _incarnations(self, tries: Tries) -> tuple[End, str]:
        code = code_of(self.spider)
        in_vain = 0
        while True:
            try:
                rows = await self.reading.call(jobs.sources, self.reader.db, self.job.id)
                sources = SourceReader(tries.terms.linker, rows, self.spider, self.job.slot)
            except StoreUnavailable as error:
                if await self._server_is_back(str(error)):
                    continue
                return End.UNAVAILABLE, str(error)
            worker = self.worker = Worker(
                store=self.store, desk=self.desk, reader=self.reader, reading=self.reading, tries=tries, sources=sources,
                settings=self.settings, code=code, tally=self.tally, on_beat=self._beat,
            )  # fmt: skip
            worker.stop_asked = self.stops
            tries.on_robots = worker.keep_robots
            tries.forget_robots()
            ended_before = self._tasks_ended()
            end = await worker.live()
            moved_on = self._tasks_ended() > ended_before
            if moved_on:
                self.away_s = None
            if end is End.PAUSED and worker.breaker_tripped:
                await self.desk.call_when_free(self.store.pause, worker.why, code)
            if end is End.UNAVAILABLE and await self._server_is_back(worker.why):
                continue
            if end is not End.FENCED:
                return end, worker.why
            in_vain = 0 if moved_on else in_vain + 1
            if in_vain > INCARNATIONS_MAX:
                return (
                    End.STALLED,
                    f"the lease was lost {in_vain} times without one commit: is the machine asleep, or --lease too short?",
                )
            if self.stops:
                return End.STOPPED, worker.why

    def _tasks_ended(self) -> int:
        return self.tally.done + self.tally.skipped + self.tally.failed + self.tally.dead

    async def _server_is_back(self, why: str) -> bool:
        """Wait for a database server that went away, backing off; False where it is a file, or stays away too long.

        One that lets us in and takes nothing (a full disk, a replica) is away too: its time runs until a task has ended.
        """
        if self.store.db.name == "sqlite":
            return False
        if self.away_s is None:
            self.away_s = time.monotonic()
        log.warning("the database is away, waiting up to %g s: %s", self.settings.outage_s, why)
        wait_s = 0.25
        while not self.stops and time.monotonic() - self.away_s < self.settings.outage_s:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 10.0)
            try:
                await self.desk.call(self.store.db.reopen)
                await self.reading.call(self.reader.db.reopen)
            except StoreError as error:
                log.debug("still away: %s", error)
                continue
            self.store.unsettled = False  # every shard is taken over anew, which settles what was unknown
            return True
        return False

    def _stop(self) -> None:
        if self.worker is not None:
            self.worker.ask_to_stop()
        if self.crew is not None:
            self.crew.stop()

    async def oversee(self, crew: Crew, *, handle_signals: bool) -> Report:
        """Let a crew do the work. What it came to is read from the database, once, when all of it has ended."""
        self.crew = crew
        with self.stopping.listening(to_signals=handle_signals), self._counting():
            ended = await crew.work()
            self.crew = None
        return await self._patiently(lambda: self._overseen(ended))

    async def _overseen(self, ended: Sequence[Ended]) -> Report:
        await self._reconnect()
        requests = sum(one.requests for one in ended)
        self.job = await self.reading.call(jobs.read, self.reader.db, self.job.id)
        found = await self.reading.call(standing.standing, self.reader.db, self.job.id)
        if found.is_complete and not self.job.halted:
            return await self.finish(requests)
        early = await self.before()
        if early is not None:
            return replace(early, requests=requests)
        counts = await self.counts()
        code, message = verdict(ended, stops=self.stops, pages_done=counts.done, pages_max=self.settings.max_pages)
        return await self.report(code, message, requests)

    async def _reconnect(self) -> None:
        """New connections, as these were idle for as long as the crew worked: a server may have ended them, or itself."""
        await self.desk.call(self.store.db.reopen)
        await self.reading.call(self.reader.db.reopen)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Read the job's counts on the side, where somebody wants to see progress."""
        if self.on_progress is None:
            yield
            return
        self.gauge.on_read = self._read
        counting = asyncio.create_task(self.gauge.keep())
        try:
            yield
        finally:
            counting.cancel()

    def _read(self, counts: Counts) -> None:
        own = self.tally
        self.elsewhere = replace(
            counts, known=counts.known - own.discovered, done=counts.done - own.done, skipped=counts.skipped - own.skipped,
            dead=counts.dead - own.dead,
        )  # fmt: skip
        if self.crew is not None:
            self._show(workers=self.crew.living)

    def _beat(self, worker: Worker) -> None:
        hosts = (host.authority for host in worker.hand.hosts.values())
        if not self.is_warned and (warning := missing_contact(self.spider.user_agent or USER_AGENT, self.tally.done, hosts)):
            self.is_warned = True
            log.warning("%s", warning)
        waiting = worker.hand.waiting(boottime_s()) or (worker.why if not worker.hand.running else "")
        self._show(in_flight=worker.hand.running, waiting=waiting)

    def _show(self, *, in_flight: int = 0, waiting: str = "", workers: int = 0) -> None:
        """The job as a whole: what the database had at the last look, and what this run did since."""
        if self.on_progress is None or self.elsewhere is None:
            return
        own, others = self.tally, self.elsewhere
        self.on_progress(
            Progress(
                done=others.done + own.done, skipped=others.skipped + own.skipped, failed=own.failed, dead=others.dead + own.dead,
                known=others.known + own.discovered, in_flight=in_flight, pages_per_s=self.gauge.done_per_s, waiting=waiting,
                workers=workers,
            )
        )  # fmt: skip

    # -- after the work --------------------------------------------------------------------

    async def _ended(self, end: End, why: str, requests: int) -> Report:
        if end is End.COMPLETE:
            return await self.finish(requests)
        if end is End.HALTED:
            return await self.report(
                EXIT_UNVERIFIED, f"the job is halted: {why.removeprefix('halted: ')}. See `limpet verify --full`", requests
            )
        messages = {
            End.STOPPED: (EXIT_STOPPED, "stopped; run the same command again to go on"),
            End.PAGE_LIMIT: (EXIT_LIMIT, f"{why}; run with a larger --max-pages to go on"),
            End.BUDGET: (EXIT_LIMIT, f"{why}; what is left waits: run with a larger one to go on"),
            End.NOTHING: (EXIT_NOTHING, nothing_in(self.spider)),
            End.PAUSED: (EXIT_STALLED, f"the job is paused: {why.removeprefix('paused: ')}"),
            End.STALLED: (EXIT_STALLED, why),
            End.FAULTY: (EXIT_USAGE, why),
            End.STUCK: (EXIT_STOPPED, f"stopped, resumable in another process: {why}"),
            End.UNAVAILABLE: (EXIT_STOPPED, f"stopped, resumable: {why}"),
        }
        code, message = messages[end]
        return await self.report(code, message, requests)

    async def finish(self, requests: int = 0) -> Report:
        """Prove the whole job; complete only where the proof holds."""
        if self.parent is not None:
            return await self.report(EXIT_COMPLETE, "complete", requests)
        if self.is_guest and await self.others():
            return await self.report(EXIT_COMPLETE, "complete; the last of its workers proves it", requests)
        await self.desk.call(settle_marks, self.store.db, self.job, self.spider)
        proof = await self.desk.call(verify_job, self.store, self.job)
        if not proof.ok:
            first = proof.findings[0]
            helps = "`limpet repair` mends it, or says what is left" if is_mendable(proof.findings) else "only a backup helps"
            return await self.report(EXIT_UNVERIFIED, f"verify failed: {first.invariant}: {first.message}; {helps}", requests)
        report = await self.report(EXIT_COMPLETE, "complete and verified", requests, verified=True)
        if report.dead > self.settings.max_dead:
            letters = "1 dead letter" if report.dead == 1 else f"{report.dead} dead letters"
            return replace(report, exit_code=EXIT_DEAD, message=f"complete and verified, with {letters}: see `limpet dead`")
        return report

    async def others(self) -> int:
        """How many workers of the job are there yet."""
        row = await self.reading.call(self.reader.db.one, "count_workers", job=self.job.id)
        return int(row[0]) if row else 0

    async def report(self, exit_code: int, message: str, requests: int = 0, *, verified: bool = False) -> Report:
        """What the database says now, with this exit code and message."""
        counts = await self.counts()
        return Report(
            exit_code, message, self.job.name, done=counts.done, skipped=counts.skipped, dead=counts.dead, pending=counts.open,
            records=counts.records, requests=requests, seconds=round(time.monotonic() - self.began_s, 3), verified=verified,
        )  # fmt: skip
