"""COMMIT was sent and no answer came: what the rows say is what happened, and nothing is guessed.

The fault is real: `Faulty` executes the COMMIT and keeps its answer, or rolls back instead. Each row of
the table in the design has a test here, and each rule a twin that breaks without it.
"""

from __future__ import annotations

import pytest

from limpet.batch import Kind, Part, SourceMove
from limpet.errors import InvariantBroken, OutcomeUnknown, PoisonRow, StoreUnavailable, WentBack
from limpet.store import Store, bisect, commit, lease
from tests.conftest import Databases, Hire
from tests.store.audit import audit
from tests.store.hands import (
    Faulty,
    Hand,
    break_commit,
    column,
    counted,
    done,
    dump,
    emitted,
    host_in,
    link,
    pages,
    records,
    refuse,
    states,
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0, 0.0, 0.0))


def in_hand(hire: Hire, *shards: int) -> tuple[Hand, list[Part]]:
    """W with ten pages in each of some shards and one claimed in each; the parts that finish them."""
    w = hire(*shards)
    for shard in shards:
        w.seed(*pages(shard, 10), shard=shard)
    w.claim(1)
    claims = sorted(w.claims.values(), key=lambda claim: claim.shard)
    parts = [w.part(c.shard, done(c, link(f"{host_in(c.shard)}/new"), offers=[emitted(f"s{c.shard}", 1)])) for c in claims]
    return w, parts


def goes_on(*hands: Hand) -> None:
    """Whoever has the shards can finish everything that is left, once."""
    while any(hand.claims or hand.claim() for hand in hands):
        for hand in hands:
            hand.finish(*(done(claim) for claim in hand.claims.values()))
    assert set(counted(hands[0].db)) == {"done"}, f"stuck: {counted(hands[0].db)}"
    audit(hands[0].db, hands[0].job.id)


# -- row 1: the ledger has our batch ------------------------------------------------------------


@pytest.mark.parametrize("shards", [(0,), (0, 1, 3)])
def test_a_commit_that_took_effect_without_an_answer_is_acknowledged_with_its_claims(hire: Hire, shards: tuple[int, ...]) -> None:
    """Row n has our batch id: nothing is written again, and the claims are read back from the rows (15)."""
    w, parts = in_hand(hire, *shards)
    faulty = break_commit(w, "unheard")
    answer = w.commit(*parts, want=3)
    assert faulty.fired == 1
    assert answer.fenced == ()
    assert len(answer.claims) == 3 * len(shards)
    assert {claim.id for claim in answer.claims} == set(column(w.db, "id", "state = 'running'"))
    assert len(records(w.db)) == len(shards)
    goes_on(w)


def test_the_acknowledgement_is_proven_by_a_real_write(hire: Hire) -> None:
    """Visible is not yet durable: the transaction that looks also writes, and its own COMMIT is answered."""
    w, parts = in_hand(hire, 0)
    beat = column(w.db, "beat", table="worker")
    faulty = break_commit(w, "unheard")
    w.commit(*parts)
    assert faulty.said[-2:] == ["renew", "commit"]
    assert column(w.db, "beat", table="worker") != beat


def test_a_commit_that_took_effect_before_the_shard_was_taken_counts_all_the_same(hire: Hire) -> None:
    """Committed, whatever the epoch now: acknowledged; the shard and its claims are gone (20)."""
    w, parts = in_hand(hire, 0, 1)
    x = hire(take=False)
    faulty = break_commit(w, "unheard", meanwhile=lambda: x.succeed_to_shard(w, 0))
    answer = w.commit(*parts, want=3)
    assert faulty.fired == 1
    assert [part.shard for part in answer.parts] == [0, 1], "what was committed is not acknowledged"
    assert answer.fenced == (0,)
    assert {claim.shard for claim in answer.claims} == {1}
    assert len(records(w.db)) == 2
    goes_on(w, x)


def test_an_unheard_release_stays_a_release(hire: Hire) -> None:
    """The shard has no owner any more, by our own hand: no fence, nothing to be sent again."""
    w, (part,) = in_hand(hire, 0)
    from dataclasses import replace

    faulty = break_commit(w, "unheard")
    answer = w.commit(replace(part, kind=Kind.RELEASE))
    assert (faulty.fired, answer.fenced, len(answer.parts)) == (1, (), 1)
    assert column(w.db, "owner", "shard = 0", table="shard") == [None]
    w.take(0)
    goes_on(w)


# -- row 4: ours, and not committed -------------------------------------------------------------


