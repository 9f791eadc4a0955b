"""A dataset, streamed in key order, and the digest that is the same however the crawl went.

The order is that of the keys' digests, which is the table's own index: nothing is sorted, and memory does
not grow with the rows. The SHA-256 is over one canonical line a record, without volatile fields and without
what is empty (so that a new optional field changes no digest): the dataset's digest. All rows are of one
moment, however long it takes. Invariant: I5.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from limpet.batch import canonical_json
from limpet.errors import UsageError
from limpet.record import Column, Kind, RecordType
from limpet.store import jobs
from limpet.store.dialect import Database, Row, quote
from limpet.store.tables import Table, load_tables

#: Records that are joined before they are written: few system calls, little memory.
CHUNK_ROWS = 500


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows of one dataset that are asked for."""

    table: Table
    where: str
    values: tuple[object, ...]
    with_slot: bool = False  # each row says its slot: they are of several
    spider: str = ""  # whose dataset it is

    @property
    def type(self) -> RecordType:
        """What the rows are."""
        return self.table.type

    @property
    def of_one_job(self) -> bool:
        """Whether only one job can write such rows: the first of `values`."""
        return self.table.type.scope == "job" and not self.with_slot


@dataclass(slots=True)
class Tally:
    """What an export came to, once its lines are through."""

    rows: int = 0
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A dataset that is there."""

    name: str
    spider: str
    table: str
    scope: str
    policy: str
    key: tuple[str, ...]
    slots: tuple[str, ...]
    rows: int


# -- which rows ---------------------------------------------------------------------------------


def every(db: Database) -> list[DatasetRow]:
    """Every dataset of the database, with its slots and its number of rows."""
    found = []
    for spider, table in _tables(db):
        rows = db.rows_text(f"SELECT COUNT(*) FROM {quote(table.name)} WHERE _closed = ''")[0][0]
        kind = table.type
        found.append(DatasetRow(kind.name, spider, table.name, kind.scope, kind.policy, kind.key, tuple(_slots(db, spider)), rows))
    return found


def choose(db: Database, name: str, *, spider: str = "", slot: str | None = None, all_slots: bool = False) -> Choice:
    """The rows of a dataset, by its name or its table's. UsageError, naming what there is, where that is not one thing.

    Without a slot: of a dataset of scope `job` the rows of the only job, of scope `spider` the present ones.
    """
    owner, table = _one(db, name, spider)
    kind = table.type
    if all_slots:
        return Choice(table, "1 = 1", (), with_slot=True, spider=owner)
    slots = _slots(db, owner)
    if slot is not None and slot not in slots:
        raise UsageError(f"spider {owner} has no job of slot {slot!r}; there {_are(slots)}")
    if kind.scope == "job":
        if slot is None and len(slots) > 1:
            raise UsageError(f"{kind.name} has rows of {len(slots)} slots: name one with --slot, or take --all-slots; there {_are(slots)}")
        job = jobs.find(db, owner, slots[0] if slot is None and slots else slot or "")
        return Choice(table, "_scope = ?" + (" AND _closed = ''" if table.history else ""), (job.id if job else -1,), spider=owner)
    if table.history:
        return _version(table, slot, owner)
    of_slot, values = ("", ()) if slot is None else (" AND _slot = ?", (slot,))
    return Choice(table, f"_scope = 0{of_slot}", values, spider=owner)


def owner_of(db: Database, name: str, spider: str = "") -> str:
    """The spider whose dataset has that name; UsageError, naming what there is, where that is not one."""
    return _one(db, name, spider)[0]


def _version(table: Table, slot: str | None, owner: str) -> Choice:
    """Of each key the newest version up to a slot, unless it was closed by then."""
    up_to, values = ("", ()) if slot is None else (" AND e._slot <= ?", (slot,))
    newest = f"_slot = (SELECT MAX(e._slot) FROM {quote(table.name)} AS e WHERE e._scope = d._scope AND e._key = d._key{up_to})"
    closed = "_closed = ''" if slot is None else "(_closed = '' OR _closed > ?)"
    return Choice(table, f"_scope = 0 AND {newest} AND {closed}", (*values, *values), spider=owner)


def _one(db: Database, name: str, spider: str) -> tuple[str, Table]:
    tables = _tables(db)
    found = [(owner, table) for owner, table in tables if name in (table.type.name, table.name) and spider in ("", owner)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(sorted(f"{table.type.name} (of {owner})" for owner, table in tables)) or "none yet"
    if not found:
        raise UsageError(f"{db.place} has no dataset {name!r}{f' of spider {spider}' if spider else ''}; there are: {there}")
    raise UsageError(f"{name!r} is a dataset of several spiders: name one with --spider; there are: {there}")


def _tables(db: Database) -> list[tuple[str, Table]]:
    owners = [row[0] for row in db.rows_text("SELECT DISTINCT spider FROM dataset ORDER BY spider")]
    return [(owner, table) for owner in owners for table in load_tables(db, owner).values()]


def _slots(db: Database, spider: str) -> list[str]:
    return sorted(job.slot for job in jobs.every(db) if job.spider == spider)


def _are(slots: Sequence[str]) -> str:
    named = ", ".join(repr(slot) for slot in slots[-20:]) or "none"
    return f"is {named}" if len(slots) == 1 else f"are {'... ' if len(slots) > 20 else ''}{named}"


# -- the rows -----------------------------------------------------------------------------------


def stored_rows(db: Database, choice: Choice) -> Iterator[Row]:
    """Slot, and the values as they are stored, in key order; the caller's snapshot holds them still."""
    columns = ", ".join(quote(column.name) for column in choice.type.columns)
    sql = f"SELECT _slot, {columns} FROM {quote(choice.table.name)} AS d WHERE {choice.where} ORDER BY _scope, _key, _slot"
    yield from db.stream_text(sql, choice.values)


