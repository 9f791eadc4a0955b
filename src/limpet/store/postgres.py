"""PostgreSQL: for many workers on many machines. READ COMMITTED, binary COPY into temporary tables.

COPY costs 0.02 ms of client CPU for a page, executemany 0.27. Staging happens in the transaction, but
before its fence: a worker frozen inside a COPY that came later could not be ended by any time-out. All
settings are SET LOCAL, so that they hold behind a pooler in transaction mode too, and they are read back
on each new connection. A call that takes longer than its deadline is ended by closing the socket: a
black hole after COMMIT answers keep-alives for ever.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from limpet.errors import (
    InvariantBroken,
    OutcomeUnknown,
    PoisonRow,
    RightMissing,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from limpet.store.deadline import Deadlines
from limpet.store.dialect import Made, Row, Value, public_dsn, short, statements
from limpet.store.postgres_address import address, wrong_option
from limpet.store.postgres_words import positional, schema, translate
from limpet.store.rights import postgres_grant, refused_at_the_door
from limpet.store.session import Session

#: The clock of the database, read anew by each statement: now() is the transaction's start.
NOW_MS = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"

#: Limits of a transaction, in milliseconds, all below the shortest lease that is sensible: a worker that is
#: frozen inside one must not block a take-over. A lease shorter than twice this shortens them (`limits`).
STATEMENT_MS = 30_000
#: A statement gets so much even where the lease is shorter: a slow disk is no reason to end it.
STATEMENT_MS_MIN = 3_000
IDLE_MS = 5_000
LOCK_MS = 5_000

#: Seconds beyond its statement's limit after which a call of a transaction is ended by closing its socket.
DEADLINE_MORE_S = 5.0

#: Seconds for a call that only reads: a proof over millions of rows takes its time, a black hole does not end.
READ_DEADLINE_S = 300.0

#: The advisory lock of whoever changes the schema of a database: "LMPT".
SCHEMA_LOCK = 0x4C4D5054

#: Rows that a stream fetches at once.
STREAM_ROWS = 2000

#: This life of the database, and what of it a role may read that is allowed less.
LIVES = (
    "SELECT pg_postmaster_start_time()::text, CASE WHEN pg_is_in_recovery() THEN 'replica'"
    " ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END",
    "SELECT pg_postmaster_start_time()::text, pg_is_in_recovery()::text",
)

#: The schema that this database's tables are in: the first of the search path that has them, or would get them.
HOME = """
SELECT n.oid, n.nspname::text AS name
  FROM unnest(current_schemas(false)) WITH ORDINALITY AS s(name, place) JOIN pg_namespace AS n ON n.nspname = s.name
  LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'meta'
 ORDER BY c.oid IS NULL, s.place LIMIT 1
"""

#: Tables and views, indexes, triggers; those of a session's own are in another schema.
CATALOGUE = f"""
WITH home AS ({HOME})
SELECT c.relname::text, CASE c.relkind WHEN 'v' THEN 'view' ELSE 'table' END, c.relname::text,
       string_agg(a.attname::text, ', ' ORDER BY a.attnum)
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relnamespace = (SELECT oid FROM home) AND c.relkind IN ('r', 'p', 'v') GROUP BY c.relname, c.relkind
UNION ALL
SELECT i.relname::text, 'index', t.relname::text, string_agg(a.attname::text, ', ' ORDER BY k.place)
  FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_class AS t ON t.oid = x.indrelid
 CROSS JOIN LATERAL unnest(x.indkey) WITH ORDINALITY AS k(number, place)
  JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum = k.number
 WHERE i.relnamespace = (SELECT oid FROM home) GROUP BY i.relname, t.relname
UNION ALL
SELECT g.tgname::text, 'trigger', t.relname::text, ''
  FROM pg_trigger AS g JOIN pg_class AS t ON t.oid = g.tgrelid
 WHERE t.relnamespace = (SELECT oid FROM home) AND NOT g.tgisinternal
