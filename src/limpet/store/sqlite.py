"""SQLite: the embedded default. WAL, synchronous=FULL, one writing connection for each process.

Every pragma's result is compared with what was asked, checkpoints are explicit and their result is
read, and a write transaction begins with BEGIN IMMEDIATE, so that a busy file is met before any
work is done. `apsw` brings its own current SQLite: the standard library's may be one of 3.7.0 to
3.51.2, which can corrupt a WAL file (sqlite.org/wal.html#walresetbug).

FULL, not NORMAL: NORMAL lost acknowledged commits in 22 of 24 power cuts, FULL in none, and from
100 pages a batch it costs nothing that can be measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw

from limpet.errors import (
    InvariantBroken,
    OutcomeUnknown,
    PoisonRow,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreUnavailable,
    UsageError,
    WentBack,
)
from limpet.store.dialect import Made, Row, Value, repeat_busy, short, statements

#: The clock of the database: on SQLite that of this machine, read anew by each statement.
NOW_MS = "CAST(unixepoch('subsec') * 1000 AS INTEGER)"

#: 'Limpet' files say so in their header (PRAGMA application_id): "LMPT".
APPLICATION_ID = 0x4C4D5054

#: A busy file is waited for so long inside SQLite; longer waits are ours, so that they can be named.
BUSY_MS = 250

#: Waits, in seconds, before a busy file is opened again: 2.6 s, and ten times BUSY_MS.
OPEN_WAITS_S = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.5, 0.5, 0.5)

#: Checkpoint once the WAL holds so many pages (16 MiB): larger steps wrote a third fewer bytes.
WAL_PAGES = 4000

#: Values bound by one INSERT: few statements, so that the interpreter lock changes hands rarely.
VALUES_MAX = 4000

#: Byte of the -shm file on which a writer holds its lock (sqlite.org/walformat.html, WAL_WRITE_LOCK).
WRITE_LOCK_BYTE = 120

FIRST_SAFE_VERSION = (3, 51, 3)

_UNAVAILABLE = (apsw.FullError, apsw.IOError, apsw.ReadOnlyError, apsw.CantOpenError, apsw.PermissionsError, apsw.NoLFSError)
_BUSY = (apsw.BusyError, apsw.LockedError, apsw.SchemaChangeError)
_CORRUPT = (apsw.CorruptError, apsw.NotADBError)
_DATA = (apsw.TooBigError, apsw.MismatchError, OverflowError, UnicodeError, TypeError)


class Sqlite:
    """One connection to a SQLite file, for one thread."""

    name = "sqlite"
    ddl_commits = False

    def __init__(
        self, path: str, *, create: bool = True, readonly: bool = False, synchronous: str = "FULL", vfs: str | None = None
    ) -> None:
        self.path = os.path.abspath(path)
        self.place = self.path
        self.readonly = readonly
        self._create = create
        self._synchronous = synchronous
        self._vfs = vfs
        self._wal_pages = 0
        self._openings = 0
        self._sql = statements("sqlite", NOW_MS)
        self._open()

    # -- life ------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._create and not self.readonly and not os.path.isdir(os.path.dirname(self.path)):
            raise UsageError(f"cannot create {self.path}: the folder {os.path.dirname(self.path)} does not exist")
        if not self._create and not os.path.exists(self.path):
            raise UsageError(f"no database at {self.path}: check --db, or start a crawl to make one")
        flags = (
            apsw.SQLITE_OPEN_READONLY if self.readonly else apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if self._create else 0)
        )
        repeat_busy(lambda: self._connect(flags), tries=OPEN_WAITS_S, wait=time.sleep)
        self._openings += 1
        self._file = self._file_at_path()

    def _connect(self, flags: int) -> None:
        """One try: where several processes open a new file at once, SQLite does not wait for some of its locks."""
        with self._errors("open"):
            self.connection = apsw.Connection(self._address(), flags=flags | apsw.SQLITE_OPEN_URI, vfs=self._vfs, statementcachesize=300)
            try:
                self.connection.set_busy_timeout(BUSY_MS)
                self._settings()
            except BaseException:
                self.close()
                raise

    def _address(self) -> str:
        """The path; on a read-only disk without a WAL, the file as one that nobody changes: SQLite cannot make its -shm there."""
        is_still = self.readonly and not os.path.exists(f"{self.path}-wal") and is_on_readonly_disk(self.path)
        return f"file:{quote(self.path)}?immutable=1" if is_still else self.path

    def _settings(self) -> None:
        found = self._pragma("application_id")
        has_tables = found == 0 and self._pragma("schema_version") != 0
        if has_tables:  # made meanwhile? Limpet names a new file before it makes a table
            found = self._pragma("application_id")
        if found not in (APPLICATION_ID, 0) or (found == 0 and has_tables):
            raise UsageError(f"{self.path} is a SQLite database, but none of Limpet's: name another file with --db")
        if self.readonly:
            self._expect("query_only", "ON", 1)
            return
        self._expect("journal_mode", "WAL", "wal")
        self._expect("synchronous", self._synchronous, {"OFF": 0, "NORMAL": 1, "FULL": 2, "EXTRA": 3}[self._synchronous])
        self._expect("wal_autocheckpoint", 0, 0)
        self._expect("journal_size_limit", 64 * 2**20, 64 * 2**20)
        self._expect("cache_size", -64000, -64000)
        self._expect("temp_store", "MEMORY", 2)
        self._expect("cell_size_check", "ON", 1)
        self._expect("trusted_schema", "OFF", 0)
        self.connection.set_wal_hook(self._note_wal)
        if found == 0:
            self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        for statement in self._sql["stage_tables"].split(";"):
            self.connection.execute(statement)

    def _pragma(self, name: str) -> Any:
        return self.connection.pragma(name)

    def _expect(self, name: str, value: object, expected: object) -> None:
        self.connection.execute(f"PRAGMA {name} = {value}").fetchall()
        found = self._pragma(name)
        if found != expected:
            raise StoreUnavailable(f"{self.path}: PRAGMA {name} = {value} was not taken: expected {expected}, found {found}")

    def _note_wal(self, _connection: apsw.Connection, _schema: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def reopen(self) -> None:
        """Throw the connection away and open a new one: nothing that it held stays."""
        self.close()
        self._create = False
        self._open()

    def close(self) -> None:
        """Close the connection; never raises."""
        with contextlib.suppress(apsw.Error):
            self.connection.close(True)

    def incarnation(self) -> str:
        """This file, as opened: device, inode and the number of openings."""
        device, inode = self._file_at_path() or (0, 0)
        return f"{device}:{inode}:{self._openings}"

    # -- transactions ----------------------------------------------------------------------

    def begin(self) -> None:
        """BEGIN IMMEDIATE: the write lock is had here, or StoreBusy; WentBack where the path leads to another file now."""
        self._check_file()
        with self._errors("begin"):
            self.connection.execute("BEGIN IMMEDIATE")

    def _file_at_path(self) -> tuple[int, int] | None:
        try:
            seen = os.stat(self.path)
        except OSError:
            return None
        return seen.st_dev, seen.st_ino

    def _check_file(self) -> None:
        """What is written to a file that was replaced or deleted while it was open would be gone with it."""
        found = self._file_at_path()
        if found == self._file:
            return
        if found is None:
            raise StoreUnavailable(f"{self.path} was moved or deleted while it was open; nothing more is written: put it back")
        self.reopen()
        raise WentBack(f"{self.path} was replaced by another file while it was open")

    def begin_alone(self) -> None:
        """The same: whoever writes is alone."""
        self.begin()

    def begin_read(self) -> None:
        """Start a snapshot that writes nothing."""
        with self._errors("begin"):
            self.connection.execute("BEGIN")

    def commit(self) -> None:
        """COMMIT, and a checkpoint where the WAL has grown; OutcomeUnknown where COMMIT failed."""
        if not self.connection.in_transaction:
            raise InvariantBroken(f"{self.path}: COMMIT outside a transaction", invariant="commit")
        try:
            self.connection.execute("COMMIT")
        except _BUSY as error:
            raise StoreBusy(f"{self.path} is locked by {self._whoever_locks()}") from error
        except apsw.FullError as error:  # the frame that commits is the last of all, and was not written
            raise StoreUnavailable(f"{self.path}: {explain(error, self.path)}") from error
        except apsw.Error as error:
            raise OutcomeUnknown(f"{self.path}: COMMIT failed: {error}") from error
        if self._wal_pages >= WAL_PAGES:
            self.checkpoint()

    def rollback(self) -> None:
        """Undo; never raises: SQLite may already have rolled back by itself."""
        with contextlib.suppress(apsw.Error):
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def checkpoint(self) -> tuple[int, int]:
        """Move the WAL into the file: (frames in the WAL, frames moved). A failure is not an error: the WAL is kept."""
        try:
            frames, moved = self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (*_BUSY, *_UNAVAILABLE):
            return self._wal_pages, 0
        if moved == frames:
            self._wal_pages = 0
        return frames, moved

    # -- statements ------------------------------------------------------------------------

    def run(self, statement: str, **values: Value) -> int:
        """Run a named statement; the rows it changed."""
        with self._errors(statement):
            self.connection.execute(self._sql[statement], values)
            return self.connection.changes()

    def rows(self, statement: str, **values: Value) -> list[Row]:
        """Every row of a named query."""
        with self._errors(statement):
            return self.connection.execute(self._sql[statement], values).fetchall()

    def one(self, statement: str, **values: Value) -> Row | None:
        """The first row of a named query, or None."""
        found = self.rows(statement, **values)
        return found[0] if found else None

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run SQL made of checked identifiers; the rows it changed."""
        with self._errors(sql):
            self.connection.execute(sql, values)
            return self.connection.changes()

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row of such a query."""
        with self._errors(sql):
            return self.connection.execute(sql, values).fetchall()

    def stream_text(self, sql: str, values: Sequence[Value] = ()) -> Iterator[Row]:
        """The rows of such a query, one by one."""
        with self._errors(sql):
            yield from self.connection.execute(sql, values)

    def stage(self, table: str, width: int, rows: Sequence[Row], *, tail: str = "") -> None:
        """Insert rows by few statements of many values: each lets go of the interpreter lock once.

        6,000 rows of 10 columns beside a busy thread: 164 ms so, 499 ms row by row.
        """
        one = f"({','.join('?' * width)})"
        step = max(1, min(256, VALUES_MAX // width))
        with self._errors(table):
            whole = len(rows) // step * step
            if whole:
                sql = f"INSERT INTO {table} VALUES {','.join([one] * step)} {tail}"
                for start in range(0, whole, step):
                    self.connection.execute(sql, tuple(chain.from_iterable(rows[start : start + step])))
            if whole < len(rows):
                rest = rows[whole:]
                # Powers of two, so that the statements come from a small cache.
                while rest:
                    size = 1 << (len(rest).bit_length() - 1)
                    sql = f"INSERT INTO {table} VALUES {','.join([one] * size)} {tail}"
                    self.connection.execute(sql, tuple(chain.from_iterable(rest[:size])))
                    rest = rest[size:]

    def unstage(self) -> None:
        """Empty the staging tables."""
        with self._errors("unstage"):
            for statement in self._sql["unstage"].split(";"):
                self.connection.execute(statement)

    def has_table(self, name: str) -> bool:
        """Whether a table of that name is there."""
        return bool(self.rows_text("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)))

    def locked(self, alias: str) -> str:
        """Nothing: a transaction that writes holds every row as it is."""
        return ""

    def ddl(self, sql: str) -> str:
        """A statement of the schema: it is written in SQLite's words."""
        return sql

    def said(self, sql: str, values: Sequence[Value]) -> str:
        """A statement with its values in it."""
        pieces = sql.split("?") if values else [sql]
        return pieces[0] + "".join(
            "'" + str(value).replace("'", "''") + "'" + piece for value, piece in zip(values, pieces[1:], strict=True)
        )

    def catalogue(self) -> dict[str, Made]:
        """Everything in the file, with the text that made it."""
        rows = self.rows_text("SELECT name, type, tbl_name, COALESCE(sql, '') FROM sqlite_master")
        return {name: Made(kind, table, sql) for name, kind, table, sql in rows}

    def integrity_check(self) -> list[str]:
        """What SQLite itself finds wrong with the file; empty where it is sound."""
        with self._errors("integrity_check"):
            found = [str(row[0]) for row in self.connection.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    # -- errors ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except _BUSY as error:
            what = "" if doing in ("open", "begin") else f" ({short(doing)})"
            raise StoreBusy(f"{self.path} is locked by {self._whoever_locks()}{what}") from error
        except _UNAVAILABLE as error:
            raise StoreUnavailable(f"{self.path}: {explain(error, self.path)}") from error
        except _CORRUPT as error:
            raise StoreCorrupt(
                f"{self.path} is damaged, or no SQLite database: {error}. Keep the file; `limpet doctor` says what can be read"
            ) from error
        except apsw.ConstraintError as error:
            if doing in self._sql:  # our own tables refuse a row: no page's data is to blame
                raise InvariantBroken(
                    f"{self.path}: a table of the protocol refuses a row ({doing}): {error}", invariant="schema"
                ) from error
            raise PoisonRow(f"{self.path} refuses the data ({short(doing)}): {error}") from error
        except _DATA as error:
            raise PoisonRow(f"{self.path} refuses the data ({short(doing)}): {error}") from error
        except apsw.Error as error:
            raise StoreError(f"{self.path}: {type(error).__name__}: {error} ({short(doing)})") from error

    def _whoever_locks(self) -> str:
        return self.lock_holder() or "another connection"

    def lock_holder(self) -> str:
        """Who holds the write lock of the WAL, as 'process 123 (name)'; '' where nobody does, or it cannot be told."""
        pid = lock_holder_pid(self.path)
        if not pid:
            return ""
        with contextlib.suppress(OSError):
            return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
        return f"process {pid}"


def lock_holder_pid(path: str) -> int:
    """The other process that holds the WAL's write lock, as /proc/locks says; 0 for none, this one, or where it cannot be told.

    Not by F_GETLK on the -shm file: closing any handle on it drops every lock that this process has there, and
    with them SQLite's own (sqlite.org/howtocorrupt.html, section 2.2).
    """
    with contextlib.suppress(OSError, ValueError):
        seen = os.stat(f"{path}-shm")
        place = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: POSIX  ADVISORY  WRITE 4711 fe:00:2146352 120 120     (those that wait have an arrow after the number)
            words = line.split()
            is_here = words[1] == "POSIX" and words[3] == "WRITE" and words[5] == place and int(words[4]) != os.getpid()
            if is_here and int(words[6]) <= WRITE_LOCK_BYTE <= (int(words[7]) if words[7] != "EOF" else WRITE_LOCK_BYTE):
                return int(words[4])
    return 0


def is_on_readonly_disk(path: str) -> bool:
    """Whether the file system of a file takes no writes from anybody."""
    with contextlib.suppress(OSError, AttributeError):  # no such call on Windows
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def explain(error: Exception, path: str) -> str:
    """A driver's error in words that say what to do."""
    if isinstance(error, apsw.FullError):
        return "the disk is full; nothing was lost: free some space and run the same command again"
    if isinstance(error, apsw.ReadOnlyError):
        return "the file or its folder is read-only; nothing was lost: make it writable and run the same command again"
    if isinstance(error, apsw.CantOpenError | apsw.PermissionsError):
        return f"cannot be opened ({error}): check that the folder exists and that this user may write to {os.path.dirname(path)}"
    return f"the disk reports an error ({error}); nothing was lost: check the disk and run the same command again"


WriteHook = Callable[[], None]


def is_sqlite_file(path: str) -> bool:
    """Whether a file begins as a SQLite database does; read by SQLite itself, without a lock.

    Never by open() and close(): on POSIX that drops every lock that other connections of this process hold on the file.
    """
    from urllib.parse import quote as quoted

    try:
        looking = apsw.Connection(
            f"file:{quoted(os.path.abspath(path))}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        )
    except apsw.Error:
        return True  # what is wrong with it is said by whoever opens it
    try:
        looking.execute("PRAGMA schema_version").fetchall()
    except apsw.NotADBError:
        return False
    except apsw.Error:
        return True
    finally:
        looking.close()
    return True
