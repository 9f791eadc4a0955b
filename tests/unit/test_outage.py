"""Whether a page or its host is to blame: decisions of `Outages`, with a clock and a lot of the test's own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from limpet import policy
from limpet.batch import Claim, Result
from limpet.engine.hand import Hand
from limpet.engine.outage import DOUBT_S, REASON, Outages
from limpet.settings import Settings
from limpet.task import Outcome, ShardId, TaskId, TaskKey

HOST, SHARD, NOW_MS = 7, 1, 1_796_000_000_000


def claim(number: int, *, host: int = HOST, authority: str = "a.test", strikes: int = 0) -> Claim:
    """A claim of a page."""
    url = f"http://{authority}/{number}"
    return Claim(
        shard=ShardId(SHARD), id=TaskId(number), key=TaskKey(bytes(16)), tries=strikes + 1, strikes=strikes, lost=0, throttled=0, host=host,
        text=url, url=url, handler="", payload="", priority=0, depth=0, hops=0, chain=b"",
    )  # fmt: skip


@dataclass
class Try:
    """A worker's hand and its judge, at a time that the test sets."""

    settings: Settings = field(default_factory=lambda: Settings(outage_after=3))
    names: set[int] = field(default_factory=set)
    told: list[tuple[str, int, str]] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.hand = Hand(delay_s=0.0, slots=8, slots_with_delay=1)
        self.outages = self.judge()

    def judge(self) -> Outages:
        """A judge of this hand."""

        async def has_worked(shard: int, host: int) -> bool:
            return host in self.names

        return Outages(
            self.hand, self.settings, lambda: self.now, has_worked, lambda *outage: self.told.append(outage),
            lambda: NOW_MS + round(self.now * 1000), lambda: 0.5,
        )  # fmt: skip

    def start(self, *claims: Claim) -> list[Claim]:
        """Claims that come into the hand and are started, as many as may."""
        self.hand.add(claims, self.now)
        return list(iter(lambda: self.hand.take(self.now), None))

    def end(self, ended: Claim, reason: str = "connect", *, status: int = 0, detail: str = "", is_heard: bool = True) -> Result | None:
        """A try ends; "" is a page that came, or a call that needed to ask nobody."""
        strike = bool(reason)
        outcome = Outcome.DONE if not reason else Outcome.DEAD if ended.strikes >= 3 else Outcome.FAILED
        result = Result(
            ended, outcome, reason=reason, status=status or (200 if is_heard and not reason else 0), detail=detail, strike=strike
        )
        found = asyncio.run(self.outages.weigh(result))
        self.hand.ended(ended, self.now, failed=found is None or found.strike)
        return found

    def fail(self, *claims: Claim, reason: str = "connect") -> list[Result | None]:
        """Several fail one after the other."""
        return [self.end(one, reason) for one in claims]


def test_an_outage_releases_all_who_met_it_and_strikes_nobody() -> None:
    """The first failures are in doubt; the last one decides them all, and what was not started goes back."""
    made = Try()
    running = made.start(*map(claim, range(12)))
    assert len(running) == 8
    assert made.fail(*running[:2]) == [None, None]
    (last,) = made.fail(running[2])
    ended = [last, *made.outages.take()]
    assert [(one.outcome, one.reason, one.strike) for one in ended if one] == [(Outcome.RELEASED, REASON, False)] * 3
    assert [one.id for one in made.outages.take_given_back()] == [8, 9, 10, 11]
    assert all(one is not None and one.outcome is Outcome.RELEASED for one in made.fail(*running[3:]))
    assert made.told == [("a.test", NOW_MS + 100_000, "connect")]
    assert made.hand.hosts[HOST].pause == policy.outage_text(NOW_MS + 100_000, "connect")


def test_without_the_protection_each_failure_is_a_strike() -> None:
    """The twin: `outage_after` 0."""
    made = Try(Settings(outage_after=0))
    ended = made.fail(*made.start(*map(claim, range(8))))
    assert all(one is not None and one.strike for one in ended)
    assert made.told == []


