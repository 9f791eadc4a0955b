"""A database of which only the first tables are there: where each CREATE commits by itself, anybody may look at that moment."""

from __future__ import annotations

import pytest

from limpet.errors import UsageError
from limpet.store import migrate, open_store
from limpet.store.dialect import split
from limpet.store.joining import has_jobs
from limpet.store.opening import connect
from tests.e2e.conftest import Limpet, limpet
from tests.servers.kinds import Databases

__all__ = ["limpet"]

on_mysql = pytest.mark.parametrize("databases", ["mysql"], indirect=True)


def begun(databases: Databases, tables: int) -> str:
    """A database that somebody began to make, and got so far with."""
    dsn = databases.new()
    db = connect(dsn, create=True)
    for statement in list(split(migrate.steps()[0][2]))[:tables]:
        db.run_text(db.ddl(statement))
    db.close()
    return dsn


@on_mysql
@pytest.mark.parametrize("tables", [1, 3])
def test_a_schema_that_is_being_made_is_no_stranger_s(limpet: Limpet, databases: Databases, tables: int) -> None:
    """Whoever looks finds no job yet; it is not told that the database is none of Limpet's."""
    dsn = begun(databases, tables)
    with pytest.raises(migrate.NoJobYet, match="holds no job yet"):
        open_store(dsn, create=False)
    assert not has_jobs(dsn)
    status = limpet("status", "--db", dsn)
    assert (status.code, "one that is just starting shows up in a moment" in status.out) == (0, True), status
    verify = limpet("verify", "--db", dsn)
    assert (verify.code, "holds no job yet" in verify.err) == (2, True), verify


@on_mysql
@pytest.mark.parametrize("tables", [1, 3])
def test_a_schema_whose_maker_was_killed_is_made_to_its_end(databases: Databases, tables: int) -> None:
    """By whoever begins next."""
    dsn = begun(databases, tables)
    store = open_store(dsn)
    assert migrate.version(store.db) == migrate.latest()
    store.close()


@on_mysql
@pytest.mark.parametrize("meta", ["(name VARCHAR(10), value TEXT)", "(name VARCHAR(10) PRIMARY KEY, value TEXT, at INT)"])
def test_another_table_named_meta_is_still_a_stranger_s(databases: Databases, meta: str) -> None:
    """Another key, or other columns: refused, for reading, for working and by whoever only asks, and left as it is."""
    dsn = databases.new()
    db = connect(dsn, create=True)
    db.run_text(f"CREATE TABLE meta {meta}")
    before = db.catalogue()
    for attempt in (lambda: open_store(dsn, create=False), lambda: open_store(dsn), lambda: has_jobs(dsn)):
        with pytest.raises(UsageError, match="no schema version"):
            attempt()
    assert db.catalogue() == before
    db.close()


@on_mysql
def test_ours_with_another_s_rows_is_a_stranger_s(databases: Databases) -> None:
    """A table that looks like ours and has rows, but no version."""
    dsn = begun(databases, 1)
    db = connect(dsn, create=True)
    db.run_text("INSERT INTO meta (name, value) VALUES ('theme', 'dark')")
    db.close()
    with pytest.raises(UsageError, match="no schema version"):
        open_store(dsn)
