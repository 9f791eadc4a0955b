"""Protections taken away, each by name: a test that still passes without one has not tested it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from limpet import failpoint
from limpet.engine import attempt, heart
from limpet.errors import OutcomeUnknown, StoreUnavailable
from limpet.store import datasets, known, ledger
from limpet.store.dialect import Database, statements
from limpet.store.sqlite import NOW_MS, Sqlite

#: The process dies between the two transactions of the Nth commit that has records; 0 for never.
DIES_BETWEEN = 0


def two_transactions() -> None:
    """Commit what became of the tasks first, and the records in a transaction of their own."""
    honest_close = ledger.close_books
    late: list[tuple[Any, ...]] = []
    gaps: list[bool] = []

    def put_records_late(db: Database, *rest: Any) -> Mapping[Any, Any]:
        late.append(rest)
        return {}

    def close_books(db: Database, alive: Sequence[Any], *more: Any) -> int:
        at_ms = honest_close(db, alive, *more)
        db.commit()
        db.begin()
        rest = late.pop()
        gaps.append(any(result.offers for part in alive for result in part.results))
        if DIES_BETWEEN and sum(gaps) == DIES_BETWEEN:
            os.kill(os.getpid(), signal.SIGKILL)
        honest_put(db, *rest)
        return at_ms

    honest_put = datasets.put_records
    datasets.__dict__["put_records"] = put_records_late
    ledger.__dict__["close_books"] = close_books


def deaf_to_errors() -> None:
    """Take every COMMIT for done, whatever the disk said; the process is killed as soon as it wants to write again."""
    honest_commit, honest_begin = Sqlite.commit, Sqlite.begin
    ignored: list[Exception] = []

    def commit_and_hope(self: Sqlite) -> None:
        try:
            honest_commit(self)
        except (OutcomeUnknown, StoreUnavailable) as error:
            ignored.append(error)

    def begin(self: Sqlite) -> None:
        if ignored:
            os.kill(os.getpid(), signal.SIGKILL)
        honest_begin(self)

    Sqlite.commit, Sqlite.begin = commit_and_hope, begin  # type: ignore[method-assign]


def no_fence() -> None:
    """Send and write whatever the lease and the shard's row say."""
    heart.Heart.may_send = property(lambda self: True)  # type: ignore[assignment, method-assign]
    heart.__dict__["beat"] = lambda db, worker: True
    sql = (
        "UPDATE shard SET watermark = CASE WHEN :n > watermark THEN :n ELSE watermark END,"
        " verified = CASE WHEN :verified > verified THEN :verified ELSE verified END,"
        " owner = CASE WHEN :kind = 'release' THEN NULL ELSE :owner END WHERE job = :job AND shard = :shard AND :epoch > 0"
    )
    statements("sqlite", NOW_MS)["fence"] = sql
    with suppress(ImportError):  # of a driver that is not installed
        from limpet.store import mysql, postgres

        postgres._translated()["fence"] = postgres.translate(sql)  # type: ignore[attr-defined]
        mysql._translated()["fence"] = mysql.words.translate(sql)  # type: ignore[attr-defined]


#: At which request of a process its lease is over for a moment.
LAPSES_AT = 8


def lapses_for_a_moment() -> None:
    """No protection less, but the worst moment: a try finds the lease over, and a heartbeat comes through before the loop looks."""
    honest_exchange = attempt.Tries.exchange
    count = iter(range(1, 1_000_000))

    async def exchange(self: attempt.Tries, *rest: Any) -> Any:
        assert self.heart is not None
        if next(count) != LAPSES_AT:
            return await honest_exchange(self, *rest)
        self.heart._sent_s -= 1_000
        try:
            return await honest_exchange(self, *rest)
        finally:
            self.heart.sent(self.heart.now())

    attempt.Tries.exchange = exchange  # type: ignore[method-assign]


def forgets_that_the_lease_was_over() -> None:
    """Take a late heartbeat for a lease that never ended."""
    honest = heart.Heart.may_send.fget
    assert honest is not None

    def may_send(self: heart.Heart) -> bool:
        self.is_over = False
        return bool(honest(self))

    heart.Heart.may_send = property(may_send)  # type: ignore[method-assign, assignment]


def remembers_what_was_lost() -> None:
    """Keep what is known whatever becomes of the database: a fail-over takes rows away that stay known."""
    known.KnownKeys.clear = lambda self: None  # type: ignore[method-assign]
    known.KnownKeys.belongs_to = lambda self, incarnation: None  # type: ignore[method-assign]


def no_fence_on_servers() -> None:
    """`no_fence`, in the words of PostgreSQL and MySQL."""
    no_fence()
    from limpet.store import mysql, mysql_words, postgres, postgres_words

    fence = statements("sqlite", NOW_MS)["fence"].replace("MAX(", "GREATEST(")
    postgres._translated()["fence"] = postgres_words.translate(fence)
    mysql._translated()["fence"] = mysql_words.translate(fence)


#: Whose Nth piece of a batch a process stops in the middle of sending.
STOPS_AT = 3


def stops_inside_staging() -> None:
    """Stop in the middle of sending rows to a server, where no failpoint can be: inside a COPY, or half-way through an INSERT."""
    import psycopg
    import pymysql

    failpoint._PLAN = {**failpoint._PLAN, "inside_staging": (STOPS_AT, "stop")}
    honest_row, honest_bytes = psycopg.Copy.write_row, pymysql.Connection._write_bytes

    def write_row(self: Any, row: Sequence[Any]) -> None:
        honest_row(self, row)
        failpoint.failpoint("inside_staging")

    def write_bytes(self: Any, data: bytes) -> None:
        if b"INSERT INTO" in data[:64] and b"stage_" in data[:64]:
            honest_bytes(self, data[: len(data) // 2])
            failpoint.failpoint("inside_staging")
            data = data[len(data) // 2 :]
        honest_bytes(self, data)

    psycopg.Copy.write_row = write_row  # type: ignore[method-assign]
    pymysql.Connection._write_bytes = write_bytes


def dies_of_a_late_copy() -> None:
    """Die where a COPY begins in a transaction that has written to rows of others: no time-out would end it while this process sleeps."""
    import psycopg

    from limpet.store.postgres import Postgres

    honest_run, honest_unstage, honest_copy = Postgres._run, Postgres.unstage, psycopg.Cursor.copy
    writers: set[object] = set()

    def run(self: Postgres, *rest: Any) -> int:
        writers.add(self.connection)
        return honest_run(self, *rest)

    def unstage(self: Postgres) -> None:
        honest_unstage(self)
        writers.discard(self.connection)

    def copy(self: Any, *rest: Any, **more: Any) -> Any:
        if self.connection in writers:
            os.kill(os.getpid(), signal.SIGABRT)
        return honest_copy(self, *rest, **more)

    Postgres._run, Postgres.unstage = run, unstage  # type: ignore[assignment, method-assign]
    psycopg.Cursor.copy = copy  # type: ignore[method-assign]
