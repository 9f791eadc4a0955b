"""`limpet verify`: prove the invariants from the rows alone, beside working workers, without writing.

The vector of watermarks is read first, in one statement, and only what is stamped at or below it is
proved; what changes in place is read in single statements, each of one moment. Whatever is read comes
in ranges, so that memory is bounded and no snapshot is held for long. `PROOFS` is the table of what is
proved; each proof is in a module of its own, and each fault it can find is in `proofs.FAULTS`.

A proof never writes. `verify_job` draws the consequence: a full proof that passes is noted on the job
and takes a halt back, one that fails halts the job. Invariants: all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from limpet.batch import digest
from limpet.errors import StoreCorrupt, StoreError, UsageError
from limpet.settings import Settings
from limpet.store import alerts, jobs, verify_books, verify_money, verify_records, verify_schema, verify_sealed, verify_tasks
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.store.proofs import FAULTS, Evidence, Fault, Finding, Head, Remedy, Report, several
from limpet.store.sealing import sealed_of
from limpet.store.tables import load_tables

__all__ = ["FAULTS", "Fault", "Finding", "Remedy", "Verdict", "is_verified", "verify", "verify_job", "verify_shard"]

#: Rows of a range: 5,000 tasks with their texts and tries take about 5 MB, and a statement over them 20 ms.
CHUNK = 5000

#: Version of `Verdict.to_json`.
JSON_VERSION = 1

#: Faults after which no other proof can run: it would read what is not there.
UNREADABLE = ("table", "dataset")


# -- what comes of it ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a proof found, how far it went, and what it looked at."""

    job: int
    full: bool
    findings: tuple[Finding, ...]  # the first of each fault; the first broken place first
    found: Mapping[str, int]  # fault -> how many, shown or not
    checked: Mapping[str, int]  # batches, tries, tasks, records, offers
    notes: tuple[str, ...]  # reported, not failed
    heads: Mapping[int, Head] = field(default_factory=dict)  # the vector that was proved

    @property
    def ok(self) -> bool:
        """Whether every invariant holds."""
        return not self.found

    @property
    def first(self) -> Finding | None:
        """The first broken place: by invariant, shard and batch."""
        return self.findings[0] if self.findings else None

    @property
    def cursors(self) -> dict[int, int]:
        """Shard -> batch up to which it is proved now, to be committed as `Part.verified`; empty where anything failed."""
        return {shard: head.watermark for shard, head in self.heads.items()} if self.ok else {}

    def summary(self) -> str:
        """One sentence for people, and for the job's `halted`."""
        looked_at = ", ".join(
            several(count, what.removesuffix("ies") + "y" if what.endswith("ies") else what[:-1]) for what, count in self.checked.items()
        )
        if self.first is None:
            return f"verified: {looked_at or 'nothing to look at'}"
        total = sum(self.found.values())
        rest = f", and {several(total - 1, 'further fault')}" if total > 1 else ""
        return f"{self.first.invariant}: {self.first.message}{rest}"

    def to_json(self) -> dict[str, object]:
        """For `--json`: stable names."""
        return {
            "version": JSON_VERSION,
            "job": self.job,
            "full": self.full,
            "clean": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "found": dict(self.found),
            "checked": dict(self.checked),
            "notes": list(self.notes),
            "watermarks": {str(shard): head.watermark for shard, head in self.heads.items()},
        }


# -- what is proved -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proof:
    """One row of the table of proofs."""

    proves: str
    run: Callable[[Evidence], None]
    whole: bool  # only by a full verify; otherwise by an incremental one
    always: bool = False  # by both
    sealed: bool = False  # also of a sealed job, which has no tasks


def _books(evidence: Evidence) -> None:
    for shard, head in evidence.heads.items():
        verify_books.prove_books(evidence, shard, evidence.after.get(shard, 0), head.watermark)


