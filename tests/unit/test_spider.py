"""What a user writes: patterns, signatures, settings and record types, each mistake said at once."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NewType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.engine.routes import split
from limpet.engine.spider import Spider, checked_settings, spiders_of, table_name
from limpet.errors import UrlRejected, UsageError
from limpet.record import record
from limpet.url import KeyProfile, canonicalise

Sku = NewType("Sku", str)


def one_page(pattern: str | None, function: Callable[..., object], *, host: str | None = None) -> Spider:
    """A spider with one handler."""
    spider = Spider("shop")
    spider.page(pattern, host=host)(function)
    return spider


def captured(spider: Spider, url: str) -> dict[str, Any] | None:
    """The captures of the route of a URL; None where there is none."""
    route = spider.route(url)
    return None if route is None else dict(route.captures)


# Patterns.


def sku(page: object, tx: object, sku: str) -> None: ...
def number(page: object, tx: object, number: int) -> None: ...
def rest(page: object, tx: object, rest: str) -> None: ...
def year_and_slug(tx: object, slug: str, year: int) -> None: ...
def plain(page: object, tx: object) -> None: ...


def through(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> object:
        return function(*args, **kwargs)

    return inner


@through
def wrapped(page: object, tx: object, sku: str) -> None: ...


@through
async def wrapped_async(page: object, tx: object) -> None: ...


MATCHES = [
    ("/p/{sku}", sku, "http://h.test/p/1", {"sku": "1"}),
    ("/p/{sku}", sku, "http://h.test/p/1/", {"sku": "1"}),
    ("/p/{sku}", wrapped, "http://h.test/p/1/", {"sku": "1"}),
    ("/p/{sku}", sku, "http://h.test/p/1?a=/b/c", {"sku": "1"}),
    ("/p/{sku}", sku, "http://h.test/p/1#/top", {"sku": "1"}),
    ("/p/{sku}", sku, "http://h.test/p/1/reviews", None),
    ("/p/{sku}", sku, "http://h.test/p", None),
    ("/p/{sku}", sku, "http://h.test/P/1", None),
    ("/p/{sku}", sku, "http://h.test/x/p/1", None),
    ("/p/{sku}", sku, "http://h.test/%70/%31", {"sku": "1"}),
    ("/p/{sku}", sku, "http://h.test/p/a%20b", {"sku": "a b"}),
    ("/p/{sku}", sku, "http://h.test/p/a%2Fb", {"sku": "a/b"}),
    ("/p/{sku}", sku, "http://h.test/p/%E6%B5%B7", {"sku": "海"}),
    ("/p/{sku}", sku, "http://h.test/p/%e6%b5", {"sku": "%E6%B5"}),
    ("/p/{sku}", sku, "http://u:p@h.test:81/p/1", {"sku": "1"}),
    ("/p/{sku}", sku, "POST http://h.test/p/1 0123456789abcdef", {"sku": "1"}),
    ("/p/{sku}.html", sku, "http://h.test/p/a.b.html", {"sku": "a.b"}),
    ("/p/{sku}.html", sku, "http://h.test/p/a-html", None),
    ("/p/{sku}/", sku, "http://h.test/p/1", {"sku": "1"}),
    ("/p/{number}", number, "http://h.test/p/0012", {"number": 12}),
    ("/p/{number}", number, "http://h.test/p/-3", {"number": -3}),
    ("/p/{number}", number, "http://h.test/p/12a", None),
    ("/p/{number}", number, "http://h.test/p/1_000", None),
    ("/p/{number}", number, "http://h.test/p/%D9%A1", None),
    ("/p/{number}", number, "http://h.test/p/" + "9" * 4001, None),
    ("/docs/{rest:path}", rest, "http://h.test/docs/a/b", {"rest": "a/b"}),
    ("/docs/{rest:path}", rest, "http://h.test/docs", {"rest": ""}),
    ("/docs/{rest:path}", rest, "http://h.test/docs2/a", None),
    ("/docs{rest:path}", rest, "http://h.test/docs2/a", {"rest": "2/a"}),
    ("/{rest:path}", rest, "http://h.test/", {"rest": ""}),
    ("/{rest:path}", rest, "http://h.test/a/b", {"rest": "a/b"}),
    ("/{year}/{slug}", year_and_slug, "http://h.test/2026/first", {"year": 2026, "slug": "first"}),
    ("/{slug}-{year}", year_and_slug, "http://h.test/a-b-2026", {"year": 2026, "slug": "a-b"}),
    ("/a/{_}/b", plain, "http://h.test/a/x/b", {}),
    ("/a/{_}/b", plain, "http://h.test/a/b", None),
    ("/a/{_:path}", plain, "http://h.test/a/x/y", {}),
    ("/", plain, "http://h.test/", {}),
    ("/", plain, "http://h.test", {}),
    ("/", plain, "http://h.test/a", None),
    ("/café", plain, "http://h.test/caf%C3%A9", {}),
    ("/%7euser/a b", plain, "http://h.test/~user/a%20b", {}),
    ("/%7euser", plain, "http://h.test/~user", {}),
    (None, plain, "http://h.test/anything?at=all", {}),
]


@pytest.mark.parametrize(("pattern", "function", "url", "expected"), MATCHES)
def test_a_pattern_takes_the_pages_it_describes(
    pattern: str | None, function: Callable[..., object], url: str, expected: dict[str, object] | None
) -> None:
    """Segments, the rest, ints, spellings: one line a case."""
    assert captured(one_page(pattern, function), url) == expected


@pytest.mark.parametrize(
    ("host", "url", "is_taken"),
    [
        ("*.example.com", "http://a.b.example.com/", True),
        ("*.example.com", "http://example.com/", True),
        ("*.example.com", "http://badexample.com/", False),
        ("EXAMPLE.com", "http://example.com:8080/", True),
        ("example.com:8080", "http://example.com:8080/", True),
        ("example.com:8080", "http://example.com/", False),
        ("127.0.0.*", "http://127.0.0.12:8800/p", True),
        ("bücher.test", "http://xn--bcher-kva.test/", True),
        ("[::1]", "http://[::1]:8800/", True),
    ],
)
def test_a_host_pattern_takes_the_hosts_it_describes(host: str, url: str, is_taken: bool) -> None:
    """A port counts only where one is written."""
    assert (one_page(None, plain, host=host).route(url) is not None) is is_taken


def test_the_first_handler_in_the_file_wins() -> None:
    """Order of definition, not of length or of captures."""
    spider = Spider("shop")
    spider.page("/p/{sku}")(sku)
    spider.page("/p/{number}", host="h.test")(number)
    spider.page()(plain)
    names = [route.handler.name for url in ("/p/1", "/q") if (route := spider.route(f"http://h.test{url}"))]
    assert names == ["sku", "plain"]
    assert spider.handler_names() == ("sku", "number", "plain")


def test_a_page_that_no_handler_takes_has_no_route() -> None:
    """The engine says so; nothing is called instead."""
    assert one_page("/p/{sku}", sku).route("http://h.test/q") is None


def test_one_function_may_take_several_patterns() -> None:
    """It is one handler, with one name."""
    spider = Spider("shop")
    spider.page("/a/{sku}")(spider.page("/b/{sku}")(sku))
    assert captured(spider, "http://h.test/a/1") == captured(spider, "http://h.test/b/1") == {"sku": "1"}
    assert spider.handler_names() == ("sku",)


def test_a_named_handler_gets_its_captures_from_its_own_patterns() -> None:
    """What `to=` sends, also where another handler would take the page."""
    spider = Spider("shop")
    spider.page("/p/1")(plain)
    spider.page("/p/{sku}")(sku)
    route = spider.route_to("sku", "http://h.test/p/1")
    assert route is not None
    assert (route.handler.name, route.captures) == ("sku", {"sku": "1"})
    assert spider.route_to("plain", "http://h.test/anywhere") is not None
    assert spider.route_to("sku", "http://h.test/anywhere") is None
    assert spider.route_to("nobody", "http://h.test/p/1") is None


@settings(max_examples=3000)
@given(st.text(alphabet=st.sampled_from("ab/%2F3~eé |?#.-\\;"), max_size=20))
def test_every_spelling_of_a_page_has_one_route(tail: str) -> None:
    """The key and what is requested lead to one handler with the same captures, or both to none."""
    spider = Spider("shop")
    spider.page("/a/{sku}")(sku)
    spider.page("/{rest:path}")(rest)
    try:
        canonical = canonicalise("http://h.test/a/" + tail, KeyProfile())
    except UrlRejected:
        return
    assert captured(spider, canonical.text) == captured(spider, canonical.request_url)


def test_no_url_holds_the_matcher_up() -> None:
    """8 KiB of dashes against two captures in one segment come back with no match."""
    spider = one_page("/{slug}-{year}.html", year_and_slug)
    assert spider.route("http://h.test/" + "-1" * 2000) is None


def test_split_finds_authority_and_path() -> None:
    """Of URLs and of key texts."""
    assert split("http://h.test") == ("h.test", "")
    assert split("http://h.test:81?a=/b") == ("h.test:81", "")
    assert split("POST http://h.test/a/ 00ff") == ("h.test", "/a")


# Mistakes, each said when the file is loaded.


def yields(page: object, tx: object) -> Any:
    yield 1


async def yields_async(page: object, tx: object) -> Any:
    yield 1


def positional(page: object, /, tx: object) -> None: ...
def keywords(page: object, tx: object, **captures: str) -> None: ...
def a_date(page: object, tx: object, day: dataclass) -> None: ...  # type: ignore[valid-type]
def int_rest(page: object, tx: object, rest: int) -> None: ...
def typed(page: object, tx: object, sku: Sku) -> None: ...


MISTAKES = [
    ("p/{sku}", sku, "begins with '/'"),
    ("/p/{sku}?a=b", sku, "without query"),
    ("/p/{sku}", plain, "captures 'sku', which is no parameter"),
    ("/p/{skuu}", sku, "did you mean 'sku'"),
    ("/p", sku, "takes 'sku', which the pattern '/p' does not capture"),
    (None, sku, "takes 'sku', which a page without a pattern does not capture"),
    ("/{sku}/{sku}", sku, "captures 'sku' twice"),
    ("/{page}", plain, "every handler is given"),
    ("/p/{sku:int}", sku, "{sku:int} is unknown"),
    ("/{rest:path}/x", rest, "stands last"),
    ("/{rest:path}", int_rest, "is no int"),
    ("/{a}-{b}-{c}", plain, "at most 2 captures"),
    ("/{slug}{year}", year_and_slug, "with text between"),
    ("/p/{sku", sku, "brace that is no capture"),
    ("/p/{", plain, "brace that is no capture"),
    ("/{day}", a_date, "a capture is a str or an int"),
    (None, yields, "yields"),
    (None, yields_async, "yields"),
    (None, positional, "cannot be passed by its name"),
    (None, keywords, "cannot be passed by its name"),
    (None, wrapped_async, "a decorator around it is not"),
    (None, print, "a handler is a function"),
    (None, Spider, "a handler is a function"),
]


@pytest.mark.parametrize(("pattern", "function", "message"), MISTAKES)
def test_what_pattern_and_function_disagree_about_is_said_at_decoration(
    pattern: str | None, function: Callable[..., object], message: str
) -> None:
    """And the spider has no such handler."""
    spider = Spider("shop")
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace("{", r"\{")):
        spider.page(pattern)(function)
    assert spider.handler_names() == ()
    assert spider.route("http://h.test/p/1") is None


def test_a_newtype_over_str_is_a_str() -> None:
    """Annotations of captures may be as fine as the user likes."""
    assert captured(one_page("/p/{sku}", typed), "http://h.test/p/1") == {"sku": "1"}


def test_page_without_parentheses_is_said() -> None:
    """`@shop.page` would make the function disappear."""
    with pytest.raises(UsageError, match="parentheses"):
        Spider("shop").page(plain)  # type: ignore[arg-type]


def test_a_handler_that_nothing_can_reach_is_refused() -> None:
    """Behind one that takes every page, or with the same pattern as another."""
    spider = one_page(None, plain)
    with pytest.raises(UsageError, match="can never be reached"):
        spider.page("/p/{sku}")(sku)
    other = one_page("/p/{sku}", sku)
    with pytest.raises(UsageError, match="the same pages"):
        other.page("/p/{sku}")(typed)
    assert other.handler_names() == ("sku",)


def test_two_handlers_of_one_name_are_refused() -> None:
    """The queue knows them by name."""

    def make() -> Callable[..., object]:
        def twin(page: object) -> None: ...

        return twin

    spider = Spider("shop")
    spider.page("/a")(make())
    with pytest.raises(UsageError, match="two handlers named twin"):
        spider.page("/b")(make())
    assert spider.route("http://h.test/b") is None


def test_a_handler_stays_an_ordinary_function() -> None:
    """It can be called, and knows whose handler it is."""
    calls = []

    def seen(page: object, tx: object) -> None:
        calls.append((page, tx))

    spider = Spider("shop")
    assert spider.page()(seen) is seen
    seen("a page", "a tx")
    assert calls == [("a page", "a tx")]
    assert spiders_of(seen) == (spider,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "My Shop"}, "expected a-z"),
        ({"name": "s" * 31}, "at most 30"),
        ({"start": "http://h.test/"}, r"write start=\['http://h.test/'\]"),
        ({"hosts": "h.test"}, r"write hosts=\['h.test'\]"),
        ({"hosts": ["http://h.test/"]}, "host pattern"),
        ({"scope": "hosts"}, "expected one of"),
        ({"key": "strict"}, "strict"),
        ({"key_options": {"strip_wwww": True}}, "strip_wwww"),
        ({"delay": 3}, "did you mean 'delay_s'"),
        ({"concurency": 3}, "did you mean 'concurrency'"),
        ({"concurrency": "3"}, "expected int"),
        ({"concurrency": True}, "expected int"),
        ({"robots": 1}, "expected bool"),
    ],
)
def test_a_mistake_in_a_description_is_said(arguments: dict[str, Any], message: str) -> None:
    """Each names what was expected, or the nearest name."""
    with pytest.raises(UsageError, match=message):
        Spider(**{"name": "shop", **arguments})


def test_settings_are_kept_as_they_were_given() -> None:
    """An int is fine where seconds are expected, a list where several values are."""
    spider = Spider("shop", delay_s=0, concurrency=64, solo_backoff_s=[1.0, 2.0])
    assert spider.settings == {"delay_s": 0, "concurrency": 64, "solo_backoff_s": (1.0, 2.0)}
    assert checked_settings("here", {}) == {}


def test_the_key_profile_follows_from_key_and_options() -> None:
    """One function makes it, with the site rules."""
    spider = Spider("shop", key="exact", key_options={"strip_www": True})
    assert spider.profile == KeyProfile.of("exact", strip_www=True)


# Record types.


@record(key="sku")
class Product:
    sku: str


def test_every_record_class_of_a_handlers_module_is_a_dataset() -> None:
    """So a spider names its types only where they live elsewhere."""
    types = one_page(None, plain).record_types()
    assert types["product"].cls is Product
    assert table_name("shop", "product") == "shop_product"


def test_two_types_of_one_name_are_refused() -> None:
    """They would share a table."""

    def another() -> type:
        @record(key="id")
        class Product:
            id: int

        return Product

    spider = Spider("shop", records=[another()])
    spider.page()(plain)
    with pytest.raises(UsageError, match="shop_product"):
        spider.record_types()


def test_a_class_that_is_no_record_is_refused() -> None:
    """In records= only: other classes of a module are none of our business."""

    class NoRecord: ...

    with pytest.raises(UsageError, match="NoRecord"):
        Spider("shop", records=[NoRecord]).record_types()


def test_a_table_name_that_a_database_would_cut_is_refused() -> None:
    """PostgreSQL takes 63 bytes, and says nothing."""

    @record(key="id", name="t" * 50)
    class Long:
        id: int

    with pytest.raises(UsageError, match="58"):
        Spider("a_long_name_for_a_shop", records=[Long]).record_types()


def test_describing_a_spider_imports_neither_store_nor_command_line() -> None:
    """What a user's own tests load stays small."""
    code = (
        "import sys; from limpet.engine.spider import Spider; Spider('shop');"
        "sys.exit(any(m.startswith(('limpet.store', 'limpet.cli', 'aiohttp')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
