"""One request, one answer, and Limpet's own verdict on whether it is whole.

aiohttp carries the bytes; what it would take for a whole answer is judged again here, because it
and every other client that was tried accept some half pages silently: a gzip body cut in two, and
a body that ends with a reset connection. The rule: complete = its framing ended, its decoder is at
its own end, the byte counts agree. A body that only ends with its connection is `unverified`
(`completeness.confirm` asks again and compares); anything else is a FetchError, where the body is
the content: of other statuses than 2xx the head says it all, and a bad body is dropped.

    kind          retryable  what happened
    connect       yes        no connection: refused, unreachable, not within `connect_timeout_s`
    dns           yes        the name was not resolved
    tls           no / yes   the certificate is not to be trusted / the handshake failed
    timeout       yes        no byte within `read_timeout_s`, or not all within `total_timeout_s`
    reset         yes        the connection was lost before the answer, or reset while nothing else marks its end
    truncated     yes        the body ends too early
    bad_answer    yes        no HTTP, contradicting lengths, damaged compression, bytes left over
    bad_answer    no         a coding that Limpet did not ask for
    too_large     no         more decompressed bytes than `body_bytes_max`
    bad_request   no         what was asked for cannot be sent
    local         yes        this machine has no file descriptor, port or memory left: the site is not to blame

Redirects are not followed, cookies are not kept, nothing is retried: one budget for all layers of
retry, and it is the task's. The one exception is RFC 9112 section 9.3.1: an idempotent request on a
*reused* connection that was lost before any answer is sent once more, since a server may close an
idle connection at any time.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import TransferEncodingError
from multidict import CIMultiDictProxy
from yarl import URL

from limpet.errors import FetchError, UsageError
from limpet.fetch.decode import ACCEPT_ENCODING, Body
from limpet.fetch.message import CHUNKED, CLOSE, COMPLETE, CONTENT_LENGTH, CUT, NO_BODY, UNVERIFIED, Answer, Request
from limpet.settings import Settings

__all__ = ["Answer", "Client", "Request"]

#: Bytes of one header field or the status line: policies and cookies of real sites pass 8 KiB, aiohttp's default.
FIELD_BYTES_MAX = 64 * 1024
#: Header fields of one answer; with the limit above, 16 MiB is the most that headers can take.
FIELDS_MAX = 256
#: Seconds an idle connection is kept: longer than the default delay and a slow answer, short enough
#: that a crawl over many hosts does not run out of file descriptors.
KEEP_ALIVE_S = 10.0
#: Seconds a resolved name is kept: resolvers honour shorter lives, but a crawl asks for a host each second.
DNS_S = 120

#: Characters of what the HTTP parser says that a message repeats.
REASON_CHARS_MAX = 200

ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"

_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class Client:
    """Sends requests over kept connections. Use as an async context manager, one per event loop.

    How many requests run at once is not its business: the gate of `pace.py` decides that.
    `ssl_context` replaces the system's trust, `resolver` its DNS.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        user_agent: str,
        headers: tuple[tuple[str, str], ...] = (),
        ssl_context: ssl.SSLContext | None = None,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._headers = [("User-Agent", user_agent), ("Accept", ACCEPT), ("Accept-Encoding", ACCEPT_ENCODING), *headers]
        self._ssl: ssl.SSLContext | bool = ssl_context or True
        self._resolver = resolver
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=0,  # the gate limits; a second queue here would only hide time from its deadlines
                ttl_dns_cache=DNS_S,
                keepalive_timeout=KEEP_ALIVE_S,
                ssl=self._ssl,
                resolver=self._resolver,
            ),
            timeout=aiohttp.ClientTimeout(
                total=settings.total_timeout_s,
                connect=settings.connect_timeout_s,
                sock_connect=settings.connect_timeout_s,
                sock_read=settings.read_timeout_s,
            ),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            max_line_size=FIELD_BYTES_MAX,
            max_field_size=FIELD_BYTES_MAX,
            max_headers=FIELDS_MAX,
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def exchange(self, request: Request) -> Answer:
        """Send one request and read its whole answer, whatever its status.

        Raises FetchError as the table above says. Cancelled, it closes the connection.
        """
        if self._session is None:
            raise UsageError("the client is used outside its `async with`")
        url = request.url
        started = self._clock()
        _sent_fresh.set(False)
        try:
            response = await self._session.request(
                request.method,
                _target(url),
                headers=_headers(request),
                data=request.body or None,
                allow_redirects=False,
            )
            try:
                body, framing, verdict, wire_bytes = await self._judged(request, response)
            except BaseException:
                response.close()
                raise
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise _fault(error, url) from error
        elapsed_s = self._clock() - started
        return Answer(url, response.status, _text(response.headers), body, framing, verdict, wire_bytes, elapsed_s)

    async def _judged(self, request: Request, response: aiohttp.ClientResponse) -> tuple[bytes, str, str, int]:
        """Body, framing, verdict, and bytes on the wire.

        No await may come between the answer's head and `_watch`: a connection whose end marks the
        body's has to be watched before it can be lost.
        """
        url = request.url
        framing = _framing(request.method, response.status, response.headers, url)
        protocol = response.connection.protocol if response.connection is not None else None
        lost = _watch(protocol) if framing == CLOSE else None
        try:
            body, wire_bytes, is_cut = await self._receive(request, response)
            if lost is not None and not is_cut:
                _check_end(lost, url)
            if protocol is not None and isinstance(protocol.exception(), HttpProcessingError):
                raise FetchError(f"{url}: bytes came after the end of the body", kind="bad_answer")
        except (FetchError, aiohttp.ClientError, OSError, RuntimeError):
            if 200 <= response.status <= 299:
                raise
            # A redirect, a throttle or a 404 is told by its head; half an error page takes nothing from it.
            response.close()
            return b"", framing, UNVERIFIED, 0
        return body, framing, CUT if is_cut else UNVERIFIED if framing == CLOSE else COMPLETE, wire_bytes

    async def _receive(self, request: Request, response: aiohttp.ClientResponse) -> tuple[bytes, int, bool]:
        """The decoded body, its size on the wire, and whether it was cut at the size that was asked for."""
        codings = ",".join(response.headers.getall("Content-Encoding", ()))
        bytes_max = request.cut_bytes or self._settings.body_bytes_max
        content = response.content
        data = await content.readany()
        if not codings and content.at_eof() and len(data) <= bytes_max:
            return data, len(data), False  # most pages: one piece, no coding
        body = Body(codings, bytes_max, url=request.url, cut=request.cut_bytes > 0)
        while data:
            body.feed(data)
            if body.is_full:
                response.close()
                break
            data = await content.readany()
        return body.finish(), body.wire_bytes, body.is_full


