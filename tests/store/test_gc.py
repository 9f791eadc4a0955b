"""Sealed jobs: what is removed, what stays, and that every proof still holds, at any moment of the removal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from limpet.batch import Claim, Offer
from limpet.errors import UsageError
from limpet.store import Store, gc, jobs, lease, requests
from limpet.store.dialect import Row
from limpet.store.repair import repair
from limpet.store.sealing import sealed_of
from limpet.store.standing import counts_of, standing
from limpet.store.verify import is_verified, verify, verify_job
from tests.conftest import on_sqlite
from tests.store.building import KINDS, TABLES
from tests.store.hands import Hand, change_sql, dead, done, emitted, found_job, link, skipped

#: Tables of which nothing of a sealed job is left.
EMPTIED = ("attempt", "revisit", "moved", "host", "robots", "request", "charge", "kept", "settlement")


@dataclass
class Slots:
    """Slots of one spider, with datasets of all kinds, each finished and proved."""

    store: Store

    def finish(self, slot: str, *, pages: int = 12, price: int = 1) -> jobs.Job:
        """Collect a slot: pages that share keys, one that is gone, one that is put back, one that is dead."""
        job = found_job(self.store, slot)
        self.store.ensure_datasets("shop", {TABLES[name]: kind for name, kind in KINDS.items()})
        hand = Hand.on(self.store)
        hand.take()
        hand.seed(*(link(f"http://h{number % 5}.test/{number}") for number in range(pages)))
        first, second, *others = hand.claim()
        hand.finish(dead(first), skipped(second), *(done(claim, offers=_offers(claim, price)) for claim in others))
        again = others[0]
        hand.db.run_text(
            "INSERT INTO request (job, shard, what, argument, who, at_ms) VALUES (?, ?, 'retry', ?, 'me', 1)",
            (job.id, again.shard, f'{{"tasks":[{again.id}]}}'),
        )
        hand.commit(hand.part(again.shard))
        (claim,) = hand.claim()
        hand.finish(done(claim, offers=_offers(claim, price + 1)))
        for shard in sorted(hand.held):
            hand.release(shard)
        lease.retire(hand.db, hand.worker)
        hand.store.close()
        assert verify_job(self.store, job).ok
        return jobs.read(self.store.db, job.id)


def _offers(claim: Claim, price: int) -> list[Offer]:
    return [emitted(f"s{claim.id % 4}", price, kind=kind) for kind in KINDS.values()]


@pytest.fixture
def slots(make_store: Callable[..., Store]) -> Slots:
    """No slot yet."""
    return Slots(make_store())


def collected(store: Store) -> list[list[Row]]:
    """Every row of every dataset."""
    return [store.db.rows_text(f"SELECT * FROM {name} ORDER BY _scope, _key, _slot") for name in TABLES.values()]


def books(store: Store) -> list[Row]:
    """The whole ledger."""
    return store.db.rows_text("SELECT * FROM ledger ORDER BY job, shard, n")


def left(store: Store, job: jobs.Job) -> dict[str, int]:
    """How many rows of a job the tables hold that `gc` empties."""
    return {name: store.db.rows_text(f"SELECT COUNT(*) FROM {name} WHERE job = ?", (job.id,))[0][0] for name in (*EMPTIED, "task")}


def proves(store: Store) -> None:
    """Every job passes, in full and from where it was last proved."""
    for job in jobs.every(store.db):
        for full in (True, False):
            verdict = verify(store.db, job, full=full)
            assert verdict.ok, verdict.summary()


def removed(store: Store, job: jobs.Job) -> int:
    """Seal a job and remove all of it."""
    assert gc.seal(store.db, job, 0.0) == ""
    return sum(gc.remove(store.db, job, sleep=lambda seconds: None))


def test_a_sealed_job_keeps_its_records_and_its_ledger_and_passes_every_proof(slots: Slots) -> None:
    """Its tasks and tries are gone, its counts are not; the slots before and after it are as they were."""
    for slot in ("1", "2", "3"):
        slots.finish(slot, price=int(slot) % 2)
    store = slots.store
    middle = jobs.every(store.db)[1]
    records, ledger, counts, others = collected(store), books(store), counts_of(store.db, middle.id), left(store, jobs.every(store.db)[2])
    assert removed(store, middle) == 12
    assert left(store, middle) == dict.fromkeys((*EMPTIED, "task"), 0)
    assert (collected(store), books(store), left(store, jobs.every(store.db)[2])) == (records, ledger, others)
    assert counts_of(store.db, middle.id) == counts
    assert (counts.done, counts.skipped, counts.dead) == (10, 1, 1)
    assert standing(store.db, middle.id).is_complete
    assert is_verified(store.db, middle)
    proves(store)
    assert "sealed" in verify(store.db, middle, full=True).notes[-1]


def test_offers_of_histories_stay_and_the_slots_around_a_sealed_one_are_decided_as_before(make_store: Callable[..., Store]) -> None:
    """A slot that is collected after its neighbour was sealed ends in the very rows that it would have ended in."""
    rows = []
    for is_sealed in (False, True):
        slots = Slots(make_store())
        db = slots.store.db
        slots.finish("1", price=5)
        middle = slots.finish("3", price=5)
        if is_sealed:
            assert db.rows_text("SELECT COUNT(*) FROM offer WHERE job = ? AND dataset = 'shop_story'", (middle.id,))[0][0]
            removed(slots.store, middle)
            assert db.rows_text("SELECT DISTINCT dataset FROM offer WHERE job = ?", (middle.id,)) == [("shop_story",)]
        slots.finish("2", price=7)
        slots.finish("4", price=5)
        found = db.rows_text("SELECT _slot, _key, _content, _closed FROM shop_story ORDER BY _slot, _key")
        rows.append([(slot, bytes(key), bytes(content), closed) for slot, key, content, closed in found])
        proves(slots.store)
    assert rows[0] == rows[1]
    assert {row[0] for row in rows[0]} >= {"1", "2", "3"}


def test_what_must_not_go_stays_and_says_why(slots: Slots) -> None:
    """Young, unproved, incomplete, worked on, or with money of unknown outcome."""
    store = slots.store
    job = slots.finish("1")

    def why(older_s: float = 0.0) -> str:
        return gc.candidates(store.db, [jobs.read(store.db, job.id)], older_s)[0].why_not

    assert (why(), why(3600.0)) == ("", "its last batch is not so old")
    store.job = job
    worker = store.register()
    assert why() == "a worker of it is alive"
    lease.retire(store.db, worker)
    store.db.run_text(
        "INSERT INTO charge (job, shard, task, try, handler, host, day, state, reserved, amount, requests, reason, n, at_ms) "
        "VALUES (?, 0, 1, 1, 'h', '', '', 'unknown', 1, 1, 1, '', 1, 1)",
        (job.id,),
    )
    assert "unknown outcome" in why()
    store.db.run_text("DELETE FROM charge")
    store.db.run_text("UPDATE job SET verified = ? WHERE job = ?", (b"", job.id))
    assert "not proved" in why()
    assert verify_job(store, job).ok
    requests.ask(store, "retry", {"states": ["dead"]}, shards=[0], who="me")
    assert why() == "it is not complete"
    assert gc.seal(store.db, job, 0.0) == "it is not complete"
    assert sealed_of(store.db, job.id) is None


def test_nothing_can_be_asked_of_a_sealed_job(slots: Slots) -> None:
    """Neither a retry nor a repair; both say what to do instead."""
    job = slots.finish("1")
    removed(slots.store, job)
    slots.store.job = job
    for refused in (
        lambda: requests.ask(slots.store, "retry", {"states": ["dead"]}, shards=[0], who="me"),
        lambda: repair(slots.store, job, batches=[(0, 1)]),
    ):
        with pytest.raises(UsageError, match="sealed"):
            refused()
    assert left(slots.store, job)["request"] == 0


def test_the_highest_id_is_never_given_twice(slots: Slots) -> None:
    """Records of a sealed slot name their task: the one with the highest id stays until there is a higher one."""
    store = slots.store
    job = slots.finish("1")
    assert removed(store, job) == 11
    assert left(store, job)["task"] == 1
    assert sum(left(store, job).values()) == 1
    proves(store)
    slots.finish("2")
    ids = {row[0] for row in store.db.rows_text("SELECT id FROM task WHERE job <> ?", (job.id,))}
    assert not ids & {row[0] for row in store.db.rows_text("SELECT _task FROM shop_product WHERE _job = ?", (job.id,))}
    (candidate, _) = gc.candidates(store.db, jobs.every(store.db), 0.0)
    assert (candidate.is_sealed, candidate.why_not) == (True, "")
    assert sum(gc.remove(store.db, job)) == 1
    assert left(store, job)["task"] == 0
    assert gc.candidates(store.db, [job], 0.0)[0].why_not == "sealed already"
    proves(store)


def test_with_every_task_removed_ids_come_again_and_proofs_fail(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: without that rule a new task is taken for the one that wrote an old record. Servers never count back."""
    store = slots.store
    change_sql(monkeypatch, store.db, "gc_tasks", " AND id < (SELECT MAX(id) FROM task)", "")
    job = slots.finish("1")
    assert removed(store, job) == 12
    found_job(store, "2")
    hand = Hand.on(store)
    hand.take()
    hand.seed(*(link(f"http://h{number % 5}.test/{number}") for number in range(12)))
    hand.leave()
    again = {row[0] for row in store.db.rows_text("SELECT id FROM task")}
    old = {row[0] for row in store.db.rows_text("SELECT _task FROM shop_product WHERE _job = ?", (job.id,))}
    assert bool(again & old) == (store.db.name == "sqlite")


