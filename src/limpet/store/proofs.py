"""What a proof can find: every fault by its word, the invariant it breaks, and what mends it.

`FAULTS` is the list that the docs print. A remedy changes what was *derived* (counters, states, a
shard's row) or has something collected again; no remedy edits the past. Where ledger, attempt or
revisit rows were altered there is none: a backup has to be restored.

Invariants: the words for all of I1 to I10. How each is proved: `verify_books.py` (I1, I2),
`verify_tasks.py` (I3, I4, I6, I7), `verify_records.py` (I5), `verify_schema.py` (the file itself).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from limpet.settings import Settings
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.sealing import Sealed
from limpet.store.tables import Table

#: Findings of one fault that a verdict shows; all of them are counted. A damaged table could break millions of rows.
SHOWN_MAX = 100


class Remedy(StrEnum):
    """What `repair` can do about a fault."""

    NONE = ""  # the past was altered: restore a backup
    REMAKE = "remake"  # make an index or view again
    HEAD = "head"  # write the shard's row again from its last ledger row
    RECOUNT = "recount"  # write a task's counters and state again from its history
    REKEY = "rekey"  # write a task's key, host and shard again from its text, or its text from what the page said
    REBUILD = "rebuild"  # make a task's row again from its text and its history
    REDISCOVER = "rediscover"  # put the tasks back that led to the missing ones
    ADOPT = "adopt"  # count tasks that no batch discovered as discovered by the repair
    COLLECT = "collect"  # take a record away that cannot be trusted, and put its task back
    REBALANCE = "rebalance"  # note in the ledger how many rows a dataset really has
    FORGET = "forget"  # drop a note that will be made anew: a pace, a robots.txt, a request's end


class Fault(NamedTuple):
    """One way in which a database can be wrong."""

    invariant: str
    remedy: Remedy
    meaning: str


_NONE = Remedy.NONE

FAULTS: dict[str, Fault] = {
    # The file, and its tables.
    "file": Fault("file", _NONE, "SQLite finds the file damaged"),
    "constraint": Fault("file", Remedy.RECOUNT, "a row breaks a CHECK, NOT NULL or UNIQUE constraint"),
    "table": Fault("schema", _NONE, "a table is missing, or is not as the schema says"),
    "index": Fault("schema", Remedy.REMAKE, "an index is missing, or is not as the schema says"),
    "view": Fault("schema", Remedy.REMAKE, "the view of a dataset is missing"),
    "trigger": Fault("schema", _NONE, "a trigger changes rows behind the protocol's back"),
    "orphan": Fault("schema", _NONE, "rows belong to a job or shard that does not exist"),
    # I1: batches.
    "shard": Fault("I1", Remedy.HEAD, "a shard's row is missing, or is not as its last batch left it"),
    "gap": Fault("I1", _NONE, "batches are missing below the watermark"),
    "tail": Fault("I1", _NONE, "the ledger ends below the watermark"),
    "seal": Fault("I1", _NONE, "a ledger row is not the one that was sealed"),
    "chain": Fault("I1", _NONE, "a ledger row does not seal the row before it"),
    "epoch": Fault("I1", _NONE, "an epoch or owner changed without a take-over"),
    "batch_id": Fault("I1", _NONE, "a batch has no id, or that of another one"),
    # I2: what never changes.
    "tries": Fault("I2", _NONE, "a batch has more or fewer attempt rows than it counted"),
    "digest": Fault("I2", _NONE, "the attempt rows of a batch are not those that it digested"),
    "try": Fault("I2", _NONE, "an attempt row belongs to no task of its shard"),
    "sealed": Fault("I2", _NONE, "what a sealed job came to is not what its ledger adds up to"),
    "revisits": Fault("I2", _NONE, "a batch has more or fewer revisit rows than it counted"),
    # I3: sources and stamps.
    "missing": Fault("I3", Remedy.REDISCOVER, "tasks that a batch discovered are gone"),
    "forged": Fault("I3", Remedy.ADOPT, "a batch is named as the source of more tasks than it discovered"),
    "source": Fault("I3", Remedy.ADOPT, "a task names a source that discovered nothing, or is no batch"),
    "range": Fault("I3", _NONE, "the tasks of a batch lie outside the ids that it noted"),
    "rank": Fault("I3", Remedy.RECOUNT, "a task's rank does not follow from its priority and depth"),
    "above": Fault("I3", _NONE, "rows are stamped above their shard's watermark"),
    "note": Fault("I3", Remedy.FORGET, "a pace, robots.txt, move or request is stamped with a batch that cannot have written it"),
    "reason": Fault("I3", _NONE, "a task was skipped, failed or given up without a reason"),
    # I4: keys.
    "key": Fault("I4", Remedy.REKEY, "a key is not the digest of the text beside it"),
    "place": Fault("I4", Remedy.REKEY, "a shard or host is not the function of the text"),
    "text": Fault("I4", Remedy.REKEY, "a task has no text"),
    "lone_text": Fault("I4", Remedy.REBUILD, "a text has no task"),
    # I5: records.
    "content": Fault("I5", Remedy.COLLECT, "a record is not what its content hash says"),
    "record_key": Fault("I5", Remedy.COLLECT, "a record's key is not the digest of its key fields"),
    "stamp": Fault("I5", Remedy.COLLECT, "a record's stamp is no try that ended as done"),
    "closed": Fault("I5", Remedy.COLLECT, "a record is hidden, or lies in another slot, without cause"),
    "stale": Fault("I5", Remedy.COLLECT, "a record is of a former try of its task"),
    "lacks": Fault("I5", Remedy.COLLECT, "records that a try offered are gone"),
    "extra": Fault("I5", Remedy.COLLECT, "a try has more records than it offered"),
    "offer": Fault("I5", Remedy.COLLECT, "an offer that lost is not what its try offered"),
    "unopposed": Fault("I5", Remedy.COLLECT, "an offer lost, but no record stands in its place"),
    "total": Fault("I5", Remedy.REBALANCE, "new - removed over the ledger is not the number of rows"),
    "dataset": Fault("I5", _NONE, "a dataset is not known, or cannot be read"),
    # I6, I7: tasks.
    "running": Fault("I6", Remedy.RECOUNT, "a task runs without an open try of its shard's epoch"),
    "task": Fault("I7", Remedy.RECOUNT, "a task is not where its history leaves it"),
    "history": Fault("I7", _NONE, "the tries of a task are no legal history"),
    "claims": Fault("I7", Remedy.RECOUNT, "a shard's claims are not its attempt rows and open tries"),
    "cap": Fault("I7", _NONE, "a task has more strikes or solo losses than its cap"),
    # I8: money.
    "charge": Fault("I8", _NONE, "a charge is not of a try that is where the charge's state says"),
    "money": Fault("I8", _NONE, "allowance, reserved, spent and unknown are not what was granted"),
    "kept": Fault("I8", _NONE, "an answer is kept for a task that is done"),
    # I9: what tasks share.
    "tally": Fault("I9", _NONE, "a tally is not the sum of the ledger's deltas"),
    "register": Fault("I9", _NONE, "the versions of a register are no history"),
    "mark": Fault("I9", _NONE, "a high-water mark fell"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, where it is, and what was expected and found."""

    fault: str
    message: str
    shard: int | None = None
    n: int | None = None  # the batch, where one can be named
    task: int | None = None
    dataset: str | None = None
    key: bytes | None = None  # of a record or offer
    row: int | None = None  # its place in the dataset's table

    @property
    def invariant(self) -> str:
        """I1 ... I10, `file` or `schema`."""
        return FAULTS[self.fault].invariant

    @property
    def remedy(self) -> Remedy:
        """What `repair` does about it; `Remedy.NONE` where only a backup helps."""
        return FAULTS[self.fault].remedy

    def place(self) -> tuple[str, int, int, int]:
        """What findings are sorted by: invariant, shard, batch, task."""
        return (_RANK[self.invariant], -1 if self.shard is None else self.shard, self.n or 0, self.task or 0)

    def to_json(self) -> dict[str, object]:
        """For `--json`: only what is known of it."""
        where = {
            "shard": self.shard,
            "n": self.n,
            "task": self.task,
            "dataset": self.dataset,
            "key": self.key.hex() if self.key else None,
        }
        known = {name: value for name, value in where.items() if value is not None}
        return {"invariant": self.invariant, "fault": self.fault, "message": self.message, "repair": str(self.remedy), **known}


