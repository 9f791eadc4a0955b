"""A rank tracker: asks a paid API for (keyword, day), once for each slot, and pays once.

    limpet run examples/serp.py --slot 2026-11-30 --param api=http://127.0.0.1:8800/api/serp --param keywords=keywords.csv

`keywords.csv` has the heading `keyword`. The slot is the day. The same again on a finished slot does nothing, and sends nothing.
"""

import csv
from collections.abc import AsyncIterator
from datetime import date

from limpet import Call, Http, Spider, Start, Tariff, Tx, UsageError, call, record

serp = Spider("serp", user_agent="serpbot/1 (+https://example.com/bot)")
serp.every("day", at="00:30", tz="Asia/Shanghai")

#: The API charges for an answer, and knows a call again by this header.
TARIFF = Tariff(charged=("2xx",), refunded=("4xx", "5xx", "timeout"), idempotency_header="Idempotency-Key")


@record(key=("keyword", "day", "url"))
class Result:
    keyword: str
    day: date
    rank: int
    title: str
    url: str


@serp.task(key=("keyword", "day"), cost=1, tariff=TARIFF)
async def ranks(keyword: str, day: date, *, http: Http, tx: Tx) -> None:
    reply = await http.get(serp.params["api"], params={"keyword": keyword, "day": day.isoformat()})
    for found in reply.json()["results"]:
        tx.emit(Result(keyword=keyword, day=day, rank=found["rank"], title=found["title"], url=found["url"]))


@serp.start
async def keywords(start: Start) -> AsyncIterator[Call]:
    if "api" not in start.params or "keywords" not in start.params:
        raise UsageError("give --param api=URL and --param keywords=FILE.csv")
    with open(start.params["keywords"], encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            yield call(ranks, keyword=row["keyword"], day=date.fromisoformat(start.slot))


if __name__ == "__main__":
    serp.main()
