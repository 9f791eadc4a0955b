"""The interpreter as a crawl needs it: how often threads take turns, and how often garbage is looked for."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

#: Seconds between two interpreter lock changes: the store's thread gets its turn five times sooner than by default.
SWITCH_S = 0.001

#: New objects between two collections of the youngest garbage. A page makes thousands that reference counts free; looking
#: through them each 700, as is the default, took 5 % of the time, and here finds a few cycles of aiohttp's.
COLLECT_EVERY = 20_000


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """The interpreter as a crawl needs it, and afterwards as it was."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(max(COLLECT_EVERY, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
