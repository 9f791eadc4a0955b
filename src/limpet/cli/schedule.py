"""`limpet schedule`: run the slot that is due, unless it is done or somebody is at it; once, or as a daemon.

It may run any number of times side by side, by cron, as a daemon and by hand, on any number of machines: jobs
are unique by (spider, slot), so all of them mean one job. Two that begin at once share its shards, as any two
workers do.

The daemon does nothing but wait. At each due instant it starts `limpet schedule` for the work, in a process of
its own, so a handler that kills its process costs a try and not the daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from limpet.cli import child, database, loop, parameters, slots
from limpet.cli.configuration import Resolved
from limpet.cli.exits import Exit
from limpet.cli.printing import count, note, say, say_json
from limpet.cli.run import report_of, resolved_for, show
from limpet.engine.load import load
from limpet.engine.spider import Spider
from limpet.engine.stopping import Stopping
from limpet.errors import LimpetError, UsageError
from limpet.schedule import Schedule, Slot, runs
from limpet.store.dialect import public_dsn
from limpet.store.joining import has_jobs
from limpet.store.slots import SlotRow, SlotState, is_empty, jobs_by_slot, look
from limpet.store.views import reading

log = logging.getLogger("limpet.schedule")

#: Seconds after which a waiting daemon reads the clock again: it may have been set, or the machine asleep.
CLOCK_S = 30.0
#: Seconds between two looks at a slot that others work on or that ended without being complete; doubled while it stays so.
LOOK_S, LOOK_MAX_S = 60.0, 600.0
#: Jobs of the latest slots that are looked at, whether they are finished: some statements each, at every trigger.
LOOKED_BACK = 200
#: Stretches of missed slots that are printed; --json has them all.
STRETCHES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a schedule and a database say at an instant."""

    spider: str
    schedule: Schedule
    last: SlotRow  # the slot that was due last
    since: datetime  # when it was due
    due: tuple[Slot, ...]  # every slot since the first one that has a job
    rows: dict[str, SlotRow]  # of those the ones that are not finished, but for the last
    following: Slot

    @property
    def missed(self) -> list[Slot]:
        """Due slots without a job."""
        return [slot for slot in self.due if slot.name in self.rows and self.rows[slot.name].state is SlotState.MISSING]

    @property
    def unfinished(self) -> list[Slot]:
        """Due slots whose job is not finished, among the latest that have one."""
        return [slot for slot in self.due if slot.name in self.rows and self.rows[slot.name].state is not SlotState.MISSING]


def schedule(args: argparse.Namespace) -> int:
    """Run the slot that is due; 0 where another has done it, or is doing it."""
    spider = load(args.file, name=args.spider).spider
    if spider.schedule is None:
        raise UsageError(f'{args.file}: spider {spider.name} has no schedule: write {spider.name}.every("day", at="00:30", tz="UTC")')
    resolved = resolved_for(args, spider)
    address = database.choose(resolved, default=f"{spider.name}.db")
    if args.daemon:
        return loop.run(_Daemon(args, spider, spider.schedule, address).live())
    found = outlook(spider, spider.schedule, address, _now(args.at))
    _show(args, found)
    return _run(args, spider, resolved, address, found)


def outlook(spider: Spider, its: Schedule, address: str, now: datetime) -> Outlook:
    """What is due at an instant, and what is missing since the first job of a slot of this schedule."""
    last, following = its.last_due(now), its.next_due(now)
    if not has_jobs(address):
        return Outlook(spider.name, its, look_nowhere(last), last.due, (last,), {}, following)
    with reading(address) as store:
        known = jobs_by_slot(store.db, spider.name)
        first = next((slot for slot in known if its.has(slot) and its.due(slot) <= last.due), last.name)
        due = its.slots(first, last.name)
        missing = {slot.name: SlotRow(slot.name, SlotState.MISSING) for slot in due if slot.name not in known}
        latest = [slot.name for slot in due if slot.name in known or slot is due[-1]][-LOOKED_BACK:]
        rows = {**missing, **{name: look(store.db, name, known.get(name)) for name in latest}}
    at_last = rows.pop(last.name)
    left = {name: row for name, row in rows.items() if row.state is not SlotState.FINISHED}
    return Outlook(spider.name, its, at_last, last.due, tuple(due), left, following)


