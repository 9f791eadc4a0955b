"""What @record makes of a class, what it refuses, and what happens when a type changes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from hashlib import blake2b
from typing import Any, Literal
from uuid import UUID  # noqa: F401  # named by an annotation below

import pytest

from limpet import columns
from limpet.errors import RecordError, UsageError
from limpet.record import KEY_BYTES_MAX, Column, Kind, field, from_definition, record, record_type


class Condition(Enum):
    NEW = "new"
    USED = "used"


class Stars(IntEnum):
    ONE = 1
    TWO = 2


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
    shelf: Literal["a", "b"] = "a"
    stars: Stars | None = None
    seen_at: datetime = field(default=datetime(2026, 11, 30, tzinfo=UTC), volatile=True)


PRODUCT = record_type(Product)


def built(annotation: str, **options: Any) -> type:
    """A class with the fields sku: str and value: `annotation`, decorated with key sku."""
    cls = type("Built", (), {"__annotations__": {"sku": "str", "value": annotation}, "__module__": __name__})
    return record(cls, **{"key": "sku", **options})


# The class.


def test_a_record_is_a_dataclass_with_slots() -> None:
    """It is built by position or keyword, compares by value, and takes no other attribute."""
    product = Product("a", None, Decimal("1.50"), stars=Stars.TWO)

    assert product == Product(sku="a", title=None, price=Decimal("1.5"), stars=Stars.TWO)
    assert product.tags == []
    assert product.seen_at == datetime(2026, 11, 30, tzinfo=UTC)
    with pytest.raises(AttributeError):
        product.colour = "red"  # type: ignore[attr-defined]


def test_a_record_can_be_frozen() -> None:
    """As a dataclass is."""

    @record(key="sku", frozen=True)
    class Fixed:
        sku: str

    fixed = Fixed(sku="a")
    with pytest.raises(AttributeError):
        fixed.sku = "b"  # type: ignore[misc]
    assert record_type(Fixed).freeze(fixed).key_text == '["a"]'


def test_columns_say_what_the_annotations_said() -> None:
    """Kind, optional, volatile, doc and choices of each field, in the order of the class."""
    assert PRODUCT.columns == (
        Column("sku", Kind.STR),
        Column("title", Kind.STR, optional=True),
        Column("price", Kind.DECIMAL),
        Column("tags", Kind.JSON, doc="as shown beside the title"),
        Column("condition", Kind.ENUM_STR, choices=("new", "used")),
        Column("shelf", Kind.ENUM_STR, choices=("a", "b")),
        Column("stars", Kind.ENUM_INT, optional=True, choices=(1, 2)),
        Column("seen_at", Kind.DATETIME, volatile=True),
    )


def test_a_type_carries_the_docstring_of_its_class() -> None:
    """The class's own docstring, without its indentation; none where there is none."""
    assert PRODUCT.doc == "A thing on sale.\n\nOne row for each sku."
    assert record_type(built("int")).doc == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Product", "product"), ("SearchResult", "search_result"), ("HTMLPage", "html_page"), ("Page2D", "page2_d"), ("a_b", "a_b")],
)
def test_a_dataset_is_named_after_its_class_in_snake_case(name: str, expected: str) -> None:
    """So that the table is called what people would call it."""
    assert record_type(record(type(name, (), {"__annotations__": {"sku": str}}), key="sku")).name == expected


def test_a_record_can_hold_trees_of_its_own_class() -> None:
    """A class that names itself in an annotation is looked at once, and nests as deep as it is."""

    @record(key="id")
    class Reply:
        id: int
        text: str
        replies: list[Reply] = field(default_factory=list)

    kind = record_type(Reply)
    thread = Reply(1, "a", [Reply(2, "b"), Reply(3, "c", [Reply(4, "d")])])

    assert kind.thaw(kind.freeze(thread).values)["replies"] == [
        {"id": 2, "text": "b", "replies": []},
        {"id": 3, "text": "c", "replies": [{"id": 4, "text": "d", "replies": []}]},
    ]
    thread.replies[0].replies.append(Reply(5, 6))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"Reply\.replies\[0\]\.replies\[0\]\.text: expected str, found int 6; write str\(6\)"):
        kind.freeze(thread)


