"""What a user writes: a spider with its starts, limits, record types, and a handler for each kind of page.

A spider is a description. It opens nothing and runs nothing by itself: `limpet run`, `run` and
`main` hand it to the engine. Handlers are known by name, tables are named after spider and
record type, and whatever is wrong with a description is said when the file is loaded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from limpet.engine.calls import CallSchema, Tariff, schema_of
from limpet.engine.routes import (
    Handler,
    Pattern,
    Route,
    annotations_of,
    check_signature,
    compile_pattern,
    handler_of,
    split,
)
from limpet.errors import UsageError
from limpet.record import BESIDE, RecordType, record_type
from limpet.schedule import Schedule
from limpet.scope import SCOPES
from limpet.settings import Settings, documented
from limpet.url import KeyProfile, SiteRule
from limpet.url_tables import host_glob

if TYPE_CHECKING:
    from limpet.engine.report import Report

ScopeKind = Literal["host", "domain", "prefix", "any"]

#: Characters of a table's name, which its view and its index have with an ending: PostgreSQL cuts off what is longer than 63 in
#: silence, MySQL takes 64.
TABLE_CHARS_MAX = 63 - max(map(len, BESIDE))
#: Tables that nobody can have: staging tables of Limpet's sessions, and what databases keep for themselves.
_RESERVED = re.compile(r"stage_(link|try|key|id)|(sqlite|pg)_\w*")
#: Half of that, so that the type's name has room.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,29}")

HandlerFunction = TypeVar("HandlerFunction", bound=Callable[..., object])
StartFunction = TypeVar("StartFunction", bound=Callable[..., AsyncIterator[Any]])


class Spider:
    """Starts, scope, key, limits and handlers of one kind of crawl.

    `scope` says which links are followed: those on the `host` (or registrable `domain`) of the page
    that holds them or of a start, those below a start's folder (`prefix`), or `any`; `hosts` names
    further ones ("*.example.com"). `key` is the profile that decides which URLs are the same page,
    with `key_options` and `rules`. Every other keyword is a field of `limpet.settings.Settings`.
    """

    def __init__(
        self,
        name: str,
        *,
        start: Iterable[str] = (),
        user_agent: str = "",
        scope: ScopeKind = "host",
        hosts: Sequence[str] = (),
        key: str = "standard",
        key_options: Mapping[str, bool] = MappingProxyType({}),
        rules: Sequence[SiteRule] = (),
        records: Sequence[type] = (),
        **settings: object,
    ) -> None:
        _check_description(name, scope, start=start, hosts=hosts)
        self.name = name
        self.starts = start
        self.user_agent = user_agent
        self.scope: ScopeKind = scope
        self.hosts = tuple(hosts)
        self.profile = KeyProfile.of(key, rules=rules, **key_options)
        self.settings = checked_settings(f"spider {name}", settings)
        self.params: dict[str, str] = {}
        self.schedule: Schedule | None = None
        self._records = tuple(records)
        self.generators: list[Callable[..., Any]] = []
        self.last_words: Handler | None = None
        self._handlers: dict[str, Handler] = {}
        self._routes: list[tuple[Pattern, Handler]] = []

    def __repr__(self) -> str:
        return f"<Spider {self.name}: {len(self._handlers)} handlers>"

    def page(self, pattern: str | None = None, *, host: str | None = None) -> Callable[[HandlerFunction], HandlerFunction]:
        """Make a function the handler of the pages that a pattern takes; the first one in the file wins.

        "/p/{sku}" captures one segment, "/docs/{rest:path}" the rest; without a pattern every other page
        is taken. The function takes `page`, `tx` and its captures, by name; a capture that is annotated
        `int` takes whole numbers only. It stays an ordinary function.
        """
        if pattern is not None and not isinstance(pattern, str):
            raise UsageError(f"spider {self.name}: write @{self.name}.page(), with parentheses")

        def register(function: HandlerFunction) -> HandlerFunction:
            handler = self._handler_of(function)
            compiled = compile_pattern(pattern, host, annotations_of(function))
            check_signature(handler, pattern)
            self._check_reachable(handler, compiled)
            self._handlers[handler.name] = handler
            self._routes.append((compiled, handler))
            function.__dict__["__limpet_spiders__"] = (*spiders_of(function), self)
            return function

        return register

    def task(
        self, *, key: str | Sequence[str], cost: object = 0, tariff: Tariff | None = None
    ) -> Callable[[HandlerFunction], HandlerFunction]:
        """Make a function the handler of keyed tasks: calls, not URLs. Its signature is their schema; `key` names what tells them apart.

        The function takes its arguments by name, and `http` and `tx`. `cost` is in credits, reserved before each try; `tariff` says
        what the provider charges for. Tasks come from `tx.enqueue(call(function, ...))`, a start, or `limpet seed`.
        """

        def register(function: HandlerFunction) -> HandlerFunction:
            handler = self._handler_of(function)
            schema = schema_of(function, annotations_of(function, extras=True), key=key, cost=cost, tariff=tariff or Tariff())
            if "http" in handler.takes and not handler.is_async:
                raise UsageError(f"{handler.name}() takes http, whose calls are awaited: write `async def {handler.name}`")
            self._handlers[handler.name] = replace(handler, needs=frozenset(), schema=schema)
            function.__dict__["__limpet_spiders__"] = (*spiders_of(function), self)
            return function

        return register

    def start(self, function: StartFunction) -> StartFunction:
        """Make an async generator a start: it yields URLs, Requests and calls, and goes on where it was when it is run again.

        It takes `start` (`start.slot`, `start.params`) or nothing, and yields the same things in the same order each time.
        """
        if not inspect.isasyncgenfunction(function):
            raise UsageError(f"@{self.name}.start stands above an async generator: `async def` with `yield`; found {function!r}")
        if any(known.__name__ == function.__name__ for known in self.generators):
            raise UsageError(f"spider {self.name} has two starts named {function.__name__}")
        self.generators.append(cast("Callable[..., Any]", function))
        return cast("StartFunction", function)

    def dead(self, function: HandlerFunction) -> HandlerFunction:
        """Make a function the handler for final failures: it takes `task` and `tx`, and what it writes commits with the dead state.

        `task` has `text`, `url`, `handler`, `reason`, `detail`, `status`, `tries`, `arguments`. A task that is put back and done takes
        its records away again, and nothing else. A task that killed its worker has no such call: nobody is there to make it.
        """
        if self.last_words is not None:
            raise UsageError(f"spider {self.name} has two handlers for final failures: {self.last_words.name} and {function.__name__}")
        handler = handler_of(function)
        if unknown := handler.takes - {"task", "tx"}:
            raise UsageError(f"{handler.name}() takes {', '.join(sorted(unknown))}; a handler for final failures takes task and tx")
        self.last_words = replace(handler, needs=frozenset())
        return function

    def costs(self) -> dict[str, int]:
        """Micro-credits of a try, of each handler that costs."""
        return {name: handler.schema.cost for name, handler in self._handlers.items() if handler.schema and handler.schema.cost}

    def schema(self, name: str) -> CallSchema:
        """The schema of a handler of calls. UsageError where it is none."""
        handler = self._handlers.get(name)
        if handler is None or handler.schema is None:
            calls = ", ".join(each for each, known in self._handlers.items() if known.schema) or "none"
            raise UsageError(f"spider {self.name}: {name!r} is no handler of keyed tasks; it has {calls}")
        return handler.schema

    def every(
        self, period: str | None = None, *, at: str = "", day: str | int | None = None, cron: str = "", tz: str = "UTC"
    ) -> Callable[[HandlerFunction], HandlerFunction]:
        """Say when the spider is due: `every("day", at="00:30", tz="Asia/Shanghai")`, or `every(cron="0 3 * * 1-5")`.

        Periods are "hour" (at=":15"), "day", "week" (day="monday") and "month" (day=1). `limpet schedule` runs it, one job
        for each slot. As a decorator it returns its function unchanged.
        """
        if self.schedule is not None:
            raise UsageError(f"spider {self.name} has a schedule already: {self.schedule}")
        self.schedule = Schedule.of(period, at=at, day=day, cron=cron, tz=tz)
        return lambda function: function

    @property
    def zone(self) -> str:
        """The time zone in which its days begin: that of its schedule; "" for UTC."""
        return self.schedule.tz if self.schedule else ""

    def route(self, url: str) -> Route | None:
        """The handler and captures of a page, by its URL or key text; None where no handler takes it."""
        authority, path = split(url)
        for pattern, handler in self._routes:
            captures = pattern.match(authority, path)
            if captures is not None:
                return Route(handler, captures)
        return None

    def route_to(self, name: str, url: str) -> Route | None:
        """The named handler for a page that was sent to it, whatever else would take the page.

        Its captures come from its own patterns. None where the handler is unknown, or needs a capture
        that the URL does not give.
        """
        handler = self._handlers.get(name)
        if handler is None:
            return None
        authority, path = split(url)
        for pattern, owner in self._routes:
            captures = pattern.match(authority, path) if owner is handler else None
            if captures is not None:
                return Route(handler, captures)
        return None if handler.needs else Route(handler, {})

    def handler(self, name: str) -> Handler | None:
        """The handler of that name, or None where this release has none."""
        return self._handlers.get(name)

    def handler_names(self) -> tuple[str, ...]:
        """The names of all handlers, in file order."""
        return tuple(self._handlers)

    def functions(self) -> Iterator[Callable[..., object]]:
        """Every function that is a handler, in file order, without what decorators put around it."""
        every = [*self._handlers.values(), *([self.last_words] if self.last_words else [])]
        return (inspect.unwrap(handler.call) for handler in every)

    def record_types(self) -> dict[str, RecordType]:
        """Every record type by name: `records=`, and each @record class in the module of a handler."""
        found: dict[str, RecordType] = {}
        for cls in (*self._records, *self._records_in_modules()):
            kind = record_type(cls)
            other = found.setdefault(kind.name, kind)
            _check_table(self.name, kind.name)
            if other.cls is not kind.cls:
                raise UsageError(
                    f"spider {self.name}: {_full_name(other.cls)} and {_full_name(kind.cls)} would share "
                    f"the table {table_name(self.name, kind.name)}; give one of them another name="
                )
        for name in found:
            for beside in BESIDE:
                if name.removesuffix(beside) in found.keys() - {name}:
                    raise UsageError(
                        f"spider {self.name}: the record types {name.removesuffix(beside)} and {name} would both have "
                        f"a {table_name(self.name, name)}; give one of them another name="
                    )
        return found

    async def run(
        self,
        *,
        db: str,
        slot: str = "",
        start: Sequence[str] | None = None,
        params: Mapping[str, str] | None = None,
        **settings: object,
    ) -> Report:
        """Run the job (this spider, slot) until it is complete or stopped, and return its report.

        It goes on where an earlier run was ended, by whatever. `start` stands in for the spider's own
        starts; every other keyword is a field of `limpet.settings.Settings`, before the spider's own.
        """
        from limpet.engine.run import run

        chosen: dict[str, Any] = {**self.settings, **checked_settings(f"{self.name}.run()", settings)}
        return await run(self, db=db, slot=slot, starts=start, settings=Settings(**chosen), params=params, handle_signals=False)

    def main(self, argv: Sequence[str] | None = None) -> None:
        """The command line of this file: the same as `limpet run FILE ...`; ends the process with its exit code."""
        from limpet.cli import main

        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise UsageError(f"{self.name}.main() needs a file to run; in a prompt, `await {self.name}.run(...)`")
        raise SystemExit(main(["run", file, *(sys.argv[1:] if argv is None else argv)]))

    def _handler_of(self, function: Callable[..., object]) -> Handler:
        handler = handler_of(function)
        known = self._handlers.get(handler.name)
        if known is None:
            return handler
        if known.call is not function:
            raise UsageError(f"spider {self.name} has two handlers named {handler.name}: the queue knows them by name alone")
        return known

    def _check_reachable(self, handler: Handler, pattern: Pattern) -> None:
        for earlier, owner in self._routes:
            if earlier.takes_all or (earlier.path, earlier.host) == (pattern.path, pattern.host):
                raise UsageError(
                    f"spider {self.name}: {handler.name}() can never be reached, since {owner.name}() above it takes "
                    f"{'every page' if earlier.takes_all else f'the same pages ({earlier.path!r})'}; the first in the file wins"
                )

    def _records_in_modules(self) -> Iterator[type]:
        for names in {id(g): g for g in (getattr(f, "__globals__", {}) for f in self.functions())}.values():
            yield from (value for value in list(names.values()) if isinstance(value, type) and "__limpet_record__" in vars(value))


def _check_description(name: object, scope: str, *, start: object, hosts: Sequence[str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"spider name {name!r}: expected a-z, 0-9 and _, beginning with a letter, at most 30 characters")
    if scope not in SCOPES:
        raise UsageError(f"spider {name}: scope {scope!r}; expected one of {', '.join(SCOPES)}")
    for option, value in (("start", start), ("hosts", hosts)):
        if isinstance(value, (str, bytes)):
            raise UsageError(f"spider {name}: {option} takes several; write {option}=[{value!r}]")
    if not isinstance(start, Iterable):
        raise UsageError(f"spider {name}: start is {start!r:.200}; expected a list of URLs")
    for each in start if isinstance(start, Collection) else ():  # what is made as it is read is looked at then
        check_start(name, each)
    for host in hosts:
        host_glob(host)


def check_start(spider: object, start: object) -> None:
    """UsageError for a start that is no text."""
    if not isinstance(start, str):
        raise UsageError(f"spider {spider}: start holds {start!r:.200}; expected URLs, each a str")


def table_name(spider: str, record: str) -> str:
    """The table that holds a spider's records of one type.

    >>> table_name("shop", "product")
    'shop_product'
    """
    return f"{spider}_{record}"


def _check_table(spider: str, record: str) -> None:
    """UsageError where no database, or one of them, can have the table of a record type."""
    name = table_name(spider, record)
    if len(name) > TABLE_CHARS_MAX:
        raise UsageError(f"table {name}: more than {TABLE_CHARS_MAX} characters; give the record type another name=")
    if _RESERVED.fullmatch(name):
        raise UsageError(f"table {name}: a name that databases, or Limpet, keep for themselves; give the record type another name=")


def spiders_of(function: object) -> tuple[Spider, ...]:
    """The spiders that a function is a handler of."""
    return cast("tuple[Spider, ...]", getattr(function, "__limpet_spiders__", ()))


def checked_settings(where: str, given: Mapping[str, object]) -> dict[str, object]:
    """The given settings; UsageError for an unknown name, with the nearest known one, or a value of another type."""
    known = documented()
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, 1, cutoff=0.4)
            raise UsageError(f"{where}: unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        expected = type(known[name][0])
        fits = (int, float) if expected is float else (list, tuple) if expected is tuple else (expected,)
        if not isinstance(value, fits) or (isinstance(value, bool) and expected is not bool):
            raise UsageError(f"{where}: setting {name} is {value!r}; expected {expected.__name__}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _full_name(cls: type | None) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls else "?"
