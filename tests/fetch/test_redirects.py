"""Redirects: followed inside the task, or the end of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from limpet.errors import FetchError, UrlRejected
from limpet.fetch.http import Client
from limpet.fetch.message import Answer, Request
from limpet.fetch.redirects import Content, Jar, Moved, follow, next_request, target_of
from limpet.settings import Settings
from tests.fetch.hostile import Wire, serve


def key_of(url: str) -> tuple[bytes, str]:
    """A stand-in for the canonicaliser: the key is the URL itself."""
    if "rejected" in url:
        raise UrlRejected("no", reason="scheme")
    return url.encode(), url.partition("://")[2].partition("/")[0]


Step = Callable[[Request], Answer] | str


@dataclass
class Web:
    """A web as a table: URL -> where it redirects to, or "" for content, or a function of the request."""

    steps: Mapping[str, Step]
    asked: list[Request] = field(default_factory=list)

    async def exchange(self, request: Request) -> Answer:
        self.asked.append(request)
        step = self.steps[request.url]
        if callable(step):
            return step(request)
        return redirect(request.url, step) if step else Answer(request.url, 200, body=request.url.encode())


def redirect(url: str, location: str, *fields: tuple[str, str], status: int = 302) -> Answer:
    return Answer(url, status, (("Location", location), *fields))


async def followed(
    web: Web,
    url: str = "http://a/1",
    *,
    request: Request | None = None,
    chain: tuple[bytes, ...] = (),
    hops: int = 0,
    moved: frozenset[str] = frozenset(),
    inside: bool = False,
    visited: list[str] | None = None,
) -> Content | Moved:
    async def is_moved(key: bytes) -> bool:
        return key.decode() in moved

    async def before_hop(target: str) -> None:
        if visited is not None:
            visited.append(target)

    return await follow(
        web,
        request or Request(url),
        own_key=url.encode(),
        chain=chain,
        hops=hops,
        key_of=key_of,
        is_moved=is_moved,
        hops_max=10,
        before_hop=before_hop,
        inside=inside,
    )


def content(found: Content | Moved) -> Answer:
    assert isinstance(found, Content), found
    return found.answer


async def test_an_answer_that_is_no_redirect_is_the_tasks_content() -> None:
    """Whatever its status; nothing is asked twice."""
    web = Web({"http://a/1": lambda r: Answer(r.url, 404)})
    assert content(await followed(web)).status == 404
    assert len(web.asked) == 1


async def test_an_end_at_another_key_is_moved_with_the_chain() -> None:
    """protocol.md hole 12: never an alias, never done without content."""
    web = Web({"http://a/1": "/2", "http://a/2": "/3", "http://a/3": ""})
    assert await followed(web) == Moved("http://a/3", 2, (b"http://a/1",), 200)


async def test_a_hop_to_another_host_is_moved_before_that_host_is_asked() -> None:
    """Its owner paces it: this task sends it nothing."""
    web = Web({"http://a/1": "http://b/1"})
    assert await followed(web, chain=(b"k0",), hops=3) == Moved("http://b/1", 4, (b"k0", b"http://a/1"), 302)
    assert [request.url for request in web.asked] == ["http://a/1"]


async def test_a_consent_cycle_ends_at_the_tasks_own_key_with_its_cookies() -> None:
    """B11, B24 (scrapy#1225): u1 sends to u2, u2 sets a cookie and sends back: the page is stored, by u1."""
    web = Web(
        {
            "http://a/1": lambda r: Answer(r.url, 200, body=b"page") if ("ok", "yes") in r.cookies else redirect(r.url, "/consent"),
            "http://a/consent": lambda r: redirect(r.url, "/1", ("Set-Cookie", "ok=yes; Path=/")),
        }
    )
    visited: list[str] = []
    answer = content(await followed(web, visited=visited))
    assert (answer.body, answer.url) == (b"page", "http://a/1")
    assert answer.hops == ("http://a/1", "http://a/consent")
    assert visited == ["http://a/consent", "http://a/1"]


async def test_the_request_that_brought_the_content_is_told() -> None:
    """An unverified body is asked for again with the same cookies."""
    web = Web(
        {
            "http://a/1": lambda r: Answer(r.url, 200) if r.cookies else redirect(r.url, "/1", ("Set-Cookie", "s=1")),
        }
    )
    found = await followed(web)
    assert isinstance(found, Content)
    assert found.request == Request("http://a/1", cookies=(("s", "1"),))


async def test_a_redirect_back_into_the_chain_is_followed_inside() -> None:
    """T1 moved to u2 on another host; u2 sends back to u1, which nobody else will fetch: the content is u2's."""
    web = Web({"http://b/2": "http://a/1", "http://a/1": ""})
    answer = content(await followed(web, "http://b/2", chain=(b"http://a/1",), hops=1))
    assert (answer.url, answer.hops) == ("http://a/1", ("http://b/2",))


async def test_a_redirect_to_a_task_that_is_itself_moved_is_followed_inside() -> None:
    """Both would be moved, to each other, and the page stored by none."""
    steps = {"http://a/1": "http://b/2", "http://b/2": ""}
    assert isinstance(await followed(Web(steps)), Moved)
    assert content(await followed(Web(steps), moved=frozenset({"http://b/2"}))).url == "http://b/2"


async def test_an_end_at_a_moved_key_on_the_same_host_is_content() -> None:
    """The same where no other host is met."""
    web = Web({"http://a/1": "/2", "http://a/2": ""})
    assert content(await followed(web, moved=frozenset({"http://a/2"}))).url == "http://a/2"


async def test_from_a_host_of_the_chain_a_hop_to_a_new_key_is_moved() -> None:
    """Inside another host only what nobody else fetches is followed."""
    web = Web({"http://b/2": "http://a/1", "http://a/1": "/new"})
    found = await followed(web, "http://b/2", chain=(b"http://a/1",), hops=1)
    assert found == Moved("http://a/new", 3, (b"http://a/1", b"http://b/2"), 302)


@pytest.mark.parametrize("hops", [0, 4, 10])
async def test_more_than_ten_hops_in_all_are_a_loop(hops: int) -> None:
    """Counted along the whole chain of tasks: endless new keys end too. A strike, so retryable."""
    web = Web({f"http://a/{n}": f"/{n + 1}" for n in range(1, 30)})
    with pytest.raises(FetchError) as caught:
        await followed(web, hops=hops)
    assert (caught.value.kind, caught.value.retryable) == ("redirect_loop", True)
    assert len(web.asked) == 11 - hops


async def test_a_page_that_redirects_to_itself_for_ever_is_a_loop() -> None:
    """No content, so never done."""
    with pytest.raises(FetchError, match="more than 10 redirects"):
        await followed(Web({"http://a/1": "/1"}))


async def test_exactly_ten_hops_are_allowed() -> None:
    """The limit itself is no loop."""
    web = Web({**{f"http://a/{n}": f"/{n + 1}" for n in range(1, 11)}, "http://a/11": ""})
    assert await followed(web) == Moved("http://a/11", 10, (b"http://a/1",), 200)


async def test_a_keyed_call_is_always_followed_inside() -> None:
    """It is not a URL: no other task could store what it asks for."""
    web = Web({"http://a/1": "http://b/2", "http://b/2": "http://c/3", "http://c/3": ""})
    assert content(await followed(web, inside=True)).url == "http://c/3"


async def test_what_before_hop_raises_ends_it_before_the_hop_is_sent() -> None:
    """robots.txt and pace have their say about each hop."""
    web = Web({"http://a/1": "/private"})

    async def forbidden(url: str) -> None:
        raise PermissionError(url)

    async def never(key: bytes) -> bool:
        return False

    with pytest.raises(PermissionError):
        await follow(
            web,
            Request("http://a/1"),
            own_key=b"http://a/1",
            chain=(),
            hops=0,
            key_of=key_of,
            is_moved=never,
            hops_max=10,
            before_hop=forbidden,
        )
    assert len(web.asked) == 1


@pytest.mark.parametrize("location", ["mailto:x@y", "ftp://b/", "http://[", "http://b:99999/", "http://rejected/"])
async def test_a_target_that_cannot_be_requested_is_an_error_that_no_retry_mends(location: str) -> None:
    """Named, never a silent drop."""
    with pytest.raises(FetchError) as caught:
        await followed(Web({"http://a/1": location}))
    assert (caught.value.kind, caught.value.retryable) == ("bad_redirect", False)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/x?a=%27#frag", "http://a/x?a=%27"),
        ("//b/x", "http://b/x"),
        ("x", "http://a/d/x"),
        ("", "http://a/d/p?q"),
        ("/caf\u00e9", "http://a/caf%C3%A9"),
        (" https://c/ ", "https://c/"),
    ],
)
def test_targets_are_resolved_as_browsers_do(location: str, target: str) -> None:
    """Against the answer's URL, without a fragment, and not requoted."""
    assert target_of(redirect("http://a/d/p?q", location)) == target


