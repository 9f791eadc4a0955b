"""What one column can hold: its kind, and the way of a value into the database and out again.

A value has three forms. The *Python* value stands in the record. The *stored* one is an int,
float, str, bytes or None and means the same on every database. The *exported* one is JSON.
An annotation becomes a `Shape` once, when the record type is made; each record pays for `encode` only.

- Strict, because a value that is bent to fit is a fault that nobody sees: nothing is parsed,
  rounded or cut. An int is a float (PEP 484), up to 2**53; a bool is no int.
- Equal values have one stored form: times are UTC, zero has no sign, JSON has sorted keys. So a
  content hash can be recomputed from the row alone (I5).
- What all databases could not keep is refused here, with the field named: NUL and lone surrogates
  in text, infinities, integers over 64 bits.

Not here: how a class is read, and keys (`record.py`); SQL types and names of tables (`store/`).
"""

from __future__ import annotations

import json
import typing
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, Flag, StrEnum
from json.encoder import encode_basestring
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, NewType, NoReturn, TypeAlias, Union

from limpet.errors import RecordError

#: A value as a database keeps it.
Stored: TypeAlias = int | float | str | bytes | None
Encode: TypeAlias = Callable[[object], Stored]
#: The way of a value into JSON: (value, depth) -> exported form.
Part: TypeAlias = Callable[[object, int], object]

#: Levels of lists and dicts inside a JSON column: MySQL's JSON functions end at 100.
JSON_DEPTH_MAX = 100
#: Digits of a Decimal: enough for any price or coordinate, and Decimal("1E+999999999") is not written out.
DECIMAL_DIGITS_MAX = 1000
#: Characters of a value that a message shows.
SHOWN_MAX = 60
#: The smallest and largest integer of 64 bits, the widest that all three databases keep.
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
#: The largest integer up to which a float holds each one: 53 bits of IEEE 754.
FLOAT_INT_MAX = 2**53


class Misfit(RecordError):
    """A value or an annotation that no column holds; `path` leads to it inside its field."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path = ""

    def under(self, step: str) -> Misfit:
        """The same misfit, seen from one level further out."""
        self.path = step + self.path
        return self


class Kind(StrEnum):
    """What a column holds, and so how it is stored."""

    INT = "int"  # 64 bits, signed
    FLOAT = "float"  # finite
    STR = "str"
    BYTES = "bytes"
    BOOL = "bool"  # 0 or 1
    DATE = "date"  # text, 2026-11-30
    DATETIME = "datetime"  # text, 2026-11-30T12:00:00.000000Z: UTC, and sorts as the time does
    DECIMAL = "decimal"  # text, its scale kept: 12.30
    JSON = "json"  # canonical text
    ENUM_STR = "enum_str"  # text, one of the column's choices
    ENUM_INT = "enum_int"


#: The one JSON text of a value: sorted keys, no spaces, every character as itself.
canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False).encode


# Into the database: one function for each kind, value -> stored form.


def encode_int(value: object) -> int:
    """64 bits, signed. A bool is refused: it is an int by accident only."""
    if type(value) is not int:
        if not isinstance(value, int) or isinstance(value, bool):
            refuse("int", value)
        value = int(value)  # an IntEnum, say
    if INT_MIN <= value <= INT_MAX:
        return value
    found = str(value) if value.bit_length() <= 128 else f"one of {value.bit_length()} bits"
    raise Misfit(f"expected an int of 64 bits, -2**63 to 2**63 - 1, found {found}; write it as str or Decimal")


def encode_float(value: object) -> float:
    """Finite. An int will do, where a float surely holds it."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, float | int):
            refuse("float", value)
        if isinstance(value, int) and abs(value) > FLOAT_INT_MAX:
            raise Misfit(f"expected float, found an int of {value.bit_length()} bits, which it may not hold; declare the field int")
        value = float(value)
    if isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0, which SQLite would do in silence
    raise Misfit(f"expected a finite float, found {value!r}; declare the field float | None and give None")


def encode_str(value: object) -> str:
    """Text that all databases can keep: no NUL, no lone surrogate. The empty text is one."""
    if type(value) is not str:
        if not isinstance(value, str):
            refuse("str", value)
        value = str.__str__(value)  # a plain copy: a result of lxml is a str that keeps its whole tree alive
    if "\0" in value:
        raise Misfit(f"expected text, found a NUL at character {value.index(chr(0))} of {shown(value)}: remove it")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise Misfit(
                f"expected text, found the lone surrogate U+{ord(value[e.start]):04X} at character {e.start} of "
                f"{shown(value)}: decode it with errors='replace'"
            ) from None
    return value


