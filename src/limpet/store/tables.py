"""The tables of datasets: one for each record type of a spider, made at start and outside any batch.

A table is named after spider and type, and its definition is a row of `dataset`, so it can be read without the
spider's code. It is made, widened by new optional fields, or refused as IncompatibleRecord; the view
`<table>_view` shows what is not Limpet's own. What goes into the rows is `datasets.py`.

A worker whose spider file is older than the table must write nothing into it: it would leave the new fields of another
page in place. `check_shapes`, after a batch has written, finds out: what widens a table waits for those who have written
to it or, where DDL commits by itself, is not used by anybody before its definition is there to be seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from limpet.batch import canonical_json
from limpet.errors import DatasetChanged, IncompatibleRecord, PoisonRow, UsageError
from limpet.record import BESIDE, RecordType, added_columns, from_definition
from limpet.store.dialect import Database, quote, repeat_busy
from limpet.store.jobs import Job

#: Limpet's own columns, in the order in which they are stored, before the user's.
OWN = ("_scope", "_key", "_slot", "_key_text", "_content", "_task_key", "_task", "_try", "_job", "_shard", "_n", "_closed")

#: SQL type of a column, by the kind of its field. Texts keep what numbers would lose: scales, zones.
SQL_TYPES = {"int": "INTEGER", "bool": "INTEGER", "enum_int": "INTEGER", "float": "REAL", "bytes": "BLOB"}

#: Waits, in seconds, for a table that is in use, or for another process that changes tables: 20 s and more, with what a server waits.
BUSY_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0)

#: What to do about a name that is taken.
ANOTHER_NAME = "give the record type another name="


@dataclass(frozen=True, slots=True)
class Table:
    """One dataset: its table, whose rows are unique over (scope, key), in `history` over (scope, key, slot)."""

    name: str
    type: RecordType
    definition: str  # of the type, as the database has it

    @property
    def history(self) -> bool:
        """Whether each slot keeps a version of its own."""
        return self.type.policy == "history"

    @property
    def columns(self) -> list[str]:
        """Quoted names of what a row is made of, Limpet's own first."""
        return [quote(name) for name in (*OWN, *(column.name for column in self.type.columns))]

    @property
    def fields(self) -> list[str]:
        """Names of the user's columns."""
        return [column.name for column in self.type.columns]

    def scope_of(self, job: Job) -> int:
        """The value of `_scope` in this job: its number, or 0 where one row stands for all slots."""
        return job.id if self.type.scope == "job" else 0


def ensure(db: Database, spider: str, name: str, record: RecordType) -> Table:
    """The table of a record type: made, widened by new optional fields, or refused as IncompatibleRecord.

    Workers that start together make it one after the other; a table that others are writing to is waited for.
    """
    if _definition(db, spider, name, record) != record.definition():
        repeat_busy(lambda: _ensure(db, spider, name, record), tries=BUSY_WAITS_S, wait=time.sleep)
    return Table(name, record, record.definition())


def check_shapes(db: Database, tables: Mapping[str, Table], written: Collection[str]) -> None:
    """Raise DatasetChanged where a dataset has other fields by now than this process knows; asked after it was written to."""
    places = ", ".join("?" * len(written))
    for name, definition in db.rows_text(f"SELECT name, definition FROM dataset WHERE name IN ({places})", sorted(written)):
        table = tables[name]
        if definition != table.definition:
            found = set(_fields_of(definition))
            if found != set(table.fields):
                more, less = sorted(found - set(table.fields)), sorted(set(table.fields) - found)
                what = "; ".join(f"{said} {', '.join(names)}" for said, names in (("it has", more), ("it lacks", less)) if names)
                raise DatasetChanged(
                    f"{db.place}: the dataset {name} was changed by another spider file while this worker ran ({what}): "
                    "nothing was written into it; start this worker again with the file that the others have"
                )


def _fields_of(definition: str) -> list[str]:
    return [str(column["name"]) for column in json.loads(definition)["columns"]]


def _ensure(db: Database, spider: str, name: str, record: RecordType) -> None:
    try:
        db.begin_alone()
        known = _definition(db, spider, name, record)
        if known is None:
            if db.has_table(name):
                _drop_leftover(db, name)
            for other in BESIDE:
                if db.has_table(name + other):
                    raise UsageError(f"a dataset cannot be named {name}: there is a {name + other} already; {ANOTHER_NAME}")
            _create(db, spider, name, record)
        elif known != record.definition():
            _widen(db, name, known, record)
        db.commit()
    except BaseException:
        db.rollback()
        raise


def _definition(db: Database, spider: str, name: str, record: RecordType) -> str | None:
    """What the database knows of a dataset; None where it has none of that name. UsageError where it is another spider's."""
    rows = db.rows_text("SELECT definition, spider, type FROM dataset WHERE name = ?", (name,))
    if not rows:
        return None
    definition, owner, kind = map(str, rows[0])
    if (owner, kind) != (spider, record.name):
        raise UsageError(f"the table {name} of {db.place} holds records of type {kind} of the spider {owner}; {ANOTHER_NAME}")
    return definition