@pytest.mark.parametrize("shards", [(0,), (0, 1, 3)])
def test_a_commit_that_never_arrived_runs_again_with_new_claims(hire: Hire, shards: tuple[int, ...]) -> None:
    """Ours at n - 1, under lock: no ghost can any more, so the part runs again in the same transaction."""
    w, parts = in_hand(hire, *shards)
    faulty = break_commit(w, "lost")
    answer = w.commit(*parts, want=3)
    assert faulty.fired == 1
    assert (answer.discovered, len(answer.claims)) == (len(shards), 3 * len(shards))
    assert len(records(w.db)) == len(shards)
    goes_on(w)


@pytest.mark.parametrize("plan", ["lost lost", "lost unheard", "unheard unheard", "unheard lost", "lost lost unheard"])
def test_a_second_and_third_unknown_outcome_are_settled_like_the_first(hire: Hire, plan: str) -> None:
    """The answer to the question may get lost too."""
    w, parts = in_hand(hire, 0, 1)
    faulty = break_commit(w, *plan.split())
    answer = w.commit(*parts, want=2)
    assert faulty.fired == len(plan.split())
    assert len(answer.claims) == 4
    goes_on(w)


@pytest.mark.parametrize("first", ["lost", "unheard"])
def test_an_outcome_that_cannot_be_found_out_stays_unknown_until_it_can(hire: Hire, first: str) -> None:
    """Sticky: the error leaves, and the same parts, sent again, are settled and not simply repeated."""
    w, parts = in_hand(hire, 0, 1)
    faulty = break_commit(w, first, "lost", "lost", "lost")
    with pytest.raises(OutcomeUnknown):
        w.commit(*parts, want=2)
    assert faulty.fired == 4
    assert w.store.unsettled
    answer = w.commit(*parts, want=2)
    assert not w.store.unsettled
    assert len(answer.claims) == 4
    assert len(records(w.db)) == 2
    goes_on(w)


def test_a_retry_that_forgets_that_the_outcome_is_unknown_breaks_the_books(hire: Hire) -> None:
    """The twin: the flag cleared, the committed batch meets its own watermark and halts the job."""
    w, parts = in_hand(hire, 0)
    break_commit(w, "unheard", "lost", "lost", "lost")
    with pytest.raises(OutcomeUnknown):
        w.commit(*parts)
    w.store.unsettled = False
    with pytest.raises(InvariantBroken):
        w.commit(*parts)


def test_known_keys_are_forgotten_on_an_unknown_outcome(hire: Hire) -> None:
    """7: what the lost connection saw may not be what is there."""
    w, parts = in_hand(hire, 0)
    old = pages(0, 10)[0].key
    assert old in w.store.known
    break_commit(w, "lost")
    w.commit(*parts)
    assert old not in w.store.known


def test_the_rows_are_staged_again_on_the_new_connection(hire: Hire) -> None:
    """Temporary tables die with the connection: links and tries of the part are all there when it runs again."""
    w, parts = in_hand(hire, 0, 1)
    break_commit(w, "lost")
    w.commit(*parts)
    new = {f"http://{host_in(shard)}/new" for shard in (0, 1)}
    assert new <= set(states(w.db))
    assert counted(w.db)["done"] == 2


# -- rows 2 and 3: went back, fenced ------------------------------------------------------------


def test_a_commit_that_never_arrived_in_a_shard_since_taken_is_dropped(hire: Hire) -> None:
    """Another owner, a higher epoch: that part is dropped, the others run again."""
    w, parts = in_hand(hire, 0, 1)
    x = hire(take=False)
    faulty = break_commit(w, "lost", meanwhile=lambda: x.succeed_to_shard(w, 0))
    answer = w.commit(*parts, want=3)
    assert faulty.fired == 1
    assert (answer.fenced, [part.shard for part in answer.parts]) == ((0,), [1])
    assert [sku for _, sku, _ in records(w.db)] == ["s1"]
    goes_on(w, x)


def test_a_higher_epoch_of_our_own_is_a_fence_too(hire: Hire) -> None:
    """We took the shard from ourselves in between: the part belongs to the life before."""
    w, parts = in_hand(hire, 0)
    other = Hand(w.store.again(), w.worker)
    break_commit(w, "lost", meanwhile=lambda: other.take(0))
    answer = w.commit(*parts, want=3)
    assert (answer.fenced, answer.parts) == ((0,), ())
    goes_on(other)
    other.store.close()


@pytest.mark.parametrize("fault", ["lost", "unheard"])
def test_a_database_that_went_back_meanwhile_drops_everything(store: Store, hire: Hire, databases: Databases, fault: str) -> None:
    """A fail-over lost more than this commit: WentBack, and nothing is run again."""
    w = hire(0, 1)
    w.seed(*pages(0, 2), *pages(1, 2))
    restore = databases.copy(store.dsn)
    w.claim(1)
    w.finish(*(done(claim) for claim in w.claims.values()), want=1)
    parts = [w.part(claim.shard, done(claim)) for claim in w.claims.values()]
    faulty = break_commit(w, fault, meanwhile=restore)
    with pytest.raises(WentBack):
        w.commit(*parts)
    assert faulty.fired == 1
    assert counted(w.db) == {"pending": 4}
    assert column(w.db, "halted", table="job") == [""]
    assert len(w.store.known) == 0
    w.take(0, 1)
    goes_on(w)


