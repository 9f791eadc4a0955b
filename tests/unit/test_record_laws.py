"""Laws of records: what goes in comes out, equal content has one hash, and different keys have different texts."""

from __future__ import annotations

import dataclasses
import json
import re
from base64 import b64decode
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.columns import canonical_json
from limpet.errors import RecordError
from limpet.record import Kind, RecordType, field, from_definition, record, record_type


class Side(Enum):
    LEFT = "l"
    RIGHT = 'r"\\'


class Stars(IntEnum):
    ONE = 1
    TWO = 2


@dataclass
class Part:
    name: str
    weights: list[float | None]


@record(key=("word", "number", "side"))
class Everything:
    """One field of each kind, and of each again that may be missing."""

    number: int
    real: float
    word: str
    blob: bytes
    flag: bool
    day: date
    at: datetime
    price: Decimal
    side: Side
    stars: Stars
    shelf: Literal["a", "b"]
    tree: dict[str, Any]
    parts: list[Part]
    maybe_number: int | None = None
    maybe_real: float | None = None
    maybe_word: str | None = None
    maybe_blob: bytes | None = None
    maybe_flag: bool | None = None
    maybe_day: date | None = None
    maybe_at: datetime | None = None
    maybe_price: Decimal | None = None
    maybe_side: Side | None = None
    maybe_parts: list[Part] | None = None
    seen_at: datetime | None = field(default=None, volatile=True)
    depth: int = field(default=0, volatile=True)


