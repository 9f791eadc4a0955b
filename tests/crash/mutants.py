"""Protections taken away, each by name: a test that still passes without one has not tested it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from limpet.engine import heart
from limpet.errors import OutcomeUnknown, StoreUnavailable
from limpet.store import datasets, ledger
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
    statements("sqlite", NOW_MS)["fence"] = (
        "UPDATE shard SET watermark = CASE WHEN :n > watermark THEN :n ELSE watermark END, verified = MAX(verified, :verified),"
        " owner = CASE WHEN :kind = 'release' THEN NULL ELSE :owner END WHERE job = :job AND shard = :shard AND :epoch > 0"
    )