def test_a_bad_page_on_a_good_host_gets_its_strike_with_the_next_answer() -> None:
    """Other pages answer, so it is the page."""
    made = Try()
    bad, *good = made.start(*map(claim, range(4)))
    assert made.fail(bad) == [None]
    made.now += 1
    assert made.end(good[0], "") is not None
    assert made.outages.take() == []  # it was under way when the bad one failed: it may come from before an outage
    made.hand.add([claim(9)], made.now)
    later = made.hand.take(made.now)
    assert later is not None
    made.end(later, "")
    assert [(one.outcome, one.strike) for one in made.outages.take()] == [(Outcome.FAILED, True)]


def test_a_refusal_is_an_answer_too() -> None:
    """404, 403 and 429 say that the host is there; a 5xx does not."""
    for status, is_there in ((404, True), (403, True), (429, True), (500, False), (503, False)):
        made = Try()
        bad = made.start(claim(1))[0]
        made.fail(bad)
        made.now += 1
        other = made.start(claim(2))[0]
        if is_there:
            asyncio.run(made.outages.weigh(Result(other, Outcome.SKIPPED, reason="x", status=status)))
        else:
            made.end(other, f"status {status}", status=status)
        assert bool(made.outages.take()) == is_there, status


def test_a_page_that_failed_before_is_no_sign_of_an_outage() -> None:
    """At the end of a crawl only bad pages are left: they fail in a row, and are not taken for their host."""
    made = Try()
    ended = made.fail(*made.start(*(claim(number, strikes=2) for number in range(8))))
    assert all(one is not None and one.strike for one in ended)


def test_in_an_outage_a_page_that_failed_before_is_not_struck_either() -> None:
    """It is in doubt with the others, and its last strike does not kill it."""
    made = Try()
    old, *fresh = made.start(claim(0, strikes=3), *map(claim, range(1, 6)))
    made.fail(fresh[0])
    assert made.fail(old) == [None]
    made.fail(*fresh[1:3])
    assert {one.outcome for one in made.outages.take()} == {Outcome.RELEASED}


def test_one_task_at_a_time_asks_whether_the_host_is_back() -> None:
    """The waits double, up to the longest; the first answer ends the outage at once."""
    made = Try()
    made.fail(*made.start(*map(claim, range(3))))
    host = made.hand.hosts[HOST]
    waits = []
    for number in range(10, 16):
        waits.append(round(host.next_s - made.now, 3))
        assert made.hand.may_take(host, made.now, 0.5) in (0, 1)
        made.now = host.next_s
        probes = made.start(claim(number), claim(number + 100))
        assert len(probes) == 1
        probe = made.end(probes[0])
        assert probe is not None
        assert (probe.outcome, probe.due_in_ms) == (Outcome.RELEASED, round((host.next_s - made.now) * 1000))
    assert waits == [1, 1, 2, 4, 8, 16]
    made.now = host.next_s
    made.end(made.start(claim(50))[0], "")
    assert (host.away_ms, host.pause, host.errors) == (0, "", 0)
    assert len(made.start(*map(claim, range(60, 80)))) == 8


def test_an_answer_that_was_under_way_before_does_not_end_an_outage() -> None:
    """Only one to what was asked after it was noticed."""
    made = Try()
    *running, slow = made.start(*map(claim, range(4)))
    made.now += 1
    made.fail(*running)
    made.end(slow, "")
    assert made.hand.hosts[HOST].away_ms


def test_a_call_that_asked_nobody_does_not_end_an_outage() -> None:
    """It read an answer that was paid for earlier, or only computed: nobody has heard of the provider."""
    made = Try()
    made.fail(*made.start(*map(claim, range(3))))
    host = made.hand.hosts[HOST]
    made.now = host.next_s
    done = made.end(made.start(claim(50))[0], "", is_heard=False)
    assert done is not None
    assert done.outcome is Outcome.DONE
    assert host.away_ms
    made.end(made.start(claim(51))[0], "")
    assert not host.away_ms


