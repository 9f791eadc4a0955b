"""What is claimed next: only what the rows say afterwards, fair over hosts, and never more than was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.batch import Want
from limpet.errors import InvariantBroken
from limpet.store import frontier, lease
from limpet.task import Lane
from tests.conftest import Databases, Hire
from tests.store.audit import audit
from tests.store.hands import (
    SETTINGS,
    Hand,
    break_commit,
    column,
    counted,
    dead,
    done,
    failed,
    found_job,
    host_in,
    link,
    pages,
    released,
    skipped,
    throttled,
)


def is_due(hand: Hand) -> None:
    """All waits are over."""
    hand.db.run_text("UPDATE task SET due_ms = 1 WHERE due_ms > 0")


# -- a claim is what the rows say after the commit ------------------------------------------------


def test_a_claim_is_committed_before_anything_is_sent_for_it(hire: Hire) -> None:
    """Pending to running, a try more, stamped with epoch and batch; nothing is taken out of the table (P01)."""
    hand = hire(0)
    hand.seed(*pages(0, 3))
    (claim,) = hand.claim(1)
    reader = hire(take=False)
    rows = reader.db.rows_text("SELECT state, lane, tries, claim_epoch, claim_n FROM task WHERE id = ?", (claim.id,))
    assert rows == [("running", "running", 1, 1, hand.held[0].watermark)]
    assert (claim.tries, claim.solo, claim.authority) == (1, False, host_in(0))
    assert counted(reader.db) == {"running": 1, "pending": 2}


def test_claims_are_read_back_and_not_remembered_from_a_try_that_failed(hire: Hire) -> None:
    """15: the first try chose some tasks and was lost; what is claimed is what the try that committed chose."""
    hand, other = hire(0), hire(1)
    hand.seed(*pages(0, 1))

    def meanwhile() -> None:  # a more urgent task comes from elsewhere
        other.seed(link(f"{host_in(0)}/urgent", priority=9), shard=1)

    faulty = break_commit(hand, "lost", meanwhile=meanwhile)
    claims = hand.claim(2)
    assert faulty.fired == 1
    assert [claim.text for claim in claims] == [f"http://{host_in(0)}/urgent", f"http://{host_in(0)}/0"]
    assert {claim.id for claim in claims} == set(column(hand.db, "id", "state = 'running'"))
    audit(hand.db, hand.job.id)


def test_claims_remembered_from_before_the_commit_are_the_wrong_ones(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 15: had the first choice been kept, a task would run in nobody's memory."""
    chosen: list[int] = []
    real = frontier.stage_ids

    def note(db: object, ids: list[int]) -> None:
        chosen.append(ids[0])
        real(db, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier, "stage_ids", note)
    hand, other = hire(0), hire(1)
    hand.seed(*pages(0, 3))
    break_commit(hand, "lost", meanwhile=lambda: other.seed(link(f"{host_in(0)}/urgent", priority=9), shard=1))
    (claim,) = hand.claim(1)
    assert chosen[0] != claim.id


