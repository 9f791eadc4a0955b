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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT, FIELD_TYPE, SERVER_STATUS
from pymysql.converters import conversions
from pymysql.cursors import SSCursor

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
from limpet.store.dialect import Row, Value, public_dsn, split, statements

#: The clock of the database, read anew by each statement, in UTC whatever the server's zone is (`_SESSION`).
NOW_MS = "CAST(UNIX_TIMESTAMP(SYSDATE(3)) * 1000 AS SIGNED)"

#: Seconds after which a call is ended by closing its socket.
DEADLINE_S = 60.0

#: Values of one INSERT: well below a max_allowed_packet of 16 MiB for rows of usual size.
VALUES_MAX = 8000

#: Words of ours that are MySQL's too; quoted in every statement.
RESERVED = ("key", "rank", "cursor")

#: Lock wait timeout, deadlock, "record has changed since last read": the whole transaction is safe to repeat.
_BUSY = frozenset({1205, 1213, 1020, 1637, 3572})
#: The data is refused: out of range, cut, wrong, too long, null, a CHECK; a duplicate key of a user's table.
_DATA = frozenset({1264, 1265, 1292, 1366, 1406, 1048, 1062, 1101, 3819, 4025, 1300, 1153})
#: The protocol's own tables refuse a row only where an invariant is broken.
_CONSTRAINT = frozenset({1062, 1048, 3819, 4025})
#: The server is going, full, read-only or takes no more connections.
_UNAVAILABLE = frozenset({1021, 1030, 1040, 1053, 1114, 1129, 1290, 1792, 1836, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031})


