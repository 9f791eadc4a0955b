"""`limpet diff`: what is new, gone and changed in a dataset from one slot to another."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterator
from dataclasses import asdict

from limpet.batch import canonical_json
from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.look import write
from limpet.cli.printing import clean, count, cut, note, say, say_json
from limpet.cli.slots import meant_in
from limpet.errors import UsageError
from limpet.store.diff import Change, Counted, Pair, changes, pair_of
from limpet.store.export import owner_of
from limpet.store.views import snapshot

#: Changes that are joined before they are written.
CHUNK_LINES = 500
#: Characters of a value in a line for people.
VALUE_CHARS = 80

MARKS = {"new": "+", "gone": "-", "changed": "~"}


def diff(args: argparse.Namespace) -> int:
    """Write the changes in key order, and their numbers; 0 whether there are any or none."""
    if len(args.slot) != 2:
        raise UsageError("diff: give --slot twice: the older slot, then the newer one")
    counted = Counted()
    with database.read(args) as store, snapshot(store.db) as db:
        owner = owner_of(db, args.dataset, args.spider or "")
        older, newer = (meant_in(db, owner, slot) for slot in args.slot)
        fields = [name.strip() for name in args.fields.split(",")] if args.fields else []
        pair = pair_of(db, args.dataset, older, newer, spider=owner, fields=fields)
        pieces = _chunks(_lines(args.format or "text", pair, changes(db, pair, counted)))
        if args.json and args.output is None and args.format is None:
            for _ in pieces:  # the numbers alone
                pass
        else:
            write(args.output, pieces, database=database.file_of(store.dsn))
    facts = {"dataset": pair.type.name, "slots": [older, newer], **asdict(counted)}
    to_stdout = args.output in (None, "-")
    if args.json and (not to_stdout or args.format is None):
        say_json(facts)
    else:
        told = ", ".join(f"{count(number)} {word}" for word, number in asdict(counted).items())
        (note if to_stdout else say)(f"{pair.type.name} from {older!r} to {newer!r}: {told}")
    return Exit.COMPLETE


def _chunks(lines: Iterator[str]) -> Iterator[bytes]:
    held: list[str] = []
    for line in lines:
        held.append(line)
        if len(held) >= CHUNK_LINES:
            yield "".join(held).encode("utf-8", "backslashreplace")
            held.clear()
    yield "".join(held).encode("utf-8", "backslashreplace")


def _lines(form: str, pair: Pair, found: Iterator[Change]) -> Iterator[str]:
    if form == "csv":
        yield _csv_line(["change", *pair.type.key, "field", "old", "new"])
    make = {"text": _text, "jsonl": _json, "csv": _csv}[form]
    for change in found:
        yield make(pair, change)


def _sides(pair: Pair, change: Change) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """The key, and the compared fields as they were and are, as an export has them."""
    old, new = ({} if values is None else pair.type.thaw(values) for values in (change.old, change.new))
    key = {name: (new or old)[name] for name in pair.type.key}
    compared = [{name: side[name] for name in pair.compared if name in side} for side in (old, new)]
    return key, compared[0], compared[1]


def _json(pair: Pair, change: Change) -> str:
    key, old, new = _sides(pair, change)
    said: dict[str, object] = {"change": change.what, "key": key}
    if change.what == "changed":
        said["fields"] = {name: {"old": old[name], "new": new[name]} for name in change.fields}
    said |= {word: side for word, side in (("old", old), ("new", new)) if side}
    return f"{canonical_json(said)}\n"


def _csv(pair: Pair, change: Change) -> str:
    key, old, new = _sides(pair, change)
    names = change.fields or [n for n in pair.compared if n not in key and (old | new)[n] is not None] or [""]
    lines = [[change.what, *key.values(), name, old.get(name), new.get(name)] for name in names]
    return "".join(_csv_line([_cell(value) for value in line]) for line in lines)


def _text(pair: Pair, change: Change) -> str:
    key, old, new = _sides(pair, change)
    head = f"{MARKS[change.what]} {' '.join(f'{name}={_shown(value)}' for name, value in key.items())}"
    if change.what == "changed":
        pieces = [f"{name}: {_shown(old[name])} -> {_shown(new[name])}" for name in change.fields]
    else:
        pieces = [f"{name}: {_shown(value)}" for name, value in (old | new).items() if name not in key and value is not None]
    return clean(f"{head}  {'; '.join(pieces)}").rstrip().replace("\n", "\\n") + "\n"


def _shown(value: object) -> str:
    return cut(value if isinstance(value, str) else canonical_json(value), VALUE_CHARS)


def _cell(value: object) -> object:
    if isinstance(value, bool | list | dict):
        return canonical_json(value)
    return "" if value is None else value


def _csv_line(cells: list[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
