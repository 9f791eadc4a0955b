"""Which links are followed: the scope of a job, and the shapes of path that only a trap makes.

Both look at canonical forms alone and change no key: a URL out of scope has a key like any other, and is
refused only as a link. What a start or a handler asks for by itself is never refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from limpet.errors import UsageError
from limpet.url import Canonical
from limpet.url_tables import host_glob, host_pattern

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList

#: What a scope can be, from narrow to wide.
SCOPES = ("prefix", "host", "domain", "any")
#: Times that one segment, one empty segment or one pair may stand in a URL; real sites stay below.
REPEATS_MAX = 3
#: Times that one run of two and more segments may stand in a row; /a/b/a/b/a/b is once too many.
RUNS_MAX = 2
#: Segments of such a run at the most: a path of 4,000 segments takes 5 ms so, and half a second without.
RUN_SEGMENTS_MAX = 16
#: Registrable domains that are remembered: 2 us each otherwise, and a page's links name few hosts.
DOMAINS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Scope:
    """The links that a job follows, by where its starts are.

    prefix   below the folder of a start, on its host and port
    host     the host and port of a start, or those of the page that holds the link
    domain   the registrable domain (example.co.uk) of a start or of that page; an IP address is its own
    any      everywhere

    `hosts` adds hosts to any of them, as patterns with `*`: `127.0.0.*`, `*.example.com`; with a port, that
    port alone. http and https are one place. `traps` off follows also what `trap_reason` names.
    """

    kind: str = "host"
    places: frozenset[str] = frozenset()
    hosts: tuple[str, ...] = ()
    traps: bool = True
    _globs: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in SCOPES:
            raise UsageError(f"scope {self.kind!r} is unknown; there are {', '.join(SCOPES)}")
        object.__setattr__(self, "hosts", tuple(sorted({host_pattern(host) for host in self.hosts})))
        object.__setattr__(self, "_globs", tuple(host_glob(host) for host in self.hosts))

    @classmethod
    def of(cls, kind: str = "host", starts: Iterable[Canonical] = (), *, hosts: str | Iterable[str] = (), traps: bool = True) -> Scope:
        """The scope of a job that begins at `starts`. UsageError for an unknown kind or a broken pattern."""
        places = frozenset(_place_of_start(kind, start) for start in starts)
        return cls(kind, places, (hosts,) if isinstance(hosts, str) else tuple(hosts), traps)

    def allows(self, canonical: Canonical, page_authority: str = "") -> bool:
        """Whether a link may be followed that was found on a page of `page_authority`, "" for none."""
        return not self.refusal(canonical, page_authority)

    def refusal(self, canonical: Canonical, page_authority: str = "") -> str:
        """Why a link is not followed, as one stable word: `scope`, or one of `trap_reason`; "" where it is."""
        if not self._holds(canonical, page_authority):
            return "scope"
        return trap_reason(canonical.text[canonical.text.index("/", len("https://")) :]) if self.traps else ""

    def _holds(self, canonical: Canonical, page_authority: str) -> bool:
        authority = canonical.authority
        if self.kind == "any" or (authority == page_authority and self.kind != "prefix"):
            return True
        if self.kind == "prefix":
            below = authority + canonical.path.rstrip("/") + "/"
            inside = any(below.startswith(place) for place in self.places)
        elif self.kind == "domain":
            domain = registrable_domain(authority)
            inside = domain in self.places or domain == registrable_domain(page_authority)
        else:
            inside = authority in self.places
        return inside or any(g.fullmatch(host_of(authority)) or g.fullmatch(authority) for g in self._globs)


def _place_of_start(kind: str, start: Canonical) -> str:
    if kind == "prefix":
        return start.authority + _folder_of(start)
    return registrable_domain(start.authority) if kind == "domain" else start.authority


def _folder_of(start: Canonical) -> str:
    """The folder that a start opens: its path, or what holds it where its last segment looks like a file.

    The key may have lost the slash at the end, so the text as found has the say on it.
    """
    is_folder = start.request_url.partition("#")[0].partition("?")[0].endswith("/")
    above, _, last = start.path.rstrip("/").rpartition("/")
    return (above if "." in last and not is_folder else start.path.rstrip("/")) + "/"


def trap_reason(path: str, *, repeats_max: int = REPEATS_MAX) -> str:
    """Why a path, with or without its query, looks like a trap, as one stable word; "" where it does not.

    `repeated_segment`   one segment, or an empty one, more than `repeats_max` times: /a/b/a/c/a/d/a
    `growing_path`       a run of segments three times in a row: a relative link that lost its slash
    `repeated_pair`      one pair of the query more than `repeats_max` times: ?q=&q=&q=&q=
    `growing_escape`     a percent sign escaped over and over: %2525252525

    >>> trap_reason("/docs/a/docs/a/docs/a"), trap_reason("/2026/11/11/11")
    ('growing_path', '')
    """
    path, _, query = path.partition("?")
    segments = path.removeprefix("/").removesuffix("/").split("/")
    repeats = _repeats(segments)
    if repeats > repeats_max:
        return "repeated_segment"
    if repeats > RUNS_MAX and _is_growing(segments):
        return "growing_path"
    if query and _repeats(query.split("&")) > repeats_max:
        return "repeated_pair"
    return "growing_escape" if "%" + "25" * (repeats_max + 1) in path + query else ""


def _repeats(pieces: list[str]) -> int:
    again = len(pieces) - len(set(pieces))
    # One piece that comes again is there twice. The usual case, at a fifth of the price of counting.
    return again + 1 if again < 2 else max(Counter(pieces).values())


def _is_growing(segments: list[str]) -> bool:
    """Whether a run of two and more segments stands RUNS_MAX + 1 times in a row.

    It does where `segments[i] == segments[i + width]` holds width * RUNS_MAX times in a row.
    """
    for width in range(2, min(RUN_SEGMENTS_MAX, len(segments) // (RUNS_MAX + 1)) + 1):
        equal_in_a_row = 0
        for one, other in zip(segments, segments[width:], strict=False):
            equal_in_a_row = equal_in_a_row + 1 if one == other else 0
            if equal_in_a_row == width * RUNS_MAX:
                return True
    return False


def same_site(a: str, b: str) -> bool:
    """Whether two authorities belong to one registrable domain, as browsers see a site; ports do not matter."""
    return registrable_domain(a) == registrable_domain(b)


@lru_cache(maxsize=DOMAINS_MAX)
def registrable_domain(authority: str) -> str:
    """The part of a host that was registered, by the Public Suffix List with its private part.

    A host that has none stands for itself: an IP address, `localhost`, `github.io` as such.

    >>> [registrable_domain(a) for a in ("a.b.example.co.uk:8080", "me.github.io", "127.0.0.1:8800")]
    ['example.co.uk', 'me.github.io', '127.0.0.1']
    """
    host = host_of(authority)
    # A canonical host that ends in a number is IPv4 (WHATWG URL, ends-in-a-number checker).
    if host.startswith("[") or host.rpartition(".")[2].isdigit():
        return host
    return _suffixes().privatesuffix(host) or host


def host_of(authority: str) -> str:
    """The host of an authority, without its port.

    >>> host_of("e.test:8080"), host_of("[::1]"), host_of("[::1]:80")
    ('e.test', '[::1]', '[::1]')
    """
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdigit() and (host[-1:] == "]" or ":" not in host) else authority


@cache
def _suffixes() -> PublicSuffixList:
    """The list as the package bundles it, never from the network. Read once, when a domain is asked for: 70 ms."""
    from publicsuffixlist import PublicSuffixList

    return PublicSuffixList()
