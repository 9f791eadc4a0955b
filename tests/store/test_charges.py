"""Money under the fence: reserved with the claim, settled with the try, drawn from a purse that nobody can overspend (I8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from limpet.batch import ANEW, CREDIT, Billed, Charge, Claim, Grant, Kept, Link, Result, Want
from limpet.errors import UsageError
from limpet.store import Store, bills, charges, requests
from limpet.store.dialect import Database
from limpet.store.verify import verify
from limpet.task import Outcome, ShardId, TaskKey
from limpet.url import digest16, host_id
from tests.conftest import Hire, on_servers
from tests.store.hands import SHARDS, Hand, dead, failed, released

COSTS = {"ask": CREDIT}


def call(number: int, shard: int, handler: str = "ask") -> Link:
    """A keyed task in a shard, on a host of its own kind."""
    bucket = next(b for b in range(64) if host_id(f"{handler}+{b:02}") % SHARDS == shard)
    text = f'call://{handler}+{bucket:02}/{{"n":{number}}}'
    return Link(ShardId(shard), host_id(f"{handler}+{bucket:02}"), TaskKey(digest16(text)), text, text, handler=handler, payload="{}")


def want(tasks: int = 100, *, day: str = "") -> Want:
    """Claim so many, for money."""
    return Want(tasks, tasks, costs=COSTS, day=day)


def paid(claim: Claim, state: Billed = Billed.CHARGED, amount: int = CREDIT, outcome: Outcome = Outcome.DONE) -> Result:
    """A try that asked once."""
    reason = "" if outcome is Outcome.DONE else "status 500"
    return Result(
        claim, outcome, reason=reason, charge=Charge(state, amount if state is Billed.CHARGED else 0, "api.test", 1, "status 200")
    )


def draw(hand: Hand, shard: int, tasks: int = 100) -> list[Claim]:
    """Draw an allowance and claim with it, in one batch."""
    return list(hand.commit(hand.part(shard, grant=Grant(CREDIT)), want={ShardId(shard): want(tasks)}).claims)


def rows(store: Store | Hand) -> list[tuple[object, ...]]:
    """The charges: state, reserved, amount."""
    return [tuple(row) for row in store.db.rows_text("SELECT state, reserved, amount FROM charge ORDER BY task, try")]


def escrow(hand: Hand, shard: int) -> int:
    """What a shard may spend."""
    row = hand.db.one("read_escrow", job=hand.job.id, shard=shard)
    return int(row[0]) if row else 0


def clean(hand: Hand) -> None:
    """The whole job is proved."""
    verdict = verify(hand.db, hand.job, full=True)
    assert verdict.ok, verdict.findings


def test_without_an_allowance_nothing_that_costs_is_claimed_and_the_shard_says_so(hire: Hire) -> None:
    """A free task beside it is."""
    w = hire(0)
    w.seed(call(1, 0), call(2, 0, handler="free"))
    answer = w.commit(w.part(0), want=want())
    assert [claim.handler for claim in answer.claims] == ["free"]
    assert answer.unpaid == {0: CREDIT}
    assert rows(w) == []
    clean(w)


def test_a_claim_reserves_and_the_end_of_the_try_settles(hire: Hire) -> None:
    """Charged as it cost, refunded and void give back, unknown counts as spent."""
    w = hire(0)
    w.store.set_budget(10 * CREDIT)
    w.seed(*(call(n, 0) for n in range(5)))
    claims = draw(w, 0, tasks=1)
    while len(claims) < 5:
        claims += w.commit(w.part(0, grant=Grant(CREDIT)), want={ShardId(0): want(1)}).claims
    assert rows(w) == [("reserved", CREDIT, 0)] * 5
    clean(w)
    one, two, three, four, five = claims
    w.finish(
        paid(one), paid(two, amount=3 * CREDIT), paid(three, Billed.REFUNDED, outcome=Outcome.SKIPPED),
        released(four), paid(five, Billed.UNKNOWN),
    )  # fmt: skip
    found = sorted(rows(w))
    assert found == [("charged", CREDIT, CREDIT), ("charged", CREDIT, 3 * CREDIT), ("refunded", CREDIT, 0), ("unknown", CREDIT, CREDIT),
                     ("void", CREDIT, 0)]  # fmt: skip
    purse = w.db.one("read_purse", name=charges.job_purse(w.job.id))
    assert purse is not None
    assert int(purse[1]) == 5 * CREDIT + escrow(w, 0)
    clean(w)


def test_a_purse_is_never_overdrawn_and_what_is_given_back_can_be_drawn_again(hire: Hire) -> None:
    """Two shards of two workers, one credit each is left in the end."""
    w, x = hire(0), hire(1)
    w.store.set_budget(3 * CREDIT)
    w.seed(*(call(n, shard) for n in range(5) for shard in (0, 1)))
    got = [draw(hand, shard) for _ in range(4) for hand, shard in ((w, 0), (x, 1))]
    assert sum(map(len, got)) == 3
    assert w.db.one("read_purse", name=charges.job_purse(w.job.id)) == (3 * CREDIT, 3 * CREDIT)
    w.finish(*(paid(claim, Billed.REFUNDED, outcome=Outcome.SKIPPED) for claim in w.claims.values()))
    back = escrow(w, 0)
    assert back == CREDIT * sum(len(claims) for claims in got[::2])
    w.commit(w.part(0, grant=Grant(0)))
    assert escrow(w, 0) == 0
    assert len(draw(x, 1)) == 1
    clean(w)


def test_two_grants_in_one_commit_are_refused(hire: Hire) -> None:
    """They would take a row that all shards share between two fences."""
    w = hire(0, 1)
    with pytest.raises(UsageError, match="alone in its commit"):
        w.send(w.part(0, grant=Grant(CREDIT)), w.part(1))


def test_a_take_over_makes_what_was_reserved_unknown_and_it_stays_spent(hire: Hire) -> None:
    """The next try has a charge of its own."""
    w, x = hire(0), hire(take=False)
    w.store.set_budget(2 * CREDIT)
    w.seed(call(1, 0))
    draw(w, 0, tasks=1)
    x.succeed_to(w)
    assert rows(x) == [("unknown", CREDIT, CREDIT)]
    clean(x)
    (claim,) = draw(x, 0)
    x.finish(paid(claim))
    assert rows(x) == [("unknown", CREDIT, CREDIT), ("charged", CREDIT, CREDIT)]
    assert x.db.one("read_purse", name=charges.job_purse(x.job.id)) == (2 * CREDIT, 2 * CREDIT)
    clean(x)


def test_a_day_has_a_purse_of_its_own_over_jobs_and_a_new_day_begins_anew(hire: Hire) -> None:
    """Two credits a day: what is left of a day is given back to it."""
    w = hire(0)
    w.seed(*(call(n, 0) for n in range(6)))

    def on(day: str) -> int:
        grant = Grant(CREDIT, day, charges.day_purse("shop", day), 2 * CREDIT)
        return len(w.commit(w.part(0, grant=grant), want={ShardId(0): want(1, day=day)}).claims)

    assert [on("2026-11-30") for _ in range(4)] == [1, 1, 0, 0]
    assert [on("2026-12-01") for _ in range(3)] == [1, 1, 0]
    assert w.db.one("read_purse", name="day:shop:2026-11-30") == (2 * CREDIT, 2 * CREDIT)
    clean(w)


def day_grant(day: str, credits: int) -> Grant:
    """A grant that the day's purse of so many credits must pay for, too."""
    return Grant(CREDIT, day, charges.day_purse("shop", day), credits * CREDIT)


