"""Feeds, counters and shared values under kills: no row missing, none double, totals exact, no update lost."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from limpet.store import shared
from tests.collecting import scenes
from tests.collecting.collector import environment
from tests.collecting.conftest import New, on_sqlite
from tests.collecting.provider import Provider
from tests.collecting.scenes import Kills, Stage
from tests.conftest import on_servers


def test_totals_are_exact_under_kills_and_freezes(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Four workers; one is killed, one is frozen for longer than its lease."""
    assert scenes.tallies(Stage(collector, tmp_path, provider), 600, Kills(4, (40, 80), at_least=2, freeze_s=3.0))["kills and freezes"]


@on_servers
def test_no_update_of_a_register_is_lost_and_no_innocent_runs_again(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Contended by three workers."""
    assert scenes.registers(Stage(collector, tmp_path, provider), 200)["again"]


@on_sqlite
@pytest.mark.parametrize("rising", [False, True])
def test_a_feed_that_is_killed_in_every_round_loses_nothing_and_doubles_nothing(
    collector: New, provider: Provider, tmp_path: Path, rising: bool
) -> None:
    """Newest first and ascending; rows arrive between pages, and some late."""
    assert scenes.fed(Stage(collector, tmp_path, provider), 6, rising=rising)["kills"]


@on_sqlite
def test_a_feed_whose_page_was_gone_once_loses_no_order(collector: New, provider: Provider) -> None:
    """Newest first, the second page answers 404: the mark stays, people are told, and the next sweep goes down to the end."""
    provider.failing, provider.orders, provider.gone = 0, [*range(1, 101)], {'feed?{"before": "91"}'}
    feed = collector("feed", "--slot", "01", "--param", f"api={provider.url}/feed")
    assert feed.run() == 0
    assert "mark orders stays where it is: skipped as gone: 1" in feed.log()
    assert "held back: skipped as gone: 1" in feed.limpet("status")
    assert scenes.marks_of(feed) == []
    provider.gone.clear()
    later = collector("feed", "--slot", "02", "--param", f"api={provider.url}/feed")
    assert later.run() == 0
    assert sorted(int(str(row["number"])) for row in later.export("order")) == [*range(1, 101)]
    assert scenes.marks_of(later) == [100]


@on_sqlite
def test_a_run_of_a_job_that_is_finished_and_proved_moves_a_mark_that_a_kill_left_behind(collector: New, provider: Provider) -> None:
    """Killed after the last commit, and proved by `limpet verify`: nothing else is left to do."""
    provider.failing, provider.orders = 0, [*range(1, 21)]
    feed = collector("feed", "--slot", "01", "--param", f"api={provider.url}/feed")
    life = subprocess.run(
        feed.command("run", str(feed.spider), "--db", feed.db, *feed.flags, *feed.arguments), cwd=feed.folder, check=False,
        env={**environment(), "LIMPET_FAILPOINT": "before_retire=kill"},
    )  # fmt: skip
    assert life.returncode == -signal.SIGKILL
    feed.limpet("verify", "--full")
    assert scenes.marks_of(feed) == []
    assert "the next run moves it" in feed.limpet("status")
    assert feed.run() == 6
    assert scenes.marks_of(feed) == [20]
    assert feed.run() == 6
    assert scenes.marks_of(feed) == [20]


MIXED = """
from decimal import Decimal
from limpet import Spider, Start, Tx, call

mixed = Spider("mixed")

@mixed.task(key="n")
async def ask(n: int, *, tx: Tx) -> None:
    tx.mark("m").seen({0: Decimal("NaN"), 1: "\\ud800", 2: "a\\0"}.get(n, n if n % 2 else str(n)))

@mixed.start
async def starts(start: Start):
    for n in range(12):
        yield call(ask, n=n)
"""


@on_sqlite
def test_bad_values_of_a_mark_are_their_tasks_faults_and_types_that_differ_are_told(collector: New, tmp_path: Path) -> None:
    """The run ends, with dead letters that say why; all other work is kept, and is not done again."""
    mixed = collector(scenes.written(tmp_path, "mixed", MIXED), "--lease", "60")
    assert mixed.run() in (0, 3)
    assert "mark m stays where it is: dead tasks of its handlers: 3; values of several types: int, str" in mixed.log()
    dead = mixed.limpet("dead", "--json")
    assert [dead.count(word) for word in ("has no order", "the lone surrogate", "a NUL")] == [1, 1, 1]
    assert "held back: dead tasks of its handlers: 3; values of several types: int, str" in mixed.limpet("status")
    assert scenes.counted(mixed.db, "SELECT COUNT(*) FROM attempt") == 12
    mixed.limpet("verify", "--full")


@on_sqlite
def test_a_start_generator_goes_on_where_it_was(collector: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it yields, it yields all, and each once."""
    counting = collector(scenes.written(tmp_path, "counting", scenes.COUNTING), "--param", "numbers=6000")
    with monkeypatch.context() as patch:
        patch.setenv("LIMPET_FAILPOINT", "after_commit@1=kill")
        assert counting.run() == -signal.SIGKILL
    assert 0 < scenes.counted(counting.db, "SELECT MAX(position) FROM source") < 6000
    assert counting.run() == 0
    assert scenes.looked(counting.db, lambda db: shared.tallies(db, 1))["in_all"] == sum(range(6000))
    counting.limpet("verify", "--full")
