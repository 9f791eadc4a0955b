"""What people ask for: never written into a shard, but applied by its owner, in a batch, under its fence."""

from __future__ import annotations

import pytest

from limpet.batch import canonical_json
from limpet.errors import OwnershipLost, UsageError
from limpet.store import frontier, lease, requests
from limpet.store.standing import standing
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import Hand, attempts, column, counted, dead, done, dump, emitted, failed, pages, records, skipped


def ended(hire: Hire, number: int = 6, *, shard: int = 0) -> Hand:
    """A worker of one shard whose pages have ended: dead for three reasons, skipped, done."""
    hand = hire(shard)
    hand.seed(*pages(shard, number), shard=shard)
    ends = [
        lambda claim: dead(claim, "handler:KeyError"),
        lambda claim: dead(claim, "handler:TypeError"),
        lambda claim: dead(claim, "status 500"),
        skipped,
        lambda claim: done(claim, offers=[emitted(f"sku{claim.id}", 1)]),
    ]
    hand.finish(*(ends[i % len(ends)](claim) for i, claim in enumerate(hand.claim())))  # type: ignore[operator]
    return hand


def ask(hand: Hand, shard: int = 0, **argument: object) -> None:
    """A person asks for something, on a connection of their own."""
    other = hand.store.again()
    other.db.run("put_request", job=hand.job.id, shard=shard, what="retry", argument=canonical_json(argument), who="a person")
    other.close()


def open_requests(hand: Hand) -> int:
    """How many requests are not yet applied."""
    return len(column(hand.db, "id", "applied_n IS NULL", table="request"))


# -- applied by the owner ---------------------------------------------------------------------------


def test_a_request_waits_until_the_owner_applies_it_in_its_next_batch(hire: Hire) -> None:
    """30: nothing changes in the shard before; then tasks, revisits and the ledger move together."""
    hand = ended(hire)
    before = dump(hand.db)
    ask(hand)
    after = dump(hand.db)
    assert {name for name in after if after[name] != before[name]} == {"request"}
    assert not standing(hand.db, hand.job.id).is_complete
    n = hand.held[0].watermark + 1
    answer = hand.commit(hand.part(0))
    assert answer.revisited == 4
    assert hand.db.rows_text("SELECT applied_n, changed FROM request") == [(n, 4)]
    assert hand.db.rows_text("SELECT revisited FROM ledger WHERE n = ?", (n,)) == [(4,)]
    assert column(hand.db, "n", table="revisit") == [n] * 4
    assert counted(hand.db) == {"pending": 4, "skipped": 1, "done": 1}
    audit(hand.db, hand.job.id)


def test_counters_start_anew_but_tries_and_attempt_rows_stay(hire: Hire) -> None:
    """A revisit is recorded; strikes, losses and throttles count from it on (23, I7)."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    hand.finish(failed(*hand.claim(), due_in_ms=60_000))
    hand.db.run_text("UPDATE task SET lane = 'ready', due_ms = 0")
    hand.claim()
    hand.take(0)
    hand.finish(dead(*hand.claim()))
    ask(hand)
    (claim,) = hand.claim()
    assert (claim.tries, claim.strikes, claim.lost, claim.throttled, claim.revisits) == (4, 0, 0, 0, 1)
    assert [(number, outcome) for _, number, outcome, _ in attempts(hand.db)] == [(1, "failed"), (2, "lost"), (3, "dead")]
    audit(hand.db, hand.job.id)


def no_living_owner_is_fenced(hire: Hire) -> None:
    """The owner's results in hand go through after a person asked for something."""
    hand = ended(hire)
    hand.seed(*pages(0, 1, start=50))
    (claim,) = hand.claim()
    part = hand.part(0, done(claim))
    ask(hand)
    assert hand.commit(part).fenced == (), "the owner was fenced"
    audit(hand.db, hand.job.id)


def test_asking_fences_nobody(hire: Hire) -> None:
    """30: a batch given to the command line would throw the living owner out."""
    no_living_owner_is_fenced(hire)


def test_a_tool_that_writes_into_a_shard_breaks_its_books(hire: Hire) -> None:
    """The twin of 30: dead -> pending by hand, without a batch, is what the audit finds."""
    hand = ended(hire)
    hand.db.run_text("UPDATE task SET state = 'pending', lane = 'ready', strikes = 0 WHERE state = 'dead'")
    with pytest.raises(AssertionError, match="I7"):
        audit(hand.db, hand.job.id)