class Mysql:
    """One connection to a MySQL or MariaDB server, for one thread."""

    name = "mysql"

    def __init__(self, dsn: str, *, lease_s: float = 10.0, readonly: bool = False) -> None:
        self.dsn = dsn
        self.place = public_dsn(dsn)
        self.readonly = readonly
        self._limit_s = max(1, int(lease_s / 2))
        self._sql = {name: translate(sql) for name, sql in statements("mysql", NOW_MS).items()}
        self._openings = 0
        self._deadlines = Deadlines(DEADLINE_S)
        self._open()

    # -- life ------------------------------------------------------------------------------

    def _open(self) -> None:
        with self._errors("connect"):
            self.connection = pymysql.connect(
                **arguments(self.dsn), charset="utf8mb4", autocommit=True, client_flag=CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
                connect_timeout=10, read_timeout=int(DEADLINE_S), write_timeout=int(DEADLINE_S), conv=_CONVERSIONS,
            )  # fmt: skip
            self._openings += 1
            self._session()
            if not self.readonly:
                for statement in split(self._sql["stage_tables"]):
                    self._execute(statement)

    def _session(self) -> None:
        wanted: Mapping[str, object] = {
            "time_zone": "+00:00",
            "sql_mode": "STRICT_ALL_TABLES,ANSI_QUOTES,NO_ENGINE_SUBSTITUTION",
            "wait_timeout": self._limit_s if not self.readonly else 3600,
            "innodb_lock_wait_timeout": min(5, self._limit_s),
            "autocommit": 1,
        }
        for name, value in wanted.items():
            self._execute(f"SET SESSION {name} = %(value)s", {"value": value})
        self._execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        isolation = self._isolation()
        if isolation != "READ-COMMITTED":
            raise StoreUnavailable(f"{self.place}: expected READ-COMMITTED, found {isolation}")
        for name, value in wanted.items():
            found = self._execute(f"SELECT @@SESSION.{name}")[1][0][0]
            ours = set(str(value).split(",")) if name == "sql_mode" else {str(value)}
            if not ours <= set(str(found).split(",")):
                raise StoreUnavailable(f"{self.place}: {name} was not taken: expected {value}, found {found}")
        if not self.readonly and self._execute("SELECT @@GLOBAL.read_only")[1][0][0]:
            raise StoreUnavailable(f"{self.place} takes no writes (a replica?): name the primary")

    def _isolation(self) -> str:
        for name in ("transaction_isolation", "tx_isolation"):  # MariaDB before 11.1 knows the second alone
            with contextlib.suppress(pymysql.Error):
                return str(self._execute(f"SELECT @@SESSION.{name}")[1][0][0])
        return "unknown"

    def reopen(self) -> None:
        """Throw the connection away and open a new one: nothing that it held stays."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close the connection; never raises."""
        with contextlib.suppress(Exception):
            self.connection.close()

    def incarnation(self) -> str:
        """The server, and the number of this connection, which a restart ends: another value voids every cache."""
        with self._errors("incarnation"):
            rows = self._execute("SELECT @@server_id, @@hostname, @@datadir")[1]
        return f"{rows}:{self._openings}"

    # -- transactions ----------------------------------------------------------------------

    def _in_transaction(self) -> bool:
        return bool(self.connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)  # type: ignore[attr-defined]

    def begin(self) -> None:
        """START TRANSACTION, where none is open."""
        if not self._in_transaction():
            with self._errors("begin"):
                self._execute("START TRANSACTION")

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing."""
        with self._errors("begin"):
            self._execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")

    def commit(self) -> None:
        """COMMIT; OutcomeUnknown where the connection is lost or the answer never comes."""
        if not self._in_transaction():
            raise InvariantBroken(f"{self.place}: COMMIT outside a transaction", invariant="commit")
        try:
            with self._deadline():
                self._execute("COMMIT")
        except pymysql.Error as error:
            if _code(error) in _BUSY:
                raise StoreBusy(f"{self.place}: COMMIT was refused: {_told(error)}") from error
            raise OutcomeUnknown(f"{self.place}: no certain answer to COMMIT: {_told(error)}") from error

    def rollback(self) -> None:
        """Undo all of it (a lock wait that timed out undoes only its own statement); never raises."""
        with contextlib.suppress(Exception):
            if self.connection.open:
                self._execute("ROLLBACK")

    # -- statements ------------------------------------------------------------------------

    def _execute(self, sql: str, values: Any = None) -> tuple[int, list[Row]]:
        with self.connection.cursor() as cursor:
            changed = cursor.execute(sql, values)
            return changed, list(cursor.fetchall() or ()) if cursor.description else []

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the rows it matched."""
        with self._errors(statement), self._deadline():
            return self._execute(self._sql[statement], values)[0]

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""
        with self._errors(statement), self._deadline():
            return self._execute(self._sql[statement], values)[1]

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""
        found = self.rows(statement, **values)
        return found[0] if found else None

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run SQL made of checked identifiers; the rows it matched. DDL commits, so a transaction is begun again after it."""
        with self._errors(sql), self._deadline():
            was_open = self._in_transaction()
            try:
                changed = self._execute(positional(sql), tuple(values) or None)[0]
            except pymysql.Error as error:
                if _code(error) not in (1061, 1060):  # this index, this column is there already
                    raise
                changed = 0
            if was_open and not self._in_transaction():
                self._execute("START TRANSACTION")
            return changed

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""
        with self._errors(sql), self._deadline():
            return self._execute(positional(sql), tuple(values) or None)[1]

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one, unbuffered."""
        with self._errors(sql), self.connection.cursor(SSCursor) as cursor:
            cursor.execute(positional(sql), tuple(values) or None)
            yield from cursor

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Insert many rows by statements of many values; `tail` is a conflict clause in SQLite's words."""
        step = max(1, VALUES_MAX // width)
        one = f"({','.join(['%s'] * width)})"
        tail = re.sub(r"ON CONFLICT \(.*\) DO NOTHING", "ON DUPLICATE KEY UPDATE _key = _key", tail)
        target = quoted(table)
        with self._errors(table), self._deadline():
            for start in range(0, len(rows), step):
                piece = rows[start : start + step]
                flat = [value for row in piece for value in row]
                self._execute(f"INSERT INTO {target} VALUES {','.join([one] * len(piece))} {tail}", flat)

    def unstage(self) -> None:
        """Empty the staging tables, which are this session's."""
        with self._errors("unstage"), self._deadline():
            for statement in split(self._sql["unstage"]):
                self._execute(statement)

    def has_table(self, name: str) -> bool:
        """Whether a table of that name is in this database."""
        return bool(self.rows_text("SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?", (name,)))

    def ddl(self, sql: str) -> str:
        """A statement of the schema, with MySQL's types."""
        return schema(sql)

    def integrity_check(self) -> list[str]:
        """Nothing: the server looks after its own files."""
        return []

    # -- errors ----------------------------------------------------------------------------

    def _deadline(self) -> contextlib.AbstractContextManager[None]:
        line = getattr(self.connection, "_sock", None)
        return self._deadlines.over(line.fileno()) if line is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except pymysql.Error as error:
            code, told = _code(error), _told(error)
            if code in _BUSY:
                raise StoreBusy(f"{self.place}: {told} ({doing})") from error
            if code in _CONSTRAINT and doing in self._sql:
                raise InvariantBroken(
                    f"{self.place}: a table of the protocol refuses a row ({doing}): {told}", invariant="schema"
                ) from error
            if code in _DATA or (isinstance(error, pymysql.DataError) and not code):
                raise PoisonRow(f"{self.place} refuses the data ({doing}): {told}") from error
            if code in _UNAVAILABLE or isinstance(error, pymysql.InterfaceError):
                raise StoreUnavailable(f"{self.place}: {told} ({doing})") from error
            raise StoreError(f"{self.place}: {type(error).__name__}: {told} ({doing})") from error
        except (OverflowError, UnicodeError, TypeError) as error:
            raise PoisonRow(f"{self.place} refuses the data ({doing}): {error}") from error
        except OSError as error:
            raise StoreUnavailable(f"{self.place}: {error} ({doing})") from error

    def lock_holder(self) -> str:
        """Nobody that can be told here."""
        return ""


# -- addresses ------------------------------------------------------------------------------------


def arguments(dsn: str) -> dict[str, Any]:
    """What the driver needs of `mysql://user:password@host:port/database?unix_socket=...`.

    >>> arguments("mysql://me:p%40ss@db:3307/crawl")["port"]
    3307
    """
    parts = urlsplit(dsn)
    if not parts.path.strip("/"):
        raise UsageError(f"{public_dsn(dsn)!r} names no database: expected mysql://user@host:3306/database")
    found: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1", "port": parts.port or 3306, "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""), "database": unquote(parts.path.strip("/")),
    }  # fmt: skip
    query = dict(parse_qsl(parts.query))
    if "unix_socket" in query:
        found["unix_socket"] = query["unix_socket"]
    return found


