"""The words of the command line: every command, its arguments and flags, and the help that is printed.

Nothing is done here. Flags of settings are made from the table in `settings.py`, so a new setting is a
new flag without a line here. Help is grouped as the docs are: run, look, mend, operate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from limpet.cli.configuration import flag_of, parsed
from limpet.cli.exits import Exit
from limpet.errors import UsageError
from limpet.settings import documented

EPILOG = """exit codes:
  0 complete and verified    3 complete, with dead letters    6 nothing to do      9 ownership lost
  1 internal error           4 stopped, resumable             7 stalled, says why
  2 usage                    5 budget reached                 8 verify failed

`limpet COMMAND --help` says more. Every flag of a setting is also LIMPET_<SETTING> in the environment and a
line of limpet.toml; `limpet config` shows each value and where it came from."""

GROUPS = ("run", "look", "mend", "operate")


#: What jobs of `limpet crawl` are named after: it is a spider like any other, and goes on by its own command.
CRAWL = "crawl"


#: Workers of one command: more than cores do not help, and each has three connections to the database.
WORKERS_MAX = 256


class Parser(argparse.ArgumentParser):
    """An argparse parser that ends a wrong call with the exit code of all wrong calls, in two lines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where to read more."""
        print(f"{self.prog}: {message}\n(`{self.prog} --help` says more)", file=sys.stderr)
        raise SystemExit(int(Exit.USAGE))


class CommandParser(Parser):
    """The parser of one command. It refuses what it does not know itself, so that the message names it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and leave nothing over."""
        found, left_over = super().parse_known_args(args, namespace)
        if left_over:
            self.error(f"unrecognized arguments: {' '.join(left_over)}")
        return found, left_over


class Commands:
    """The commands, as they are added: name -> (group, one line)."""

    def __init__(self, subparsers: Any, common: argparse.ArgumentParser) -> None:
        self._subparsers = subparsers
        self._common = common
        self.listed: dict[str, tuple[str, str]] = {}

    def add(self, group: str, name: str, line: str, *, epilog: str = "") -> argparse.ArgumentParser:
        """A parser for one more command."""
        self.listed[name] = (group, line)
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name,
            prog=f"limpet {name}", help=line, description=_sentence(line), epilog=epilog, parents=[self._common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        return parser


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = Parser(prog="limpet", add_help=False, usage="limpet COMMAND ...")
    top.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    top.add_argument("--version", action="version", version=f"limpet {installed_version()}")
    commands = Commands(top.add_subparsers(dest="command", parser_class=CommandParser), _common())
    for add in (_run_commands, _look_commands, _mend_commands, _operate_commands):
        add(commands)
    top.format_help = lambda: overview(commands)  # type: ignore[method-assign]
    return top


def installed_version() -> str:
    """The version of this Limpet."""
    try:
        return version("limpet")
    except PackageNotFoundError:  # run from a checkout that is not installed
        import limpet

        return limpet.__version__


def overview(commands: Commands) -> str:
    """What `limpet --help` prints."""
    lines = ["usage: limpet COMMAND ...", "", "A crawler that cannot lose its place: kill it, run it again, and it goes on.", ""]
    for group in GROUPS:
        for at, (name, line) in enumerate((n, text) for n, (g, text) in commands.listed.items() if g == group):
            lines.append(f"  {group if at == 0 else '':<9}{name:<9}{line}")
        lines.append("")
    return "\n".join([*lines, EPILOG, ""])


def _common() -> argparse.ArgumentParser:
    """What every command takes."""
    common = Parser(add_help=False)
    group = common.add_argument_group("everywhere")
    group.add_argument(
        "--db",
        type=line_of_text,
        metavar="ADDRESS",
        help="sqlite:///file.db or a path; else LIMPET_DB, else the only job database here",
    )
    group.add_argument("--config", metavar="FILE", help="read this file instead of ./limpet.toml")
    group.add_argument("--json", action="store_true", help="print JSON with stable fields")
    group.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="log on stderr from this level on (warning)",
    )
    group.add_argument("--log-format", default="text", choices=("text", "json"), help="a line of text or of JSON a record (text)")
    group.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    return common


# -- run --------------------------------------------------------------------------------------


def _run_commands(commands: Commands) -> None:
    demo = commands.add("run", "demo", "crawl a small shop on loopback, killing the crawler on the way, and show what was collected")
    demo.add_argument("--kills", type=whole, default=5, metavar="N", help="SIGKILLs on the way (5)")
    demo.add_argument("--products", type=whole, default=600, metavar="N", help="products of the shop (600)")
    demo.add_argument("--faults", choices=("none", "mild", "harsh"), default="mild", help="what goes wrong on the shop's side (mild)")
    demo.add_argument("--seed", type=whole, default=1, metavar="N", help="of the shop and of the moments of the kills (1)")

    new = commands.add("run", "new", "write a commented spider and its test, both of which run as they are")
    new.add_argument("name", help="a-z, 0-9 and _: NAME.py and test_NAME.py are written")
    new.add_argument("--start", metavar="URL", type=line_of_text, help="the first page (that of the demo shop)")
    new.add_argument("--folder", default=".", help="where to write (here)")

    crawl = commands.add("run", "crawl", "collect pages without any code, into the dataset `page`")
    crawl.add_argument("urls", nargs="*", type=line_of_text, metavar="URL", help="start pages")
    _starts_from(crawl)
    crawl.add_argument("--scope", choices=("host", "domain", "prefix"), default="host", help="which links are followed (host)")
    crawl.add_argument("--keep", choices=("body",), action="append", default=[], help="also keep the body of each page")
    _job_flags(crawl, 'the job ("")')
    crawl.set_defaults(spider=CRAWL)
    _setting_flags(crawl)

    run = commands.add("run", "run", "run a spider, or go on with it, or join it where it is running")
    _file(run)
    run.add_argument(
        "--start",
        action="append",
        type=line_of_text,
        metavar="URL",
        help="a start page instead of the spider's own; may be repeated",
    )
    _starts_from(run)
    run.add_argument(
        "--param",
        action="append",
        type=pair,
        default=[],
        metavar="NAME=VALUE",
        help="a value for `spider.params`; may be repeated",
    )
    run.add_argument(
        "--workers",
        type=number_of,
        metavar="N|auto",
        help="so many worker processes here, each replaced when it dies; auto: one for each processor (this process alone)",
    )
    _job_flags(run, 'the job: a logical day, or any text ("")')
    _setting_flags(run)

    worker = commands.add("run", "worker", "work on a job that is there, beside other workers, on this or another machine")
    _file(worker)
    worker.add_argument(
        "--param", action="append", type=pair, default=[], metavar="NAME=VALUE", help="a value for `spider.params`; may be repeated"
    )
    worker.add_argument("--wait", action="store_true", help="where there is no work wait for it, also after a job has ended")
    _job_flags(worker, "the job (the spider's oldest that is not finished)", default=None)
    _setting_flags(worker)

    attempt = commands.add("run", "try", "fetch one page, run its handler, print records and links, and write nothing")
    _file(attempt)
    attempt.add_argument("url", metavar="URL", type=line_of_text, help="the page to fetch; robots.txt is obeyed")
    attempt.add_argument("--handler", metavar="NAME", help="this handler, whatever the patterns say")
    attempt.add_argument("--param", action="append", type=pair, default=[], metavar="NAME=VALUE", help="a value for `spider.params`")
    _setting_flags(attempt)


def _starts_from(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--from",
        dest="starts_from",
        metavar="FILE",
        type=line_of_text,
        help="start pages, one a line; - is stdin. Any number: the file is read as the crawl goes on",
    )


def _file(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="the Python file of the spider")
    command.add_argument("--spider", metavar="NAME", default="", help="which one, where the file holds several")


def _job_flags(command: argparse.ArgumentParser, meaning: str, *, default: str | None = "") -> None:
    command.add_argument("--slot", type=line_of_text, default=default, metavar="S", help=meaning)
    command.add_argument("--user-agent", type=line_of_text, metavar="TEXT", help="who asks: name/1 (+https://where.to/complain)")
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def _setting_flags(command: argparse.ArgumentParser) -> None:
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


# -- look -------------------------------------------------------------------------------------


def _look_commands(commands: Commands) -> None:
    status = commands.add("look", "status", "how far each job is, and the exact reason when it waits")
    _which_job(status)
    status.add_argument("--full", action="store_true", help="count every task and attempt, also in a large database")
    status.add_argument("--hosts", type=whole, default=10, metavar="N", help="hosts to name (10)")
    status.add_argument(
        "--check",
        choices=("live", "ready"),
        help="say only whether this machine's workers are alive, or at work: exit code 0 or 7, and 4 where the database is away",
    )

    verify = commands.add("look", "verify", "prove from the rows alone that nothing is lost, double or half written")
    _which_job(verify)
    verify.add_argument("--full", action="store_true", help="everything, not only what came since the last time")

    dead = commands.add("look", "dead", "the dead letters, with their reasons")
    _which_job(dead)
    dead.add_argument("--reason", metavar="R", help="only those of this reason, or of its family: handler, status 500")
    dead.add_argument("--limit", type=whole, default=50, metavar="N", help="at most so many; 0 means all (50)")
    dead.add_argument("--detail", action="store_true", help="with the whole message or traceback")

    export = commands.add("look", "export", "write a dataset in key order, and its SHA-256")
    export.add_argument("dataset", nargs="?", help="its name, such as product; without it, what there is")
    export.add_argument("--format", choices=("jsonl", "csv"), default="jsonl", help="a JSON object a line, or CSV (jsonl)")
    export.add_argument("-o", "--output", metavar="FILE", help="a file, which appears whole or not at all (stdout)")
    export.add_argument("--spider", metavar="NAME", help="whose dataset, where several spiders have one of that name")
    export.add_argument("--slot", type=line_of_text, metavar="S", help="the rows of this slot")
    export.add_argument("--all-slots", action="store_true", help="the rows of every slot, with the slot in each")

    explain = commands.add(
        "look", "explain", "how a URL becomes its key, and what became of it",
        epilog="With --key only key texts are printed: of the URLs, or of the lines of stdin. A line is a URL, or a JSON object\n"
        "with input, and perhaps base, charset, profile and options. A URL that is rejected gives an empty line (null with\n"
        "--json) and the reason on stderr.",
    )  # fmt: skip
    explain.add_argument("urls", nargs="*", type=str, metavar="URL", help="what to explain, as it was found; nothing is fetched")
    explain.add_argument("--key", action="store_true", help="print key texts alone; URLs may come as lines on stdin")
    explain.add_argument(
        "--file", metavar="FILE", help="the spider's file: then scope, route and robots are explained as it would have them"
    )
    explain.add_argument("--profile", metavar="NAME", help="exact, standard or aggressive (the job's own, else standard)")
    explain.add_argument("--option", action="append", default=[], metavar="NAME=on", help="an option of the key profile; may be repeated")
    explain.add_argument("--base", metavar="URL", help="what a relative URL is resolved against")
    _which_job(explain)

    shell = commands.add("look", "shell", "a Python prompt with `page`, as a handler would see it")
    shell.add_argument("url", metavar="URL", type=line_of_text, help="the page to fetch; robots.txt is obeyed")
    shell.add_argument("-c", dest="code", metavar="CODE", help="run this instead of a prompt")
    _setting_flags(shell)

    hosts = commands.add("look", "hosts", "hosts with what waits of them, their pace, and why they wait")
    hosts.add_argument("hosts", nargs="*", type=line_of_text, metavar="HOST", help="these hosts alone: example.com, or a URL of theirs")
    hosts.add_argument("--limit", type=whole, default=30, metavar="N", help="so many hosts with open tasks at the most (30)")
    _which_job(hosts)


def _which_job(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("which job (where there are several)")
    group.add_argument("--spider", metavar="NAME", help="the spider's name")
    group.add_argument("--slot", type=line_of_text, metavar="S", help="its slot")


# -- mend -------------------------------------------------------------------------------------


def _mend_commands(commands: Commands) -> None:
    retry = commands.add("mend", "retry", "put dead letters back to be tried again, and end a pause")
    retry.add_argument("urls", nargs="*", type=line_of_text, metavar="URL", help="only these, in whatever state they ended")
    retry.add_argument("--reason", metavar="R", help="only those of this reason, or of its family")
    retry.add_argument(
        "--state", action="append", choices=("dead", "skipped", "done"), help="put back what ended so; may be repeated (dead)"
    )
    _which_job(retry)

    repair = commands.add("mend", "repair", "put the tasks of broken batches back, as a new batch; verify names them")
    repair.add_argument("batches", nargs="*", metavar="SHARD:N", type=batch, help="batches; without any, those that verify finds")
    _which_job(repair)

    migrate = commands.add("mend", "migrate", "bring a database to the schema of this release")
    migrate.add_argument("--print", dest="printed", action="store_true", help="print the SQL and change nothing")

    backup = commands.add("mend", "backup", "copy the database while it is in use, and check the copy")
    backup.add_argument("output", metavar="FILE", help="the copy, which appears whole or not at all")
    backup.add_argument("--force", action="store_true", help="replace a file that is there")


# -- operate ----------------------------------------------------------------------------------


def _operate_commands(commands: Commands) -> None:
    pause = commands.add("operate", "pause", "let hosts be asked nothing more, or let a whole job claim nothing more, until resume")
    _hosts_or_job(pause)
    pause.add_argument("--reason", default="by hand", type=line_of_text, metavar="TEXT", help="what status says meanwhile (by hand)")
    _which_job(pause)
    resume = commands.add("operate", "resume", "end the pause of hosts, or that of a whole job")
    _hosts_or_job(resume)
    _which_job(resume)

    commands.add("operate", "doctor", "check versions, files, locks, disk and database")

    config = commands.add("operate", "config", "each setting, its value, and where it came from")
    config.add_argument("file", nargs="?", metavar="FILE", help="a spider's file, to see what it says")
    config.add_argument("--spider", metavar="NAME", default="", help="which one, where the file holds several")
    _setting_flags(config)


def _hosts_or_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("hosts", nargs="*", type=line_of_text, metavar="HOST", help="these hosts alone: example.com, or a URL of theirs")
    command.add_argument("--job", action="store_true", help="the whole job, as without a HOST")


# -- values -----------------------------------------------------------------------------------


def line_of_text(text: str) -> str:
    """A text that any database can hold, and that is one line."""
    if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise argparse.ArgumentTypeError(f"{text!r} holds characters that are no text")
    return text


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)


def number_of(text: str) -> str:
    """`auto`, or how many workers."""
    if text != "auto" and not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= WORKERS_MAX):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, or a number from 1 to {WORKERS_MAX}")
    return text


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = line_of_text(text).partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, with a name as in Python")
    return name, value


def batch(text: str) -> tuple[int, int]:
    """SHARD:N, as verify names a batch."""
    shard, colon, n = text.partition(":")
    if not (colon and shard.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected SHARD:N, such as 3:127, as verify names it")
    return int(shard), int(n)


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:] + "."
