"""A spider with a schedule and the small site that it collects: a list of products, whose prices are what a test says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import IO, Any

from limpet.store import slots
from limpet.store.views import reading
from tests.e2e.sites import GONE, Reply, Served, page, serving

SHANGHAI = '"day", at="00:30", tz="Asia/Shanghai"'

SPIDER = '''
from limpet import Page, Spider, Tx, record

prices = Spider("prices", start=["{origin}/"], user_agent="prices/1 (+http://127.0.0.1/bot)", shards=8)
{every}


@record(key="sku")
class Price:
    """A product's price."""

    sku: str
    price: int


@prices.page("/p/{{sku}}")
async def product(page: Page, tx: Tx, sku: str) -> None:
    """One product."""
    tx.emit(Price(sku=sku, price=int(page.one("h1"))))


@prices.page()
async def listing(page: Page, tx: Tx) -> None:
    """The list."""
    tx.follow(page.links())
'''


@dataclass
class Daily:
    """The site, the spider's file, the database, and what the site does wrong at the moment."""

    site: Served
    file: Path
    db: str
    products: int
    price: Callable[[int], int] = lambda number: 100 + number
    broken: set[int] = field(default_factory=set)  # products whose page has no price: their handler raises
    missing: set[int] = field(default_factory=set)  # products that are not in the list
    held: set[int] = field(default_factory=set)  # products whose answer waits for `go`
    waiting: Event = field(default_factory=Event)  # somebody waits for such an answer
    go: Event = field(default_factory=Event)

    def answer(self, address: str, path: str, asked: int) -> Reply:
        """What the site says."""
        if path == "/":
            return page(*(f"/p/{number}" for number in range(self.products) if number not in self.missing))
        if not path.startswith("/p/"):
            return GONE
        number = int(path.removeprefix("/p/"))
        if number in self.held:
            self.waiting.set()
            self.go.wait(300)
        return page(title="sold out" if number in self.broken else str(self.price(number)))

    @property
    def asked(self) -> dict[str, int]:
        """How often each page was asked for, by its path; robots.txt is no page."""
        found = {name.partition("/")[2]: number for name, number in self.site.asked.items()}
        return {path: number for path, number in found.items() if path != "robots.txt"}

    def forget(self) -> None:
        """Count anew."""
        self.site.asked.clear()

    def states(self) -> dict[str, str]:
        """Slot -> what there is of it, in the order in which the jobs were made."""
        with reading(self.db) as store:
            return {slot: str(slots.look(store.db, slot, job).state) for slot, job in slots.jobs_by_slot(store.db, "prices").items()}

    def command(self, name: str, *words: object) -> list[str]:
        """A command line for a process of its own."""
        return [sys.executable, "-m", "limpet", name, str(self.file), "--db", self.db, "--quiet", *map(str, words)]

    def start(self, name: str, *words: object, said: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        """Such a process; `said` takes its stderr."""
        return subprocess.Popen(self.command(name, *words), stdout=subprocess.PIPE, stderr=said, text=True)


def last_json(text: str) -> dict[str, Any]:
    """The last of the objects that a command printed."""
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


@contextmanager
def daily(folder: Path, every: str = SHANGHAI, *, products: int = 5, db: str = "") -> Iterator[Daily]:
    """A site that is served, and a spider's file for it; its database is a file beside that, unless another one is named."""
    made: list[Daily] = []
    with serving(lambda address, path, asked: made[0].answer(address, path, asked)) as site:
        file = folder / "prices.py"
        file.write_text(SPIDER.format(origin=site.origin(), every=f"prices.every({every})" if every else ""), encoding="utf-8")
        made.append(Daily(site, file, db or str(folder / "prices.db"), products))
        try:
            yield made[0]
        finally:
            made[0].go.set()
