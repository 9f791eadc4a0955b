"""What collecting cost, summed up; and what a provider's bill, or a person, says of charges of unknown outcome.

A settlement is a row for its charge; the owner of the shard applies it in its next batch, like any request of people.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from limpet.batch import Billed
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.opening import Store


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
    """What some jobs have cost, by handler, host, day and outcome."""
    found = []
    for job in jobs:
        for handler, host, day_ms, state, tries, amount, requests, reserved in db.rows("sum_charges", job=job):
            found.append(Cost(job, handler, host, int(day_ms), state, int(tries), int(amount), int(requests), int(reserved)))
    return found


@dataclass(frozen=True, slots=True)
class Unknown:
    """A charge of unknown outcome, of a task that may have other charges."""

    shard: int
    task: int
    number: int  # of the try
    reserved: int
    text: str
    charged_later: bool  # a later try of the same task was charged


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
    """Where a later try under the same idempotency key was charged, the provider has charged the call once: there."""
    settlement = Settlement()
    for one in found:
        if one.charged_later:
            settlement.say(one, 0)
        else:
            settlement.left += 1
    return settlement


def by_bill(db: Database, job: Job, found: Iterable[Unknown], billed: Mapping[str, int], *, is_whole: bool) -> Settlement:
    """By what a provider billed for each task: what its known charges do not explain was an unknown one.

    `is_whole`: a task that the bill does not name was not charged at all.
    """
    settlement = Settlement()
    by_task: dict[str, list[Unknown]] = defaultdict(list)
    for one in found:
        by_task[one.text].append(one)
    known = {str(text): int(amount) for text, amount in db.rows("charged_by_task", job=job.id)}
    for text in sorted({*by_task, *known, *billed}):
        if text not in billed and not is_whole:
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
