"""Proof of the records: each is what its try offered, under the key of its own fields, and none is gone.

A record and the try that its stamp names are read in one statement, so that a record which another task
wins meanwhile is of one moment. Three counts complete it: a try's records and offers are as many as it
offered, an offer that lost has a record in its place, and over the ledger new - removed = rows.
Fields that are volatile are under no hash and so not proved. Invariants: I5, and of I3 the stamps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from limpet.errors import RecordError
from limpet.store.dialect import Database, Row, quote
from limpet.store.proofs import Evidence, several
from limpet.store.tables import OWN, Table, unpack
from limpet.store.verify_books import watermarks_now
from limpet.store.verify_tasks import ranges
from limpet.store.views import snapshot
from limpet.task import Outcome
from limpet.url import digest16

#: In what a try ended that wrote records: done, or dead, where a handler for final failures wrote for it.
WROTE = (str(Outcome.DONE), str(Outcome.DEAD))

#: What a row's stamp leads to, and whether its task ended as done once more after that.
_STAMP = ("a.outcome", "a.job", "a.shard", "a.n", "a.records", "t.key")
_LATER = (
    "CASE WHEN t.tries = d._try THEN 0 WHEN EXISTS ("
    "SELECT 1 FROM attempt AS b WHERE b.task = d._task AND b.try > d._try "
    "AND (b.outcome = 'done' OR (b.outcome = 'dead' AND b.records > 0))) THEN 1 ELSE 0 END"
)

#: Columns before a row's values: its place, Limpet's own, the stamp's.
_HEAD = 1 + len(OWN) + len(_STAMP) + 1

#: Before any (key, slot, task key).
_FIRST = (b"", "", b"")


@dataclass(frozen=True, slots=True)
class _Record:
    """A stored row with what its stamp leads to."""

    row: int
    scope: int
    key: bytes
    slot: str
    key_text: str
    content: bytes
    task_key: bytes
    task: int
    tries: int
    job: int
    shard: int
    n: int
    closed: str
    outcome: str | None  # of the try that the stamp names
    try_job: int | None
    try_shard: int | None
    try_n: int | None
    try_records: int | None
    its_key: bytes | None  # of the task that the stamp names
    is_later: int  # that task ended as done once more, after this try


@dataclass(frozen=True, slots=True)
class _Offer:
    """An offer that lost, with what its stamp leads to."""

    key: bytes
    slot: str
    task_key: bytes
    task: int
    tries: int
    job: int
    shard: int
    n: int
    key_text: str
    content: bytes
    packed: str
    outcome: str | None
    try_job: int | None
    try_shard: int | None
    try_n: int | None
    its_key: bytes | None
    is_later: int


class RecordProof:
    """I5 of one dataset."""

    def __init__(self, evidence: Evidence, table: Table) -> None:
        self._evidence = evidence
        self._db = evidence.db
        self._job = evidence.job
        self._report = evidence.report
        self._table = table
        self._highest: dict[int, int] = defaultdict(int)  # shard -> batch: stamps of this job's rows
        self._name = quote(table.name)
        head = [*(f"d.{quote(name)}" for name in ("_id", *OWN)), *_STAMP, _LATER]
        self._columns = ", ".join([*head, *(f"d.{quote(column.name)}" for column in table.type.columns)])

    # -- all of it -----------------------------------------------------------------------

    def prove(self) -> None:
        """Every row and every offer of the job; of a spider's dataset those that this job wrote."""
        whose = "_scope" if self._table.type.scope == "job" else "_job"
        query = (
            f"SELECT {self._columns} FROM {self._name} AS d LEFT JOIN attempt AS a ON a.task = d._task AND a.try = d._try "
            f"LEFT JOIN task AS t ON t.id = d._task WHERE d._id > ? AND d._id <= ? AND +d.{whose} = ? ORDER BY d._id"
        )  # the + keeps the planner on the id
        after = -(2**63)
        while (upto := self._next_chunk(after)) is not None:
            self.prove_rows(self._db.rows_text(query, (after, upto, self._job.id)))
            after = upto
        self._prove_offers(self._table.scope_of(self._job))
        self._prove_stamps()

    def _next_chunk(self, after: int) -> int | None:
        rows = self._db.rows_text(
            f"SELECT MAX(_id) FROM (SELECT _id FROM {self._name} WHERE _id > ? ORDER BY _id LIMIT ?) AS chunk",
            (after, self._evidence.chunk),
        )
        return None if rows[0][0] is None else int(rows[0][0])

    def prove_of_batches(self, shard: int, after: int, upto: int) -> None:
        """What the tries of some batches wrote, as far as it still stands."""
        query = (
            f"SELECT {self._columns} FROM attempt AS a JOIN {self._name} AS d ON d._task = a.task AND d._try = a.try "
            "LEFT JOIN task AS t ON t.id = d._task "
            "WHERE a.job = ? AND a.shard = ? AND a.n > ? AND a.n <= ? AND a.records > 0"
        )
        self.prove_rows(self._db.rows_text(query, (self._job.id, shard, after, upto)))
        names = {"job": self._job.id, "shard": shard, "after": after, "upto": upto}
        for row in self._db.rows("verify_offers_of_batches", dataset=self._table.name, **names):
            self._prove_offer(row)

    # -- rows ----------------------------------------------------------------------------

    def prove_rows(self, rows: Iterable[Row]) -> None:
        """Each row against its hashes and its stamp."""
        seal, job, scope = self._table.type.seal, self._job, self._table.scope_of(self._job)
        count = 0
        for row in rows:
            count += 1
            try:
                sealed = seal(row[_HEAD:])
            except RecordError:
                sealed = None
            # In the order of the columns: _key is 2, _slot 3, _key_text 4, _content 5, _closed 12, _LATER the last of the head.
            if (
                sealed is None
                or sealed[:3] != (row[2], row[4], row[5])
                or (row[1], row[3], row[12], row[_HEAD - 1]) != (scope, job.slot, "", 0)
                or row[13:17] != (Outcome.DONE, row[9], row[10], row[11])
                or row[17] < 1
                or row[18] != row[6]
            ):
                self._explain(_Record(*row[:_HEAD]), row[_HEAD:])
            if row[11] > self._highest[row[10]]:
                self._highest[row[10]] = row[11]
        self._report.checked["records"] += count

    def _explain(self, record: _Record, values: Sequence[object]) -> None:
        """Say what is wrong with a row; a version that was closed for cause is not."""
        here = f"{self._table.name} {record.key_text[:200]}"
        for fault, why in self._faults(record, values):
            where = {
                "shard": record.shard,
                "n": record.n,
                "task": record.task,
                "dataset": self._table.name,
                "key": record.key,
                "row": record.row,
            }
            self._report.add(fault, f"{here}: {why}", **where)  # type: ignore[arg-type]

    def _faults(self, record: _Record, values: Sequence[object]) -> Iterator[tuple[str, str]]:
        if wrong := self._wrong_hashes(record.key, record.key_text, record.content, values):
            yield wrong
        slot, scope = self._job.slot, self._table.scope_of(self._job)
        if (record.scope, record.slot) != (scope, slot):
            yield "closed", f"expected scope {scope}, slot {slot!r}, found {record.scope}, {record.slot!r}"
        if self._evidence.sealed:
            return  # the try that wrote it is gone; it was proved before it went
        if wrong_stamp := _wrong_stamp(record):
            yield "stamp", wrong_stamp
        if record.closed and not (self._table.history and record.closed == (slot or "closed") and record.is_later):
            yield "closed", f"it is closed ({record.closed!r}), but its task did not end as done again without it"
        if record.is_later and not record.closed:
            yield "stale", f"it is of try {record.tries}, and its task ended as done once more after that"

    def _wrong_hashes(self, key: bytes, key_text: str, content: bytes, values: Sequence[object]) -> tuple[str, str] | None:
        try:
            sealed = self._table.type.seal(values)
        except RecordError as error:
            return "content", str(error)
        if key != digest16(key_text):
            return "record_key", f"its key is {key.hex()}, its key text has {digest16(key_text).hex()}"
        if sealed.key_text != key_text:
            return "record_key", f"its key fields make the key {sealed.key_text[:200]}"
        return (
            ("content", f"its fields have content {sealed.content.hex()}, expected {content.hex()}") if sealed.content != content else None
        )

    # -- offers --------------------------------------------------------------------------

    def _prove_offers(self, scope: int) -> None:
        key, slot, task_key = _FIRST
        names = {"dataset": self._table.name, "scope": scope, "most": self._evidence.chunk}
        while rows := self._db.rows("verify_offers", key=key, slot=slot, task_key=task_key, **names):
            for row in rows:
                if row[5] == self._job.id:
                    self._prove_offer(row)
            key, slot, task_key = rows[-1][:3]
        if self._table.type.scope == "job" and not self._table.history:
            self._prove_opposed(scope)

    def _prove_offer(self, row: Row) -> None:
        """An offer is what a try that ended as done offered, as its record would be."""
        offer = _Offer(*row)
        self._report.checked["offers"] += 1
        if offer.n > self._highest[offer.shard]:
            self._highest[offer.shard] = offer.n
        if why := self._wrong_offer(offer):
            message = f"{self._table.name} {offer.key_text[:200]}: the offer of task {offer.task}: {why}"
            self._report.add("offer", message, shard=offer.shard, n=offer.n, task=offer.task, dataset=self._table.name, key=offer.key)

    def _wrong_offer(self, offer: _Offer) -> str:
        stamp = (offer.job, offer.shard, offer.n, offer.task_key)
        if self._evidence.sealed:
            pass  # as with records
        elif offer.outcome not in WROTE or (offer.try_job, offer.try_shard, offer.try_n, offer.its_key) != stamp:
            return f"its stamp is try {offer.tries} in batch {offer.n} of shard {offer.shard}, which did not end as done there"
        if offer.slot != self._job.slot:
            return f"it lies in slot {offer.slot!r}, expected {self._job.slot!r}"
        if offer.is_later and self._table.type.scope == "job" and not self._table.history:
            return f"it is of try {offer.tries}, and its task ended as done once more after that"
        try:
            values = unpack(offer.packed, self._table.fields)
        except (ValueError, KeyError, TypeError) as error:
            return f"it cannot be read: {error}"
        wrong = self._wrong_hashes(offer.key, offer.key_text, offer.content, values)
        return wrong[1] if wrong else ""

    def _prove_opposed(self, scope: int) -> None:
        """Inside a job an offer lost to a lower task key, whose record stands."""
        rows = self._db.rows_text(
            "SELECT o.key, o.key_text, o.task, o.shard, o.n FROM offer AS o "
            f"LEFT JOIN {self._name} AS d ON d._scope = o.scope AND d._key = o.key "
            "WHERE o.dataset = ? AND o.scope = ? AND (d._id IS NULL OR d._task_key >= o.task_key) ORDER BY o.key LIMIT ?",
            (self._table.name, scope, self._evidence.chunk),
        )
        for key, key_text, task, shard, n in rows:
            message = f"{self._table.name} {key_text[:200]}: task {task} lost to another task, but no record of a lower key stands"
            self._report.add("unopposed", message, shard=shard, n=n, task=task, dataset=self._table.name, key=key)

    def _prove_stamps(self) -> None:
        """I3: no row is stamped above its shard's watermark, read after the rows."""
        watermarks = watermarks_now(self._evidence)
        for shard, highest in self._highest.items():
            if highest > (upto := watermarks.get(shard, highest)):
                message = f"{self._table.name} has rows of batch {highest} of shard {shard}, whose watermark is {upto}"
                self._report.add("stamp", message, shard=shard, n=highest, dataset=self._table.name)


