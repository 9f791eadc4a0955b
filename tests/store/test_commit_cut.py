"""A commit over a line that breaks: at its COMMIT, before or after it arrived, and in the middle of any statement.

The line is a real one, through a proxy; the server is a real one. Each row of the table in ARCHITECTURE.md, section 4, is met
here by what really happens on a network; `test_unknown_outcome.py` has the same table on every database, without one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from limpet.batch import Part
from limpet.errors import InvariantBroken, LimpetError, OutcomeUnknown, StoreUnavailable, WentBack
from limpet.settings import Settings
from limpet.store import Store, commit, open_store
from limpet.store.verify import verify
from tests.conftest import Databases, on_servers
from tests.servers import proxy as proxies
from tests.servers.proxy import Proxy
from tests.store.audit import audit
from tests.store.hands import SHARDS, Hand, Product, column, counted, done, emitted, found_job, host_in, link, pages, records, table_name

pytestmark = on_servers

#: Seconds: the server ends a transaction in which nothing is said after half of it, where a fault is one that nobody says; the
#: client gives a call up after `GIVE_UP_S` there. Elsewhere nothing has to lapse, and a slow moment of the machine ends nothing.
LEASE_S, CALM_LEASE_S = 3.0, 600.0
GIVE_UP_S = 1.0

ONE, SEVERAL = (0,), (0, 1, 3)

#: What becomes of a COMMIT, and whether it took effect.
ARRIVES = ("after", "delay", "unheard", "buffered")
NEVER_ARRIVES = ("before", "half", "half-open")
#: Of these nobody is told.
SILENT = ("half-open", "unheard")

#: A test of a line that falls silent otherwise.
silently = pytest.mark.parametrize("trial", ["silent"], indirect=True)


@dataclass
class Trial:
    """A worker behind a line that breaks, and what it has in hand; `x` is another, with a line of its own."""

    databases: Databases
    line: Proxy
    store: Store
    w: Hand
    x: Hand
    number: int = 0
    expected: dict[str, int] = field(default_factory=dict)  # sku -> price

    def parts(self, *shards: int) -> list[Part]:
        """One page of each shard, with a new link of its own, one that all share, and a record."""
        made = []
        for shard in shards:
            claim = next(claim for claim in self.w.claims.values() if claim.shard == shard)
            self.number += 1
            sku = f"s{self.number:04}"
            self.expected[sku] = self.number
            links = (link(f"{host_in(shard)}/new/{self.number}"), link(f"{host_in(2)}/shared/{self.number // len(shards)}"))
            made.append(self.w.part(shard, done(claim, *links, offers=[emitted(sku, self.number)])))
        self.w.db.one("clock")  # a connection that was idle for too long is opened again now, and not in the middle of a test
        return made

    def is_whole(self, *hands: Hand) -> None:
        """The books are right, nothing is doubled, nobody blamed; and whoever has the shards can finish the rest."""
        db = self.x.db
        assert self.x.store.job is not None
        verdict = verify(db, self.x.store.job, full=True)
        assert verdict.ok, verdict.summary()
        found = [sku for _, sku, _ in records(db)]
        assert len(found) == len(set(found))
        audit(db, self.x.job.id)
        assert column(db, "halted", table="job") == [""]
        while any(hand.claims or hand.claim() for hand in hands):
            for hand in hands:
                hand.finish(*(done(claim) for claim in hand.claims.values()))
        assert set(counted(db)) == {"done"}, counted(db)
        audit(db, self.x.job.id)


@pytest.fixture(scope="module")
def line(databases: Databases) -> Iterator[Proxy]:
    """A proxy to the server."""
    with proxies.running(databases.server.port) as made:  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def trial(request: pytest.FixtureRequest, databases: Databases, line: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """W has every shard, twelve pages in each, and one claimed in each."""
    is_silent = hasattr(request, "param") or request.node.callspec.params.get("fault") in SILENT
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0, 0.1, 0.2, 0.5, 1.0, 1.0))
    settings = Settings(shards=SHARDS, lease_s=LEASE_S if is_silent else CALM_LEASE_S)
    dsn = databases.ready()
    store = open_store(dsn, settings=settings)
    behind = open_store(line.through(dsn), settings=settings)
    for one in (store, behind):
        found_job(one)
        one.ensure_datasets("shop", {table_name(Product): Product})
    line.fired, line.plan, line.meanwhile = [], [], None
    line.count_from_here()
    made = Trial(databases, line, store, Hand.on(behind), Hand.on(store))
    made.w.take()
    for shard in range(SHARDS):
        made.w.seed(*pages(shard, 12), shard=shard)
    made.w.claim(1)
    if is_silent:
        session = made.w.db._session  # type: ignore[attr-defined]
        session.write_s = session.read_s = GIVE_UP_S
    yield made
    line.count_from_here()
    made.w.leave()
    made.x.leave()
    behind.close()
    store.close()


# -- the rows of the table -----------------------------------------------------------------------


@pytest.mark.parametrize("shards", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("fault", ARRIVES)
def test_a_commit_that_arrived_is_acknowledged_once(trial: Trial, fault: str, shards: tuple[int, ...]) -> None:
    """Row 1: the ledger has our batch."""
    parts = trial.parts(*shards)
    trial.line.plan = [fault]
    answer = trial.w.commit(*parts, want=2)
    assert trial.line.fired == [fault]
    assert (len(answer.parts), answer.fenced, len(answer.claims)) == (len(shards), (), 2 * len(shards))
    assert {sku: price for _, sku, price in records(trial.x.db)} == trial.expected
    trial.is_whole(trial.w)


@pytest.mark.parametrize("shards", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("fault", NEVER_ARRIVES)
def test_a_commit_that_never_arrived_runs_again(trial: Trial, fault: str, shards: tuple[int, ...]) -> None:
    """Row 4: ours, and not committed; where the line is half-open, its ghost holds the rows until the server ends it."""
    parts = trial.parts(*shards)
    trial.line.plan = [fault]
    answer = trial.w.commit(*parts, want=2)
    assert trial.line.fired == [fault]
    assert (len(answer.parts), answer.fenced, len(answer.claims)) == (len(shards), (), 2 * len(shards))
    assert {sku: price for _, sku, price in records(trial.x.db)} == trial.expected
    trial.is_whole(trial.w)


@pytest.mark.parametrize("shards", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("fault", ["before", "half", "after", "delay"])
def test_a_shard_that_was_taken_meanwhile_is_dropped_and_what_was_committed_counts(
    trial: Trial, fault: str, shards: tuple[int, ...]
) -> None:
    """Rows 1 and 3: another owner, a higher epoch; what had arrived is acknowledged all the same."""
    parts = trial.parts(*shards)
    trial.line.plan, trial.line.meanwhile = [fault], lambda: trial.x.succeed_to_shard(trial.w, 0)
    answer = trial.w.commit(*parts, want=2)
    assert trial.line.fired == [fault]
    assert answer.fenced == (0,)
    written = shards if fault in ARRIVES else shards[1:]
    assert tuple(part.shard for part in answer.parts) == written
    assert len(records(trial.x.db)) == len(written)
    trial.is_whole(trial.w, trial.x)


@pytest.mark.parametrize("shards", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_database_that_went_back_meanwhile_drops_everything(trial: Trial, fault: str, shards: tuple[int, ...]) -> None:
    """Row 2: a fail-over to a server that lacks more than this commit."""
    restore = trial.databases.copy(trial.store.dsn)
    trial.w.commit(*trial.parts(*shards), want=1)
    parts = trial.parts(*shards)
    trial.line.plan, trial.line.meanwhile = [fault], restore
    with pytest.raises(WentBack):
        trial.w.commit(*parts)
    assert trial.line.fired == [fault]
    assert records(trial.x.db) == []
    assert len(trial.w.store.known) == 0
    trial.w.take()
    trial.is_whole(trial.w)


@pytest.mark.parametrize("shards", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize(
    ("fault", "sql"),
    [
        ("before", "UPDATE shard SET watermark = watermark + 1 WHERE shard = 0"),
        ("after", "UPDATE ledger SET batch_id = digest WHERE shard = 0 AND n = {n}"),
    ],
    ids=["before", "after"],
)
def test_rows_that_fit_no_story_halt_the_job(trial: Trial, fault: str, sql: str, shards: tuple[int, ...]) -> None:
    """Row 5: somebody wrote under our name, or the parts of one commit disagree."""
    parts = trial.parts(*shards)
    trial.line.plan, trial.line.meanwhile = [fault], lambda: trial.x.db.run_text(sql.format(n=parts[0].n))
    with pytest.raises(InvariantBroken):
        trial.w.commit(*parts)
    assert trial.line.fired == [fault]
    assert column(trial.x.db, "halted", table="job")[0].startswith("I1")  # type: ignore[attr-defined]


# -- again and again ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["before after", "after before", "after after", "buffered after", "half before delay"])
def test_a_second_and_a_third_fault_are_settled_like_the_first(trial: Trial, plan: str) -> None:
    """The answer to the question may get lost too."""
    parts = trial.parts(*SEVERAL)
    trial.line.plan = plan.split()
    for _ in range(3):
        try:
            answer = trial.w.commit(*parts, want=1)
        except OutcomeUnknown:
            continue
        break
    assert trial.line.fired == plan.split()
    assert len(answer.claims) == len(SEVERAL)
    assert {sku: price for _, sku, price in records(trial.x.db)} == trial.expected
    trial.is_whole(trial.w)


def test_an_outage_after_the_commit_keeps_its_outcome_unknown_until_it_ends(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is let in any more: OutcomeUnknown leaves; the same parts, sent again later, are found committed."""
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0,))
    parts = trial.parts(*SEVERAL)
    trial.line.plan, trial.line.meanwhile = ["after"], trial.line.refuse
    with pytest.raises(OutcomeUnknown):
        trial.w.commit(*parts, want=1)
    assert trial.w.store.unsettled
    trial.line.admit()
    answer = trial.w.commit(*parts, want=1)
    assert (trial.line.fired, len(answer.claims), trial.w.store.unsettled) == (["after"], len(SEVERAL), False)
    trial.is_whole(trial.w)


