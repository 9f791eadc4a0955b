"""A web server that misbehaves on purpose: one coroutine for each misbehaviour, none of them HTTP by accident.

`FAULTS` names what `Client.exchange` must make of each: a verdict, or the kind of the FetchError.
A path beyond the name is free (`/hang/7`). Nothing here uses an HTTP library.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import brotli  # type: ignore[import-untyped]
import zstandard

PAGE = b"<!doctype html><title>page</title><p>" + b"0123456789" * 200 + b"</p>"
GZ = gzip.compress(PAGE, mtime=0)


@dataclass
class Wire:
    """One connection, seen from the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes = b""

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def sent(self, *pieces: bytes) -> None:
        """Send, and let the client read it before anything else is sent."""
        self.send(*pieces)
        await self.writer.drain()
        await asyncio.sleep(0.01)

    def head_of(self, *fields: bytes, status: bytes = b"200 OK") -> bytes:
        return b"\r\n".join([b"HTTP/1.1 " + status, *fields, b"", b""])

    async def answer(self, body: bytes, *fields: bytes, status: bytes = b"200 OK") -> None:
        await self.sent(self.head_of(b"Content-Length: %d" % len(body), *fields, status=status), body)

    def reset(self) -> None:
        """End with a RST instead of a FIN."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Fault = Callable[[Wire], Awaitable[None]]
FAULTS: dict[str, tuple[Fault, str]] = {}


def fault(expected: str) -> Callable[[Fault], Fault]:
    def register(coroutine: Fault) -> Fault:
        FAULTS[coroutine.__name__] = coroutine, expected
        return coroutine

    return register


# -- framing -------------------------------------------------------------------------------


@fault("complete")
async def sound(w: Wire) -> None:
    await w.answer(PAGE, b"Content-Type: text/html; charset=utf-8")


@fault("complete")
async def sound_chunked(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: chunked"), b"%x\r\n" % len(PAGE), PAGE, b"\r\n0\r\n\r\n")


@fault("complete")
async def chunked_bytewise(w: Wire) -> None:
    w.send(w.head_of(b"Transfer-Encoding: chunked"))
    for byte in PAGE[:50]:
        await w.sent(b"1;ext=x\r\n", bytes([byte]), b"\r\n")
    await w.sent(b"0\r\nTrailer: x\r\n\r\n")


@fault("complete")
async def large_then_fin(w: Wire) -> None:
    """aio-libs/aiohttp#13348: a whole body whose FIN comes while the parser is paused."""
    body = bytes(range(256)) * 8192
    w.send(w.head_of(b"Content-Length: %d" % len(body)), body)
    await w.writer.drain()
    w.writer.close()


@fault("complete")
async def large_chunked_then_fin(w: Wire) -> None:
    w.send(w.head_of(b"Transfer-Encoding: chunked"))
    for _ in range(64):
        w.send(b"8000\r\n", b"x" * 0x8000, b"\r\n")
    w.send(b"0\r\n\r\n")
    await w.writer.drain()
    w.writer.close()


