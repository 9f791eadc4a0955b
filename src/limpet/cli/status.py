"""`limpet status`: how far each job is, and the exact reason when it waits."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, replace

from limpet import policy
from limpet.batch import CREDIT
from limpet.cli import database
from limpet.cli.arguments import CRAWL
from limpet.cli.printing import count, cut, duration, moment, say, say_json, table
from limpet.engine.paying import credits_text
from limpet.mark import decode
from limpet.store.bills import Balance, Purse
from limpet.store.examine_server import SNAPSHOT_S
from limpet.store.migrate import NoJobYet
from limpet.store.overview import PaceRow, Status, provider_of
from limpet.store.overview import status as status_of
from limpet.store.shared import MarkRow
from limpet.store.verify import is_verified
from limpet.store.views import WorkerRow
from limpet.task import Lane, State

#: Reasons that are named beside a count; --json has them all.
REASONS_SHOWN = 4
#: Characters of a reason in a line.
REASON_CHARS = 60
#: Characters of a gap: two values of a mark, and a few words.
GAP_CHARS = 200
#: Characters of what holds a mark back: every reason, with its number.
HELD_CHARS = 300


def status(args: argparse.Namespace) -> int:
    """Print how each job is; with --check only whether the workers of this machine do their work."""
    if args.check:
        from limpet.cli.checking import check

        return check(args)
    whole = True if args.full else None
    try:
        with database.read(args) as store:
            found = [
                (one := status_of(store, job, whole=whole), one.is_complete and is_verified(store.db, job.id))
                for job in database.jobs_of(store, args)
            ]
            place = store.db.place
    except NoJobYet as empty:  # a crawl that begins at this moment makes its tables first, and then its job
        if args.spider is not None or args.slot is not None:
            raise
        if args.json:
            say_json({"db": database.place(database.of(args)), "jobs": []})
        else:
            say(f"{empty}; one that is just starting shows up in a moment")
        return 0
    if args.json:
        say_json({"db": place, "jobs": [as_json(one, is_proved) for one, is_proved in found]})
        return 0
    for number, (one, is_proved) in enumerate(found):
        say(("\n" if number else "") + as_text(one, is_proved, hosts_shown=args.hosts))
    return 0


# -- what it comes to -------------------------------------------------------------------------


def state_of(status: Status, is_proved: bool) -> str:
    """The state of a job, in a word or two."""
    if status.job.halted:
        return "halted"
    if status.sealed:
        return "sealed"
    if status.is_complete:
        return "complete and verified" if is_proved else "complete, not yet verified"
    if status.job.paused:
        return "paused"
    if is_worked_on(status):
        return "running"
    return "stopped" if status.books.discovered or status.sources else "empty"


def why_it_waits(status: Status, *, machine: str = "") -> str:
    """The exact reason why a job makes no headway; "" where it does, or has nothing left to do. Pure, but for sources' files."""
    job, now_ms = status.job, status.books.now_ms
    if job.halted:
        return f"halted: {job.halted}; `limpet verify --full` says what is wrong, and whether `limpet repair` or a backup helps"
    if status.is_complete:
        return ""
    if job.paused:
        return f"paused: {job.paused}; `limpet resume` or `limpet retry` ends it"
    if not is_worked_on(status):
        return _nobody_works(status)
    if status.lock_holder and now_ms - status.books.last_ms > 5000:
        return f"{status.lock_holder} holds the database's write lock"
    if status.waiting_hosts and not (status.waiting_hosts[0].held and status.lanes[Lane.RUNNING].tasks):
        return _all_hosts_wait(status.waiting_hosts)
    if status.lanes[Lane.RUNNING].tasks or ready(status):
        return ""
    return _only_later(status, machine or socket.gethostname())


def is_worked_on(status: Status) -> bool:
    """Whether any worker lives."""
    return any(worker.is_living for worker in status.workers)


def ready(status: Status) -> int:
    """Open tasks that wait for nothing but their turn."""
    return status.open - sum(lane.tasks for lane in status.lanes.values())


def _nobody_works(status: Status) -> str:
    lost = status.lanes[Lane.RUNNING].tasks
    left = f"; the {count(lost, 'task')} it had in hand are taken over then" if lost else ""
    command = "limpet crawl" if status.job.spider == CRAWL else "limpet run"
    money = status.money
    for purse, option in ((money.job, "--budget"), (money.day, "--budget-day")) if money else ():
        if purse is not None and purse.is_empty:
            return f"no worker is running; {purse_text(purse)}, and `{command}` goes on with a larger {option}{left}"
    options = "--max-pages or --budget" if money and money.job.budget is not None else "--max-pages"
    return f"no worker is running; the same `{command}` goes on, with a larger {options} where that ended it{left}"


