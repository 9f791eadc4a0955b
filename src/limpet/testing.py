"""Run one handler in a test of your own: no network, no database, nothing written. `run` gives it a page, `run_call` a call.

    from limpet import Page, testing
    from shop import product

    def test_a_product_page_gives_its_record():
        page = Page.from_file("p.html", url="http://shop.example/p/1")
        ran = testing.run(product, page)
        assert ran.records == [Product(sku="1", ...)]
        assert [link.handler for link in ran.links] == ["listing"]

    def test_a_keyword_is_asked_for_once():
        ran = testing.run_call(ranks, {"keyword": "tea", "day": day}, answers={"https://api.example/serp": {"results": [...]}})
        assert [request.params["keyword"] for request in ran.requests] == ["tea"]
        assert ran.charge == testing.Charged("charged", reserved=Decimal(1), credits=Decimal(1))

The links are those that a crawl would follow: in scope, each key once. A mistake in the handler is not
raised but is what it would be in a crawl, a dead task: `outcome`, `reason`, and the traceback in `detail`;
where the spider has a handler for final failures, what that one writes is there. A mistake in the test is raised.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from limpet.batch import CREDIT, Charge, Claim, Kept, Link, Result, canonical_json
from limpet.engine.calling import Bill, Http
from limpet.engine.calls import Call, CallSchema, is_call
from limpet.engine.handle import How, handle
from limpet.engine.keyed import reason_of
from limpet.engine.lastwords import DeadTask
from limpet.engine.links import Linker
from limpet.engine.routes import Handler, Route, handler_of
from limpet.engine.spider import Spider, spiders_of
from limpet.engine.tx import Terms, Tx
from limpet.errors import FetchError, UsageError
from limpet.fetch.message import Answer, Request
from limpet.fetch.page import Page
from limpet.fetch.retry_after import asked_wait_s
from limpet.mark import Mark, decode, encode
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.task import Outcome, ShardId, TaskId, TaskKey
from limpet.url import Canonical, KeyProfile, canonicalise

#: Seconds for a handler that waits, as in a crawl; one that blocks is not interrupted in a test.
TIMEOUT_S = Settings().handler_timeout_s

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FoundLink:
    """A task that the handler asks for."""

    url: str  # what would be requested
    key_url: str  # the canonical text that tells it from other tasks
    handler: str  # the name of the one that would take it; "" where none would
    priority: int = 0
    data: object = None
    method: str = "GET"


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that a call sent, as the provider would have got it."""

    method: str
    url: str  # with its query
    params: Mapping[str, str] = field(default_factory=dict)  # the query, read; of a name that is there twice the last value
    headers: Mapping[str, str] = field(default_factory=dict)  # the handler's own, and the idempotency key by the tariff's name for it
    body: bytes = b""
    idempotency_key: str = ""  # the same for every try of the task; "" where the tariff names no header

    def json(self) -> Any:
        """The body, read as JSON. Raises ValueError."""
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Charged:
    """What a try cost, in credits. An unknown one counts as all that was reserved."""

    outcome: str  # charged | refunded | void | unknown
    reserved: Decimal
    credits: Decimal


