"""One try of one task: route, robots, pace, fetch, handler; and what it ended in, as a frozen value.

Nothing here touches the database but by asking (is this task moved? what did robots.txt say?), and
nothing is written before the commit that holds the result. Each request is sent only while the lease
runs; what comes of a request is decided by the class of its error, in one place (`_of_error`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from limpet import policy
from limpet.batch import Claim, Link, Result, RobotsRow
from limpet.engine.ends import End
from limpet.engine.hand import Hand, Host
from limpet.engine.handle import Ending, How, handle
from limpet.engine.heart import Heart
from limpet.engine.keyed import Calls, unheard, written
from limpet.engine.lastwords import last_words
from limpet.engine.outage import Outages
from limpet.engine.recent import Recent
from limpet.engine.request import Request as Asked
from limpet.engine.routes import Route
from limpet.engine.spider import Spider
from limpet.engine.threads import HandlersStuck, HandlerThreads
from limpet.engine.tx import Terms, Tx
from limpet.engine.watchdog import Watchdog
from limpet.errors import FetchError, LimpetError, UrlRejected
from limpet.failpoint import failpoint
from limpet.fetch.completeness import confirm
from limpet.fetch.http import Client
from limpet.fetch.message import Answer, Request
from limpet.fetch.page import Page
from limpet.fetch.redirects import Content, Moved, follow, origin_of
from limpet.fetch.retry_after import asked_wait_s
from limpet.fetch.robots import ORIGINS_MAX, Report, RobotsGate, robots_request
from limpet.fetch.status import Meaning, verdict_of
from limpet.settings import Settings
from limpet.task import Outcome
from limpet.url import host_id

log = logging.getLogger("limpet.attempt")

#: Reasons, as one stable phrase each.
ROBOTS, GONE, MOVED, TOO_LARGE, NO_HANDLER, OUT_OF_SCOPE = "robots", "gone", "moved", "too large", "no handler", "out of scope"

#: Bytes of a message that an attempt row keeps.
DETAIL_MAX = 8192


class LeaseOver(LimpetError):
    """This worker's lease has run out: nothing is sent, and what was in hand is dropped."""


@dataclass(slots=True)
class Lookups:
    """What a try may ask of the database."""

    is_moved: Callable[[bytes], Awaitable[bool]]
    robots_of: Callable[
        [str, int], Awaitable[tuple[str, int, bytes, float] | None]
    ]  # (origin, shard) -> outcome, status, body, seconds left
    has_worked: Callable[[int, int], Awaitable[bool]]  # (shard, host) -> whether a task of it is done


