"""`repair` mends what can be derived, has the rest collected again, and never edits the past."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from limpet.batch import Claim, Result
from limpet.errors import OutcomeUnknown, UsageError
from limpet.store import Store, jobs
from limpet.store.dialect import Database, Row
from limpet.store.proofs import FAULTS, Remedy
from limpet.store.repair import Repaired, is_mendable, remedies, repair, repair_job
from limpet.store.verify import is_verified, verify
from limpet.task import Outcome
from tests.conftest import Databases, Hire, on_sqlite
from tests.store.building import TABLES, Crawl
from tests.store.hands import Faulty, Hand, done, dump, emitted, link, records, states
from tests.store.tampering import Tampering
from tests.store.tampering_table import TAMPERINGS
from tests.store.test_verify_tampering import Built, build

#: What never changes, once it is written.
PAST = ("ledger", "attempt", "revisit")

MENDED = [one for one in TAMPERINGS if one.is_mended and not one.needs_a_file]
BEYOND = [one for one in TAMPERINGS if not one.is_mended and not one.needs_a_file]
IN_A_FILE = [one for one in TAMPERINGS if one.needs_a_file]


@pytest.fixture(scope="module")
def built(databases: Databases) -> Built:
    """A crawl that has met everything, none of whose workers lives."""
    return build(databases, "product", "story")


@pytest.fixture(scope="module")
def built_whole(databases: Databases) -> Built:
    """The same, with datasets over slots, where a try's count of records is only an upper bound."""
    return build(databases, *TABLES)


@pytest.fixture
def crawled(built: Built) -> Iterator[Store]:
    """The crawl as it was built."""
    store = built.open()
    yield store
    store.close()


def past(db: Database) -> dict[str, set[Row]]:
    """Ledger, attempt and revisit rows."""
    return {name: set(db.rows_text(f"SELECT * FROM {name}")) for name in PAST}


def findings(store: Store) -> set[str]:
    """Which faults verify finds in the store's job."""
    assert store.job is not None
    return set(verify(store.db, jobs.read(store.db, store.job.id), full=True).found)


def go_on(store: Store, batches: int = 12) -> Crawl:
    """Take the job up again, and work on it for a while."""
    store.ensure_datasets("shop", {})
    crawl = Crawl(store, 7, kinds=[name for name, table in TABLES.items() if table in store.tables])
    crawl.pages = 30
    for _ in range(batches):
        crawl.work(30)
    crawl.leave()
    return crawl


# -- every way of tampering ---------------------------------------------------------------------


@pytest.mark.parametrize("tampering", MENDED, ids=lambda one: one.name)
def test_what_has_a_remedy_is_mended_and_the_crawl_goes_on(crawled: Store, tampering: Tampering) -> None:
    """After a repair the job is proved, its halt is over, the past is as it was, and what follows is clean too."""
    is_mended(crawled, tampering)


@on_sqlite
@pytest.mark.parametrize("tampering", IN_A_FILE, ids=lambda one: one.name)
def test_what_a_file_lets_happen_is_mended_or_left_too(crawled: Store, tampering: Tampering) -> None:
    """What no server lets anybody do to a row."""
    (is_mended if tampering.is_mended else is_left)(crawled, tampering)


def is_mended(crawled: Store, tampering: Tampering) -> None:
    """Change a crawl, and have it repaired."""
    tampering.apply(crawled.db)
    before = past(crawled.db)
    crawled.job = jobs.read(crawled.db, tampering.job)
    crawled.halt("verify failed")
    assert is_mendable(verify(crawled.db, crawled.job, full=True).findings)
    verdict, rounds = repair_job(crawled)
    assert verdict.ok, [one.message for one in verdict.findings]
    assert rounds
    assert is_verified(crawled.db, crawled.job)
    assert not jobs.read(crawled.db, crawled.job.id).halted
    assert all(before[name] <= after for name, after in past(crawled.db).items())
    json.dumps([one.to_json() for one in rounds])
    go_on(crawled)
    assert findings(crawled) == set()


