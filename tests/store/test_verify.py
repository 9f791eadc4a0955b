"""`verify` proves from the rows alone, beside working workers, in bounded steps, and writes nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet import batch
from limpet.batch import Kind, Want
from limpet.errors import StoreError, UsageError
from limpet.settings import Settings
from limpet.store import Store, jobs, ledger, open_store
from limpet.store.dialect import Database, Row
from limpet.store.proofs import FAULTS, Report
from limpet.store.verify import Verdict, is_verified, verify, verify_job, verify_shard
from limpet.store.verify_books import tries_digest
from limpet.store.verify_history import History, Task, Try, misplaced, not_running, over_cap, recount, unlawful
from limpet.task import State
from tests.conftest import Databases, Hire, on_sqlite
from tests.store.building import KINDS, OPERATIONS, Crawl, a_crawl
from tests.store.hands import SETTINGS, Hand, done, dump, emitted, failed, pages

MakeStore = Callable[..., Store]


def proved(store: Store, *, full: bool = True, **more: object) -> Verdict:
    """What verify says of the store's job."""
    assert store.job is not None
    return verify(store.db, jobs.read(store.db, store.job.id), full=full, **more)  # type: ignore[arg-type]


@pytest.fixture
def crawled(store: Store, hire: Hire) -> Hand:
    """A worker that seeded twelve pages in two shards and collected nine of them."""
    hand = hire()
    hand.seed(*pages(0, 6), *pages(1, 6))
    for number, claim in enumerate(hand.claim(5)):
        hand.finish(done(claim, *pages(2, 1, start=number), offers=[emitted(f"s{number}", number)]))
    return hand


# -- reading ------------------------------------------------------------------------------------


def test_verify_writes_nothing(crawled: Hand, store: Store) -> None:
    """A proof needs no more than to read: on a connection that cannot write the answer is the same."""
    before = dump(store.db)
    reader = store.again(readonly=True)
    try:
        assert proved(reader) == proved(store)
        assert proved(reader).ok
        assert dump(store.db) == before
    finally:
        reader.close()


