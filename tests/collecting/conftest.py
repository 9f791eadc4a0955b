"""A provider, and collectors of the examples on the database of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.collecting.collector import EXAMPLES, Collector
from tests.collecting.provider import Provider, providing
from tests.conftest import Databases

New = Callable[..., Collector]

on_sqlite = pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
on_postgres = pytest.mark.parametrize("databases", ["postgres"], indirect=True)
on_mysql = pytest.mark.parametrize("databases", ["mysql"], indirect=True)


@pytest.fixture
def provider() -> Iterator[Provider]:
    """The paid API."""
    with providing() as served:
        yield served


@pytest.fixture
def collector(databases: Databases, tmp_path: Path) -> New:
    """Makes collectors of one new database: `collector("serp", "--slot", "2026-11-30")`."""
    db = databases.new()

    def new(spider: str | Path, *arguments: str) -> Collector:
        place = spider if isinstance(spider, Path) else EXAMPLES / f"{spider}.py"
        return Collector(place, db, tmp_path, arguments)

    return new
