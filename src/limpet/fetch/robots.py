"""robots.txt by RFC 9309: what one file allows, what an answer means, and one fetch in flight per origin.

Protego matches paths; what it and every other parser that was tried gets wrong on our table is done
in front of it: the byte order mark (without it the first group is unreadable, and everything
allowed), line ends, the groups that hold for one product token, and the size limit.

    answer                    outcome        for how long
    2xx                       parse          24 h
    4xx, redirect nowhere     allow_all      24 h
    429, 5xx, no answer       disallow_all   until a further try, with back-off; the last good file
                                             holds meanwhile, and after 30 days everything is allowed

While nothing is known nobody may ask, so `RobotsGate.rules` raises FetchError `robots_unreachable`
with the time of the next try instead of an answer: a task is put off by it, never skipped. Every
task that waits for a fetch obeys what it brings, not only the first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import quote

from protego import Protego

from limpet.errors import FetchError
from limpet.fetch.message import Answer, Request
from limpet.fetch.redirects import origin_of, target_of
from limpet.url import URL_BYTES_MAX

log = logging.getLogger(__name__)

#: Bytes of a file that count: 500 KiB is what RFC 9309 section 2.5 asks for at least.
ROBOTS_BYTES_MAX = 512_000
#: Redirects that are followed, across hosts (section 2.3.1.2: at least five).
ROBOTS_HOPS_MAX = 5
#: Seconds a file may be used (section 2.4: no more than 24 hours).
ROBOTS_TTL_S = 24 * 3600.0
#: Seconds of silence after which a site counts as having no rules (section 2.3.1.4: for example 30 days).
UNREACHABLE_MAX_S = 30 * 24 * 3600.0
#: Seconds before the second try of an unreachable file, doubled for each further one, up to the second figure.
RETRY_S = 5.0
RETRY_MAX_S = 3600.0
#: Origins whose rules are kept in memory: the oldest go first and are fetched again when they are needed.
ORIGINS_MAX = 10_000

#: What 401 and 403 stand for where the gate is strict.
FORBIDDEN = b"user-agent: *\ndisallow: /\n"

#: Spelling -> canonical name of a directive.
_NAMES = {
    **dict.fromkeys(("user-agent", "useragent", "user agent"), "user-agent"),
    "allow": "allow",
    **dict.fromkeys(("disallow", "dissallow", "dissalow", "disalow", "diasllow", "disallaw"), "disallow"),
    **dict.fromkeys(("crawl-delay", "crawl delay", "crawldelay"), "crawl-delay"),
    **dict.fromkeys(("sitemap", "sitemaps", "site-map"), "sitemap"),
}
_TOKEN = re.compile(r"[A-Za-z_-]+")
_NUMBER = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]*)?|\.[0-9]+)\Z")
_LINE_END = re.compile(r"\r\n|\n|\r")
#: What may stand in a rule as it is. The rest is escaped, so that no parser takes U+2028 for the end of a line.
_RULE_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "#")


class Outcome(StrEnum):
    """What an answer to the request for robots.txt means. The values are those that are stored."""

    PARSE = "parse"
    ALLOW_ALL = "allow_all"
    DISALLOW_ALL = "disallow_all"  # nothing is known, until a further try
    RETRY_LATER = "retry_later"  # the same, and the server itself asked to wait; kept as disallow_all


def outcome_of(status: int) -> Outcome:
    """What a final status (after redirects) means. A 3xx here is a redirect that leads nowhere: as unavailable.

    >>> outcome_of(404), outcome_of(503)
    (<Outcome.ALLOW_ALL: 'allow_all'>, <Outcome.DISALLOW_ALL: 'disallow_all'>)
    """
    if 200 <= status <= 299:
        return Outcome.PARSE
    if status == 429:
        return Outcome.RETRY_LATER
    return Outcome.ALLOW_ALL if 300 <= status <= 499 else Outcome.DISALLOW_ALL


def product_token(user_agent: str) -> str:
    """The name by which robots.txt knows us: the first product of the header (RFC 9309 section 2.2.1).

    >>> product_token("shopbot/1 (+https://example.com/bot)")
    'shopbot'
    """
    match = _TOKEN.match(user_agent.strip())
    return match[0] if match else ""


def decode(body: bytes) -> str:
    """The text of a file: cut at the size limit at a line end, without its byte order mark, bad bytes replaced.

    A rule that is cut in two is dropped, not used: its half may match more than the whole.
    """
    is_cut = len(body) > ROBOTS_BYTES_MAX
    body = body[:ROBOTS_BYTES_MAX]
    if body.startswith(b"\xef\xbb\xbf"):
        text = body[3:].decode("utf-8", "replace")
    elif body.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = body.decode("utf-16", "replace")
    else:
        text = body.decode("utf-8", "replace")
    if is_cut:
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    return text


@dataclass(frozen=True, slots=True)
class Line:
    """One directive: its canonical name and its value."""

    name: str  # user-agent | allow | disallow | crawl-delay | sitemap
    value: str


def read_lines(text: str) -> list[Line]:
    """The directives of a file, in order. What is none is passed over (section 2.2.4)."""
    lines = []
    for raw in _LINE_END.split(text):
        if (line := _read_line(raw.partition("#")[0].strip())) is not None:
            lines.append(line)
    return lines


def _read_line(text: str) -> Line | None:
    """As lenient as Protego: a missing colon and usual misspellings are taken for what they mean."""
    if not text:
        return None
    name, colon, value = text.partition(":")
    if colon and (known := _NAMES.get(" ".join(name.lower().split()))) is not None:
        return Line(known, value.strip())
    words = text.split(None, 2)
    for n in (1, 2):
        if (known := _NAMES.get(" ".join(words[:n]).lower())) is not None:
            return Line(known, text.split(None, n)[n].strip() if len(words) > n else "")
    return None


def group_for(lines: list[Line], token: str) -> list[Line]:
    """The rules of all groups that name the token (any case), else of all for `*` (section 2.2.1).

    Agents that follow each other share what follows. Only a rule ends such a list: an unknown line,
    a sitemap or a delay in between does not.
    """
    token = token.lower()
    named: list[Line] | None = None
    others: list[Line] = []
    is_ours = is_all = has_rule = False
    for line in lines:
        if line.name == "user-agent":
            if has_rule:
                is_ours = is_all = has_rule = False
            agent = _agent(line.value)
            is_all = is_all or agent == "*"
            if token and agent == token:
                is_ours, named = True, named or []
        elif line.name != "sitemap":
            has_rule = has_rule or line.name != "crawl-delay"
            if is_ours and named is not None:
                named.append(line)
            if is_all:
                others.append(line)
    return others if named is None else named


def _agent(value: str) -> str:
    if value.startswith("*") and (len(value) == 1 or value[1].isspace()):
        return "*"
    match = _TOKEN.match(value)
    return match[0].lower() if match else ""


def _escaped(value: str) -> str:
    return value if value.isascii() and value.isprintable() else quote(value, safe=_RULE_SAFE)


def crawl_delay_s(value: str) -> float | None:
    """Seconds of a Crawl-delay line; None for anything but a plain decimal number.

    >>> crawl_delay_s(".25"), crawl_delay_s("1e300"), crawl_delay_s("10s")
    (0.25, None, None)
    """
    value = value.strip()
    return float(value) if _NUMBER.match(value) else None


class Rules:
    """What one origin's robots.txt says to one product token."""

    __slots__ = ("_protego", "crawl_delay_s", "outcome", "sitemaps")

    def __init__(self, text: str, token: str, *, outcome: Outcome = Outcome.PARSE) -> None:
        lines = read_lines(text) if outcome is Outcome.PARSE else []
        group = group_for(lines, token)
        rules = [f"{line.name}: {_escaped(line.value)}" for line in group if line.name != "crawl-delay"]
        delays = [delay for line in group if line.name == "crawl-delay" and (delay := crawl_delay_s(line.value)) is not None]
        self._protego = Protego.parse("\n".join(["user-agent: *", *rules])) if rules else None
        self.outcome = outcome
        #: As the file says it; the pace cuts and reports it. The largest, where there are several.
        self.crawl_delay_s: float | None = max(delays, default=None)
        self.sitemaps = tuple(line.value for line in lines if line.name == "sitemap" and line.value)

    def allowed(self, url: str) -> bool:
        """Whether the URL may be requested. `/robots.txt` itself always may (section 2.2.2)."""
        return self._protego is None or self._protego.can_fetch(url, "limpet")