@pytest.mark.parametrize(
    ("reason", "back"),
    [
        ("", 4),
        ("handler", 3),
        ("handler:KeyError", 2),
        ("status 500", 1),
        ("status", 1),
        ("stat", 0),
        ("gone", 0),
    ],
)
def test_a_reason_names_itself_and_its_family(hire: Hire, reason: str, back: int) -> None:
    """`limpet retry --reason handler` puts back what failed in a handler, and nothing whose reason merely begins so."""
    hand = ended(hire)
    ask(hand, reason=reason)
    assert hand.commit(hand.part(0)).revisited == back
    assert open_requests(hand) == 0
    audit(hand.db, hand.job.id)


def test_states_other_than_dead_are_put_back_where_they_are_named(hire: Hire) -> None:
    """Skipped and done too, by hand only."""
    hand = ended(hire)
    ask(hand, states=["skipped", "done"])
    assert hand.commit(hand.part(0)).revisited == 2
    assert counted(hand.db) == {"dead": 4, "pending": 2}
    audit(hand.db, hand.job.id)


def test_named_tasks_are_put_back_whatever_state_they_ended_in(hire: Hire) -> None:
    """Those that run or wait are left alone; so are those of other shards."""
    hand = ended(hire)
    hand.seed(*pages(0, 1, start=50))
    ids = column(hand.db, "id")
    ask(hand, tasks=[*ids, 999_999])
    hand.claim(9)
    assert hand.commit(hand.part(0)).revisited == 0
    assert open_requests(hand) == 0
    assert column(hand.db, "COUNT(*)", "revisits = 1") == [6]
    audit(hand.db, hand.job.id)


