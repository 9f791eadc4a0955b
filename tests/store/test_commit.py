"""The one transaction: everything of a batch is visible together, or nothing is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from limpet import failpoint
from limpet.batch import HostRow, RobotsRow
from limpet.errors import InvariantBroken, StoreBusy, UsageError
from limpet.failpoint import COMMIT_STEPS, FailpointRaised
from limpet.store import commit, frontier, ledger
from tests.conftest import Hire
from tests.store.audit import audit
from tests.store.hands import (
    Faulty,
    Hand,
    attempts,
    change_sql,
    column,
    counted,
    dead,
    done,
    dump,
    emitted,
    failed,
    host_in,
    link,
    pages,
    records,
    released,
    skipped,
    states,
)

FailAt = Callable[[str], Callable[[], bool]]


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FailAt:
    """Makes one failpoint raise; the answer says whether it did."""

    def at(name: str) -> Callable[[], bool]:
        log = tmp_path / "failpoints"
        monkeypatch.setenv("LIMPET_FAILPOINT_LOG", str(log))
        monkeypatch.setattr(failpoint, "_PLAN", {name: (1, "raise")})
        monkeypatch.setattr(failpoint, "_HITS", Counter())
        return lambda: log.exists() and log.read_text().split() == [name]

    return at


def a_full_part(hand: Hand) -> list[object]:
    """Seed a page, claim it, and make a part that writes into every table a batch can write."""
    (page,) = pages(1, 1)
    hand.seed(page)
    (claim,) = hand.claim(1, 1)
    result = done(claim, link(f"{host_in(2)}/child"), offers=[emitted("a", 1)])
    host = HostRow(claim.host, claim.authority, delay_ms=1000, wait_ms=1000)
    robots = RobotsRow(f"http://{claim.authority}", "parse", 200, b"User-agent: *", 60_000)
    move = hand.open_source(link(f"{host_in(3)}/from-a-list"))
    return [hand.part(1, result, hosts=(host,), robots=(robots,), sources=(move,), code=b"code")]


# -- together or not at all ---------------------------------------------------------------------


def test_a_batch_moves_state_links_records_pace_and_watermark_together(hire: Hire) -> None:
    """What was collected and how far the crawl got are one commit."""
    hand = hire()
    before = hand.held[1].watermark
    answer = hand.commit(*a_full_part(hand))  # type: ignore[arg-type]
    assert states(hand.db) == {
        f"http://{host_in(1)}/0": "done",
        f"http://{host_in(2)}/child": "pending",
        f"http://{host_in(3)}/from-a-list": "pending",
    }
    assert records(hand.db) == [("", "a", 1)]
    assert column(hand.db, "watermark", "shard = 1", table="shard") == [before + 2]
    assert [column(hand.db, "n", table=table) for table in ("host", "robots")] == [[before + 2]] * 2
    assert (answer.discovered, answer.deltas) == (2, {"shop_product": [1, 0, 0, 0, 0]})
    audit(hand.db, hand.job.id)


@pytest.mark.parametrize("step", COMMIT_STEPS[:-1])
def test_a_commit_that_fails_at_any_step_changes_nothing_and_can_be_repeated(hire: Hire, fail_at: FailAt, step: str) -> None:
    """All of it or nothing, wherever it breaks: and the very same part goes through afterwards (P01, P14, P32)."""
    hand = hire()
    parts = a_full_part(hand)
    before = dump(hand.db)
    fired = fail_at(step)
    with pytest.raises(FailpointRaised):
        hand.commit(*parts, want=5)  # type: ignore[arg-type]
    assert fired()
    assert dump(hand.db) == before
    assert hand.commit(*parts, want=5).discovered == 2  # type: ignore[arg-type]
    audit(hand.db, hand.job.id)


@pytest.mark.parametrize("step", ["after_discover", "after_records", "after_finish", "after_ledger"])
def test_without_a_transaction_the_same_failure_would_leave_half_a_batch(
    hire: Hire, fail_at: FailAt, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The twin: were what is done so far committed instead of rolled back, the dump would differ."""
    hand = hire()
    parts = a_full_part(hand)
    before = dump(hand.db)
    monkeypatch.setattr(type(hand.db), "rollback", type(hand.db).commit)
    fired = fail_at(step)
    with pytest.raises(FailpointRaised):
        hand.commit(*parts)  # type: ignore[arg-type]
    assert fired()
    assert dump(hand.db) != before