#: Whether this exchange has gone out on a connection that had never been used before.
_sent_fresh: ContextVar[bool] = ContextVar("sent_fresh", default=False)


class _Lost(aiohttp.ClientError):
    """A fresh connection was lost before an answer."""


class _Connector(aiohttp.TCPConnector):
    """Two rules about connections that aiohttp does not have.

    A connection on which bytes came while it lay idle is never handed out: aiohttp would take them
    for the answer to the next request, a stored page under a wrong URL. And what aiohttp sends a
    second time by itself is stopped unless the first went out on a reused connection.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: weakref.WeakSet[object] = weakref.WeakSet()

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        if _sent_fresh.get():
            raise _Lost("the connection was lost before an answer")
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            assert protocol is not None
            if protocol not in self._used:
                self._used.add(protocol)
                _sent_fresh.set(True)
                return connection
            if not protocol.should_close:
                return connection
            connection.close()  # one idle connection fewer, so this ends


def _target(url: str) -> URL:
    """The URL as aiohttp takes it, without any requoting."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise FetchError(f"{url!r}: characters that cannot be sent; they had to be escaped", kind="bad_request", retryable=False)
    target = URL(url, encoded=True)
    if url.find("?") == len(url) - 1:
        # yarl drops a "?" with nothing behind it, but the server was promised the URL as it was found.
        # Its property is filled before anyone reads it; a test holds the bytes on the wire.
        target._cache["raw_path_qs"] = target.raw_path + "?"
    return target


def _headers(request: Request) -> list[tuple[str, str]] | None:
    if not request.cookies:
        return list(request.headers) if request.headers else None
    return [*request.headers, ("Cookie", "; ".join(f"{name}={value}" for name, value in request.cookies))]


def _framing(method: str, status: int, headers: CIMultiDictProxy[str], url: str) -> str:
    """How this answer's body is delimited (RFC 9112 section 6.3)."""
    if status < 200:
        raise FetchError(f"{url}: status {status}, which nobody asked for", kind="bad_answer", status=status)
    if method == "HEAD" or status in (204, 304):
        return NO_BODY
    transfer = headers.get("Transfer-Encoding")
    if transfer is not None:
        if transfer.strip().lower() != "chunked":
            raise FetchError(f"{url}: transfer coding {transfer!r}, expected chunked", kind="bad_answer", retryable=False)
        return CHUNKED
    return CONTENT_LENGTH if "Content-Length" in headers else CLOSE