@pytest.mark.parametrize("tampering", BEYOND, ids=lambda one: one.name)
def test_what_has_no_remedy_is_left_as_it_is_and_says_so(crawled: Store, tampering: Tampering) -> None:
    """Where the past was altered nothing is invented: a backup is asked for, and not a row but the halt is changed."""
    is_left(crawled, tampering)


def is_left(crawled: Store, tampering: Tampering) -> None:
    """Change a crawl beyond repair."""
    tampering.apply(crawled.db)
    crawled.job = jobs.read(crawled.db, tampering.job)
    found = findings(crawled)
    before = {name: rows for name, rows in dump(crawled.db).items() if name not in ("worker", "job", "alert")}
    verdict, rounds = repair_job(crawled)
    assert set(verdict.found) == found
    assert rounds[-1].beyond
    assert not rounds[-1].batches
    assert "restore a backup" in rounds[-1].advice
    assert jobs.read(crawled.db, crawled.job.id).halted
    assert {name: rows for name, rows in dump(crawled.db).items() if name not in ("worker", "job", "alert")} == before


@pytest.mark.parametrize("tampering", [one for one in MENDED if one.invariant in ("I3", "I5")], ids=lambda one: one.name)
def test_records_over_slots_are_mended_too(built_whole: Built, tampering: Tampering) -> None:
    """Where other slots take keys over, and no count names the task, all that may have written a record are tried again."""
    store = built_whole.open()
    try:
        tampering.apply(store.db)
        store.job = jobs.read(store.db, tampering.job)
        verdict, _ = repair_job(store)
        assert verdict.ok, [one.message for one in verdict.findings]
        go_on(store)
        assert findings(store) == set()
    finally:
        store.close()


# -- a crawl that ends in one way only ----------------------------------------------------------

PAGES = 40
SKUS = 9


def visit(claim: Claim) -> Result:
    """A site whose pages say the same each time: links to two further pages, and a product that others sell too."""
    number = int(claim.text.rpartition("/")[2])
    links = [page(n) for n in (2 * number, 2 * number + 1) if n < PAGES]
    return done(claim, *links, offers=[emitted(f"s{number % SKUS}", number), emitted(f"only-{number}", number)])


def page(number: int) -> object:
    """The link to a page."""
    return link(f"http://site{number % 5}.test/{number}")


def crawl_to_the_end(hand: Hand) -> None:
    """Visit all there is."""
    while claims := [*hand.claims.values()] or hand.claim():
        hand.finish(*map(visit, claims))


@pytest.fixture
def ended(store: Store, hire: Hire) -> Store:
    """A crawl of the site that is complete; its worker has gone."""
    hand = hire()
    hand.seed(page(1))  # type: ignore[arg-type]
    crawl_to_the_end(hand)
    for shard in list(hand.held):
        hand.release(shard)
    assert len(states(store.db)) == PAGES - 1
    return store


def mend_and_crawl(store: Store, change: Callable[[Database], object]) -> Repaired:
    """Change something, repair it, and crawl on to the end."""
    assert store.job is not None
    store.db.begin()
    change(store.db)
    store.db.commit()
    assert findings(store)
    verdict, rounds = repair_job(store)
    assert verdict.ok, verdict.summary()
    hand = Hand.on(store)
    hand.take()
    crawl_to_the_end(hand)
    hand.leave()
    assert findings(store) == set()
    return rounds[0]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM shop_product WHERE sku = 's3'",
        "DELETE FROM shop_product WHERE sku = 'only-7'",
        "DELETE FROM shop_product",
        "UPDATE shop_product SET price = price + 1",
        "UPDATE shop_product SET _try = 7 WHERE sku = 's3'",
        "UPDATE shop_product SET _closed = 'x'",
        "DELETE FROM offer WHERE task > 9",
        'UPDATE offer SET row_json = \'{"price":1,"seen":1,"sku":"s1"}\'',
        "DELETE FROM task WHERE id = 12",
        "UPDATE task SET state = 'pending', lane = 'ready' WHERE state = 'done'",
    ],
)
def test_what_was_collected_comes_back_the_same(ended: Store, change: str) -> None:
    """Record by record the dataset is what it was before somebody changed it, whoever's task key wins a shared key."""
    before = records(ended.db)
    offers = ended.db.rows_text("SELECT key, task_key, content FROM offer ORDER BY 1, 2")
    mend_and_crawl(ended, lambda db: db.run_text(change))
    assert records(ended.db) == before
    assert ended.db.rows_text("SELECT key, task_key, content FROM offer ORDER BY 1, 2") == offers


