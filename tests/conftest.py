"""Databases to test on. `store` is an open one with an empty job; `hire` makes workers on it.

A test that takes one of these fixtures runs on every database that can be had here; LIMPET_DATABASES names some of them
(sqlite,postgres,mysql). What is about one database alone says so by `on_sqlite` or `on_servers`, never by a skip.

Examples of a law have no deadline: cores are shared, and a slow moment is no broken law.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from limpet.settings import Settings
from limpet.store import Store, open_store
from tests.servers.kinds import NAMES, Databases, Kinds, chosen
from tests.store.hands import SETTINGS, Hand, Product, found_job, table_name

Hire = Callable[..., Hand]

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

#: A test of what only a file has: its locks, its log, its place on a disk.
on_sqlite = pytest.mark.parametrize("databases", ["sqlite"], indirect=True)

#: A test of what only a server has: sessions, row locks, restarts.
on_servers = pytest.mark.parametrize("databases", ["mysql", "postgres"], indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    """Find out which databases can be had; in CI, all of them must be."""
    try:
        config.stash[CHOSEN], config.stash[LEFT_OUT] = chosen(os.environ)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


CHOSEN = pytest.StashKey[list[str]]()
LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_report_header(config: pytest.Config) -> str:
    """Which databases the store is tested on, and which are left out."""
    left_out = f"; left out: {', '.join(config.stash[LEFT_OUT])}" if config.stash[LEFT_OUT] else ""
    return f"databases: {', '.join(config.stash[CHOSEN])}{left_out}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a database that was not chosen; the header names it."""
    without = [item for item in items if _database_of(item) not in ("", *config.stash[CHOSEN])]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in set(without)]


def _database_of(item: pytest.Item) -> str:
    return item.callspec.params.get("databases", "") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


@pytest.fixture(scope="session")
def kinds() -> Iterator[Kinds]:
    """Every kind of database, each started when it is first asked for."""
    made = Kinds()
    yield made
    made.close()


@pytest.fixture(scope="session", params=sorted(NAMES))
def databases(request: pytest.FixtureRequest, kinds: Kinds) -> Databases:
    """One kind of database after the other."""
    return kinds.of(request.param)


@pytest.fixture
def make_store(databases: Databases) -> Iterator[Callable[..., Store]]:
    """Opens stores; `make_store()` on a new database, `make_store(dsn)` on one that is there."""
    opened: list[Store] = []

    def make(dsn: str = "", settings: Settings = SETTINGS) -> Store:
        opened.append(open_store(dsn or databases.ready(), settings=settings))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """An open database with an empty job of four shards and a dataset of products."""
    made = make_store()
    found_job(made)
    made.ensure_datasets("shop", {table_name(Product): Product})
    return made


@pytest.fixture
def hire(store: Store) -> Iterator[Hire]:
    """Makes workers of the store's job, each with a connection of its own: `hire()` takes every free shard, `hire(0, 1)` two."""
    hired: list[Hand] = []

    def one(*shards: int, take: bool = True) -> Hand:
        hand = Hand.on(store)
        hired.append(hand)
        if take:
            hand.take(*shards)
        return hand

    yield one
    for hand in hired:
        hand.leave()
