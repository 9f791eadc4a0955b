"""`limpet seed FILE --from CSV`: the rows of a file as keyed tasks, millions of them, once."""

from __future__ import annotations

import argparse
from datetime import date

from limpet.cli import database, slots
from limpet.cli.exits import Exit
from limpet.cli.parameters import params_of
from limpet.cli.printing import count, say, say_json
from limpet.cli.run import resolved_for
from limpet.engine.calls import CallSchema
from limpet.engine.csvfile import Csv
from limpet.engine.load import load
from limpet.engine.seeding import seed as seed_job
from limpet.engine.sources import source_of_csv
from limpet.engine.spider import Spider
from limpet.errors import UsageError
from limpet.store import open_store


def seed(args: argparse.Namespace) -> int:
    """Put the rows in, and say how many were new."""
    spider = load(args.file, name=args.spider).spider
    slots.settle(args, spider)
    spider.params.update(params_of(args))
    resolved = resolved_for(args, spider)
    schema = _schema(spider, args.task)
    shared = _shared(schema, Csv.at(args.csv), args.set, args.slot)
    source = source_of_csv(args.csv, schema.handler, shared)
    store = open_store(database.choose(resolved, default=f"{spider.name}.db"), settings=resolved.settings)
    try:
        found = seed_job(store, spider, args.slot, source)
        name = store.job.name if store.job else spider.name
    finally:
        store.close()
    if args.json:
        say_json({"job": name, "new": found.new, "rejected": found.rejected, "whole": found.is_whole, "known": found.was_known})
    elif found.was_known:
        say(f"{name}: {args.csv} was put in before: 0 new tasks")
    elif not found.is_whole:
        say(f"{name}: every shard has a worker: they read {args.csv} from here on, or the next `limpet run` does")
    else:
        rejected = f", {count(found.rejected, 'row')} rejected" if found.rejected else ""
        say(f"{name}: {count(found.new, 'new task')}{rejected}; `limpet run` or `limpet worker` does them")
    return Exit.COMPLETE


def _schema(spider: Spider, name: str) -> CallSchema:
    if name:
        return spider.schema(name)
    calls = [each for each in spider.handler_names() if (handler := spider.handler(each)) and handler.schema]
    if len(calls) != 1:
        raise UsageError(
            f"spider {spider.name} has {len(calls)} handlers of keyed tasks ({', '.join(calls) or 'none'}): name one with --task"
        )
    return spider.schema(calls[0])


def _shared(schema: CallSchema, table: Csv, given: list[str], slot: str) -> dict[str, str]:
    """What all rows have in common, as text: --set, and the slot's day where the key wants a day that the file does not give."""
    shared = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found:
            raise UsageError(f"--set {text!r}: expected NAME=VALUE")
        shared[name] = value
    columns = {*table.heading, *shared}
    for name, argument in schema.arguments.items():
        if name not in columns and argument.kind is date and _is_day(slot):
            shared[name] = slot
            columns.add(name)
    if unknown := columns - schema.arguments.keys():
        raise UsageError(f"{table.place}: {', '.join(sorted(unknown))}: {schema.handler} takes {', '.join(schema.arguments)}")
    if missing := {name for name in schema.key if name not in columns}:
        raise UsageError(
            f"{table.place}: no column {', '.join(sorted(missing))}, which {schema.handler} has in its key; or give it by --set"
        )
    return shared


def _is_day(slot: str) -> bool:
    try:
        date.fromisoformat(slot)
    except ValueError:
        return False
    return True
