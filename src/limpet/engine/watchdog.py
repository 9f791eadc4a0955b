"""A handler that blocks the event loop costs its own task only.

Each step of a handler (from one `await` to the next) is marked. A thread looks at the mark in
ticks, and counts the ticks for which it saw one and the same step: a process that was stopped or
suspended has seen none meanwhile, so nobody is blamed for that time. After one time-out the step is
interrupted, after a second one the process ends by SIGKILL: then the task is a lost try, and as a
suspect, alone, it is found out.

Two ways to interrupt, two ways to end:

    the step lets go of the interpreter (Python code, time.sleep)   the thread sends SIGPROF; its handler raises
    it holds the interpreter, so the thread starves (a regex)       the kernel sends SIGPROF, by CPU time used
    it does not heed signals either                                 the thread sends SIGKILL, or where it starves,
                                                                    the kernel SIGVTALRM, whose default ends the process

Signals reach the main thread alone. Where the loop runs in another one, the interruption is an
asynchronous exception, which neither a sleep nor a regex heeds: those end by the second time-out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
from time import monotonic
from types import FrameType, TracebackType
from typing import Self

#: Looks at a step in one time-out: its end is found an eighth late at the most.
TICKS = 8
#: Seconds between two looks at the most, so that a stop is heeded and the CPU timers stay armed.
TICK_MAX_S = 1.0
#: Seconds that telling about the end of the process may take.
TELL_S = 2.0

_HAS_TIMERS = hasattr(signal, "setitimer")

log = logging.getLogger("limpet.watchdog")


class HandlerTimeout(BaseException):
    """Raised inside a handler that is over its time; no `except Exception` in it swallows this."""


class Watchdog:
    """Watches the handler steps of one event loop; enter it in the thread of that loop."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._tick_s = min(timeout_s / TICKS, TICK_MAX_S)
        self._task: object = None  # of the marked step, for the log
        self._since = 0.0  # the marked step, by its start; 0.0 for none
        self._shot = 0.0  # the step that was interrupted
        self._by_signal = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="limpet-watchdog", daemon=True)
        self._watched = 0

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        is_free = _HAS_TIMERS and signal.getsignal(signal.SIGPROF) == signal.SIG_DFL  # else a profiler has it
        if is_free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGPROF, self._on_signal)
            self._by_signal = True
        if _HAS_TIMERS and signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL:
            with contextlib.suppress(Exception):  # no stderr, or none with a descriptor
                faulthandler.register(signal.SIGVTALRM, file=sys.__stderr__ or 2, chain=True)  # tells where it stood, then ends it
        if math.isfinite(self.timeout_s):
            self._arm()  # a step may starve the thread before its first tick
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._disarm()
        if self._by_signal:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def begin(self, task: object) -> None:
        """A step of this task's handler starts, in the thread of the loop."""
        self._task = task
        self._since = monotonic()

    def end(self) -> None:
        """The step is over: from here on nothing is raised."""
        if self._by_signal:
            self._since = 0.0
            return
        with self._lock:
            self._since = 0.0
            if self._shot:  # it may still be on its way
                self._shot = 0.0
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), None)

    def _watch(self) -> None:
        ticks_max = math.ceil(self.timeout_s / self._tick_s)
        seen, ticks = 0.0, 0
        while not self._stop.wait(self._tick_s):
            self._arm()
            since = self._since
            ticks = ticks + 1 if since and since == seen else 0
            seen = since
            if ticks >= 2 * ticks_max:
                self._kill()
            elif ticks >= ticks_max:  # at each tick: a bare `except:` may have swallowed the last one
                self._interrupt(since)

    def _interrupt(self, since: float) -> None:
        with self._lock:
            if self._since != since:
                return
            self._shot = since
            if self._by_signal:
                signal.pthread_kill(self._watched, signal.SIGPROF)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), ctypes.py_object(HandlerTimeout))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two instructions of whatever runs there: so only where a step is marked.

        The CPU timer's signal finds no shot, since the thread had no chance to fire one: the clock decides.
        """
        since = self._since
        if since and (self._shot == since or monotonic() - since >= self.timeout_s):
            raise HandlerTimeout(f"blocked the event loop for {self.timeout_s:g} s")

    def _arm(self) -> None:
        """Let the kernel act where this thread gets no more turns.

        The timers count the CPU time of all threads, so that a time-out used up between two ticks means a
        starved thread only beyond what all cores can use in a tick.
        """
        if not _HAS_TIMERS:
            return
        cores_s = 2 * self._tick_s * (os.cpu_count() or 1)
        if self._by_signal:
            signal.setitimer(signal.ITIMER_PROF, self.timeout_s + cores_s, self._tick_s)
        if signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL:  # else it is somebody else's
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * (self.timeout_s + cores_s))

    def _disarm(self) -> None:
        if not _HAS_TIMERS:
            return
        if self._by_signal:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        if signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            faulthandler.unregister(signal.SIGVTALRM)

    def _kill(self) -> None:
        teller = threading.Thread(target=self._tell, daemon=True)
        teller.start()
        teller.join(TELL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self) -> None:
        """Say why, and where it stood; in a thread of its own, as it may be the log or stderr that blocks."""
        log.critical("%r: its handler blocks and heeds nothing; this process ends, and the task will run alone", self._task)
        with contextlib.suppress(Exception):  # no stderr, or none with a descriptor
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