def test_what_a_failure_after_the_commit_hides_is_still_there(hire: Hire, fail_at: FailAt) -> None:
    """COMMIT is the point of no return: a process that dies after it has lost nothing but its memory."""
    hand, other = hire(), hire(take=False)
    parts = a_full_part(hand)
    fired = fail_at("after_commit")
    with pytest.raises(FailpointRaised):
        hand.commit(*parts, want=5)  # type: ignore[arg-type]
    assert fired()
    assert counted(hand.db)["done"] == 1
    other.succeed_to(hand)
    audit(other.db, other.job.id)
    assert counted(other.db) == {"done": 1, "pending": 2}


def test_a_commit_outside_a_transaction_is_refused(hire: Hire) -> None:
    """A client whose COMMIT of a failed transaction says nothing would report what was never written."""
    hand = hire()
    with pytest.raises(InvariantBroken):
        hand.db.commit()


# -- the order of the steps ---------------------------------------------------------------------


def test_every_fence_is_the_first_thing_its_transaction_says_in_shard_order(hire: Hire) -> None:
    """The order of steps is the only lock order: shards first, then tasks, records, own tasks, books (13, 27)."""
    hand = hire()
    hand.seed(*(page for shard in range(4) for page in pages(shard, 1)))
    claims = hand.claim()
    said = Faulty(hand.store.db)
    hand.store.db = said  # type: ignore[assignment]
    hand.finish(*(done(claim, link(f"{host_in(0)}/new")) for claim in reversed(claims)), want=1)
    assert said.said[:4] == ["fence"] * 4
    order = ["fence", "discover", "discover_text", "finish", "put_attempts", "claim", "put_ledger", "renew", "commit"]
    assert [name for name in dict.fromkeys(said.said) if name in order] == order


def test_two_parts_of_one_shard_in_one_commit_are_refused(hire: Hire) -> None:
    """The second would always meet its own fence."""
    hand = hire()
    before = dump(hand.db)
    with pytest.raises(UsageError, match="two parts of one shard"):
        hand.send(hand.part(1), hand.part(1))
    assert dump(hand.db) == before


def test_an_empty_commit_is_nothing(hire: Hire) -> None:
    """No part, no transaction."""
    hand = hire()
    before = dump(hand.db)
    assert hand.commit().parts == ()
    assert dump(hand.db) == before


# -- discover -----------------------------------------------------------------------------------


def test_a_link_that_two_parts_share_becomes_one_task(hire: Hire) -> None:
    """De-duplicated after the fences, over the surviving parts."""
    hand = hire()
    hand.seed(*pages(0, 1), *pages(1, 1))
    first, second = hand.claim()
    shared = link(f"{host_in(2)}/shared")
    assert hand.finish(done(first, shared), done(second, shared)).discovered == 1
    audit(hand.db, hand.job.id)


def test_a_link_that_is_there_stays_as_it_is(hire: Hire) -> None:
    """A task that was dead, done or running is no second task, and is not put back (P17, P41)."""
    hand = hire()
    hand.seed(*pages(0, 4))
    a, b, c, _ = hand.claim()
    hand.finish(dead(a), skipped(b))
    hand.store.known.clear()
    assert hand.finish(done(c, *pages(0, 4))).discovered == 0
    assert counted(hand.db) == {"dead": 1, "skipped": 1, "done": 1, "running": 1}
    audit(hand.db, hand.job.id)


