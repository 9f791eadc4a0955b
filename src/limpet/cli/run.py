"""`limpet run`, `limpet crawl` and `limpet worker`: one job, from what is there to what it ends in."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from limpet.cli import database, loop, slots
from limpet.cli.configuration import Resolved, read_file, resolve
from limpet.cli.exits import Exit
from limpet.cli.parameters import params_of
from limpet.cli.printing import count, duration, note, say, say_json, table
from limpet.cli.progress import bar
from limpet.cli.spool import lasting
from limpet.engine.load import load
from limpet.engine.oversight import Crew
from limpet.engine.report import Progress, Report
from limpet.engine.run import join
from limpet.engine.run import run as run_job
from limpet.engine.spider import Spider
from limpet.engine.stopping import Stopping
from limpet.errors import StoreBusy, StoreUnavailable, UsageError
from limpet.store.lease import waiting_lock
from limpet.store.opening import lock_folder_of

log = logging.getLogger("limpet.run")

#: Seconds between two looks for work, with --wait; doubled, up to the second number, while a job stands still.
WAIT_S, WAIT_MAX_S = 3.0, 60.0
#: Ends of a worker after which, with --wait, it looks for work again: complete, nothing to do, or paused by somebody.
WAITED_FOR = frozenset({Exit.COMPLETE, Exit.DEAD_LETTERS, Exit.NOTHING_TO_DO, Exit.STALLED})


def run(args: argparse.Namespace) -> int:
    """Run a spider, or go on with it; the exit code of its report."""
    spider = load(args.file, name=args.spider).spider
    slots.settle(args, spider)
    resolved = resolved_for(args, spider)
    address = database.choose(resolved, default=f"{spider.name}.db")
    return _run_and_report(args, spider, resolved, address, args.start)


def crawl(args: argparse.Namespace) -> int:
    """Collect pages into the dataset `page`, without any code of the user's."""
    from limpet.cli.pages import pages_spider

    for url in args.urls:
        _refuse_without_scheme(url)
    spider = pages_spider(scope=args.scope, keep_body="body" in args.keep)
    slots.settle(args, spider)
    resolved = resolved_for(args, spider)
    address = database.choose(resolved, default=f"{spider.name}.db")
    return _run_and_report(args, spider, resolved, address, args.urls)


def resolved_for(args: argparse.Namespace, spider: Spider) -> Resolved:
    """The settings of a spider's run. Who asks is put into the spider, where the engine looks."""
    own = {**spider.settings, "user_agent": spider.user_agent}
    resolved = resolve(vars(args), os.environ, read_file(args.config), spider=spider.name, own=own)
    spider.user_agent = resolved.extras["user_agent"]
    return resolved


def _run_and_report(args: argparse.Namespace, spider: Spider, resolved: Resolved, address: str, starts: Sequence[str] | None) -> int:
    report = report_of(args, spider, resolved, address, starts)
    show(report, spider.name, address, as_json=args.json)
    return report.exit_code


def report_of(args: argparse.Namespace, spider: Spider, resolved: Resolved, address: str, starts: Sequence[str] | None = None) -> Report:
    """Run the job that the arguments name; what it ended in."""
    params = params_of(args)
    starts_from = getattr(args, "starts_from", None)
    slots.remember(address, spider, resolved.settings)
    if starts_from is not None:
        starts_from = lasting(starts_from, address)
    if not args.json and sys.stderr.isatty():
        note(f"{spider.name}: {database.place(address)}; Ctrl-C stops it, and the same command goes on")
    crew: Crew | None = None
    if getattr(args, "ray", None):
        from limpet.cli.ray_runner import ray_crew_of

        crew = ray_crew_of(args, resolved.settings, address)
    elif getattr(args, "workers", None):
        from limpet.cli.crew import crew_of

        crew = crew_of(args, resolved.settings, address)
    with bar(quiet=args.quiet or args.json) as on_progress:
        running = run_job(
            spider, db=address, slot=args.slot, starts=starts, starts_from=starts_from, settings=resolved.settings, params=params,
            on_progress=on_progress, crew=crew, alerts=resolved.alerts,
        )  # fmt: skip
        return loop.run(running)


def worker(args: argparse.Namespace) -> int:
    """Work on a job that is there, beside others; 6 where there is none that waits, unless that is waited for."""
    from limpet.cli.crew import number_in_crew

    spider = load(args.file, name=args.spider).spider
    slots.settle(args, spider)
    resolved = resolved_for(args, spider)
    address = database.choose(resolved, default=f"{spider.name}.db")
    parent = sys.stdin.fileno() if number_in_crew() is not None else None
    with bar(quiet=args.quiet or args.json) as on_progress:
        report = loop.run(_join(args, spider, resolved, address, on_progress, parent))
    show(report, spider.name, address, as_json=args.json)
    return report.exit_code


async def _join(
    args: argparse.Namespace, spider: Spider, resolved: Resolved, address: str, on_progress: Callable[[Progress], None] | None,
    parent: int | None,
) -> Report:  # fmt: skip
    """Join a job; with --wait again and again, for as long as nobody stops this process and nothing is wrong with a job."""
    params = params_of(args)

    async def once() -> Report:
        return await join(
            spider,
            db=address,
            slot=args.slot,
            settings=resolved.settings,
            params=params,
            on_progress=on_progress,
            parent=parent,
            alerts=resolved.alerts,
        )

    if not args.wait:
        return await once()
    stop = asyncio.Event()
    with waiting_lock(lock_folder_of(database.file_of(address))), Stopping(stop.set).listening(to_signals=True):  # also between two jobs
        wait_s = WAIT_S
        while True:
            try:
                report = await once()
            except (StoreUnavailable, StoreBusy) as error:
                log.warning("the database is away, waiting for it: %s", error)
                report = Report(Exit.NOTHING_TO_DO, str(error), spider.name)
            if report.exit_code not in WAITED_FOR:
                return report
            if report.done:
                log.info("%s: %s; waiting for work", report.job, report.message)
            wait_s = min(2 * wait_s, WAIT_MAX_S) if report.exit_code == Exit.STALLED else WAIT_S
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), wait_s)
                return replace(report, exit_code=Exit.STOPPED, message="stopped while waiting for work")


def show(report: Report, spider: str, address: str, *, as_json: bool) -> None:
    """Print what a run ended in, and what to do next."""
    if as_json:
        say_json({**report.as_json(), "db": database.place(address)})
        return
    say(f"{report.job}: {report.message}")
    states = [("done", report.done), ("skipped", report.skipped), ("dead", report.dead), ("open", report.pending)]
    say("  " + ", ".join(f"{count(number)} {state}" for state, number in states if number or state == "done"))
    if report.records:
        named = [(table_of.removeprefix(f"{spider}_"), number) for table_of, number in sorted(report.records.items())]
        say(table([(name, number, "record" if number == 1 else "records") for name, number in named]))
    if report.requests:
        say(f"  {count(report.requests, 'request')} in {duration(report.seconds)}")
    say(f"  database: {database.place(address)}")


def _refuse_without_scheme(url: str) -> None:
    if "://" not in url and not url.lower().startswith(("http:", "https:")):
        raise UsageError(f"{url!r} is no URL: write https://{url.lstrip('/')} or http://{url.lstrip('/')}")