"""

#: Types of the staging tables' columns, for COPY.
STAGE_TYPES = {
    "stage_link": "int8 int8 int8 bytea int8 int8 int8 text text text text int8 int8 int8 bytea",
    "stage_try": "int8 int8 int8 int8 int8 int8 text text int8 int8 int8 int8 int8 int8 text text int8 bytea int8 int8 text text",
    "stage_key": "int8 bytea",
    "stage_id": "int8",
}

_BUSY = (pg.DeadlockDetected, pg.SerializationFailure, pg.LockNotAvailable, pg.QueryCanceled)
_DATA_CLASSES = ("22", "23", "54", "P0")  # P0: a trigger of somebody's own raised
_UNAVAILABLE_CLASSES = ("08", "25", "53", "55", "57", "58")
_CORRUPT = ("XX001", "XX002")
#: The connection lives, but leads to a server that has become a replica, or is going.
_ELSEWHERE = ("25006", "57P01", "57P02", "57P03")


class Postgres:
    """One connection to a PostgreSQL server, for one thread."""

    name = "postgres"
    ddl_commits = False

    def __init__(self, dsn: str, *, lease_s: float = 10.0, readonly: bool = False, deadline_s: float | None = None) -> None:
        self.dsn = dsn
        self.place = public_dsn(dsn)
        self.readonly = readonly
        self._limits = limits(lease_s)
        self._session = Session(
            self.place, self.reopen, write_s=deadline_s or self._limits["statement_timeout"] / 1000 + DEADLINE_MORE_S,
            read_s=deadline_s or READ_DEADLINE_S, readonly=readonly,
        )  # fmt: skip
        self._sql = _translated()
        self._address = address(dsn)
        self._openings = 0
        self._deadlines = Deadlines()
        self._has_written = False  # in this transaction, to rows that others may wait for
        self._life = LIVES[0]
        self._open()

    # -- life ------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            with self._errors("connect"):
                self.connection = psycopg.connect(autocommit=True, prepare_threshold=None, **self._address)
        except StoreUnavailable as error:
            advice = refused_at_the_door(str(error), role=str(self._address.get("user", "this role")))
            advice = advice or wrong_option(str(error))
            if self._openings or not advice:
                raise
            raise UsageError(f"{error}; {advice}") from error
        try:
            with self._errors("connect"), self._deadline(self._session.write_s):
                self._life = self._readable_life()
                if not self.readonly:
                    self._read_back()
        except BaseException:
            self._hang_up()
            raise
        self._openings += 1
        self._session.opened()

    def _readable_life(self) -> str:
        try:
            self.connection.execute(LIVES[0])
        except (pg.InsufficientPrivilege, pg.FeatureNotSupported, pg.UndefinedFunction, pg.ObjectNotInPrerequisiteState):
            return LIVES[1]
        return LIVES[0]

    def _read_back(self) -> None:
        """Hold what a transaction has against what it was told: a pooler, or a role's own settings, may differ."""
        wanted: Mapping[str, object] = {"transaction_isolation": "read committed", "synchronous_commit": "on", **self._limits}
        asked = ["server_encoding", "transaction_read_only", *wanted]
        self._begin()
        found = dict(self.connection.execute("SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", (asked,)).fetchall())
        self.connection.execute("ROLLBACK")
        if found["server_encoding"] != "UTF8":
            raise UsageError(f"{self.place}: the database's encoding is {found['server_encoding']}; Limpet needs UTF8")
        if found["transaction_read_only"] != "off":
            raise StoreUnavailable(f"{self.place} takes no writes (a replica?): name the primary")
        for name, value in wanted.items():
            if found[name] != str(value):
                raise StoreUnavailable(f"{self.place}: {name} was not taken: expected {value}, found {found[name]}")

    def reopen(self) -> None:
        """Throw the connection away and open a new one: nothing that it held stays."""
        self._hang_up()
        self._open()

    def close(self) -> None:
        """Close the connection, for good unless it is opened again; never raises."""
        self._session.is_closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        """Where no new connection can be had now, whoever needs one next tries again: an outage must not close this for good."""
        self._session.is_lost = True
        self._deadlines.end()
        with contextlib.suppress(Exception):
            self.connection.close()

    def incarnation(self) -> str:
        """The server's start, its timeline where the role may read it, and this connection: another value voids every cache."""
        (row,) = self._session.again(lambda: self._read("incarnation", self._life, (), self._session.write_s))
        return f"{row}:{self._openings}"

    # -- transactions ----------------------------------------------------------------------

    def _begin(self) -> None:
        keep_alive_s = max(1, self._limits["lock_timeout"] // 1000)
        self.connection.execute(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
            + "".join(f"SET LOCAL {name} = {value}; " for name, value in self._limits.items())
            + f"SET LOCAL tcp_keepalives_idle = {keep_alive_s}; SET LOCAL tcp_keepalives_interval = 1; SET LOCAL tcp_keepalives_count = 3; "
            f"SET LOCAL tcp_user_timeout = {self._limits['lock_timeout']}; "  # of an answer that a sleeper takes no more of
            "SET LOCAL synchronous_commit = on; SET LOCAL client_min_messages = warning"
        )

    def begin(self) -> None:
        """BEGIN with this transaction's limits; nothing where staging has begun it."""
        self._session.may_write()
        if self._session.under_way:
            return
        self._session.again(self._begin_once)
        self._session.begun()

    def _begin_once(self) -> None:
        with self._errors("begin"), self._deadline(self._session.write_s):
            self._begin()

    def begin_alone(self) -> None:
        """BEGIN a change of the schema, which only one connection at a time may make; the lock ends with the transaction.

        What is made goes where the tables are, also where another schema, such as one of the role's own name, is before that.
        """
        self.begin()
        self.rows_text(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})")
        first = "quote_ident(home.name) || ', ' || current_setting('search_path')"
        self.rows_text(f"SELECT set_config('search_path', {first}, true) FROM ({HOME}) AS home WHERE home.name <> current_schema()")

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing."""

        def start() -> None:
            with self._errors("begin"), self._deadline():
                self.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

        self._session.again(start)
        self._session.begun(snapshot=True)

    def commit(self) -> None:
        """COMMIT; OutcomeUnknown where the connection is lost or the answer never comes.

        A COMMIT of a failed transaction is answered ROLLBACK without an error, so its state is asserted first.
        """
        self._session.ready()
        if self.connection.info.transaction_status is not TransactionStatus.INTRANS:
            raise InvariantBroken(f"{self.place}: COMMIT outside a healthy transaction", invariant="commit")
        try:
            with self._deadline():
                answer = self.connection.execute("COMMIT").statusmessage
        except _BUSY as error:
            raise StoreBusy(f"{self.place}: COMMIT was refused: {_told(error)}") from error
        except psycopg.Error as error:
            self._note_lost(error)
            if error.sqlstate and error.sqlstate[:2] in _DATA_CLASSES:
                raise PoisonRow(f"{self.place}: COMMIT was refused: {_told(error)}") from error
            raise OutcomeUnknown(f"{self.place}: no certain answer to COMMIT: {_told(error)}") from error
        self._session.ended()
        if answer != "COMMIT":
            raise StoreUnavailable(f"{self.place}: COMMIT was answered {answer}: nothing was written")

    def rollback(self) -> None:
        """Undo; never raises. Where that fails, the connection is given up, and with it the transaction."""
        try:
            if not self._session.is_lost and self.connection.info.transaction_status is not TransactionStatus.IDLE:
                with self._deadline():
                    self.connection.execute("ROLLBACK")
        except Exception:
            self._session.is_lost = True
        self._session.ended()

    # -- statements ------------------------------------------------------------------------

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the rows it changed."""
        return self._run(statement, self._sql[statement], values)

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""
        sql = self._sql[statement]
        return self._session.again(lambda: self._read(statement, sql, values))

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""
        found = self.rows(statement, **values)
        return found[0] if found else None

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run SQL made of checked identifiers; the rows it changed."""
        return self._run(sql, positional(sql), values)

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""
        return self._session.again(lambda: self._read(sql, positional(sql), values))

    def _run(self, doing: str, sql: str, values: Mapping[str, Value] | Sequence[Value]) -> int:
        self._session.may_write()
        self._has_written = True
        with self._errors(doing), self._deadline():
            return max(0, self.connection.execute(sql, values).rowcount)

    def _read(self, doing: str, sql: str, values: Mapping[str, Value] | Sequence[Value], limit_s: float | None = None) -> list[Row]:
        with self._errors(doing), self._deadline(limit_s):
            return self.connection.execute(sql, values).fetchall()

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one, from a cursor on the server."""
        is_alone = not self._session.under_way
        if is_alone:
            self.begin_read()
        try:
            with self._errors(sql), self._deadline():
                cursor = self.connection.cursor(name="limpet_stream")
                cursor.execute(positional(sql), values)
            while rows := self._fetch(sql, cursor):
                yield from rows
            with self._errors(sql):
                cursor.close()
        finally:
            if is_alone:
                self.rollback()

    def _fetch(self, doing: str, cursor: psycopg.ServerCursor[Row]) -> list[Row]:
        with self._errors(doing), self._deadline():
            return cursor.fetchmany(STREAM_ROWS)

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Rows into a staging table by binary COPY; into any other, and once shared rows are held, by a few statements of many values.

        No time-out of the server's ends a COPY whose client sleeps: begun after the fence, it would keep a shard for ever.
        """
        if not rows:
            return
        self._session.may_write()
        with self._errors(table), self._deadline(), self.connection.cursor() as cursor:
            types = STAGE_TYPES.get(table)
            if types and not tail and not self._has_written:
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
            self.connection.execute(f"{self._sql['stage_tables']}; {self._sql['unstage']}")
        self._has_written = False

    def has_table(self, name: str) -> bool:
        """Whether a table, view or index of that name is on the search path, as this statement's snapshot has it.

        Not by to_regclass: its cache may not know yet what another connection has just committed.
        """
        sql = (
            "SELECT 1 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
            "WHERE n.nspname = ANY (current_schemas(false)) AND c.relname = ?"
        )
        return bool(self.rows_text(sql, (name,)))

    def locked(self, alias: str) -> str:
        """Ends a query whose rows nobody else may change before COMMIT."""
        return f" FOR UPDATE OF {alias}"

    def ddl(self, sql: str) -> str:
        """A statement of the schema, with PostgreSQL's types."""
        return schema(sql)

    def said(self, sql: str, values: Sequence[Value]) -> str:
        """A statement with its values in it."""
        return psycopg.ClientCursor(self.connection).mogrify(positional(sql), values)

    def catalogue(self) -> dict[str, Made]:
        """Everything in the schema that is made into, with its columns."""
        return {name: Made(kind, table, columns) for name, kind, table, columns in self.rows_text(CATALOGUE)}

    def integrity_check(self) -> list[str]:
        """Nothing: the server looks after its own files."""
        return []

    # -- errors ----------------------------------------------------------------------------

    def _deadline(self, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Only around what waits for the server: a connection that is closed has no socket, and says so by itself."""
        if self.connection.closed:
            return contextlib.nullcontext()
        return self._deadlines.over(self.connection.fileno(), limit_s or self._session.limit_s)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._note_lost(error)
            raise self._meant(error, doing) from error
        except (OverflowError, UnicodeError, TypeError, struct.error) as error:
            raise PoisonRow(f"{self.place} refuses the data ({short(doing)}): {error}") from error

    def _meant(self, error: psycopg.Error, doing: str) -> StoreError:
        """The error of ours that says what the caller must do."""
        state, shown = error.sqlstate or "", short(doing)
        told = f"{self.place}: {_told(error)} ({shown})"
        if isinstance(error, _BUSY):
            return StoreBusy(told)
        if state in ("42501", "3F000"):  # without a right to its schema a role has none
            info = self.connection.info
            return RightMissing(f"{told}; it takes {postgres_grant(told, role=info.user, database=info.dbname)}")
        if state[:2] == "23" and doing in self._sql:  # our own tables refuse a row: no page's data is to blame
            return InvariantBroken(f"{self.place}: a table of the protocol refuses a row ({doing}): {_told(error)}", invariant="schema")
        if state[:2] in _DATA_CLASSES or (isinstance(error, psycopg.DataError) and not state):
            return PoisonRow(f"{self.place} refuses the data ({shown}): {_told(error)}")
        if state in _CORRUPT:
            return StoreCorrupt(told)
        if not state or state[:2] in _UNAVAILABLE_CLASSES or self.connection_is_lost():
            return StoreUnavailable(told)
        return StoreError(f"{self.place}: {type(error).__name__}: {_told(error)} ({shown})")

    def _note_lost(self, error: psycopg.Error) -> None:
        if self.connection_is_lost() or error.sqlstate in _ELSEWHERE:
            self._session.is_lost = True

    def connection_is_lost(self) -> bool:
        """Whether this connection can no longer be used."""
        return getattr(self, "connection", None) is None or self.connection.closed or self.connection.broken

    def lock_holder(self) -> str:
        """Nobody that can be told here: `doctor` asks pg_blocking_pids."""
        return ""


def limits(lease_s: float) -> dict[str, int]:
    """What a transaction may take, in milliseconds, at a lease.

    >>> limits(2.0)
    {'statement_timeout': 3000, 'lock_timeout': 1000, 'idle_in_transaction_session_timeout': 1000}
    """
    half = max(200, round(lease_s * 500))
    return {
        "statement_timeout": min(STATEMENT_MS, max(STATEMENT_MS_MIN, round(lease_s * 900))), "lock_timeout": min(LOCK_MS, half),
        "idle_in_transaction_session_timeout": min(IDLE_MS, half),
    }  # fmt: skip


def _told(error: Exception) -> str:
    """The first line of what the driver says, which holds no password."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@cache
def _translated() -> dict[str, str]:
    return {name: translate(sql) for name, sql in statements("postgres", NOW_MS).items()}