# -- in the middle of any statement ---------------------------------------------------------------


def insistently(hand: Hand, parts: list[Part]) -> None:
    """Send the same parts until it is certain that they were written, as the engine does."""
    until = time.monotonic() + 120
    while True:
        try:
            hand.send(*parts, want=1)
            return
        except (StoreUnavailable, OutcomeUnknown):
            assert time.monotonic() < until


@pytest.mark.parametrize(("is_heard", "step"), [(False, 1), (True, 3)], ids=["unheard", "heard"])
def test_a_line_that_is_cut_in_the_middle_of_any_statement_costs_nothing(trial: Trial, is_heard: bool, step: int) -> None:
    """At each message of a commit of three shards before it arrives, and at some before they are answered: written once, in the end."""
    at = 1
    while True:
        parts = trial.parts(*SEVERAL)
        trial.line.count_from_here(at, is_heard=is_heard)
        insistently(trial.w, parts)
        if len(trial.line.fired) == (at - 1) // step:
            break
        assert trial.line.fired[-1] == "cut"
        assert {sku: price for _, sku, price in records(trial.x.db)} == trial.expected, f"cut at message {at}"
        at += step
    assert at > 20, "a commit has more messages than that"
    trial.line.count_from_here()
    trial.is_whole(trial.w)


