"""Redirects: which hops are followed inside the task, and which end it as moved.

    to the task's own host             followed inside, with its cookies
    ... for good (301, 308), to another path, without a cookie: Moved at once. The page has another
                                       address, whose own task asks for it: following would ask twice
    ends at the task's own key         its content (a consent cycle: cookie set, sent back)
    ends at another key                Moved: that key has, or gets, a task of its own
    leaves the host                    Moved: another owner paces that host
    ... back into the chain of moves   followed inside: the tasks of the chain have ended as moved,
    ... or to a task that is `moved`   so nobody else would ever store the content
    more than `hops_max` in all        FetchError redirect_loop: a strike, then dead

Never an alias, never dropped as a duplicate, never done without content (ARCHITECTURE.md, section 7). A task that
is not a URL (`inside=True`: a keyed call) and what must keep its method and body (307 and 308 of a
POST, which no URL can name) are always followed inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp
from yarl import URL

from limpet.credentials import is_secret
from limpet.errors import FetchError, UrlRejected
from limpet.fetch.message import Answer, Request
from limpet.url import href

#: RFC 9110 section 15.4. 300 and 304 are none: they name nothing that replaces the answer.
REDIRECTS = frozenset({301, 302, 303, 307, 308})
#: What describes a body that is not sent on.
_BODY_ONLY = frozenset({"content-type", "content-encoding", "content-language", "content-location", "content-length"})


class Exchanger(Protocol):
    """What sends one request: a `Client`, or something that paces one."""

    async def exchange(self, request: Request) -> Answer:
        """One request, one answer; raises FetchError."""


@dataclass(frozen=True, slots=True)
class Content:
    """The task's own answer, whatever its status. `request` brought it, with the cookies of its hops.

    The hops that led to it are in `answer.hops`.
    """

    answer: Answer
    request: Request


@dataclass(frozen=True, slots=True)
class Moved:
    """The task ends as moved: `target` is enqueued in the same commit, with `hops` and `chain`."""

    target: str
    hops: int
    chain: tuple[bytes, ...]
    status: int


async def follow(
    client: Exchanger,
    request: Request,
    *,
    own_key: bytes,
    chain: tuple[bytes, ...],
    hops: int,
    key_of: Callable[[str], tuple[bytes, str]],
    is_moved: Callable[[bytes], Awaitable[bool]],
    hops_max: int,
    before_hop: Callable[[str], Awaitable[None]],
    inside: bool = False,
    private: frozenset[str] = frozenset(),
) -> Content | Moved:
    """Send a task's request and follow its redirects as the table above says.

    `chain` and `hops` are what led to this task. `key_of` gives a URL's key and authority and may
    raise UrlRejected; `is_moved` asks whether a task with that key has ended as moved; `before_hop`
    is awaited with each URL before it is requested (robots, pace) and may raise to end it all. Headers that `private` names,
    in lower case, stay on their origin, as those do whose names say that they are credentials.
    Raises FetchError: `redirect_loop` (a strike), `bad_redirect` (a target that cannot be requested, not retryable).
    """
    answer = await client.exchange(request)
    if answer.status not in REDIRECTS:
        return Content(answer, request)  # nearly every one: nothing needs to be known of its key
    home, home_path = key_of(request.url)[1], _path(request.url)
    jar = Jar()
    passed: list[str] = []
    while (target := target_of(answer)) is not None:
        if hops + len(passed) + 1 > hops_max:
            raise FetchError(f"{request.url}: more than {hops_max} redirects, the last to {target}", kind="redirect_loop")
        key, authority = _key(key_of, target, answer.url)
        is_plain = inside or (request.method not in ("GET", "HEAD") and answer.status in (307, 308))
        is_own = key == own_key or authority == home
        if not (is_plain or is_own or await _is_ours(key, chain, is_moved)):
            return Moved(target, hops + len(passed) + 1, (*chain, own_key), answer.status)
        jar.take(answer)
        if not is_plain and await _ends_here(answer, request, target, key, home_path, own_key, chain, jar, is_moved):
            return Moved(target, hops + len(passed) + 1, (*chain, own_key), answer.status)
        passed.append(answer.url)
        request = next_request(request, answer, target, jar, private)
        await before_hop(target)
        answer = await client.exchange(request)
    if passed and not inside and request.method in ("GET", "HEAD"):
        key, _ = _key(key_of, answer.url, answer.url)
        if key != own_key and not await _is_ours(key, chain, is_moved):
            return Moved(answer.url, hops + len(passed), (*chain, own_key), answer.status)
    return Content(replace(answer, hops=tuple(passed)) if passed else answer, request)


async def _ends_here(
    answer: Answer, request: Request, target: str, key: bytes, home_path: str, own_key: bytes, chain: tuple[bytes, ...], jar: Jar,
    is_moved: Callable[[bytes], Awaitable[bool]],
) -> bool:  # fmt: skip
    """Whether a hop on the own host is a move for good, so that following it would bring what another task brings.

    Consent and session cycles are temporary, or set a cookie; a loop that only counts up a query keeps its
    path, and is met inside one task, whose strikes end it.
    """
    if answer.status not in (301, 308) or key == own_key or jar.has_cookies or request.cookies or _path(target) == home_path:
        return False
    return not await _is_ours(key, chain, is_moved)


async def _is_ours(key: bytes, chain: tuple[bytes, ...], is_moved: Callable[[bytes], Awaitable[bool]]) -> bool:
    """Whether nobody else will fetch that key: its task led here, or ended as moved itself."""
    return key in chain or await is_moved(key)


def _path(url: str) -> str:
    """The path of a URL, without its query."""
    return url.partition("://")[2].partition("/")[2].partition("?")[0].partition("#")[0]


def _key(key_of: Callable[[str], tuple[bytes, str]], target: str, url: str) -> tuple[bytes, str]:
    try:
        return key_of(target)
    except UrlRejected as error:
        raise FetchError(f"{url}: redirects to what is no page: {error}", kind="bad_redirect", retryable=False) from error


def target_of(answer: Answer) -> str | None:
    """The absolute URL that an answer redirects to, without its fragment; None where it is content.

    A redirect without Location is content (Fetch standard). Raises FetchError `bad_redirect` for one that is no URL.
    """
    if answer.status not in REDIRECTS:
        return None
    location = answer.header("location")
    if location is None:
        return None
    try:
        target = href(location, base=answer.url).partition("#")[0]
    except UrlRejected as error:
        raise FetchError(f"{answer.url}: redirects to {location!r}: {error}", kind="bad_redirect", retryable=False) from error
    if not target.startswith(("http://", "https://")):
        raise FetchError(f"{answer.url}: redirects to {location!r}, which is not http", kind="bad_redirect", retryable=False)
    return target


def next_request(request: Request, answer: Answer, target: str, jar: Jar, private: frozenset[str] = frozenset()) -> Request:
    """The request for the next hop (Fetch standard, HTTP-redirect fetch, steps 11 to 14); to another origin without credentials."""
    method, body, headers = request.method, request.body, request.headers
    if (answer.status == 303 and method not in ("GET", "HEAD")) or (answer.status in (301, 302) and method == "POST"):
        method, body = "GET", b""
        headers = tuple((name, value) for name, value in headers if name.lower() not in _BODY_ONLY)
    cookies = request.cookies
    if origin_of(target) != origin_of(request.url):
        headers = tuple((name, value) for name, value in headers if not (is_secret(name) or name.lower() in private))
        cookies = ()
    gathered = jar.cookies(target)
    names = {name for name, _ in gathered}
    cookies = (*((name, value) for name, value in cookies if name not in names), *gathered)
    return replace(request, url=target, method=method, headers=headers, body=body, cookies=cookies)


def origin_of(url: str) -> str:
    """Scheme, host and port of a WHATWG URL, without userinfo."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


