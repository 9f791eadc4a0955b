"""MySQL and MariaDB: READ COMMITTED, strict, rows found and not rows changed, tasks updated by id alone.

The session's settings are set and read back on each connection: FOUND_ROWS, so that a fence that changes
nothing is told from one that lost; a strict sql_mode, or the server would cut texts in silence; a
`wait_timeout` below the lease, the only limit here on a worker that is frozen inside a transaction. No
INSERT IGNORE: it hides other errors too. A statement of DDL commits by itself, so tables are made with
IF NOT EXISTS, and making them may be repeated.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pymysql
from pymysql.constants import CLIENT, FIELD_TYPE, SERVER_STATUS
from pymysql.converters import conversions
from pymysql.cursors import SSCursor

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
from limpet.store import mysql_words as words
from limpet.store.deadline import Deadlines
from limpet.store.dialect import Made, Row, Value, public_dsn, short, split, statements
from limpet.store.mysql_session import arguments, keep_alive, settings_of
from limpet.store.rights import MYSQL_DENIED, MYSQL_DOOR, mysql_grant
from limpet.store.session import Session

#: The clock of the database, read anew by each statement, in UTC whatever the server's zone is (`_SESSION`).
NOW_MS = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)"

#: Seconds that one statement of a transaction may take, and those after which its socket is closed.
STATEMENT_S = 30
DEADLINE_MORE_S = 5.0

#: Seconds for a call that only reads: a proof over millions of rows takes its time, a black hole does not end.
READ_DEADLINE_S = 300.0

#: Values of one INSERT: few statements, each of them short.
VALUES_MAX = 8000

#: Tables and views, indexes, triggers, a row for each column; not the primary keys, which have all one name.
CATALOGUE = """
SELECT c.TABLE_NAME, CASE t.TABLE_TYPE WHEN 'VIEW' THEN 'view' ELSE 'table' END, c.TABLE_NAME, c.COLUMN_NAME, c.ORDINAL_POSITION
  FROM information_schema.COLUMNS AS c
  JOIN information_schema.TABLES AS t ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME
 WHERE c.TABLE_SCHEMA = DATABASE()
UNION ALL
SELECT INDEX_NAME, 'index', TABLE_NAME, COLUMN_NAME, SEQ_IN_INDEX
  FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() AND INDEX_NAME <> 'PRIMARY'
UNION ALL
SELECT TRIGGER_NAME, 'trigger', EVENT_OBJECT_TABLE, '', 1 FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA = DATABASE()
 ORDER BY 1, 5
