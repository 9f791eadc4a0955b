"""The schema: from its first version on, step by step, and never backwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from limpet.errors import SchemaNewer, StoreBusy, UsageError
from limpet.store import Store, migrate, open_store, sqlite
from limpet.store.dialect import split
from limpet.store.joining import has_jobs
from limpet.store.opening import connect
from limpet.store.sqlite import Sqlite
from tests.conftest import Databases, Hire, on_sqlite
from tests.store.audit import audit
from tests.store.hands import Hand, child, column, counted, done, dump, found_job, pages, tables

LATER = (
    9001,
    "later",
    "CREATE TABLE later (x INTEGER); -- a step; of a release to come\nALTER TABLE meta ADD COLUMN more TEXT;\n",
)
BROKEN = (9002, "broken", "CREATE TABLE half (x INTEGER);\nALTER TABLE nowhere ADD COLUMN x TEXT;\n")


@pytest.fixture
def with_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds steps of releases to come."""
    real = migrate.steps()

    def add(*later: tuple[int, str, str]) -> None:
        monkeypatch.setattr(migrate, "steps", lambda: [*real, *later])

    return add


def names_of(store: Store) -> set[str]:
    """The tables of a database."""
    return set(tables(store.db))


def test_a_new_database_gets_the_schema_of_this_release(make_store: Callable[..., Store], databases: Databases) -> None:
    """Every table of the protocol, the version, and a name of its own."""
    store, other = make_store(databases.new()), make_store(databases.new())
    assert migrate.version(store.db) == migrate.latest()
    assert {"meta", "job", "worker", "shard", "source", "task", "task_text", "attempt", "ledger"} <= names_of(store)
    ids = {column(one.db, "value", "name = 'database'", table="meta")[0] for one in (store, other)}
    assert len(ids) == 2


def test_steps_have_numbers_without_a_gap_and_names() -> None:
    """0001, 0002, ...: a file that was misnamed would never be applied."""
    numbers = [number for number, _, _ in migrate.steps()]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert all(name and sql.strip() for _, name, sql in migrate.steps())


def test_migrating_again_is_nothing(store: Store) -> None:
    """Every start does it."""
    before = dump(store.db)
    assert migrate.migrate(store.db) == []
    assert dump(store.db) == before


def test_a_later_step_is_applied_once_and_keeps_what_is_there(
    hire: Hire, make_store: Callable[..., Store], with_steps: Callable[..., None]
) -> None:
    """Data, epochs and watermarks of the old release go on in the new one."""
    hand = hire(0)
    hand.seed(*pages(0, 4))
    hand.finish(*(done(claim) for claim in hand.claim(2)))
    with_steps(LATER)
    assert migrate.migrate(hand.db) == ["9001_later"]
    assert migrate.migrate(hand.db) == []
    assert "later" in names_of(hand.store)
    assert counted(hand.db) == {"done": 2, "pending": 2}
    assert len(hand.claim()) == 2
    audit(hand.db, hand.job.id)


def test_a_step_that_fails_leaves_the_schema_before_it(store: Store, with_steps: Callable[..., None]) -> None:
    """One transaction each: the step before it stands, of the broken one nothing does; a mended one is applied later.

    MySQL commits each CREATE by itself: what was made stays, and the step is taken from its beginning again.
    """
    with_steps(LATER, BROKEN)
    with pytest.raises(Exception, match="nowhere"):
        migrate.migrate(store.db)
    assert migrate.version(store.db) == 9001
    assert ("half" in names_of(store)) is store.db.ddl_commits
    with_steps(LATER, (9002, "mended", "CREATE TABLE half (x INTEGER);"))
    assert migrate.migrate(store.db) == ["9002_mended"]
    assert migrate.version(store.db) == 9002


def test_an_older_schema_is_not_worked_on_before_it_is_migrated(store: Store, with_steps: Callable[..., None]) -> None:
    """Opening without `create` says which command to run, and changes nothing."""
    before = dump(store.db)
    with_steps(LATER)
    with pytest.raises(UsageError, match="limpet migrate"):
        open_store(store.dsn, create=False)
    assert dump(store.db) == before


@pytest.mark.parametrize("create", [True, False])
def test_a_newer_schema_is_refused_and_never_touched(store: Store, monkeypatch: pytest.MonkeyPatch, create: bool) -> None:
    """Upgrade this installation; the file stays as the newer release left it."""
    store.db.run_text("UPDATE meta SET value = '99' WHERE name = 'schema'")
    before = dump(store.db)
    with pytest.raises(SchemaNewer, match="upgrade Limpet"):
        open_store(store.dsn, create=create)
    assert dump(store.db) == before


def test_a_database_without_a_job_yet_is_named_so(databases: Databases) -> None:
    """Nothing was started there: say what would."""
    dsn = databases.new()
    connect(dsn, create=True).close()
    with pytest.raises(UsageError, match="holds no job yet"):
        open_store(dsn, create=False)


