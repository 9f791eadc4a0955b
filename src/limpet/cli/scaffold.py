"""`limpet new NAME`: a commented spider and its test, both of which run as they are.

Against the demo shop (`python -m limpet.demo.site serve --port 8800`), whose pages the spider reads; every
line that another site needs otherwise says so.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
import sys
from pathlib import Path

from limpet.cli.exits import Exit
from limpet.cli.printing import say, say_json
from limpet.errors import UsageError
from limpet.url import KeyProfile, canonicalise

#: The first page of the demo shop.
DEMO_START = "http://127.0.0.1:8800/"
#: Names that a file would hide, or that pytest would take for something else.
_TAKEN = frozenset({"limpet", "conftest", "pytest"}) | sys.stdlib_module_names

SPIDER = '''\
"""{name}: what it collects, in one line.

Kill it whenever you like, and run it again: it goes on where it was.

    limpet try {name}.py {start}
        one page: its records and links; nothing is written
    limpet run {name}.py --db {name}.db
        all pages
    limpet status --db {name}.db
        how far it is, and why it waits
    limpet export product --db {name}.db
        what it collected
    pytest test_{name}.py
        the test beside this file
"""

from datetime import UTC, datetime
from decimal import Decimal

from limpet import Page, Spider, Tx, field, record

spider = Spider(
    "{name}",
    start=["{start}"],
    # Who asks, and where to complain. robots.txt is obeyed under the first word.
    user_agent="{name}bot/1 (+https://example.com/bot)",
    # Which links are followed: those on the host of a start, or on its "domain", below its "prefix", or "any".
    scope="host",
    # Every limit is an option: see `limpet config`. A host is asked once a second unless this says otherwise
    # (or it is this machine).
    # delay_s=1.0,
    # max_pages=1000,
)


@record(key="url")  # what tells one record from another: a field, or several as a tuple
class Product:
    """One row of the dataset `product`. Types are columns; a new field has to be optional (| None)."""

    url: str
    sku: str
    title: str
    price: Decimal  # never a float: 12.30 stays 12.30
    stock: int
    seen_at: datetime = field(volatile=True)  # says nothing about the product: no part of what is compared


@spider.page("/p/{{number}}")  # pages of this path; the first handler in the file that fits takes a page
async def product(page: Page, tx: Tx, number: str) -> None:
    """What is collected of a product's page. All of it is stored with the page, or none of it."""
    tx.emit(
        Product(
            url=page.key_url,  # the canonical address: the same for every spelling
            sku=page.one(".sku"),  # the text of the first match; without a match the page is a dead letter
            title=page.one("h1.title"),
            price=Decimal(page.one(".price")),
            stock=int(page.one(".stock")),
            seen_at=datetime.now(UTC),
        )
    )
    tx.follow(page.links())  # those in scope; what is known already is not fetched again


@spider.page()  # every other page
async def listing(page: Page, tx: Tx) -> None:
    """A page that only leads on."""
    tx.follow(page.links())


if __name__ == "__main__":
    spider.main()  # `python {name}.py --db {name}.db` is the same as `limpet run {name}.py --db {name}.db`
'''

TEST = '''\
"""What {name}.py takes from a page: no network and no database. Run it with pytest."""

from decimal import Decimal

from limpet import Page, testing

from {name} import listing, product

# Save a real page for this: Page.from_file("product.html", url=...) reads it.
PRODUCT = """
<html><body>
  <h1 class="title">A lamp</h1>
  <dl><dd class="sku">LP-7</dd><dd class="price">12.30</dd><dd class="stock">4</dd></dl>
  <a href="/p/8#reviews">another</a> <a href="/">home</a> <a href="https://elsewhere.example/">away</a>
</body></html>
"""


def test_a_product_page_gives_one_record_and_its_links() -> None:
    """Every field is where it should be, and links out of scope are not followed."""
    page = Page.from_html(PRODUCT, url="{product_url}")
    ran = testing.run(product, page)
    assert ran.outcome == "done", ran.detail
    [record] = ran.records
    assert (record.url, record.sku, record.title) == ("{product_key}", "LP-7", "A lamp")
    assert (record.price, record.stock) == (Decimal("12.30"), 4)
    assert [link.handler for link in ran.links] == ["product", "listing"]


def test_a_product_page_without_a_price_is_a_dead_letter() -> None:
    """A page that is not as expected is never half a record."""
    page = Page.from_html("<h1 class='title'>A lamp</h1>", url="{product_url}")
    ran = testing.run(product, page)
    assert (ran.outcome, ran.records) == ("dead", [])


def test_a_listing_only_leads_on() -> None:
    """Every other page has no record."""
    ran = testing.run(listing, Page.from_html('<a href="/p/1">a</a>', url="{start}"))
    assert not ran.records
    assert [link.handler for link in ran.links] == ["product"]
'''


def new(args: argparse.Namespace) -> int:
    """Write NAME.py and test_NAME.py; neither of them replaces a file."""
    name = args.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,29}", name):
        raise UsageError(f"{name!r} cannot name a spider: expected a-z, 0-9 and _, beginning with a letter, at most 30 characters")
    if keyword.iskeyword(name) or name in _TAKEN or name.startswith("test_"):
        raise UsageError(f"{name!r} is a name of Python's own, or of pytest's: the spider's file would hide it; choose another")
    start = canonicalise(args.start or DEMO_START, KeyProfile.of()).request_url
    if any(char in start for char in '"\\{}'):
        raise UsageError(f"{start!r} cannot stand in a Python text as it is: write it into the file yourself")
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UsageError(f"{args.folder} is no folder")
    url = canonicalise("/p/7", KeyProfile.of(), base=start)
    facts = {"name": name, "start": start, "product_url": url.request_url, "product_key": url.text}
    files = {folder / f"{name}.py": SPIDER.format(**facts), folder / f"test_{name}.py": TEST.format(**facts)}
    if there := [str(file) for file in files if file.exists()]:
        raise UsageError(f"{' and '.join(there)} is there already, and is not replaced: choose another name")
    for file, text in files.items():
        with open(file, "x", encoding="utf-8") as out:
            out.write(text)
    spider, test = files
    if args.json:
        say_json({"files": [str(spider), str(test)], "start": start})
        return Exit.COMPLETE
    say(f"wrote {spider} and {test}\n")
    if not args.start:
        python = os.path.basename(sys.executable)
        say(f"  {python} -m limpet.demo.site serve --port 8800    # the shop that it reads, until you change it")
    say(f"  limpet try {spider} {start}\n  limpet run {spider} --db {name}.db\n  pytest {test}")
    return Exit.COMPLETE
