"""Proof of the file and its tables: SQLite's own check, and the schema as the migrations make it.

What ought to be there is made anew, in memory, by the migrations of this release, and compared by name,
columns and text. Tables, views and indexes of other people are their own business; a trigger is not, as
it changes rows inside a transaction of Limpet's. Invariants: none by number; `file` and `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import apsw

from limpet.errors import RecordError
from limpet.store import migrate
from limpet.store.dialect import Database, Made, quote, split
from limpet.store.proofs import Evidence, Report
from limpet.store.tables import OWN, SQL_TYPES, Table, load_tables, make_view

#: How SQLite's check begins to say that a row, not the file, is wrong.
_CONSTRAINTS = ("CHECK constraint", "NULL value", "non-unique entry", "NUMERIC value", "TEXT value")


class Checkable(Protocol):
    """A database that can check its own file."""

    def integrity_check(self) -> list[str]:
        """What it finds wrong; empty where the file is sound."""


def prove_file(evidence: Evidence) -> None:
    """SQLite's check of pages, indexes, UNIQUE, NOT NULL and CHECK constraints."""
    for line in cast(Checkable, evidence.db).integrity_check():
        evidence.report.add("constraint" if line.startswith(_CONSTRAINTS) else "file", line)


def prove_schema(evidence: Evidence) -> None:
    """Every table of the protocol as the migrations make it, every dataset as its definition says."""
    db, report = evidence.db, evidence.report
    found = db.catalogue()
    for name, expected in expected_in(db).items():
        _compare(report, name, expected, found.get(name))
    for name, made in found.items():
        if made.kind == "trigger":
            report.add("trigger", f"the trigger {name} changes rows of {made.table} behind the protocol's back: drop it")
    try:
        tables = load_tables(db, evidence.job.spider)
    except RecordError as error:
        report.add("dataset", str(error))
        return
    for table in tables.values():
        for fault, message in _wrong_dataset(db, table, found):
            report.add(fault, message, dataset=table.name)
    if "table" not in report.found:
        evidence.tables = tables


def expected_in(db: Database) -> Mapping[str, Made]:
    """What the catalogue of a database ought to hold: SQLite's texts, or a server's columns."""
    if db.name == "sqlite":
        return {name: Made(made.kind, made.table, made.sql) for name, made in schema_in_memory().items()}
    expected = {}
    for name, made in schema_in_memory().items():
        if made.kind == "table":
            expected[name] = Made("table", name, made.columns)
        elif made.sql:
            expected[name] = Made("index", made.table, _COLUMNS_OF_INDEX.search(db.ddl(made.sql))[1].replace("`", ""))  # type: ignore[index]
    return expected


_COLUMNS_OF_INDEX = re.compile(r" ON \w+ \(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Said:
    """A table or index as the migrations of this release say it, in SQLite's form."""

    kind: str
    table: str
    sql: str
    columns: str


@cache
def schema_in_memory() -> Mapping[str, Said]:
    """What the migrations of this release make, made in memory."""
    memory = apsw.Connection(":memory:")
    try:
        for _, _, sql in migrate.steps():
            for statement in split(sql):
                memory.execute(statement)
        said = {}
        for row in memory.execute("SELECT name, type, tbl_name, COALESCE(sql, '') FROM sqlite_master").fetchall():
            name, kind, table, sql = map(str, row)
            columns = [str(column[1]) for column in memory.execute(f"PRAGMA table_info({quote(name)})")] if kind == "table" else []
            said[name] = Said(kind, table, sql, ", ".join(columns))
    finally:
        memory.close()
    return said


def _compare(report: Report, name: str, expected: Made, found: Made | None) -> None:
    fault = "index" if expected.kind == "index" and expected.shape else "table"
    if found is None:
        report.add(fault, f"the {expected.kind} {name} is missing")
    elif (found.kind, found.shape) != (expected.kind, expected.shape):
        report.add(
            fault,
            f"the {expected.kind} {name} is not as the schema says: expected {_flat(expected.shape)}, found {_flat(found.shape)}",
        )


def _wrong_dataset(db: Database, table: Table, found: Mapping[str, Made]) -> Iterator[tuple[str, str]]:
    """What of a dataset's table, unique key, index and view is not as its definition makes them."""
    if table.name not in found:
        yield "table", f"the table of the dataset {table.name} is missing"
        return
    is_file = db.name == "sqlite"
    if is_file:
        columns = {row[1]: row[2] for row in db.rows_text(f"PRAGMA table_info({quote(table.name)})")}
    else:  # a server holds values to their types, and names the types in words of its own
        columns = dict.fromkeys(found[table.name].shape.split(", "), "")
    expected = {column.name: SQL_TYPES.get(str(column.kind), "TEXT") for column in table.type.columns}
    for name in ("_id", *OWN, *expected):
        if name not in columns:
            yield "table", f"the table {table.name} has no column {name}"
        elif is_file and name in expected and columns[name] != expected[name]:
            yield "table", f"the column {name} of {table.name}: expected {expected[name]}, found {columns[name]}"
    for name in sorted(set(columns) - {"_id", *OWN, *expected}):
        yield "table", f"the table {table.name} has a column {name} that its definition does not name"
    unique = "_scope, _key, _slot" if table.history else "_scope, _key"
    indexes = [made.shape for made in found.values() if made.kind == "index" and made.table == table.name]
    if f"UNIQUE ({unique})" not in found[table.name].shape and unique not in indexes:
        yield "table", f"the table {table.name} is not unique over ({unique})"
    if f"{table.name}_task" not in found:
        yield "index", f"the index {table.name}_task is missing"
    if f"{table.name}_view" not in found:
        yield "view", f"the view {table.name}_view is missing"


def _flat(sql: str) -> str:
    return " ".join(sql.split())[:200]


# -- and making it again ------------------------------------------------------------------------


def remake(db: Database, tables: Mapping[str, Table]) -> int:
    """Make indexes and views again that are missing or not as the schema says, in the caller's transaction; how many."""
    found, made = db.catalogue(), 0
    for name, expected in expected_in(db).items():
        if expected.kind == "index" and expected.shape and found.get(name) != expected:
            if name in found:
                db.run_text(f"DROP INDEX {quote(name)}" + (f" ON {quote(expected.table)}" if db.name == "mysql" else ""))
            db.run_text(db.ddl(schema_in_memory()[name].sql))
            made += 1
    for table in tables.values():
        if f"{table.name}_task" not in found:
            db.run_text(f"CREATE INDEX {quote(table.name + '_task')} ON {quote(table.name)} (_task)")
            made += 1
        if f"{table.name}_view" not in found:
            make_view(db, table.name, table.type)
            made += 1
    return made