KIND = record_type(Everything)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
decimals = st.decimals(allow_nan=False, allow_infinity=False)
zones = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes(datetime(1, 1, 2, 0, 0), datetime(9999, 12, 30), timezones=zones | st.just(UTC))
trees = st.recursive(
    st.none() | st.booleans() | integers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
parts = st.lists(st.builds(Part, texts, st.lists(st.none() | floats, max_size=3)), max_size=3)
records = st.builds(
    Everything,
    number=integers,
    real=floats,
    word=texts,
    blob=st.binary(max_size=20),
    flag=st.booleans(),
    day=st.dates(),
    at=moments,
    price=decimals,
    side=st.sampled_from(Side),
    stars=st.sampled_from(Stars),
    shelf=st.sampled_from(["a", "b"]),
    tree=st.dictionaries(texts, trees, max_size=3),
    parts=parts,
    maybe_number=st.none() | integers,
    maybe_real=st.none() | floats,
    maybe_word=st.none() | texts,
    maybe_blob=st.none() | st.binary(max_size=20),
    maybe_flag=st.none() | st.booleans(),
    maybe_day=st.none() | st.dates(),
    maybe_at=st.none() | moments,
    maybe_price=st.none() | decimals,
    maybe_side=st.none() | st.sampled_from(Side),
    maybe_parts=st.none() | parts,
    seen_at=st.none() | moments,
    depth=integers,
)

#: Exported form -> the value it was, for the kinds where they differ. Written anew, not taken from the code.
REVIVE: dict[str, Any] = {
    "bytes": b64decode,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
    "decimal": Decimal,
}


def revived(name: str, kind: Kind, value: Any) -> Any:
    """The value that an export came from."""
    if value is None:
        return None
    if name.endswith("side"):
        return Side(value)
    if name.endswith("parts"):
        return [Part(**part) for part in value]
    return REVIVE.get(kind, lambda same: same)(value)


@given(records)
@settings(max_examples=150)
def test_what_is_frozen_thaws_to_what_it_was(value: Everything) -> None:
    """For every kind, through the stored form and through JSON text, and with the scale of a Decimal."""
    frozen = KIND.freeze(value)
    exported = json.loads(json.dumps(KIND.thaw(frozen.values)))
    back = {column.name: revived(column.name, column.kind, exported[column.name]) for column in KIND.columns}

    assert back == {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not value.price.as_tuple().exponent > 0:  # type: ignore[operator]  # it is finite
        assert back["price"].as_tuple().exponent == value.price.as_tuple().exponent


@given(records)
@settings(max_examples=150)
def test_stored_values_are_what_every_database_keeps(value: Everything) -> None:
    """Plain int, float, str, bytes or None; no bool, no subclass, nothing that cannot be UTF-8."""
    for column, stored in zip(KIND.columns, KIND.freeze(value).values, strict=True):
        assert type(stored) in (int, float, str, bytes, type(None)), column
        assert stored is not None or column.optional
        if isinstance(stored, str):
            assert "\0" not in stored
            stored.encode()
        if isinstance(stored, int):
            assert -(2**63) <= stored < 2**63


@given(records)
@settings(max_examples=150)
def test_a_frozen_record_is_sealed_again_as_the_same(value: Everything) -> None:
    """From the row and the definition alone, and as often as it is asked."""
    frozen = KIND.freeze(value)

    assert KIND.freeze(value) == frozen
    assert KIND.seal(frozen.values) == frozen
    assert from_definition(KIND.name, KIND.definition()).seal(frozen.values) == frozen


@given(records)
@settings(max_examples=150)
def test_content_is_the_digest_of_the_canonical_export(value: Everything) -> None:
    """Whoever has the export can recompute it, with no part of Limpet."""
    frozen = KIND.freeze(value)
    lasting = {n: v for n, v in KIND.thaw(frozen.values).items() if v is not None and n not in ("seen_at", "depth")}
    text = canonical_json(lasting)

    assert frozen.content == blake2b(text.encode(), digest_size=16).digest()
    assert frozen.key_text == canonical_json([lasting["word"], lasting["number"], lasting["side"]])
    assert frozen.key == blake2b(frozen.key_text.encode(), digest_size=16).digest()


@given(records, st.none() | moments, integers)
@settings(max_examples=100)
def test_content_does_not_depend_on_volatile_fields(value: Everything, seen_at: datetime | None, depth: int) -> None:
    """Nor does the key."""
    other = dataclasses.replace(value, seen_at=seen_at, depth=depth)

    assert KIND.freeze(other).content == KIND.freeze(value).content
    assert KIND.freeze(other).key == KIND.freeze(value).key


@given(records, st.permutations(range(len(KIND.columns))))
@settings(max_examples=100)
def test_content_does_not_depend_on_the_order_of_columns(value: Everything, order: list[int]) -> None:
    """Fields may be sorted anew between two releases."""
    frozen = KIND.freeze(value)
    shuffled = dataclasses.replace(KIND, columns=tuple(KIND.columns[i] for i in order))

    assert shuffled.seal([frozen.values[i] for i in order])[:3] == frozen[:3]


@given(records, records, st.sets(st.sampled_from([column.name for column in KIND.columns]), max_size=3))
@settings(max_examples=100)
def test_records_share_content_only_where_all_that_lasts_is_equal(one: Everything, other: Everything, names: set[str]) -> None:
    """Any lasting field that changes, changes the content; in particular None is not the empty text."""
    mixed = dataclasses.replace(one, **{name: getattr(other, name) for name in names})
    before, after = KIND.freeze(one), KIND.freeze(mixed)
    same = all(a == b for column, a, b in zip(KIND.columns, before.values, after.values, strict=True) if not column.volatile)

    assert (before.content == after.content) == same


@record(key=("a", "b"))
class Pair:
    a: str
    b: str


@record(key=("a", "b", "c", "d", "e", "f"))
class Key:
    a: int
    b: bytes
    c: datetime
    d: bool
    e: Side
    f: Decimal


def key_text(kind: RecordType, value: object) -> str:
    """The key text of a record."""
    return kind.freeze(value).key_text


close = st.text('ab",[]\\', max_size=4)  # what JSON is made of: where a bad quoting would merge


@given(st.tuples(close, close), st.tuples(close, close))
@settings(max_examples=500)
def test_different_keys_of_text_have_different_texts(one: tuple[str, str], other: tuple[str, str]) -> None:
    """No text moves from one field of a key into the next."""
    kind = record_type(Pair)
    assert (key_text(kind, Pair(*one)) == key_text(kind, Pair(*other))) == (one == other)


keys = st.tuples(
    st.integers(-2, 2),
    st.binary(max_size=2),
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 1, 1, 0, 0, 2), timezones=st.just(UTC)),
    st.booleans(),
    st.sampled_from(Side),
    st.sampled_from([Decimal("1.0"), Decimal("10"), Decimal("-1"), Decimal("0")]),
)


@given(keys, keys)
@settings(max_examples=500)
def test_different_keys_of_any_kind_have_different_texts(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """And equal ones have one."""
    kind = record_type(Key)
    assert (key_text(kind, Key(*one)) == key_text(kind, Key(*other))) == (one == other)


anything = st.one_of(
    trees,
    st.binary(max_size=5),
    st.dates(),
    st.datetimes(),
    moments,
    st.decimals(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(Side),
)
asked = st.sampled_from(
    [
        int,
        float,
        str,
        bytes,
        bool,
        date,
        datetime,
        Decimal,
        Side,
        Stars,
        Literal["a"],
        list[int],
        dict[str, Any],
        Part,
        str | None,
    ]
)


@given(asked, anything)
@settings(max_examples=500)
def test_a_value_is_kept_or_refused_with_a_reason(annotation: Any, value: object) -> None:
    """No other exception leaves an encoder, whatever a handler puts in."""
    kind = record_type(record(type("Row", (), {"__annotations__": {"id": int, "value": annotation}}), key="id"))
    assert kind.cls is not None
    try:
        stored = kind.freeze(kind.cls(1, value)).values[1]
    except RecordError as refused:
        reason = str(refused)
    else:
        reason = "Row.value: expected nothing else"
        assert stored is None or type(stored) in (int, float, str, bytes)
    assert re.match(r"Row\.value.*: expected ", reason, re.DOTALL)
