"""The spider of `limpet demo`: every product of the shop, once, whatever the spelling of its links."""

from __future__ import annotations

from decimal import Decimal

from limpet.engine.spider import Spider
from limpet.engine.tx import Tx
from limpet.fetch.page import Page
from limpet.record import record

shop = Spider(
    "shop",
    user_agent="limpet-demo/1 (+http://127.0.0.1/)",
    hosts=["127.0.0.*"],  # links lead from one host of the shop to the next
    concurrency=32,
    per_host=8,
    delay_s=0,  # our own machine: there is nobody to be polite to
    commit_pages=40,  # a crawl of seconds, killed on the way: small commits, so that a kill costs few requests
    commit_ms=250,
)


@record(key="url")
class Product:
    """A product, as its page shows it."""

    url: str
    sku: str
    title: str
    price: Decimal
    stock: int


@shop.page("/p/{_}")
async def product(page: Page, tx: Tx) -> None:
    """The record of a product, and the links to others."""
    tx.emit(
        Product(
            url=page.key_url,
            sku=page.one(".sku"),
            title=page.one("h1.title"),
            price=Decimal(page.one(".price")),
            stock=int(page.one(".stock")),
        )
    )
    tx.follow(page.links())


@shop.page()
async def listing(page: Page, tx: Tx) -> None:
    """Every other page: it only leads on."""
    tx.follow(page.links())


if __name__ == "__main__":
    shop.main()
