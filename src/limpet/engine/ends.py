"""Why an incarnation of a worker ended."""

from __future__ import annotations

from enum import StrEnum


class End(StrEnum):
    """Why an incarnation ended."""

    COMPLETE = "complete"
    NOTHING = "nothing to do"
    STOPPED = "stopped"
    PAGE_LIMIT = "page limit"
    BUDGET = "budget"
    PAUSED = "paused"
    HALTED = "halted"
    STALLED = "stalled"
    FAULTY = "faulty"  # the spider's own start is wrong
    FENCED = "fenced"  # start again under another id
    STUCK = "stuck"  # so many handlers hang in threads that only another process can go on
    UNAVAILABLE = "unavailable"  # the database takes nothing now
