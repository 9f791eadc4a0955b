"""Kill a crawl again and again, by its progress."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.crash.trial import Trial

#: Seconds in which something happens: a suspect waits for two minutes after it has run alone twice.
SUSPECTS_S = 200.0


def storm(trial: Trial, *, kills: int, every: tuple[int, int], rng: random.Random, after_kill: Callable[[], None] | None = None) -> int:
    """Kill each life after so many requests; how many kills there were until one ended by itself.

    By requests that the site has seen, not by the clock: on a busy machine that would hit nothing but start-up. A few
    milliseconds are added, so that a kill falls anywhere in a batch.
    """
    for kill in range(kills):
        wanted = trial.ground.site.stats.requests + rng.randint(*every)
        born = trial.start()
        if not born.until(partial(_has_asked, trial, wanted), SUSPECTS_S):
            assert born.ended() in (0, 3, 6), born.printed()
            return kill
        if born.wait(rng.uniform(0, 0.02)) is not None:
            return kill
        assert born.kill() == -9
        if after_kill:
            after_kill()
    return kills


def _has_asked(trial: Trial, requests: int) -> bool:
    return trial.ground.site.stats.requests >= requests
