"""What a handler gets: text, tree, links, and a word about what is not as it seems."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import Missing, UsageError
from limpet.fetch.message import UNVERIFIED, Answer
from limpet.fetch.page import DEPTH_MAX, Anchor, Page

SHOP = """<!doctype html><html><head><title> A
  shop </title></head><body><h1 class="title">Café  <b>noir</b></h1>
<span class=price>  12.30 </span><span class="empty"></span><p id=x data-n=" 7 ">text</p>
<a class="next" href="/2?a=1&amp;b=2#f" rel="Next">next  <i>page</i></a><a name="anchor">none</a></body></html>"""


def links(html: str | bytes, *, url: str = "http://h/d/p?q", nofollow: bool = False, **headers: str) -> list[str]:
    page = Page.from_html(html, url=url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return [anchor.url for anchor in page.links(nofollow=nofollow)]


# -- one, css, xpath -----------------------------------------------------------------------


def test_one_gives_the_text_of_the_first_match() -> None:
    """Of an element all its text, of ::text and ::attr() the value; no white space around it."""
    page = Page.from_html(SHOP)
    assert page.one(".title") == "Café  noir"
    assert page.one(".title::text") == "Café"
    assert page.one("span.price") == "12.30"
    assert page.one("#x::attr(data-n)") == "7"
    assert page.one(".empty") == ""
    assert page.one("a.next, h1") == "Café  noir"


@pytest.mark.parametrize("query", [".sku", ".title::attr(id)", ".empty::text", "table td"])
def test_one_names_selector_and_url_where_nothing_matches(query: str) -> None:
    """P-like: a redesign must not store empty fields."""
    with pytest.raises(Missing, match=r"http://h/p") as caught:
        Page.from_html(SHOP, url="http://h/p").one(query)
    assert query in str(caught.value)


CLASSES = st.lists(st.sampled_from(["a", "b", "a-b", "A", "aa", " ", "\t", "\n", "\f", "\u00a0", "\x0b"]), max_size=4).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["p", "i", "div"]), CLASSES), max_size=6), st.sampled_from(["a", "a-b", "b", "A"]))
def test_a_selector_that_is_walked_to_finds_what_its_xpath_finds(elements: list[tuple[str, str]], name: str) -> None:
    """By tag, class or both, whatever blanks stand between the names of a class attribute."""
    page = Page.from_html("".join(f'<{tag} class="{names}">{n}<b>!</b></{tag}>' for n, (tag, names) in enumerate(elements)) + "<u></u>")
    for query in (f".{name}", f"p.{name}", "div", "u", f"b.{name}"):
        expected = page.css(query)
        try:
            found: str | None = page.one(query)
        except Missing:
            found = None
        assert found == (expected[0].xpath("string()").get("").strip() if expected else None)


@pytest.mark.parametrize("query", ["", "..x", "a[", "a::nope", "p:nth-child("])
def test_what_is_no_selector_is_a_usage_error_and_not_a_missing_field(query: str) -> None:
    """The spider is wrong, not the page."""
    with pytest.raises(UsageError) as caught:
        Page.from_html(SHOP).one(query)
    assert not isinstance(caught.value, Missing)


def test_css_and_xpath_are_parsels_on_the_same_tree() -> None:
    """What users know; variables too."""
    page = Page.from_html(SHOP)
    assert page.css("a::attr(href)").getall() == ["/2?a=1&b=2#f"]
    assert page.xpath("//p[@id=$id]/text()", id="x").get() == "text"
    assert page.css("h1")[0].root.getroottree() is not None
    assert page.selector.root is page.tree


def test_the_title_has_single_spaces() -> None:
    """ "" where there is none."""
    assert Page.from_html(SHOP).title == "A shop"
    assert Page.from_html("<p>x").title == ""


# -- the answer ----------------------------------------------------------------------------


def test_a_page_tells_the_three_urls_apart() -> None:
    """ARCHITECTURE.md, section 7: as found, of the answer, canonical. The key is computed when it is asked for."""
    asked: list[str] = []

    def key_of(url: str) -> str:
        asked.append(url)
        return "key of " + url

    answer = Answer("http://h/final", 203, (("Content-Type", "text/plain"), ("X-A", "1"), ("x-a", "2")), b"body", hops=("http://h/start",))
    page = Page(answer, requested_url="http://h/start", key_url=key_of, data={"rank": 1})
    assert asked == []
    assert (page.requested_url, page.url, page.key_url, page.key_url) == (
        "http://h/start",
        "http://h/final",
        "key of http://h/final",
        "key of http://h/final",
    )
    assert asked == ["http://h/final"]
    assert Page(answer, key_url="fixed").key_url == "fixed"
    assert Page(answer).key_url == "http://h/final"
    assert (page.status, page.headers["x-A"], page.body, page.data, page.hops) == (
        203,
        "1",
        b"body",
        {"rank": 1},
        ("http://h/start",),
    )


def test_the_standard_key_is_used_where_none_is_given() -> None:
    """In a user's own tests."""
    assert Page.from_html(SHOP, url="HTTP://H:80/a/../b/?").key_url == "http://h/b"


