"""Several workers on one job find each other through the database alone, share it, and take over from each other.

Every test runs on each kind of database that `LIMPET_DATABASES` names.
"""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from limpet.cli.crew import size_of
from tests.conftest import on_servers, on_sqlite
from tests.crash.nursery import Born
from tests.hardening.conftest import NewTeam
from tests.hardening.team import FLAGS, PATIENT_LEASE_S, Team

#: Seconds of a heartbeat, under the lease of `FLAGS`.
LEASE_S = float(str(FLAGS["lease"]))
HEARTBEAT_S = LEASE_S / 5
#: Seconds that a loaded machine may add to anything, also by standing still.
SLACK_S = 30.0

#: Flags of a worker that ends by itself, with 5, and leaves nearly all to others.
A_LITTLE: dict[str, Any] = {"max-pages": 6}


def at_work(crowd: Team, born: Born) -> bool:
    """Whether a worker has shards."""
    return crowd.owned().get(born.pid, 0) > 0


# -- finding and sharing ----------------------------------------------------------------------


def test_workers_share_the_shards_evenly_and_hand_them_over_on_a_clean_stop(new_team: NewTeam) -> None:
    """One has all eight; with three it is 2, 3 and 3 within a few heartbeats; one that stops leaves its share, and nothing is lost."""
    crowd = new_team(lease=PATIENT_LEASE_S, **{"per-host": 1, "delay": 0.05})
    soon_s = 10 * PATIENT_LEASE_S / 5 + SLACK_S
    with crowd.unfinished():
        with crowd.unfinished(*crowd.hosts()[:-1]):
            first = crowd.start()
            crowd.until(lambda: crowd.shares() == [8])
            others = [crowd.start("worker"), crowd.start()]
            crowd.until(lambda: len(crowd.owned()) == 3)
            crowd.until(lambda: crowd.shares() == [2, 3, 3], soon_s, what="an even share")
        crowd.until(lambda: crowd.site.stats.requests > 20)
        first.signal(signal.SIGTERM)
        assert first.ended() == 4, first.printed()
        crowd.until(lambda: crowd.shares() == [4, 4], soon_s, what="the share of the one who left")
        assert crowd.dead() == {first.pid: "stopped"}
    assert {born.ended() for born in others} <= {0, 6}, others[0].printed() + others[1].printed()
    assert crowd.outcomes()["lost"] == 0
    assert crowd.faults() == []


def test_links_that_one_worker_finds_in_another_ones_shard_are_crawled_by_that_one(new_team: NewTeam) -> None:
    """A worker without anything of its own to do sees what others put into its shards, and does not commit empty batches meanwhile."""
    crowd = new_team(products=200, hosts=20, latency_s=0.05, lease=PATIENT_LEASE_S, **{"per-host": 1})
    with crowd.unfinished(*crowd.hosts()):
        workers = [crowd.start()]
        crowd.until(lambda: crowd.shares() == [8])
        workers += [crowd.start("worker")]
        crowd.until(lambda: crowd.shares() == [4, 4])
        names = {name for born in workers for name in crowd.names(born.pid)}
    crowd.ended()
    empty = "SUM(CASE WHEN claimed + done + skipped + failed + discovered = 0 THEN 1 ELSE 0 END)"
    sql = f"SELECT owner, SUM(done), {empty} FROM ledger GROUP BY owner"
    done = [row for row in crowd.rows(sql) if row[0] in names]
    assert len(done) == 2
    assert all(int(pages) > 0 for _, pages, _ in done), done
    assert all(int(empty) < 60 for _, _, empty in done), done
    assert crowd.faults() == []


# -- taking over --------------------------------------------------------------------------------


