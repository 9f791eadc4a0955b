"""PostgreSQL: for many workers on many machines. READ COMMITTED, binary COPY into temporary tables.

COPY costs 0.02 ms of client CPU for a page, executemany 0.27. Staging happens in the transaction, but
before its fence: a worker frozen inside a COPY that came later could not be ended by any time-out. All
settings are SET LOCAL, so that they hold behind a pooler in transaction mode too, and they are read back
on each new connection. A call that takes longer than its deadline is ended by closing the socket: a
black hole after COMMIT answers keep-alives for ever.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cache

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from limpet.errors import (
    InvariantBroken,
    OutcomeUnknown,
    PoisonRow,
    StoreBusy,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from limpet.store.deadline import Deadlines
from limpet.store.dialect import Row, Value, public_dsn, statements

#: The clock of the database, read anew by each statement: now() is the transaction's start.
NOW_MS = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"

#: Limits of a transaction, in milliseconds, all below the shortest lease that is sensible: a worker that is
#: frozen inside one must not block a take-over. A lease shorter than twice this shortens them (`limits`).
STATEMENT_MS = 30_000
IDLE_MS = 5_000
LOCK_MS = 5_000

#: Seconds after which a call is ended by closing its socket.
DEADLINE_S = 60.0

#: Types of the staging tables' columns, for COPY.
STAGE_TYPES = {
    "stage_link": "int8 int8 int8 bytea int8 int8 int8 text text text text int8 int8 int8 bytea",
    "stage_try": "int8 int8 int8 int8 int8 int8 text text int8 int8 int8 int8 int8 int8 text text int8 bytea int8 int8 text text",
    "stage_key": "int8 bytea",
    "stage_id": "int8",
}

_BUSY = (pg.DeadlockDetected, pg.SerializationFailure, pg.LockNotAvailable, pg.QueryCanceled)
_DATA_CLASSES = ("22", "23", "54")


class Postgres:
    """One connection to a PostgreSQL server, for one thread."""

    name = "postgres"

    def __init__(self, dsn: str, *, lease_s: float = 10.0, readonly: bool = False) -> None:
        self.dsn = dsn
        self.place = public_dsn(dsn)
        self.readonly = readonly
        self._limit_ms = max(200, round(lease_s * 500))
        self._sql = {name: translate(sql) for name, sql in statements("postgres", NOW_MS).items()}
        self._openings = 0
        self._deadlines = Deadlines(DEADLINE_S)
        self._open()

    # -- life ------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._errors("connect"):
            self.connection = psycopg.connect(
                self.dsn, autocommit=True, connect_timeout=10, application_name="limpet", prepare_threshold=None,
                keepalives_idle=5, keepalives_interval=2, keepalives_count=3, tcp_user_timeout=15_000,
            )  # fmt: skip
            self._openings += 1
            found = self.connection.execute("SHOW server_encoding").fetchone()
            if not found or found[0] != "UTF8":
                raise UsageError(f"{self.place}: the database's encoding is {found and found[0]}; Limpet needs UTF8")
            if not self.readonly:
                self._begin()
                isolation = self.connection.execute("SHOW transaction_isolation").fetchone()
                writable = self.connection.execute("SHOW transaction_read_only").fetchone()
                self.connection.execute("ROLLBACK")
                if not isolation or isolation[0] != "read committed":
                    raise StoreUnavailable(f"{self.place}: expected READ COMMITTED, found {isolation}")
                if not writable or writable[0] != "off":
                    raise StoreUnavailable(f"{self.place} takes no writes (a replica?): name the primary")

    def reopen(self) -> None:
        """Throw the connection away and open a new one: nothing that it held stays."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close the connection; never raises."""
        with contextlib.suppress(Exception):
            self.connection.close()

    def incarnation(self) -> str:
        """The server's start and timeline, and the number of this connection: another value voids every cache."""
        with self._errors("incarnation"):
            row = self.connection.execute("SELECT pg_postmaster_start_time()::text, pg_is_in_recovery()::text").fetchone()
        return f"{row}:{self._openings}"

    # -- transactions ----------------------------------------------------------------------

    def _begin(self) -> None:
        limit = self._limit_ms
        self.connection.execute(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
            f"SET LOCAL statement_timeout = {min(STATEMENT_MS, 4 * limit)}; SET LOCAL lock_timeout = {min(LOCK_MS, limit)}; "
            f"SET LOCAL idle_in_transaction_session_timeout = {min(IDLE_MS, limit)}; SET LOCAL synchronous_commit = on"
        )

    def _in_transaction(self) -> bool:
        return self.connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def begin(self) -> None:
        """BEGIN with this transaction's limits; nothing where staging has begun it."""
        if not self._in_transaction():
            with self._errors("begin"):
                self._begin()

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing."""
        with self._errors("begin"):
            self.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def commit(self) -> None:
        """COMMIT; OutcomeUnknown where the connection is lost or the answer never comes.

        A COMMIT of a failed transaction is answered ROLLBACK without an error, so its state is asserted first.
        """
        if self.connection.info.transaction_status is not TransactionStatus.INTRANS:
            raise InvariantBroken(f"{self.place}: COMMIT outside a healthy transaction", invariant="commit")
        try:
            with self._deadline():
                self.connection.execute("COMMIT")
        except (*_BUSY,) as error:
            raise StoreBusy(f"{self.place}: COMMIT was refused: {error}") from error
        except psycopg.Error as error:
            if error.sqlstate and error.sqlstate[:2] in _DATA_CLASSES:
                raise PoisonRow(f"{self.place}: COMMIT was refused: {error}") from error
            raise OutcomeUnknown(f"{self.place}: no certain answer to COMMIT: {_told(error)}") from error

    def rollback(self) -> None:
        """Undo; never raises."""
        with contextlib.suppress(Exception):
            if self._in_transaction():
                self.connection.execute("ROLLBACK")

    # -- statements ------------------------------------------------------------------------

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the rows it changed."""
        with self._errors(statement), self._deadline():
            return max(0, self.connection.execute(self._sql[statement], values).rowcount)

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""
        with self._errors(statement), self._deadline():
            return self.connection.execute(self._sql[statement], values).fetchall()

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""
        with self._errors(statement), self._deadline():
            return self.connection.execute(self._sql[statement], values).fetchone()

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run SQL made of checked identifiers; the rows it changed."""
        with self._errors(sql), self._deadline():
            return max(0, self.connection.execute(positional(sql), values).rowcount)

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""
        with self._errors(sql), self._deadline():
            return self.connection.execute(positional(sql), values).fetchall()

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one, from a cursor on the server."""
        with self._errors(sql), self.connection.transaction(), self.connection.cursor(name="limpet_stream") as cursor:
            cursor.itersize = 2000
            cursor.execute(positional(sql), values)
            yield from cursor

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Rows into a staging table by binary COPY; into any other by a few statements of many values."""
        if not rows:
            return
        with self._errors(table), self._deadline(), self.connection.cursor() as cursor:
            types = STAGE_TYPES.get(table)
            if types and not tail:
                with cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
                    copy.set_types(types.split())
                    for row in rows:
                        copy.write_row(row)
                return
            step = max(1, 30_000 // width)
            one = f"({','.join(['%s'] * width)})"
            for start in range(0, len(rows), step):
                piece = rows[start : start + step]
                flat = [value for row in piece for value in row]
                cursor.execute(f"INSERT INTO {table} VALUES {','.join([one] * len(piece))} {tail}", flat)

    def unstage(self) -> None:
        """Begin the transaction and empty the staging tables, which are this session's and made where they are missing."""
        self.begin()
        with self._errors("unstage"), self._deadline():
            self.connection.execute(self._sql["stage_tables"])
            self.connection.execute(self._sql["unstage"])

    def has_table(self, name: str) -> bool:
        """Whether a table of that name is on the search path."""
        return bool(self.rows_text("SELECT 1 WHERE to_regclass(?) IS NOT NULL", (name,)))

    def ddl(self, sql: str) -> str:
        """A statement of the schema, with PostgreSQL's types."""
        return schema(sql)

    def integrity_check(self) -> list[str]:
        """Nothing: the server looks after its own files."""
        return []

    # -- errors ----------------------------------------------------------------------------

    def _deadline(self) -> contextlib.AbstractContextManager[None]:
        return self._deadlines.over(self.connection.fileno())

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except _BUSY as error:
            raise StoreBusy(f"{self.place}: {_told(error)} ({doing})") from error
        except psycopg.Error as error:
            state = error.sqlstate or ""
            if state[:2] in _DATA_CLASSES:
                raise PoisonRow(f"{self.place} refuses the data ({doing}): {_told(error)}") from error
            if isinstance(error, psycopg.DataError) and not state:
                raise PoisonRow(f"{self.place} refuses the data ({doing}): {_told(error)}") from error
            if not state or state[:2] in ("08", "25", "53", "55", "57", "58") or self.connection_is_lost():
                raise StoreUnavailable(f"{self.place}: {_told(error)} ({doing})") from error
            raise StoreError(f"{self.place}: {type(error).__name__}: {_told(error)} ({doing})") from error
        except (OverflowError, UnicodeError, TypeError) as error:
            raise PoisonRow(f"{self.place} refuses the data ({doing}): {error}") from error

    def connection_is_lost(self) -> bool:
        """Whether this connection can no longer be used."""
        return getattr(self, "connection", None) is None or self.connection.closed or self.connection.broken

    def lock_holder(self) -> str:
        """Nobody that can be told here: `doctor` asks pg_blocking_pids."""
        return ""


def _told(error: Exception) -> str:
    """The first line of what the driver says, which holds no password."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)\b")


@cache
def translate(sql: str) -> str:
    """A statement with psycopg's placeholders.

    >>> translate("SELECT :a, x::text, '50 %' WHERE b = :b")
    "SELECT %(a)s, x::text, '50 %%' WHERE b = %(b)s"
    """
    return _NAMED.sub(r"%(\1)s", sql.replace("%", "%%"))


@cache
def positional(sql: str) -> str:
    """SQL with `?` for values, with psycopg's placeholders."""
    return sql.replace("%", "%%").replace("?", "%s")


def schema(sql: str) -> str:
    """The schema of SQLite's form, as PostgreSQL says it."""
    for pattern, said in (
        (r"\bINTEGER PRIMARY KEY\b", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
        (r"\bINTEGER\b", "BIGINT"),
        (r"\bBLOB\b", "BYTEA"),
        (r"\bREAL\b", "DOUBLE PRECISION"),
        (r"\bx''", "''"),
        (r"\) WITHOUT ROWID", ")"),
    ):
        sql = re.sub(pattern, said, sql)
    return sql
