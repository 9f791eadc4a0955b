"""What collecting costs: a charge for each try, escrow for each shard, a purse for each job or day.

A budget is a purse. An owner draws an allowance from it for its shard, rarely and in a commit of its own; a claim
reserves against the allowance, on a row that the fence has locked already. So no two owners can both spend the last
credit, and no commit waits for a row that all share. What is reserved becomes charged, refunded, void or, where a
crash came between, unknown; unknown counts as spent until somebody settles it. Invariant: I8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from limpet.batch import Billed, Charge, Grant, Part, Result, Want
from limpet.errors import InvariantBroken, StoreBusy
from limpet.store.dialect import Database

#: An allowance is this part of what a purse has left, so that the last credits are spread over the shards that want them.
SHARE_OF_LEFT = 4

#: Tasks that an allowance pays for where there is no budget: the purse's row is touched once for so many.
UNLIMITED_TASKS = 1000

#: Settlements that one batch applies.
SETTLEMENTS_MAX = 1000

#: In a ledger row's deltas: [granted, reserved, spent, unknown], each as it changed.
MONEY = "~money"


def job_purse(job: int) -> str:
    """The purse of a job.

    >>> job_purse(7)
    'job:7'
    """
    return f"job:{job}"


def day_purse(spider: str, day: str) -> str:
    """The purse of all jobs of a spider on one day.

    >>> day_purse("serp", "2026-11-30")
    'day:serp:2026-11-30'
    """
    return f"day:{spider}:{day}"


@dataclass(slots=True)
class Escrow:
    """What one shard may spend, read and written under its fence."""

    allowance: int = 0
    day: str = ""
    day_allowance: int = 0

    @classmethod
    def of(cls, db: Database, part: Part) -> Escrow:
        """The shard's row; an empty one where it has none."""
        row = db.one("read_escrow", job=part.job, shard=part.shard)
        return cls(int(row[0]), str(row[1]), int(row[2])) if row else cls()

    def write(self, db: Database, part: Part) -> None:
        """Write the row."""
        db.run(
            "put_escrow", job=part.job, shard=part.shard, n=part.n, allowance=self.allowance, day=self.day, day_allowance=self.day_allowance
        )

    def can_pay(self, cost: int, day: str) -> bool:
        """Whether a try of this cost may be reserved now."""
        return self.allowance >= cost and (not day or (self.day == day and self.day_allowance >= cost))

    def pay(self, amount: int, day: str) -> None:
        """Take an amount, or give it back where it is negative; of a day that is over, only the job's part comes back."""
        self.allowance -= amount
        if day and day == self.day:
            self.day_allowance -= amount


# -- step 5: what the tries of a batch cost -----------------------------------------------------


def settle(db: Database, part: Part) -> list[int]:
    """End the reserved charges of this part's tries, and apply settlements: what changed, as MONEY says it."""
    moved = [0, 0, 0, 0]
    rows = db.rows("reserved_charges", job=part.job, shard=part.shard)
    reserved = {(task, number): (int(held), str(day)) for task, number, held, day, _ in rows}
    asked = db.rows("open_settlements", job=part.job, shard=part.shard, most=SETTLEMENTS_MAX)
    if not reserved and not asked:
        return moved
    escrow = Escrow.of(db, part)
    for result in part.results:
        held = reserved.get((result.claim.id, result.claim.tries))
        if held is not None:
            _end(db, part, result, *held, escrow, moved)
    for task, number, state, amount, before, was, day in asked:
        _apply(db, part, (task, number), (str(state), int(amount)), (str(before), int(was), str(day)), escrow, moved)
    if any(moved):
        escrow.write(db, part)
    return moved


def _end(db: Database, part: Part, result: Result, reserved: int, day: str, escrow: Escrow, moved: list[int]) -> None:
    charge = result.charge or Charge(Billed.VOID)
    amount = reserved if charge.state is Billed.UNKNOWN else charge.amount if charge.state is Billed.CHARGED else 0
    _write(db, part, (result.claim.id, result.claim.tries), charge, amount, before=str(Billed.RESERVED))
    escrow.pay(amount - reserved, day)
    moved[1] -= reserved
    moved[3 if charge.state is Billed.UNKNOWN else 2] += amount


def _apply(
    db: Database, part: Part, which: tuple[int, int], said: tuple[str, int], found: tuple[str, int, str], escrow: Escrow, moved: list[int]
) -> None:
    """Somebody says what an unknown charge came to; one that is no longer unknown stays as it is."""
    (state, amount), (before, was, day) = said, found
    amount = amount if state == Billed.CHARGED else 0
    if before == Billed.UNKNOWN:
        _write(db, part, which, Charge(Billed(state), amount, reason="settled"), amount, before=before)
        escrow.pay(amount - was, day)
        moved[3] -= was
        moved[2] += amount
    db.run("close_settlement", job=part.job, shard=part.shard, task=which[0], n=part.n, **{"try": which[1]})


def _write(db: Database, part: Part, which: tuple[int, int], charge: Charge, amount: int, *, before: str) -> None:
    changed = db.run(
        "settle_charge", job=part.job, shard=part.shard, task=which[0], state=str(charge.state), amount=amount, host=charge.host,
        requests=charge.requests, reason=charge.reason, n=part.n, before=before, **{"try": which[1]},
    )  # fmt: skip
    if changed != 1:
        raise InvariantBroken(f"the charge of task {which[0]}, try {which[1]}, was changed by somebody else", invariant="I8")


