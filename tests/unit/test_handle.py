"""What a handler ends in: outcomes, exceptions, and time-outs of what waits. What blocks is in test_blocking.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from limpet.batch import Claim
from limpet.engine.handle import DETAIL_BYTES_MAX, Ending, How, handle
from limpet.engine.links import Linker
from limpet.engine.routes import handler_of
from limpet.engine.spider import Spider
from limpet.engine.tx import Terms, Tx
from limpet.errors import Blocked, Dead, FetchError, HandlerRevoked, Missing, OwnershipLost, Retry, Skip, StoreBusy
from limpet.fetch.page import Page
from limpet.record import record
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.task import Outcome, ShardId, TaskId, TaskKey
from limpet.url import KeyProfile, canonicalise

#: A time-out that nothing here should reach, and one that everything here that waits does.
LONG_S, SHORT_S = 60.0, 0.05

#: One that is reached, too; as much again, in which a handler cleans up, is not used up by a slow moment of the machine.
AMPLE_S = 1.0


@record(key="id")
class Row:
    id: int


def tx_and_page() -> tuple[Tx, Page]:
    """The tx of one task on one page, and the page."""
    here = canonicalise("http://h.test/a", KeyProfile())
    claim = Claim(
        shard=ShardId(0), id=TaskId(1), key=TaskKey(here.key), tries=1, strikes=0, lost=0, throttled=0, host=0,
        text=here.text, url=here.text, handler="", payload="", priority=0, depth=0, hops=0, chain=b"",
    )  # fmt: skip
    linker = Linker(KeyProfile(), Scope.of("host", [here]), shards=1)
    terms = Terms.of(Spider("shop", records=[Row]), linker, Settings())
    page = Page.from_html("<a href=b>b</a>", url=here.text)
    return Tx(terms, claim, page), page


def ended(function: Callable[..., object], *, timeout_s: float = LONG_S, loop: Callable[[], Any] | None = None, **parts: Any) -> Ending:
    """What a handler of this function ends in, in a loop of its own."""
    tx, page = tx_and_page()

    async def once() -> Ending:
        return await handle(handler_of(function), page, tx, {}, timeout_s=timeout_s, **parts)

    with asyncio.Runner(loop_factory=loop) as runner:
        ending = runner.run(once())
    if ending.kind is not How.DONE:
        assert (tx.offers(), tx.links()) == ((), ())
    with pytest.raises(HandlerRevoked):
        tx.emit(Row(id=0))
    return ending


# Outcomes.


def test_a_handler_that_returns_is_done_and_its_writes_stay() -> None:
    """Async or not; and then the tx is closed."""

    async def one(page: Page, tx: Tx) -> None:
        tx.emit(Row(id=1))
        await asyncio.sleep(0)
        tx.follow(page.links())

    def other(page: Page, tx: Tx) -> None:
        tx.emit(Row(id=1))
        tx.follow(page.links())

    for function in (one, other):
        tx, page = tx_and_page()
        ending = asyncio.run(handle(handler_of(function), page, tx, {}, timeout_s=LONG_S))
        assert (ending.kind, ending.outcome) == (How.DONE, Outcome.DONE)
        assert (len(tx.offers()), len(tx.links())) == (1, 1)
        with pytest.raises(HandlerRevoked):
            tx.emit(Row(id=2))
        assert len(tx.offers()) == 1


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


ENDINGS: list[tuple[BaseException, How, Outcome, str, float | None]] = [
    (Retry("not yet", after_s=7), How.RETRY, Outcome.FAILED, "not yet", 7.0),
    (Retry(), How.RETRY, Outcome.FAILED, "asked by the handler", None),
    (Retry(after_s=float("nan")), How.RETRY, Outcome.FAILED, "asked by the handler", None),
    (Retry(after_s=-1), How.RETRY, Outcome.FAILED, "asked by the handler", 0.0),
    (Skip("sold  out\n"), How.SKIP, Outcome.SKIPPED, "sold out", None),
    (Skip(""), How.SKIP, Outcome.SKIPPED, "skipped by its handler", None),
    (Skip("\ud800\0"), How.SKIP, Outcome.SKIPPED, "\\ud800\\0", None),
    (Dead("login needed"), How.DEAD, Outcome.DEAD, "login needed", None),
    (Blocked(), How.BLOCKED, Outcome.THROTTLED, "blocked", None),
    (Blocked("captcha", after_s=60), How.BLOCKED, Outcome.THROTTLED, "captcha", 60.0),
    (FetchError("reset", kind="reset"), How.FAILED, Outcome.FAILED, "reset", None),
    (FetchError("big", kind="too_large", retryable=False), How.FAILED, Outcome.DEAD, "too_large", None),
    (FetchError("busy", kind="status", status=503, retry_after_s=9), How.FAILED, Outcome.FAILED, "status", 9.0),
    (KeyError("price"), How.CRASHED, Outcome.DEAD, "handler:KeyError", None),
    (Missing("h1"), How.CRASHED, Outcome.DEAD, "handler:Missing", None),
    (TwoArguments(1, 2), How.CRASHED, Outcome.DEAD, "handler:TwoArguments", None),
    (Unprintable(), How.CRASHED, Outcome.DEAD, "handler:Unprintable", None),
    (TimeoutError(), How.CRASHED, Outcome.DEAD, "handler:TimeoutError", None),
    (SystemExit(3), How.CRASHED, Outcome.DEAD, "handler:SystemExit", None),
    (AssertionError(), How.CRASHED, Outcome.DEAD, "handler:AssertionError", None),
    (ExceptionGroup("g", [Skip("inside")]), How.SKIP, Outcome.SKIPPED, "inside", None),
    (ExceptionGroup("g", [Skip("a"), Skip("b")]), How.CRASHED, Outcome.DEAD, "handler:ExceptionGroup", None),
    (StoreBusy("locked"), How.RELEASED, Outcome.RELEASED, "handler:StoreBusy", 30.0),
    (OwnershipLost("gone"), How.RELEASED, Outcome.RELEASED, "handler:OwnershipLost", 30.0),
    (MemoryError(), How.RELEASED, Outcome.RELEASED, "handler:MemoryError", 30.0),
    (asyncio.CancelledError(), How.RELEASED, Outcome.RELEASED, "handler:CancelledError", 30.0),
]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(("error", "how", "outcome", "reason", "after_s"), ENDINGS, ids=[repr(row[0]) for row in ENDINGS])
def test_an_exception_means_what_the_design_says(
    is_async: bool, error: BaseException, how: How, outcome: Outcome, reason: str, after_s: float | None
) -> None:
    """P34: one end for each try, and nothing of what it wrote before is kept."""

    def plain(tx: Tx) -> None:
        tx.emit(Row(id=1))
        raise error

    async def waiting(tx: Tx) -> None:
        plain(tx)

    ending = ended(waiting if is_async else plain)
    assert (ending.kind, ending.outcome, ending.reason, ending.after_s) == (how, outcome, reason, after_s)
    assert ending.is_strike is (how in (How.RETRY, How.FAILED))


def test_a_crash_keeps_its_traceback_from_the_handlers_own_line_on() -> None:
    """Without Limpet's frames before it."""

    async def crash(page: Page) -> None:
        raise KeyError("price")

    lines = ended(crash).detail.splitlines()
    assert "crash" in lines[1]
    assert lines[-1] == "KeyError: 'price'"


