"""Workers that claim, commit, freeze, wake, die and take over in any order, on the real store, beside a simple model.

The model knows who owns each shard and what each task has been through; after every step the rows must say the
same. In the end whoever is left must be able to finish everything: nothing lost, nothing double, nobody blamed.
Planted bugs prove that it would notice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from limpet.batch import Claim, Kind, Link, Part, Result, Want
from limpet.errors import LimpetError
from limpet.settings import Settings
from limpet.store import commit, lease, open_store, standing
from limpet.store.commit import Committed
from limpet.store.dialect import Database
from limpet.task import Outcome
from tests.conftest import Databases
from tests.store.audit import audit
from tests.store.hands import (
    PROFILE,
    SPIDER,
    Clock,
    Faulty,
    Hand,
    Product,
    break_commit,
    change_sql,
    done,
    emitted,
    failed,
    host_in,
    link,
    mutated,
    released,
    table_name,
)

SHARDS = 2
PAGES = 30
WORKERS = 3
SUSPECT_AFTER, SOLO_LOSSES = 3, 3

#: Back-offs are cut to nothing, so that every step may follow every other.
SETTINGS = Settings(shards=SHARDS, lease_s=600.0, solo_backoff_s=())


def page(number: int) -> Link:
    """A page of the site: two hosts in each shard."""
    return link(f"{host_in(number % SHARDS, number // SHARDS % 2, shards=SHARDS)}/{number}", shards=SHARDS)


SITE = [page(number) for number in range(PAGES)]
NUMBER = {one.text: number for number, one in enumerate(SITE)}


def links_of(number: int) -> list[Link]:
    """What a page leads to: neighbours, which lie in both shards, lead to the same new pages, and back."""
    group = number // 4
    return [*(SITE[(4 * group + more) % PAGES] for more in (4, 5, 6, 7)), SITE[group]]


#: How a page ends that leads nowhere.
NOWHERE = 6


def result_of(claim: Claim, how: int) -> Result:
    """How a try of a page ends: mostly well."""
    if how == 0:
        return failed(claim, due_in_ms=0)
    if how == 1:
        return released(claim)
    number = NUMBER[claim.text]
    offer = emitted(f"sku{number % 7}", number)
    if how == 2:  # it leads away from its shard, and nowhere else: the last of its shard may be the first of another
        return done(claim, *(one for one in links_of(number) if one.shard != claim.shard), offers=[offer])
    return done(claim, *(links_of(number) if how != NOWHERE else ()), offers=[offer])


class Between:
    """A database in which something happens after the first question of a reader."""

    def __init__(self, db: Database, happens: Callable[[], None]) -> None:
        self._db = db
        self._happens = [happens]

    def __getattr__(self, name: str) -> object:
        asked = getattr(self._db, name)
        if name not in ("one", "rows", "rows_text"):
            return asked

        def ask(*arguments: object, **more: object) -> object:
            found = asked(*arguments, **more)
            if self._happens:
                self._happens.pop()()
            return found

        return ask


@dataclass
class Task:
    """What a task has been through."""

    shard: int
    state: str = "pending"
    tries: int = 0
    strikes: int = 0
    lost: int = 0
    solo: int = 0
    is_solo: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether only a lone claim may take it."""
        return self.state in ("pending", "failed") and self.lost >= SUSPECT_AFTER

    @property
    def is_ready(self) -> bool:
        """Whether an ordinary claim may take it."""
        return self.state in ("pending", "failed") and not self.is_suspect

    def lose(self) -> None:
        """Its worker is gone."""
        self.lost += 1
        self.solo += self.is_solo
        self.state = "pending" if not self.is_solo else "dead" if self.solo >= SOLO_LOSSES else "failed"
        self.is_solo = False


@dataclass
class Shard:
    """Who owns a shard."""

    owner: str | None = None
    epoch: int = 0
    watermark: int = 0


workers = st.integers(0, WORKERS - 1)
owners = st.integers(0, 59)  # which of the workers that are awake and own something
shards = st.integers(0, SHARDS - 1)
ends = st.lists(st.integers(0, 5), min_size=8, max_size=8)
faults = st.sampled_from(["", "", "lost", "unheard", "lost unheard"])