def lose(db: Database, part: Part) -> list[int]:
    """At a take-over: what was reserved may have been sent; where an answer was kept, it is known what that one cost."""
    rows = db.rows("reserved_charges", job=part.job, shard=part.shard)
    moved = [0, 0, 0, 0]
    if not rows:
        return moved
    db.run("lose_charges", job=part.job, shard=part.shard, n=part.n)
    escrow = Escrow.of(db, part)
    for _, _, held, day, amount in rows:
        moved[1] -= int(held)
        moved[2 if amount > 0 else 3] += int(amount) or int(held)
        if amount > 0:
            escrow.pay(int(amount) - int(held), str(day))
    escrow.write(db, part)
    return moved


# -- step 5: allowances -------------------------------------------------------------------------


def draw(db: Database, job: int, shards: int, part: Part, grant: Grant) -> list[int]:
    """Draw an allowance for a shard from its purses, or give all of it back; what changed, as MONEY says it."""
    escrow = Escrow.of(db, part)
    before = escrow.allowance
    if grant.cost <= 0:
        back = max(0, escrow.allowance)
        _move(db, job_purse(job), -back)
        escrow.allowance -= back
        if escrow.day:
            _leave_day(db, escrow, grant)
    else:
        escrow.allowance += _drawn(db, job_purse(job), grant.cost, shards, has=escrow.allowance)
        if grant.day:
            if escrow.day != grant.day:
                _leave_day(db, escrow, grant)
                escrow.day = grant.day
            row = db.one("read_purse", name=grant.day_purse)
            if row is None or row[0] != grant.day_budget:
                set_budget(db, grant.day_purse, grant.day_budget)
            escrow.day_allowance += _drawn(db, grant.day_purse, grant.cost, shards, has=escrow.day_allowance)
    escrow.write(db, part)
    return [escrow.allowance - before, 0, 0, 0]


def _leave_day(db: Database, escrow: Escrow, grant: Grant) -> None:
    """What is left of a day goes back to that day's purse."""
    if escrow.day and escrow.day_allowance > 0:
        spider = grant.day_purse.split(":")[1]
        _move(db, day_purse(spider, escrow.day), -escrow.day_allowance)
    escrow.day, escrow.day_allowance = "", 0


def _drawn(db: Database, purse: str, cost: int, shards: int, *, has: int) -> int:
    """How much of a purse could be had: a share of what is left, at least one task's cost; 0 where that is too much."""
    if has >= cost:
        return 0
    for _ in range(3):
        row = db.one("read_purse", name=purse)
        budget, granted = (row[0], int(row[1])) if row else (None, 0)
        if row is None:
            db.run("new_purse", name=purse)
        left = None if budget is None else int(budget) - granted
        wanted = cost * UNLIMITED_TASKS if left is None else max(cost - has, left // (SHARE_OF_LEFT * shards))
        if left is not None and wanted > left:
            return 0
        if db.run("draw", name=purse, amount=wanted) == 1:
            return wanted
    raise StoreBusy(f"purse {purse}: others drew from it at every look")


def _move(db: Database, purse: str, amount: int) -> None:
    if amount:
        db.run("draw", name=purse, amount=amount)


# -- step 6: what a claim may take --------------------------------------------------------------


def reserve(db: Database, part: Part, ids: Sequence[int], want: Want) -> tuple[list[int], list[list[object]], bool]:
    """Of staged tasks those that can be paid for: (ids, rows for `charge`, whether some could not be)."""
    found = {task: (int(tries), str(handler)) for task, tries, handler in db.rows("staged_handlers")}
    if not any(want.costs.get(handler) for _, handler in found.values()):
        return list(ids), [], False
    escrow = Escrow.of(db, part)
    kept: list[int] = []
    rows: list[list[object]] = []
    is_short = False
    for task in ids:
        tries, handler = found[task]
        cost = want.costs.get(handler, 0)
        if cost and not escrow.can_pay(cost, want.day):
            is_short = True
            continue
        kept.append(task)
        if cost:
            escrow.pay(cost, want.day)
            rows.append([
                part.job, part.shard, task, tries + 1, handler, "", want.day, str(Billed.RESERVED), cost, 0, 0, "", part.n,
            ])  # fmt: skip
    if rows:
        escrow.write(db, part)
    return kept, rows, is_short


#: The columns that `reserve` fills; the time comes last.
COLUMNS = "charge (job, shard, task, try, handler, host, day, state, reserved, amount, requests, reason, n, at_ms)"


def put_reserved(db: Database, rows: Iterable[Sequence[object]], at_ms: int) -> list[int]:
    """Write the reserved charges of a claim: what changed, as MONEY says it."""
    staged = [(*row, at_ms) for row in rows]
    if staged:
        db.stage(COLUMNS, 14, staged)
    return [0, sum(int(str(row[8])) for row in staged), 0, 0]


# -- purses -------------------------------------------------------------------------------------


def set_budget(db: Database, purse: str, budget: int | None) -> None:
    """Say what a purse may hold, in micro-credits; None for no limit. In the caller's transaction."""
    db.run("put_purse", name=purse, budget=budget)