def test_a_traceback_is_bounded_and_can_be_stored() -> None:
    """Deep recursion, megabytes of message, NULs, lone surrogates."""

    def crash(page: Page) -> None:
        def deeper(n: int) -> None:
            if not n:
                raise ValueError("\0\ud800" + "é" * 10**6)
            deeper(n - 1)

        deeper(500)

    detail = ended(crash).detail
    assert len(detail.encode()) <= DETAIL_BYTES_MAX
    assert "\0" not in detail


async def never_awaited() -> None: ...


@pytest.mark.parametrize("make", [int, list, partial(Row, id=1), never_awaited])
def test_a_handler_that_returns_something_has_lost_it(make: Callable[[], object]) -> None:
    """What is returned instead of emitted, or never awaited, would vanish in silence."""

    def returns(page: Page) -> object:
        return make()

    ending = ended(returns)
    assert (ending.kind, ending.reason) == (How.CRASHED, "handler:UsageError")
    assert "writes by tx" in ending.detail


def cancels() -> None:
    raise asyncio.CancelledError


def skips() -> None:
    raise Skip("in a hurry")


@pytest.mark.parametrize("answer", [cancels, skips, bool])
def test_the_engines_own_cancellation_leaves_and_drops_the_writes(answer: Callable[[], None]) -> None:
    """Whatever the handler makes of it: a half-finished task is not done, nor skipped."""
    tx, page = tx_and_page()
    started = asyncio.Event()

    async def waits(tx: Tx) -> None:
        tx.emit(Row(id=1))
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            answer()

    async def scene() -> None:
        task = asyncio.create_task(handle(handler_of(waits), page, tx, {}, timeout_s=LONG_S))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert tx.offers() == ()


