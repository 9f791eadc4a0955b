"""A claim, a resume and the question "is anything left?" cost the same, however many tasks wait. The long form is `bench/frontier.py`.

SQLite counts the steps of its machine for each statement, so "the same" is a number here and no time. Other databases'
plans are tested where their dialects are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from limpet.batch import Link
from limpet.settings import Settings
from limpet.store import Store, open_store, standing
from limpet.store.sqlite import Sqlite
from limpet.task import ShardId, TaskKey
from limpet.url import digest16, host_id
from tests.store.hands import Hand, done, found_job

FEW, MANY = 1_000, 100_000
HOSTS = 20
SHARDS = 4

#: Statements that run for every batch or at every start, and what they are given in a plan.
HOT = ("due", "ready_host_after", "ready_of_host", "suspects_due", "next_due", "open_work")


def pending(folder: Path, tasks: int) -> Store:
    """A database in which so many tasks of 20 hosts wait, put in through the store's own batches."""
    store = open_store(f"sqlite:///{folder}/{tasks}.db", settings=Settings(shards=SHARDS, lease_s=600.0))
    found_job(store)
    hand = Hand.on(store)
    hand.take()
    hosts = [(f"h{n}.test", host_id(f"h{n}.test")) for n in range(HOSTS)]
    for start in range(0, tasks, 10_000):
        links = []
        for n in range(start, min(start + 10_000, tasks)):
            name, host = hosts[n % HOSTS]
            text = f"http://{name}/{n}"
            links.append(Link(ShardId(host % SHARDS), host, TaskKey(digest16(text)), text, text, depth=n % 7))
        hand.seed(*links)
    for shard in list(hand.held):
        hand.release(shard)
    hand.leave()
    return store


@contextmanager
def counting(db: Sqlite) -> Iterator[Counter[str]]:
    """SQLite's own count of what its machine did for the statements of a block, by their beginnings."""
    steps: Counter[str] = Counter()

    def note(event: dict[str, object]) -> None:
        status = event["stmt_status"]
        assert isinstance(status, dict)
        steps["steps"] += status["SQLITE_STMTSTATUS_VM_STEP"]
        steps["scanned"] += status["SQLITE_STMTSTATUS_FULLSCAN_STEP"]

    db.connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, note, id=steps)
    try:
        yield steps
    finally:
        db.connection.trace_v2(0, None, id=steps)


def work_of_a_round(store: Store) -> dict[str, Counter[str]]:
    """What it takes to resume, to claim 100 tasks, to finish them while claiming 100 more, and to ask what is left."""
    hand = Hand.on(store)
    assert isinstance(hand.db, Sqlite)
    cost = {}
    with counting(hand.db) as cost["resume"]:
        assert len(hand.take()) == SHARDS
    with counting(hand.db) as cost["claim"]:
        claims = hand.claim(25)
    assert len(claims) == SHARDS * 25
    with counting(hand.db) as cost["finish"]:
        hand.finish(*(done(claim) for claim in claims), want=25)
    with counting(hand.db) as cost["standing"]:
        assert not standing.standing(hand.db, hand.job.id).is_complete
    hand.leave()
    return cost


@pytest.mark.slow
def test_no_step_of_a_round_depends_on_how_many_tasks_wait(tmp_path: Path) -> None:
    """Resume, claim, finish and standing with 100,000 pending tasks take as many steps of SQLite's machine as with 1,000."""
    stores = [pending(tmp_path, tasks) for tasks in (FEW, MANY)]
    few, many = (work_of_a_round(store) for store in stores)
    for name, counts in many.items():
        # A scan would take a hundred times as many; a few more are those of shards that still hold something.
        assert counts["steps"] < 1.1 * few[name]["steps"] + 100, (name, few[name], counts)
        assert counts["scanned"] <= few[name]["scanned"] + SHARDS, (name, few[name], counts)
    for store in stores:
        store.close()


def test_a_round_that_scans_would_be_found_out(tmp_path: Path) -> None:
    """The measure itself: without the index of open tasks, the steps grow with the rows."""
    stores = [pending(tmp_path, tasks) for tasks in (FEW, 5 * FEW)]
    for store in stores:
        store.db.run_text("DROP INDEX task_open")
    few, many = (work_of_a_round(store)["claim"]["steps"] for store in stores)
    assert many > 2 * few
    for store in stores:
        store.close()


@pytest.mark.parametrize("statement", HOT)
def test_the_plan_of_each_question_reads_the_index_of_open_tasks_alone(tmp_path: Path, statement: str) -> None:
    """No table row is met, and no row of the index that is not asked for."""
    store = pending(tmp_path, FEW)
    assert isinstance(store.db, Sqlite)
    given = {"job": 1, "shard": 0, "host": 1, "after": 0, "most": 10, "lane": "waiting"}
    plan = [row[3] for row in store.db.connection.execute(f"EXPLAIN QUERY PLAN {store.db._sql[statement]}", given)]
    store.close()
    about_tasks = [line for line in plan if " t " in f"{line} " or " task " in f"{line} "]
    assert about_tasks
    for line in about_tasks:
        assert "SEARCH" in line, plan
        assert "COVERING INDEX" in line, plan
    assert not any("TEMP B-TREE" in line for line in plan), plan
