"""One thread for one connection: the only way from the loop to the store.

A call is never cut off: a commit that was begun goes on to its end, whatever becomes of the task that
waits for it, and close() waits for it too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from limpet.errors import StoreBusy

log = logging.getLogger("limpet.store")

#: Seconds that a database which is busy with others is asked again, as long as a commit asks; then the caller decides.
BUSY_S = 20.0
#: Seconds between two of these asks, doubled up to the second number.
BUSY_WAIT_S, BUSY_WAIT_MAX_S = 0.02, 0.5
#: Seconds of such a wait after which a person is told.
TELL_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


class OneThread:
    """Runs calls one after the other, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call, made on the thread; shielded from cancellation."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._pool, lambda: function(*args, **kwargs)))

    async def call_when_free(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same of a whole transaction, again and again while others keep the database busy; StoreBusy where that takes too long."""
        began, wait_s, is_told = time.monotonic(), BUSY_WAIT_S, False
        while True:
            try:
                return await self.call(function, *args, **kwargs)
            except StoreBusy as error:
                waited_s = time.monotonic() - began
                if waited_s > BUSY_S:
                    raise
                if waited_s > TELL_S and not is_told:
                    is_told = True
                    log.warning("the database is busy, waiting up to %g s: %s", BUSY_S, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BUSY_WAIT_MAX_S)

    def close(self) -> None:
        """Wait for the last call, and end the thread."""
        self._pool.shutdown(wait=True)


class Together:
    """Yes-or-no questions about keys; those that come while a call is under way share the next one.

    A hop to the thread and back costs more than a look into an index: beside a busy loop, a turn of the interpreter.
    """

    def __init__(self, thread: OneThread, answer: Callable[[Sequence[bytes]], Container[bytes]]) -> None:
        self._thread = thread
        self._answer = answer  # of some keys, those for which it is yes
        self._waiting: list[tuple[bytes, asyncio.Future[bool]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def ask(self, key: bytes) -> bool:
        """Whether it is yes for this key. Raises what the call raised."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, future))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all())
        return await future

    async def _ask_all(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, []
            try:
                found = await self._thread.call(self._answer, [key for key, _ in asked])
            except Exception as error:
                for _, future in asked:
                    if not future.done():
                        future.set_exception(error)
                continue
            for key, future in asked:
                if not future.done():  # whoever asked was cancelled meanwhile
                    future.set_result(key in found)
        self._asking = None
