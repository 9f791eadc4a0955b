"""An outage of a host in the middle of a crawl: nobody is struck, nothing is lost, and the crawl goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from limpet import Call, Http, Spider, Start, Tx, call
from limpet.errors import LimpetError
from limpet.store import alerts, open_store
from limpet.store.opening import connect
from tests.e2e.conftest import Limpet
from tests.e2e.receivers import receiving
from tests.e2e.sites import GONE, Reply, page, serving
from tests.e2e.test_alerts import follower, hook, ran, told

PAGES = 60
LINKS = [f"/{number}" for number in range(PAGES)]


class Shaky:
    """A site of a start and PAGES pages that goes away after some of them, until it is mended."""

    def __init__(self, *, after: int, how: str = "status 503", links: list[str] = LINKS) -> None:
        self.after = after
        self.links = links
        self.how = how
        self.served = 0
        self.failed = 0
        self.mended = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, host: str, path: str, times: int) -> Reply:
        """What it answers."""
        if path == "/robots.txt":
            return GONE
        with self._lock:
            if self.served < self.after or self.mended.is_set():
                self.served += 1
                return page(*self.links) if path == "/" else page()
            self.failed += 1
        if self.how == "reset":
            raise ConnectionResetError
        return Reply(status=int(self.how.removeprefix("status ")))


def tries(db: Path) -> dict[str, int]:
    """Outcomes of the tries, and the strikes among them."""
    with sqlite3.connect(db) as rows:  # after the crawl: nobody here has it open
        found = dict(rows.execute("SELECT outcome || ' ' || reason, COUNT(*) FROM attempt GROUP BY 1"))
        return {**found, "strikes": rows.execute("SELECT COALESCE(SUM(strike), 0) FROM attempt").fetchone()[0]}


@contextmanager
def mended_once_noticed(shaky: Shaky, db: Path, *, protected: bool = True) -> Iterator[None]:
    """Mend the site when a crawl that the block runs has written down that it is away; one without the protection, three deaths."""

    def look_and_mend() -> None:
        until(lambda: bool(_pauses_or_none(db)) if protected else in_state(db, "dead") >= 3, "the outage to be committed")
        shaky.mended.set()

    looking = threading.Thread(target=look_and_mend)
    looking.start()
    yield
    looking.join()


@pytest.mark.parametrize("how", ["status 503", "status 500", "reset"])
def test_an_outage_in_the_middle_of_a_crawl_strikes_nobody(tmp_path: Path, how: str) -> None:
    """Every request fails, until the crawl has taken notice; then it is complete, without a dead letter."""
    shaky = Shaky(after=20, how=how)
    with serving(shaky) as site, mended_once_noticed(shaky, tmp_path / "x.db"):
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), backoff_s=0.02, strikes=1)
    found = tries(tmp_path / "x.db")
    assert (report.exit_code, report.done, report.dead, found["strikes"]) == (0, PAGES + 1, 0, 0)
    assert 5 <= found["released outage of host"] <= shaky.failed <= 40


@pytest.mark.parametrize("how", ["status 503", "reset"])
def test_without_the_protection_the_same_outage_kills_tasks(tmp_path: Path, how: str) -> None:
    """The twin."""
    shaky = Shaky(after=20, how=how)
    with serving(shaky) as site, mended_once_noticed(shaky, tmp_path / "x.db", protected=False):
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), backoff_s=0.02, strikes=1, outage_after=0)
    assert report.exit_code == 3
    assert tries(tmp_path / "x.db")["strikes"] == report.dead >= 3


def test_bad_pages_of_a_good_host_strike_as_ever(tmp_path: Path) -> None:
    """Also many of them, and also when nothing but them is left. One page at a time: so an answer comes between any two of them."""

    def answer(host: str, path: str, times: int) -> Reply:
        is_bad = path[1:].isdigit() and int(path[1:]) % 10 == 0
        return Reply(status=500) if is_bad else page(*LINKS) if path == "/" else page()

    with serving(answer) as site:
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), strikes=2, concurrency=1)
    found = tries(tmp_path / "x.db")
    assert (report.exit_code, report.dead, found["strikes"]) == (3, PAGES // 10, 2 * PAGES // 10)
    assert "released outage of host" not in found


def test_a_host_that_does_not_come_back_is_given_up(tmp_path: Path) -> None:
    """After `throttle_hours` its tasks strike, and die with the reason of their last try."""
    shaky = Shaky(after=50)
    with serving(shaky) as site:
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), throttle_hours=0.0001, backoff_s=0.001, strikes=1)
    found = tries(tmp_path / "x.db")
    assert (report.exit_code, report.dead) == (3, PAGES + 1 - 50)
    assert found["released outage of host"] >= 5
    assert found["dead status 503"] == report.dead


def test_an_outage_is_told_once_and_status_shows_it_until_it_is_over(limpet: Limpet, tmp_path: Path) -> None:
    """Since when and why; the alert names the host."""
    shaky = Shaky(after=20)
    db = tmp_path / "x.db"
    seen: list[str] = []

    def look_and_mend() -> None:
        posts = robot.wait_for(1)
        assert "127.0.0.1" in posts[0].message["message"]
        until(lambda: bool(pauses(db)), "the outage to be committed")
        seen.append(status_of(db))
        shaky.mended.set()

    with receiving() as robot, serving(shaky) as site:
        looking = threading.Thread(target=look_and_mend)
        looking.start()
        report = ran(follower(), db, hook(robot), start=site.url("/"), backoff_s=0.3)
        looking.join()
        assert report.exit_code == 0
        assert [post.message["title"] for post in robot.posts] == ["limpet: shop: a host is away"]
        assert told(db) == [("outage", "shop: a host is away", True)]
    assert f"127.0.0.1:{site.port}" in seen[0]
    assert "outage since 20" in seen[0]
    assert "outage" not in status_of(db)


def status_of(db: Path) -> str:
    """What `limpet status` prints, by a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-m", "limpet", "status", "--db", str(db)], capture_output=True, text=True, check=True, env=environment()
    )
    return ended.stdout


