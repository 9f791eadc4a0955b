"""`limpet status` of collecting: budgets, unknown charges, high-water marks, providers that are away, on each database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from limpet import policy
from limpet.batch import CREDIT, Billed, Charge, Claim, Grant, HostRow, Link, Seen, Want
from limpet.store import Store, charges, requests, shared
from limpet.store.overview import status
from limpet.task import Outcome, ShardId, TaskKey
from limpet.url import digest16, host_id
from tests.conftest import Hire, on_sqlite
from tests.e2e.conftest import Limpet
from tests.store.hands import SHARDS, Hand, dead, done, found_job

DAY = "2026-11-30"


def call(number: int, shard: int = 0) -> Link:
    """A keyed task in a shard."""
    bucket = next(b for b in range(64) if host_id(f"ask+{b:02}") % SHARDS == shard)
    text = f'call://ask+{bucket:02}/{{"n":{number}}}'
    return Link(ShardId(shard), host_id(f"ask+{bucket:02}"), TaskKey(digest16(text)), text, text, handler="ask", payload="{}")


def draw(hand: Hand, shard: int, day_budget: int = 0, tasks: int = 9) -> Sequence[Claim]:
    """Claim with an allowance of the job, and of the day where that has a budget."""
    grant = Grant(CREDIT, DAY, charges.day_purse("shop", DAY), day_budget * CREDIT) if day_budget else Grant(CREDIT)
    want = Want(tasks, tasks, costs={"ask": CREDIT}, day=grant.day)
    return hand.commit(hand.part(shard, grant=grant), want={ShardId(shard): want}).claims


def ended(hand: Hand, claim: Claim, state: Billed = Billed.CHARGED) -> None:
    """A try whose charge came to that."""
    hand.finish(replace(done(claim), charge=Charge(state, CREDIT if state is Billed.CHARGED else 0, "api.test", 1, "status 200")))


def told(limpet: Limpet, store: Store, *words: str) -> tuple[dict[str, Any], str]:
    """The one job as JSON, and as text on one line."""
    (job,) = limpet("status", "--db", store.dsn, "--json", *words).json["jobs"]
    return job, " ".join(limpet("status", "--db", store.dsn, *words).out.split())


# -- money -----------------------------------------------------------------------------------------


def test_status_says_what_is_spent_of_which_budgets_and_what_is_unknown(limpet: Limpet, store: Store, hire: Hire) -> None:
    """Charged, reserved and unknown are spent; what shards hold unused is not, whatever was drawn."""
    w, x = hire(0, 1), hire(take=False)
    store.set_budget(640 * CREDIT)
    w.seed(*(call(n) for n in range(4)))
    one, two, three, four = draw(w, 0, day_budget=320)
    ended(w, one)
    ended(w, two, Billed.REFUNDED)
    ended(w, three, Billed.UNKNOWN)
    job, text = told(limpet, store)
    money = {"spent_micro": 3 * CREDIT, "budget_micro": 640 * CREDIT, "unknown": 1, "unknown_micro": CREDIT}
    day = {"day": DAY, "spent_micro": 3 * CREDIT, "budget_micro": 320 * CREDIT}
    assert job["money"] == {**money, "day": day}
    assert "budget: 3 of 640 credits spent or reserved" in text
    assert f"budget of {DAY}: 3 of 320 credits spent or reserved" in text
    assert "1 unknown charge of 1 credit: `limpet cost settle`" in text
    x.succeed_to(w)
    assert four.id not in x.claims
    job, text = told(limpet, store)
    assert job["money"] == {**money, "day": day, "unknown": 2, "unknown_micro": 2 * CREDIT}
    assert "2 unknown charges of 2 credits" in text


def test_a_budget_that_is_used_up_is_the_reason_why_nobody_works(limpet: Limpet, store: Store, hire: Hire) -> None:
    """The job's, or the day's, with the option that goes on; one that has something left is only named."""
    w = hire(0)
    store.set_budget(2 * CREDIT)
    w.seed(*(call(n) for n in range(4)))
    (claim,) = draw(w, 0, day_budget=1)
    ended(w, claim)
    assert told(limpet, store)[0]["why"] == ""
    w.leave()
    why = f"no worker is running; budget of {DAY}: 1 of 1 credit spent or reserved, and `limpet run` goes on with a larger --budget-day"
    assert told(limpet, store)[0]["why"] == why
    x = hire(take=False)
    x.succeed_to(w)
    (claim,) = draw(x, 0, day_budget=5)
    ended(x, claim)
    x.leave()
    why = "no worker is running; budget: 2 of 2 credits spent or reserved, and `limpet run` goes on with a larger --budget"
    assert told(limpet, store)[0]["why"] == why
    store.set_budget(4 * CREDIT)
    assert "with a larger --max-pages or --budget where that ended it" in told(limpet, store)[0]["why"]


def test_a_job_without_a_limit_says_what_it_costs_and_one_without_costs_nothing(limpet: Limpet, store: Store, hire: Hire) -> None:
    """Null, and no line."""
    assert told(limpet, store)[0]["money"] is None
    assert "credits" not in told(limpet, store)[1]
    w = hire(0)
    w.seed(call(1))
    (claim,) = draw(w, 0)
    ended(w, claim)
    job, text = told(limpet, store)
    assert job["money"] == {"spent_micro": CREDIT, "budget_micro": None, "day": None, "unknown": 0, "unknown_micro": 0}
    assert "cost: 1 credit spent or reserved, and there is no budget" in text
    assert "unknown" not in text


def test_the_money_of_a_large_job_is_told_like_that_of_a_small_one(store: Store, hire: Hire) -> None:
    """What was spent follows from the purse and the shards, and unknown charges from their index."""
    w = hire(0)
    w.seed(*(call(n) for n in range(3)))
    for claim in draw(w, 0):
        ended(w, claim, Billed.UNKNOWN)
    short, whole = (status(w.store, w.job, whole=whole).money for whole in (False, True))
    assert short == whole
    assert short is not None
    assert (short.unknown, short.unknown_amount) == (3, 3 * CREDIT)


# -- marks -----------------------------------------------------------------------------------------


def sweep(hand: Hand, low: int, high: int, *, shard: int = 0, gaps: bool = False) -> None:
    """A page of orders that was seen."""
    (claim,) = hand.claim(1, shard)
    hand.finish(replace(done(claim), seen=(Seen("orders", "ask", f"int:{low}", f"int:{high}", high - low + 1, gaps),)))


def test_status_says_where_a_mark_is_and_what_the_sweep_saw(limpet: Limpet, store: Store, hire: Hire) -> None:
    """Not set, candidates, moved, and a gap where the next sweep does not reach down to it."""
    w = hire()
    w.seed(call(1), call(2, 1))
    assert told(limpet, store)[0]["marks"] == []
    sweep(w, 51, 60)
    job, text = told(limpet, store)
    mark = {"name": "orders", "type": "int", "value": None, "low": "51", "high": "60", "seen": 10, "moved": False, "gap": "", "held": ""}
    assert job["marks"] == [mark]
    assert "mark orders: not set; this sweep saw 51 to 60, 10 values, and moves it when it is complete" in text
    sweep(w, 41, 50, shard=1)
    shared.move_marks(w.db, w.job)
    job, text = told(limpet, store)
    assert job["marks"] == [{**mark, "value": "60", "low": "41", "seen": 20, "moved": True}]
    assert "mark orders: 60, moved when this job was complete; this sweep saw 41 to 60, 20 values" in text
    store.job = None
    found_job(store, "next")
    again = Hand.on(store)
    again.take()
    again.seed(call(3))
    job, text = told(limpet, store, "--slot", "next")
    before = {"value": "60", "low": None, "high": None, "seen": 0}
    assert job["marks"] == [{**mark, **before}]
    assert "mark orders: 60 " in f"{text} "
    sweep(again, 71, 80, gaps=True)
    shared.move_marks(again.db, again.job)
    job, text = told(limpet, store, "--slot", "next")
    assert (job["marks"][0]["value"], job["marks"][0]["gap"]) == ("80", "nothing between 60 and 71 was seen")
    assert "; a gap: nothing between 60 and 71 was seen" in text
    job, text = told(limpet, store, "--slot", "")
    assert (job["marks"][0]["value"], job["marks"][0]["moved"]) == ("80", False)  # others moved it on
    assert "mark orders: 80; this sweep saw 41 to 60, 20 values" in text
    again.leave()


def test_a_mark_that_stays_where_it_is_is_told_with_the_reason(limpet: Limpet, store: Store, hire: Hire) -> None:
    """The sweep is complete: something was left unread, or nobody has moved the mark yet. In a large job nobody looks for that."""
    w = hire()
    w.seed(call(1), call(2), call(3))
    sweep(w, 1, 9)
    one, two = w.claim(2)
    w.finish(dead(one), replace(dead(two), outcome=Outcome.SKIPPED, reason="gone"))
    shared.move_marks(w.db, w.job)
    job, text = told(limpet, store)
    why = "dead tasks of its handlers: 1; skipped as gone: 1"
    assert (job["complete"], job["marks"][0]["value"], job["marks"][0]["held"]) == (True, None, why)
    assert f"mark orders: not set; this sweep saw 1 to 9, 9 values; held back: {why}" in text
    (short,) = status(w.store, w.job, whole=False).marks
    assert short.held is None
    requests.ask(w.store, "retry", {"states": ["dead", "skipped"]}, shards=[0], who="me")
    w.commit(w.part(0))
    w.finish(*(done(claim) for claim in w.claim()))
    assert "mark orders: not set; this sweep saw 1 to 9, 9 values; the next run moves it" in told(limpet, store)[1]
    shared.move_marks(w.db, w.job)
    assert "mark orders: 9, moved when this job was complete" in told(limpet, store)[1]


def test_a_mark_of_several_types_is_told_while_the_sweep_goes_on(limpet: Limpet, store: Store, hire: Hire) -> None:
    """Before all the work is done."""
    w = hire()
    w.seed(call(1), call(2), call(3))
    sweep(w, 1, 9)
    (claim,) = w.claim(1)
    w.finish(replace(done(claim), seen=(Seen("orders", "ask", "str:x", "str:y", 2),)))
    job, text = told(limpet, store)
    assert (job["complete"], job["marks"][0]["held"]) == (False, "values of several types: int, str")
    assert "this sweep saw 1 to y, 11 values; held back: values of several types: int, str" in text


# -- providers that are away -----------------------------------------------------------------------


@on_sqlite
def test_a_provider_that_is_away_is_one_line_with_when_it_is_asked_again(limpet: Limpet, store: Store, hire: Hire) -> None:
    """Its calls lie on many hosts of ours; the first that asks again counts. Each is in the JSON, with since when it is away."""
    w = hire()
    w.seed(call(1), call(2, 1))
    pause = policy.outage_text(1_796_047_503_250, "connect")
    for number, shard in enumerate((0, 1)):
        link = call(9, shard)
        row = HostRow(link.host, link.text.removeprefix("call://").partition("/")[0], 0, 60_000 * (2 - number), pause)
        w.commit(w.part(shard, hosts=(row,)))
    job, text = told(limpet, store)
    assert [row["away_since_ms"] for row in job["pauses"]] == [1_796_047_503_250] * 2
    assert text.count("outage since") == 2  # in the reason why it waits, and in the line of the host
    assert text.count("host ask (calls) waits until ") == 1
    assert "ask+" not in text
    assert "other host" not in text
    first = min(row["next_ms"] for row in job["pauses"])
    assert job["why"].startswith("every host with a task ready has to wait: ask (calls) until ")
    assert first < job["now_ms"] + 61_000


@pytest.mark.parametrize("field", ["money", "marks"])
def test_the_fields_of_collecting_are_always_there(limpet: Limpet, store: Store, field: str) -> None:
    """Also of a job that collects nothing of that kind."""
    assert field in told(limpet, store)[0]
