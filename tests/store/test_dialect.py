"""Statements and how they run: each prepares, the hot ones stay narrow, and driver errors become Limpet's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet import errors
from limpet.batch import Want
from limpet.store import Store, lease
from limpet.store.dialect import Database, parse, public_dsn, quote, repeat_busy, sqlite_path, statements
from limpet.store.opening import connect
from limpet.store.sqlite import APPLICATION_ID, FIRST_SAFE_VERSION, NOW_MS, Sqlite
from tests.conftest import Databases, Hire, on_servers, on_sqlite
from tests.store.hands import Hand, column, done, link, pages

SQL = statements("sqlite", NOW_MS)
CORE = files("limpet.store").joinpath("sql", "core.sql").read_text(encoding="utf-8")


def sqlite_of(store: Store) -> Sqlite:
    """The connection of a test that is SQLite's alone."""
    assert isinstance(store.db, Sqlite)
    return store.db


def values_for(sql: str) -> dict[str, int]:
    """Some value for each parameter."""
    return dict.fromkeys(re.findall(r":(\w+)", re.sub(r"'[^']*'|--.*", "", sql)), 1)


# -- the loader -------------------------------------------------------------------------------------


def test_every_statement_has_a_name_of_its_own() -> None:
    """Of two with one name the first would vanish."""
    names = re.findall(r"^-- name: (\w+)$", CORE, re.MULTILINE)
    assert len(names) == len(set(names)) == len(parse(CORE))
    assert len(names) == CORE.count("\n-- name:")


def test_every_override_is_of_a_statement_of_the_core_and_says_why() -> None:
    """`Differs: ...` is its first comment."""
    folder = files("limpet.store").joinpath("sql")
    for entry in folder.iterdir():
        if entry.name.endswith(".sql") and entry.name != "core.sql":
            for name, sql in parse(entry.read_text(encoding="utf-8")).items():
                assert name in SQL, f"{entry.name}: {name}"
                assert sql.startswith("-- Differs:"), f"{entry.name}: {name}"


def test_the_clock_is_the_databases_and_stands_in_every_place() -> None:
    """No {now_ms} is left."""
    assert not [name for name, sql in SQL.items() if "now_ms}" in sql]
    assert [name for name, sql in SQL.items() if NOW_MS in sql]


@on_sqlite
@pytest.mark.parametrize("name", sorted(set(SQL) - {"stage_tables", "unstage"}))
def test_every_statement_prepares(store: Store, name: str) -> None:
    """Against the schema of this release, with a value for each of its parameters."""
    db = sqlite_of(store)
    assert db.connection.execute(f"EXPLAIN {SQL[name]}", values_for(SQL[name])).fetchall()


@on_servers
def test_every_statement_prepares_on_servers(store: Store) -> None:
    """In the server's own words, with its types."""
    words = store.db._sql  # type: ignore[attr-defined]
    assert set(words) == set(SQL)
    for name, sql in words.items():
        if name not in ("stage_tables", "unstage"):
            prepare(store.db, name, sql)


def prepare(db: Database, name: str, sql: str) -> None:
    """Have a server prepare a statement; StoreError where it cannot."""
    sql = re.sub(r"--.*", "", sql).replace("%%", "%")
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", sql)))
    db.unstage()
    if db.name == "postgres":
        numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", sql)
        types = ", ".join("bigint" if one == "n" else "unknown" for one in names)
        db.run_text(f"PREPARE {name} {f'({types})' if names else ''} AS {numbered}")
    else:
        db.run_text("SET @said = ?", (re.sub(r"%\(\w+\)s", "?", sql),))
        db.run_text(f"PREPARE {name} FROM @said")
    db.rollback()


UPDATES = sorted(
    name for name, sql in SQL.items() if re.search(r"\bUPDATE (shard|worker|task|source|request)\b", sql) and not name.startswith("repair_")
)


@pytest.mark.parametrize("name", UPDATES)
def test_every_update_of_a_protocol_table_is_guarded(name: str) -> None:
    """It names the row and the state that it leaves: no UPDATE by key alone."""
    text = re.sub(r"--.*", "", SQL[name])
    assert re.search(r"\bWHERE\b.*\b(AND|=)", text, re.DOTALL)
    if " task" in text.split("SET")[0]:
        assert "state" in text.split("WHERE")[-1]


