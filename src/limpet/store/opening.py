"""Opening a database, and the one object through which the engine speaks to it.

A `Store` is one writing connection, for one thread, with what a worker's commits need: its job, the
tables of its datasets and the memory of known keys. `Store.again()` opens another connection to the
same place, for a heartbeat or for reading.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from limpet.batch import Part, Want
from limpet.errors import InvariantBroken, LimpetError, OutcomeUnknown, PoisonRow, UsageError
from limpet.record import RecordType
from limpet.settings import SHARDS_SERVER, SHARDS_SQLITE, Settings
from limpet.store import alerts, bisect, charges, jobs, lease, migrate
from limpet.store.commit import Committed, Context, check_parts
from limpet.store.dialect import Database, public_dsn, sqlite_path
from limpet.store.known import KnownKeys
from limpet.store.sqlite import Sqlite
from limpet.store.tables import Table, ensure, load_tables
from limpet.task import ShardId
from limpet.url import KeyProfile

#: Characters of a slot: MySQL keeps no more of one in an index, and PostgreSQL no more than 2,700 bytes.
SLOT_CHARS_MAX = 300


def checked_slot(slot: object) -> str:
    """A slot as it was given; UsageError where no job can have it.

    >>> checked_slot("2026-11-30")
    '2026-11-30'
    """
    if not isinstance(slot, str) or any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in slot):
        raise UsageError(f"slot {slot!r:.200}: expected a line of text")
    if len(slot) > SLOT_CHARS_MAX:
        raise UsageError(f"slot {slot[:40]!r}...: {len(slot)} characters; expected at most {SLOT_CHARS_MAX}")
    return slot


def connect(dsn: str, *, create: bool = False, readonly: bool = False, lease_s: float = 10.0) -> Database:
    """A connection to the database at an address; UsageError for one that Limpet cannot speak to."""
    scheme = dsn.partition("://")[0] if "://" in dsn else "sqlite"
    if scheme == "sqlite":
        return Sqlite(sqlite_path(dsn), create=create, readonly=readonly)
    if scheme in ("postgresql", "postgres"):
        try:
            from limpet.store.postgres import Postgres
        except ImportError as error:
            raise UsageError(f"{public_dsn(dsn)}: PostgreSQL needs the extra: pip install 'limpet[postgres]' ({error})") from error
        return Postgres(dsn, lease_s=lease_s, readonly=readonly)
    if scheme in ("mysql", "mariadb"):
        try:
            from limpet.store.mysql import Mysql
        except ImportError as error:
            raise UsageError(f"{public_dsn(dsn)}: MySQL and MariaDB need the extra: pip install 'limpet[mysql]' ({error})") from error
        return Mysql(dsn, lease_s=lease_s, readonly=readonly)
    known = "sqlite:///file.db, postgresql://user@host/database or mysql://user@host/database"
    raise UsageError(f"{public_dsn(dsn)!r}: expected {known}; found {scheme!r}")


def open_store(dsn: str, *, create: bool = True, readonly: bool = False, settings: Settings | None = None) -> Store:
    """Open a database for work. With `create`, a missing file is made and an old schema brought up to date."""
    settings = settings or Settings()
    db = connect(dsn, create=create, readonly=readonly, lease_s=settings.lease_s)
    try:
        if create and not readonly:
            migrate.migrate(db)
        migrate.check(db)
    except LimpetError:
        db.close()
        raise
    return Store(dsn, db, settings)


@dataclass(slots=True)
class Store:
    """One writing connection with its job, its datasets and its memory of known keys."""

    dsn: str
    db: Database
    settings: Settings
    job: jobs.Job | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    known: KnownKeys = field(default_factory=KnownKeys)
    unsettled: bool = False  # the last commit's outcome is unknown: the same parts must come again
    acknowledged: dict[ShardId, int] = field(default_factory=dict)  # shard -> its highest batch that this process took for committed

    def again(self, *, readonly: bool = False) -> Store:
        """Another connection to the same database, for another thread."""
        return Store(self.dsn, connect(self.dsn, readonly=readonly, lease_s=self.settings.lease_s), self.settings, self.job, self.tables)

    def close(self) -> None:
        """Close the connection; never raises."""
        self.db.close()

    # -- jobs ------------------------------------------------------------------------------

    def join(self, *, spider: str, slot: str = "", profile: KeyProfile | None = None, sources: Sequence[jobs.Source] = ()) -> jobs.Job:
        """Make the job with its shards and sources, or load it; it is this store's job from now on. UsageError for a slot that is none."""
        shards = self.settings.shards or (SHARDS_SQLITE if self.db.name == "sqlite" else SHARDS_SERVER)
        self.job = jobs.join(
            self.db, spider=spider, slot=checked_slot(slot), profile=profile or KeyProfile.of(), shards=shards, sources=list(sources)
        )
        return self.job

    def ensure_datasets(self, spider: str, records: Mapping[str, RecordType]) -> None:
        """Make or widen the tables of a spider's records: table name -> type. Outside any batch."""
        for name, record in sorted(records.items()):
            self.tables[name] = ensure(self.db, spider, name, record)
        for name, table in load_tables(self.db, spider).items():
            self.tables.setdefault(name, table)

    # -- the worker's life -----------------------------------------------------------------

    def register(self) -> lease.Worker:
        """Become a worker: a row, a lease, and a locked file beside the database."""
        return lease.register(self.db, lease_s=self.settings.lease_s, lock_folder=lock_folder(self.db), job=self.job.id if self.job else 0)

    def take_over(self, row: lease.ShardRow, me: lease.Worker, code: bytes = b"") -> lease.Taken | None:
        """Make a shard ours; None where somebody else was faster."""
        assert self.job is not None, "a shard is taken over for a job"
        taken = lease.take_over(self.db, self.job.id, row, me, self.settings, code)
        if taken is not None:
            self.acknowledged[taken.shard] = taken.watermark
        return taken

    def commit(self, parts: Sequence[Part], wants: Mapping[ShardId, Want] | None = None) -> list[Committed]:
        """Commit parts; a list, since a refused batch commits in pieces. A broken invariant halts the job first."""
        done = self._commit(parts, wants)
        self.acknowledged.update((part.shard, part.n) for one in done for part in one.parts)
        return done

    def _commit(self, parts: Sequence[Part], wants: Mapping[ShardId, Want] | None) -> list[Committed]:
        assert self.job is not None, "parts are committed for a job"
        check_parts(parts)
        self.known.belongs_to(self.db.incarnation())
        context = Context(self.job, self.tables, self.known, self.settings.suspect_after)
        try:
            if self.unsettled:
                try:
                    done = [bisect.commit_without_losers(self.db, context, parts, wants or {}, unsettled=True)]
                except PoisonRow:  # settled: it was not written, and its data is refused
                    self.unsettled = False
                else:
                    self.unsettled = False
                    return done
            return bisect.commit_bisecting(self.db, context, parts, wants or {}, poison_rows_max=self.settings.poison_rows_max)
        except OutcomeUnknown:
            self.unsettled = True
            raise
        except InvariantBroken as error:
            self.halt(f"{error.invariant}: {error}")
            raise

    def halt(self, reason: str) -> None:
        """Stop the job for everybody: nobody claims until `verify --full` passes."""
        self._on_job("halt", alerts.HALTED, reason=reason)

    def pause(self, reason: str, code: bytes = b"") -> None:
        """Stop claiming; cleared by retry, resume, or a run with other spider code. With the code of a spider it is the breaker's."""
        self._on_job("pause", alerts.BREAKER if code else "", reason=reason, code=code)

    def set_budget(self, micro: int | None) -> None:
        """Say what the job may spend in all, in micro-credits; None for no limit."""
        assert self.job is not None, "a budget is a job's"
        self._write("put_purse", name=charges.job_purse(self.job.id), budget=micro)

    def resume(self) -> None:
        """Take a pause back."""
        self._on_job("resume")

    def _on_job(self, statement: str, alert: str = "", **values: object) -> None:
        assert self.job is not None, "a job is stopped, not a database"
        job = self.job
        self._write(
            statement, (lambda: alerts.put_now(self.db, job, alert, str(values["reason"]))) if alert else None, job=job.id, **values
        )

    def _write(self, statement: str, also: Callable[[], None] | None = None, **values: object) -> None:
        self.db.begin()
        try:
            if self.db.run(statement, **values) and also is not None:  # by the one who changed the row: a second halt tells nobody anew
                also()
            self.db.commit()
        except BaseException:
            self.db.rollback()
            raise


def lock_folder(db: Database) -> str:
    """Where the lock files of workers lie: beside a SQLite file, else in this user's folder for temporary files."""
    return lock_folder_of(db.place if db.name == "sqlite" else "")


def lock_folder_of(file: str) -> str:
    """The same of a database that is a file, or, with "", of one on a server. UsageError where that folder cannot be had."""
    if file:
        return os.path.dirname(os.path.abspath(file))
    folder = os.path.join(tempfile.gettempdir(), f"limpet-{os.getuid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        why = "is a file" if isinstance(error, FileExistsError) else f"cannot be made: {error.strerror}"
        raise UsageError(
            f"{folder} {why}; expected a folder, in which workers of databases on servers keep their lock files: "
            "remove what is there, or name another place with TMPDIR"
        ) from error
    return folder
