"""The ceiling: every page fetched and parsed as fast as the parts allow, and nothing stored.

    python bench/ceiling.py http://127.0.0.1:8800/ http://127.0.0.2:8800/

aiohttp with 64 requests in flight, a parser, a set of URLs in memory: no key, no scope but the hosts of
the starts, no robots.txt beyond one prefix, no record, no progress. What Limpet does on top of this is measured against it.
It takes selectolax where that is installed, which is faster than lxml and not safe on hostile pages; else lxml.
Prints the number of products that it saw.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

import aiohttp

#: Requests in flight, as in `examples/shop.py`.
CONCURRENCY = 64
#: What the shops' robots.txt files forbid.
FORBIDDEN = ("/private/", "/staff/")
FIELDS = ("h1.title", ".sku", ".price", ".stock")

#: What is read of a page: whether it is a product, and every link as it is written.
Read = Callable[[bytes], tuple[bool, list[str]]]


def by_selectolax() -> Read:
    """The reader that selectolax makes; ImportError without it."""
    from selectolax.lexbor import LexborHTMLParser

    def read(body: bytes) -> tuple[bool, list[str]]:
        page = LexborHTMLParser(body)
        found = page.css_first(FIELDS[0])
        texts = [page.css_first(field).text() for field in FIELDS] if found is not None else []
        return bool(texts), [href for link in page.css("a") if (href := link.attributes.get("href"))]

    return read


def by_lxml() -> Read:
    """The reader that lxml makes, with compiled XPath."""
    from lxml import etree
    from parsel.csstranslator import HTMLTranslator

    fields = [etree.XPath(f"string(({HTMLTranslator().css_to_xpath(field)})[1])", smart_strings=False) for field in FIELDS]
    links = etree.XPath("//a/@href", smart_strings=False)

    def read(body: bytes) -> tuple[bool, list[str]]:
        tree = etree.fromstring(body, etree.HTMLParser(encoding="utf-8"))
        texts = [field(tree) for field in fields]
        return bool(texts[0]), links(tree)

    return read


async def crawl(starts: list[str], read: Read) -> int:
    """Fetch and read everything that the starts lead to on their hosts; the number of products."""
    hosts = {urlsplit(start).hostname for start in starts}
    seen: set[str] = set()
    queue: asyncio.Queue[str] = asyncio.Queue()
    products = 0

    def add(url: str) -> None:
        parts = urlsplit(url)
        if url not in seen and parts.hostname in hosts and not parts.path.startswith(FORBIDDEN):
            seen.add(url)
            queue.put_nowait(url)

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal products
        while True:
            url = await queue.get()
            async with session.get(url, allow_redirects=False) as answer:
                body = await answer.read()
            if answer.status in (301, 302):
                add(urljoin(url, answer.headers["location"]))
            elif answer.status == 200:
                is_product, links = read(body)
                products += is_product
                for link in links:
                    add(urljoin(url, link).partition("#")[0])
            queue.task_done()

    for start in starts:
        add(start)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
        workers = [asyncio.create_task(work(session)) for _ in range(CONCURRENCY)]
        await queue.join()
        for worker in workers:
            worker.cancel()
    return products


def main() -> None:
    """Crawl from the URLs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="+")
    parser.add_argument("--parser", choices=("selectolax", "lxml"), help="selectolax where it is installed, as without it")
    options = parser.parse_args()
    try:
        read = by_lxml() if options.parser == "lxml" else by_selectolax()
    except ImportError:
        if options.parser:
            raise
        read = by_lxml()
    print(asyncio.run(crawl(options.starts, read)))


if __name__ == "__main__":
    main()
