"""Where a task must stand, from its tries and revisits alone: a pure recount, written once.

`verify` holds each task's row against it (I6, I7), `repair` writes the row by it. A claim is open where
the task's claim is not older than its last try: every claim ends in exactly one attempt row of a later
batch, or, where a batch ends a try and claims again, of that very batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from limpet.settings import Settings
from limpet.store.dialect import Row
from limpet.task import Lane, Outcome, State, state_after

#: Reason of a lost try after which its task is dead (`lease.reclaim`).
KILLER = "killed its worker"

#: A retry that is due later than this after its last try is reported: 30 days.
DUE_MS_MAX = 30 * 24 * 3600 * 1000

_OUTCOMES = frozenset(map(str, Outcome))


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt row, as far as it tells where its task stands."""

    shard: int
    n: int
    number: int
    outcome: str
    reason: str
    strike: int
    solo: int
    at_ms: int

    @property
    def leaves(self) -> State:
        """The state in which this try left its task."""
        if self.outcome != Outcome.LOST:
            return state_after(Outcome(self.outcome))
        if not self.solo:
            return State.PENDING
        return State.DEAD if self.reason == KILLER else State.FAILED

    @property
    def is_end(self) -> bool:
        """Whether only a revisit could follow."""
        return self.leaves in (State.DONE, State.SKIPPED, State.DEAD)


@dataclass(frozen=True, slots=True)
class Task:
    """A task's row, with its shard's epoch and watermark at that moment."""

    id: int
    shard: int
    state: str
    lane: str
    due_ms: int
    tries: int
    strikes: int
    lost: int
    solo: int
    throttled: int
    throttled_ms: int
    revisits: int
    claim_epoch: int
    claim_n: int
    claim_solo: int
    shard_epoch: int
    watermark: int
    batch_epoch: int  # of the batch that claimed it; -1 where there is none


@dataclass(frozen=True, slots=True)
class History:
    """A task and everything that happened to it, of one moment."""

    task: Task
    tries: tuple[Try, ...]  # by number
    revisits: tuple[tuple[int, int], ...]  # (after_try, batch), in order


@dataclass(frozen=True, slots=True)
class Account:
    """What a task's row must say."""

    state: State
    tries: int
    strikes: int
    lost: int
    solo: int
    throttled: int
    revisits: int
    is_open: bool  # a claim that has not ended
    is_fresh: bool  # never tried, or not since it was put back

    COUNTERS = ("tries", "strikes", "lost", "solo", "throttled", "revisits")


def histories(rows: Iterable[Row]) -> Iterator[History]:
    """The rows of `verify_histories`, task by task; rows that belong to no task are left out."""
    for task_id, group in groupby(rows, key=itemgetter(0)):
        task: Task | None = None
        tries: list[Try] = []
        revisits: list[tuple[int, int]] = []
        for _, part, shard, *rest in group:
            if part == 0:
                task = Task(task_id, shard, *rest)
            elif part == 1:
                outcome, reason, n, number, strike, solo, at_ms = rest[:7]
                tries.append(Try(shard, n, number, outcome, reason, strike, solo, at_ms))
            else:
                revisits.append((rest[3], rest[2]))
        if task is not None:
            yield History(task, tuple(tries), tuple(revisits))


def recount(history: History) -> Account:
    """Where the task must stand."""
    tries, claim_n = history.tries, history.task.claim_n
    is_open = claim_n > 0 and (not tries or claim_n >= tries[-1].n)
    after = history.revisits[-1][0] if history.revisits else 0
    since = [one for one in tries if one.number > after]
    lost = [one for one in since if one.outcome == Outcome.LOST]
    return Account(
        state=State.RUNNING if is_open else since[-1].leaves if since else State.PENDING,
        tries=len(tries) + is_open,
        strikes=sum(one.strike for one in since),
        lost=len(lost),
        solo=sum(one.solo for one in lost),
        throttled=sum(one.outcome == Outcome.THROTTLED for one in since),
        revisits=len(history.revisits),
        is_open=is_open,
        is_fresh=not since,
    )


