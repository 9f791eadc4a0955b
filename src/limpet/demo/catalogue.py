"""What the demo shop holds: products, pages, links and faults, all of it following from a few numbers.

Nothing here serves, reads a clock or draws at random: two shops with equal fields are equal byte for byte, so `truth`
can say, without one request, what a perfect crawl ends with. Product n stands on host n modulo `hosts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal

#: Products on one page of a listing.
LISTED = 12
#: Links from a product page to others of its host.
RELATED = 6
#: Tries that a passing fault spoils: one, or two. Fewer than the four tries that a crawler should give a page.
SPOILED_TRIES = (1, 2)

CATEGORIES = {
    "lamps": ("lamp", "lantern", "candlestick"),
    "chairs": ("chair", "stool", "bench"),
    "kettles": ("kettle", "teapot", "samovar"),
    "clocks": ("clock", "sundial", "hourglass"),
    "rugs": ("rug", "doormat", "kilim"),
}
#: Names outside ASCII, so that a page read in the wrong charset is a wrong record.
MAKERS = ("Åkerby", "Boréal", "Čapek", "Dolmen", "Garçon", "Gjøvik", "Hölzel", "Ípek", "いろは", "Корабль", "麒麟", "Łąka")

Fault = Literal["", "busy", "throttled", "reset", "short", "slow", "gone", "dead"]
FaultProfile = Literal["none", "mild", "harsh"]

#: Of a thousand pages, how many show each fault. `gone` (404) and `dead` (500) last and strike products alone;
#: `busy` (503), `throttled` (429), `reset` and `short` pass after one or two tries; `slow` is only slow.
FAULTS: dict[FaultProfile, dict[Fault, int]] = {
    "none": {},
    "mild": {"busy": 25, "throttled": 8, "reset": 15, "short": 10, "slow": 15, "gone": 6, "dead": 6},
    "harsh": {"busy": 60, "throttled": 20, "reset": 50, "short": 40, "slow": 40, "gone": 15, "dead": 15},
}
LASTING: frozenset[Fault] = frozenset({"gone", "dead"})
PASSING: frozenset[Fault] = frozenset({"busy", "throttled", "reset", "short"})

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#1d2b2a}
body{background:#f7f6f2}a{color:#0b6e69}header{border-bottom:2px solid #0b6e69;margin-bottom:1.5rem}h1{line-height:1.2}
ul{columns:2;padding-left:1.2rem}dl{display:grid;grid-template-columns:6rem 1fr}dt{color:#667}dd{margin:0}.price{font-weight:600}
"""


