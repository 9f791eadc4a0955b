"""What each kind of column takes, keeps and gives back; what it refuses, and the words it does that with.

Without `from __future__ import annotations`: annotations are objects here, texts in `test_record.py`.
"""

import math
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NewType, Optional, cast
from zoneinfo import ZoneInfo

import pytest
from lxml import html
from typing_extensions import TypeAliasType

from limpet.errors import RecordError
from limpet.record import Frozen, field, record, record_type


class Colour(StrEnum):
    RED = "red"


class Side(Enum):
    LEFT = "l"
    RIGHT = "r"


class Stars(IntEnum):
    ONE = 1


class Level(Enum):
    LOW = -1


@dataclass
class Money:
    amount: Decimal
    at: datetime | None = None


@dataclass
class Basket:
    owner: str
    content: dict[str, list[Money]]


class Text(str):
    __slots__ = ("tree",)


class Whole(int):
    pass


class Real(float):
    pass


class Blob(bytes):
    pass


class Nowhere(tzinfo):
    """A zone that does not know its own offset."""

    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> None:
        return None


Sku = NewType("Sku", str)
Alias = TypeAliasType("Alias", int)
BERLIN = ZoneInfo("Europe/Berlin")


def freeze(annotation: Any, value: object) -> tuple[object, object]:
    """The stored and the exported form of a value in a column of that annotation."""
    kind = record_type(record(type("Row", (), {"__annotations__": {"id": int, "value": annotation}}), key="id"))
    assert kind.cls is not None
    frozen: Frozen = kind.freeze(kind.cls(1, value))
    return frozen.values[1], kind.thaw(frozen.values)["value"]


@pytest.mark.parametrize(
    ("annotation", "value", "stored", "exported"),
    [
        (int, 0, 0, 0),
        (int, 2**63 - 1, 2**63 - 1, 2**63 - 1),
        (int, -(2**63), -(2**63), -(2**63)),
        (int, Whole(3), 3, 3),
        (int, Stars.ONE, 1, 1),
        (Alias, 5, 5, 5),
        (float, 1.5, 1.5, 1.5),
        (float, 3, 3.0, 3.0),
        (float, Real(0.1), 0.1, 0.1),
        (float, 2**53, float(2**53), float(2**53)),
        (str, "", "", ""),
        (str, "Grüße 🐚\n\x01", "Grüße 🐚\n\x01", "Grüße 🐚\n\x01"),
        (str, Text("x"), "x", "x"),
        (str, Colour.RED, "red", "red"),
        (Sku, "a", "a", "a"),
        (Annotated[str, "anything"], "a", "a", "a"),
        (bytes, b"\0\xff", b"\0\xff", "AP8="),
        (bytes, Blob(b"x"), b"x", "eA=="),
        (bool, True, 1, True),
        (bool, False, 0, False),
        (date, date(2026, 11, 30), "2026-11-30", "2026-11-30"),
        (date, date(1, 1, 1), "0001-01-01", "0001-01-01"),
        (datetime, datetime(2026, 11, 30, 12, tzinfo=UTC), "2026-11-30T12:00:00.000000Z", "2026-11-30T12:00:00.000000Z"),
        (datetime, datetime(2026, 7, 1, 1, 2, 3, 45, BERLIN), "2026-06-30T23:02:03.000045Z", "2026-06-30T23:02:03.000045Z"),
        (
            datetime,
            datetime(33, 4, 3, tzinfo=timezone(timedelta(hours=2))),
            "0033-04-02T22:00:00.000000Z",
            "0033-04-02T22:00:00.000000Z",
        ),
        (Decimal, Decimal("12.30"), "12.30", "12.30"),
        (Decimal, Decimal("-0.00"), "0.00", "0.00"),
        (Decimal, Decimal("1E+3"), "1000", "1000"),
        (Decimal, Decimal("1E-8"), "0.00000001", "0.00000001"),
        (Decimal, Decimal("0E-8"), "0.00000000", "0.00000000"),
        (Decimal, Decimal("9" * 1000), "9" * 1000, "9" * 1000),
        (Side, Side.LEFT, "l", "l"),
        (Colour, Colour.RED, "red", "red"),
        (Stars, Stars.ONE, 1, 1),
        (Level, Level.LOW, -1, -1),
        (Literal["a", "b"], "b", "b", "b"),
        (Literal[1, 2], 2, 2, 2),
        (str | None, None, None, None),
        (Optional[Decimal], None, None, None),  # noqa: UP045  # both spellings are met
        (Annotated[bool | None, "x"], None, None, None),
        (bool | None, True, 1, True),
        (bytes | None, None, None, None),
        (list[int] | None, None, None, None),
        (list[str], ["b", "a"], '["b","a"]', ["b", "a"]),
        (list[float], [1, 0.5, -0.0], "[1.0,0.5,0.0]", [1.0, 0.5, 0.0]),
        (list[bytes | None], [b"x", None], '["eA==",null]', ["eA==", None]),
        (list[bool], [True], "[true]", [True]),
        (list, [1, "a", None, [2, {"b": 1.5}]], '[1,"a",null,[2,{"b":1.5}]]', [1, "a", None, [2, {"b": 1.5}]]),
        (dict, {"b": 1, "a": [True]}, '{"a":[true],"b":1}', {"a": [True], "b": 1}),
        (dict[str, Any], {"é": None}, '{"é":null}', {"é": None}),
        (dict[str, Decimal], {"x": Decimal("1.0")}, '{"x":"1.0"}', {"x": "1.0"}),
        (dict[Sku, date], {"x": date(2026, 1, 2)}, '{"x":"2026-01-02"}', {"x": "2026-01-02"}),
        (list[Side], [Side.RIGHT], '["r"]', ["r"]),
        (Money, Money(Decimal("1.50")), '{"amount":"1.50","at":null}', {"amount": "1.50", "at": None}),
        (
            Basket,
            Basket("me", {"x": [Money(Decimal(1), datetime(2026, 1, 1, tzinfo=UTC))]}),
            '{"content":{"x":[{"amount":"1","at":"2026-01-01T00:00:00.000000Z"}]},"owner":"me"}',
            {"content": {"x": [{"amount": "1", "at": "2026-01-01T00:00:00.000000Z"}]}, "owner": "me"},
        ),
    ],
)
def test_a_value_is_stored_and_exported_as_its_kind_says(annotation: Any, value: object, stored: object, exported: object) -> None:
    """Each with the exact types of both forms: a subclass of str or int is a plain one after it."""
    found_stored, found_exported = freeze(annotation, value)

    assert (found_stored, type(found_stored)) == (stored, type(stored))
    assert (found_exported, type(found_exported)) == (exported, type(exported))


