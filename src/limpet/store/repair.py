"""`limpet repair`: write again what can be derived, and have the rest collected again, as a new, recorded batch.

The past is never edited. Where ledger, attempt or revisit rows were altered, nothing here helps: such
findings come back as `beyond`, and a backup has to be restored. Only an owner may write into a shard, so
a repair takes the shards that it needs over, mends them, and gives them up again, all in one transaction:
a take-over, a batch of kind "repair", a release for each. Then `verify_job` must pass; it takes the halt back.

What is done for which fault is `proofs.FAULTS`; how, is in `repair_tasks.py` and `repair_records.py`.
Invariants: whatever held before holds after.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from limpet.batch import Kind, Part, tries_digest
from limpet.errors import InvariantBroken, OwnershipLost, UsageError
from limpet.store import jobs, lease, ledger, repair_records, repair_tasks, verify_schema
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.store.proofs import FAULTS, Finding, Remedy, several
from limpet.store.repair_work import Withdrawn, Work
from limpet.store.sealing import refuse_sealed, sealed_of
from limpet.store.tables import load_tables
from limpet.store.verify import UNREADABLE, Verdict, verify, verify_job
from limpet.store.verify_tasks import GONE
from limpet.task import Epoch

__all__ = ["Repaired", "Withdrawn", "is_mendable", "remedies", "repair", "repair_job"]

#: Findings of one fault that one round of `repair_job` takes on.
ROUND_MAX = 10_000

#: Rounds of proving and mending: what one round brings to light the next one mends.
ROUNDS_MAX = 8

#: What is mended first: shards' rows, without which no batch is known; then keys, texts and rows that others refer to.
STAGES = (
    frozenset({Remedy.HEAD}),
    frozenset({Remedy.REMAKE, Remedy.REBUILD, Remedy.REKEY}),
    frozenset(Remedy) - {Remedy.NONE, Remedy.HEAD, Remedy.REMAKE, Remedy.REBUILD, Remedy.REKEY},
)

#: Faults of a shard's ledger after which its last row tells nothing.
_DAMAGED = frozenset({"gap", "tail", "seal", "chain"})

#: Faults of a shard's books after which its tasks cannot be recounted from them.
_UNSOUND = _DAMAGED | {"tries", "digest", "try", "revisits", "above"}

_BACKUP = (
    "what was recorded of the past has been altered, and no repair may invent it: restore a backup (`limpet backup` makes them), "
    "or begin a new slot, which collects everything again"
)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did, and what it could not do."""

    batches: dict[int, int] = field(default_factory=dict)  # shard -> number of its repair batch
    mended: dict[str, int] = field(default_factory=dict)  # remedy -> findings it was applied to
    put_back: int = 0  # tasks, to be tried again
    withdrawn: tuple[Withdrawn, ...] = ()  # records that were taken away, as they were
    later: tuple[Finding, ...] = ()  # to be proved and mended again after this
    beyond: tuple[Finding, ...] = ()  # nothing but a backup helps

    @property
    def advice(self) -> str:
        """What to do about the findings that are beyond repair; "" where there are none."""
        if not self.beyond:
            return ""
        return f"{several(len(self.beyond), 'finding')} cannot be repaired, the first is {self.beyond[0].message}: {_BACKUP}"

    def to_json(self) -> dict[str, object]:
        """For `--json`: stable names."""
        return {
            "batches": {str(shard): n for shard, n in self.batches.items()},
            "mended": dict(self.mended), "put_back": self.put_back,
            "withdrawn": [one.to_json() for one in self.withdrawn], "later": [one.to_json() for one in self.later],
            "beyond": [one.to_json() for one in self.beyond], "advice": self.advice,
        }  # fmt: skip


# -- the public functions -----------------------------------------------------------------------