def test_a_missing_page_is_found_again_by_the_page_that_led_to_it(ended: Store, hire: Hire) -> None:
    """A page that is gone before it was ever visited is linked to by its parent, which is visited again."""
    hand = hire()
    hand.seed(link("http://other.test/100"))
    (claim,) = (one for one in hand.claim() if one.text.endswith("/100"))
    target = link("http://site3.test/77")
    hand.finish(done(claim, target))
    for shard in list(hand.held):
        hand.release(shard)
    (task,) = ended.db.rows_text("SELECT id FROM task_text WHERE text = ?", (target.text,))
    ended.db.run_text("DELETE FROM task WHERE id = ?", task)
    ended.db.run_text("DELETE FROM task_text WHERE id = ?", task)
    assert findings(ended) == {"missing"}
    verdict, (done_once,) = repair_job(ended)
    assert verdict.ok
    assert done_once.put_back == 1
    assert target.text not in states(ended.db)
    assert states(ended.db)["http://other.test/100"] == "pending"
    again = Hand.on(ended)
    again.take()
    again.finish(*(done(one, target) for one in again.claim() if one.text.endswith("/100")))
    again.leave()
    assert states(ended.db)[target.text] == "pending"
    assert findings(ended) == set()


def test_missing_starts_are_read_again_from_their_source(ended: Store) -> None:
    """Where no page led to what is missing, the sources are opened again: known keys vanish."""
    hand = Hand.on(ended)
    hand.take()
    hand.seed(link("http://start.test/"))
    for shard in list(hand.held):
        hand.release(shard)
    hand.leave()
    (task,) = ended.db.rows_text("SELECT id FROM task_text WHERE text = 'http://start.test/'")
    ended.db.run_text("DELETE FROM task WHERE id = ?", task)
    ended.db.run_text("DELETE FROM task_text WHERE id = ?", task)
    verdict, _ = repair_job(ended)
    assert verdict.ok
    assert {(row.position, row.closed) for row in jobs.sources(ended.db, 1)} == {(0, False)}


def test_a_lost_text_is_found_at_the_address_that_answered(store: Store, hire: Hire) -> None:
    """A text that is gone is written again only where an address has the very key."""
    hand = hire()
    hand.seed(link("http://a.test/x"))
    (claim,) = hand.claim()
    hand.finish(Result(claim, Outcome.DONE, url="http://A.test/x#top"))
    for shard in list(hand.held):
        hand.release(shard)
    store.db.run_text("DELETE FROM task_text")
    verdict, _ = repair_job(store)
    assert verdict.ok
    assert states(store.db) == {"http://a.test/x": "done"}


def test_a_record_that_is_taken_away_is_handed_back(ended: Store) -> None:
    """Nothing vanishes unseen: what could not be trusted is in the answer, as it was."""
    done_once = mend_and_crawl(ended, lambda db: db.run_text("UPDATE shop_product SET price = 12345 WHERE sku = 'only-7'"))
    (gone,) = done_once.withdrawn
    assert (gone.dataset, gone.key_text, gone.values["price"]) == ("shop_product", '["only-7"]', 12345)
    assert json.loads(json.dumps(gone.to_json()))["values"]["sku"] == "only-7"


# -- how ----------------------------------------------------------------------------------------