def _wrong_stamp(record: _Record) -> str:
    stamp = f"try {record.tries} of task {record.task} in batch {record.n} of shard {record.shard}"
    if record.outcome is None:
        return f"its stamp is {stamp}, which does not exist"
    if (record.try_job, record.try_shard, record.try_n) != (record.job, record.shard, record.n):
        return f"its stamp is {stamp}; that try was in batch {record.try_n} of shard {record.try_shard}"
    if record.outcome not in WROTE:
        return f"its stamp is {stamp}, which ended as {record.outcome}"
    if not record.try_records:
        return f"its stamp is {stamp}, which offered no record"
    return "" if record.its_key == record.task_key else f"its stamp is {stamp}, which has another key"


# -- counts -------------------------------------------------------------------------------------


def prove_counts(evidence: Evidence) -> None:
    """Each try that ended as done has as many records and offers as it offered, range by range."""
    tries = (
        "FROM task AS t JOIN attempt AS a ON a.task = t.id AND a.outcome IN ('done', 'dead') AND a.try = "
        "CASE WHEN t.state = 'done' THEN t.tries ELSE (SELECT MAX(b.try) FROM attempt AS b "
        "WHERE b.task = t.id AND (b.outcome = 'done' OR (b.outcome = 'dead' AND b.records > 0))) END "
        "WHERE t.id > ? AND t.id <= ? AND +t.job = ? AND a.records > 0 AND (t.state IN ('done', 'dead') OR t.revisits > 0)"
    )
    for low, high in ranges(evidence):
        _prove_counts(evidence, tries, (low, high, evidence.job.id))


