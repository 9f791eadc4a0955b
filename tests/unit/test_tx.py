"""`tx`: what it takes, what it refuses at the call, and that a late write stores nothing."""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import partial
from typing import Any

import pytest

from limpet.batch import Claim
from limpet.engine.links import Linker
from limpet.engine.request import JSON_DEPTH_MAX, PAYLOAD_BYTES_MAX, Request
from limpet.engine.spider import Spider
from limpet.engine.tx import Terms, Tx
from limpet.errors import HandlerRevoked, RecordError, UrlRejected, UsageError
from limpet.fetch.page import Page
from limpet.record import field, record
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.task import ShardId, TaskId, TaskKey
from limpet.url import KeyProfile, canonicalise, digest16, host_id, shard_of

HERE = "http://h.test/a/here"
HTML = """<base href="/b/"><a href="1">one</a> <a class="next" rel="next nofollow" href="2?y=1&amp;x=2">two</a>
<a name="top">no link</a> <a href="mailto:me@h.test">mail</a> <a href="http://other.test/">away</a>
<a href="1#again">one</a> <li class="item">3</li>"""


@record(key="sku")
class Product:
    sku: str
    stock: int = 0
    seen_at: datetime = field(default=datetime(2026, 1, 1, tzinfo=UTC), volatile=True)


def product(page: Page, tx: Tx, sku: str) -> None: ...
def listing(page: Page, tx: Tx) -> None: ...


def spider_of_two() -> Spider:
    """A product and a listing handler."""
    spider = Spider("shop")
    spider.page("/p/{sku}")(product)
    spider.page()(listing)
    return spider


def tx_of(html: str = HTML, *, depth: int = 0, depth_max: int = -1, url: str = HERE, kind: str = "host", **settings: Any) -> Tx:
    """The tx of one task on one page."""
    here = canonicalise(url, KeyProfile())
    linker = Linker(KeyProfile(), Scope.of(kind, [here]), shards=16, depth_max=depth_max)
    claim = Claim(
        shard=ShardId(0), id=TaskId(1), key=TaskKey(here.key), tries=1, strikes=0, lost=0, throttled=0, host=0,
        text=here.text, url=url, handler="", payload="", priority=0, depth=depth, hops=0, chain=b"",
    )  # fmt: skip
    return Tx(Terms.of(spider_of_two(), linker, Settings(**settings)), claim, Page.from_html(html, url=url))


def urls(tx: Tx) -> list[str]:
    """What would be requested."""
    return [link.url for link in tx.links()]


# Records.


def test_a_record_becomes_an_offer_with_its_key() -> None:
    """Frozen at the call: a later change of the object changes nothing."""
    tx = tx_of()
    thing = Product(sku="a", stock=1)
    tx.emit(thing)
    thing.stock = 2
    (offer,) = tx.offers()
    assert (offer.dataset, offer.key_text, offer.values[1]) == ("product", '["a"]', 1)
    assert tx.records() == [thing]


def test_of_two_records_with_one_key_the_last_wins_and_is_counted() -> None:
    """P33: emitting again replaces, it never appends."""
    tx = tx_of()
    for stock in (1, 2, 3):
        tx.emit(Product(sku="a", stock=stock))
    tx.emit(Product(sku="b"))
    assert [offer.values[1] for offer in tx.offers()] == [3, 0]
    assert tx.replaced == 2


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Product(sku="a\0b"), r"Product\.sku.*NUL.*http://h\.test/a/here"),
        (Product(sku="\ud800"), r"Product\.sku.*surrogate.*http://h\.test/a/here"),
        (Product(sku=7), r"Product\.sku.*http://h\.test/a/here"),  # type: ignore[arg-type]
        (Product(sku="a", stock=2**63), r"Product\.stock.*http://h\.test/a/here"),
        (Product(sku="a" * 2000), r"1,000 bytes.*http://h\.test/a/here"),
        (None, "no record type"),
        ({"sku": "a"}, "no record type"),
        (Product, "no record type"),
    ],
)
def test_a_record_that_cannot_be_stored_is_refused_at_the_call(thing: object, message: str) -> None:
    """With field and task named; nothing of it stays."""
    tx = tx_of(record_bytes_max=1000)
    with pytest.raises(RecordError, match=message):
        tx.emit(thing)
    assert (tx.offers(), tx.size, tx.replaced) == ((), 0, 0)


def test_a_record_type_without_a_table_is_refused() -> None:
    """A class that the spider's module does not hold has none."""

    @record(key="id")
    class Elsewhere:
        id: int

    tx = tx_of()
    with pytest.raises(RecordError, match=r"records=\[Elsewhere\]"):
        tx.emit(Elsewhere(id=1))
    assert tx.offers() == ()


