"""A machine that has too little: few open files, little memory. The crawl completes, or says what it lacks and goes on later."""

from __future__ import annotations

import pytest

from tests.crash.trial import Trial

MIB = 2**20


def test_a_crawl_makes_do_with_64_open_files(trial: Trial) -> None:
    """Eight requests at a time, and three connections to the database."""
    code, printed = trial.run(files_max=64)
    assert code == 0, printed
    assert trial.faults() == []


@pytest.mark.parametrize("files", [8, 10])
def test_a_crawl_that_may_open_too_few_files_says_so(trial: Trial, files: int) -> None:
    """A message that names the file that could not be opened, and no traceback."""
    code, printed = trial.run(files_max=files)
    assert code in (2, 4), printed
    assert "open" in printed
    assert "Traceback" not in printed
    trial.finish()
    assert trial.faults() == []


@pytest.mark.parametrize("memory", [8, 24, 48])
def test_a_crawl_that_has_too_little_memory_ends_and_goes_on_with_more(trial: Trial, memory: int) -> None:
    """Wherever it runs out: what was acknowledged is there, no page is blamed, and no traceback of ours is printed.

    A thread that lacks memory for its first step leaves whoever started it waiting for ever (CPython's `Thread.start` waits for a
    sign that never comes); such a process has to be killed, and loses nothing either.
    """
    try:
        code, printed = trial.run(memory_more=memory * MIB)
    except AssertionError as error:
        if "in thread started by" not in str(error):  # else it was killed
            raise
    else:
        assert code not in (0, 3, 6), printed
        assert "Traceback" not in printed
    assert trial.wounds() == []
    trial.finish()
    assert trial.faults() == []


def test_a_crawl_makes_do_with_little_memory(trial: Trial) -> None:
    """The twin: with room for its threads and pages it completes."""
    code, printed = trial.run(memory_more=1024 * MIB)
    assert code == 0, printed
    assert trial.faults() == []
