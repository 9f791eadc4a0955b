"""Mending records: what cannot be trusted is taken away, and the task that offered it is tried again.

The next offer takes the place of a record that was taken away, as when a task no longer emits it. What a
dataset holds in the end is held against the ledger, and the difference noted in the repair's batch, so
that new - removed = rows again. Invariants: I5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from limpet.errors import RecordError
from limpet.store.dialect import Row, quote
from limpet.store.proofs import Finding, Remedy
from limpet.store.repair_work import Withdrawn, Work
from limpet.store.tables import Table, unpack
from limpet.store.verify_records import total_of

#: Records that are handed back to the caller, to look at.
WITHDRAWN_MAX = 1000


def mend(work: Work, by_remedy: Mapping[Remedy, Sequence[Finding]]) -> None:
    """Take away, put back, and let offers take the place of what is gone."""
    findings = by_remedy.get(Remedy.COLLECT, ())
    for one in findings:
        table = work.tables.get(one.dataset or "")
        if one.row is not None and table is not None:
            _withdraw(work, table, "_id = ?", (one.row,))
        if one.fault == "extra":
            for each in work.tables.values():
                _withdraw(work, each, "_task = ? AND _n = ? AND _shard = ?", (one.task, one.n, one.shard))
            work.changes += work.db.run("repair_drop_tried_offers", task=one.task, number=_try_of(work, one))
        if one.fault == "offer" and table is not None:
            names = {"dataset": table.name, "scope": table.scope_of(work.job), "key": one.key, "task": one.task}
            work.changes += work.db.run("repair_drop_offers", **names)
        if one.fault != "unopposed":
            _ask_back(work, one)
    for one in findings:
        table = work.tables.get(one.dataset or "")
        if table is not None and one.key is not None:
            _promote(work, table, one.key)
    for one in by_remedy.get(Remedy.REBALANCE, ()):
        _search(work, one)


def corrections(work: Work) -> dict[str, list[int]]:
    """Dataset -> counters that make its books agree with its rows: [new, replaced, kept, removed, conflicts]."""
    found: dict[str, list[int]] = {}
    for table in work.tables.values():
        total = total_of(work.db, work.job.id, work.job.spider, table)
        if total.rows != total.booked:
            found[table.name] = [max(0, total.rows - total.booked), 0, 0, max(0, total.booked - total.rows), 0]
    return found


def _withdraw(work: Work, table: Table, where: str, values: tuple[object, ...]) -> None:
    """Delete rows, keeping what they were for the caller."""
    columns = [column.name for column in table.type.columns]
    query = f"SELECT _key_text, _task, {', '.join(map(quote, columns))} FROM {quote(table.name)} WHERE {where}"
    for key_text, task, *stored in work.db.rows_text(query, values):
        if len(work.withdrawn) < WITHDRAWN_MAX:
            work.withdrawn.append(Withdrawn(table.name, str(key_text), task, _shown(table, columns, stored)))
    work.changes += work.db.run_text(f"DELETE FROM {quote(table.name)} WHERE {where}", values)


def _shown(table: Table, columns: Sequence[str], stored: Sequence[object]) -> dict[str, object]:
    try:
        return table.type.thaw(stored)
    except RecordError:
        return {name: repr(value) for name, value in zip(columns, stored, strict=True)}


def _try_of(work: Work, finding: Finding) -> int:
    rows = work.db.rows_text("SELECT try FROM attempt WHERE task = ? AND shard = ? AND n = ?", (finding.task, finding.shard, finding.n))
    return int(rows[0][0]) if rows else 0


def _ask_back(work: Work, finding: Finding) -> None:
    """Have the task tried again that a stamp names, where this job has it."""
    row = work.db.one("repair_read_task", job=work.job.id, task=finding.task) if finding.task is not None else None
    if row is not None:
        work.ask_back(row[0], [int(finding.task or 0)])


def _promote(work: Work, table: Table, key: bytes) -> None:
    """Let the lowest offer of a key stand where no record stands, or one of a higher task key.

    Versions of a history are collected anew instead: which of them stands depends on other slots.
    """
    scope, slot = table.scope_of(work.job), work.job.slot
    if table.history:
        for task, _, shard, _ in work.db.rows("repair_offers_of_key", dataset=table.name, scope=scope, key=key):
            work.ask_back(shard, [task])
        return
    offer = work.db.one("next_offer", dataset=table.name, scope=scope, key=key, slot=slot)
    if offer is None:
        return
    query = f"SELECT _id, _task, _shard, _task_key, _job FROM {quote(table.name)} WHERE _scope = ? AND _key = ?"
    for row, task, shard, task_key, job in work.db.rows_text(query, (scope, key)):
        if job != work.job.id or task_key < offer[0]:
            return
        _withdraw(work, table, "_id = ?", (row,))
        work.ask_back(shard, [task])
    work.changes += work.db.run_text(
        f"INSERT INTO {quote(table.name)} ({', '.join(table.columns)}) VALUES ({','.join('?' * len(table.columns))})",
        _row_of(work, table, key, offer),
    )
    work.db.run("drop_offer", dataset=table.name, scope=scope, key=key, slot=slot, task_key=offer[0])
    own = next(iter(work.owned.values()), None) or work.own(offer[4])
    work.db.run("put_heir", dataset=table.name, scope=scope, key=key, job=own.job, shard=own.shard, n=own.n)


def _row_of(work: Work, table: Table, key: bytes, offer: Row) -> Row:
    task_key, task, tries, job, shard, n, key_text, content, packed = offer
    values = unpack(packed, table.fields)
    return (table.scope_of(work.job), key, work.job.slot, key_text, content, task_key, task, tries, job, shard, n, "", *values)


def _search(work: Work, finding: Finding) -> None:
    """Where a dataset has fewer rows than its books say, put back every task of this job that may have written them.

    In a job's dataset the count of each try names the task; in a spider's, other slots take keys over, so that
    a try may rightly have fewer: all that have are tried again, if their batch wrote to the dataset.
    """
    table = work.tables.get(finding.dataset or "")
    if table is None or all(each.type.scope == "job" or each.history for each in work.tables.values()):
        return
    total = total_of(work.db, work.job.id, work.job.spider, table)
    if total.rows >= total.booked:
        return
    counts = "".join(
        f" + (SELECT COUNT(*) FROM {quote(each.name)} AS d WHERE d._task = a.task AND d._try = a.try)" for each in work.tables.values()
    )
    short = work.db.rows_text(
        "SELECT a.shard, a.task, l.deltas FROM attempt AS a JOIN task AS t ON t.id = a.task AND t.tries = a.try "
        "JOIN ledger AS l ON l.job = a.job AND l.shard = a.shard AND l.n = a.n "
        "WHERE a.job = ? AND t.state = 'done' AND a.records > "
        f"(SELECT COUNT(*) FROM offer AS o WHERE o.task = a.task AND o.try = a.try){counts}",
        (work.job.id,),
    )
    for shard, task, deltas in short:
        new, replaced, *_ = json.loads(deltas).get(table.name, (0, 0))
        if new or replaced:
            work.ask_back(shard, [task])
