"""A shop with products on several hosts: each product once, whatever the spelling of its links.

    limpet run examples/shop.py --db shop.db --start http://127.0.0.1:8800/
    limpet export product --db shop.db

Kill it whenever you like, and run it again.
"""

from decimal import Decimal

from limpet import Page, Spider, Tx, record

shop = Spider(
    "shop",
    start=["http://127.0.0.1:8800/"],
    user_agent="shopbot/1 (+https://example.com/bot)",  # who asks, and where to complain
    hosts=["127.0.0.*"],  # links lead from one host of the shop to the next
    concurrency=64,
    per_host=16,
    delay_s=0,  # our own machine: there is nobody to be polite to
)


@record(key="url")
class Product:
    """A product, as its page shows it."""

    url: str
    sku: str
    title: str
    price: Decimal  # never a float: 12.30 stays 12.30
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
