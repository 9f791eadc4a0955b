"""Keyed tasks: calls, not URLs. The signature of a handler is their schema, and some of its arguments are their key.

    @spider.task(key=("keyword", "day"), cost=1)
    async def serp(keyword: str, day: date, *, http: Http, tx: Tx) -> None: ...

    tx.enqueue(call(serp, keyword="tea", day=date(2026, 11, 30)))

The text of a call is `call://serp+07/{"day":"2026-11-30","keyword":"tea"}`: handler and key in one form for each value, in
which a number is written in one way only. `+07` spreads the calls of a handler over 64 places, and so over the shards, as
the hosts of URLs do; no URL's host holds a "+". Nothing here reads a clock but the warning about keys that differ each time.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import time
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from limpet.batch import CREDIT, Link, canonical_json
from limpet.engine.request import PAYLOAD_BYTES_MAX, check_json, check_priority, check_text
from limpet.errors import UsageError
from limpet.task import ShardId, TaskKey
from limpet.url import authority_of, digest16, host_id

log = logging.getLogger("limpet.calls")

#: Places over which the calls of one handler are spread: as many as a server's shards.
BUCKETS = 64

#: Bytes of a key: the text of a task is indexed by its digest, and shown to people.
KEY_BYTES_MAX = 8192

#: Digits of a number on either side of its point: it is written out without an exponent, and 1e99999999 is 100 MB.
DIGITS_MAX = 1000

#: Credits that a try may cost, and that an answer's header may say.
COST_MAX = 1_000_000

#: Characters of a value that is none, in what is said of it.
SHOWN_MAX = 200

#: What a handler of calls may take besides its arguments.
GIVEN = ("http", "tx")

#: Seconds around now in which a time in a key is taken for `now()`.
NOW_S = 60.0

_UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[1-8][0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class places:
    """How many decimal places a number in a key has: `lat: Annotated[Decimal, places(6)]`."""

    number: int


@dataclass(frozen=True, slots=True)
class Tariff:
    """What a provider charges for, and what tells. Outcomes are "2xx", "404", "timeout", "lost".

    `charged` and `refunded` are the outcomes that cost, and that do not; any other is unknown until it is settled. "timeout" is
    no answer in time, "lost" a connection that ended after the request was sent. `credits_header` names the header that says
    how many credits a call took. `idempotency_header` names the one by which the provider knows a call again and charges it
    once; every try of a task sends the same.
    """

    charged: tuple[str, ...] = ("2xx",)
    refunded: tuple[str, ...] = ("3xx", "4xx", "5xx", "timeout")
    credits_header: str = ""
    idempotency_header: str = ""

    def __post_init__(self) -> None:
        for outcome in (*self.charged, *self.refunded):
            if not re.fullmatch(r"[1-5]xx|[1-5][0-9][0-9]|timeout|lost", outcome):
                raise UsageError(f'tariff: outcome {outcome!r}; expected a status ("404"), a class of them ("5xx"), "timeout" or "lost"')

    def says(self, outcome: str) -> str:
        """ "charged", "refunded" or "unknown", by the outcome itself before its class.

        >>> Tariff(charged=("2xx", "404")).says("404"), Tariff().says("503"), Tariff().says("lost")
        ('charged', 'refunded', 'unknown')
        """
        for name in (outcome, f"{outcome[0]}xx") if outcome.isdigit() else (outcome,):
            if name in self.charged:
                return "charged"
            if name in self.refunded:
                return "refunded"
        return "unknown"


@dataclass(frozen=True, slots=True)
class Prices:
    """Micro-credits of a try: by handler, and for each shard by the hosts of ours on which the calls of such handlers lie."""

    of_handlers: Mapping[str, int] = field(default_factory=dict)
    of_hosts: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: Mapping[str, int], shards: int) -> Prices:
        """Of the handlers that cost, for a job of so many shards."""
        found: dict[int, dict[int, int]] = {}
        for handler, cost in costs.items():
            for bucket in range(BUCKETS):
                host = host_id(_place(handler, bucket))
                found.setdefault(host % shards, {})[host] = cost
        return cls(costs, found)


def _place(handler: str, bucket: int) -> str:
    """The authority of a handler's calls in one of its places.

    >>> _place("serp.ranks", 7)
    'serp.ranks+07'
    """
    return f"{handler}+{bucket:02}"


_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

#: How each kind of argument is read from a text.
_FROM_TEXT: Mapping[type, Callable[[str], object]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: _BOOLS[text.strip().lower()],
    Decimal: lambda text: Decimal(text.strip()),
    date: lambda text: date.fromisoformat(text.strip()),
    datetime: lambda text: datetime.fromisoformat(text.strip()),
    UUID: lambda text: UUID(text.strip()),
    list: json.loads,
    dict: json.loads,
}

#: Kinds that JSON has no word for: kept as text.
_AS_TEXT = (Decimal, date, datetime, UUID)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a handler of calls: how its value is written into the queue, and read from it."""

    name: str
    kind: type
    is_optional: bool = False
    places: int | None = None
    default: object = inspect.Parameter.empty

    def encode(self, value: object) -> object:
        """The value as JSON has it, in one form. UsageError, naming argument and value, where it is of another type."""
        if value is None and self.is_optional:
            return None
        found = self._encoded(value)
        if found is None:
            raise UsageError(f"argument {self.name} is {value!r}: expected {self.kind.__name__}, found {type(value).__name__}")
        return found

    def _encoded(self, value: object) -> object:
        kind = self.kind
        if kind is datetime and isinstance(value, datetime):
            if value.tzinfo is None:
                raise UsageError(f"argument {self.name} is {value!r}: a time without a zone is a different one on each machine")
            return value.astimezone(UTC).isoformat()
        if kind is date and isinstance(value, date) and not isinstance(value, datetime):
            return value.isoformat()
        if kind is Decimal and isinstance(value, (Decimal, int)) and not isinstance(value, bool):
            return self._decimal(Decimal(value))
        if kind is UUID and isinstance(value, UUID):
            return str(value)
        if kind in (list, dict) and isinstance(value, (list, tuple, dict)):
            check_json(value, self.name)
            return value
        if type(value) is kind or (kind is float and type(value) is int):
            if kind is str:
                check_text(str(value), f"argument {self.name}")
            check_json(value, self.name)
            return float(value) if kind is float else value  # type: ignore[arg-type]
        return None

    def _decimal(self, value: Decimal) -> str:
        if not value.is_finite():
            raise UsageError(f"argument {self.name} is {value}: expected a number")
        if int(value.as_tuple().exponent) < -DIGITS_MAX or value.adjusted() >= DIGITS_MAX:
            raise UsageError(f"argument {self.name} is {str(value)[:SHOWN_MAX]}: more than {DIGITS_MAX} digits on one side of the point")
        if self.places is not None:
            try:
                value = value.quantize(Decimal(1).scaleb(-self.places), ROUND_HALF_EVEN)
            except InvalidOperation as error:
                raise UsageError(f"argument {self.name} is {value}: too long for {self.places} places") from error
        return f"{value if value else abs(value):f}"

    def decode(self, kept: object) -> object:
        """The value of what is kept. UsageError where this release expects another type."""
        if kept is None and self.is_optional:
            return None
        try:
            if self.kind in _AS_TEXT and isinstance(kept, str):
                return _FROM_TEXT[self.kind](kept)
        except (TypeError, ValueError, InvalidOperation) as error:
            raise UsageError(f"argument {self.name} is {kept!r}: expected {self.kind.__name__}") from error
        if not isinstance(kept, (int, float) if self.kind is float else self.kind) or (isinstance(kept, bool) and self.kind is not bool):
            raise UsageError(f"argument {self.name} is {kept!r}: expected {self.kind.__name__}, found {type(kept).__name__}")
        return kept

    def read(self, text: str) -> object:
        """The value of a field of a CSV file. UsageError where it is none of this type."""
        if not text and self.is_optional:
            return None
        try:
            return _FROM_TEXT[self.kind](text)
        except (KeyError, ValueError, InvalidOperation, RecursionError) as error:
            raise UsageError(f"{self.name} is {text[:SHOWN_MAX]!r}: expected {self.kind.__name__}") from error


