"""What the demo shop answers: every reply is decided here, from the request and the number of the attempt.

No socket and no clock: `site` brings the requests in and sends what is decided, after the delay and up to the ending
that the reply names. The counts of `Stats` are what tests and `limpet demo` judge a crawl by.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from posixpath import normpath
from typing import Literal, TextIO
from urllib.parse import parse_qsl, unquote, urlencode

from limpet.demo.catalogue import STYLE, Body, Shop

#: Seconds that a `slow` page takes beyond the latency of all pages.
SLOW_S = 0.15
#: What a throttled reply asks for, in whole seconds: the least that the header can say.
RETRY_AFTER_S = 1
#: Page bodies that are kept, so that a crawl of many kills does not pay for each page anew.
KEPT_BODIES = 20_000

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked of one host."""

    host: int
    method: str
    target: str
    closes: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What a host answers, after how long, and how the sending ends: whole, cut short, or reset half-way."""

    status: int
    body: bytes = b""
    content_type: str = "text/html; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    delay_s: float = 0.0
    ending: Literal["whole", "short", "reset"] = "whole"

    def encode(self, *, head_only: bool = False, closes: bool = False) -> bytes:
        """The bytes on the wire, were they all sent."""
        lines = [f"HTTP/1.1 {self.status} .", f"Content-Type: {self.content_type}", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += ["Connection: close"] if closes else []
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if head_only else self.body)


@dataclass(slots=True)
class Stats:
    """What a site was asked so far. `attempts` counts by address and page, whatever the spelling of the request."""

    requests: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    breaches: Counter[str] = field(default_factory=Counter)
    open_now: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)

    @property
    def repeated(self) -> int:
        """Requests beyond the first of each page."""
        return self.attempts.total() - len(self.attempts)

    def report(self) -> dict[str, object]:
        """What `/_stats` says, as JSON-able values."""
        again = Counter({page: count - 1 for page, count in self.attempts.items() if count > 1})
        return {
            "requests": self.requests,
            "pages": len(self.attempts),
            "repeated": self.repeated,
            "most_repeated": again.most_common(10),
            "breaches": self.breaches.total(),
            "peaks": dict(self.peaks),
        }


def page_of(target: str) -> tuple[str, dict[str, str]]:
    """The path and query that a request's target means: dot segments resolved, escapes decoded, the query sorted by name.

    >>> page_of("/about/.././%70/12?")
    ('/p/12', {})
    >>> page_of("/c/lamps?sort=name&page=2")
    ('/c/lamps', {'page': '2', 'sort': 'name'})
    """
    path, _, query = target.partition("?")
    return "/" + normpath(unquote(path)).lstrip("/"), dict(sorted(parse_qsl(query, keep_blank_values=True)))


@dataclass(slots=True)
class Site:
    """A shop that is being served: what it holds, what it was asked, and where requests are logged."""

    shop: Shop
    latency_s: float = 0.0
    log: TextIO | None = None
    stats: Stats = field(default_factory=Stats)
    bodies: dict[tuple[int, str, str], Body | None] = field(default_factory=dict)

    def arrived(self, request: Request) -> tuple[str, Reply]:
        """Count a request and decide its reply: the page's name in the log, and the reply."""
        path, query = page_of(request.target)
        address = self.shop.address(request.host)
        if path == "/_stats":
            only = self.stats.requests if query.get("only") == "requests" else None
            report = self.stats.report() if only is None else {"requests": only}
            return "", Reply(200, json.dumps(report).encode(), JSON)
        name = f"{address}{path}" + (f"?{urlencode(query)}" if query else "")
        self.stats.requests += 1
        self.stats.attempts[name] += 1
        self.stats.open_now[address] += 1
        self.stats.peaks[address] = max(self.stats.peaks[address], self.stats.open_now[address])
        if path.startswith("/staff/"):
            self.stats.breaches[name] += 1
        reply = self.decide(request.method, request.host, path, query, self.stats.attempts[name])
        return name, replace(reply, delay_s=reply.delay_s + self.latency_s)

    def ended(self, request: Request, name: str, arrived_at: float, status: int) -> None:
        """Note the end of a request in the log; status 0 means that the client got no whole answer."""
        if not name:
            return
        self.stats.open_now[self.shop.address(request.host)] -= 1
        if self.log:
            self.log.write(f"{arrived_at:.4f}\t{name}\t{status}\n")

    def decide(self, method: str, host: int, path: str, query: dict[str, str], attempt: int) -> Reply:
        """The reply to one request for a page, given how often the page was asked for, this time included."""
        if method not in ("GET", "HEAD"):
            return Reply(405, headers=(("Allow", "GET, HEAD"),))
        fault = self.shop.fault(host, path)
        if fault == "gone":
            return Reply(404, b"<!doctype html><title>No longer sold</title>")
        if fault == "dead":
            return Reply(500, b"<!doctype html><title>Out of order</title>")
        is_spoilt = self.shop.spoils(host, path, attempt)
        if fault == "busy" and is_spoilt:
            return Reply(503, b"<!doctype html><title>Busy</title>")
        if fault == "throttled" and is_spoilt:
            return Reply(429, b"<!doctype html><title>Too fast</title>", headers=(("Retry-After", str(RETRY_AFTER_S)),))
        reply = self._page(host, path, query)
        if fault in ("reset", "short") and is_spoilt and reply.body:
            return replace(reply, ending="reset" if fault == "reset" else "short")
        return replace(reply, delay_s=SLOW_S) if fault == "slow" else reply

    def _page(self, host: int, path: str, query: dict[str, str]) -> Reply:
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "old" and (product := _number(rest)) is not None and product < self.shop.products:
            return Reply(301, headers=(("Location", self.shop.url(product)),))
        key = (host, path, urlencode(query))
        if key not in self.bodies:
            if len(self.bodies) >= KEPT_BODIES:
                self.bodies.clear()
            self.bodies[key] = self._body(host, kind, rest, query)
        body = self.bodies[key]
        if body is None:
            return Reply(404, b"<!doctype html><title>No such page</title>")
        return Reply(200, body.content, body.content_type)

    def _body(self, host: int, kind: str, rest: str, query: dict[str, str]) -> Body | None:
        match kind, rest:
            case "", "":
                return self.shop.start_page(host)
            case "c", category:
                return self.shop.listing(host, category, _number(query.get("page", "1")) or 0)
            case "p", number if (product := _number(number)) is not None:
                is_here = product < self.shop.products and self.shop.host_of(product) == host
                return self.shop.product_page(product) if is_here else None
            case "robots.txt", "":
                return Body(b"User-agent: *\nDisallow: /staff/\n", PLAIN)
            case "style.css", "":
                return Body(STYLE.encode(), "text/css")
            case "staff", _:
                return Body(b"<!doctype html><title>Staff only</title>")
        return None


def _number(text: str) -> int | None:
    """A number in its one spelling: `07` is another page than `7`, and there is none."""
    return int(text) if text.isascii() and text.isdecimal() and str(int(text[:12])) == text else None