def test_a_value_that_holds_itself_is_refused() -> None:
    """Depth is bounded, so the recursion ends in a message."""
    kind, ring = record_type(built("list[Any]")), list[Any]()
    ring.append(ring)

    with pytest.raises(RecordError, match="expected at most 100 levels, found more; does it hold itself"):
        kind.freeze(kind.cls("a", ring))  # type: ignore[misc]


# What is refused at decoration time.


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("complex", "no column holds complex: expected int, float, str"),
        ("UUID", "no column holds UUID: .*; write str"),
        ("set[str]", r"no column holds set\[str\]: .*; write list\[...\]"),
        ("tuple[int, ...]", r"no column holds tuple\[int, \.\.\.\]: .*; write list"),
        ("dict[int, str]", r"no column holds dict\[int, str\]: expected dict\[str, ...\], as JSON knows no other keys"),
        ("int | str", r"no column holds int \| str: expected int, float, str.*or one of these \| None"),
        ("int | str | None", r"no column holds int \| str \| None"),
        ("None", "no column holds NoneType"),
        ("Any", r"no column holds Any: .*; write dict\[str, Any\] or list\[Any\]"),
        ("list[set[int]]", r"no column holds set\[int\]"),
        ("Literal[1, 'a']", r"no column holds Literal\[1, 'a'\]: expected values all str or all int, found \[1, 'a'\]"),
        ("Literal[True]", "expected values all str or all int"),
        ("Mixed", "no column holds Mixed: expected values all str or all int"),
        ("Bits", "no column holds Bits"),
        ("Loose", "no column holds Loose: .*a dataclass or model"),
        ("Surely", "an annotation of Built means nothing in module .*'Surely' is not defined.*TYPE_CHECKING"),
        ("datetime.now.then", "an annotation of Built means nothing in module"),
    ],
)
def test_an_annotation_that_no_column_holds_is_refused_at_once(annotation: str, expected: str) -> None:
    """The message says which class and field, what was expected and what was found."""
    with pytest.raises(RecordError, match=expected) as caught:
        built(annotation)

    assert str(caught.value).startswith("Built.value: ") or "of Built" in str(caught.value)


class Mixed(Enum):
    A = "a"
    B = 2


class Bits(Flag):
    A = 1


class Loose:
    size: int


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key": ()}, "Built has no key"),
        ({"key": ""}, "the key names '', expected some of"),
        ({"key": "url"}, r"the key names 'url', expected some of \['sku', 'value'\]"),
        ({"key": ("sku", "sku")}, "names a field twice"),
        ({"scope": "slot"}, "expected scope job or spider .* found 'slot'"),
        ({"policy": "merge"}, "policy replace, keep, history, found .* 'merge'"),
        ({"name": "Über"}, "the name 'Über' is no column's or dataset's"),
        ({"name": "a" * 64}, "at most 63"),
        ({"volatile": "sku"}, r"Built.sku is volatile, and part of the key"),
        ({"volatile": "vaule"}, r"volatile names \['vaule'\], expected some of"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], expected: str) -> None:
    """A wrong option is a RecordError, which is a UsageError, and leaves no record type behind."""
    with pytest.raises(UsageError, match=expected):
        built("int", **options)


@pytest.mark.parametrize("annotation", ["int | None", "float", "list[str]", "dict[str, int]"])
def test_a_key_field_always_has_one_exact_value(annotation: str) -> None:
    """Optional, float and JSON fields are no part of a key."""
    with pytest.raises(RecordError, match=r"Built.value is (optional|float|json), and part of the key"):
        built(annotation, key=("sku", "value"))


@pytest.mark.parametrize("name", ["Title", "_own", "preis_é", "é", "a" * 64, "xmin", "rowid", "oid"])
def test_a_field_whose_name_is_not_safe_in_sql_is_refused(name: str) -> None:
    """Everything else is quoted by the store, reserved words too; these cannot be helped by quoting."""
    with pytest.raises(RecordError, match=re.escape(f"Named.{name}: the name {name!r}")):
        record(type("Named", (), {"__annotations__": {"sku": str, name: str}}), key="sku")


@pytest.mark.parametrize("name", ["order", "rank", "desc", "group", "key", "a" * 63])
def test_a_reserved_word_is_a_good_name_of_a_field(name: str) -> None:
    """People collect ranks and orders; the store quotes every name."""
    kind = record_type(record(type("Named", (), {"__annotations__": {"sku": str, name: str}}), key="sku"))
    assert [column.name for column in kind.columns] == ["sku", name]


