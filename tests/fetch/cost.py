"""CPU per page of `Client.exchange` against aiohttp's bare `session.get().read()`, and of a `Page`.

    python -m tests.fetch.cost            # loopback server in another process; ratios are what counts

Not a test: figures depend on the machine. Rounds are interleaved, and the median of each is printed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import time

import aiohttp

from limpet.fetch.http import Client, Request
from limpet.settings import Settings

LINKS = b"".join(b'<li><a href="/p/%d">product %d</a></li>' % (n, n) for n in range(11))
PAGE = (
    b'<!doctype html><html lang="en"><head><title>A product</title><meta name="description" content="x"></head><body>'
    b'<h1 class="title">Caf\xc3\xa9</h1><span class="sku">S-1</span><span class="price">12.30</span>'
    b'<span class="stock">7</span><p>' + b"lorem ipsum dolor " * 60 + b"</p><ul>" + LINKS + b"</ul></body></html>"
)
PER_ROUND = 1500
ROUNDS = 9
CONCURRENCY = 16


def server(port: multiprocessing.Queue[int]) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(answer * data.count(b"\r\n\r\n"))  # type: ignore[attr-defined]

    async def main() -> None:
        listening = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
        port.put(listening.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def cpu_per_call(call: object) -> float:
    started = time.process_time()

    async def worker() -> None:
        for _ in range(PER_ROUND // CONCURRENCY):
            await call()  # type: ignore[operator]

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return (time.process_time() - started) * 1000 / (PER_ROUND // CONCURRENCY * CONCURRENCY)


async def fetching(port: int) -> None:
    url = f"http://127.0.0.1:{port}/p/1"
    async with Client(Settings(), user_agent="cost/1") as client, aiohttp.ClientSession() as session:

        async def exchange() -> None:
            await client.exchange(Request(url))

        async def bare() -> None:
            async with session.get(url) as response:
                await response.read()

        calls = {"aiohttp session.get().read()": bare, "Client.exchange": exchange}
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                spent[name].append(await cpu_per_call(call))
        for name, figures in spent.items():
            print(f"{name:32} {statistics.median(figures):.3f} ms")
        ratios = [b / a for a, b in zip(*spent.values(), strict=True)]
        print(f"{'ratio (median of rounds)':32} {statistics.median(ratios):.2f}")


def parsing() -> None:
    from limpet.fetch.message import Answer
    from limpet.fetch.page import Page

    answer = Answer("http://127.0.0.1/p/1", 200, (("Content-Type", "text/html; charset=utf-8"),), PAGE)

    def whole() -> None:
        page = Page(answer, requested_url=answer.url, key_url=answer.url)
        for selector in (".title", ".sku", ".price::text", ".stock"):
            page.one(selector)
        page.links()

    def links_only() -> None:
        Page(answer, requested_url=answer.url, key_url=answer.url).links()

    def joined() -> None:
        for anchor in Page(answer, requested_url=answer.url, key_url=answer.url).links():
            _ = anchor.url

    for name, call in {
        "parse, links(), 4 x one()": whole,
        "parse, links()": links_only,
        "parse, links(), 11 x url": joined,
    }.items():
        figures = []
        for _ in range(ROUNDS):
            started = time.process_time()
            for _ in range(PER_ROUND):
                call()
            figures.append((time.process_time() - started) * 1000 / PER_ROUND)
        print(f"{name:32} {statistics.median(figures):.3f} ms")


def main() -> None:
    print(f"page of {len(PAGE):,} bytes, Python {sys.version.split()[0]}")
    port: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(port,), daemon=True)
    process.start()
    try:
        asyncio.run(fetching(port.get(timeout=60)))
    finally:
        process.terminate()
    parsing()


if __name__ == "__main__":
    main()