@pytest.mark.parametrize("status", [200, 201, 300, 304, 305, 404])
def test_other_statuses_are_no_redirects(status: int) -> None:
    """A Location there names something else; a redirect without one is content."""
    assert target_of(redirect("http://a/", "/x", status=status)) is None
    assert target_of(Answer("http://a/", 301)) is None


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [
        (301, "GET", "GET"), (301, "POST", "GET"), (302, "POST", "GET"), (303, "POST", "GET"), (303, "PUT", "GET"),
        (303, "HEAD", "HEAD"), (302, "PUT", "PUT"), (307, "POST", "POST"), (308, "POST", "POST"),
    ],
)  # fmt: skip
def test_method_and_body_follow_the_fetch_standard(status: int, method: str, then: str) -> None:
    """HTTP-redirect fetch, step 12: a GET has no body, and no headers about one."""
    request = Request("http://a/1", method, (("Content-Type", "x/y"), ("X-Own", "1")), b"body")
    follower = next_request(request, redirect("http://a/1", "/2", status=status), "http://a/2", Jar())
    assert (follower.method, follower.body) == ((then, b"body") if then == method else ("GET", b""))
    assert ("X-Own", "1") in follower.headers
    assert (("Content-Type", "x/y") in follower.headers) is (then == method)


async def test_a_post_that_must_stay_a_post_is_followed_inside() -> None:
    """307 to another host: no URL alone could name what is to be sent there."""
    web = Web({"http://a/1": lambda r: redirect(r.url, "http://b/2", status=307), "http://b/2": ""})
    found = await followed(web, request=Request("http://a/1", "POST", body=b"x"))
    assert content(found).url == "http://b/2"
    assert web.asked[1].body == b"x"


