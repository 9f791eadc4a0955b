"""One handler against one page, under a time-out: what it ended in, as a value.

Nothing that a handler does leaves here as an exception but the cancellation of the engine itself
and HandlersStuck. A coroutine is driven step by step, so that the watchdog knows which task
blocks the loop, and so that a handler that swallows its cancellation is ended all the same.
The time-out is set at the first `await` that waits; most handlers have none, and pay nothing for it.

What an exception means is section 3 of ARCHITECTURE.md: a handler's own mistake ends its task at once,
what Limpet raised keeps its meaning, cancellation and lack of memory blame nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import traceback
import types
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from limpet.credentials import hidden
from limpet.engine.routes import Handler
from limpet.engine.threads import HandlersStuck, HandlerThreads
from limpet.engine.tx import Tx
from limpet.engine.watchdog import HandlerTimeout, Watchdog
from limpet.errors import Blocked, Dead, FetchError, HandlerOutcome, HostPaused, OwnershipLost, Retry, Skip, StoreError, UsageError
from limpet.fetch.page import Page
from limpet.task import Outcome

#: Bytes of a traceback that are kept with a dead letter.
DETAIL_BYTES_MAX = 8 * 1024
#: Characters of a reason: it is grouped by.
REASON_CHARS_MAX = 200
#: Frames of a traceback, counted from where it was raised.
FRAMES_MAX = 40
#: Seconds that a handler has for its own cleaning up (`finally`, `async with`) once its time is over.
CLEANUP_S = 5.0
#: Seconds before a task that blamed nobody is tried again, so that a lack of memory is not met at full speed.
RELEASE_AFTER_S = 30.0


class How(StrEnum):
    """In what a handler ended."""

    DONE = "done"
    RETRY = "retry"  # asked for another try: a strike
    SKIP = "skip"
    DEAD = "dead"  # gave its task up
    BLOCKED = "blocked"  # saw a block page: throttles the host
    FAILED = "failed"  # a FetchError left it
    CRASHED = "crashed"  # any other exception: dead at once, counted by the breaker
    TIMED_OUT = "timed_out"  # a strike
    RELEASED = "released"  # nobody's fault


#: The outcome of a try that ended so. The strike caps and throttle caps of the engine come after it.
OUTCOME_OF = {
    How.DONE: Outcome.DONE,
    How.RETRY: Outcome.FAILED,
    How.SKIP: Outcome.SKIPPED,
    How.DEAD: Outcome.DEAD,
    How.BLOCKED: Outcome.THROTTLED,
    How.FAILED: Outcome.FAILED,
    How.CRASHED: Outcome.DEAD,
    How.TIMED_OUT: Outcome.FAILED,
    How.RELEASED: Outcome.RELEASED,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """What one call of a handler ended in. Of anything but DONE, nothing that it wrote is kept."""

    kind: How
    reason: str = ""  # "handler:KeyError"; never empty but for DONE
    detail: str = ""  # traceback, for people
    after_s: float | None = None  # not before so long from now; None where the engine decides
    error: BaseException | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the try; a FetchError that no retry can mend is dead."""
        if self.kind is How.FAILED and isinstance(self.error, FetchError) and not self.error.retryable:
            return Outcome.DEAD
        return OUTCOME_OF[self.kind]

    @property
    def is_strike(self) -> bool:
        """Whether it counts against the task."""
        return self.kind in (How.RETRY, How.FAILED, How.TIMED_OUT)


DONE = Ending(How.DONE)


