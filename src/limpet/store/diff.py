"""What is new, gone and changed in a dataset from one slot to another, in key order and in constant memory.

Both slots are read along the index of their keys, a page of each at a time, inside one snapshot, and merged. Volatile
fields are left out. A record is *in* a slot where that slot's job emitted it: of a history also where its content
was that of an older version, which then stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from limpet.errors import UsageError
from limpet.record import RecordType
from limpet.store.dialect import Database, quote
from limpet.store.export import Choice, choose
from limpet.store.tables import Table

#: Rows of each slot that are held at a time.
PAGE_ROWS = 500

Stored = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one record: its values as they are stored, in the order of the columns."""

    what: str  # new | gone | changed
    old: Stored | None
    new: Stored | None
    fields: tuple[str, ...] = ()  # of a changed one, the names of those that differ


@dataclass(slots=True)
class Counted:
    """How many there were, once all changes are through."""

    new: int = 0
    gone: int = 0
    changed: int = 0
    same: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two slots of one dataset, and the fields that are compared."""

    older: Choice
    newer: Choice
    compared: tuple[str, ...]

    @property
    def type(self) -> RecordType:
        """What the records are."""
        return self.older.type


def pair_of(db: Database, name: str, older: str, newer: str, *, spider: str = "", fields: Sequence[str] = ()) -> Pair:
    """Two slots of a dataset; UsageError, naming what there is, where they cannot be compared."""
    if older == newer:
        raise UsageError(f"slot {older!r} twice: name the older slot, then the newer one")
    sides = [choose(db, name, spider=spider, slot=slot) for slot in (older, newer)]
    table = sides[0].table
    if table.history:
        sides = [_emitted_in(side, slot) for side, slot in zip(sides, (older, newer), strict=True)]
    elif table.type.scope != "job":
        raise UsageError(
            f"{table.type.name} keeps one row over all slots (scope spider, policy {table.type.policy}), so what it was in an older slot "
            'is gone: scope="job" keeps the rows of each slot, policy="history" each version'
        )
    return Pair(sides[0], sides[1], _compared(table, fields))


def _compared(table: Table, fields: Sequence[str]) -> tuple[str, ...]:
    lasting = tuple(column.name for column in table.type.columns if not column.volatile)
    unknown = [name for name in fields if name not in lasting]
    if unknown:
        raise UsageError(f"{table.type.name} has no lasting field {unknown[0]!r}; it has {', '.join(lasting)}")
    return tuple(name for name in lasting if not fields or name in fields)


def _emitted_in(side: Choice, slot: str) -> Choice:
    """Of a history the versions that stood in a slot, but only of the keys that this slot's job emitted.

    Each of these has an open version of the slot, or, where that would repeat the one before, an offer.
    """
    table = side.table
    version = (
        f"EXISTS (SELECT 1 FROM {quote(table.name)} AS p WHERE p._scope = d._scope AND p._key = d._key AND p._slot = ? AND p._closed = '')"
    )
    offer = "EXISTS (SELECT 1 FROM offer AS o WHERE o.dataset = ? AND o.scope = d._scope AND o.key = d._key AND o.slot = ?)"
    return Choice(table, f"{side.where} AND ({version} OR {offer})", (*side.values, slot, table.name, slot), spider=side.spider)


def changes(db: Database, pair: Pair, counted: Counted) -> Iterator[Change]:
    """Every change, in key order; the caller's snapshot holds both slots still. `counted` is filled on the way."""
    names = [column.name for column in pair.type.columns]
    places = [(name, names.index(name)) for name in pair.compared]
    left, right = _rows(db, pair.older), _rows(db, pair.newer)
    old, new = next(left, None), next(right, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old[0] < new[0]):
            assert old is not None, "one of the two is there"
            counted.gone += 1
            yield Change("gone", old[1], None)
            old = next(left, None)
        elif old is None or new[0] < old[0]:
            counted.new += 1
            yield Change("new", None, new[1])
            new = next(right, None)
        else:
            differing = tuple(name for name, place in places if old[1][place] != new[1][place])
            if differing:
                counted.changed += 1
                yield Change("changed", old[1], new[1], differing)
            else:
                counted.same += 1
            old, new = next(left, None), next(right, None)


def _rows(db: Database, side: Choice) -> Iterator[tuple[bytes, Stored]]:
    """Key and values of the rows of one slot, in key order, a page at a time: two may be read side by side on one connection."""
    columns = ", ".join(quote(column.name) for column in side.type.columns)
    sql = (
        f"SELECT _key, {columns} FROM {quote(side.table.name)} AS d WHERE {side.where} AND _key > ? ORDER BY _scope, _key LIMIT {PAGE_ROWS}"
    )
    after = b""
    while rows := db.rows_text(sql, (*side.values, after)):
        for key, *values in rows:
            after = bytes(key)
            yield after, tuple(bytes(v) if isinstance(v, memoryview | bytearray) else v for v in values)
        if len(rows) < PAGE_ROWS:
            return