class Measured:
    """A connection that notes the largest answer it gave."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.largest = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.db, name)

    def rows(self, statement: str, **values: object) -> list[Row]:
        """Read, and measure."""
        return self._measured(self.db.rows(statement, **values))

    def one(self, statement: str, **values: object) -> Row | None:
        """The first row."""
        return next(iter(self.db.rows(statement, **values)), None)

    def rows_text(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        """Read, and measure."""
        return self._measured(self.db.rows_text(sql, values))

    def _measured(self, rows: list[Row]) -> list[Row]:
        self.largest = max(self.largest, len(rows))
        return rows


def test_memory_does_not_depend_on_the_number_of_tasks(store: Store, hire: Hire) -> None:
    """Whatever is read comes in ranges: no answer is larger than one, in a job of many times as many rows."""
    hand = hire()
    for start in range(0, 600, 60):
        hand.seed(*pages(start % 4, 60, start=start))
        hand.finish(*(done(claim, offers=[emitted(f"s{claim.id}", 1)]) for claim in hand.claim(60)))
    reader = Measured(store.db)
    assert store.job is not None
    assert verify(reader, store.job, full=True, chunk=50).checked["tasks"] == 600  # type: ignore[arg-type]
    assert 50 <= reader.largest <= 100  # 60 tries of one batch are read at once


def test_verify_beside_a_working_worker_gives_no_false_alarm(databases: Databases) -> None:
    """While another thread claims, commits, dies, is succeeded and has tasks put back, every proof passes."""
    dsn = databases.new()
    crawl = a_crawl(open_store(dsn, settings=SETTINGS), 5)
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                crawl.do("seed", "work", "work", "kill", "work", "put_back", "work", "stop", "work")
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    reader = open_store(dsn, create=False, readonly=True, settings=SETTINGS)
    reader.job = crawl.job
    vectors = set()
    worker.start()
    try:
        while (len(vectors) < 20) and not failures:
            for full in (True, False):
                verdict = proved(reader, full=full, chunk=20)
                assert verdict.ok, verdict.summary()
                vectors.add(tuple(head.watermark for head in verdict.heads.values()))
    finally:
        stop.set()
        worker.join()
        reader.close()
        crawl.leave()
        crawl.store.close()
    assert not failures


@on_sqlite
def test_a_damaged_file_is_a_finding_not_an_error(databases: Databases) -> None:
    """A page that was overwritten is named, whatever else can still be read."""
    dsn = databases.new()
    store = open_store(dsn, settings=SETTINGS)
    a_crawl(store, 1).leave()
    ((root, size),) = store.db.rows_text(
        "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_master WHERE name = 'attempt'"
    )
    store.db.rows_text("PRAGMA wal_checkpoint(TRUNCATE)")
    place = store.db.place
    store.close()
    with open(place, "r+b") as file:
        file.seek((root - 1) * size)
        file.write(os.urandom(size))
    store = open_store(dsn, settings=SETTINGS)
    try:
        store.job = jobs.every(store.db)[0]
        verdict = proved(store)
        assert verdict.first is not None
        assert (verdict.first.invariant, verdict.first.fault) == ("file", "file")
    finally:
        store.close()


# -- how far ------------------------------------------------------------------------------------


def test_an_incremental_proof_looks_only_at_what_came_since(crawled: Hand, store: Store) -> None:
    """After a cursor was committed, what lies before it is not read again; a full proof reads all."""
    first = proved(store, full=False)
    assert first.ok
    assert first.cursors == {shard: held.watermark for shard, held in crawled.held.items()}
    crawled.commit(*(crawled.part(shard, verified=cursor) for shard, cursor in first.cursors.items()))
    again = proved(store, full=False)
    assert (again.checked["batches"], again.checked.get("tries", 0)) == (len(first.cursors), 0)
    store.db.run_text("UPDATE attempt SET offered = ? WHERE outcome = 'done'", (b"other",))
    assert proved(store, full=False).ok
    assert set(proved(store).found) == {"digest"}
    assert set(proved(store, full=False, from_batches={1: 0}).found) == {"digest"}


def test_cursors_move_only_on_a_pass(crawled: Hand, store: Store) -> None:
    """A proof that fails gives no cursors to commit."""
    store.db.run_text("UPDATE ledger SET at_ms = 0 WHERE n = 2")
    verdict = proved(store, full=False)
    assert not verdict.ok
    assert verdict.cursors == {}


def test_a_shard_is_proved_by_ranges_of_batches(crawled: Hand, store: Store) -> None:
    """What an owner proves: counts and seals always, digests where it is thorough."""
    assert store.job is not None
    watermark = crawled.held[0].watermark
    assert verify_shard(store.db, store.job, 0, 0, watermark, thorough=True) == []
    store.db.run_text("UPDATE attempt SET offered = ? WHERE shard = 0", (b"other",))
    assert verify_shard(store.db, store.job, 0, 0, watermark) == []
    found = verify_shard(store.db, store.job, 0, 0, watermark, thorough=True)
    assert {(one.invariant, one.fault, one.shard) for one in found} == {("I2", "digest", 0)}
    store.db.run_text("DELETE FROM attempt WHERE shard = 0")
    assert "I2" in {one.invariant for one in verify_shard(store.db, store.job, 0, 0, watermark)}
    assert verify_shard(store.db, store.job, 0, watermark, watermark) == []


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ("UPDATE ledger SET at_ms = at_ms - 1 WHERE shard = 0 AND n = 2", "I1"),
        ("DELETE FROM ledger WHERE shard = 0 AND n = 2", "I1"),
        ("DELETE FROM attempt WHERE shard = 0", "I2"),
        ("DELETE FROM task WHERE id = (SELECT MAX(id) FROM task WHERE source_shard = 0)", "I3"),
        ("UPDATE attempt SET n = n + 100 WHERE shard = 0", "I3"),
        ("UPDATE task SET claim_epoch = 0 WHERE shard = 0 AND state = 'running'", "I6"),
    ],
)
def test_the_quick_proof_of_a_shard_finds_what_must_stop_a_new_owner(crawled: Hand, store: Store, change: str, invariant: str) -> None:
    """Without digests the books, the counts, the stamps and what runs are proved all the same."""
    crawled.claim(1, 0)
    assert store.job is not None
    watermark = crawled.held[0].watermark
    assert verify_shard(store.db, store.job, 0, 0, watermark) == []
    assert store.db.run_text(change)
    assert invariant in {one.invariant for one in verify_shard(store.db, store.job, 0, 0, watermark)}


# -- what follows -------------------------------------------------------------------------------


def test_a_full_proof_that_passes_is_noted_until_the_next_batch(crawled: Hand, store: Store) -> None:
    """The job is verified at this vector of watermarks, and no longer once a batch has moved it."""
    assert store.job is not None
    assert not is_verified(store.db, store.job)
    assert verify_job(store, full=False).ok
    assert not is_verified(store.db, store.job)
    assert verify_job(store).ok
    assert is_verified(store.db, store.job)
    assert is_verified(store.db, store.job.id)
    crawled.commit(crawled.part(0))
    assert not is_verified(store.db, store.job)


def test_a_proof_that_fails_halts_the_job_and_one_that_passes_ends_the_halt(crawled: Hand, store: Store) -> None:
    """Results in hand commit, nobody claims, until a full proof passes."""
    assert store.job is not None
    crawled.claim(1, 0)
    store.db.run_text("UPDATE task SET strikes = 1 WHERE state = 'done'")
    verdict = verify_job(store)
    assert verdict.first is not None
    assert verdict.first.invariant == "I7"
    assert jobs.read(store.db, store.job.id).halted == verdict.summary()
    (claim,) = crawled.claims.values()
    answer = crawled.commit(crawled.part(0, done(claim)), want=Want(5, 5))
    assert (len(answer.claims), answer.stopped) == (0, f"halted: {verdict.summary()}")
    assert not is_verified(store.db, store.job)
    store.db.run_text("UPDATE task SET strikes = 0")
    assert verify_job(store, full=False).ok
    assert jobs.read(store.db, store.job.id).halted
    assert verify_job(store, store.job).ok
    assert not jobs.read(store.db, store.job.id).halted
    assert crawled.claim(1, 2)


def test_verify_asks_for_a_job(make_store: MakeStore) -> None:
    """A store that joined no job has nothing to prove."""
    with pytest.raises(UsageError, match="joined none"):
        verify_job(make_store())


def test_a_table_that_is_gone_ends_the_proof_with_a_note(crawled: Hand, store: Store) -> None:
    """What cannot be read is not proved, and the verdict says so; it raises nothing."""
    store.db.run_text("DROP TABLE attempt")
    verdict = proved(store)
    assert {one.invariant for one in verdict.findings} == {"schema"}
    assert any("not proved" in note for note in verdict.notes)


def test_a_missing_column_of_the_database_is_an_error_of_the_quick_proof(crawled: Hand, store: Store) -> None:
    """The quick proof of a shard does not look at the schema: the database itself refuses."""
    store.db.run_text("DROP TABLE revisit")
    assert store.job is not None
    with pytest.raises(StoreError):
        verify_shard(store.db, store.job, 0, 0, 1)


def test_other_peoples_tables_are_left_alone(crawled: Hand, store: Store) -> None:
    """A table, view or index that somebody made beside Limpet's is no fault."""
    store.db.run_text("CREATE TABLE mine (x INTEGER)")
    store.db.run_text("CREATE VIEW mine_too AS SELECT state, COUNT(*) AS number FROM task GROUP BY state")
    store.db.run_text("CREATE INDEX mine_three ON task (rank)")
    assert proved(store).ok


