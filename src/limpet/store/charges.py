"""What collecting costs: a charge for each try, escrow for each shard, a purse for each job or day.

A budget is a purse. An owner draws an allowance from it for its shard, rarely and in a commit of its own; a claim
reserves against the allowance, on a row that the fence has locked already. So no two owners can both spend the last
credit, and no commit waits for a row that all share. What is reserved becomes charged, refunded, void or, where a
crash came between, unknown; unknown counts as spent until somebody settles it. Invariant: I8.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from limpet.batch import Billed, Charge, Grant, Part, Result, Want
from limpet.errors import InvariantBroken, StoreBusy
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.jobs import read as read_job
from limpet.task import ShardId

#: An allowance is this part of what a purse has left, so that the last credits are spread over the shards that want them.
SHARE_OF_LEFT = 4

#: Tasks that an allowance pays for where there is no budget: the purse's row is touched once for so many.
UNLIMITED_TASKS = 1000

#: Looks at purses that others draw from at the same time, before the whole batch is repeated.
LOOKS = 3

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
    def of(cls, db: Database, job: int, shard: int) -> Escrow:
        """The shard's row; an empty one where it has none."""
        row = db.one("read_escrow", job=job, shard=shard)
        return cls(int(row[0]), str(row[1]), int(row[2])) if row else cls()

    def write(self, db: Database, part: Part) -> None:
        """Write the row."""
        db.run(
            "put_escrow", job=part.job, shard=part.shard, n=part.n, allowance=self.allowance, day=self.day, day_allowance=self.day_allowance
        )

    def spendable(self, day: str) -> int:
        """Micro-credits that may be reserved now, for a try on that day; "" where no day has a purse."""
        return self.allowance if not day else min(self.allowance, self.day_allowance) if self.day == day else 0

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
    escrow = Escrow.of(db, part.job, part.shard)
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
        requests=charge.requests, reason=charge.reason, n=part.n, before=before, anew=int(charge.anew), **{"try": which[1]},
    )  # fmt: skip
    if changed != 1:
        raise InvariantBroken(f"the charge of task {which[0]}, try {which[1]}, was changed by somebody else", invariant="I8")


def reclaim(db: Database, part: Part) -> list[int]:
    """At a take-over: end what was reserved, and give back what the shard holds unused, so that it is drawn under the budget of now."""
    moved = _lose(db, part)
    held = Escrow.of(db, part.job, part.shard)
    if held.allowance <= 0 and held.day_allowance <= 0:
        return moved
    back = give_back(db, read_job(db, part.job), [part]).get(part.shard, (0, 0, 0, 0))
    return [a + b for a, b in zip(moved, back, strict=True)]


def _lose(db: Database, part: Part) -> list[int]:
    """What was reserved may have been sent; where an answer was kept, it is known what that one cost."""
    rows = db.rows("reserved_charges", job=part.job, shard=part.shard)
    moved = [0, 0, 0, 0]
    if not rows:
        return moved
    db.run("lose_charges", job=part.job, shard=part.shard, n=part.n)
    escrow = Escrow.of(db, part.job, part.shard)
    for _, _, held, day, amount in rows:
        moved[1] -= int(held)
        moved[2 if amount > 0 else 3] += int(amount) or int(held)
        if amount > 0:
            escrow.pay(int(amount) - int(held), str(day))
    escrow.write(db, part)
    return moved


# -- step 5: allowances -------------------------------------------------------------------------


def draw(db: Database, job: Job, part: Part, grant: Grant) -> list[int]:
    """Draw an allowance for a shard from its purses, or give all of it back; what changed, as MONEY says it.

    All or nothing: a shard that cannot have what a task costs of every purse holds nothing of any of them, since others
    can use it. Money that nobody can use, and that goes to and fro, would keep a job from its end for ever.
    """
    if grant.cost <= 0:
        return give_back(db, job, [part]).get(part.shard, [0, 0, 0, 0])
    escrow = Escrow.of(db, part.job, part.shard)
    for _ in range(LOOKS):
        found, moves = _planned(db, job, escrow, grant)
        if _moved(db, moves, grant):
            found.write(db, part)
            return [found.allowance - escrow.allowance, 0, 0, 0]
    raise StoreBusy(f"purses {', '.join(sorted(moves))}: others drew from them at every look")


def give_back(db: Database, job: Job, parts: Iterable[Part]) -> dict[ShardId, list[int]]:
    """Give back what shards hold unused, so that others of this job, and other jobs on that day, can have it: what changed, by shard."""
    moves: dict[str, int] = defaultdict(int)
    changed = {}
    for part in parts:
        escrow = Escrow.of(db, part.job, part.shard)
        back, back_day = max(0, escrow.allowance), max(0, escrow.day_allowance)
        if back or back_day:
            moves[job_purse(job.id)] -= back
            moves[day_purse(job.spider, escrow.day)] -= back_day
            Escrow(escrow.allowance - back, escrow.day, escrow.day_allowance - back_day).write(db, part)
            changed[part.shard] = [-back, 0, 0, 0]
    for name in sorted(moves):
        _move(db, name, moves[name])
    return changed


