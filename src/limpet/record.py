"""What a record is: a row with a business key, frozen so that it can be stored, compared and proved.

    @record(key="sku")
    class Product:
        sku: str
        price: Decimal
        seen_at: datetime = field(volatile=True)

A record type is read once, when the class is decorated; whatever no column can hold is refused
there. `RecordType.freeze` then makes of each record what a batch carries:

- key: BLAKE2b-16 of the key text, the canonical JSON array of the exported key fields. Other key
  fields, other text. Equal values have one text, but a Decimal keeps its scale, in the key too:
  12.3 and 12.30 are two keys. The empty text is a key like any other; None never is.
- content: BLAKE2b-16 of the record as exported, in canonical JSON, without its volatile fields and
  without what is None. So it does not depend on the order of the columns, and a new optional
  field leaves the content of every older row as it was (I5).

Not here: how one column's values are checked and stored (`columns.py`), tables (`store/`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, dataclass_transform, get_args, get_type_hints, overload

from limpet.columns import EXPORTS, TEXTS, Classes, Encode, Kind, Member, Misfit, Stored, bare, canonical_json, shape_of, shown
from limpet.errors import IncompatibleRecord, RecordError

__all__ = ["Column", "Frozen", "Kind", "RecordType", "added_columns", "field", "from_definition", "record", "record_type"]

T = TypeVar("T")
Scope = Literal["job", "spider"]
Policy = Literal["replace", "keep", "history"]

#: Columns of one type: InnoDB's limit is 1017, and half of it leaves room for Limpet's own.
COLUMNS_MAX = 500

#: The endings of what a dataset has beside its table: a view, and an index.
BESIDE = ("_view", "_task")
#: Bytes of a key text: a URL of 8 KiB is the longest sensible key, twice for what JSON escapes.
KEY_BYTES_MAX = 16 * 1024
#: Bytes of a record, unless the settings say otherwise.
RECORD_BYTES_MAX = 2**20
#: The form that `definition` writes; another number is another Limpet's.
DEFINITION_FORMAT = 1
#: A name that is safe in SQL everywhere; 63 bytes are PostgreSQL's limit. A leading "_" is Limpet's own.
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
#: Names that no quoting saves: PostgreSQL's system columns, SQLite's row number. All other reserved
#: words (order, rank, desc, ...) are good names of fields, so the store quotes every name, always.
NAMES_TAKEN = frozenset({"tableoid", "xmin", "xmax", "cmin", "cmax", "ctid", "oid", "rowid"})
#: Where `field` keeps what it says, in the metadata of a dataclass's field.
MARK = "limpet"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a dataset. `doc` and `choices` describe it and are no part of its shape."""

    name: str
    kind: Kind
    optional: bool = False
    volatile: bool = False  # stays out of the content hash
    doc: str = ""
    choices: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def layout(self) -> str:
        """What must stay as it is, as long as the table lives; an enum is stored as its values are."""
        return self.kind.removeprefix("enum_") + " | None" * self.optional + ", volatile" * self.volatile


def check_name(name: str) -> None:
    """Raise RecordError unless `name` can stand in SQL, quoted, on every database."""
    if not NAME.fullmatch(name) or name in NAMES_TAKEN:
        raise Misfit(
            f"the name {name!r} is no column's or dataset's: expected a to z first, then a to z, 0 to 9 and _, at most 63 in "
            f"all, and none of {', '.join(sorted(NAMES_TAKEN))}, which PostgreSQL and SQLite keep for themselves"
        )


class Frozen(NamedTuple):
    """One record, ready to be stored. A tuple, as one is made of every record: 0.3 us, a frozen dataclass 0.8."""

    key: bytes
    key_text: str
    content: bytes  # over what is neither volatile nor None
    values: tuple[Stored, ...]  # in the order of the type's columns
    size: int  # bytes of its JSON, volatile fields included