def test_a_large_request_is_applied_in_bounded_steps(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch puts back so many at most; the request stays open, and the job incomplete, until the last."""
    monkeypatch.setattr(frontier, "REVISIT_MAX", 3)
    hand = hire(0)
    hand.seed(*pages(0, 10))
    hand.finish(*(dead(claim) for claim in hand.claim()))
    ask(hand)
    steps = []
    while open_requests(hand):
        assert not standing(hand.db, hand.job.id).is_complete
        steps.append(hand.commit(hand.part(0)).revisited)
    assert steps == [3, 3, 3, 1]
    assert counted(hand.db) == {"pending": 10}
    audit(hand.db, hand.job.id)


def test_a_task_that_dies_again_meanwhile_is_not_put_back_by_the_same_request(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request has a cursor: it ends, even where every task dies at once."""
    monkeypatch.setattr(frontier, "REVISIT_MAX", 2)
    hand = hire(0)
    hand.seed(*pages(0, 5))
    hand.finish(*(dead(claim) for claim in hand.claim()))
    ask(hand)
    for _ in range(8):
        hand.claim()
        if hand.claims:
            hand.finish(*(dead(claim) for claim in hand.claims.values()))
    assert open_requests(hand) == 0
    assert set(column(hand.db, "revisits")) == {1}
    audit(hand.db, hand.job.id)


def test_two_requests_in_one_batch_put_a_task_back_once(hire: Hire) -> None:
    """The second finds it pending."""
    hand = ended(hire)
    ask(hand)
    ask(hand)
    assert hand.commit(hand.part(0)).revisited == 4
    assert hand.db.rows_text("SELECT changed FROM request ORDER BY id") == [(4,), (0,)]
    audit(hand.db, hand.job.id)


def test_a_request_for_one_shard_leaves_the_others_alone(hire: Hire) -> None:
    """Each shard has a row of its own."""
    hand = ended(hire)
    other = ended(hire, shard=1)
    ask(hand, shard=1)
    assert hand.commit(hand.part(0)).revisited == 0
    assert other.commit(other.part(1)).revisited == 4


def test_a_fenced_owner_applies_nothing(hire: Hire) -> None:
    """The request is applied once, by the owner of the day."""
    hand, heir = ended(hire), hire(take=False)
    part = hand.part(0)
    ask(hand)
    heir.succeed_to(hand)
    assert hand.commit(part).fenced == (0,)
    assert open_requests(heir) == 1
    assert heir.commit(heir.part(0)).revisited == 4
    audit(heir.db, heir.job.id)


def test_what_was_emitted_before_stands_until_the_task_is_done_again(hire: Hire) -> None:
    """Putting back takes no record away; the new run replaces it."""
    hand = ended(hire)
    ask(hand, states=["done"])
    hand.claim()
    assert len(records(hand.db)) == 1
    hand.finish(*(done(claim) for claim in hand.claims.values()))
    assert records(hand.db) == []
    audit(hand.db, hand.job.id)


# -- applied without an owner -------------------------------------------------------------------------


def test_without_a_worker_the_command_takes_the_shard_applies_and_gives_it_up(hire: Hire) -> None:
    """30: free shards are taken over, everything in numbered batches, and nobody owns them afterwards."""
    hand = ended(hire)
    hand.release(0)
    store = hand.store.again()
    requests.ask(store, "retry", {}, shards=requests.shards_with_dead(store), who="me")
    applied = requests.apply(store)
    assert (applied.shards, applied.put_back, applied.left) == (1, 4, ())
    assert hand.db.rows_text("SELECT kind FROM ledger WHERE shard = 0 ORDER BY n DESC LIMIT 3") == [
        ("release",),
        ("request",),
        ("takeover",),
    ]
    assert column(hand.db, "owner", "shard = 0", table="shard") == [None]
    assert counted(hand.db) == {"pending": 4, "skipped": 1, "done": 1}
    audit(hand.db, hand.job.id)
    store.close()


def test_shards_of_the_living_are_left_to_their_owners(hire: Hire) -> None:
    """The command waits for no one: the owner applies it in its next batch."""
    hand = ended(hire)
    store = hand.store.again()
    requests.ask(store, "retry", {}, shards=[0], who="me")
    watermark = hand.held[0].watermark
    applied = requests.apply(store)
    assert (applied.shards, applied.left) == (0, (0,))
    assert column(hand.db, "watermark", "shard = 0", table="shard") == [watermark]
    assert hand.commit(hand.part(0)).revisited == 4
    store.close()


def test_a_command_that_loses_its_shard_leaves_the_rest_of_the_request(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """OwnershipLost (exit 9): what it committed stays, the request is still open for whoever took the shard."""
    monkeypatch.setattr(frontier, "REVISIT_MAX", 2)
    hand, heir = ended(hire), hire(take=False)
    hand.release(0)
    store = hand.store.again()
    requests.ask(store, "retry", {}, shards=[0], who="me")
    real, fired = requests._commit, []

    def lose(one: object, part: object) -> int:
        if fired:
            heir.take(0) or heir.db.run_text("UPDATE worker SET dead = 1 WHERE worker = ?", (part.owner,))  # type: ignore[attr-defined]
            heir.take(0)
        fired.append(1)
        return real(one, part)  # type: ignore[arg-type]

    monkeypatch.setattr(requests, "_commit", lose)
    with pytest.raises(OwnershipLost):
        requests.apply(store)
    assert len(fired) == 2
    monkeypatch.setattr(requests, "_commit", real)
    assert open_requests(heir) == 1
    while open_requests(heir):
        heir.commit(heir.part(0))
    assert counted(heir.db) == {"pending": 4, "skipped": 1, "done": 1}
    audit(heir.db, heir.job.id)
    store.close()


def test_nothing_asked_is_nothing_done(hire: Hire) -> None:
    """No worker row, no take-over."""
    hand = ended(hire)
    before = dump(hand.db)
    assert requests.apply(hand.store) == requests.Applied(0, 0, ())
    assert dump(hand.db) == before


def test_an_argument_that_is_too_long_is_refused(hire: Hire) -> None:
    """It is read with each batch until it is done with."""
    hand = ended(hire)
    with pytest.raises(UsageError, match="fewer tasks"):
        requests.ask(hand.store, "retry", {"tasks": list(range(200_000))}, shards=[0], who="me")
    assert open_requests(hand) == 0


def test_a_request_ends_its_worker_even_when_it_fails(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens on the way, the command's worker row is dead afterwards."""
    hand = ended(hire)
    hand.release(0)
    store = hand.store.again()
    requests.ask(store, "retry", {}, shards=[0], who="me")
    monkeypatch.setattr(requests, "_apply_to", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        requests.apply(store)
    living = {row[0] for row in hand.db.rows("living_workers")}
    assert living == {hand.worker.id}
    assert [row.owner_lives for row in lease.shards(hand.db, hand.job.id)] == [False] * 4
    store.close()
