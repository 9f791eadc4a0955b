"""What a run says of itself: how far it is while it goes on, and what it ended in.

An exit code follows from the rows of the database alone, computed after the work; `cli/exits.py` says what each means.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

EXIT_COMPLETE, EXIT_INTERNAL, EXIT_USAGE, EXIT_DEAD, EXIT_STOPPED, EXIT_LIMIT, EXIT_NOTHING, EXIT_STALLED, EXIT_UNVERIFIED = range(9)


@dataclass(frozen=True, slots=True)
class Report:
    """What a run ended in. `exit_code` is that of the command line."""

    exit_code: int
    message: str
    job: str
    done: int = 0
    skipped: int = 0
    dead: int = 0
    pending: int = 0
    records: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    seconds: float = 0.0
    verified: bool = False

    def as_json(self) -> dict[str, object]:
        """The report as stable, versioned fields."""
        return {"v": 1, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; made once a heartbeat."""

    done: int
    skipped: int
    failed: int
    dead: int
    known: int
    in_flight: int
    pages_per_s: float
    waiting: str
    workers: int = 0  # processes of this command's own, where there are several