@fault("truncated")
async def fewer_bytes(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: %d" % (len(PAGE) + 1)), PAGE)
    w.writer.close()


@fault("truncated")
async def fewer_bytes_at_once(w: Wire) -> None:
    w.send(w.head_of(b"Content-Length: %d" % (len(PAGE) + 1)), PAGE)
    w.writer.close()


@fault("truncated")
async def reset_within_length(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: %d" % (len(PAGE) + 1)), PAGE)
    w.reset()


@fault("bad_answer")
async def more_bytes(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: %d" % (len(PAGE) - 5)), PAGE)


@fault("bad_answer")
async def more_bytes_after_the_head(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: %d" % (len(PAGE) - 5)))
    await w.sent(PAGE)


@fault("truncated")
async def no_last_chunk(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: chunked"), b"%x\r\n" % len(PAGE), PAGE, b"\r\n")
    w.writer.close()


@fault("truncated")
async def half_a_chunk(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: chunked"), b"%x\r\n" % len(PAGE), PAGE[:100])
    w.reset()


@fault("bad_answer")
async def chunk_size_is_garbage(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: chunked"), b"%x\r\n" % len(PAGE), PAGE, b"\r\nzz\r\n")


@fault("bad_answer")
async def bytes_after_the_last_chunk(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: chunked"))
    await w.sent(b"%x\r\n" % len(PAGE), PAGE, b"\r\n0\r\n\r\nmore")


@fault("bad_answer")
async def length_and_chunked(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: 5", b"Transfer-Encoding: chunked"), b"5\r\nhello\r\n0\r\n\r\n")


@fault("bad_answer")
async def two_lengths(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: 5", b"Content-Length: 6"), b"hello!")


@fault("bad_answer")
async def length_is_negative(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: -5"), PAGE)


@fault("bad_answer")
async def length_with_a_plus(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Length: +5"), b"hello")


@fault("bad_answer")
async def transfer_coding_unknown(w: Wire) -> None:
    await w.sent(w.head_of(b"Transfer-Encoding: gzip"), GZ)
    w.writer.close()


@fault("unverified")
async def close_fin(w: Wire) -> None:
    await w.sent(w.head_of(), PAGE)
    w.writer.close()


@fault("unverified")
async def close_fin_at_once(w: Wire) -> None:
    w.send(w.head_of(), PAGE)
    w.writer.close()


@fault("reset")
async def close_rst(w: Wire) -> None:
    """aiohttp takes this for a normal end."""
    await w.sent(w.head_of(), PAGE)
    w.reset()


@fault("reset")
async def close_rst_at_once(w: Wire) -> None:
    w.send(w.head_of(), PAGE)
    w.reset()


@fault("reset")
async def close_rst_gzip(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Encoding: gzip"), GZ)
    w.reset()


# -- content codings -----------------------------------------------------------------------


@fault("complete")
async def gzip_sound(w: Wire) -> None:
    await w.answer(GZ, b"Content-Encoding: gzip")


@fault("complete")
async def gzip_two_members(w: Wire) -> None:
    await w.answer(gzip.compress(PAGE[:500]) + gzip.compress(PAGE[500:]), b"Content-Encoding: x-gzip")


@fault("complete")
async def gzip_of_nothing(w: Wire) -> None:
    await w.answer(b"", b"Content-Encoding: gzip")


@fault("truncated")
async def gzip_half(w: Wire) -> None:
    """All five clients that were tried accept this."""
    await w.answer(GZ[: len(GZ) // 2], b"Content-Encoding: gzip")


@fault("truncated")
async def gzip_half_chunked(w: Wire) -> None:
    half = GZ[: len(GZ) // 2]
    await w.sent(w.head_of(b"Transfer-Encoding: chunked", b"Content-Encoding: gzip"), b"%x\r\n" % len(half), half, b"\r\n0\r\n\r\n")


@fault("truncated")
async def gzip_without_its_checksum(w: Wire) -> None:
    await w.answer(GZ[:-8], b"Content-Encoding: gzip")


@fault("truncated")
async def gzip_half_close(w: Wire) -> None:
    await w.sent(w.head_of(b"Content-Encoding: gzip"), GZ[: len(GZ) // 2])
    w.writer.close()


@fault("bad_answer")
async def gzip_bad_crc(w: Wire) -> None:
    await w.answer(GZ[:-8] + bytes(4) + GZ[-4:], b"Content-Encoding: gzip")


@fault("bad_answer")
async def gzip_is_none(w: Wire) -> None:
    await w.answer(PAGE, b"Content-Encoding: gzip")


@fault("bad_answer")
async def gzip_left_over(w: Wire) -> None:
    await w.answer(GZ + b"<p>more", b"Content-Encoding: gzip")


@fault("complete")
async def deflate_zlib(w: Wire) -> None:
    await w.answer(zlib.compress(PAGE), b"Content-Encoding: deflate")


@fault("complete")
async def deflate_raw(w: Wire) -> None:
    raw = zlib.compressobj(wbits=-15)
    await w.answer(raw.compress(PAGE) + raw.flush(), b"Content-Encoding: deflate")


@fault("truncated")
async def deflate_half(w: Wire) -> None:
    await w.answer(zlib.compress(PAGE)[:30], b"Content-Encoding: deflate")


@fault("bad_answer")
async def deflate_left_over(w: Wire) -> None:
    await w.answer(zlib.compress(PAGE) + b"x", b"Content-Encoding: deflate")


@fault("complete")
async def brotli_sound(w: Wire) -> None:
    await w.answer(brotli.compress(PAGE), b"Content-Encoding: br")


@fault("truncated")
async def brotli_half(w: Wire) -> None:
    await w.answer(brotli.compress(PAGE)[:20], b"Content-Encoding: br")


@fault("bad_answer")
async def brotli_left_over(w: Wire) -> None:
    await w.answer(brotli.compress(PAGE) + b"x", b"Content-Encoding: br")


@fault("complete")
async def zstd_sound(w: Wire) -> None:
    await w.answer(zstandard.compress(PAGE), b"Content-Encoding: zstd")


@fault("truncated")
async def zstd_half(w: Wire) -> None:
    await w.answer(zstandard.compress(PAGE)[:20], b"Content-Encoding: zstd")


@fault("bad_answer")
async def zstd_left_over(w: Wire) -> None:
    await w.answer(zstandard.compress(PAGE) + b"xxxxxxxx", b"Content-Encoding: zstd")


@fault("complete")
async def two_codings(w: Wire) -> None:
    await w.answer(brotli.compress(GZ), b"Content-Encoding: gzip, br")


@fault("complete")
async def two_codings_in_two_headers(w: Wire) -> None:
    await w.answer(brotli.compress(GZ), b"Content-Encoding: gzip", b"Content-Encoding: br")


@fault("bad_answer")
async def nine_codings(w: Wire) -> None:
    await w.answer(GZ, b"Content-Encoding: " + b",".join([b"gzip"] * 9))


@fault("bad_answer")
async def coding_unknown(w: Wire) -> None:
    await w.answer(PAGE, b"Content-Encoding: compress")


@fault("complete")
async def coding_named_but_none(w: Wire) -> None:
    await w.answer(PAGE, b"Content-Encoding: UTF-8")


# -- size ----------------------------------------------------------------------------------


@fault("too_large")
async def gzip_bomb(w: Wire) -> None:
    await w.answer(bomb(2**26), b"Content-Encoding: gzip")


@fault("too_large")
async def brotli_bomb(w: Wire) -> None:
    await w.answer(brotli.compress(bytes(2**26), quality=5), b"Content-Encoding: br")


@fault("too_large")
async def zstd_bomb(w: Wire) -> None:
    await w.answer(zstandard.compress(bytes(2**26)), b"Content-Encoding: zstd")


@fault("too_large")
async def bomb_in_a_bomb(w: Wire) -> None:
    await w.answer(gzip.compress(bomb(2**26)), b"Content-Encoding: gzip, gzip")


@fault("too_large")
async def endless_body(w: Wire) -> None:
    w.send(w.head_of(b"Transfer-Encoding: chunked"))
    while not w.writer.transport.is_closing():
        w.send(b"8000\r\n", b"x" * 0x8000, b"\r\n")
        await w.writer.drain()
        await asyncio.sleep(0)


@fault("too_large")
async def endless_gzip_without_output(w: Wire) -> None:
    w.send(w.head_of(b"Content-Encoding: gzip"), GZ[:10])
    while not w.writer.transport.is_closing():
        w.send(b"\x00\x00\x00\xff\xff" * 6000)
        await w.writer.drain()
        await asyncio.sleep(0)


@fault("bad_answer")
async def header_of_two_megabytes(w: Wire) -> None:
    await w.answer(PAGE, b"X-Long: " + b"x" * 2**21)


@fault("bad_answer")
async def twenty_thousand_headers(w: Wire) -> None:
    await w.answer(PAGE, *(b"X-%d: y" % n for n in range(20_000)))


# -- time ----------------------------------------------------------------------------------


@fault("timeout")
async def hang(w: Wire) -> None:
    await w.reader.read()


@fault("timeout")
async def hang_within_the_body(w: Wire) -> None:
    w.send(w.head_of(b"Content-Length: 5000"), PAGE)
    await w.reader.read()


@fault("timeout")
async def drip_body(w: Wire) -> None:
    w.send(w.head_of(b"Content-Length: 100000"))
    while not w.writer.transport.is_closing():
        w.send(b"x")
        await asyncio.sleep(0.3)


@fault("timeout")
async def drip_header(w: Wire) -> None:
    w.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not w.writer.transport.is_closing():
        w.send(b"x")
        await asyncio.sleep(0.3)


@fault("timeout")
async def early_hints_for_ever(w: Wire) -> None:
    while not w.writer.transport.is_closing():
        w.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await asyncio.sleep(0.3)


# -- no HTTP at all ------------------------------------------------------------------------


@fault("complete")
async def fifty_early_hints(w: Wire) -> None:
    w.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 50)
    await w.answer(PAGE)


@fault("complete")
async def status_999(w: Wire) -> None:
    await w.answer(PAGE, status=b"999 Request denied")


@fault("reset")
async def no_answer(w: Wire) -> None:
    w.writer.close()


@fault("reset")
async def no_answer_but_a_reset(w: Wire) -> None:
    w.reset()


@fault("reset")
async def half_a_head(w: Wire) -> None:
    await w.sent(b"HTTP/1.1 200 OK\r\nContent-Le")
    w.writer.close()


@fault("bad_answer")
async def garbage(w: Wire) -> None:
    await w.sent(bytes(range(256)) * 4)


@fault("bad_answer")
async def no_head(w: Wire) -> None:
    """HTTP/0.9."""
    await w.sent(PAGE)
    w.writer.close()


@fault("bad_answer")
async def icy(w: Wire) -> None:
    await w.sent(b"ICY 200 OK\r\n\r\nmusic")


@fault("bad_answer")
async def header_with_nul(w: Wire) -> None:
    await w.answer(PAGE, b"X-Nul: a\x00b")


@fault("bad_answer")
async def switching_protocols(w: Wire) -> None:
    await w.sent(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nxyz")


def bomb(size: int) -> bytes:
    """`size` zeros as gzip: about a thousandth of it."""
    squeeze = zlib.compressobj(9, wbits=31)
    return b"".join([*(squeeze.compress(bytes(2**20)) for _ in range(size // 2**20)), squeeze.flush()])


# -- the server ----------------------------------------------------------------------------


@dataclass
class Site:
    """A running hostile server: where it is, and what it was asked."""

    port: int = 0
    scheme: str = "http"
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    wires: list[Wire] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}/{path.lstrip('/')}"

    @property
    def targets(self) -> list[str]:
        """The request targets so far, in order."""
        return [head.split(b" ")[1].decode("latin-1") for head in self.heads]


@contextlib.asynccontextmanager
async def listen(
    connection: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve each connection by a coroutine; yields the port. Connections end with the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            await connection(reader, writer)
        writer.close()

    server = await asyncio.start_server(ending, "127.0.0.1", 0, ssl=tls, limit=2**22)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serve(handler: Fault | None = None, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """Serve every fault by its name, or all paths by `handler`."""
    site = Site(scheme="https" if tls else "http")

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        site.connections += 1
        wire = Wire(reader, writer)
        site.wires.append(wire)
        while not writer.is_closing():
            wire.head = await reader.readuntil(b"\r\n\r\n")
            site.heads.append(wire.head)
            length = next((int(f[15:]) for f in wire.head.split(b"\r\n") if f.lower().startswith(b"content-length:")), 0)
            wire.head += await reader.readexactly(length)
            name = wire.head.split(b" ")[1].decode("latin-1").lstrip("/").partition("/")[0].partition("?")[0]
            await (handler or FAULTS[name][0])(wire)

    async with listen(connection, tls) as site.port:
        yield site
