"""`limpet schedule`: one job for each slot, from however many processes and machines, once or as a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from limpet.cli.schedule import CLOCK_S, wait_until
from limpet.store import open_store
from tests.conftest import on_sqlite
from tests.e2e.conftest import Limpet
from tests.e2e.daily import SHANGHAI, Daily, daily, last_json
from tests.servers.kinds import Databases

#: Somewhat after slot 2026-11-30 of Shanghai was due.
NOW = "2026-11-29T18:00:00Z"


@pytest.fixture
def prices(databases: Databases, tmp_path: Path) -> Iterator[Daily]:
    """A spider that is due each day at 00:30 in Shanghai, with a database of its own."""
    with daily(tmp_path, db=databases.ready()) as made:
        yield made


# -- one job a logical day --------------------------------------------------------------------------

#: Several commands in one process, which is started under another TZ.
MANY = """
import json, sys
from limpet.cli import main
codes = [main([*json.loads(sys.argv[1]), "--at", at]) for at in sys.argv[2:]]
print(json.dumps(codes))
"""


def at_instants(prices: Daily, zone: str, instants: list[str]) -> list[int]:
    """`limpet schedule` at each of some instants, on a machine that is set to a zone; its exit codes."""
    words = ["schedule", str(prices.file), "--db", prices.db, "--quiet", "--json", "--lease", "60", "--read-timeout", "120"]
    command = [sys.executable, "-c", MANY, json.dumps(words), *instants]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={"TZ": zone, "PATH": ""})
    assert ended.returncode == 0, ended.stderr
    codes: list[int] = json.loads(ended.stdout.splitlines()[-1])
    return codes


@pytest.mark.parametrize(
    ("every", "begin", "days"),
    [
        # New York's clocks go forward on 8 March and back on 1 November 2026; Shanghai's stay
        (SHANGHAI, "2026-03-06T16:00", ["2026-03-06", "2026-03-07", "2026-03-08", "2026-03-09"]),
        (SHANGHAI, "2026-10-30T16:00", ["2026-10-30", "2026-10-31", "2026-11-01", "2026-11-02"]),
        ('"day", at="02:30", tz="America/New_York"', "2026-03-07T01:00", ["2026-03-06", "2026-03-07", "2026-03-08", "2026-03-09"]),
        ('"day", at="01:30", tz="America/New_York"', "2026-10-31T01:00", ["2026-10-30", "2026-10-31", "2026-11-01", "2026-11-02"]),
    ],
)
def test_one_job_for_each_logical_day_whatever_the_machine_is_set_to(tmp_path: Path, every: str, begin: str, days: list[str]) -> None:
    """Two machines, one set to UTC and one to New York, each trigger every four hours for three days over a change of clocks."""
    with daily(tmp_path, every, products=2) as prices:
        first = datetime.fromisoformat(begin).replace(tzinfo=UTC)
        instants = [(first + timedelta(hours=4 * number)).isoformat() for number in range(19)]
        codes = [code for zone in ("UTC", "America/New_York") for code in at_instants(prices, zone, instants)]
        assert codes == [0] * 2 * len(instants)
        assert prices.states() == dict.fromkeys(days, "finished")
        assert prices.asked == {"": len(days), "p/0": len(days), "p/1": len(days)}


#: Eight processes at once, again and again: each is forked from one that has imported everything, so all begin together.
EIGHT = """
import json, os, sys
import limpet.cli.schedule
from limpet.cli import main
for at in sys.argv[2:]:
    children = []
    for _ in range(8):
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(main([*json.loads(sys.argv[1]), "--at", at]))
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
"""


@pytest.mark.slow
def test_eight_processes_that_trigger_a_slot_at_once_make_one_job(databases: Databases, tmp_path: Path) -> None:
    """Ten slots, one after the other, two on a server: each page is asked for once a slot, and every process exits with 0."""
    slots, lease_s = (10, 120) if databases.name == "sqlite" else (2, 60)  # long: a busy machine starves nobody
    with daily(tmp_path, products=30, db=databases.ready()) as prices:
        words = json.dumps(["schedule", str(prices.file), "--db", prices.db, "--quiet", "--lease", str(lease_s), "--read-timeout", "120"])
        instants = [f"2026-11-{day:02}T18:00:00Z" for day in range(1, slots + 1)]
        ended = subprocess.run([sys.executable, "-c", EIGHT, words, *instants], capture_output=True, text=True, check=False, timeout=600)
        assert ended.returncode == 0, ended.stderr
        assert [json.loads(line) for line in ended.stdout.splitlines()] == [[0] * 8] * slots, ended.stderr
        assert prices.states() == {f"2026-11-{day:02}": "finished" for day in range(2, slots + 2)}
        assert prices.asked == dict.fromkeys(["", *(f"p/{number}" for number in range(30))], slots)


# -- once -------------------------------------------------------------------------------------------


def test_a_slot_is_run_once_and_what_was_missed_is_named_with_its_command(limpet: Limpet, prices: Daily) -> None:
    """The commands that are printed make exactly the missing slots."""
    flags = [prices.file, "--db", prices.db]
    ended = limpet("schedule", *flags, "--at", "2026-11-24T18:00:00Z")
    assert ended.code == 0
    assert "every day at 00:30, Asia/Shanghai" in ended.out
    assert "slot 2026-11-25, which has no job yet" in ended.out
    assert "complete and verified" in ended.out
    assert limpet("run", *flags, "--slot", "2026-11-28").code == 0
    prices.forget()
    ended = limpet("schedule", *flags, "--at", NOW, "--once")
    assert ended.code == 0
    assert prices.asked[""] == 1
    assert "missing: 3 earlier slots" in ended.out
    commands = [shlex.split(line) for line in ended.lines if line.strip().startswith("limpet backfill")]
    assert [(words[4], words[6]) for words in commands] == [("2026-11-26", "2026-11-27"), ("2026-11-29", "2026-11-29")]
    for words in commands:
        assert limpet(*words[1:], "--at", NOW).code == 0
    again = limpet("schedule", *flags, "--at", NOW, "--json")
    assert (again.code, again.json["state"], again.json["missing"], again.json["next"]) == (0, "finished", [], "2026-12-01")
    assert sorted(prices.states()) == [f"2026-11-{day}" for day in range(25, 31)]
    assert prices.asked == dict.fromkeys(prices.asked, 4)


def test_a_slot_that_somebody_works_on_is_left_to_them(limpet: Limpet, prices: Daily) -> None:
    """Exit 0 at once, naming who; nothing is asked for."""
    prices.held = {3}
    child = prices.start("run", "--slot", "2026-11-30")
    try:
        assert prices.waiting.wait(60)
        ended = limpet("schedule", prices.file, "--db", prices.db, "--at", NOW, "--json")
        assert (ended.code, ended.json["state"]) == (0, "working")  # and no report of a run
        assert str(child.pid) in ended.json["workers"][0]
        prices.go.set()
        child.communicate(timeout=120)
        assert child.returncode == 0
        assert prices.asked == dict.fromkeys(prices.asked, 1)
    finally:
        child.kill()
        child.communicate()


def test_a_slot_begun_by_a_worker_that_is_dead_is_gone_on_with(limpet: Limpet, prices: Daily) -> None:
    """What that one has committed is not asked for again."""
    prices.held = {3}
    child = prices.start("run", "--slot", "2026-11-30", "--concurrency", "1")
    assert prices.waiting.wait(60)
    child.kill()
    child.communicate()
    prices.go.set()
    assert prices.states() == {"2026-11-30": "unfinished"}
    ended = limpet("schedule", prices.file, "--db", prices.db, "--at", NOW)
    assert ended.code == 0, ended
    assert "was begun, and nobody is at it" in ended.out
    assert prices.states() == {"2026-11-30": "finished"}
    assert prices.asked["p/3"] == 2


def test_what_a_slot_ends_in_is_what_schedule_ends_in(limpet: Limpet, prices: Daily) -> None:
    """3 with dead letters, and 0 the next time, since it is done; 7 where a person paused the job."""
    prices.broken = {1, 2}
    flags = ["--db", prices.db, "--at", NOW]
    assert limpet("schedule", prices.file, *flags).code == 3
    assert limpet("schedule", prices.file, *flags).code == 0
    assert limpet("retry", "--db", prices.db).code == 0
    assert limpet("pause", "--db", prices.db, "--reason", "wait").code == 0
    assert limpet("schedule", prices.file, *flags).code == 7
    assert limpet("resume", "--db", prices.db).code == 0
    prices.broken = set()
    assert limpet("schedule", prices.file, *flags).code == 0


def test_today_is_the_slot_of_the_spiders_zone_in_every_command(limpet: Limpet, tmp_path: Path) -> None:
    """Kiritimati is a day ahead of Pago Pago, or two; commands that do not read the file know the zone from the last run."""
    seen = []
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        folder = tmp_path / zone.replace("/", "-")
        folder.mkdir()
        with daily(folder, f'"day", tz="{zone}"', products=1) as prices:
            told = limpet("config", prices.file, "--json").json["schedule"]
            assert limpet("run", prices.file, "--db", prices.db, "--slot", "today").code == 0
            (slot,) = prices.states()
            assert slot == told["today"]
            for words in (["status"], ["verify"], ["dead"], ["export", "price"]):
                assert limpet(*words, "--db", prices.db, "--slot", "today").code == 0
            assert limpet("backfill", prices.file, "--db", prices.db, "--from", "today", "--to", "today").code == 0
            assert [*prices.states()] == [slot]
            seen.append(slot)
    assert seen[0] > seen[1]


def test_what_cannot_be_scheduled_is_refused(limpet: Limpet, tmp_path: Path) -> None:
    """No schedule, an instant without a zone or at the end of time, a slot that is not due yet."""
    with daily(tmp_path, "", products=1) as prices:
        ended = limpet("schedule", prices.file)
        assert ended.code == 2
        assert 'prices.every("day", at="00:30"' in ended.err
        assert "every day at 00:00, UTC" in limpet("config", prices.file).out
    with daily(tmp_path, products=1) as prices:
        assert limpet("schedule", prices.file, "--at", "2026-11-30T00:00:00").code == 2
        assert limpet("schedule", prices.file, "--at", "yesterday").code == 2
        for instant in ("9999-12-31T23:59:59Z", "0001-01-01T00:00:00+08:00"):
            ended = limpet("schedule", prices.file, "--at", instant)
            assert (ended.code, "expected a year from 1970 to 9989" in ended.err) == (2, True)
        ended = limpet("backfill", prices.file, "--from", "2026-11-29", "--to", "2026-12-01", "--at", NOW)
        assert ended.code == 2
        assert "2026-12-01 is not due before 2026-11-30 16:30 UTC; the last one was 2026-11-30" in ended.err
        assert not Path(prices.db).exists()


# -- the daemon -------------------------------------------------------------------------------------


class Sky:
    """A clock that does what a test says at each wait."""

    def __init__(self, *leaps_s: float) -> None:
        self.now = datetime(2026, 11, 30, tzinfo=UTC)
        self.leaps_s = list(leaps_s)
        self.waits_s: list[float] = []

    async def pass_by(self, seconds: float) -> bool:
        """Wait, while the clock leaps as well; nobody asks to stop."""
        self.waits_s.append(seconds)
        self.now += timedelta(seconds=seconds + (self.leaps_s.pop(0) if self.leaps_s else 0.0))
        return False


@pytest.mark.parametrize(
    ("leaps_s", "waits_s"),
    [
        ([], [30.0, 30.0, 30.0, 10.0]),
        ([3600.0], [30.0]),  # set forward, or the machine was asleep: due at once
        ([0.0, -50.0], [30.0, 30.0, 30.0, 30.0, 30.0]),  # set back: waits on
        ([0.0, 0.0, 0.0, -1.0], [30.0, 30.0, 30.0, 10.0, 1.0]),  # and never wakes early
    ],
)
def test_a_wait_ends_when_the_clock_says_so_whatever_it_did_meanwhile(leaps_s: list[float], waits_s: list[float]) -> None:
    """The clock is read again at least each 30 s, and at the end."""
    sky = Sky(*leaps_s)
    due = sky.now + timedelta(seconds=100)
    assert asyncio.run(wait_until(due, clock=lambda: sky.now, is_stopped_within=sky.pass_by))
    assert sky.now >= due
    assert sky.waits_s == waits_s
    assert max(waits_s) <= CLOCK_S


def until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    """Wait until something is so, as long as a process lives."""
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
            raise AssertionError(child.communicate())


@on_sqlite
@pytest.mark.slow
def test_a_daemon_runs_each_slot_when_it_is_due_and_stops_cleanly(limpet: Limpet, prices: Daily) -> None:
    """The one that was missed last at once, the next one when its time has come; SIGTERM while it waits is exit 0."""
    due = datetime(2026, 11, 29, 16, 30, tzinfo=UTC)
    assert limpet("schedule", prices.file, "--db", prices.db, "--at", "2026-11-28T18:00:00Z").code == 0
    log = prices.file.with_name("said")
    begin = (due - timedelta(seconds=12)).isoformat()
    with log.open("w") as said:
        child = prices.start("schedule", "--daemon", "--at", begin, "--json", "--log-level", "info", said=said)
    try:
        until(lambda: "slot 2026-11-30 is finished" in log.read_text(), child)  # and the run that did it has said so, and ended
        assert prices.states() == dict.fromkeys(["2026-11-29", "2026-11-30"], "finished")
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0, log.read_text()
        assert last_json(out)["job"] == "prices@2026-11-30"
        assert "slot 2026-11-29 is finished; 2026-11-30 is due" in log.read_text()
    finally:
        child.kill()
        child.communicate()


@on_sqlite
@pytest.mark.slow
def test_a_daemon_that_is_told_to_stop_stops_its_run_which_goes_on_later(limpet: Limpet, prices: Daily) -> None:
    """Exit 4: the run has ended too, and the same command goes on."""
    prices.held = {2}
    child = prices.start("schedule", "--daemon", "--at", NOW)
    try:
        assert prices.waiting.wait(60)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=120)
        assert child.returncode == 4, err
    finally:
        child.kill()
        child.communicate()
    prices.go.set()
    assert prices.states() == {"2026-11-30": "unfinished"}
    assert limpet("schedule", prices.file, "--db", prices.db, "--at", NOW).code == 0


@pytest.mark.slow
def test_a_daemon_goes_on_with_a_slot_whose_worker_died(prices: Daily) -> None:
    """It looks at what others work on; a worker of this machine that was killed is seen to be gone at once."""
    prices.held = {2}
    first = prices.start("run", "--slot", "2026-11-30")
    assert prices.waiting.wait(60)
    first.kill()
    first.communicate()
    prices.go.set()
    child = prices.start("schedule", "--daemon", "--at", NOW)
    try:
        until(lambda: prices.states() == {"2026-11-30": "finished"}, child)
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=120)
    store = open_store(prices.db, create=False, readonly=True)
    assert store.db.rows_text("SELECT COUNT(*) FROM job") == [(1,)]
    store.close()


@on_sqlite
@pytest.mark.slow
def test_a_daemon_asks_a_start_that_gave_nothing_again(limpet: Limpet, prices: Daily) -> None:
    """The file that it reads was filled after the slot was due."""
    listed = prices.file.with_name("listed.txt")
    start = f"\n\n@prices.start\nasync def listed():\n    with open({str(listed)!r}) as lines:\n        for line in lines:\n"
    start += "            yield line.strip()\n"
    own = f'start=["{prices.site.origin()}/"], '
    prices.file.write_text(prices.file.read_text(encoding="utf-8").replace(own, "") + start, encoding="utf-8")
    listed.write_text("")
    assert limpet("schedule", prices.file, "--db", prices.db, "--at", NOW).code == 6
    listed.write_text(prices.site.url("/p/1\n"))
    child = prices.start("schedule", "--daemon", "--at", NOW)
    try:
        until(lambda: prices.states() == {"2026-11-30": "finished"}, child)
    finally:
        child.kill()
        child.communicate()
