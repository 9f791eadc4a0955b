"""Pages with a consent wall: what has a sku is content, whatever address it came from."""

from __future__ import annotations

from limpet import Page, Spider, Tx, record

circle = Spider("circle", user_agent="circlebot/1 (+https://example.com/bot)", concurrency=8, per_host=4, delay_s=0)


@record(key="sku")
class Content:
    """What is behind the wall."""

    sku: str


@circle.page()
async def page(page: Page, tx: Tx) -> None:
    """The content where there is any, and the links."""
    sku = page.css(".sku::text").get()
    if sku:
        tx.emit(Content(sku=sku))
    tx.follow(page.links())
