"""What differs between databases, and nothing else: connections, bulk staging, errors, statements.

`Database` is the small interface that the rest of the store is written against. It runs named
statements of `sql/core.sql`; a database may override whole statements in `sql/<name>.sql`, each
with a comment that begins "Differs:". SQLite's side of it is in `sqlite.py`. Driver errors become
Limpet's here and there, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol
from urllib.parse import unquote

from limpet.errors import UsageError

Value = Any
Row = tuple[Any, ...]

#: Identifiers of tables and columns that are made from a user's names: checked, then quoted.
IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")

#: Characters of a statement that a message repeats: one that makes a table of many fields is longer than a screen.
DOING_CHARS_MAX = 50

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Made:
    """A table, index, view or trigger, as a database's catalogue has it."""

    kind: str
    table: str
    shape: str  # the text that made it, where that is kept as it was (SQLite); else its columns, in order


class Database(Protocol):
    """One connection, used by one thread. Every method raises only Limpet's errors."""

    name: str  # sqlite | postgres | mysql
    place: str  # where it is, without a password: for messages
    ddl_commits: bool  # a change of the schema commits by itself, so a kill may leave half of one

    def begin(self) -> None:
        """Start a transaction that may write, where staging has not begun it; StoreBusy where another writer holds on too long."""

    def begin_alone(self) -> None:
        """Begin a transaction that may change the schema, which only one connection at a time does; StoreBusy where another is at it."""

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing, for several queries that must agree."""

    def commit(self) -> None:
        """Commit; OutcomeUnknown where the answer is not certain."""

    def rollback(self) -> None:
        """Undo what the transaction did; never raises."""

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the number of rows it changed."""

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run a statement made of checked identifiers, with `?` for values; rows changed."""

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one, in bounded memory."""

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Insert many rows into a table at the price of a few statements; `tail` is a conflict clause."""

    def unstage(self) -> None:
        """Empty the staging tables; where they belong to a transaction, begin it."""

    def has_table(self, name: str) -> bool:
        """Whether a table of that name is there."""

    def locked(self, alias: str) -> str:
        """What ends a query, for the rows of one of its tables to stay as they are until COMMIT."""

    def ddl(self, sql: str) -> str:
        """A statement of the schema, written in SQLite's words, in this database's."""

    def said(self, sql: str, values: Sequence[Value]) -> str:
        """A statement of `run_text` as it would be sent, its values in it: for a script."""

    def catalogue(self) -> dict[str, Made]:
        """Everything that is made in this database, by name."""

    def reopen(self) -> None:
        """Throw the connection away and open a new one: after an unknown outcome."""

    def close(self) -> None:
        """Close; never raises."""

    def incarnation(self) -> str:
        """Names this life of the database: another value means that caches of it are void."""


def short(doing: str) -> str:
    """What a database was asked, for a message: the name of a statement, or the beginning of one that was made.

    >>> short("put_job"), short("SELECT  1\\n FROM " + "x" * 99)
    ('put_job', 'SELECT 1 FROM xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...')
    """
    text = " ".join(doing.split())
    return text if len(text) <= DOING_CHARS_MAX else f"{text[:DOING_CHARS_MAX]}..."


def quote(identifier: str) -> str:
    """A checked identifier, quoted.

    >>> quote("shop_product")
    '"shop_product"'
    """
    if not IDENTIFIER.match(identifier):
        raise UsageError(
            f"{identifier!r} is no name for a table or column: expected a-z, 0-9 and _, at most 63, not beginning with a digit"
        )
    return f'"{identifier}"'


@cache
def statements(dialect: str, now_ms: str) -> dict[str, str]:
    """The named statements of one database: core.sql with its overrides, the clock put in."""
    folder = files("limpet.store").joinpath("sql")
    found = parse(folder.joinpath("core.sql").read_text(encoding="utf-8"))
    override = folder.joinpath(f"{dialect}.sql")
    if override.is_file():
        found |= parse(override.read_text(encoding="utf-8"))
    return {name: sql.replace("{now_ms}", now_ms) for name, sql in found.items()}


def parse(text: str) -> dict[str, str]:
    """Split a file of named statements.

    >>> parse("-- name: one\\n-- why\\nSELECT 1\\n\\n-- name: two\\nSELECT 2\\n")
    {'one': '-- why\\nSELECT 1', 'two': 'SELECT 2'}
    """
    pieces = _NAME.split(text)
    return {name: re.sub(r"\n-- -{10}.*", "", body, flags=re.DOTALL).strip() for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}


def split(sql: str) -> Iterator[str]:
    """The statements of a schema file, its comments left in.

    >>> list(split("CREATE TABLE a (x TEXT); -- why; really\\n\\nCREATE TABLE b (y TEXT);\\n"))
    ['CREATE TABLE a (x TEXT)', 'CREATE TABLE b (y TEXT)']
    """
    bare = "\n".join(line.partition("--")[0].rstrip() for line in sql.splitlines())
    for statement in bare.split(";"):
        if statement.strip():
            yield statement.strip()


def public_dsn(dsn: str) -> str:
    """A database's address without its password, for messages and logs.

    Whatever stands between the first colon of the user's part and the last "@" is taken for the password: one with a "/" or
    "?" that should have been written as %2F or %3F is not shown either. Of the parameters, those that say where it is stay.

    >>> public_dsn("postgresql://me:secret@db/x?password=y"), public_dsn("postgresql:///x?user=me&password=y&host=/run")
    ('postgresql://me:***@db/x', 'postgresql:///x?host=/run')
    >>> public_dsn("mysql://me:pa/ss?@db/x"), public_dsn("postgresql://?service=crawl")
    ('mysql://me:***@db/x', 'postgresql://?service=crawl')
    """
    if "://" not in dsn or dsn.startswith("sqlite:"):
        return dsn
    scheme, _, rest = dsn.partition("://")
    user, at, place = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    where, _, query = place.partition("?")
    kept = "&".join(pair for pair in query.split("&") if pair.partition("=")[0] in ("host", "service", "unix_socket"))
    return f"{scheme}://{name}{':***' if colon else ''}{at}{where}{'?' if kept else ''}{kept}"


def sqlite_path(dsn: str) -> str:
    """The path in `sqlite:///relative.db`, `sqlite:////absolute.db` or a plain path.

    >>> sqlite_path("sqlite:////tmp/x.db"), sqlite_path("sqlite:///x.db"), sqlite_path("x.db")
    ('/tmp/x.db', 'x.db', 'x.db')
    """
    if "://" not in dsn:
        return dsn
    if not dsn.startswith("sqlite:///"):
        raise UsageError(
            f"{public_dsn(dsn)!r} is no address of a SQLite file: expected sqlite:///relative.db or sqlite:////absolute/path.db"
        )
    path = unquote(dsn.removeprefix("sqlite:///"))
    if not path:
        raise UsageError(f"{dsn!r} names no file: expected sqlite:///relative.db or sqlite:////absolute/path.db")
    return path


def repeat_busy(action: Callable[[], Any], *, tries: Iterable[float], wait: Callable[[float], None]) -> Any:
    """Run `action`, repeating it after each wait of `tries` while it raises StoreBusy."""
    from limpet.errors import StoreBusy

    for pause in tries:
        try:
            return action()
        except StoreBusy:
            wait(pause)
    return action()