def prove_counts_of_batches(evidence: Evidence, shard: int, after: int, upto: int) -> None:
    """The same of the tries that ended in some batches and were not made again since."""
    tries = (
        "FROM attempt AS a WHERE a.job = ? AND a.shard = ? AND a.n > ? AND a.n <= ? AND a.outcome IN ('done', 'dead') AND a.records > 0 "
        "AND NOT EXISTS (SELECT 1 FROM attempt AS b WHERE b.task = a.task AND b.try > a.try "
        "AND (b.outcome = 'done' OR (b.outcome = 'dead' AND b.records > 0)))"
    )
    _prove_counts(evidence, tries, (evidence.job.id, shard, after, upto))


def _prove_counts(evidence: Evidence, tries: str, values: tuple[int, ...]) -> None:
    """One statement, so one moment.

    Where another slot may have taken a key over, or kept it, a try may have fewer; nowhere more. A task that was put
    back since may lack what a repair took away, until it ends as done again.
    """
    tables = list(evidence.tables.values())
    is_exact = all(table.type.scope == "job" or table.history for table in tables)
    counts = "".join(
        f" + (SELECT COUNT(*) FROM {quote(table.name)} AS d WHERE d._task = a.task AND d._try = a.try AND d._closed = '')"
        for table in tables
    )
    rows = evidence.db.rows_text(
        "SELECT shard, n, task, number, records, found FROM (SELECT a.shard, a.n, a.task, a.try AS number, a.records, "
        f"(SELECT COUNT(*) FROM offer AS o WHERE o.task = a.task AND o.try = a.try){counts} AS found, "
        "CASE WHEN EXISTS (SELECT 1 FROM revisit AS r WHERE r.task = a.task AND r.after_try >= a.try) "
        "THEN 1 ELSE 0 END AS put_back "
        f"{tries}) AS counted WHERE found <> records AND (found > records OR (put_back = 0 AND ? = 1))",
        (*values, int(is_exact)),
    )
    for shard, n, task, number, offered, found in rows:
        fault = "lacks" if found < offered else "extra"
        message = f"try {number} of task {task} offered {several(offered, 'record')}, {found} are there"
        evidence.report.add(fault, message, shard=shard, n=n, task=task)


