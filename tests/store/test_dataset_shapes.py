"""A dataset is one spider's, and whoever writes to it knows all of its fields: else nothing is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from limpet.batch import Claim, Offer
from limpet.engine.spider import Spider
from limpet.errors import DatasetChanged, IncompatibleRecord, UsageError
from limpet.record import COLUMNS_MAX, RecordType, record, record_type
from limpet.settings import Settings
from limpet.store import Store, datasets, open_store
from limpet.store.opening import connect
from limpet.store.postgres import STAGE_TYPES
from limpet.store.verify import verify
from tests.conftest import Databases
from tests.store.hands import PROFILE, SHARDS, Hand, done, pages

on_postgres = pytest.mark.parametrize("databases", ["postgres"], indirect=True)
on_mysql = pytest.mark.parametrize("databases", ["mysql"], indirect=True)

TABLE = "shop_thing"


def kind_of(fields: Mapping[str, Any], *, name: str = "thing", doc: str = "", **options: Any) -> RecordType:
    """A record type of some fields, whose key is `k`."""
    made = type("Thing", (), {"__annotations__": dict(fields), "__module__": __name__, "__doc__": doc})
    return record_type(record(key="k", name=name, **options)(made))


OLD = kind_of({"k": str, "title": str})
NEW = kind_of({"k": str, "price": int | None, "title": str})
TURNED = kind_of({"title": str, "k": str}, doc="The same fields in another order, and what they mean.")


def thing(kind: RecordType, **values: object) -> Offer:
    """A record as a handler offers it."""
    assert kind.cls is not None
    frozen = kind.freeze(kind.cls(**values))
    return Offer(TABLE, frozen.key, frozen.key_text, frozen.content, frozen.values)


@dataclass
class Shift:
    """Two workers of one job. The older one's spider file is older, and so is its task's claim to every record: its key is lower."""

    older: Hand
    newer: Hand
    low: Claim
    high: Claim

    def rows(self, columns: str) -> list[tuple[object, ...]]:
        """What the dataset holds."""
        return [tuple(row) for row in self.newer.db.rows_text(f"SELECT {columns} FROM {TABLE} ORDER BY k")]


@contextmanager
def shift(databases: Databases, old: RecordType, new: RecordType) -> Iterator[Shift]:
    """The newer one changes the table after the older one has claimed."""
    dsn = databases.ready()
    stores: list[Store] = []
    hands: list[Hand] = []
    for shard, kind in ((0, old), (1, new)):
        store = open_store(dsn, settings=Settings(shards=SHARDS, lease_s=600.0))
        stores.append(store)
        store.join(spider="shop", profile=PROFILE)
        store.ensure_datasets("shop", {TABLE: kind})
        hands.append(hand := Hand.on(store))
        hand.take(shard)
        hand.seed(*pages(shard, 20, hosts=20), shard=shard)
        hand.claim(99, shard)
    older, newer = hands
    high = max(newer.claims.values(), key=lambda claim: claim.key)
    low = min(older.claims.values(), key=lambda claim: claim.key)
    assert low.key < high.key
    yield Shift(older, newer, low, high)
    for hand in hands:
        hand.leave()
    for store in stores:
        store.close()


# -- a table that grows under somebody's hands ---------------------------------------------------------


def test_a_worker_with_an_older_spider_file_writes_nothing_into_a_wider_table(databases: Databases) -> None:
    """Its batch is refused as a whole, by a message that says what to do; with the same file it cannot begin again."""
    with shift(databases, OLD, NEW) as crew:
        crew.newer.finish(done(crew.high, offers=[thing(NEW, k="K", price=5, title="new")]))
        with pytest.raises(DatasetChanged, match=r"it has price\): nothing was written into it; start this worker again with the file"):
            crew.older.finish(done(crew.low, offers=[thing(OLD, k="K", title="old"), thing(OLD, k="L", title="old")]))
        assert crew.rows("k, price, title") == [("K", 5, "new")]
        with pytest.raises(IncompatibleRecord, match="'price' is gone"):
            crew.older.store.ensure_datasets("shop", {TABLE: OLD})
        crew.older.store.ensure_datasets("shop", {TABLE: NEW})
        crew.older.finish(done(crew.low, offers=[thing(NEW, k="K", price=None, title="old")]))
        assert crew.rows("k, price, title") == [("K", None, "old")]
        verdict = verify(crew.newer.db, crew.newer.job, full=True)
        assert verdict.ok, verdict.findings


def test_without_the_look_at_its_fields_such_a_worker_tears_a_record(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the title of one page and the price of another are one row, which no page gave."""
    monkeypatch.setattr(datasets, "check_shapes", lambda db, tables, written: None)
    with shift(databases, OLD, NEW) as crew:
        crew.newer.finish(done(crew.high, offers=[thing(NEW, k="K", price=5, title="new")]))
        crew.older.finish(done(crew.low, offers=[thing(OLD, k="K", title="old")]))
        assert crew.rows("k, price, title") == [("K", 5, "old")]
        assert "content" in verify(crew.newer.db, crew.newer.job, full=True).found


