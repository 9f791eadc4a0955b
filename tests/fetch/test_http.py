"""Limpet's own verdict on answers, against a server that misbehaves in every way that was found."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp.abc import AbstractResolver, ResolveResult

from limpet.errors import FetchError, UsageError
from limpet.fetch.http import Answer, Client, Request
from limpet.settings import Settings
from tests.fetch.hostile import FAULTS, PAGE, Site, Wire, listen, serve
from tests.fetch.leap import run

TLS = Path(__file__).parent / "tls"
CAP = 4 * 2**20


def client(**options: object) -> Client:
    settings = {name: options.pop(name) for name in list(options) if name in Settings.__dataclass_fields__}
    return Client(Settings(**{"body_bytes_max": CAP, **settings}), user_agent="limpet-test/1", **options)  # type: ignore[arg-type]


#: Seconds for which this process may stand still, of which its clock knows nothing; far less than the next larger limit.
STALL_S = 40


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0)


async def outcome(name: str) -> str:
    """What `exchange` makes of one fault: the verdict, or the kind of the error."""
    async with serve() as site, client() as http:
        started = asyncio.get_running_loop().time()
        try:
            result = (await http.exchange(Request(site.url(name)))).verdict
        except FetchError as error:
            result = error.kind
        assert asyncio.get_running_loop().time() - started <= Settings().total_timeout_s + STALL_S
        return result


@pytest.mark.parametrize("name", FAULTS)
def test_each_misbehaviour_gets_its_own_verdict(name: str) -> None:
    """faults.md section 5: complete, unverified or an error of the right kind; nothing cut passes as whole."""
    assert run(outcome(name)) == FAULTS[name][1]


@pytest.mark.parametrize("name", ["close_rst", "close_rst_at_once", "close_fin", "more_bytes_after_the_head", "gzip_half"])
def test_the_verdict_is_the_same_on_uvloop(name: str) -> None:
    """The end of a connection is told by the loop, and there are two."""
    assert run(outcome(name), uvloop.new_event_loop) == FAULTS[name][1]


@pytest.mark.parametrize(
    ("name", "retryable"),
    [("too_large", False), ("truncated", True), ("reset", True), ("timeout", True)],
)
def test_retryable_follows_the_kind(name: str, retryable: bool) -> None:
    """Asking again can mend a cut body, never a large one."""
    fault = next(fault for fault, (_, kind) in FAULTS.items() if kind == name)

    async def scenario() -> None:
        async with serve() as site, client() as http:
            with pytest.raises(FetchError) as caught:
                await http.exchange(Request(site.url(fault)))
            assert caught.value.retryable is retryable
            assert site.url(fault) in str(caught.value)

    run(scenario())


async def test_a_coding_that_nobody_asked_for_is_not_retryable() -> None:
    """No further try makes a server stop using `compress`."""
    async with serve() as site, client() as http:
        with pytest.raises(FetchError) as caught:
            await http.exchange(Request(site.url("coding_unknown")))
    assert (caught.value.kind, caught.value.retryable) == ("bad_answer", False)


async def test_bodies_come_out_decompressed_and_counted() -> None:
    """Body, framing, wire bytes and headers are those of the answer."""
    async with serve() as site, client() as http:
        plain, gzipped, chunked, closed = [
            await http.exchange(Request(site.url(name))) for name in ("sound", "gzip_sound", "sound_chunked", "close_fin")
        ]
    assert [a.body for a in (plain, gzipped, chunked, closed)] == [PAGE] * 4
    assert [a.framing for a in (plain, gzipped, chunked, closed)] == ["content-length", "content-length", "chunked", "close"]
    assert plain.wire_bytes == len(PAGE) > gzipped.wire_bytes > 0
    assert plain.header("content-TYPE") == "text/html; charset=utf-8"
    assert plain.elapsed_s > 0


@pytest.mark.parametrize(
    "name",
    [
        "gzip_two_members",
        "deflate_raw",
        "deflate_zlib",
        "brotli_sound",
        "zstd_sound",
        "two_codings",
        "two_codings_in_two_headers",
    ],
)
async def test_each_coding_is_undone(name: str) -> None:
    """gzip with many members, both readings of deflate, br, zstd, and one on top of another."""
    async with serve() as site, client() as http:
        assert (await http.exchange(Request(site.url(name)))).body == PAGE


async def test_one_byte_over_the_limit_is_too_large_and_the_limit_itself_is_not() -> None:
    """P109: a body over the limit is refused by name, never dropped or cut silently."""
    async with serve() as site:
        async with client(body_bytes_max=len(PAGE)) as http:
            assert (await http.exchange(Request(site.url("gzip_sound")))).body == PAGE
        async with client(body_bytes_max=len(PAGE) - 1) as http:
            for name in ("sound", "gzip_sound", "sound_chunked"):
                with pytest.raises(FetchError, match=f"larger than {len(PAGE) - 1:,} bytes") as caught:
                    await http.exchange(Request(site.url(name)))
                assert caught.value.kind == "too_large"


@pytest.mark.parametrize("name", ["sound", "gzip_sound", "gzip_bomb", "endless_body"])
async def test_a_body_can_be_cut_on_purpose(name: str) -> None:
    """robots.txt is read up to a size, whatever follows; the answer says that it was cut."""
    async with serve() as site, client() as http:
        answer = await http.exchange(Request(site.url(name), cut_bytes=1000))
        assert (answer.verdict, len(answer.body)) == ("cut", 1000)
        assert (await http.exchange(Request(site.url("sound"), cut_bytes=len(PAGE)))).verdict == "complete"


@pytest.mark.parametrize("status", [b"404 Not Found", b"429 Slow down", b"301 Moved", b"503 Busy"])
@pytest.mark.parametrize("behaviour", ["cut", "reset", "garbage", "large", "hang"])
async def test_what_the_head_says_holds_where_only_an_error_page_is_broken(status: bytes, behaviour: str) -> None:
    """A gone page is gone and a throttle a throttle, however its page ends; no body is kept, no connection reused."""

    async def broken(w: Wire) -> None:
        size = 2 * CAP if behaviour == "large" else len(PAGE)
        coding = b"Content-Encoding: gzip" if behaviour == "garbage" else b"X-No: 1"
        w.send(w.head_of(b"Content-Length: %d" % size, coding, b"Location: /x", b"Retry-After: 7", status=status))
        w.send(b"x" * size if behaviour == "large" else PAGE if behaviour == "garbage" else PAGE[:50])
        await w.writer.drain()
        if behaviour == "hang":
            await w.reader.read()
        w.reset() if behaviour == "reset" else w.writer.close()

    async with serve(broken) as site, client() as http:
        answer = await http.exchange(Request(site.url("x")))
        assert (answer.status, answer.body, answer.verdict) == (int(status[:3]), b"", "unverified")
        assert (answer.header("retry-after"), answer.header("location")) == ("7", "/x")
        await http.exchange(Request(site.url("x")))
        assert site.connections == 2


# -- what is sent --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/a%2Fb/c%2fd?q=%27&x=a+b%3A%20;z=[1]",
        "/|'\"<>^`{}\\",
        "//x/../y/./z",
        "/%zz%?%",
        "/p??x=?",
        "/p?",
        "/?",
        "/?=&&",
        "/~m/%7Em/;v=1",
    ],
)
async def test_the_url_is_sent_as_it_is(target: str) -> None:
    """B34 (aiohttp#4307, #2188, yarl#1077): requoting breaks signatures. Byte for byte, also a lone `?`."""
    async with serve(ok) as site, client() as http:
        for _ in range(2):
            await http.exchange(Request(f"http://127.0.0.1:{site.port}{target}"))
        assert site.targets == [target, target]


@pytest.mark.parametrize("url", ["http://127.0.0.1/a b", "http://127.0.0.1/é", "http://127.0.0.1/a\r\nX: y", "ftp://h/", "http:///x", "x"])
async def test_what_cannot_be_sent_is_refused_before_a_connection_is_made(url: str) -> None:
    """A raw space or line end would be a second request line; nothing is sent, and no retry mends it."""
    async with serve(ok) as site, client() as http:
        with pytest.raises(FetchError) as caught:
            await http.exchange(Request(url.replace("127.0.0.1", f"127.0.0.1:{site.port}")))
        assert (caught.value.kind, caught.value.retryable) == ("bad_request", False)
        assert site.connections == 0


async def test_a_header_cannot_smuggle_another() -> None:
    """A line end inside a header's value is refused, and nothing is sent."""
    async with serve(ok) as site, client() as http:
        with pytest.raises(FetchError) as caught:
            await http.exchange(Request(site.url("x"), headers=(("X-A", "b\r\nX-C: d"),)))
        assert caught.value.kind == "bad_request"
        assert site.heads == []


async def test_headers_cookies_body_and_userinfo_go_out_as_given() -> None:
    """The request's own headers win over the defaults; cookies keep order and spelling."""
    async with serve(ok) as site, client() as http:
        await http.exchange(
            Request(
                f"http://user:pa%40ss@127.0.0.1:{site.port}/x",
                method="POST",
                headers=(("Accept", "application/json"), ("X-Two", "1"), ("X-Two", "2")),
                cookies=(("b", '"quoted value"'), ("a", "1")),
                body=b"k=v",
            )
        )
        lines = site.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /x HTTP/1.1"
    assert 'Cookie: b="quoted value"; a=1' in lines
    assert "User-Agent: limpet-test/1" in lines
    assert [line for line in lines if line.startswith("Accept:")] == ["Accept: application/json"]
    assert [line for line in lines if line.startswith("X-Two:")] == ["X-Two: 1", "X-Two: 2"]
    assert "Authorization: Basic dXNlcjpwYUBzcw==" in lines


async def test_header_values_are_text_without_surrogates() -> None:
    """Bytes of a header are UTF-8 or else Latin-1, so that they can be stored."""

    async def odd(w: Wire) -> None:
        await w.answer(b"", b"X-Utf: caf\xc3\xa9", b"X-Latin: caf\xe9")

    async with serve(odd) as site, client() as http:
        answer = await http.exchange(Request(site.url("x")))
    assert (answer.header("x-utf"), answer.header("x-latin")) == ("café", "café")


@pytest.mark.parametrize(("method", "status"), [("HEAD", b"200 OK"), ("GET", b"204 No Content"), ("GET", b"304 Not Modified")])
async def test_answers_without_a_body_are_complete(method: str, status: bytes) -> None:
    """A Content-Length there describes what was not sent."""

    async def bare(w: Wire) -> None:
        await w.sent(w.head_of(b"Content-Length: 5000", b"Content-Encoding: gzip", status=status))

    async with serve(bare) as site, client() as http:
        for _ in range(2):
            answer = await http.exchange(Request(site.url("x"), method=method))
            assert (answer.framing, answer.verdict, answer.body) == ("none", "complete", b"")
        assert site.connections == 1


# -- connections ---------------------------------------------------------------------------


async def test_connections_are_kept() -> None:
    """Ten answers of every framing but `close`, one connection."""
    async with serve() as site, client() as http:
        for name in ["sound", "gzip_sound", "sound_chunked", "fifty_early_hints", "brotli_sound"] * 2:
            await http.exchange(Request(site.url(name)))
        assert (site.connections, len(site.heads)) == (1, 10)


def no_idle_connection_is_clean(http: Client) -> bool:
    """Whether bytes that nobody asked for have come on every connection that is kept."""
    assert http._session is not None
    connector = http._session.connector
    assert connector is not None
    return all(protocol.should_close for idle in connector._conns.values() for protocol, _ in idle)


async def test_bytes_on_an_idle_connection_are_never_the_answer_to_the_next_request() -> None:
    """aiohttp would store the planted answer under the second URL; here the connection is dropped."""

    async def planter(w: Wire) -> None:
        await w.answer(b"asked for")
        w.send(w.head_of(b"Content-Length: 7"), b"planted")

    async with serve(planter) as site, client() as http:
        for path in ("a", "b", "c"):
            assert (await http.exchange(Request(site.url(path)))).body == b"asked for"
            await until(lambda: no_idle_connection_is_clean(http))
        assert site.connections == 3


async def test_a_server_that_speaks_first_is_no_http() -> None:
    """Another protocol's banner is not taken for an answer, and the end is prompt."""

    async def banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()

    async with listen(banner) as port:
        assert (await failure(f"http://127.0.0.1:{port}/")).kind == "bad_answer"


def second_request(then: Callable[[Wire], object]) -> Callable[[Wire], Awaitable[None]]:
    """Answers the first request of each connection, and does something else at its second."""
    seen: set[int] = set()

    async def handler(w: Wire) -> None:
        if id(w) in seen:
            then(w)
        else:
            seen.add(id(w))
            await w.answer(PAGE)

    return handler


@pytest.mark.parametrize("then", [lambda w: w.writer.close(), lambda w: w.reset()])
async def test_a_kept_connection_that_dies_costs_no_try(then: Callable[[Wire], object]) -> None:
    """RFC 9112 section 9.3.1: an idempotent request on a reused connection is sent once more."""
    async with serve(second_request(then)) as site, client() as http:
        for _ in range(3):
            assert (await http.exchange(Request(site.url("x")))).body == PAGE
        assert (site.connections, len(site.heads)) == (3, 5)


async def test_a_post_on_a_dead_connection_is_not_sent_twice() -> None:
    """It may have had its effect: whether to repeat it is the task's budget."""
    async with serve(second_request(lambda w: w.writer.close())) as site, client() as http:
        await http.exchange(Request(site.url("x")))
        with pytest.raises(FetchError) as caught:
            await http.exchange(Request(site.url("x"), method="POST", body=b"pay"))
        assert (caught.value.kind, len(site.heads)) == ("reset", 2)


@pytest.mark.parametrize("name", ["no_answer", "no_answer_but_a_reset"])
async def test_a_fresh_connection_that_dies_is_not_tried_again_in_secret(name: str) -> None:
    """P102: one budget for all layers of retry; aiohttp alone would send it twice."""
    async with serve() as site, client() as http:
        with pytest.raises(FetchError):
            await http.exchange(Request(site.url(name)))
        assert len(site.heads) == 1


async def test_a_cancelled_exchange_closes_its_connection() -> None:
    """What is in flight when a worker stops does not come back as the next answer."""
    async with serve() as site, client() as http:
        task = asyncio.create_task(http.exchange(Request(site.url("hang_within_the_body"))))
        await until(lambda: bool(site.heads))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await site.wires[0].writer.wait_closed()


async def test_it_is_used_inside_its_context_only() -> None:
    """A closed client says so instead of opening connections that nobody closes."""
    http = client()
    with pytest.raises(UsageError):
        await http.exchange(Request("http://127.0.0.1:1/"))


# -- no connection -------------------------------------------------------------------------


async def failure(url: str, **options: object) -> FetchError:
    async with client(**options) as http:
        with pytest.raises(FetchError) as caught:
            await http.exchange(Request(url))
    return caught.value


async def test_a_refused_connection_is_a_connect_error() -> None:
    """Retryable: the site may be back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = await failure(f"http://127.0.0.1:{free.getsockname()[1]}/")
    assert (error.kind, error.retryable) == ("connect", True)


async def test_a_name_without_an_address_is_a_dns_error() -> None:
    """P103: a class of its own, so that it can have its own plan."""

    class Nowhere(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
            raise OSError(None, "Name or service not known")

        async def close(self) -> None: ...

    error = await failure("http://nowhere.invalid/", resolver=Nowhere())
    assert (error.kind, error.retryable) == ("dns", True)


async def test_a_name_that_is_never_resolved_ends_at_the_connect_deadline() -> None:
    """A dead name server costs `connect_timeout_s`, not the whole minute."""

    class Silent(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
            await asyncio.Event().wait()
            return []

        async def close(self) -> None: ...

    started = asyncio.get_running_loop().time()
    error = await failure("http://silent.invalid/", resolver=Silent())
    assert error.kind == "connect"
    assert asyncio.get_running_loop().time() - started <= Settings().connect_timeout_s + STALL_S


async def test_running_out_of_file_descriptors_is_not_the_sites_fault() -> None:
    """P19-like: 64 open files at most is a local fault, named so."""
    async with serve() as site, client() as http:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as highest:
            number = highest.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        try:
            with pytest.raises(FetchError) as caught:
                await http.exchange(Request(site.url("sound")))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (caught.value.kind, caught.value.retryable) == ("local", True)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EMFILE
        assert (await http.exchange(Request(site.url("sound")))).body == PAGE


def test_an_error_is_told_in_plain_words() -> None:
    """No name, number or hint of the HTTP library's, and the address once: whoever reads it never saw that library."""
    told = {
        "fewer_bytes": "the body ends too early",
        "half_a_chunk": "the body ends too early",
        "chunk_size_is_garbage": "no HTTP: Invalid character in chunk size",
        "icy": "no HTTP: Bad status line",
        "no_answer": "the connection was lost before an answer",
        "close_rst": "the connection was reset within the body",
        "hang": "no byte came within read_timeout_s",
    }

    async def scenario() -> None:
        async with serve() as site:
            for name, words in told.items():
                assert str(await failure(site.url(name))) == f"{site.url(name)}: {words}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        for scheme in ("http", "https"):
            assert str(await failure(f"{scheme}://{place}/")) == f"{scheme}://{place}/: cannot connect to {place}: connection refused"

    run(scenario())


# -- TLS -----------------------------------------------------------------------------------


def server_tls(name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.pem")
    return context


def trust() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "ca.pem"))


