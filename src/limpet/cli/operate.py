"""`limpet config`: each setting, its value, and where it came from."""

from __future__ import annotations

import argparse
import os

from limpet.cli.configuration import read_file, resolve
from limpet.cli.exits import Exit
from limpet.cli.printing import say, say_json, table
from limpet.engine.load import load
from limpet.settings import Settings


def config(args: argparse.Namespace) -> int:
    """Print the settings that a command given here would have."""
    spider = load(args.file, name=args.spider).spider if args.file else None
    own = {**spider.settings, "user_agent": spider.user_agent} if spider else {}
    resolved = resolve(vars(args), os.environ, read_file(args.config), spider=spider.name if spider else "", own=own)
    if args.json:
        say_json({"settings": {name: {"value": value, "from": origin, "doc": doc} for name, value, origin, doc in resolved.rows()}})
        return Exit.COMPLETE
    changed = Settings() != resolved.settings
    say(table([(name, _shown(value), origin) for name, value, origin, _ in resolved.rows()], indent=""))
    if not changed:
        say("\nevery setting has its default; flags, LIMPET_<SETTING>, limpet.toml and the spider change them, in this order")
    return Exit.COMPLETE


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