"""

#: Names the lock of whoever changes the schema of a database (64 characters at most); waited for so many seconds.
SCHEMA_LOCK = "CONCAT('limpet:', MD5(DATABASE()))"
SCHEMA_LOCK_S = 10

#: Rows that a stream fetches at once.
STREAM_ROWS = 2000

#: One INSERT is no longer than this part of max_allowed_packet: a character may take four bytes, and escaping doubles some.
PACKET_PART = 4

#: Lock wait timeout, deadlock, "record has changed since last read", a killed statement: the whole transaction is safe to repeat.
#: 1467 is a deadlock too: "failed to read auto-increment value" is said where the lock of the next id was one of those waited for.
_BUSY = frozenset({1205, 1213, 1020, 1317, 1467, 1637, 3572})
#: The data is refused: out of range, cut, wrong, too long, null, a CHECK; a duplicate key of a user's table, a SIGNAL, a row too wide.
_DATA = frozenset({1264, 1265, 1292, 1366, 1406, 1048, 1062, 1101, 3819, 4025, 1300, 1153, 1644, 1117, 1118})
#: What the engine said, where the server says no more than 1030: a row too wide.
_TOO_WIDE = "error 139"
#: The protocol's own tables refuse a row only where an invariant is broken.
_CONSTRAINT = frozenset({1062, 1048, 3819, 4025})
#: The server is going, full, read-only or takes no more connections.
_UNAVAILABLE = frozenset({1021, 1030, 1040, 1053, 1114, 1129, 1290, 1792, 1836, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031})
#: The connection is gone, or leads to a server that has become a replica.
_LOST = frozenset({1053, 1152, 1153, 1158, 1159, 1160, 1161, 1184, 1290, 1792, 1836, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031})
#: A table's pages are damaged: crashed, or its file does not hold what it should.
_CORRUPT = frozenset({1034, 1194, 1195, 1712, 1877})


class Mysql:
    """One connection to a MySQL or MariaDB server, for one thread."""

    name = "mysql"
    ddl_commits = True

    def __init__(self, dsn: str, *, lease_s: float = 10.0, readonly: bool = False, deadline_s: float | None = None) -> None:
        self.dsn = dsn
        self.place = public_dsn(dsn)
        self.readonly = readonly
        self._half_lease_s = max(1, int(lease_s / 2))
        self._session = Session(
            self.place, self.reopen, write_s=deadline_s or min(STATEMENT_S, 4 * self._half_lease_s) + DEADLINE_MORE_S,
            read_s=deadline_s or READ_DEADLINE_S, readonly=readonly,
        )  # fmt: skip
        self._sql = _translated()
        self._openings = 0
        self._packet_bytes = 2**24
        self._collation = words.MYSQL_COLLATION
        self._holds_schema = False
        self._deadlines = Deadlines()
        self._open()

    # -- life ------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            with self._errors("connect"):
                self.connection = pymysql.connect(
                    **arguments(self.dsn), charset="utf8mb4", autocommit=True, client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
                    connect_timeout=10, read_timeout=self._session.read_s, write_timeout=self._session.read_s, conv=_CONVERSIONS,
                )  # fmt: skip
        except StoreError as error:
            if self._openings or not isinstance(error.__cause__, Exception) or _code(error.__cause__) not in MYSQL_DOOR:
                raise
            raise UsageError(str(error)) from error
        try:
            with self._errors("connect"), self._deadline(self._session.write_s):
                keep_alive(self.connection)
                self._settle_session()
                if not self.readonly:
                    for statement in split(self._sql["stage_tables"]):
                        self._execute(statement)
        except BaseException:
            self._hang_up()
            raise
        self._openings += 1
        self._holds_schema = False
        self._session.opened()

    def _settle_session(self) -> None:
        """Set what this session needs, and read it back: a proxy, or a server's own rules, may not take it."""
        wanted = settings_of(self._half_lease_s, readonly=self.readonly)
        self._execute("SET " + ", ".join(f"SESSION {name} = %s" for name in wanted), tuple(wanted.values()))
        self._execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        isolation = self._isolation()
        if isolation != "READ-COMMITTED":
            raise StoreUnavailable(f"{self.place}: expected READ-COMMITTED, found {isolation}")
        (row,) = self._execute("SELECT " + ", ".join(f"@@SESSION.{name}" for name in wanted))[1]
        for (name, value), found in zip(wanted.items(), row, strict=True):
            ours = set(str(value).split(",")) if name in ("sql_mode", "optimizer_switch") else {str(value)}
            if not ours <= set(str(found).split(",")):
                raise StoreUnavailable(f"{self.place}: {name} was not taken: expected {value}, found {found}")
        ((self._packet_bytes, is_readonly, version),) = self._execute("SELECT @@max_allowed_packet, @@GLOBAL.read_only, VERSION()")[1]
        self._collation = words.MARIADB_COLLATION if "MariaDB" in version else words.MYSQL_COLLATION
        if is_readonly and not self.readonly:
            raise StoreUnavailable(f"{self.place} takes no writes (a replica?): name the primary")

    def _isolation(self) -> str:
        for name in ("transaction_isolation", "tx_isolation"):  # MariaDB before 11.1 knows the second alone
            with contextlib.suppress(pymysql.Error):
                return str(self._execute(f"SELECT @@SESSION.{name}")[1][0][0])
        return "unknown"

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
        """The server, and the number of this connection, which a restart ends: another value voids every cache."""
        sql = "SELECT @@server_id, @@hostname, @@datadir"
        rows = self._session.again(lambda: self._read("incarnation", sql, None, self._session.write_s))
        return f"{rows}:{self._openings}"

    # -- transactions ----------------------------------------------------------------------

    def _in_transaction(self) -> bool:
        return bool(self.connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)  # type: ignore[attr-defined]

    def begin(self) -> None:
        """START TRANSACTION; nothing where staging has begun it."""
        self._session.may_write()
        if self._session.under_way:
            return
        self._start("START TRANSACTION")
        self._session.begun()

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing."""
        self._start("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        self._session.begun(snapshot=True)

    def begin_alone(self) -> None:
        """Begin a change of the schema, which only one connection at a time may make. What DDL commits by itself stays locked."""
        ((got,),) = self.rows_text(f"SELECT GET_LOCK({SCHEMA_LOCK}, {SCHEMA_LOCK_S})")
        if got != 1:
            raise StoreBusy(f"{self.place}: another process is changing the schema")
        self._holds_schema = True
        self.begin()

    def _start(self, *said: str) -> None:
        def start() -> None:
            with self._errors("begin"), self._deadline(self._session.write_s):
                for sql in said:
                    self._execute(sql)

        self._session.again(start)

    def commit(self) -> None:
        """COMMIT; OutcomeUnknown where the connection is lost or the answer never comes."""
        self._session.ready()
        if not self._in_transaction():
            raise InvariantBroken(f"{self.place}: COMMIT outside a transaction", invariant="commit")
        try:
            with self._deadline():
                self._execute("COMMIT")
        except (pymysql.Error, OSError) as error:
            self._note_lost(error)
            if _code(error) in _BUSY:
                raise StoreBusy(f"{self.place}: COMMIT was refused: {_told(error)}") from error
            raise OutcomeUnknown(f"{self.place}: no certain answer to COMMIT: {_told(error)}") from error
        self._session.ended()
        self._let_schema_go()

    def rollback(self) -> None:
        """Undo all of it (a lock wait that timed out undoes only its own statement); never raises."""
        try:
            if not self._session.is_lost and self.connection.open:
                with self._deadline():
                    self._execute("ROLLBACK")
        except Exception:
            self._session.is_lost = True
        self._session.ended()
        self._let_schema_go()

    def _let_schema_go(self) -> None:
        """Where that fails, the connection is given up, and the lock with it."""
        if self._holds_schema and not self._session.is_lost:
            try:
                with self._deadline():
                    self._execute(f"SELECT RELEASE_LOCK({SCHEMA_LOCK})")
            except Exception:
                self._session.is_lost = True
        self._holds_schema = False

    # -- statements ------------------------------------------------------------------------

    def _execute(self, sql: str, values: Any = None) -> tuple[int, list[Row]]:
        with self.connection.cursor() as cursor:
            changed = cursor.execute(sql, values)
            return changed, list(cursor.fetchall() or ()) if cursor.description else []

    def _read(self, doing: str, sql: str, values: Any, limit_s: float | None = None) -> list[Row]:
        with self._errors(doing), self._deadline(limit_s):
            return self._execute(sql, values)[1]

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the rows it matched."""
        sql = self._sql[statement]
        self._session.may_write()
        with self._errors(statement), self._deadline():
            return self._execute(sql, values)[0]

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""
        sql = self._sql[statement]
        return self._session.again(lambda: self._read(statement, sql, values))

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""
        found = self.rows(statement, **values)
        return found[0] if found else None

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run SQL made of checked identifiers; the rows it matched. DDL commits, so a transaction is begun again after it."""
        self._session.may_write()
        with self._errors(sql), self._deadline():
            try:
                changed = self._execute(words.positional(sql), tuple(values) or None)[0]
            except pymysql.Error as error:
                if _code(error) not in (1061, 1060):  # this index, this column is there already
                    raise
                changed = 0
            if self._session.under_way and not self._in_transaction():
                self._execute("START TRANSACTION")
            return changed

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""
        return self._session.again(lambda: self._read(sql, words.positional(sql), tuple(values) or None))

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one, unbuffered."""
        self._session.ready()
        with self._errors(sql), self.connection.cursor(SSCursor) as cursor:
            with self._deadline():
                cursor.execute(words.positional(sql), tuple(values) or None)
            while rows := self._fetch(cursor):
                yield from rows

    def _fetch(self, cursor: SSCursor) -> list[Row]:
        with self._deadline():
            return list(cursor.fetchmany(STREAM_ROWS))

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Insert many rows by statements of many values; `tail` is a conflict clause in SQLite's words."""
        tail = re.sub(r"ON CONFLICT \(.*\) DO NOTHING", "ON DUPLICATE KEY UPDATE _key = _key", tail)
        target, one = words.quoted(table), f"({','.join(['%s'] * width)})"
        self._session.may_write()
        with self._errors(table), self._deadline():
            for piece in self._pieces(table, max(1, VALUES_MAX // width), rows):
                flat = [value for row in piece for value in row]
                self._execute(f"INSERT INTO {target} VALUES {','.join([one] * len(piece))} {tail}", flat)

    def _pieces(self, table: str, rows_max: int, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Rows for one INSERT each: not too many, and not too long for one packet, which would cost the connection."""
        bytes_max = self._packet_bytes // PACKET_PART
        piece: list[Row] = []
        size = 0
        for row in rows:
            more = sum(len(value) for value in row if isinstance(value, str | bytes)) + 8 * len(row)
            if more > bytes_max:
                raise PoisonRow(
                    f"{self.place} refuses the data ({table}): a row of {more:,} bytes; max_allowed_packet lets one have {bytes_max:,}"
                )
            if piece and (len(piece) >= rows_max or size + more > bytes_max):
                yield piece
                piece, size = [], 0
            piece.append(row)
            size += more
        if piece:
            yield piece

    def unstage(self) -> None:
        """Begin the transaction and empty the staging tables, which are this session's."""
        self.begin()
        with self._errors("unstage"), self._deadline():
            for statement in split(self._sql["unstage"]):
                self._execute(statement)

    def has_table(self, name: str) -> bool:
        """Whether a table of that name is in this database."""
        return bool(self.rows_text("SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?", (name,)))

    def locked(self, alias: str) -> str:
        """Ends a query whose rows nobody else may change before COMMIT."""
        return " FOR UPDATE"

    def ddl(self, sql: str) -> str:
        """A statement of the schema, with MySQL's types."""
        return words.schema(sql, self._collation)

    def said(self, sql: str, values: Sequence[Value]) -> str:
        """A statement with its values in it."""
        return str(self.connection.cursor().mogrify(words.positional(sql), tuple(values) or None))

    def catalogue(self) -> dict[str, Made]:
        """Everything in this database, with its columns."""
        columns: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for name, kind, table, column, _place in self.rows_text(CATALOGUE):
            columns[kind, table, name].append(column)
        found: dict[str, Made] = {}
        for kind, table, name in sorted(columns, key=lambda made: made[0] == "index"):  # an index may have the name of a table
            made = Made(kind, table, ", ".join(columns[kind, table, name]))
            found[f"{table}.{name}" if name in found else name] = made
        return found

    def integrity_check(self) -> list[str]:
        """Nothing: the server looks after its own files."""
        return []

    # -- errors ----------------------------------------------------------------------------

    def _deadline(self, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        line = getattr(self.connection, "_sock", None)
        return self._deadlines.over(line.fileno(), limit_s or self._session.limit_s) if line is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (pymysql.Error, OSError) as error:
            self._note_lost(error)
            raise self._meant(error, doing) from error
        except (OverflowError, UnicodeError, TypeError) as error:
            raise PoisonRow(f"{self.place} refuses the data ({short(doing)}): {error}") from error

    def _meant(self, error: Exception, doing: str) -> StoreError:
        """The error of ours that says what the caller must do."""
        code, shown = _code(error), short(doing)
        told = f"{self.place}: {_told(error)} ({shown})"
        if code in _BUSY:
            return StoreBusy(told)
        if code in MYSQL_DENIED:
            return RightMissing(f"{told}; it takes {mysql_grant(told, database=arguments(self.dsn)['database'])}")
        if code in _CONSTRAINT and doing in self._sql:
            return InvariantBroken(f"{self.place}: a table of the protocol refuses a row ({doing}): {_told(error)}", invariant="schema")
        if code in _DATA or (isinstance(error, pymysql.DataError) and not code) or (code == 1030 and _TOO_WIDE in _told(error)):
            return PoisonRow(f"{self.place} refuses the data ({shown}): {_told(error)}")
        if code in _CORRUPT:
            return StoreCorrupt(told)
        if code in _UNAVAILABLE or self._session.is_lost or isinstance(error, OSError):
            return StoreUnavailable(told)
        return StoreError(f"{self.place}: {type(error).__name__}: {_told(error)} ({shown})")

    def _note_lost(self, error: Exception) -> None:
        is_open = getattr(self, "connection", None) is not None and self.connection.open
        if not is_open or isinstance(error, OSError | pymysql.InterfaceError) or _code(error) in _LOST:
            self._session.is_lost = True

    def lock_holder(self) -> str:
        """Nobody that can be told here."""
        return ""


def _whole(text: bytes | str) -> int | float:
    shown = text.decode() if isinstance(text, bytes) else text
    return float(shown) if "." in shown else int(shown)


#: SUM() of integers is DECIMAL here.
_CONVERSIONS: dict[Any, Callable[..., Any]] = {**conversions, FIELD_TYPE.DECIMAL: _whole, FIELD_TYPE.NEWDECIMAL: _whole}


@cache
def _translated() -> dict[str, str]:
    return {name: words.translate(sql) for name, sql in statements("mysql", NOW_MS).items()}


def _code(error: Exception) -> int:
    return int(error.args[0]) if error.args and isinstance(error.args[0], int) else 0


def _told(error: Exception) -> str:
    return str(error.args[1] if len(error.args) > 1 else error).splitlines()[0] if error.args else type(error).__name__