def look_nowhere(slot: Slot) -> SlotRow:
    """A slot of a spider that has no database yet."""
    return SlotRow(slot.name, SlotState.MISSING)


def _run(args: argparse.Namespace, spider: Spider, resolved: Resolved, address: str, found: Outlook) -> int:
    slot, state = found.last.slot, found.last.state
    if state in (SlotState.FINISHED, SlotState.WORKING):
        return Exit.COMPLETE
    args.slot = slot
    report = report_of(args, spider, resolved, address)
    show(report, spider.name, address, as_json=args.json)
    return Exit.COMPLETE if report.exit_code == Exit.NOTHING_TO_DO and report.verified else report.exit_code  # done meanwhile


# -- what is said ---------------------------------------------------------------------------------


def _show(args: argparse.Namespace, found: Outlook) -> None:
    if args.json:
        say_json({
            "spider": found.spider, "schedule": str(found.schedule), "slot": found.last.slot, "due": found.since.isoformat(),
            "state": found.last.state, "workers": list(found.last.workers), "missing": [slot.name for slot in found.missed],
            "unfinished": [slot.name for slot in found.unfinished], "next": found.following.name,
            "next_due": found.following.due.isoformat(),
        })  # fmt: skip
        return
    by = f" by {', '.join(found.last.workers)}" if found.last.workers else ""
    doing = {
        SlotState.FINISHED: "is finished: nothing to do",
        SlotState.WORKING: f"is being worked on{by}: nothing to do",
        SlotState.MISSING: "has no job yet",
        SlotState.OPEN: "was begun, and nobody is at it: going on",
    }.get(found.last.state, f"is {found.last.state}")
    say(f"{found.spider}: {found.schedule}")
    say(f"  due since {found.since:%Y-%m-%d %H:%M} UTC: slot {found.last.slot}, which {doing}")
    for word, slots_of in (("missing", found.missed), ("not finished", found.unfinished)):
        if slots_of:
            say(f"  {word}: {count(len(slots_of), 'earlier slot')}")
        stretches = runs(slots_of, list(found.due))
        for first, last in stretches[:STRETCHES_SHOWN]:
            say(f"    {backfill_command(args, first.name, last.name)}")
        if len(stretches) > STRETCHES_SHOWN:
            say(f"    and {count(len(stretches) - STRETCHES_SHOWN, 'stretch', 'stretches')} more; --json has them all")
    say(f"  next: slot {found.following.name}, due {found.following.due:%Y-%m-%d %H:%M} UTC")


def backfill_command(args: argparse.Namespace, first: str, last: str) -> str:
    """The command that makes some slots. A credential in it is hidden: this goes to logs."""
    words = ["limpet", "backfill", args.file, "--from", first, "--to", last]
    for flag, value in (("--spider", args.spider), ("--db", public_dsn(args.db or "")), ("--config", args.config)):
        words += [flag, value] if value else []
    return shlex.join([*words, *parameters.shown(args)])


def _now(at: str | None) -> datetime:
    return slots.instant(at) if at else datetime.now(UTC)


# -- the daemon -----------------------------------------------------------------------------------


async def wait_until(due: datetime, *, clock: Callable[[], datetime], is_stopped_within: Callable[[float], Awaitable[bool]]) -> bool:
    """Wait until the clock says that it is due, whatever the clock does meanwhile; False where somebody asked to stop first.

    `is_stopped_within` waits for so many seconds and says whether a wish to stop came. The clock is read again each 30 s.
    """
    while (left_s := (due - clock()).total_seconds()) > 0:
        if await is_stopped_within(min(left_s, CLOCK_S)):
            return False
    return True


