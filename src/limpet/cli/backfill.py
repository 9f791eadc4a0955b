"""`limpet backfill`: make the slots of a span that are missing, go on with those that are unfinished, try again what failed.

A slot that is finished without dead letters is left alone. Of one with dead letters these are put back, as `limpet retry`
does, and nothing else is fetched again. Where the schedule, or anybody, runs a slot at the same time, both work on one job.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from limpet.cli import database, slots
from limpet.cli.configuration import Resolved
from limpet.cli.exits import Exit
from limpet.cli.mend import who
from limpet.cli.printing import count, say, say_json
from limpet.cli.run import report_of, resolved_for
from limpet.engine.load import load
from limpet.engine.report import Report
from limpet.engine.spider import Spider
from limpet.errors import UsageError
from limpet.schedule import Slot
from limpet.store import jobs, open_store, requests
from limpet.store.joining import has_jobs
from limpet.store.slots import SlotRow, SlotState, is_sealed, jobs_by_slot, look
from limpet.store.views import reading

#: Exit codes from the best to the worst: what a span ends in is the worst of its slots.
WORSE = (
    Exit.COMPLETE, Exit.NOTHING_TO_DO, Exit.DEAD_LETTERS, Exit.BUDGET, Exit.STOPPED, Exit.STALLED, Exit.OWNERSHIP_LOST,
    Exit.USAGE, Exit.VERIFY_FAILED, Exit.INTERNAL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """What became of one slot."""

    row: SlotRow  # as it was found
    done: str  # made | gone on with | tried again | left alone
    report: Report | None = None
    put_back: int = 0

    @property
    def code(self) -> int:
        """The exit code that this slot would give."""
        if self.report is None:
            return Exit.COMPLETE
        done_meanwhile = self.report.exit_code == Exit.NOTHING_TO_DO and self.report.verified
        return Exit.COMPLETE if done_meanwhile else self.report.exit_code


def backfill(args: argparse.Namespace) -> int:
    """Make what is missing, slot by slot; the exit code of the worst."""
    spider, resolved, address = _loaded(args)
    wanted = _span(args, spider)
    made: list[Made] = []
    for slot in wanted:
        if made:  # a file that is run for several jobs begins each of them anew
            spider, resolved, address = _loaded(args)
        made.append(_make(args, spider, resolved, address, slot.name))
        _say_slot(args, made[-1])
        if made[-1].code == Exit.STOPPED:
            break
    _say_sum(args, spider, wanted, made)
    return _worst(made)


def _loaded(args: argparse.Namespace) -> tuple[Spider, Resolved, str]:
    spider = load(args.file, name=args.spider).spider
    resolved = resolved_for(args, spider)
    return spider, resolved, database.choose(resolved, default=f"{spider.name}.db")


def _span(args: argparse.Namespace, spider: Spider) -> list[Slot]:
    """The slots that are meant, all of which must have been due."""
    its = spider.schedule or slots.PLAIN
    first, last = (slots.meant(text, its) for text in (args.first, args.last))
    found = its.slots(first, last)
    if not found:
        raise UsageError(f"from {first} to {last}: {its} has no slot there")
    now = slots.instant(args.at) if args.at else datetime.now(UTC)
    if spider.schedule is not None and found[-1].due > now:
        raise UsageError(
            f"slot {found[-1].name} is not due before {found[-1].due:%Y-%m-%d %H:%M} UTC; the last one was {its.last_due(now).name}"
        )
    return found


def _make(args: argparse.Namespace, spider: Spider, resolved: Resolved, address: str, slot: str) -> Made:
    row = _found(address, spider.name, slot)
    if row.state is SlotState.FINISHED and (not row.dead or row.job is None or _is_sealed(address, row.job)):
        return Made(row, "left alone")
    put_back = _put_back_dead(address, row.job, resolved) if row.state is SlotState.FINISHED and row.job is not None else 0
    done = {SlotState.MISSING: "made", SlotState.FINISHED: "tried again"}.get(row.state, "gone on with")
    args.slot = slot
    return Made(row, done, report_of(args, spider, resolved, address), put_back)


def _found(address: str, spider: str, slot: str) -> SlotRow:
    if not has_jobs(address):
        return SlotRow(slot, SlotState.MISSING)
    with reading(address) as store:
        return look(store.db, slot, jobs_by_slot(store.db, spider).get(slot))


def _is_sealed(address: str, job: jobs.Job) -> bool:
    with reading(address) as store:
        return is_sealed(store.db, job)


def _put_back_dead(address: str, job: jobs.Job, resolved: Resolved) -> int:
    """Ask for the dead letters of a job to be put back: whoever runs it next, which is this command, applies that."""
    store = open_store(address, create=False, settings=resolved.settings)
    try:
        store.job = job
        requests.ask(store, "retry", {"states": ["dead"]}, shards=requests.shards_with_dead(store), who=who())
        return int((store.db.one("count_dead", job=job.id) or (0,))[0])
    finally:
        store.close()


# -- what is said -----------------------------------------------------------------------------------


def _worst(made: list[Made]) -> int:
    return max((one.code for one in made), key=lambda code: WORSE.index(Exit(code)), default=Exit.COMPLETE)


def _say_slot(args: argparse.Namespace, made: Made) -> None:
    row, report = made.row, made.report
    if args.json:
        ended = {} if report is None else asdict(report)
        say_json({"slot": row.slot, "was": row.state, "what": made.done, "put_back": made.put_back, "exit_code": made.code, "run": ended})
        return
    said = f"was {row.state}" if report is None else f"{report.message}; {count(report.done)} done, {count(report.requests, 'request')}"
    again = f" ({count(made.put_back, 'dead letter')} put back)" if made.put_back else ""
    say(f"{row.slot}  {made.done}{again}: {said}")


def _say_sum(args: argparse.Namespace, spider: Spider, wanted: list[Slot], made: list[Made]) -> None:
    did = Counter(one.done for one in made)
    left = len(wanted) - len(made)
    words = ("made", "gone on with", "tried again", "left alone")
    requests_sent = sum(one.report.requests for one in made if one.report)
    if args.json:
        counts = {word.replace(" ", "_"): did[word] for word in words}
        summary = {**counts, "slots": len(wanted), "not_reached": left, "requests": requests_sent, "exit_code": _worst(made)}
        say_json({"spider": spider.name, "summary": summary})
        return
    told = ", ".join(f"{count(did[word])} {word}" for word in words if did[word])
    later = f"; stopped with {count(left, 'slot')} to go: the same command goes on" if left else ""
    say(f"{spider.name}: {count(len(wanted), 'slot')}: {told}, {count(requests_sent, 'request')}{later}")
