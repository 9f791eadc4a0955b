"""Whatever signal comes, and whenever: what was acknowledged is there, and the same command goes on."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from limpet.store.sqlite import lock_holder_pid
from tests.crash.judge import owners, workers
from tests.crash.nursery import Born
from tests.crash.trial import Ground, Trial

NewTrial = Callable[..., Trial]

#: Steps at which a worker may freeze with no transaction open, so that another one takes its shards over.
OUTSIDE = ["after_answer", "before_freeze", "after_stage", "after_commit", "after_acknowledge"]

#: Steps at which it holds the write lock of the file.
INSIDE = ["after_fence", "after_records", "after_ledger", "takeover_reclaim"]


def freeze(trial: Trial, step: str, *, hit: int = 3, **hooks: object) -> Born:
    """A life that has frozen at a step."""
    born = trial.start(failpoint=f"{step}@{hit}=stop", failpoint_log=str(trial.folder / "fired"), **hooks)
    assert born.until(lambda: born.is_frozen), born.printed()
    assert (trial.folder / "fired").read_text() == f"{step}\n"
    return born


def has_asked(ground: Ground, requests: int) -> bool:
    """Whether the site has seen so many requests."""
    return ground.site.stats.requests >= requests


def freeze_outside(new_trial: NewTrial, step: str, **hooks: object) -> tuple[Trial, Born]:
    """A life that has frozen at a step with no transaction open: another thread of it may be in the middle of one, then again."""
    for hit in range(3, 12):
        trial = new_trial(lease=0.5)
        born = freeze(trial, step, hit=hit, **hooks)
        if lock_holder_pid(str(trial.db)) != born.pid:
            return trial, born
        born.kill()
    raise AssertionError(f"inside a transaction each time at {step}")


# -- Ctrl-C and SIGTERM -----------------------------------------------------------------------


def test_ctrl_c_twice_at_any_moment_leaves_a_crawl_that_goes_on(slow: Ground) -> None:
    """Ten times, each time 0.2 s apart, at moments drawn by how many pages this life has asked for: in as many crawls as it takes."""
    trial, rng = slow.trial(), random.Random(7)
    codes = []
    moments = [1, *(rng.randrange(30) for _ in range(9))]
    while moments:
        born = trial.start()
        asked = slow.site.stats.requests
        if not born.until(partial(has_asked, slow, asked + moments[0])):
            assert born.ended() in (0, 6), born.printed()  # it was complete before
            assert trial.faults() == []
            trial = slow.trial()
            continue
        del moments[0]
        born.signal(signal.SIGINT)
        born.wait(0.2)
        born.signal(signal.SIGINT)
        codes.append(born.ended())
        # The second one may come when all is said, and the process is about to end.
        assert codes[-1] in (0, 4, 6) or (codes[-1] == -signal.SIGINT and "run the same command again" in born.printed())
        assert "Traceback" not in born.printed()
        assert trial.wounds() == []
    assert len(codes) == 10
    trial.finish()
    assert trial.faults() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_crawl_cleanly(slow: Ground, number: signal.Signals) -> None:
    """Exit code 4: what was in hand is stored or given back, no shard is owned, and nothing counts against any task."""
    trial = slow.trial()
    born = trial.held()
    assert trial.acks.stat().st_size > 500
    born.signal(number)
    trial.let_go()
    assert born.ended() == 4, born.printed()
    assert "run the same command again" in born.printed()
    assert "running" not in trial.books().states
    assert trial.wounds() == []
    assert not list(trial.folder.glob("*.lock"))
    trial.finish()
    assert trial.faults() == []


# -- frozen alone -----------------------------------------------------------------------------


def test_a_worker_that_was_stopped_for_longer_than_its_lease_goes_on(slow: Ground) -> None:
    """Three times at drawn moments, with `--lease 1`: it neither ends nor loses anything, and no former owner writes again."""
    trial, rng, stops = slow.trial(lease=1), random.Random(3), 0
    born = trial.start()
    while stops < 3:
        if born.until(partial(has_asked, slow, slow.site.stats.requests + rng.randrange(20, 60))):
            born.signal(signal.SIGSTOP)
        if born.until(partial(is_stopped_for_longer_than_its_lease, trial, born)):
            born.signal(signal.SIGCONT)
            stops += 1
        else:  # it had ended before
            ends_well(trial, born)
            trial = slow.trial(lease=1)
            born = trial.start()
    ends_well(trial, born)


def is_stopped_for_longer_than_its_lease(trial: Trial, born: Born) -> bool:
    """Whether a life is frozen, and the lease of every worker over."""
    return born.is_frozen and all(is_over for _, _, is_over in workers(trial.db))


def ends_well(trial: Trial, born: Born) -> None:
    """The life completes the crawl, and nobody wrote into a shard that another one had by then."""
    assert born.ended() == 0, born.printed()
    assert comes_back(trial) == []
    assert trial.faults() == []


def comes_back(trial: Trial) -> list[str]:
    """Workers that wrote into a shard after another one had taken it over."""
    return sorted({owner for line in owners(trial.db).values() for owner in line if line.count(owner) > 1})


# -- frozen while another worker is there ---------------------------------------------------------


@pytest.mark.parametrize("step", OUTSIDE)
def test_a_worker_that_wakes_after_another_took_its_shards_writes_nothing(new_trial: NewTrial, step: str) -> None:
    """The other ends the crawl; the one that wakes finds itself dead, begins again under another name, and ends well."""
    trial, zombie = freeze_outside(new_trial, step)
    dead = {worker for worker, pid, _ in workers(trial.db) if pid == zombie.pid}
    code, printed = trial.run()
    assert code == 0, printed
    batches = owners(trial.db)
    assert all(line[-1] not in dead for line in batches.values())
    zombie.signal(signal.SIGCONT)
    assert zombie.ended() in (0, 6), zombie.printed()
    after = owners(trial.db)
    assert all(after[shard][: len(line)] == line and not dead & set(after[shard][len(line) :]) for shard, line in batches.items())
    assert comes_back(trial) == []
    assert trial.faults() == []


def test_a_worker_without_a_fence_is_found_out(new_trial: NewTrial) -> None:
    """The twin that must fail: with neither lease nor fence checked, the one that wakes writes, and it shows."""
    trial, zombie = freeze_outside(new_trial, "after_stage", mutants=["no_fence"])
    code, printed = trial.run()
    assert code == 0, printed
    zombie.signal(signal.SIGCONT)
    code = zombie.ended()
    assert comes_back(trial) or code == 8 or trial.faults()


@pytest.mark.parametrize("step", INSIDE)
def test_a_worker_that_freezes_inside_a_transaction_is_named_and_can_be_ended(new_trial: NewTrial, step: str) -> None:
    """It holds the file's write lock: a second process names its pid, and goes on once that is ended."""
    trial = new_trial(lease=0.5)
    frozen = freeze(trial, step)
    code, printed = trial.run(constants={"limpet.engine.onethread.BUSY_S": 0.5})
    assert code == 4, printed
    named = re.search(r"locked by process (\d+)", printed)
    assert named, printed
    assert int(named[1]) == frozen.pid
    frozen.kill()
    assert trial.wounds() == []
    trial.finish()
    assert trial.faults() == []


def test_a_worker_that_waits_beside_another_takes_over_when_that_is_killed(slow: Ground) -> None:
    """A second run joins; the first one's file lock tells its death at once, so nobody waits for the lease of ten minutes."""
    trial = slow.trial(lease=600)
    first = trial.held()
    second = trial.start(flags={"lease": 2})
    assert second.until(lambda: len(workers(trial.db)) == 2)
    first.kill()
    assert second.ended() == 0, second.printed()
    assert len(set(chain.from_iterable(owners(trial.db).values()))) == 2
    assert trial.faults() == []


def test_a_signal_to_a_life_that_has_ended_is_nothing(trial: Trial) -> None:
    """The harness sends none to a process of another name that has the same number by now."""
    code, _ = trial.run()
    assert code == 0
    trial.lives[-1].signal(signal.SIGKILL)
    assert trial.lives[-1].wait(0) == 0
    assert not Path(f"{trial.db}-wal").exists()
