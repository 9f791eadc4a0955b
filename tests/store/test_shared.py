"""Tallies, registers and high-water marks: nothing lost, nothing double, and nobody waits for a hot row (I9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from limpet.batch import Claim, RegisterWrite, Result, Seen
from limpet.engine.attempt import GONE, MOVED, NO_HANDLER, OUT_OF_SCOPE, ROBOTS, TOO_LARGE
from limpet.store import requests, shared
from limpet.store.verify import verify
from limpet.task import Outcome
from tests.conftest import Hire
from tests.store.hands import Hand, dead, done, pages, skipped


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


def test_a_task_that_is_put_back_adds_to_a_tally_again_and_last_words_stay(hire: Hire) -> None:
    """A tally counts tries that were kept: what a task had counted before it was put back is not taken away."""
    w = hire(0)
    w.seed(*pages(0, 2))
    one, two = w.claim()
    w.finish(counting(one, "done", 1), replace(dead(two), tallies=(("given_up", 1),), is_final=True))
    requests.ask(w.store, "retry", {"states": ["done", "dead"]}, shards=[0], who="me")
    w.commit(w.part(0))
    w.finish(*(counting(claim, "done", 1) for claim in w.claim()))
    assert shared.tallies(w.db, w.job.id) == {"done": 3, "given_up": 1}
    clean(w)


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
    assert (moved.held, values(w)) == (shared.Held(dead=1), [])
    requests.ask(w.store, "retry", {"states": ["dead"]}, shards=[0], who="me")
    w.commit(w.part(0))
    sweep(w, [(1, 100)])
    (moved,) = shared.move_marks(w.db, w.job)
    assert (moved.value, values(w)) == ("int:200", ["int:200"])
    clean(w)


@pytest.mark.parametrize("reason", [GONE, ROBOTS, TOO_LARGE, OUT_OF_SCOPE])
def test_a_task_that_nobody_read_holds_its_mark_back_until_it_is_asked_again(hire: Hire, reason: str) -> None:
    """A page that was gone may have had the next one behind it: what follows would never be seen again."""
    w = hire(0)
    w.seed(*pages(0, 2))
    one, two = w.claim()
    w.finish(sweeping(one, 91, 100), skipped(two, reason))
    for _ in range(2):
        (moved,) = shared.move_marks(w.db, w.job)
        assert (moved.held, values(w)) == (shared.Held(skipped=((reason, 1),)), [])
    assert str(moved.held) == f"skipped as {reason}: 1"
    requests.ask(w.store, "retry", {"states": ["skipped"]}, shards=[0], who="me")
    w.commit(w.part(0))
    sweep(w, [(81, 90)])
    (moved,) = shared.move_marks(w.db, w.job)
    assert (moved.value, bool(moved.held), values(w)) == ("int:100", False, ["int:100"])
    clean(w)


@pytest.mark.parametrize("reason", [MOVED, NO_HANDLER, "sold out"])
def test_a_skip_that_the_handler_decided_or_that_stands_for_another_task_counts_as_seen(hire: Hire, reason: str) -> None:
    """The twin."""
    w = hire(0)
    w.seed(*pages(0, 2))
    one, two = w.claim()
    w.finish(sweeping(one, 91, 100), skipped(two, reason))
    assert shared.move_marks(w.db, w.job)[0].value == "int:100"


@pytest.mark.parametrize(("leads_to", "is_held"), [("feed", True), ("detail", False), ("", True)])
def test_where_the_routes_decide_only_tasks_of_a_marks_handlers_hold_it_back(hire: Hire, leads_to: str, is_held: bool) -> None:
    """A dead link elsewhere in a crawl is nothing to a mark; where nobody knows, it may be."""
    w = hire(0)
    w.seed(*pages(0, 3))
    one, two, three = w.claim()
    w.finish(sweeping(one, 91, 100), skipped(two, GONE), dead(three))
    (moved,) = shared.move_marks(w.db, w.job, lambda text: leads_to)
    assert moved.held == (shared.Held(1, (("gone", 1),)) if is_held else shared.Held())
    assert values(w) == ([] if is_held else ["int:100"])


def test_a_mark_of_a_job_whose_tasks_were_removed_stays(hire: Hire) -> None:
    """What was left unread of it nobody can say any more."""
    w = hire(0)
    w.seed(*pages(0, 1))
    sweep(w, [(1, 5)])
    w.db.begin()
    w.db.run("gc_seal", job=w.job.id, tasks=1, done=1, skipped=0, dead=0, charged=0, vector=b"v")
    w.db.commit()
    assert (shared.move_marks(w.db, w.job), values(w)) == ([], [])
    (row,) = shared.marks_of_job(w.db, w.job, is_complete=True)
    assert row.held == "its tasks were removed before it moved"


def test_values_of_two_types_break_no_commit_and_hold_the_mark_back(hire: Hire) -> None:
    """In one batch, in a later one, and of another handler: the work is kept, and both types are named."""
    w = hire()
    w.seed(*pages(0, 4), *pages(1, 1))
    claims = w.claim()
    texts = replace(done(claims[0]), seen=(Seen("orders", "feed", "str:a", "str:b", 2),))
    w.finish(texts, sweeping(claims[1], 1, 5))
    w.finish(sweeping(claims[2], 90, 95))
    w.finish(done(claims[3]), replace(done(claims[4]), seen=(Seen("orders", "other", "date:2026-11-30", "date:2026-11-30", 1),)))
    (row,) = shared.marks_of_job(w.db, w.job, is_complete=False)
    assert (row.seen, row.held) == (14, "values of several types: date, str")
    for _ in range(2):
        (moved,) = shared.move_marks(w.db, w.job)
        assert (moved.held.types, values(w)) == (("date", "str"), [])
    clean(w)


def test_a_mark_that_another_sweep_left_with_another_type_stays_there(hire: Hire) -> None:
    """Two slots side by side: neither had a mark to compare with."""
    w = hire(0)
    w.seed(*pages(0, 1))
    sweep(w, [(1, 5)])
    other = w.store.join(spider="shop", slot="2", profile=w.job.profile)
    w.db.begin()
    w.db.run("put_mark", spider="shop", name="orders", version=1, value="str:z", low="str:a", gap="", job=other.id)
    w.db.commit()
    w.store.join(spider="shop", slot="", profile=w.job.profile)
    (moved,) = shared.move_marks(w.db, w.job)
    assert (moved.held.types, values(w)) == (("int", "str"), ["str:z"])
    (row,) = shared.marks_of_job(w.db, w.job, is_complete=True)
    assert (row.held, row.is_moved) == ("values of several types: int, str", False)


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
