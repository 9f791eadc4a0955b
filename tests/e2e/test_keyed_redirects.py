"""A keyed call follows its redirects within its try: each hop is paced by whom it asks, billed, and told no credential of others."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from limpet import Http, Spider, Tariff, Tx, record, testing
from limpet.testing import SentRequest
from tests.e2e.conftest import Limpet
from tests.e2e.sites import Reply, moved, serving

API = "https://api.test"
OWN = {"Authorization": "Bearer x", "Cookie": "a=b", "X-Api-Key": "x", "X-Request-Name": "mine", "Accept-Language": "no"}

spider = Spider("redirected", user_agent="redirected/1 (+http://127.0.0.1/bot)")


@record(key="n")
class Answered:
    """Who answered at last."""

    n: int
    status: int
    url: str


@spider.task(key="n", cost=1, tariff=Tariff(idempotency_header="X-Call"))
async def one(n: int, method: str = "GET", *, http: Http, tx: Tx) -> None:
    """Asks once, in one way or the other."""
    reply = await (http.post(f"{API}/v1", json={"n": n}, headers=OWN) if method == "POST" else http.get(f"{API}/v1", headers=OWN))
    tx.emit(Answered(n, reply.status, reply.url))


def asked(answers: Callable[[SentRequest], object], method: str = "GET") -> testing.Ran:
    """One call, and what it came to."""
    return testing.run_call(one, {"n": 1, "method": method}, answers=answers)


def redirect(to: str, status: int = 302) -> object:
    """An answer that leads elsewhere."""
    return testing.answer("", status=status, headers={"Location": to})


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [(301, "GET", "GET"), (308, "GET", "GET"), (301, "POST", "GET"), (302, "POST", "GET"), (303, "POST", "GET"), (307, "POST", "POST"),
     (308, "POST", "POST")],
)  # fmt: skip
def test_a_redirect_is_followed_with_the_method_and_body_that_the_fetch_standard_says(status: int, method: str, then: str) -> None:
    """On its own origin with every header; the bill counts both requests, and pays for the last one."""
    ran = asked(lambda sent: redirect("/v2", status) if sent.url.endswith("/v1") else {"ok": 1}, method)
    assert (ran.outcome, ran.records) == ("done", [Answered(1, 200, f"{API}/v2")]), ran.detail
    first, last = ran.requests
    assert (first.method, last.method, last.url) == (method, then, f"{API}/v2")
    assert last.body == (first.body if then == method else b"")
    assert {name: last.headers[name] for name in (*OWN, "X-Call")} == {name: first.headers[name] for name in (*OWN, "X-Call")}
    assert ran.charge is not None
    assert (ran.charge.outcome, ran.charge.credits) == ("charged", 1)


@pytest.mark.parametrize("to", ["https://other.test/v1", "https://api.test:444/v1", "http://api.test/v1"])
def test_nothing_secret_goes_to_another_origin(to: str) -> None:
    """Nor the idempotency key, which is between us and the one who was asked, whatever its header is called."""
    ran = asked(lambda sent: redirect(to) if sent.url == f"{API}/v1" else {"ok": 1})
    assert ran.outcome == "done"
    assert set(ran.requests[0].headers) >= {*OWN, "X-Call"}
    assert {name for name in ran.requests[1].headers if name in {*OWN, "X-Call"}} == {"X-Request-Name", "Accept-Language"}


def test_a_circle_of_redirects_ends_with_a_strike_and_costs_nothing() -> None:
    """After as many hops as the settings say."""
    ran = asked(lambda sent: redirect("/v1"))
    assert (ran.outcome, ran.reason, len(ran.requests)) == ("failed", "redirect loop", 11)
    assert ran.charge is not None
    assert (ran.charge.outcome, ran.charge.credits) == ("refunded", 0)


def test_a_redirect_to_what_cannot_be_asked_is_dead() -> None:
    """No other try would lead elsewhere."""
    ran = asked(lambda sent: redirect("ftp://h.test/"))
    assert (ran.outcome, ran.reason) == ("dead", "bad redirect")


SPIDER = """
from limpet import Spider, call, record

moving = Spider("moving", user_agent="moving/1 (+http://127.0.0.1/bot)")


@record(key="n")
class Answered:
    n: int
    url: str


@moving.task(key="n", cost=1)
async def one(n: int, *, http, tx):
    reply = await http.get(moving.params["api"], params={"n": n})
    tx.emit(Answered(n, reply.url))
    if moving.params.get("broken"):
        raise ValueError("later")


@moving.start
async def asked(start):
    for n in range(3):
        yield call(one, n=n)
"""


def test_a_moved_api_is_followed_paced_and_paid_for_once(limpet: Limpet, tmp_path: Path) -> None:
    """The answer at the end is kept: a handler that is mended later sends nothing again, not even the first hop."""
    (tmp_path / "moving.py").write_text(SPIDER, encoding="utf-8")

    at: dict[str, list[float]] = defaultdict(list)

    def answer(address: str, path: str, times: int) -> Reply:
        at[address].append(time.monotonic())
        return moved(site.url(f"/new{path[path.index('?') :]}", host=1), 308) if path.startswith("/old") else Reply("{}")

    with serving(answer, hosts=2) as site:
        words = ["run", "moving.py", "--db", "moving.db", "--param", f"api={site.url('/old')}", "--json"]
        words += ["--delay", "0.2", "--per-host", "1"]
        broken = limpet(*words, "--param", "broken=1")
        assert (broken.code, broken.json["dead"]) == (3, 3)
        for times in at.values():
            assert all(later - earlier > 0.15 for earlier, later in pairwise(times)), "each host has its own pace"
        assert limpet("retry", "--db", "moving.db", "--json").code == 0
        assert limpet(*words).code == 0
        assert sorted(site.asked.values()) == [1] * 6
    costs = [json.loads(line) for line in limpet("cost", "--db", "moving.db", "--by", "host", "--by", "outcome", "--json").lines]
    charged = [(row["host"], row["credits"], row["requests"]) for row in costs if row.get("outcome") == "charged"]
    assert charged == [(f"127.0.0.2:{site.port}", "3", 6)]
    urls = {json.loads(line)["url"] for line in limpet("export", "answered", "--db", "moving.db").lines}
    assert urls == {site.url(f"/new?n={n}", host=1) for n in range(3)}
