"""Which slot a word means: `today` is a slot of the spider's schedule, in its zone, found once, when a command is given."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from limpet.engine.spider import Spider
from limpet.errors import UsageError
from limpet.schedule import YEAR_MAX, YEAR_MIN, Schedule
from limpet.settings import Settings
from limpet.store import open_store, slots
from limpet.store.dialect import Database

#: The word for the slot of the present day.
TODAY = "today"
#: What a spider that says nothing of slots is taken to have.
PLAIN = Schedule.of("day", tz="UTC")


def meant(text: str, schedule: Schedule | None, now: datetime | None = None) -> str:
    """The slot that the text of a flag means."""
    return (schedule or PLAIN).today(now or datetime.now(UTC)) if text == TODAY else text


def meant_in(db: Database, spider: str, text: str) -> str:
    """The same, where the spider's file is not at hand: by the schedule that it had when it was last run."""
    return meant(text, slots.schedule_of(db, spider)) if text == TODAY else text


def settle(args: argparse.Namespace, spider: Spider) -> None:
    """Put the slot that --slot means in its place."""
    if args.slot is not None:
        args.slot = meant(args.slot, spider.schedule)


def remember(address: str, spider: Spider, settings: Settings) -> None:
    """Note the spider's schedule in the database, which is made where there is none."""
    if spider.schedule is None:
        return
    store = open_store(address, settings=settings)
    try:
        slots.remember(store.db, spider.name, spider.schedule)
    finally:
        store.close()


def instant(text: str) -> datetime:
    """A point in time, such as 2026-11-30T16:30:00Z; UsageError without a zone, and outside of the years that slots may lie in."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is no point in time: expected one like 2026-11-30T16:30:00Z") from error
    if found.tzinfo is None:
        raise UsageError(f"{text!r} has no zone: end it with Z, or with an offset such as +08:00")
    if not YEAR_MIN <= found.year < YEAR_MAX:
        raise UsageError(f"{text!r}: expected a year from {YEAR_MIN} to {YEAR_MAX - 1}")
    return found.astimezone(UTC)