def test_json_is_read_from_the_text() -> None:
    """Of any charset; what is none raises ValueError."""
    answer = Answer("http://h/", 200, (("Content-Type", "application/json"),), '{"a": "é"}'.encode())
    assert Page(answer).json() == {"a": "é"}
    with pytest.raises(ValueError, match="Expecting"):
        Page.from_html("<p>").json()


def test_a_page_from_a_file_is_like_one_from_the_web(tmp_path: Path) -> None:
    """Its charset is found in the bytes, its links are resolved against the URL that is given."""
    path = tmp_path / "p.html"
    path.write_bytes('<meta charset=gbk><p>中文</p><a href="x">'.encode("gbk"))
    page = Page.from_file(path, url="http://h/d/p")
    assert (page.one("p"), page.encoding, page.encoding_how) == ("中文", "gbk", "meta")
    assert [anchor.url for anchor in page.links()] == ["http://h/d/x"]


def test_an_unverified_body_says_so() -> None:
    """The verdict stays with the page."""
    assert Page(Answer("http://h/", 200, verdict=UNVERIFIED)).verdict == "unverified"


# -- text and tree -------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["utf-8", "utf-16", "utf-16-le", "gb18030", "shift_jis"])
def test_tree_and_text_agree_in_every_charset(codec: str) -> None:
    """utf-16 and gb18030 come out right, also where libxml2 would read the meta tag differently."""
    html = '<html><head><meta charset="iso-8859-1"><title>日本</title></head><body><p>中日</p><a href="/日本">x</a>'
    answer = Answer("http://h/", 200, (("Content-Type", f"text/html; charset={codec.removesuffix('-le')}"),), html.encode(codec))
    page = Page(answer)
    assert (page.text, page.title, page.one("p")) == (html, "日本", "中日")
    assert page.links()[0].url == "http://h/%E6%97%A5%E6%9C%AC"
    assert page.problems == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \n",
        b"\x00",
        b"<!-- x -->",
        b"plain",
        b"<",
        b"<?xml?>",
        b"\xff\xfe",
        bytes(range(256)),
        b"<html",
        b"</p>",
        b"<!doctype html>",
    ],
)
def test_anything_that_can_be_sent_has_a_tree(body: bytes) -> None:
    """Nothing raises but what a handler asks for in vain."""
    page = Page(Answer("http://h/", 200, (("Content-Type", "text/html"),), body))
    assert page.tree.tag
    assert (page.links(), page.css(".x").getall(), page.title) == ([], [], "")
    with pytest.raises(Missing):
        page.one(".x")


def test_bad_bytes_do_not_end_the_page() -> None:
    """They are replaced and counted; what follows them is seen."""
    body = "<p>Größe, naïve".encode() + b" \xff\xfe</p><a href=/x>caf\xe9</a>"
    page = Page.from_html(body, headers={"Content-Type": "text/html; charset=utf-8"})
    assert [anchor.text for anchor in page.links()] == ["caf\ufffd"]
    assert page.problems == ("charset: 3 characters are not utf-8",)


def test_a_zero_byte_does_not_end_the_page() -> None:
    """It is U+FFFD in the tree, as in browsers."""
    page = Page.from_html(b"<p>a\x00b</p><a href=/x>y</a>")
    assert page.one("p") == "a\ufffdb"
    assert len(page.links()) == 1