async def handle(
    handler: Handler,
    page: Page | None,
    tx: Tx,
    captures: Mapping[str, object],
    *,
    timeout_s: float,
    watchdog: Watchdog | None = None,
    threads: HandlerThreads | None = None,
) -> Ending:
    """Run a handler to its end, or to its time-out, and say what it ended in. `tx` takes nothing afterwards.

    Without a `watchdog` a handler that blocks the loop is not interrupted; without `threads` one that is
    not async runs in the loop. Raises CancelledError where this task was cancelled, and HandlersStuck.
    """
    alarm = _Alarm(timeout_s, tx)
    try:
        if handler.is_async:
            result = await _driven(handler.start(page, tx, captures), alarm, tx, watchdog)
        elif threads is not None:
            result = await threads.call(partial(handler.start, page, tx, captures), timeout_s=timeout_s, name=handler.name)
        else:
            result = _marked(handler, page, tx, captures, watchdog)
        if result is not None:
            if asyncio.iscoroutine(result):
                result.close()
            raise UsageError(f"{handler.name}() returned a {type(result).__name__}: a handler returns nothing and writes by tx")
    except BaseException as error:
        if watchdog is not None:
            watchdog.end()  # should its interruption have come between two lines of `_driven`
        verdict = alarm.verdict(error)
        tx.revoke("its time was over" if isinstance(verdict, HandlerTimeout) else f"its handler ended by {type(error).__name__}")
        if isinstance(error, (HandlersStuck, KeyboardInterrupt, GeneratorExit)):
            raise
        if _is_cancelled(error) or alarm.is_stop():
            raise asyncio.CancelledError from error
        return ending_of(verdict)
    finally:
        alarm.cancel()
    if alarm.is_stop():  # swallowed, in the middle of its work
        tx.revoke("its worker was stopped")
        raise asyncio.CancelledError
    if alarm.is_over:  # it swallowed its cancellation: too late all the same
        return ending_of(alarm.verdict(None))
    tx.close()
    return DONE


def ending_of(error: BaseException) -> Ending:
    """What an exception that left a handler means for its task."""
    error = _single(error)
    match error:
        case Retry():
            return Ending(How.RETRY, _reason(error.reason, "retry"), after_s=_seconds(error.after_s))
        case Blocked():
            return Ending(How.BLOCKED, _reason(error.reason, "blocked"), after_s=_seconds(error.after_s), error=error)
        case Skip():
            return Ending(How.SKIP, _reason(error.reason, "skipped by its handler"))
        case Dead() | HandlerOutcome():
            return Ending(How.DEAD, _reason(getattr(error, "reason", ""), "given up by its handler"), _detail(error))
        case FetchError():
            return Ending(How.FAILED, _reason(error.kind, "fetch"), _detail(error), _seconds(error.retry_after_s), error)
        case HostPaused():
            return Ending(How.RELEASED, "its host paused", after_s=_seconds(error.after_s), error=error)
        case HandlerTimeout():
            return Ending(How.TIMED_OUT, "handler_timeout", _detail(error), error=error)
        case StoreError() | OwnershipLost() | MemoryError() | asyncio.CancelledError():
            return Ending(How.RELEASED, f"handler:{type(error).__name__}", _detail(error), RELEASE_AFTER_S, error)
    return Ending(How.CRASHED, _reason(f"handler:{type(error).__name__}", ""), _detail(error), error=error)


@types.coroutine
def _driven(coroutine: Any, alarm: _Alarm, tx: Tx, watchdog: Watchdog | None) -> Generator[Any, Any, object]:
    """Drive a handler's coroutine from await to await, with the watchdog told of each step."""
    thrown: BaseException | None = None
    try:
        while True:
            if watchdog is not None:
                watchdog.begin(tx)
            try:
                waits_for = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value
            finally:
                if watchdog is not None:
                    watchdog.end()
            alarm.set()
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                thrown = alarm.heard(error)
    except (HandlerTimeout, GeneratorExit):
        _finish(coroutine, tx, watchdog)
        raise


def _marked(handler: Handler, page: Page | None, tx: Tx, captures: Mapping[str, object], watchdog: Watchdog | None) -> object:
    """Call a handler that is not async in the loop: one step."""
    if watchdog is None:
        return handler.start(page, tx, captures)
    watchdog.begin(tx)
    try:
        return handler.start(page, tx, captures)
    finally:
        watchdog.end()