@dataclass(slots=True)
class Tries:
    """Everything that the tries of one run share."""

    spider: Spider
    settings: Settings
    client: Client
    terms: Terms
    tables: Mapping[str, str]  # record type -> table
    hand: Hand
    lookups: Lookups
    watchdog: Watchdog
    threads: HandlerThreads
    clock: Callable[[], float]
    token: str
    on_robots: Callable[[int, RobotsRow], None] = lambda shard, row: None
    heart: Heart | None = None
    requests: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    outages: Outages = field(init=False)
    calls: Calls = field(init=False)
    _gate: RobotsGate = field(init=False)
    _shard_of_origin: Recent[int] = field(default_factory=lambda: Recent(ORIGINS_MAX))
    _loaded_origins: Recent[bool] = field(default_factory=lambda: Recent(ORIGINS_MAX))
    _given_back: list[Claim] = field(default_factory=list)
    _reported: Recent[bool] = field(default_factory=lambda: Recent(ORIGINS_MAX))
    _crashes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.calls = Calls(
            self.settings, self.terms, self.tables, self.hand, self.watchdog, self.threads, self.clock, self.exchange, self._retry_after,
            self._note_crash,
        )  # fmt: skip
        self.outages = Outages(self.hand, self.settings, self.clock, self.lookups.has_worked)
        self._gate = RobotsGate(
            self._fetch_robots,
            self.token,
            self.clock,
            on_report=self._keep_robots,
            retry_after=self._retry_after,
            retry_s=self.settings.backoff_s,
            url_bytes_max=self.settings.url_bytes_max,
        )

    # -- a try -----------------------------------------------------------------------------

    async def perform(self, claim: Claim) -> Result:
        """Try a task once. Raises LeaseOver, CancelledError, and nothing else."""
        result = await self._try(claim)
        if result.outcome is not Outcome.DEAD or self.spider.last_words is None:
            return result
        try:
            return await last_words(
                self.spider.last_words, result, terms=self.terms, tables=self.tables, timeout_s=self.settings.handler_timeout_s,
                watchdog=self.watchdog, threads=self.threads,
            )  # fmt: skip
        except HandlersStuck as error:
            return unheard(result, error)  # else its last words would never be heard

    async def _try(self, claim: Claim) -> Result:
        handler = self.spider.handler(claim.handler)
        if handler is not None and handler.schema is not None:
            return await self.calls.perform(claim, handler)
        route = self._route(claim)
        if isinstance(route, Result):
            return route
        answer: Answer | None = None
        try:
            fetched = await self._fetch(claim)
            if isinstance(fetched, Moved):
                return self._moved(claim, fetched)
            answer = fetched.answer
            failpoint("after_answer")
            refused = self._refusal(claim, answer)
            if refused is not None:
                return refused
            return await self._handle(claim, route, answer)
        except Forbidden:
            return Result(claim, Outcome.SKIPPED, reason=ROBOTS)
        except HandlersStuck as error:
            return unheard(Result(claim, Outcome.RELEASED), error)
        except FetchError as error:
            return self._of_error(claim, error)

    def _route(self, claim: Claim) -> Route | Result:
        """The handler that takes a task; a parked or skipped result where none does."""
        name = claim.handler
        if name and self.spider.handler(name) is None:
            return Result(claim, Outcome.RELEASED, reason=f"parked: no handler {name}", park=True)
        route = self.spider.route_to(name, claim.text) if name else self.spider.route(claim.text)
        if route is None:
            return Result(claim, Outcome.SKIPPED, reason=NO_HANDLER)
        return route

    # -- fetching --------------------------------------------------------------------------

    async def _fetch(self, claim: Claim) -> Content | Moved:
        asked = Asked.of(claim.url, claim.payload) if claim.payload else None
        request = Request(asked.url, asked.method, asked.headers, asked.body) if asked else Request(claim.url)
        pace = self.hand.hosts[claim.host]
        exchanger = _Paced(self, pace)
        await self._obey_robots(claim, claim.url, pace)
        found = await follow(
            exchanger, request, own_key=claim.key, chain=_chain_of(claim.chain), hops=claim.hops,
            key_of=partial(self._key_of, claim), is_moved=self.lookups.is_moved, hops_max=self.settings.hops_max,
            before_hop=lambda url: self._obey_robots(claim, url, pace),
        )  # fmt: skip
        if isinstance(found, Content) and verdict_of(found.answer.status) is Meaning.OK:
            answer = await confirm(exchanger.exchange, found.request, found.answer)
            return found if answer is found.answer else Content(answer, found.request)
        return found

    async def exchange(self, request: Request, pace: Host, sent: Callable[[], None] = lambda: None) -> Answer:
        """Send one request of a task, when its host's pace and this worker's lease allow it; `sent` is called just before."""
        while (wait_s := pace.next_s - self.clock()) > 0 and pace.delay_s > 0:
            await asyncio.sleep(wait_s)
        if self.heart is not None and not self.heart.may_send:
            raise LeaseOver("the lease of this worker is over")
        failpoint("before_send")
        self.requests += 1
        sent()
        try:
            return await self.client.exchange(request)
        finally:
            self.hand.answered(pace, self.clock())

    def _key_of(self, claim: Claim, url: str) -> tuple[bytes, str]:
        found = self.terms.linker.accepted(url) if url == claim.url else self.terms.linker.canonical(url)
        return found.key, found.authority

    # -- robots ----------------------------------------------------------------------------

    async def _obey_robots(self, claim: Claim, url: str, pace: Host) -> None:
        """Return where robots.txt allows a URL; Forbidden where it does not; FetchError while nobody knows."""
        if not self.settings.robots:
            return
        origin = origin_of(url)
        self._shard_of_origin.keep(origin, claim.shard)
        if origin not in self._loaded_origins:
            kept = await self.lookups.robots_of(origin, claim.shard)
            self._loaded_origins.keep(origin, True)
            if kept is not None and kept[3] > 0:
                self._gate.preload(origin, kept[0], kept[2], kept[3], status=kept[1])
        rules = await self._gate.rules(origin)
        if rules.crawl_delay_s is not None:
            if rules.crawl_delay_s > self.settings.crawl_delay_max_s and origin not in self._reported:
                self._reported.keep(origin, True)
                log.warning(
                    "%s asks for %g s between requests; cut to %g s (crawl_delay_max_s)", origin, rules.crawl_delay_s,
                    self.settings.crawl_delay_max_s,
                )  # fmt: skip
            self.hand.slow(pace, min(rules.crawl_delay_s, self.settings.crawl_delay_max_s))
        if not rules.allowed(url):
            raise Forbidden(url)

    async def _fetch_robots(self, url: str) -> Answer:
        try:
            host = self.hand.hosts.get(host_id(self.terms.linker.accepted(url).authority))
        except UrlRejected as error:  # only a redirect leads to such a host
            raise FetchError(f"{url}: {error}", kind="bad_redirect", retryable=False) from error
        if host is not None:
            return await self.exchange(robots_request(url), host)
        self.requests += 1
        return await self.client.exchange(robots_request(url))

    def _keep_robots(self, report: Report) -> None:
        shard = self._shard_of_origin.get(report.origin)
        if shard is not None:
            outcome = "disallow_all" if report.outcome == "retry_later" else str(report.outcome)
            self.on_robots(shard, RobotsRow(report.origin, outcome, report.status, report.body, round(report.ttl_s * 1000)))

    def _retry_after(self, answer: Answer) -> float | None:
        return asked_wait_s(answer, datetime.now(UTC), self.settings.retry_after_max_s)

    # -- what an answer means ---------------------------------------------------------------

    def _refusal(self, claim: Claim, answer: Answer) -> Result | None:
        """The result of an answer that is no page; None for one that is."""
        if verdict_of(answer.status) is Meaning.OK:
            return None
        wait_s = self._retry_after(answer)
        meaning = verdict_of(answer.status, has_retry_after=wait_s is not None)
        status, url = answer.status, answer.url if answer.url != claim.url else ""
        if meaning is Meaning.GONE:
            return Result(claim, Outcome.SKIPPED, reason=GONE, status=status, url=url)
        if meaning is Meaning.THROTTLED:
            return self._throttled(claim, f"status {status}", wait_s, status=status)
        if meaning is Meaning.REFUSED:
            return Result(claim, Outcome.DEAD, reason=f"status {status}", status=status, url=url)
        verdict = policy.failed(claim, f"status {status}", self.settings, random.random(), after_s=wait_s)
        return self._result(claim, verdict, status=status, url=url)

    def _throttled(self, claim: Claim, reason: str, wait_s: float | None, *, status: int = 0, detail: str = "") -> Result:
        """The host waits, for everybody; this task is due when it has."""
        verdict = policy.throttled(claim, reason, self.settings, round(time.time() * 1000), random.random(), after_s=wait_s)
        pause_s = verdict.due_in_ms / 1000 if verdict.due_in_ms else policy.throttle_wait_s(1, self.settings, random.random(), wait_s)
        pace = self.hand.hosts[claim.host]
        horizon_s = 2 * self.settings.commit_ms / 1000
        until_s = self.clock() + pause_s
        if pause_s > horizon_s:
            self._given_back += self.hand.pause(pace, until_s, reason)
        else:
            self.hand.hold(pace, until_s, reason)
        return self._result(claim, verdict, status=status, detail=detail)

    def _of_error(self, claim: Claim, error: FetchError) -> Result:
        """The result of a request that brought no usable answer, by the class of its error."""
        status, detail = error.status or 0, str(error)[:DETAIL_MAX]
        if error.kind == "too_large":
            return Result(claim, Outcome.SKIPPED, reason=TOO_LARGE, status=status, detail=detail)
        if not error.retryable:
            return Result(claim, Outcome.DEAD, reason=error.kind.replace("_", " "), status=status, detail=detail)
        reason = error.kind.replace("_", " ")
        return self._result(
            claim,
            policy.failed(claim, reason, self.settings, random.random(), after_s=error.retry_after_s),
            status=status,
            detail=detail,
        )

    def _moved(self, claim: Claim, moved: Moved) -> Result:
        """The target is a task of its own, enqueued in the same commit; a start's target is in scope like the start."""
        link = self._link_to(claim, moved)
        if isinstance(link, str):
            return Result(claim, Outcome.SKIPPED, reason=OUT_OF_SCOPE, status=moved.status, url=moved.target, detail=f"moved; {link}")
        return Result(
            claim,
            Outcome.SKIPPED,
            reason=MOVED,
            status=moved.status,
            url=moved.target,
            moved_to=link.key,
            links=(link,),
            size=len(link.text) * 2,
        )

    def _link_to(self, claim: Claim, moved: Moved) -> Link | str:
        linker = self.terms.linker
        try:
            canonical = linker.canonical(moved.target)
        except UrlRejected as error:
            return error.reason
        refusal = "" if claim.depth == 0 else linker.scope.refusal(canonical, claim.authority)
        if refusal:
            return refusal
        return linker.link(
            canonical, handler=claim.handler, payload=claim.payload, priority=claim.priority, depth=claim.depth, hops=moved.hops,
            chain=b"".join(moved.chain),
        )  # fmt: skip

    # -- the handler -----------------------------------------------------------------------

    async def _handle(self, claim: Claim, route: Route, answer: Answer) -> Result:
        page = self._page(claim, answer)
        tx = Tx(self.terms, claim, page)
        ending = await handle(
            route.handler,
            page,
            tx,
            route.captures,
            timeout_s=self.settings.handler_timeout_s,
            watchdog=self.watchdog,
            threads=self.threads,
        )
        self._note_crash(route.handler.name, ending)
        url = answer.url if answer.url != claim.url else ""
        if ending.kind is How.DONE:
            self.dropped.update(tx.dropped)
            return written(Result(claim, Outcome.DONE, status=answer.status, url=url), tx, self.tables)
        return self._of_ending(claim, ending, answer.status, url)

    def _page(self, claim: Claim, answer: Answer) -> Page:
        data = Asked.of(claim.url, claim.payload).data if claim.payload else None
        return Page(answer, requested_url=claim.url, key_url=next(piece for piece in claim.text.split(" ") if "://" in piece), data=data)

    def _of_ending(self, claim: Claim, ending: Ending, status: int, url: str) -> Result:
        detail = ending.detail[:DETAIL_MAX]
        if ending.outcome is Outcome.THROTTLED:
            return self._throttled(claim, ending.reason, ending.after_s, status=status, detail=detail)
        if ending.is_strike and ending.outcome is Outcome.FAILED:
            verdict = policy.failed(claim, ending.reason, self.settings, random.random(), after_s=ending.after_s)
            return self._result(claim, verdict, status=status, detail=detail, url=url)
        if ending.outcome is Outcome.RELEASED:  # no strike, but counted: a page that never fits in memory must end some day
            verdict = policy.throttled(
                claim, ending.reason, self.settings, round(time.time() * 1000), random.random(), after_s=ending.after_s
            )
            return self._result(claim, verdict, status=status, detail=detail, url=url)
        return Result(claim, ending.outcome, reason=ending.reason, detail=detail, status=status, url=url)

    def _note_crash(self, name: str, ending: Ending) -> None:
        if ending.kind is How.CRASHED:
            self._crashes[name] += 1
        elif ending.kind is How.DONE:
            self._crashes.pop(name, None)

    @staticmethod
    def _result(claim: Claim, verdict: policy.Verdict, *, status: int = 0, detail: str = "", url: str = "") -> Result:
        return Result(
            claim,
            verdict.outcome,
            reason=verdict.reason,
            detail=detail,
            status=status,
            strike=verdict.strike,
            due_in_ms=verdict.due_in_ms,
            url=url,
        )

    # -- what the worker asks --------------------------------------------------------------

    def why_over(self) -> tuple[End, str] | None:
        """Why the worker must end: one handler failed so many times in a row, or too many hang in threads; None where it goes on."""
        for name, times in self._crashes.items():
            if times >= self.settings.breaker:
                return End.PAUSED, f"handler {name} failed {times} times in a row; mend it, then run again or `limpet retry`"
        if why := self.threads.why_stuck():
            log.error("stopping, since %s", why)
            return End.STUCK, why
        return None

    def take_given_back(self) -> list[Claim]:
        """Claims whose host paused before they were started; each is returned once."""
        back, self._given_back = self._given_back, []
        return back + self.outages.take_given_back()

    def pause_ms(self, claim: Claim) -> int:
        """Milliseconds until a claim's host may be asked again."""
        return max(1, round((self.hand.hosts[claim.host].next_s - self.clock()) * 1000))

    async def close(self) -> None:
        """End what robots.txt still asks for."""
        await self._gate.close()

    def forget_robots(self) -> None:
        """Read what is kept of robots.txt again: another incarnation may own the shards now."""
        self._loaded_origins.clear()


class Forbidden(LimpetError):
    """robots.txt forbids this URL."""


@dataclass(slots=True)
class _Paced:
    """The client as `follow` sees it: every request by the pace of the task's host."""

    tries: Tries
    pace: Host

    async def exchange(self, request: Request) -> Answer:
        self.tries.threads.check()  # nothing is asked for that no handler could take
        return await self.tries.exchange(request, self.pace)


def _chain_of(chain: bytes) -> tuple[bytes, ...]:
    return tuple(chain[i : i + 16] for i in range(0, len(chain), 16))