def environment() -> dict[str, str]:
    """This process's, without settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LIMPET_")}


#: A process that stands still for a while keeps its lease, and asks for nothing twice.
PATIENT = ("--lease", "60", "--read-timeout", "120", "--total-timeout", "300")

SPIDER = """
from limpet import Spider
shop = Spider("shop", delay_s=0.0)

@shop.page()
def any_page(page, tx):
    tx.follow(page.links())
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait for a condition."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"waited in vain for {what}"
        threading.Event().wait(0.05)


def pauses(db: Path) -> list[tuple[str, int]]:
    """What the rows of hosts say: pause, failures in a row."""
    opened = connect(str(db), readonly=True)  # never by another SQLite library in this process: closing it drops the locks of the crawl
    try:
        return [(str(pause), int(errors)) for pause, errors in opened.rows_text("SELECT pause, errors FROM host WHERE pause <> ''")]
    finally:
        opened.close()


def in_state(db: Path, state: str) -> int:
    """How many tasks are in a state; none while there are no tables."""
    try:
        opened = connect(str(db), readonly=True)
        try:
            return int(opened.rows_text("SELECT COUNT(*) FROM task WHERE state = ?", (state,))[0][0])
        finally:
            opened.close()
    except LimpetError:
        return 0


def test_an_outage_outlives_its_worker(tmp_path: Path) -> None:
    """Killed in it, its successor finds the pause in the host's row, strikes nobody, and raises no second alert."""
    shaky = Shaky(after=20)
    db, file = tmp_path / "x.db", tmp_path / "s.py"
    file.write_text(SPIDER)
    command = [sys.executable, "-m", "limpet", "run", str(file), "--db", str(db), "--backoff", "0.4", *PATIENT, "--json"]
    with serving(shaky) as site:
        first = subprocess.Popen([*command, "--start", site.url("/")], stdout=subprocess.PIPE, env=environment())
        until(lambda: any(errors >= 5 for _, errors in _pauses_or_none(db)), "the outage to be committed, with all that showed it")
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()  # type: ignore[union-attr]
        ((pause, errors),) = pauses(db)
        assert pause.startswith("outage since ")
        assert errors >= 5
        failed = shaky.failed
        second = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
        until(lambda: shaky.failed > failed, "the successor to ask whether the host is back")
        shaky.mended.set()
        out, _ = second.communicate(timeout=300)
    report = json.loads(out)
    assert (report["exit_code"], report["done"], report["dead"]) == (0, PAGES + 1, 0)
    assert tries(db)["strikes"] == 0
    store = open_store(str(db), create=False)
    assert [one.kind for one in alerts.newest(store.db, most=10)] == ["outage"]
    store.close()
    assert pauses(db) == []