def _all_hosts_wait(waiting: list[PaceRow]) -> str:
    first, *others = _by_provider(waiting)
    if first.held:  # those that wait for a time come before those that wait for a person
        more = f", and {count(len(others), 'other host')}" if others else ""
        return f"every host with a task ready is on hold: {first.authority} ({first.held}){more}; `limpet resume {first.authority}` ends it"
    if not any(host.pause for host in waiting):
        delay = duration(first.delay_ms / 1000)
        return f"at the pace of its hosts: the next request to {first.authority}, after its delay of {delay}"
    why = f" ({first.pause})" if first.pause else ""
    more = f", and {count(len(others), 'other host')} later" if others else ""
    return f"every host with a task ready has to wait: {first.authority} until {moment(first.next_ms)}{why}{more}"


def _only_later(status: Status, machine: str) -> str:
    """What is left, where nothing is running and nothing is ready."""
    away = _by_provider(pace for pace in status.paces if policy.outage_since_ms(pace.pause))
    reasons = [f"{pace.authority} is away ({pace.pause}); asked again at {moment(pace.next_ms)}" for pace in away[:REASONS_SHOWN]]
    for lane, what in (
        (Lane.WAITING, "only retries are left"),
        (Lane.SUSPECT, "only tasks that killed workers are left, to be run alone"),
    ):
        found = status.lanes[lane]
        if found.tasks:
            in_s = max(0.0, (found.due_ms - status.books.now_ms) / 1000)
            reasons.append(f"{what}: {count(found.tasks)}, the first at {moment(found.due_ms)} (in {duration(in_s)})")
    if parked := status.lanes[Lane.PARKED].tasks:
        reasons.append(f"{count(parked, 'task')} parked: the spider has no handler for them")
    for source in status.sources:
        if not source.closed and source.place and (source.host != machine or not os.path.exists(source.place)):
            reasons.append(f"the starts in {source.place} on {source.host} cannot be read from here")
    if waiting := sum(request.waiting for request in status.requests):
        reasons.append(f"what was asked of {count(waiting, 'shard')} is applied in their next batch")
    return "; ".join(reasons)


def _by_provider(paces: Iterable[PaceRow]) -> list[PaceRow]:
    """Of the hosts of ours on which a handler's calls lie the one that is asked first, under the name of all of them."""
    found: dict[tuple[str, str], PaceRow] = {}
    for pace in paces:
        named = replace(pace, authority=provider_of(pace.authority))
        known = found.setdefault((named.authority, named.held), named)
        if named.next_ms < known.next_ms:
            found[named.authority, named.held] = named
    return list(found.values())


def rate_of(status: Status) -> float:
    """Tasks ended a second, over the last minute, or over the job's whole life where that is shorter."""
    books = status.books
    window_s = min(60.0, max(1.0, (books.now_ms - books.first_ms) / 1000)) if books.first_ms else 60.0
    return books.recent / window_s


def seconds_left(status: Status) -> tuple[float, str] | None:
    """A guess at what is left, and the host that takes longest, "" for none; None where nobody works, or nothing was done of late."""
    rate = rate_of(status)
    if not rate or not status.open or not is_worked_on(status):
        return None
    slowest, host = status.open / rate, ""
    delays = {pace.authority: pace.delay_ms / 1000 for pace in status.paces}
    for row in status.hosts or []:
        alone = row.open * delays.get(row.authority, 0.0)
        if alone > slowest:
            slowest, host = alone, row.authority
    return slowest, host


# -- JSON -------------------------------------------------------------------------------------


def as_json(status: Status, is_proved: bool) -> dict[str, object]:
    """A job as stable fields. What was not counted, because there is too much of it, is null."""
    books, job = status.books, status.job
    left = seconds_left(status)
    return {
        "job": job.name,
        "spider": job.spider,
        "slot": job.slot,
        "state": state_of(status, is_proved),
        "complete": status.is_complete,
        "verified": is_proved,
        "halted": job.halted,
        "paused": job.paused,
        "why": why_it_waits(status),
        "tasks": {"known": books.discovered, **status.states},
        "lanes": {"ready": ready(status), **{name: lane.tasks for name, lane in status.lanes.items()}},
        "next_due_ms": min((lane.due_ms for lane in status.lanes.values() if lane.due_ms), default=None),
        "oldest_open_ms": status.oldest_open_ms,
        "dead_by_reason": status.dead_by_reason,
        "skipped_by_reason": status.skipped_by_reason,
        "hosts": None if status.hosts is None else [{"authority": row.authority, **row.states} for row in status.hosts],
        "scheme_twins": status.scheme_twins,
        "records": status.records,
        "rate_per_s": round(rate_of(status), 3),
        "eta_s": round(left[0], 1) if left else None,
        "slowest_host": left[1] if left else "",
        "attempts": {
            name: getattr(books, name) for name in ("claimed", "done", "skipped", "failed", "dead", "released", "throttled", "lost")
        },
        "revisited": books.revisited,
        "batches": books.batches,
        "unproved_batches": sum(watermark - verified for _, _, watermark, verified in status.watermarks),
        "first_ms": books.first_ms,
        "last_ms": books.last_ms,
        "now_ms": books.now_ms,
        "workers": [asdict(worker) for worker in status.workers],
        "pauses": [
            {**asdict(pace), "away_since_ms": policy.outage_since_ms(pace.pause) or None}
            for pace in status.paces
            if pace.pause or pace.errors or pace.held
        ],
        "sources": [{"kind": s.kind, "place": s.place, "host": s.host, "position": s.position, "closed": s.closed} for s in status.sources],
        "requests": [asdict(request) for request in status.requests],
        "sealed_ms": status.sealed.at_ms if status.sealed else None,
        "oldest_transaction": asdict(status.oldest_transaction) if status.oldest_transaction else None,
        "money": _money_json(status.money) if status.money else None,
        "marks": [_mark_json(row) for row in status.marks],
    }


