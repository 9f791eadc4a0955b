"""Databases to test on. `store` is an open one with an empty job; `hire` makes workers on it.

A test that takes one of these fixtures runs on every database of `KINDS`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from limpet.settings import Settings
from limpet.store import Store, open_store
from tests.servers import mariadb, postgres
from tests.store.hands import SETTINGS, Hand, Product, found_job, table_name

Hire = Callable[..., Hand]


class Databases(Protocol):
    """One kind of database, of which a test may have as many as it likes."""

    name: str

    def new(self) -> str:
        """The address of a new, empty database."""

    def copy(self, dsn: str) -> Callable[[], None]:
        """Keep what a database holds now; the answer puts it back beneath whoever has it open."""

    def close(self) -> None:
        """End what runs for it."""


class SqliteDatabases:
    """SQLite files in one folder."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0

    def new(self) -> str:
        """The address of a file that is not there yet."""
        self.made += 1
        return f"sqlite:///{self.folder}/{self.made}.db"

    def copy(self, dsn: str) -> Callable[[], None]:
        """Through SQLite's backup, which writes under the file's locks, so that open connections see it happen."""
        import apsw

        place = dsn.removeprefix("sqlite:///")
        kept = apsw.Connection(":memory:")
        with apsw.Connection(place) as live, kept.backup("main", live, "main") as step:
            step.step()
        live.close()

        def put_back() -> None:
            beneath = apsw.Connection(place)
            with beneath.backup("main", kept, "main") as step:
                step.step()
            beneath.close()

        return put_back

    def close(self) -> None:
        """Nothing runs for it."""


class PostgresDatabases:
    """Databases of one PostgreSQL server, which a wheel brings."""

    name = "postgres"

    def __init__(self, _folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(postgres.running())

    def new(self) -> str:
        """The address of a new, empty database."""
        return self.server.new_database()

    def copy(self, dsn: str) -> Callable[[], None]:
        """Every row of every table, kept here; putting them back replaces what is there in one transaction."""
        import psycopg

        with psycopg.connect(dsn) as live:
            names = [row[0] for row in live.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
            kept = {}
            for name in names:
                with live.cursor().copy(f'COPY "{name}" TO STDOUT (FORMAT BINARY)') as rows:
                    kept[name] = b"".join(rows)

        def put_back() -> None:
            with psycopg.connect(dsn) as beneath:
                beneath.execute("TRUNCATE " + ", ".join(f'"{name}"' for name in names))
                for name, content in kept.items():
                    with beneath.cursor().copy(f'COPY "{name}" FROM STDIN (FORMAT BINARY)') as rows:
                        rows.write(content)

        return put_back

    def close(self) -> None:
        """End the server."""
        self._stack.close()


class MariadbDatabases:
    """Databases of one MariaDB server, which the system's package brings."""

    name = "mysql"

    def __init__(self, _folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(mariadb.running())

    def new(self) -> str:
        """The address of a new, empty database."""
        return self.server.new_database()

    def copy(self, dsn: str) -> Callable[[], None]:
        """Every row of every table, kept beside it; putting them back replaces what is there in one transaction."""
        import pymysql

        from limpet.store.mysql import arguments

        with contextlib.closing(pymysql.connect(**arguments(dsn))) as live, live.cursor() as cursor:
            cursor.execute("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_TYPE = 'BASE TABLE'")
            names = [row[0] for row in cursor.fetchall()]
            kept = {}
            for name in names:
                cursor.execute(f"SELECT * FROM `{name}`")
                kept[name] = list(cursor.fetchall())

        def put_back() -> None:
            with contextlib.closing(pymysql.connect(**arguments(dsn))) as beneath, beneath.cursor() as cursor:
                for name, rows in kept.items():
                    cursor.execute(f"DELETE FROM `{name}`")
                    for row in rows:
                        cursor.execute(f"INSERT INTO `{name}` VALUES ({','.join(['%s'] * len(row))})", row)
                beneath.commit()

        return put_back

    def close(self) -> None:
        """End the server."""
        self._stack.close()


#: A file system in memory, on Linux: a commit costs no fsync there.
MEMORY = "/dev/shm"

#: Every database that the suite of the store runs on.
KINDS: dict[str, Callable[[Path], Databases]] = {
    name: kind
    for name, kind in {"sqlite": SqliteDatabases, "postgres": PostgresDatabases, "mysql": MariadbDatabases}.items()
    if name in os.environ.get("LIMPET_DATABASES", "sqlite").split(",")
}


@pytest.fixture(scope="session", params=sorted(KINDS))
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """One kind of database after the other, in memory where there is a file system for it: these tests never cut the power."""
    with tempfile.TemporaryDirectory(prefix="limpet-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        kind = KINDS[request.param](Path(folder))
        yield kind
        kind.close()


@pytest.fixture
def make_store(databases: Databases) -> Iterator[Callable[..., Store]]:
    """Opens stores; `make_store()` on a new database, `make_store(dsn)` on one that is there."""
    opened: list[Store] = []

    def make(dsn: str = "", settings: Settings = SETTINGS) -> Store:
        opened.append(open_store(dsn or databases.new(), settings=settings))
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
