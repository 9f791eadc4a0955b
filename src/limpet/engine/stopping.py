"""Wishes to stop: by signals of this process's own, and by whoever started it, each wish counted once.

Ctrl-C on a terminal reaches a whole process group, a service manager may signal every process of a
service, and the process that started this one passes on what it got. So each way is counted by itself, and
the larger count holds: one wish stays one, however many ways it came by.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

#: Bytes read at a time from whoever started this process: each byte is a wish.
WISHES_READ = 64

#: Who listens to signals now, the innermost last: each hears every signal, and only the outermost's end lets them go.
_LISTENERS: list[Stopping] = []


class Stopping:
    """Counts wishes to stop; `heard` is called once for each."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._by_signal = 0
        self._by_parent = 0
        self.count = 0

    @contextlib.contextmanager
    def listening(self, *, to_signals: bool, to_parent: int | None = None) -> Iterator[None]:
        """Listen while the block runs. `to_parent`: a descriptor; a byte is a wish, and its end, the parent's death, is one too."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM) if to_signals else ()
        if to_signals:  # what whoever listens around this block has heard, holds in it too
            self._by_signal = max([self._by_signal, *(listener._by_signal for listener in _LISTENERS)])
            _LISTENERS.append(self)
        for number in numbers:
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, _signalled)
        if to_parent is not None:
            os.set_blocking(to_parent, False)
            loop.add_reader(to_parent, self._told, to_parent)
        try:
            self._settle()
            yield
        finally:
            if to_signals:
                _LISTENERS.remove(self)
            for number in numbers if not _LISTENERS else ():
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                    loop.remove_signal_handler(number)
            if to_parent is not None:
                loop.remove_reader(to_parent)

    def signalled(self) -> None:
        """A signal has come."""
        self._by_signal += 1
        self._settle()

    def _told(self, descriptor: int) -> None:
        try:
            wishes = os.read(descriptor, WISHES_READ)
        except BlockingIOError:
            return
        except OSError:
            wishes = b""
        if not wishes:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._by_parent = self._by_parent + len(wishes) if wishes else max(1, self._by_parent)
        self._settle()

    def _settle(self) -> None:
        while self.count < max(self._by_signal, self._by_parent):
            self.count += 1
            self._heard()


def _signalled() -> None:
    for listener in list(_LISTENERS):
        listener.signalled()