@pytest.mark.parametrize("body", ["<body>", ""])
def test_what_stands_behind_the_end_is_part_of_the_page(body: str) -> None:
    """libxml2 puts it beside the root, where no selector looks; browsers show it in the body."""
    html = f"<html>{body}<a href=/1>x</a></html>text<!-- c --><a href=/2>y</a></body></html>"
    html += "<p class=late><a href=/3>z</a></html><!-- hidden -->"
    page = Page.from_html(html)
    assert [anchor.href for anchor in page.links()] == ["/1", "/2", "/3"]
    assert page.one(".late") == "z"
    assert page.css("a::attr(href)").getall() == ["/1", "/2", "/3"]
    assert page.xpath("string()").get("") == "xtextyz"


@pytest.mark.parametrize("depth", [100, 300, DEPTH_MAX - 10])
def test_deep_pages_are_read_whole(depth: int) -> None:
    """libxml2 stops at 256 levels unless told otherwise, and all that follows is lost without an error."""
    page = Page.from_html("<div>" * depth + "<a href=/deep>" + "</div>" * depth + "<a href=/after>y</a>")
    assert [anchor.href for anchor in page.links()] == ["/deep", "/after"]
    assert page.problems == ()


@pytest.mark.parametrize("depth", [DEPTH_MAX + 10, 200_000])
def test_links_below_the_deepest_level_are_found_and_the_limit_is_visible(depth: int) -> None:
    """The tree ends there, and says so; links are read again without one. In linear time."""
    html = (
        '<base href="/b/"><a href="first">' + "<div>" * depth + '<a href="deep" rel=nofollow>x</a>' + "</div>" * depth + "<a href=/after>"
    )
    started = time.process_time()
    page = Page.from_html(html, url="http://h/")
    assert [anchor.url for anchor in page.links()] == ["http://h/b/first", "http://h/b/deep", "http://h/after"]
    assert [anchor.href for anchor in page.links(nofollow=True)] == ["first", "/after"]
    assert page.problems == (f"depth: the tree ends at {DEPTH_MAX:,} levels; links behind that were read without it",)
    assert time.process_time() - started < 5


def test_a_text_of_twelve_megabytes_is_read() -> None:
    """Without `huge_tree` libxml2 stops at 10 MB of one text."""
    page = Page.from_html(b"<p>" + b"x" * 12 * 2**20 + b"</p><a href=/x>")
    assert [anchor.href for anchor in page.links()] == ["/x"]


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_any_body_gives_a_page(body: bytes) -> None:
    """Text, tree, links and problems of whatever comes; every link has a URL of http or https."""
    page = Page(Answer("http://h/", 200, (("Content-Type", "text/html"),), body))
    page.text.encode()
    assert all(anchor.url.startswith(("http://", "https://")) for anchor in page.links())
    assert all(": " in problem for problem in page.problems)


# -- links ---------------------------------------------------------------------------------


def test_links_come_in_order_with_all_that_is_known_of_them() -> None:
    """`<a href>` and `<area href>`; text with single spaces, rel in lower case."""
    page = Page.from_html(SHOP + '<map><area href="/m" alt=" the  map "></map><a href=/>home</a>', url="http://h/d/p")
    found = page.links()
    assert all(isinstance(anchor, Anchor) for anchor in found)
    assert [(anchor.href, anchor.url, anchor.rel, anchor.text) for anchor in found] == [
        ("/2?a=1&b=2#f", "http://h/2?a=1&b=2#f", "next", "next page"),
        ("/m", "http://h/m", "", "the map"),
        ("/", "http://h/", "", "home"),
    ]


@pytest.mark.parametrize(
    ("href", "url"),
    [
        ("x", "http://h/d/x"), ("./x", "http://h/d/x"), ("../x", "http://h/x"), ("/x y", "http://h/x%20y"), ("?n=1", "http://h/d/p?n=1"),
        ("#top", "http://h/d/p?q#top"), ("", "http://h/d/p?q"), ("//o/x", "http://o/x"), ("\\\\o\\x", "http://o/x"),
        ("  http://o/ ", "http://o/"), ("ht\ntp://o/", "http://o/"), ("HTTPS://O:443/a%2fb", "https://o/a%2fb"),
        ("http:x", "http://h/d/x"), ("/é|'", "http://h/%C3%A9|'"), ("a:b/c", None), ("./a:b", "http://h/d/a:b"),
        ("mailto:x@y", None), ("javascript:void(0)", None), (" JavaScript:x", None), ("java\tscript:x", None), ("tel:1", None),
        ("data:text/html,x", None), ("ftp://h/", None),
        ("http://[", None), ("//[", None), ("http://h:99999/", None), ("http://", None),
        ("https:", None), ("/" * 3 + "o", "http://o/"),
    ],
)  # fmt: skip
def test_a_link_leads_where_a_browser_would_go(href: str, url: str | None) -> None:
    """WHATWG URL; what is not http or https is no link."""
    escaped = href.replace("&", "&amp;").replace('"', "&quot;")
    assert links(f'<a href="{escaped}">x</a>') == ([url] if url else [])


