"""`limpet status --check live|ready`: whether the workers of this machine do what they are there for. For service managers.

`live`: a worker of this machine holds its lease, or there is no work for one. A database that is away is no reason to end a
worker, which waits for it: then a file lock that a worker of this machine holds is enough. `ready`: beside that the database
answers, the job is neither halted nor paused, and this machine has shards of it, or there are none to be had.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import count, say, say_json
from limpet.errors import StoreBusy, StoreUnavailable
from limpet.store import lease
from limpet.store.migrate import NoJobYet
from limpet.store.opening import lock_folder_of
from limpet.store.standing import standing
from limpet.store.views import WorkerRow, workers_of_job


@dataclass(frozen=True, slots=True)
class JobWork:
    """What there is to do on a job, and who does it."""

    name: str
    stopped: str  # why nobody may claim; "" where all may
    workers: Sequence[WorkerRow]
    free_shards: int  # without a living owner


def check(args: argparse.Namespace) -> int:
    """0 for yes, 7 for no, 4 where it cannot be told because the database does not answer."""
    address = database.of(args)
    try:
        with database.read(args) as store:
            now_ms = int(store.db.rows("clock")[0][0])
            work = [
                JobWork(
                    job.name,
                    f"halted: {job.halted}" if job.halted else f"paused: {job.paused}" if job.paused else "",
                    workers_of_job(store.db, job.id, now_ms),
                    sum(not row.owner_lives for row in lease.shards(store.db, job.id)),
                )
                for job in database.jobs_of(store, args)
                if not standing(store.db, job.id).is_complete  # one that is only being proved waits for nobody
            ]
        code, why = verdict(args.check, work, socket.gethostname())
    except NoJobYet:
        code, why = Exit.COMPLETE, "there is no job yet"
    except (StoreUnavailable, StoreBusy) as error:
        held = lease.held_locks(lock_folder_of(database.file_of(address)))
        is_enough = args.check == "live" and held > 0
        code = Exit.COMPLETE if is_enough else Exit.STOPPED if args.check == "ready" else Exit.STALLED
        why = f"the database does not answer ({error}); {count(held, 'worker')} of this machine {'is' if held == 1 else 'are'} there"
    if args.json:
        say_json({"check": args.check, "ok": code == Exit.COMPLETE, "why": why})
    else:
        say(f"{args.check}: {'yes' if code == Exit.COMPLETE else 'no'}: {why}")
    return code


def verdict(asked: str, work: Sequence[JobWork], host: str) -> tuple[Exit, str]:
    """The answer of one machine, from what there is to do.

    >>> verdict("live", [], "here")[0]
    <Exit.COMPLETE: 0>
    """
    if not work:
        return Exit.COMPLETE, "no job waits for workers"
    mine = [(job, worker) for job in work for worker in job.workers if worker.is_living and worker.host == host]
    if asked == "live":
        if mine:
            return Exit.COMPLETE, f"{count(len(mine), 'worker')} of this machine with a running lease"
        waiting = [job.name for job in work if not job.stopped]
        if waiting:
            return Exit.STALLED, f"no worker of {host} holds a lease, and {waiting[0]} waits"
        return Exit.COMPLETE, f"no job may be worked on: {work[0].name} is {work[0].stopped}"
    stopped = [job for job in work if job.stopped]
    if len(stopped) == len(work):
        return Exit.STALLED, f"{stopped[0].name} is {stopped[0].stopped}"
    if not mine:
        return Exit.STALLED, f"no worker of {host} has joined"
    shards = sum(worker.shards for _, worker in mine)
    if not shards and any(job.free_shards for job, _ in mine):
        return Exit.STALLED, f"the workers of {host} have no shard yet, and some are free"
    return Exit.COMPLETE, f"{count(len(mine), 'worker')} of this machine with {count(shards, 'shard')}"
