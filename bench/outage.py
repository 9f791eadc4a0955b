"""A site of 80,000 product pages that goes away at 50,000: what the second run asks for.

    python -m bench.outage                        # 80,000 pages, away at 50,000
    python -m bench.outage --pages 8000           # in small: away at 5,000

The site goes away in the middle of the crawl: every connection is closed without an answer. The crawl notices that it is the
host, and not its pages; then it is stopped, as somebody who sees it would. The site comes back, the same command is given
again, and the site counts what it is asked for. `tests/e2e/test_outages.py` is the same in the suite, with 800 pages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SPIDER = """
from limpet import Page, Spider, Tx, record

@record(key="sku")
class Product:
    sku: str
    title: str

shop = Spider("shop", delay_s=0.0)

@shop.page("/p/{sku}")
async def product(page: Page, tx: Tx, sku: str) -> None:
    tx.emit(Product(sku=sku, title=page.one("h1")))
"""

_REQUEST = re.compile(rb"GET (/\S*) HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*\r\n")


class Shop:
    """A site of product pages on loopback, on a thread of its own."""

    def __init__(self, away_at: int) -> None:
        self.away_at = away_at
        self.is_mended = False
        self.served = 0
        self.refused = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Shop:
        """Begin to listen."""
        self._thread.start()
        self._ready.wait()
        return self

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    @property
    def is_away(self) -> bool:
        """Whether every request fails."""
        return self.served >= self.away_at and not self.is_mended

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                found = _REQUEST.match(await reader.readuntil(b"\r\n\r\n"))
                path = found[1].decode() if found else "/"
                if path == "/robots.txt":
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                if self.is_away:
                    self.refused += 1
                    return
                self.served += 1
                body = f"<!doctype html><title>{path}</title><h1>Product {path}</h1>".encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def is_noticed(db: Path) -> bool:
    """Whether the host's row says that it is away."""
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as rows:
            return bool(rows.execute("SELECT 1 FROM host WHERE pause LIKE 'outage since%'").fetchall())
    except sqlite3.OperationalError:
        return False


def counted(db: Path, sql: str) -> int:
    """A number from the database."""
    with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as rows:
        return int(rows.execute(sql).fetchone()[0])


def main() -> int:
    """Run it, and print what came of it; 1 where a figure is not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=80_000, metavar="N", help="product pages of the site (80000)")
    parser.add_argument("--at", type=int, metavar="N", help="pages after which it goes away (five eighths)")
    args = parser.parse_args()
    at = args.at if args.at is not None else args.pages * 5 // 8
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), args.pages, at)


def measure(folder: Path, pages: int, at: int) -> int:
    """The two runs, and the figures."""
    shop = Shop(at).start()
    db, spider, starts = folder / "shop.db", folder / "shop.py", folder / "starts.txt"
    spider.write_text(SPIDER)
    starts.write_text("".join(f"http://127.0.0.1:{shop.port}/p/{number}\n" for number in range(pages)))
    command = [sys.executable, "-m", "limpet", "run", str(spider), "--from", str(starts), "--db", str(db), "--json", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIMPET_")}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    while not (shop.is_away and is_noticed(db)) and first.poll() is None:
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    stopped = json.loads(first.communicate()[0].splitlines()[-1])
    strikes = counted(db, "SELECT COALESCE(SUM(strike), 0) FROM attempt")
    print(f"first run:  {stopped['done']:,} pages done; the site went away: {shop.refused:,} requests failed")
    print(f"            {strikes} strikes, {stopped['dead']} dead letters, {stopped['pending']:,} pages left; exit {stopped['exit_code']}")
    served, shop.is_mended = shop.served, True
    began = time.monotonic()
    again = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, check=False)
    report = json.loads(again.stdout.splitlines()[-1])
    asked = shop.served - served
    print(f"second run: {asked:,} pages asked for in {time.monotonic() - began:.0f} s; exit {report['exit_code']}, {report['message']}")
    rows = counted(db, "SELECT COUNT(*) FROM shop_product")
    print(f"saved:      {1 - asked / pages:.1%} of its requests; {rows:,} products, {shop.served:,} pages served in all")
    shop.stop()
    right = (stopped["done"], stopped["dead"], strikes, asked, rows, report["exit_code"]) == (at, 0, 0, pages - at, pages, 0)
    print("as it must be" if right else "NOT as it must be")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
