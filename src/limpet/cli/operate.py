"""`limpet config`: each setting, its value, and where it came from; and a spider's schedule, with what `--slot today` means."""

from __future__ import annotations

import argparse
import os

from limpet.cli.configuration import read_file, resolve
from limpet.cli.exits import Exit
from limpet.cli.printing import say, say_json, table
from limpet.cli.slots import PLAIN, TODAY, meant
from limpet.engine.load import load
from limpet.errors import UsageError
from limpet.schedule import Schedule
from limpet.settings import Settings


def config(args: argparse.Namespace) -> int:
    """Print the settings that a command given here would have."""
    spider = load(args.file, name=args.spider).spider if args.file else None
    own = {**spider.settings, "user_agent": spider.user_agent} if spider else {}
    resolved = resolve(vars(args), os.environ, read_file(args.config), spider=spider.name if spider else "", own=own)
    its = (spider.schedule if spider else None) or PLAIN
    if args.json:
        settings = {name: {"value": value, "from": origin, "doc": doc} for name, value, origin, doc in resolved.rows()}
        say_json({"settings": settings, "schedule": {"every": str(its), "zone": its.tz, "today": _today(its)}})
        return Exit.COMPLETE
    changed = Settings() != resolved.settings
    say(table([(name, _shown(value), origin) for name, value, origin, _ in resolved.rows()], indent=""))
    of = "schedule" if spider and spider.schedule else "no schedule, so days of UTC"
    say(f"\n{of}: {its}; --slot today is {_today(its) or 'refused, as a day has not one slot'}")
    if not changed:
        say("every setting has its default; flags, LIMPET_<SETTING>, limpet.toml and the spider change them, in this order")
    return Exit.COMPLETE


def _today(its: Schedule) -> str:
    """The slot that `--slot today` means; "" where that is not one."""
    try:
        return meant(TODAY, its)
    except UsageError:
        return ""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"
