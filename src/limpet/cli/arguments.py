"""The words of the command line: every command, its arguments and flags, and the help that is printed.

Nothing is done here. Flags of settings are made from the table in `settings.py`, so a new setting is a
new flag without a line here. Help is grouped as the docs are: run, look, mend, operate.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from limpet.cli.exits import Exit
from limpet.cli.flags import job_flags, params, setting_flags, spider_file, starts_from, which_job, workers
from limpet.cli.money_arguments import add_cost, add_seed
from limpet.cli.slot_arguments import add_backfill, add_diff, add_schedule
from limpet.cli.values import age, batch, line_of_text, pair, slot, whole

EPILOG = """exit codes:
  0 complete and verified    3 complete, with dead letters    6 nothing to do      9 ownership lost
  1 internal error           4 stopped, resumable             7 stalled, says why
  2 usage                    5 budget reached                 8 verify failed

`limpet COMMAND --help` says more. Every flag of a setting is also LIMPET_<SETTING> in the environment and a
line of limpet.toml; `limpet config` shows each value and where it came from."""

GROUPS = ("run", "look", "mend", "operate")


#: What jobs of `limpet crawl` are named after: it is a spider like any other, and goes on by its own command.
CRAWL = "crawl"


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
    starts_from(crawl)
    crawl.add_argument("--scope", choices=("host", "domain", "prefix"), default="host", help="which links are followed (host)")
    crawl.add_argument("--keep", choices=("body",), action="append", default=[], help="also keep the body of each page")
    job_flags(crawl, 'the job ("")')
    crawl.set_defaults(spider=CRAWL)
    setting_flags(crawl)

    run = commands.add("run", "run", "run a spider, or go on with it, or join it where it is running")
    spider_file(run)
    run.add_argument(
        "--start",
        action="append",
        type=line_of_text,
        metavar="URL",
        help="a start page instead of the spider's own; may be repeated",
    )
    starts_from(run)
    params(run)
    workers(run)
    run.add_argument("--ray", type=line_of_text, metavar="ADDRESS", help="let a Ray cluster place the workers (no)")
    job_flags(run, 'the job: a logical day, any text, or today, the schedule\'s present slot ("")')
    setting_flags(run)

    worker = commands.add("run", "worker", "work on a job that is there, beside other workers, on this or another machine")
    spider_file(worker)
    params(worker)
    worker.add_argument("--wait", action="store_true", help="where there is no work wait for it, also after a job has ended")
    job_flags(worker, "the job (the spider's oldest that is not finished)", default=None)
    setting_flags(worker)

    add_seed(commands)
    add_schedule(commands)

    attempt = commands.add("run", "try", "fetch one page, run its handler, print records and links, and write nothing")
    spider_file(attempt)
    attempt.add_argument("url", metavar="URL", type=line_of_text, help="the page to fetch; robots.txt is obeyed")
    attempt.add_argument("--handler", metavar="NAME", help="this handler, whatever the patterns say")
    attempt.add_argument("--param", action="append", type=pair, default=[], metavar="NAME=VALUE", help="a value for `spider.params`")
    setting_flags(attempt)


# -- look -------------------------------------------------------------------------------------


def _look_commands(commands: Commands) -> None:
    status = commands.add("look", "status", "how far each job is, and the exact reason when it waits")
    which_job(status)
    status.add_argument("--full", action="store_true", help="count every task and attempt, also in a large database")
    status.add_argument("--hosts", type=whole, default=10, metavar="N", help="hosts to name (10)")
    status.add_argument(
        "--check",
        choices=("live", "ready"),
        help="say only whether this machine's workers are alive, or at work: exit code 0 or 7, and 4 where the database is away",
    )

    verify = commands.add("look", "verify", "prove from the rows alone that nothing is lost, double or half written")
    which_job(verify)
    verify.add_argument("--full", action="store_true", help="everything, not only what came since the last time")

    dead = commands.add("look", "dead", "the dead letters, with their reasons")
    which_job(dead)
    dead.add_argument("--reason", metavar="R", help="only those of this reason, or of its family: handler, status 500")
    dead.add_argument("--limit", type=whole, default=50, metavar="N", help="at most so many; 0 means all (50)")
    dead.add_argument("--detail", action="store_true", help="with the whole message or traceback")

    export = commands.add("look", "export", "write a dataset in key order, and its SHA-256")
    export.add_argument("dataset", nargs="?", help="its name, such as product; without it, what there is")
    export.add_argument("--format", choices=("jsonl", "csv"), default="jsonl", help="a JSON object a line, or CSV (jsonl)")
    export.add_argument("-o", "--output", metavar="FILE", help="a file, which appears whole or not at all (stdout)")
    export.add_argument("--spider", metavar="NAME", help="whose dataset, where several spiders have one of that name")
    export.add_argument("--slot", type=slot, metavar="S", help="the rows of this slot; today is the present one")
    export.add_argument("--all-slots", action="store_true", help="the rows of every slot, with the slot in each")
    export.add_argument(
        "--after", type=line_of_text, metavar="CURSOR", help="only rows written since the export that printed this cursor; @FILE reads it"
    )

    add_diff(commands)

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
    which_job(explain)

    shell = commands.add("look", "shell", "a Python prompt with `page`, as a handler would see it")
    shell.add_argument("url", metavar="URL", type=line_of_text, help="the page to fetch; robots.txt is obeyed")
    shell.add_argument("-c", dest="code", metavar="CODE", help="run this instead of a prompt")
    setting_flags(shell)

    hosts = commands.add("look", "hosts", "hosts with what waits of them, their pace, and why they wait")
    hosts.add_argument("hosts", nargs="*", type=line_of_text, metavar="HOST", help="these hosts alone: example.com, or a URL of theirs")
    hosts.add_argument("--limit", type=whole, default=30, metavar="N", help="so many hosts with open tasks at the most (30)")
    which_job(hosts)

    add_cost(commands)


# -- mend -------------------------------------------------------------------------------------


def _mend_commands(commands: Commands) -> None:
    retry = commands.add("mend", "retry", "put dead letters back to be tried again, and end a pause")
    retry.add_argument("urls", nargs="*", type=line_of_text, metavar="URL", help="only these, in whatever state they ended")
    retry.add_argument(
        "--task", action="append", default=[], metavar="TEXT", help="only this task, by its text (`dead` prints it); may be repeated"
    )
    retry.add_argument("--reason", metavar="R", help="only those of this reason, or of its family")
    retry.add_argument(
        "--state", action="append", choices=("dead", "skipped", "done"), help="put back what ended so; may be repeated (dead)"
    )
    which_job(retry)

    add_backfill(commands)

    repair = commands.add("mend", "repair", "put the tasks of broken batches back, as a new batch; verify names them")
    repair.add_argument("batches", nargs="*", metavar="SHARD:N", type=batch, help="batches; without any, those that verify finds")
    which_job(repair)

    migrate = commands.add("mend", "migrate", "bring a database to the schema of this release")
    migrate.add_argument("file", nargs="?", metavar="FILE", help="a spider's file, whose tables are made or widened too")
    migrate.add_argument("--spider", metavar="NAME", default="", help="which one, where the file holds several")
    migrate.add_argument("--print", dest="printed", action="store_true", help="print the SQL and change nothing")

    backup = commands.add("mend", "backup", "copy the database while it is in use, and check the copy")
    backup.add_argument("output", metavar="FILE", help="the copy, which appears whole or not at all")
    backup.add_argument("--force", action="store_true", help="replace a file that is there")

    gc = commands.add(
        "mend", "gc", "remove the tasks and tries of slots that are long finished and proved; their datasets and ledgers stay"
    )
    gc.add_argument("--slots-older", type=age, required=True, metavar="AGE", help="jobs whose last batch is older: 90d, 12h or 30min")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--vacuum", action="store_true", help="then give the space of a file back to the disk; nobody can write meanwhile")
    which_job(gc)


# -- operate ----------------------------------------------------------------------------------


def _operate_commands(commands: Commands) -> None:
    pause = commands.add("operate", "pause", "let hosts be asked nothing more, or let a whole job claim nothing more, until resume")
    _hosts_or_job(pause)
    pause.add_argument("--reason", default="by hand", type=line_of_text, metavar="TEXT", help="what status says meanwhile (by hand)")
    which_job(pause)
    resume = commands.add("operate", "resume", "end the pause of hosts, or that of a whole job")
    _hosts_or_job(resume)
    which_job(resume)

    alert = commands.add("operate", "alert", "the alerts of this database: list them, send what waits, or try every address")
    alert.add_argument(
        "what", choices=("list", "send", "test"), help="the newest; those that wait; one to each address, to see who gets it"
    )
    alert.add_argument("--limit", type=whole, default=50, metavar="N", help="alerts to list (50)")
    alert.add_argument("--spider", metavar="NAME", help="send those of this spider alone, or try its addresses (every spider)")

    commands.add("operate", "doctor", "check versions, files, locks, disk and database")

    config = commands.add("operate", "config", "each setting, its value, and where it came from")
    config.add_argument("file", nargs="?", metavar="FILE", help="a spider's file, to see what it says")
    config.add_argument("--spider", metavar="NAME", default="", help="which one, where the file holds several")
    setting_flags(config)


def _hosts_or_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("hosts", nargs="*", type=line_of_text, metavar="HOST", help="these hosts alone: example.com, or a URL of theirs")
    command.add_argument("--job", action="store_true", help="the whole job, as without a HOST")


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:] + "."
