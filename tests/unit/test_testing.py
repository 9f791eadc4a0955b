"""`limpet.testing`: what a user's own test of a handler sees, of one that takes a page and of one that takes a call."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest

import limpet
from limpet import DeadTask, FetchError, Http, Page, Request, Retry, Skip, Spider, Tariff, Tx, call, field, places, record, testing
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


# -- calls -----------------------------------------------------------------------------------------

DAY = date(2026, 11, 30)
API = "http://api.test/v1"

rates = Spider("rates", user_agent="ratesbot/1 (+https://example.com/bot)")


@record(key="pair")
class Rate:
    pair: str
    rate: Decimal


@record(key="task")
class Lost:
    task: str
    reason: str
    status: int


@rates.task(
    key=("pair", "day"),
    cost="0.25",
    tariff=Tariff(credits_header="X-Credits", idempotency_header="Idempotency-Key", refunded=("4xx", "5xx")),
)
async def rate(pair: str, day: date, *, depth: int = 0, http: Http, tx: Tx) -> None:
    reply = await http.get(f"{API}/rate", params={"pair": pair, "day": day.isoformat()}, headers={"Accept": "application/json"})
    tx.emit(Rate(pair=pair, rate=Decimal(reply.json()["rate"])))


@rates.task(key="lat")
async def shares(lat: Annotated[Decimal, places(3)], *, http: Http, tx: Tx) -> None:
    mark, cursor = tx.mark("rows", order="desc", overlap=2), await tx.register("cursor")
    found = (await http.post(f"{API}/rows", json={"lat": str(lat), "since": mark.value, "cursor": cursor.value})).json()
    for number in found:
        mark.seen(number)
    cursor.set({"at": found[0], "of": cursor.version})
    tx.tally("rows", len(found))
    tx.enqueue(call(rate, pair="A/B", day=DAY), priority=3)
    tx.enqueue(f"{API}/about")


@rates.page("/board")
async def board(page: Page, tx: Tx) -> None:
    cursor = await tx.register("cursor")
    tx.enqueue(call(rate, pair=page.one("b"), day=DAY))
    tx.mark("boards").seen(DAY)
    tx.tally("boards")
    cursor.set([cursor.value, cursor.version])


@rates.dead
def lost(task: DeadTask, tx: Tx) -> None:
    tx.emit(Lost(task=task.text, reason=task.reason, status=task.status))


ASKED = {"pair": "A/B", "day": DAY}


def test_a_call_shows_what_it_wrote_what_it_sent_and_what_it_cost() -> None:
    """Method, URL, query, headers with the idempotency key; the money in credits."""
    ran = testing.run_call(rate, ASKED, answers={f"{API}/rate": testing.answer({"rate": "1.5"}, headers={"X-Credits": "0.1"})})
    assert (ran.outcome, ran.detail) == ("done", "")
    assert ran.records == [Rate("A/B", Decimal("1.5"))]
    (sent,) = ran.requests
    assert (sent.method, sent.url, sent.body) == ("GET", f"{API}/rate?pair=A%2FB&day=2026-11-30", b"")
    assert sent.params == {"pair": "A/B", "day": "2026-11-30"}
    assert sent.headers == {"Accept": "application/json", "Idempotency-Key": sent.idempotency_key}
    assert ran.charge == testing.Charged("charged", reserved=Decimal("0.25"), credits=Decimal("0.1"))
    again, other = (
        testing.run_call(rate, {**ASKED, "pair": pair, "depth": depth}, answers=lambda sent: {"rate": "1"}).requests[0]
        for pair, depth in (("A/B", 7), ("A/C", 0))
    )
    assert len(sent.idempotency_key) > 16
    assert again.idempotency_key == sent.idempotency_key != other.idempotency_key


def test_a_call_shows_what_it_shares_and_what_it_asks_for() -> None:
    """Tallies, registers, marks; calls with arguments as their handler will get them, apart from URLs; nothing is charged."""
    ran = testing.run_call(
        shares, {"lat": Decimal("39.90419")}, answers={f"POST {API}/rows": [44, 43, 41]}, marks={"rows": 42}, registers={"cursor": "x"}
    )
    assert ran.outcome == "done", ran.detail
    assert ran.requests[0].json() == {"lat": "39.904", "since": 40, "cursor": "x"}
    assert ran.requests[0].idempotency_key == ""
    assert ran.tallies == {"rows": 3}
    assert ran.registers == {"cursor": {"at": 44, "of": 1}}
    assert ran.marks == {"rows": testing.SeenMark(41, 44, 3)}
    assert ran.calls == [call(rate, pair="A/B", day=DAY, depth=0, priority=3)]
    assert [link.url for link in ran.links] == [f"{API}/about"]
    assert ran.charge is None
    first = testing.run_call(shares, {"lat": Decimal(1)}, answers=lambda sent: [1])
    assert first.requests[0].json() == {"lat": "1.000", "since": None, "cursor": None}
    assert first.registers == {"cursor": {"at": 1, "of": 0}}


@pytest.mark.parametrize(
    ("answers", "rate"),
    [
        ({f"{API}/rate": {"rate": "1"}}, "1"),
        ({f"{API}/rate": {"rate": "1"}, f"{API}/rate?day=2026-11-30&pair=A/B": {"rate": "2"}}, "2"),
        ({f"GET {API}/rate": {"rate": "3"}, f"POST {API}/rate": {"rate": "4"}, f"{API}/rate": {"rate": "5"}}, "3"),
        ({f"GET {API}/rate": '{"rate": "6"}', f"{API}/rate?pair=A%2FC&day=2026-11-30": {"rate": "7"}}, "6"),
        (lambda sent: b'{"rate": "8%s"}' % sent.params["day"][:4].encode(), "82026"),
    ],
)
def test_of_the_answers_that_are_given_the_one_that_says_most_counts(answers: testing.Answers, rate: str) -> None:
    """By URL, by URL and query in any order and spelling, by method, or by a function; text, bytes and JSON."""
    ran = testing.run_call(globals()["rate"], ASKED, answers=answers)
    assert ran.records == [Rate("A/B", Decimal(rate))]


@pytest.mark.parametrize(
    ("answered", "outcome", "reason", "charged", "status"),
    [
        (404, Outcome.SKIPPED, "gone", "refunded", None),
        (429, Outcome.THROTTLED, "status 429", "refunded", None),
        (503, Outcome.FAILED, "status 503", "refunded", None),
        (402, Outcome.DEAD, "status 402", "refunded", 402),
        (FetchError("slow", kind="timeout"), Outcome.FAILED, "timeout", "unknown", None),
        (FetchError("cut", kind="reset"), Outcome.FAILED, "reset", "unknown", None),
        (FetchError("no", kind="bad_request", retryable=False), Outcome.DEAD, "bad request", "void", 0),
        ({"price": 1}, Outcome.DEAD, "handler:KeyError", "charged", 0),
    ],
)
def test_what_a_provider_refuses_ends_as_in_a_run(
    answered: object, outcome: Outcome, reason: str, charged: str, status: int | None
) -> None:
    """By the status and by the tariff; nothing is kept, but for what the handler for final failures writes of a dead task."""
    ran = testing.run_call(rate, ASKED, answers={f"{API}/rate": answered})
    assert (ran.outcome, ran.reason) == (outcome, reason)
    text = rates.schema("rate").text(ASKED)
    assert ran.records == ([Lost(text, reason, status)] if status is not None else [])
    assert ran.charge is not None
    assert (ran.charge.outcome, ran.charge.credits > 0) == (charged, charged in ("charged", "unknown"))


def test_a_mistake_of_the_test_is_raised_whatever_the_handler_makes_of_it() -> None:
    """A request without an answer, an answer that is none, an assertion that fails in the function that answers."""
    swallowing = Spider("swallowing")

    @swallowing.task(key="n", cost=1)
    async def swallows(n: int, *, http: Http) -> None:
        try:
            await http.get(f"{API}/{n}")
        except BaseException:
            return

    def fails(sent: testing.SentRequest) -> object:
        assert sent.url == "another"
        return {}

    with pytest.raises(UsageError, match=r"GET http://api.test/v1/7: answers= says nothing about it; it has http://api.test/v1/8$"):
        testing.run_call(swallows, {"n": 7}, answers={f"{API}/8": 200})
    with pytest.raises(UsageError, match="None is no answer"):
        testing.run_call(swallows, {"n": 7}, answers=lambda sent: None)
    with pytest.raises(AssertionError, match="another"):
        testing.run_call(swallows, {"n": 7}, answers=fails)
    with pytest.raises(pytest.fail.Exception, match="by hand"):
        testing.run_call(swallows, {"n": 7}, answers=lambda sent: pytest.fail("by hand"))
    assert testing.run_call(swallows, {"n": 7}, answers=lambda sent: 500).outcome == "done"


def test_the_wrong_helper_and_arguments_that_do_not_fit_are_said() -> None:
    """Instead of a task that is dead for another reason."""
    with pytest.raises(UsageError, match="rate needs day: give it by name"):
        testing.run_call(rate, {"pair": "A/B"})
    with pytest.raises(UsageError, match="argument day is '2026-11-30': expected date, found str"):
        testing.run_call(rate, {"pair": "A/B", "day": "2026-11-30"})
    with pytest.raises(UsageError, match=r"product.. is no handler of keyed tasks"):
        testing.run_call(product, {"sku": "1"})
    with pytest.raises(UsageError, match=r"rate.. is a handler of keyed tasks, which takes no page: testing.run_call"):
        testing.run(rate, Page.from_html("", url="http://h.test/"))


def test_a_page_may_enqueue_calls_and_share_values_too() -> None:
    """Calls are not among its links; what nobody has written yet is empty."""
    ran = testing.run(board, Page.from_html("<b>A/B</b>", url="http://h.test/board"))
    assert (ran.outcome, ran.links) == ("done", [])
    assert ran.calls == [call(rate, pair="A/B", day=DAY, depth=0)]
    assert (ran.tallies, ran.registers) == ({"boards": 1}, {"cursor": [None, 0]})
    assert ran.marks == {"boards": testing.SeenMark(DAY, DAY, 1)}
    dead = testing.run(board, Page.from_html("", url="http://h.test/board"))
    assert [(one.reason, one.status) for one in dead.records] == [("handler:Missing", 200)]
    assert (dead.calls, dead.tallies) == ([], {})


def test_a_handler_for_final_failures_that_fails_leaves_its_traceback() -> None:
    """Nothing that it wrote is kept, and the task is dead for its own reason."""
    failing = Spider("failing")

    @failing.task(key="n")
    async def gives_up(n: int, *, http: Http) -> None:
        raise limpet.Dead("enough")

    @failing.dead
    def raises(task: DeadTask, tx: Tx) -> None:
        tx.emit(Lost(task=task.text, reason=task.reason, status=0))
        raise KeyError("oops")

    ran = testing.run_call(gives_up, {"n": 1})
    assert (ran.outcome, ran.reason, ran.records) == ("dead", "enough", [])
    assert "raises() ended as crashed: handler:KeyError" in ran.detail
    assert "oops" in ran.detail


# -- the examples ----------------------------------------------------------------------------------


def example(name: str, handler: str) -> tuple[Spider, Callable[..., object]]:
    """A spider of the examples, loaded by its path, and one of its handlers."""
    spider = load(ROOT / "examples" / f"{name}.py").spider
    found = spider.handler(handler)
    assert found is not None
    return spider, found.call


def test_the_rank_tracker_asks_once_for_a_keyword_and_a_day() -> None:
    """Its parameters are those of the test, and only meanwhile."""
    spider, ranks = example("serp", "ranks")
    results = [{"rank": 1, "title": "Tea", "url": "https://tea.example/"}, {"rank": 2, "title": "More", "url": "https://more.example/"}]
    ran = testing.run_call(
        ranks, {"keyword": "tea", "day": DAY}, answers={f"{API}/serp?keyword=tea&day=2026-11-30": {"results": results}},
        params={"api": f"{API}/serp"},
    )  # fmt: skip
    assert [(one.keyword, one.day, one.rank, one.url) for one in ran.records] == [
        ("tea", DAY, found["rank"], found["url"]) for found in results
    ]
    assert ran.charge == testing.Charged("charged", Decimal(1), Decimal(1))
    assert ran.requests[0].headers["Idempotency-Key"] == ran.requests[0].idempotency_key
    assert spider.params == {}


def test_the_map_collector_asks_for_a_rounded_point_and_believes_the_header() -> None:
    """39.904190 and 39.90419 are one task; a dense area costs more than was reserved."""
    _, around = example("maps", "around")
    place = {"id": "p1", "name": "A tea house", "lat": "39.9", "lng": "116.4"}

    def at(lat: str) -> testing.Ran:
        return testing.run_call(
            around, {"keyword": "tea", "lat": Decimal(lat), "lng": Decimal("116.4"), "day": DAY}, params={"api": f"{API}/places"},
            answers={f"POST {API}/places": testing.answer({"places": [place, {**place, "id": "p2"}]}, headers={"X-Credits-Charged": "3"})},
        )  # fmt: skip

    ran = at("39.90419")
    assert ran.requests[0].json() == {"keyword": "tea", "lat": "39.90419", "lng": "116.40000"}
    assert at("39.9041900").requests == ran.requests
    assert [(one.place, one.lat, one.day) for one in ran.records] == [("p1", Decimal("39.9"), DAY), ("p2", Decimal("39.9"), DAY)]
    assert ran.tallies == {"places": 2}
    assert ran.charge == testing.Charged("charged", Decimal(1), Decimal(3))


def test_the_detail_collector_enqueues_what_it_lists_and_notes_what_it_gives_up() -> None:
    """A list costs nothing; a feature that the provider refuses is in a dataset of its own."""
    spider, features = example("detail", "features")
    one = spider.handler("one")
    assert one is not None
    params = {"api": API}
    listed = {f"{API}/features?page=1": {"features": ["f1", "f2"], "more": True}, f"{API}/features": {"features": [], "more": False}}
    ran = testing.run_call(features, {"page": 1, "day": DAY}, answers=listed, params=params)
    assert ran.calls == [
        call("one", feature_id="f1", day=DAY), call("one", feature_id="f2", day=DAY), call("features", page=2, day=DAY),
    ]  # fmt: skip
    assert ran.charge is None
    assert testing.run_call(features, {"page": 2, "day": DAY}, answers=listed, params=params).calls == []
    told = {f"{API}/feature?id=f1": {"rating": "4.5", "reviews": 12}, f"{API}/feature?id=f2": 410, f"{API}/feature?id=f3": 400}
    first, gone, refused = (
        testing.run_call(one.call, {"feature_id": name, "day": DAY}, answers=told, params=params) for name in ("f1", "f2", "f3")
    )
    assert [(found.feature_id, found.rating, found.reviews) for found in first.records] == [("f1", "4.5", 12)]
    assert first.charge == testing.Charged("charged", Decimal("0.5"), Decimal("0.5"))
    assert (gone.outcome, gone.records) == ("skipped", [])
    (noted,) = refused.records
    assert (refused.outcome, noted.reason, '"feature_id":"f3"' in noted.task) == ("dead", "status 400", True)
    assert refused.charge == testing.Charged("refunded", Decimal("0.5"), Decimal(0))


def test_the_feed_reader_goes_on_below_a_page_that_is_all_new_and_no_further() -> None:
    """Down to where the last sweep ended, and ten numbers further."""
    _, orders = example("feed", "orders")

    def page(before: int, **marks: int) -> testing.Ran:
        newest = before - 1 if before else 100
        rows = [{"number": number, "item": f"item {number}"} for number in range(newest, newest - 10, -1)]
        return testing.run_call(orders, {"before": before}, answers=lambda sent: {"orders": rows}, params={"api": API}, marks=marks)

    first = page(0)
    assert (first.requests[0].url, page(91).requests[0].params) == (API, {"before": "91"})
    assert (first.calls, first.marks) == ([call("orders", before=91)], {"orders": testing.SeenMark(91, 100, 10)})
    assert [one.number for one in first.records] == [*range(100, 90, -1)]
    assert page(0, orders=95).calls == [call("orders", before=91)]  # 95 less ten: 91 is still above
    assert page(91, orders=95).calls == []
    assert testing.run_call(orders, {"before": 0}, answers={API: {"orders": []}}, params={"api": API}).calls == []


def test_a_spider_file_is_its_own_command_line() -> None:
    """`python examples/shop.py ...` is `limpet run examples/shop.py ...`."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "shop.py"), "--no-such-flag"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert ran.returncode == 2
    assert "--no-such-flag" in ran.stderr


PACKAGE = Path(limpet.__file__).parent
SHOWING = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", SHOWING)
def test_examples_in_docstrings_are_true(name: str) -> None:
    """They are run, of every module that has one."""
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0
    assert found.attempted
