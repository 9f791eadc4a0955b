"""The demo shop into two datasets from one page, with a place between the two where the process may die."""

from __future__ import annotations

from decimal import Decimal

from limpet import Page, Spider, Tx, record
from limpet.failpoint import failpoint

shelf = Spider("shelf", user_agent="shelfbot/1 (+https://example.com/bot)", hosts=["127.0.0.*"], concurrency=8, per_host=4, delay_s=0)


@record(key="url")
class Product:
    """What a product's page says of the thing itself."""

    url: str
    sku: str
    title: str
    price: Decimal


@record(key="sku")
class Stock:
    """How many there are; emitted after the product, by the same task."""

    sku: str
    pieces: int


@shelf.page("/p/{_}")
async def product(page: Page, tx: Tx) -> None:
    """Two records of two datasets, which are stored both or neither, and the links."""
    sku = page.one(".sku")
    tx.emit(Product(url=page.key_url, sku=sku, title=page.one("h1.title"), price=Decimal(page.one(".price"))))
    failpoint("between_emits")
    tx.emit(Stock(sku=sku, pieces=int(page.one(".stock"))))
    tx.follow(page.links())


@shelf.page()
async def listing(page: Page, tx: Tx) -> None:
    """Every other page only leads on."""
    tx.follow(page.links())