@dataclass(frozen=True, slots=True)
class CallSchema:
    """What the signature of a handler of calls says, and what a call of it costs."""

    handler: str
    key: tuple[str, ...]
    arguments: Mapping[str, Argument]
    cost: int = 0  # micro-credits
    tariff: Tariff = field(default_factory=Tariff)

    def link(self, arguments: Mapping[str, object], *, shards: int, priority: int = 0, depth: int = 0) -> Link:
        """The task of a call. UsageError, naming handler and argument, for arguments that do not fit."""
        check_priority(priority)
        kept = self.encode(arguments)
        whole = self._text({name: kept[name] for name in self.key})
        host = host_id(authority_of(whole))
        payload = canonical_json({"arguments": kept})
        if len(payload.encode()) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"{self.handler}: more than {PAYLOAD_BYTES_MAX:,} bytes of arguments")
        return Link(
            ShardId(host % shards), host, TaskKey(digest16(whole)), whole, whole, handler=self.handler, payload=payload,
            priority=priority, depth=depth,
        )  # fmt: skip

    def text(self, key: Mapping[str, object]) -> str:
        """The canonical text of the call with these values of the key."""
        return self._text({name: self.arguments[name].encode(key[name]) for name in self.key})

    def _text(self, key: Mapping[str, object]) -> str:
        text = canonical_json(key)
        if len(text.encode()) > KEY_BYTES_MAX:
            raise UsageError(f"{self.handler}: a key of more than {KEY_BYTES_MAX:,} bytes: {text[:200]}")
        return f"call://{_place(self.handler, digest16(f'{self.handler} {text}')[0] % BUCKETS)}/{text}"

    def encode(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """All arguments as JSON has them, defaults included."""
        if unknown := arguments.keys() - self.arguments.keys():
            raise UsageError(f"{self.handler} does not take {', '.join(sorted(unknown))}; it takes {', '.join(self.arguments)}")
        kept = {}
        for name, argument in self.arguments.items():
            value = arguments.get(name, argument.default)
            if value is inspect.Parameter.empty:
                raise UsageError(f"{self.handler} needs {name}: give it by name")
            try:
                kept[name] = argument.encode(value)
            except UsageError as error:
                raise UsageError(f"{self.handler}: {error}") from None
            if name in self.key:
                _warn_of_fleeting(self.handler, name, value)
        return kept

    def decode(self, payload: str) -> dict[str, object]:
        """The arguments of a claimed task; what this release does not know any more is left out."""
        kept = json.loads(payload or "{}").get("arguments", {})
        found = {}
        for name, argument in self.arguments.items():
            if name in kept:
                found[name] = argument.decode(kept[name])
            elif argument.default is not inspect.Parameter.empty:
                found[name] = argument.default
            else:
                raise UsageError(f"{self.handler} needs {name}, which this task was enqueued without: give it a default")
        return found


@dataclass(frozen=True, slots=True)
class Call:
    """A keyed task to be enqueued: a handler and its arguments."""

    handler: str
    arguments: Mapping[str, object]
    priority: int = 0


def call(handler: Callable[..., object] | str, /, *, priority: int = 0, **arguments: Any) -> Call:
    """A task for a handler of calls, by the function or its name; checked when it is enqueued.

    A handler's argument named `priority` is given in `Call(handler, {...})` itself.
    """
    name = handler if isinstance(handler, str) else getattr(handler, "__name__", repr(handler))
    return Call(name, arguments, priority)


@dataclass(frozen=True, slots=True)
class Start:
    """What a start generator may know: the slot of its job, and the parameters of the run."""

    slot: str
    params: Mapping[str, str]


def is_call(text: str) -> bool:
    """Whether a task's text is that of a call.

    >>> is_call('call://serp+07/{"keyword":"tea"}'), is_call("http://e.test/")
    (True, False)
    """
    return text.startswith("call://")


def schema_of(
    function: Callable[..., object], annotations: Mapping[str, object], *, key: object, cost: object, tariff: Tariff
) -> CallSchema:
    """The schema that a function's signature is. UsageError, naming function and parameter, where it is none."""
    where = f"{function.__name__}()"
    names = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple)) else ()
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in GIVEN:
            arguments[name] = _argument(where, name, annotations.get(name, inspect.Parameter.empty), parameter.default)
    if not names:
        raise UsageError(
            f'{where}: a keyed task needs key="..." or key=("...", "..."), of its arguments {", ".join(arguments) or "(none)"}'
        )
    for name in names:
        if name not in arguments:
            raise UsageError(f"{where}: key {name!r} is no argument of it; it takes {', '.join(map(str, arguments)) or 'none'}")
        if arguments[name].kind is float or (arguments[name].kind is Decimal and arguments[name].places is None):
            raise UsageError(
                f"{where}: {name} is in the key, and a number there needs one way of writing it: annotate it "
                f"Annotated[Decimal, places(6)], with `places` from limpet"
            )
    return CallSchema(function.__name__, tuple(map(str, names)), arguments, micro(cost, where), tariff)