def encode_bytes(value: object) -> bytes:
    """Bytes as they are."""
    if not isinstance(value, bytes):
        refuse("bytes", value)
    return bytes(value)


def encode_bool(value: object) -> int:
    """True and False only, as 1 and 0."""
    if not isinstance(value, bool):
        refuse("bool", value)
    return int(value)


def encode_date(value: object) -> str:
    """A day, as ISO 8601. A datetime is refused: its day depends on a zone."""
    if not isinstance(value, date) or isinstance(value, datetime):
        refuse("date", value)
    return date.isoformat(value)


def encode_datetime(value: object) -> str:
    """A moment, as ISO 8601 in UTC with six digits of a second, always 27 characters."""
    if not isinstance(value, datetime):
        refuse("datetime", value)
    if value.tzinfo is not UTC:
        if value.utcoffset() is None:
            raise Misfit(
                f"expected a datetime with a time zone, found {shown(value)} without; "
                "write datetime.now(UTC), or .replace(tzinfo=...) if you know the zone"
            )
        try:
            value = value.astimezone(UTC)
        except OverflowError:
            raise Misfit(f"expected a moment in the years 1 to 9999 of UTC, found {shown(value)}") from None
    # Half the time of isoformat(timespec="microseconds"), 0.9 against 1.4 to 2.2 us: one of the dearest columns.
    day = f"{value.year:04d}-{_TWO[value.month]}-{_TWO[value.day]}"
    return f"{day}T{_TWO[value.hour]}:{_TWO[value.minute]}:{_TWO[value.second]}.{value.microsecond:06d}Z"


_TWO = tuple(f"{n:02d}" for n in range(60))


def encode_decimal(value: object) -> str:
    """Digits without an exponent, the scale kept: Decimal("12.30") is 12.30."""
    if not isinstance(value, Decimal):
        refuse("Decimal", value)
    if not value.is_finite():
        raise Misfit(f"expected a finite Decimal, found {value}; declare the field Decimal | None and give None")
    if not value:
        value = value.copy_abs()
    text = Decimal.__str__(value)
    if "E" in text or len(text) > DECIMAL_DIGITS_MAX:
        if len(value.as_tuple().digits) + abs(value.adjusted()) > DECIMAL_DIGITS_MAX:
            raise Misfit(f"expected a Decimal of at most {DECIMAL_DIGITS_MAX} digits, found {shown(value)}")
        text = Decimal.__format__(value, "f")
    return text


def _base64(value: Any) -> str:
    return b64encode(value).decode()


#: Stored form to JSON text: a %-template, and what to do with the value first. One template for a
#: whole row costs half of joining a text for each column. Dates and Decimals hold nothing to escape.
TEXTS: dict[Kind, tuple[str, Callable[[Any], object] | None]] = {
    **dict.fromkeys((Kind.INT, Kind.ENUM_INT, Kind.JSON), ("%s", None)),
    **dict.fromkeys((Kind.DATE, Kind.DATETIME, Kind.DECIMAL), ('"%s"', None)),
    **dict.fromkeys((Kind.STR, Kind.ENUM_STR), ("%s", encode_basestring)),
    Kind.FLOAT: ("%r", float),
    Kind.BYTES: ('"%s"', _base64),
    Kind.BOOL: ("%s", lambda value: "true" if value else "false"),
}

#: Stored form to exported form, for the kinds where they differ.
EXPORTS: dict[Kind, Callable[[Any], object]] = {Kind.FLOAT: float, Kind.BYTES: _base64, Kind.BOOL: bool, Kind.JSON: json.loads}


#: (expected, found) -> what to write instead, {} being the value; between numbers and text it is the type's name.
_REMEDIES = {
    ("Decimal", "float"): "write Decimal('{}'): a float has no scale to keep",
    ("int", "bool"): "write int({}) if a number is meant",
    ("int", "float"): "write int({}) or round({})",
    ("float", "Decimal"): "write float({}), or declare the field Decimal",
    ("str", "bytes"): "write {}.decode()",
    ("bytes", "str"): "write {}.encode()",
    ("date", "str"): "write date.fromisoformat({})",
    ("date", "datetime"): "write .date() of it, in the zone that is meant",
    ("datetime", "str"): "write datetime.fromisoformat({})",
    ("datetime", "date"): "write a datetime with a time zone",
    ("bool", "int"): "write bool({})",
    ("list", "tuple"): "write list({})",
}
_PLAIN = frozenset({"int", "float", "str", "Decimal"})