def test_a_batch_that_only_claims_has_a_number_and_a_ledger_row(hire: Hire) -> None:
    """15: without one, an unknown outcome could not be settled."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    n = hand.held[0].watermark
    hand.claim(2)
    assert hand.held[0].watermark == n + 1
    assert hand.db.rows_text("SELECT claimed, done FROM ledger WHERE n = ?", (n + 1,)) == [(2, 0)]


def test_running_tasks_in_nobodys_memory_come_back_by_take_over(hire: Hire) -> None:
    """A worker that forgot its claims takes its own shard over: they are lost tries, not tasks that run for ever (14)."""
    hand = hire(0)
    hand.seed(*pages(0, 5))
    hand.claim(3)
    hand.claims.clear()
    assert len(hand.claim(5)) == 2
    hand.claims.clear()
    (taken,) = hand.take(0)
    assert taken.lost == 5
    assert len(hand.claim()) == 5
    audit(hand.db, hand.job.id)


def test_a_task_that_moved_between_select_and_update_is_a_broken_invariant(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner alone claims in its shard: fewer rows than chosen halt the job, and nothing is claimed."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    hand.finish(done(*hand.claim(1)))
    (ended,) = column(hand.db, "id", "state = 'done'")
    monkeypatch.setattr(frontier, "_round", lambda db, part, want, means: ([ended], 0))
    with pytest.raises(InvariantBroken) as caught:
        hand.claim(1)
    assert caught.value.invariant == "I6"
    assert counted(hand.db) == {"done": 1, "pending": 1}


def test_nothing_is_claimed_that_was_not_asked_for(hire: Hire) -> None:
    """No want, no claim; other shards are left alone."""
    hand = hire(0, 1)
    hand.seed(*pages(0, 3), *pages(1, 3))
    assert hand.commit(hand.part(0), hand.part(1)).claims == ()
    answer = hand.commit(hand.part(0), hand.part(1), want={0: Want(2, 2)})
    assert {claim.shard for claim in answer.claims} == {0}


# -- order ----------------------------------------------------------------------------------------


def test_priority_comes_first_then_breadth_then_age(hire: Hire) -> None:
    """Of one host: larger priority, smaller depth, lower id."""
    hand = hire(0)
    host = host_in(0)
    wanted = [("a", 0, 0), ("b", 0, 1), ("c", 5, 3), ("d", 0, 0), ("e", -1, 0), ("f", 5, 1)]
    for name, priority, depth in wanted:
        hand.seed(link(f"{host}/{name}", priority=priority, depth=depth))
    order = [hand.claim(1)[0].text[-1] for _ in wanted]
    by_rule = sorted(wanted, key=lambda one: (-one[1], one[2]))
    assert order == [name for name, _, _ in by_rule]


def test_of_several_claims_of_one_batch_the_order_is_the_same(hire: Hire) -> None:
    """Read back by rank and id."""
    hand = hire(0)
    hand.seed(*(link(f"{host_in(0)}/{i}", depth=9 - i) for i in range(9)))
    assert [claim.depth for claim in hand.claim(9)] == [*range(1, 10)]


def test_a_retry_waits_until_it_is_due_and_then_joins_the_others(hire: Hire) -> None:
    """Failed and throttled tasks are not claimable before their time (18); `next_due_ms` says when."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    first, second = hand.claim()
    answer = hand.finish(failed(first, 1_200_000), throttled(second, 600_000), want=9)
    assert answer.claims == ()
    due_in_ms = answer.next_due_ms[0]
    assert due_in_ms is not None
    assert 300_000 < due_in_ms <= 600_000
    is_due(hand)
    assert {claim.id for claim in hand.claim()} == {first.id, second.id}
    assert hand.commit(hand.part(0)).next_due_ms[0] is None
    audit(hand.db, hand.job.id)


def a_throttle_is_no_hot_loop(hire: Hire) -> None:
    """A host that always says 429: how often is it asked before its time?"""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    asked = 0
    for _ in range(10):
        claims = hand.claim(5)
        asked += len(claims)
        if claims:
            hand.finish(*(throttled(claim, 60_000) for claim in claims))
    assert asked == 1, f"asked {asked} times at once"


def test_a_throttled_task_is_not_asked_for_again_before_its_time(hire: Hire) -> None:
    """18: release carries a due time."""
    a_throttle_is_no_hot_loop(hire)


