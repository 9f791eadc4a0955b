"""Faults that are known and not yet mended: each test here fails until its fault is, and then moves to its own file."""

from __future__ import annotations

import pytest

from limpet.errors import OutcomeUnknown
from limpet.store import commit
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import break_commit, column, counted, done, emitted, pages, released


def test_a_suspect_that_was_parked_is_a_suspect_again(hire: Hire) -> None:
    """`unpark` puts every parked task into the ready lane, suspects too: they then run in a crowd, which they may kill again."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    for _ in range(3):
        hand.claim()
        hand.take(0)
    (suspect,) = hand.claim(1, solo=True)
    hand.finish(released(suspect, park=True))
    hand.take(0)
    assert column(hand.db, "lane") == ["suspect"]
    assert hand.claim() == []
    audit(hand.db, hand.job.id)


def test_poison_that_is_met_when_an_unknown_outcome_is_settled_later_is_bisected(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Store.commit` with `unsettled` set lets PoisonRow leave: it is settled then (not written), so it can be bisected."""
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0,))
    hand = hire(0)
    hand.seed(*pages(0, 3))
    part = hand.part(0, *(done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(hand.claim())))
    break_commit(hand, "lost", "lost")
    with pytest.raises(OutcomeUnknown):
        hand.send(part)
    hand.db.run_text("CREATE TRIGGER no BEFORE INSERT ON shop_product WHEN NEW.sku = 'p1' BEGIN SELECT RAISE(ABORT, 'no'); END")
    hand.send(part)
    assert counted(hand.db) == {"done": 2, "dead": 1}
    assert not hand.store.unsettled
    audit(hand.db, hand.job.id)
