"""What can be told of a PostgreSQL, MySQL or MariaDB server from inside, for `limpet doctor`. Nothing here writes.

A server keeps what Limpet promises only as far as its own settings let it: a commit that was answered before it was on the
disk, or before the replica that is promoted had it, is gone with the disk or the primary. And a transaction that somebody
forgot keeps every dead row of the hot tables in place, so that a crawl grows slower by the hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from limpet.errors import StoreError
from limpet.store.dialect import Database

Verdict = Literal["ok", "note", "warning", "fault"]

#: The oldest releases that the suite runs on.
POSTGRES_MIN, MARIADB_MIN, MYSQL_MIN = (13,), (10, 6), (8, 0)
#: Seconds after which an open transaction is somebody's mistake: ours last a second.
SNAPSHOT_S = 60.0
#: Seconds between the server's clock and this machine's that are worth a word. Leases are on the server's clock alone.
SKEW_S = 5.0
#: Bytes of one message to MySQL: a commit of 16 MiB of records is staged in statements below that.
PACKET_BYTES_MIN = 16 * 2**20
#: Seconds after which a server that probes for dead peers should have found one; two hours is the default of most systems.
KEEPALIVE_S_MAX = 60
#: Connections that a worker has: to write, to read, to beat.
CONNECTIONS_OF_WORKER = 3


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was asked of a server, and whether it is as it should be."""

    what: str
    verdict: Verdict
    message: str


@dataclass(frozen=True, slots=True)
class OldTransaction:
    """The transaction that has been open for longest, of those that this user may see."""

    who: str  # its process or thread, and what it calls itself
    age_s: float
    state: str

    @property
    def told(self) -> str:
        """In words."""
        return f"{self.who} has a transaction open for {self.age_s:.0f} s ({self.state}): what was changed since cannot be cleaned up"


def facts(db: Database, *, now_s: Callable[[], float] = time.time) -> list[Fact]:
    """Everything, in the order in which it is worth reading."""
    found = [_clock(db, now_s)]
    found += [*(_postgres(db) if db.name == "postgres" else _mysql(db))]
    found.append(_oldest(db))
    return found


def _oldest(db: Database) -> Fact:
    old = oldest_transaction(db)
    if old is not None and old.age_s > SNAPSHOT_S:
        return Fact("oldest transaction", "warning", f"{old.told}; end it, or the crawl grows slower")
    if not sees_others(db):
        right = "GRANT pg_monitor TO it" if db.name == "postgres" else "GRANT PROCESS ON *.* TO it"
        return Fact("oldest transaction", "note", f"this role sees none but its own: {right} shows all")
    return Fact("oldest transaction", "ok", "none that is older than a minute")


def sees_others(db: Database) -> bool:
    """Whether this role may see the transactions of others."""
    if db.name == "postgres":
        return bool(db.rows_text("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')")[0][0])
    return bool(db.rows_text("SELECT 1 FROM information_schema.USER_PRIVILEGES WHERE PRIVILEGE_TYPE = 'PROCESS' LIMIT 1"))


def oldest_transaction(db: Database) -> OldTransaction | None:
    """The oldest open transaction but our own; None where there is none, this user may see none, or the database is a file."""
    try:
        if db.name == "postgres":
            rows = db.rows_text(POSTGRES_OLDEST)
        elif db.name == "mysql":
            rows = db.rows_text(MYSQL_OLDEST)
        else:
            return None
    except StoreError:
        return None
    return OldTransaction(str(rows[0][0]), float(rows[0][1]), str(rows[0][2])) if rows else None


def _clock(db: Database, now_s: Callable[[], float]) -> Fact:
    before = now_s()
    server_s = int(db.rows("clock")[0][0]) / 1000
    skew_s = server_s - (before + now_s()) / 2
    if abs(skew_s) > SKEW_S:
        return Fact("clock", "note", f"the server's is {skew_s:+.1f} s from this machine's; leases and times are the server's")
    return Fact("clock", "ok", f"{skew_s:+.1f} s from this machine's")


