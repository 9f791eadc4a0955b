"""`limpet verify` and `limpet repair`: the proof of a job, and what mends it where it fails."""

from __future__ import annotations

import argparse
from contextlib import suppress

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import count, say, say_json
from limpet.errors import StoreError, StoreUnavailable
from limpet.store import Store, jobs, open_store
from limpet.store.repair import Repaired, is_mendable, repair_job
from limpet.store.repair import repair as mend
from limpet.store.verify import Finding, Verdict, verify_job
from limpet.store.verify import verify as prove

#: Findings that are printed; --json has more of each fault.
FINDINGS_SHOWN = 20


def verify(args: argparse.Namespace) -> int:
    """Prove each job; 8 where one fails, and then it is halted: nobody claims until it is repaired."""
    failed = False
    store = _open(database.of(args))
    try:
        for job in database.jobs_of(store, args):
            verdict = _prove(store, job, full=args.full)
            failed = failed or not verdict.ok
            if args.json:
                say_json({"name": job.name, **verdict.to_json()})
            else:
                say(_as_text(job, verdict))
    finally:
        store.close()
    return Exit.VERIFY_FAILED if failed else Exit.COMPLETE


def _open(address: str) -> Store:
    """The database, for writing where it takes that: a proof of a file on a read-only disk is a proof all the same."""
    try:
        return open_store(address, create=False)
    except StoreUnavailable:
        return open_store(address, create=False, readonly=True)


def _prove(store: Store, job: jobs.Job, *, full: bool) -> Verdict:
    if getattr(store.db, "readonly", False):
        return prove(store.db, job, full=full)
    try:
        return verify_job(store, job, full=full)
    except StoreError:
        with suppress(StoreError):  # busy or full: the proof itself needs no write
            return prove(store.db, job, full=full)
        raise


def _as_text(job: jobs.Job, verdict: Verdict) -> str:
    """What a proof came to, the first broken place first."""
    scope = "everything" if verdict.full else "what came since it was last proved; --full proves everything"
    lines = [f"{job.name}: {verdict.summary()} ({scope})"]
    if not verdict.ok:
        lines += [_line(finding) for finding in verdict.findings[:FINDINGS_SHOWN]]
        hidden = sum(verdict.found.values()) - min(len(verdict.findings), FINDINGS_SHOWN)
        lines += [f"  and {count(hidden, 'further fault')}"] if hidden > 0 else []
        lines.append("the job is halted: nobody claims until `limpet verify --full` passes")
        can_mend = is_mendable(verdict.findings)
        lines.append("`limpet repair` mends it, or says what is left" if can_mend else "no repair mends this: restore a backup")
    lines += [f"  note: {note}" for note in verdict.notes]
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    place = f" at {finding.shard}:{finding.n}" if finding.shard is not None and finding.n else ""
    return f"  {finding.invariant} {finding.fault}{place}: {finding.message}"


# -- repair -----------------------------------------------------------------------------------


def repair(args: argparse.Namespace) -> int:
    """Put the tasks of named batches back, or mend what verify finds; 6 where nothing is wrong, 8 where not all is mended."""
    with database.of_job(args) as (store, job):
        if args.batches:
            rounds = [mend(store, job, batches=args.batches)]
            verdict = verify_job(store, job)
        else:
            verdict, rounds = repair_job(store, job)
    done = [one for one in rounds if one.batches]
    if args.json:
        say_json({"job": job.name, "rounds": [one.to_json() for one in rounds], "verdict": verdict.to_json()})
    else:
        for one in rounds:
            say("\n".join(_mended(job, one)))
        say(_as_text(job, verdict))
    if not verdict.ok:
        return Exit.VERIFY_FAILED
    return Exit.COMPLETE if done or job.halted else Exit.NOTHING_TO_DO


def _mended(job: jobs.Job, one: Repaired) -> list[str]:
    """What one round of repairing did."""
    lines = [f"{job.name}: {remedy} for {count(number, 'fault')}" for remedy, number in one.mended.items()]
    lines += [f"{job.name}: {count(one.put_back, 'task')} put back; `limpet run` tries them again"] if one.put_back else []
    lines += [f"{job.name}: {count(len(one.withdrawn), 'record')} taken away; --json prints them"] if one.withdrawn else []
    lines += [f"  batch {shard}:{n}" for shard, n in one.batches.items()]
    return [*lines, *([one.advice] if one.advice else [])]