def count_rows(db: Database, choice: Choice) -> int:
    """How many rows there are."""
    return int(db.rows_text(f"SELECT COUNT(*) FROM {quote(choice.table.name)} AS d WHERE {choice.where}", choice.values)[0][0])


def chunks(db: Database, choice: Choice, form: str, tally: Tally) -> Iterator[bytes]:
    """The export, `jsonl` or `csv`, in pieces; `tally` is filled once they are through."""
    kind = choice.type
    lasting = [column.name for column in kind.columns if not column.volatile]
    write, head = _writer(form, choice)
    digest = sha256()
    lines: list[str] = [head] if head else []
    for slot, *values in stored_rows(db, choice):
        row = kind.thaw(values)
        seal = {name: row[name] for name in lasting if row[name] is not None}
        digest.update(canonical_line({"": slot, **seal} if choice.with_slot else seal))
        lines.append(write({"slot": slot, **row} if choice.with_slot else row))
        tally.rows += 1
        if len(lines) >= CHUNK_ROWS:
            yield "".join(lines).encode()
            lines.clear()
    tally.sha256 = digest.hexdigest()
    yield "".join(lines).encode()


def canonical_line(record: dict[str, object]) -> bytes:
    """What a record adds to its dataset's digest.

    >>> canonical_line({"b": 1, "a": "é"}).decode()
    '{"a":"é","b":1}\\n'
    """
    return f"{canonical_json(record)}\n".encode()


def _writer(form: str, choice: Choice) -> tuple[Callable[[dict[str, object]], str], str]:
    """What makes a line of a record, and the head of the file."""
    if form == "jsonl":
        encode = json.JSONEncoder(ensure_ascii=False).encode
        return lambda row: encode(row) + "\n", ""
    columns = choice.type.columns
    as_text = [_cell_of(column) for column in columns]
    names = [*(["slot"] if choice.with_slot else []), *(column.name for column in columns)]
    shaped: list[Callable[[object], object]] = [*([str] if choice.with_slot else []), *as_text]
    return lambda row: _csv_line([cell(row[name]) for name, cell in zip(names, shaped, strict=True)]), _csv_line(names)


def _cell_of(column: Column) -> Callable[[object], object]:
    """A value as CSV says it: nothing where there is none, JSON as its text, true and false in words."""
    if column.kind is Kind.JSON:
        return lambda value: "" if value is None else canonical_json(value)
    if column.kind is Kind.BOOL:
        return lambda value: "" if value is None else str(value).lower()
    return lambda value: "" if value is None else value


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
