"""Disks that are full, read-only, broken or busy: a clear error of the right class, nothing lost, no task blamed.

Each fault is a real one (a full file system, a limit of the kernel, a lock of another process, bytes that were
changed) or SQLite's own error at the very write that it would come from, through a file system in Python.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import apsw
import pytest

from limpet.batch import Part
from limpet.errors import (
    LimpetError,
    OutcomeUnknown,
    SchemaNewer,
    StoreBusy,
    StoreCorrupt,
    StoreUnavailable,
    UsageError,
)
from limpet.settings import Settings
from limpet.store import commit, lease, open_store, sqlite
from limpet.store.sqlite import Sqlite
from tests.conftest import Databases, on_sqlite
from tests.store.audit import audit
from tests.store.hands import (
    SHARDS,
    Hand,
    Product,
    child,
    column,
    counted,
    done,
    dump,
    emitted,
    found_job,
    pages,
    records,
    table_name,
)

pytestmark = on_sqlite  # these are faults of a file


@pytest.fixture(autouse=True)
def _short_waits(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_MS", 20)
    monkeypatch.setattr(sqlite, "OPEN_WAITS_S", (0.0,))
    monkeypatch.setattr(commit, "BUSY_WAITS_S", (0.0,))
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0, 0.0))


class Place:
    """A folder with a database in it, and a worker that has claimed four pages; what it would commit."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.db"
        self.store = open_store(f"sqlite:///{self.path}", settings=Settings(shards=SHARDS, lease_s=600.0))
        found_job(self.store)
        self.store.ensure_datasets("shop", {table_name(Product): Product})
        self.hand = Hand.on(self.store)
        self.hand.take()
        self.hand.seed(*pages(0, 8))
        self.hand.claim(4)

    def part(self, bytes_each: int = 10) -> Part:
        """The results of the pages claimed, each with a record and a long story."""
        from dataclasses import replace

        results = [
            replace(done(claim, offers=[emitted(f"sku{i}", i)]), detail=os.urandom(bytes_each // 2).hex())
            for i, claim in enumerate(self.hand.claims.values())
        ]
        return self.hand.part(0, *results)

    def goes_on(self, part: Part) -> None:
        """The fault is over: the very same part goes through, and nothing was lost or blamed."""
        self.hand.send(part)
        assert counted(self.hand.db) == {"done": 4, "pending": 4}
        assert len(records(self.hand.db)) == 4
        assert column(self.hand.db, "halted", table="job") == [""]
        audit(self.hand.db, self.hand.job.id)
        assert isinstance(self.hand.db, Sqlite)
        assert self.hand.db.integrity_check() == []

    def close(self) -> None:
        """Close what is open."""
        self.hand.leave()
        self.store.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A database in a folder of its own."""
    made = Place(tmp_path)
    yield made
    made.close()


def content(path: Path) -> dict[str, bytes]:
    """Every file beside a database, with its bytes."""
    return {file.name: file.read_bytes() for file in sorted(path.parent.iterdir()) if file.is_file()}


# -- what cannot be opened ----------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """And is not made."""
    with pytest.raises(UsageError, match="no/where does not exist"):
        open_store(f"sqlite:///{tmp_path}/no/where/x.db")
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_does_not_exist_is_not_made_by_looking(tmp_path: Path) -> None:
    """`status` of a misspelt name must not leave an empty database behind."""
    for readonly in (False, True):
        with pytest.raises(UsageError, match=r"no database at .*/x\.db"):
            open_store(f"sqlite:///{tmp_path}/x.db", create=False, readonly=readonly)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    """It cannot be opened, and stays a folder."""
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        open_store(f"sqlite:///{tmp_path}")
    assert [*tmp_path.iterdir()] == []


NO_DATABASES = {
    "csv": b"url,title\n" * 200,
    "noise": bytes(range(1, 256)) * 40,
    "format 4": b"SQLite format 4\0" + bytes(4096),
    "html": b"<html>",
}


@pytest.mark.parametrize("text", NO_DATABASES.values(), ids=NO_DATABASES)
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path, text: bytes) -> None:
    """Whatever `--db` was pointed at by mistake."""
    path = tmp_path / "x.db"
    path.write_bytes(text)
    for create in (True, False):
        with pytest.raises(StoreCorrupt, match="no SQLite database"):
            open_store(f"sqlite:///{path}", create=create)
    assert content(path) == {"x.db": text}


@pytest.mark.parametrize("application_id", [0, 0x0F055112])
@pytest.mark.parametrize("table", ["bookmarks", "meta", "job"])
def test_a_database_of_another_application_is_refused_and_left_as_it_is(tmp_path: Path, application_id: int, table: str) -> None:
    """A browser's, a package manager's: not one byte of it changes, and no file appears beside it."""
    path = tmp_path / "x.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute(f"CREATE TABLE {table} (name TEXT, value TEXT)")
        other.execute(f"PRAGMA application_id = {application_id}")
        other.commit()
    before = content(path)
    for create in (True, False):
        with pytest.raises(UsageError, match="none of Limpet's"):
            open_store(f"sqlite:///{path}", create=create)
    assert content(path) == before


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    """As `mktemp` makes one: nothing in it can be lost."""
    path = tmp_path / "x.db"
    path.touch()
    open_store(f"sqlite:///{path}").close()
    assert path.stat().st_size > 0


def test_a_newer_schema_is_refused_and_the_file_is_left_as_it_is(place: Place) -> None:
    """Upgrade this installation."""
    place.store.db.run_text("UPDATE meta SET value = '99' WHERE name = 'schema'")
    place.close()
    before = place.path.read_bytes()
    with pytest.raises(SchemaNewer):
        open_store(f"sqlite:///{place.path}")
    assert place.path.read_bytes() == before


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write to what is read-only: be nobody for a while, where we are root."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach, which pytest's own are not."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="limpet-disk-"))
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def test_a_read_only_file_is_read_but_takes_no_commit(open_folder: Path) -> None:
    """It says so, writes nothing, and goes on once it may be written to."""
    place = Place(open_folder)
    part = place.part()
    before = dump(place.store.db)
    place.close()
    for file in open_folder.iterdir():
        file.chmod(0o444)
    open_folder.chmod(0o555)
    with unprivileged(), pytest.raises(StoreUnavailable, match=r"read-only|cannot be opened"):
        found_job(open_store(f"sqlite:///{place.path}"))
    open_folder.chmod(0o777)
    for file in open_folder.iterdir():
        file.chmod(0o666)
    place.store = open_store(f"sqlite:///{place.path}", settings=place.store.settings)
    assert dump(place.store.db) == before
    found_job(place.store)
    place.store.ensure_datasets("shop", {table_name(Product): Product})
    place.hand.store = place.store.again()
    place.goes_on(part)
    place.close()


def test_a_folder_that_may_not_be_written_to_makes_no_database(open_folder: Path) -> None:
    """Check that this user may write there."""
    open_folder.chmod(0o555)
    with unprivileged(), pytest.raises(StoreUnavailable, match="cannot be opened"):
        open_store(f"sqlite:///{open_folder}/x.db")
    assert [*open_folder.iterdir()] == []


# -- damaged files ------------------------------------------------------------------------------------


def closed_copy(place: Place, tmp_path: Path) -> Path:
    """The database as one closed file, with enough pages in it to damage."""
    place.hand.seed(*pages(1, 400, start=1000))
    assert isinstance(place.store.db, Sqlite)
    place.store.db.checkpoint()
    copy = tmp_path / "damaged.db"
    shutil.copy(place.path, copy)
    return copy


def use(path: Path) -> list[Exception]:
    """Open a damaged database and work on it: the errors that came of it."""
    met: list[Exception] = []
    try:
        store = open_store(f"sqlite:///{path}", settings=Settings(shards=SHARDS, lease_s=600.0))
    except LimpetError as error:
        return [error]
    try:
        found_job(store)
        hand = Hand.on(store)
        hand.db.run_text("UPDATE worker SET dead = 1 WHERE worker <> ?", (hand.worker.id,))
        hand.take()
        for _ in range(3):
            hand.finish(*(done(claim) for claim in hand.claim(50)))
        dump(hand.db)
    except LimpetError as error:
        met.append(error)
    finally:
        store.close()
    return met


@pytest.mark.parametrize("tenths", range(1, 10))
def test_a_truncated_file_is_damage_and_nobodys_fault(place: Place, tmp_path: Path, tenths: int) -> None:
    """Cut anywhere (P26, P52): StoreCorrupt, loud, never a fresh start, never a dead letter."""
    path = closed_copy(place, tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * tenths // 10)
    before = path.stat().st_size
    (error,) = use(path)
    assert isinstance(error, StoreCorrupt)
    assert "Keep the file" in str(error)
    assert path.stat().st_size >= before
    with contextlib.suppress(apsw.Error), contextlib.closing(apsw.Connection(str(path))) as raw:
        assert raw.execute("SELECT COUNT(*) FROM task WHERE state = 'dead'").fetchall() == [(0,)]


@pytest.mark.parametrize("page", range(1, 30, 2))
def test_a_page_that_was_overwritten_is_damage_and_nobodys_fault(place: Place, tmp_path: Path, page: int) -> None:
    """A block of zeros where a page was: StoreCorrupt as soon as it is read, and nothing else ever."""
    path = closed_copy(place, tmp_path)
    with path.open("r+b") as file:
        file.seek(4096 * page)
        file.write(bytes(4096))
    for error in use(path):
        assert isinstance(error, StoreCorrupt), error
    with contextlib.closing(Sqlite(str(path), readonly=True, create=False)) as db:
        problems: list[str] = []
        with contextlib.suppress(StoreCorrupt):
            problems = db.integrity_check()
            assert problems


def test_a_header_that_was_overwritten_is_no_database(place: Place, tmp_path: Path) -> None:
    """The first bytes are gone."""
    path = closed_copy(place, tmp_path)
    with path.open("r+b") as file:
        file.write(bytes(100))
    (error,) = use(path)
    assert isinstance(error, StoreCorrupt)


@pytest.mark.parametrize("cut", [1, 100, 4096, 5000, 100_000])
def test_a_torn_log_costs_at_most_what_was_not_committed(place: Place, tmp_path: Path, cut: int) -> None:
    """P04: the last bytes of the WAL are missing, as after a power cut: it opens, and what it holds is whole."""
    place.hand.seed(*pages(1, 200, start=1000))
    for name in ("x.db", "x.db-wal"):
        shutil.copy(place.path.parent / name, tmp_path / f"torn{name[1:]}")
    wal = tmp_path / "torn.db-wal"
    with wal.open("r+b") as file:
        file.truncate(max(0, wal.stat().st_size - cut))
    store = open_store(f"sqlite:///{tmp_path}/torn.db")
    assert isinstance(store.db, Sqlite)
    assert store.db.integrity_check() == []
    job = store.db.rows_text("SELECT job FROM job")
    if job:
        audit(store.db, 1)
    store.close()


# -- locked by others -----------------------------------------------------------------------------------

HOLDER = """
import sqlite3, sys
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(place: Place) -> Iterator[subprocess.Popen[str]]:
    """Another program in the middle of a transaction."""
    process = child(HOLDER, str(place.path))
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_that_outlasts_every_wait_names_who_holds_it(place: Place, holder: subprocess.Popen[str]) -> None:
    """StoreBusy, with process and name; nothing was written, and the same part goes through afterwards."""
    part, before = place.part(), dump(place.hand.db)
    with pytest.raises(StoreBusy, match=rf"locked by process {holder.pid} \(python[^()]*\)$"):
        place.hand.send(part)
    with pytest.raises(StoreBusy):
        lease.beat(place.hand.db, place.hand.worker)
    assert dump(place.hand.db) == before
    holder.communicate("")
    place.goes_on(part)


def test_a_process_frozen_inside_its_transaction_is_named_and_may_be_ended(place: Place, holder: subprocess.Popen[str]) -> None:
    """17: it holds the only write lock of the file and will never let go; ending it by its pid is safe."""
    holder.send_signal(signal.SIGSTOP)
    part = place.part()
    with pytest.raises(StoreBusy):
        place.hand.send(part)
    assert isinstance(place.hand.db, Sqlite)
    pid = sqlite.lock_holder_pid(str(place.path))
    assert pid == holder.pid
    os.kill(pid, signal.SIGKILL)
    holder.wait()
    assert place.hand.db.lock_holder() == ""
    place.goes_on(part)


def test_a_database_that_is_locked_can_still_be_opened_and_read(place: Place, holder: subprocess.Popen[str]) -> None:
    """`status` and a second worker's start do not wait for the writer."""
    assert holder.poll() is None
    store = open_store(f"sqlite:///{place.path}")
    assert counted(store.db) == {"running": 4, "pending": 4}
    store.close()


# -- full disks -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    done_with = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)], capture_output=True, check=False)
    if done_with.returncode:
        pytest.skip("only root may mount a small file system")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill_up(folder: Path, leave: int) -> Path:
    """Fill a file system but for so many bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with filler.open("r+b") as file:
        file.truncate(max(0, filler.stat().st_size - leave))
    return filler


@pytest.mark.needs_root
@pytest.mark.parametrize("leave", [0, 8192, 65536])
def test_a_full_disk_is_told_and_the_same_part_goes_through_when_there_is_space(small_disk: Path, leave: int) -> None:
    """StoreUnavailable, in words; no task blamed, nothing lost, the job not halted."""
    place = Place(small_disk)
    part, before = place.part(bytes_each=100_000), dump(place.hand.db)
    filler = fill_up(small_disk, leave)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="disk is full; nothing was lost"):
            place.hand.send(part)
    assert dump(place.hand.db) == before
    filler.unlink()
    place.goes_on(part)
    place.close()


@pytest.mark.needs_root
def test_on_a_full_disk_take_over_and_heartbeat_fail_alike_and_go_on_alike(small_disk: Path) -> None:
    """Nobody is certified dead, no shard changes hands, until there is space."""
    place = Place(small_disk)
    heir = Hand.on(place.store)
    heir.bury(place.hand)
    before = dump(heir.db)
    filler = fill_up(small_disk, 0)
    with pytest.raises(StoreUnavailable):
        heir.take()
    with pytest.raises(StoreUnavailable):
        lease.beat(heir.db, heir.worker)
    assert dump(heir.db) == before
    filler.unlink()
    assert sum(taken.lost for taken in heir.take()) == 4
    audit(heir.db, heir.job.id)
    heir.leave()
    place.close()


@pytest.mark.needs_root
def test_a_database_cannot_be_begun_on_a_full_disk(small_disk: Path) -> None:
    """Said in words, and tried again with space."""
    filler = fill_up(small_disk, 0)
    with pytest.raises(StoreUnavailable, match="disk"):
        open_store(f"sqlite:///{small_disk}/x.db")
    filler.unlink()
    open_store(f"sqlite:///{small_disk}/x.db").close()


def test_a_file_that_may_not_grow_any_more_is_told_and_goes_on_when_it_may(place: Place) -> None:
    """A quota or ulimit: the kernel refuses the write in the middle; what became of the commit is found out afterwards."""
    part, before = place.part(bytes_each=100_000), dump(place.hand.db)
    size = os.path.getsize(f"{place.path}-wal")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, limits[1]))
    try:
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            place.hand.send(part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert dump(place.hand.db) == before
    place.goes_on(part)


# -- a write that fails, one after the other ----------------------------------------------------------------


class FaultyFiles(apsw.VFS):
    """The real file system, but the n-th write or sync of the database's files fails."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: type[apsw.Error] = apsw.IOError
        self.left = -1  # so many go well; -1: all
        self.fired = 0
        super().__init__(name, "unix", maxpathname=0)

    def fail(self, error: type[apsw.Error], after: int) -> None:
        """From now on, so many go well, and all after them fail."""
        self.error, self.left, self.fired = error, after, 0

    def step(self) -> None:
        """One write or sync."""
        if self.left == 0:
            self.fired += 1
            raise self.error("injected")
        self.left -= self.left > 0

    def xOpen(self, name: object, flags: list[int]) -> FaultyFile:
        """A file of this file system."""
        return FaultyFile(self, name, flags)


class FaultyFile(apsw.VFSFile):
    """One file of `FaultyFiles`."""

    def __init__(self, files: FaultyFiles, name: object, flags: list[int]) -> None:
        self.files = files
        super().__init__("unix", name, flags)  # type: ignore[arg-type]

    def xWrite(self, data: bytes, offset: int) -> None:
        """Write, or fail."""
        self.files.step()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        """Sync, or fail."""
        self.files.step()
        super().xSync(flags)


@pytest.fixture
def faulty(place: Place, monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """The place's worker on a faulty file system."""
    files = FaultyFiles(f"faulty{id(place)}")
    place.hand.store.close()
    place.hand.store.db = Sqlite(str(place.path), create=False, vfs=files.name)
    return files


ERRORS = {"full": apsw.FullError, "io": apsw.IOError, "readonly": apsw.ReadOnlyError}


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_every_write_of_a_commit_may_fail_and_nothing_is_lost(place: Place, faulty: FaultyFiles, kind: str) -> None:
    """EIO, ENOSPC, EROFS at the first write of the commit, at the second, and so on: told, repeatable, nobody blamed."""
    part, before, fired = place.part(bytes_each=6000), dump(place.hand.db), 0
    for after in count():
        faulty.fail(ERRORS[kind], after)
        try:
            place.hand.send(part)
        except (StoreUnavailable, OutcomeUnknown):
            fired += 1
        else:
            break
        finally:
            was_met = faulty.fired > 0
            faulty.fail(ERRORS[kind], -1)
        assert was_met
        now = dump(place.hand.db)
        assert now["task"] == before["task"] or place.hand.store.unsettled, "half a batch"
    assert not was_met
    faulty.fail(ERRORS[kind], -1)
    assert fired >= 5, "the fault was never met"
    assert counted(place.hand.db) == {"done": 4, "pending": 4}
    assert len(records(place.hand.db)) == 4
    assert column(place.hand.db, "halted", table="job") == [""]
    audit(place.hand.db, place.hand.job.id)


def test_a_failure_that_was_not_met_would_pass_everything(place: Place, faulty: FaultyFiles) -> None:
    """The twin: the fault fires where it is planned, and a commit has that many writes."""
    faulty.fail(apsw.IOError, 10_000)
    place.hand.send(place.part())
    assert faulty.fired == 0
    assert 0 < 10_000 - faulty.left < 1000


def test_a_checkpoint_that_fails_is_no_error_of_the_commit_before_it(
    place: Place, faulty: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed is in the log; moving it into the file is tried again later."""
    monkeypatch.setattr(sqlite, "WAL_PAGES", 1)
    writes = count()
    real = faulty.step

    def only_the_commit() -> None:
        next(writes)
        real()

    faulty.step = only_the_commit  # type: ignore[method-assign]
    part = place.part()
    size = os.path.getsize(place.path)
    faulty.fail(apsw.FullError, -1)
    checkpoint, fired = Sqlite.checkpoint, []

    def fails(db: Sqlite) -> tuple[int, int]:
        faulty.fail(apsw.FullError, 0)
        try:
            return checkpoint(db)
        finally:
            fired.append(faulty.fired)
            faulty.fail(apsw.FullError, -1)

    monkeypatch.setattr(Sqlite, "checkpoint", fails)
    place.hand.send(part)
    assert fired
    assert fired[0] > 0
    monkeypatch.setattr(Sqlite, "checkpoint", checkpoint)
    assert counted(place.hand.db) == {"done": 4, "pending": 4}
    assert isinstance(place.hand.db, Sqlite)
    frames, moved = place.hand.db.checkpoint()
    assert frames == moved
    assert os.path.getsize(place.path) >= size
    audit(place.hand.db, place.hand.job.id)
