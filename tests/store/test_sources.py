"""Lists of starts: read in batches, each line once, wherever the reading stops."""

from __future__ import annotations

import pytest

from limpet.batch import SourceMove
from limpet.errors import OwnershipLost
from limpet.store import commit, jobs
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import Hand, column, counted, done, dump, mutated, pages


def position(hand: Hand) -> list[tuple[int, bool]]:
    """Where each source stands."""
    return [(source.position, source.closed) for source in jobs.sources(hand.db, hand.job.id)]


def read_on(hand: Hand, before: int, after: int, last: int = 10, shard: int = 0) -> SourceMove:
    """A step through a list of ten pages."""
    return SourceMove(1, before, after, after == last, tuple(pages(shard, 10)[before:after]))


@pytest.fixture
def opened(hire: Hire) -> Hand:
    """A worker of all shards, and a list of ten pages that nobody has begun to read."""
    hand = hire()
    hand.open_source()
    return hand


def test_position_and_tasks_move_in_one_batch(opened: Hand) -> None:
    """Seeds are expanded like any task: stamped, counted, sealed (5, 22)."""
    answer = opened.commit(opened.part(0, sources=(read_on(opened, 0, 4),)))
    assert answer.discovered == 4
    assert position(opened) == [(4, False)]
    opened.commit(opened.part(0, sources=(read_on(opened, 4, 10),)))
    assert position(opened) == [(10, True)]
    assert counted(opened.db) == {"pending": 10}
    assert set(column(opened.db, "source_n")) == {2, 3}
    audit(opened.db, opened.job.id)


def every_line_is_read(hand: Hand, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader dies between two batches and inside one; another one goes on from the position."""
    hand.commit(hand.part(0, sources=(read_on(hand, 0, 3),)))
    with monkeypatch.context() as patched:
        patched.setattr(commit.ledger, "close_books", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand.commit(hand.part(0, sources=(read_on(hand, 3, 7),)))
    heir = hire(take=False)
    heir.succeed_to(hand)
    ((at, _),) = position(heir)
    heir.commit(heir.part(0, sources=(read_on(heir, at, 10),)))
    assert column(heir.db, "COUNT(*)") == [10], "lines were skipped"
    audit(heir.db, heir.job.id)


def test_a_reader_that_dies_leaves_its_position_where_its_tasks_are(opened: Hand, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is skipped, none is read twice."""
    every_line_is_read(opened, hire, monkeypatch)


def test_a_position_that_moved_by_itself_would_skip_lines(opened: Hand, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the position written outside the batch, and the batch then lost."""
    real = commit.transact

    def early(db: object, context: object, parts: object, wants: object) -> object:
        for part in parts:  # type: ignore[attr-defined]
            for move in part.sources:
                db.run("move_source", job=part.job, source=move.source, before=move.before, after=move.after, closed=0)  # type: ignore[attr-defined]
        return real(db, context, parts, wants)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "transact", early)
    monkeypatch.setattr(commit, "account", mutated(commit.account, "if moved != 1:", "if False:"))
    with pytest.raises(AssertionError, match="lines were skipped"):
        every_line_is_read(opened, hire, monkeypatch)


def test_of_two_readers_one_moves_the_source_and_the_other_writes_nothing(opened: Hand, hire: Hire) -> None:
    """Compare and set: the slower one's batch is dropped, with the tasks that it read."""
    opened.release(3)
    other = hire(3)
    slow = other.part(3, sources=(read_on(other, 0, 5),))
    opened.commit(opened.part(0, sources=(read_on(opened, 0, 4),)))
    before = dump(other.db)
    with pytest.raises(OwnershipLost, match="read on by another worker"):
        other.commit(slow)
    assert dump(other.db) == before
    assert len(other.store.known) == 0


def test_a_closed_source_is_not_read_on(opened: Hand) -> None:
    """Its end is its end."""
    opened.commit(opened.part(0, sources=(read_on(opened, 0, 10),)))
    before = dump(opened.db)
    with pytest.raises(OwnershipLost):
        opened.commit(opened.part(0, sources=(SourceMove(1, 10, 20, False),)))
    assert dump(opened.db) == before


def test_a_fenced_reader_does_not_move_the_source(opened: Hand, hire: Hire) -> None:
    """Its part is dropped whole, the position with it."""
    part = opened.part(0, sources=(read_on(opened, 0, 4),))
    hire(take=False).succeed_to(opened)
    assert opened.commit(part).fenced == (0,)
    assert position(opened) == [(0, False)]
    assert counted(opened.db) == {}


def test_known_lines_of_another_list_vanish(opened: Hand) -> None:
    """Other content is another source; what was there stays as it is, done or not."""
    opened.commit(opened.part(0, sources=(read_on(opened, 0, 10),)))
    opened.finish(*(done(claim) for claim in opened.claim(4)))
    opened.open_source()
    opened.store.known.clear()
    answer = opened.commit(opened.part(0, sources=(SourceMove(2, 0, 12, True, tuple(pages(0, 12))),)))
    assert answer.discovered == 2
    assert counted(opened.db) == {"done": 4, "pending": 8}
    audit(opened.db, opened.job.id)


def test_an_empty_list_is_read_to_its_end(opened: Hand) -> None:
    """Nothing in it, and it is closed."""
    opened.commit(opened.part(0, sources=(SourceMove(1, 0, 0, True),)))
    assert position(opened) == [(0, True)]
    assert opened.db.one("open_work", job=opened.job.id) == (0, 0, 0, 0)


def test_several_steps_of_a_source_fit_into_one_batch(opened: Hand) -> None:
    """Each meets the position that the one before it left."""
    opened.commit(opened.part(0, sources=(read_on(opened, 0, 4), read_on(opened, 4, 10))))
    assert position(opened) == [(10, True)]
    assert counted(opened.db) == {"pending": 10}


def test_a_list_fills_the_shards_of_others(opened: Hand, hire: Hire) -> None:
    """A source belongs to no shard: whoever reads it, its lines go where their texts belong."""
    opened.release(2)
    other = hire(2)
    links = tuple(pages(0, 2) + pages(2, 2))
    opened.commit(opened.part(0, sources=(SourceMove(1, 0, 4, True, links),)))
    assert len(other.claim()) == 2
    audit(other.db, other.job.id)