@pytest.mark.parametrize("sql", ["DELETE FROM shard", "UPDATE shard SET epoch = 0, owner = 'x', watermark = 99 WHERE shard = 0"])
def test_a_missing_shard_or_a_lower_epoch_is_a_database_that_went_back(hire: Hire, sql: str) -> None:
    """No shard row, an epoch below ours: neither is a fence."""
    w, parts = in_hand(hire, 0)
    x = hire(take=False)
    break_commit(w, "lost", meanwhile=lambda: x.db.run_text(sql))
    with pytest.raises(WentBack):
        w.commit(*parts)


# -- row 5: nothing that can be ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "sql"),
    [
        ("unheard", "UPDATE ledger SET batch_id = digest WHERE shard = 0 AND n = (SELECT watermark FROM shard WHERE shard = 0)"),
        ("lost", "UPDATE shard SET watermark = watermark + 1 WHERE shard = 0"),
        ("lost", "UPDATE shard SET watermark = watermark + 5 WHERE shard = 0"),
    ],
)
def test_rows_that_fit_no_story_halt_the_job(hire: Hire, fault: str, sql: str) -> None:
    """Our owner and epoch, but not our batch: somebody wrote under our name."""
    w, parts = in_hand(hire, 0)
    x = hire(take=False)
    faulty = break_commit(w, fault, meanwhile=lambda: x.db.run_text(sql))
    with pytest.raises(InvariantBroken) as caught:
        w.commit(*parts)
    assert (faulty.fired, caught.value.invariant) == (1, "I1")
    assert column(w.db, "halted", table="job")[0]


def test_parts_of_one_commit_that_disagree_halt_the_job(hire: Hire) -> None:
    """One transaction: all of its surviving parts are there, or none is."""
    w, parts = in_hand(hire, 0, 1)
    x = hire(take=False)

    def undo_one() -> None:
        x.db.run_text("DELETE FROM ledger WHERE shard = 1 AND n = ?", (parts[1].n,))
        x.db.run_text("UPDATE shard SET watermark = watermark - 1 WHERE shard = 1")

    break_commit(w, "unheard", meanwhile=undo_one)
    with pytest.raises(InvariantBroken):
        w.commit(*parts)
    assert column(w.db, "halted", table="job")[0].startswith("I1")  # type: ignore[attr-defined]


# -- twins --------------------------------------------------------------------------------------


def unheard_then_lost(hire: Hire) -> None:
    """The promise: after any unknown outcome the crawl ends with every page once and its books right."""
    for shard, fault in enumerate(("unheard", "lost")):
        w, parts = in_hand(hire, shard)
        faulty = break_commit(w, fault)
        w.commit(*parts, want=3)
        assert faulty.fired == 1
        goes_on(w)


def test_settled_by_the_rows_every_unknown_outcome_ends_well(hire: Hire) -> None:
    """Both faults, one after the other."""
    unheard_then_lost(hire)


@pytest.mark.parametrize("rule", ["assume that it went through", "assume that it did not", "send it as a new batch"])
def test_guessing_instead_of_looking_breaks_the_promise(hire: Hire, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """The twins: each guess is wrong for one of the two faults."""

    def guess(db: Faulty, context: commit.Context, parts: list[Part], wants: dict[int, object]) -> commit.Committed:
        from dataclasses import replace

        db.reopen()  # type: ignore[operator]
        if rule == "assume that it went through":
            return commit.Committed(tuple(parts))
        if rule == "send it as a new batch":
            parts = [replace(part, n=part.n + 1) for part in parts]
        return commit.transact(db, context, parts, wants)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "settle", guess)
    with pytest.raises((AssertionError, InvariantBroken, WentBack)):
        unheard_then_lost(hire)


# -- together with other things -----------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost", "unheard"])
@pytest.mark.parametrize("hit", [1, 2, 3])
def test_an_unknown_outcome_in_the_middle_of_a_bisection_loses_no_half(hire: Hire, fault: str, hit: int) -> None:
    """3a: the id of a half is not that of the whole, so "committed" is said of the half alone."""
    w = hire(0)
    w.seed(*pages(0, 4))
    claims = w.claim()
    refuse(w.db, "p2")
    faulty = break_commit(w, *[""] * (hit - 1), fault)
    w.send(w.part(0, *(done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(claims))))
    assert faulty.fired == 1
    assert counted(w.db) == {"done": 3, "dead": 1}
    assert [sku for _, sku, _ in records(w.db)] == ["p0", "p1", "p3"]
    audit(w.db, w.job.id)