def test_an_empty_or_foreign_name_is_an_error(store: Store) -> None:
    """A misspelt statement is found at once."""
    with pytest.raises(KeyError):
        store.db.run("no_such_statement")


# -- plans ------------------------------------------------------------------------------------------

#: Statement -> the only ways in which its plan may touch `task`.
HOT = {
    "ready_host_after": {"SEARCH task USING COVERING INDEX task_open"},
    "ready_of_host": {"SEARCH task USING COVERING INDEX task_open"},
    "ready_above": {"SEARCH task USING COVERING INDEX task_open"},
    "ready_host_between": {"SEARCH task USING COVERING INDEX task_open"},
    "suspects_due": {"SEARCH task USING COVERING INDEX task_open"},
    "due": {"SEARCH task USING COVERING INDEX task_open"},
    "next_due": {"SEARCH task USING COVERING INDEX task_open"},
    "open_work": {"SEARCH t USING COVERING INDEX task_open", "SEARCH task USING COVERING INDEX"},
    "running_tasks": {"SEARCH task USING INDEX task_open"},
    "read_claims": {"SEARCH t USING INDEX task_open", "SEARCH x USING INTEGER PRIMARY KEY"},
    "claim": {"SEARCH task USING INTEGER PRIMARY KEY"},
    "promote": {"SEARCH task USING INTEGER PRIMARY KEY"},
    "finish": {"SEARCH task USING INTEGER PRIMARY KEY"},
    "revisit": {"SEARCH task USING INTEGER PRIMARY KEY"},
    "discover": {"SEARCH t USING COVERING INDEX sqlite_autoindex_task_1"},
    "discover_text": {"SEARCH t USING INDEX sqlite_autoindex_task_1", "SEARCH t USING INTEGER PRIMARY KEY"},
    "count_discovered": {"SEARCH task USING INTEGER PRIMARY KEY"},
    "dead_candidates": {"SEARCH t USING INDEX task_dead", "SEARCH x USING INTEGER PRIMARY KEY", "SEARCH a USING INDEX"},
    "unpark": {"SEARCH task USING INDEX task_open", "SEARCH task USING COVERING INDEX task_open"},
    "task_by_key": {"SEARCH t USING INDEX sqlite_autoindex_task_1"},
    "highest_task": {"SEARCH task"},
}
_ALIASES = re.compile(r"(SCAN|SEARCH) (task|t|x|a)\b")


@on_sqlite
@pytest.mark.parametrize("name", sorted(HOT))
def test_hot_statements_reach_tasks_by_their_index_only(store: Store, name: str) -> None:
    """P116: nothing scans the table, and what a claim reads lies in one narrow index."""
    db = sqlite_of(store)
    rows = db.connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", values_for(SQL[name]))
    plan = [row[3].replace(" EXISTS", "") for row in rows]
    touching = [line for line in plan if _ALIASES.match(line)]
    assert touching, plan
    assert all(any(line.startswith(way) for way in HOT[name]) for line in touching if not line.startswith("SEARCH a ")), plan
    assert not [line for line in plan if "AUTOMATIC" in line], plan


