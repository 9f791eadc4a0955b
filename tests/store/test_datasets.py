"""Datasets: one row for one key, the same rows however the commits fall.

The model is a pure function: of all tasks that now emit a key in a slot the lowest task key's record counts,
and over slots the policy decides. Hypothesis draws what is emitted and every order and grouping of commits.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.batch import canonical_json
from limpet.errors import IncompatibleRecord, UsageError
from limpet.record import RecordType, field, record, record_type
from limpet.settings import Settings
from limpet.store import Store, datasets, open_store
from limpet.store.dialect import Row, quote
from limpet.store.tables import load_tables, pack, unpack
from tests.conftest import Databases, Hire
from tests.store.audit import audit
from tests.store.hands import (
    PROFILE,
    SPIDER,
    Hand,
    Product,
    column,
    columns_of,
    done,
    emitted,
    failed,
    link,
    mutated,
    pages,
    product_type,
    records,
    shape,
    table_name,
)

LAW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

Emits = dict[str, int]  # sku -> price


class Crawls:
    """Jobs of several slots on one database, whose tasks are committed by hand, by name."""

    def __init__(self, databases: Databases, kind: RecordType, slots: Iterable[str], names: Sequence[str], shards: int = 2) -> None:
        self.kind = kind
        self.stores: list[Store] = []
        self.hands: dict[str, Hand] = {}
        self.keys: dict[str, bytes] = {}
        dsn = databases.ready()
        for slot in slots:
            store = open_store(dsn, settings=Settings(shards=shards, lease_s=600.0))
            store.join(spider=SPIDER, slot=slot, profile=PROFILE)
            store.ensure_datasets(SPIDER, {table_name(kind): kind})
            hand = Hand.on(store)
            hand.take()
            links = {name: link(f"{name}.test/", shards=shards) for name in names}
            self.keys = {name: one.key for name, one in links.items()}
            hand.seed(*links.values())
            hand.claim()
            self.stores.append(store)
            self.hands[slot] = hand

    def commit(self, slot: str, batch: Sequence[tuple[str, Emits]]) -> None:
        """One commit of some tasks of a slot, with what each emits."""
        hand = self.hands[slot]
        claims = {claim.key: claim for claim in hand.claims.values()}
        hand.finish(
            *(
                done(claims[self.keys[name]], offers=[emitted(sku, price, kind=self.kind) for sku, price in emits.items()])
                for name, emits in batch
            )
        )

    def again(self, slot: str, names: Sequence[str]) -> None:
        """A person puts tasks back; they are claimed anew."""
        hand = self.hands[slot]
        for name in names:
            one = link(f"{name}.test/", shards=hand.job.shards)
            (task,) = column(hand.db, "id", "job = ? AND key = ?", (hand.job.id, one.key))
            hand.db.run(
                "put_request",
                job=hand.job.id,
                shard=one.shard,
                what="retry",
                argument=canonical_json({"tasks": [task]}),
                who="me",
            )
        for _ in range(2 * len(names) + 1):
            hand.claim()
        assert len(hand.claims) >= len(names)

    def rows(self) -> list[Row]:
        """What the dataset holds, without what is volatile."""
        return records(self.stores[0].db, table_name(self.kind))

    def __enter__(self) -> Crawls:
        """As it is."""
        return self

    def __exit__(self, *error: object) -> None:
        """Audit every job, unless the test ended early (Hypothesis ends one by an error of its own), and close."""
        try:
            for hand in self.hands.values() if error[0] is None else ():
                audit(hand.db, hand.job.id)
        finally:
            for hand in self.hands.values():
                hand.leave()
            for store in self.stores:
                store.close()


def winners(emits: dict[str, Emits], keys: dict[str, bytes]) -> dict[str, int]:
    """Of all tasks that emit a key, the lowest task key's record."""
    best: dict[str, tuple[bytes, int]] = {}
    for name, its in emits.items():
        for sku, price in its.items():
            best[sku] = min(best.get(sku, (b"\xff" * 17, 0)), (keys[name], price))
    return {sku: price for sku, (_, price) in best.items()}


def expected(policy: str, scope: str, by_slot: dict[str, dict[str, Emits]], keys: dict[str, bytes]) -> list[Row]:
    """The model: what the dataset must hold in the end, in whatever order it came there."""
    per_slot = {slot: winners(emits, keys) for slot, emits in sorted(by_slot.items())}
    if scope == "job":
        return sorted(((slot, sku, price) for slot, won in per_slot.items() for sku, price in won.items()), key=lambda r: (r[1], r[0]))
    versions: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for slot, won in per_slot.items():
        for sku, price in won.items():
            versions[sku].append((slot, price))
    rows: list[Row] = []
    for sku, its in versions.items():
        if policy == "history":
            rows += [(s, sku, p) for i, (s, p) in enumerate(its) if i == 0 or its[i - 1][1] != p]
        else:
            slot, price = its[-1] if policy == "replace" else its[0]
            rows.append((slot, sku, price))
    return by_key(rows)


