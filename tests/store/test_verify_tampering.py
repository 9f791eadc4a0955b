"""Each way of changing a database behind Limpet's back is found, by the right invariant, at the right place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from limpet.store import Store, jobs, open_store
from limpet.store.proofs import FAULTS
from limpet.store.verify import Verdict, verify
from tests.conftest import Databases, on_sqlite
from tests.store.building import KINDS, a_crawl
from tests.store.hands import SETTINGS
from tests.store.tampering import Tampering
from tests.store.tampering_table import TAMPERINGS

#: Finds everything that the table of tamperings picks (each pick fails where there is nothing to pick).
SEED = 1


@dataclass(frozen=True)
class Built:
    """A database with a crawl in it."""

    databases: Databases
    dsn: str

    def open(self) -> Store:
        """A store of a copy of it, of no job yet."""
        return open_store(self.databases.fork(self.dsn), settings=SETTINGS)


def build(databases: Databases, *kinds: str) -> Built:
    """A crawl of two slots that has met everything, with tasks running."""
    dsn = databases.ready()
    store = open_store(dsn, settings=SETTINGS)
    crawl = a_crawl(store, SEED, kinds=kinds)
    crawl.claim()
    crawl.leave()
    store.db.run_text("UPDATE worker SET dead = 1")  # its process is gone, and was found to be
    store.close()
    return Built(databases, dsn)


@pytest.fixture(scope="module")
def built(databases: Databases) -> Built:
    """A crawl with a dataset of each job, and one of versions: every count is exact."""
    return build(databases, "product", "story")


@pytest.fixture
def store(built: Built) -> Iterator[Store]:
    """The crawl as it was built, whatever the test before has done to it."""
    store = built.open()
    yield store
    store.close()


def proved(store: Store, job: int = 1, **more: object) -> Verdict:
    """What verify says of a job."""
    return verify(store.db, jobs.read(store.db, job), full=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("tampering", [one for one in TAMPERINGS if not one.needs_a_file], ids=lambda one: one.name)
def test_tampering_is_found_by_its_invariant_and_at_its_place(store: Store, tampering: Tampering) -> None:
    """Exactly the faults that a change makes are found, the invariant is named, and the batch where one can be."""
    is_found(store, tampering)


@on_sqlite
@pytest.mark.parametrize("tampering", [one for one in TAMPERINGS if one.needs_a_file], ids=lambda one: one.name)
def test_what_a_file_lets_happen_is_found_too(store: Store, tampering: Tampering) -> None:
    """SQLite checks a row only when Limpet writes it; a server lets nobody break a CHECK, or put a text where a number stands."""
    is_found(store, tampering)


def is_found(store: Store, tampering: Tampering) -> None:
    """Change a crawl, and hold what verify says against what it must say."""
    picked = tampering.apply(store.db)
    verdict = proved(store, tampering.job)
    assert set(verdict.found) == tampering.faults, [one.message for one in verdict.findings]
    found = [one for one in verdict.findings if one.fault == tampering.fault]
    assert {one.invariant for one in found} == {FAULTS[tampering.fault].invariant}
    if tampering.batch is not None:
        place = (picked["shard"], int(str(picked["n"])) + tampering.batch)
        assert place in [(one.shard, one.n) for one in found], [one.message for one in found]
    assert not verdict.ok
    assert json.loads(json.dumps(verdict.to_json()))["findings"][0]["invariant"] == verdict.findings[0].invariant


@pytest.mark.parametrize("types", [("product", "story"), tuple(KINDS), ("price",), ()], ids=lambda types: "+".join(types) or "none")
def test_an_untouched_crawl_passes(databases: Databases, types: tuple[str, ...]) -> None:
    """What the store built by itself is clean, in full and from where it was last proved, in every slot."""
    store = build(databases, *types).open()
    try:
        for job in jobs.every(store.db):
            for full in (True, False):
                verdict = verify(store.db, job, full=full, limits=replace(SETTINGS, solo_losses=3))
                assert verdict.ok, verdict.summary()
                assert verdict.checked["batches"] > 20
    finally:
        store.close()


def test_small_ranges_find_the_same(store: Store) -> None:
    """However few rows are read at a time, the same is found."""
    tampering = next(one for one in TAMPERINGS if one.name == "a field of a record is changed")
    tampering.apply(store.db)
    assert proved(store, chunk=1).findings == proved(store).findings != ()


def test_every_fault_has_been_seen() -> None:
    """A fault that no tampering brings about may be one that nothing finds."""
    seen = {fault for one in TAMPERINGS for fault in one.faults}
    elsewhere = {"file", "history", "cap", "stale"}  # test_verify.py
    elsewhere |= {"charge", "money", "kept"}  # test_charges.py
    elsewhere |= {"tally", "register", "mark"}  # test_shared.py
    assert set(FAULTS) - seen <= elsewhere, set(FAULTS) - seen - elsewhere


def test_there_are_enough_kinds_of_tampering() -> None:
    """At least thirty, over all invariants that there are."""
    assert len({one.name for one in TAMPERINGS}) == len(TAMPERINGS) >= 100
    assert {one.invariant for one in TAMPERINGS} == {"schema", *(f"I{number}" for number in range(1, 8))}
