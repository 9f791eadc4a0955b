"""`limpet dead`, `limpet export`, `limpet verify`: what is there, and the proof of it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import BinaryIO

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import count, cut, moment, note, say, say_json, table
from limpet.cli.slots import meant_in
from limpet.errors import UsageError
from limpet.store import cursor
from limpet.store.atomic import final_place, is_special, whole_file
from limpet.store.export import Choice, DatasetRow, Tally, choose, chunks, every, owner_of
from limpet.store.sqlite import is_sqlite_file
from limpet.store.views import DeadLetter, dead_letters, snapshot

#: Characters of a message in the list of dead letters; --detail prints all.
DETAIL_CHARS = 100
#: Characters of a file that holds a cursor.
CURSOR_CHARS_MAX = 16 * 2**20


# -- dead -------------------------------------------------------------------------------------


def dead(args: argparse.Namespace) -> int:
    """List the dead letters."""
    with database.read(args) as store:
        for job in database.jobs_of(store, args):
            with snapshot(store.db) as db:
                letters = dead_letters(db, job, reason=args.reason or "")
                shown = islice(letters, args.limit) if args.limit else letters
                number = 0
                for letter in shown:
                    number += 1
                    if args.json:
                        say_json({"job": job.name, **asdict(letter)})
                    else:
                        say(_letter(letter, whole=args.detail))
                more = args.limit and next(letters, None) is not None
            if not args.json:
                note(f"{job.name}: {count(number, 'dead letter')}" + (", and more: --limit 0 lists all" if more else ""))
    return Exit.COMPLETE


def _letter(letter: DeadLetter, *, whole: bool) -> str:
    line = f"{letter.text}\n    {letter.reason}, after {count(letter.tries, 'try', 'tries')}, {moment(letter.at_ms)}"
    if not letter.detail:
        return line
    if whole:
        return "\n".join([line, *(f"    {text}" for text in letter.detail.rstrip().splitlines())])
    return f"{line}\n    {cut(letter.detail.rstrip().splitlines()[-1].strip(), DETAIL_CHARS)}"


# -- export -----------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    """Write a dataset in key order; digest and cursor go to stderr where the rows go to stdout."""
    if args.slot is not None and args.all_slots:
        raise UsageError("--slot names one slot, --all-slots takes them all: give one of the two")
    with database.read(args) as store, snapshot(store.db) as db:
        if args.dataset is None:
            return _list(args, store.db.place, every(db))
        owner = owner_of(db, args.dataset, args.spider or "")
        slot = None if args.slot is None else meant_in(db, owner, args.slot)
        choice = choose(db, args.dataset, spider=owner, slot=slot, all_slots=args.all_slots)
        now = cursor.take(db, choice)
        if args.after is not None:
            choice = cursor.newer(db, choice, cursor.parse(_text_of(args.after)), now)
        tally = Tally()
        write(args.output, chunks(db, choice, args.format, tally), database=database.file_of(store.dsn))
    _show(args, choice, tally, str(now))
    return Exit.COMPLETE


def _text_of(given: str) -> str:
    """A cursor, or the content of the file that is named after an @."""
    if not given.startswith("@"):
        return given
    with open(given[1:], encoding="utf-8", errors="replace") as file:
        return file.read(CURSOR_CHARS_MAX)


def write(output: str | None, pieces: Iterator[bytes], *, database: str) -> None:
    """Write pieces to a file, which appears whole or not at all, or to stdout. UsageError for the place of a database.

    `database` is the file that they come from, "" for a server's.
    """
    if output is None or output == "-":
        if sys.__stdout__ is None:
            raise UsageError("standard output is closed: name a file with -o, or let something read it (> FILE)")
        sys.stdout.flush()
        _write(sys.stdout.buffer, pieces)
    elif is_special(output):
        with open(output, "wb") as device:
            _write(device, pieces)
    else:
        place = final_place(output, database=database)
        if os.path.exists(place) and os.path.getsize(place) and is_sqlite_file(place):
            raise UsageError(f"{output} is another database, which is never replaced: name another file")
        with whole_file(output, database=database) as part, open(part, "wb") as file:
            _write(file, pieces)


def _write(file: BinaryIO, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        file.write(piece)
    file.flush()


def _show(args: argparse.Namespace, choice: Choice, tally: Tally, now: str) -> None:
    to_stdout = args.output in (None, "-")
    if args.json and not to_stdout:
        size = os.path.getsize(args.output) if not is_special(args.output) else None
        facts = {
            "dataset": choice.type.name,
            "rows": tally.rows,
            "sha256": tally.sha256,
            "format": args.format,
            "file": args.output,
            "bytes": size,
            "cursor": now,
        }
        say_json(facts)
        return
    line = f"{choice.type.name}: {count(tally.rows, 'record')}, SHA-256 {tally.sha256}"
    (note if to_stdout else say)(line if to_stdout else f"{line}, in {args.output}")
    note(f"cursor: {now}")


def _list(args: argparse.Namespace, place: str, found: list[DatasetRow]) -> int:
    if args.json:
        say_json({"db": place, "datasets": [asdict(row) for row in found]})
        return Exit.COMPLETE
    if not found:
        raise UsageError(f"{place} has no dataset yet")
    rows: list[tuple[object, ...]] = [("dataset", "spider", "records", "key", "scope", "slots")]
    rows += [(r.name, r.spider, r.rows, ", ".join(r.key), r.scope, ", ".join(map(repr, r.slots))) for r in found]
    say(table(rows))
    return Exit.COMPLETE