async def tls_exchange(site: Site, name: str) -> Answer:
    async with client(ssl_context=trust()) as http:
        return await http.exchange(Request(site.url(name)))


@pytest.mark.parametrize("name", ["sound", "gzip_sound", "sound_chunked", "large_then_fin"])
async def test_tls_answers_are_judged_like_others(name: str) -> None:
    """The same rule above an encrypted connection."""
    async with serve(tls=server_tls("good")) as site:
        assert (await tls_exchange(site, name)).verdict == "complete"


@pytest.mark.parametrize("certificate", ["elsewhere", "expired", "unknown"])
async def test_an_untrusted_certificate_is_a_tls_error_that_no_retry_mends(certificate: str) -> None:
    """Wrong host, expired, unknown authority; no request is sent."""
    async with serve(tls=server_tls(certificate)) as site:
        with pytest.raises(FetchError) as caught:
            await tls_exchange(site, "sound")
        assert (caught.value.kind, caught.value.retryable) == ("tls", False)
        assert str(caught.value).startswith(f"{site.url('sound')}: no TLS with 127.0.0.1:{site.port}: ")
        assert site.heads == []


async def test_a_tls_body_that_ends_with_its_connection_is_unverified_or_reset() -> None:
    """With and without close_notify nothing proves it whole; a RST is an error."""
    async with serve(tls=server_tls("good")) as site:
        assert (await tls_exchange(site, "close_fin")).verdict == "unverified"
        with pytest.raises(FetchError) as caught:
            await tls_exchange(site, "close_rst")
        assert caught.value.kind == "reset"


@pytest.mark.parametrize(("behaviour", "kind"), [("abort", "connect"), ("plain", "tls"), ("hang", "connect")])
async def test_a_handshake_that_fails_is_retryable_and_ends_in_time(behaviour: str, kind: str) -> None:
    """Aborted, answered in plain HTTP, or never answered."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if behaviour == "plain":
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        if behaviour == "hang":
            await reader.read()

    async with listen(connection) as port:
        started = asyncio.get_running_loop().time()
        error = await failure(f"https://127.0.0.1:{port}/")
        assert asyncio.get_running_loop().time() - started <= Settings().connect_timeout_s + STALL_S
    assert (error.kind, error.retryable) == (kind, True)


async def ok(w: Wire) -> None:
    await w.answer(b"ok")


def test_aiohttp_still_needs_what_is_mended_here() -> None:
    """The negative control: aiohttp alone takes a reset and half a gzip body for whole answers."""

    async def scenario() -> None:
        async with serve() as site, aiohttp.ClientSession() as session:
            for name in ("close_rst", "gzip_half"):
                async with session.get(site.url(name)) as response:
                    assert PAGE.startswith((await response.read())[:20])

    run(scenario())