@on_sqlite
@pytest.mark.parametrize("name", ["ready_host_after", "ready_of_host", "suspects_due", "due", "next_due"])
def test_the_claims_path_sorts_nothing(store: Store, name: str) -> None:
    """The index has the order: the first rows are the ones."""
    db = sqlite_of(store)
    plan = [row[3] for row in db.connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", values_for(SQL[name]))]
    assert not [line for line in plan if "TEMP B-TREE" in line], plan


def fill(hand: Hand, number: int, hosts: int = 50) -> None:
    """So many pending tasks of some hosts in shard 0, in one statement."""
    key = "CAST(printf('%016d', value) AS BLOB)"
    numbers = "WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n WHERE value < ?) "
    columns = "(id, job, shard, host, key, state, lane, rank, source_shard, source_n)"
    select = f"SELECT value, 1, 0, value % {hosts}, {key}, 'pending', 'ready', value % 7, 0, 1 FROM n"
    hand.db.run_text(f"{numbers} INSERT INTO task {columns} {select}", (number,))
    hand.db.run_text(f"{numbers} INSERT INTO task_text SELECT value, 'http://h/' || value, '', '', '', 0, 0, 0, x'' FROM n", (number,))


def steps(db: Sqlite, action: Callable[[], object]) -> int:
    """How many instructions of SQLite's virtual machine an action takes."""
    count = 0

    def step() -> bool:
        nonlocal count
        count += 1
        return False

    db.connection.set_progress_handler(step, 1)
    try:
        action()
    finally:
        db.connection.set_progress_handler(None)
    return count


def work_of(hire: Hire, number: int) -> dict[str, int]:
    """The steps of each part of a worker's life, with so many tasks pending."""
    hand = hire(0)
    db = sqlite_of(hand.store)
    fill(hand, number)
    want = Want(20, 1)
    done_with: dict[str, int] = {}
    done_with["claim"] = steps(db, lambda: hand.commit(hand.part(0), want=want))
    new = [link(one.text) for one in pages(0, 20)]
    results = [done(claim, *(new if i == 0 else ())) for i, claim in enumerate(hand.claims.values())]
    done_with["commit"] = steps(db, lambda: hand.finish(*results, want=0))
    done_with["standing"] = steps(db, lambda: db.one("open_work", job=hand.job.id))
    hand.commit(hand.part(0), want=want)
    done_with["take over"] = steps(db, lambda: hand.take(0))
    done_with["shards"] = steps(db, lambda: lease.shards(db, hand.job.id))
    return done_with


@on_sqlite
def test_what_a_batch_touches_does_not_depend_on_how_many_tasks_wait(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P08, P39, P116, P120: claim, commit, completion and take-over cost the same with 1,000 and with 100,000 pending."""
    from tests.store.hands import found_job

    costs = []
    for number in (1_000, 100_000):
        store = make_store()
        found_job(store)
        hands: list[Hand] = []

        def hire(*shards: int, made: Store = store, hands: list[Hand] = hands) -> Hand:
            hands.append(Hand.on(made))
            hands[-1].take(*shards)
            return hands[-1]

        costs.append(work_of(hire, number))
        hands[0].leave()
    small, large = costs
    assert small.keys() == large.keys()
    for name, cost in small.items():
        assert large[name] <= 1.1 * cost + 50, f"{name}: {cost} steps with 1,000 tasks pending, {large[name]} with 100,000"


@on_sqlite
def test_without_its_index_a_claim_would_read_every_task(make_store: Callable[..., Store]) -> None:
    """The twin of P116: the same statement over a table without task_open."""
    from tests.store.hands import found_job

    costs = []
    for number in (1_000, 10_000):
        store = make_store()
        found_job(store)
        hand = Hand.on(store)
        hand.take(0)
        db = sqlite_of(hand.store)
        fill(hand, number)
        db.run_text("DROP INDEX task_open")
        costs.append(steps(db, lambda db=db: db.one("next_due", job=1, shard=0, lane="waiting")))  # type: ignore[misc]
        hand.leave()
    assert costs[1] > 5 * costs[0]


# -- staging ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 15, 22])
def test_every_row_is_staged_in_its_place_whatever_their_number(store: Store, width: int) -> None:
    """Statements of many values, then of powers of two: no row is lost or doubled at the seams."""
    db = store.db
    columns = ", ".join(f"c{i} BIGINT" for i in range(width))
    db.begin()
    db.run_text(f"CREATE TEMPORARY TABLE pile ({columns})")
    for number in (0, 1, 2, 3, 7, 181, 182, 255, 256, 257, 300, 513, 1025):
        db.run_text("DELETE FROM pile")
        rows = [tuple(range(i, i + width)) for i in range(number)]
        db.stage("pile", width, rows)
        assert db.rows_text("SELECT * FROM pile ORDER BY c0") == rows
    db.rollback()


def test_unstage_empties_every_staging_table(store: Store) -> None:
    """What one try left must not be in the next."""
    made = re.findall(r"CREATE TEMPORARY TABLE (\w+)", SQL["stage_tables"])
    assert made == re.findall(r"DELETE FROM (\w+)", SQL["unstage"])
    db = store.db
    db.unstage()
    db.stage("stage_id", 1, [(1,)])
    assert column(db, "id", table="stage_id") == [1]
    db.unstage()
    assert column(db, "id", table="stage_id") == []
    db.rollback()


# -- settings, checkpoints ------------------------------------------------------------------------------


@on_sqlite
def test_every_connection_has_the_settings_that_were_asked_for(store: Store) -> None:
    """WAL, FULL and the rest, read back; a version of SQLite without the WAL-reset fault."""
    db = sqlite_of(store)
    again = connect(store.dsn)
    assert isinstance(again, Sqlite)
    for one in (db, again):
        read = {name: one.connection.pragma(name) for name in ("journal_mode", "synchronous", "application_id", "trusted_schema")}
        assert read == {"journal_mode": "wal", "synchronous": 2, "application_id": APPLICATION_ID, "trusted_schema": 0}
    again.close()
    assert tuple(map(int, apsw.sqlite_lib_version().split("."))) >= FIRST_SAFE_VERSION


def test_a_setting_that_is_not_taken_is_an_error(tmp_path: Path) -> None:
    """A file system without shared memory has no WAL: say so, do not go on without it."""
    with pytest.raises(errors.StoreUnavailable, match="journal_mode"):
        Sqlite(str(tmp_path / "x.db"), vfs="unix-dotfile")


@on_sqlite
def test_the_log_is_moved_into_the_file_as_it_grows(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are explicit, and their result is read; a reader that holds one up is no error."""
    from limpet.store import sqlite

    hand, reader = hire(0), hire(take=False)
    db = sqlite_of(hand.store)
    assert isinstance(reader.db, Sqlite)
    monkeypatch.setattr(sqlite, "WAL_PAGES", 50)
    reader.db.begin_read()
    column(reader.db, "job", table="job")
    for start in range(0, 600, 100):
        hand.seed(*pages(0, 100, start=start))
    frames, moved = db.checkpoint()
    assert moved < frames, "the reader held it up"
    reader.db.rollback()
    frames, moved = db.checkpoint()
    assert moved == frames
    size = os.path.getsize(f"{db.path}-wal")
    for start in range(600, 1200, 100):
        hand.seed(*pages(0, 100, start=start))
    assert os.path.getsize(f"{db.path}-wal") <= 3 * size, "the log is never begun anew"


def test_a_connection_for_reading_writes_nothing(store: Store) -> None:
    """By SQLite itself; on a server by the connection, since a pooler may hand a session's settings to somebody else."""
    again = connect(store.dsn, readonly=True)
    assert again.rows_text("SELECT COUNT(*) FROM job") == [(1,)]
    for write in (
        lambda: again.run_text("DELETE FROM job"),
        lambda: again.run("halt", job=1, reason="x"),
        lambda: again.stage("meta", 2, [("a", "b")]),
    ):
        with pytest.raises(errors.StoreUnavailable):
            write()
    again.close()
    assert column(store.db, "halted", table="job") == [""]
    assert column(store.db, "COUNT(*)", table="job") == [1]


def test_closing_twice_is_fine(databases: Databases) -> None:
    """It never raises."""
    db = connect(databases.new(), create=True)
    db.close()
    db.close()


# -- errors -----------------------------------------------------------------------------------------

ERRORS = [
    (apsw.BusyError, errors.StoreBusy),
    (apsw.LockedError, errors.StoreBusy),
    (apsw.SchemaChangeError, errors.StoreBusy),
    (apsw.FullError, errors.StoreUnavailable),
    (apsw.IOError, errors.StoreUnavailable),
    (apsw.ReadOnlyError, errors.StoreUnavailable),
    (apsw.CantOpenError, errors.StoreUnavailable),
    (apsw.PermissionsError, errors.StoreUnavailable),
    (apsw.CorruptError, errors.StoreCorrupt),
    (apsw.NotADBError, errors.StoreCorrupt),
    (apsw.ConstraintError, errors.PoisonRow),
    (apsw.TooBigError, errors.PoisonRow),
    (apsw.MismatchError, errors.PoisonRow),
    (OverflowError, errors.PoisonRow),
    (UnicodeError, errors.PoisonRow),
    (apsw.SQLError, errors.StoreError),
    (apsw.MisuseError, errors.StoreError),
    (apsw.InterruptError, errors.StoreError),
]


@on_sqlite
@pytest.mark.parametrize(("raised", "expected"), ERRORS, ids=lambda error: error.__name__)
def test_every_error_of_the_driver_becomes_the_class_that_says_what_to_do(
    store: Store, raised: type[Exception], expected: type[Exception]
) -> None:
    """Only errors of data blame a task; a full disk, a lock or a damaged file never do."""
    with pytest.raises(errors.StoreError) as caught, sqlite_of(store)._errors("somewhere"):
        raise raised("what the driver says")
    assert type(caught.value) is expected
    assert caught.value.__cause__ is not None


@on_sqlite
def test_a_constraint_of_a_table_of_the_protocol_is_no_error_of_data(store: Store) -> None:
    """The same error class of the driver; the statement tells them apart."""
    with pytest.raises(errors.InvariantBroken), sqlite_of(store)._errors("put_ledger"):
        raise apsw.ConstraintError("UNIQUE")


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "\ud800"])
def test_a_value_that_no_column_holds_is_an_error_of_data(store: Store, value: object) -> None:
    """Numbers beyond 64 bits, lone surrogates."""
    store.db.unstage()
    with pytest.raises(errors.PoisonRow):
        store.db.stage("stage_id", 1, [(value,)])
    store.db.rollback()


