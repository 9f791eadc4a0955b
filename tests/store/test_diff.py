"""`limpet diff`: new, gone and changed from one slot to another, beside what a person would find by comparing two lists."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet import reading
from limpet.errors import UsageError
from limpet.record import RecordType
from limpet.store import Store, diff
from limpet.store.diff import Change, Counted, changes, pair_of
from limpet.store.views import snapshot
from tests.conftest import Databases, on_sqlite
from tests.store.hands import SPIDER, Hand, done, emitted, found_job, pages, product_type, table_name
from tests.store.test_datasets import Crawls, Emits, batches_of, winners

LAW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
BY_JOB = product_type()
HISTORY = product_type("spider", "history")
NAMES = ("a", "b", "c")

Told = dict[str, tuple[object, ...]]


def told(store: Store, older: str, newer: str, **more: object) -> tuple[Told, Counted]:
    """What `diff` says: sku -> (what, old price, new price); its numbers."""
    counted = Counted()
    with snapshot(store.db) as db:
        found = list(changes(db, pair_of(db, "product", older, newer, **more), counted))  # type: ignore[arg-type]
    keys = [side(change)[0] for change in found]
    assert len(keys) == len(set(keys))
    return {str(side(c)[0]): (c.what, c.old and c.old[1], c.new and c.new[1]) for c in found}, counted


def side(change: Change) -> tuple[object, ...]:
    """The side of a change that is there."""
    found = change.new or change.old
    assert found is not None
    return found


def expected(old: dict[str, int], new: dict[str, int]) -> Told:
    """The model: two lists of prices, compared."""
    gone = {sku: ("gone", price, None) for sku, price in old.items() if sku not in new}
    fresh = {sku: ("new", None, price) for sku, price in new.items() if sku not in old}
    return gone | fresh | {sku: ("changed", old[sku], new[sku]) for sku in old.keys() & new.keys() if old[sku] != new[sku]}


emits = st.dictionaries(st.sampled_from("vwxyz"), st.integers(1, 3), max_size=4)
by_slot = st.fixed_dictionaries(dict.fromkeys("123", st.fixed_dictionaries(dict.fromkeys(NAMES, emits))))


@settings(max_examples=15, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), kind=st.sampled_from([BY_JOB, HISTORY]), what=by_slot)
def test_a_diff_is_what_comparing_both_slots_gives(
    databases: Databases, data: st.DataObject, kind: RecordType, what: dict[str, dict[str, Emits]]
) -> None:
    """Rows of jobs and versions of a history alike; slots may be run in any order, and tasks run again."""
    with Crawls(databases, kind, "123", NAMES) as crawls:
        for slot in data.draw(st.permutations("123")):
            for batch in batches_of(data.draw, NAMES):
                crawls.commit(slot, [(name, what[slot][name]) for name in batch])
        again = data.draw(st.sampled_from("123"))
        then = {name: data.draw(emits) for name in NAMES[:2]}
        crawls.again(again, NAMES[:2])
        crawls.commit(again, list(then.items()))
        what = {**what, again: what[again] | then}
        won = {slot: winners(what[slot], crawls.keys) for slot in "123"}
        for older, newer in ("12", "13", "23", "31"):
            found, counted = told(crawls.stores[0], older, newer)
            assert found == expected(won[older], won[newer])
            assert counted.same == len(won[older].keys() & won[newer].keys()) - counted.changed
            assert counted.new + counted.gone + counted.changed == len(found)


def filled(databases: Databases, kind: RecordType, *slots: dict[str, tuple[int, int]]) -> Crawls:
    """Slots 1, 2, ... with a task each, whose records are sku -> (price, seen)."""
    crawls = Crawls(databases, kind, "123"[: len(slots)], ["a"])
    for slot, products in zip("123", slots, strict=False):
        hand = crawls.hands[slot]
        (claim,) = hand.claims.values()
        hand.finish(done(claim, offers=[emitted(sku, price, seen=seen, kind=kind) for sku, (price, seen) in products.items()]))
    return crawls


def test_volatile_fields_make_no_change_and_fields_may_be_chosen(databases: Databases) -> None:
    """`seen` differs in every slot; only what was asked for is compared."""
    with filled(databases, BY_JOB, {"x": (1, 10), "y": (2, 10)}, {"x": (1, 20), "y": (3, 20)}) as crawls:
        store = crawls.stores[0]
        assert told(store, "1", "2")[0] == {"y": ("changed", 2, 3)}
        assert told(store, "1", "2", fields=["sku"]) == ({}, Counted(same=2))
        with pytest.raises(UsageError, match="no lasting field 'seen'; it has sku, price"):
            told(store, "1", "2", fields=["seen"])


def test_what_cannot_be_compared_is_refused(databases: Databases) -> None:
    """One row over all slots, the same slot twice, a slot without a job, a dataset that is not there."""
    with filled(databases, product_type("spider"), {"x": (1, 1)}, {"x": (2, 1)}) as crawls:
        store = crawls.stores[0]
        with pytest.raises(UsageError, match="keeps one row over all slots"):
            told(store, "1", "2")
        with pytest.raises(UsageError, match="'1' twice"):
            told(store, "1", "1")
        with pytest.raises(UsageError, match="has no job of slot '9'"):
            told(store, "1", "9")
        with pytest.raises(UsageError, match="has no dataset 'nothing'"):
            pair_of(store.db, "nothing", "1", "2")


def test_differences_come_back_as_python_values(databases: Databases) -> None:
    """`limpet.open(...).diff(...)`, in the same order and with the same words."""
    older, newer = {"x": (1, 1), "y": (2, 1), "z": (3, 1)}, {"w": (9, 1), "y": (5, 1), "z": (3, 2)}
    with filled(databases, BY_JOB, older, newer) as crawls, reading.open(crawls.stores[0].dsn) as db:
        found = {one.key["sku"]: one for one in db.diff("product", "1", "2")}
        assert {sku: one.what for sku, one in found.items()} == {"x": "gone", "w": "new", "y": "changed"}
        assert (found["y"].old, found["y"].new) == ({"sku": "y", "price": 2}, {"sku": "y", "price": 5})
        assert (found["y"].fields, found["w"].old, found["x"].new) == (("price",), None, None)
        assert [one.what for one in db.diff("product", "1", "2", fields=["sku"])] == [o.what for o in found.values() if not o.fields]


# -- many rows ----------------------------------------------------------------------------------


@on_sqlite
def test_a_diff_of_many_rows_takes_constant_memory(databases: Databases, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times the rows, the same peak; pages end anywhere in the keys."""
    peaks = {}
    for number, rows in enumerate((400, 8000)):
        for slot in (f"{number}a", f"{number}b"):
            found_job(store, slot)
            store.ensure_datasets(SPIDER, {table_name(BY_JOB): BY_JOB})
            hand = Hand.on(store)
            hand.take()
            hand.seed(*pages(0, 1))
            (claim,) = hand.claim(1, 0)
            prices = [(i, i + (slot.endswith("b") and i % 3 == 0)) for i in range(rows) if i % 7 or slot.endswith("a")]
            hand.finish(done(claim, offers=[emitted(f"s{i}", price) for i, price in prices]))
            hand.leave()
        monkeypatch.setattr(diff, "PAGE_ROWS", 97)
        counted = Counted()
        with snapshot(store.db) as db:
            tracemalloc.start()
            for _ in changes(db, pair_of(db, "product", f"{number}a", f"{number}b"), counted):
                pass
            peaks[rows] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        gone = len(range(0, rows, 7))
        changed = len(range(0, rows, 3)) - len(range(0, rows, 21))
        assert counted == Counted(new=0, gone=gone, changed=changed, same=rows - gone - changed)
    assert peaks[8000] < peaks[400] + 1_000_000, peaks  # all rows at once would be some 4 MB