@dataclass(slots=True)
class _Daemon:
    """Waits for each due instant, and has the work done by another process."""

    args: argparse.Namespace
    spider: Spider
    schedule: Schedule
    address: str
    wishes: int = 0
    child: Process | None = None
    rest_s: float = LOOK_S
    is_cut_short: bool = False  # the last run was told to stop
    _wished: asyncio.Event = field(default_factory=asyncio.Event)
    _ahead: timedelta = timedelta(0)  # how far --at puts the clock off

    async def live(self) -> int:
        """Until somebody asks it to stop: 0 where it was waiting, 4 where that stopped a run, which goes on when it is started again."""
        if self.args.at:
            self._ahead = slots.instant(self.args.at) - datetime.now(UTC)
        if sys.stderr.isatty():
            note(f"{self.spider.name}: {self.schedule}; Ctrl-C ends it")
        with Stopping(self._stop).listening(to_signals=True):
            while True:
                try:
                    until = await self._step()
                except LimpetError as error:
                    log.warning("%s; looking again soon", error)
                    until = self._later()
                if self._is_asked() or not await self._is_due(until):
                    return Exit.STOPPED if self.is_cut_short else Exit.COMPLETE

    async def _step(self) -> datetime:
        """Have the slot that is due run, where it is not finished and nobody is at it; when to look again."""
        found = await asyncio.to_thread(outlook, self.spider, self.schedule, self.address, self._clock())
        slot, state = found.last.slot, found.last.state
        if state is SlotState.FINISHED:
            log.info("%s: slot %s is finished; %s is due at %s", found.spider, slot, found.following.name, found.following.due)
            self.rest_s = LOOK_S
            return found.following.due
        if state is SlotState.WORKING:
            self.rest_s = LOOK_S
            return self._soon(LOOK_S)
        if found.last.job is not None and not self.spider.generators and await asyncio.to_thread(self._is_empty, found.last):
            log.warning("%s: slot %s has nothing to do: no start", found.spider, slot)
            return found.following.due
        code = await self._run_in_child()
        self.is_cut_short = code == Exit.STOPPED
        log.info("%s: the run of slot %s ended with exit code %d", found.spider, slot, code)
        return self._clock() if code in (Exit.COMPLETE, Exit.DEAD_LETTERS) else self._later()

    def _is_empty(self, row: SlotRow) -> bool:
        with reading(self.address) as store:
            return row.job is not None and is_empty(store.db, row.job)

    async def _run_in_child(self) -> int:
        from limpet.cli.crew import environment_of

        self.child = await asyncio.create_subprocess_exec(
            *command_of(self.args, self._clock()), env=environment_of(self.args, self.address), start_new_session=True
        )
        if self.wishes:
            self._pass_on()
        try:
            code = await self.child.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                self.child.kill()
            raise
        finally:
            self.child = None
        return code

    def _clock(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    def _soon(self, seconds: float) -> datetime:
        """So much later, but not after the next slot is due."""
        now = self._clock()
        return min(now + timedelta(seconds=seconds), self.schedule.next_due(now).due)

    def _later(self) -> datetime:
        """Later each time that a slot could not be finished, so that what nobody has mended is not tried all the time."""
        rest_s, self.rest_s = self.rest_s, min(2 * self.rest_s, LOOK_MAX_S)
        return self._soon(rest_s)

    async def _is_due(self, at: datetime) -> bool:
        return await wait_until(at, clock=self._clock, is_stopped_within=self._is_stopped_within)

    def _is_asked(self) -> bool:
        return self.wishes > 0

    async def _is_stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wished.wait(), seconds)
        return bool(self.wishes)

    def _stop(self) -> None:
        self.wishes += 1
        self._wished.set()
        self._pass_on()

    def _pass_on(self) -> None:
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)


def command_of(args: argparse.Namespace, now: datetime) -> list[str]:
    """The command that runs what is due; settings, parameters and the address go by the environment."""
    command = child.limpet("schedule", os.path.abspath(args.file), "--log-level", args.log_level)
    command += ["--log-format", args.log_format]
    for flag, value in (("--spider", args.spider), ("--config", args.config), ("--workers", args.workers)):
        command += [flag, value] if value else []
    command += ["--at", now.isoformat()] if args.at else []
    return command + [flag for flag, given in (("--json", args.json), ("--quiet", True), ("--debug", args.debug)) if given]
