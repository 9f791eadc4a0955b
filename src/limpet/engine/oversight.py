"""A job as a whole, whoever works on it: its counts while it runs, and what several processes of one command ended in.

What a crew of processes comes to is told by the database alone, once, after all of them have ended
(`verdict`); what they said themselves only explains it. Nothing here starts a process: `cli/crew.py` does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from limpet.engine.report import EXIT_INTERNAL, EXIT_LIMIT, EXIT_STALLED, EXIT_STOPPED, EXIT_USAGE
from limpet.errors import LimpetError
from limpet.store.standing import Counts

log = logging.getLogger("limpet.oversight")

#: Seconds between two looks at the counts, at least; and no more than a twentieth of the time is spent on looking.
LOOK_S = 1.0
LOOK_SHARE = 20


@dataclass(frozen=True, slots=True)
class Ended:
    """What one process of a crew ended in, in its own words."""

    exit_code: int
    message: str = ""
    requests: int = 0


class Crew(Protocol):
    """Processes that do the work of one job."""

    @property
    def living(self) -> int:
        """How many there are now."""

    async def work(self) -> Sequence[Ended]:
        """Keep them at work until they end by themselves; what each place in the crew ended in."""

    def stop(self) -> None:
        """Pass a wish to stop on, once to each; a second one means sooner."""


class Gauge:
    """The counts of a job, read again and again."""

    def __init__(self, read: Callable[[], Awaitable[Counts]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self.counts: Counts | None = None
        self.done_per_s = 0.0
        self.on_read: Callable[[Counts], None] = lambda counts: None

    async def keep(self) -> None:
        """Read on until cancelled. A database that is away leaves the last counts."""
        read_s = 0.0
        while True:
            began = self._clock()
            try:
                counts = await self._read()
            except LimpetError as error:
                log.debug("the counts could not be read: %s", error)
            else:
                if self.counts is not None and began > read_s:
                    self.done_per_s = max(0.0, (counts.done - self.counts.done) / (began - read_s))
                self.counts, read_s = counts, began
                self.on_read(counts)
            await asyncio.sleep(max(LOOK_S, LOOK_SHARE * (self._clock() - began)))


def verdict(ended: Sequence[Ended], *, stops: int, pages_done: int, pages_max: int) -> tuple[int, str]:
    """Exit code and message of a crew that has ended while its job is neither complete nor stopped by anybody.

    >>> verdict([Ended(7, "only parked tasks are left"), Ended(4)], stops=0, pages_done=3, pages_max=0)
    (7, 'only parked tasks are left')
    >>> verdict([Ended(4), Ended(4)], stops=1, pages_done=3, pages_max=0)[0]
    4
    """
    if stops:
        return EXIT_STOPPED, "stopped; run the same command again to go on"
    if pages_max and pages_done >= pages_max:
        return EXIT_LIMIT, f"the page limit of {pages_max} is reached; run with a larger --max-pages to go on"
    for code in (EXIT_INTERNAL, EXIT_USAGE, EXIT_STALLED, EXIT_LIMIT):
        for one in ended:
            if one.exit_code == code:
                return code, one.message or "a worker ended so, and did not say why"
    said = next((one.message for one in ended if one.message), "stopped; run the same command again to go on")
    return EXIT_STOPPED, said
