"""A map collector: asks a paid API for the places around a point, by (keyword, lat, lng, day).

A number in a key needs one way of writing it: `places(5)` is about a metre. 39.90419 and 39.904190 are one task, paid for once.

    limpet seed examples/maps.py --from points.csv --slot 2026-11-30          # heading: keyword,lat,lng
    limpet run examples/maps.py --slot 2026-11-30 --param api=http://127.0.0.1:8800/api/places --budget 500
"""

from datetime import date
from decimal import Decimal
from typing import Annotated

from limpet import Http, Spider, Tariff, Tx, places, record

maps = Spider("maps", user_agent="mapsbot/1 (+https://example.com/bot)")

Degrees = Annotated[Decimal, places(5)]

#: The header says what a call took: a dense area costs more.
TARIFF = Tariff(credits_header="X-Credits-Charged", idempotency_header="Idempotency-Key")


@record(key=("day", "place"))
class Place:
    day: date
    place: str
    name: str
    lat: Decimal
    lng: Decimal


@maps.task(key=("keyword", "lat", "lng", "day"), cost=1, tariff=TARIFF)
async def around(keyword: str, lat: Degrees, lng: Degrees, day: date, *, http: Http, tx: Tx) -> None:
    reply = await http.post(maps.params["api"], json={"keyword": keyword, "lat": str(lat), "lng": str(lng)})
    found = reply.json()["places"]
    tx.tally("places", len(found))  # one counter over all workers; two points may see the same place
    for place in found:
        tx.emit(Place(day=day, place=place["id"], name=place["name"], lat=Decimal(place["lat"]), lng=Decimal(place["lng"])))


if __name__ == "__main__":
    maps.main()
