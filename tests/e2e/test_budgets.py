"""A budget ends a run: nothing beyond it is spent, nothing that could be paid for waits, and no money goes to and fro for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from limpet.engine.load import load
from tests.conftest import on_sqlite
from tests.e2e.sites import Reply, Served, serving
from tests.servers.kinds import Databases

SPIDER = """
import json

from limpet import Call, Spider

paid = Spider("paid", user_agent="paid/1 (+http://127.0.0.1/bot)")


@paid.task(key="n", cost=1)
async def dear(n: int, *, http, tx):
    await http.get(paid.params["api"], params={"n": n})


@paid.task(key="n", cost="0.5")
async def cheap(n: int, *, http, tx):
    await http.get(paid.params["api"], params={"n": n})


@paid.task(key="n")
async def free(n: int, *, http, tx):
    tx.tally("free")


@paid.start
async def asked(start):
    for handler, n in json.loads(start.params["calls"]):
        yield Call(handler, {"n": n})
"""

#: Seconds after which a run goes on for ever.
PATIENCE_S = 300

#: A process that stands still for a while asks for nothing twice.
PATIENT = ("--lease", "30", "--read-timeout", "120", "--total-timeout", "300")

CREDIT = 1_000_000


@dataclass(frozen=True)
class Paid:
    """The spider's file, its database, and the site that it asks."""

    file: Path
    db: str
    site: Served

    def limpet(self, *words: object) -> tuple[int, dict[str, Any]]:
        """Exit code, and the last JSON object that was printed."""
        command = [sys.executable, "-m", "limpet", *map(str, words), "--db", self.db, "--json"]
        ended = subprocess.run(command, cwd=self.file.parent, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert ended.stdout, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return ended.returncode, found

    def run(self, slot: str, calls: list[tuple[str, int]], *words: object) -> tuple[int, dict[str, Any]]:
        """A run of a slot in a process of its own, so that one that hangs is seen to."""
        asked = ["--param", f"api={self.site.url('/')}", "--param", f"calls={json.dumps(calls)}"]
        return self.limpet("run", self.file, "--slot", slot, *asked, *PATIENT, *words)

    def money(self, slot: str) -> dict[str, Any]:
        """What `status` says of a slot's money."""
        _, found = self.limpet("status", "--slot", slot)
        money: dict[str, Any] = found["jobs"][0]["money"]
        return money


@pytest.fixture
def paid(databases: Databases, tmp_path: Path) -> Iterator[Paid]:
    """A spider whose handlers cost a credit, and half of one."""
    file = tmp_path / "paid.py"
    file.write_text(SPIDER, encoding="utf-8")
    with serving(lambda address, path, asked: Reply("{}")) as site:
        yield Paid(file, databases.ready(), site)


DEAR = [("dear", n) for n in range(20)]
MIXED = [(handler, n) for n in range(10) for handler in ("dear", "cheap")]


def test_a_budget_of_a_day_ends_a_run_and_is_shared_by_the_jobs_of_that_day(paid: Paid) -> None:
    """Five of the first slot leave four for the second: what a finished job has drawn and not used goes back to the day."""
    code, _ = paid.run("a", DEAR[:5], "--budget-day", 9)
    assert code == 0
    code, ended = paid.run("b", DEAR, "--budget-day", 9)
    assert (code, ended["done"]) == (5, 4)
    assert "the budget of the day" in ended["message"]
    money = paid.money("b")
    assert (money["spent_micro"], money["budget_micro"], money["unknown"]) == (4 * CREDIT, None, 0)
    assert (money["day"]["spent_micro"], money["day"]["budget_micro"]) == (9 * CREDIT, 9 * CREDIT)
    code, ended = paid.run("b", DEAR)  # without a limit of days
    assert (code, ended["done"]) == (0, 20)
    assert paid.site.requests == 25
    assert paid.limpet("verify", "--full")[0] == 0


@on_sqlite
@pytest.mark.parametrize(
    ("calls", "budgets", "done", "spent"),
    [
        (DEAR, ["--budget", 7.5], 7, 7),
        (DEAR, ["--budget", 7, "--budget-day", 90], 7, 7),
        (DEAR, ["--budget", 90, "--budget-day", 7], 7, 7),
        (DEAR, ["--budget", 0.5], 0, 0),
        (MIXED, ["--budget", 100], 20, 15),
    ],
)
def test_a_run_ends_when_the_least_of_its_budgets_is_used_up(
    paid: Paid, calls: list[tuple[str, int]], budgets: list[object], done: int, spent: int
) -> None:
    """Also where the other one has much left, and where what is left pays for no task."""
    code, ended = paid.run("a", calls, *budgets)
    assert (code, ended["done"]) == (5 if done < len(calls) else 0, done)
    assert paid.money("a")["spent_micro"] == spent * CREDIT
    assert paid.limpet("verify", "--full")[0] == 0


@on_sqlite
def test_of_two_costs_less_than_the_cheapest_is_left_in_the_end(paid: Paid) -> None:
    """Which tasks are first is not said; what each shard could not use is put together again."""
    code, _ = paid.run("a", MIXED, "--budget", 6.3)
    assert code == 5
    assert paid.money("a")["spent_micro"] == 6 * CREDIT
    code, ended = paid.run("a", MIXED, "--budget", 15)
    assert (code, ended["done"]) == (0, 20)
    assert paid.site.requests == 20


def test_what_costs_nothing_waits_for_no_money(paid: Paid) -> None:
    """However much lies before it that cannot be paid for."""
    calls = [(handler, n) for handler in ("dear", "free") for n in range(400)]
    code, ended = paid.run("a", calls, "--budget", 3)
    assert (code, ended["done"]) == (5, 403)
    assert paid.money("a")["spent_micro"] == 3 * CREDIT
    assert paid.limpet("verify", "--full")[0] == 0


@on_sqlite
def test_a_cheap_task_is_not_held_back_by_a_dear_one(paid: Paid) -> None:
    """What is left pays for no dear one, and for two cheap ones."""
    code, ended = paid.run("a", [*DEAR, *(("cheap", n) for n in range(2))], "--budget", 0.99)
    assert (code, ended["done"]) == (5, 1)
    code, ended = paid.run("a", [], "--budget", 1)
    assert (code, ended["done"]) == (5, 2)


@pytest.mark.parametrize("databases", ["postgres", "sqlite"], indirect=True)
def test_what_an_idle_worker_has_drawn_is_used_by_the_one_that_is_short(paid: Paid) -> None:
    """Nearly all calls lie in one shard, and an allowance of each other one is for a dozen: all of the budget is spent."""
    schema = load(paid.file).spider.schema("dear")
    by_shard: dict[int, list[int]] = {shard: [] for shard in range(4)}
    for n in range(1000):
        by_shard[schema.link({"n": n}, shards=4).shard].append(n)
    calls = [("dear", n) for n in [*by_shard[0][:200], *(by_shard[shard][0] for shard in (1, 2, 3))]]
    code, ended = paid.run("a", calls, "--budget", 150, "--shards", 4, "--workers", 2)
    assert (code, ended["done"]) == (5, 150)
    assert paid.money("a")["spent_micro"] == 150 * CREDIT
    assert paid.site.requests == 150