def test_a_batch_id_that_ignored_the_content_would_lose_half_a_batch(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 3a: with one id for all content a half that was committed passes for the whole."""
    monkeypatch.setattr(Part, "content_digest", lambda part: b"same")
    w = hire(0)
    w.seed(*pages(0, 4))
    results = [done(claim) for claim in w.claim()]
    half, whole = w.part(0, *results[:2]), w.part(0, *results)
    w.commit(half)
    assert commit.was_committed(w.db, whole) is True


def test_an_outcome_that_stays_unknown_in_a_bisection_gives_the_shard_up(hire: Hire) -> None:
    """The pieces cannot be sent again as the whole: the take-over finds out what became of them."""
    w = hire(0)
    w.seed(*pages(0, 4))
    claims = w.claim()
    refuse(w.db, "p2")
    faulty = break_commit(w, "unheard", "lost", "lost", "lost")
    answers = w.send(w.part(0, *(done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(claims))))
    assert faulty.fired == 4
    assert [(len(answer.parts), answer.fenced) for answer in answers] == [(0, (0,))]
    (taken,) = w.take(0)
    assert taken.lost == 2
    assert counted(w.db) == {"done": 2, "pending": 2}
    assert column(w.db, "halted", table="job") == [""]
    audit(w.db, w.job.id)


def test_poison_that_is_met_while_settling_is_bisected(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first COMMIT never arrived; run again, the data is refused: not an error, but a dead letter."""
    w = hire(0)
    w.seed(*pages(0, 3))
    claims = w.claim()
    x = hire(take=False)
    break_commit(w, "lost", meanwhile=lambda: refuse(x.db, "p1"))
    w.send(w.part(0, *(done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(claims))))
    assert counted(w.db) == {"done": 2, "dead": 1}
    audit(w.db, w.job.id)


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


@pytest.mark.parametrize("fault", ["lost", "unheard"])
def test_a_source_moves_once_whatever_became_of_the_commit(hire: Hire, fault: str) -> None:
    """The compare-and-set is in the batch: run again it finds its place, acknowledged it is not run again."""
    w = hire(0)
    move: SourceMove = w.open_source(*pages(0, 3))
    break_commit(w, fault)
    w.commit(w.part(0, sources=(move,)))
    assert w.db.rows_text("SELECT position, closed FROM source") == [(1, 1)]
    assert counted(w.db) == {"pending": 3}
    audit(w.db, w.job.id)


@pytest.mark.parametrize("fault", ["lost", "unheard"])
def test_a_take_over_of_unknown_outcome_is_ours_or_is_tried_again(hire: Hire, fault: str) -> None:
    """Owner = me and epoch = e + 1 means that it is mine; a second take-over from oneself costs nothing."""
    w, x = hire(0), hire(take=False)
    w.seed(*pages(0, 2))
    w.claim()
    x.bury(w)
    faulty = break_commit(x, fault)
    with pytest.raises(OutcomeUnknown):
        x.take(0)
    assert faulty.fired == 1
    x.db.reopen()
    (row, *_) = lease.shards(x.db, x.job.id)
    assert (row.owner == x.worker.id, row.epoch) == ((True, 2) if fault == "unheard" else (False, 1))
    x.take(0)
    goes_on(x)
    assert set(column(x.db, "lost")) == {1}, "a task was blamed twice for one death"


def test_a_reconnect_that_fails_keeps_the_outcome_unknown(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another kind on the way does not make the first outcome any better known."""
    w, parts = in_hand(hire, 0)
    faulty = break_commit(w, "unheard")
    fired = []

    def refused() -> None:
        fired.append(1)
        raise StoreUnavailable("no route")

    with monkeypatch.context() as patched:
        patched.setattr(Faulty, "reopen", lambda self: refused(), raising=False)
        with pytest.raises(OutcomeUnknown):
            w.commit(*parts)
    assert (faulty.fired, len(fired)) == (1, 3)
    before = dump(w.db)
    w.commit(*parts)
    after = dump(w.db)
    assert {name for name in after if after[name] != before[name]} == {"worker"}
    goes_on(w)


def test_poison_rows_are_counted_over_a_whole_bisection(hire: Hire) -> None:
    """The limit holds however the pieces fall, with an unknown outcome among them."""
    w = hire(0)
    w.seed(*pages(0, 12))
    results = [done(claim, offers=[emitted(f"p{i}", i)]) for i, claim in enumerate(w.claim())]
    refuse(w.db)
    break_commit(w, "", "lost")
    context = commit.Context(w.job, w.store.tables, w.store.known)
    with pytest.raises(Exception, match="more than 5 tasks") as caught:
        bisect.commit_bisecting(w.store.db, context, [w.part(0, *results)], {}, poison_rows_max=5)
    assert not isinstance(caught.value, PoisonRow)
