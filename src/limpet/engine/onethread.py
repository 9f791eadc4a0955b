"""One thread for one connection: the only way from the loop to the store.

A call is never cut off: a commit that was begun goes on to its end, whatever becomes of the task that
waits for it, and close() waits for it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

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
