"""One try of a keyed task: its arguments, its handler with `http`, its bill; and what it ended in, as a frozen value.

The pace of a provider is that of each worker: `per_host` requests at once (`concurrency` where that is not set), `delay_s` where
it is set, and none between them else, since a contract says what a paid API bears. robots.txt is for crawlers of pages and is not
asked. A throttle pauses the provider for every task of this worker.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from limpet import policy
from limpet.batch import Charge, Claim, Kept, Offer, Result
from limpet.engine.calling import Bill, Http, Throttled, authority_of
from limpet.engine.hand import Hand, Host
from limpet.engine.handle import Ending, How, handle
from limpet.engine.routes import Handler
from limpet.engine.threads import HandlersStuck, HandlerThreads
from limpet.engine.tx import Terms, Tx
from limpet.engine.watchdog import Watchdog
from limpet.errors import FetchError, HostPaused, UsageError
from limpet.fetch.message import Answer, Request
from limpet.settings import Settings
from limpet.task import Outcome
from limpet.url import host_id

#: Bytes of a message that an attempt row keeps.
DETAIL_MAX = 8192

#: Statuses have three digits (RFC 9110 section 15).
STATUS_MAX = 999

#: Seconds that a try waits for a paused provider; its task goes back where that takes longer.
WAIT_S = 2.0

#: Endings after which an answer that was kept is of no use: the task is done, or wants another answer.
DROPS_KEPT = frozenset({How.DONE, How.RETRY, How.BLOCKED})

#: Endings after which the provider is to answer anew, not what it answered already: under another idempotency key.
ASKS_ANEW = frozenset({How.RETRY, How.BLOCKED})

ReadKept = Callable[[Claim, bytes], Awaitable[tuple[int, str, str, bytes] | None]]


async def _nothing_kept(claim: Claim, request: bytes) -> None:
    return None


async def _kept_nowhere(shard: int, kept: Kept) -> None:
    return None


@dataclass(slots=True)
class Calls:
    """What the tries of keyed tasks share."""

    settings: Settings
    terms: Terms
    tables: Mapping[str, str]  # record type -> table
    hand: Hand
    watchdog: Watchdog
    threads: HandlerThreads
    clock: Callable[[], float]
    send: Callable[[Request, Host, Callable[[], None]], Awaitable[Answer]]
    retry_after: Callable[[Answer], float | None]
    note: Callable[[str, Ending], None]  # the breaker counts
    job: str = ""
    read_kept: ReadKept = _nothing_kept
    keep: Callable[[int, Kept], Awaitable[None]] = _kept_nowhere
    bills: dict[int, Bill] = field(default_factory=dict)
    _slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    async def perform(self, claim: Claim, handler: Handler) -> Result:
        """Try a keyed task once. Raises LeaseOver and CancelledError, and nothing else."""
        assert handler.schema is not None, "a handler of calls has a schema"
        try:
            arguments = handler.schema.decode(claim.payload)
        except UsageError as error:
            return Result(claim, Outcome.DEAD, reason="handler:arguments", detail=str(error)[:DETAIL_MAX])
        bill = self.bills[claim.id] = Bill(handler.schema)
        http = Http(claim, bill, self.job, self._paced, self.retry_after, self.read_kept, self.keep, self.settings.hops_max)
        tx = Tx(self.terms, claim, None)
        given = {**arguments, **({"http": http} if "http" in handler.takes else {})}
        try:
            ending = await handle(
                handler, None, tx, given, timeout_s=self.settings.handler_timeout_s, watchdog=self.watchdog, threads=self.threads
            )
        except HandlersStuck as error:
            return unheard(Result(claim, Outcome.RELEASED, charge=bill.charge()), error)
        await http.end()
        self.note(handler.name, ending)
        result = self._done(claim, tx, bill) if ending.kind is How.DONE else self._of_ending(claim, ending, bill)
        drops = (http.has_kept or claim.tries > 1) and ending.kind in DROPS_KEPT and not isinstance(ending.error, Throttled)
        anew = drops and ending.kind in ASKS_ANEW and bool(handler.schema.tariff.idempotency_header)
        charge = bill.charge()
        return replace(result, charge=replace(charge, anew=True) if charge and anew else charge, drops_kept=drops)

    def charge_of(self, claim: Claim) -> Charge | None:
        """What a try that was cut off has cost so far; None where it asked for nothing."""
        bill = self.bills.get(claim.id)
        return bill.charge() if bill else None

    def forget(self, claim: Claim) -> None:
        """The try has ended, and its result is in."""
        self.bills.pop(claim.id, None)

    def _done(self, claim: Claim, tx: Tx, bill: Bill) -> Result:
        return written(Result(claim, Outcome.DONE, status=200 if bill.requests else 0), tx, self.tables)

    def _of_ending(self, claim: Claim, ending: Ending, bill: Bill) -> Result:
        detail, error = ending.detail[:DETAIL_MAX], ending.error
        if ending.outcome is Outcome.THROTTLED:
            return self._throttled(claim, ending, bill)
        if isinstance(error, HostPaused):
            wait_s = policy.within(ending.after_s or WAIT_S, policy.AFTER_MAX_S)
            return Result(claim, Outcome.RELEASED, reason=ending.reason, detail=str(error), due_in_ms=max(1, round(wait_s * 1000)))
        if ending.outcome is Outcome.RELEASED:
            now_ms = round(time.time() * 1000)
            verdict = policy.throttled(claim, ending.reason, self.settings, now_ms, random.random(), after_s=ending.after_s)
            return self._result(claim, verdict, detail)
        status, reason = status_of(error), reason_of(ending)
        if ending.is_strike and ending.outcome is Outcome.FAILED:
            verdict = policy.failed(claim, reason, self.settings, random.random(), after_s=ending.after_s)
            return self._result(claim, verdict, detail, status=status)
        return Result(claim, ending.outcome, reason=reason, detail=detail, status=status)

    def _throttled(self, claim: Claim, ending: Ending, bill: Bill) -> Result:
        verdict = policy.throttled(claim, ending.reason, self.settings, round(time.time() * 1000), random.random(), after_s=ending.after_s)
        wait_s = verdict.due_in_ms / 1000 or policy.throttle_wait_s(1, self.settings, random.random(), ending.after_s)
        if bill.host:
            self.hand.hold(self._provider(bill.host), self.clock() + wait_s, ending.reason)
        status = ending.error.status if isinstance(ending.error, Throttled) else 0
        return self._result(claim, verdict, ending.detail[:DETAIL_MAX], status=status)

    @staticmethod
    def _result(claim: Claim, verdict: policy.Verdict, detail: str, *, status: int = 0) -> Result:
        return Result(
            claim, verdict.outcome, reason=verdict.reason, detail=detail, status=status, strike=verdict.strike, due_in_ms=verdict.due_in_ms
        )

    # -- pace ------------------------------------------------------------------------------

    async def _paced(self, request: Request, sent: Callable[[], None]) -> Answer:
        """Send, when the provider has a place for it and its pace allows it; `sent` is called just before."""
        authority = authority_of(request.url)
        pace = self._provider(authority)
        slots = self._slots.get(authority)
        if slots is None:
            slots = self._slots[authority] = asyncio.Semaphore(self.settings.per_host or self.settings.concurrency)
        async with slots:
            while (wait_s := pace.next_s - self.clock()) > 0 or pace.held:
                if wait_s > WAIT_S or pace.held:
                    raise HostPaused(authority, after_s=max(wait_s, WAIT_S), reason=pace.held or pace.pause)
                await asyncio.sleep(wait_s)
            return await self.send(request, pace, sent)

    def _provider(self, authority: str) -> Host:
        """The pace of a provider; one that is met for the first time has no delay but what the settings say."""
        number = host_id(authority)
        known = self.hand.hosts.get(number)
        if known is None:
            shard = number % self.terms.linker.shards
            known = self.hand.hosts[number] = Host(
                number, authority, shard, max(0.0, self.settings.delay_s), self.settings.concurrency, self.clock()
            )
        return known


def reason_of(ending: Ending) -> str:
    """What an ending is counted by: of a request that failed "status 503" or "timeout", else the handler's own reason."""
    error = ending.error
    if not isinstance(error, FetchError):
        return ending.reason
    return f"status {status_of(error)}" if error.kind == "status" else ending.reason.replace("_", " ")


def status_of(error: BaseException | None) -> int:
    """The status of a request that failed; 0 where there was no answer, or a handler made up one that is none."""
    status = error.status if isinstance(error, FetchError) else None
    return status if type(status) is int and 0 < status <= STATUS_MAX else 0


def unheard(result: Result, error: HandlersStuck) -> Result:
    """A try for which no handler could be called: no strike, nothing is kept of it, and its task is pending again."""
    return replace(
        result, outcome=Outcome.RELEASED, reason="handlers hang", detail=str(error), strike=False, due_in_ms=0, links=(), offers=(),
        moved_to=b"", size=0, tallies=(), registers=(), seen=(), drops_kept=False,
        charge=result.charge and replace(result.charge, anew=False),
    )  # fmt: skip


def written(result: Result, tx: Tx, tables: Mapping[str, str]) -> Result:
    """A result with everything that its handler wrote."""
    return replace(
        result,
        links=tx.links(),
        offers=tuple(Offer(tables[o.dataset], o.key, o.key_text, o.content, o.values) for o in tx.offers()),
        size=tx.size,
        tallies=tx.tallies(),
        registers=tx.registers(),
        seen=tx.seen(),
    )