def _touched(evidence: Evidence) -> None:
    for shard, head in evidence.heads.items():
        verify_tasks.prove_touched(evidence, shard, evidence.after.get(shard, 0), head.watermark)


def _records(evidence: Evidence) -> None:
    for table in evidence.tables.values():
        verify_records.RecordProof(evidence, table).prove()
    if evidence.sealed is None:
        verify_records.prove_counts(evidence)


def _records_of_batches(evidence: Evidence) -> None:
    for shard, head in evidence.heads.items():
        prove_records_of_batches(evidence, shard, evidence.after.get(shard, 0), head.watermark)


def prove_records_of_batches(evidence: Evidence, shard: int, after: int, upto: int) -> None:
    """I5 of what the tries of some batches wrote."""
    for low, high in verify_books.pieces(after, upto):
        for table in evidence.tables.values():
            verify_records.RecordProof(evidence, table).prove_of_batches(shard, low, high)
        verify_records.prove_counts_of_batches(evidence, shard, low, high)


def _sealed(evidence: Evidence) -> None:
    verify_sealed.prove_sealed(evidence, vector_digest(evidence.heads))


def _stamps(evidence: Evidence) -> None:
    verify_books.prove_stamps(evidence, evidence.heads)


#: In this order; a later feature adds its rows: I10 inbox and outbox.
PROOFS: tuple[Proof, ...] = (
    Proof("file", verify_schema.prove_file, whole=True, sealed=True),
    Proof("schema", verify_schema.prove_schema, whole=True, always=True, sealed=True),
    Proof("I1 I2", _books, whole=True, always=True, sealed=True),
    Proof("I2 I8 of a sealed job", _sealed, whole=True, always=True, sealed=True),
    Proof("I3 I4 I6 I7", verify_tasks.prove_tasks, whole=True),
    Proof("I3 I4 I6 I7 of some batches", _touched, whole=False),
    Proof("I5", _records, whole=True, sealed=True),
    Proof("I5 of some batches", _records_of_batches, whole=False),
    Proof("I5 totals", verify_records.prove_totals, whole=True, sealed=True),
    Proof("I5 offers of known datasets", verify_records.prove_datasets, whole=True, sealed=True),
    Proof("I8", verify_money.prove_money, whole=True),
    Proof("I9", verify_money.prove_shared, whole=True, sealed=True),
    Proof("I3 stamps", _stamps, whole=True, always=True),
    Proof("I3 notes", verify_books.prove_notes, whole=True),
    Proof("schema, rows of nobody", verify_books.prove_strays, whole=True, sealed=True),
)


# -- proving ------------------------------------------------------------------------------------


def verify(
    db: Database, job: Job, *, full: bool = False, chunk: int = CHUNK, from_batches: Mapping[int, int] | None = None,
    limits: Settings | None = None, shown_max: int | None = None,
) -> Verdict:  # fmt: skip
    """Prove a job's invariants; reads only.

    Without `full` each shard is proved from where it last passed (`shard.verified`), or from the batch that
    `from_batches` names for it. `limits` adds the caps of strikes and solo losses: only for a job that ran under one
    set of them. Raises StoreError where the database cannot be read; a damaged file is a finding.
    """
    report = Report() if shown_max is None else Report(shown_max)
    evidence = Evidence(db, job, report, chunk=chunk, limits=limits)
    try:
        evidence.sealed = sealed_of(db, job.id)
        for proof in PROOFS:
            if not (proof.always or proof.whole == full) or (evidence.sealed and not proof.sealed):
                continue
            if any(fault in report.found for fault in UNREADABLE):
                report.notes.append(f"not proved, since what it needs cannot be read: {proof.proves}")
                continue
            if proof.run is _books:
                evidence.heads = verify_books.read_heads(evidence)
                evidence.after = {} if full else cursors_of(evidence.heads, from_batches or {})
            proof.run(evidence)
    except StoreCorrupt as error:
        report.add("file", str(error))
    return Verdict(job.id, full, report.findings(), dict(report.found), dict(report.checked), tuple(report.notes), dict(evidence.heads))


