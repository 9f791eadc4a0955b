"""The demo shop, with pages whose handler does something dreadful: `--param bad=3,7 --param kind=kill`."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from limpet import Page, Spider, Tx, record

thorn = Spider("thorn", user_agent="thornbot/1 (+https://example.com/bot)", hosts=["127.0.0.*"], concurrency=8, per_host=4, delay_s=0)


@record(key="sku")
class Product:
    """A product."""

    sku: str
    title: str
    number: int


@thorn.page("/p/{number}")
async def product(page: Page, tx: Tx, number: int) -> None:
    """The record of a product, unless it is one of the bad ones."""
    tx.follow(page.links())
    if thorn.params.get("bad") == "all" or str(number) in thorn.params.get("bad", "").split(","):
        harm(thorn.params["kind"])
    tx.emit(Product(sku=page.one(".sku"), title=page.one("h1.title"), number=number))


def harm(kind: str) -> None:
    """What a page can do to the process that reads it."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise LookupError("this page is not as it was")
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass


@thorn.page()
async def listing(page: Page, tx: Tx) -> None:
    """Every other page only leads on."""
    tx.follow(page.links())