def test_a_try_that_runs_for_long_is_reported_not_failed(crawled: Hand, store: Store) -> None:
    """Nobody but its worker knows whether it still runs: a note, no finding."""
    crawled.claim(1, 0)
    store.db.run_text("UPDATE ledger SET at_ms = at_ms - 7200000")
    for shard in crawled.held:
        picked = {"job": 1, "shard": shard, "n": 1}
        for n in range(1, crawled.held[shard].watermark + 1):
            _seal_again(store.db, picked | {"n": n})
    verdict = proved(store)
    assert verdict.ok
    assert any("shard 0: 1 task of a living worker" in note for note in verdict.notes)


def _seal_again(db: Database, picked: dict[str, object]) -> None:
    from tests.store.tampering import reseal

    reseal(db, picked, only=True)


# -- laws ---------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    kinds=st.sets(st.sampled_from(sorted(KINDS))),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=14),
)
def test_any_sequence_of_legal_operations_leaves_verify_clean(
    databases: Databases, seed: int, kinds: set[str], operations: list[str]
) -> None:
    """Whatever workers and people do, in any order: every slot's job is proved, in full and step by step."""
    store = open_store(databases.ready(), settings=SETTINGS)
    crawl = Crawl(store, seed, kinds=sorted(kinds)).do("seed", *operations)
    try:
        for job in jobs.every(store.db):
            for full in (True, False):
                verdict = verify(store.db, job, full=full, limits=SETTINGS, chunk=7)
                assert verdict.ok, verdict.summary()
    finally:
        crawl.leave()
        store.close()


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=16, max_size=16),
            st.integers(1, 9),
            st.sampled_from(["done", "lost"]),
            st.text(max_size=5),
            st.binary(max_size=20),
        ),
        max_size=5,
    )
)
def test_the_recounted_digest_is_that_of_the_batch(tries: list[tuple[bytes, int, str, str, bytes]]) -> None:
    """The quick form of the digest that the proof uses says what the batch said."""
    rows = sorted((3, *row, 7) for row in tries)
    assert tries_digest(rows) == batch.tries_digest(tries)


