"""Run one handler against one page in a test of your own: no network, no database, nothing written.

    from limpet import Page, testing
    from shop import product

    def test_a_product_page_gives_its_record():
        page = Page.from_file("p.html", url="http://shop.example/p/1")
        ran = testing.run(product, page)
        assert ran.records == [Product(sku="1", ...)]
        assert [link.handler for link in ran.links] == ["listing"]

The links are those that a crawl would follow: in scope, each key once. A mistake in the handler is not
raised but is what it would be in a crawl, a dead task: `outcome`, `reason`, and the traceback in `detail`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from limpet.batch import Claim, Link
from limpet.engine.handle import Ending, handle
from limpet.engine.links import Linker
from limpet.engine.routes import Route, handler_of
from limpet.engine.spider import Spider, spiders_of
from limpet.engine.tx import Terms, Tx
from limpet.errors import UsageError
from limpet.fetch.page import Page
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.task import Outcome, ShardId, TaskId, TaskKey
from limpet.url import Canonical, KeyProfile, canonicalise

#: Seconds for a handler that waits, as in a crawl; one that blocks is not interrupted in a test.
TIMEOUT_S = Settings().handler_timeout_s


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
class Ran:
    """What one call of a handler came to. Other outcomes than done keep no records and no links."""

    records: list[Any]  # the objects that were emitted
    links: list[FoundLink]
    outcome: Outcome
    reason: str = ""  # "handler:KeyError"
    detail: str = ""  # the traceback
    error: BaseException | None = field(default=None, repr=False)
    dropped: Mapping[str, int] = field(default_factory=dict)  # links that are not followed, by reason
    replaced: int = 0  # records whose key had been emitted before


def run(handler: Callable[..., object], page: Page, /, **captures: object) -> Ran:
    """Call a handler, `async` or not, with a page, and return what it emitted and followed.

    Captures come from the page's URL where the handler has a pattern that takes it; those given here win.
    Raises UsageError where one is missing.
    """
    spider = next(iter(spiders_of(handler)), None) or Spider("testing")
    here = canonicalise(page.url, spider.profile)
    route = _route(spider, handler, here, captures)
    page = _keyed(page, spider, here)
    tx = _tx(spider, page, here)
    ending = _finished(handle(route.handler, page, tx, route.captures, timeout_s=TIMEOUT_S))
    return _ran(ending, tx, spider)


def _route(spider: Spider, function: Callable[..., object], here: Canonical, captures: Mapping[str, object]) -> Route:
    name = getattr(function, "__name__", "")
    routed = spider.route_to(name, here.text)
    handler = routed.handler if routed else spider.handler(name) or handler_of(function)
    known: dict[str, Any] = {**(routed.captures if routed else {}), **captures}
    if missing := handler.needs.difference(known):
        raise UsageError(f"{handler.name}() needs {', '.join(sorted(missing))}, which {here.text} does not give: pass it by name")
    if unknown := known.keys() - handler.takes:
        raise UsageError(f"{handler.name}() does not take {', '.join(sorted(unknown))}")
    return Route(handler, known)


def _keyed(page: Page, spider: Spider, here: Canonical) -> Page:
    """The page with the key that this spider gives it: made by hand, it has that of the standard profile."""
    if spider.profile == KeyProfile() or not isinstance(page, Page):
        return page
    return Page(page._answer, requested_url=page.requested_url, key_url=here.text, data=page.data)


def _tx(spider: Spider, page: Page, here: Canonical) -> Tx:
    starts = [canonicalise(url, spider.profile) for url in spider.starts] if isinstance(spider.starts, (list, tuple)) else []
    scope = Scope.of(spider.scope, [here, *starts], hosts=spider.hosts)
    settings = Settings(**spider.settings)  # type: ignore[arg-type]
    linker = Linker(spider.profile, scope, shards=1, url_bytes_max=settings.url_bytes_max)
    types = {kind.cls: kind for kind in spider.record_types().values() if kind.cls}
    terms = Terms(spider, linker, types, settings.record_bytes_max, settings.links_per_page_max, settings.nofollow, takes_any_type=True)
    return Tx(terms, _claim(linker.link(here)), page)


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
        handler="",
        payload="",
        priority=0,
        depth=0,
        hops=0,
        chain=b"",
    )


def _finished(running: Coroutine[Any, Any, Ending]) -> Ending:
    """The result of a coroutine, also where the test itself runs in an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(running)
    found: list[Ending] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(running)))
    thread.start()
    thread.join()
    return found[0]


def _ran(ending: Ending, tx: Tx, spider: Spider) -> Ran:
    return Ran(
        records=tx.records(),
        links=[_found(link, spider) for link in tx.links()],
        outcome=ending.outcome,
        reason=ending.reason,
        detail=ending.detail,
        error=ending.error,
        dropped=dict(tx.dropped),
        replaced=tx.replaced,
    )


def _found(link: Link, spider: Spider) -> FoundLink:
    route = spider.route(link.text)
    name = link.handler or (route.handler.name if route else "")
    kept = json.loads(link.payload or "{}")
    return FoundLink(link.url, link.text, name, link.priority, kept.get("data"), kept.get("method", "GET"))
