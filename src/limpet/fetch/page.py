"""What a handler gets: one answer, its text, its tree and its links.

Everything is made when it is first asked for, from one lxml tree: `one` and `links` with compiled
XPath (never quadratic on a page that was tried), `css` and `xpath` with parsel's selectors on the
same tree. What the reader of a page should know about that tree is in `problems`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from cssselect import SelectorError
from lxml import etree
from multidict import CIMultiDict, CIMultiDictProxy
from parsel import Selector, SelectorList
from parsel.csstranslator import HTMLTranslator

from limpet.errors import Missing, UrlRejected, UsageError
from limpet.fetch import charset
from limpet.fetch.attributes import ATTRIBUTES_MAX, thinned
from limpet.fetch.links import Anchor, FlatLinks, anchors
from limpet.fetch.message import COMPLETE, Answer
from limpet.url import KeyProfile, canonicalise, href

__all__ = ["Anchor", "Page"]

#: Levels of libxml2's tree even with `huge_tree` (256 without, which real pages reach): it stops reading there.
DEPTH_MAX = 2048
#: Compiled selectors that are kept. A spider has dozens; one that makes them from data would grow without end.
SELECTORS_MAX = 1024
#: Characters of a selector or URL that a message repeats.
SHOWN_MAX = 200


class Page:
    """An answer as a handler sees it.

    `key_url` is the canonical text, or a function that makes it from `url`. `data` is what the task
    was enqueued with. Reading never fails for what a server may send; only `one` and `json` raise.
    """

    __slots__ = (
        "_answer",
        "_base",
        "_decoded",
        "_headers",
        "_key_url",
        "_problems",
        "_selector",
        "_tree",
        "data",
        "requested_url",
    )

    def __init__(
        self,
        answer: Answer,
        *,
        requested_url: str | None = None,
        key_url: str | Callable[[str], str] | None = None,
        data: Any = None,
    ) -> None:
        self._answer = answer
        self.requested_url = answer.url if requested_url is None else requested_url
        self._key_url = _standard_key if key_url is None else key_url
        self.data = data
        self._base: str | None = None
        self._decoded: charset.Decoded | None = None
        self._headers: CIMultiDictProxy[str] | None = None
        self._problems: list[str] = []
        self._selector: Selector | None = None
        self._tree: etree._Element | None = None

    @classmethod
    def from_html(
        cls,
        html: str | bytes,
        *,
        url: str = "http://example.com/",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        data: Any = None,
    ) -> Page:
        """A page for tests. Text is taken as UTF-8; of bytes the charset is found as usual."""
        fields = {name.lower(): value for name, value in (headers or {}).items()}
        fields.setdefault("content-type", "text/html; charset=utf-8" if isinstance(html, str) else "text/html")
        body = html.encode() if isinstance(html, str) else html
        return cls(Answer(href(url), status, tuple(fields.items()), body, verdict=COMPLETE, wire_bytes=len(body)), data=data)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, url: str, headers: Mapping[str, str] | None = None, data: Any = None) -> Page:
        """A page for tests, from a saved file."""
        return cls.from_html(Path(path).read_bytes(), url=url, headers=headers, data=data)

    # -- the answer ------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address of the answer, after redirects."""
        return self._answer.url

    @property
    def key_url(self) -> str:
        """The canonical text: the one to compare and to store, never to request."""
        if not isinstance(self._key_url, str):
            self._key_url = self._key_url(self.url)
        return self._key_url

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        """The header fields, by name in any case; the first of each name."""
        if self._headers is None:
            self._headers = CIMultiDictProxy(CIMultiDict(self._answer.headers))
        return self._headers

    @property
    def body(self) -> bytes:
        """The bytes as sent, decompressed: to be decoded again, should the charset turn out wrong."""
        return self._answer.body

    @property
    def verdict(self) -> str:
        """Whether the body is known to be whole: "complete", or "unverified" where only the connection's end says so."""
        return self._answer.verdict

    @property
    def hops(self) -> tuple[str, ...]:
        """The URLs that redirected here, oldest first."""
        return self._answer.hops

    @property
    def encoding(self) -> str:
        """The encoding by which the body was read: a WHATWG name in lower case."""
        return self._text().encoding

    @property
    def encoding_how(self) -> str:
        """Who said so: bom, header, meta, valid, detected or fallback."""
        return self._text().how

    @property
    def text(self) -> str:
        """The body as text."""
        return self._text().text

    def json(self) -> Any:
        """The body as JSON. Raises ValueError where it is none."""
        return json.loads(self.text)

    # -- the tree --------------------------------------------------------------------------

    @property
    def tree(self) -> etree._Element:
        """The root element. Anything that can be sent has one; that of an empty body is an empty `<html>`."""
        if self._tree is None:
            self._tree = self._parse()
        return self._tree

    @property
    def selector(self) -> Selector:
        """parsel's selector on the tree."""
        if self._selector is None:
            self._selector = Selector(root=self.tree, type="html", base_url=self.url)
        return self._selector

    def css(self, query: str) -> SelectorList[Selector]:
        """What a CSS selector matches, as parsel's list: `page.css("a::attr(href)").getall()`."""
        return self.selector.css(query)

    def xpath(self, query: str, **variables: Any) -> SelectorList[Selector]:
        """What an XPath matches, as parsel's list."""
        return self.selector.xpath(query, **variables)

    def one(self, query: str) -> str:
        """The text of the first match of a CSS selector, without white space around it.

        Of an element all the text inside it; of `::text` and `::attr(name)` that value. Raises Missing
        where nothing matches, and UsageError for what is no selector.
        """
        found = _compiled(query)(self.tree)
        if not found:
            raise Missing(f"{query[:SHOWN_MAX]!r} matches nothing on {self.url[:SHOWN_MAX]}")
        first: str | etree._Element = found[0]
        if not isinstance(first, str):
            first = _inner_text(first) if len(first) else first.text or ""
        return first.strip()

    @property
    def title(self) -> str:
        """The text of the first `<title>` with single spaces, "" without one."""
        first = next(self.tree.iter("title"), None)
        return "" if first is None else " ".join(_inner_text(first).split())

    @property
    def base_url(self) -> str:
        """Against what links are resolved (WHATWG HTML section 4.2.3): the first `<base href>` of http or https, else `url`."""
        if self._base is None:
            self._base = self._found_base()
        return self._base

    @property
    def is_html(self) -> bool:
        """Whether the answer is a page: by its Content-Type, without one by its first character."""
        content_type = self._answer.header("content-type")
        if content_type is None:
            return self.body.lstrip(b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n")[:1] == b"<"
        media = content_type.partition(";")[0].strip().lower()
        return media in ("text/html", "application/xhtml+xml")

    def links(self, *, nofollow: bool = False) -> list[Anchor]:
        """The links of the page, in order, `<base href>` applied; none of what is not HTML.

        With `nofollow` those are left out that the page asks not to follow: by `rel`, or all by its robots meta or header.
        """
        if not self.is_html or (nofollow and self.is_nofollow):
            return []
        tree, refused = self.tree, list[str]()  # the tree first: it tells whether it is cut
        elements = tree.iter("a", "area") if not self._is_cut() else self._flat()
        found = anchors(elements, self.base_url, self.encoding, refused.append)
        self._note("links", f"{len(refused)} are no URLs, the first {refused[0][:SHOWN_MAX]!r}" if refused else "")
        return [anchor for anchor in found if not anchor.is_nofollow] if nofollow else found

    @property
    def is_nofollow(self) -> bool:
        """Whether the page asks to follow none of its links (robots meta, X-Robots-Tag)."""
        values = [value for name, value in self._answer.headers if name.lower() == "x-robots-tag"]
        for meta in self.tree.iter("meta"):
            if (meta.get("name") or "").strip().lower() == "robots":
                values.append(meta.get("content") or "")
        return any(word.strip().lower() in ("nofollow", "none") for value in values for word in value.split(","))

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it seems: each a word, a colon and a sentence. Empty for nearly every page.

        `depth` the tree ends early, `attributes` a tag has too many, `charset` characters were replaced, `links` some are no URLs.
        """
        _ = self.tree
        return tuple(self._problems)

    # -- inside ----------------------------------------------------------------------------

    def _text(self) -> charset.Decoded:
        if self._decoded is None:
            self._decoded = charset.decode(self.body, self._answer.header("content-type"))
            damaged = self._decoded.text.count("\ufffd")
            self._note("charset", f"{damaged:,} characters are not {self._decoded.encoding}" if damaged else "")
        return self._decoded

    def _parse(self) -> etree._Element:
        """The tree; a parser of its own where its log is needed, since the shared one may be used elsewhere."""
        whole = self._source()
        source = thinned(whole)
        if source is not whole:
            self._note("attributes", f"a tag has more than {ATTRIBUTES_MAX}; of those behind, the tree has what leads on")
        parser = _PARSER if source.count(b"<") <= DEPTH_MAX else _new_parser()
        try:
            root = etree.fromstring(source, parser) if source else None
        except etree.ParserError:
            root = None
        if parser is not _PARSER and any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log):
            self._note("depth", f"the tree ends at {DEPTH_MAX:,} levels; links behind that were read without it")
        if root is None:
            return etree.Element("html")
        if root.getnext() is not None:
            _join(root)
        return root

    def _source(self) -> bytes:
        """The page in UTF-8. Read as text first: libxml2 stops, or guesses anew, where bytes and label differ."""
        decoded = self._text()
        body = self.body
        if decoded.encoding == "utf-8" and decoded.how != "bom" and "\ufffd" not in decoded.text:
            return body
        return decoded.text.encode("utf-8", "replace")

    def _is_cut(self) -> bool:
        return any(problem.startswith("depth:") for problem in self._problems)

    def _flat(self) -> list[etree._Element]:
        """Links of a page whose tree ends early."""
        parser = etree.HTMLParser(target=cast(Any, FlatLinks()), encoding="utf-8", huge_tree=True)
        return cast("list[etree._Element]", etree.fromstring(self._source(), parser))

    def _found_base(self) -> str:
        first = next((base for base in self.tree.iter("base") if base.get("href") is not None), None)
        if first is None:
            return self.url
        try:
            base = href(first.get("href") or "", base=self.url, charset=self.encoding)
        except UrlRejected:
            return self.url
        return base if base.startswith(("http://", "https://")) else self.url

    def _note(self, word: str, sentence: str) -> None:
        if sentence and not any(problem.startswith(f"{word}:") for problem in self._problems):
            self._problems.append(f"{word}: {sentence}")

    def __repr__(self) -> str:
        return f"<Page {self.status} {self.url[:SHOWN_MAX]}>"


def _join(root: etree._Element) -> None:
    """Move what stands behind `</html>` into the body, as browsers do: libxml2 makes further roots of it, out of sight."""
    body = root.find("body")
    target = root if body is None else body
    texts: list[str] = []
    for part in [part for behind in root.itersiblings("*") for part in _parts(behind)]:
        if isinstance(part, str):
            texts.append(part)
        else:
            _append_text(target, "".join(texts))
            texts.clear()
            target.append(part)
    _append_text(target, "".join(texts))


def _parts(element: etree._Element) -> Iterator[str | etree._Element]:
    """The texts and children of an element, and of a head or body in it."""
    if element.text:
        yield element.text
    for child in list(element):
        if child.tag in ("head", "body"):
            yield from _parts(child)
        else:
            yield child


def _append_text(target: etree._Element, text: str) -> None:
    if text and len(target):
        target[-1].tail = (target[-1].tail or "") + text
    elif text:
        target.text = (target.text or "") + text


def _new_parser() -> etree.HTMLParser:
    return etree.HTMLParser(encoding="utf-8", huge_tree=True)


_PARSER = _new_parser()
_inner_text: Callable[[etree._Element], str] = etree.XPath("string()", smart_strings=False)  # type: ignore[assignment]
#: A selector by tag, by class, or by both.
_SIMPLE = re.compile(r"(?=.)([a-z][a-z0-9]*)?(?:\.([A-Za-z][A-Za-z0-9_-]*))?")
#: What stands between the names of a class attribute to XPath's normalize-space.
_BLANKS = re.compile("[ \t\n\r]+")
_SELECTORS: dict[str, Callable[[etree._Element], list[Any]]] = {}
_TRANSLATOR = HTMLTranslator()
_STANDARD = KeyProfile.of()


def _compiled(query: str) -> Callable[[etree._Element], list[Any]]:
    """The first match of a CSS selector, as compiled XPath."""
    compiled = _SELECTORS.get(query)
    if compiled is None:
        if len(_SELECTORS) >= SELECTORS_MAX:
            _SELECTORS.clear()
        simple = _SIMPLE.fullmatch(query)
        try:
            path = f"({_TRANSLATOR.css_to_xpath(query)})[1]"
            compiled = cast(Callable[[etree._Element], "list[Any]"], etree.XPath(path, smart_strings=False))
        except (SelectorError, etree.XPathError) as error:
            raise UsageError(f"{query[:SHOWN_MAX]!r} is no CSS selector: {error}") from error
        _SELECTORS[query] = compiled = _walk(simple[1] or "*", simple[2] or "") if simple else compiled
    return compiled


def _walk(tag: str, name: str) -> Callable[[etree._Element], list[Any]]:
    """The first element of a tag, or of any, with a class, or with none in particular: a walk that ends there.

    What most selectors of a spider are: 2 us where XPath takes 9, and on a large page that has none still the faster.
    """

    def find(tree: etree._Element) -> list[Any]:
        for element in tree.iter(tag):
            names = element.get("class") if name else ""
            if names == name or (names and name in names and name in _BLANKS.split(names)):
                return [element]
        return []

    return find


def _standard_key(url: str) -> str:
    return canonicalise(url, _STANDARD).text
