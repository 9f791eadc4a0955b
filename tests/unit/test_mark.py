"""Values of marks: what has an order and a place in every database, and what a handler is told of all else."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from limpet.engine.sharing import HighWaterMark, mark_of
from limpet.errors import UsageError
from limpet.mark import TEXT_MAX, decode, encode, less, sorts_before

REFUSED: list[tuple[Any, str]] = [
    (Decimal("NaN"), "no order"),
    (Decimal("sNaN"), "no order"),
    (Decimal("-Infinity"), "no order"),
    ("a\0b", "NUL"),
    ("\ud800x", "surrogate U\\+D800"),
    ("x" * TEXT_MAX, "characters"),
    (10**TEXT_MAX, "characters"),
    (True, "expected int"),
    (1.5, "a float"),
    (datetime(2026, 1, 1), "no time zone"),
]


def mark(reached: str = "") -> HighWaterMark:
    """The mark "orders", where the sweeps before reached that."""
    return mark_of("orders", "asc", "feed", {"orders": reached} if reached else {}, None, lambda: None)


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[repr(value)[:20] for value, _ in REFUSED])
def test_a_value_without_an_order_or_a_place_is_refused_where_it_is_noted(value: Any, message: str) -> None:
    """The line that noted it is to blame, before anything is stored; the mark is named."""
    with pytest.raises(UsageError, match=message):
        encode(value)
    noting = mark()
    for call in (noting.seen, mark("int:5").is_new):
        with pytest.raises(UsageError, match=f"mark orders: .*{message}"):
            call(value)
    assert noting.note() is None


@pytest.mark.parametrize("value", [7, -(10**900), "é", "", date(2026, 11, 30), datetime(2026, 11, 30, tzinfo=UTC), Decimal("1E+900")])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    """And is not before itself."""
    assert decode(encode(value)) == value
    assert not less(encode(value), encode(value))


def test_a_value_of_another_type_than_those_before_is_refused() -> None:
    """Those of the task, and what the sweeps before reached."""
    noting = mark()
    noting.seen(5)
    for other in (noting, mark("int:7")):
        with pytest.raises(UsageError, match="mark orders: '6' is of type str, the values before are of type int"):
            other.seen("6")
    note = noting.note()
    assert note is not None
    assert (note.low, note.high, note.count) == ("int:5", "int:5", 1)


def test_any_two_values_have_an_order_by_type_first() -> None:
    """So the lowest and the highest of several types have two types, whatever came first."""
    texts = [encode(value) for value in (9, 10, "1", Decimal("0.5"), date(2026, 1, 1))]
    for one in texts:
        assert [sorts_before(one, other) + sorts_before(other, one) for other in texts if other != one] == [1] * 4
