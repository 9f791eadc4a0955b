"""A deadline on every call to a server: one thread that closes the socket of a call which outlives it.

A black hole after COMMIT answers TCP's keep-alives for ever, so no setting of the driver ends the wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

#: Seconds between two looks of the thread.
TICK_S = 0.25


class Deadlines:
    """Watches the calls of one connection, one at a time; its thread runs from the first call until `end`."""

    def __init__(self) -> None:
        self._until = 0.0
        self._handle = -1
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.cuts = 0  # calls that it ended

    @contextlib.contextmanager
    def over(self, handle: int, limit_s: float) -> Iterator[None]:
        """Close the socket `handle` where the block takes longer than the limit."""
        if self._thread is None:
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._watch, args=(self._ended,), name="limpet-deadline", daemon=True)
            self._thread.start()
        with self._lock:
            self._handle, self._until = handle, time.monotonic() + limit_s
        try:
            yield
        finally:
            with self._lock:
                self._handle = -1

    def end(self) -> None:
        """Let the thread go; the next call begins another."""
        self._ended.set()
        self._thread = None

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(TICK_S):
            with self._lock:
                if self._handle >= 0 and time.monotonic() > self._until:
                    cut(self._handle)
                    self._handle = -1
                    self.cuts += 1


def cut(handle: int) -> None:
    """Shut a socket down both ways, whoever is reading from it."""
    with contextlib.suppress(OSError):
        line = socket.socket(fileno=os.dup(handle))
        try:
            line.shutdown(socket.SHUT_RDWR)
        finally:
            line.close()