class Crawling(RuleBasedStateMachine):
    """The store and its model, side by side."""

    databases: Databases
    finished: ClassVar[int] = 0  # histories that were brought to their end and audited

    @initialize(starts=st.sets(st.integers(0, PAGES - 1), min_size=1, max_size=6))
    def begin(self, starts: set[int]) -> None:
        """A job with some starts, and workers that own nothing yet but one."""
        self.store = open_store(self.databases.ready(), settings=SETTINGS)
        self.store.join(spider=SPIDER, profile=PROFILE)
        self.store.ensure_datasets(SPIDER, {table_name(Product): Product})
        self.hands = [Hand.on(self.store) for _ in range(WORKERS)]
        self.frozen: dict[int, list[Part]] = {}
        self.dead: set[str] = set()
        self.tasks: dict[str, Task] = {}
        self.shards = [Shard() for _ in range(SHARDS)]
        self.ghosts: list[list[Part]] = []
        first = self.hands[0]
        for shard in range(SHARDS):
            self.take_over(0, shard)
        move = first.open_source(*(SITE[number] for number in sorted(starts)))
        self._send(0, [first.part(0, sources=(move,))])

    # -- what workers do -------------------------------------------------------------------------

    @rule(pick=owners, most=st.integers(1, 4), hows=ends, fault=faults, claims=st.booleans())
    def work(self, pick: int, most: int, hows: list[int], fault: str, claims: bool) -> None:
        """Commit what is in hand, in all shards at once, and claim; the COMMIT's answer may get lost."""
        if (who := self._owner(pick)) is not None:
            self._work(who, most, hows, fault, claims)

    def _owner(self, pick: int) -> int | None:
        awake = [who for who, hand in enumerate(self.hands) if hand.held and who not in self.frozen]
        return awake[pick % len(awake)] if awake else None

    def _work(self, who: int, most: int, hows: list[int], fault: str, claims: bool) -> None:
        hand = self.hands[who]
        wants = {shard: Want(most, most) for shard in hand.held} if claims else {}
        self._send(who, self._parts(who, hows), wants, fault)

    @rule(pick=owners, hows=ends)
    def ask_whether_it_is_complete(self, pick: int, hows: list[int]) -> None:
        """While somebody asks, a worker commits what it has in hand, in all shards at once."""
        who = self._owner(pick)

        def commit_meanwhile() -> None:
            if who is not None:
                self._work(who, 1, hows, "", claims=False)

        before = self._is_complete()
        found = standing.standing(Between(self.store.db, commit_meanwhile), self.hands[0].job.id)  # type: ignore[arg-type]
        assert found.is_complete in (before, self._is_complete()), "it was complete at no moment"

    @rule(pick=owners)
    def ask_at_the_end(self, pick: int) -> None:
        """The same where one task is left in one shard, and leads to the other."""
        if (who := self._owner(pick)) is None:
            return
        for free in range(SHARDS):
            self.take_over(who, free)
        hand = self.hands[who]
        if hand.held:
            self._work(who, PAGES, [NOWHERE] * PAGES, "", claims=True)
            self._work(who, PAGES, [NOWHERE] * (len(hand.claims) - 1), "", claims=False)
        awake = [by for by, other in enumerate(self.hands) if other.held and by not in self.frozen]
        if who in awake:
            self.ask_whether_it_is_complete(awake.index(who), [2])

    def _is_complete(self) -> bool:
        return all(task.state in ("done", "dead") for task in self.tasks.values())

    @rule(who=workers, shard=shards)
    def claim_alone(self, who: int, shard: int) -> None:
        """Everything in hand is done with; then one suspect, alone."""
        hand = self.hands[who]
        if who in self.frozen or shard not in hand.held or hand.claims:
            return
        self._send(who, [hand.part(shard)], {shard: Want(1, 1, solo=True)})

    @rule(who=workers, shard=shards)
    def take_over(self, who: int, shard: int) -> None:
        """Try to get a shard: it works for who lives, where nobody else who lives has it."""
        if who in self.frozen:
            return
        hand, its = self.hands[who], self.shards[shard]
        may = its.owner is None or its.owner == hand.worker.id or its.owner in self.dead
        may = may and hand.worker.id not in self.dead
        (row,) = (row for row in lease.shards(hand.db, hand.job.id) if row.shard == shard)
        taken = self.hands[who].store.take_over(row, hand.worker)
        assert (taken is not None) == may, f"worker {who} takes shard {shard}"
        if taken is None:
            return
        hand.take_note(taken)
        its.owner, its.epoch, its.watermark = hand.worker.id, its.epoch + 1, its.watermark + 1
        assert (taken.epoch, taken.watermark) == (its.epoch, its.watermark), "the token must grow"
        running = [task for task in self.tasks.values() if task.shard == shard and task.state == "running"]
        assert taken.lost == len(running), "what the former owner left running"
        for task in running:
            task.lose()

    @rule(who=workers, shard=shards)
    def release(self, who: int, shard: int) -> None:
        """A clean stop gives one shard up."""
        hand = self.hands[who]
        if who in self.frozen or shard not in hand.held:
            return
        results = [released(claim) for claim in hand.claims.values() if claim.shard == shard]
        self._send(who, [hand.part(shard, *results, kind=Kind.RELEASE)])

    # -- what happens to them ----------------------------------------------------------------------

    @rule(pick=owners, hows=ends)
    def freeze(self, pick: int, hows: list[int]) -> None:
        """A worker stops just before its commit, with its parts in hand."""
        if (who := self._owner(pick)) is not None:
            self.frozen[who] = self._parts(who, hows)

    @rule(who=workers)
    def wake(self, who: int) -> None:
        """It goes on with what it had, whatever has become of its shards."""
        if who in self.frozen:
            self._send(who, self.frozen.pop(who))

    @rule(who=workers, by=workers)
    def expire(self, who: int, by: int) -> None:
        """A worker is found dead, although it only sleeps."""
        hand = self.hands[who]
        if who == by or by in self.frozen or hand.worker.id in self.dead:
            return
        assert self.hands[by].bury(hand) == [hand.worker.id]
        self.dead.add(hand.worker.id)

    @rule(pick=owners, then=owners, shard=shards, hows=ends)
    def interrupt(self, pick: int, then: int, shard: int, hows: list[int]) -> None:
        """At work in all the shards it can get, frozen, found dead, one of them taken over, and awake again."""
        if (who := self._owner(pick)) is None:
            return
        for free in range(SHARDS):
            self.take_over(who, free)
        if self.hands[who].held:
            self._work(who, 2, hows, "", claims=True)
        self.frozen[who] = self._parts(who, hows)
        awake = [by for by, hand in enumerate(self.hands) if by not in self.frozen and hand.worker.id not in self.dead]
        if awake:
            self.expire(who, awake[then % len(awake)])
            self.take_over(awake[then % len(awake)], shard)
        self.wake(who)

    @rule(pick=owners, hows=ends, again=st.booleans(), soon=st.booleans())
    def fence_itself(self, pick: int, hows: list[int], again: bool, soon: bool) -> None:
        """Past its lease a worker drops what it has and takes its shards over again; but what it sent may still be on its way."""
        if (who := self._owner(pick)) is None:
            return
        hand = self.hands[who]
        self.ghosts.append(self._parts(who, hows))
        had = sorted(hand.held)
        hand.held.clear()
        hand.claims.clear()
        for shard in had if again else ():
            self.take_over(who, shard)
        if hand.held:
            self._work(who, 2, hows, "", claims=True)
        if soon:
            self.haunt(who)

    @rule(pick=owners, by=workers, shard=shards, hows=ends)
    def commit_late(self, pick: int, by: int, shard: int, hows: list[int]) -> None:
        """Between another's look at a shard and its take-over, the owner, who counts as dead, commits and claims once more."""
        if (who := self._owner(pick)) is None:
            return
        by = (who + 1 + by % (WORKERS - 1)) % WORKERS
        hand, other = self.hands[who], self.hands[by]
        shard = shard if shard in hand.held else min(hand.held)
        if by in self.frozen or {hand.worker.id, other.worker.id} & self.dead:
            return
        self.expire(who, by)
        (row,) = (row for row in lease.shards(other.db, other.job.id) if row.shard == shard)
        had = self.shards[shard].watermark
        self._work(who, 2, hows, "", claims=True)
        if self.shards[shard].watermark == had:
            return
        assert other.store.take_over(row, other.worker) is None, "it looked before the last commit"
        self.take_over(by, shard)

    @rule(who=workers)
    def time_goes_backwards(self, who: int) -> None:
        """The database's clock is set back by hours: whoever beats lives on, whoever does not is found dead all the same."""
        by = self.hands[who]
        if who in self.frozen or by.worker.id in self.dead:
            return
        by.db.run_text("UPDATE worker SET lease_until_ms = lease_until_ms + 7200000 WHERE dead = 0")
        clock = Clock()
        watch = lease.Watch(clock)
        assert watch.look(by.db, by.worker.id) == [], "one look at a clock that jumps kills nobody"
        silent = set()
        for number, hand in enumerate(self.hands):
            if number in self.frozen:
                silent |= {hand.worker.id} - self.dead
            elif hand.worker.id not in self.dead:
                assert lease.beat(hand.db, hand.worker)
        clock.now += 1e6
        assert set(watch.look(by.db, by.worker.id)) == silent
        self.dead |= silent

    @rule(who=workers)
    def haunt(self, who: int) -> None:
        """What was on its way arrives."""
        if self.ghosts:
            self._send(who, self.ghosts.pop(0), is_ghost=True)

    @rule(who=workers)
    def beat(self, who: int) -> None:
        """A worker that finds itself dead forgets everything and begins again under another id."""
        hand = self.hands[who]
        if who in self.frozen:
            return
        lives = lease.beat(hand.db, hand.worker)
        assert lives == (hand.worker.id not in self.dead)
        if not lives:
            self._begin_anew(who)

    @rule(who=workers, hows=ends, before=st.booleans())
    def crash(self, who: int, hows: list[int], before: bool) -> None:
        """kill -9 before a commit, or just after it: the next process certifies that at once, by the lock."""
        if not before and who not in self.frozen and self.hands[who].held:
            self._send(who, self._parts(who, hows), {shard: Want(2, 2) for shard in self.hands[who].held})
        former = self.hands[who].worker.id
        self._begin_anew(who)
        found = lease.Watch(Clock()).look(self.hands[who].db, self.hands[who].worker.id)
        gone = {former} - self.dead
        assert set(found) == gone
        self.dead |= gone

    # -- how -----------------------------------------------------------------------------------------

    def _parts(self, who: int, hows: list[int]) -> list[Part]:
        hand = self.hands[who]
        results: dict[int, list[Result]] = {shard: [] for shard in hand.held}
        for claim, how in zip(hand.claims.values(), hows, strict=False):
            results[claim.shard].append(result_of(claim, how))
        return [hand.part(shard, *its) for shard, its in results.items()]

    def _begin_anew(self, who: int) -> None:
        hand = self.hands[who]
        self.frozen.pop(who, None)
        hand.held.clear()
        hand.claims.clear()
        os.close(hand.worker.lock_file)
        hand.worker = hand.store.register()

    def _send(self, who: int, parts: list[Part], wants: dict[int, Want] | None = None, fault: str = "", is_ghost: bool = False) -> None:
        """Commit, and compare what came of it with what the model says must."""
        hand, wants = self.hands[who], wants or {}
        alive = [part for part in parts if self._is_owner(part)]
        faulty: Faulty | None = break_commit(hand, *fault.split()) if fault else None
        try:
            (answer,) = hand.store.commit(parts) if is_ghost else hand.send(*parts, want=wants)
        finally:
            if faulty is not None:
                hand.store.db = faulty.db
        assert {part.shard for part in answer.parts} == {part.shard for part in alive}, "whose parts are written"
        assert set(answer.fenced) == {part.shard for part in parts} - {part.shard for part in alive}
        for part in alive:
            self._apply(part)
        self._apply_claims(answer, wants)

    def _is_owner(self, part: Part) -> bool:
        its = self.shards[part.shard]
        return (its.owner, its.epoch, its.watermark) == (part.owner, part.epoch, part.n - 1)

    def _apply(self, part: Part) -> None:
        its = self.shards[part.shard]
        its.watermark = part.n
        if part.kind is Kind.RELEASE:
            its.owner = None
        for result in part.results:
            task = self.tasks[result.claim.text]
            assert (task.state, task.tries) == ("running", result.claim.tries), "a result of a try that is not the open one"
            task.state = {Outcome.DONE: "done", Outcome.FAILED: "failed", Outcome.RELEASED: "pending"}[result.outcome]
            task.strikes += result.strike
            task.is_solo = False
            self._discover(result.links)
        for move in part.sources:
            self._discover(move.links)

    def _discover(self, links: Iterable[Link]) -> None:
        for one in links:
            self.tasks.setdefault(one.text, Task(one.shard))

    def _apply_claims(self, answer: Committed, wants: dict[int, Want]) -> None:
        written = {part.shard for part in answer.parts}
        for shard, want in wants.items():
            claims = [claim for claim in answer.claims if claim.shard == shard]
            of_shard = [task for task in self.tasks.values() if task.shard == shard]
            ready = sum(task.is_suspect if want.solo else task.is_ready for task in of_shard) if shard in written else 0
            assert len(claims) == min(want.tasks, ready), "how many are claimed"
        for claim in answer.claims:
            task = self.tasks[claim.text]
            assert task.is_suspect if claim.solo else task.is_ready, f"{claim.text} was not to be claimed"
            task.state, task.tries, task.is_solo = "running", task.tries + 1, claim.solo

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def the_rows_say_the_same(self) -> None:
        """Every task and shard, after every step."""
        if not hasattr(self, "tasks"):
            return
        rows = self.store.db.rows_text(
            "SELECT x.text, t.shard, t.state, t.tries, t.strikes, t.lost, t.solo FROM task AS t JOIN task_text AS x ON x.id = t.id"
        )
        found = {text: (shard, *rest) for text, shard, *rest in rows}
        assert found == {
            text: (task.shard, task.state, task.tries, task.strikes, task.lost, task.solo) for text, task in self.tasks.items()
        }
        owners = self.store.db.rows_text("SELECT owner, epoch, watermark FROM shard ORDER BY shard")
        assert owners == [(its.owner, its.epoch, its.watermark) for its in self.shards]
        running = {claim.text for hand in self.hands for claim in hand.claims.values()}
        stray = {text for text, task in self.tasks.items() if task.state == "running"} - running
        held = {(hand.worker.id, shard) for hand in self.hands for shard in hand.held}
        forgotten = {text for text in stray if (self.shards[self.tasks[text].shard].owner, self.tasks[text].shard) in held}
        assert not forgotten, f"they run in nobody's memory: {forgotten}"

    def teardown(self) -> None:
        """Whoever is left finishes everything, and the books are right."""
        if not hasattr(self, "hands"):
            return
        try:
            self._finish_all()
            type(self).finished += 1
        finally:
            for hand in self.hands:
                hand.leave()
            self.store.close()

    def _finish_all(self) -> None:
        self._begin_anew(0)  # whatever it was, it may be dead
        last = self.hands[0]
        for other in self.hands[1:]:
            last.bury(other)
        self.store.db.run_text("UPDATE worker SET dead = 1 WHERE worker <> ?", (last.worker.id,))
        last.held.clear()
        last.claims.clear()
        last.take()
        last_ones = []
        for _ in range(200):
            claims = last.claim(8) or [claim for shard in range(SHARDS) for claim in last.claim(1, shard, solo=True)]
            if not claims:
                break
            last.finish(*(result_of(claim, 9) for claim in claims))
            last_ones += [NUMBER[claim.text] for claim in claims]
        db = self.store.db
        states = dict(db.rows_text("SELECT x.text, t.state FROM task AS t JOIN task_text AS x ON x.id = t.id"))
        assert set(states.values()) <= {"done", "dead"}, f"stuck: {states}"
        ended = [NUMBER[text] for text, state in states.items() if state == "done"]
        missing = ({one.text for number in last_ones for one in links_of(number)} | set(self.tasks)) - set(states)
        assert not missing, f"links are lost: {missing}"
        best = {f"sku{number % 7}": min((SITE[n].key, n) for n in ended if n % 7 == number % 7)[1] for number in ended}
        assert dict(db.rows_text("SELECT sku, price FROM shop_product_view")) == best, "records"
        assert db.rows_text("SELECT halted FROM job") == [("",)]
        audit(db, 1)


