"""Faults that are known and not yet mended: each test here fails until its fault is, and then moves to its own file."""

from __future__ import annotations

import pytest

from limpet.errors import OutcomeUnknown
from limpet.store import commit
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import break_commit, counted, done, emitted, pages, refuse


def test_poison_that_is_met_when_an_unknown_outcome_is_settled_later_is_bisected(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Store.commit` with `unsettled` set lets PoisonRow leave: it is settled then (not written), so it can be bisected."""
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0,))
    hand = hire(0)
    hand.seed(*pages(0, 3))
    part = hand.part(0, *(done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(hand.claim())))
    break_commit(hand, "lost", "lost")
    with pytest.raises(OutcomeUnknown):
        hand.send(part)
    refuse(hand.db, "p1")
    hand.send(part)
    assert counted(hand.db) == {"done": 2, "dead": 1}
    assert not hand.store.unsettled
    audit(hand.db, hand.job.id)