def unlawful(history: History) -> str:
    """Why tries and revisits are no history that the state machine allows; "" where they are one."""
    tries, revisits = history.tries, history.revisits
    if unknown := {one.outcome for one in tries} - _OUTCOMES:
        return f"a try ended as {min(unknown)!r}, which is no outcome"
    numbers = [one.number for one in tries]
    if numbers != [*range(1, len(tries) + 1)]:
        return f"expected tries 1 to {len(tries)}, found {_some(numbers)}"
    if strays := {one.shard for one in tries} - {history.task.shard}:
        return f"its tries are of shard {min(strays)}, it is of shard {history.task.shard}"
    after = {number for number, _ in revisits}
    ends = {one.number for one in tries if one.is_end}
    if len(after) != len(revisits) or not after <= ends:
        return f"it was put back after tries {_some(sorted(number for number, _ in revisits))}, but ended in {_some(sorted(ends))}"
    for number in sorted(ends - after):
        if number != len(tries):
            return f"try {number} ended it, and try {number + 1} followed without its being put back"
    if [one.n for one in tries] != sorted(one.n for one in tries):
        return f"its tries are of batches {_some([one.n for one in tries])}, which fall"
    return ""


def not_running(history: History, account: Account) -> str:
    """Why a task with an open claim, or that says it runs, does not run as it should (I6); "" where it does."""
    task = history.task
    if not account.is_open:
        return "it runs, but has no open try" if task.state == State.RUNNING else ""
    if task.state != State.RUNNING or task.lane != Lane.RUNNING:
        where = f"{task.state}, lane {task.lane or 'none'}"
        return f"it was claimed in batch {task.claim_n} and that try has not ended, but it is {where}"
    if task.claim_n > task.watermark or task.batch_epoch < 0:
        return f"it was claimed in batch {task.claim_n}, which shard {task.shard} does not have"
    if task.claim_epoch != task.shard_epoch:
        return f"it runs under epoch {task.claim_epoch}, its shard has {task.shard_epoch}"
    if task.batch_epoch != task.claim_epoch:
        return f"it runs under epoch {task.claim_epoch}, the batch that claimed it has {task.batch_epoch}"
    return "" if task.claim_solo in (0, 1) else f"claim_solo is {task.claim_solo}"


def misplaced(history: History, account: Account) -> list[str]:
    """What of a task's row is not as its history says (I7)."""
    task = history.task
    wrong = [
        f"{name}: expected {expected}, found {found}"
        for name in Account.COUNTERS
        if (expected := getattr(account, name)) != (found := getattr(task, name))
    ]
    if not account.is_open and task.state != State.RUNNING and task.state != account.state:
        wrong.append(f"state: expected {account.state}, found {task.state}")
    if bool(task.throttled_ms) != bool(account.throttled):
        wrong.append(f"throttled {account.throttled} times, but since {task.throttled_ms}")
    if task.claim_solo and not account.is_open:
        wrong.append("marked as claimed alone, but not claimed")
    if lane := wrong_lane(task, account):
        wrong.append(lane)
    return wrong


def over_cap(account: Account, limits: Settings) -> str:
    """Which counter is above its cap; "" where none is."""
    if account.strikes > limits.strikes:
        return f"{account.strikes} strikes, at most {limits.strikes}"
    return f"{account.solo} solo losses, at most {limits.solo_losses}" if account.solo > limits.solo_losses else ""


def wrong_lane(task: Task, account: Account) -> str:
    """Why a lane does not fit its task; "" where it does. A running one is looked at by `not_running`."""
    found = f"found lane {task.lane or 'none'}, due {task.due_ms}"
    if account.state in (State.DONE, State.SKIPPED, State.DEAD):
        return f"an ended task waits nowhere, {found}" if task.lane or task.due_ms else ""
    if account.is_open:
        return f"a running task is not due, {found}" if task.due_ms else ""
    if task.lane not in (Lane.READY, Lane.WAITING, Lane.SUSPECT, Lane.PARKED):
        return f"a task that is {account.state} waits to be claimed, {found}"
    if task.lane == Lane.SUSPECT and not account.lost:
        return f"a suspect lost a try, this one none, {found}"
    if task.lane == Lane.WAITING and (account.is_fresh or not task.due_ms):
        return f"a task waits for its next try only after a try, and until a time, {found}"
    if task.lane in (Lane.READY, Lane.PARKED) and task.due_ms:
        return f"a task that is due later is not {task.lane}, {found}"
    return ""


def is_due_late(history: History) -> bool:
    """Whether a task waits so long that nobody can have meant it."""
    return bool(history.tries) and history.task.due_ms > history.tries[-1].at_ms + DUE_MS_MAX


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10])) or "none"
    return shown + (", ..." if len(numbers) > 10 else "")