def test_a_worker_that_takes_a_record_back_is_refused_alike(databases: Databases) -> None:
    """A task that runs again and emits nothing changes rows too: the next offer would take the place without its new fields."""
    with shift(databases, OLD, OLD) as crew:
        crew.older.finish(done(crew.low, offers=[thing(OLD, k="K", title="old")]))
        crew.older.db.run(
            "put_request", job=crew.older.job.id, shard=0, what="retry", argument=json.dumps({"tasks": [crew.low.id]}), who="me"
        )
        for _ in range(3):
            crew.older.claim(99, 0)
        again = crew.older.claims[crew.low.id]
        crew.newer.store.ensure_datasets("shop", {TABLE: NEW})
        with pytest.raises(DatasetChanged):
            crew.older.finish(done(again))
        assert crew.rows("k, title") == [("K", "old")]


def test_fields_in_another_order_and_other_words_about_them_keep_nobody_from_writing(databases: Databases) -> None:
    """Offers are kept by the names of their fields: whoever put them in, and whoever lets one take a record's place."""
    with shift(databases, OLD, TURNED) as crew:
        crew.newer.finish(done(crew.high, offers=[thing(TURNED, k="K", title="turned")]))
        crew.older.finish(done(crew.low, offers=[thing(OLD, k="K", title="old")]))
        assert crew.rows("k, title") == [("K", "old")]
        crew.older.db.run(
            "put_request", job=crew.older.job.id, shard=0, what="retry", argument=json.dumps({"tasks": [crew.low.id]}), who="me"
        )
        for _ in range(3):
            crew.older.claim(99, 0)
        crew.older.finish(done(crew.older.claims[crew.low.id]))
        assert crew.rows("k, title") == [("K", "turned")]
        verdict = verify(crew.newer.db, crew.newer.job, full=True)
        assert verdict.ok, verdict.findings


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spider", "kind"), [("shop_new", "thing"), ("shop", "new_thing")])
def test_a_table_is_one_spiders_and_one_types(databases: Databases, spider: str, kind: str) -> None:
    """Two spiders, or types, whose names come to one would write each other's records away."""
    store = open_store(databases.ready())
    store.ensure_datasets("shop", {"shop_new_thing": kind_of({"k": str}, name="new_thing")})
    if (spider, kind) == ("shop", "new_thing"):
        store.ensure_datasets(spider, {"shop_new_thing": kind_of({"k": str}, name=kind)})
    else:
        with pytest.raises(UsageError, match="holds records of type new_thing of the spider shop; give the record type another name="):
            store.ensure_datasets(spider, {"shop_new_thing": kind_of({"k": str}, name=kind)})
    store.close()


@pytest.mark.parametrize("beside", ["_view", "_task"])
def test_a_table_is_not_named_like_what_another_one_has_beside_it(databases: Databases, beside: str) -> None:
    """In either order; an index shares its name with no table on PostgreSQL and SQLite, and everywhere it would confuse people."""
    store = open_store(databases.ready())
    store.ensure_datasets("shop", {f"shop_thing{beside}": kind_of({"k": str}, name=f"thing{beside}")})
    with pytest.raises(UsageError, match=f"there is a shop_thing{beside} already"):
        store.ensure_datasets("shop", {"shop_thing": kind_of({"k": str})})
    store.close()


@pytest.mark.parametrize(
    ("spider", "names", "message"),
    [
        ("stage", ["link"], "keep for themselves"),
        ("sqlite", ["thing"], "keep for themselves"),
        ("pg", ["thing"], "keep for themselves"),
        ("s" * 30, ["t" * 28], "more than 58 characters"),
        ("shop", ["item", "item_task"], "would both have a shop_item_task"),
        ("shop", ["item_view", "item"], "would both have a shop_item_view"),
    ],
)
def test_names_that_some_database_cannot_have_are_refused_with_the_spider(spider: str, names: list[str], message: str) -> None:
    """So that a spider that runs on one of them runs on each."""
    kinds = [kind_of({"k": str}, name=name).cls for name in names]
    with pytest.raises(UsageError, match=message):
        Spider(spider, records=[kind for kind in kinds if kind]).record_types()