# Time-outs of handlers that wait.


def test_a_handler_that_waits_too_long_is_a_strike() -> None:
    """P29: its time ends, with the line where it stood."""

    async def waits(tx: Tx) -> None:
        tx.emit(Row(id=1))
        await asyncio.Event().wait()

    ending = ended(waits, timeout_s=SHORT_S)
    assert (ending.kind, ending.outcome, ending.reason, ending.is_strike) == (
        How.TIMED_OUT,
        Outcome.FAILED,
        "handler_timeout",
        True,
    )
    assert "await asyncio.Event().wait()" in ending.detail


def test_a_write_after_the_time_out_raises() -> None:
    """P30: also in the handler that goes on, and swallows its cancellation."""
    seen: list[type] = []

    async def swallows(tx: Tx) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                tx.emit(Row(id=1))
            except HandlerRevoked as error:
                seen.append(type(error))

    assert ended(swallows, timeout_s=SHORT_S).kind is How.TIMED_OUT
    assert seen == [HandlerRevoked]


def test_a_handler_may_clean_up_after_its_time_out() -> None:
    """`finally` with an await in it runs to its end."""
    seen: list[str] = []

    async def cleans(tx: Tx) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned")

    assert ended(cleans, timeout_s=AMPLE_S).kind is How.TIMED_OUT
    assert seen == ["cleaned"]


def test_a_handler_that_never_ends_its_cleaning_up_is_left() -> None:
    """After as long again."""

    async def stays(tx: Tx) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    assert ended(stays, timeout_s=SHORT_S).kind is How.TIMED_OUT


def test_another_exception_after_the_time_out_is_still_the_time_out() -> None:
    """Nor does a Skip then count as one."""

    async def raises(tx: Tx) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Skip("too late") from None

    assert ended(raises, timeout_s=SHORT_S).kind is How.TIMED_OUT


def test_a_task_that_a_handler_left_behind_writes_nothing() -> None:
    """P30: what runs on after the return has a closed tx."""
    tx, page = tx_and_page()
    late: list[object] = []

    async def leaves(tx: Tx) -> None:
        go_on = asyncio.Event()

        async def write() -> None:
            await go_on.wait()
            tx.emit(Row(id=2))

        task = asyncio.create_task(write())
        late.extend([task, go_on])

    async def scene() -> None:
        ending = await handle(handler_of(leaves), page, tx, {}, timeout_s=LONG_S)
        assert ending.kind is How.DONE
        task, go_on = late
        go_on.set()  # type: ignore[attr-defined]
        with pytest.raises(HandlerRevoked):
            await task  # type: ignore[misc]

    asyncio.run(scene())
    assert tx.offers() == ()


def test_asyncio_timeouts_inside_a_handler_work() -> None:
    """Its own time-outs and task groups are its own affair."""

    async def own(tx: Tx) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        tx.emit(Row(id=1))

    assert ended(own).kind is How.DONE