_KINDS = tuple(_FROM_TEXT)


def _argument(where: str, name: str, annotation: object, default: object) -> Argument:
    kind, number, is_optional = annotation, None, False
    if typing.get_origin(kind) is typing.Annotated:
        kind, *notes = typing.get_args(kind)
        number = next((note.number for note in notes if isinstance(note, places)), None)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        is_optional = len(options) < len(typing.get_args(kind))
        kind = options[0] if len(options) == 1 else kind
    kind = typing.get_origin(kind) or kind
    if kind not in _KINDS:
        known = ", ".join(each.__name__ for each in _KINDS)
        shown = "nothing" if kind is inspect.Parameter.empty else repr(kind)
        raise UsageError(f"{where}: argument {name} is annotated {shown}: expected one of {known}, or one of them | None")
    return Argument(name, typing.cast(type, kind), is_optional, number, default)


def micro(credits: object, where: str) -> int:
    """Micro-credits of a number of credits.

    >>> micro(1, "serp()"), micro("0.25", "serp()")
    (1000000, 250000)
    """
    try:
        value = Decimal(str(credits)) * CREDIT
    except InvalidOperation as error:
        raise UsageError(f"{where}: cost {credits!r}: expected a number of credits") from error
    if not value.is_finite() or value < 0 or value != value.to_integral_value():
        raise UsageError(f"{where}: cost {credits!r}: expected a number of credits from 0 on, with at most 6 decimal places")
    if value > COST_MAX * CREDIT:
        raise UsageError(f"{where}: cost {credits!r}: expected at most {COST_MAX:,} credits for a try")
    return int(value)


_warned: set[tuple[str, str]] = set()


def _warn_of_fleeting(handler: str, name: str, value: object) -> None:
    """A key that is another one each time it is made collects, and costs, everything again."""
    if (handler, name) in _warned:
        return
    if isinstance(value, UUID) or (isinstance(value, str) and _UUID.fullmatch(value)):
        what = "a UUID"
    elif isinstance(value, datetime) and value.microsecond and abs(value.timestamp() - time.time()) < NOW_S:
        what = "the present time"
    else:
        return
    _warned.add((handler, name))
    log.warning(
        "%s: %s in its key looks like %s (%s): if each run makes another one, nothing is ever known again", handler, name, what, value
    )
