"""What keeps a server healthy for days: how hot tables are stored, what a worker takes of it, and what the doctor says of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from limpet.demo.catalogue import Shop
from limpet.store.examine_server import CONNECTIONS_OF_WORKER, Fact, facts
from limpet.store.opening import connect
from limpet.store.postgres import limits
from limpet.store.postgres_words import STORAGE
from tests.conftest import on_servers
from tests.crash.nursery import Nursery
from tests.hardening.team import PATIENT_LEASE_S, team
from tests.servers import replica
from tests.servers.kinds import Databases

on_postgres = pytest.mark.parametrize("databases", ["postgres"], indirect=True)


def told(dsn: str) -> dict[str, Fact]:
    """What the doctor says of a server."""
    db = connect(dsn, readonly=True)
    try:
        return {fact.what: fact for fact in facts(db)}
    finally:
        db.close()


def ask(dsn: str, sql: str) -> list[Any]:
    """Rows, as the one who may everything; on MySQL from a connection to no database, so that it is none of those of a database."""
    if dsn.startswith("postgresql"):
        with psycopg.connect(dsn, autocommit=True) as line:
            return line.execute(sql).fetchall()
    import pymysql

    from limpet.store.mysql import arguments

    with closing(pymysql.connect(**{**arguments(dsn), "database": None}, autocommit=True)) as other, other.cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


@on_postgres
def test_hot_tables_have_room_for_the_next_version_of_a_row_and_are_swept_early(databases: Databases) -> None:
    """Every table that changes in place is stored as the table of words says, in a database that was made anew."""
    found = {
        name: set(options)
        for name, options in ask(databases.ready(), "SELECT relname, reloptions FROM pg_class WHERE reloptions IS NOT NULL")
    }
    for table, options in STORAGE.items():
        assert {option.replace(" ", "") for option in options.split(",")} <= found.get(table, set()), table
    assert {"task", "shard", "worker", "host"} <= STORAGE.keys()


@pytest.mark.parametrize("lease_s", [4.0, 10.0, 30.0])
def test_every_limit_of_a_transaction_is_below_the_lease(lease_s: float) -> None:
    """A worker that is frozen inside one is ended before anybody could take its shards over."""
    found = limits(lease_s)
    assert max(found.values()) < 1000 * lease_s
    assert found["lock_timeout"] < found["statement_timeout"]


@on_servers
def test_a_worker_has_three_connections_and_a_crew_three_each(forks: Nursery, databases: Databases, tmp_path: Path) -> None:
    """As the docs and the doctor count them: never more, however long it works."""
    dsn = databases.new()
    name = dsn.rpartition("/")[2].partition("?")[0]
    if databases.name == "postgres":
        sql = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'limpet'"
    else:
        sql = f"SELECT count(*) FROM information_schema.PROCESSLIST WHERE db = '{name}'"
    wanted, counts = 2 * CONNECTIONS_OF_WORKER, [0]

    def counted() -> int:
        counts.append(int(ask(dsn, sql)[0][0]))
        return counts[-1]

    with team(forks, dsn, Shop(products=200, hosts=8), tmp_path, latency_s=0.1, lease=PATIENT_LEASE_S) as crowd:
        with crowd.unfinished(crowd.hosts()[0]):
            crowd.start()
            crowd.start()
            crowd.until(lambda: crowd.shares() == [4, 4])
            crowd.until(lambda: counted() == wanted, what="every connection")
            crowd.until(lambda: counted() and crowd.site.stats.requests > 150, what="progress")
        assert max(counts) == wanted
        crowd.site.latency_s = 0.0
        crowd.ended()


@on_servers
def test_a_role_that_sees_its_own_transactions_alone_says_so(databases: Databases) -> None:
    """Else the doctor would call a server clean that it has not been shown."""
    dsn = databases.new()
    name = dsn.rpartition("/")[2].partition("?")[0]
    if databases.name == "postgres":
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(f"CREATE ROLE blind_{name} LOGIN")
        fact = told(dsn.replace("postgres@", f"blind_{name}@"))["oldest transaction"]
    else:
        ask(dsn, "CREATE USER blind@'127.0.0.1'")
        ask(dsn, f"GRANT ALL ON {name}.* TO blind@'127.0.0.1'")
        fact = told(dsn.replace("root@", "blind@"))["oldest transaction"]
        ask(dsn, "DROP USER blind@'127.0.0.1'")
    assert fact.verdict == "note"
    assert "GRANT" in fact.message
    assert told(dsn)["oldest transaction"].verdict == "ok"


@pytest.mark.slow
@pytest.mark.needs_postgres
def test_the_doctor_names_an_asynchronous_replica_and_a_slot_that_nobody_reads() -> None:
    """The first may cost the last commits, the second the disk."""
    with replica.pair() as both:
        dsn = both.primary.new_database()
        before = told(dsn)
        assert (before["replication"].verdict, replica.NAME in before["replication"].message) == ("warning", True)
        assert "replication slots" not in before
        both.replica.stop("immediate")
        both.wait_for_no_sender()
        after = told(dsn)
        assert (after["replication slots"].verdict, replica.NAME in after["replication slots"].message) == ("warning", True)
