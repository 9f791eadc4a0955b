"""A feed reader: what is newer than the last time, newest first. Killed half way it loses nothing: the mark moves at the end.

    limpet run examples/feed.py --slot 2026-11-30T08 --param api=http://127.0.0.1:8800/api/feed

Each slot is a sweep from the newest order down to where the last complete sweep ended, and ten numbers further, since some
orders come late. Orders are one dataset over all slots: what two sweeps saw is one row.
"""

from collections.abc import AsyncIterator

from limpet import Call, Http, Spider, Tx, call, record

feed = Spider("feed", user_agent="feedbot/1 (+https://example.com/bot)")

#: Orders that come late have a number at most so far below the newest.
LATE = 10


@record(key="number", scope="spider")
class Order:
    number: int
    item: str


@feed.task(key="before")
async def orders(before: int, *, http: Http, tx: Tx) -> None:
    """A page of orders below a number; 0 is the newest page."""
    mark = tx.mark("orders", order="desc", overlap=LATE)
    found = (await http.get(feed.params["api"], params={"before": before} if before else None)).json()["orders"]
    for order in found:
        mark.seen(order["number"])
        tx.emit(Order(number=order["number"], item=order["item"]))
    if found and mark.is_new(found[-1]["number"]):  # the whole page is new: go on below it
        tx.enqueue(call(orders, before=found[-1]["number"]))


@feed.start
async def newest() -> AsyncIterator[Call]:
    yield call(orders, before=0)


if __name__ == "__main__":
    feed.main()