def cursors_of(heads: Mapping[int, Head], given: Mapping[int, int]) -> dict[int, int]:
    """Where to go on from: where the caller says, else where the shard last passed."""
    return {shard: given.get(shard, head.verified) for shard, head in heads.items()}


def verify_shard(db: Database, job: Job, shard: int, after: int, upto: int, *, thorough: bool = False) -> list[Finding]:
    """Prove the batches of one shard above `after` and up to `upto`: what an owner does, at a take-over and as it goes.

    Always: the ledger in full (I1), the counts of attempt rows, revisits and discovered tasks (I2, I3), running tasks
    (I6), stamps. `thorough` adds what has to be digested row by row: tries (I2), keys (I4), records (I5), states (I7).
    """
    report = Report()
    evidence = Evidence(db, job, report)
    verify_books.prove_books(evidence, shard, after, upto, thorough=thorough)
    verify_tasks.prove_touched(evidence, shard, after, upto, thorough=thorough)
    if thorough:
        evidence.tables = load_tables(db, job.spider)
        prove_records_of_batches(evidence, shard, after, upto)
    verify_books.prove_stamps(evidence, [shard])
    return list(report.findings())


# -- what follows from it -----------------------------------------------------------------------


def verify_job(
    store: Store, job: Job | None = None, *, full: bool = True, limits: Settings | None = None, shown_max: int | None = None
) -> Verdict:
    """Prove a job, the store's where none is given, and act on it.

    A full proof that passes is noted on the job and ends a halt; one that fails halts the job.
    """
    job = job or store.job
    if job is None:
        raise UsageError("verify proves a job: the store has joined none")
    job = jobs.read(store.db, job.id)
    verdict = verify(store.db, job, full=full, limits=limits, shown_max=shown_max)
    if not verdict.ok:
        with suppress(StoreError):  # a damaged file may take no write; the verdict stands all the same
            _halt(store.db, job, verdict.summary())
    elif full:
        _write(store.db, unhalt={"job": job.id})
        _note_proof(store.db, job, vector_digest(verdict.heads))
    return verdict


def _note_proof(db: Database, job: Job, vector: bytes) -> None:
    """Note what was proved, unless the job has moved on since: whoever moved it may have proved it, and noted that, already.

    The job's row is written first, so that of two who note proofs one waits for the other; what was proved is held
    against the shards after that.
    """
    db.begin()
    try:
        db.run("mark_verified", job=job.id, vector=vector)
        if _present_vector(db, job) == vector:
            db.commit()
        else:
            db.rollback()
    except BaseException:
        db.rollback()
        raise


def _halt(db: Database, job: Job, reason: str) -> None:
    """Halt the job, and where it was not halted already raise an alert, in one transaction."""
    db.begin()
    try:
        if db.run("halt", job=job.id, reason=reason):
            alerts.put_now(db, job, alerts.VERIFY, reason)
        db.commit()
    except BaseException:
        db.rollback()
        raise


def _write(db: Database, **statements: Mapping[str, object]) -> None:
    try:
        db.begin()
        for statement, values in statements.items():
            db.run(statement, **values)
        db.commit()
    except BaseException:
        db.rollback()
        raise


def is_verified(db: Database, job: Job | int) -> bool:
    """Whether a full proof has passed since the job's last batch."""
    now = jobs.read(db, job if isinstance(job, int) else job.id)
    return bool(now.verified) and now.verified == _present_vector(db, now)


def _present_vector(db: Database, job: Job) -> bytes:
    return vector_digest({shard: Head(*its) for shard, *its in db.rows("watermarks", job=job.id)})


def vector_digest(heads: Mapping[int, Head]) -> bytes:
    """16 bytes that name a vector of epochs and watermarks."""
    return digest(*(f"{shard} {head.epoch} {head.watermark}".encode() for shard, head in sorted(heads.items())))
