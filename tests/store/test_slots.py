"""The slots of a spider: which are finished, which somebody works on; and proofs of a job that several processes end together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from limpet.schedule import Schedule
from limpet.store import Store, jobs, slots, verify
from limpet.store.slots import SlotRow, SlotState, jobs_by_slot, look
from limpet.store.verify import is_verified, verify_job
from tests.conftest import Hire
from tests.store.hands import Hand, dead, done, found_job, pages


def found(store: Store, slot: str = "") -> SlotRow:
    """What there is of a slot."""
    return look(store.db, slot, jobs_by_slot(store.db, "shop").get(slot))


def give_up(hand: Hand) -> None:
    """A clean stop, as far as the database sees it."""
    for shard in list(hand.held):
        hand.release(shard)
    hand.db.run_text("UPDATE worker SET dead = 1 WHERE worker = ?", (hand.worker.id,))


def test_a_slot_goes_from_missing_over_worked_on_and_unfinished_to_finished(store: Store, hire: Hire) -> None:
    """Complete is not finished before it is proved; dead letters are counted; a pause and a halt are told."""
    assert found(store, "other") == SlotRow("other", SlotState.MISSING)
    assert found(store).state is SlotState.OPEN
    hand = hire()
    hand.seed(*pages(0, 2))
    row = found(store)
    assert (row.state, len(row.workers)) == (SlotState.WORKING, 1)
    first, second = hand.claim(2, 0)
    hand.finish(done(first), dead(second))
    give_up(hand)
    assert found(store).state is SlotState.OPEN
    store.pause("by hand")
    assert found(store).state is SlotState.PAUSED
    store.resume()
    assert verify_job(store).ok
    row = found(store)
    assert (row.state, row.dead, row.workers) == (SlotState.FINISHED, 1, ())
    store.halt("a fault")
    assert found(store).state is SlotState.HALTED


def test_jobs_come_in_the_order_in_which_they_were_made(store: Store) -> None:
    """The first one tells since when slots can be missing."""
    for slot in ("2026-11-30", "2026-11-28", "2026-11-29"):
        found_job(store, slot)
    assert list(jobs_by_slot(store.db, "shop")) == ["", "2026-11-30", "2026-11-28", "2026-11-29"]
    assert jobs_by_slot(store.db, "another") == {}


def test_a_schedule_is_remembered_until_another_is_said(store: Store) -> None:
    """By spider; told again it writes nothing."""
    first, second = Schedule.of("day", tz="Asia/Shanghai"), Schedule.of(cron="0 3 * * *")
    assert slots.schedule_of(store.db, "shop") is None
    slots.remember(store.db, "shop", first)
    with closing(store.again(readonly=True)) as reading:
        slots.remember(reading.db, "shop", first)  # which could not write
        assert slots.schedule_of(reading.db, "shop") == first
        assert slots.schedule_of(reading.db, "other") is None
    slots.remember(store.db, "shop", second)
    assert slots.schedule_of(store.db, "shop") == second


# -- proofs side by side ----------------------------------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[str]]:
    """Let something happen between the reading of the next proof and its note."""

    def arrange(happens: Callable[[], object]) -> list[str]:
        real, fired = verify.verify, []

        def proved(*args: object, **more: object) -> object:
            verdict = real(*args, **more)  # type: ignore[arg-type]
            if not fired:
                fired.append("now")
                happens()
            return verdict

        monkeypatch.setattr(verify, "verify", proved)
        return fired

    return arrange


def two_end_together(store: Store, hire: Hire, meanwhile: Callable[[Callable[[], object]], list[str]]) -> bool:
    """A proves; B gives its shard up and proves; only then A notes its proof. Whether the job counts as proved."""
    hand = hire()
    hand.seed(*pages(0, 1))
    hand.finish(done(hand.claim(1, 0)[0]))
    for shard in (0, 1, 2):
        hand.release(shard)
    with closing(store.again()) as other:

        def b_ends() -> None:
            hand.release(3)
            assert verify_job(other).ok
            assert is_verified(other.db, jobs.read(other.db, 1))

        fired = meanwhile(b_ends)
        assert verify_job(store).ok
        assert fired
        return is_verified(store.db, jobs.read(store.db, 1))


def test_an_older_proof_does_not_take_the_place_of_a_newer_one(
    store: Store, hire: Hire, meanwhile: Callable[[Callable[[], object]], list[str]]
) -> None:
    """Else a job that several processes end at once stays unproved, after each of them has said that it is verified."""
    assert two_end_together(store, hire, meanwhile)
