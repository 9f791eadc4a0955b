"""A worker that stops at any step of a commit or a take-over for longer than its lease, and wakes: it writes nothing, and goes on.

On servers, inside transactions too: the server ends those, so nobody waits for the one that sleeps. A SQLite file is locked
by whoever sleeps inside one (`tests/crash/test_signals.py` has that), so there it stops outside of them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from limpet.errors import StoreBusy
from limpet.failpoint import COMMIT_STEPS, TAKEOVER_STEPS
from limpet.store.dialect import Database
from limpet.store.opening import connect
from tests.conftest import on_servers, on_sqlite
from tests.crash.nursery import Born
from tests.hardening.conftest import NewTeam
from tests.hardening.team import Team
from tests.servers.kinds import Databases

#: In the middle of a COPY or of an INSERT: `mutants.stops_inside_staging`.
STAGING = "inside_staging"

#: Steps on the way into and out of the transaction, where a SQLite file is not locked.
OUTSIDE = [("before_freeze", "before_stage", "after_stage", "after_commit"), ("after_acknowledge", "takeover_begin", "takeover_commit")]

#: Every step, in lines of zombies: each takes over from the one before, and stops at its own step.
INSIDE = [
    ("before_freeze", "before_stage", STAGING, "after_stage", "after_begin"),
    ("after_fence", "after_discover", "after_records", "after_finish", "after_account"),
    ("after_claim", "after_ledger", "after_commit", "after_acknowledge"),
    TAKEOVER_STEPS,
]

#: Steps of the twins: before the fence, and behind the commit.
TWINS = ("before_stage", "after_commit")


@dataclass(frozen=True, slots=True)
class Zombie:
    """A worker that has stopped at a step, and what it had done by then."""

    step: str
    born: Born
    names: frozenset[str]


def stopped_at(crowd: Team, step: str, *mutants: str) -> Zombie:
    """A worker that has stopped at a step, as its failpoint noted; of a SQLite file without the lock of it."""
    for hit in range(3, 12):
        log = crowd.folder / f"fired-{step}-{hit}"
        if step == STAGING:
            hooks: dict[str, object] = {"mutants": [*mutants, "stops_inside_staging"]}
        else:
            hooks = {"mutants": [*mutants], "failpoint": f"{step}@{hit}=stop"}
        born = crowd.start(hooks={**hooks, "failpoint_log": str(log)})
        crowd.until(partial(getattr, born, "is_frozen"), what=f"{step}, time {hit}")
        assert log.read_text() == f"{step}\n"
        if not crowd.is_locked_by(born):
            return Zombie(step, born, frozenset(crowd.names(born.pid)))
        born.kill()  # another thread of it was inside a transaction
    raise AssertionError(f"inside a transaction each time at {step}")


def woken(new_team: NewTeam, steps: Sequence[str], *mutants: str) -> tuple[Team, list[Zombie], dict[str, int]]:
    """Zombies that have just been woken, after a last worker has all shards; and how many batches each had committed by then.

    The windows are so small, and the shop so large, that there is something to do for each of them.
    """
    crowd = new_team(products=240, lease=1, **{"per-host": 1, "delay": 0.02, "commit-pages": 8})
    with crowd.unfinished():
        zombies = [stopped_at(crowd, step, *mutants) for step in steps]
        other = crowd.start()
        crowd.until(lambda: crowd.owned() == {other.pid: 8}, what="a take-over")
        assert all(zombie.born.is_frozen for zombie in zombies)
        batches = {zombie.step: crowd.batches_of(zombie.names) for zombie in zombies}
    for zombie in zombies:
        zombie.born.signal(signal.SIGCONT)
    return crowd, zombies, batches


def wake_and_write_nothing(new_team: NewTeam, steps: Sequence[str]) -> None:
    crowd, zombies, batches = woken(new_team, steps)
    crowd.ended()
    assert {zombie.step: crowd.batches_of(zombie.names) for zombie in zombies} == batches
    assert [zombie.step for zombie in zombies if not crowd.names(zombie.born.pid) - zombie.names] == [], "no other name"
    assert crowd.blamed() == 0
    assert crowd.faults() == []


@on_servers
@pytest.mark.parametrize("steps", INSIDE, ids=lambda steps: steps[0])
def test_workers_that_stop_at_any_step_and_wake_after_a_take_over_write_nothing(new_team: NewTeam, steps: Sequence[str]) -> None:
    """Under their old names and epochs, that is: under new ones they go on as workers, and the crawl ends well."""
    wake_and_write_nothing(new_team, steps)


@on_sqlite
@pytest.mark.parametrize("steps", OUTSIDE, ids=lambda steps: steps[0])
def test_workers_that_stop_outside_a_transaction_and_wake_after_a_take_over_write_nothing(new_team: NewTeam, steps: Sequence[str]) -> None:
    """The same on a file."""
    wake_and_write_nothing(new_team, steps)


@on_sqlite
@pytest.mark.parametrize("patience_s", [600, 0])
def test_a_worker_that_begins_while_another_sleeps_inside_a_transaction_of_a_file_waits(new_team: NewTeam, patience_s: float) -> None:
    """And says for whom. The twin without patience ends at once, resumable. Nobody but the sleeper can let the file go."""
    crowd = new_team(products=40, lease=1, **{"per-host": 1, "delay": 0.02})
    log = crowd.folder / "fired"
    sleeper = crowd.start(hooks={"failpoint": "after_fence@3=stop", "failpoint_log": str(log)})
    crowd.until(lambda: sleeper.is_frozen)
    assert log.read_text() == "after_fence\n"
    newcomer = crowd.start(hooks={"constants": {"limpet.engine.onethread.BUSY_S": patience_s}})
    if patience_s:
        crowd.until(lambda: f"locked by process {sleeper.pid}" in newcomer.printed(), what="a wait")
        assert newcomer.wait(0) is None
    else:
        assert newcomer.ended() == 4, newcomer.printed()
    sleeper.signal(signal.SIGCONT)
    crowd.ended(ok=frozenset({0, 6} if patience_s else {0, 4, 6}))
    assert crowd.blamed() == 0
    assert crowd.faults() == []


@pytest.mark.parametrize("databases", ["postgres"], indirect=True)
def test_nothing_is_copied_once_others_may_wait_for_a_row(new_team: NewTeam) -> None:
    """A COPY whose client sleeps is ended by no time-out: a commit begins none after its fence, nor a take-over after its own."""
    crowd = new_team(products=40, latency_s=0.1)
    crowd.gate.shut_after(20)
    first = crowd.start()
    crowd.until(lambda: crowd.site.stats.requests > 20)
    first.kill()
    crowd.gate.open()
    second = crowd.start(hooks={"mutants": ["dies_of_a_late_copy"]})
    assert second.ended() == 0, second.printed()
    assert crowd.outcomes()["lost"] > 0
    assert crowd.faults() == []


#: Seconds of the reader's lease: so little that its server soon sees to it, and more than it takes from one statement to the next.
LEASE_S = 4

#: Holds rows, and asks for an answer that no socket's buffer holds.
READER = f"""
import sys
from limpet.store.opening import connect
db = connect(sys.argv[1], lease_s={LEASE_S})
db.begin()
db.run_text("UPDATE held SET x = x + 1")
db.run_text(sys.argv[2])
print("holds", flush=True)
db.rows_text("SELECT REPEAT('x', 1000000) FROM held AS a, held AS b, held AS c")
"""


def sleeps_in_an_answer(databases: Databases, *, setting: str, tries: int) -> bool:
    """Whether a reader that sleeps in the middle of a large answer lets the rows go that it holds, before so many tries to write to them.

    Each try waits for half of its lease.
    """
    dsn = databases.new()
    db = connect(dsn, lease_s=LEASE_S)
    for sql in ("CREATE TABLE held (x INTEGER)", "INSERT INTO held VALUES (0), (0), (0), (0), (0), (0)"):
        db.begin()
        db.run_text(sql)
        db.commit()
    with subprocess.Popen([sys.executable, "-c", READER, dsn, setting], stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout
            assert reader.stdout.readline() == b"holds\n"
            while not db.rows_text(ANSWERS[databases.name]):
                assert reader.poll() is None
            reader.send_signal(signal.SIGSTOP)
            assert db.rows_text(ANSWERS[databases.name])
            return any(_may_write(db) for _ in range(tries))
        finally:
            reader.kill()
            db.close()


#: Finds the session that is in the middle of its answer.
ANSWERS = {
    "postgres": "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT REPEAT%' AND datname = current_database()",
    "mysql": "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT REPEAT%' AND db = DATABASE()",
}


def _may_write(db: Database) -> bool:
    db.begin()
    try:
        db.run_text("UPDATE held SET x = x + 1")
        db.commit()
    except StoreBusy:
        db.rollback()
        return False
    return True


@on_servers
def test_a_worker_that_sleeps_in_the_middle_of_an_answer_lets_its_rows_go(databases: Databases) -> None:
    """The server cannot send the rest, and no limit on statements ends that: one on what its peer takes does."""
    assert sleeps_in_an_answer(databases, setting="UPDATE held SET x = x", tries=30)


@pytest.mark.parametrize("databases", ["postgres"], indirect=True)
def test_without_a_limit_on_what_its_peer_takes_a_server_would_wait_for_ever(databases: Databases) -> None:
    """The twin."""
    assert not sleeps_in_an_answer(databases, setting="SET LOCAL tcp_user_timeout = 0", tries=6)


def test_every_step_of_a_commit_and_a_take_over_has_its_zombie() -> None:
    """A step that is added later, too."""
    assert {*COMMIT_STEPS, *TAKEOVER_STEPS} <= {step for line in INSIDE for step in line}


@pytest.mark.parametrize("step", TWINS)
def test_a_worker_without_a_fence_that_wakes_is_found_out(new_team: NewTeam, step: str) -> None:
    """The twin that must fail: with neither lease nor fence checked it writes, or is caught by what checks the rows."""
    crowd, zombies, batches = woken(new_team, [step], "no_fence")
    codes = crowd.ended(ok=frozenset(range(10)))
    assert crowd.batches_of(zombies[0].names) > batches[step] or 8 in codes or crowd.faults()
