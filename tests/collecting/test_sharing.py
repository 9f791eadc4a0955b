"""Feeds, counters and shared values under kills: no row missing, none double, totals exact, no update lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from limpet.store import shared
from limpet.store.opening import connect
from tests.collecting.collector import Collector
from tests.collecting.conftest import New
from tests.collecting.provider import Provider

COUNTING = """
from collections.abc import AsyncIterator
from limpet import Call, Spider, Start, Tx, call

counting = Spider("counting")


@counting.task(key="number")
async def count(number: int, *, tx: Tx) -> None:
    for name in range(20):
        if number % (name + 1) == 0:
            tx.tally(f"divisible.{name + 1}")
    tx.tally("in_all", number)


@counting.start
async def numbers(start: Start) -> AsyncIterator[Call]:
    for number in range(int(start.params["numbers"])):
        yield call(count, number=number)
"""

ADDING = """
from collections.abc import AsyncIterator
from limpet import Call, Spider, Start, Tx, call

adding = Spider("adding")


@adding.task(key="number")
async def add(number: int, *, tx: Tx) -> None:
    register = await tx.register(f"sum.{number % 5}")
    register.set((register.value or 0) + 1)
    tx.tally("writes")


@adding.start
async def numbers(start: Start) -> AsyncIterator[Call]:
    for number in range(int(start.params["numbers"])):
        yield call(add, number=number)
"""


def written(folder: Path, name: str, text: str) -> Path:
    """The file of a spider."""
    place = folder / f"{name}.py"
    place.write_text(text, encoding="utf-8")
    return place


def sums(db: str, job: int = 1) -> dict[str, int]:
    """The tallies of a job."""
    opened = connect(db, readonly=True)
    try:
        return shared.tallies(opened, job)
    finally:
        opened.close()


def done(db: str) -> int:
    """Tasks that are done, or 0 while there is no job."""
    opened = connect(db, readonly=True)
    try:
        return int((opened.one("done_so_far", job=1) or (0,))[0] or 0)
    finally:
        opened.close()


def test_totals_are_exact_under_kills_and_freezes(collector: New, tmp_path: Path) -> None:
    """Four workers add to twenty tallies; one is killed, one is frozen for longer than its lease."""
    number = 600
    counting = collector(written(tmp_path, "counting", COUNTING), "--param", f"numbers={number}", "--commit-pages", "20")
    counting.run("--max-pages", "1")
    hits, _ = counting.together(lambda: done(counting.db), workers=4, kills=4, every=(40, 80), freeze_s=3.0)
    assert hits >= 2
    found = sums(counting.db)
    assert found["in_all"] == sum(range(number))
    assert [found[f"divisible.{n}"] for n in range(1, 21)] == [len(range(0, number, n)) for n in range(1, 21)]
    counting.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["mysql", "postgres"], indirect=True)
def test_no_update_of_a_register_is_lost_and_no_innocent_runs_again(collector: New, tmp_path: Path) -> None:
    """Contended by three workers: as many versions as tasks, and only a lost race runs a task again."""
    number = 200
    adding = collector(written(tmp_path, "adding", ADDING), "--param", f"numbers={number}", "--commit-pages", "10", "--concurrency", "4")
    adding.run("--max-pages", "1")
    adding.together(lambda: done(adding.db), workers=3, kills=0, every=(1, 2))
    opened = connect(adding.db, readonly=True)
    try:
        values = shared.registers(opened, "adding")
        again = {str(row[0]) for row in opened.rows_text("SELECT DISTINCT reason FROM attempt WHERE outcome <> 'done'")}
        strikes = opened.rows_text("SELECT SUM(strike) FROM attempt")[0][0]
    finally:
        opened.close()
    assert sum(version for version, _ in values.values()) == number
    assert sum(int(str(value)) for _, value in values.values()) == number
    assert sums(adding.db)["writes"] == number
    assert again <= {"a register had another version by then", "stopped", "its shard is handed over"}
    assert not int(strikes or 0)
    adding.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_a_feed_that_is_killed_in_every_round_loses_nothing_and_doubles_nothing(collector: New, provider: Provider) -> None:
    """Newest first, ten rounds; rows arrive between pages, and some late."""
    rng = random.Random(7)
    newest, late = 0, []
    missing = []
    for round_ in range(10):
        provider.orders += [newest + n for n in range(1, 26) if n != 20] + late
        late = [newest + 20]  # comes in the next round, below what is newest by then
        newest += 25
        fed = collector("feed", "--slot", f"{round_:02}", "--param", f"api={provider.url}/feed")
        hits = _killed(fed, provider, rng)
        assert hits or round_
        assert fed.run() in (0, 6)
        rows = sorted(int(str(row["number"])) for row in fed.export("order"))
        assert len(rows) == len(set(rows))
        missing = [number for number in provider.orders if number not in rows]
        if round_:
            assert missing == [] or set(missing) <= set(late)
    assert missing == []
    opened = connect(fed.db, readonly=True)
    try:
        marks = [row[2] for row in opened.rows("marks_of_spider", spider="feed")]
    finally:
        opened.close()
    assert marks == [f"int:{25 * (n + 1)}" for n in range(10)]
    fed.limpet("verify", "--full", "--slot", "09")


def _killed(fed: Collector, provider: Provider, rng: random.Random) -> int:
    """Kill one life of a run after a page or two; whether that happened."""
    wanted = provider.requests + rng.randint(1, 2)
    life = fed.start()
    while life.poll() is None:
        if provider.requests >= wanted:
            life.kill()
            return int(life.wait() == -9)
    return 0


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_a_start_generator_goes_on_where_it_was(collector: New, tmp_path: Path) -> None:
    """Killed while it yields, it yields all, and each once."""
    counting = collector(written(tmp_path, "counting", COUNTING), "--param", "numbers=6000")
    life = counting.start()
    while life.poll() is None and not _has_read(counting.db):
        pass
    life.kill()
    assert life.wait() == -9
    assert counting.run() == 0
    assert sums(counting.db)["in_all"] == sum(range(6000))
    counting.limpet("verify", "--full")


def _has_read(db: str) -> bool:
    """Whether a piece of the generator is in."""
    from limpet.errors import LimpetError

    try:
        opened = connect(db, readonly=True)
    except LimpetError:
        return False
    try:
        return bool(opened.rows_text("SELECT 1 FROM source WHERE position > 0"))
    except LimpetError:
        return False
    finally:
        opened.close()
