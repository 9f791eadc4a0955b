"""PgBouncer in transaction mode: each transaction may run in another session of the server, and nothing here minds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from limpet.demo.catalogue import Shop
from limpet.errors import StoreError
from limpet.store.opening import connect, open_store
from limpet.store.postgres import Postgres
from tests.crash.nursery import Nursery
from tests.hardening.team import Team, team
from tests.servers import pgbouncer
from tests.servers.kinds import PostgresDatabases
from tests.servers.pgbouncer import Pooler

pytestmark = [
    pytest.mark.parametrize("databases", ["postgres"], indirect=True),
    pytest.mark.needs_pgbouncer,
]


@pytest.fixture
def pooler(databases: PostgresDatabases) -> Iterator[Pooler]:
    """One before the tests' server; ended before the next, for a pool keeps databases open."""
    with pgbouncer.running(databases.server) as made:
        yield made


def asked(crowd: Team) -> int:
    """Requests that the site has seen."""
    return crowd.site.stats.requests


def test_two_workers_crawl_through_a_pooler_that_is_killed_as_they_are(
    forks: Nursery, databases: PostgresDatabases, pooler: Pooler, tmp_path: Path
) -> None:
    """Three server connections for two workers' six; a worker dies and is replaced, then the pooler; the proof passes in the end."""
    dsn = pooler.through(databases.new())
    with team(forks, dsn, Shop(products=300, hosts=16), tmp_path, latency_s=0.02, **{"per-host": 2}) as crowd:
        *hosts, last = crowd.hosts()
        with crowd.unfinished(last):
            with crowd.unfinished(*hosts):
                first, _ = crowd.start(), crowd.start()
                crowd.until(lambda: crowd.shares() == [4, 4])
                crowd.gate.shut_after(60)
            crowd.until(lambda: asked(crowd) > 60, what="progress")
            first.kill()
            crowd.gate.open()
            crowd.start()
            crowd.until(lambda: crowd.shares() == [4, 4], what="a take-over")
            crowd.until(lambda: asked(crowd) > 120, what="progress")
            before = pooler.process.pid
            pooler.kill()
            pooler.start()
            assert pooler.process.pid != before
        crowd.ended()
        assert pooler.transactions() > 20
        assert asked(crowd) > 300
        assert crowd.outcomes()["lost"] > 0
        assert crowd.faults() == []


def test_a_connection_is_another_session_with_each_transaction(databases: PostgresDatabases, pooler: Pooler) -> None:
    """So that these tests test something: the pooler does move clients about, and we leave no setting behind in a session."""
    dsn = pooler.through(databases.ready())
    db = Postgres(dsn, lease_s=60)
    sessions: Counter[int] = Counter()
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as other, psycopg.connect(dsn, prepare_threshold=None) as holder:
        holder.execute("SELECT 1")  # keeps one session to itself, so that the others are made
        for _ in range(6):
            db.begin()
            sessions[db.rows_text("SELECT pg_backend_pid()")[0][0]] += 1
            with psycopg.connect(dsn, prepare_threshold=None) as second:
                second.execute("SELECT 1")
            assert db.rows_text("SELECT current_setting('lock_timeout')") == [("5s",)]
            db.commit()
        left = {other.execute("SELECT current_setting('lock_timeout')").fetchone() for _ in range(6)}
    db.close()
    assert len(sessions) > 1
    assert left == {("0",)}


def test_staging_tables_are_made_wherever_a_transaction_runs(databases: PostgresDatabases, pooler: Pooler) -> None:
    """A transaction in a session that nobody has staged in; one that believed its own session to be kept would find no table."""

    class Keeping(Postgres):
        """Makes its staging tables once for each connection, as a driver without a pooler could."""

        has_made = False

        def unstage(self) -> None:
            if not self.has_made:
                super().unstage()
                self.has_made = True

    for kind, works in ((Postgres, True), (Keeping, False)):
        dsn = pooler.through(databases.ready())
        db, refused, sessions = kind(dsn, lease_s=60), [], []
        with ExitStack() as holders:
            for _ in range(2):
                db.unstage()
                try:
                    db.begin()
                    sessions.append(db.rows_text("SELECT pg_backend_pid()")[0][0])
                    db.stage("stage_id", 1, [(7,)])
                    assert db.rows_text("SELECT id FROM stage_id") == [(7,)]
                    db.commit()
                except StoreError as error:
                    refused.append(str(error))
                    db.rollback()
                hold(holders, dsn, sessions)
        db.close()
        assert len({*sessions}) == 2
        assert (not refused) is works, refused
        assert works or "stage_id" in refused[0]


def hold(holders: ExitStack, dsn: str, sessions: list[int]) -> None:
    """Keep the session of the last transaction to somebody else, whoever else comes on the way to it."""
    while True:
        other = holders.enter_context(psycopg.connect(dsn, prepare_threshold=None))
        if other.execute("SELECT pg_backend_pid()").fetchone() == (sessions[-1],):
            return
        other.rollback()


def test_a_prepared_statement_would_not_be_found_again(databases: PostgresDatabases, pooler: Pooler) -> None:
    """Why none is made: in another session it is unknown, or another client's of the same name is there."""
    dsn = pooler.through(databases.ready())
    lines = [psycopg.connect(dsn, prepare_threshold=0, autocommit=True) for _ in range(2)]
    with pytest.raises(psycopg.errors.DatabaseError, match="prepared statement"):
        [line.execute("SELECT count(*) FROM task") for line in lines * 6]
    for line in lines:
        line.close()
    db = connect(dsn)
    for _ in range(12):
        assert db.rows("clock")[0][0] > 0
    db.close()


def test_processes_that_begin_at_once_make_one_schema_through_a_pooler(databases: PostgresDatabases, pooler: Pooler) -> None:
    """The lock of whoever changes the schema ends with its transaction, so it is no session's; all four get the same database."""
    dsn, found = pooler.through(databases.new()), []

    def begin() -> None:
        store = open_store(dsn)
        found.append(store.db.rows_text("SELECT value FROM meta WHERE name = 'database'")[0][0])
        store.close()

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert len(set(found)) == 1
    with psycopg.connect(databases.server.dsn(dsn.rpartition("/")[2])) as admin:
        assert admin.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