def test_one_task_cannot_hold_more_than_a_commit_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that emits without an end dies of it, not the worker."""
    monkeypatch.setattr("limpet.engine.tx.TASK_BYTES_MAX", 10_000)
    tx = tx_of()

    def without_end() -> None:
        for number in range(10_000):
            tx.emit(Product(sku=str(number)))

    with pytest.raises(UsageError, match=r"h\.test/a/here: more than 10,000 bytes"):
        without_end()


# Links.


def test_links_of_every_form_lead_to_the_same_task() -> None:
    """Texts, anchors, elements, attributes, lists and generators of them; relative ones are joined to the base."""
    page = tx_of()._page
    forms: list[Any] = [
        "1",
        "http://h.test/b/1",
        page.css("a")[0],
        page.css("a:first-of-type"),
        page.css("a:first-of-type::attr(href)"),
        page.css("a::attr(href)")[0],
        page.links()[0],
        page.links()[:1],
        (url for url in ["1", "/b/1"]),
        [["1"], page.css("a")[:1]],
        {"1"},
    ]
    for form in forms:
        tx = tx_of()
        tx.follow(form)
        assert urls(tx) == ["http://h.test/b/1"], form
        (link,) = tx.links()
        assert (link.text, link.key) == ("http://h.test/b/1", digest16("http://h.test/b/1"))
        assert (link.host, link.shard) == (host_id("h.test"), shard_of("h.test", 16))
        assert (link.depth, link.handler, link.payload, link.priority) == (1, "", "", 0)


def test_what_is_requested_is_what_was_found_and_the_key_is_canonical() -> None:
    """The two texts of a URL."""
    tx = tx_of()
    tx.follow(tx._page.css("a.next"))
    (link,) = tx.links()
    assert (link.url, link.text) == ("http://h.test/b/2?y=1&x=2", "http://h.test/b/2?x=2&y=1")


def test_what_is_not_followed_is_counted_by_reason() -> None:
    """Out of scope, no address, no web address, a trap, too long."""
    tx = tx_of()
    tx.follow(tx._page.css("a"))
    tx.follow(["/x/x/x/x/x", "/" + "a" * 9000, "http://[", "//other.test/", "\ud800"])
    assert urls(tx) == ["http://h.test/b/1", "http://h.test/b/2?y=1&x=2"]
    assert tx.dropped == {"no_href": 1, "scheme": 1, "scope": 2, "repeated_segment": 1, "too_long": 1, "host": 1, "surrogate": 1}


def test_an_empty_selection_follows_nothing() -> None:
    """The last listing has no next page."""
    tx = tx_of()
    tx.follow(tx._page.css("a.nowhere"))
    assert tx.links() == ()
    assert tx.dropped == {}


def test_a_link_to_the_page_itself_is_no_discovery() -> None:
    """Its task exists: it is this one."""
    tx = tx_of()
    tx.follow([HERE, "/a/here/", "/a/%68ere#top"])
    tx.enqueue(HERE)
    assert tx.links() == ()


def test_the_order_of_links_is_that_of_the_page() -> None:
    """So that what a limit lets in follows from the page alone."""
    tx = tx_of()
    tx.follow([f"/{n}" for n in (3, 1, 2, 1, 3)])
    assert [link.text[-1] for link in tx.links()] == ["3", "1", "2"]


FOLLOWED_TWICE: list[tuple[list[dict[str, Any]], tuple[str, int]]] = [
    ([{}, {}], ("", 0)),
    ([{}, {"to": listing}], ("listing", 0)),
    ([{"to": listing}, {}], ("listing", 0)),
    ([{}, {"priority": 5}, {}], ("", 5)),
    ([{"priority": 5}, {"to": listing}], ("", 5)),
    ([{"priority": -5}, {}], ("", 0)),
    ([{"to": listing}, {"to": listing, "data": 1}], ("listing", 0)),
]


@pytest.mark.parametrize(("calls", "expected"), FOLLOWED_TWICE)
def test_of_two_links_with_one_key_the_one_that_says_more_stays(calls: list[dict[str, Any]], expected: tuple[str, int]) -> None:
    """Whatever the order of the calls: sooner first, then a named handler, then data."""
    tx = tx_of()
    for arguments in calls:
        tx.follow("/b/1", **arguments)
    (link,) = tx.links()
    assert (link.handler, link.priority) == expected
    assert bool(link.payload) == any("data" in arguments for arguments in calls)


def test_a_link_carries_handler_priority_and_data() -> None:
    """As canonical JSON: a queue outlives a release."""
    tx = tx_of()
    tx.follow(tx._page.css("a.next"), to=listing, priority=5, data={"rank": 1, "a": ["é", None]})
    (link,) = tx.links()
    assert (link.handler, link.priority, link.payload) == ("listing", 5, '{"data":{"a":["é",null],"rank":1}}')
    assert Request.of(link.url, link.payload).data == {"rank": 1, "a": ["é", None]}


def test_data_is_no_part_of_the_key() -> None:
    """It travels with whoever discovers the task first."""
    tx = tx_of()
    tx.follow("/b/1", data=1)
    assert tx.links()[0].key == digest16("http://h.test/b/1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": None}, "matched nothing"),
        ({"target": 7}, "not a int"),
        ({"target": b"/b/1"}, "not a bytes"),
        ({"target": {"/b/1": 1}}, "not a dict"),
        ({"target": "/b/1", "to": "nobody"}, "to=nobody: no handler of spider shop, which has product, listing"),
        ({"target": "/b/1", "to": print}, "to=print"),
        ({"target": "/b/1", "to": product}, "it needs sku, which no pattern of it captures from http://h.test/b/1"),
        ({"target": "/b/1", "priority": "high"}, "priority 'high'"),
        ({"target": "/b/1", "priority": 10**7}, "priority 10000000"),
        ({"target": "/b/1", "data": {"day": date(2026, 1, 1)}}, r"data\.day is a date"),
        ({"target": "/b/1", "data": {1: "a"}}, "key 1: expected a str"),
        ({"target": "/b/1", "data": [float("nan")]}, r"data\[0\] is nan"),
        ({"target": "/b/1", "data": {"a": "\0"}}, r"data\.a holds a NUL"),
        ({"target": "/b/1", "data": {"a": ["\ud800"]}}, r"data\.a\[0\] holds the lone surrogate U\+D800"),
        ({"target": "/b/1", "data": "x" * PAYLOAD_BYTES_MAX}, "more than 1,048,576 bytes"),
    ],
)
def test_a_mistake_in_following_is_said_at_the_call(arguments: dict[str, Any], message: str) -> None:
    """And no link of it stays."""
    tx = tx_of()
    with pytest.raises(UsageError, match=message):
        tx.follow(arguments.pop("target"), **arguments)
    assert tx.links() == ()


def test_an_element_that_leads_nowhere_is_a_mistake() -> None:
    """A selector that matches list items instead of links loses every page behind them."""
    tx = tx_of()
    with pytest.raises(UsageError, match="<li>"):
        tx.follow(tx._page.css("li.item"))


def test_data_nested_without_an_end_is_refused() -> None:
    """Before anybody's recursion limit is met."""
    deep: list[Any] = []
    for _ in range(JSON_DEPTH_MAX + 1):
        deep = [deep]
    with pytest.raises(UsageError, match="nested deeper"):
        tx_of().follow("/b/1", data=deep)


