"""Which handler takes which page: patterns over host and path, and the functions behind them.

A pattern is matched against the canonical URL, so every spelling of a page has one handler:
"/p/{sku}" takes one segment ("/p/{_}" too, without passing it on), "/docs/{rest:path}" takes /docs
and all below it, a trailing slash is never significant, and the query is no part of it. Literal parts may be written as people
read them (/café); captures arrive decoded. What a pattern and a function disagree about is
found when the spider is loaded, never on a page.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import quote, unquote, unquote_to_bytes

from limpet.engine.calls import CallSchema
from limpet.errors import UsageError
from limpet.scope import host_of
from limpet.url_tables import host_glob

#: Captures in one segment of a path: with more, a hostile URL of 8 KiB could hold the matcher for minutes.
CAPTURES_PER_SEGMENT_MAX = 2
#: What a handler may take besides its captures.
GIVEN = ("page", "tx")

_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]*))?\}")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
#: Stays as it is in a literal: RFC 3986 section 3.3's pchar, "/" and the escapes themselves.
_PATH_SAFE = "/%!$&'()*+,;=:@-._~"
_INT = "-?[0-9]{1,4000}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """The pages that one `@spider.page(...)` takes."""

    path: str | None
    host: str | None
    path_regex: re.Pattern[str] | None
    host_regex: re.Pattern[str] | None
    ints: frozenset[str] = frozenset()

    @property
    def takes_all(self) -> bool:
        """Whether no page can ever reach a pattern behind this one."""
        return self.path is None and self.host is None

    def match(self, authority: str, path: str) -> dict[str, str | int] | None:
        """The captures of a page (of the form that `split` gives), or None where it is not taken."""
        if self.host_regex and not matches_host(self.host_regex, authority):
            return None
        if self.path_regex is None:
            return {}
        found = self.path_regex.fullmatch(path)
        if found is None:
            return None
        return {name: int(value) if name in self.ints else _decoded(value) for name, value in found.groupdict(default="").items()}


@dataclass(frozen=True, slots=True)
class Handler:
    """A function of a spider, known by its name: a queue outlives the object."""

    name: str
    call: Callable[..., object]
    is_async: bool
    takes: frozenset[str]
    needs: frozenset[str]  # captures without a default
    schema: CallSchema | None = None  # of a handler of calls, which takes no pages

    def start(self, page: object, tx: object, captures: Mapping[str, object]) -> object:
        """Call the function; a coroutine where it is asynchronous."""
        arguments = dict(captures)
        if "page" in self.takes and self.schema is None:
            arguments["page"] = page
        if "tx" in self.takes:
            arguments["tx"] = tx
        return self.call(**arguments)


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of one page, and what its pattern captured."""

    handler: Handler
    captures: Mapping[str, str | int]


def split(url: str) -> tuple[str, str]:
    """(authority, path) of a page's URL or of a task's key text, in the one form that patterns are matched against.

    >>> split("http://127.0.0.1:8800/p/%31/?a=b")
    ('127.0.0.1:8800', '/p/1')
    """
    start = url.find("://") + 3
    end = len(url)
    for mark in "?# ":
        if (at := url.find(mark, start, end)) >= 0:
            end = at
    slash = url.find("/", start, end)
    if slash < 0:
        return url[start:end].rpartition("@")[2], ""
    path = url[slash:end].rstrip("/")
    return url[start:slash].rpartition("@")[2], _spelled_once(path) if "%" in path else path


def compile_pattern(path: str | None, host: str | None, annotations: Mapping[str, object]) -> Pattern:
    """A pattern as written, with what the function says about its captures; UsageError where it is none."""
    host_regex = host_glob(host) if host is not None else None
    if path is None:
        return Pattern(None, host, None, host_regex)
    if given := [name for name in captures_of(path) if name in GIVEN]:
        raise UsageError(f"pattern {path!r}: {given[0]!r} is the name of something every handler is given; choose another")
    ints = frozenset(name for name in captures_of(path) if _is_int(path, name, annotations.get(name, str)))
    return Pattern(path, host, re.compile(_path_regex(path, ints), re.DOTALL), host_regex, ints)


def captures_of(path: str | None) -> tuple[str, ...]:
    """The names that a pattern captures, in order; {_} is none."""
    return tuple(found[1] for found in _CAPTURE.finditer(path or "") if found[1] != "_")


def matches_host(regex: re.Pattern[str], authority: str) -> bool:
    """Whether a host's pattern takes an authority, with its port or without it."""
    return bool(regex.fullmatch(authority) or regex.fullmatch(host_of(authority)))