_RANK = {name: f"{rank:02}" for rank, name in enumerate(["file", "schema", *(f"I{number}" for number in range(1, 11))])}


class Report:
    """Gathers what proofs find: the first findings of each fault, the number of all, and what was looked at."""

    def __init__(self, shown_max: int = SHOWN_MAX) -> None:
        self._shown_max = shown_max
        self._findings: list[Finding] = []
        self.found: Counter[str] = Counter()
        self.checked: Counter[str] = Counter()
        self.notes: list[str] = []

    def add(
        self, fault: str, message: str, *, shard: int | None = None, n: int | None = None, task: int | None = None,
        dataset: str | None = None, key: bytes | None = None, row: int | None = None,
    ) -> None:  # fmt: skip
        """Count a fault, and keep it if there is room."""
        self.found[fault] += 1
        if self.found[fault] <= self._shown_max:
            self._findings.append(Finding(fault, message, shard, n, task, dataset, key, row))

    def findings(self) -> tuple[Finding, ...]:
        """What was kept, the first broken place first."""
        return tuple(sorted(self._findings, key=Finding.place))


@dataclass(frozen=True, slots=True)
class Head:
    """How far a shard is, as one statement over all shards read it."""

    epoch: int
    watermark: int
    verified: int


@dataclass(slots=True)
class Evidence:
    """What every proof is given: where to read, how far, and where to say what is wrong."""

    db: Database
    job: Job
    report: Report
    heads: Mapping[int, Head] = field(default_factory=dict)  # the vector that is proved: nothing above it is
    after: Mapping[int, int] = field(default_factory=dict)  # shard -> batch up to which it was proved before
    tables: Mapping[str, Table] = field(default_factory=dict)
    chunk: int = 5000
    sealed: Sealed | None = None  # its tasks and tries were removed: see verify_sealed.py
    limits: Settings | None = None  # given where the job ran under one set of caps from start to end


def several(rows: int, what: str) -> str:
    """A number with its noun.

    >>> several(1, "batch"), several(3, "batch"), several(2, "try")
    ('1 batch', '3 batches', '2 tries')
    """
    if rows == 1:
        return f"{rows} {what}"
    return f"{rows:,} {what[:-1]}ies" if what.endswith("y") else f"{rows:,} {what}{'es' if what.endswith('ch') else 's'}"
