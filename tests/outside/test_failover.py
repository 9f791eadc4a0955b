"""A primary that dies and a replica that takes its place, under workers who know both by one address.

Asynchronous: what the replica had not heard is gone, though it was acknowledged. It is noticed, and collected again.
Synchronous: nothing that was acknowledged happens twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from limpet.demo.catalogue import Shop
from limpet.store.examine_server import facts
from limpet.store.opening import connect
from tests.crash.nursery import Nursery
from tests.hardening.team import Team, team
from tests.servers import replica
from tests.servers.replica import Pair

pytestmark = [pytest.mark.needs_postgres, pytest.mark.slow]

#: Batches that the primary acknowledges and the replica never hears of, and more than enough answers for them.
UNHEARD, ANSWERS = 12, 250


@dataclass
class Trial:
    """Workers on two servers."""

    both: Pair
    crowd: Team
    database: str
    acks: list[Path]

    def start(self, **hooks: Any) -> None:
        """One more worker, which notes what it takes for committed."""
        self.acks.append(self.crowd.folder / f"acks-{len(self.acks)}")
        self.crowd.start(hooks={"acks": str(self.acks[-1]), **hooks})

    def batches(self, *, of_replica: bool = False) -> int:
        """How many batches a server has."""
        server = self.both.replica if of_replica else self.both.primary
        with psycopg.connect(server.dsn(self.database), autocommit=True) as line:
            row = line.execute("SELECT COALESCE(SUM(watermark), 0) FROM shard").fetchone()
        return int(row[0]) if row else 0

    def alerts(self) -> list[str]:
        """The kinds of alerts that the replica, which is the primary now, holds."""
        with psycopg.connect(self.both.replica.dsn(self.database), autocommit=True) as line:
            return [str(kind) for (kind,) in line.execute("SELECT kind FROM alert ORDER BY id").fetchall()]

    def acknowledged(self) -> Counter[str]:
        """How often each record and task was taken for committed."""
        return Counter(line for path in self.acks if path.exists() for line in path.read_text(encoding="utf-8").splitlines())

    def fail_over(self) -> tuple[int, int]:
        """The primary dies, the replica is promoted: batches that the first had acknowledged, and that the second has."""
        had = self.batches()
        self.both.kill_primary()
        has = self.batches(of_replica=True)
        self.both.promote()
        return had, has


@contextmanager
def trial(forks: Nursery, folder: Path, *, synchronous: bool = False) -> Iterator[Trial]:
    """A pair of servers and a shop; no worker yet."""
    with replica.pair(synchronous=synchronous) as both:
        dsn = both.new_database()
        with team(forks, dsn, Shop(products=480, hosts=8), folder, latency_s=0.03, **{"per-host": 2}) as crowd:
            yield Trial(both, crowd, dsn.partition("?")[0].rpartition("/")[2], [])


def at_work(run: Trial, shares: list[int], **hooks: Any) -> None:
    """Start workers who share the shards as said, and let them get somewhere, but not to the end: the site answers only so often."""
    run.crowd.gate.shut_after(ANSWERS // 2)
    with run.crowd.unfinished(*run.crowd.hosts()):
        for _ in shares:
            run.start(**hooks)
        run.crowd.until(lambda: run.crowd.shares() == shares)
    run.crowd.until(lambda: run.crowd.site.stats.requests > 20, what="progress")


def lose_some(run: Trial) -> tuple[int, int]:
    """Let the replica miss batches, and fail over to it."""
    run.both.deafen()
    before = run.batches()
    run.crowd.gate.shut_after(ANSWERS)
    run.crowd.until(lambda: run.batches() >= before + UNHEARD, what="more batches")
    lost = run.fail_over()
    run.crowd.gate.open()
    return lost


def test_what_an_asynchronous_replica_never_heard_is_noticed_and_collected_again(forks: Nursery, tmp_path: Path) -> None:
    """Acknowledged batches are gone: workers say so, drop what they knew, take their shards over anew, and complete."""
    with trial(forks, tmp_path) as run:
        at_work(run, [4, 4])
        had, has = lose_some(run)
        assert has < had
        run.crowd.ended()
        repeated = {line for line, times in run.acknowledged().items() if times > 1}
        assert repeated, "nothing that was acknowledged was lost"
        said = "".join(born.printed() for born in run.crowd.lives)
        assert "the database went back" in said, said
        assert run.alerts() == ["went back"]  # of both workers, once
        assert run.crowd.faults() == []


def test_a_worker_that_kept_its_memory_over_a_fail_over_would_lose_pages(forks: Nursery, tmp_path: Path) -> None:
    """The twin: links that it takes for known are nowhere, so their pages are never asked for."""
    with trial(forks, tmp_path) as run:
        at_work(run, [8], mutants=["remembers_what_was_lost"])
        had, has = lose_some(run)
        assert has < had
        run.crowd.ended(ok=frozenset({0, 3, 4, 6, 7, 8}))
        found = run.crowd.faults()
        assert any("expected" in fault for fault in found), found


def test_with_a_synchronous_replica_nothing_that_was_acknowledged_happens_twice(forks: Nursery, tmp_path: Path) -> None:
    """Whatever a worker took for committed is there after the fail-over; the doctor says of both kinds what they are worth."""
    with trial(forks, tmp_path, synchronous=True) as run:
        at_work(run, [4, 4])
        run.crowd.until(lambda: run.crowd.site.stats.requests > 60, what="progress")
        assert replication(run) == "ok"
        run.fail_over()
        run.crowd.gate.open()
        run.crowd.ended()
        assert [line for line, times in run.acknowledged().items() if times > 1] == []
        assert "the database went back" not in "".join(born.printed() for born in run.crowd.lives)
        assert run.crowd.faults() == []


def replication(run: Trial) -> str:
    """The doctor's verdict."""
    db = connect(run.crowd.db, readonly=True)
    try:
        return next(fact.verdict for fact in facts(db) if fact.what == "replication")
    finally:
        db.close()
