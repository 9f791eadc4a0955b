"""A crawl that is killed at, or refused, any of its writes, syncs and deletions goes on to the records of an undisturbed one.

The long form takes the first 300 of each, and more errors: `python -m tests.crash.long --only sweep`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest

from tests.crash.sweep import ERRORS, IMPATIENT, Fault, calls_of, failed, has_strace, killed, run_traced
from tests.crash.trial import Trial

pytestmark = pytest.mark.skipif(
    not has_strace() and os.environ.get("CI") != "true", reason="strace is not installed here, or may not trace"
)

NewTrial = Callable[..., Trial]

#: Points of a crawl of 78 tasks: it makes at least 30 syncs, 500 writes, 4 deletions and 2 truncations.
POINTS: dict[str, Iterable[int]] = {
    "fdatasync": range(1, 29),
    "pwrite64": (*range(1, 26), *range(50, 500, 75)),
    "unlink": range(1, 5),
    "ftruncate": range(1, 3),
}
REFUSED = {"fdatasync": (1, 2, 3, 4, 6, 9, 14, 20, 26), "pwrite64": (1, 2, 3, 8, 20, 45, 90, 150, 220, 300, 400)}

#: EIO at each, the other two at every second one.
REFUSALS = [
    Fault(call, n, error, lasts=n % 3 == 0)
    for call, points in REFUSED.items()
    for turn, n in enumerate(points)
    for error in ERRORS
    if error == "EIO" or turn % 2 == ERRORS.index(error) % 2
]


@pytest.mark.parametrize(("call", "n"), [(call, n) for call, points in POINTS.items() for n in points])
def test_a_crawl_that_is_killed_at_a_system_call_goes_on_from_there(trial: Trial, call: str, n: int) -> None:
    """The signal comes on entry: the call has not acted, and whatever came before it has."""
    assert killed(trial, Fault(call, n)) == []


@pytest.mark.parametrize("fault", REFUSALS, ids=str)
def test_a_crawl_whose_disk_refuses_a_call_says_so_or_goes_on(trial: Trial, fault: Fault) -> None:
    """Once, or (every third) from then on: no proof passes with records missing, and the next life completes."""
    assert failed(trial, fault) == []


def test_a_sweep_of_faults_that_never_fire_fails(trial: Trial) -> None:
    """The trap of every sweep: beyond the last call nothing happens, and everything would pass."""
    assert calls_of(trial, "fdatasync") < 1000
    assert "never fired" in killed(trial, Fault("fdatasync", 1000))[0]
    assert "never fired" in failed(trial, Fault("pwrite64", 60_000, "EIO"))[0]


def test_a_sweep_of_kills_finds_a_commit_in_two_transactions(new_trial: NewTrial) -> None:
    """The twin that must fail: somewhere between the two, a kill leaves tasks that are done without their records."""
    assert any(wounds_of_the_mutant(new_trial(), n) for n in range(15, 40))


def wounds_of_the_mutant(trial: Trial, n: int) -> list[str]:
    """What a kill at a sync leaves of a crawl whose commits are two transactions."""
    run_traced(trial, Fault("fdatasync", n), mutants=["two_transactions"])
    return trial.wounds()


def test_a_sweep_of_errors_finds_a_store_that_is_deaf_to_them(new_trial: NewTrial) -> None:
    """The twin that must fail: a COMMIT that could not be written, and is taken for done, acknowledges what is lost."""
    assert any(loses_what_it_acknowledged(new_trial(), n) for n in range(200, 500, 30))


def loses_what_it_acknowledged(trial: Trial, n: int) -> bool:
    """Whether a write that failed in a crawl which is deaf to errors cost anything: those of some commits hold no records."""
    run_traced(trial, Fault("pwrite64", n, "EIO"), mutants=["deaf_to_errors"], constants=IMPATIENT)
    return any("acknowledged and gone" in wound for wound in trial.wounds())
