"""Each hot statement reaches long tables by its index only, as each database itself tells it. The long form is `plans.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from limpet.store import open_store
from tests.conftest import Databases
from tests.store.hands import SETTINGS, drop_index
from tests.store.plans import HOT, SHARDS, Filled, fill

#: So many that every database would rather read an index than all of it.
TASKS = 200_000


@pytest.fixture(scope="module")
def filled(databases: Databases) -> Iterator[Filled]:
    """A database in which that many tasks were done, run or wait, with what a batch stages."""
    store = open_store(databases.ready(), settings=replace(SETTINGS, shards=SHARDS))
    made = fill(store, TASKS)
    made.stage()
    yield made
    store.db.rollback()
    store.close()


@pytest.mark.parametrize("name", sorted(HOT))
def test_a_hot_statement_reaches_long_tables_by_its_index_only(filled: Filled, name: str) -> None:
    """P116: no batch, claim, take-over or proof of a range reads a table that grows with the crawl."""
    ways = set(filled.ways(name))
    assert ways <= HOT[name], ways - HOT[name]


def test_the_plan_of_a_claim_is_told(filled: Filled) -> None:
    """The measure itself: a way by which each is reached is read out of the plan, and none is overlooked."""
    told = {name for name in HOT if filled.ways(name)}
    optimised_away = {
        "highest_task",
        "ready_host_after",
        "ready_host_between",
        "verify_stamps",
        "task_by_key",
    }  # answered while it was planned
    assert told >= set(HOT) - (optimised_away if filled.db.name == "mysql" else set())


def test_without_its_index_a_scan_would_be_found_out(databases: Databases) -> None:
    """The twin: the index of open tasks is gone."""
    store = open_store(databases.ready(), settings=replace(SETTINGS, shards=SHARDS))
    made = fill(store, TASKS // 10)
    drop_index(store.db, "task_open", "task")
    made.stage()
    assert set(made.ways("next_due")) - HOT["next_due"]
    store.db.rollback()
    store.close()
