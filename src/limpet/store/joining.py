"""Which job a worker that comes along can join. Nothing here writes."""

from __future__ import annotations

import os

from limpet.store import jobs, migrate
from limpet.store.dialect import Database, sqlite_path
from limpet.store.opening import connect
from limpet.store.standing import standing
from limpet.store.verify import is_verified


def has_jobs(dsn: str) -> bool:
    """Whether there is a database at the address, with Limpet's tables in it."""
    is_file = dsn.startswith("sqlite:") or "://" not in dsn
    if is_file and not os.path.exists(sqlite_path(dsn)):
        return False
    db = connect(dsn, readonly=True)
    try:
        found = migrate.version(db)
        return found > 0 and not migrate.is_in_the_making(db, found)
    finally:
        db.close()


def job_to_join(db: Database, spider: str, slot: str | None = None) -> jobs.Job | None:
    """The oldest job of a spider that is not both complete and proved, or that of a slot in whatever state; None for none."""
    if slot is not None:
        return jobs.find(db, spider, slot)
    return next((job for job in jobs.every(db) if job.spider == spider and not is_finished(db, job)), None)


def is_finished(db: Database, job: jobs.Job) -> bool:
    """Whether a job is complete, and proved since its last batch."""
    return standing(db, job.id).is_complete and is_verified(db, job)