@silently
@pytest.mark.parametrize("at", [1, 9, 19])
def test_a_line_that_falls_silent_in_the_middle_of_a_statement_is_given_up(trial: Trial, at: int) -> None:
    """Half-open: the client closes it after its deadline, the server its end after its own; nothing is lost."""
    parts = trial.parts(*SEVERAL)
    trial.line.count_from_here(at, is_silent=True)
    insistently(trial.w, parts)
    assert trial.line.fired == ["silence"]
    assert {sku: price for _, sku, price in records(trial.x.db)} == trial.expected
    trial.line.count_from_here()
    trial.is_whole(trial.w)


# -- twins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "rule"), [("before", "it went through"), ("after", "it did not")])
def test_guessing_instead_of_looking_breaks_the_promise(trial: Trial, monkeypatch: pytest.MonkeyPatch, fault: str, rule: str) -> None:
    """The twins: each guess is wrong for one of the two."""

    def guess(db: SimpleNamespace, context: commit.Context, parts: list[Part], wants: object) -> commit.Committed:
        db.reopen()
        if rule == "it went through":
            return commit.Committed(tuple(parts))
        return commit.transact(db, context, parts, wants)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "settle", guess)
    parts = trial.parts(*SEVERAL)
    trial.line.plan = [fault]
    try:
        trial.w.commit(*parts, want=1)
    except LimpetError:
        pass
    else:
        assert {sku: price for _, sku, price in records(trial.x.db)} != trial.expected
    assert trial.line.fired == [fault]


@silently
def test_without_its_deadline_a_call_on_a_silent_line_waits_on(trial: Trial) -> None:
    """The twin: a client that waits for longer than this test."""
    session = trial.w.db._session  # type: ignore[attr-defined]
    session.write_s = session.read_s = 60.0
    trial.w.db.reopen()
    parts = trial.parts(0)
    trial.line.count_from_here(4, is_silent=True)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (insistently(trial.w, parts), ended.set()))
    thread.start()
    while not trial.line.fired:
        assert not ended.wait(0.01)
    assert not ended.wait(3 * GIVE_UP_S)
    trial.line.refuse()
    trial.line.admit()
    thread.join()
    assert trial.line.fired == ["silence"]
    trial.line.count_from_here()
    trial.is_whole(trial.w)