def test_a_repair_is_a_recorded_batch(ended: Store) -> None:
    """A take-over, a batch of kind repair that names what it put back, a release: numbered and sealed like all others."""
    assert ended.job is not None
    (shard, n), *_ = ended.db.rows_text("SELECT shard, n FROM ledger WHERE done > 0 ORDER BY n DESC")
    ((before,),) = ended.db.rows_text("SELECT watermark FROM shard WHERE shard = ?", (shard,))
    done_once = repair(ended, ended.job, batches=[(shard, n)])
    assert done_once.batches == {shard: before + 2}
    query = "SELECT kind, revisited FROM ledger WHERE shard = ? AND n > ? ORDER BY n"
    ((put_back,),) = ended.db.rows_text("SELECT done FROM ledger WHERE shard = ? AND n = ?", (shard, n))
    assert ended.db.rows_text(query, (shard, before)) == [("takeover", 0), ("repair", put_back), ("release", 0)]
    assert done_once.put_back == put_back > 0
    assert findings(ended) == set()
    assert ended.db.rows_text("SELECT owner FROM shard WHERE owner IS NOT NULL") == []


def test_a_batch_that_does_not_exist_is_refused(ended: Store) -> None:
    """And nothing is changed."""
    assert ended.job is not None
    before = dump(ended.db)
    with pytest.raises(UsageError, match="no batch 999"):
        repair(ended, ended.job, batches=[(0, 999)])
    assert dump(ended.db) == before


def test_a_living_worker_is_not_interfered_with(ended: Store, hire: Hire) -> None:
    """While somebody owns a shard a repair is refused, names the process, and changes nothing of the job."""
    assert ended.job is not None
    hire(1)
    ended.db.run_text("UPDATE task SET strikes = 9 WHERE state = 'done'")
    before = {name: rows for name, rows in dump(ended.db).items() if name != "worker"}
    with pytest.raises(UsageError, match=r"living workers \(process"):
        repair_job(ended)
    assert {name: rows for name, rows in dump(ended.db).items() if name != "worker"} == before


def test_a_repair_whose_commit_fails_changes_nothing(ended: Store) -> None:
    """All of it is one transaction: it happens whole, or not at all."""
    assert ended.job is not None
    ended.db.run_text("UPDATE task SET strikes = 9")
    ended.db.run_text("DELETE FROM shop_product WHERE sku = 's3'")
    found = verify(ended.db, ended.job, full=True).findings
    before = {name: rows for name, rows in dump(ended.db).items() if name != "worker"}
    faulty = Faulty(ended.db, "", "lost")
    ended.db = faulty  # type: ignore[assignment]
    with pytest.raises(OutcomeUnknown):
        repair(ended, ended.job, found)
    assert faulty.fired == 1
    ended.db = faulty.db
    assert {name: rows for name, rows in dump(ended.db).items() if name != "worker"} == before
    assert repair_job(ended)[0].ok


def test_nothing_to_mend_is_nothing_done(ended: Store) -> None:
    """A clean job is proved, and not a batch is written."""
    assert ended.job is not None
    before = past(ended.db)
    verdict, rounds = repair_job(ended)
    assert (verdict.ok, rounds) == (True, [])
    assert repair(ended, ended.job) == Repaired()
    assert past(ended.db) == before


def test_repair_asks_for_a_job(make_store: Callable[..., Store]) -> None:
    """A store that joined no job has nothing to mend."""
    with pytest.raises(UsageError, match="joined none"):
        repair_job(make_store())


def test_every_remedy_is_used_and_told() -> None:
    """The docs print which fault is mended in which way; each way is there for some fault, and was tested."""
    told = remedies()
    assert set(told) == set(FAULTS)
    assert {fault.remedy for fault in FAULTS.values()} == set(Remedy)
    assert {remedy for one in MENDED for remedy in (FAULTS[fault].remedy for fault in one.faults)} >= set(Remedy) - {Remedy.NONE}
