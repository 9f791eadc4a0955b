"""`limpet.open(...)`: what was collected, as Python values."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from limpet import reading
from limpet.batch import Offer
from limpet.errors import UsageError
from limpet.record import record, record_type
from limpet.store import Store, open_store
from tests.store.hands import SETTINGS, Hand, done, found_job, pages


@record(key="name", name="odd")
class Odd:
    """A column of every awkward kind."""

    name: str
    price: Decimal
    day: date
    at: datetime
    raw: bytes
    is_new: bool
    tags: list[str]
    note: str | None


def odd(number: int) -> Odd:
    """A record."""
    return Odd(
        f"n{number}",
        Decimal("1.20"),
        date(2026, 1, 2),
        datetime(2026, 1, 2, 3, tzinfo=UTC),
        b"\xff",
        number % 2 == 0,
        ["a"],
        None,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A database with ten records."""
    made = open_store(str(tmp_path / "x.db"), settings=SETTINGS)
    found_job(made)
    kind = record_type(Odd)
    made.ensure_datasets("shop", {"shop_odd": kind})
    hand = Hand.on(made)
    hand.take()
    hand.seed(*pages(0, 10))
    frozen = [kind.freeze(odd(number)) for number in range(10)]
    offers = [Offer("shop_odd", f.key, f.key_text, f.content, f.values) for f in frozen]
    hand.finish(*(done(claim, offers=[offer]) for claim, offer in zip(hand.claim(10, 0), offers, strict=True)))
    yield made
    hand.leave()
    made.close()


def test_rows_come_back_as_the_values_that_were_emitted(store: Store) -> None:
    """Decimals with their scale, times with their zone, bytes, lists; in key order, and each time anew."""
    with reading.open(store.dsn) as db:
        rows = db.dataset("odd")
        assert sorted(rows, key=lambda row: str(row["name"])) == [asdict(odd(number)) for number in range(10)]
        assert rows.rows() == [*rows]
        assert str(rows.rows()[0]["price"]) == "1.20"
        assert len(rows) == 10
        assert rows.columns == ("name", "price", "day", "at", "raw", "is_new", "tags", "note")
        assert db.datasets() == ["odd"]
        assert "10 rows" in repr(rows)


def test_two_readings_at_once_and_a_writer_do_not_disturb_each_other(store: Store) -> None:
    """Each iteration is of one moment, on a connection of its own."""
    with reading.open(store.dsn) as db:
        first, second = iter(db.dataset("odd")), iter(db.dataset("odd"))
        next(first)
        store.pause("a write in between")
        assert sum(1 for _ in second) == 10
        assert sum(1 for _ in first) == 9


def test_what_is_not_there_is_said(store: Store, tmp_path: Path) -> None:
    """No database, no dataset, no slot of that name; reading makes no file."""
    with pytest.raises(UsageError, match="no database"):
        reading.open(str(tmp_path / "y.db"))
    assert not (tmp_path / "y.db").exists()
    with reading.open(store.dsn) as db:
        for call in ({"name": "even"}, {"name": "odd", "slot": "b"}, {"name": "odd", "spider": "other"}):
            with pytest.raises(UsageError):
                db.dataset(**call)  # type: ignore[arg-type]
        assert len(db.dataset("odd", all_slots=True)) == 10
        assert next(iter(db.dataset("shop_odd", all_slots=True)))["slot"] == ""


def test_arrow_needs_pyarrow_and_says_so(store: Store) -> None:
    """Without it a clear error; with it a table of as many rows."""
    with reading.open(store.dsn) as db:
        if importlib.util.find_spec("pyarrow") is None:
            with pytest.raises(UsageError, match="pip install pyarrow"):
                db.dataset("odd").arrow()
        else:
            table = db.dataset("odd").arrow()
            assert (table.num_rows, table.column("price")[0].as_py()) == (10, "1.20")