def test_a_class_without_fields_or_with_too_many_is_refused() -> None:
    """1 to 500 fields."""
    many = {f"f{n}": int for n in range(501)}
    with pytest.raises(RecordError, match="expected 1 to 500 fields, each once, found 0"):
        record(type("Empty", (), {}), key="sku")
    with pytest.raises(RecordError, match="found 501"):
        record(type("Wide", (), {"__annotations__": many}), key="f0")


def test_what_a_dataclass_refuses_is_a_record_error() -> None:
    """The one class to catch, with the reason that dataclasses gave."""
    with pytest.raises(RecordError, match=r"Shared: mutable default .*list.* for field tags"):
        record(type("Shared", (), {"__annotations__": {"sku": str, "tags": list[str]}, "tags": []}), key="sku")


@pytest.mark.parametrize(
    ("defaults", "above"),
    [({"title": ""}, "title"), ({"tags": field(default_factory=list)}, "tags"), ({"tags": field(doc="none"), "title": ""}, "title")],
)
def test_a_field_without_a_default_below_one_that_has_one_is_named(defaults: dict[str, Any], above: str) -> None:
    """With what to do about it: dataclasses name neither field in a way that helps."""
    annotations = {"title": str, "tags": list[str], "sku": str} if above == "tags" else {"tags": list[str], "title": str, "sku": str}
    with pytest.raises(RecordError, match=rf"^Odd\.sku has no default, but {above} above it has: move {above} last, or drop its default$"):
        record(type("Odd", (), {"__annotations__": annotations, **defaults}), key="sku")


def test_a_class_that_was_not_decorated_is_no_record_type() -> None:
    """Said with what to write."""
    with pytest.raises(RecordError, match=r"^Loose is no record type: decorate it with @record\(key=...\)$"):
        record_type(Loose)


@pytest.mark.parametrize("value", [Product("a", None, Decimal(1)), None, "product"])
def test_a_value_is_no_record_type(value: Any) -> None:
    """Not even a record: the type is its class's."""
    with pytest.raises(RecordError, match=r"expected a class that @record made a record type of, found (Product|None|'product')"):
        record_type(value)


def test_a_subclass_of_a_record_is_a_record_only_when_decorated_itself() -> None:
    """Its key may be another one, so it does not inherit the type; decorated, it has all fields."""

    class Offer(Product):
        pass

    with pytest.raises(RecordError, match=r"Offer is no record type.*Product, which it extends, is one"):
        record_type(Offer)
    with pytest.raises(RecordError, match="dataset 'product': expected a Product, found a Offer"):
        PRODUCT.freeze(Offer("a", None, Decimal(1)))

    @record(key=("sku", "shop"))
    class Better(Product):
        shop: str = ""

    assert [c.name for c in record_type(Better).columns] == [*(c.name for c in PRODUCT.columns), "shop"]
    assert record_type(Product) is PRODUCT


def test_a_class_is_one_record_type_only() -> None:
    """Decorated twice in the same way it stays what it is; in another way it is refused, and stays what it is."""
    cls = built("int")
    kind = record_type(cls)

    assert record_type(record(cls, key="sku")) == kind
    with pytest.raises(RecordError, match="Built is a record type already"):
        record(cls, key="value")
    assert record_type(cls) == kind


# Freezing.


