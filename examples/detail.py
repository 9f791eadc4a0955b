"""A detail collector: one paid call for each (feature, day), found by another call, and what was given up in a dataset of its own.

limpet run examples/detail.py --slot 2026-11-30 --param api=http://127.0.0.1:8800/api
"""

from collections.abc import AsyncIterator
from datetime import date

from limpet import Call, DeadTask, Http, Spider, Start, Tx, call, record

detail = Spider("detail", user_agent="detailbot/1 (+https://example.com/bot)")


@record(key=("feature_id", "day"))
class Detail:
    feature_id: str
    day: date
    rating: str
    reviews: int


@record(key="task")
class GivenUp:
    task: str
    reason: str


@detail.task(key=("page", "day"))  # a list costs nothing
async def features(page: int, day: date, *, http: Http, tx: Tx) -> None:
    found = (await http.get(f"{detail.params['api']}/features", params={"page": page})).json()
    for feature in found["features"]:
        tx.enqueue(call(one, feature_id=feature, day=day))
    if found["more"]:
        tx.enqueue(call(features, page=page + 1, day=day))


@detail.task(key=("feature_id", "day"), cost="0.5")
async def one(feature_id: str, day: date, *, http: Http, tx: Tx) -> None:
    found = (await http.get(f"{detail.params['api']}/feature", params={"id": feature_id})).json()
    tx.emit(Detail(feature_id=feature_id, day=day, rating=found["rating"], reviews=found["reviews"]))


@detail.dead
def given_up(task: DeadTask, tx: Tx) -> None:
    tx.emit(GivenUp(task=task.text, reason=task.reason))


@detail.start
async def first(start: Start) -> AsyncIterator[Call]:
    yield call(features, page=1, day=date.fromisoformat(start.slot))


if __name__ == "__main__":
    detail.main()