@dataclass(frozen=True, slots=True)
class RecordType:
    """A kind of record: what its table looks like, and the ways in and out of it."""

    name: str
    cls: type | None  # None where it was read from a database
    key: tuple[str, ...]
    scope: Scope
    policy: Policy
    columns: tuple[Column, ...]
    doc: str = ""
    encoders: tuple[Encode, ...] = dataclasses.field(default=(), repr=False, compare=False)
    plan: _Plan = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_type(self)
        object.__setattr__(self, "plan", _Plan.of(self.key, self.columns))

    def freeze(self, value: object, *, bytes_max: int = RECORD_BYTES_MAX) -> Frozen:
        """The stored form of a record of this type, every field checked.

        Raises RecordError, naming type and field, for a value that its column cannot hold, a key
        longer than 16 KiB, and a record of more than `bytes_max` bytes of JSON.
        """
        if type(value) is not self.cls or self.cls is None:
            expected = f"a {self.cls.__name__}" if self.cls else "none, as the type was read from a database, without its class"
            raise RecordError(f"dataset {self.name!r}: expected {expected}, found a {type(value).__name__}")
        stored: list[Stored] = []
        try:
            for encode, given in zip(self.encoders, self.plan.read(value)):  # noqa: B905  # strict= costs 0.3 us, and both are of `columns`
                stored.append(encode(given))
        except Misfit as misfit:
            raise RecordError(f"{self.cls.__name__}.{self.columns[len(stored)].name}{misfit.path}: {misfit}") from None
        except AttributeError as e:
            raise RecordError(f"{self.cls.__name__}: a field was never given a value: {e}") from None
        frozen = self.plan.seal(tuple(stored))
        if frozen.size > bytes_max or len(frozen.key_text) > KEY_BYTES_MAX // 4:
            _check_size(self, frozen, bytes_max)
        return frozen

    def seal(self, values: Sequence[Any]) -> Frozen:
        """Key and content of values in their stored form: what `verify` recounts from a row."""
        try:
            if len(values) != len(self.columns):
                raise ValueError(f"expected {len(self.columns)} values, found {len(values)}")
            return self.plan.seal(tuple(values))
        except (ValueError, TypeError) as e:
            raise RecordError(f"a row of {self.name!r} does not hold what its columns say: {e}") from e

    def thaw(self, values: Sequence[Any]) -> dict[str, object]:
        """A row as it is exported: stored values in the order of the columns -> what JSON can say."""
        try:
            pairs = zip(self.plan.exports, values, strict=True)
            return {name: export(value) if export and value is not None else value for (name, export), value in pairs}
        except (ValueError, TypeError) as e:
            raise RecordError(f"a row of {self.name!r} does not hold what its columns say: {e}") from e

    def definition(self) -> str:
        """This type as canonical JSON, documentation included; `from_definition` reads it."""
        columns = [{**dataclasses.asdict(column), "choices": list(column.choices)} for column in self.columns]
        about = {"format": DEFINITION_FORMAT, "key": self.key, "scope": self.scope, "policy": self.policy, "doc": self.doc}
        return canonical_json({**about, "columns": columns})


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is done to each row of a type, worked out once: `freeze` is paid for by every record."""

    read: Callable[[Any], tuple[object, ...]]
    texts: tuple[tuple[int, Callable[[Any], object]], ...]  # what to do with a value before its template
    key: tuple[str, itemgetter[Any]]  # template of the key text, and the values that go into it
    content: tuple[str, itemgetter[Any]]  # the same of the content, where no column is None
    pieces: tuple[tuple[int, str], ...]  # '"name":%s' of each lasting column, by name
    volatile: tuple[int, ...]
    is_sparse: bool  # some column is optional
    exports: tuple[tuple[str, Callable[[Any], object] | None], ...]

    @classmethod
    def of(cls, key: tuple[str, ...], columns: tuple[Column, ...]) -> _Plan:
        names = [column.name for column in columns]
        read, templates = attrgetter(*names), [TEXTS[column.kind] for column in columns]
        keys = [names.index(name) for name in key]
        lasting = [i for i in sorted(range(len(names)), key=names.__getitem__) if not columns[i].volatile]
        pieces = [f'"{names[i]}":{templates[i][0]}' for i in lasting]
        return cls(
            read=read if len(names) > 1 else lambda value: (read(value),),
            texts=tuple((i, text) for i, (_, text) in enumerate(templates) if text),
            key=(f"[{','.join(templates[i][0] for i in keys)}]", itemgetter(*keys)),
            content=(f"{{{','.join(pieces)}}}", itemgetter(*lasting)),
            pieces=tuple(zip(lasting, pieces, strict=True)),
            volatile=tuple(i for i, column in enumerate(columns) if column.volatile),
            is_sparse=any(column.optional for column in columns),
            exports=tuple((column.name, EXPORTS.get(column.kind)) for column in columns),
        )

    def seal(self, values: tuple[Any, ...]) -> Frozen:
        """Key and content of stored values."""
        texts = list(values)
        if self.is_sparse and None in values:
            for i, text in self.texts:
                if texts[i] is not None:
                    texts[i] = text(texts[i])
            content = f"{{{','.join([piece % texts[i] for i, piece in self.pieces if texts[i] is not None])}}}".encode()
        else:
            for i, text in self.texts:
                texts[i] = text(texts[i])
            content = (self.content[0] % self.content[1](texts)).encode()
        key_text = self.key[0] % self.key[1](texts)
        size = len(content)
        for i in self.volatile:
            size += len(texts[i].encode()) if type(texts[i]) is str else 8
        return Frozen(_digest(key_text.encode()), key_text, _digest(content), values, size)


def _digest(text: bytes) -> bytes:
    """BLAKE2b (RFC 7693), 16 bytes: a hostile site could make a fast hash collide."""
    return blake2b(text, digest_size=16).digest()


def _check_size(kind: RecordType, frozen: Frozen, bytes_max: int) -> None:
    """Raise RecordError, naming the largest field, unless record and key are small enough."""
    if frozen.size > bytes_max:
        sizes = {c.name: len(v) for c, v in zip(kind.columns, frozen.values, strict=True) if isinstance(v, str | bytes)}
        raise RecordError(
            f"a record of {kind.name!r} with key {frozen.key_text[:200]}: expected at most {bytes_max:,} bytes, "
            f"found {frozen.size:,}; the largest field is {max(sizes, key=sizes.__getitem__, default='')!r}"
        )
    if (found := len(frozen.key_text.encode())) > KEY_BYTES_MAX:
        raise RecordError(f"a key of {kind.name!r}, {frozen.key_text[:60]}...: expected at most {KEY_BYTES_MAX:,} bytes, found {found:,}")


# What users write.


@overload
def field(*, default: T, volatile: bool = False, doc: str = "") -> T: ...
@overload
def field(*, default_factory: Callable[[], T], volatile: bool = False, doc: str = "") -> T: ...
@overload
def field(*, volatile: bool = False, doc: str = "") -> Any: ...
def field(*, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, volatile: bool = False, doc: str = "") -> Any:
    """A field of a record that says more than its type.

    `volatile`: stays out of content hash and conflicts (when it was fetched, how deep it was found).
    `doc`: what it means, kept with the table. In a class that is not made by `@record` it stands in
    the annotation: `seen_at: Annotated[datetime, field(volatile=True)]`.
    """
    return dataclasses.field(default=default, default_factory=default_factory, metadata={MARK: (volatile, doc)})


class Options(TypedDict, total=False):
    """What `record` takes beside the key."""

    scope: Scope
    policy: Policy
    name: str | None
    volatile: str | tuple[str, ...]
    frozen: bool


@overload
def record(cls: type[T], *, key: str | tuple[str, ...], **options: Unpack[Options]) -> type[T]: ...
@overload
def record(*, key: str | tuple[str, ...], **options: Unpack[Options]) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(field,))
def record(
    cls: type[Any] | None = None,
    *,
    key: str | tuple[str, ...] = (),
    scope: Scope = "job",
    policy: Policy = "replace",
    name: str | None = None,
    volatile: str | tuple[str, ...] = (),
    frozen: bool = False,
) -> Any:
    """Make a class a record type: `@record(key="sku")`, or `record(key="sku")(ExistingModel)`.

    A plain class becomes a dataclass with slots, `frozen` if asked; a dataclass, attrs class, msgspec
    Struct or pydantic model stays what it is. `key` names the fields that tell one record from
    another. `scope`: unique inside the job, or over all slots of the spider. `policy` over slots:
    the newer row `replace`s, the older one is `keep`-ed, or both are `history`. `name`: of the
    dataset, else the class's in snake_case. `volatile`: fields of a class that cannot say it itself.

    Raises RecordError for a type without a key, or with a field that no column can hold.
    """

    def wrap(cls: type[Any]) -> type[Any]:
        doc = _description(cls)
        whole = _whole(cls, frozen=frozen)
        keys = (key,) if isinstance(key, str) else tuple(key)
        columns, encoders = _columns(whole, (volatile,) if isinstance(volatile, str) else tuple(volatile))
        made = RecordType(name or _snake_case(cls.__name__), whole, keys, scope, policy, columns, doc, encoders)
        if vars(whole).get("__limpet_record__", made) != made:
            raise RecordError(f"{cls.__name__} is a record type already, with another key or other options: make a subclass of it")
        whole.__limpet_record__ = made
        return whole

    return wrap if cls is None else wrap(cls)


def record_type(cls: type) -> RecordType:
    """The record type that `@record` made of a class; RecordError where it made none."""
    made = getattr(cls, "__dict__", {}).get("__limpet_record__")  # its own, not its parent's
    if isinstance(made, RecordType):
        return made
    if not (name := getattr(cls, "__name__", "")):
        raise RecordError(f"expected a class that @record made a record type of, found {shown(cls)}")
    parent = getattr(cls, "__limpet_record__", None)
    why = f"; {parent.cls.__name__}, which it extends, is one, but its key may not be this one's" if parent else ""
    raise RecordError(f"{name} is no record type: decorate it with @record(key=...){why}")


# From a class to a type.


def _whole(cls: type[Any], *, frozen: bool) -> type[Any]:
    """The class itself where it has fields already, else a dataclass made of it."""
    has_fields = _members(cls) is not None
    if has_fields and frozen:
        raise RecordError(f"{cls.__name__} has its fields already: frozen is for a class that @record makes")
    if has_fields:
        return cls
    if type(cls) not in (type, ABCMeta) or hasattr(cls, "__attrs_attrs__"):
        raise RecordError(f"{cls.__name__}: expected a plain class, dataclass, attrs class, msgspec Struct or pydantic model of its own")
    with_default = [name for name, value in vars(cls).items() if _is_default(value)]
    try:
        return dataclass(slots=True, frozen=frozen)(cls)
    except (TypeError, ValueError) as e:
        misplaced = re.match(r"non-default argument '(\w+)' follows default argument", str(e))
        raise RecordError(_out_of_order(cls, misplaced[1], with_default) if misplaced else f"{cls.__name__}: {e}") from e


def _out_of_order(cls: type[Any], name: str, with_default: Sequence[str]) -> str:
    """What is wrong where a field without a default stands below one that has one, and how to mend it."""
    names = list(inspect.get_annotations(cls))
    above = [each for each in names[: names.index(name)] if each in with_default]
    if not above:
        return f"{cls.__name__}.{name} has no default, but a field that it inherits has: give it one, or drop the other's"
    return f"{cls.__name__}.{name} has no default, but {above[-1]} above it has: move {above[-1]} last, or drop its default"


def _is_default(value: object) -> bool:
    """Whether what a class says of a name gives a field its default."""
    if not isinstance(value, dataclasses.Field):
        return True
    return value.default is not dataclasses.MISSING or value.default_factory is not dataclasses.MISSING


def _columns(cls: type, volatile: tuple[str, ...]) -> tuple[tuple[Column, ...], tuple[Encode, ...]]:
    columns, encoders, classes = [], [], Classes(_members)
    for member in _members(cls) or ():
        try:
            shape = shape_of(member.annotation, classes)
            marked = member.volatile or member.name in volatile
            columns.append(Column(member.name, shape.kind, shape.optional, marked, member.doc, shape.choices))
            encoders.append(shape.encode)
        except Misfit as misfit:
            raise RecordError(f"{cls.__name__}.{member.name}{misfit.path}: {misfit}") from None
    if unknown := set(volatile) - {column.name for column in columns}:
        raise RecordError(f"{cls.__name__}: volatile names {sorted(unknown)}, expected some of {[c.name for c in columns]}")
    return tuple(columns), tuple(encoders)


def _members(cls: type) -> list[Member] | None:
    """The fields of a dataclass, attrs class, msgspec Struct or pydantic model; None for any other class.

    Known by what such a class carries, so that none of the libraries is imported here. A subclass
    that was not decorated itself is none: its own annotations are no fields of it.
    """
    own = vars(cls)
    said: dict[str, tuple[Any, ...]]
    if "__dataclass_fields__" in own:
        said = {f.name: (f,) for f in dataclasses.fields(cls)}
    elif "__attrs_attrs__" in own:
        said = {a.name: (a,) for a in own["__attrs_attrs__"]}
    elif isinstance(struct := getattr(cls, "__struct_fields__", None), tuple):
        said = dict.fromkeys(struct, ())
    elif isinstance(model := getattr(cls, "__pydantic_fields__", getattr(cls, "model_fields", None)), dict):
        return [_member(name, info.annotation, (info, *info.metadata)) for name, info in model.items()]
    else:
        return None
    hints = _hints(cls)
    return [_member(name, hints[name], beside) for name, beside in said.items()]


def _hints(cls: type) -> dict[str, Any]:
    own = {name: value for name, value in vars(cls).items() if isinstance(value, type)}  # classes inside the class
    try:
        return get_type_hints(cls, localns={cls.__name__: cls, **own}, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as e:
        raise Misfit(
            f"an annotation of {cls.__name__} means nothing in module {cls.__module__!r} ({e}): expected types that are "
            "defined above it, at module level, and not imported under TYPE_CHECKING only"
        ) from e


def _member(name: str, annotation: Any, beside: tuple[object, ...]) -> Member:
    """A field with what stands beside its type: our own `field(...)`, or the description that pydantic and msgspec know."""
    kind, extras = bare(annotation)
    volatile, doc = False, ""
    for extra in (*beside, *extras):
        metadata = getattr(extra, "metadata", None)
        is_volatile, words = metadata.get(MARK, (False, "")) if isinstance(metadata, Mapping) else (False, "")
        volatile, doc = volatile or is_volatile, doc or words or getattr(extra, "description", None) or ""
    return Member(name, kind, volatile, doc)


def _check_type(kind: RecordType) -> None:
    """Raise RecordError unless the parts of a type fit together."""
    about = kind.cls.__name__ if kind.cls else kind.name
    columns = {column.name: column for column in kind.columns}
    check_name(kind.name)
    if not 0 < len(columns) <= COLUMNS_MAX or len(columns) != len(kind.columns):
        raise RecordError(f"{about}: expected 1 to {COLUMNS_MAX} fields, each once, found {len(kind.columns)}")
    if kind.scope not in get_args(Scope) or kind.policy not in get_args(Policy):
        raise RecordError(
            f"{about}: expected scope {' or '.join(get_args(Scope))} and policy {', '.join(get_args(Policy))}, "
            f"found {kind.scope!r} and {kind.policy!r}"
        )
    if not kind.key or len(set(kind.key)) != len(kind.key):
        raise RecordError(f"{about} has no key, or names a field twice in it: write @record(key=...) with some of {list(columns)}")
    for name in kind.key:
        if name not in columns:
            raise RecordError(f"{about}: the key names {name!r}, expected some of {list(columns)}")
        column = columns[name]
        flaws = {"optional": column.optional, "volatile": column.volatile, column.kind: column.kind in (Kind.FLOAT, Kind.JSON)}
        if flaw := next((word for word, is_so in flaws.items() if is_so), ""):
            raise RecordError(f"{about}.{name} is {flaw}, and part of the key: expected a field that always has one exact value")


def _snake_case(name: str) -> str:
    """SearchResult -> search_result, HTMLPage -> html_page."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _description(cls: type) -> str:
    """The class's own docstring; not the signature that dataclasses put in its place."""
    doc = vars(cls).get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)


