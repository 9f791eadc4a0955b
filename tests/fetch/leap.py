"""An event loop whose clock leaps over waiting, so that no test ever sleeps.

Sockets are real. When nothing is readable, the loop does not wait for its next timer: it moves its
clock there. A server that drips one byte each 0.3 s for a minute takes milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

#: Real seconds in which bytes on their way through loopback must arrive before time leaps.
GRACE_S = 0.004

#: The same before a leap that is longer than `SHORT_S`: it ends at a limit of the code under test, which bytes that a busy machine
#: was slow to deliver must not meet.
LONG_GRACE_S = 0.1
SHORT_S = 1.0


class LeapSelector(selectors.DefaultSelector):
    """Reports what is ready; where nothing is, says how long the loop would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.leapt_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(min(timeout, LONG_GRACE_S if timeout > SHORT_S else GRACE_S))
        if not ready:
            self.leapt_s += timeout
        return ready


class LeapLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting costs no time."""

    def __init__(self) -> None:
        self._leaps = LeapSelector()
        super().__init__(self._leaps)

    def time(self) -> float:
        return super().time() + self._leaps.leapt_s


def run(coroutine: Coroutine[Any, Any, Any], loop_factory: Callable[[], asyncio.AbstractEventLoop] = LeapLoop) -> Any:
    """Run to the end, and fail where asyncio had to report an error that nobody took."""
    reported: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        return await coroutine

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(watched())
    assert not reported, reported
    return result
