"""Serves the demo shop on loopback, faults included.

    python -m limpet.demo.site serve --products 300 --faults mild --log requests.tsv
    python -m limpet.demo.site truth --products 300 --faults mild --port 8800 > truth.jsonl

Each host answers `/` (categories), `/c/<category>?page=<n>&sort=name` (listings), `/p/<n>` (products), `/old/<n>` (301 to
the product, on whatever host that stands), `/robots.txt` (forbids `/staff/`: a request there is a breach) and `/_stats`
(JSON: requests, repeats, breaches, peaks of concurrency; `/_stats?only=requests` is cheap to ask often).

Other programs start it with `running` (a thread of theirs) or `spawned` (a process of its own, ended with its parent).
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

from limpet.demo.catalogue import FAULTS, Shop
from limpet.demo.replies import Reply, Request, Site

#: Bytes of a request's head: a client that sends more is no crawler of this shop.
HEAD_BYTES_MAX = 32 * 1024
#: Ports to try before giving up where one port must be free on several addresses.
PORT_TRIES = 20
#: Seconds that a child has to end in, once its standard input is closed.
CHILD_END_S = 10


class Connection(asyncio.Protocol):
    """One client's connection: takes whole requests, one at a time, and sends what the site decides."""

    def __init__(self, site: Site, host: int, connections: set[Connection]) -> None:
        self._site = site
        self._host = host
        self._connections = connections
        self._received = b""
        self._waiting: tuple[asyncio.TimerHandle, Callable[[], None]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and stand among the open connections."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its type
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the reply that waits for its time, if there is one."""
        self._connections.discard(self)
        if self._waiting:
            timer, cut_off = self._waiting
            timer.cancel()
            cut_off()

    def abort(self) -> None:
        """Close at once, whatever waits to be sent."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer every whole request that came in, in order."""
        self._received += data
        while self._waiting is None and not self._transport.is_closing() and b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            self._answer(head)
        if len(self._received) > HEAD_BYTES_MAX:
            self._transport.abort()

    def _answer(self, head: bytes) -> None:
        request = _parse(head, self._host)
        if request is None:
            self._transport.write(Reply(400).encode(closes=True))
            self._transport.close()
            return
        arrived_at = time.monotonic()
        name, reply = self._site.arrived(request)

        def send() -> None:
            self._waiting = None
            # Counted first: whoever has an answer may rely on its line in the log.
            self._site.ended(request, name, arrived_at, reply.status if reply.ending == "whole" else 0)
            self._send(request, reply)

        def send_late() -> None:
            send()
            self.data_received(b"")  # what came in while this reply waited

        if reply.delay_s:
            timer = asyncio.get_running_loop().call_later(reply.delay_s, send_late)
            self._waiting = timer, lambda: self._site.ended(request, name, arrived_at, 0)
        else:
            send()

    def _send(self, request: Request, reply: Reply) -> None:
        # A body that may have come with a refused method is not read, so the connection cannot be used again.
        closes = request.closes or reply.status == 405
        whole = reply.encode(head_only=request.method == "HEAD", closes=closes)
        if reply.ending == "whole":
            self._transport.write(whole)
        else:
            self._transport.write(whole[: -len(reply.body) // 2])
        if reply.ending == "reset":
            _reset(self._transport)
        elif closes or reply.ending == "short":
            self._transport.close()


def _parse(head: bytes, host: int) -> Request | None:
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[1].startswith("/"):
        return None
    fields = {name.strip().lower(): value.strip().lower() for name, _, value in (text.partition(":") for text in lines)}
    return Request(host, words[0], words[1], closes=fields.get("connection") == "close" or words[2] == "HTTP/1.0")


def _reset(transport: asyncio.Transport) -> None:
    """End a connection with RST: without the linger option an abort can look like a normal end."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


# -- starting and stopping -----------------------------------------------------------------


def listen(shop: Shop) -> tuple[Shop, list[socket.socket]]:
    """Bind the shop's hosts: the shop as it can be served here, and a socket a host.

    Port 0 becomes a port that is free on every host. Where an address cannot be bound (macOS has 127.0.0.1 alone), the
    shop has the hosts before it. Raises OSError where a given port is taken.
    """
    for _ in range(PORT_TRIES):
        sockets: list[socket.socket] = []
        try:
            for host in range(shop.hosts):
                port = shop.port or (sockets[0].getsockname()[1] if sockets else 0)
                sockets.append(socket.create_server((shop.address(host), port), backlog=1024))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and sockets:
                shop = replace(shop, hosts=len(sockets))
            else:
                for opened in sockets:
                    opened.close()
                if error.errno == errno.EADDRINUSE and sockets and not shop.port:
                    continue
                raise
        return replace(shop, port=sockets[0].getsockname()[1]), sockets
    raise OSError(errno.EADDRINUSE, f"no port is free on all of {shop.hosts} loopback addresses")


async def serve(site: Site, sockets: Sequence[socket.socket], stop: asyncio.Event) -> None:
    """Serve until `stop` is set; every socket and connection is closed then."""
    loop = asyncio.get_running_loop()
    connections: set[Connection] = set()  # to end with the site: a client's keep-alive would outlive it

    def acceptor(host: int) -> Callable[[], Connection]:
        return lambda: Connection(site, host, connections)

    servers = [await loop.create_server(acceptor(host), sock=opened) for host, opened in enumerate(sockets)]
    try:
        await stop.wait()
    finally:
        for server in servers:
            server.close()
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)  # an aborted connection is closed on the loop's next turn


@contextmanager
def running(shop: Shop, **options: Any) -> Iterator[Site]:
    """Serve a shop from a thread of this process, on a free port if its port is 0; `options` are those of `Site`.

    The shop that is served, with its port, is the site's `shop`. Its `stats` may be read once the crawl is over;
    while requests come in, ask `/_stats`.
    """
    served, sockets = listen(shop)
    site = Site(served, **options)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(site, sockets, stop)), name="shop")
    thread.start()
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def spawned(shop: Shop, *, latency_ms: int = 0, log: str = "") -> Iterator[Shop]:
    """Serve a shop from a process of its own; gives the shop as it is served, with its port.

    The child ends when the block does, and also when this process dies in whatever way. Signals of the terminal do not
    reach it. Raises OSError where it cannot serve.
    """
    command = [sys.executable, "-Pm", "limpet.demo.site", "serve", "--until-eof", f"--log={log}", f"--latency={latency_ms}"]
    command += [f"--port={shop.port}", f"--products={shop.products}", f"--hosts={shop.hosts}", f"--seed={shop.seed}"]
    command += [f"--faults={shop.faults}", *(["--plain"] if shop.plain else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdin
        assert child.stdout
        try:
            starts = [word for word in child.stdout.readline().split() if word.startswith("http://")]
            if not starts:
                raise OSError(f"the demo shop did not start: {' '.join(command)} ended with {child.wait(CHILD_END_S)}")
            yield replace(shop, port=urlsplit(starts[0]).port or 0, hosts=len(starts))
        finally:
            child.stdin.close()
            try:
                child.wait(CHILD_END_S)
            except subprocess.TimeoutExpired:
                child.kill()


# -- the command line ----------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the shop, or print its truth, as the command line says; returns the exit code."""
    options = _parser().parse_args(arguments)
    shop = Shop(
        port=options.port,
        products=options.products,
        hosts=options.hosts,
        faults=options.faults,
        seed=options.seed,
        plain=options.plain,
    )
    if options.what == "truth":
        for row in shop.truth():
            print(json.dumps(row, ensure_ascii=False, sort_keys=True))
        return 0
    with ExitStack() as stack:
        log = stack.enter_context(open(options.log, "a", buffering=1, encoding="utf-8")) if options.log else None
        served, sockets = listen(shop)
        site = Site(served, options.latency / 1000, log)
        print(f"serving {served.products} products on {' '.join(served.starts())}", flush=True)
        with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
            runner.run(_serve_until_told(site, sockets, until_eof=options.until_eof))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m limpet.demo.site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Shop()
    parser.add_argument("what", choices=("serve", "truth"))
    parser.add_argument("--port", type=int, default=0, help="port of every host; 0, as without it: one that is free")
    parser.add_argument("--products", type=int, default=default.products)
    parser.add_argument("--hosts", type=int, default=default.hosts, help="loopback addresses, from 127.0.0.1 on")
    parser.add_argument("--faults", choices=tuple(FAULTS), default=default.faults)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--plain", action="store_true", help="spell links in one way, send every page as UTF-8")
    parser.add_argument("--latency", type=int, default=0, help="milliseconds that every answer takes")
    parser.add_argument("--log", default="", help="append a line a request: monotonic time of arrival, page, status (0: cut off)")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input does: with the parent process")
    return parser


async def _serve_until_told(site: Site, sockets: Sequence[socket.socket], *, until_eof: bool) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def wait_for_eof() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(stop.set)

    if until_eof:
        threading.Thread(target=wait_for_eof, daemon=True).start()
    await serve(site, sockets, stop)


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop of `uvloop` where the extra `fast` is installed; else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