def _pauses_or_none(db: Path) -> list[tuple[str, int]]:
    try:
        return pauses(db) if db.exists() else []
    except LimpetError:  # its tables are being made
        return []


def test_a_person_can_have_a_host_asked_at_once(limpet: Limpet, tmp_path: Path) -> None:
    """`limpet resume HOST` ends a wait of an hour, where somebody knows that it is back; without an outage there is nothing to end.

    All that is left has been asked once, one after the other, and was given back until then.
    """
    shaky = Shaky(after=1, links=LINKS[:5])
    db, file = tmp_path / "x.db", tmp_path / "s.py"
    file.write_text(SPIDER)
    command = [sys.executable, "-m", "limpet", "run", str(file), "--db", str(db), "--backoff", "3600", "--backoff-max", "7200"]
    command += ["--concurrency", "1", *PATIENT]
    with serving(shaky) as site:
        crawl = subprocess.Popen([*command, "--json", "--start", site.url("/")], stdout=subprocess.PIPE, env=environment())
        try:
            until(lambda: bool(_pauses_or_none(db)) and in_state(db, "running") == 0, "the outage, and all five pages, to be committed")
            assert shaky.failed == 5
            shaky.mended.set()
            ended = limpet("resume", site.url("/"), "--db", db)
            assert (ended.code, "goes on (outage since" in ended.out) == (0, True), ended
            report = json.loads(crawl.communicate(timeout=300)[0])
        finally:
            crawl.kill()
            crawl.communicate()
        assert (report["exit_code"], report["done"], report["dead"]) == (0, 6, 0)
        assert limpet("resume", site.url("/"), "--db", db).code == 6


def test_a_second_run_does_what_the_outage_left_and_not_all_of_it(tmp_path: Path) -> None:
    """The case of docs/outage.md in small: away at 500 of 800 pages, stopped; the next run asks for the 300 that are left."""
    pages, before = 800, 500
    shaky = Shaky(after=before, links=[f"/p/{number}" for number in range(pages - 1)])
    db = tmp_path / "x.db"
    file = tmp_path / "s.py"
    file.write_text(SPIDER)
    command = [sys.executable, "-m", "limpet", "run", str(file), "--db", str(db), "--backoff", "0.2", *PATIENT, "--json"]
    with serving(shaky) as site:
        first = subprocess.Popen([*command, "--start", site.url("/")], stdout=subprocess.PIPE, env=environment())
        until(lambda: bool(_pauses_or_none(db)), "the outage to be committed")
        until(lambda: in_state(db, "done") == before, "every page that came before it to be committed, too")
        first.send_signal(signal.SIGINT)
        out, _ = first.communicate(timeout=300)
        stopped = json.loads(out)
        assert (stopped["exit_code"], stopped["done"], stopped["dead"]) == (4, before, 0)
        served = shaky.served
        shaky.mended.set()
        again = subprocess.run(command, stdout=subprocess.PIPE, env=environment(), check=False, timeout=300)
        report = json.loads(again.stdout)
        assert (report["exit_code"], report["done"], report["dead"]) == (0, pages, 0)
        assert shaky.served - served == pages - before == report["requests"]


@pytest.mark.parametrize("outage_after", [5, 0])
def test_an_outage_of_a_provider_strikes_no_call(tmp_path: Path, outage_after: int) -> None:
    """Keyed calls lie on 64 hosts of ours, and are one provider all the same; without the protection they die."""
    shaky = Shaky(after=20)
    rank = Spider("rank")

    @rank.task(key="number")
    async def one(number: int, *, http: Http, tx: Tx) -> None:
        await http.get(f"{rank.params['api']}/{number}")

    @rank.start
    async def numbers(start: Start) -> AsyncIterator[Call]:
        for number in range(PAGES):
            yield call(one, number=number)

    db = tmp_path / "x.db"
    with serving(shaky) as site, mended_once_noticed(shaky, db, protected=bool(outage_after)):
        rank.params["api"] = site.origin()
        report = ran(rank, db, backoff_s=0.02, strikes=1, outage_after=outage_after)
    if outage_after:
        assert (report.exit_code, report.done, tries(db)["strikes"]) == (0, PAGES, 0)
        assert tries(db)["released outage of host"] >= 5
    else:
        assert (report.exit_code, report.dead >= 3) == (3, True)