def granted(hand: Hand, purse: str) -> int:
    """What was drawn from a purse."""
    row = hand.db.one("read_purse", name=purse)
    return int(row[1]) if row else 0


def test_a_shard_that_one_purse_has_nothing_for_holds_nothing_of_the_other(hire: Hire) -> None:
    """The day has one credit, the job five: the second shard would keep one of the job's for nothing."""
    w, x = hire(0), hire(1)
    w.store.set_budget(5 * CREDIT)
    w.seed(*(call(n, shard) for n in range(2) for shard in (0, 1)))
    day = "2026-11-30"
    for hand, shard, claims, paid_for in ((w, 0, 1, 1), (x, 1, 0, 1), (x, 1, 0, 1), (w, 0, 0, 1)):
        answer = hand.commit(hand.part(shard, grant=day_grant(day, 1)), want={ShardId(shard): want(9, day=day)})
        assert (len(answer.claims), answer.unpaid) == (claims, {shard: CREDIT})
        assert (granted(w, charges.job_purse(w.job.id)), escrow(hand, shard)) == (paid_for * CREDIT, 0)
        assert granted(w, charges.day_purse("shop", day)) == CREDIT
    clean(w)


@pytest.mark.parametrize("how", ["grant", "other day", "release", "take-over", "finished"])
def test_what_a_shard_holds_unused_goes_back_to_the_purses_it_came_from(hire: Hire, how: str) -> None:
    """Where it is asked to, where its day is over, where its owner gives it up or is dead; what it has spent stays drawn."""
    w, x = hire(0), hire(take=False)
    w.store.set_budget(320 * CREDIT)
    w.seed(call(1, 0))
    first, second = "2026-11-30", "2026-12-01"
    (claim,) = w.commit(w.part(0, grant=day_grant(first, 160)), want={ShardId(0): want(9, day=first)}).claims
    w.finish(paid(claim))
    assert granted(w, charges.job_purse(w.job.id)) == 20 * CREDIT
    assert granted(w, charges.day_purse("shop", first)) == 10 * CREDIT
    if how == "grant":
        w.commit(w.part(0, grant=Grant()))  # by a run that has no budget of a day
    elif how == "release":
        w.release(0)
    elif how == "take-over":
        x.succeed_to(w)
    elif how == "finished":  # nobody takes it over any more, but the next run gives back what it held
        requests.free_money(w.store)
        assert granted(w, charges.day_purse("shop", first)) == 10 * CREDIT, "its owner lives"
        x.bury(w)
        requests.free_money(x.store)
    else:
        w.commit(w.part(0, grant=day_grant(second, 160)))
    assert granted(w, charges.day_purse("shop", first)) == CREDIT
    assert granted(w, charges.day_purse("shop", second)) == (10 * CREDIT if how == "other day" else 0)
    assert granted(w, charges.job_purse(w.job.id)) == (20 if how == "other day" else 1) * CREDIT
    clean(w)