def _money_json(money: Balance) -> dict[str, object]:
    day = money.day and {"day": money.day.day, "spent_micro": money.day.spent, "budget_micro": money.day.budget}
    spent = {"spent_micro": money.job.spent, "budget_micro": money.job.budget, "day": day}
    return {**spent, "unknown": money.unknown, "unknown_micro": money.unknown_amount}


def _mark_json(row: MarkRow) -> dict[str, object]:
    kind = (row.value or row.high).partition(":")[0]
    seen = {"low": _shown(row.low), "high": _shown(row.high), "seen": row.seen, "moved": row.is_moved, "gap": row.gap, "held": row.held}
    return {"name": row.name, "type": kind, "value": _shown(row.value), **seen}


def _shown(value: str) -> str | None:
    """A mark's value without its type; null where there is none."""
    return str(decode(value)) if value else None


# -- text -------------------------------------------------------------------------------------


def as_text(status: Status, is_proved: bool, *, hosts_shown: int) -> str:
    """A job as people read it."""
    lines = [f"{status.job.name}: {state_of(status, is_proved)}"]
    if why := why_it_waits(status):
        lines.append(f"  {why}")
    lines.append(table(_states(status)))
    lines += [f"  {line}" for line in (*_pace(status), *_beside(status))]
    if status.hosts and hosts_shown:
        lines += ["", table(_hosts(status, hosts_shown))]
    if status.hosts is None:
        lines.append("  hosts and reasons of skips: not counted, there are many tasks; --full counts them")
    return "\n".join(lines)


def _states(status: Status) -> list[tuple[object, ...]]:
    beside = {
        State.DEAD: _reasons(status.dead_by_reason),
        State.SKIPPED: _reasons(status.skipped_by_reason or {}),
        State.FAILED: f"next try {moment(status.lanes[Lane.WAITING].due_ms)}" if status.lanes[Lane.WAITING].due_ms else "",
        State.PENDING: f"the oldest since {moment(status.oldest_open_ms)}" if status.oldest_open_ms else "",
    }
    order = (State.DONE, State.SKIPPED, State.DEAD, State.FAILED, State.RUNNING, State.PENDING)
    return [(str(state), status.states[state], beside.get(state, "")) for state in order if status.states[state] or state is State.DONE]


def _reasons(reasons: dict[str, int]) -> str:
    named = [f"{cut(reason, REASON_CHARS)} {count(number)}" for reason, number in list(reasons.items())[:REASONS_SHOWN]]
    more = len(reasons) - REASONS_SHOWN
    return ", ".join([*named, *([f"and {count(more, 'reason')} more"] if more > 0 else [])])


def _pace(status: Status) -> list[str]:
    lines = []
    rate = rate_of(status)
    if status.open and rate and is_worked_on(status):
        left = seconds_left(status)
        tail = f"; about {duration(left[0])} left{f', most of it {left[1]}' if left[1] else ''}" if left else ""
        lines.append(f"{rate:.1f} tasks/s over the last minute{tail}")
    lines += [_worker(w, status.books.now_ms) for w in status.workers if w.is_living or w.shards]
    held = _by_provider(pace for pace in status.paces if pace.held)
    lines += [f"host {pace.authority} is on hold: {cut(pace.held, REASON_CHARS)}" for pace in held[:REASONS_SHOWN]]
    if len(held) > REASONS_SHOWN:
        lines.append(f"and {count(len(held) - REASONS_SHOWN, 'other host')} on hold; `limpet hosts` lists them")
    now_ms = status.books.now_ms
    waiting = (p for p in status.paces if p.pause and not p.held and (p.next_ms > now_ms or policy.outage_since_ms(p.pause)))
    paused = _by_provider(waiting)
    lines += [
        f"host {pace.authority} waits until {moment(pace.next_ms)}: {cut(pace.pause, REASON_CHARS)}" for pace in paused[:REASONS_SHOWN]
    ]
    if len(paused) > REASONS_SHOWN:
        lines.append(f"and {count(len(paused) - REASONS_SHOWN, 'other host')}")
    return lines


