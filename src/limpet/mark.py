"""Values of high-water marks: their one form in the database, and their order. Pure.

A value keeps its type beside it, so that 9 comes before 10 and a day is never compared with a number.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

from limpet.columns import Misfit, encode_str
from limpet.errors import UsageError

#: A value of an incremental sweep.
Mark = int | str | date | datetime | Decimal

#: Characters of a value's text: each shard of each handler keeps two, and people read them.
TEXT_MAX = 1000


def encode(value: Mark) -> str:
    """The text of a mark's value, with its type; a time is UTC. UsageError for what has no order or no place in a database.

    >>> encode(7), encode("b"), encode(Decimal("1.50"))
    ('int:7', 'str:b', 'decimal:1.50')
    """
    text = _encoded(value)
    if len(text) > TEXT_MAX:
        raise UsageError(f"a mark's value has {len(text):,} characters: expected at most {TEXT_MAX:,}")
    try:
        return encode_str(text)
    except Misfit as error:
        raise UsageError(f"a mark's value: {error}") from None


def _encoded(value: Mark) -> str:
    if isinstance(value, bool):
        raise UsageError(f"a mark's value is {value!r}: expected int, str, date, datetime or Decimal")
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(f"a mark's value {value!r} has no time zone")
        return f"datetime:{value.astimezone(UTC).isoformat()}"
    if isinstance(value, Decimal) and not value.is_finite():
        raise UsageError(f"a mark's value is {value}, which has no order: expected a finite number")
    for kind, name in ((int, "int"), (str, "str"), (Decimal, "decimal")):
        if isinstance(value, kind):
            return f"{name}:{value}"
    if isinstance(value, date):
        return f"date:{value.isoformat()}"
    raise UsageError(f"a mark's value is a {type(value).__name__}: expected int, str, date, datetime or Decimal")


_DECODE: dict[str, Callable[[str], Mark]] = {
    "int": int,
    "str": str,
    "decimal": Decimal,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
}


def decode(text: str) -> Mark:
    """The value of a mark's text.

    >>> decode("int:7")
    7
    """
    kind, _, value = text.partition(":")
    return _DECODE[kind](value)


def kind_of(text: str) -> str:
    """The type of a mark's text.

    >>> kind_of("int:7")
    'int'
    """
    return text.partition(":")[0]


def less(one: str, other: str) -> bool:
    """Whether one value comes before another. UsageError where their types differ."""
    if kind_of(one) != kind_of(other):
        raise UsageError(f"a mark has values of two types: {one!r} and {other!r}")
    return sorts_before(one, other)


def sorts_before(one: str, other: str) -> bool:
    """An order of any two values, by type first: of several types the lowest and the highest value have two.

    >>> sorts_before("int:9", "int:10"), sorts_before("str:a", "int:10")
    (True, False)
    """
    if kind_of(one) != kind_of(other):
        return kind_of(one) < kind_of(other)
    return bool(decode(one) < decode(other))  # type: ignore[operator]


def overlapped(value: Mark, overlap: object) -> Mark:
    """A mark's value, moved back by an overlap of its kind (int, Decimal or timedelta) for rows that come late."""
    if not overlap:
        return value
    if isinstance(value, date) and not isinstance(overlap, timedelta):
        raise UsageError(f"overlap {overlap!r} of a mark of dates: expected a timedelta")
    if isinstance(value, str):
        raise UsageError("a mark of texts has no overlap")
    return value - overlap  # type: ignore[operator]