def _finish(coroutine: Any, tx: Tx, watchdog: Watchdog | None) -> None:
    """Close a coroutine that was left in the middle; what its own cleaning up raises is of no interest any more."""
    if watchdog is not None:
        watchdog.begin(tx)
    try:
        with contextlib.suppress(Exception, HandlerTimeout):
            coroutine.close()
    finally:
        if watchdog is not None:
            watchdog.end()


class _Alarm:
    """The time-out of one handler that waits: first it is cancelled, and after a further while left."""

    __slots__ = ("_cause", "_is_heard", "_is_left", "_task", "_timeout_s", "_timer", "_tx", "is_over")

    def __init__(self, timeout_s: float, tx: Tx) -> None:
        self.is_over = False
        self._timeout_s = timeout_s
        self._tx = tx
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_heard = self._is_left = False
        self._cause: BaseException | None = None

    def set(self) -> None:
        """The handler waits: from its first wait on the time runs."""
        if self._task is None:
            self._task = asyncio.current_task()
            if math.isfinite(self._timeout_s):
                self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._ring)

    def cancel(self) -> None:
        """The handler has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, error: BaseException) -> BaseException:
        """What is to be thrown into the handler for what was thrown at its wait."""
        if isinstance(error, GeneratorExit):
            raise error
        if isinstance(error, asyncio.CancelledError) and self._task is not None and self.is_over:
            if self._is_left:
                self._task.uncancel()
                raise self.verdict(error)
            if not self._is_heard:
                self._is_heard = True
                self._task.uncancel()
            self._cause = error
        return error

    def verdict(self, error: BaseException | None) -> BaseException:
        """HandlerTimeout where the time was over, whatever the handler made of it; else the error itself."""
        if error is not None and (not self.is_over or isinstance(error, HandlerTimeout)):
            return error
        timeout = HandlerTimeout(f"not done after {self._timeout_s:g} s")
        timeout.__cause__ = error or self._cause
        return timeout

    def is_stop(self) -> bool:
        """Whether the engine has cancelled this task while the handler waited, whatever the handler made of it."""
        return self._task is not None and self._task.cancelling() > 0

    def _ring(self) -> None:
        self.is_over = True
        self._tx.revoke("its time was over")
        self._again()

    def _again(self) -> None:
        if self._task is None:
            return
        self._is_left = self._is_heard
        self._timer = asyncio.get_running_loop().call_later(min(CLEANUP_S, self._timeout_s), self._again)
        self._task.cancel()


def _is_cancelled(error: BaseException) -> bool:
    """Whether this is the cancellation of the engine's own task, not one that the handler made itself."""
    task = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return task is not None and task.cancelling() > 0


def _single(error: BaseException) -> BaseException:
    """The one exception inside a group: a TaskGroup wraps what a child raised."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _reason(text: object, fallback: str) -> str:
    return hidden(" ".join(_storable(str(text)).split()))[:REASON_CHARS_MAX] or fallback


def _seconds(value: object) -> float | None:
    """A wait as it was given, from 0 on, and without end where it is beyond all numbers; None where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    try:
        return max(0.0, float(value))
    except OverflowError:  # an int of hundreds of digits
        return math.inf if value > 0 else 0.0


def _detail(error: BaseException) -> str:
    """The traceback from the handler's own first line on; of a long one the middle is left out."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("limpet.engine."):
        trace = trace.tb_next
    told = traceback.TracebackException(type(error), error, trace, limit=-FRAMES_MAX, compact=True)
    text = hidden(_storable("".join(told.format()))).encode()  # whole: of a value that is cut, the rest would be no value
    if len(text) > DETAIL_BYTES_MAX:
        head, tail = DETAIL_BYTES_MAX // 4, DETAIL_BYTES_MAX * 3 // 4 - 8
        text = text[:head] + b"\n...\n" + text[-tail:]
    return text.decode(errors="ignore")


def _storable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