def _version(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version.

    >>> _version("10.11.19-MariaDB-0+deb12u1"), _version("17.10 (Debian)")
    ((10, 11, 19), (17, 10))
    """
    numbers = []
    for piece in text.replace("-", " ").split(" ")[0].split("."):
        if not piece.isdigit():
            break
        numbers.append(int(piece))
    return tuple(numbers)


# -- PostgreSQL -------------------------------------------------------------------------------

#: Sessions, slots of replicas and prepared transactions, each of which holds a snapshot; the oldest first.
POSTGRES_OLDEST = """
SELECT who, age_s, state FROM (
    SELECT 'process ' || pid || COALESCE(' (' || NULLIF(application_name, '') || ')', '') AS who,
           CAST(EXTRACT(EPOCH FROM clock_timestamp() - xact_start) AS DOUBLE PRECISION) AS age_s, COALESCE(state, '') AS state
      FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    UNION ALL
    SELECT 'prepared transaction ' || gid, CAST(EXTRACT(EPOCH FROM clock_timestamp() - prepared) AS DOUBLE PRECISION), 'prepared'
      FROM pg_prepared_xacts
) AS open ORDER BY age_s DESC LIMIT 1
"""

POSTGRES_SETTINGS = """
SELECT name, setting FROM pg_settings
 WHERE name IN ('server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'autovacuum',
                'default_transaction_isolation', 'max_connections', 'tcp_keepalives_idle', 'tcp_user_timeout')
"""


def _postgres(db: Database) -> Iterator[Fact]:
    settings: dict[str, str] = {str(name): str(value) for name, value in db.rows_text(POSTGRES_SETTINGS)}
    version = settings.get("server_version", "")
    yield _release("PostgreSQL", version, POSTGRES_MIN)
    isolation = settings.get("default_transaction_isolation", "")
    yield Fact("isolation", "ok", f"read committed, set for each transaction; the server's default is {isolation}")
    yield _flag(settings, "fsync", "a power cut of the server may leave a damaged database")
    yield _flag(settings, "full_page_writes", "a power cut of the server may leave a damaged database")
    yield _flag(settings, "autovacuum", "the hot tables grow with each commit", verdict="warning")
    yield _postgres_replicas(db, settings)
    yield from _slots(db)
    idle = int(settings.get("tcp_keepalives_idle") or 0)
    if not 0 < idle <= KEEPALIVE_S_MAX:
        yield Fact(
            "keep-alives", "warning",
            f"tcp_keepalives_idle is {idle or 'off'}: one cut off in a transaction blocks its shards; set it to 5 to {KEEPALIVE_S_MAX}",
        )  # fmt: skip
    else:
        yield Fact("keep-alives", "ok", f"a dead peer is looked for after {idle} s")
    used = int(db.rows_text("SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")[0][0])
    yield _connections(used, int(settings.get("max_connections") or 0))


def _postgres_replicas(db: Database, settings: Mapping[str, str]) -> Fact:
    names = settings.get("synchronous_standby_names", "")
    rows = db.rows_text("SELECT COALESCE(application_name, ''), COALESCE(sync_state, '') FROM pg_stat_replication")
    if names:
        return Fact("replication", "ok", f"synchronous ({names}): what was acknowledged survives a fail-over")
    if rows:
        shown = ", ".join(f"{name} {state}".strip() for name, state in rows)
        return Fact(
            "replication", "warning", f"asynchronous ({shown}): a fail-over may lose the last commits, which are then collected again"
        )
    return Fact("replication", "ok", "no replica")


def _slots(db: Database) -> Iterator[Fact]:
    """Slots that nobody reads: the server keeps its log, and old rows, for whoever may come back."""
    left = [str(row[0]) for row in db.rows_text("SELECT slot_name FROM pg_replication_slots WHERE NOT active ORDER BY slot_name")]
    if left:
        yield Fact(
            "replication slots", "warning",
            f"{', '.join(left)}: nobody reads it, and the server keeps its log until the disk is full; drop it, or start its replica",
        )  # fmt: skip


def _flag(settings: Mapping[str, str], name: str, otherwise: str, *, verdict: Verdict = "fault") -> Fact:
    is_on = settings.get(name, "on") == "on"
    return Fact(name, "ok" if is_on else verdict, "on" if is_on else f"off: {otherwise}")


# -- MySQL and MariaDB ------------------------------------------------------------------------

MYSQL_OLDEST = """
SELECT CONCAT('thread ', trx_mysql_thread_id), TIMESTAMPDIFF(SECOND, trx_started, NOW()), trx_state
  FROM information_schema.INNODB_TRX WHERE trx_mysql_thread_id <> CONNECTION_ID() ORDER BY trx_started LIMIT 1
"""

MYSQL_SETTINGS = """
SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'sync_binlog', 'log_bin', 'binlog_format',
    'innodb_snapshot_isolation', 'sql_mode', 'max_allowed_packet', 'max_connections', 'wsrep_on', 'rpl_semi_sync_master_enabled',
    'rpl_semi_sync_source_enabled', 'transaction_isolation', 'tx_isolation', 'read_only', 'innodb_doublewrite')