def test_the_shards_of_a_killed_worker_are_taken_over_at_once_on_the_same_host(new_team: NewTeam) -> None:
    """The lock on its file tells, and not its lease of 20 s, which nobody waits for."""
    crowd = new_team(lease=20, **{"per-host": 1, "delay": 0.1})
    with crowd.unfinished():
        first = crowd.start()
        crowd.until(lambda: crowd.shares() == [8])
        second = crowd.start()
        crowd.until(lambda: len(crowd.owned()) == 2)
        first.kill()
        crowd.until(lambda: crowd.owned() == {second.pid: 8}, what="a take-over")
        assert crowd.dead() == {first.pid: "its process is gone"}
        second.signal(signal.SIGTERM)
        assert second.ended() == 4
    crowd.start(lease=2)
    crowd.ended(ok=frozenset({0, 4, 6}))
    assert crowd.faults() == []


def test_the_shards_of_a_frozen_worker_are_taken_over_within_its_lease_and_three_heartbeats(new_team: NewTeam) -> None:
    """And when it wakes it writes nothing under its old name, begins again under another, and goes on."""
    crowd = new_team(**{"per-host": 1, "delay": 0.1})
    with crowd.unfinished():
        first, second = crowd.start(), crowd.start()
        crowd.until(lambda: crowd.shares() == [4, 4])
        crowd.freeze(first)
        zombie = crowd.names(first.pid)
        waited = crowd.until(lambda: crowd.owned() == {second.pid: 8}, what="a take-over")
        assert waited < LEASE_S + 3 * HEARTBEAT_S + SLACK_S
        assert crowd.dead()[first.pid] == "its lease is over and it did not beat between two looks"
        before = crowd.owners()
        first.signal(signal.SIGCONT)
        crowd.until(lambda: at_work(crowd, first), what="another name for the one that woke")
    crowd.ended()
    after = crowd.owners()
    assert all(not zombie & set(after[shard][len(line) :]) for shard, line in before.items())
    assert crowd.faults() == []


@on_servers
def test_a_shard_that_a_hanging_session_holds_keeps_nobody_from_the_others(new_team: NewTeam) -> None:
    """Longer than any lock is waited for: seven shards are crawled meanwhile, and the eighth is taken when it is let go."""
    crowd = new_team(hosts=8, lease=4, **{"per-host": 1, "delay": 0.1})
    first = crowd.start(**A_LITTLE)
    assert first.ended() == 5, first.printed()
    host = crowd.hosts()[-1]  # much of it is left, so nothing is over while its shard is held
    with crowd.holding(crowd.host(host).shard):
        second = crowd.start()
        crowd.until(lambda: crowd.owned() == {second.pid: 7}, what="seven shards")
        asked = crowd.site.stats.requests
        crowd.until(lambda: crowd.site.stats.requests > asked + 20, what="some work")
        crowd.until(lambda: crowd.owned() == {second.pid: 7}, what="seven shards yet")
    crowd.until(lambda: crowd.owned() == {second.pid: 8} or second.wait(0) is not None, what="the last shard")
    crowd.ended(ok=frozenset({0, 5}))
    assert "is away" not in second.printed()
    assert crowd.faults() == []


# -- politeness ---------------------------------------------------------------------------------


def test_a_host_has_one_connection_and_its_delay_over_all_workers_and_over_a_take_over(new_team: NewTeam) -> None:
    """Four workers, two killed and one frozen on the way: never two requests at once, never two within the delay."""
    crowd = new_team(products=120, latency_s=0.05, **{"per-host": 1, "delay": 0.1})
    with crowd.unfinished():
        first, second, third, _fourth = [crowd.start() for _ in range(4)]
        crowd.until(lambda: crowd.shares() == [2, 2, 2, 2])
        first.kill()
        crowd.until(lambda: crowd.shares() == [2, 3, 3])
        crowd.freeze(second)
        crowd.until(lambda: crowd.shares() == [4, 4])
        second.signal(signal.SIGCONT)
        crowd.until(lambda: at_work(crowd, second), what="another name for the one that woke")
        third.kill()
        crowd.until(lambda: third.pid not in crowd.owned(), what="its death")
    crowd.ended()
    assert crowd.died_of("its process is gone") == {first.pid, third.pid}
    assert set(crowd.stats()["peaks"].values()) == {1}
    gaps = {host: min(later - sooner for sooner, later in pairwise(times)) for host, times in crowd.arrivals().items()}
    assert len(gaps) == 4
    assert min(gaps.values()) >= 0.1, gaps
    assert crowd.faults() == []