def test_key_and_content_can_be_recomputed_from_the_export() -> None:
    """The key digests the JSON array of the key fields; the content the JSON object without what is volatile or null."""
    frozen = PRODUCT.freeze(Product("a", None, Decimal("1.50"), ["x", "é"], seen_at=datetime(2026, 1, 2, tzinfo=UTC)))
    exported = PRODUCT.thaw(frozen.values)
    lasting = {name: value for name, value in exported.items() if value is not None and name != "seen_at"}

    assert frozen.key_text == json.dumps(["a"])
    assert frozen.key == blake2b(b'["a"]', digest_size=16).digest()
    text = json.dumps(lasting, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert frozen.content == blake2b(text.encode(), digest_size=16).digest()


def test_a_row_is_sealed_as_its_record_was_frozen() -> None:
    """So `verify` can prove key and content from the row alone, without the spider's code."""
    frozen = PRODUCT.freeze(Product("a", "T", Decimal("1.50")))
    stranger = from_definition("product", PRODUCT.definition())

    assert PRODUCT.seal(list(frozen.values)) == frozen
    assert stranger.seal(frozen.values) == frozen
    tampered = PRODUCT.seal((*frozen.values[:2], "1.51", *frozen.values[3:]))
    assert (tampered.key, tampered.content == frozen.content) == (frozen.key, False)


def test_the_empty_text_is_a_key_and_none_is_not() -> None:
    """An empty part of a key is a value; a missing one is a fault of the handler, and says so."""
    assert PRODUCT.freeze(Product("", None, Decimal(1))).key_text == '[""]'
    with pytest.raises(RecordError, match=r"Product.sku: expected str, found None; declare .* unless it is part of the key"):
        PRODUCT.freeze(Product(None, None, Decimal(1)))  # type: ignore[arg-type]


def test_a_record_of_another_class_is_refused() -> None:
    """Also where it looks alike."""
    with pytest.raises(RecordError, match="dataset 'product': expected a Product, found a dict"):
        PRODUCT.freeze({"sku": "a"})


def test_a_record_above_the_limit_is_refused_and_names_its_largest_field() -> None:
    """Bytes of its JSON, volatile fields included: at the limit it passes, one byte above it does not."""
    product = Product("a", "x" * 1000, Decimal(1))
    size = PRODUCT.freeze(product).size

    assert 1000 < size < 1300
    assert PRODUCT.freeze(product, bytes_max=size).size == size
    with pytest.raises(RecordError, match=rf"'product' with key \[\"a\"\]: expected at most {size - 1:,} .*found {size:,}.*'title'"):
        PRODUCT.freeze(product, bytes_max=size - 1)
    with pytest.raises(RecordError, match="expected at most 1,048,576 bytes"):
        PRODUCT.freeze(replace(product, title="é" * 2**19))


def test_volatile_text_counts_for_the_size() -> None:
    """A field that stays out of the hash does not stay out of the row."""
    kind = record_type(built("str", volatile="value"))
    assert kind.cls is not None

    assert kind.freeze(kind.cls("a", "é" * 500)).size >= 1000
    with pytest.raises(RecordError, match="largest field is 'value'"):
        kind.freeze(kind.cls("a", "é" * 500), bytes_max=900)


def test_a_key_above_its_limit_is_refused() -> None:
    """A key text is kept beside its digest and sent with it, so it has a limit of its own."""
    fits = PRODUCT.freeze(Product("x" * (KEY_BYTES_MAX - 4), None, Decimal(1)))

    assert len(fits.key_text) == KEY_BYTES_MAX
    with pytest.raises(RecordError, match=r"a key of 'product', .*: expected at most 16,384 bytes, found 16,385"):
        PRODUCT.freeze(Product("x" * (KEY_BYTES_MAX - 3), None, Decimal(1)))
    with pytest.raises(RecordError, match="expected at most 16,384 bytes"):
        PRODUCT.freeze(Product("é" * 9000, None, Decimal(1)))


def test_a_field_without_a_value_is_refused() -> None:
    """A slot that was deleted, or that `init=False` never filled."""
    product = Product("a", None, Decimal(1))
    del product.price

    with pytest.raises(RecordError, match="Product: a field was never given a value"):
        PRODUCT.freeze(product)


def test_a_row_that_is_not_of_its_columns_is_a_record_error() -> None:
    """`export` and `verify` meet rows that someone tampered with."""
    values = PRODUCT.freeze(Product("a", None, Decimal(1))).values
    for bad in (values[:-1], (*values, 1), (*values[:3], "{", *values[4:])):
        with pytest.raises(RecordError, match="a row of 'product' does not hold what its columns say"):
            PRODUCT.thaw(bad)
    for bad in (values[:-1], (*values, 1), (3, *values[1:])):
        with pytest.raises(RecordError, match="a row of 'product' does not hold what its columns say"):
            PRODUCT.seal(bad)


def test_every_kind_has_a_text() -> None:
    """A kind that is added is added everywhere."""
    assert set(columns.TEXTS) == set(Kind)
    assert set(columns.EXPORTS) <= set(Kind)


def test_a_literal_with_none_is_optional() -> None:
    """As mypy reads it."""
    assert record_type(built("Literal['a', None]")).columns[1] == Column("value", Kind.ENUM_STR, optional=True, choices=("a",))
