"""Forty workers at once that find the same new pages and finish their own, in any order: no deadlock reaches anybody.

The order of the steps of a commit is the only lock order: discover, sorted, through an anti-join; then finish. How many
transactions were repeated because of a deadlock is counted and told; there should be none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from threading import Barrier, Thread

import pytest

from limpet.errors import StoreBusy
from limpet.store import Store, commit, lease
from limpet.store.dialect import Database
from limpet.store.verify import verify
from tests.conftest import on_servers
from tests.store.audit import audit
from tests.store.hands import SETTINGS, Hand, counted, done, found_job, host_in, link

pytestmark = on_servers

WORKERS = 40
COMMITS = 4  # of each worker
PAGES = 5  # that each commit finishes
POOL = 160  # pages that everybody finds, over all shards

#: Words for it. MariaDB says the second where the lock of the next id was waited for.
DEADLOCK = ("deadlock", "auto-increment")


class Crowd:
    """Workers with a shard each, and what their transactions met."""

    def __init__(self, store: Store, workers: int = WORKERS) -> None:
        self.store = store
        found_job(store)
        self.hands = [Hand.on(store) for _ in range(workers)]
        rows = lease.shards(store.db, self.hands[0].job.id)
        self.hosts = [host_in(shard, shards=WORKERS) for shard in range(WORKERS)]
        for hand, row in zip(self.hands, rows, strict=False):
            taken = hand.store.take_over(row, hand.worker)
            assert taken is not None
            hand.take_note(taken)
            hand.seed(*(link(f"{self.hosts[row.shard]}/own/{i}", shards=WORKERS) for i in range(COMMITS * PAGES)))
            hand.claim(PAGES)
        self.pool = [link(f"{self.hosts[i % WORKERS]}/found/{i}", shards=WORKERS) for i in range(POOL)]
        self.met: Counter[str] = Counter()
        self.failures: list[BaseException] = []

    def rush(self, patch: pytest.MonkeyPatch) -> None:
        """Everybody commits at once, again and again."""
        real = commit.transact

        def counting(*arguments: object) -> object:
            try:
                return real(*arguments)  # type: ignore[arg-type]
            except StoreBusy as error:
                self.met["deadlock" if any(word in str(error).lower() for word in DEADLOCK) else "wait"] += 1
                raise

        patch.setattr(commit, "transact", counting)
        barrier = Barrier(len(self.hands))
        threads = [Thread(target=self._work, args=(number, barrier)) for number in range(len(self.hands))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, number: int, barrier: Barrier) -> None:
        hand, lot = self.hands[number], random.Random(number)
        try:
            for _ in range(COMMITS):
                results = [done(claim, *lot.sample(self.pool, 20)) for claim in list(hand.claims.values())[:PAGES]]
                barrier.wait(60)
                hand.finish(*results, want=PAGES)
        except BaseException as error:
            barrier.abort()
            self.failures.append(error)

    def leave(self) -> None:
        """Close every connection."""
        for hand in self.hands:
            hand.leave()


def test_forty_workers_that_find_the_same_pages_never_deadlock(make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fails, every page is there once, and the number of deadlocks is told."""
    crowd = Crowd(make_store(settings=replace(SETTINGS, shards=WORKERS)))
    crowd.rush(monkeypatch)
    print(f"deadlocks: {crowd.met['deadlock']}, other waits: {crowd.met['wait']}, in {WORKERS * COMMITS} commits")
    try:
        assert not crowd.failures
        assert crowd.met["deadlock"] == 0
        states = counted(crowd.store.db)
        assert states.total() == WORKERS * COMMITS * PAGES + POOL
        assert states["done"] == WORKERS * COMMITS * PAGES
        audit(crowd.store.db, crowd.hands[0].job.id)
        verdict = verify(crowd.store.db, crowd.hands[0].job, full=True)
        assert verdict.ok, verdict.summary()
    finally:
        crowd.leave()


def test_the_same_pages_inserted_crosswise_deadlock(make_store: Callable[..., Store]) -> None:
    """The twin, and the measure: without the one order of all links, one of two is ended by the server, and says so."""
    crowd = Crowd(make_store(settings=replace(SETTINGS, shards=WORKERS)), workers=2)
    pair = [hand.db for hand in crowd.hands]
    rows = [(1, one.shard, one.host, one.key, 0, 0, 1, one.text, "", "", "", 0, 0, 0, b"") for one in crowd.pool[:2]]
    told: list[str] = []

    def insert(db: Database, row: tuple[object, ...]) -> None:
        try:
            db.run_text("DELETE FROM stage_link")
            db.stage("stage_link", 15, [row])
            db.run("discover")
        except StoreBusy as error:
            told.append(str(error).lower())
            db.rollback()

    try:
        for db, row in zip(pair, rows, strict=True):
            db.unstage()
            insert(db, row)
        crossing = [Thread(target=insert, args=(db, row)) for db, row in zip(pair, reversed(rows), strict=True)]
        for thread in crossing:
            thread.start()
        for thread in crossing:
            thread.join()
        assert len(told) == 1
        assert any(word in told[0] for word in DEADLOCK), told
    finally:
        for db in pair:
            db.rollback()
        crowd.leave()