def _worker(worker: WorkerRow, now_ms: int) -> str:
    """A worker with its shards, its rate, and the age of its lease."""
    who = f"process {worker.pid} on {worker.host}, since {moment(worker.started_ms)}, {count(worker.shards, 'shard')}"
    age = duration(max(0, now_ms - worker.heard_ms) / 1000)
    if worker.is_living:
        return f"worker: {who}, {worker.tasks_per_s:.1f} tasks/s, lease renewed {age} ago"
    return f"gone: {who}, last heard of {age} ago; other workers take its shards over"


def _beside(status: Status) -> list[str]:
    lines = []
    if status.sealed:
        lines.append(f"sealed {moment(status.sealed.at_ms)}: its tasks and tries were removed by `limpet gc`; datasets and ledger stay")
    if status.records:
        lines.append("records: " + ", ".join(f"{name} {count(number)}" for name, number in status.records.items()))
    lines += [*(_money(status.money) if status.money else ()), *(_mark(row, is_complete=status.is_complete) for row in status.marks)]
    if parked := status.lanes[Lane.PARKED].tasks:
        lines.append(f"{count(parked, 'task')} parked: the spider has no handler for them")
    if status.scheme_twins:
        twins = count(status.scheme_twins, "task")
        lines.append(f"{twins} differ from others in http and https alone; the key option merge_scheme joins them")
    lost = status.books.lost
    if lost:
        lines.append(f"{count(lost, 'try was', 'tries were')} in flight when a worker was killed; each is tried again, and none is blamed")
    old = status.oldest_transaction
    if old is not None and old.age_s > SNAPSHOT_S:
        lines.append(f"{old.told}; `limpet doctor` says more")
    lines += [f"asked by {r.who}: {r.what}, not yet applied in {count(r.waiting, 'shard')}" for r in status.requests if r.waiting]
    return lines


def _money(money: Balance) -> list[str]:
    lines = [purse_text(purse) for purse in (money.job, money.day) if purse is not None]
    if money.unknown:
        what = f"{count(money.unknown, 'unknown charge')} of {_credits(money.unknown_amount)}"
        lines.append(f"{what}: `limpet cost settle` says what they came to")
    return lines


def purse_text(purse: Purse) -> str:
    """What was spent of a budget, for people.

    >>> purse_text(Purse(12_500_000, 137_000_000)), purse_text(Purse(0, 5_000_000, "2026-11-30"))
    ('budget: 12.5 of 137 credits spent or reserved', 'budget of 2026-11-30: 0 of 5 credits spent or reserved')
    """
    if purse.budget is None:
        return f"cost: {_credits(purse.spent)} spent or reserved, and there is no budget"
    of = f" of {purse.day}" if purse.day else ""
    return f"budget{of}: {credits_text(purse.spent)} of {_credits(purse.budget)} spent or reserved"


def _credits(micro: int) -> str:
    return f"{credits_text(micro)} credit{'' if micro == CREDIT else 's'}"


def _mark(row: MarkRow, *, is_complete: bool) -> str:
    """A mark, what this job's sweep saw, and what becomes of the mark."""
    line = f"mark {cut(row.name, REASON_CHARS)}: {cut(_shown(row.value) or 'not set', REASON_CHARS)}"
    if not row.seen:
        return line
    low, high = (cut(str(decode(value)), REASON_CHARS) for value in (row.low, row.high))
    saw = f"this sweep saw {low} to {high}, {count(row.seen, 'value')}"
    if row.is_moved:
        return f"{line}, moved when this job was complete; {saw}" + (f"; a gap: {cut(row.gap, GAP_CHARS)}" if row.gap else "")
    if row.held:
        return f"{line}; {saw}; held back: {cut(row.held, HELD_CHARS)}"
    if row.is_behind and not is_complete:
        return f"{line}; {saw}, and moves it when it is complete"
    if row.is_behind:
        return f"{line}; {saw}; " + ("it stays where it is; --full says why" if row.held is None else "the next run moves it")
    return f"{line}; {saw}"


def _hosts(status: Status, shown: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [("host", "done", "skipped", "dead", "open")]
    assert status.hosts is not None, "asked for only where hosts were counted"
    for row in status.hosts[:shown]:
        ended = [row.states.get(state, 0) for state in (State.DONE, State.SKIPPED, State.DEAD)]
        rows.append((row.authority, *ended, row.open))
    if len(status.hosts) > shown:
        rows.append((f"and {count(len(status.hosts) - shown, 'host')} more",))
    return rows
