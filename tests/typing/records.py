"""Code that must, and must not, type-check: each line marked `# E: code` is an error of that code, no other line is one.

`tests/unit/test_record_typing.py` runs mypy over this file; nobody imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated

import attrs
import msgspec
import pydantic

from limpet.record import Frozen, RecordType, added_columns, field, from_definition, record, record_type


@record(key="sku")
class Product:
    """A class of no kind: `@record` gives it its `__init__`."""

    sku: str
    price: Decimal
    stock: int | None = None
    tags: list[str] = field(default_factory=list, doc="as shown")
    seen_at: datetime = field(default=datetime(2026, 11, 30, tzinfo=UTC), volatile=True)


@record(key=("keyword", "day"), scope="spider", policy="history", name="rank", frozen=True)
class Rank:
    """Every option."""

    day: str = field(doc="of the search")
    keyword: str
    rank: int


@record(key="sku")
class Modelled(pydantic.BaseModel):
    sku: str
    seen_at: Annotated[datetime, field(volatile=True)]


@record(key="sku")
@dataclass
class Plain:
    sku: str
    stock: int = 0


@record(key="sku")
@attrs.define
class Defined:
    sku: str
    stock: int = 0


@record(key="sku")
class Structured(msgspec.Struct):
    sku: str
    stock: int = 0


class Existing(pydantic.BaseModel):
    sku: str


Wrapped = record(key="sku")(Existing)
Direct = record(Existing, key="sku")

product = Product("a", Decimal("1.50"))
Product(sku="a", price=Decimal("1.50"), stock=3, tags=["x"], seen_at=datetime.now(UTC))
product.stock = 4
stock: int | None = product.stock
Rank(keyword="shoes", day="2026-11-30", rank=1)
Modelled(sku="a", seen_at=datetime.now(UTC))
Plain("a", 1)
Defined("a", 1)
Structured("a", 1)
Existing(sku="a")
kind: RecordType = record_type(Product)
frozen: Frozen = kind.freeze(product, bytes_max=1000)
content: bytes = frozen.content
row: dict[str, object] = kind.thaw(frozen.values)
added_columns(kind.definition(), from_definition("product", kind.definition()))

Product(sku=1, price=Decimal("1.50"))  # E: arg-type
Product(sku="a", price="1.50")  # E: arg-type
Product(sku="a")  # E: call-arg
Product(sku="a", price=Decimal(1), colour="red")  # E: call-arg
Product("a", Decimal(1), 3, [1])  # E: list-item
product.sku = 5  # E: assignment
colour = product.colour  # E: attr-defined
Rank("2026-11-30", "shoes", "1")  # E: arg-type
Rank(keyword="shoes", day="2026-11-30", rank=1).rank = 2  # E: misc
Modelled(sku=1, seen_at=datetime.now(UTC))  # E: arg-type
Plain(1)  # E: arg-type
Defined(1)  # E: arg-type
Structured(1)  # E: arg-type
record_type(product)  # E: arg-type
record(Existing)  # E: call-overload
record(key=3)(Existing)  # E: call-overload
record(key="sku", scope="slot")(Existing)  # E: call-overload
record(key="sku", policy="merge")(Existing)  # E: call-overload
field(default=1, default_factory=int)  # E: call-overload
number: int = field(default="one")  # E: assignment
kind.key = ("price",)  # E: misc
frozen.key_text = "[]"  # E: misc