# -- pausing --------------------------------------------------------------------------------------


def test_a_host_that_somebody_pauses_is_asked_nothing_until_it_goes_on(new_team: NewTeam) -> None:
    """From another machine: the owner gives its claims back, the others are crawled to the end, and nobody blames a task."""
    crowd = new_team(products=80, lease=PATIENT_LEASE_S, **{"per-host": 1})
    crowd.gate.shut_after(20)
    crowd.start()
    crowd.until(lambda: crowd.shares() == [8])
    crowd.start("worker")
    crowd.until(lambda: crowd.site.stats.requests > 20)
    host = crowd.hosts()[1]
    code, said = crowd.limpet("pause", host, "--reason", "ask bob")
    assert (code, f"{host} on hold: ask bob" in said) == (0, True), said
    crowd.until(lambda: crowd.host(host).held, what="a batch that notes it")
    crowd.gate.open()
    crowd.until(lambda: crowd.host(host).running == 0, what="an end of what was asked")
    asked = asked_of(crowd, host)
    crowd.until(lambda: _waits_for(crowd, host), what="a standstill")
    assert asked_of(crowd, host) == asked
    code, said = crowd.limpet("hosts")
    assert any(host in line and "on hold" in line and "ask bob" in line for line in said.splitlines()), said
    assert crowd.limpet("resume", host)[0] == 0
    crowd.until(lambda: not crowd.host(host).held, what="a batch that notes it")
    assert crowd.limpet("resume", host)[0] == 6
    crowd.ended()
    assert crowd.outcomes()["failed"] == crowd.outcomes()["dead"] == 0
    assert crowd.faults() == []


def asked_of(crowd: Team, host: str) -> int:
    """How many requests a host has seen."""
    address = host.partition(":")[0]
    return sum(times for page, times in dict(crowd.site.stats.attempts).items() if page.startswith(f"{address}/"))


def _waits_for(crowd: Team, host: str) -> bool:
    return f"every host with a task ready is on hold: {host}" in crowd.limpet("status")[1]


def test_a_host_paused_while_nobody_works_stays_so_for_whoever_comes(new_team: NewTeam) -> None:
    """The command takes the shard over, writes it down, and gives it up; the next worker heeds it, from its first claim on."""
    crowd = new_team(products=40)
    first = crowd.start(**A_LITTLE)
    assert first.ended() == 5, first.printed()
    host = crowd.hosts()[2]
    assert crowd.limpet("pause", host)[0] == 0
    asked = asked_of(crowd, host)
    crowd.start()
    crowd.until(lambda: _waits_for(crowd, host), what="a standstill")
    assert asked_of(crowd, host) == asked
    assert crowd.limpet("resume", host)[0] == 0
    crowd.ended(ok=frozenset({0, 5}))
    assert crowd.faults() == []


def test_a_paused_job_ends_every_worker_and_resume_lets_it_go_on(new_team: NewTeam) -> None:
    """`limpet pause --job` from anywhere: exit 7 everywhere, with the reason; what was in flight is stored."""
    crowd = new_team(products=240)
    crowd.gate.shut_after(20)
    workers = [crowd.start(), crowd.start()]
    crowd.until(lambda: crowd.site.stats.requests > 20)
    assert crowd.limpet("pause", "--job", "--reason", "lunch")[0] == 0
    crowd.gate.open()
    assert [born.ended() for born in workers] == [7, 7], workers[0].printed()
    assert "lunch" in workers[0].printed()
    assert crowd.limpet("resume", "--job")[0] == 0
    crowd.start()
    crowd.ended(ok=frozenset({0, 7}))
    assert crowd.faults() == []


# -- limpet worker ----------------------------------------------------------------------------------