def test_rows_go_in_small_transactions_and_every_proof_holds_between_them(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is left anywhere leaves a database that is sound, and goes on."""
    monkeypatch.setattr(gc, "TASKS", 2)
    store = slots.store
    slots.finish("1")
    job = slots.finish("2")
    slots.finish("3")
    assert gc.seal(store.db, job, 0.0) == ""
    for step, number in enumerate(gc.remove(store.db, job, sleep=lambda seconds: None), 1):
        assert number <= 2
        proves(store)
        if step == 3:
            break
    assert 0 < left(store, job)["task"] < 12
    assert gc.candidates(store.db, [job], 0.0)[0].why_not == ""
    assert sum(gc.remove(store.db, job, sleep=lambda seconds: None)) == 12 - 6
    proves(store)


KILLED = """
import sys
from limpet.store import gc, jobs, open_store
store = open_store(sys.argv[1], create=False)
gc.TASKS = 2
job = jobs.every(store.db)[0]
assert gc.seal(store.db, job, 0.0) == ""
print(sum(gc.remove(store.db, job)))
"""


@pytest.mark.parametrize("plan", ["gc_sealed=kill", "gc_batch=kill", "gc_batch@3=kill"])
def test_killed_in_the_middle_it_goes_on(slots: Slots, plan: str) -> None:
    """After the seal, in a transaction, between two: the proofs hold, and the next call removes the rest."""
    store = slots.store
    job = slots.finish("1")
    slots.finish("2")
    environment = {**os.environ, "LIMPET_FAILPOINT": plan, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", KILLED, store.dsn], env=environment, check=False, timeout=60)
    assert killed.returncode == -9
    assert sealed_of(store.db, job.id) is not None
    proves(store)
    done_before = {"gc_sealed=kill": 0, "gc_batch=kill": 0, "gc_batch@3=kill": 4}[plan]
    assert left(store, job)["task"] == 12 - done_before
    assert sum(gc.remove(store.db, job)) == 12 - done_before
    proves(store)


def test_a_ledger_that_was_changed_after_the_seal_is_found(slots: Slots) -> None:
    """By its chain of seals, or by its sums: that the rows are gone hides nothing of it."""
    store = slots.store
    job = slots.finish("1")
    slots.finish("2")
    removed(store, job)
    store.db.run_text("UPDATE ledger SET done = done + 1 WHERE job = ? AND done > 0", (job.id,))
    assert "seal" in verify(store.db, job, full=True).found
    store.db.run_text("UPDATE sealed SET tasks = tasks + 1 WHERE job = ?", (job.id,))
    assert "sealed" in verify(store.db, job, full=True).found


def test_a_record_that_was_changed_after_the_seal_is_found(slots: Slots) -> None:
    """Its content hash and the ledger's totals do not need the try that wrote it."""
    store = slots.store
    job = slots.finish("1")
    slots.finish("2")
    removed(store, job)
    store.db.run_text("UPDATE shop_product SET price = 77 WHERE _job = ?", (job.id,))
    assert "content" in verify(store.db, job, full=True).found
    store.db.run_text("DELETE FROM shop_product WHERE _job = ?", (job.id,))
    assert "total" in verify(store.db, job, full=True).found


@on_sqlite
def test_pages_are_used_again_and_vacuum_gives_them_back(slots: Slots) -> None:
    """A file does not shrink by itself; the next slot takes the space, and VACUUM returns it."""
    store = slots.store

    def pages() -> tuple[int, int]:
        return tuple(store.db.rows_text(f"PRAGMA {name}")[0][0] for name in ("page_count", "freelist_count"))  # type: ignore[return-value]

    job = slots.finish("1", pages=400)
    slots.finish("2", pages=40)
    before, _ = pages()
    removed(store, job)
    after, free = pages()
    assert (after, free > before // 4) == (before, True)
    slots.finish("3", pages=200)
    assert pages()[0] == before
    gc.vacuum(store.db)
    assert pages()[0] < before
    assert pages()[1] == 0
    proves(store)


def test_vacuum_is_for_files(slots: Slots) -> None:
    """A server says that it needs none."""
    if slots.store.db.name == "sqlite":
        gc.vacuum(slots.store.db)
    else:
        with pytest.raises(UsageError, match="by itself"):
            gc.vacuum(slots.store.db)
    assert slots.store.db.rows("list_jobs") == []