def refuse(expected: str, value: object) -> NoReturn:
    """Raise Misfit: what was expected, what was found, and what to write instead where that is known."""
    found = type(value).__name__
    if value is None:
        raise Misfit(f"expected {expected}, found None; declare the field {expected} | None, unless it is part of the key")
    remedy = _REMEDIES.get((expected, found), f"write {expected}({{}})" if {expected, found} <= _PLAIN else "")
    raise Misfit(f"expected {expected}, found {found} {shown(value)}{'; ' * bool(remedy)}{remedy.replace('{}', shown(value))}")


def shown(value: object) -> str:
    """A value as a message shows it: cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


# From an annotation to a shape.


#: What an annotation may be.
_FITS = (
    "int, float, str, bytes, bool, date, datetime, Decimal, an Enum or Literal of str or int, list[...], "
    "dict[str, ...], a dataclass or model, or one of these | None"
)

#: What to write instead of a type that no column holds.
_INSTEAD = {"UUID": "str", "time": "str", "timedelta": "float, in seconds", "Mapping": "dict[str, ...]"}
_INSTEAD |= dict.fromkeys(("set", "frozenset", "tuple", "Sequence"), "list[...]")
_INSTEAD |= dict.fromkeys(("Any", "object"), "dict[str, Any] or list[Any]")


@dataclass(frozen=True, slots=True)
class Shape:
    """What an annotation asks for."""

    kind: Kind
    encode: Encode  # value -> stored form
    part: Part  # value -> exported form, inside JSON
    optional: bool = False
    choices: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One field of a class, its annotation resolved."""

    name: str
    annotation: object
    volatile: bool
    doc: str


@dataclass(frozen=True, slots=True)
class Classes:
    """How the fields of a class are read, and the classes met so far, since one may hold itself."""

    members: Callable[[type], Iterable[Member] | None]  # None for a class without fields
    parts: dict[type, Part] = field(default_factory=dict)


def bare(annotation: Any) -> tuple[Any, tuple[object, ...]]:
    """The type under Annotated, NewType and `type` aliases, with what Annotated adds to it."""
    metadata: tuple[object, ...] = ()
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation, metadata = annotation.__origin__, metadata + annotation.__metadata__
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            break
    if typing.get_origin(annotation) in (Union, UnionType):
        metadata += tuple(extra for arg in typing.get_args(annotation) for extra in bare(arg)[1])
    return annotation, metadata


def shape_of(annotation: object, classes: Classes) -> Shape:
    """The shape that an annotation asks for; Misfit says which annotation no column holds."""
    kind, _ = bare(annotation)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, UnionType):
        return _optional(kind, args, classes)
    if origin is Literal:
        return _literal(kind, args, classes)
    if kind in (list, dict) or origin in (list, dict):
        return _json(_container(kind, origin or kind, args, classes))
    if isinstance(kind, type):
        if kind in _SCALARS:
            return _scalar(*_SCALARS[kind])
        if issubclass(kind, Enum) and not issubclass(kind, Flag):
            return _enum(kind)
        if kind.__name__ == "AwareDatetime" and kind.__module__.startswith("pydantic"):
            return _scalar(*_SCALARS[datetime])
        if (part := _object(kind, classes)) is not None:
            return _json(part)
    _unsupported(kind)


_SCALARS: dict[type, tuple[Kind, Encode]] = {
    int: (Kind.INT, encode_int),
    float: (Kind.FLOAT, encode_float),
    str: (Kind.STR, encode_str),
    bytes: (Kind.BYTES, encode_bytes),
    bool: (Kind.BOOL, encode_bool),
    date: (Kind.DATE, encode_date),
    datetime: (Kind.DATETIME, encode_datetime),
    Decimal: (Kind.DECIMAL, encode_decimal),
}


def _unsupported(annotation: object) -> NoReturn:
    origin = typing.get_origin(annotation) or annotation
    instead = _INSTEAD.get(getattr(origin, "__name__", ""), "")
    raise Misfit(f"no column holds {_named(annotation)}: expected {_FITS}" + (f"; write {instead}" if instead else ""))