def explore(databases: Databases, examples: int, **more: object) -> int:
    """Let the machine run; the number of histories that ended well. An error leaves as it is."""
    machine = type("Crawling", (Crawling,), {"databases": databases, "finished": 0})
    limits = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        **more,  # type: ignore[arg-type]
    )
    run_state_machine_as_test(machine, settings=limits)
    return machine.finished


def test_any_order_of_crashes_freezes_and_take_overs_leaves_the_invariants_true(databases: Databases) -> None:
    """I1 to I7, no task lost, none doubled, every record the right one. A server takes a step in ten times as long as a file."""
    examples = 60 if databases.name == "sqlite" else 15
    assert explore(databases, examples) >= examples


# -- planted bugs: each must be found ---------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch, Hand], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    """A bug by its name."""
    BUGS[plant.__name__] = plant
    return plant


@bug
def the_epoch_is_not_raised(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """P68: a token that nobody raises."""
    change_sql(patch, hand.db, "take_over", "epoch = epoch + 1", "epoch = epoch + 0")
    patch.setattr(lease, "take_over", mutated(lease.take_over, "Epoch(row.epoch + 1)", "Epoch(row.epoch)"))  # type: ignore[arg-type]


@bug
def the_fence_is_not_read(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """Its row count is taken for granted."""
    patch.setattr(commit, "fence", mutated(commit.fence, "if rows == 1:", "if True:"))  # type: ignore[arg-type]


@bug
def the_fence_does_not_look_at_the_epoch_and_the_number(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """Only the owner is compared: what a worker sent in an earlier life of its own goes through."""
    change_sql(patch, hand.db, "fence", "AND epoch = :epoch AND watermark = :n - 1", "AND :epoch > 0")


@bug
def the_fence_does_not_look_at_all(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """It raises the watermark of whoever has the shard."""
    change_sql(patch, hand.db, "fence", "AND owner = :owner AND epoch = :epoch AND watermark = :n - 1", "AND :owner <> '' AND :epoch > 0")


@bug
def links_are_merged_before_the_fences(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """2: the copy that is kept may be that of the part that is dropped."""
    real = commit.transact

    def merged(db: object, context: object, parts: list[Part], wants: object) -> Committed:
        seen: set[bytes] = set()
        kept = []
        for part in parts:
            results = []
            for result in part.results:
                results.append(replace(result, links=tuple(one for one in result.links if one.key not in seen)))
                seen |= {one.key for one in result.links}
            kept.append(replace(part, results=tuple(results)))
        return real(db, context, kept, wants)  # type: ignore[arg-type]

    patch.setattr(commit, "transact", merged)


@bug
def an_interruption_is_a_strike(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """1: the worker died, and the task is blamed."""
    patch.setattr(lease, "reclaim", mutated(lease.reclaim, "0, 1, was_solo, 0, was_solo", "1, 1, was_solo, 0, was_solo"))  # type: ignore[arg-type]


@bug
def a_crowd_is_blamed_like_a_lone_suspect(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """1: every lost try counts as one that was alone."""
    patch.setattr(lease, "reclaim", mutated(lease.reclaim, "solo_losses = solo + was_solo", "was_solo = 1; solo_losses = solo + 1"))  # type: ignore[arg-type]


@bug
def a_take_over_forgets_to_reclaim(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """14, 16: what the former owner left running runs for ever."""
    change_sql(patch, hand.db, "running_tasks", "lane = 'running'", "lane = 'nowhere'")


@bug
def a_take_over_is_one_statement(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """16: it waits for the shard's row as it is now, but knows what runs from before it waited."""
    look, take, seen = lease.shards, lease.take_over, {}

    def looking(db: Database, job: int) -> list[lease.ShardRow]:
        rows = look(db, job)
        seen.update({row.shard: db.rows("running_tasks", job=job, shard=row.shard) for row in rows})
        return rows

    def taking(db: Database, job: int, row: lease.ShardRow, *more: object) -> lease.Taken | None:
        now = next(one for one in look(db, job) if one.shard == row.shard)
        return take(db, job, replace(now, epoch=row.epoch), *more)  # type: ignore[arg-type]

    patch.setattr(lease, "SEEN", seen, raising=False)
    patch.setattr(lease, "reclaim", mutated(lease.reclaim, 'db.rows("running_tasks", job=part.job, shard=part.shard)', "SEEN[part.shard]"))  # type: ignore[arg-type]
    patch.setattr(lease, "shards", looking)
    patch.setattr(lease, "take_over", taking)


@bug
def completion_is_read_shard_by_shard(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """4: the last task of a shard leads to the first of one that was looked at before."""

    def one_by_one(db: Database, job: int) -> standing.Standing:
        sql = "SELECT COUNT(*) FROM task WHERE job = ? AND shard = ? AND lane IS NOT NULL"
        return standing.Standing(sum(bool(db.rows_text(sql, (job, shard))[0][0]) for shard in range(SHARDS)), 0, 0, True)

    patch.setattr(standing, "standing", one_by_one)


@bug
def one_look_at_a_clock_that_jumps_is_enough(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """P69: a lease that ends too late counts as over at once."""

    def at_once(watch: object, worker: str, beat: int, lease_ms: int, until_ms: int, now_ms: int, now: float) -> bool:
        return not now_ms <= until_ms <= now_ms + 2 * lease_ms

    patch.setattr(lease.Watch, "_twice_over", at_once)


@bug
def an_unknown_outcome_counts_as_committed(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """20: nobody looks."""

    def assume(db: Faulty, context: commit.Context, parts: list[Part], wants: object) -> Committed:
        db.reopen()  # type: ignore[operator]
        return commit.acknowledge(db, context, Committed(tuple(parts)), (), {part.shard: [] for part in parts})  # type: ignore[arg-type]

    patch.setattr(commit, "settle", assume)


@bug
def an_unknown_outcome_is_simply_repeated(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """20: as if nothing had been sent."""

    def repeat(db: Faulty, context: commit.Context, parts: list[Part], wants: object) -> Committed:
        db.reopen()  # type: ignore[operator]
        return commit.transact(db, context, parts, wants)  # type: ignore[arg-type]

    patch.setattr(commit, "settle", repeat)


@bug
def keys_are_known_before_they_are_committed(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """7: a link of a part that was then fenced is never looked for again."""
    real = commit.stage

    def early(db: object, context: commit.Context, parts: list[Part]) -> dict[object, list[bytes]]:
        offered = real(db, context, parts)  # type: ignore[arg-type]
        for keys in offered.values():
            context.known.update(keys)
        return offered  # type: ignore[return-value]

    patch.setattr(commit, "stage", early)
    patch.setattr(commit.KnownKeys, "clear", lambda keys: None)


@bug
def the_dead_may_beat_again(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """P70: a delayed heartbeat revives a worker whose shards are gone."""
    change_sql(patch, hand.db, "renew", " AND dead = 0", "")


@bug
def the_dead_may_take_shards(patch: pytest.MonkeyPatch, hand: Hand) -> None:
    """A worker that does not know yet that it is dead gets what is free."""
    patch.setattr(lease, "_is_dead", lambda db, worker: False)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(databases: Databases, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Within a hundred runs of the machine, without shrinking."""
    probe = open_store(databases.ready(), settings=SETTINGS)
    probe.join(spider=SPIDER, profile=PROFILE)
    hand = Hand.on(probe)
    try:
        BUGS[name](monkeypatch, hand)
        with pytest.raises((AssertionError, LimpetError, KeyError, ExceptionGroup)):
            explore(databases, 100, phases=[Phase.generate], report_multiple_bugs=False)
    finally:
        hand.leave()
        probe.close()