@dataclass(slots=True)
class _Entry:
    """What is known of one origin."""

    rules: Rules | None = None  # None: never reached
    body: bytes = b""
    until: float = 0.0  # on the gate's clock
    outcome: Outcome = Outcome.DISALLOW_ALL
    status: int = 0
    failures: int = 0  # in a row
    silent_since: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A fetch of robots.txt, for whoever keeps it: `preload` takes the same again."""

    origin: str
    outcome: Outcome
    status: int
    body: bytes  # UTF-8, without BOM, cut
    ttl_s: float
    reason: str  # for people; "" where all is well


def robots_request(url: str) -> Request:
    """The request for a robots.txt: any type, no more than counts."""
    return Request(url, headers=(("Accept", "text/plain,*/*;q=0.5"),), cut_bytes=ROBOTS_BYTES_MAX + 1)


@dataclass(slots=True)
class RobotsGate:
    """The rules of every origin, fetched when first asked for.

    `fetch` sends one request for a URL (`robots_request`), paced like any other, and may raise
    FetchError. `token` is our product token. `clock` gives seconds that never go back. `on_report`
    is called once for each fetch, before its waiters go on; `retry_after` reads that header of an answer.
    """

    fetch: Callable[[str], Awaitable[Answer]]
    token: str
    clock: Callable[[], float]
    on_report: Callable[[Report], None] = lambda report: None
    retry_after: Callable[[Answer], float | None] = lambda answer: None
    retry_s: float = RETRY_S
    url_bytes_max: int = URL_BYTES_MAX  # of what a redirect names
    strict: bool = False  # 401 and 403 forbid everything; RFC 9309 lets them allow it
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _flights: dict[str, asyncio.Task[_Entry]] = field(default_factory=dict)

    async def rules(self, origin: str) -> Rules:
        """The rules of `scheme://host:port`, fetched where none are fresh.

        Raises FetchError `robots_unreachable` while nothing is known, with `retry_after_s` until the
        next try and the status of the last. A waiter that is cancelled does not end the fetch of the others.
        """
        entry = self._entries.get(origin)
        if entry is None or entry.until <= self.clock():
            flight = self._flights.get(origin)
            if flight is None:
                flight = asyncio.create_task(self._refresh(origin), name=f"robots {origin}")
                self._flights[origin] = flight
                flight.add_done_callback(lambda done: self._landed(origin, done))
            entry = await asyncio.shield(flight)
        if entry.rules is None:
            raise FetchError(
                f"{origin}/robots.txt: {entry.reason}",
                kind="robots_unreachable",
                status=entry.status or None,
                retry_after_s=max(entry.until - self.clock(), 0.0),
            )
        return entry.rules

    def preload(self, origin: str, outcome: str, body: bytes, ttl_s: float, *, status: int = 0) -> None:
        """Take back what `on_report` gave to an earlier process; `ttl_s` is what is left of it. Fresher knowledge wins."""
        until = self.clock() + min(ttl_s, ROBOTS_TTL_S)
        known = self._entries.get(origin)
        if known is not None and known.until >= until:
            return
        kind = Outcome(outcome)
        usable = kind in (Outcome.PARSE, Outcome.ALLOW_ALL)
        rules = Rules(body.decode("utf-8", "replace"), self.token, outcome=kind) if usable else None
        self._remember(origin, _Entry(rules, body, until, kind, status, failures=0 if usable else 1, reason=f"status {status}"))

    async def close(self) -> None:
        """End what is in flight."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _landed(self, origin: str, flight: asyncio.Task[_Entry]) -> None:
        self._flights.pop(origin, None)
        if not flight.cancelled():
            flight.exception()  # its waiters have it; without any, nobody needs a report of it

    async def _refresh(self, origin: str) -> _Entry:
        before = self._entries.get(origin, _Entry())
        try:
            answer, met = await self._asked(f"{origin}/robots.txt")
        except FetchError as error:
            why = str(error).removeprefix(f"{origin}/robots.txt: ")  # the address is told beside it
            if error.kind == "bad_redirect":
                return self._settle(origin, Outcome.ALLOW_ALL, b"", 0, why)
            return self._silence(origin, before, error.status or 0, why, error.retry_after_s)
        status = answer.status
        if self.strict and status in (401, 403):
            return self._settle(origin, Outcome.PARSE, FORBIDDEN, status, f"status {status}")
        outcome = outcome_of(status)
        if outcome in (Outcome.DISALLOW_ALL, Outcome.RETRY_LATER):
            return self._silence(origin, before, status, f"status {status}", self.retry_after(answer))
        body = decode(answer.body).encode() if outcome is Outcome.PARSE else b""
        if met and met != origin and self._entries.get(met, _Entry()).until <= self.clock():
            # Another host's own file, met on the way: known for that host too. Any other path is not its
            # rules, or whoever redirects to it could write another site's robots.txt.
            self._settle(met, outcome, body, status, "")
        return self._settle(origin, outcome, body, status, "" if outcome is Outcome.PARSE else f"status {status}")

    async def _asked(self, url: str) -> tuple[Answer, str]:
        """The answer after at most five redirects, and the origin whose own file it is, "" for nobody's."""
        answer = await self.fetch(url)
        for _ in range(ROBOTS_HOPS_MAX):
            target = target_of(answer)
            if target is None:
                break
            if len(target) > self.url_bytes_max:
                raise FetchError(f"{url}: redirects to more than {self.url_bytes_max} bytes", kind="bad_redirect", retryable=False)
            url = target
            answer = await self.fetch(url)
        origin = origin_of(url)
        return answer, origin if answer.status <= 299 and url == f"{origin}/robots.txt" else ""

    def _settle(self, origin: str, outcome: Outcome, body: bytes, status: int, reason: str) -> _Entry:
        rules = Rules(body.decode(), self.token, outcome=outcome)
        if reason and outcome is Outcome.ALLOW_ALL:
            log.info("%s/robots.txt: %s: everything is allowed", origin, reason)
        entry = _Entry(rules, body, self.clock() + ROBOTS_TTL_S, outcome, status, reason=reason)
        return self._keep(origin, entry)

    def _silence(self, origin: str, before: _Entry, status: int, reason: str, wait_s: float | None) -> _Entry:
        """Not reached: the last good file holds, and the next try comes later."""
        now = self.clock()
        since = now if before.silent_since is None else before.silent_since
        wait_s = max(wait_s or 0.0, min(self.retry_s * 2 ** min(before.failures, 20), RETRY_MAX_S))
        rules = before.rules
        if rules is None and now - since >= UNREACHABLE_MAX_S:
            log.warning("%s/robots.txt: unreachable for 30 days (%s): everything is allowed", origin, reason)
            rules = Rules("", self.token, outcome=Outcome.ALLOW_ALL)
        outcome = Outcome.DISALLOW_ALL if rules is None else rules.outcome
        entry = _Entry(rules, before.body, now + wait_s, outcome, status, before.failures + 1, since, reason)
        return self._keep(origin, entry)

    def _keep(self, origin: str, entry: _Entry) -> _Entry:
        self._remember(origin, entry)
        self.on_report(Report(origin, entry.outcome, entry.status, entry.body, entry.until - self.clock(), entry.reason))
        return entry

    def _remember(self, origin: str, entry: _Entry) -> None:
        self._entries.pop(origin, None)
        self._entries[origin] = entry
        while len(self._entries) > ORIGINS_MAX:
            del self._entries[next(iter(self._entries))]
