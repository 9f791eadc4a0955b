"""The jobs of a spider by their slots: which are finished, which somebody works on; and the schedule that the spider said last.

A job is unique by (spider, slot), so whoever comes second finds the first one's. What is told here is told of one
moment: between a look and a run another process may begin the same slot, and then both work on one job.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from zoneinfo import ZoneInfo

from limpet.schedule import Schedule
from limpet.store import jobs, lease
from limpet.store.dialect import Database, repeat_busy
from limpet.store.joining import is_finished
from limpet.store.sealing import sealed_of
from limpet.store.standing import standing

#: Waits, in seconds, for the row of a schedule that several processes note at once.
BUSY_WAITS_S = (0.05, 0.2, 0.5, 1.0)


class SlotState(StrEnum):
    """What there is of a slot."""

    MISSING = "missing"  # no job
    FINISHED = "finished"  # complete, and proved since its last batch; or sealed by gc
    WORKING = "working"  # a worker that lives is at it
    OPEN = "unfinished"  # there is work left, and nobody at it
    PAUSED = "paused"
    HALTED = "halted"


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot of a spider, as it was found."""

    slot: str
    state: SlotState
    job: jobs.Job | None = None
    dead: int = 0  # its dead letters
    workers: tuple[str, ...] = ()  # who works on it: machine and process


def jobs_by_slot(db: Database, spider: str) -> dict[str, jobs.Job]:
    """Every job of a spider, in the order in which they were made."""
    return {job.slot: job for job in jobs.every(db) if job.spider == spider}


def look(db: Database, slot: str, job: jobs.Job | None) -> SlotRow:
    """What there is of a slot, whose job was found or not."""
    if job is None:
        return SlotRow(slot, SlotState.MISSING)
    (dead,) = db.one("count_dead", job=job.id) or (0,)
    if job.halted:
        return SlotRow(slot, SlotState.HALTED, job, dead)
    if is_sealed(db, job) or is_finished(db, job):
        return SlotRow(slot, SlotState.FINISHED, job, dead)
    workers = _living(db, job)
    if workers:
        return SlotRow(slot, SlotState.WORKING, job, dead, workers)
    return SlotRow(slot, SlotState.PAUSED if job.paused else SlotState.OPEN, job, dead)


def is_sealed(db: Database, job: jobs.Job) -> bool:
    """Whether the tasks of a job were removed after a full proof: nothing of it can be done again."""
    return sealed_of(db, job.id) is not None


def is_empty(db: Database, job: jobs.Job) -> bool:
    """Whether a job has no task, and none to come."""
    return standing(db, job.id).is_nothing


def _living(db: Database, job: jobs.Job) -> tuple[str, ...]:
    """Workers of a job whose lease holds, but for those of this machine whose process is gone."""
    return tuple(
        f"{host}, process {pid}"
        for _worker, host, pid, boot, path, device, inode in db.rows("slots_living", job=job.id)
        if not lease.lock_is_free(host, boot, path, device, inode)
    )


def schedule_of(db: Database, spider: str) -> Schedule | None:
    """The schedule with which a spider was run last; None where it had none."""
    row = db.one("slots_read_schedule", name=_name_of(spider))
    return Schedule.from_json(row[0]) if row else None


def today(db: Database, spider: str, now_ms: int) -> str:
    """The day that it is in the zone of a spider's schedule."""
    schedule = schedule_of(db, spider)
    return datetime.fromtimestamp(now_ms / 1000, ZoneInfo(schedule.tz) if schedule else UTC).date().isoformat()


def remember(db: Database, spider: str, schedule: Schedule) -> None:
    """Note a spider's schedule, for commands that do not read its file; nothing where it is noted already."""
    if schedule_of(db, spider) != schedule:
        repeat_busy(lambda: _remember(db, spider, schedule), tries=BUSY_WAITS_S, wait=time.sleep)


def _remember(db: Database, spider: str, schedule: Schedule) -> None:
    db.begin()
    try:
        db.run("slots_put_schedule", name=_name_of(spider), value=schedule.to_json())
        db.commit()
    except BaseException:
        db.rollback()
        raise


def _name_of(spider: str) -> str:
    return f"schedule of {spider}"