class Overtaken:
    """A real connection on which something happens once, just after a purse was looked at."""

    def __init__(self, db: Database, purse: str, meanwhile: Callable[[], None]) -> None:
        self.db, self.purse, self.meanwhile = db, purse, [meanwhile]

    def __getattr__(self, name: str) -> object:
        return getattr(self.db, name)

    def one(self, statement: str, **values: str) -> object:
        """A row, as it was before."""
        row = self.db.one(statement, **values)
        if self.meanwhile and statement == "read_purse" and values["name"] == self.purse:
            self.meanwhile.pop()()
        return row


@on_servers
def test_a_purse_that_another_draws_from_between_look_and_draw_is_looked_at_again(hire: Hire) -> None:
    """The job's last credit goes to the other: what was drawn of the day already goes back to it."""
    w, x = hire(0), hire(take=False)
    job, day = charges.job_purse(w.job.id), charges.day_purse("shop", "2026-11-30")
    w.store.set_budget(CREDIT)

    def takes_it() -> None:
        x.db.begin()
        assert x.db.run("draw", name=job, amount=CREDIT) == 1
        x.db.commit()

    db = Overtaken(w.db, job, takes_it)
    w.db.begin()
    assert charges.draw(db, w.job, w.part(0), day_grant("2026-11-30", 3)) == [0, 0, 0, 0]  # type: ignore[arg-type]
    w.db.commit()
    assert db.meanwhile == []
    assert (granted(w, job), granted(w, day), escrow(w, 0)) == (CREDIT, 0, 0)


# -- answers that were paid for ------------------------------------------------------------------


def test_an_answer_is_kept_until_its_task_is_done_and_survives_a_take_over(hire: Hire) -> None:
    """Kept in a batch of its own; a dead task keeps it; done drops it."""
    w, x = hire(0), hire(take=False)
    w.store.set_budget(9 * CREDIT)
    w.seed(call(1, 0))
    (claim,) = draw(w, 0)
    which = digest16("GET http://api.test/")
    w.commit(w.part(0, kept=(Kept(claim.id, claim.tries, which, 200, "http://api.test/", "[]", b"compressed"),)))
    x.succeed_to(w)
    found = x.db.one("read_kept", job=x.job.id, shard=0, task=claim.id, request=which)
    assert found is not None
    assert (found[0], bytes(found[3])) == (200, b"compressed")
    (again,) = draw(x, 0)
    x.finish(replace(dead(again, "handler:KeyError"), charge=Charge(Billed.VOID)))
    assert x.db.one("read_kept", job=x.job.id, shard=0, task=claim.id, request=which) is not None
    clean(x)
    requests.ask(x.store, "retry", {"tasks": [claim.id]}, shards=[0], who="me")
    x.commit(x.part(0))
    (last,) = draw(x, 0)
    x.finish(replace(paid(last, Billed.VOID), drops_kept=True))
    assert x.db.one("read_kept", job=x.job.id, shard=0, task=claim.id, request=which) is None
    clean(x)


# -- settling -------------------------------------------------------------------------------------


