"""The heartbeat: a thread with a connection of its own, and what this worker may still do.

The lease is counted from when a heartbeat was *sent*, on a clock that goes on while the machine
sleeps: counted from the answer it would end too late. A worker past `lease - margin` sends nothing
more; what it holds is dropped, and it takes its shards over anew (ARCHITECTURE.md, section 5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from limpet.errors import LimpetError, StoreError
from limpet.settings import Settings
from limpet.store.lease import Watch, Worker, beat
from limpet.store.opening import Store

log = logging.getLogger("limpet.heart")

#: Looks at other workers' rows, in heartbeats: a death is told within lease + 3 heartbeats.
LOOK_EVERY = 1


def boottime_s() -> float:
    """Seconds since this machine started, asleep or not; where the system has no such clock, CLOCK_MONOTONIC."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Heart:
    """Beats for one worker until it is stopped; knows whether the worker may still send and write."""

    def __init__(self, store: Store, worker: Worker, settings: Settings, *, clock: Callable[[], float] = boottime_s) -> None:
        self._store = store
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._sent_s = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="limpet-heart", daemon=True)
        self.is_dead = False  # certified by somebody: this worker's id is used up
        self.is_over = False  # once the lease was over here, tries were dropped on its word: a late beat does not bring them back
        self.found_dead: list[str] = []  # workers that this one certified

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its connection."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._settings.lease_s)

    def sent(self, at_s: float) -> None:
        """A commit is a heartbeat too: it was sent at `at_s`, and it came through."""
        self._sent_s = max(self._sent_s, at_s)

    def now(self) -> float:
        """The clock that the lease is counted on."""
        return self._clock()

    @property
    def may_send(self) -> bool:
        """Whether the lease, less its margin, still runs: asked before each request. Once told no, it stays no."""
        if self._clock() >= self._sent_s + self._settings.lease_s - self._settings.margin_s:
            self.is_over = True
        return not (self.is_dead or self.is_over)

    def _beat_on(self) -> None:
        store: Store | None = None
        watch = Watch(self._clock)
        try:
            while not self._stop.wait(self._settings.heartbeat_s):
                try:
                    store = store or self._store.again()
                    self._beat_once(store, watch)
                except StoreError as error:
                    log.debug("heartbeat failed, tried again: %s", error)
                    if store is not None:
                        store.close()
                        store = None
                except LimpetError as error:
                    log.warning("heartbeat: %s", error)
        finally:
            if store is not None:
                store.close()

    def _beat_once(self, store: Store, watch: Watch) -> None:
        at_s = self._clock()
        if beat(store.db, self._worker):
            self.sent(at_s)
        else:
            self.is_dead = True
            return
        self.found_dead += watch.look(store.db, self._worker.id)