def test_zero_has_no_sign() -> None:
    """SQLite drops it in silence, and the content hash of the row would no longer hold."""
    stored, exported = freeze(float, -0.0)

    assert math.copysign(1, stored) == 1  # type: ignore[arg-type]
    assert math.copysign(1, exported) == 1  # type: ignore[arg-type]


def test_text_from_a_page_does_not_keep_the_page() -> None:
    """A result of XPath is a str that holds its tree; what is stored is a plain copy."""
    (found,) = cast(list[str], html.fromstring("<p>text</p>").xpath("//p/text()"))
    assert type(found) is not str

    stored, _ = freeze(str, found)
    assert (stored, type(stored)) == ("text", str)
    assert freeze(list[str], [found]) == ('["text"]', ["text"])


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, True, "expected int, found bool True; write int(True) if a number is meant"),
        (int, "12", "expected int, found str '12'; write int('12')"),
        (int, 1.0, "expected int, found float 1.0; write int(1.0) or round(1.0)"),
        (int, None, "expected int, found None; declare the field int | None, unless it is part of the key"),
        (int, 2**63, f"expected an int of 64 bits, -2**63 to 2**63 - 1, found {2**63}; write it as str or Decimal"),
        (int, -(2**63) - 1, f"expected an int of 64 bits, -2**63 to 2**63 - 1, found {-(2**63) - 1}; write it as str or Decimal"),
        (int, 10**1000, "expected an int of 64 bits, -2**63 to 2**63 - 1, found one of 3322 bits; write it as str or Decimal"),
        (float, "1.5", "expected float, found str '1.5'; write float('1.5')"),
        (float, True, "expected float, found bool True"),
        (
            float,
            Decimal("1.5"),
            "expected float, found Decimal Decimal('1.5'); write float(Decimal('1.5')), or declare the field Decimal",
        ),
        (float, math.nan, "expected a finite float, found nan; declare the field float | None and give None"),
        (float, -math.inf, "expected a finite float, found -inf; declare the field float | None and give None"),
        (float, 2**53 + 1, "expected float, found an int of 54 bits, which it may not hold; declare the field int"),
        (float, 10**400, "expected float, found an int of 1329 bits, which it may not hold; declare the field int"),
        (str, 5, "expected str, found int 5; write str(5)"),
        (str, b"x", "expected str, found bytes b'x'; write b'x'.decode()"),
        (str, ["a" * 100], "expected str, found list ['" + "a" * 55 + "..."),
        (str, "a\0b", r"expected text, found a NUL at character 1 of 'a\x00b': remove it"),
        (
            str,
            "é\ud800",
            r"expected text, found the lone surrogate U+D800 at character 1 of 'é\ud800': decode it with errors='replace'",
        ),
        (bytes, "x", "expected bytes, found str 'x'; write 'x'.encode()"),
        (bytes, bytearray(b"x"), "expected bytes, found bytearray bytearray(b'x')"),
        (bool, 1, "expected bool, found int 1; write bool(1)"),
        (
            date,
            datetime(2026, 1, 1),
            "expected date, found datetime datetime.datetime(2026, 1, 1, 0, 0); write .date() of it, in the zone that is meant",
        ),
        (date, "2026-01-01", "expected date, found str '2026-01-01'; write date.fromisoformat('2026-01-01')"),
        (
            datetime,
            datetime(2026, 1, 1),
            "expected a datetime with a time zone, found datetime.datetime(2026, 1, 1, 0, 0) without; "
            "write datetime.now(UTC), or .replace(tzinfo=...) if you know the zone",
        ),
        (
            datetime,
            date(2026, 1, 1),
            "expected datetime, found date datetime.date(2026, 1, 1); write a datetime with a time zone",
        ),
        (datetime, "2026-01-01", "expected datetime, found str '2026-01-01'; write datetime.fromisoformat('2026-01-01')"),
        (Decimal, "12.30", "expected Decimal, found str '12.30'; write Decimal('12.30')"),
        (Decimal, 12, "expected Decimal, found int 12; write Decimal(12)"),
        (Decimal, 12.3, "expected Decimal, found float 12.3; write Decimal('12.3'): a float has no scale to keep"),
        (Decimal, Decimal("NaN"), "expected a finite Decimal, found NaN; declare the field Decimal | None and give None"),
        (Decimal, Decimal("sNaN"), "expected a finite Decimal, found sNaN; declare the field Decimal | None and give None"),
        (
            Decimal,
            Decimal("-Infinity"),
            "expected a finite Decimal, found -Infinity; declare the field Decimal | None and give None",
        ),
        (Decimal, Decimal("1E+999999"), "expected a Decimal of at most 1000 digits, found Decimal('1E+999999')"),
        (Decimal, Decimal("0E-1001"), "expected a Decimal of at most 1000 digits, found Decimal('0E-1001')"),
        (Side, "l", "expected Side, found str 'l'; write Side('l')"),
        (Side, "x", "expected Side, found str 'x'"),
        (Side, Colour.RED, "expected Side, found Colour <Colour.RED: 'red'>"),
        (Stars, 1, "expected Stars, found int 1; write Stars(1)"),
        (Literal["a", "b"], "c", "expected one of 'a', 'b', found str 'c'"),
        (Literal["a", "b"], ["a"], "expected one of 'a', 'b', found list ['a']"),
        (Literal[1, 2], True, "expected one of 1, 2, found bool True"),
        (list[int], (1,), "expected list, found tuple (1,); write list((1,))"),
        (list[int], "12", "expected list, found str '12'"),
        (dict[str, int], [], "expected dict, found list []"),
        (Money, {"amount": 1}, "expected Money, found dict {'amount': 1}"),
        (Money, None, "expected Money, found None; declare the field Money | None, unless it is part of the key"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_told_what_to_write(annotation: Any, value: object, message: str) -> None:
    """Nothing is parsed, rounded or cut: each message says what was expected, what was found and what to do."""
    with pytest.raises(RecordError) as caught:
        freeze(annotation, value)

    assert str(caught.value) == f"Row.value: {message}"


@pytest.mark.parametrize(
    ("annotation", "value", "where"),
    [
        (list[int], [1, "2"], "Row.value[1]: expected int, found str '2'"),
        (list[str | None], [None, 3], "Row.value[1]: expected str, found int 3"),
        (dict[str, list[int]], {"a": [1], "b": [0, None]}, "Row.value['b'][1]: expected int, found None"),
        (dict[str, int], {3: 1}, "Row.value[3]: expected str, found int 3"),
        (dict[str, int], {"a\0": 1}, r"Row.value['a\x00']: expected text, found a NUL"),
        (
            dict[str, Any],
            {"a": {"b": [{"c": "\udc00"}]}},
            "Row.value['a']['b'][0]['c']: expected text, found the lone surrogate U+DC00",
        ),
        (
            dict[str, Any],
            {"a": {1, 2}},
            "Row.value['a']: expected None, bool, int, float, str, list or dict, found set {1, 2}",
        ),
        (list[Any], [2**64], "Row.value[0]: expected an int of 64 bits"),
        (list[Any], [math.nan], "Row.value[0]: expected a finite float"),
        (list[Any], [{1: 2}], "Row.value[0][1]: expected str, found int 1"),
        (Basket, Basket("me", {"x": [Money(1)]}), "Row.value.content['x'][0].amount: expected Decimal, found int 1"),  # type: ignore[arg-type]
        (
            Basket,
            Basket("me", {"x": [Money(Decimal(1), datetime(2026, 1, 1))]}),
            "Row.value.content['x'][0].at: expected a datetime with a time zone",
        ),
    ],
)
def test_a_misfit_inside_json_is_named_by_its_path(annotation: Any, value: object, where: str) -> None:
    """Among a thousand entries people need to know which one."""
    with pytest.raises(RecordError) as caught:
        freeze(annotation, value)

    assert str(caught.value).startswith(where)


def test_a_datetime_at_the_edges_of_time_is_refused() -> None:
    """Its UTC would be in the year 0 or 10,000."""
    for value in (
        datetime.max.replace(tzinfo=timezone(-timedelta(hours=5))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
    ):
        with pytest.raises(RecordError, match="expected a moment in the years 1 to 9999 of UTC"):
            freeze(datetime, value)


def test_a_zone_that_knows_no_offset_is_none() -> None:
    """Such a datetime is as naive as one without a zone."""
    with pytest.raises(RecordError, match="expected a datetime with a time zone"):
        freeze(datetime, datetime(2026, 1, 1, tzinfo=Nowhere()))


def test_equal_moments_in_different_zones_are_one_key() -> None:
    """Also the two that a clock shows when summer time ends."""

    @record(key="at")
    class Moment:
        at: datetime

    kind = record_type(Moment)
    first, second = (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1))

    assert kind.freeze(Moment(first)).key == kind.freeze(Moment(first.astimezone(UTC))).key
    assert kind.freeze(Moment(first)).key_text == '["2026-10-25T00:30:00.000000Z"]'
    assert kind.freeze(Moment(second)).key_text == '["2026-10-25T01:30:00.000000Z"]'


def test_every_kind_that_may_be_a_key_has_a_key_text() -> None:
    """The exported values, in the order of the key."""

    @record(key=("side", "day", "at", "price", "flag", "blob", "n", "word", "shelf"))
    class Wide:
        n: int
        word: str
        flag: bool
        blob: bytes
        day: date
        at: datetime
        price: Decimal
        side: Side
        shelf: Literal[1, 2]

    wide = Wide(7, 'a"b', True, b"x", date(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.0"), Side.LEFT, 2)
    text = '["l","2026-01-02","2026-01-02T00:00:00.000000Z","1.0",true,"eA==",7,"a\\"b",2]'

    assert record_type(Wide).freeze(wide).key_text == text


def test_a_decimal_in_a_key_keeps_its_scale() -> None:
    """12.3 and 12.30 are two keys: a key is what is exported, and what is unsure is not merged."""

    @record(key="price")
    class Priced:
        price: Decimal

    kind = record_type(Priced)
    assert kind.freeze(Priced(Decimal("12.3"))).key_text == '["12.3"]'
    assert kind.freeze(Priced(Decimal("12.30"))).key_text == '["12.30"]'
    assert kind.freeze(Priced(Decimal("-0.0"))).key == kind.freeze(Priced(Decimal("0.0"))).key


def test_a_time_of_day_is_no_column() -> None:
    """No database keeps it in one way; text does."""
    with pytest.raises(RecordError, match=r"Row.value: no column holds time: .*; write str"):
        freeze(time, time(12))


def test_field_marks_stand_in_annotations_too() -> None:
    """On either side of `| None`."""

    @record(key="id")
    class Marked:
        id: int
        a: Annotated[int | None, field(volatile=True, doc="inside")] = None
        b: Annotated[int, field(volatile=True)] | None = None
        c: int = field(default=0, doc="as a default")

    columns = record_type(Marked).columns
    assert [(c.name, c.optional, c.volatile, c.doc) for c in columns[1:]] == [
        ("a", True, True, "inside"),
        ("b", True, True, ""),
        ("c", False, False, "as a default"),
    ]
