"""Poison: the database refuses a batch's data; the row is found, its task is dead, and everything else commits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from limpet.batch import HostRow, Kind, Want
from limpet.errors import InvariantBroken, PoisonRow, StoreBusy, StoreError, StoreUnavailable
from limpet.store import Store, bisect, commit, datasets, ledger
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import Hand, attempts, column, counted, done, dump, emitted, host_in, link, pages, records, refuse, states


def emitting(hand: Hand, number: int, shard: int = 0) -> list[object]:
    """Seed and claim so many pages; the results, each with a record p0, p1, ..."""
    hand.seed(*pages(shard, number), shard=shard)
    return [done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(hand.claim(number, shard))]


@pytest.mark.parametrize("bad", [{0}, {7}, {3, 4}, {0, 6, 7}, {0, 1, 2, 3, 4}])
def test_poison_rows_are_found_and_everything_else_commits(hire: Hire, bad: set[int]) -> None:
    """3: each task whose data the database refuses is dead, poison; the others' records are there."""
    hand = hire(0)
    results = emitting(hand, 8)
    refuse(hand.db, *(f"p{i}" for i in bad))
    answers = hand.send(hand.part(0, *results), want=5)  # type: ignore[arg-type]
    assert len(answers) > 1
    assert [sku for _, sku, _ in records(hand.db)] == [f"p{i}" for i in range(8) if i not in bad]
    assert counted(hand.db) == {"done": 8 - len(bad), "dead": len(bad)}
    assert Counter((o, r) for _, _, o, r in attempts(hand.db)) == {("done", ""): 8 - len(bad), ("dead", "poison"): len(bad)}
    assert all("refused" in d for d in column(hand.db, "detail", "outcome = 'dead'", table="attempt"))  # type: ignore[operator]
    audit(hand.db, hand.job.id)


def test_pieces_of_a_refused_batch_have_ids_of_their_own_and_claim_nothing(hire: Hire) -> None:
    """Other content is another id, so an unknown outcome of a half says nothing about the whole."""
    hand = hire(0)
    results = emitting(hand, 4)
    hand.seed(*pages(0, 9, start=100))
    refuse(hand.db, "p2")
    whole = hand.part(0, *results)  # type: ignore[arg-type]
    answers = hand.send(whole, want=5)
    written = [part.batch_id() for answer in answers for part in answer.parts]
    assert len({*written, whole.batch_id()}) == len(answers) + 1
    assert [n for answer in answers for n in [part.n for part in answer.parts]] == [*range(whole.n, whole.n + len(answers))]
    assert all(answer.claims == () for answer in answers)
    assert counted(hand.db)["running"] == 0
    audit(hand.db, hand.job.id)