def test_a_database_that_another_process_is_making_holds_no_job_yet(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps: who looks then is not told to migrate, and makes the rest like anybody who begins."""
    dsn, real = databases.new(), migrate.steps()
    monkeypatch.setattr(migrate, "steps", lambda: real[:1])
    open_store(dsn).close()
    monkeypatch.setattr(migrate, "steps", lambda: real)
    with pytest.raises(migrate.NoJobYet, match="holds no job yet"):
        open_store(dsn, create=False)
    assert not has_jobs(dsn)
    store = open_store(dsn)
    found_job(store)
    store.close()
    assert has_jobs(dsn)


def test_a_table_named_meta_is_no_schema_of_ours(databases: Databases) -> None:
    """A file that says it is Limpet's, but whose `meta` is another's."""
    dsn = databases.new()
    db = connect(dsn, create=True)
    db.run_text("CREATE TABLE meta (name TEXT, value TEXT)")
    db.close()
    with pytest.raises(UsageError, match="no schema version"):
        open_store(dsn)


def test_threads_that_start_at_once_on_a_new_database_wait_for_each_other(databases: Databases) -> None:
    """The version is read again under the write lock: one applies the steps, the others find them applied."""
    dsn, barrier = databases.new(), Barrier(6)

    def start(_: int) -> int:
        barrier.wait()
        store = open_store(dsn)
        version = migrate.version(store.db)
        store.close()
        return version

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(start, range(6))) == {migrate.latest()}


STARTER = """
import sys
from limpet.store import open_store
print("ready", flush=True)
sys.stdin.readline()
store = open_store(sys.argv[1])
print(store.db.rows_text("SELECT value FROM meta WHERE name = 'database'")[0][0], flush=True)
"""


def test_processes_that_start_at_once_on_a_new_database_agree_on_it(databases: Databases) -> None:
    """Four workers begun by one script: none fails, and there is one database."""
    dsn = databases.new()
    processes = [child(STARTER, dsn) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=30)[0].strip() for process in processes}
    assert len(answers) == 1
    assert answers != {""}


@on_sqlite
def test_a_file_that_another_process_makes_meanwhile_is_no_strangers(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no name yet when it is looked at, and tables a moment later: both are Limpet's."""
    dsn, real, fired = databases.new(), Sqlite._pragma, []

    def made_meanwhile(db: Sqlite, name: str) -> object:
        found = real(db, name)
        if name == "application_id" and not fired:
            fired.append(found)
            open_store(dsn).close()
        return found

    monkeypatch.setattr(Sqlite, "_pragma", made_meanwhile)
    store = open_store(dsn)
    assert fired == [0]
    assert migrate.version(store.db) == migrate.latest()
    store.close()


@on_sqlite
def test_a_file_that_is_busy_while_it_is_opened_is_opened_again(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite does not wait for the locks of a change of journal mode; Limpet does, for a while."""
    import apsw

    real, fired, waits = Sqlite._settings, [], []

    def busy(db: Sqlite) -> None:
        fired.append(1)
        if len(fired) < 4:
            raise apsw.BusyError("locked")
        real(db)

    monkeypatch.setattr(sqlite.time, "sleep", waits.append)
    monkeypatch.setattr(Sqlite, "_settings", busy)
    open_store(databases.new()).close()
    assert waits == list(sqlite.OPEN_WAITS_S[:3])
    monkeypatch.setattr(Sqlite, "_settings", lambda db: (_ for _ in ()).throw(apsw.BusyError("locked")))
    with pytest.raises(StoreBusy):
        open_store(databases.new())


def test_comments_and_semicolons_in_them_are_no_statements() -> None:
    """A step is split where it must be."""
    sql = "-- a; b\nCREATE TABLE a (x TEXT); -- c; d\n\n;\nCREATE TABLE b (\n    y TEXT  -- e; f\n);\n"
    assert [*split(sql)] == ["CREATE TABLE a (x TEXT)", "CREATE TABLE b (\n    y TEXT\n)"]


def test_a_job_goes_on_in_a_copy_of_its_database(store: Store, databases: Databases) -> None:
    """The database is all that there is: copied and opened elsewhere, nothing is missing."""
    hand = Hand.on(store)
    hand.take()
    hand.seed(*pages(0, 3))
    hand.leave()
    store.close()
    copy = open_store(databases.fork(store.dsn))
    found_job(copy)
    heir = Hand.on(copy)
    heir.db.run_text("UPDATE worker SET dead = 1 WHERE worker <> ?", (heir.worker.id,))
    heir.take()
    assert len(heir.claim()) == 3
    audit(heir.db, heir.job.id)
    heir.leave()
    copy.close()