def _whole(text: bytes | str) -> int | float:
    shown = text.decode() if isinstance(text, bytes) else text
    return float(shown) if "." in shown else int(shown)


#: SUM() of integers is DECIMAL here.
_CONVERSIONS: dict[Any, Callable[..., Any]] = {**conversions, FIELD_TYPE.DECIMAL: _whole, FIELD_TYPE.NEWDECIMAL: _whole}


def _code(error: Exception) -> int:
    return int(error.args[0]) if error.args and isinstance(error.args[0], int) else 0


def _told(error: Exception) -> str:
    return str(error.args[1] if len(error.args) > 1 else error).splitlines()[0] if error.args else type(error).__name__


# -- words ----------------------------------------------------------------------------------------

_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_WORD = re.compile(rf"(?<![\w:\"`'])({'|'.join(RESERVED)})\b(?![\"'(])")
_UPSERT = re.compile(r"ON CONFLICT \([^)]*\) DO UPDATE\s+SET")


@cache
def translate(sql: str) -> str:
    """A statement of core.sql with PyMySQL's placeholders and MySQL's words for an upsert.

    >>> translate("SELECT key FROM moved WHERE job = :job")
    'SELECT `key` FROM moved WHERE job = %(job)s'
    """
    return _UPSERT.sub("ON DUPLICATE KEY UPDATE", _NAMED.sub(r"%(\1)s", quoted(sql.replace("%", "%%"))))


@cache
def quoted(sql: str) -> str:
    """SQL with the names quoted that are words of MySQL's own."""
    return "\n".join(line if line.lstrip().startswith("--") else _WORD.sub(r"`\1`", line) for line in sql.split("\n"))


@cache
def positional(sql: str) -> str:
    """SQL with `?` for values, with PyMySQL's placeholders."""
    return quoted(sql.replace("%", "%%").replace("?", "%s")) if "?" in sql else quoted(sql)


#: Columns of bytes that are keys or digests: short, and indexed.
_SHORT_BYTES = (
    r"key|_key|task_key|_task_key|target|digest|key_digest|batch_id|code|paused_code|verified|previous|seal|offered|content|_content"
)
#: Columns of text that are long; every other text is a short name or word.
_LONG_TEXT = r"payload|text|url|detail|pause_detail|definition|row_json|argument|deltas|place|key_profile|key_text|_key_text"


def schema(sql: str) -> str:
    """The schema of SQLite's form, as MySQL and MariaDB say it."""
    short, long = "VARCHAR(190) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    for pattern, said in (
        (r"^CREATE TABLE ", "CREATE TABLE IF NOT EXISTS "),
        (r"\bINTEGER PRIMARY KEY\b", "BIGINT AUTO_INCREMENT PRIMARY KEY"),
        (r"\bINTEGER\b", "BIGINT"),
        (rf"^(\s*|.*?[(,]\s*)({_SHORT_BYTES})(\s+)BLOB\b", r"\1\2\3VARBINARY(64)"),
        (rf"((?:^|,)\s*)({_SHORT_BYTES})(\s+)BLOB\b", r"\1\2\3VARBINARY(64)"),
        (r"\bBLOB\b", "LONGBLOB"),
        (rf"((?:^|[(,])\s*)({_LONG_TEXT})(\s+)TEXT\b", rf"\1\2\3{long}"),
        (r"\bTEXT(\s+NOT NULL DEFAULT '')", r"VARCHAR(2000) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin\1"),
        (r"(\"[a-z_0-9]+\" )TEXT\b", rf"\1{long}"),
        (r"\bTEXT\b", short),
        (r"\bREAL\b", "DOUBLE"),
        (r"\bx''", "''"),
        (r"\) WITHOUT ROWID", ")"),
        (r"^(CREATE INDEX .*?\))\s+WHERE .*\Z", r"\1"),
    ):
        sql = re.sub(pattern, said, sql, flags=re.MULTILINE | re.DOTALL if "WHERE" in pattern else re.MULTILINE)
    return quoted(sql)