def by_key(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of sku, then slot."""
    return sorted(rows, key=lambda row: (row[1], row[0]))


def ask_again(hand: Hand, shard: int, task: object) -> None:
    """A person asks for one task to be put back."""
    hand.db.run("put_request", job=hand.job.id, shard=shard, what="retry", argument=canonical_json({"tasks": [task]}), who="me")


NAMES = ("a", "b", "c", "d", "e")
emits = st.dictionaries(st.sampled_from(["x", "y", "z"]), st.integers(1, 3), max_size=3)
by_name = st.fixed_dictionaries(dict.fromkeys(NAMES, emits))
by_slot = st.fixed_dictionaries(dict.fromkeys("123", st.fixed_dictionaries(dict.fromkeys("abc", emits))))


def batches_of(draw: Callable[..., object], names: Sequence[str]) -> list[list[str]]:
    """An order of the tasks, cut into batches."""
    order = draw(st.permutations(list(names)))
    cuts = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    batches: list[list[str]] = [[]]
    for name, cut in zip(order, cuts, strict=True):  # type: ignore[call-overload]
        if cut and batches[-1]:
            batches.append([])
        batches[-1].append(name)
    return batches


# -- inside a job -----------------------------------------------------------------------------------


@settings(max_examples=25, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), what=by_name)
def test_the_lower_task_key_wins_in_any_order_and_grouping_of_commits(
    databases: Databases, data: st.DataObject, what: dict[str, Emits]
) -> None:
    """10: the same rows, and so the same hash of the table, whatever the timing; over two shards."""
    with Crawls(databases, Product, [""], NAMES) as crawls:
        for batch in batches_of(data.draw, NAMES):
            crawls.commit("", [(name, what[name]) for name in batch])
        assert crawls.rows() == expected("replace", "job", {"": what}, crawls.keys)


def test_every_order_of_three_tasks_ends_in_the_same_rows(databases: Databases) -> None:
    """All six, one by one and in pairs: exhaustive where Hypothesis only draws."""
    what = {"a": {"x": 1, "y": 1}, "b": {"x": 2}, "c": {"x": 3, "y": 3}}
    seen = set()
    for order in itertools.permutations("abc"):
        for cut in (1, 2, 3):
            with Crawls(databases, Product, [""], "abc") as crawls:
                crawls.commit("", [(name, what[name]) for name in order[:cut]])
                if order[cut:]:
                    crawls.commit("", [(name, what[name]) for name in order[cut:]])
                seen.add(tuple(crawls.rows()))
                wanted = expected("replace", "job", {"": what}, crawls.keys)
    assert seen == {tuple(wanted)}


def test_letting_the_last_commit_win_depends_on_timing(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 10: whoever comes last overwrites."""
    monkeypatch.setattr(datasets, "decide", mutated(datasets.decide, "task_key < standing.task_key", "task_key != standing.task_key"))
    seen = set()
    for order in ("ab", "ba"):
        with Crawls(databases, Product, [""], "ab") as crawls:
            for name in order:
                crawls.commit("", [(name, {"x": ord(name)})])
            seen.add(tuple(crawls.rows()))
    assert len(seen) == 2


@settings(max_examples=25, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), first=by_name, then=by_name)
def test_a_task_that_runs_again_replaces_what_it_emitted_and_the_next_offer_takes_the_place(
    databases: Databases, data: st.DataObject, first: dict[str, Emits], then: dict[str, Emits]
) -> None:
    """Retraction: in the end only what each task emitted last counts, in any order of first and second runs (P33)."""
    with Crawls(databases, Product, [""], NAMES) as crawls:
        for batch in batches_of(data.draw, NAMES):
            crawls.commit("", [(name, first[name]) for name in batch])
        back = sorted(data.draw(st.sets(st.sampled_from(NAMES), min_size=1)))
        crawls.again("", back)
        for batch in batches_of(data.draw, back):
            crawls.commit("", [(name, then[name]) for name in batch])
        last = first | {name: then[name] for name in back}
        assert crawls.rows() == expected("replace", "job", {"": last}, crawls.keys)


