"""Tallies, registers and high-water marks: nothing lost, nothing double, and nobody waits for a hot row (I9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from limpet.batch import Claim, RegisterWrite, Result, Seen
from limpet.store import shared
from limpet.store.verify import verify
from limpet.task import Outcome
from tests.conftest import Hire
from tests.store.hands import Hand, dead, done, pages


def counting(claim: Claim, name: str, more: int) -> Result:
    """A try that counts."""
    return replace(done(claim), tallies=((name, more),))


def writing(claim: Claim, *writes: RegisterWrite) -> Result:
    """A try that sets registers."""
    return replace(done(claim), registers=writes)


def sweeping(claim: Claim, low: int, high: int, *, gaps: bool = False, name: str = "orders") -> Result:
    """A try that saw some values."""
    return replace(done(claim), seen=(Seen(name, "feed", f"int:{low}", f"int:{high}", high - low + 1, gaps),))


def clean(hand: Hand) -> None:
    """The whole job is proved."""
    verdict = verify(hand.db, hand.job, full=True)
    assert verdict.ok, verdict.findings


# -- tallies ---------------------------------------------------------------------------------------


def test_a_tally_is_summed_over_shards_and_tries_that_did_not_end_well_add_nothing(hire: Hire) -> None:
    """Dropped with the rest of what they wrote."""
    w = hire()
    w.seed(*pages(0, 3), *pages(1, 2))
    claims = w.claim()
    results = [counting(claim, "seen", 10**9) for claim in claims]
    w.finish(*results[:4], replace(results[4], outcome=Outcome.SKIPPED, reason="gone"))
    assert shared.tallies(w.db, w.job.id) == {"seen": 4 * 10**9}
    clean(w)


def test_a_fenced_part_adds_nothing_to_a_tally(hire: Hire) -> None:
    """And what its successor counts, counts once."""
    w, x = hire(0), hire(take=False)
    w.seed(*pages(0, 1))
    (claim,) = w.claim()
    x.succeed_to(w)
    assert w.send(w.part(0, counting(claim, "seen", 1)))[0].fenced == (0,)
    (again,) = x.claim()
    x.finish(counting(again, "seen", 1))
    assert shared.tallies(x.db, x.job.id) == {"seen": 1}
    clean(x)


# -- registers -------------------------------------------------------------------------------------


def test_of_two_writes_on_one_version_the_second_runs_again_and_nobody_else(hire: Hire) -> None:
    """In one commit: the loser goes back without a strike; what else is in the batch commits."""
    w = hire(0)
    w.seed(*pages(0, 3))
    one, two, other = w.claim()
    answer = w.commit(w.part(0, writing(one, RegisterWrite("r", 0, "1")), writing(two, RegisterWrite("r", 0, "2")), done(other)))
    assert [result.outcome for part in answer.parts for result in part.results] == ["done", "released", "done"]
    (again,) = w.claim()
    assert (again.id, again.tries, again.strikes) == (two.id, 2, 0)
    w.finish(writing(again, RegisterWrite("r", 1, "2")))
    assert shared.registers(w.db, "shop") == {"r": (2, 2)}
    clean(w)


def test_workers_that_write_one_register_lose_no_update(hire: Hire) -> None:
    """Each reads, adds one and writes, in whatever order: as many versions as writes, and the value is their number."""
    hands = [hire(shard) for shard in range(4)]
    hands[0].seed(*(link for shard in range(4) for link in pages(shard, 5)))
    lost = 0
    while True:
        claims = [(hand, claim) for hand in hands for claim in hand.claim(2)]
        if not claims:
            break
        read = shared.registers(hands[0].db, "shop").get("sum", (0, 0))
        for hand, claim in claims:
            answer = hand.commit(hand.part(claim.shard, writing(claim, RegisterWrite("sum", read[0], str(int(str(read[1])) + 1)))))
            lost += sum(result.outcome is Outcome.RELEASED for part in answer.parts for result in part.results)
    assert shared.registers(hands[0].db, "shop") == {"sum": (20, 20)}
    assert lost > 0
    clean(hands[0])


def test_registers_of_other_names_in_one_task_are_written_both_or_neither(hire: Hire) -> None:
    """One of two was written by another: none of them is."""
    w = hire(0)
    w.seed(*pages(0, 2))
    one, two = w.claim()
    w.finish(writing(one, RegisterWrite("b", 0, "1")))
    w.finish(writing(two, RegisterWrite("a", 0, "1"), RegisterWrite("b", 0, "9")))
    assert shared.registers(w.db, "shop") == {"b": (1, 1)}
    clean(w)


# -- marks -----------------------------------------------------------------------------------------


def values(hand: Hand, name: str = "orders") -> list[str]:
    """The versions of a mark."""
    return [str(row[2]) for row in hand.db.rows("marks_of_spider", spider="shop") if row[0] == name]


def sweep(hand: Hand, seen: Iterable[tuple[int, int]], *, gaps: bool = False) -> None:
    """Claim everything, and say what each try saw."""
    hand.finish(*(sweeping(claim, *bounds, gaps=gaps) for claim, bounds in zip(hand.claim(), seen, strict=True)))


def test_a_mark_moves_once_to_the_highest_value_of_all_shards_in_whatever_order(hire: Hire) -> None:
    """Newest first, over two shards; moved by several at once it has one version."""
    w = hire()
    w.seed(*pages(0, 1), *pages(1, 1))
    sweep(w, [(101, 200), (1, 100)])
    assert values(w) == []
    moved = [shared.move_marks(w.db, w.job) for _ in range(3)]
    assert [one.value for (one,) in moved] == ["int:200"] * 3
    assert values(w) == ["int:200"]
    clean(w)


def test_a_dead_task_of_the_sweep_holds_its_mark_back_until_it_is_mended(hire: Hire) -> None:
    """Rows 1 to 100 may never have been seen."""
    w = hire(0)
    w.seed(*pages(0, 2))
    one, two = w.claim()
    w.finish(sweeping(one, 101, 200), dead(two))
    (moved,) = shared.move_marks(w.db, w.job)
    assert (moved.held_back, values(w)) == (1, [])
    from limpet.store import requests

    requests.ask(w.store, "retry", {"states": ["dead"]}, shards=[0], who="me")
    w.commit(w.part(0))
    sweep(w, [(1, 100)])
    (moved,) = shared.move_marks(w.db, w.job)
    assert (moved.value, values(w)) == ("int:200", ["int:200"])
    clean(w)


def test_a_mark_never_falls_and_a_gap_below_a_sweep_is_reported(hire: Hire) -> None:
    """The second slot saw nothing at or below where the first one ended."""
    w = hire(0)
    w.seed(*pages(0, 1))
    sweep(w, [(1, 50)])
    shared.move_marks(w.db, w.job)
    w.store.join(spider="shop", slot="2", profile=w.job.profile)
    later = hire(take=False)
    later.store.job = w.store.job
    later.take(0)
    later.seed(*pages(0, 2))
    sweep(later, [(60, 70), (40, 45)], gaps=True)
    assert shared.move_marks(later.db, later.job)[0].gap == ""
    w.store.join(spider="shop", slot="3", profile=w.job.profile)
    last = hire(take=False)
    last.store.job = w.store.job
    last.take(0)
    last.seed(*pages(0, 1))
    sweep(last, [(90, 95)], gaps=True)
    assert "between 70 and 90" in shared.move_marks(last.db, last.job)[0].gap
    assert values(last) == ["int:50", "int:70", "int:95"]
    clean(last)


@pytest.mark.parametrize(
    ("sql", "fault"),
    [
        ("UPDATE tally SET value = value + 1", "tally"),
        ("DELETE FROM register WHERE version = 1", "register"),
        ("UPDATE register SET task = 99999 WHERE version = 2", "register"),
        ("UPDATE mark SET value = 'int:1' WHERE version = 2", "mark"),
        ("DELETE FROM mark WHERE version = 1", "mark"),
    ],
)
def test_shared_values_that_were_tampered_with_are_found(hire: Hire, sql: str, fault: str) -> None:
    """Each by its word."""
    w = hire(0)
    w.seed(*pages(0, 4))
    for number, claim in enumerate(w.claim()):
        result = replace(sweeping(claim, 10 * number, 10 * number + 5), tallies=(("seen", 1),))
        w.finish(replace(result, registers=(RegisterWrite("r", number, str(number)),)))
        shared.move_marks(w.db, w.job)
    clean(w)
    w.db.begin()
    assert w.db.run_text(sql) >= 1
    w.db.commit()
    assert fault in verify(w.db, w.job, full=True).found