def _watch(protocol: ResponseHandler | None) -> asyncio.Future[None] | None:
    """A future that tells whether the connection ended orderly or was reset."""
    closed = protocol.closed if protocol is not None else None
    if closed is not None:
        closed.add_done_callback(_retrieved)
    return closed


def _retrieved(future: asyncio.Future[None]) -> None:
    """Take the exception, so that asyncio does not report one that nobody needed."""
    if not future.cancelled():
        future.exception()


def _check_end(lost: asyncio.Future[None], url: str) -> None:
    if lost.done() and not lost.cancelled() and lost.exception() is not None:
        raise FetchError(f"{url}: the connection was reset within the body", kind="reset")


def _text(headers: CIMultiDictProxy[str]) -> tuple[tuple[str, str], ...]:
    """Header fields as text; bytes that are no UTF-8 are read as Latin-1 (RFC 9110 section 5.5)."""
    fields = tuple(headers.items())
    if all(value.isascii() for _, value in fields):
        return fields
    return tuple((name, value if value.isprintable() else _latin(value)) for name, value in fields)


def _latin(value: str) -> str:
    """aiohttp leaves bytes that are no UTF-8 as lone surrogates, which no database takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogateescape").decode("latin-1")
    return value


def _fault(error: Exception, url: str) -> FetchError:
    """The FetchError that an error of aiohttp or asyncio means."""
    kind, retryable = _kind(error)
    return FetchError(f"{url}: {_in_words(error, kind, url)}", kind=kind, retryable=retryable)


def _in_words(error: Exception, kind: str, url: str) -> str:
    """What went wrong, for whoever reads `limpet dead`: no word of aiohttp's or asyncio's."""
    match kind, error:
        case "connect" | "dns" | "tls" | "local", _:
            target = URL(url, encoded=True)
            place = f"{target.host_subcomponent}:{target.port}"
            what = {"dns": f"cannot resolve {target.host}", "tls": f"no TLS with {place}"}.get(kind, f"cannot connect to {place}")
            return f"{what}: {_cause(error)}"
        case "timeout", aiohttp.SocketTimeoutError():
            return "no byte came within read_timeout_s"
        case "timeout", _:
            return "the answer was not whole within total_timeout_s"
        case "truncated", _:
            return "the body ends too early"
        case "reset", OSError(errno=int(number)):
            return f"the connection was lost: {os.strerror(number).lower()}"
        case "reset", aiohttp.ServerDisconnectedError():
            return "the connection was closed before an answer"
        case "bad_answer", aiohttp.ClientResponseError():
            return f"no HTTP: {_one_line(error.message)}"
        case "bad_answer", aiohttp.ClientPayloadError() if isinstance(error.__cause__, TransferEncodingError):
            return f"no HTTP: {_one_line(error.__cause__.message)}"
        case _:
            return _one_line(str(error)) or type(error).__name__


def _cause(error: Exception) -> str:
    """Why there is no connection: the system's word for it, without the numbers and addresses that drivers add."""
    cause: Any = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return str(cause.verify_message)
    if isinstance(cause, ssl.SSLError):
        return str(cause.reason or "the handshake failed").replace("_", " ").lower()
    if isinstance(cause, TimeoutError):
        return "no answer within connect_timeout_s"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return str(cause.strerror or cause).lower()
    return os.strerror(number).lower() if number else str(cause) or "it was closed at once"


def _one_line(text: str) -> str:
    """The first line of a parser's complaint, which goes on to show the bytes under it."""
    return text.partition("\n")[0].rstrip(": ")[:REASON_CHARS_MAX]


def _kind(error: Exception) -> tuple[str, bool]:
    match error:
        case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
            return "tls", False
        case aiohttp.ClientConnectorSSLError() | ssl.SSLError():
            return "tls", True
        case aiohttp.ClientConnectorDNSError():
            return "dns", True
        case OSError(errno=number) if number in _OWN_FAULTS:
            return "local", True
        case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError():
            return "connect", True
        case TimeoutError():
            return "timeout", True
        case aiohttp.ClientPayloadError():
            is_garbage = isinstance(error.__cause__, TransferEncodingError) and "Not enough data" not in str(error.__cause__)
            return ("bad_answer" if is_garbage else "truncated"), True
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return "bad_request", False
        case _Lost() | OSError() | aiohttp.ClientConnectionError() | RuntimeError():
            return "reset", True
        case ValueError():
            return "bad_request", False
        case _:
            return "bad_answer", True