def test_retraction_removes_promotes_and_counts(databases: Databases) -> None:
    """Of two offers the winner goes: the other takes its place; then it goes too, and the row with it."""
    low, high = sorted("ab", key=lambda name: link(f"{name}.test/").key)
    with Crawls(databases, Product, [""], "ab") as crawls:
        crawls.commit("", [(low, {"x": 1, "y": 9})])
        crawls.commit("", [(high, {"x": 2})])
        assert crawls.rows() == [("", "x", 1), ("", "y", 9)]
        crawls.again("", [low])
        crawls.commit("", [(low, {})])
        assert crawls.rows() == [("", "x", 2)]
        crawls.again("", [high])
        crawls.commit("", [(high, {})])
        assert crawls.rows() == []
        assert column(crawls.stores[0].db, "COUNT(*)", table="offer") == [0]


def test_without_kept_offers_a_retraction_would_lose_a_record(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: offers that lost are thrown away."""
    monkeypatch.setattr(datasets.Writer, "_keep_offer", lambda writer, bid: None)
    low, high = sorted("ab", key=lambda name: link(f"{name}.test/").key)
    with Crawls(databases, Product, [""], "ab") as crawls:
        crawls.commit("", [(low, {"x": 1})])
        crawls.commit("", [(high, {"x": 2})])
        crawls.again("", [low])
        crawls.commit("", [(low, {})])
        assert crawls.rows() == []


def test_a_run_that_fails_keeps_what_the_run_before_it_stored(hire: Hire) -> None:
    """A revisit that ends as dead has emitted nothing: the record of the try that was done stands (23, I5)."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim()
    hand.finish(done(claim, offers=[emitted("x", 1)]))
    ask_again(hand, 0, claim.id)
    hand.claim()
    hand.claim()
    (again,) = hand.claims.values()
    hand.finish(replace(failed(again), offers=(emitted("x", 2),)))
    assert records(hand.db) == [("", "x", 1)]
    audit(hand.db, hand.job.id)


def test_a_sku_that_two_hosts_show_is_one_row(hire: Hire) -> None:
    """The shard is never part of a record's key: pages of two shards, in one commit and in two."""
    hand = hire()
    hand.seed(*pages(0, 2), *pages(3, 2))
    claims = hand.claim()
    hand.finish(*(done(claim, offers=[emitted("same", 7)]) for claim in claims[:2] + claims[2:3]))
    hand.finish(done(claims[3], offers=[emitted("same", 8)]))
    assert [sku for _, sku, _ in records(hand.db)] == ["same"]
    assert column(hand.db, "COUNT(*)", table="offer") == [3]
    audit(hand.db, hand.job.id)


def test_conflicts_and_kept_offers_are_counted(hire: Hire) -> None:
    """Different content for one key is a conflict; the same content is not."""
    hand = hire(0)
    hand.seed(*pages(0, 3))
    claims = sorted(hand.claim(), key=lambda claim: claim.key)
    answer = hand.finish(done(claims[0], offers=[emitted("x", 1)]))
    assert answer.deltas == {"shop_product": [1, 0, 0, 0, 0]}
    answer = hand.finish(done(claims[1], offers=[emitted("x", 1)]))
    assert answer.deltas == {"shop_product": [0, 0, 1, 0, 0]}
    answer = hand.finish(done(claims[2], offers=[emitted("x", 2)]))
    assert answer.deltas == {"shop_product": [0, 0, 1, 0, 1]}
    audit(hand.db, hand.job.id)


def test_what_is_volatile_makes_no_conflict_and_no_other_content(hire: Hire) -> None:
    """The time of the fetch differs with every kill; the content does not."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    claims = sorted(hand.claim(), key=lambda claim: claim.key)
    hand.finish(done(claims[0], offers=[emitted("x", 1, seen=111)]))
    answer = hand.finish(done(claims[1], offers=[emitted("x", 1, seen=222)]))
    assert answer.deltas["shop_product"][4] == 0
    assert emitted("x", 1, seen=111).content == emitted("x", 1, seen=222).content
    assert emitted("x", 1, seen=111).content != emitted("x", 2, seen=111).content


# -- over slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["replace", "keep", "history"])
@settings(max_examples=20, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), what=st.fixed_dictionaries(dict.fromkeys(("1", "2", "3"), st.fixed_dictionaries(dict.fromkeys("abc", emits)))))
def test_slots_in_any_order_and_interleaved_end_in_the_same_rows(
    databases: Databases, policy: str, data: st.DataObject, what: dict[str, dict[str, Emits]]
) -> None:
    """10: replace takes the greatest slot, keep the smallest, history a version where the content changed."""
    kind = product_type("spider", policy)
    with Crawls(databases, kind, ["1", "2", "3"], "abc") as crawls:
        order = data.draw(st.permutations([(slot, name) for slot in what for name in "abc"]))
        for slot, name in order:
            crawls.commit(slot, [(name, what[slot][name])])
        assert crawls.rows() == expected(policy, "spider", what, crawls.keys)


@pytest.mark.parametrize("policy", ["replace", "keep", "history"])
def test_slots_in_their_order_end_as_the_policy_says(databases: Databases, policy: str) -> None:
    """The plain case: three sweeps, one after the other."""
    what = {"1": {"a": {"x": 1}, "b": {"y": 5}}, "2": {"a": {"x": 1}, "b": {}}, "3": {"a": {"x": 2}, "b": {"y": 5}}}
    with Crawls(databases, product_type("spider", policy), ["1", "2", "3"], "ab") as crawls:
        for slot, its in what.items():
            crawls.commit(slot, [*its.items()])
        rows = {
            "replace": [("3", "x", 2), ("3", "y", 5)],
            "keep": [("1", "x", 1), ("1", "y", 5)],
            "history": [("1", "x", 1), ("3", "x", 2), ("1", "y", 5)],
        }
        assert crawls.rows() == rows[policy] == expected(policy, "spider", what, crawls.keys)


def test_scope_job_keeps_the_rows_of_each_slot_apart(databases: Databases) -> None:
    """The default: unique by (job, key)."""
    with Crawls(databases, Product, ["1", "2"], "a") as crawls:
        for slot, price in (("2", 2), ("1", 1)):
            crawls.commit(slot, [("a", {"x": price})])
        assert crawls.rows() == [("1", "x", 1), ("2", "x", 2)]


@settings(max_examples=25, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), first=by_name, then=by_name, before=emits)
def test_retraction_in_a_history_closes_the_version_and_another_offer_opens_it(
    databases: Databases, data: st.DataObject, first: dict[str, Emits], then: dict[str, Emits], before: Emits
) -> None:
    """What counts in a slot is what its tasks emitted last, whichever of them came first."""
    with Crawls(databases, product_type("spider", "history"), ["1", "2"], NAMES) as crawls:
        crawls.commit("1", [("a", before)])
        for batch in batches_of(data.draw, NAMES):
            crawls.commit("2", [(name, first[name]) for name in batch])
        back = sorted(data.draw(st.sets(st.sampled_from(NAMES), min_size=1)))
        crawls.again("2", back)
        for batch in batches_of(data.draw, back):
            crawls.commit("2", [(name, then[name]) for name in batch])
        last = first | {name: then[name] for name in back}
        assert crawls.rows() == expected("history", "spider", {"1": {"a": before}, "2": last}, crawls.keys)


def test_a_version_that_nobody_emits_any_more_is_closed_and_not_forgotten(databases: Databases) -> None:
    """`history`: the row stays, closed, and the view no longer shows it."""
    with Crawls(databases, product_type("spider", "history"), ["1"], "a") as crawls:
        crawls.commit("1", [("a", {"x": 1})])
        crawls.again("1", ["a"])
        crawls.commit("1", [("a", {})])
        assert crawls.rows() == []
        assert crawls.stores[0].db.rows_text("SELECT sku, price, _closed FROM shop_product") == [("x", 1, "1")]


# -- tables -----------------------------------------------------------------------------------------


def test_a_dataset_is_a_real_table_with_a_real_unique_key(store: Store) -> None:
    """Named after spider and type; the key is enforced by the database itself, not by our code."""
    sql = "INSERT INTO shop_product VALUES (?, 1, ?, '', '', ?, ?, 1, 1, 1, 0, 1, '', 'x', 1, 0)"
    store.db.run_text(sql, (1, b"k", b"c", b"t"))
    from limpet.errors import PoisonRow

    with pytest.raises(PoisonRow):
        store.db.run_text(sql, (2, b"k", b"c", b"t"))
    assert column(store.db, "COUNT(*)", table="shop_product") == [1]


def test_the_view_shows_what_a_user_declared_and_nothing_of_ours(store: Store) -> None:
    """`slot` and the fields."""
    assert columns_of(store.db, "shop_product_view") == ["slot", "sku", "price", "seen"]


@record(key="sku", name="product")
class Wider:
    """With a new optional field in the middle."""

    sku: str
    colour: str | None = None
    price: int = 0
    seen: int = field(default=0, volatile=True)


@record(key="sku", name="product")
class Other:
    """With a price of another type."""

    sku: str
    price: str
    seen: int = field(default=0, volatile=True)


def test_a_new_optional_field_adds_a_column_and_keeps_rows_and_offers(hire: Hire) -> None:
    """At start, outside any batch; offers that were kept before it are still those of their own fields."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    low, high = sorted(hand.claim(), key=lambda claim: claim.key)
    hand.finish(done(low, offers=[emitted("x", 1)]), done(high, offers=[emitted("x", 2, seen=5)]))
    hand.store.ensure_datasets("shop", {"shop_product": record_type(Wider)})
    assert hand.db.rows_text("SELECT sku, colour, price FROM shop_product_view") == [("x", None, 1)]
    ask_again(hand, 0, low.id)
    hand.claim()
    hand.claim()
    hand.finish(*(done(claim) for claim in hand.claims.values()))
    assert hand.db.rows_text("SELECT sku, colour, price, seen FROM shop_product_view") == [("x", None, 2, 5)]
    audit(hand.db, hand.job.id)


def test_an_incompatible_change_is_refused_and_changes_nothing(store: Store) -> None:
    """Another type for a field, another key (31): say what differs, touch nothing."""
    before = shape(store.db)
    with pytest.raises(IncompatibleRecord, match="price"):
        store.ensure_datasets("shop", {"shop_product": record_type(Other)})
    with pytest.raises(IncompatibleRecord, match="policy"):
        store.ensure_datasets("shop", {"shop_product": product_type("job", "keep")})
    assert shape(store.db) == before


def test_making_a_table_that_is_there_is_nothing(store: Store) -> None:
    """Every start asks for its tables."""
    before = shape(store.db)
    store.ensure_datasets("shop", {"shop_product": Product})
    assert shape(store.db) == before


def test_datasets_can_be_read_without_the_spiders_code(store: Store) -> None:
    """Their definitions are in the database."""
    (table,) = load_tables(store.db).values()
    assert (table.name, table.type.key, [c.name for c in table.type.columns]) == (
        "shop_product",
        ("sku",),
        ["sku", "price", "seen"],
    )
    assert load_tables(store.db, "another") == {}


@pytest.mark.parametrize("name", ["Robert'); DROP TABLE task;--", "", "1a", "a" * 64, "a-b", "ä"])
def test_a_name_that_is_no_identifier_is_refused(store: Store, name: str) -> None:
    """Tables and columns are made of checked names only."""
    with pytest.raises(UsageError):
        quote(name)
    with pytest.raises(UsageError):
        store.ensure_datasets("shop", {name: Product})
    assert column(store.db, "COUNT(*)", table="dataset") == [1]


@pytest.mark.parametrize("name", ["order_by", "groups", "table_1", "value", "n"])
def test_a_field_may_have_any_name_that_a_record_type_takes(databases: Databases, name: str) -> None:
    """Names are always quoted, and Limpet's own columns begin with an underscore."""
    make = {"__annotations__": {"sku": str, name: int}, "__module__": __name__}
    kind = record_type(record(key="sku", name="odd")(type("Odd", (), make)))
    store = open_store(databases.ready())
    store.ensure_datasets("shop", {"shop_odd": kind})
    assert store.db.rows_text(f'SELECT "{name}" FROM shop_odd_view') == []
    store.close()


values_of_columns = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(),
    st.binary(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(values_of_columns))
def test_packed_offers_come_back_as_they_were(values: list[object]) -> None:
    """Law: unpack(pack(x)) is x, for everything a column can hold, in whatever order it is asked for."""
    fields = [f"f{number}" for number in range(len(values))]
    assert unpack(pack(fields, values), fields) == values
    assert unpack(pack(fields, values), ["new", *reversed(fields)]) == [None, *reversed(values)]


def test_a_try_that_emits_one_key_twice_stores_the_last(hire: Hire) -> None:
    """The last wins, and the row is counted once."""
    hand = hire(0)
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim()
    offers = [emitted("a", 1), emitted("b", 5), emitted("a", 2), emitted("a", 3)]
    hand.finish(done(claim, offers=offers))
    assert records(hand.db) == [("", "a", 3), ("", "b", 5)]
    audit(hand.db, hand.job.id)


def test_many_records_of_one_batch_are_all_written(hire: Hire) -> None:
    """More than one statement's worth: none is lost at the seams."""
    hand = hire(0)
    hand.seed(*pages(0, 3))
    claims = hand.claim()
    for number, claim in zip((1, 255, 1234), claims, strict=True):
        offers = [emitted(f"{number}-{i}", i) for i in range(number)]
        assert hand.finish(done(claim, offers=offers)).deltas["shop_product"][0] == number
    assert column(hand.db, "COUNT(*)", table="shop_product") == [1490]
    audit(hand.db, hand.job.id)