def test_depth_and_number_of_links_have_limits() -> None:
    """Counted, and the first ones of the page stay."""
    deep = tx_of(depth=3, depth_max=3)
    deep.follow(["/1", "/2"])
    deep.enqueue("/3")
    assert (deep.links(), deep.dropped) == ((), {"depth": 3})
    many = tx_of(links_per_page_max=2)
    many.follow(["/1", "/2", "/3", "/2", "/4"])
    assert (urls(many), many.dropped) == (["http://h.test/1", "http://h.test/2"], {"too_many": 3})
    with pytest.raises(UsageError, match="more than 2 links"):
        many.enqueue("/5")


def test_nofollow_is_heeded_where_it_is_asked_for() -> None:
    """Of anchors and of elements."""
    for form in ("anchors", "elements"):
        tx = tx_of(nofollow=True)
        tx.follow([a for a in tx._page.links() if "2" in a.url] if form == "anchors" else tx._page.css("a.next"))
        assert (tx.links(), tx.dropped) == ((), {"nofollow": 1})


def test_a_known_link_costs_no_second_object() -> None:
    """The memo hands out the same link to every page that has it, spelled so, at the same depth."""
    tx = tx_of()
    tx.follow("/b/1")
    other = Tx(tx._terms, tx._claim, tx._page)
    other.follow("/b/1")
    assert tx.links()[0] is other.links()[0]


def test_what_the_scope_says_depends_on_the_page_that_asks() -> None:
    """The memo of one page's answer is not another's."""
    here = tx_of()
    here.follow("http://other.test/x")
    away = tx_of(url="http://other.test/")
    shared = Tx(here._terms, away._claim, away._page)
    shared.follow("http://other.test/x")
    here.follow("http://other.test/x")
    assert (here.links(), urls(shared)) == ((), ["http://other.test/x"])


