"""The invariants, recounted in plain Python from whole tables: slow, obvious, and independent of `verify`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from limpet.batch import tries_digest
from limpet.store import ledger
from limpet.store.dialect import Database, Row
from limpet.url import canonicalise, digest16, host_id, shard_of
from tests.store.hands import PROFILE

Books = dict[int, list[dict[str, object]]]
Shards = dict[int, tuple[int, int]]  # shard -> (epoch, watermark)

#: The states in which a try of an outcome may have left its task, or a revisit since.
STATES_AFTER = {
    "done": {"done", "pending"},
    "skipped": {"skipped", "pending"},
    "failed": {"failed"},
    "dead": {"dead", "pending"},
    "released": {"pending"},
    "throttled": {"pending"},
    "lost": {"pending", "failed", "dead"},
}

_COLUMNS = (*ledger.COLUMNS, "seal")
_TRIES = """
SELECT a.shard, a.n, t.key, a.try, a.outcome, a.reason, a.offered, a.task, a.strike, a.solo,
       a.try > COALESCE((SELECT MAX(after_try) FROM revisit AS r WHERE r.task = a.task), 0)
  FROM attempt AS a JOIN task AS t ON t.id = a.task WHERE a.job = ?"""
_TASKS = """
SELECT t.id, t.shard, t.host, t.key, t.state, t.tries, t.strikes, t.lost, t.solo, t.claim_epoch, x.text
  FROM task AS t JOIN task_text AS x ON x.id = t.id WHERE t.job = ?"""
_STRAYS = """
SELECT d._key_text FROM {name} AS d
 WHERE NOT EXISTS (SELECT 1 FROM attempt AS a WHERE a.task = d._task AND a.try = d._try AND a.shard = d._shard
                      AND a.n = d._n AND a.job = d._job AND a.outcome = 'done')"""


def audit(db: Database, job: int) -> None:
    """Assert I1 to I7 of a job, and that the deltas of every dataset are its rows."""
    shards = {s: (epoch, n) for s, epoch, n in db.rows_text("SELECT shard, epoch, watermark FROM shard WHERE job = ?", (job,))}
    tries = db.rows_text(_TRIES, (job,))
    _books(db, job, shards, tries)
    _tasks(db, job, shards, tries)
    _records(db)


def _books(db: Database, job: int, shards: Shards, tries: list[Row]) -> None:
    books: Books = defaultdict(list)
    for row in db.rows_text(f"SELECT {', '.join(_COLUMNS)} FROM ledger WHERE job = ? ORDER BY shard, n", (job,)):
        books[row[1]].append(dict(zip(_COLUMNS, row, strict=True)))
    found = Counter(db.rows_text("SELECT source_shard, source_n FROM task WHERE job = ?", (job,)))
    of_batch: dict[tuple[int, int], list[tuple[bytes, int, str, str, bytes]]] = defaultdict(list)
    for shard, n, key, number, outcome, reason, offered, *_ in tries:
        of_batch[shard, n].append((key, number, outcome, reason, offered))
    for shard, (epoch, watermark) in shards.items():
        rows = books.pop(shard, [])
        assert [row["n"] for row in rows] == [*range(1, watermark + 1)], f"I1: batches of shard {shard}"
        epochs = [int(str(row["epoch"])) for row in rows]
        assert epochs == sorted(epochs), f"I1: epochs of shard {shard} fall: {epochs}"
        assert max(epochs, default=epoch) <= epoch, f"I1: shard {shard} has epoch {epoch}, its batches {epochs}"
        previous: object = b""
        for row in rows:
            here, its_tries = f"{shard}, {row['n']}", of_batch.pop((shard, row["n"]), [])  # type: ignore[arg-type]
            assert row["previous"] == previous, f"I1: batch {here} does not follow the one before"
            assert row["seal"] == ledger.seal(row), f"I1: seal of batch {here}"
            previous = row["seal"]
            assert row["digest"] == tries_digest(its_tries), f"I2: digest of batch {here}"
            counts = Counter(outcome for _, _, outcome, _, _ in its_tries)
            assert all(row[outcome] == counts[outcome] for outcome in STATES_AFTER), f"I2: counts of batch {here}"
            assert row["discovered"] == found.pop((shard, row["n"]), 0), f"I3: discovered in batch {here}"
    assert not books, f"I1: batches of shards that are not there: {[*books]}"
    assert not found, f"I3: tasks of batches that are not there: {found}"
    assert not of_batch, f"I2: attempts of batches that are not there: {[*of_batch]}"


def _tasks(db: Database, job: int, shards: Shards, tries: list[Row]) -> None:
    of_task: dict[int, list[tuple[int, str, int, int, int]]] = defaultdict(list)
    for _, _, _, number, outcome, _, _, task, strike, solo, counts in sorted(tries, key=lambda row: row[3]):
        of_task[task].append((number, outcome, strike, solo, counts))
    keys = set()
    for task, shard, host, key, state, number, strikes, lost, solo, epoch, text in db.rows_text(_TASKS, (job,)):
        here, mine = f"task {task} ({text})", of_task.pop(task, [])
        authority = canonicalise(text, PROFILE).authority
        assert (key, host, shard) == (digest16(text), host_id(authority), shard_of(authority, len(shards))), f"I4: {here}"
        keys.add(key)
        running = state == "running"
        assert not running or epoch == shards[shard][0], f"I6: {here} runs under epoch {epoch}, its shard has {shards[shard][0]}"
        assert [n for n, *_ in mine] == [*range(1, number + (not running))], f"I7: {here}: {number} tries, {mine}, {state}"
        since = [row for row in mine if row[4]]
        recount = (sum(r[2] for r in since), sum(r[1] == "lost" for r in since), sum(r[1] == "lost" and r[3] for r in since))
        assert (strikes, lost, solo) == recount, f"I7: {here}: strikes, lost, solo are {(strikes, lost, solo)}, rows say {recount}"
        assert running or not mine or state in STATES_AFTER[mine[-1][1]], f"I7: {here}: {state} after {mine[-1]}"
    assert not of_task, f"I7: attempts of tasks that are not there: {[*of_task]}"
    ((rows, texts),) = db.rows_text("SELECT (SELECT COUNT(*) FROM task WHERE job = ?), (SELECT COUNT(*) FROM task_text)", (job,))
    assert len(keys) == rows <= texts, f"I4: {len(keys)} keys, {rows} tasks, {texts} texts"


def _records(db: Database) -> None:
    sums = ledger.total(json.loads(text) for (text,) in db.rows_text("SELECT deltas FROM ledger"))
    for (name,) in db.rows_text("SELECT name FROM dataset"):
        ((rows,),) = db.rows_text(f"SELECT COUNT(*) FROM {name}")
        new, _, _, removed, _ = sums.get(name, [0] * 5)
        assert new - removed == rows, f"I5: {name}: {new} new, {removed} removed, but {rows} rows"
        strays = db.rows_text(_STRAYS.format(name=name))
        assert not strays, f"I5: {name}: no try that went well wrote {strays}"