# -- histories ----------------------------------------------------------------------------------

TASK = Task(1, 0, "pending", "ready", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, 50, 0)


def tried(*outcomes: str, killed: bool = False) -> tuple[Try, ...]:
    """Tries in batches 10, 20, ...; `solo` marks one that ran alone, `strike` one that counts."""
    found = []
    for number, word in enumerate(outcomes, 1):
        outcome, *marks = word.split("+")
        reason = "killed its worker" if killed and number == len(outcomes) else "why"
        found.append(Try(0, 10 * number, number, outcome, reason, int("strike" in marks), int("solo" in marks), 0))
    return tuple(found)


@pytest.mark.parametrize(
    ("tries", "revisits", "claim_n", "state"),
    [
        ((), (), 0, State.PENDING),
        ((), (), 5, State.RUNNING),
        (tried("done"), (), 9, State.DONE),
        (tried("done"), (), 10, State.RUNNING),
        (tried("failed+strike"), (), 5, State.FAILED),
        (tried("lost"), (), 5, State.PENDING),
        (tried("lost+solo"), (), 5, State.FAILED),
        (tried("lost+solo", killed=True), (), 5, State.DEAD),
        (tried("throttled"), (), 5, State.PENDING),
        (tried("released"), (), 5, State.PENDING),
        (tried("dead"), ((1, 12),), 9, State.PENDING),
        (tried("dead", "done"), ((1, 12),), 15, State.DONE),
        (tried("dead"), ((1, 12),), 12, State.RUNNING),
    ],
)
def test_a_state_follows_from_tries_claims_and_revisits(
    tries: tuple[Try, ...], revisits: tuple[tuple[int, int], ...], claim_n: int, state: State
) -> None:
    """The last try, an open claim or a revisit says where a task stands."""
    history = History(replace(TASK, claim_n=claim_n), tries, revisits)
    assert unlawful(history) == ""
    assert recount(history).state is state


def test_counters_begin_anew_after_a_revisit() -> None:
    """Tries only grow; strikes, losses and throttles count from the last time a person put the task back."""
    tries = tried("failed+strike", "lost", "dead+strike", "failed+strike", "lost+solo", "throttled")
    account = recount(History(replace(TASK, claim_n=55), tries, ((3, 31),)))
    assert (account.tries, account.strikes, account.lost, account.solo, account.throttled) == (6, 1, 1, 1, 1)
    assert over_cap(account, Settings()) == ""
    assert over_cap(account, Settings(strikes=0)) == "1 strikes, at most 0"
    assert over_cap(account, Settings(solo_losses=0)) == "1 solo losses, at most 0"


@pytest.mark.parametrize(
    ("tries", "revisits"),
    [
        (tried("done", "done"), ()),
        (tried("failed"), ((1, 12),)),
        (tried("done"), ((1, 12), (1, 13))),
        (tried("done")[1:] + tried("done", "failed")[1:], ()),
        ((replace(tried("done")[0], shard=3),), ()),
        ((replace(tried("done")[0], outcome="lucky"),), ()),
    ],
)
def test_an_unlawful_history_is_told_apart(tries: tuple[Try, ...], revisits: tuple[tuple[int, int], ...]) -> None:
    """A try after an end, a revisit without one, a gap, another shard, an unknown outcome."""
    assert unlawful(History(TASK, tries, revisits))


