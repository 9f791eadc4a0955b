"""Flags that several commands share. Those of settings are made from the table in `settings.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from limpet.cli.configuration import flag_of, parsed
from limpet.cli.values import line_of_text, number_of, pair, slot
from limpet.errors import UsageError
from limpet.settings import documented


def spider_file(command: argparse.ArgumentParser) -> None:
    """The file of a spider, and which of its spiders is meant."""
    command.add_argument("file", metavar="FILE", help="the Python file of the spider")
    command.add_argument("--spider", metavar="NAME", default="", help="which one, where the file holds several")


def starts_from(command: argparse.ArgumentParser) -> None:
    """A file of start pages."""
    command.add_argument(
        "--from",
        dest="starts_from",
        metavar="FILE",
        type=line_of_text,
        help="start pages, one a line; - is stdin. Any number: the file is read as the crawl goes on",
    )


def params(command: argparse.ArgumentParser) -> None:
    """Values for `spider.params`."""
    command.add_argument(
        "--param", action="append", type=pair, default=[], metavar="NAME=VALUE",
        help="a value for `spider.params`; may be repeated. @ENV:VARIABLE is the value of an environment variable",
    )  # fmt: skip


def workers(command: argparse.ArgumentParser) -> None:
    """How many worker processes."""
    command.add_argument(
        "--workers",
        type=number_of,
        metavar="N|auto",
        help="so many worker processes here, each replaced when it dies; auto: one for each processor (this process alone)",
    )


def job_flags(command: argparse.ArgumentParser, meaning: str, *, default: str | None = "") -> None:
    """The slot of a run, who asks, and whether a bar is shown."""
    command.add_argument("--slot", type=slot, default=default, metavar="S", help=meaning)
    who_asks(command)


def who_asks(command: argparse.ArgumentParser) -> None:
    """Who asks, and whether a bar is shown."""
    command.add_argument("--user-agent", type=line_of_text, metavar="TEXT", help="who asks: name/1 (+https://where.to/complain)")
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def which_job(command: argparse.ArgumentParser) -> None:
    """Which job of a database is meant."""
    group = command.add_argument_group("which job (where there are several)")
    group.add_argument("--spider", metavar="NAME", help="the spider's name")
    group.add_argument("--slot", type=slot, metavar="S", help="its slot")


def setting_flags(command: argparse.ArgumentParser) -> None:
    """Every setting, as a flag."""
    group = command.add_argument_group("settings")
    for name, (default, doc) in documented().items():
        shown = f"{doc} ({_shown(default)})".replace("%", "%%")
        if isinstance(default, bool):
            group.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=shown)
        else:
            kind = {int: "N", float: "S" if name.endswith("_s") else "X", tuple: "S,S"}[type(default)]
            group.add_argument(flag_of(name), dest=name, type=_value_of(name), default=None, metavar=kind, help=shown)


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(f"{value:g}" for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def _value_of(name: str) -> Callable[[str], object]:
    def value(text: str) -> object:
        try:
            return parsed(name, text, flag_of(name))
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value
