"""One bad page costs itself: whatever it does to the process, its handler or the database, the rest of the crawl completes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from tests.crash.trial import SPIDERS, Ground, Trial

NewTrial = Callable[..., Trial]

#: Waits after a death, cut short: 5 s and 2 min are for storms of kills.
SOON = {"solo-backoff": "0.05,0.05"}


def products(trial: Trial) -> set[int]:
    """The numbers of the products that are stored."""
    connection = apsw.Connection(str(trial.db))
    found = {number for (number,) in connection.execute("SELECT number FROM thorn_product")}
    connection.close()
    return found


def deaths(trial: Trial, *, most: int, by: int = -signal.SIGKILL) -> int:
    """How often the crawl dies until a life ends by itself, or so often at the most."""
    for number in range(most):
        code, printed = trial.run()
        if code != by:
            assert code == 3, printed
            return number
    return most


# -- a page that kills the process --------------------------------------------------------------


def test_a_page_that_kills_the_process_is_one_dead_letter(large: Ground) -> None:
    """Among 500: three deaths in a crowd, three alone, and 499 products are stored."""
    trial = large.trial("thorn", **SOON, **{"commit-pages": 100})
    trial.params.update(bad=250, kind="kill")
    assert 1 <= deaths(trial, most=20) <= 6
    books = trial.books()
    assert books.dead == {"killed its worker": 1}
    assert not books.fault
    assert products(trial) == set(range(500)) - {250}
    trial.params.clear()
    assert trial.limpet("retry")[0] == 0
    trial.finish()
    assert trial.faults() == []


def test_a_page_that_makes_the_process_crash_is_one_dead_letter(new_trial: NewTrial) -> None:
    """A segmentation fault in somebody's library, say."""
    trial = new_trial("thorn", **SOON)
    trial.params.update(bad=11, kind="segfault")
    assert 1 <= deaths(trial, most=20, by=-signal.SIGSEGV) <= 6
    assert trial.books().dead == {"killed its worker": 1}
    assert products(trial) == set(range(24)) - {11}


def test_two_pages_that_kill_the_process_are_two_dead_letters(new_trial: NewTrial) -> None:
    """Each is found out alone; nobody who ran beside one is blamed."""
    trial = new_trial("thorn", **SOON)
    trial.params.update(bad="5,6", kind="kill")
    assert 2 <= deaths(trial, most=20) <= 12
    assert trial.books().dead == {"killed its worker": 2}
    assert products(trial) == set(range(24)) - {5, 6}


def test_without_suspects_a_page_that_kills_the_process_does_so_for_ever(new_trial: NewTrial) -> None:
    """The twin that must fail: nothing is ever found out, and the crawl never ends."""
    trial = new_trial("thorn", **{"suspect-after": 10**6})
    trial.params.update(bad=5, kind="kill")
    assert deaths(trial, most=9) == 9
    assert not trial.books().dead


# -- a handler that fails -----------------------------------------------------------------------


def copy_of_thorn(trial: Trial) -> Path:
    """A spider file of the trial's own, to be mended."""
    trial.file = trial.folder / "thorn.py"
    trial.file.write_text((SPIDERS / "thorn.py").read_text())
    return trial.file


def test_a_handler_that_always_fails_pauses_the_job_and_goes_on_when_it_is_mended(medium: Ground) -> None:
    """After 50 in a row: exit code 7, again and again, until the code is another; `retry` brings the dead letters back."""
    trial = medium.trial("thorn", breaker=50)
    file = copy_of_thorn(trial)
    trial.params.update(bad="all", kind="raise")
    code, printed = trial.run()
    assert code == 7, printed
    assert "product failed 50 times in a row" in printed
    assert 50 <= trial.books().dead["handler:LookupError"] < 70
    requests = medium.site.stats.requests
    assert trial.run()[0] == 7
    assert medium.site.stats.requests == requests
    file.write_text(file.read_text().replace("raise LookupError", "return  # raise LookupError"))
    code, printed = trial.run()
    assert code == 3, printed
    assert trial.limpet("retry")[0] == 0
    trial.finish()
    assert trial.faults() == []


def test_retry_alone_ends_a_pause(medium: Ground) -> None:
    """The site has been mended, not the spider."""
    trial = medium.trial("thorn", breaker=50)
    trial.params.update(bad="all", kind="raise")
    assert trial.run()[0] == 7
    trial.params.clear()
    assert trial.run()[0] == 7
    assert trial.limpet("retry")[0] == 0
    trial.finish()
    assert trial.faults() == []


def test_without_the_breaker_a_broken_handler_burns_every_page(medium: Ground) -> None:
    """The twin that must fail: 150 pages asked for, 150 dead letters."""
    trial = medium.trial("thorn", breaker=10**6)
    trial.params.update(bad="all", kind="raise")
    assert trial.run()[0] == 3
    assert trial.books().dead == {"handler:LookupError": 150}


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_a_handler_that_blocks_costs_its_own_task(new_trial: NewTrial, kind: str) -> None:
    """It is interrupted at its time-out, and struck; the others complete, in one life."""
    trial = new_trial("thorn", **{"handler-timeout": 1, "strikes": 2})
    trial.params.update(bad=7, kind=kind)
    code, printed = trial.run()
    assert code == 3, printed
    assert trial.books().dead == {"handler_timeout": 1}
    assert products(trial) == set(range(24)) - {7}


# -- a value that the database refuses --------------------------------------------------------------


def half_done(trial: Trial) -> set[int]:
    """Stop in the middle of the crawl; the products that are still to come."""
    code, printed = trial.run(flags={"max-pages": 24})
    assert code == 5, printed
    return set(range(24)) - products(trial)


def refuse(trial: Trial, condition: str) -> None:
    """Let the database refuse some products."""
    connection = apsw.Connection(str(trial.db))
    connection.execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON thorn_product WHEN {condition} BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )
    connection.close()


def allow(trial: Trial) -> None:
    """Let it take everything again."""
    connection = apsw.Connection(str(trial.db))
    connection.execute("DROP TRIGGER refuse")
    connection.close()


def test_a_record_that_the_database_refuses_is_one_dead_letter(new_trial: NewTrial) -> None:
    """The batch is cut to pieces until the row is alone; the rest commits. What refused it is no part of the schema: verify says so."""
    trial = new_trial("thorn")
    bad = max(half_done(trial))
    refuse(trial, f"NEW.number = {bad}")
    code, printed = trial.run()
    assert code == 8, printed
    assert "the trigger refuse" in printed
    assert trial.books().dead == {"poison": 1}
    assert products(trial) == set(range(24)) - {bad}
    allow(trial)
    assert trial.limpet("verify", "--full")[0] == 0
    assert trial.limpet("retry")[0] == 0
    trial.finish()
    assert trial.faults() == []


def test_a_database_that_refuses_every_record_blames_no_page(new_trial: NewTrial) -> None:
    """More than a few in one batch are a broken release: the crawl stops and says so, and goes on when it is mended."""
    trial = new_trial("thorn", **{"poison-rows-max": 1})
    assert half_done(trial)
    refuse(trial, "1")
    code, printed = trial.run()
    assert code not in (0, 3, 6), printed
    assert "a broken release, not poison" in printed
    assert len(products(trial)) < 24
    allow(trial)
    trial.limpet("retry")
    trial.finish()
    assert trial.faults() == []
