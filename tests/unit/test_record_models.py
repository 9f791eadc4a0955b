"""Classes that others made: dataclasses, pydantic models, attrs classes and msgspec Structs are records as they are."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec
import pydantic
import pytest

from limpet.errors import RecordError
from limpet.record import Column, Kind, field, from_definition, record, record_type

Volatile = Annotated[datetime, field(volatile=True, doc="when it was fetched")]


class Condition(StrEnum):
    NEW = "new"


class PydanticPart(pydantic.BaseModel):
    name: str
    weight: float | None = None


class PydanticThing(pydantic.BaseModel):
    """As sold."""

    sku: str
    price: Decimal = pydantic.Field(description="net", ge=0)
    condition: Condition
    parts: list[PydanticPart]
    seen_at: Volatile
    sold_at: pydantic.AwareDatetime | None = None


@attrs.define
class AttrsPart:
    name: str
    weight: float | None = None


@attrs.define
class AttrsThing:
    """As sold."""

    sku: str
    price: Annotated[Decimal, field(doc="net")]
    condition: Condition
    parts: list[AttrsPart]
    seen_at: Volatile
    sold_at: datetime | None = None


class MsgspecPart(msgspec.Struct):
    name: str
    weight: float | None = None


class MsgspecThing(msgspec.Struct, rename="camel"):
    """As sold."""

    sku: str
    price: Annotated[Decimal, msgspec.Meta(description="net")]
    condition: Condition
    parts: list[MsgspecPart]
    seen_at: Volatile
    sold_at: datetime | None = None


@dataclass
class PlainPart:
    name: str
    weight: float | None = None


@dataclass(frozen=True)
class PlainThing:
    """As sold."""

    sku: str
    price: Annotated[Decimal, field(doc="net")]
    condition: Condition
    parts: list[PlainPart]
    seen_at: Volatile
    sold_at: datetime | None = None


@record(key="sku", name="thing")
class LimpetThing:
    """As sold."""

    sku: str
    price: Decimal = field(doc="net")
    condition: Condition
    parts: list[PlainPart]
    seen_at: datetime = field(volatile=True, doc="when it was fetched")
    sold_at: datetime | None = None


THINGS: list[tuple[type[Any], type[Any]]] = [
    (PydanticThing, PydanticPart),
    (AttrsThing, AttrsPart),
    (MsgspecThing, MsgspecPart),
    (PlainThing, PlainPart),
    (LimpetThing, PlainPart),
]


def thing(cls: type[Any], part: type[Any], **changes: Any) -> Any:
    """A record of the class, whichever library made it."""
    values = {
        "sku": "a",
        "price": Decimal("1.50"),
        "condition": Condition.NEW,
        "parts": [part(name="lid", weight=1), part(name="pot")],
        "seen_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    made = cls if not changes else getattr(cls, "model_construct", cls)  # pydantic would refuse what must not fit
    return made(**{**values, **changes})


@pytest.mark.parametrize(("cls", "part"), THINGS, ids=lambda cls: cls.__name__)
def test_a_class_of_any_library_is_a_record_like_any_other(cls: type[Any], part: type[Any]) -> None:
    """It stays the class it was, and has the same columns, key, content and export."""
    assert record(key="sku", name="thing")(cls) is cls

    kind, own = record_type(cls), record_type(LimpetThing)
    frozen = kind.freeze(thing(cls, part))
    assert kind.columns == (
        Column("sku", Kind.STR),
        Column("price", Kind.DECIMAL, doc="net"),
        Column("condition", Kind.ENUM_STR, choices=("new",)),
        Column("parts", Kind.JSON),
        Column("seen_at", Kind.DATETIME, volatile=True, doc="when it was fetched"),
        Column("sold_at", Kind.DATETIME, optional=True),
    )
    assert kind.definition() == own.definition()
    assert frozen == own.freeze(thing(LimpetThing, PlainPart))
    assert from_definition("thing", kind.definition()).thaw(frozen.values) == {
        "sku": "a",
        "price": "1.50",
        "condition": "new",
        "parts": [{"name": "lid", "weight": 1.0}, {"name": "pot", "weight": None}],
        "seen_at": "2026-01-01T00:00:00.000000Z",
        "sold_at": None,
    }


@pytest.mark.parametrize(("cls", "part"), THINGS, ids=lambda cls: cls.__name__)
def test_its_values_are_checked_whatever_its_library_let_pass(cls: type[Any], part: type[Any]) -> None:
    """attrs and msgspec check nothing when an object is made, pydantic nothing when it is changed."""
    kind = record_type(record(key="sku", name="thing")(cls))
    wrong, odd = thing(cls, part, price="1.50"), thing(cls, part, parts=[{"name": "lid"}])

    with pytest.raises(RecordError, match=rf"{cls.__name__}.price: expected Decimal, found str '1.50'; write Decimal\('1.50'\)"):
        kind.freeze(wrong)
    with pytest.raises(RecordError, match=rf"{cls.__name__}.parts\[0\]: expected {part.__name__}, found dict"):
        kind.freeze(odd)


def test_volatile_fields_of_a_class_that_cannot_be_changed_are_named_from_outside() -> None:
    """A model that another package ships."""

    class Shipped(pydantic.BaseModel):
        sku: str
        seen_at: pydantic.AwareDatetime

    kind = record_type(record(key="sku", volatile=("seen_at",))(Shipped))
    first, second = (kind.freeze(Shipped(sku="a", seen_at=datetime(year, 1, 1, tzinfo=UTC))) for year in (2025, 2026))

    assert first.content == second.content
    assert first.values != second.values


def test_a_decorated_model_is_a_record() -> None:
    """The decorator form does what the call does, inherited fields included."""

    class Base(pydantic.BaseModel):
        sku: str

    @record(key="sku")
    class Child(Base):
        stock: int = 0

    assert [column.name for column in record_type(Child).columns] == ["sku", "stock"]
    with pytest.raises(RecordError, match="Base is no record type"):
        record_type(Base)


def test_a_class_that_is_made_already_cannot_be_frozen_here() -> None:
    """It would be a promise that nobody keeps."""

    @dataclass
    class Made:
        sku: str

    with pytest.raises(RecordError, match="Made has its fields already: frozen is for a class that @record makes"):
        record(key="sku", frozen=True)(Made)
    with pytest.raises(RecordError, match="is no record type"):
        record_type(Made)


def test_a_subclass_that_its_library_has_not_seen_is_refused() -> None:
    """An attrs class is made by its decorator: without it the fields that it adds are none."""

    class Bare(AttrsPart):
        size: int

    with pytest.raises(RecordError, match="Bare: expected a plain class, dataclass, attrs class"):
        record(key="name")(Bare)
    with pytest.raises(RecordError, match=r"Row\.value: no column holds Bare"):
        record(type("Row", (), {"__annotations__": {"id": int, "value": Bare}}), key="id")


def test_a_class_of_an_unknown_making_is_refused() -> None:
    """A metaclass of its own does what nobody here knows."""
    for cls in (Condition, type("Odd", (type,), {})("Made", (), {"__annotations__": {"id": int}})):
        with pytest.raises(RecordError, match="expected a plain class, dataclass, attrs class, msgspec Struct or pydantic model"):
            record(key="id")(cls)


def test_an_instance_of_a_nested_subclass_is_refused() -> None:
    """Its own fields would be lost in silence."""

    class Heavier(PlainPart):
        pass

    kind = record_type(LimpetThing)
    with pytest.raises(RecordError, match=r"LimpetThing.parts\[0\]: expected PlainPart, found Heavier"):
        kind.freeze(thing(LimpetThing, PlainPart, parts=[Heavier("lid")]))


def test_no_library_of_models_is_needed_for_records() -> None:
    """Known by what its classes carry, none is imported here (attrs is there anyway, as aiohttp needs it)."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('limpet.record', 'limpet.columns'):\n"
        "            [sys.modules.setdefault(n, None) for n in ('pydantic', 'msgspec')]\n"
        "sys.meta_path.insert(0, Block())\n"
        "from limpet.record import record, record_type\n"
        "@record(key='a')\nclass Row:\n    a: int\n    b: list[int] | None = None\n"
        "print(record_type(Row).freeze(Row(1)).key_text, sys.modules['pydantic'], sys.modules['msgspec'])"
    )
    source = Path(inspect.getfile(record)).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=60)

    assert done.stdout == "[1] None None\n", done.stderr