def test_a_throttle_without_a_due_time_would_be_a_hot_loop(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 18."""
    from limpet.store import commit

    monkeypatch.setattr(commit, "lane_of", lambda state, **more: Lane.READY if state == "pending" else Lane.NONE)
    with pytest.raises(AssertionError, match="asked 10 times"):
        a_throttle_is_no_hot_loop(hire)


def test_throttles_are_counted_with_the_time_of_the_first(hire: Hire) -> None:
    """So that a task that is put off for ever can be given up: N times or T hours (18)."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    since = set()
    for times in range(1, 4):
        (claim,) = hand.claim()
        assert (claim.throttled, claim.strikes) == (times - 1, 0)
        hand.finish(throttled(claim, 1))
        since.add(column(hand.db, "throttled_ms")[0])
        is_due(hand)
    assert len(since) == 1
    assert since != {0}
    hand.finish(dead(*hand.claim(), reason="throttled"))
    audit(hand.db, hand.job.id)


def test_many_due_retries_join_in_bounded_steps(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch moves at most so many; none is forgotten."""
    monkeypatch.setattr(frontier, "PROMOTE_MAX", 3)
    hand = hire(0)
    hand.seed(*pages(0, 10))
    hand.finish(*(failed(claim, 60_000) for claim in hand.claim()))
    is_due(hand)
    assert [len(hand.claim()) for _ in range(5)] == [3, 3, 3, 1, 0]


def test_a_released_task_is_claimable_at_once_and_is_no_strike(hire: Hire) -> None:
    """A clean stop, an outage of the host: the try ends as released."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim()
    hand.finish(released(claim))
    (again,) = hand.claim()
    assert (again.tries, again.strikes, again.lost) == (2, 0, 0)


# -- hosts ----------------------------------------------------------------------------------------


def test_a_claim_takes_of_each_host_no_more_than_its_pace_lets_start(hire: Hire) -> None:
    """A quota for each, another for some, none for those that pause; and the whole is bounded."""
    hand = hire(0)
    links = pages(0, 50, hosts=5)
    hand.seed(*links)
    hosts = [one.host for one in links[:5]]
    want = Want(100, 2, busy={hosts[0]: 0, hosts[1]: 5})
    claims = hand.commit(hand.part(0), want=want).claims
    assert Counter(claim.host for claim in claims) == {hosts[1]: 5, hosts[2]: 2, hosts[3]: 2, hosts[4]: 2}
    assert len(hand.commit(hand.part(0), want=Want(3, 2)).claims) == 3


def test_rounds_go_on_where_the_last_one_ended_and_no_host_starves(hire: Hire) -> None:
    """Five places a round for twelve hosts: after twelve rounds every host has had five."""
    hand = hire(0)
    links = pages(0, 12 * 20, hosts=12)
    hand.seed(*links)
    seen: Counter[int] = Counter()
    after = frontier.LOWEST_HOST
    for _ in range(12):
        answer = hand.commit(hand.part(0), want=Want(5, 1, after_host=after))
        after = answer.rounds[0]
        seen.update(claim.host for claim in answer.claims)
        assert max(seen.values()) - min(seen.values()) <= 1 or len(seen) < 12
    assert set(seen.values()) == {5}


def test_without_a_round_the_first_hosts_would_take_everything(hire: Hire) -> None:
    """The twin: always beginning at the lowest host starves the others."""
    hand = hire(0)
    hand.seed(*pages(0, 12 * 20, hosts=12))
    seen: Counter[int] = Counter()
    for _ in range(12):
        seen.update(claim.host for claim in hand.commit(hand.part(0), want=Want(5, 1)).claims)
    assert len(seen) == 5


def many_hosts(hand: Hand, number: int) -> list[int]:
    """So many hosts with a task each, written straight into the table."""
    hand.seed(*pages(0, 1))
    hosts = sorted({(i * 2654435761) % 2**40 for i in range(number)})
    hand.db.run_text("DELETE FROM task_text")
    hand.db.run_text("DELETE FROM task")
    cell = "INSERT INTO task (id, job, shard, host, key, state, lane, source_shard, source_n) VALUES "
    for start in range(0, number, 500):
        rows = [(i + 1, hand.job.id, 0, host, host.to_bytes(16, "big")) for i, host in enumerate(hosts)][start : start + 500]
        sql = cell + ", ".join(["(?, ?, ?, ?, ?, 'pending', 'ready', 0, 2)"] * len(rows))
        hand.db.run_text(sql, [value for row in rows for value in row])
    hand.db.run_text("INSERT INTO task_text SELECT id, CONCAT('http://x/', id), '', '', '', 0, 0, 0, ? FROM task", (b"",))
    return hosts


def test_a_claim_among_thousands_of_paused_hosts_is_bounded_and_gets_past_them(hire: Hire) -> None:
    """It looks at so many hosts at most; the round goes on from there, so the one that may start is found."""
    hand = hire(0)
    hosts = many_hosts(hand, 3500)
    free = hosts[3210]
    busy = dict.fromkeys(hosts, 0) | {free: 1}
    asked: list[int] = []
    real = hand.db.one

    def count(statement: str, **values: object) -> object:
        asked.append(statement == "ready_host_after")
        return real(statement, **values)

    hand.db.one = count  # type: ignore[method-assign]
    after, claims, rounds = frontier.LOWEST_HOST, (), 0
    while not claims:
        asked.clear()
        answer = hand.commit(hand.part(0), want=Want(10, 1, busy=busy, after_host=after))
        assert sum(asked) <= frontier.HOSTS_MAX
        after, claims, rounds = answer.rounds[0], answer.claims, rounds + 1  # type: ignore[assignment]
    assert [claim.host for claim in claims] == [free]
    assert rounds == 4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tasks=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    quotas=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    most=st.integers(1, 12),
)
def test_rounds_drain_everything_within_the_quotas(databases: Databases, tasks: list[int], quotas: list[int], most: int) -> None:
    """Law: each claim keeps every quota and the total, takes as much as they allow, and nothing is left behind."""
    from limpet.store import open_store

    store = open_store(databases.ready(), settings=SETTINGS)
    found_job(store)
    hand = Hand.on(store)
    hand.take(0)
    names = [host_in(0, i) for i in range(len(tasks))]
    links = [link(f"{name}/{i}") for name, number in zip(names, tasks, strict=True) for i in range(number)]
    hand.seed(*links)
    hosts = [link(name).host for name in names]
    quota = {host: max(1, q) if sum(quotas) == 0 else q for host, q in zip(hosts, quotas, strict=False)}
    left = Counter(one.host for one in links)
    after = frontier.LOWEST_HOST
    for _ in range(60):
        answer = hand.commit(hand.part(0), want=Want(most, 1, busy=quota, after_host=after))
        after, got = answer.rounds[0], Counter(claim.host for claim in answer.claims)
        assert all(number <= quota[host] for host, number in got.items())
        assert got.total() == min(most, sum(min(left[host], quota[host]) for host in hosts))
        left -= got
        if not got:
            break
    assert all(quota[host] == 0 for host in left)
    hand.leave()
    store.close()


# -- suspects -------------------------------------------------------------------------------------


def make_suspects(hire: Hire, number: int = 1, deaths: int = 3) -> Hand:
    """Tasks whose workers were lost so often; the last owner."""
    hand = hire(0)
    hand.seed(*pages(0, number))
    for _ in range(deaths):
        hand.claim()
        other = hire(take=False)
        other.succeed_to(hand)
        hand = other
    return hand


def test_a_task_lost_three_times_is_claimed_alone_and_by_nobody_else(hire: Hire) -> None:
    """A suspect is not in the ready lane: only a claim that asks for one gets it, and gets one."""
    hand = make_suspects(hire, 2)
    hand.seed(*pages(0, 3, start=10))
    assert {claim.lost for claim in hand.claim()} == {0}
    assert hand.commit(hand.part(0)).suspects_due_ms == {0: 0}
    (suspect,) = hand.claim(50, solo=True)
    assert (suspect.lost, suspect.solo, suspect.tries) == (3, True, 4)
    assert column(hand.db, "claim_solo", "id = ?", (suspect.id,)) == [1]
    hand.finish(done(suspect), *(done(claim) for claim in hand.claims.values() if claim.id != suspect.id))
    assert len(hand.claim(50, solo=True)) == 1
    audit(hand.db, hand.job.id)


def test_a_task_lost_twice_is_no_suspect_yet(hire: Hire) -> None:
    """Three lost tries make one."""
    hand = make_suspects(hire, 1, deaths=2)
    assert [claim.lost for claim in hand.claim()] == [2]


def test_a_suspect_whose_host_pauses_is_left_and_the_next_one_taken(hire: Hire) -> None:
    """A solo claim keeps to the pace as well."""
    hand = hire(0)
    hand.seed(*pages(0, 2, hosts=2))
    for _ in range(3):
        hand.claim()
        hand.take(0)
    first, second = sorted(column(hand.db, "host"))  # type: ignore[type-var]
    (claim,) = hand.commit(hand.part(0), want=Want(1, 1, busy={first: 0}, solo=True)).claims  # type: ignore[dict-item]
    assert claim.host == second


@pytest.mark.parametrize("end", [released, skipped, failed], ids=["released", "skipped", "failed"])
def test_a_suspect_that_survives_stays_a_suspect_until_it_has_ended(hire: Hire, end: object) -> None:
    """Released or failed it waits in the suspects' lane; its solo try that went well is no loss."""
    hand = make_suspects(hire)
    (suspect,) = hand.claim(1, solo=True)
    hand.finish(end(suspect))  # type: ignore[operator]
    ((lane, solo, lost),) = hand.db.rows_text("SELECT lane, solo, lost FROM task")
    assert (lane, solo, lost) == (None if end is skipped else "suspect", 0, 3)
    audit(hand.db, hand.job.id)


# -- parked tasks -----------------------------------------------------------------------------------


def test_a_task_without_a_handler_is_parked_and_never_a_strike(hire: Hire) -> None:
    """31: pending, not claimable by this release, in sight; a take-over by another release has a look at it again."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    first, _ = hand.claim()
    hand.finish(released(first, park=True, reason="no handler gone"))
    assert hand.db.rows_text("SELECT state, lane, strikes FROM task WHERE id = ?", (first.id,)) == [("pending", "parked", 0)]
    assert hand.claim() == []
    assert hand.db.one("open_work", job=hand.job.id) == (1, 0, 0, 1)
    hand.take(0)
    assert [claim.id for claim in hand.claim()][:1] == [first.id]
    audit(hand.db, hand.job.id)


def test_a_suspect_that_was_parked_is_a_suspect_again(hire: Hire) -> None:
    """Parked and taken over it is claimed alone as before: in a crowd it might kill the crowd."""
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


# -- other shards -----------------------------------------------------------------------------------


def test_a_claim_names_its_shard_and_host_as_the_link_did(hire: Hire) -> None:
    """What comes back is what went in: texts, payload, hops, chain."""
    hand = hire(2)
    one = replace(
        link(f"{host_in(2)}/A?b=1", handler="page", payload='{"data":1}', priority=3, depth=4, hops=2, chain=b"k" * 32),
        url="http://X/raw",
    )
    hand.seed(one)
    (claim,) = hand.claim()
    assert (claim.shard, claim.host, claim.key, claim.text, claim.url) == (one.shard, one.host, one.key, one.text, one.url)
    assert (claim.handler, claim.payload, claim.priority, claim.depth) == ("page", '{"data":1}', 3, 4)
    assert (claim.hops, claim.chain, claim.authority) == (2, b"k" * 32, host_in(2))


def test_rows_of_a_shard_say_who_owns_it(hire: Hire) -> None:
    """Owner, epoch, watermark, and whether the owner lives."""
    hand, other = hire(0), hire(1)
    other.release(1)
    rows = lease.shards(hand.db, hand.job.id)
    assert [(row.shard, row.owner, row.epoch, row.watermark, row.owner_lives) for row in rows] == [
        (0, hand.worker.id, 1, 1, True),
        (1, None, 1, 2, False),
        (2, None, 0, 0, False),
        (3, None, 0, 0, False),
    ]