async def test_credentials_do_not_leave_their_origin() -> None:
    """Fetch standard, HTTP-redirect fetch, step 13; the task's own cookies too, and other headers that are named so."""
    request = Request("http://a/1", headers=(("Authorization", "secret"), ("X-Own", "1")), cookies=(("s", "1"),))
    jar = Jar()
    jar.take(redirect("http://a/1", "http://b/2", ("Set-Cookie", "t=2")))
    away = next_request(request, redirect("http://a/1", "http://b/2"), "http://b/2", jar)
    assert (away.headers, away.cookies) == ((("X-Own", "1"),), ())
    named = Request("http://a/1", headers=(("X-Api-Key", "secret"), ("X-Call", "1"), ("Accept-Language", "no")))
    away = next_request(named, redirect("http://a/1", "http://b/2"), "http://b/2", Jar(), private=frozenset({"x-call"}))
    assert away.headers == (("Accept-Language", "no"),)
    home = next_request(request, redirect("http://a/1", "/2"), "http://a/2", jar)
    assert (home.headers, home.cookies) == (request.headers, (("s", "1"), ("t", "2")))


async def test_cookies_keep_their_spelling_and_their_rules() -> None:
    """RFC 6265: path, deletion and replacement; values byte for byte."""
    jar = Jar()
    jar.take(
        redirect(
            "http://127.0.0.1:8/a",
            "/",
            ("Set-Cookie", 'q="a b"; Path=/'),
            ("Set-Cookie", "deep=1; Path=/deep"),
            ("set-cookie", "x=1"),
        )
    )
    jar.take(redirect("http://127.0.0.1:8/a", "/", ("Set-Cookie", "x=gone; Max-Age=0")))
    assert dict(jar.cookies("http://127.0.0.1:8/b")) == {"q": '"a b"'}
    assert dict(jar.cookies("http://127.0.0.1:8/deep/er")) == {"q": '"a b"', "deep": "1"}
    assert jar.cookies("http://127.0.0.2:8/b") == ()


async def test_a_real_consent_cycle_over_the_wire() -> None:
    """The same with a server, the client and kept connections."""

    async def site(w: Wire) -> None:
        if b" /1 " in w.head and b"Cookie: ok=yes" not in w.head:
            await w.answer(b"", b"Location: /consent?to=%2F1", status=b"302 Found")
        elif b" /consent" in w.head:
            await w.answer(b"", b"Location: /1", b"Set-Cookie: ok=yes; Path=/; HttpOnly", status=b"303 See Other")
        else:
            await w.answer(b"page")

    async with serve(site) as server, Client(Settings(), user_agent="x") as client:

        async def is_moved(key: bytes) -> bool:
            return False

        async def before_hop(url: str) -> None: ...

        url = server.url("1")
        found = await follow(
            client,
            Request(url),
            own_key=url.encode(),
            chain=(),
            hops=0,
            key_of=key_of,
            is_moved=is_moved,
            hops_max=10,
            before_hop=before_hop,
        )
    assert content(found).body == b"page"
    assert (server.targets, server.connections) == (["/1", "/consent?to=%2F1", "/1"], 1)
