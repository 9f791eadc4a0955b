"""The links of a page: `<a href>` and `<area href>`, in document order, as cheap as can be.

An Anchor is a view of its element: nothing is joined, split or copied before someone asks. Whoever
needs only the key hands `href`, `base` and `charset` to `limpet.url`, which remembers what it has seen.
Only http and https are links: `mailto:`, `javascript:` and the like are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import ada_url
from lxml import etree

from limpet.url import href as resolve

#: A scheme (RFC 3986 section 3.1), or the two slashes of an authority, either of which WHATWG takes in both forms.
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):|[/\\]{2}")
#: A relative reference from which the parser strips nothing: no scheme, no host, nothing to look at.
_PLAIN = re.compile(r"(?:/(?![/\\])|[?#.])[^\x00-\x20]*\Z").match
#: What the URL parser strips before it looks: C0 controls and space around, tab and line ends anywhere.
_STRIPPED = "".join(map(chr, range(0x21)))
_DROPPED = str.maketrans("", "", "\t\n\r")


class Anchor:
    """One link. `href` is as it is written, `url` what a browser would request."""

    __slots__ = ("_element", "base", "charset", "href")

    def __init__(self, href: str, base: str, charset: str, element: etree._Element) -> None:
        self.href = href
        self.base = base
        self.charset = charset
        self._element = element

    @property
    def url(self) -> str:
        """The absolute URL, with its fragment; the query is written in the page's charset."""
        return resolve(self.href, base=self.base, charset=self.charset)

    @property
    def rel(self) -> str:
        """The `rel` attribute in lower case, "" without one."""
        return (self._element.get("rel") or "").lower()

    @property
    def is_nofollow(self) -> bool:
        """Whether the page asks not to follow this link."""
        return "nofollow" in self.rel.split()

    @property
    def text(self) -> str:
        """The link's text with single spaces; for an `<area>` its `alt`."""
        if self._element.tag == "area":
            return " ".join((self._element.get("alt") or "").split())
        return " ".join("".join(map(str, self._element.itertext())).split())

    def __repr__(self) -> str:
        return f"Anchor({self.href!r})"


def anchors(elements: Iterable[etree._Element], base: str, charset: str, refused: Callable[[str], None]) -> list[Anchor]:
    """The links among `elements`. What has a scheme or host but is no URL goes to `refused`.

    A relative reference to a base of http or https always is one (WHATWG URL, basic URL parser), so it needs no look.
    """
    found = []
    for element in elements:
        href = element.get("href")
        if href is None:
            continue
        if _PLAIN(href) is None:
            is_link = _is_link(href)
            if not is_link:
                if is_link is None:
                    refused(href)
                continue
        found.append(Anchor(href, base, charset, element))
    return found


def _is_link(href: str) -> bool | None:
    """Whether a reference leads to http or https; None where it has a scheme or host, but is no URL."""
    seen = href.strip(_STRIPPED).translate(_DROPPED)
    match = _ABSOLUTE.match(seen)
    if match is None:
        return True
    scheme = match[1]
    if scheme is not None and scheme.lower() not in ("http", "https"):
        return False
    return ada_url.check_url(seen if scheme is not None else f"http:{seen}") or None


class FlatLinks:
    """A parser target that keeps the elements of links, and no tree: no depth is too much for it."""

    def __init__(self) -> None:
        self.elements: list[etree._Element] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Called by lxml for each start tag."""
        if tag in ("a", "area") and "href" in attributes:
            self.elements.append(etree.Element(tag, dict(attributes)))

    def close(self) -> list[etree._Element]:
        """Called by lxml at the end: what the parser returns."""
        return self.elements
