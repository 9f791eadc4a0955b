"""Records read back in Python: `limpet.open("shop.db").dataset("product")`.

    with limpet.open("shop.db") as db:
        for row in db.dataset("product"):
            print(row["sku"], row["price"])     # Decimal, datetime, bytes: what the record type says

Rows come in key order, a few at a time, and each reading is of one moment. Nothing can be written by this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from limpet.errors import UsageError
from limpet.record import Column, Kind
from limpet.store.dialect import Database
from limpet.store.diff import Counted, changes, pair_of
from limpet.store.export import Choice, choose, count_rows, every, stored_rows
from limpet.store.opening import Store, open_store
from limpet.store.views import snapshot

_VALUES: dict[Kind, Callable[[Any], object]] = {
    Kind.BOOL: bool,
    Kind.BYTES: bytes,
    Kind.DATE: date.fromisoformat,
    Kind.DATETIME: datetime.fromisoformat,
    Kind.DECIMAL: Decimal,
    Kind.JSON: json.loads,
}
#: Rows that become one batch of an Arrow table.
ARROW_ROWS = 10_000


def open(db: str) -> Collected:
    """A database of Limpet's, to read its datasets; a path or sqlite:///file.db. Raises UsageError where there is none."""
    return Collected(open_store(db, create=False, readonly=True))


class Collected:
    """What a database has collected. A context manager; `close` ends it too."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._store.close()

    def __repr__(self) -> str:
        return f"<{self._store.db.place}: {', '.join(self.datasets()) or 'no dataset'}>"

    def datasets(self) -> list[str]:
        """The names of the datasets."""
        return sorted({row.name for row in every(self._store.db)})

    def dataset(self, name: str, *, spider: str = "", slot: str | None = None, all_slots: bool = False) -> Dataset:
        """The rows of a dataset, by the name of its type or table; as `limpet export` has them.

        Raises UsageError, naming what there is, where the name, spider and slot are not of one dataset.
        """
        return Dataset(self._store, choose(self._store.db, name, spider=spider, slot=slot, all_slots=all_slots))

    def diff(self, name: str, older: str, newer: str, *, spider: str = "", fields: Sequence[str] = ()) -> Iterator[Difference]:
        """What is new, gone and changed in a dataset from one slot to another, in key order; as `limpet diff` has it.

        Volatile fields are left out; `fields` names those that are compared. Raises UsageError, naming what there is, for
        an unknown dataset, slot or field, and for a dataset that keeps no rows of older slots.
        """
        with _own_snapshot(self._store) as db:
            pair = pair_of(db, name, older, newer, spider=spider, fields=fields)
            columns = [(column.name, _VALUES.get(column.kind)) for column in pair.type.columns]
            for change in changes(db, pair, Counted()):
                old, new = (_read(columns, values) for values in (change.old, change.new))
                key = {field: (new or old or {})[field] for field in pair.type.key}
                sides = [side and {field: side[field] for field in pair.compared} for side in (old, new)]
                yield Difference(change.what, key, sides[0], sides[1], change.fields)


def _read(columns: Sequence[tuple[str, Callable[[Any], object] | None]], values: Sequence[Any] | None) -> dict[str, Any] | None:
    """Stored values as Python's, by name."""
    if values is None:
        return None
    named = zip(columns, values, strict=True)
    return {name: value if value is None or read is None else read(value) for (name, read), value in named}


@contextmanager
def _own_snapshot(store: Store) -> Iterator[Database]:
    """A connection of its own: two iterations may be under way at once, and a crawl writes meanwhile."""
    reader = store.again(readonly=True)
    try:
        with snapshot(reader.db) as db:
            yield db
    finally:
        reader.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """What became of one record from one slot to another."""

    what: str  # new | gone | changed
    key: dict[str, Any]
    old: dict[str, Any] | None  # the fields that were compared; None of a new one
    new: dict[str, Any] | None  # None of one that is gone
    fields: tuple[str, ...]  # of a changed one, the names of those that differ


@dataclass(frozen=True, slots=True, repr=False)
class Dataset:
    """The rows of one dataset, in key order. Each iteration reads them anew."""

    _store: Store
    _choice: Choice

    def __repr__(self) -> str:
        return f"<{self._choice.table.name}: {len(self)} rows of {', '.join(self.columns)}>"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names, readers = self.columns, self._readers()
        with _own_snapshot(self._store) as db:
            for row in stored_rows(db, self._choice):
                values = row if self._choice.with_slot else row[1:]
                yield {
                    name: value if value is None or read is None else read(value)
                    for name, read, value in zip(names, readers, values, strict=True)
                }

    def __len__(self) -> int:
        with _own_snapshot(self._store) as db:
            return count_rows(db, self._choice)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in their order."""
        names = tuple(column.name for column in self._columns)
        return ("slot", *names) if self._choice.with_slot else names

    def rows(self) -> list[dict[str, Any]]:
        """Every row at once."""
        return [*self]

    def arrow(self) -> Any:
        """The dataset as a `pyarrow.Table`. Raises UsageError where pyarrow is not installed."""
        try:
            pyarrow: Any = import_module("pyarrow")
        except ImportError as error:
            raise UsageError("a dataset becomes an Arrow table by pyarrow, which is not installed: pip install pyarrow") from error
        schema = pyarrow.schema([
            *([("slot", pyarrow.string())] if self._choice.with_slot else []),
            *((column.name, _arrow_type(pyarrow, column)) for column in self._columns),
        ])  # fmt: skip
        batches, rows = [], list[dict[str, Any]]()
        for row in self:
            rows.append({name: _plain(value) for name, value in row.items()})
            if len(rows) >= ARROW_ROWS:
                batches.append(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
                rows = []
        batches.append(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
        return pyarrow.Table.from_batches(batches, schema=schema)

    @property
    def _columns(self) -> tuple[Column, ...]:
        return self._choice.type.columns

    def _readers(self) -> list[Callable[[Any], object] | None]:
        readers = [_VALUES.get(column.kind) for column in self._columns]
        return [None, *readers] if self._choice.with_slot else readers


def _arrow_type(pyarrow: Any, column: Column) -> Any:
    """The Arrow type of a column. Decimals of any scale, and JSON, are their texts: no one type holds them exactly."""
    kinds = {
        Kind.INT: pyarrow.int64(), Kind.ENUM_INT: pyarrow.int64(), Kind.FLOAT: pyarrow.float64(), Kind.BOOL: pyarrow.bool_(),
        Kind.BYTES: pyarrow.binary(), Kind.DATE: pyarrow.date32(), Kind.DATETIME: pyarrow.timestamp("us", tz="UTC"),
    }  # fmt: skip
    return kinds.get(column.kind, pyarrow.string())


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True) if isinstance(value, (list, dict)) else value