def test_a_worker_ends_with_6_where_there_is_no_job_and_where_it_is_finished(new_team: NewTeam) -> None:
    """It begins nothing by itself: no database, no job, no start."""
    crowd = new_team(products=10)
    early = crowd.start("worker")
    assert early.ended() == 6, early.printed()
    assert crowd.rows("SELECT 1 FROM job") == []
    assert crowd.start().ended() == 0
    late = crowd.start("worker")
    assert (late.ended(), "no job of this spider waits" in late.printed()) == (6, True), late.printed()
    named = crowd.start("worker", slot="")
    assert (named.ended(), "finished and verified" in named.printed()) == (6, True), named.printed()


def test_a_worker_that_waits_takes_whatever_job_comes(new_team: NewTeam) -> None:
    """`--wait`: it is there before the job is, works on it, outlives it, and ends by a signal; its checks tell the truth."""
    crowd = new_team(**{"per-host": 1, "delay": 0.05})
    waiting = crowd.start("worker", wait=True)
    with crowd.unfinished():
        beginner = crowd.start()
        crowd.until(lambda: len(crowd.owned()) == 2)
    assert beginner.ended() in (0, 6), beginner.printed()
    crowd.until(lambda: crowd.owned() == {})
    assert crowd.limpet("status", "--check", "live") == (0, "live: yes: no job waits for workers\n")
    assert waiting.wait(0) is None
    waiting.signal(signal.SIGTERM)
    assert waiting.ended() == 4
    assert crowd.faults() == []


def test_the_checks_of_live_and_ready_tell_the_truth(new_team: NewTeam) -> None:
    """No job: nothing to do. At work: both. Frozen past its lease: neither. Paused: alive, and not ready."""
    crowd = new_team(**{"per-host": 1, "delay": 0.2})

    def alive() -> int:
        return crowd.limpet("status", "--check", "live")[0]

    with crowd.unfinished():
        born = crowd.start()
        crowd.until(lambda: crowd.shares() == [8])
        crowd.until(lambda: alive() == 0)
        ready = (0, "ready: yes: 1 worker of this machine with 8 shards\n")
        crowd.until(lambda: crowd.limpet("status", "--check", "ready") == ready, what="a worker that is ready")
        born.signal(signal.SIGSTOP)
        crowd.until(lambda: alive() == 7)
        assert crowd.limpet("status", "--check", "ready")[0] == 7
        born.signal(signal.SIGCONT)
        crowd.until(lambda: crowd.limpet("status", "--check", "ready")[0] == 0)
        assert crowd.limpet("pause")[0] == 0
        assert crowd.limpet("status", "--check", "ready")[0] == 7
        born.ended()
        assert alive() == 0
        assert "paused: by hand" in crowd.limpet("status", "--check", "ready")[1]


# -- limpet run --workers ---------------------------------------------------------------------------


def children_of(pid: int) -> set[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in found.read_text(encoding="ascii").split()} if found.exists() else set()


