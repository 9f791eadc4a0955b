"""`limpet gc`: slots that are long finished and proved give their tasks and tries back."""

from __future__ import annotations

import argparse
import os

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import count, moment, note, say, say_json, size, table
from limpet.store import Store
from limpet.store import gc as store_gc
from limpet.store.gc import Candidate


def gc(args: argparse.Namespace) -> int:
    """Seal and remove what is old enough; 6 where nothing is."""
    with database.of_database(args) as store:
        if args.vacuum:
            store_gc.check_vacuum(store.db)  # before anything is removed
        found = store_gc.candidates(store.db, database.jobs_of(store, args), args.slots_older)
        removable = [one for one in found if not one.why_not]
        if args.dry_run:
            return _show(args, found, removable)
        before, removed = _bytes(store), 0
        for one in removable:
            removed += _remove(args, store, one)
        if args.vacuum:
            store_gc.vacuum(store.db)
        if not args.json:
            space = f"; the file has {size(_bytes(store))}, had {size(before)}" if args.vacuum else "; what comes next uses their space"
            note(f"{count(removed, 'task')} removed" + (space if removed or args.vacuum else ""))
    return Exit.COMPLETE if removable or args.vacuum else Exit.NOTHING_TO_DO


def _remove(args: argparse.Namespace, store: Store, one: Candidate) -> int:
    if not one.is_sealed and (why := store_gc.seal(store.db, one.job, args.slots_older)):
        note(f"{one.job.name} stays: {why}")
        return 0
    removed = sum(store_gc.remove(store.db, one.job))
    if args.json:
        say_json({"job": one.job.name, "sealed": True, "tasks": one.tasks, "tasks_removed": removed})
    else:
        say(f"{one.job.name}: sealed; {count(removed, 'task')} with their tries removed")
    return removed


def _show(args: argparse.Namespace, found: list[Candidate], removable: list[Candidate]) -> int:
    if args.json:
        say_json({"jobs": [_as_json(one) for one in found]})
    else:
        rows = [(one.job.name, moment(one.last_ms), one.tasks, one.why_not or "would be removed") for one in found]
        say(table([("job", "last batch", "tasks", ""), *rows]))
    return Exit.COMPLETE if removable else Exit.NOTHING_TO_DO


def _as_json(one: Candidate) -> dict[str, object]:
    return {
        "job": one.job.name, "last_ms": one.last_ms, "tasks": one.tasks, "sealed": one.is_sealed, "removable": not one.why_not,
        "why_not": one.why_not,
    }  # fmt: skip


def _bytes(store: Store) -> int:
    file = database.file_of(store.dsn)
    return os.path.getsize(file) if file and os.path.exists(file) else 0