def handler_of(function: Callable[..., object]) -> Handler:
    """The handler that a function is; UsageError where it cannot be one."""
    if not inspect.isfunction(function):
        raise UsageError(f"a handler is a function (def or async def), not {function!r}")
    where = f"{function.__name__}()"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{where} yields: a handler calls tx.emit(...) and tx.follow(...) instead")
    if inspect.iscoroutinefunction(inspect.unwrap(function)) and not inspect.iscoroutinefunction(function):
        raise UsageError(f"{where} is async, but a decorator around it is not: its inner function needs `async def` and `await`")
    takes, needs = [], []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"{where}: parameter {name!r} cannot be passed by its name; a handler takes page, tx and its captures")
        takes.append(name)
        if parameter.default is parameter.empty and name not in GIVEN:
            needs.append(name)
    return Handler(function.__name__, function, inspect.iscoroutinefunction(function), frozenset(takes), frozenset(needs))


def annotations_of(function: Callable[..., object], *, extras: bool = False) -> dict[str, object]:
    """The parameters' annotations, resolved where they can be; with `extras`, what `Annotated` adds stays."""
    try:
        return typing.get_type_hints(function, include_extras=extras)
    except Exception:  # a name that only a type checker sees; what it leaves as text is judged as text
        if sys.version_info >= (3, 14):  # annotations are made when they are asked for, and fail then
            import annotationlib

            return annotationlib.get_annotations(function, format=annotationlib.Format.FORWARDREF)
        return dict(function.__annotations__)


def check_signature(handler: Handler, path: str | None) -> None:
    """Raise UsageError where a function and its pattern do not agree on the captures."""
    captured, where = captures_of(path), f"{handler.name}()"
    shown = f"the pattern {path!r}" if path is not None else "a page without a pattern"
    for name in captured:
        if name not in handler.takes:
            raise UsageError(f"{where}: {shown} captures {name!r}, which is no parameter of it{_nearest(name, handler.needs)}")
    for name in sorted(handler.needs.difference(captured)):
        raise UsageError(f"{where}: takes {name!r}, which {shown} does not capture{_nearest(name, (*captured, *GIVEN))}")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _path_regex(path: str, ints: frozenset[str]) -> str:
    if not path.startswith("/") or re.search("[?#]", path):
        raise UsageError(f"pattern {path!r}: expected a path that begins with '/', without query or fragment")
    names = captures_of(path)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"pattern {path!r}: captures {name!r} twice")
    if any(len(_CAPTURE.findall(segment)) > CAPTURES_PER_SEGMENT_MAX for segment in path.split("/")) or "}{" in path:
        raise UsageError(f"pattern {path!r}: at most {CAPTURES_PER_SEGMENT_MAX} captures in a segment, with text between them")
    regex, at = "", 0
    stripped = path.rstrip("/")
    for found in _CAPTURE.finditer(stripped):
        regex += _literal(path, stripped[at : found.start()])
        regex = _with_capture(path, regex, found, is_last=found.end() == len(stripped), is_int=found[1] in ints)
        at = found.end()
    return regex + _literal(path, stripped[at:])


def _with_capture(path: str, regex: str, found: re.Match[str], *, is_last: bool, is_int: bool) -> str:
    name, kind = found[1], found[2]
    opened = "(?:" if name == "_" else f"(?P<{name}>"
    if kind is None:
        return f"{regex}{opened}{_INT if is_int else '[^/]+'})"
    if kind != "path":
        raise UsageError(f"pattern {path!r}: {{{name}:{kind}}} is unknown; {{{name}}} takes a segment, {{{name}:path}} the rest")
    if not is_last:
        raise UsageError(f"pattern {path!r}: {{{name}:path}} takes the rest, so it stands last")
    if regex.endswith("/"):  # /docs itself is a page of /docs/{rest:path}: its key has no slash at the end
        return f"{regex[:-1]}(?:/{opened}.*))?"
    return f"{regex}{opened}.*)"


def _literal(path: str, text: str) -> str:
    if "{" in text or "}" in text:
        raise UsageError(f"pattern {path!r}: {text!r} has a brace that is no capture; write {{name}}, {{name:path}}, %7B or %7D")
    return re.escape(_spelled_once(quote(text, safe=_PATH_SAFE)))


def _spelled_once(path: str) -> str:
    """A path with escapes in capitals, none where none is needed, and no stray %: the spelling of a key."""

    def spell(found: re.Match[str]) -> str:
        char = chr(int(found[1] or "25", 16))
        return char if char in _UNRESERVED else f"%{(found[1] or '25').upper()}"

    return _ESCAPE.sub(spell, path)


def _decoded(value: str) -> str:
    try:
        return unquote(value, errors="strict") if "%" in value else value
    except UnicodeDecodeError:  # bytes of another charset, nobody can say which: one spelling of them
        return quote(unquote_to_bytes(value), safe="")


def _is_int(path: str, name: str, annotation: object) -> bool:
    plain = getattr(annotation, "__supertype__", annotation)  # a NewType over str or int
    if plain in (int, "int"):
        if f"{{{name}:path}}" in path:
            raise UsageError(f"pattern {path!r}: {name!r} takes the rest of a path, which is no int")
        return True
    if plain in (str, "str", inspect.Parameter.empty):
        return False
    raise UsageError(f"pattern {path!r}: {name!r} is annotated {annotation!r}; a capture is a str or an int")