def test_links_that_are_no_urls_are_counted_and_named() -> None:
    """Never a silent drop; other schemes are none of our business."""
    page = Page.from_html('<a href="http://[">a</a><a href="//h:x/">b</a><a href="mailto:a">c</a><a href="/ok">d</a>')
    assert [anchor.href for anchor in page.links()] == ["/ok"]
    assert page.problems == ("links: 2 are no URLs, the first 'http://['",)


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ('<base href="/b/">', "http://h/b/x"), ('<base target=_top><base href="//o/b/"><base href="/no/">', "http://o/b/x"),
        ('<base href="">', "http://h/d/x"), ('<base href="javascript:1">', "http://h/d/x"), ('<base href="http://[">', "http://h/d/x"),
        ('<base href="mailto:x">', "http://h/d/x"),
    ],
)  # fmt: skip
def test_the_first_usable_base_is_applied(base: str, url: str) -> None:
    """WHATWG HTML section 4.2.3; `base_url` is what links are resolved against."""
    assert links(base + "<a href=x>") == [url]
    assert Page.from_html(base, url="http://h/d/p?q").base_url == url.removesuffix("x").replace(
        "/d/", "/d/" if url != "http://h/d/x" else "/d/p?q"
    )


def test_a_query_is_written_in_the_charset_of_the_page() -> None:
    """As browsers do, and as the server expects it; the path is UTF-8 all the same."""
    html = '<meta charset=gbk><a href="/中?q=中">x</a>'.encode("gbk")
    assert links(html) == ["http://h/%E4%B8%AD?q=%D6%D0"]


def test_nofollow_leaves_out_what_the_page_asks_for() -> None:
    """By rel, by robots meta, by header; only where it is asked for."""
    html = '<a href=/1 rel="ugc NOFOLLOW">a</a><a href=/2 rel="nofollower">b</a>'
    assert links(html) == ["http://h/1", "http://h/2"]
    assert links(html, nofollow=True) == ["http://h/2"]
    for all_of_them in ("noindex, NoFollow", "none"):
        assert links(f'<meta name=Robots content="{all_of_them}">' + html, nofollow=True) == []
        assert links(html, nofollow=True, x_robots_tag=all_of_them) == []
    assert links('<meta name=robots content="noindex">' + html, nofollow=True) == ["http://h/2"]
    assert links(html, nofollow=True, x_robots_tag="otherbot: nofollow") == ["http://h/2"]


@pytest.mark.parametrize(
    ("content_type", "is_html"),
    [
        ("text/html", True), ("TEXT/HTML; charset=utf-8", True), ("application/xhtml+xml", True), ("application/json", False),
        ("text/plain", False), ("application/pdf", False), ("image/svg+xml", False), ("", False),
    ],
)  # fmt: skip
def test_only_pages_have_links(content_type: str, is_html: bool) -> None:
    """A link in a PDF's bytes or in a text is none; without a type the first character decides."""
    page = Page(Answer("http://h/", 200, (("Content-Type", content_type),), b"<a href=/x>"))
    assert (page.is_html, len(page.links())) == (is_html, int(is_html))
    assert Page(Answer("http://h/", 200, (), b"\xef\xbb\xbf \n<a href=/x>")).is_html
    assert not Page(Answer("http://h/", 200, (), b"%PDF-1.7 <a href=/x>")).is_html


@pytest.mark.parametrize(
    "html",
    ["<a href=/x>" * 20_000, "<a " * 50_000, "<div " + "a=1 " * 50_000 + ">", "&amp" * 100_000, "<" * 200_000, "<b><i>" * 40_000,
     "<table>" * 20_000, "<!--" * 50_000, "</html><p>" * 30_000, "</html>x" * 50_000, "</html>" * 50_000,
     "<a href='" + "x" * 2**20 + "'>"],
)  # fmt: skip
def test_hostile_markup_takes_linear_time(html: str) -> None:
    """A 39 kB page held another parser for 2 s."""
    started = time.process_time()
    page = Page.from_html(html)
    page.links()
    _ = page.title
    assert time.process_time() - started < 3
