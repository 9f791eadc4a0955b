"""`limpet backfill`: exactly what is missing, unfinished or failed is asked for, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Ended, Limpet
from tests.e2e.daily import Daily, daily
from tests.servers.kinds import Databases

NOW = "2026-11-29T18:00:00Z"  # slot 2026-11-30 of Shanghai was due


@pytest.fixture
def prices(databases: Databases, tmp_path: Path) -> Iterator[Daily]:
    """A spider that is due each day at 00:30 in Shanghai, of forty products, with a database of its own."""
    with daily(tmp_path, products=40, db=databases.ready()) as made:
        yield made


def backfill(limpet: Limpet, prices: Daily, first: str, last: str, *more: object) -> Ended:
    """The command, as a person gives it."""
    return limpet("backfill", prices.file, "--db", prices.db, "--from", first, "--to", last, "--at", NOW, *more)


def objects(ended: Ended) -> list[dict[str, Any]]:
    """The JSON objects that were printed."""
    return [json.loads(line) for line in ended.lines]


def test_exactly_the_missing_slots_are_made(limpet: Limpet, prices: Daily) -> None:
    """A line a slot and a sum; given again it asks for nothing and exits with 0."""
    assert limpet("run", prices.file, "--db", prices.db, "--slot", "2026-11-28").code == 0
    prices.forget()
    ended = backfill(limpet, prices, "2026-11-27", "2026-11-30")
    assert ended.code == 0, ended
    assert [line.split(":")[0] for line in ended.lines] == [
        "2026-11-27  made",
        "2026-11-28  left alone",
        "2026-11-29  made",
        "2026-11-30  made",
        "prices",
    ]
    assert "4 slots: 3 made, 1 left alone, 12" in ended.lines[-1]
    assert prices.states() == dict.fromkeys(["2026-11-28", "2026-11-27", "2026-11-29", "2026-11-30"], "finished")
    assert prices.asked == dict.fromkeys(prices.asked, 3)
    assert len(prices.asked) == 41
    prices.forget()
    again = backfill(limpet, prices, "2026-11-27", "2026-11-30", "--only-missing", "--json")
    assert again.code == 0
    assert objects(again)[-1]["summary"] == {
        "made": 0, "gone_on_with": 0, "tried_again": 0, "left_alone": 4, "slots": 4, "not_reached": 0, "requests": 0, "exit_code": 0,
    }  # fmt: skip
    assert prices.asked == {}


def test_of_a_finished_slot_only_what_failed_is_asked_for_again(limpet: Limpet, prices: Daily) -> None:
    """Thirty products fail, then none does: thirty requests, no more; what fails again is exit 3."""
    prices.broken = set(range(30))
    assert backfill(limpet, prices, "2026-11-29", "2026-11-30").code == 3
    prices.forget()
    prices.broken = {7}
    ended = backfill(limpet, prices, "2026-11-30", "2026-11-30", "--json")
    assert ended.code == 3
    assert (objects(ended)[0]["put_back"], objects(ended)[0]["what"]) == (30, "tried again")
    assert prices.asked == {f"p/{number}": 1 for number in range(30)}
    prices.forget()
    prices.broken = set()
    assert backfill(limpet, prices, "2026-11-29", "2026-11-30").code == 0
    assert prices.asked == {f"p/{number}": 2 if number == 7 else 1 for number in range(30)}
    assert [row["rows"] for row in objects(limpet("export", "--db", prices.db, "--json"))[0]["datasets"]] == [80]
    assert limpet("verify", "--full", "--db", prices.db).code == 0


def test_an_unfinished_slot_is_gone_on_with(limpet: Limpet, prices: Daily) -> None:
    """What its dead worker had committed is not asked for again."""

    def price(number: int) -> int:
        if sum(prices.asked.values()) > 10 and not prices.go.is_set():  # whichever it is: the order of products is that of their keys
            prices.waiting.set()
            prices.go.wait(300)
        return 100 + number

    prices.price = price
    child = prices.start("run", "--slot", "2026-11-29", "--concurrency", "1", "--commit-pages-first", "1")
    assert prices.waiting.wait(60)
    child.kill()
    child.communicate()
    prices.go.set()
    before = sum(prices.asked.values())
    ended = backfill(limpet, prices, "2026-11-28", "2026-11-29", "--json")
    assert ended.code == 0
    assert [one["what"] for one in objects(ended)[:-1]] == ["made", "gone on with"]
    assert [one["was"] for one in objects(ended)[:-1]] == ["missing", "unfinished"]
    asked_twice = sum(prices.asked.values()) - 2 * 41
    assert before > 5
    assert 0 <= asked_twice < before


def test_the_exit_code_is_that_of_the_worst_slot(limpet: Limpet, prices: Daily) -> None:
    """A slot with dead letters, and one that a person has paused; the others are made all the same."""
    prices.broken = {1}
    assert backfill(limpet, prices, "2026-11-27", "2026-11-27").code == 3
    assert limpet("run", prices.file, "--db", prices.db, "--slot", "2026-11-28").code == 3
    assert limpet("retry", "--db", prices.db, "--slot", "2026-11-28").code == 0
    assert limpet("pause", "--db", prices.db, "--slot", "2026-11-28").code == 0
    ended = backfill(limpet, prices, "2026-11-27", "2026-11-29", "--json")
    assert ended.code == 7
    assert [one["exit_code"] for one in objects(ended)[:-1]] == [3, 7, 3]
    assert objects(ended)[-1]["summary"]["exit_code"] == 7
    assert limpet("backfill", prices.file, "--from", "2026-11-30", "--to", "2026-11-29").code == 2
    assert limpet("backfill", prices.file, "--from", "yesterday", "--to", "2026-11-29").code == 2


@pytest.mark.slow
def test_a_backfill_beside_the_schedules_run_of_a_slot_is_one_job(limpet: Limpet, prices: Daily) -> None:
    """Four people and four schedules at once: each page once, and all exit with 0."""
    commands = [["schedule", "--at", NOW], ["backfill", "--from", "2026-11-30", "--to", "2026-11-30", "--at", NOW]] * 4
    children = [prices.start(*words, "--lease", "120") for words in commands]
    ended = [(child.communicate(timeout=300), child.returncode) for child in children]
    assert [code for _, code in ended] == [0] * len(children), ended
    assert prices.states() == {"2026-11-30": "finished"}
    assert prices.asked == dict.fromkeys(prices.asked, 1)
    assert len(prices.asked) == 41


def test_a_spider_without_a_schedule_has_days(limpet: Limpet, tmp_path: Path) -> None:
    """Its slots are plain days; nothing is known of when they are due."""
    with daily(tmp_path, "", products=1) as prices:
        assert backfill(limpet, prices, "2026-12-30", "2027-01-01").code == 0
        assert list(prices.states()) == ["2026-12-30", "2026-12-31", "2027-01-01"]
        assert backfill(limpet, prices, "2026-W48", "2026-W49").code == 2