@on_sqlite
def test_a_text_beyond_the_limit_of_a_file_is_an_error_of_data(store: Store) -> None:
    """SQLite's limit, made smaller here."""
    sqlite_of(store).connection.limit(apsw.SQLITE_LIMIT_LENGTH, 1000)
    with pytest.raises(errors.PoisonRow):
        store.db.stage("stage_id", 1, [("x" * 1001,)])


def test_busy_is_repeated_as_often_as_said() -> None:
    """Then it leaves."""
    calls, waits = [], []

    def action() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise errors.StoreBusy("locked")
        return "done"

    assert repeat_busy(action, tries=(0.1, 0.2, 0.3), wait=waits.append) == "done"
    assert waits == [0.1, 0.2]
    calls.clear()
    with pytest.raises(errors.StoreBusy):
        repeat_busy(action, tries=(0.1,), wait=waits.append)


# -- names and addresses ------------------------------------------------------------------------------


@given(st.text(max_size=80))
def test_only_checked_names_are_ever_quoted(name: str) -> None:
    """Law: a name that passes holds nothing that could end the quotes."""
    try:
        quoted = quote(name)
    except errors.UsageError:
        return
    assert re.fullmatch(r'"[a-z_][a-z0-9_]{0,62}"', quoted)


@given(st.text(st.characters(exclude_characters="@/:?#[]", codec="ascii", categories=["L", "N"]), min_size=1))
def test_no_password_is_ever_shown(password: str) -> None:
    """In front of the host, and in the query."""
    word = f"secret{password}"
    shown = public_dsn(f"postgresql://me:{word}@db:5432/x?password={word}&sslmode=require")
    assert shown == "postgresql://me:***@db:5432/x"