def test_every_staging_table_is_such_a_name() -> None:
    """They are temporary, and hide a table of the same name."""
    for table in STAGE_TYPES:
        spider, _, name = table.partition("_")
        with pytest.raises(UsageError, match="keep for themselves"):
            Spider(spider, records=[kind for kind in [kind_of({"k": str}, name=name).cls] if kind]).record_types()


# -- rows that are too wide ------------------------------------------------------------------------


@on_mysql
def test_a_row_that_is_too_wide_is_its_tasks_own_fault(databases: Databases) -> None:
    """InnoDB keeps the beginnings of long texts in the row: the task is a dead letter, and the others are written."""
    fields = {"k": str, **{f"f{number}": str for number in range(250)}}
    wide = kind_of(fields)
    with shift(databases, wide, wide) as crew:
        good, bad = (
            thing(wide, k=key, **{name: text for name in fields if name != "k"}) for key, text in (("good", "x"), ("bad", "x" * 39))
        )
        other = next(claim for claim in crew.older.claims.values() if claim.id != crew.low.id)
        crew.older.send(crew.older.part(0, done(crew.low, offers=[good]), done(other, offers=[bad])))
        assert crew.rows("k") == [("good",)]
        (letter,) = crew.newer.db.rows_text("SELECT task, reason FROM attempt WHERE outcome = 'dead'")
        assert (letter[0], "poison" in letter[1]) == (other.id, True)


@on_mysql
def test_too_many_fields_for_a_table_are_refused_in_few_words(databases: Databases) -> None:
    """At the start, before anything is asked for."""
    store = open_store(databases.ready())
    fields = {"k": str, **{f"a_field_with_a_name_of_some_length_{number}": str for number in range(COLUMNS_MAX - 1)}}
    with pytest.raises(IncompatibleRecord, match=f"{COLUMNS_MAX} fields of thing are too many for a table there") as refused:
        store.ensure_datasets("shop", {TABLE: kind_of(fields)})
    assert len(str(refused.value)) < 500
    store.close()


# -- PostgreSQL's schemas ----------------------------------------------------------------------------


def run_as_admin(dsn: str, *statements: str) -> None:
    """Statements of somebody who may everything."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as line:
        for statement in statements:
            line.execute(statement)


def crawled(dsn: str) -> None:
    """A job, a dataset, a record, and the proof of it."""
    store = open_store(dsn, settings=Settings(shards=SHARDS, lease_s=600.0))
    store.join(spider="shop", profile=PROFILE)
    store.ensure_datasets("shop", {TABLE: OLD})
    hand = Hand.on(store)
    hand.take()
    hand.seed(*pages(0, 3), shard=0)
    claim = hand.claim(9)[0]
    hand.finish(done(claim, offers=[thing(OLD, k="K", title="t")]))
    verdict = verify(hand.db, hand.job, full=True)
    assert verdict.ok, verdict.findings
    hand.leave()
    store.close()


def schemas_of(dsn: str, *names: str) -> list[str]:
    """Where some tables are."""
    db = connect(dsn)
    found = [row[0] for name in names for row in db.rows_text("SELECT schemaname FROM pg_tables WHERE tablename = ?", (name,))]
    db.close()
    return found


@on_postgres
def test_a_schema_that_comes_before_the_tables_own_changes_nothing(databases: Databases) -> None:
    """As that of a role's own name does by default: the tables are where they are, and new ones are made beside them."""
    dsn = databases.new()
    open_store(dsn).close()
    run_as_admin(dsn, "CREATE SCHEMA postgres")
    crawled(dsn)
    assert schemas_of(dsn, "meta", TABLE) == ["public", "public"]


@on_postgres
@pytest.mark.parametrize("name", ["My-Crawl", "crawl", 'a"b'])
def test_a_schema_may_have_any_name(databases: Databases, name: str) -> None:
    """Named in the address, as libpq does."""
    dsn = databases.new()
    quoted = '"' + name.replace('"', '""') + '"'
    run_as_admin(dsn, f"CREATE SCHEMA {quoted}")
    path = re.sub(r"[^A-Za-z0-9]", lambda found: f"%{ord(found[0]):02X}", f"-csearch_path={quoted}")
    crawled(f"{dsn}{'&' if '?' in dsn else '?'}options={path}")
    assert schemas_of(dsn, "meta", TABLE) == [name, name]
