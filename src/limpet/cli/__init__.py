"""The command line: `limpet COMMAND ...`.

    arguments.py   every command and flag               configuration.py  which value a setting has, and why
    database.py    which database and job is meant      exits.py          exit codes, and what each error means
    run.py         run, crawl (its spider: pages.py)    trying.py, shell.py   try, shell (a page of onepage.py)
    status.py      status                               explain.py, keys.py   explain, explain --key
    look.py        dead, export                         proving.py        verify, repair
    schedule.py    schedule                             backfill.py, diff.py   backfill, diff
    mend.py        retry, pause, resume, migrate, backup
    spool.py       starts that can be read only once   child.py          the command by which Limpet starts itself

A command is a function from its arguments to an exit code. Modules are imported when their command is
given, so that `limpet status` does not wait for an HTTP client.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from limpet.cli.arguments import parser
from limpet.cli.exits import READER_GONE, Exit, tell

__all__ = ["main"]

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. No error that a user can cause leaves as a traceback."""
    _replace_closed_streams()
    top = parser()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        args = top.parse_args(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    if args.command is None:
        print(top.format_help(), file=sys.stdout if args.help else sys.stderr)
        return Exit.COMPLETE if args.help else Exit.USAGE
    debug = args.debug or os.environ.get("LIMPET_DEBUG", "") not in ("", "0")
    try:
        from limpet.cli.logs import set_up

        set_up(args.log_level, args.log_format)
        code = command_of(args.command)(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _let_stdout_go()
        return READER_GONE
    except (Exception, KeyboardInterrupt) as error:
        return tell(error, as_json=args.json, debug=debug)


def command_of(name: str) -> Command:
    """The function of a command; only its own module is imported."""
    found = _running(name) or _looking(name) or _mending(name) or _operating(name)
    assert found is not None, "the parser knows no other command"
    return found


def _running(name: str) -> Command | None:
    match name:
        case "run":
            from limpet.cli.run import run

            return run
        case "worker":
            from limpet.cli.run import worker

            return worker
        case "crawl":
            from limpet.cli.run import crawl

            return crawl
        case "seed":
            from limpet.cli.seed import seed

            return seed
        case "schedule":
            from limpet.cli.schedule import schedule

            return schedule
        case "try":
            from limpet.cli.trying import attempt

            return attempt
        case "demo":
            from limpet.cli.demo import demo

            return demo
        case "new":
            from limpet.cli.scaffold import new

            return new
    return None


def _looking(name: str) -> Command | None:
    match name:
        case "status":
            from limpet.cli.status import status

            return status
        case "verify":
            from limpet.cli.proving import verify

            return verify
        case "dead":
            from limpet.cli.look import dead

            return dead
        case "export":
            from limpet.cli.look import export

            return export
        case "diff":
            from limpet.cli.diff import diff

            return diff
        case "hosts":
            from limpet.cli.hosts import hosts

            return hosts
        case "cost":
            from limpet.cli.cost import cost

            return cost
        case "explain":
            from limpet.cli.explain import explain

            return explain
        case "shell":
            from limpet.cli.shell import shell

            return shell
    return None


def _mending(name: str) -> Command | None:
    match name:
        case "retry":
            from limpet.cli.mend import retry

            return retry
        case "backfill":
            from limpet.cli.backfill import backfill

            return backfill
        case "repair":
            from limpet.cli.proving import repair

            return repair
        case "migrate":
            from limpet.cli.mend import migrate

            return migrate
        case "backup":
            from limpet.cli.mend import backup

            return backup
        case "gc":
            from limpet.cli.gc import gc

            return gc
    return None


def _operating(name: str) -> Command | None:
    match name:
        case "pause":
            from limpet.cli.hosts import pause

            return pause
        case "resume":
            from limpet.cli.hosts import resume

            return resume
        case "doctor":
            from limpet.cli.doctor import doctor

            return doctor
        case "config":
            from limpet.cli.operate import config

            return config
        case "alert":
            from limpet.cli.alert import alert

            return alert
    return None


def _replace_closed_streams() -> None:
    """Whoever started this process may have closed its standard streams: what is said there goes nowhere.

    Their numbers are taken first: else a database would get one, and whatever is printed by number would go into it.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nowhere)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _let_stdout_go() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, without a second error at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