def _planned(db: Database, job: Job, escrow: Escrow, grant: Grant) -> tuple[Escrow, dict[str, int]]:
    """What the shard will hold, and what that takes of each purse, as they are now."""
    held = escrow.day_allowance if escrow.day == grant.day else 0  # of a day that is over all goes back
    more, more_day = _more(*_read(db, job_purse(job.id)), grant.cost, job.shards, has=escrow.allowance), None
    if more is not None:
        more_day = _more(grant.day_budget, _read(db, grant.day_purse)[1], grant.cost, job.shards, has=held) if grant.day else 0
    if more is None or more_day is None:
        more, more_day = -max(0, escrow.allowance), -max(0, held)
    moves = {job_purse(job.id): more}
    if escrow.day:
        moves[day_purse(job.spider, escrow.day)] = -max(0, escrow.day_allowance)
    if grant.day:
        moves[grant.day_purse] = more_day
    return Escrow(escrow.allowance + more, grant.day, held + more_day), moves


def _more(budget: int | None, granted: int, cost: int, shards: int, *, has: int) -> int | None:
    """How much an allowance grows: by a share of what its purse has left, at least by what one task lacks; None: it has not so much."""
    if has >= cost:
        return 0
    if budget is None:
        return cost * UNLIMITED_TASKS
    left = budget - granted
    wanted = max(cost - has, left // (SHARE_OF_LEFT * shards))
    return wanted if wanted <= left else None


def _read(db: Database, purse: str) -> tuple[int | None, int]:
    """Budget of a purse, and what was drawn from it."""
    row = db.one("read_purse", name=purse)
    return (None if row[0] is None else int(row[0]), int(row[1])) if row else (None, 0)


def _moved(db: Database, moves: Mapping[str, int], grant: Grant) -> bool:
    """Draw and give back, purse by purse, by name: everybody locks them in that order. False where one no longer has so much."""
    done: list[str] = []
    for name in sorted(moves):
        if name == grant.day_purse and (db.one("read_purse", name=name) or ("none",))[0] != grant.day_budget:
            set_budget(db, name, grant.day_budget)
        if not _move(db, name, moves[name]):
            for other in done:
                _move(db, other, -moves[other])
            return False
        done.append(name)
    return True


def _move(db: Database, purse: str, amount: int) -> bool:
    if not amount:
        return True
    if db.one("read_purse", name=purse) is None:
        db.run("new_purse", name=purse)
    return db.run("draw", name=purse, amount=amount) == 1


# -- step 6: what a claim may take --------------------------------------------------------------


@dataclass(slots=True)
class Means:
    """What one claim may still reserve in its shard, and what it could not."""

    escrow: Escrow
    left: int = 0  # micro-credits that are not yet spoken for
    short_of: int = 0  # what the cheapest task costs that could not be paid for; 0 where all could be

    @classmethod
    def of(cls, db: Database, part: Part, want: Want) -> Means:
        """Before the claim; without a look where nothing costs."""
        if not want.costs:
            return cls(Escrow())
        escrow = Escrow.of(db, part.job, part.shard)
        return cls(escrow, escrow.spendable(want.day))

    def tries_of(self, price: int) -> int:
        """For how many tries of this price it is enough."""
        return max(0, self.left) // price

    def cut(self, ids: Sequence[int], price: int) -> Sequence[int]:
        """The first of some tasks that all have this price: those that it is enough for. They are spoken for from now on."""
        paid = ids[: self.tries_of(price)]
        self.left -= price * len(paid)
        if len(paid) < len(ids):
            self._lacks(price)
        return paid

    def pay(self, cost: int, day: str) -> bool:
        """Reserve one try. False where the shard has not so much."""
        if self.escrow.spendable(day) < cost:
            self._lacks(cost)
            return False
        self.escrow.pay(cost, day)
        return True

    def _lacks(self, cost: int) -> None:
        self.short_of = min(self.short_of or cost, cost)


def reserve(db: Database, part: Part, ids: Sequence[int], want: Want, means: Means) -> tuple[list[int], list[list[object]]]:
    """Of staged tasks those that can be paid for: (ids, rows for `charge`)."""
    found = {task: (int(tries), str(handler)) for task, tries, handler in db.rows("staged_handlers")}
    kept: list[int] = []
    rows: list[list[object]] = []
    for task in ids:
        tries, handler = found[task]
        cost = want.costs.get(handler, 0)
        if not cost:
            kept.append(task)
        elif means.pay(cost, want.day):
            kept.append(task)
            rows.append([
                part.job, part.shard, task, tries + 1, handler, "", want.day, str(Billed.RESERVED), cost, 0, 0, "", part.n,
            ])  # fmt: skip
    if rows:
        means.escrow.write(db, part)
    return kept, rows


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
