"""A person's pause of a host, and which hosts are short of claims: decisions of the hand, without a clock of its own."""

from __future__ import annotations

from limpet.batch import Claim
from limpet.engine.hand import Hand
from limpet.task import ShardId, TaskId, TaskKey

HOST, AUTHORITY, SHARD = 7, "a.test", 1


def claim(number: int, *, host: int = HOST, authority: str = AUTHORITY) -> Claim:
    """A claim of a page."""
    url = f"http://{authority}/{number}"
    return Claim(
        shard=ShardId(SHARD), id=TaskId(number), key=TaskKey(bytes(16)), tries=1, strikes=0, lost=0, throttled=0, host=host, text=url,
        url=url, handler="", payload="", priority=0, depth=0, hops=0, chain=b"",
    )  # fmt: skip


def hand(*claims: Claim, delay_s: float = 0.0, slots: int = 1) -> Hand:
    """A hand with claims, at time 0."""
    made = Hand(delay_s=delay_s, slots=slots, slots_with_delay=1)
    made.add(claims, 0.0)
    return made


def test_a_paused_host_starts_nothing_gives_its_claims_back_and_lets_what_runs_end() -> None:
    """Also what is claimed meanwhile stays; and it takes no further claims."""
    held = hand(*map(claim, range(3)))
    running = held.take(0.0)
    assert running is not None
    back = held.heed(HOST, AUTHORITY, SHARD, "ask bob", 0.0)
    assert [one.id for one in back] == [1, 2]
    assert (held.unstarted, held.running) == (0, 1)
    held.ended(running, 1.0)
    held.add([claim(9)], 1.0)
    assert (held.take(100.0), held.startable(100.0)) == (None, False)
    assert held.may_take(held.hosts[HOST], 100.0, 10.0) == 0
    assert held.waiting(100.0) == "a.test on hold: ask bob"


def test_a_host_that_goes_on_starts_where_it_stood() -> None:
    """The pace is untouched by the pause."""
    held = hand(claim(1), delay_s=5.0)
    first = held.take(0.0)
    assert first is not None
    held.ended(first, 1.0)
    held.heed(HOST, AUTHORITY, SHARD, "ask bob", 1.0)
    held.add([claim(2)], 1.0)
    assert held.heed(HOST, AUTHORITY, SHARD, "", 2.0) == []
    assert held.take(5.9) is None
    assert held.take(6.0) is not None


def test_other_hosts_go_on_beside_a_paused_one() -> None:
    """A pause costs nobody else a turn."""
    held = hand(claim(1), claim(2, host=8, authority="b.test"))
    held.heed(HOST, AUTHORITY, SHARD, "x", 0.0)
    started = held.take(0.0)
    assert started is not None
    assert started.host == 8


def test_a_host_that_was_never_met_can_be_paused_and_is_not_forgotten() -> None:
    """It is remembered however many hosts come."""
    held = hand()
    assert held.heed(HOST, AUTHORITY, SHARD, "x", 0.0) == []
    held._forget_idle(0.0)
    assert held.hosts[HOST].held == "x"
    held.add([claim(1)], 0.0)
    assert held.take(0.0) is None


def test_a_pause_comes_back_with_the_pace_after_a_take_over() -> None:
    """The next owner heeds it from its first claim on."""
    held = hand()
    held.restore(HOST, AUTHORITY, SHARD, delay_s=0.0, wait_s=0.0, pause="", errors=0, held="x", now=0.0)
    held.add([claim(1)], 0.0)
    assert held.take(10.0) is None
    assert not held.is_short_of(HOST, 10.0, 1.0)


def test_a_host_is_short_of_claims_where_it_has_none_and_may_be_asked_soon() -> None:
    """One that was never met is; one that waits, is on hold, or has a claim is not."""
    held = hand(claim(1), delay_s=2.0)
    assert held.is_short_of(99, 0.0, 0.5)
    assert not held.is_short_of(HOST, 0.0, 0.5)
    running = held.take(0.0)
    assert running is not None
    assert held.is_short_of(HOST, 0.0, 0.5)
    held.ended(running, 1.0)
    assert not held.is_short_of(HOST, 1.0, 0.5)
    assert held.is_short_of(HOST, 2.6, 0.5)
    held.heed(HOST, AUTHORITY, SHARD, "x", 2.6)
    assert not held.is_short_of(HOST, 2.6, 0.5)