def lost_twice(hire: Hire) -> Hand:
    """One task with two unknown tries and a charged one; one with an unknown, a void and a reserved one."""
    w, x, y = hire(0), hire(take=False), hire(take=False)
    w.seed(call(1, 0), call(2, 0))
    draw(w, 0)
    x.succeed_to(w)
    first = next(claim for claim in draw(x, 0, tasks=2) if '"n":1' in claim.text)
    x.finish(*(released(claim) for claim in x.claims.values() if claim.id != first.id))
    y.succeed_to(x)
    claim = next(claim for claim in draw(y, 0, tasks=2) if claim.id == first.id)
    y.finish(paid(claim))
    return y


def test_a_bill_says_which_of_the_unknown_charges_were_charged(hire: Hire) -> None:
    """Task 1 was billed twice; task 2, of which a try runs, is left for later; a task that is billed beyond its charges is named."""
    w = lost_twice(hire)
    texts = {link.text: link for link in (call(1, 0), call(2, 0))}
    one, two = sorted(texts)
    found = bills.unknown(w.db, w.job)
    assert [charge.text for charge in found].count(one) == 2
    settlement = bills.by_bill(w.db, w.job, found, {one: 2 * CREDIT, "call://ask+00/{}": CREDIT}, is_whole=True)
    assert (settlement.more, settlement.less) == ({"call://ask+00/{}": CREDIT}, {})
    bills.ask(w.store, settlement, "me")
    w.commit(w.part(0))
    assert sorted(str(row[0]) for row in rows(w)) == ["charged", "charged", "refunded", "reserved", "unknown", "void"]
    assert [charge.text for charge in bills.unknown(w.db, w.job)] == [two]
    assert settlement.left == 1
    w.finish(*(replace(paid(claim, Billed.VOID), drops_kept=True) for claim in w.claims.values()))
    settlement = bills.by_bill(w.db, w.job, bills.unknown(w.db, w.job), {one: 2 * CREDIT, two: CREDIT}, is_whole=True)
    assert [(state, amount) for _, state, amount in settlement.said] == [(Billed.CHARGED, CREDIT)]
    clean(w)


def test_under_an_idempotency_key_a_later_charge_has_paid_for_the_earlier_tries(hire: Hire) -> None:
    """The other task's try stays unknown."""
    w = lost_twice(hire)
    settlement = bills.by_idempotency(bills.unknown(w.db, w.job))
    assert [state for _, state, _ in settlement.said] == [Billed.REFUNDED] * 2
    bills.ask(w.store, settlement, "me")
    assert requests.apply(w.store).left == (0,)  # its owner lives, and applies it
    w.commit(w.part(0))
    assert settlement.left == len(bills.unknown(w.db, w.job)) == 1
    clean(w)


@pytest.mark.parametrize("anew", [False, True])
def test_an_answer_that_was_paid_for_has_paid_for_a_try_that_read_it_again_and_was_lost(hire: Hire, anew: bool) -> None:
    """Unless its handler wanted another answer: then the next try asks under another key, and may have been charged again."""
    w, x = hire(0), hire(take=False)
    w.seed(call(1, 0))
    (claim,) = draw(w, 0)
    charge = Charge(Billed.CHARGED, CREDIT, "api.test", 1, "status 200", anew=anew)
    w.finish(replace(failed(claim, due_in_ms=0), charge=charge, drops_kept=anew))
    draw(w, 0)
    x.succeed_to(w)
    assert [found.is_paid for found in bills.unknown(x.db, x.job)] == [not anew]
    asked = x.db.one("read_kept", job=x.job.id, shard=0, task=claim.id, request=ANEW)
    assert (asked is not None) == anew
    clean(x)


# -- tampering -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        ("UPDATE charge SET amount = amount + 1 WHERE state = 'charged'", "money"),
        ("DELETE FROM charge WHERE state = 'unknown'", "money"),
        ("UPDATE escrow SET allowance = allowance + 1000000", "money"),
        ("UPDATE purse SET granted = granted - 1000000", "money"),
        ("DELETE FROM purse", "money"),
        ("UPDATE charge SET state = 'reserved' WHERE state = 'void'", "charge"),
        ("UPDATE charge SET try = 9 WHERE state = 'charged'", "charge"),
        ("INSERT INTO kept SELECT job, shard, task, batch_id, n, 1, 200, '', '[]', batch_id, 0"
         " FROM charge JOIN ledger USING (job, shard, n) WHERE state = 'charged'", "kept"),
    ],
)  # fmt: skip
def test_money_that_was_tampered_with_is_found(hire: Hire, sql: str, fault: str) -> None:
    """Each by its word."""
    w = lost_twice(hire)
    clean(w)
    w.db.begin()
    assert w.db.run_text(sql.replace(" try ", ' "try" ') if w.db.name == "sqlite" else sql) >= 1
    w.db.commit()
    assert fault in verify(w.db, w.job, full=True).found