def _drop_leftover(db: Database, name: str) -> None:
    """A table that no row of `dataset` names is somebody's own; or, where DDL commits by itself, one that a killed start left empty."""
    if db.ddl_commits:
        rows = db.rows_text(
            "SELECT COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = ?", (name,)
        )
        if {row[0] for row in rows} >= {"_id", *OWN} and not db.rows_text(f"SELECT 1 FROM {quote(name)} LIMIT 1"):
            db.run_text(f"DROP VIEW IF EXISTS {quote(name + '_view')}")
            db.run_text(f"DROP TABLE {quote(name)}")
            return
    raise UsageError(f"a dataset cannot be named {name}: a table of that name is there already; {ANOTHER_NAME}")


def _create(db: Database, spider: str, name: str, record: RecordType) -> None:
    own = (
        "_id INTEGER PRIMARY KEY, _scope INTEGER NOT NULL, _key BLOB NOT NULL, _slot TEXT NOT NULL, _key_text TEXT NOT NULL, "
        "_content BLOB NOT NULL, _task_key BLOB NOT NULL, _task INTEGER NOT NULL, _try INTEGER NOT NULL, _job INTEGER NOT NULL, "
        "_shard INTEGER NOT NULL, _n INTEGER NOT NULL, _closed TEXT NOT NULL"
    )
    unique = "_scope, _key, _slot" if record.policy == "history" else "_scope, _key"
    fields = "".join(f", {quote(column.name)} {SQL_TYPES.get(str(column.kind), 'TEXT')}" for column in record.columns)
    try:
        db.run_text(db.ddl(f"CREATE TABLE {quote(name)} ({own}{fields}, UNIQUE ({unique}))"))
    except PoisonRow as error:
        raise IncompatibleRecord(f"{len(record.columns)} fields of {record.name} are too many for a table there: {error}") from error
    db.run_text(f"CREATE INDEX {quote(name + '_task')} ON {quote(name)} (_task)")
    make_view(db, name, record)
    db.run_text(
        "INSERT INTO dataset (name, spider, type, scope, policy, definition, created_ms) VALUES (?, ?, ?, ?, ?, ?, 0)",
        (name, spider, record.name, record.scope, record.policy, record.definition()),
    )


def _widen(db: Database, name: str, old: str, record: RecordType) -> None:
    before = from_definition(record.name, old)
    try:
        added = added_columns(before, record)
    except IncompatibleRecord as error:
        raise IncompatibleRecord(f"the table {name} of {db.place} holds another shape of {record.name}: {error}") from error
    for column in added:
        db.run_text(db.ddl(f"ALTER TABLE {quote(name)} ADD COLUMN {quote(column.name)} {SQL_TYPES.get(str(column.kind), 'TEXT')}"))
    make_view(db, name, record)
    db.run_text("UPDATE dataset SET definition = ? WHERE name = ?", (record.definition(), name))


def make_view(db: Database, name: str, record: RecordType) -> None:
    """Make the view of a table anew: its slot and the fields of the present type, without what is closed."""
    columns = ", ".join(quote(column.name) for column in record.columns)
    db.run_text(f"DROP VIEW IF EXISTS {quote(name + '_view')}")
    db.run_text(f"CREATE VIEW {quote(name + '_view')} AS SELECT _slot AS slot, {columns} FROM {quote(name)} WHERE _closed = ''")


def load_tables(db: Database, spider: str | None = None) -> dict[str, Table]:
    """Every dataset of the database, or of one spider, as its definition says: no spider code is needed."""
    rows = db.rows_text("SELECT name, type, definition, spider FROM dataset ORDER BY name")
    return {
        name: Table(name, from_definition(kind, definition), definition)
        for name, kind, definition, owner in rows
        if spider is None or owner == spider
    }


# -- values of offers ------------------------------------------------------------------------------


def pack(fields: Sequence[str], values: Iterable[object]) -> str:
    """Stored values as JSON, by the names of their fields; bytes as {"b": hex}."""
    held = ({"b": bytes(v).hex()} if isinstance(v, bytes | bytearray | memoryview) else v for v in values)
    return canonical_json(dict(zip(fields, held, strict=True)))


def unpack(text: str, fields: Sequence[str]) -> list[object]:
    """The values of some fields that `pack` packed; a field that is not among them is None. ValueError for what it did not pack.

    >>> unpack(pack(["n", "raw"], [1, b"x"]), ["raw", "new", "n"])
    [b'x', None, 1]
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("expected an object of fields")
    values = (found.get(name) for name in fields)
    return [bytes.fromhex(v["b"]) if isinstance(v, dict) else v for v in values]
