"""What is left of a job whose tasks and tries were removed: one row that says what they came to.

A sealed job is complete and proved for ever: nothing of it is claimed, put back or repaired any more. Its ledger, its
datasets, its tallies, registers and marks stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from limpet.errors import UsageError
from limpet.store.dialect import Database

if TYPE_CHECKING:
    from limpet.store.jobs import Job


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the tasks of a sealed job came to."""

    at_ms: int
    tasks: int
    done: int
    skipped: int
    dead: int
    charged: int  # micro-credits
    vector: bytes  # digest of the watermarks at which the proof had passed


def sealed_of(db: Database, job: int) -> Sealed | None:
    """The seal of a job; None while its tasks are there."""
    row = db.one("read_sealed", job=job)
    if row is None:
        return None
    at_ms, tasks, done, skipped, dead, charged, vector = row
    return Sealed(int(at_ms), int(tasks), int(done), int(skipped), int(dead), int(charged), bytes(vector))


def refuse_sealed(db: Database, job: Job, *, so: str = "") -> None:
    """UsageError where nothing can be asked of the job any more; `so` is what cannot be done therefore."""
    if sealed_of(db, job.id) is not None:
        raise UsageError(
            f"job {job.name} is sealed: `limpet gc` has removed its tasks{f', so {so}' if so else ''}; a new slot (--slot) collects again"
        )
