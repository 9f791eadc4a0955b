"""A storm of kills slows a crawl down; it neither stops it nor costs anybody."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.crash.storm import storm
from tests.crash.trial import Ground, Trial


def test_a_crawl_that_is_killed_all_the_time_completes(medium: Ground) -> None:
    """Up to 60 kills 3 to 8 requests apart: the same records, no dead letter, and at most two windows of requests repeated a kill."""
    trial = medium.trial(**{"solo-backoff": "0.05,0.05"})
    medium.quiet("shelf")
    asked = medium.site.stats.requests
    kills = storm(trial, kills=60, every=(3, 8), rng=random.Random(11))
    assert kills >= 15
    trial.finish()
    assert trial.faults() == []
    assert medium.site.stats.requests - asked <= 320 + kills * repeated_max(trial)


def repeated_max(trial: Trial) -> int:
    """Two windows at the most are claimed, and with them go the robots.txt of three hosts."""
    return 2 * int(str(trial.flags["commit-pages"])) + 3


def test_a_storm_in_which_each_loss_counts_kills_the_innocent(new_trial: Callable[..., Trial]) -> None:
    """The twin that must fail: with every lost try held against its task, a few kills are enough."""
    trial = new_trial(**{"suspect-after": 1, "solo-losses": 1, "solo-backoff": "0,0"})
    storm(trial, kills=40, every=(1, 4), rng=random.Random(5))
    trial.finish(ok=frozenset({0, 3, 6}))
    assert trial.faults()
    assert set(trial.books().dead) == {"killed its worker"}