def repair(
    store: Store, job: Job, findings: Iterable[Finding] = (), *, batches: Iterable[tuple[int, int]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Repaired:  # fmt: skip
    """Mend what was found, and put the tasks of the named (shard, batch) back, in one transaction.

    Where something is beyond repair and nothing can be done before it, nothing is changed. What comes back as `later` has
    to be proved again first: `repair_job` does that.

    Raises UsageError while a living worker owns a shard of the job, and for batches that do not exist.
    """
    named = sorted(set(batches))
    if named:
        refuse_sealed(store.db, job)
    elif sealed_of(store.db, job.id) is not None:  # a repair is a batch, or puts tasks back: a sealed job has neither
        return Repaired(beyond=tuple(findings))
    now, later, beyond = _plan(findings)
    if not now and not named:
        return Repaired(later=later, beyond=beyond)
    job = jobs.read(store.db, job.id)
    _refuse_unknown(store.db, job, named)
    me = store.register()
    try:
        lease.Watch(clock).look(store.db, me.id)
        _refuse_living(store.db, job)
        store.db.begin()
        try:
            tables = load_tables(store.db, job.spider)
            work = Work(store.db, job, store.settings, tables, lambda shard: _take(work, me, shard, now))
            done = _mend(work, me, now, named)
            if not work.changes:
                store.db.rollback()
                return Repaired(later=later, beyond=(*beyond, *now))
            store.db.commit()
        except BaseException:
            store.db.rollback()
            raise
    finally:
        lease.retire(store.db, me)
    return Repaired(done, dict(work.mended), sum(map(len, work.put_back.values())), tuple(work.withdrawn), later, (*beyond, *work.beyond))


def repair_job(store: Store, job: Job | None = None, *, clock: Callable[[], float] = time.monotonic) -> tuple[Verdict, list[Repaired]]:
    """Prove, mend, and prove again, until the job is clean or nothing more can be done; the last proof is acted on."""
    job = job or store.job
    if job is None:
        raise UsageError("repair mends a job: the store has joined none")
    done: list[Repaired] = []
    for _ in range(ROUNDS_MAX):
        findings = verify(store.db, jobs.read(store.db, job.id), full=True, shown_max=ROUND_MAX).findings
        if not findings:
            break
        done.append(repair(store, job, findings, clock=clock))
        if not done[-1].batches:
            break
    return verify_job(store, job), done


def is_mendable(findings: Iterable[Finding]) -> bool:
    """Whether `repair` has something that it can do about them, first of all; only a further proof tells whether that is all."""
    return bool(_plan(findings)[0])


def _plan(findings: Iterable[Finding]) -> tuple[list[Finding], tuple[Finding, ...], tuple[Finding, ...]]:
    """What is mended now, what has to be proved again after that, and what nothing mends.

    One stage at a time, as what is wrong in a later one may only be a shadow of an earlier one. Where the books of a shard
    are not sound, its tasks cannot be recounted from them. And nothing is collected again, or taken away, for a job that
    needs its backup all the same.
    """
    known = list(findings)
    unsound = {one.shard for one in known if one.fault in _UNSOUND}
    damaged = {one.shard for one in known if one.fault in _DAMAGED}

    def is_hopeless(one: Finding) -> bool:
        if one.remedy is Remedy.HEAD:
            return one.shard in damaged
        return one.remedy is Remedy.NONE or (one.remedy is Remedy.RECOUNT and one.shard in unsound)

    if unreadable := tuple(one for one in known if one.fault in UNREADABLE):
        return [], tuple(one for one in known if one not in unreadable), unreadable
    for stage in STAGES[:-1]:
        now = [one for one in known if one.remedy in stage and not is_hopeless(one)]
        if now:
            return now, tuple(one for one in known if one not in now), ()
    beyond = tuple(one for one in known if is_hopeless(one))
    return ([], tuple(one for one in known if one not in beyond), beyond) if beyond else (known, (), ())


def _refuse_living(db: Database, job: Job) -> None:
    owners = sorted({str(row.owner) for row in lease.shards(db, job.id) if row.owner_lives})
    if owners:
        found = [w for w in db.rows("living_workers") if w[0] in owners]
        who = ", ".join(f"process {w[2]} on {w[1]}" for w in found) or ", ".join(owners)
        raise UsageError(f"job {job.name} has living workers ({who}): stop them, and wait for their lease to end, before a repair")


def _refuse_unknown(db: Database, job: Job, named: Sequence[tuple[int, int]]) -> None:
    for shard, n in named:
        if db.one("read_batch_id", job=job.id, shard=shard, n=n) is None:
            raise UsageError(f"shard {shard} of job {job.name} has no batch {n}: `limpet verify` names those that are broken")


# -- the transaction ----------------------------------------------------------------------------


def _mend(work: Work, me: lease.Worker, findings: Sequence[Finding], named: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Everything, under the write lock: shard -> number of its repair batch."""
    by_remedy: dict[Remedy, list[Finding]] = {}
    for one in findings:
        by_remedy.setdefault(one.remedy, []).append(one)
    _write_heads(work, by_remedy.get(Remedy.HEAD, ()))
    for shard in sorted(repair_tasks.shards_of(work, findings) | {shard for shard, _ in named}) or [0]:
        work.own(shard)
    _remake(work, by_remedy.get(Remedy.REMAKE, ()))
    repair_tasks.mend(work, by_remedy)
    repair_records.mend(work, by_remedy)
    work.db.one("repair_next_task")
    for shard, n in named:
        work.ask_back(shard, repair_tasks.tried_in(work, shard, n))
    for remedy, its in by_remedy.items():
        work.mended[str(remedy)] += len(its)
    return _close(work, me)


def _write_heads(work: Work, findings: Sequence[Finding]) -> None:
    """Write a shard's row again from its last ledger row."""
    for shard in sorted({one.shard for one in findings if one.shard is not None}):
        n, epoch = work.db.one("repair_last_batch", job=work.job.id, shard=shard) or (0, 0)
        if work.db.one("read_shard", job=work.job.id, shard=shard) is None:
            work.db.run("put_shard", job=work.job.id, shard=shard)
        work.changes += work.db.run("repair_head", job=work.job.id, shard=shard, n=n, epoch=epoch)


def _take(work: Work, me: lease.Worker, shard: int, findings: Sequence[Finding]) -> Part:
    """Take a shard over: its tasks are put where their history leaves them, then what still runs is lost.

    As `lease.take_over`, but in the caller's transaction: a task that only says it runs would break a take-over.
    """
    row = next((row for row in lease.shards(work.db, work.job.id) if row.shard == shard), None)
    if row is None:
        raise InvariantBroken(f"shard {shard} of job {work.job.id} has no row", invariant="I1")
    if work.db.run("take_over", me=me.id, job=work.job.id, shard=shard, epoch=row.epoch, watermark=row.watermark) != 1:
        raise OwnershipLost(f"shard {shard} of job {work.job.id} was taken by another worker meanwhile; nothing was changed")
    part = Part(job=work.job.id, shard=row.shard, owner=me.id, epoch=Epoch(row.epoch + 1), n=row.watermark + 1, kind=Kind.TAKEOVER)
    repair_tasks.recount_shard(work, shard, [one for one in findings if one.shard == shard and one.remedy is Remedy.RECOUNT])
    work.db.unstage()
    lease.reclaim(work.db, part, work.settings)
    work.db.unstage()
    return part


def _remake(work: Work, findings: Sequence[Finding]) -> None:
    if findings:
        work.changes += verify_schema.remake(work.db, work.tables)


def _close(work: Work, me: lease.Worker) -> dict[int, int]:
    """The repair batch of each shard, and its release: tasks put back, corrections, and what a dataset really holds."""
    at_ms = int((work.db.one("clock") or (0,))[0])
    totals = repair_records.corrections(work)
    work.changes += len(totals)
    done: dict[int, int] = {}
    for shard, taken in sorted(work.owned.items()):
        part = Part(job=taken.job, shard=taken.shard, owner=me.id, epoch=taken.epoch, n=taken.n + 1, kind=Kind.REPAIR)
        _fence(work.db, part)
        revisited = repair_tasks.put_back(work, part)
        work.changes += revisited
        gone = {f"{GONE}/{source}/{n}": [0, 0, 0, count, 0] for (source, n), count in work.gone.items() if source == shard}
        found = repair_tasks.adopt(work, part, gone=sum(counts[3] for counts in gone.values()))
        ledger.put(
            work.db, part, at_ms, Counter(), tries_digest([]), found, revisited=revisited, deltas={**gone, **totals},
        )  # fmt: skip
        totals = {}
        done[shard] = part.n
        last = Part(job=taken.job, shard=taken.shard, owner=me.id, epoch=taken.epoch, n=taken.n + 2, kind=Kind.RELEASE)
        _fence(work.db, last)
        ledger.put(work.db, last, at_ms, Counter(), tries_digest([]), ledger.Found())
    return done


def _fence(db: Database, part: Part) -> None:
    values = {"job": part.job, "shard": part.shard, "owner": part.owner, "epoch": part.epoch, "n": part.n, "kind": str(part.kind)}
    if db.run("fence", verified=0, **values) != 1:
        raise InvariantBroken(f"shard {part.shard} of job {part.job} is not as this repair left it", invariant="I1")


def remedies() -> dict[str, tuple[str, str, str]]:
    """For the docs: fault -> (invariant, what is wrong, what mends it)."""
    return {word: (fault.invariant, fault.meaning, str(fault.remedy) or "restore a backup") for word, fault in FAULTS.items()}
