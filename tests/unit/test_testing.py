"""`limpet.testing.run`: what a user's own test of a handler sees."""

from __future__ import annotations

import asyncio
import doctest
import os
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import Page, Request, Retry, Skip, Spider, Tx, field, record, testing
from limpet.engine.load import load
from limpet.errors import Missing, UsageError
from limpet.task import Outcome

ROOT = Path(__file__).parents[2]
PRODUCT = """<title>alder</title><h1 class="title">alder  birch</h1><span class="sku">SKU-0000007</span>
<span class="price">12.30</span><span class="stock">4</span>
<a href="/p/8#top">8</a> <a href="/./p/8">8</a> <a href="/c/1?sort=id&amp;page=2" class="next">next</a>
<a href="/p/7">itself</a> <a href="http://other.test/">away</a> <a href="mailto:me@h.test">mail</a>"""

shop = Spider("shop", start=["http://127.0.0.1:8800/"], user_agent="shopbot/1 (+https://example.com/bot)")


@record(key="sku")
class Product:
    sku: str
    title: str
    price: Decimal
    stock: int
    url: str
    seen_at: datetime = field(volatile=True)


@shop.page("/p/{sku}")
async def product(page: Page, tx: Tx, sku: str) -> None:
    tx.emit(
        Product(
            sku=page.css(".sku::text").get() or "",
            title=page.one(".title"),
            price=Decimal(page.one(".price")),
            stock=int(page.one(".stock")),
            url=page.key_url,
            seen_at=datetime(2026, 11, 30, tzinfo=UTC),
        )
    )
    tx.follow(page.links())


@shop.page()
async def listing(page: Page, tx: Tx) -> None:
    tx.follow(page.css("a.next"), to=listing, priority=5, data={"rank": 1})


def test_the_example_of_the_design_runs_as_written() -> None:
    """Records as objects, links with the handler that will take them, each key once."""
    page = Page.from_html(PRODUCT, url="http://h.test/p/7/")
    ran = testing.run(product, page)
    assert (ran.outcome, ran.reason, ran.error) == (Outcome.DONE, "", None)
    assert ran.outcome == "done"
    assert ran.records == [
        Product("SKU-0000007", "alder  birch", Decimal("12.30"), 4, "http://h.test/p/7", datetime(2026, 11, 30, tzinfo=UTC))
    ]
    assert [(link.key_url, link.handler) for link in ran.links] == [
        ("http://h.test/p/8", "product"),
        ("http://h.test/c/1?page=2&sort=id", "listing"),
    ]
    assert ran.links[1].url == "http://h.test/c/1?sort=id&page=2"
    assert ran.dropped == {"scope": 1}


def test_links_show_what_they_carry() -> None:
    """Handler, priority, data; of a request the method."""

    def asks(page: Page, tx: Tx) -> None:
        tx.follow(page.css("a.next"), priority=5, data={"rank": 1})
        tx.enqueue(Request.post("/api", json={"q": 1}, data=[2]))

    ran = testing.run(asks, Page.from_html(PRODUCT, url="http://h.test/"))
    assert [(link.priority, link.data, link.method) for link in ran.links] == [(5, {"rank": 1}, "GET"), (0, [2], "POST")]


def test_a_page_from_a_file_and_captures_by_name(tmp_path: Path) -> None:
    """Those given win over those of the URL; a function that is nobody's handler will do."""
    seen: list[object] = []

    def takes(page: Page, sku: str, number: int = 3) -> None:
        seen.extend([page.one("h1"), sku, number])

    file = tmp_path / "p.html"
    file.write_text(PRODUCT)
    page = Page.from_file(file, url="http://h.test/p/7")
    assert testing.run(takes, page, sku="x").outcome == "done"
    assert seen == ["alder  birch", "x", 3]


