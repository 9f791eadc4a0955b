"""A storm of kills slows a crawl down; it neither stops it nor costs anybody."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.crash.storm import storm
from tests.crash.trial import Ground, Trial


def test_a_crawl_that_is_killed_all_the_time_completes(medium: Ground) -> None:
    """Up to 60 kills 3 to 8 requests apart: the same records, no dead letter, and at most two windows of requests repeated a kill.

    A crawl that was quicker than its kills is followed by another one, until there were kills enough.
    """
    medium.quiet("shelf")
    rng, kills = random.Random(11), 0
    while kills < 15:
        kills += stormed(medium, rng)


def stormed(medium: Ground, rng: random.Random) -> int:
    """One crawl in a storm, and what holds of it; how many kills there were. No lease is over in a slow moment."""
    trial = medium.trial(lease=60, **{"solo-backoff": "0.05,0.05"})
    asked = medium.site.stats.requests
    kills = storm(trial, kills=60, every=(3, 8), rng=rng)
    trial.finish()
    assert trial.faults() == []
    assert medium.site.stats.requests - asked <= 320 + kills * repeated_max(trial)
    return kills


def repeated_max(trial: Trial) -> int:
    """Two windows at the most are claimed, and with them go the robots.txt of three hosts."""
    return 2 * int(str(trial.flags["commit-pages"])) + 3


def test_a_storm_in_which_each_loss_counts_kills_the_innocent(new_trial: Callable[..., Trial]) -> None:
    """The twin that must fail: with every lost try held against its task, a few kills are enough, in one of a few crawls."""
    rng = random.Random(5)
    assert any(loses_innocents(new_trial(**{"suspect-after": 1, "solo-losses": 1, "solo-backoff": "0,0"}), rng) for _ in range(10))


def loses_innocents(trial: Trial, rng: random.Random) -> bool:
    """Whether a storm made a task dead; it may have been over before its second kill."""
    storm(trial, kills=40, every=(1, 4), rng=rng)
    trial.finish(ok=frozenset({0, 3, 6}))
    dead = set(trial.books().dead)
    assert dead <= {"killed its worker"}
    assert bool(trial.faults()) == bool(dead)
    return bool(dead)
