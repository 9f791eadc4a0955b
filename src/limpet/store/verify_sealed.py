"""Proof of a sealed job: its tasks and tries are gone, and its ledger still adds up to what they came to.

The ledger is proved as ever (I1): a chain of seals without a gap. Instead of rows its sums are held against the seal:
tasks, ends, money, and the watermarks at which everything was last proved. Records are proved by their hashes, without
the try that wrote them (I5). Invariants: I1, I2, I5, I8 of what `gc` has sealed.
"""

from __future__ import annotations

from limpet.store.proofs import Evidence
from limpet.store.verify_money import booked


def prove_sealed(evidence: Evidence, vector: bytes) -> None:
    """The sums of the ledger against the seal."""
    seal, report, job = evidence.sealed, evidence.report, evidence.job.id
    if seal is None:
        return
    discovered, claimed, ended = (int(value) for value in evidence.db.rows("verify_sealed_sums", job=job)[0])
    spent = booked(evidence.db, job)
    wrong = []
    if vector != seal.vector:
        wrong.append("its shards have moved on since it was sealed")
    if discovered != seal.tasks:
        wrong.append(f"the ledger discovered {discovered} tasks, the seal says {seal.tasks}")
    if seal.done + seal.skipped + seal.dead != seal.tasks:
        wrong.append(f"the seal says {seal.tasks} tasks, of which {seal.done + seal.skipped + seal.dead} have ended")
    if claimed != ended:
        wrong.append(f"the ledger claimed {claimed} times, and {ended} tries ended")
    if sum(row[2] for row in spent.values()) != seal.charged:
        wrong.append(f"the ledger spent {sum(row[2] for row in spent.values())} micro-credits, the seal says {seal.charged}")
    for why in wrong:
        report.add("sealed", f"job {evidence.job.name} is sealed, and {why}")
    report.notes.append("the job is sealed: its tasks and tries were removed, and are proved by its ledger alone")
