"""Definitions: what is kept beside a table, read without the spider's code, and compared when a type changes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest

from limpet.errors import IncompatibleRecord, RecordError
from limpet.record import Column, Kind, RecordType, added_columns, field, from_definition, record, record_type


class Condition(Enum):
    NEW = "new"
    USED = "used"


@record(key="sku")
class Product:
    """A thing on sale.

    One row for each sku.
    """

    sku: str
    title: str | None
    price: Decimal
    tags: list[str] = field(default_factory=list, doc="as shown beside the title")
    condition: Condition = Condition.NEW
    shelf: str = "a"
    seen_at: datetime = field(default=datetime(2026, 11, 30, tzinfo=UTC), volatile=True)


PRODUCT = record_type(Product)


def test_a_definition_is_read_back_as_the_same_type_without_its_class() -> None:
    """Export works, and freezing says why it does not."""
    text = PRODUCT.definition()
    kind = from_definition("product", text)
    values = PRODUCT.freeze(Product("a", "T", Decimal("1.50"), ["x"])).values

    assert kind == replace(PRODUCT, cls=None)
    assert kind.definition() == text
    assert kind.thaw(values) == PRODUCT.thaw(values)
    with pytest.raises(RecordError, match="read from a database, without its class"):
        kind.freeze(Product("a", None, Decimal(1)))
    with pytest.raises(RecordError, match="read from a database, without its class"):
        kind.freeze(None)


def test_a_definition_documents_the_table() -> None:
    """Docs of the type and of its fields, choices of an enum: all that a comment on a table needs."""
    about = json.loads(PRODUCT.definition())

    assert about["doc"].startswith("A thing on sale.")
    assert about["columns"][3] == {
        "name": "tags",
        "kind": "json",
        "optional": False,
        "volatile": False,
        "doc": "as shown beside the title",
        "choices": [],
    }
    assert about["columns"][4]["choices"] == ["new", "used"]
    assert {key: about[key] for key in ("format", "key", "scope", "policy")} == {
        "format": 1,
        "key": ["sku"],
        "scope": "job",
        "policy": "replace",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"format":2}',
        PRODUCT.definition().replace('"json"', '"xml"'),
        PRODUCT.definition().replace('"title"', '"title\\"; drop table task"'),
        PRODUCT.definition().replace('["sku"]', '["url"]'),
        PRODUCT.definition().replace('"doc":"",', '"size":3,'),
    ],
)
def test_a_definition_that_is_none_is_a_record_error(text: str) -> None:
    """Whoever tampers with it cannot put a name into SQL that a class could not."""
    with pytest.raises(RecordError):
        from_definition("product", text)


WAS = from_definition("product", PRODUCT.definition())


def changed(*, drop: str = "", add: tuple[Column, ...] = (), swap: Column | None = None, **about: Any) -> RecordType:
    """The product type as a later release may have it."""
    kept = tuple(swap if swap and swap.name == c.name else c for c in WAS.columns if c.name != drop)
    return replace(WAS, columns=(*add, *kept), **about)


def test_new_optional_fields_are_what_may_be_added() -> None:
    """Anywhere in the class, between types as between definitions."""
    added = (Column("brand", Kind.STR, optional=True), Column("depth", Kind.INT, optional=True, volatile=True))
    now = changed(add=added)

    assert added_columns(WAS, now) == added
    assert added_columns(WAS.definition(), now) == added
    assert added_columns(WAS.definition(), now.definition()) == added
    assert added_columns(PRODUCT, WAS) == ()


def test_a_new_optional_field_leaves_old_content_as_it_was() -> None:
    """The content hash of a row that was stored before is the one that the new type computes."""
    old = PRODUCT.freeze(Product("a", "T", Decimal(1)))
    now = changed(add=(Column("brand", Kind.STR, optional=True),))

    assert now.seal((None, *old.values)).content == old.content
    assert now.seal(("x", *old.values)).content != old.content


@pytest.mark.parametrize(
    "now",
    [
        changed(doc="Told anew."),
        changed(swap=Column("tags", Kind.JSON, doc="other words")),
        changed(swap=Column("condition", Kind.ENUM_STR, choices=("new", "used", "broken"))),
        changed(swap=Column("condition", Kind.STR)),
        replace(WAS, columns=WAS.columns[::-1]),
    ],
)
def test_docs_choices_and_the_order_of_fields_may_change(now: RecordType) -> None:
    """Definitions compare by what is stored."""
    assert added_columns(WAS, now) == ()
    assert added_columns(now, WAS) == ()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (changed(drop="title"), "'title' is gone"),
        (changed(add=(Column("brand", Kind.STR),)), r"'brand' is new and not optional \(\| None\)"),
        (changed(swap=Column("price", Kind.FLOAT)), "'price' was decimal, is now float"),
        (changed(swap=Column("title", Kind.STR)), r"'title' was str \| None, is now str"),
        (changed(swap=Column("price", Kind.DECIMAL, optional=True)), r"'price' was decimal, is now decimal \| None"),
        (changed(swap=Column("price", Kind.DECIMAL, volatile=True)), "'price' was decimal, is now decimal, volatile"),
        (changed(key=("sku", "shelf")), r"its key was \('sku',\), is now \('sku', 'shelf'\)"),
        (changed(scope="spider"), "its scope was 'job', is now 'spider'"),
        (changed(policy="keep"), "its policy was 'replace', is now 'keep'"),
        (changed(drop="title", policy="keep"), "its policy was .*; 'title' is gone"),
    ],
)
def test_any_other_change_is_refused_with_all_that_differs(now: RecordType, expected: str) -> None:
    """And with what to do about it."""
    with pytest.raises(IncompatibleRecord, match=expected) as caught:
        added_columns(WAS.definition(), now)

    assert "dataset 'product'" in str(caught.value)
    assert "@record(name=...)" in str(caught.value)