def test_a_dead_poison_task_leaves_nothing_of_itself(hire: Hire) -> None:
    """Its links and its other records are not written either."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    good, bad = hand.claim()
    refuse(hand.db, "bad")
    hand.send(hand.part(0, done(good), done(bad, link(f"{host_in(0)}/never"), offers=[emitted("fine", 1), emitted("bad", 2)])))
    assert records(hand.db) == []
    assert f"http://{host_in(0)}/never" not in states(hand.db)
    audit(hand.db, hand.job.id)


def test_more_poison_than_a_few_stops_the_shard_and_blames_no_more_tasks(hire: Hire) -> None:
    """More than five in one batch are a broken release: the error names it, and the others stay running."""
    hand = hire(0)
    results = emitting(hand, 40)
    refuse(hand.db, *(f"p{i}" for i in range(40)))
    with pytest.raises(StoreError, match="broken release") as caught:
        hand.send(hand.part(0, *results))  # type: ignore[arg-type]
    assert not isinstance(caught.value, PoisonRow)
    assert counted(hand.db)["dead"] <= 5
    assert counted(hand.db)["running"] >= 35
    hand.take(0)
    audit(hand.db, hand.job.id)


@pytest.mark.parametrize("error", [StoreUnavailable("the disk is full"), StoreError("no such column: price")])
def test_what_is_not_an_error_of_data_blames_nobody(hire: Hire, monkeypatch: pytest.MonkeyPatch, error: StoreError) -> None:
    """3: disk full, read-only, a missing column: nothing is bisected, nothing changes, the part goes through later."""
    hand = hire(0)
    part = hand.part(0, *emitting(hand, 8))  # type: ignore[arg-type]
    part = hand.part(0, *part.results)
    before, fired = dump(hand.db), []

    def broken(*arguments: object) -> None:
        fired.append(1)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "put_records", broken)
        with pytest.raises(type(error)):
            hand.send(part)
    assert fired == [1]
    assert dump(hand.db) == before
    hand.send(part)
    assert counted(hand.db) == {"done": 8}


def test_blaming_every_error_on_data_would_kill_innocent_tasks(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: were a full disk bisected, it would make dead letters as soon as one small commit went through."""
    hand = hire(0)
    results = emitting(hand, 2)
    put, fired = datasets.put_records, []

    def broken(*arguments: object) -> object:
        if len(fired) < 3:  # the commit, the part by itself, its first half
            fired.append(1)
            raise PoisonRow("the disk is full")
        return put(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(datasets, "put_records", broken)
    hand.send(hand.part(0, *results))  # type: ignore[arg-type]
    assert fired
    assert counted(hand.db)["dead"] == 1


def test_a_refusal_of_what_belongs_to_no_task_is_no_poison(hire: Hire) -> None:
    """A pace, a source's position: nobody is to blame but Limpet."""
    hand = hire(0)
    with pytest.raises(StoreError, match="belongs to no task"):
        hand.send(hand.part(0, hosts=(HostRow(1, "\ud800.test", 0, 0),)))


def test_a_duplicate_in_the_protocols_own_tables_is_a_broken_invariant_and_no_poison(hire: Hire) -> None:
    """Errors of data are those outside the protocol's own keys: a second attempt row of one try is no page's fault."""
    hand = hire(0)
    results = emitting(hand, 2)
    task = results[1].claim.id  # type: ignore[attr-defined]
    hand.db.run_text("INSERT INTO attempt VALUES (1, 0, 99, ?, 1, 'done', '', 0, 0, 0, ?, 0, 0, '', '', 0)", (task, b""))
    with pytest.raises(InvariantBroken):
        hand.send(hand.part(0, *results))  # type: ignore[arg-type]
    assert counted(hand.db) == {"running": 2}


def test_a_shard_given_up_with_a_poison_row_in_hand_still_writes_the_rest(hire: Hire) -> None:
    """Only the last piece of a release gives the shard up; the pieces before it still need it."""
    hand = hire(0)
    results = emitting(hand, 4)
    refuse(hand.db, "p1")
    answers = hand.send(hand.part(0, *results, kind=Kind.RELEASE))  # type: ignore[arg-type]
    assert not any(answer.fenced for answer in answers)
    assert counted(hand.db) == {"done": 3, "dead": 1}
    assert column(hand.db, "owner", "shard = 0", table="shard") == [None]
    audit(hand.db, hand.job.id)


def test_poison_in_one_shard_does_not_hold_up_another(hire: Hire) -> None:
    """A commit of two shards falls into its parts: the clean one is written whole."""
    hand = hire(0, 1)
    first, second = emitting(hand, 3, 0), emitting(hand, 3, 1)
    refuse(hand.db, "p1")
    second = [done(r.claim, offers=[emitted(f"q{i}", i)]) for i, r in enumerate(second)]  # type: ignore[attr-defined]
    hand.send(hand.part(0, *first), hand.part(1, *second))  # type: ignore[arg-type]
    assert counted(hand.db) == {"done": 5, "dead": 1}
    audit(hand.db, hand.job.id)


def test_text_that_no_database_can_hold_is_poison_of_its_own_task(hire: Hire) -> None:
    """A lone surrogate that came this far costs its page, not the batch."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    good, bad = hand.claim()
    broken = replace(link(f"{host_in(0)}/x"), url="http://x/\ud800")
    hand.send(hand.part(0, done(good, link(f"{host_in(0)}/y")), done(bad, broken)))
    assert counted(hand.db) == {"done": 1, "dead": 1, "pending": 1}
    audit(hand.db, hand.job.id)


@pytest.mark.parametrize("error", [StoreUnavailable("the disk is full"), StoreBusy("locked")])
def test_a_disk_that_fills_up_while_poison_is_sought_blames_nobody_and_loses_nothing(
    hire: Hire, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Pieces that were written cannot be sent again: the shard is given up, and comes back by take-over."""
    hand = hire(0, 1)
    first, second = emitting(hand, 8, 0), emitting(hand, 2, 1)
    refuse(hand.db, "p6")
    monkeypatch.setattr(commit, "BUSY_WAITS_S", ())
    close, written, fired = ledger.close_books, [], []

    def full(*arguments: object) -> object:
        if len(written) == 2:
            fired.append(1)
            raise error
        written.append(1)
        return close(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "close_books", full)
    answers = hand.send(hand.part(0, *first), hand.part(1, *second))  # type: ignore[arg-type]
    assert fired == [1]
    assert [len(answer.parts) for answer in answers] == [1, 1, 0]
    assert answers[-1].fenced == (0, 1)
    assert counted(hand.db)["dead"] == 0
    assert column(hand.db, "halted", table="job") == [""]
    monkeypatch.undo()
    hand.take(0, 1)
    audit(hand.db, hand.job.id)
    assert counted(hand.db)["pending"] + counted(hand.db)["done"] == 10


def test_bisecting_goes_on_by_the_settings_limit(store: Store, hire: Hire) -> None:
    """The limit is a setting, and is what the bisection is given."""
    hand = hire(0)
    results = emitting(hand, 4)
    refuse(hand.db, "p0", "p1")
    context = commit.Context(hand.job, hand.store.tables, hand.store.known)
    with pytest.raises(StoreError, match="more than 1 tasks"):
        bisect.commit_bisecting(hand.db, context, [hand.part(0, *results)], {0: Want()}, poison_rows_max=1)  # type: ignore[arg-type]
    assert store.settings.poison_rows_max == 5