# -- totals -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Total:
    """What the ledger says of a dataset, and what is there."""

    booked: int  # new - removed
    rows: int


def total_of(db: Database, job: int, spider: str, table: Table) -> Total:
    """Read in one moment by the caller's snapshot or transaction: the ledgers of the job, or of all jobs of the spider."""
    if table.type.scope == "job":
        books, where = [job], (" WHERE _scope = ?", (job,))
    else:
        books, where = [row[0] for row in db.rows("verify_jobs_of_spider", spider=spider)], (" WHERE _scope = ?", (0,))
    booked = 0
    for each in books:
        for (deltas,) in db.rows("verify_deltas", job=each):
            if (counts := json.loads(deltas).get(table.name)) is not None:
                booked += counts[0] - counts[3]
    return Total(booked, db.rows_text(f"SELECT COUNT(*) FROM {quote(table.name)}{where[0]}", where[1])[0][0])


def prove_totals(evidence: Evidence) -> None:
    """Per dataset, new - removed = rows, over the ledger; for a spider's dataset over all its jobs."""
    for table in evidence.tables.values():
        with snapshot(evidence.db) as db:
            total = total_of(db, evidence.job.id, evidence.job.spider, table)
        if total.booked != total.rows:
            evidence.report.add(
                "total",
                f"{table.name}: the ledger counts {several(total.booked, 'row')}, {total.rows:,} are there",
                dataset=table.name,
            )


def prove_datasets(evidence: Evidence) -> None:
    """Every offer belongs to a dataset that is known."""
    known = {row[0] for row in evidence.db.rows_text("SELECT name FROM dataset")}
    for name, scope in evidence.db.rows("verify_offered_datasets"):
        if name not in known and scope in (0, evidence.job.id):
            evidence.report.add("dataset", f"offers of the dataset {name}, which is not known", dataset=name)
