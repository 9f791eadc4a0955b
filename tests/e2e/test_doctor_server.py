"""What `limpet doctor` and `limpet status` say of a database server, and of who spoils it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from limpet.cli.checking import JobWork, verdict
from limpet.store.dialect import Database
from limpet.store.examine_server import facts, oldest_transaction
from limpet.store.opening import connect
from limpet.store.views import WorkerRow
from tests.conftest import on_servers
from tests.e2e.conftest import Limpet
from tests.servers import postgres
from tests.servers.kinds import Databases

#: What every server is asked.
ASKED = {"clock", "server", "isolation", "replication", "connections", "oldest transaction"}
#: What one of them alone is asked.
OF_KIND = {
    "postgres": {"fsync", "full_page_writes", "autovacuum", "keep-alives"},
    "mysql": {"sql_mode", "max_allowed_packet", "innodb_flush_log_at_trx_commit"},
}


@contextmanager
def forgotten(dsn: str) -> Iterator[None]:
    """A transaction that somebody has left open, with a snapshot."""
    if dsn.startswith("postgresql"):
        import psycopg

        with psycopg.connect(dsn, application_name="forgetful") as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT COUNT(*) FROM pg_class")
            yield
        return
    import pymysql

    from limpet.store.mysql import arguments

    other = pymysql.connect(**arguments(dsn))
    try:
        with other.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT COUNT(*) FROM information_schema.TABLES")
        yield
    finally:
        other.close()


@on_servers
def test_the_doctor_asks_a_server_everything_that_matters_before_there_is_a_job(
    databases: Databases, limpet: Limpet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its verdict; the servers of the tests are as they should be."""
    monkeypatch.setattr("limpet.store.examine_server.SKEW_S", 60.0)  # a machine may stand still between two looks at clocks
    ended = limpet("doctor", "--db", databases.new(), "--json")
    found = {finding["what"]: finding["verdict"] for finding in ended.json["findings"]}
    assert found.keys() >= ASKED | OF_KIND[databases.name]
    assert {found[what] for what in ASKED | OF_KIND[databases.name]} == {"ok"}, ended.out
    assert ended.code == 0


def let_it_look_anew(db: Database) -> None:
    """MariaDB answers from what it knew, where its transactions were asked for less than 0.1 s ago."""
    if db.name == "mysql":
        db.rows_text("SELECT SLEEP(0.15)")


@on_servers
def test_the_oldest_transaction_is_named_by_who_holds_it(databases: Databases, limpet: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    """None at first; then the forgotten one, by its process or thread, in doctor and status alike."""
    dsn = databases.new()
    db = connect(dsn, readonly=True)
    with forgotten(dsn):
        let_it_look_anew(db)
        found = oldest_transaction(db)
        assert found is not None
        assert found.who.startswith(("process ", "thread "))
        assert "forgetful" in found.who or databases.name == "mysql"
        assert found.age_s >= 0
        monkeypatch.setattr("limpet.store.examine_server.SNAPSHOT_S", -1.0)
        let_it_look_anew(db)
        (old,) = (fact for fact in facts(db) if fact.what == "oldest transaction")
        assert (old.verdict, found.who in old.message) == ("warning", True)
    db.close()


@on_servers
def test_a_clock_that_is_off_is_told_and_is_no_fault(databases: Databases) -> None:
    """Leases are on the server's clock alone."""
    db = connect(databases.new(), readonly=True)
    clock = next(fact for fact in facts(db, now_s=lambda: time.time() - 3_600) if fact.what == "clock")
    said = re.match(r"the server's is \+(\d+)\.\d s from this machine's", clock.message)
    assert (clock.verdict, said is not None) == ("note", True), clock
    assert said
    assert 3_500 < int(said[1]) < 3_700, clock  # between the two looks at clocks, a machine may stand still
    db.close()


def test_a_server_that_may_lose_what_it_acknowledged_is_a_fault() -> None:
    """PostgreSQL without fsync: named, with what it means."""
    with postgres.running("\nfsync = off\nautovacuum = off\ntcp_keepalives_idle = 7200\n") as server:
        db = connect(server.new_database(), readonly=True)
        found = {fact.what: fact for fact in facts(db)}
        db.close()
    assert (found["fsync"].verdict, "power cut" in found["fsync"].message) == ("fault", True)
    assert (found["autovacuum"].verdict, found["keep-alives"].verdict) == ("warning", "warning")


# -- status --check, by what there is to do ------------------------------------------------------------


def worker(host: str, shards: int, *, lives: bool = True) -> WorkerRow:
    """A worker of a machine."""
    return WorkerRow("w", host, 1, lives, 0, 0, shards)


CHECKS = [
    ("nothing to do", [], 0, 0),
    ("at work", [JobWork("shop", "", [worker("here", 4)], 0)], 0, 0),
    ("nobody here", [JobWork("shop", "", [worker("there", 4)], 0)], 7, 7),
    ("dead", [JobWork("shop", "", [worker("here", 4, lives=False)], 4)], 7, 7),
    ("standing by: every shard has an owner", [JobWork("shop", "", [worker("here", 0), worker("there", 4)], 0)], 0, 0),
    ("joined, and shards are free", [JobWork("shop", "", [worker("here", 0)], 4)], 0, 7),
    ("paused", [JobWork("shop", "paused: by hand", [], 4)], 0, 7),
    ("paused, and another job waits", [JobWork("shop", "paused: by hand", [], 4), JobWork("news", "", [], 4)], 7, 7),
    ("paused, and at work on another", [JobWork("shop", "paused: x", [], 4), JobWork("news", "", [worker("here", 4)], 0)], 0, 0),
    ("halted", [JobWork("shop", "halted: I1", [worker("here", 4)], 0)], 0, 7),
]


@pytest.mark.parametrize(("work", "live", "ready"), [row[1:] for row in CHECKS], ids=[row[0] for row in CHECKS])
def test_the_checks_answer_for_this_machine_alone(work: list[JobWork], live: int, ready: int) -> None:
    """A table: what there is to do and who does it, and both answers."""
    assert (verdict("live", work, "here")[0], verdict("ready", work, "here")[0]) == (live, ready)
