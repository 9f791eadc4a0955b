"""The built-in spider of `limpet crawl`: every page in scope becomes one record of the dataset `page`.

Its key is the page's canonical URL. What depends on the moment or on the way a page was found (when,
how deep, under which spelling) is volatile, so the dataset's digest is that of the pages alone.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime

from lxml import etree

from limpet.cli.arguments import CRAWL
from limpet.engine.spider import ScopeKind, Spider
from limpet.engine.tx import Tx
from limpet.errors import UrlRejected
from limpet.fetch.page import Page as Fetched
from limpet.record import field, record
from limpet.url import href

#: Characters of text that a record keeps: a novel has half of it. `text_cut` says where there were more.
TEXT_CHARS_MAX = 1_000_000
#: Characters of a title, a description and the like.
LINE_CHARS_MAX = 10_000
#: Bytes of a record: a body of 16 MiB grows by a third in JSON, and has the text beside it.
RECORD_BYTES_MAX = 32 * 2**20

#: Elements whose text nobody sees.
_HIDDEN = frozenset({"script", "style", "noscript", "template", "head", "svg", "iframe", "object", "select", "textarea"})
#: Elements that do not end a word; all others stand apart.
_INLINE = frozenset({
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "ins", "kbd",
    "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
})  # fmt: skip
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


@record(key="url", name="page")
class Page:
    """One page of the web, as it was answered."""

    url: str = field(doc="canonical URL: the key")
    status: int = field(doc="HTTP status")
    content_type: str = field(doc="media type, in lower case, without parameters")
    encoding: str = field(doc="encoding by which the body was read; empty where it is no text")
    title: str
    description: str = field(doc="of <meta name=description>")
    canonical: str = field(doc="address that the page itself calls canonical, absolute; recorded, never obeyed")
    language: str = field(doc="of <html lang>, else of the Content-Language header")
    text: str = field(doc="what a reader sees, a line for each block")
    text_cut: bool = field(doc=f"whether there was more text than {TEXT_CHARS_MAX:,} characters")
    words: int = field(doc="words of the text, divided by white space")
    links_out: int = field(doc="links on the page, doubles included")
    content_hash: str = field(doc="SHA-256 of the body, decompressed")
    fetched_at: datetime = field(volatile=True)
    depth: int = field(volatile=True, doc="links from a start, as it was first found")
    found_url: str = field(volatile=True, doc="spelling under which it was first found")
    answered_url: str = field(volatile=True, doc="address of the answer, after redirects")
    elapsed_ms: int = field(volatile=True, doc="from the request to the last byte")
    body: bytes | None = field(default=None, doc="the body, decompressed, with --keep body")


def pages_spider(*, scope: ScopeKind = "host", keep_body: bool = False) -> Spider:
    """The spider of `limpet crawl`."""
    spider = Spider(CRAWL, scope=scope, record_bytes_max=RECORD_BYTES_MAX)

    async def collect(page: Fetched, tx: Tx) -> None:
        links = page.links()
        tx.emit(record_of(page, depth=tx._claim.depth, links=len(links), keep_body=keep_body))
        tx.follow(links)

    spider.page()(collect)
    return spider


def record_of(page: Fetched, *, depth: int, links: int, keep_body: bool) -> Page:
    """The record of a page."""
    media = page.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_text = page.is_html or media.startswith("text/")
    text = visible_text(page.tree) if page.is_html else page.text if is_text else ""
    text = _UNSTORABLE.sub("\ufffd", text)
    kept = text[:TEXT_CHARS_MAX]
    return Page(
        url=page.key_url,
        status=page.status,
        content_type=_line(media),
        encoding=page.encoding if is_text else "",
        title=_line(page.title) if page.is_html else "",
        description=_description(page) if page.is_html else "",
        canonical=_canonical(page) if page.is_html else "",
        language=_line((page.tree.get("lang") if page.is_html else None) or page.headers.get("content-language", "")),
        text=kept,
        text_cut=len(kept) < len(text),
        words=len(text.split()),
        links_out=links,
        content_hash=hashlib.sha256(page.body).hexdigest(),
        fetched_at=datetime.now(UTC),
        depth=depth,
        found_url=_line(page.requested_url),
        answered_url=_line(page.url),
        elapsed_ms=round(page._answer.elapsed_s * 1000),
        body=page.body if keep_body else None,
    )


def visible_text(root: etree._Element) -> str:
    """What a reader of the page sees: a line for each block, single spaces, nothing of scripts and styles.

    >>> from lxml import html
    >>> visible_text(html.fromstring("<body><h1>A <b>b</b>c</h1><script>x</script><p>d<br>e</p></body>"))
    'A bc\\nd\\ne'
    """
    pieces: list[str] = []  # texts, and a NUL, which no text of a tree holds, between two blocks
    walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
    for event, element in walk:
        tag = element.tag if isinstance(element.tag, str) else ""
        edge = "" if tag in _INLINE or not tag else "\0"
        if event != "start":
            pieces += [edge, element.tail or ""]
        elif tag in _HIDDEN:
            walk.skip_subtree()
        else:
            pieces += [edge, element.text or ""]
    lines = (" ".join(line.split()) for line in "".join(pieces).split("\0"))
    return "\n".join(line for line in lines if line)


def _description(page: Fetched) -> str:
    for meta in page.tree.iter("meta"):
        if (meta.get("name") or "").strip().lower() == "description":
            return _line(meta.get("content") or "")
    return ""


def _canonical(page: Fetched) -> str:
    """The first `<link rel=canonical>` that is a URL, made absolute."""
    for link in page.tree.iter("link"):
        if "canonical" in (link.get("rel") or "").lower().split() and link.get("href"):
            try:
                return _line(href(link.get("href") or "", base=page.url, charset=page.encoding))
            except UrlRejected:
                continue
    return ""


def _line(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", " ".join(text.split())[:LINE_CHARS_MAX])