# Definitions: what is kept beside the table.


def from_definition(name: str, text: str) -> RecordType:
    """The type that a definition describes: it thaws and seals rows, but without its class freezes none."""
    try:
        about = json.loads(text)
        if about["format"] != DEFINITION_FORMAT:
            raise RecordError(f"the definition of {name!r} has format {about['format']}, expected {DEFINITION_FORMAT}: upgrade Limpet")
        columns = tuple(Column(**{**c, "kind": Kind(c["kind"]), "choices": tuple(c["choices"])}) for c in about["columns"])
        return RecordType(name, None, tuple(about["key"]), about["scope"], about["policy"], columns, about["doc"])
    except (ValueError, TypeError, KeyError) as e:
        raise RecordError(f"the definition of {name!r} is none: {type(e).__name__}: {e}") from e


def added_columns(old: RecordType | str, new: RecordType | str) -> tuple[Column, ...]:
    """The columns that `new` adds to `old`, both as types or definitions; () where they have one shape.

    Only new optional fields may be added, in any place; docs, choices and the order of fields
    may change. Raises IncompatibleRecord, with everything that differs.
    """
    was, now = (from_definition("dataset", kind) if isinstance(kind, str) else kind for kind in (old, new))
    before, after = ({column.name: column for column in kind.columns} for kind in (was, now))
    added = tuple(column for column in now.columns if column.name not in before)
    wrong = [f"its {a} was {x!r}, is now {y!r}" for a in ("key", "scope", "policy") if (x := getattr(was, a)) != (y := getattr(now, a))]
    wrong += [f"{name!r} is gone" for name in before if name not in after]
    wrong += [f"{n!r} was {c.layout}, is now {after[n].layout}" for n, c in before.items() if n in after and c.layout != after[n].layout]
    wrong += [
        f"{column.name!r} is new and not optional (| None), which rows that are there cannot have"
        for column in added
        if not column.optional
    ]
    if wrong:
        raise IncompatibleRecord(
            f"dataset {now.name!r} has another shape than its table: {'; '.join(wrong)}. "
            "Only optional fields can be added: put the rest back, or give the new shape a name of its own with @record(name=...)"
        )
    return added
