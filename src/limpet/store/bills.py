"""What collecting cost, summed up, and what its budgets have left; and what a bill, or a person, says of charges of unknown outcome.

A settlement is a row for its charge; the owner of the shard applies it in its next batch, like any request of people.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from limpet.batch import Billed
from limpet.store import slots
from limpet.store.charges import Escrow, day_purse, job_purse
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.store.sealing import sealed_of

#: What stands for handler and host where a job's tries are gone.
SEALED = "(sealed)"
DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Cost:
    """The charges of one kind: micro-credits, tries and requests."""

    job: int
    handler: str
    host: str
    day_ms: int  # the day, UTC, at which it was last written
    state: str
    tries: int
    amount: int
    requests: int
    reserved: int


def costs(db: Database, jobs: Iterable[int]) -> list[Cost]:
    """What some jobs have cost, by handler, host, day and outcome; of one whose tries are gone, what its seal says, in one row."""
    found = []
    for job in jobs:
        if (seal := sealed_of(db, job)) is not None:  # rows that are still there are counted in it
            if seal.charged:
                day_ms = seal.at_ms - seal.at_ms % DAY_MS
                found.append(Cost(job, SEALED, SEALED, day_ms, Billed.CHARGED, seal.done, seal.charged, 0, 0))
            continue
        for handler, host, day_ms, state, tries, amount, requests, reserved in db.rows("sum_charges", job=job):
            found.append(Cost(job, handler, host, int(day_ms), state, int(tries), int(amount), int(requests), int(reserved)))
    return found


@dataclass(frozen=True, slots=True)
class Purse:
    """What a purse has paid, in micro-credits: what is charged, what is reserved, and what is unknown until it is settled."""

    spent: int
    budget: int | None = None  # None: no limit
    day: str = ""  # of the purse of a day

    @property
    def is_empty(self) -> bool:
        """Whether nothing more can be reserved."""
        return self.budget is not None and self.spent >= self.budget


@dataclass(frozen=True, slots=True)
class Balance:
    """The money of a job at one moment: its purse, that of the day, and the charges of unknown outcome."""

    job: Purse
    day: Purse | None = None
    unknown: int = 0
    unknown_amount: int = 0


def balance(db: Database, job: Job, now_ms: int) -> Balance | None:
    """What a job has spent, of which budgets; None where it has neither costs nor budget.

    Of a purse all is spent that was drawn from it and that no shard holds unused; no charge is read for that (I8). What other
    jobs of the spider have drawn from a day's purse is spent as far as this job can tell.
    """
    purse = db.one("read_purse", name=job_purse(job.id))
    if purse is None:
        return None
    held = [Escrow.of(db, job.id, shard) for shard in range(job.shards)]
    found = [db.rows("unknown_in_shard", job=job.id, shard=shard)[0] for shard in range(job.shards)]
    return Balance(
        Purse(int(purse[1]) - sum(one.allowance for one in held), None if purse[0] is None else int(purse[0])),
        _day(db, job, held, now_ms),
        sum(int(count) for count, _ in found),
        sum(int(amount) for _, amount in found),
    )


def _day(db: Database, job: Job, held: Iterable[Escrow], now_ms: int) -> Purse | None:
    """The purse of the day that paid last; of today, where none has paid yet."""
    unused: dict[str, int] = defaultdict(int)
    for one in held:
        unused[one.day] += one.day_allowance
    day = max(unused) or slots.today(db, job.spider, now_ms)
    purse = db.one("read_purse", name=day_purse(job.spider, day))
    return None if purse is None or purse[0] is None else Purse(int(purse[1]) - unused[day], int(purse[0]), day)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A charge of unknown outcome, of a task that may have other charges."""

    shard: int
    task: int
    number: int  # of the try
    reserved: int
    text: str
    is_paid: bool  # another try of the same task, under the same idempotency key, was charged


def unknown(db: Database, job: Job) -> list[Unknown]:
    """Every charge of a job that nobody knows the outcome of, by task and try."""
    return [
        Unknown(int(shard), int(task), int(number), int(reserved), str(text), bool(later))
        for shard, task, number, reserved, text, later in db.rows("unknown_charges", job=job.id)
    ]


@dataclass(slots=True)
class Settlement:
    """What is said of unknown charges, and what a bill and the ledger do not agree on."""

    said: list[tuple[Unknown, Billed, int]] = field(default_factory=list)
    left: int = 0  # unknown charges that nothing is said of
    more: dict[str, int] = field(default_factory=dict)  # task text -> micro-credits that were billed beyond its charges
    less: dict[str, int] = field(default_factory=dict)  # ... that we count and nobody billed

    def say(self, one: Unknown, amount: int) -> None:
        """This charge came to so much; 0 is a refund."""
        self.said.append((one, Billed.CHARGED if amount else Billed.REFUNDED, amount))


def by_decree(found: Iterable[Unknown], *, is_charged: bool) -> Settlement:
    """All of them charged as reserved, or all of them refunded."""
    settlement = Settlement()
    for one in found:
        settlement.say(one, one.reserved if is_charged else 0)
    return settlement


def by_idempotency(found: Iterable[Unknown]) -> Settlement:
    """Where another try under the same idempotency key was charged, the provider has charged the call once: there."""
    settlement = Settlement()
    for one in found:
        if one.is_paid:
            settlement.say(one, 0)
        else:
            settlement.left += 1
    return settlement


def by_bill(db: Database, job: Job, found: Iterable[Unknown], billed: Mapping[str, int], *, is_whole: bool) -> Settlement:
    """By what a provider billed for each task: what its known charges do not explain was an unknown one.

    `is_whole`: a task that the bill does not name was not charged at all. A task of which a try runs now is left for later: nobody
    knows yet which of its tries the bill is about.
    """
    settlement = Settlement()
    by_task: dict[str, list[Unknown]] = defaultdict(list)
    for one in found:
        by_task[one.text].append(one)
    known = {str(text): int(amount) for text, amount in db.rows("charged_by_task", job=job.id)}
    runs = {str(text) for (text,) in db.rows("tasks_being_charged", job=job.id)}
    for text in sorted({*by_task, *known, *billed}):
        if text in runs or (text not in billed and not is_whole):
            settlement.left += len(by_task[text])
            continue
        rest = billed.get(text, 0) - known.get(text, 0)
        for one in by_task[text]:
            amount = min(rest, one.reserved) if rest > 0 else 0
            settlement.say(one, amount)
            rest -= amount
        if rest > 0:
            settlement.more[text] = rest
        elif rest < 0:
            settlement.less[text] = -rest
    return settlement


def ask(store: Store, settlement: Settlement, who: str) -> None:
    """Write the settlements down, in one transaction, for the owners of their shards."""
    assert store.job is not None, "charges are a job's"
    store.db.begin()
    try:
        for one, state, amount in settlement.said:
            store.db.run(
                "put_settlement", job=store.job.id, shard=one.shard, task=one.task, state=str(state), amount=amount, who=who,
                **{"try": one.number},
            )  # fmt: skip
        store.db.commit()
    except BaseException:
        store.db.rollback()
        raise
