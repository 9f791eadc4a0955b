"""Proof of money and of what tasks share: charges and escrow (I8), tallies, registers and marks (I9).

All of it changes in place, so each question is asked in one snapshot: rows and the ledger's notes on them are of one moment,
while workers go on. Only a full proof asks.
"""

from __future__ import annotations

import json
from collections import defaultdict

from limpet.errors import UsageError
from limpet.mark import decode, less
from limpet.store import charges, shared
from limpet.store.dialect import Database
from limpet.store.proofs import Evidence
from limpet.store.views import snapshot

#: Findings of one question that are read.
MOST = 100


def prove_money(evidence: Evidence) -> None:
    """I8: one charge for a try, reserved ones of running tasks, and allowance + reserved + spent + unknown = granted."""
    job, report = evidence.job.id, evidence.report
    with snapshot(evidence.db) as db:
        sums = booked(db, job)
        for task, number, shard, n, why in db.rows("verify_charges", job=job, most=MOST):
            report.add("charge", f"the charge of task {task}, try {number}: {why}", shard=shard, n=n, task=task)
        for task, shard, n in db.rows("verify_kept", job=job, most=MOST):
            report.add("kept", f"an answer is kept for task {task}, which is done or does not exist", shard=shard, n=n, task=task)
        found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        for shard, reserved, spent, unknown in db.rows("verify_charge_sums", job=job):
            found[shard] = [int(reserved), int(spent), int(unknown)]
        allowances = {int(row[0]): int(row[1]) for row in db.rows("verify_escrow", job=job)}
        purse = db.one("read_purse", name=charges.job_purse(job))
    report.checked["charges"] += len(allowances)
    for shard in sorted({*sums, *found, *allowances}):
        granted, *moved = sums.get(shard, [0, 0, 0, 0])
        if moved != found[shard]:
            message = f"shard {shard}: the ledger says reserved, spent, unknown {moved} micro-credits, the charges {found[shard]}"
            report.add("money", message, shard=shard)
        left = granted - sum(moved)
        if allowances.get(shard, 0) != left:
            report.add("money", f"shard {shard} may spend {allowances.get(shard, 0)}; by the ledger {left}", shard=shard)
    granted = sum(row[0] for row in sums.values())
    if purse is None and granted:
        report.add("money", f"the job's purse is gone, of which {granted} was granted")
    if purse is not None and int(purse[1]) != granted:
        report.add("money", f"the job's purse has granted {purse[1]}; by the ledger {granted}")
    if purse is not None and purse[0] is not None and int(purse[1]) > int(purse[0]):
        report.notes.append(f"more is granted than the budget: {purse[1]} of {purse[0]} micro-credits; it was lowered since")


def booked(db: Database, job: int) -> dict[int, list[int]]:
    """What the ledger says of each shard's money: granted, reserved, spent, unknown."""
    sums: dict[int, list[int]] = {}
    for shard, deltas in db.rows("verify_notes_of_deltas", job=job, like=f'%"{charges.MONEY}"%'):
        moved = json.loads(deltas).get(charges.MONEY, (0, 0, 0, 0))
        sums[shard] = [a + b for a, b in zip(sums.get(shard, [0, 0, 0, 0]), moved, strict=True)]
    return sums


def prove_shared(evidence: Evidence) -> None:
    """I9: a tally is the sum of the ledger's deltas; versions of registers and marks are a history that never falls."""
    job, report = evidence.job, evidence.report
    with snapshot(evidence.db) as db:
        booked: dict[tuple[int, str], int] = defaultdict(int)
        for shard, deltas in db.rows("verify_notes_of_deltas", job=job.id, like=f'%"{shared.TALLY}%'):
            for name, moved in json.loads(deltas).items():
                if name.startswith(shared.TALLY):
                    booked[shard, name.removeprefix(shared.TALLY)] += moved[0]
        found = {(int(shard), str(name)): int(value) for shard, name, value in db.rows("verify_tallies", job=job.id)}
        registers = db.rows("verify_registers", spider=job.spider)
        strange = [] if evidence.sealed else db.rows("verify_register_stamps", job=job.id, most=MOST)
        marks = db.rows("marks_of_spider", spider=job.spider)
    for at in sorted({*booked, *found}):
        if booked[at] != found.get(at, 0):
            report.add("tally", f"tally {at[1]} in shard {at[0]} is {found.get(at, 0)}; by the ledger {booked[at]}", shard=at[0])
    for name, lowest, highest, count in registers:
        if lowest != 1 or highest != count:
            report.add("register", f"register {name} has {count} versions, from {lowest} to {highest}")
    for name, version, shard, n, task in strange:
        message = f"version {version} of register {name} was written by task {task} in batch {n} of shard {shard}, which wrote nothing"
        report.add("register", message, shard=shard, n=n, task=task)
    last: dict[str, tuple[int, str]] = {}
    for name, version, value, *_ in marks:
        before, was = last.get(name, (0, ""))
        last[name] = (version, value)
        if version != before + 1:
            report.add("mark", f"mark {name} goes from version {before} to {version}")
        elif not _follows(was, value):
            report.add("mark", f"mark {name} goes from {was} to {value} in version {version}: expected a greater one of its type")


def _follows(was: str, value: str) -> bool:
    try:
        decode(value)
        return not was or less(was, value)
    except (UsageError, KeyError, ValueError, ArithmeticError):
        return False