def test_a_host_that_is_away_for_too_long_is_given_up() -> None:
    """After `throttle_hours` its tasks get their strikes, one try at a time."""
    made = Try()
    made.fail(*made.start(*map(claim, range(3))))
    made.now += 24 * 3600 + 1
    probe = made.end(made.start(claim(9, strikes=3))[0])
    assert probe is not None
    assert (probe.outcome, probe.strike) == (Outcome.DEAD, True)


def test_at_rest_and_after_a_minute_doubts_are_strikes() -> None:
    """Nobody is left to ask, or nobody answered in time: as it always was."""
    for at_rest, passed_s, decided in ((True, 0.0, 1), (False, DOUBT_S - 1, 0), (False, DOUBT_S, 1)):
        made = Try()
        made.fail(*made.start(claim(1)))
        made.now += passed_s
        made.outages.settle(at_rest=at_rest)
        assert [one.strike for one in made.outages.take()] == [True] * decided
        assert made.hand.in_doubt == 1 - decided


def test_a_name_that_never_worked_is_a_dead_link_and_one_that_did_is_not() -> None:
    """DNS that fails for a host with a page that is done may be our resolver; for any other it is a typo in a link."""
    detail = "cannot resolve a.test: name or service not known"
    for reason in ("dns", "robots unreachable"):
        for names, strikes in ((set(), True), ({HOST}, False)):
            made = Try(names=names)
            running = made.start(*map(claim, range(3)))
            ended = [made.end(one, reason, detail=detail) for one in running]
            assert [one is not None and one.strike for one in ended] == [strikes] * 3
    made = Try()
    assert [made.end(one, "robots unreachable", detail="no answer") for one in made.start(*map(claim, range(3)))][:2] == [None, None]


def test_the_calls_of_one_handler_are_one_provider() -> None:
    """They lie on 64 hosts of ours: failures over several of them are one outage, and any answer ends it for all."""
    made = Try()
    calls = made.start(*(claim(number, host=number, authority=f"serp+{number:02}") for number in range(4)))
    made.fail(*calls[:3])
    assert [made.hand.hosts[number].away_ms > 0 for number in range(4)] == [True, True, True, False]
    last = made.end(calls[3])
    assert last is not None
    assert last.outcome is Outcome.RELEASED
    assert {host for host, _, _ in made.told} == {"serp"}
    made.now += 100
    made.end(made.start(claim(9, host=2, authority="serp+02"))[0], "")
    assert made.hand.away == {}


def test_the_next_owner_of_a_host_goes_on_with_its_outage() -> None:
    """The host's row says since when; the first failure is released at once, and the wait is as long as it has been away."""
    made = Try()
    pause = policy.outage_text(NOW_MS + 40_000, "timeout")
    made.hand.restore(HOST, "a.test", SHARD, delay_s=0.0, wait_s=2.0, pause=pause, errors=9, held="", now=made.now)
    assert made.start(*map(claim, range(3))) == []
    made.now += 2
    probe = made.end(made.start()[0])
    assert probe is not None
    assert (probe.outcome, probe.due_in_ms) == (Outcome.RELEASED, 62_000)
    assert made.told == [("a.test", NOW_MS + 40_000, "connect")]


def test_a_person_who_lets_a_host_go_on_has_it_asked_at_once() -> None:
    """`limpet resume HOST` in an outage."""
    made = Try()
    made.fail(*made.start(*map(claim, range(3))))
    made.now += 0.1
    made.hand.heed(HOST, "a.test", SHARD, "", made.now)
    assert len(made.start(claim(9), claim(10))) == 1


def test_a_shard_that_leaves_takes_its_doubts_along() -> None:
    """They go back unblamed, and nothing of them is decided later."""
    made = Try()
    made.fail(*made.start(claim(1)))
    assert made.hand.holds(SHARD)
    assert [one.id for one in made.hand.drop(SHARD)] == [1]
    assert not made.hand.holds(SHARD)
    made.outages.settle(at_rest=True)
    assert made.outages.take() == []