def is_there(pid: int) -> bool:
    """Whether a process runs, and is more than an entry that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_crew_of_processes_does_the_work_and_replaces_its_dead(new_team: NewTeam) -> None:
    """Three workers of one command; one that is killed is named, and another takes its place; one exit code, of the whole job."""
    crowd = new_team(workers=3, **{"per-host": 1, "delay": 0.05})
    with crowd.unfinished():
        born = crowd.start()
        crowd.until(lambda: crowd.shares() == [2, 3, 3], what="a crew of three")
        victim = next(iter(crowd.owned()))
        assert victim in children_of(born.pid)
        os.kill(victim, signal.SIGKILL)
        crowd.until(lambda: len(crowd.owned()) == 3 and victim not in crowd.owned(), what="a successor")
    assert born.ended() == 0, born.printed()
    assert f"(process {victim}) was killed by SIGKILL: another one takes its place" in born.printed()
    assert "complete and verified" in born.printed()
    assert crowd.faults() == []


@on_sqlite
def test_a_crew_is_as_large_as_the_machine_and_a_worker_that_joins_it_gets_its_share(new_team: NewTeam) -> None:
    """`--workers auto`, and a `limpet worker` from elsewhere: the shards are even again, and the crew proves the job."""
    crowd = new_team(shards=64, **{"per-host": 1, "delay": 0.05})
    size = size_of("auto", 64)
    with crowd.unfinished():
        born = crowd.start(workers="auto")
        crowd.until(lambda: len(crowd.owned()) == size, what="a crew")
        guest = crowd.start("worker")
        crowd.until(lambda: len(crowd.owned()) == size + 1 and crowd.shares()[0] == 64 - size * -(-64 // (size + 1)), what="a share")
    assert (born.ended(), guest.ended()) == (0, 0), born.printed() + guest.printed()
    assert "complete and verified" in born.printed()
    assert crowd.faults() == []


@pytest.mark.parametrize(
    ("databases", "to_all"), [("sqlite", False), ("sqlite", True), ("postgres", True), ("mysql", False)], indirect=["databases"]
)
def test_one_signal_stops_a_whole_crew_cleanly_however_many_processes_it_reaches(new_team: NewTeam, to_all: bool) -> None:
    """SIGINT to the command, or by a terminal to its whole group: passed on once, so nothing is cut off; exit 4, and nobody is left."""
    crowd = new_team(workers=2, lease=PATIENT_LEASE_S, **{"per-host": 1, "delay": 0.05})
    with crowd.unfinished():
        with crowd.unfinished(*crowd.hosts()[:-1]):
            born = crowd.start()
            crowd.until(lambda: crowd.shares() == [4, 4], what="a crew")
        crew = children_of(born.pid)
        crowd.until(lambda: crowd.site.stats.requests > 20)
        os.killpg(born.pid, signal.SIGINT) if to_all else born.signal(signal.SIGINT)
        assert born.ended() == 4, born.printed()
    assert "Traceback" not in born.printed()
    assert not any(map(is_there, crew))
    assert crowd.owned() == {}
    assert set(crowd.dead().values()) == {"stopped"}
    assert crowd.outcomes()["lost"] == 0
    crowd.start()
    crowd.ended(ok=frozenset({0, 4}))
    assert crowd.faults() == []


@on_sqlite
def test_no_worker_of_a_crew_outlives_its_command(new_team: NewTeam) -> None:
    """SIGKILL of the command alone: its workers find their line to it closed, commit, give their shards up, and end."""
    crowd = new_team(workers=2, lease=PATIENT_LEASE_S, **{"per-host": 1, "delay": 0.05})
    with crowd.unfinished():
        with crowd.unfinished(*crowd.hosts()[:-1]):
            born = crowd.start()
            crowd.until(lambda: crowd.shares() == [4, 4], what="a crew")
        crew = children_of(born.pid)
        os.kill(born.pid, signal.SIGKILL)
        crowd.until(lambda: not any(map(is_there, crew)), what="the end of the crew")
    assert crowd.owned() == {}
    assert crowd.outcomes()["lost"] == 0
    crowd.start()
    crowd.ended()
    assert crowd.faults() == []


@on_sqlite
def test_a_crew_whose_workers_cannot_start_ends_with_their_reason(new_team: NewTeam, tmp_path: Path) -> None:
    """A spider that breaks only in a worker: the command says why and ends, it does not start them for ever."""
    crowd = new_team(products=10, workers=2)
    spider = tmp_path / "odd.py"
    lines = ["import os", "from limpet import Spider", "if 'LIMPET_CREW' in os.environ:", "    raise ValueError('only one may')"]
    lines += ["odd = Spider('odd', start=['http://127.0.0.1:1/'])", "@odd.page()", "async def any(page, tx): ..."]
    spider.write_text("\n".join(lines), encoding="utf-8")
    code, said = crowd.limpet("run", str(spider), "--workers", "2")
    assert (code, "only one may" in said) == (2, True), said
