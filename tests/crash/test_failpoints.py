"""A crawl that dies, fails or freezes at each step of its work ends, run again, with the records of one that did not."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from limpet import failpoint
from tests.crash.judge import acks_in, open_tasks, workers
from tests.crash.trial import Trial

#: Steps that a crawl comes to once; every other one at least three times.
ONCE = {*failpoint.JOB_STEPS, "before_retire"}

#: Where an exception ends one task, not the process: in the engine's part of a try, and in the handler.
OF_A_TASK = {
    "before_send": "internal:FailpointRaised",
    "after_answer": "internal:FailpointRaised",
    "between_emits": "handler:FailpointRaised",
}

CASES = [(name, hit) for name in failpoint.ALL for hit in ((1,) if name in ONCE else (1, 3))]


def place(trial: Trial, name: str, hit: int, action: str) -> dict[str, str]:
    """The hooks that make a life do it, and say so."""
    return {"failpoint": f"{name}@{hit}={action}", "failpoint_log": str(trial.folder / "fired")}


def fired(trial: Trial) -> list[str]:
    """The failpoints that did what they should."""
    log = trial.folder / "fired"
    return log.read_text().split() if log.exists() else []


@pytest.mark.parametrize(("name", "hit"), CASES)
def test_a_crawl_that_is_killed_at_a_step_goes_on_from_there(trial: Trial, name: str, hit: int) -> None:
    """What was acknowledged is there at once; the next life ends with the records of a crawl that nothing happened to."""
    code, _ = trial.run(**place(trial, name, hit, "kill"))
    assert (code, fired(trial)) == (-9, [name])
    assert trial.wounds() == []
    trial.finish()
    assert trial.faults() == []


@pytest.mark.parametrize("name", failpoint.ALL)
def test_an_exception_at_a_step_costs_at_most_the_task_at_hand(trial: Trial, name: str) -> None:
    """In a task it is that task's dead letter, which `retry` brings back; elsewhere the process ends, and resumes."""
    code, printed = trial.run(**place(trial, name, 1 if name in ONCE else 3, "raise"))
    assert fired(trial) == [name]
    assert trial.wounds() == []
    if name in OF_A_TASK:
        assert code == 3, printed
        assert trial.faults(dead={OF_A_TASK[name]: 1}) == []
        assert trial.limpet("retry")[0] == 0
    else:
        assert code == 1, printed
    trial.finish()
    assert trial.faults() == []


@pytest.mark.parametrize("name", failpoint.ALL)
def test_a_crawl_that_freezes_at_a_step_for_longer_than_its_lease_goes_on(new_trial: Callable[..., Trial], name: str) -> None:
    """Once awake it has its lease renewed, or takes its own shards over, before it sends or writes anything."""
    trial = new_trial(lease=0.4)
    born = trial.start(**place(trial, name, 1 if name in ONCE else 2, "stop"))
    assert born.until(lambda: born.is_frozen)
    assert fired(trial) == [name]
    if name not in failpoint.JOB_STEPS:
        assert born.until(lambda: all(is_over for _, _, is_over in workers(trial.db)))
    born.signal(signal.SIGCONT)
    assert born.ended() == 0, born.printed()
    assert trial.faults() == []


def test_a_heartbeat_that_comes_late_does_not_bring_back_a_lease_that_was_over(new_trial: Callable[..., Trial]) -> None:
    """What a try dropped since the lease was over would stay running for ever, if its worker went on as if nothing had been."""
    trial = new_trial(lease=600)  # no other lease is over in a slow moment
    code, printed = trial.run(mutants=["lapses_for_a_moment"])
    assert code == 0, printed
    assert len(workers(trial.db)) == 2  # it began anew, once
    assert trial.faults() == []


def test_a_late_heartbeat_that_is_believed_leaves_a_task_to_nobody(new_trial: Callable[..., Trial]) -> None:
    """The twin: everything else ends, and the one task waits for a try that was dropped."""
    trial = new_trial(lease=600)
    seen: dict[tuple[int, tuple[str, ...]], float] = {}  # what there was, and since when

    def stands() -> bool:
        acks = len(acks_in(trial.acks)) if trial.acks.exists() else 0
        found = (acks, tuple(open_tasks(trial.db)) if acks else ())
        return time.monotonic() - seen.setdefault(found, time.monotonic()) > 2 and found[1] == ("running",)

    born = trial.start(mutants=["lapses_for_a_moment", "forgets_that_the_lease_was_over"])
    assert born.until(stands), born.printed()
    born.kill()
    assert open_tasks(trial.db) == ["running"]
    assert len(workers(trial.db)) == 1


@pytest.mark.parametrize("commit", [1, 2, 3])
def test_a_commit_in_two_transactions_is_found_out(trial: Trial, commit: int) -> None:
    """The twin that must fail: what dies between a transaction for the tasks and one for their records leaves a broken state."""
    code, printed = trial.run(mutants=["two_transactions"], constants={"tests.crash.mutants.DIES_BETWEEN": commit})
    assert code == -9, printed
    assert trial.wounds()
    trial.finish(ok=frozenset({0, 6, 8}))
    assert trial.faults()


def test_every_failpoint_of_the_product_is_in_the_list() -> None:
    """A name that stands in the code, and not in the list, would be tested by nobody."""
    package = Path(failpoint.__file__).parent
    called = {name for file in package.rglob("*.py") for name in re.findall(r"\bfailpoint\(\"(\w+)\"\)", file.read_text(encoding="utf-8"))}
    assert called | {"between_emits"} == set(failpoint.NAMES)  # that one is for handlers, which are users' code