def _named(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _scalar(kind: Kind, encode: Encode, choices: tuple[str | int, ...] = ()) -> Shape:
    export = EXPORTS.get(kind)
    part: Part = (lambda value, _: encode(value)) if export is None else (lambda value, _: export(encode(value)))
    return Shape(kind, encode, part, choices=choices)


def _json(part: Part) -> Shape:
    return Shape(Kind.JSON, lambda value: canonical_json(part(value, 1)), part)


def _optional(annotation: object, args: tuple[object, ...], classes: Classes) -> Shape:
    rest = [arg for arg in args if arg is not NoneType]
    if len(rest) != 1:
        _unsupported(annotation)
    shape = shape_of(rest[0], classes)
    return replace(
        shape,
        encode=lambda value: None if value is None else shape.encode(value),
        part=lambda value, depth: None if value is None else shape.part(value, depth),
        optional=True,
    )


def _literal(annotation: object, args: tuple[object, ...], classes: Classes) -> Shape:
    if None in args:
        return _optional(annotation, (Literal[tuple(a for a in args if a is not None)], NoneType), classes)
    kind, choices = _choices(annotation, args)
    allowed, of = frozenset(choices), type(choices[0])

    def encode(value: object) -> Stored:
        if type(value) is of and value in allowed:
            return value
        raise Misfit(f"expected one of {', '.join(map(repr, choices))}, found {type(value).__name__} {shown(value)}")

    return _scalar(kind, encode, choices)


def _enum(cls: type[Enum]) -> Shape:
    kind, choices = _choices(cls, [member.value for member in cls])

    def encode(value: object) -> Stored:
        if type(value) is cls:
            return value._value_  # type: ignore[no-any-return]  # half the time of .value
        if isinstance(value, str | int) and value in choices:
            raise Misfit(f"expected {cls.__name__}, found {type(value).__name__} {shown(value)}; write {cls.__name__}({value!r})")
        refuse(cls.__name__, value)

    return _scalar(kind, encode, choices)


def _choices(annotation: object, values: Sequence[Any]) -> tuple[Kind, tuple[str | int, ...]]:
    """The kind that all values share, and they themselves, checked."""
    if values and all(type(value) is str for value in values):
        return Kind.ENUM_STR, tuple(encode_str(value) for value in values)
    if values and all(type(value) is int for value in values):
        return Kind.ENUM_INT, tuple(encode_int(value) for value in values)
    raise Misfit(f"no column holds {_named(annotation)}: expected values all str or all int, found {shown(list(values))}")


# Inside JSON: lists, dicts, objects, and whatever a bare list or dict may hold.


def _container(annotation: object, origin: object, args: tuple[Any, ...], classes: Classes) -> Part:
    inner = _inner(args[-1], classes) if args else _tree
    if origin is list:
        return _list(inner)
    if args and bare(args[0])[0] is not str:
        raise Misfit(f"no column holds {_named(annotation)}: expected dict[str, ...], as JSON knows no other keys")
    return _dict(inner)


def _inner(annotation: object, classes: Classes) -> Part:
    return _tree if bare(annotation)[0] in (Any, object) else shape_of(annotation, classes).part


def _list(inner: Part) -> Part:
    def part(value: object, depth: int) -> list[object]:
        if not isinstance(value, list):
            refuse("list", value)
        return [_into(inner, item, depth, i) for i, item in enumerate(value)]

    return part


def _dict(inner: Part) -> Part:
    def part(value: object, depth: int) -> dict[Any, object]:
        if not isinstance(value, dict):
            refuse("dict", value)
        return {_into(_str, key, depth, key): _into(inner, item, depth, key) for key, item in value.items()}

    return part


def _object(cls: type, classes: Classes) -> Part | None:
    if cls in classes.parts:
        return classes.parts[cls]
    if (members := classes.members(cls)) is None:
        return None
    parts: list[tuple[str, Part]] = []  # filled below: a field may be of the class itself

    def part(value: object, depth: int) -> dict[str, object]:
        if type(value) is not cls:
            refuse(cls.__name__, value)
        return {name: _into(inner, getattr(value, name), depth, name, ".%s") for name, inner in parts}

    classes.parts[cls] = part
    for member in members:
        try:
            parts.append((member.name, _inner(member.annotation, classes)))
        except Misfit as misfit:
            raise misfit.under(f".{member.name}") from None
    return part


def _into(inner: Part, value: object, depth: int, step: object, form: str = "") -> Any:
    """What `inner` makes of a value one level further in; a misfit there is told the step that led to it."""
    if depth > JSON_DEPTH_MAX:
        raise Misfit(f"expected at most {JSON_DEPTH_MAX} levels, found more; does it hold itself?")
    try:
        return inner(value, depth + 1)
    except Misfit as misfit:
        raise misfit.under(form % step if form else f"[{shown(step)}]") from None


def _tree(value: object, depth: int) -> object:
    """Whatever JSON can say, where the annotation does not say it."""
    for cls, inner in _TREES:
        if isinstance(value, cls):
            return inner(value, depth)
    raise Misfit(f"expected None, bool, int, float, str, list or dict, found {type(value).__name__} {shown(value)}")


_str, _int, _float = (_scalar(*_SCALARS[cls]).part for cls in (str, int, float))
#: What JSON holds, with bool before int, which it is one of.
_TREES = (
    (NoneType | bool, lambda value, _: value),
    (str, _str),
    (int, _int),
    (float, _float),
    (list, _list(_tree)),
    (dict, _dict(_tree)),
)
