"""Threads for handlers that are not `async`, so that blocking I/O in them blocks nobody else.

A thread cannot be killed. One that is over its time is abandoned: its task is over, its `tx` no
longer takes anything, and another thread takes its place; Python code in it is interrupted at its
next instruction, and what blocks elsewhere is left alone until it returns. Abandoned threads are
counted, and at `stuck_max` no further handler starts: the worker stops, resumable, since only the end of
its process ends them. `concurrent.futures` is not used because the interpreter waits for its threads when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import math
import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

from limpet.engine.watchdog import HandlerTimeout
from limpet.errors import LimpetError

#: Threads that may be stuck at a time: each holds a stack and, if it computes, a share of the interpreter.
STUCK_MAX = 32
#: Handlers that a message names.
NAMED_MAX = 5


class HandlersStuck(LimpetError):
    """So many threads hang in handlers that none may start: stop, resumable, and mend the handlers."""


class HandlerThreads:
    """At most `size` handlers at a time, each in a thread of its own while it runs. For one event loop."""

    def __init__(self, size: int, *, stuck_max: int = STUCK_MAX) -> None:
        self._free = asyncio.Semaphore(size)
        self._stuck_max = stuck_max
        self._idle: list[_Worker] = []
        self._stuck: set[_Worker] = set()

    @property
    def stuck(self) -> int:
        """How many threads are over their time and have not returned yet."""
        return sum(worker.is_busy for worker in self._stuck)

    def why_stuck(self) -> str:
        """Why no further handler may start, with the names of those that hang; "" while one may."""
        if len(self._stuck) < self._stuck_max or self.stuck < self._stuck_max:
            return ""
        names = Counter(worker.name for worker in self._stuck if worker.is_busy)
        told = ", ".join(f"{name} ({times})" for name, times in names.most_common(NAMED_MAX))
        return f"{names.total()} handlers hang in threads, over their time-out, and none may start beside them: {told}"

    def check(self) -> None:
        """Raise HandlersStuck where no further handler may start."""
        if why := self.why_stuck():
            raise HandlersStuck(why)

    async def call(self, work: Callable[[], object], *, timeout_s: float, name: str = "handler") -> object:
        """What `work` returns or raises, run in a thread; HandlerTimeout where it takes longer.

        The time-out counts from when a thread takes the work. `name` is told where it hangs. Raises HandlersStuck.
        """
        async with self._free:
            self.check()
            worker = self._idle.pop() if self._idle else _Worker()
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[_Answer] = loop.create_future()
            late = (None, HandlerTimeout(f"not done after {timeout_s:g} s"))
            alarm = loop.call_later(timeout_s, _resolve, answer, late) if math.isfinite(timeout_s) else None
            worker.name = name
            worker.take(_Job(contextvars.copy_context(), work, loop, answer))
            try:
                result, error = await answer
            except asyncio.CancelledError as cancelled:
                result, error = None, cancelled
            if alarm is not None:
                alarm.cancel()
            if worker.abandon(answer):
                self._stuck = {other for other in self._stuck if other.is_busy} | {worker}
            else:
                self._idle.append(worker)
            if error is not None:
                raise error
            return result

    def close(self) -> None:
        """Let idle threads end. Stuck ones are daemons: the process does not wait for them."""
        while self._idle:
            self._idle.pop().take(None)


_Answer = tuple[object, BaseException | None]  # a future refuses some exceptions, such as StopIteration


def _resolve(future: asyncio.Future[_Answer], answer: _Answer) -> None:
    if not future.done():  # else the time was over in the same moment
        future.set_result(answer)


class _Job:
    __slots__ = ("answer", "context", "loop", "work")

    def __init__(
        self,
        context: contextvars.Context,
        work: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[_Answer],
    ) -> None:
        self.context, self.work, self.loop, self.answer = context, work, loop, answer


class _Worker:
    """One thread, and the job that it has."""

    def __init__(self) -> None:
        self.name = ""  # of the handler that it runs, or ran last
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name="limpet-handler", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    def take(self, job: _Job | None) -> None:
        """Do this job; None ends the thread."""
        self._job = job
        self._jobs.put(job)

    def abandon(self, answer: asyncio.Future[_Answer]) -> bool:
        """Interrupt the job where it still runs, and let the thread end with it; False where it is over."""
        with self._lock:
            if self._job is None or self._job.answer is not answer:
                return False
            self._is_abandoned = True
            ident = self._thread.ident or 0
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(HandlerTimeout))
            return True

    def _work(self) -> None:
        try:
            while not self._is_abandoned and (job := self._jobs.get()) is not None:
                self._do(job)
        except HandlerTimeout:
            pass  # it came when the work was just done, which is as good
        finally:
            self._job = None

    def _do(self, job: _Job) -> None:
        answer: _Answer
        try:
            answer = job.context.run(job.work), None
        except BaseException as error:
            answer = None, error
        with self._lock:
            self._job = None
            if self._is_abandoned:
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            job.loop.call_soon_threadsafe(_resolve, job.answer, answer)
