"""The words of `limpet schedule`, `backfill` and `diff`."""

from __future__ import annotations

import argparse
from typing import Protocol

from limpet.cli.flags import params, setting_flags, spider_file, who_asks, workers
from limpet.cli.values import line_of_text, slot

_AT = "an instant to take for the present, such as 2026-11-30T16:30:00Z: for tests (the clock)"


class Adding(Protocol):
    """What commands are added to."""

    def add(self, group: str, name: str, line: str, *, epilog: str = "") -> argparse.ArgumentParser:
        """A parser for one more command."""


def add_schedule(commands: Adding) -> None:
    """`limpet schedule`, and its flags."""
    schedule = commands.add("run", "schedule", "run the slot that is due, unless it is done or somebody is at it")
    spider_file(schedule)
    ways = schedule.add_mutually_exclusive_group()
    ways.add_argument("--once", action="store_true", help="run what is due now, and end; this is what it does anyway")
    ways.add_argument("--daemon", action="store_true", help="wait for each due instant and run what is due, until SIGTERM")
    schedule.add_argument("--at", type=line_of_text, metavar="INSTANT", help=_AT)
    params(schedule)
    workers(schedule)
    who_asks(schedule)
    setting_flags(schedule)


def add_backfill(commands: Adding) -> None:
    """`limpet backfill`, and its flags."""
    backfill = commands.add("mend", "backfill", "make the slots of a span that are missing, unfinished or failed, and nothing else")
    spider_file(backfill)
    backfill.add_argument("--from", dest="first", required=True, type=slot, metavar="SLOT", help="the first slot; today is the present one")
    backfill.add_argument("--to", dest="last", required=True, type=slot, metavar="SLOT", help="the last slot, which is made too")
    backfill.add_argument(
        "--only-missing",
        action="store_true",
        default=True,
        help="make only what is missing, unfinished or failed; this is what it does anyway",
    )
    backfill.add_argument("--at", type=line_of_text, metavar="INSTANT", help=_AT)
    params(backfill)
    workers(backfill)
    who_asks(backfill)
    setting_flags(backfill)


def add_diff(commands: Adding) -> None:
    """`limpet diff`, and its flags."""
    diff = commands.add("look", "diff", "what is new, gone and changed in a dataset from one slot to another")
    diff.add_argument("dataset", help="its name, such as product")
    diff.add_argument(
        "--slot", action="append", type=slot, required=True, metavar="S", help="given twice: the older slot, then the newer one"
    )
    diff.add_argument(
        "--format", choices=("text", "jsonl", "csv"), help="a line a record, a JSON object a line, or a CSV line a field (text)"
    )
    diff.add_argument("--fields", type=line_of_text, metavar="F,F", help="compare these fields alone: price,stock")
    diff.add_argument("-o", "--output", metavar="FILE", help="a file, which appears whole or not at all (stdout)")
    diff.add_argument("--spider", metavar="NAME", help="whose dataset, where several spiders have one of that name")
