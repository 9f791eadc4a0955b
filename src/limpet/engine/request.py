"""What a task asks the web for, where that is more than a plain GET, and its form in the queue.

A queue outlives a release: a payload is canonical JSON of plain values, never a pickle nor the
name of a class. A plain GET without data has the payload "". Headers travel with the task but
are no part of its key; the method and the body are (`url.key_text`).
"""

from __future__ import annotations

import base64
import json as json_text
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlencode

from limpet.batch import canonical_json
from limpet.errors import UsageError

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Set by the fetch layer alone: a second value would break the framing or send the request elsewhere.
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "upgrade", "expect"})
#: Bytes of a payload: it is read with each claim, so a row of the queue must stay small beside a page.
PAYLOAD_BYTES_MAX = 2**20
#: Bits of a whole number in JSON, some 1,000 digits: from 4,300 digits on Python itself neither writes nor reads one.
INT_BITS_MAX = 3322
#: Priorities of tasks: with the depth they share one 64-bit rank.
PRIORITY_MAX = 1_000_000
#: Nesting of JSON: far below the interpreter's recursion limit, which other readers share.
JSON_DEPTH_MAX = 64

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a task. `data` is not sent: it travels with the task, as `page.data`."""

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    data: object = None
    priority: int = 0
    dedup: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise UsageError(f"a request's url is a str, not {type(self.url).__name__}")
        if self.method not in METHODS:
            raise UsageError(f"method {self.method!r} of {self.url}: expected one of {', '.join(sorted(METHODS))}")
        for name, value in self.headers:
            _check_header(name, value)
        check_json(self.data, "data")
        check_priority(self.priority)

    @classmethod
    def get(cls, url: str, *, headers: Headers = (), data: object = None, priority: int = 0, dedup: bool = True) -> Self:
        """A GET, with headers of its own."""
        return cls(url, headers=_pairs(headers), data=data, priority=priority, dedup=dedup)

    @classmethod
    def post(
        cls,
        url: str,
        *,
        json: object = None,
        form: Mapping[str, object] | Iterable[tuple[str, object]] | None = None,
        body: bytes | str | None = None,
        headers: Headers = (),
        data: object = None,
        priority: int = 0,
        dedup: bool = True,
    ) -> Self:
        """A POST of exactly one of `json`, `form` (fields) or `body`.

        `data` travels with the task, as everywhere in Limpet, and is not sent. Two posts of other
        bodies to one URL are two tasks.
        """
        given = [name for name, value in (("json", json), ("form", form), ("body", body)) if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or ("none (data= travels with the task and is not sent)" if data is not None else "none")
            raise UsageError(f"POST {url}: expected exactly one of json=, form=, body=; found {found}")
        sent, kind = _body(json, form, body)
        pairs = _pairs(headers)
        if kind and not any(name.lower() == "content-type" for name, _ in pairs):
            pairs = (*pairs, ("Content-Type", kind))
        return cls(url, "POST", pairs, sent, data, priority, dedup)

    def payload(self) -> str:
        """The canonical JSON that is kept in the queue; "" for a plain GET without data."""
        kept: dict[str, object] = {}
        if self.method != "GET":
            kept["method"] = self.method
        if self.headers:
            kept["headers"] = [list(pair) for pair in self.headers]
        if self.body:
            kept["body"] = base64.b64encode(self.body).decode("ascii")
        if self.data is not None:
            kept["data"] = self.data
        if not kept:
            return ""
        text = canonical_json(kept)
        if len(text.encode()) > PAYLOAD_BYTES_MAX:
            raise UsageError(f"{self.method} {self.url}: more than {PAYLOAD_BYTES_MAX:,} bytes of body and data")
        return text

    @classmethod
    def of(cls, url: str, payload: str, *, priority: int = 0) -> Self:
        """The request that a claimed task's url and payload stand for: the inverse of `payload`."""
        if not payload:
            return cls(url, priority=priority)
        kept = json_text.loads(payload)
        return cls(
            url,
            kept.get("method", "GET"),
            tuple((name, value) for name, value in kept.get("headers", ())),
            base64.b64decode(kept.get("body", "")),
            kept.get("data"),
            priority,
        )

    def with_data(self, data: object) -> Self:
        """The same request, with other data for its handler."""
        return replace(self, data=data)


def check_json(value: object, where: str, depth: int = 0) -> None:
    """Raise UsageError, naming the place, where a value would not come back from JSON as it is."""
    if value is None or value is True or value is False:
        return
    if isinstance(value, int):
        if value.bit_length() > INT_BITS_MAX:
            raise UsageError(f"{where} has more than {INT_BITS_MAX * 3 // 10:,} digits: give it as a str")
    elif isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise UsageError(f"{where} is {value}: JSON has no such number")
    elif depth >= JSON_DEPTH_MAX:
        raise UsageError(f"{where}: nested deeper than {JSON_DEPTH_MAX}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            check_json(inner, f"{where}[{index}]", depth + 1)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}: expected a str, found {type(key).__name__}")
            check_text(key, f"a key of {where}")
            check_json(inner, f"{where}.{key}", depth + 1)
    else:
        raise UsageError(f"{where} is a {type(value).__name__}: expected None, bool, int, float, str, list or dict")


def check_priority(priority: object) -> None:
    """Raise UsageError for a priority that is no place in the queue."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        shown = repr(priority) if not isinstance(priority, int) or priority.bit_length() <= INT_BITS_MAX else "beyond all numbers"
        raise UsageError(f"priority {shown}: expected an int from -{PRIORITY_MAX:,} to {PRIORITY_MAX:,}")


def check_text(text: str, where: str) -> None:
    """Raise UsageError where a text holds what some database or UTF-8 refuses."""
    if found := _UNSTORABLE.search(text):
        what = "a NUL" if found[0] == "\0" else f"the lone surrogate U+{ord(found[0]):04X}"
        raise UsageError(f"{where} holds {what} at position {found.start()}")


def _body(json: object, form: object, body: bytes | str | None) -> tuple[bytes, str]:
    """What is sent, and its Content-Type where it says so by itself."""
    if body is not None:
        return (body.encode() if isinstance(body, str) else bytes(body)), ""
    if form is not None:
        fields = form.items() if isinstance(form, Mapping) else form
        return urlencode(list(fields), doseq=True).encode(), "application/x-www-form-urlencoded"  # type: ignore[call-overload]
    check_json(json, "json")
    return json_text.dumps(json, ensure_ascii=False, separators=(",", ":")).encode(), "application/json"


def _pairs(headers: Headers) -> tuple[tuple[str, str], ...]:
    return tuple(headers.items() if isinstance(headers, Mapping) else ((name, value) for name, value in headers))


def _check_header(name: object, value: object) -> None:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        raise UsageError(f"header {name!r}: no name of a header (RFC 9110 section 5.6.2)")
    if name.lower() in OWN_HEADERS:
        raise UsageError(f"header {name}: set by Limpet alone")
    if not isinstance(value, str) or _CONTROL.search(value) or not value.isascii():
        raise UsageError(f"header {name}: expected printable ASCII, found {value!r}")