def test_what_was_discovered_meanwhile_is_met_by_the_conflict_clause(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anti-join and conflict clause: without the first half the second still makes one task of two."""
    hand = hire()
    first_half = "WHERE (SELECT t.id" if hand.db.name == "postgres" else "WHERE NOT EXISTS"
    change_sql(monkeypatch, hand.db, "discover", first_half, first_half.replace("WHERE", "WHERE 1 = 1 OR"))
    hand.seed(*pages(0, 2))
    first, second = hand.claim()
    assert hand.finish(done(first, *pages(0, 3))).discovered == 1
    hand.store.known.clear()
    assert hand.finish(done(second, *pages(0, 4))).discovered == 1
    audit(hand.db, hand.job.id)


def test_new_tasks_are_counted_from_their_stamps_and_not_from_row_counts(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that says 2 for every row changes no book (21: MariaDB does)."""
    hand = hire()
    run = type(hand.db).run

    def miscount(db: object, statement: str, **values: object) -> int:
        rows = run(db, statement, **values)  # type: ignore[arg-type]
        return 2 * rows if statement.startswith(("discover", "put_")) else rows

    monkeypatch.setattr(type(hand.db), "run", miscount)
    assert hand.seed(*pages(0, 3), *pages(2, 2)).discovered == 5
    (claim,) = hand.claim(1, 2)
    assert hand.finish(done(claim, *pages(2, 4), *pages(3, 1))).discovered == 3
    assert column(hand.db, "discovered", "discovered > 0", table="ledger") == [3, 5]
    audit(hand.db, hand.job.id)


def test_depth_and_priority_are_those_of_the_first_discovery(hire: Hire) -> None:
    """A later, shorter way to a page does not change its task."""
    hand = hire()
    hand.seed(link(f"{host_in(0)}/x", depth=5, priority=1))
    hand.store.known.clear()
    hand.seed(link(f"{host_in(0)}/x", depth=1, priority=9))
    ((depth, priority),) = hand.db.rows_text("SELECT depth, priority FROM task_text")
    assert (depth, priority) == (5, 1)


# -- finish -------------------------------------------------------------------------------------


def test_a_result_for_a_task_that_does_not_run_halts_the_job_and_writes_nothing(hire: Hire) -> None:
    """Fewer rows finished than expected under a held fence is a broken invariant, not a retry (32)."""
    hand = hire()
    hand.seed(*pages(0, 2))
    first, second = hand.claim()
    hand.finish(done(first))
    before = dump(hand.db)
    with pytest.raises(InvariantBroken) as caught:
        hand.commit(hand.part(0, done(first), done(second)))
    assert caught.value.invariant == "I6"
    after = dump(hand.db)
    assert column(hand.db, "halted", table="job")[0].startswith("I6")  # type: ignore[attr-defined]
    assert {name for name in after if after[name] != before[name]} == {"alert", "job"}


@pytest.mark.parametrize("wrong", ["tries", "twice"])
def test_a_try_that_is_not_the_open_one_finishes_nothing(hire: Hire, wrong: str) -> None:
    """The guard names the try: an old result of the same task, or the same one twice, does not end it."""
    from dataclasses import replace

    hand = hire()
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim()
    results = [done(replace(claim, tries=claim.tries + 1))] if wrong == "tries" else [done(claim), done(claim)]
    with pytest.raises(InvariantBroken):
        hand.commit(hand.part(0, *results))
    assert counted(hand.db) == {"running": 1}


def test_an_outcome_other_than_done_drops_what_was_emitted_and_keeps_its_books(hire: Hire) -> None:
    """Records of a try that failed are dropped; its attempt, its links' digest and the host's pause are kept (32, P34)."""
    from dataclasses import replace

    hand = hire()
    hand.seed(*pages(0, 3))
    a, b, c = hand.claim()
    offers = (emitted("x", 1),)
    hand.finish(replace(failed(a), offers=offers), replace(skipped(b), offers=offers), replace(dead(c), offers=offers))
    assert records(hand.db) == []
    assert [(o, r) for _, _, o, r in attempts(hand.db)] == [("failed", "timeout"), ("skipped", "gone"), ("dead", "status 500")]
    audit(hand.db, hand.job.id)


def test_a_skip_or_death_without_a_reason_is_not_written(hire: Hire) -> None:
    """I3: each skip and death has its reason."""
    hand = hire()
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim()
    with pytest.raises(InvariantBroken):
        hand.finish(skipped(claim, ""))
    assert counted(hand.db) == {"running": 1}


# -- the books ----------------------------------------------------------------------------------


def test_every_claim_ends_in_exactly_one_attempt_row_and_tries_never_fall(hire: Hire) -> None:
    """Released, throttled, failed, lost and done tries of one task are five rows (19, I7)."""
    hand, other = hire(0), hire(take=False)
    hand.seed(*pages(0, 1))

    def again(worker: Hand) -> object:
        worker.db.run_text("UPDATE task SET lane = 'ready', due_ms = 0 WHERE lane = 'waiting'")  # its wait is over
        return worker.claim()[0]

    hand.finish(released(again(hand)))  # type: ignore[arg-type]
    from tests.store.hands import throttled

    hand.finish(throttled(again(hand), 5))  # type: ignore[arg-type]
    hand.finish(failed(again(hand)))  # type: ignore[arg-type]
    again(hand)
    other.succeed_to(hand)
    other.finish(done(again(other)))  # type: ignore[arg-type]
    assert [(n, outcome) for _, n, outcome, _ in attempts(hand.db)] == [
        (1, "released"), (2, "throttled"), (3, "failed"), (4, "lost"), (5, "done"),
    ]  # fmt: skip
    assert hand.db.rows_text("SELECT tries, strikes, lost, throttled FROM task") == [(5, 1, 1, 1)]
    audit(hand.db, hand.job.id)


def test_every_fenced_transaction_is_a_numbered_batch_sealed_over_the_one_before(hire: Hire) -> None:
    """Claims, results, releases and take-overs: 1, 2, 3 without a gap (15, I1)."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    first, second = hand.claim()
    hand.finish(done(first))
    hand.release(0, released(second))
    hand.take(0)
    kinds = hand.db.rows_text("SELECT n, kind, epoch FROM ledger WHERE shard = 0 ORDER BY n")
    assert kinds == [(1, "takeover", 1), (2, "work", 1), (3, "work", 1), (4, "work", 1), (5, "release", 1), (6, "takeover", 2)]
    audit(hand.db, hand.job.id)


def test_a_ledger_row_that_was_changed_breaks_its_seal(hire: Hire) -> None:
    """Whatever of a row is edited, its seal no longer covers it."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    row = hand.db.rows_text(f"SELECT {', '.join((*ledger.COLUMNS, 'seal'))} FROM ledger ORDER BY n DESC LIMIT 1")[0]
    named = dict(zip(ledger.COLUMNS, row, strict=False))
    assert ledger.seal(named) == row[-1]
    for name in ledger.COLUMNS:
        other = named[name] + (b"x" if isinstance(named[name], bytes) else "x" if isinstance(named[name], str) else 1)  # type: ignore[operator]
        assert ledger.seal(named | {name: other}) != row[-1], name


def test_a_batch_whose_predecessor_is_missing_is_not_written(hire: Hire) -> None:
    """A ledger with a gap halts the job instead of growing over it."""
    hand = hire(0)
    hand.db.run_text("DELETE FROM ledger WHERE n = 1")
    with pytest.raises(InvariantBroken) as caught:
        hand.commit(hand.part(0))
    assert caught.value.invariant == "I1"
    assert column(hand.db, "watermark", "shard = 0", table="shard") == [1]


def test_the_code_that_wrote_a_batch_is_in_its_row(hire: Hire) -> None:
    """Each batch keeps the digest of the spider's code."""
    hand = hire(0)
    hand.commit(hand.part(0, code=b"release 7"))
    assert column(hand.db, "code", "n = 2", table="ledger") == [b"release 7"]


# -- stopped jobs -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["halted", "paused"])
def test_a_stopped_job_takes_the_results_in_hand_and_claims_nothing(hire: Hire, how: str) -> None:
    """24: everybody stops claiming, nobody loses what was fetched; and it goes on when that is taken back."""
    hand, other = hire(0), hire(1)
    hand.seed(*pages(0, 3), *pages(1, 3))
    (claim,) = hand.claim(1)
    hand.store.halt("I3: row 7") if how == "halted" else hand.store.pause("50 in a row")
    answer = hand.finish(done(claim), want=5)
    assert (answer.claims, answer.stopped.partition(":")[0]) == ((), how)
    assert other.claim() == []
    assert counted(hand.db) == {"done": 1, "pending": 5}
    hand.db.run("unhalt" if how == "halted" else "resume", job=hand.job.id)
    assert len(other.claim()) == 3
    audit(hand.db, hand.job.id)


# -- busy, and errors after the commit ----------------------------------------------------------


def test_a_busy_database_is_asked_again_with_the_whole_transaction(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlock and busy: roll back everything, repeat the whole transaction."""
    hand = hire()
    parts = a_full_part(hand)
    waits: list[float] = []
    monkeypatch.setattr(commit.time, "sleep", waits.append)
    begin, fired = type(hand.db).begin, []

    def busy(db: object) -> None:
        if len(fired) < 3:
            fired.append(1)
            raise StoreBusy("locked")
        begin(db)  # type: ignore[arg-type]

    monkeypatch.setattr(type(hand.db), "begin", busy)
    assert hand.commit(*parts).discovered == 2  # type: ignore[arg-type]
    assert waits == list(commit.BUSY_WAITS_S[:3])
    audit(hand.db, hand.job.id)


def test_a_database_that_stays_busy_is_an_error_that_blames_no_task(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last wait StoreBusy leaves, and the part can be sent again."""
    hand = hire()
    parts = a_full_part(hand)
    before = dump(hand.db)
    monkeypatch.setattr(commit, "BUSY_WAITS_S", (0.0, 0.0))
    begin, fired = type(hand.db).begin, []

    def busy(db: object) -> None:
        fired.append(1)
        raise StoreBusy("locked")

    with monkeypatch.context() as patched:
        patched.setattr(type(hand.db), "begin", busy)
        with pytest.raises(StoreBusy):
            hand.commit(*parts)  # type: ignore[arg-type]
    assert (len(fired), begin is type(hand.db).begin) == (3, True)
    assert dump(hand.db) == before
    assert hand.commit(*parts).discovered == 2  # type: ignore[arg-type]


def test_a_busy_answer_after_a_definite_commit_does_not_commit_twice(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the claims back may meet a lock; the batch is committed all the same, and the claims are found."""
    hand = hire(0)
    hand.seed(*pages(0, 3))
    read, fired = frontier.read_claims, []

    def busy(*arguments: object) -> object:
        if not fired:
            fired.append(1)
            raise StoreBusy("locked")
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier, "read_claims", busy)
    assert len(hand.claim(2)) == 2
    assert fired
    assert column(hand.db, "halted", table="job") == [""]
    audit(hand.db, hand.job.id)


# -- complete -----------------------------------------------------------------------------------


def test_complete_is_one_statement_that_sees_a_commit_whole(hire: Hire) -> None:
    """4: while a parent ends in one shard and its child starts in another, no reader may find both closed."""
    hand, reader = hire(0, 1), hire(take=False)
    hand.seed(*pages(0, 1), shard=0)
    (parent,) = hand.claim()
    child = pages(1, 1)

    def is_open(shard: int) -> bool:
        sql = "SELECT COUNT(*) FROM task WHERE job = ? AND shard = ? AND lane IS NOT NULL"
        return bool(reader.db.rows_text(sql, (hand.job.id, shard))[0][0])

    one_by_one = [is_open(1)]  # the twin: shard by shard, the commit falls between the two
    at_first = reader.db.one("open_work", job=hand.job.id)
    hand.finish(done(parent, *child))
    one_by_one.append(is_open(0))
    afterwards = reader.db.one("open_work", job=hand.job.id)
    assert one_by_one == [False, False], "read shard by shard, the job looks complete"
    assert (at_first, afterwards) == ((1, 0, 0, 1), (1, 0, 0, 1))


def test_every_kind_of_open_work_keeps_a_job_from_being_complete(hire: Hire) -> None:
    """Pending, running, failed, an open source, a request of a person: each alone is enough (P15, P19)."""
    hand = hire()
    sources = hand.db.one("open_work", job=hand.job.id)
    assert sources == (0, 0, 0, 0), "no task at all is nothing to do, never complete"
    move = hand.open_source(*pages(0, 1))
    assert hand.db.one("open_work", job=hand.job.id) == (0, 1, 0, 0)
    hand.commit(hand.part(0, sources=(move,)))
    assert hand.db.one("open_work", job=hand.job.id) == (1, 0, 0, 1)
    (claim,) = hand.claim()
    assert hand.db.one("open_work", job=hand.job.id) == (1, 0, 0, 1)
    hand.finish(failed(claim, 60_000))
    assert hand.db.one("open_work", job=hand.job.id) == (1, 0, 0, 1)
    hand.db.run_text("UPDATE task SET lane = 'ready', due_ms = 0")
    hand.finish(dead(*hand.claim()))
    assert hand.db.one("open_work", job=hand.job.id) == (0, 0, 0, 1)
    hand.db.run("put_request", job=hand.job.id, shard=0, what="retry", argument="{}", who="me")
    assert hand.db.one("open_work", job=hand.job.id) == (0, 0, 1, 1)
