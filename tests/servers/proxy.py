"""A TCP proxy that breaks a database connection at a chosen COMMIT, or in the middle of any statement.

It knows nothing of either protocol but how a COMMIT looks on the wire (drivers send it in clear). What it
breaks is noted in `fired`, so that a test can assert that its fault happened. It runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: COMMIT as a simple query of PostgreSQL, and as a COM_QUERY of MySQL. ON COMMIT in a statement is neither.
COMMIT = re.compile(rb"COMMIT\x00\Z|\x03COMMIT\Z")

#: What a client says first when it wants to know what became of its COMMIT.
SETTLING = b"FOR UPDATE"

#: Seconds that an answer is held back before the line is cut.
DELAY_S = 0.2

#: What may become of a COMMIT.
FAULTS = {
    "before": "the line is cut before COMMIT arrives",
    "half": "half of it arrives, and the line is cut",
    "after": "it arrives, and the line is cut before the answer",
    "delay": "it arrives; the answer is held back for a while, and then the line is cut",
    "half-open": "nothing arrives any more, in either direction, and nobody says so",
    "unheard": "it arrives, the answer does not, and nobody says so",
    "buffered": "the client's line is cut; COMMIT arrives when the client is back and asks",
}


@dataclass
class Proxy:
    """Between any number of clients and one server on this machine."""

    target: int
    port: int = 0
    fired: list[str] = field(default_factory=list)  # the faults that happened
    plan: list[str] = field(default_factory=list)  # what becomes of the next COMMITs; "" for nothing
    cut_at: int = 0  # break the line at the client's message of this number, counted from `count_from_here`
    is_heard: bool = False  # that message arrives before the line is cut
    is_silent: bool = False  # and nobody says that the line is cut
    meanwhile: Callable[[], object] | None = None  # happens once, after a fault and before any client is let in again
    messages: int = 0
    _is_shut: bool = False
    _lines: set[Line] = field(default_factory=set)
    _half_open: list[Line] = field(default_factory=list)
    _held: tuple[asyncio.StreamWriter, bytes] | None = None
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    def through(self, dsn: str) -> str:
        """A database's address, by way of this proxy."""
        assert dsn.count(f":{self.target}/") == 1
        return dsn.replace(f":{self.target}/", f":{self.port}/")

    def count_from_here(self, cut_at: int = 0, *, is_heard: bool = False, is_silent: bool = False) -> None:
        """Count the client's messages from 0; cut the line at one of them."""
        self.messages, self.cut_at, self.is_heard, self.is_silent = 0, cut_at, is_heard, is_silent

    def refuse(self) -> None:
        """Break every line, and let nobody in until `admit`."""
        self._call(self._refuse)

    def admit(self) -> None:
        """Let clients in again."""
        self._is_shut = False
        self._call(self._open.set)

    def _call(self, action: Callable[[], object]) -> None:
        done = threading.Event()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(action)
        self._loop.call_soon_threadsafe(done.set)
        done.wait()

    def _refuse(self) -> None:
        self._is_shut = True
        self._open.clear()
        for line in list(self._lines):
            line.cut()

    async def serve(self, started: Callable[[], None], ended: asyncio.Event) -> None:
        """Until `ended`."""
        self._loop = asyncio.get_running_loop()
        self._open.set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        started()
        await ended.wait()
        server.close()
        for line in [*self._lines, *self._half_open]:
            line.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open.is_set():
            writer.transport.abort()
            return
        try:
            its = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        line = Line(self, reader, writer, *its)
        self._lines.add(line)
        with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
            await line.carry()
        self._lines.discard(line)

    def _next(self) -> str:
        return self.plan.pop(0) if self.plan else ""

    async def _happened(self, fault: str) -> None:
        """Note a fault; what happens meanwhile happens while nobody is let in."""
        self.fired.append(fault)
        action, self.meanwhile = self.meanwhile, None
        if action is not None:
            self._open.clear()
            await asyncio.to_thread(action)
            if not self._is_shut:
                self._open.set()


@dataclass(eq=False)
class Line:
    """One client's connection and its own to the server."""

    proxy: Proxy
    client_in: asyncio.StreamReader
    client_out: asyncio.StreamWriter
    server_in: asyncio.StreamReader
    server_out: asyncio.StreamWriter
    is_muted: bool = False  # what the server says is thrown away
    is_half_open: bool = False  # the server is never told that its client is gone
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def carry(self) -> None:
        """Both ways, until either side is gone."""
        ways = [asyncio.create_task(way) for way in (self._to_server(), self._to_client())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self.cut()

    async def _to_client(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self.server_in.read(2**16):
                if self.is_muted:
                    self.answered.set()
                    continue
                self.client_out.write(data)
                await self.client_out.drain()
        if self.is_muted:  # the line is being broken: that ends it
            self.answered.set()
            await asyncio.Event().wait()

    async def _to_server(self) -> None:
        proxy = self.proxy
        while data := await self.client_in.read(2**16):
            proxy.messages += 1
            if proxy.cut_at and proxy.messages == proxy.cut_at:
                return await self._cut_in_the_middle(data)
            if COMMIT.search(data) and (fault := proxy._next()):
                return await self._break(fault, data)
            await self._pass_on(data)
            if proxy._held is not None and SETTLING in data:
                (ghost, held), proxy._held = proxy._held, None
                ghost.write(held)
                await ghost.drain()
        return None

    async def _pass_on(self, data: bytes) -> None:
        self.server_out.write(data)
        await self.server_out.drain()

    async def _cut_in_the_middle(self, data: bytes) -> None:
        if self.proxy.is_heard:
            self.is_muted = True
            await self._pass_on(data)
            await self.answered.wait()
        if self.proxy.is_silent:
            await self._fall_silent("silence")
        else:
            self.server_out.transport.abort()
            await self.proxy._happened("cut")

    async def _fall_silent(self, fault: str) -> None:
        """Nothing goes either way until the client gives up; the server is not told even then."""
        self.is_muted = self.is_half_open = True
        await self.proxy._happened(fault)
        while await self.client_in.read(2**16):
            pass

    async def _break(self, fault: str, data: bytes) -> None:
        """Returning cuts the line."""
        self.is_muted = True
        if fault == "half":
            await self._pass_on(data[: len(data) // 2])
        if fault in ("after", "delay", "unheard"):
            await self._pass_on(data)
            await self.answered.wait()
        if fault == "delay":
            await asyncio.sleep(DELAY_S)
        if fault in ("half-open", "unheard"):
            return await self._fall_silent(fault)
        if fault == "buffered":
            self.proxy._held = (self.server_out, data)
            self.client_out.transport.abort()
        else:
            self.server_out.transport.abort()  # before anything happens meanwhile: the ghost is gone
        await self.proxy._happened(fault)
        if fault == "buffered":
            await self.answered.wait()  # the ghost's COMMIT was read
        return None

    def cut(self) -> None:
        """Break both connections, with a reset; that to the server later, where it is half-open."""
        self.client_out.transport.abort()
        if self.is_half_open and not self.server_out.transport.is_closing():
            self.is_half_open = False
            self.proxy._half_open.append(self)
        else:
            self.server_out.transport.abort()


@contextlib.contextmanager
def running(target: int) -> Iterator[Proxy]:
    """A proxy to a port of this machine, for as long as the block runs."""
    proxy = Proxy(target)
    started = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        ended = asyncio.Event()
        loops.append((asyncio.get_running_loop(), ended))
        await proxy.serve(started.set, ended)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="proxy", daemon=True)
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        loop, ended = loops[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
