"""A server that is stopped, or killed with all its processes, at any moment of a sequence of commits, and started again.

What was acknowledged is there; what was not is settled by the rows and written once; the books are right.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from limpet.batch import Part
from limpet.errors import OutcomeUnknown, StoreUnavailable, WentBack
from limpet.store import Store, commit, open_store
from limpet.store.verify import verify
from tests.conftest import on_servers
from tests.servers.kinds import KINDS, Databases
from tests.store.audit import audit
from tests.store.hands import SETTINGS, SHARDS, Hand, Product, counted, done, emitted, found_job, pages, records, table_name

#: Seconds after which the server is gone, at most: long enough for some commits, and for the middle of one.
LATEST_S = 0.15


@pytest.fixture(scope="module")
def own(databases: Databases) -> Iterator[Databases]:
    """A server that nobody else uses, on a disk: MariaDB takes a log in /dev/shm for one that outlives any kill."""
    with tempfile.TemporaryDirectory(prefix="limpet-restart-") as name:
        made = KINDS[databases.name](Path(name))
        yield made
        made.close()


class Sequence:
    """A worker that commits a page of each shard after the other, and what was acknowledged to it."""

    def __init__(self, own: Databases) -> None:
        self.server = own.server  # type: ignore[attr-defined]
        self.store = self._made(own)
        self.hand = Hand.on(self.store)
        self.hand.take()
        for shard in range(SHARDS):
            self.hand.seed(*pages(shard, 150), shard=shard)
        self.hand.claim(1)
        self.acknowledged: list[str] = []
        self.broken: list[str] = []  # what the commits met

    @staticmethod
    def _made(own: Databases) -> Store:
        store = open_store(own.ready(), settings=SETTINGS)
        found_job(store)
        store.ensure_datasets("shop", {table_name(Product): Product})
        return store

    def parts(self) -> list[Part]:
        """What is in hand, each page with a record; where a slow stop let all pages be done, a batch of each shard without any."""
        made = [self.hand.part(claim.shard, done(claim, offers=[emitted(str(claim.id), 1)])) for claim in self.hand.claims.values()]
        return made or [self.hand.part(shard) for shard in self.hand.held]

    def commit(self, parts: list[Part]) -> None:
        """Commit, and note it."""
        self.hand.commit(*parts, want=1)
        self.acknowledged += [offer.key_text for part in parts for result in part.results for offer in result.offers]

    def until_broken(self) -> list[Part]:
        """Commit until the server is gone; what was in hand then."""
        while True:
            parts = self.parts()
            try:
                self.commit(parts)
            except (StoreUnavailable, OutcomeUnknown) as error:
                self.broken.append(type(error).__name__)
                return parts

    def there(self) -> set[str]:
        """The records that are there, read on a connection of its own."""
        reader = self.store.again(readonly=True)
        found = {f'["{sku}"]' for _, sku, _ in records(reader.db)}
        reader.close()
        return found

    def leave(self) -> None:
        """Close what is open."""
        self.hand.leave()
        self.store.close()


@pytest.fixture
def sequence(own: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence]:
    """On a database of its own."""
    monkeypatch.setattr(commit, "SETTLE_WAITS_S", (0.0,))
    made = Sequence(own)
    yield made
    made.leave()


@on_servers
@pytest.mark.parametrize(("how", "times"), [("fast", 2), ("immediate", 2), ("kill", 4)])
def test_a_server_that_goes_at_any_moment_loses_nothing_that_was_acknowledged(sequence: Sequence, how: str, times: int) -> None:
    """Started again, the same parts are sent again, and found written or written now."""
    lot = random.Random(how)
    server = sequence.server
    stop: Callable[[], None] = server.kill if how == "kill" else lambda: server.stop(how)
    for _ in range(times):
        timer = Timer(lot.uniform(0, LATEST_S), stop)
        timer.start()
        in_hand = sequence.until_broken()
        timer.join()
        server.start()
        assert set(sequence.acknowledged) <= sequence.there()
        sequence.commit(in_hand)
    assert len(sequence.broken) == times
    assert sequence.there() == set(sequence.acknowledged)
    assert len(sequence.acknowledged) == len(set(sequence.acknowledged)) == counted(sequence.hand.db)["done"]
    verdict = verify(sequence.hand.db, sequence.hand.job, full=True)
    assert verdict.ok, verdict.summary()
    audit(sequence.hand.db, sequence.hand.job.id)


@pytest.mark.parametrize("databases", ["mysql"], indirect=True)
def test_a_server_that_need_not_write_before_it_answers_loses_what_was_acknowledged(sequence: Sequence) -> None:
    """The twin, and the measure: the same kill, and a COMMIT that is answered before it is on the disk. Limpet sees it.

    On MariaDB alone: PostgreSQL's WAL writer may write all of it in time, whatever its delay.
    """
    sequence.hand.db.run_text("SET GLOBAL innodb_flush_log_at_timeout = 2000")
    sequence.hand.db.run_text("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
    for _ in range(20):
        sequence.commit(sequence.parts())
    sequence.server.kill()
    in_hand = sequence.until_broken()
    sequence.server.start()
    assert not set(sequence.acknowledged) <= sequence.there()
    with pytest.raises(WentBack):
        sequence.commit(in_hand)