"""


def _mysql(db: Database) -> Iterator[Fact]:
    settings: dict[str, str] = {str(name).lower(): str(value) for name, value in db.rows_text(MYSQL_SETTINGS)}
    version = settings.get("version", "")
    is_mariadb = "mariadb" in version.lower()
    yield _release("MariaDB" if is_mariadb else "MySQL", version, MARIADB_MIN if is_mariadb else MYSQL_MIN)
    isolation = settings.get("transaction_isolation") or settings.get("tx_isolation", "")
    yield Fact("isolation", "ok", f"READ-COMMITTED, set for each session; the server's default is {isolation}")
    if "innodb_snapshot_isolation" in settings:
        yield Fact("innodb_snapshot_isolation", "ok", f"{settings['innodb_snapshot_isolation']}: of no matter under READ-COMMITTED")
    yield Fact("sql_mode", "ok", f"strict, set for each session; the server's default is {settings.get('sql_mode') or 'empty'}")
    yield _packet(int(settings.get("max_allowed_packet") or 0))
    yield from _mysql_durable(settings)
    yield _mysql_replicas(settings)
    used = int(db.rows_text("SELECT COUNT(*) FROM information_schema.PROCESSLIST")[0][0])
    yield _connections(used, int(settings.get("max_connections") or 0))


def _packet(found: int) -> Fact:
    if found < PACKET_BYTES_MIN:
        wanted = f"expected at least {PACKET_BYTES_MIN:,}"
        return Fact("max_allowed_packet", "warning", f"{found:,} bytes, {wanted}: a commit with large records may be refused")
    return Fact("max_allowed_packet", "ok", f"{found:,} bytes")


def _mysql_durable(settings: Mapping[str, str]) -> Iterator[Fact]:
    flush = settings.get("innodb_flush_log_at_trx_commit", "1")
    lost = "a power cut of the server loses commits that were acknowledged; they are collected again"
    yield Fact("innodb_flush_log_at_trx_commit", "ok" if flush == "1" else "warning", flush if flush == "1" else f"{flush}: {lost}")
    if settings.get("log_bin") == "ON":
        sync = settings.get("sync_binlog", "1")
        yield Fact(
            "sync_binlog", "ok" if sync == "1" else "note", sync if sync == "1" else f"{sync}: replicas may lack what a power cut took"
        )
        if settings.get("binlog_format") == "STATEMENT":
            yield Fact("binlog_format", "fault", "STATEMENT: the server refuses writes under READ-COMMITTED; set it to ROW or MIXED")


def _mysql_replicas(settings: Mapping[str, str]) -> Fact:
    if settings.get("wsrep_on") == "ON":
        return Fact("replication", "warning", "Galera: let all workers use one node; several writing nodes are not supported")
    semi = settings.get("rpl_semi_sync_master_enabled", settings.get("rpl_semi_sync_source_enabled", "OFF"))
    if semi == "ON":
        return Fact("replication", "ok", "semi-synchronous, as long as a replica answers in time")
    if settings.get("log_bin") == "ON":
        return Fact(
            "replication", "note", "asynchronous, if there are replicas: a fail-over may lose the last commits, which are collected again"
        )
    return Fact("replication", "ok", "no binary log, so no replica")


# -- both -------------------------------------------------------------------------------------


def _release(name: str, version: str, least: tuple[int, ...]) -> Fact:
    if _version(version) < least:
        return Fact("server", "warning", f"{name} {version}: the oldest that is tested is {'.'.join(map(str, least))}")
    return Fact("server", "ok", f"{name} {version}")


def _connections(used: int, most: int) -> Fact:
    free = most - used
    shown = f"{used} of {most} in use"
    if free < CONNECTIONS_OF_WORKER:
        return Fact("connections", "warning", f"{shown}: a worker needs {CONNECTIONS_OF_WORKER}")
    return Fact("connections", "ok", f"{shown}: room for {free // CONNECTIONS_OF_WORKER} more workers, at {CONNECTIONS_OF_WORKER} each")