class Jar:
    """The cookies of one chain of hops: RFC 6265 by aiohttp's jar, made at the first Set-Cookie.

    aiohttp takes the quotes off a value and cannot put them back; browsers send it as it was set, so that
    spelling is kept beside it.
    """

    __slots__ = ("_jar", "_spelled")

    def __init__(self) -> None:
        self._jar: aiohttp.CookieJar | None = None
        self._spelled: dict[tuple[str, str], str] = {}

    @property
    def has_cookies(self) -> bool:
        """Whether any answer has set a cookie."""
        return self._jar is not None

    def take(self, answer: Answer) -> None:
        """Keep what the answer sets."""
        fields = [value for name, value in answer.headers if name.lower() == "set-cookie"]
        if not fields:
            return
        if self._jar is None:
            self._jar = aiohttp.CookieJar(unsafe=True, quote_cookie=False)  # unsafe: hosts that are IP addresses too
        self._jar.update_cookies_from_headers(fields, URL(answer.url, encoded=True))
        for text in fields:
            name, _, value = text.partition(";")[0].partition("=")
            value = value.strip()
            if len(value) > 1 and value[0] == value[-1] == '"':
                self._spelled[name.strip(), value[1:-1].replace('\\"', '"')] = value

    def cookies(self, url: str) -> tuple[tuple[str, str], ...]:
        """What goes to that URL."""
        if self._jar is None:
            return ()
        found = self._jar.filter_cookies(URL(url, encoded=True)).items()
        return tuple((name, self._spelled.get((name, morsel.value), morsel.value)) for name, morsel in found)