@pytest.mark.parametrize(
    ("dsn", "path"),
    [("sqlite:////a/b.db", "/a/b.db"), ("sqlite:///b.db", "b.db"), ("b.db", "b.db"), ("sqlite:////a/b%20c.db", "/a/b c.db")],
)
def test_addresses_of_files_are_read(dsn: str, path: str) -> None:
    """Three slashes and a path; four where it is absolute."""
    assert sqlite_path(dsn) == path


@pytest.mark.parametrize("dsn", ["sqlite://x.db", "sqlite:///", "sqlite://"])
def test_addresses_that_name_no_file_are_refused(dsn: str) -> None:
    """With what was expected."""
    with pytest.raises(errors.UsageError, match="sqlite:///"):
        sqlite_path(dsn)


def test_a_database_that_this_release_does_not_speak_to_is_named_without_its_password() -> None:
    """UsageError, exit 2."""
    with pytest.raises(errors.UsageError) as caught:
        connect("oracle://me:tiger@db/x")
    assert "tiger" not in str(caught.value)


def test_every_method_of_the_protocol_is_there(store: Store) -> None:
    """The interface that the rest of the store is written against."""
    wanted = {name for name in vars(Database) if not name.startswith("_")} | {"name", "place"}
    assert wanted <= {name for name in dir(store.db) if not name.startswith("_")}