def dice(*key: object) -> int:
    """A number below 2**64 that follows from the key alone."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of a page, and the Content-Type that it is sent with."""

    content: bytes
    content_type: str = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """One shop, spread over loopback hosts 127.0.0.1, 127.0.0.2, ... on one port. Every page follows from these fields."""

    port: int = 0
    products: int = 300
    hosts: int = 4
    faults: FaultProfile = "none"
    seed: int = 1
    #: Spell every link in one way and send every page as UTF-8.
    plain: bool = False

    # -- what there is ---------------------------------------------------------------------

    def address(self, host: int) -> str:
        """The IP address of a host, counted from 0."""
        return f"127.0.0.{host + 1}"

    def origin(self, host: int) -> str:
        """`http://address:port`, without a slash at its end."""
        return f"http://{self.address(host)}:{self.port}"

    def starts(self) -> list[str]:
        """The start page of each host: from any of them every product can be reached, from all of them sooner."""
        return [f"{self.origin(host)}/" for host in range(self.hosts)]

    def host_of(self, product: int) -> int:
        """The host that a product stands on."""
        return product % self.hosts

    def shelf(self, host: int, category: str) -> range:
        """The products of one host in one category, ascending."""
        step = self.hosts * len(CATEGORIES)
        return range(host + self.hosts * list(CATEGORIES).index(category), self.products, step)

    def url(self, product: int) -> str:
        """The one canonical URL of a product's page."""
        return f"{self.origin(self.host_of(product))}/p/{product}"

    def category(self, product: int) -> str:
        """The category of a product."""
        return list(CATEGORIES)[product // self.hosts % len(CATEGORIES)]

    def record(self, product: int) -> dict[str, str | int]:
        """The fields that a product's page shows: url, sku, title, price (as text, two decimals) and stock."""
        roll = dice(self.seed, "product", product)
        nouns = CATEGORIES[self.category(product)]
        cents = 99 + dice(self.seed, "price", product) % 99_900
        return {
            "url": self.url(product),
            "sku": f"LP-{product:06d}",
            "title": f"{MAKERS[roll % len(MAKERS)]} {nouns[roll // 16 % len(nouns)]} {roll // 64 % 900 + 100}",
            "price": f"{cents // 100}.{cents % 100:02d}",
            "stock": roll // 65536 % 250,
        }

    def truth(self) -> Iterator[dict[str, str | int]]:
        """What a perfect crawl ends with, by product: `outcome` (done, gone, dead), `fault`, and the record where it is done."""
        for product in range(self.products):
            fault = self.fault(self.host_of(product), f"/p/{product}")
            outcome = fault if fault in LASTING else "done"
            fields = self.record(product) if outcome == "done" else {"url": self.url(product)}
            yield {"outcome": outcome, "fault": fault, **fields}

    def listing_urls(self) -> Iterator[str]:
        """The canonical URL of every page that shows no product: start pages and listings, each listing's query sorted."""
        for host in range(self.hosts):
            yield f"{self.origin(host)}/"
            for category in CATEGORIES:
                for number in range(1, self.page_count(host, category) + 1):
                    yield f"{self.origin(host)}/c/{category}?page={number}&sort=name"

    def page_count(self, host: int, category: str) -> int:
        """Pages of a listing: at least one, if an empty one."""
        return max(1, -(-len(self.shelf(host, category)) // LISTED))

    # -- what goes wrong -------------------------------------------------------------------

    def fault(self, host: int, path: str) -> Fault:
        """The fault that a page has, whatever its query; a page that is no product never has a lasting one."""
        if not path.startswith(("/p/", "/c/", "/old/")):
            return ""
        roll = dice(self.seed, "fault", host, path) % 1000
        for fault, share in FAULTS[self.faults].items():
            if roll < share:
                return fault if path.startswith("/p/") or fault not in LASTING else ""
            roll -= share
        return ""

    def spoils(self, host: int, path: str, attempt: int) -> bool:
        """Whether a passing fault still spoils this attempt (counted from 1) at a page."""
        return attempt <= SPOILED_TRIES[dice(self.seed, "tries", host, path) % len(SPOILED_TRIES)]

    # -- how it looks ----------------------------------------------------------------------

    def start_page(self, host: int) -> Body:
        """The page that links to the first page of every listing of a host."""
        links = [self._link(host, f"/c/{name}", "page=1&sort=name", name.title(), "start") for name in CATEGORIES]
        intro = f"<p>{len(range(host, self.products, self.hosts))} things to sit on, look at and drink from.</p>"
        return self._page(f"Barnacle Row, no. {host + 1}", f"{self.origin(host)}/", f"{intro}{_list(links)}")

    def listing(self, host: int, category: str, number: int) -> Body | None:
        """Page `number` (from 1) of a category; None past the end."""
        if category not in CATEGORIES or not 1 <= number <= self.page_count(host, category):
            return None
        shown = self.shelf(host, category)[(number - 1) * LISTED : number * LISTED]
        links = [self._link(host, f"/p/{product}", "", str(self.record(product)["title"]), number) for product in shown]
        more = ""
        if number < self.page_count(host, category):
            more = self._link(host, f"/c/{category}", f"page={number + 1}&sort=name", "next page", number, 'rel="next" ')
        staff = f'<a href="/staff/{category}">staff only</a>'  # robots.txt forbids it: fetching it is a breach
        url = f"{self.origin(host)}/c/{category}?page={number}&sort=name"
        return self._page(f"{category.title()}, page {number}", url, f"{_list(links)}<p>{more}</p><footer>{staff}</footer>")

    def product_page(self, product: int) -> Body:
        """A product: its record, others of its host, one by its old address, and one of the next host."""
        record = self.record(product)
        fields = "".join(f'<dt>{name}</dt><dd class="{name}">{record[name]}</dd>' for name in ("sku", "price", "stock"))
        title = escape(str(record["title"]))
        main = f"<dl>{fields}</dl><h2>See also</h2>{_list(self._related(product))}"
        return self._page(title, self.url(product), main, self.encoding(product), title_class="title")

    def encoding(self, product: int) -> str:
        """utf-8, utf-16 (named by the header) or gb18030 (named by the page alone, as many real pages do)."""
        roll = 0 if self.plain else dice(self.seed, "encoding", product) % 8
        return {6: "gb18030", 7: "utf-16"}.get(roll, "utf-8")

    def spell(self, host: int, path: str, query: str, salt: object) -> str:
        """One of many spellings of a link from a page of the same host; all of them are the same page."""
        whole = f"{path}?{query}" if query else path
        if self.plain:
            return whole
        first, rest = path[1], path[2:]
        ways = (
            whole,
            f"{whole}#reviews",
            f"{self.origin(host)}{whole}",
            f"HTTP{self.origin(host)[4:]}{whole}#",
            f"//{self.address(host)}:{self.port}{whole}",
            f"/about/../.{whole}",
            f"/%{ord(first):02x}{rest}?{query}",  # an escaped letter; without a query, an empty one
            f" {whole}\n",
            f"../{whole[1:]}",
            f"{path}?{'&'.join(reversed(query.split('&')))}",
        )
        return ways[dice(self.seed, "spelling", path, query, salt) % len(ways)]

    def _related(self, product: int) -> list[str]:
        host = self.host_of(product)
        here = range(host, self.products, self.hosts)
        others = [here[dice(self.seed, "related", product, k) % len(here)] for k in range(RELATED)]
        links = [self._link(host, f"/p/{other}", "", f"no. {other}", product) for other in others]
        old = dice(self.seed, "old", product) % self.products
        links.append(self._link(host, f"/old/{old}", "", f"no. {old}, formerly here", product))
        away = (product + 1) % self.products
        return [*links, f'<a href="{self.url(away)}">next door</a>']

    def _link(self, host: int, path: str, query: str, text: str, salt: object, attributes: str = "") -> str:
        return f'<a {attributes}href="{escape(self.spell(host, path, query, salt))}">{escape(text)}</a>'

    def _page(self, title: str, url: str, main: str, encoding: str = "utf-8", *, title_class: str = "name") -> Body:
        meta = '<meta charset="gb18030">' if encoding == "gb18030" else ""
        text = (
            f'<!doctype html><html lang="en"><head>{meta}<title>{title}</title>'
            f'<meta name="description" content="{title}, from the shops of Barnacle Row">'
            f'<link rel="canonical" href="{escape(url)}"><link rel="stylesheet" href="/style.css"></head>'
            f'<body><header><a href="/">Barnacle Row</a></header><h1 class="{title_class}">{title}</h1>'
            f"<main>{main}</main></body></html>\n"
        )
        content_type = "text/html" if encoding == "gb18030" else f"text/html; charset={encoding}"
        return Body(text.encode(encoding), content_type)


def _list(items: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