@pytest.mark.parametrize(
    ("captures", "message"), [({}, "needs sku, which http://h.test/q does not give"), ({"sku": "1", "x": 2}, "does not take x")]
)
def test_captures_that_do_not_fit_are_said(captures: dict[str, Any], message: str) -> None:
    """Instead of a TypeError from inside."""
    with pytest.raises(UsageError, match=message):
        testing.run(product, Page.from_html("", url="http://h.test/q"), **captures)


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Skip("sold out"), Outcome.SKIPPED, "sold out"),
        (Retry("not yet"), Outcome.FAILED, "not yet"),
        (limpet.Blocked(), Outcome.THROTTLED, "blocked"),
        (limpet.Dead("login"), Outcome.DEAD, "login"),
        (KeyError("price"), Outcome.DEAD, "handler:KeyError"),
    ],
)
def test_other_outcomes_keep_nothing_and_say_why(error: Exception, outcome: Outcome, reason: str) -> None:
    """As in a crawl; a mistake comes with its traceback."""

    async def ends(page: Page, tx: Tx) -> None:
        tx.follow(page.links())
        raise error

    ran = testing.run(ends, Page.from_html(PRODUCT, url="http://h.test/"))
    assert (ran.outcome, ran.reason, ran.records, ran.links) == (outcome, reason, [], [])
    assert ("KeyError: 'price'" in ran.detail) is isinstance(error, KeyError)


def test_a_missing_selector_is_told_with_selector_and_url() -> None:
    """What a redesign of the site looks like."""
    ran = testing.run(product, Page.from_html("<p>new design</p>", url="http://h.test/p/7"))
    assert (ran.reason, type(ran.error)) == ("handler:Missing", Missing)
    assert "'.title'" in ran.detail
    assert "http://h.test/p/7" in ran.detail


def test_a_test_that_runs_in_an_event_loop_may_use_it_too() -> None:
    """As with pytest-asyncio."""

    async def test() -> testing.Ran:
        return testing.run(product, Page.from_html(PRODUCT, url="http://h.test/p/7"))

    assert len(asyncio.run(test()).records) == 1


def test_the_key_is_that_of_the_spiders_profile() -> None:
    """Also for a page that was made by hand."""
    exact = Spider("exact_shop", key="exact")
    seen: list[str] = []

    @exact.page()
    def keeps(page: Page) -> None:
        seen.append(page.key_url)

    testing.run(keeps, Page.from_html("", url="http://h.test/a/?b=1&a=2"))
    assert seen == ["http://h.test/a/?b=1&a=2"]


def test_the_shop_of_the_examples_reads_its_pages() -> None:
    """It is loaded by its path, as the command line does it."""
    spider = load(ROOT / "examples" / "shop.py").spider
    routes = [spider.route(f"http://127.0.0.1:8800{path}") for path in ("/p/7", "/", "/c/1?page=2")]
    assert [route.handler.name for route in routes if route] == ["product", "listing", "listing"]
    assert list(spider.record_types()) == ["product"]
    taken = spider.handler("product")
    assert taken is not None
    ran = testing.run(taken.call, Page.from_html(PRODUCT, url="http://127.0.0.1:8800/p/7"))
    shown = {name: getattr(ran.records[0], name) for name in ("url", "sku", "title", "price", "stock")}
    assert shown == {
        "url": "http://127.0.0.1:8800/p/7",
        "sku": "SKU-0000007",
        "title": "alder  birch",
        "price": Decimal("12.30"),
        "stock": 4,
    }


def test_a_spider_file_is_its_own_command_line() -> None:
    """`python examples/shop.py ...` is `limpet run examples/shop.py ...`."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "shop.py"), "--no-such-flag"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert ran.returncode == 2
    assert "--no-such-flag" in ran.stderr


@pytest.mark.parametrize("name", ["routes", "spider", "tx", "links", "request"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    """They are run."""
    module = __import__(f"limpet.engine.{name}", fromlist=["_"])
    assert doctest.testmod(module).failed == 0