def test_a_running_task_needs_its_shards_epoch_and_an_open_try() -> None:
    """I6, case by case."""
    sound = replace(TASK, state="running", lane="running", tries=1, claim_n=5, claim_epoch=5, batch_epoch=5)
    assert not_running(History(sound, (), ()), recount(History(sound, (), ()))) == ""
    for flaw in ({"claim_epoch": 4}, {"batch_epoch": 4}, {"batch_epoch": -1}, {"claim_n": 51}, {"lane": "ready"}, {"claim_n": 0}):
        history = History(replace(sound, **flaw), (), ())  # type: ignore[arg-type]
        assert not_running(history, recount(history)), flaw
    assert misplaced(History(sound, (), ()), recount(History(sound, (), ()))) == []


def test_caps_are_proved_where_the_limits_are_given(crawled: Hand, store: Store) -> None:
    """A task beyond its cap is found by the one who knows the cap."""
    (claim,) = crawled.claim(1, 0)
    crawled.finish(failed(claim))
    assert proved(store).ok
    assert proved(store, limits=SETTINGS).ok
    verdict = proved(store, limits=replace(SETTINGS, strikes=0))
    assert [(one.fault, one.task) for one in verdict.findings] == [("cap", claim.id)]


# -- verdicts -----------------------------------------------------------------------------------


def test_findings_are_bounded_counted_and_in_order() -> None:
    """However much is broken, a verdict shows the first of each fault, and how many there are."""
    report = Report(shown_max=2)
    for n in (9, 3, 5):
        report.add("seal", f"batch {n}", shard=1, n=n)
    report.add("table", "a table")
    assert [one.message for one in report.findings()] == ["a table", "batch 3", "batch 9"]
    assert report.found == {"seal": 3, "table": 1}


def test_a_verdict_says_what_was_looked_at_and_what_is_wrong(crawled: Hand, store: Store) -> None:
    """One sentence for people, stable names for programs."""
    assert "10 tries, 19 batches, 22 tasks, 10 records" in proved(store).summary()
    store.db.run_text("UPDATE ledger SET at_ms = 0 WHERE shard = 0 AND n = 2")
    verdict = proved(store)
    assert verdict.summary().startswith("I1: batch 2 of shard 0")
    found = verdict.to_json()
    assert (found["clean"], found["found"]) == (False, {"seal": 1})
    assert found["findings"] == [
        {"invariant": "I1", "fault": "seal", "message": verdict.findings[0].message, "repair": "", "shard": 0, "n": 2}
    ]


def test_every_fault_names_an_invariant_and_what_it_means() -> None:
    """The docs print this table."""
    for word, fault in FAULTS.items():
        assert fault.invariant in ("file", "schema", *(f"I{number}" for number in range(1, 11))), word
        assert fault.meaning[0].islower() or fault.meaning.startswith("SQLite"), word


def test_a_repairs_corrections_are_counted_off(crawled: Hand, store: Store) -> None:
    """Tasks that a repair noted as gone are not missed in the batch that discovered them, nor in the sum of all."""
    store.db.run_text("DELETE FROM task_text WHERE id = (SELECT MAX(id) FROM task)")
    store.db.run_text("DELETE FROM task WHERE id = (SELECT MAX(id) FROM task)")
    verdict = proved(store)
    (missing,) = verdict.findings
    assert missing.fault == "missing"
    assert missing.shard is not None
    its = crawled.held[missing.shard]
    part = crawled.part(missing.shard, kind=Kind.REPAIR)
    store.db.begin()
    store.db.run("fence", job=part.job, shard=part.shard, owner=part.owner, epoch=part.epoch, n=part.n, kind="repair", verified=0)
    deltas = {f"~tasks/{missing.shard}/{missing.n}": [0, 0, 0, 1, 0]}
    ledger.put(store.db, part, 0, {}, batch.tries_digest([]), ledger.Found(-1), deltas=deltas)
    store.db.commit()
    its.watermark += 1
    assert proved(store).ok
    assert proved(store, full=False).ok
    assert store.db.rows_text("SELECT SUM(discovered), (SELECT COUNT(*) FROM task) FROM ledger") == [(21, 21)]