# Requests.


def test_what_is_enqueued_is_asked_for_by_itself() -> None:
    """Neither scope nor trap rule applies: somebody wants this very page."""
    tx = tx_of()
    tx.enqueue("http://other.test/x/x/x/x/x")
    tx.enqueue("3")
    assert urls(tx) == ["http://other.test/x/x/x/x/x", "http://h.test/b/3"]


def test_a_post_is_a_task_of_its_own() -> None:
    """Method and body are part of the key, headers are not."""
    tx = tx_of()
    for body in ("a", "b", "a"):
        tx.enqueue(Request.post("/api", json={"q": body}, headers={"X-Day": body}, data={"q": body}), to=listing, priority=2)
    tx.enqueue("/api")
    first, second, plain = tx.links()
    assert (first.text.split()[:2], plain.text) == (["POST", "http://h.test/api"], "http://h.test/api")
    assert len({first.key, second.key, plain.key}) == 3
    assert first.key == digest16(first.text)
    again = Request.of(first.url, first.payload)
    assert (again.method, again.body, again.data) == ("POST", b'{"q":"a"}', {"q": "a"})
    assert again.headers == (("X-Day", "a"), ("Content-Type", "application/json"))
    assert (first.handler, first.priority) == ("listing", 2)


def test_a_request_that_is_not_to_be_merged_is_a_task_of_its_own_each_time() -> None:
    """And the same try, run again, asks for the same tasks."""

    def asked() -> list[bytes]:
        tx = tx_of()
        tx.enqueue("/now", dedup=False)
        tx.enqueue(Request.get("/now", dedup=False))
        tx.enqueue("/now")
        return [link.key for link in tx.links()]

    keys = asked()
    assert len(set(keys)) == 3
    assert asked() == keys
    assert keys[2] == digest16("http://h.test/now")
    other = tx_of(url="http://h.test/a/there")
    other.enqueue("/now", dedup=False)
    assert other.links()[0].key not in keys
    assert other.links()[0].text.startswith("http://h.test/now ")


@pytest.mark.parametrize("url", ["mailto:me@h.test", "http://[", "http://h.test/" + "a" * 9000, "http://\ud800/"])
def test_a_url_that_cannot_be_requested_is_refused_at_the_call(url: str) -> None:
    """With the task named, since nobody follows it by accident."""
    tx = tx_of()
    with pytest.raises(UrlRejected, match=r"enqueued by http://h\.test/a/here"):
        tx.enqueue(url)
    assert tx.links() == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "found none"),
        ({"data": {"q": 1}}, "data= travels with the task and is not sent"),
        ({"json": 1, "body": b"x"}, "found json and body"),
        ({"body": b"", "headers": {"Bad Name": "x"}}, "Bad Name"),
        ({"body": b"", "headers": {"X": "a\r\nY: b"}}, "header X"),
        ({"body": b"", "headers": {"Host": "h"}}, "set by Limpet alone"),
        ({"json": {"a": date(2026, 1, 1)}}, r"json\.a is a date"),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused(arguments: dict[str, Any], message: str) -> None:
    """When it is made."""
    with pytest.raises(UsageError, match=message):
        Request.post("/api", **arguments)


def test_a_form_is_sent_as_fields() -> None:
    """As a browser would."""
    request = Request.post("/api", form={"q": "a b", "n": [1, 2]})
    assert request.body == b"q=a+b&n=1&n=2"
    assert request.headers == (("Content-Type", "application/x-www-form-urlencoded"),)


def test_a_plain_get_has_no_payload() -> None:
    """The usual row of the queue stays narrow."""
    assert Request("http://h.test/").payload() == ""
    assert Request.of("http://h.test/", "") == Request("http://h.test/")


# The end of a tx.


@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_late_write_raises_and_nothing_is_stored(is_revoked: bool) -> None:
    """P30: after the time-out, and after the handler has returned."""
    tx = tx_of()
    tx.emit(Product(sku="a"))
    tx.follow("/b/1")
    kept = (tx.offers(), tx.links())
    tx.revoke() if is_revoked else tx.close()
    writes = (partial(tx.emit, Product(sku="b")), partial(tx.follow, "/b/2"), partial(tx.enqueue, "/b/3"))
    for write in writes:
        with pytest.raises(HandlerRevoked, match=r"h\.test/a/here"):
            write()
    assert (tx.offers(), tx.links()) == (((), ()) if is_revoked else kept)
    assert tx.size == 0 or not is_revoked