@dataclass(frozen=True, slots=True)
class SeenMark:
    """What a try saw of an incremental sweep."""

    low: Mark
    high: Mark
    count: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What one call of a handler came to. Other outcomes than done keep nothing that it wrote."""

    records: list[Any]  # the objects that were emitted
    links: list[FoundLink]  # URLs that were followed or enqueued
    outcome: Outcome
    reason: str = ""  # "handler:KeyError"
    detail: str = ""  # the traceback
    error: BaseException | None = field(default=None, repr=False)
    dropped: Mapping[str, int] = field(default_factory=dict)  # links that are not followed, by reason
    replaced: int = 0  # records whose key had been emitted before
    calls: list[Call] = field(default_factory=list)  # that were enqueued, as `call(...)` gives them, with every argument
    tallies: Mapping[str, int] = field(default_factory=dict)
    registers: Mapping[str, object] = field(default_factory=dict)  # those that were set, with their new value
    marks: Mapping[str, SeenMark] = field(default_factory=dict)  # what was seen, by name
    requests: list[SentRequest] = field(default_factory=list)  # of a call, in the order of its `http`
    charge: Charged | None = None  # of a call that costs


#: URL -> what is answered, or a function that is asked for each request. See `run_call`.
Answers: TypeAlias = "Mapping[str, object] | Callable[[SentRequest], object]"


def run(handler: Callable[..., object], page: Page, /, **captures: object) -> Ran:
    """Call a handler, `async` or not, with a page, and return what it emitted and followed.

    Captures come from the page's URL where the handler has a pattern that takes it; those given here win.
    Raises UsageError where one is missing. No sweep was before this one, and no register was ever written.
    """
    spider = next(iter(spiders_of(handler)), None) or Spider("testing")
    here = canonicalise(page.url, spider.profile)
    route = _route(spider, handler, here, captures)
    terms = _terms(spider, here)
    claim = _claim(terms.linker.link(here))
    return _finished(_tried(route.handler, _keyed(page, spider, here), route.captures, terms, claim))


def run_call(
    handler: Callable[..., object], arguments: Mapping[str, object], /, *, answers: Answers = _NOTHING,
    params: Mapping[str, str] = _NOTHING, marks: Mapping[str, Mark] = _NOTHING, registers: Mapping[str, object] = _NOTHING,
) -> Ran:  # fmt: skip
    """Call a handler of keyed tasks with the arguments of one call, and return what it wrote, what it sent and what that cost.

    What its `http` gets is said by `answers`: by URL, with or without its query ("https://api.example/serp?day=2026-11-30"; the
    order of parameters is not significant) and, where it matters, behind a method ("POST https://api.example/places"); the
    key that says most wins. Or by a function that takes a SentRequest. An answer is what `answer(...)` gives; short for that, a str
    or bytes is a body, an int a status, anything else is JSON. An exception is raised instead of an answer, such as
    `FetchError("no answer in time", kind="timeout")`.

        ran = testing.run_call(ranks, {"keyword": "tea", "day": day}, answers={"https://api.example/serp": {"results": []}})

    `params` are `spider.params` meanwhile, `marks` what the sweeps before had reached, `registers` what is in them. Raises
    UsageError for arguments that do not fit, and for a request that nothing is said about.
    """
    spider, known, schema = _called(handler)
    terms = replace(_terms(spider), marks={name: encode(value) for name, value in marks.items()}, read_register=_reader(registers))
    link = schema.link(arguments, shards=1)
    claim, bill, provider = _claim(link), Bill(schema), _Provider(answers, schema.tariff.idempotency_header)
    http = Http(claim, bill, "testing", provider.send, _retry_after(_settings(spider)), _nothing_kept, _keep_nothing)
    given = {**schema.decode(link.payload), **({"http": http} if "http" in known.takes else {})}
    with _meanwhile(spider, params):
        ran = _finished(_tried(known, None, given, terms, claim))
    if provider.mistake is not None:
        raise provider.mistake
    return replace(ran, requests=provider.requests, charge=_charged(bill.charge(), schema.cost))


def answer(body: object = b"", *, status: int = 200, headers: Mapping[str, str] = _NOTHING) -> Answer:
    """An answer of a provider: bytes as they are, a str as UTF-8, anything else as JSON."""
    if isinstance(body, bytes):
        content, kind = body, ""
    elif isinstance(body, str):
        content, kind = body.encode(), "text/html; charset=utf-8"
    else:
        content, kind = json.dumps(body, ensure_ascii=False).encode(), "application/json"
    pairs = tuple(headers.items())
    if kind and not any(name.lower() == "content-type" for name in headers):
        pairs = (("Content-Type", kind), *pairs)
    return Answer("", status, pairs, content, wire_bytes=len(content))


# -- which handler, and on what terms -----------------------------------------------------------


def _route(spider: Spider, function: Callable[..., object], here: Canonical, captures: Mapping[str, object]) -> Route:
    name = getattr(function, "__name__", "")
    routed = spider.route_to(name, here.text)
    handler = routed.handler if routed else spider.handler(name) or handler_of(function)
    if handler.schema is not None:
        raise UsageError(f"{handler.name}() is a handler of keyed tasks, which takes no page: testing.run_call({handler.name}, {{...}})")
    known: dict[str, Any] = {**(routed.captures if routed else {}), **captures}
    if missing := handler.needs.difference(known):
        raise UsageError(f"{handler.name}() needs {', '.join(sorted(missing))}, which {here.text} does not give: pass it by name")
    if unknown := known.keys() - handler.takes:
        raise UsageError(f"{handler.name}() does not take {', '.join(sorted(unknown))}")
    return Route(handler, known)


def _called(function: Callable[..., object]) -> tuple[Spider, Handler, CallSchema]:
    name = getattr(function, "__name__", repr(function))
    for spider in spiders_of(function):
        known = spider.handler(name)
        if known is not None and known.schema is not None:
            return spider, known, known.schema
    raise UsageError(f"{name}() is no handler of keyed tasks (@spider.task(key=...)): testing.run gives a page to a handler")


def _keyed(page: Page, spider: Spider, here: Canonical) -> Page:
    """The page with the key that this spider gives it: made by hand, it has that of the standard profile."""
    if spider.profile == KeyProfile() or not isinstance(page, Page):
        return page
    return Page(page._answer, requested_url=page.requested_url, key_url=here.text, data=page.data)


def _settings(spider: Spider) -> Settings:
    return Settings(**spider.settings)  # type: ignore[arg-type]


def _terms(spider: Spider, *here: Canonical) -> Terms:
    starts = [canonicalise(url, spider.profile) for url in spider.starts] if isinstance(spider.starts, (list, tuple)) else []
    scope = Scope.of(spider.scope, [*here, *starts], hosts=spider.hosts)
    settings = _settings(spider)
    linker = Linker(spider.profile, scope, shards=1, url_bytes_max=settings.url_bytes_max)
    return replace(Terms.of(spider, linker, settings, read_register=_reader(_NOTHING)), takes_any_type=True)


def _reader(registers: Mapping[str, object]) -> Callable[[str], Coroutine[Any, Any, tuple[int, str | None]]]:
    async def read(name: str) -> tuple[int, str | None]:
        return (1, canonical_json(registers[name])) if name in registers else (0, None)

    return read


def _claim(link: Link) -> Claim:
    return Claim(
        shard=ShardId(0),
        id=TaskId(1),
        key=TaskKey(link.key),
        tries=1,
        strikes=0,
        lost=0,
        throttled=0,
        host=link.host,
        text=link.text,
        url=link.url,
        handler=link.handler,
        payload=link.payload,
        priority=0,
        depth=0,
        hops=0,
        chain=b"",
    )


@contextmanager
def _meanwhile(spider: Spider, params: Mapping[str, str]) -> Iterator[None]:
    """The spider with these parameters beside its own."""
    before = dict(spider.params)
    spider.params.update(params)
    try:
        yield
    finally:
        spider.params.clear()
        spider.params.update(before)


# -- a provider that answers as the test says ---------------------------------------------------


@dataclass(slots=True)
class _Provider:
    answers: Answers
    idempotency_header: str
    requests: list[SentRequest] = field(default_factory=list)
    mistake: BaseException | None = None  # of the test: whatever the handler made of it, it is raised in the end

    async def send(self, sent: Request, note: Callable[[], None]) -> Answer:
        """The answer to a request, noted."""
        headers = dict(sent.headers)
        key = next((value for name, value in sent.headers if name.lower() == self.idempotency_header.lower()), "")
        query = parse_qsl(sent.url.partition("#")[0].partition("?")[2], keep_blank_values=True)
        request = SentRequest(sent.method, sent.url, dict(query), headers, sent.body, key)
        self.requests.append(request)
        note()
        try:
            found = _as_answer(self.answers(request) if callable(self.answers) else _looked_up(self.answers, request), request)
        except FetchError:
            raise
        except BaseException as mistake:
            self.mistake = self.mistake or mistake
            raise
        if isinstance(found, Exception):
            raise found
        return replace(found, url=found.url or sent.url)


def _looked_up(answers: Mapping[str, object], request: SentRequest) -> object:
    """Of the keys that fit a request that which says most: its query first, then its method."""
    found: tuple[tuple[bool, bool], object] | None = None
    for key, value in answers.items():
        method, _, url = key.rpartition(" ")
        address, asks, query = url.partition("?")
        here = request.url.partition("#")[0].partition("?")
        says_most = (bool(asks), bool(method))
        if (
            method in ("", request.method)
            and address == here[0]
            and (not asks or _sorted(query) == _sorted(here[2]))
            and (found is None or says_most > found[0])
        ):
            found = says_most, value
    if found is None:
        told = ", ".join(answers) or "none"
        raise UsageError(f"{request.method} {request.url}: answers= says nothing about it; it has {told}")
    return found[1]


def _sorted(query: str) -> list[tuple[str, str]]:
    return sorted(parse_qsl(query, keep_blank_values=True))


def _as_answer(found: object, request: SentRequest) -> Answer | Exception:
    if isinstance(found, (Answer, Exception)):
        return found
    if found is None:
        raise UsageError(f"{request.method} {request.url}: None is no answer; testing.answer(None) is JSON's null")
    return answer(status=found) if isinstance(found, int) and not isinstance(found, bool) else answer(found)


def _retry_after(settings: Settings) -> Callable[[Answer], float | None]:
    return lambda found: asked_wait_s(found, datetime.now(UTC), settings.retry_after_max_s)


async def _nothing_kept(claim: Claim, request: bytes) -> None:
    return None


async def _keep_nothing(shard: int, kept: Kept) -> None:
    return None


# -- one try, and what it came to ---------------------------------------------------------------


async def _tried(handler: Handler, page: Page | None, given: Mapping[str, object], terms: Terms, claim: Claim) -> Ran:
    tx = Tx(terms, claim, page)
    ending = await handle(handler, page, tx, given, timeout_s=TIMEOUT_S)
    reason, detail, last = ending.reason if page else reason_of(ending), ending.detail, terms.spider.last_words
    if ending.outcome is Outcome.DEAD and last is not None:
        status = page.status if page else ending.error.status or 0 if isinstance(ending.error, FetchError) else 0
        task = DeadTask.of(Result(claim, Outcome.DEAD, reason=reason, detail=detail, status=status))
        tx = Tx(terms, claim, None)
        ended = await handle(last, None, tx, {"task": task} if "task" in last.takes else {}, timeout_s=TIMEOUT_S)
        if ended.kind is not How.DONE:
            detail = f"{detail}\n{last.name}() ended as {ended.kind}: {ended.reason}\n{ended.detail}"
    found = tx.links()
    return Ran(
        records=tx.records(),
        links=[_found(link, terms.spider) for link in found if not is_call(link.text)],
        outcome=ending.outcome,
        reason=reason,
        detail=detail,
        error=ending.error,
        dropped=dict(tx.dropped),
        replaced=tx.replaced,
        calls=[_call(link, terms.spider) for link in found if is_call(link.text)],
        tallies=dict(tx.tallies()),
        registers={write.name: json.loads(write.value) for write in tx.registers()},
        marks={seen.name: SeenMark(decode(seen.low), decode(seen.high), seen.count) for seen in tx.seen()},
    )


def _found(link: Link, spider: Spider) -> FoundLink:
    route = spider.route(link.text)
    name = link.handler or (route.handler.name if route else "")
    kept = json.loads(link.payload or "{}")
    return FoundLink(link.url, link.text, name, link.priority, kept.get("data"), kept.get("method", "GET"))


def _call(link: Link, spider: Spider) -> Call:
    return Call(link.handler, spider.schema(link.handler).decode(link.payload), link.priority)


def _charged(charge: Charge | None, reserved: int) -> Charged | None:
    return None if charge is None else Charged(str(charge.state), Decimal(reserved) / CREDIT, Decimal(charge.amount) / CREDIT)


def _finished(running: Coroutine[Any, Any, Ran]) -> Ran:
    """The result of a coroutine, also where the test itself runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(running)
    found: list[Ran] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(running)))
    thread.start()
    thread.join()
    return found[0]
