"""The table of tamperings: one line a way, with the fault that must be found, and what else is broken by it."""

from __future__ import annotations

from tests.store.tampering import (
    BATCH,
    ENDED,
    FOUND_MANY,
    FRESH,
    HERE,
    LAST,
    OFFER,
    OFFERED,
    OPPOSED,
    PUT_BACK,
    RECORD,
    RUNS,
    TRIED,
    Tampering,
    add_trigger,
    change_index,
    forge_record,
    forge_task,
    lose_dataset_index,
    lose_index,
    resealed,
    resealed_deltas,
    swap_with_offer,
)

T = Tampering


def _ledger(change: str) -> str:
    return f"UPDATE ledger SET {change} {HERE}"


def _shard(change: str) -> str:
    return f"UPDATE shard SET {change} WHERE job = {{job}} AND shard = {{shard}}"


def _attempt(change: str) -> str:
    return f"UPDATE attempt SET {change} {HERE} AND task = {{task}}"


def _task(change: str) -> str:
    return f"UPDATE task SET {change} WHERE id = {{task}}"


def _record(change: str) -> str:
    return f"UPDATE shop_product SET {change} WHERE _id = {{row}}"


def _offer(change: str) -> str:
    return f"UPDATE offer SET {change} {OFFERED}"


LEDGER: list[Tampering] = [
    T("a batch is gone from the ledger", BATCH, f"DELETE FROM ledger {HERE}", "gap", also=("claims", "source", "total")),
    T("a count of a batch is raised", BATCH, _ledger("done = done + 1"), "seal", also=("claims", "tries")),
    T("the clock of a batch is changed", BATCH, _ledger("at_ms = at_ms - 1"), "seal"),
    T("the owner of a batch is changed", BATCH, _ledger("owner = 'nobody'"), "seal", also=("epoch",)),
    T("the code of a batch is changed", BATCH, _ledger("code = x'00'"), "seal"),
    T("the seal of a batch is changed", BATCH, _ledger("seal = x'00'"), "seal", also=("chain",)),
    T("a batch is changed and sealed alone", BATCH, resealed(_ledger("at_ms = at_ms - 1"), only=True), "chain", batch=1),
    T("a batch follows on another one", BATCH, _ledger("previous = x'00'"), "chain", also=("seal",)),
    T("the last batch is gone", LAST, f"DELETE FROM ledger {HERE}", "tail", also=("claims",)),
    T("the watermark is raised", LAST, _shard("watermark = watermark + 1"), "tail", batch=1),
    T("an epoch falls", BATCH, resealed(_ledger("epoch = epoch - 1")), "epoch"),
    T("an owner changes without a take-over", BATCH, resealed(_ledger("owner = 'nobody'")), "epoch"),
    T("a batch passes for a take-over", BATCH, resealed(_ledger("kind = 'takeover'")), "epoch"),
    T("a shard goes on after it was given up", BATCH, resealed(_ledger("kind = 'release'")), "epoch", batch=1),
    T("a batch loses its id", BATCH, resealed(_ledger("batch_id = x''")), "batch_id"),
    T("the row of a shard is gone", LAST, "DELETE FROM shard WHERE job = {job} AND shard = {shard}", "shard", batch=None),
    T("the watermark is lowered", LAST, _shard("watermark = watermark - 1"), "shard", also=("above",), mends=True),
    T("the epoch of a shard is lowered", LAST, _shard("epoch = epoch - 1"), "shard"),
    T("the owner of a shard is changed", LAST, _shard("owner = 'nobody'"), "shard"),
    T("a shard is proved further than it is", LAST, _shard("verified = watermark + 1"), "shard", batch=None),
]

_DOUBLE = (
    "INSERT INTO attempt SELECT job, shard, 1, task, try + 1, outcome, reason, status, strike, solo, offered, links, records, "
    "url, detail, at_ms FROM attempt WHERE task = {task}"
)
_OTHER = "(SELECT MAX(id) FROM task WHERE job = {job} AND tries = 0 AND shard = {shard})"

TRIES: list[Tampering] = [
    T(
        "an attempt row is gone",
        ENDED,
        f"DELETE FROM attempt {HERE} AND task = {{task}}",
        "tries",
        also=("digest", "running", "stamp"),
    ),
    T(
        "an attempt row has another outcome",
        ENDED,
        _attempt("outcome = 'skipped', reason = 'gone'"),
        "tries",
        also=("digest", "stamp", "task"),
    ),
    T("an attempt row has another reason", f"{TRIED}'failed'", _attempt("reason = 'other'"), "digest"),
    T("an attempt row has another offer", ENDED, _attempt("offered = x'00'"), "digest"),
    T("an attempt row has another number", f"{TRIED}'skipped'", _attempt("try = try + 7"), "digest", also=("history",)),
    T("an attempt row lies in another batch", f"{TRIED}'failed'", _attempt("n = 1"), "tries", also=("digest",)),
    T("an attempt row is of another task", ENDED, _attempt(f"task = {_OTHER}"), "digest", also=("running", "stamp", "task")),
    T("an attempt row is doubled", ENDED, _DOUBLE, "tries", batch=None, also=("digest", "history")),
    T("an attempt row is of no task", f"{TRIED}'failed'", _attempt("task = 999999"), "try", also=("digest", "history")),
    T("an attempt row is above the watermark", f"{TRIED}'skipped'", _attempt("n = n + 1000"), "tries", also=("above", "digest")),
    T(
        "an attempt row is of a shard that is none",
        f"{TRIED}'skipped'",
        _attempt("shard = 99"),
        "tries",
        also=("digest", "history", "orphan"),
    ),
    T(
        "an attempt row has an outcome that is none",
        f"{TRIED}'skipped'",
        _attempt("outcome = 'lucky'"),
        "tries",
        also=("constraint", "digest", "history"),
    ),
    T(
        "a task was skipped without a reason",
        f"{TRIED}'skipped'",
        _attempt("reason = ''"),
        "reason",
        also=("constraint", "digest"),
    ),
    T("a revisit row is gone", PUT_BACK, f"DELETE FROM revisit {HERE} AND task = {{task}}", "revisits", also=("history",)),
    T(
        "a revisit row is forged",
        ENDED,
        "INSERT INTO revisit VALUES ({job}, {shard}, {n}, {task}, 1)",
        "revisits",
        also=("task",),
    ),
    T(
        "a revisit row is above the watermark",
        PUT_BACK,
        f"UPDATE revisit SET n = n + 1000 {HERE} AND task = {{task}}",
        "revisits",
        also=("above",),
    ),
]

_DROP = "DELETE FROM task WHERE id = {task}"
_DROP_TEXT = "DELETE FROM task_text WHERE id = {task}"
_ANOTHER_BATCH = "(SELECT MIN(n) FROM ledger WHERE job = {job} AND shard = {shard} AND discovered > 0 AND n <> {n})"
_NO_BATCH = "(SELECT MIN(n) FROM ledger WHERE job = {job} AND shard = {shard} AND discovered = 0)"

SOURCES: list[Tampering] = [
    T("a task that never ran is gone", FRESH, f"{_DROP};; {_DROP_TEXT}", "missing"),
    T("the row of a task that never ran is gone", FRESH, _DROP, "missing", also=("lone_text",)),
    T(
        "the row of a task that ran is gone",
        ENDED,
        _DROP,
        "missing",
        batch=None,
        also=("digest", "lone_text", "stamp", "try"),
        mends=True,
    ),
    T("a task that ran is gone", ENDED, f"{_DROP};; {_DROP_TEXT}", "missing", batch=None, also=("digest", "stamp", "try")),
    T("a task is forged", FOUND_MANY, forge_task, "forged"),
    T("a task is moved to another source", FRESH, _task(f"source_n = {_ANOTHER_BATCH}"), "missing", also=("forged",)),
    T("a task is moved to a source that found nothing", FRESH, _task(f"source_n = {_NO_BATCH}"), "missing", also=("source",)),
    T("a task comes from above the watermark", FRESH, _task("source_n = source_n + 1000"), "missing", also=("source",)),
    T("a batch notes other ids", FOUND_MANY, resealed(_ledger("id_low = id_low + 1")), "range"),
    T("a batch notes fewer discoveries", FOUND_MANY, resealed(_ledger("discovered = discovered - 1")), "forged", mends=False),
    T("a task goes before all others", FRESH, _task("rank = -99000000"), "rank"),
    T(
        "the pace of a host is above the watermark",
        "host, shard, n: SELECT host, shard, n FROM host WHERE job = {job}",
        "UPDATE host SET n = n + 1000 WHERE job = {job} AND host = {host}",
        "note",
        batch=1000,
    ),
    T(
        "a robots.txt is above the watermark",
        "origin, shard, n: SELECT origin, shard, n FROM robots WHERE job = {job}",
        "UPDATE robots SET n = n + 1000 WHERE job = {job} AND origin = '{origin}'",
        "note",
        batch=1000,
    ),
    T(
        "a request ended above the watermark",
        "id, shard, n: SELECT id, shard, applied_n FROM request WHERE job = {job} AND applied_n > 0",
        "UPDATE request SET applied_n = applied_n + 1000 WHERE id = {id}",
        "note",
        batch=1000,
    ),
    T("a move is forged", ENDED, "INSERT INTO moved SELECT job, key, key, shard, id, {n} FROM task WHERE id = {task}", "note"),
]

KEYS: list[Tampering] = [
    T("the text of a task that never ran is changed", FRESH, "UPDATE task_text SET text = text || 'x' WHERE id = {task}", "key"),
    T(
        "the text of a task that ran is changed",
        ENDED,
        "UPDATE task_text SET url = text, text = text || 'x' WHERE id = {task}",
        "key",
        batch=None,
    ),
    T(
        "the host in a text is changed",
        FRESH,
        "UPDATE task_text SET text = replace(text, 'http://', 'http://x.') WHERE id = {task}",
        "place",
        also=("key",),
    ),
    T("the key of a task that never ran is changed", FRESH, _task("key = x'000102030405060708090a0b0c0d0e0f'"), "key"),
    T(
        "the key of a task that ran is changed",
        ENDED,
        _task("key = x'000102030405060708090a0b0c0d0e0f'"),
        "key",
        batch=None,
        also=("digest", "stamp"),
        mends=True,
    ),
    T("the host of a task is changed", FRESH, _task("host = host + 1"), "place"),
    T("the shard of a task is changed", FRESH, _task("shard = (shard + 1) % 4"), "place", batch=None),
    T("the shard of a task is none", FRESH, _task("shard = 99"), "place", batch=None),
    T("the text of a task that never ran is gone", FRESH, _DROP_TEXT, "text"),
    T("the text of a task that ran is gone", ENDED, _DROP_TEXT, "text", batch=None, mends=False),
]

RECORDS: list[Tampering] = [
    T("a record is gone", RECORD, "DELETE FROM shop_product WHERE _id = {row}", "lacks", also=("total",)),
    T(
        "a record for which others wait is gone",
        OPPOSED,
        "DELETE FROM shop_product WHERE _id = {row}",
        "lacks",
        also=("total", "unopposed"),
    ),
    T("a field of a record is changed", RECORD, _record("price = price + 1"), "content"),
    T("a field of a record is of another type", RECORD, _record("price = 'dear'"), "content"),
    T("the content hash of a record is changed", RECORD, _record("_content = x'00'"), "content"),
    T("the key of a record is changed", RECORD, _record("_key = x'00'"), "record_key"),
    T("the key text of a record is changed", RECORD, _record("_key_text = '[\"other\"]'"), "record_key"),
    T("the key field of a record is changed", RECORD, _record("sku = 'other'"), "record_key"),
    T("a record is of a try that never was", RECORD, _record("_try = _try + 5"), "stamp", also=("lacks",)),
    T(
        "a record is of another task",
        RECORD,
        _record("_task = (SELECT task FROM attempt WHERE outcome = 'failed' ORDER BY job, shard, n, task LIMIT 1)"),
        "stamp",
        batch=None,
        also=("lacks", "stale"),
    ),
    T("a record is of another batch", RECORD, _record("_n = _n + 1"), "stamp", batch=1),
    T("a record is above the watermark", RECORD, _record("_n = _n + 1000"), "stamp", batch=1000),
    T("a record is of another task key", RECORD, _record("_task_key = x'00'"), "stamp"),
    T("a record lies in another slot", RECORD, _record("_slot = '7'"), "closed"),
    T("a record is hidden", RECORD, _record("_closed = '0'"), "closed", also=("lacks",)),
    T("a record is forged", RECORD, forge_record, "extra", also=("total",)),
    T("an offer is gone", OFFER, f"DELETE FROM offer {OFFERED}", "lacks"),
    T("an offer is changed", OFFER, _offer('row_json = \'{{"price":99,"seen":0,"sku":"s1"}}\''), "offer"),
    T("an offer cannot be read", OFFER, _offer("row_json = 'nothing'"), "offer"),
    T("an offer is of another try", OFFER, _offer("try = try + 5"), "offer", also=("lacks",)),
    T("the higher task key has won", OFFER, swap_with_offer, "unopposed", batch=None),
    T("more records are counted", BATCH, resealed_deltas(lambda c: [c[0] + 1, *c[1:]]), "total", batch=None),
    T("fewer records are counted", BATCH, resealed_deltas(lambda c: [*c[:3], c[3] + 1, c[4]]), "total", batch=None),
    T(
        "offers are of a dataset that is not known",
        OFFER,
        "UPDATE offer SET dataset = 'shop_other' WHERE dataset = 'shop_product'",
        "dataset",
        batch=None,
    ),
]

STATES: list[Tampering] = [
    T("a task runs under an older epoch", RUNS, _task("claim_epoch = claim_epoch - 1"), "running", job=2),
    T("a running task is set to pending", RUNS, _task("state = 'pending', lane = 'ready'"), "running", job=2, also=("claims",)),
    T("a running task is set to done", RUNS, _task("state = 'done', lane = NULL"), "running", job=2, also=("claims",)),
    T("a running task waits as a ready one", RUNS, _task("lane = 'ready'"), "running", job=2, also=("claims", "constraint")),
    T("a running task forgets who claimed it", RUNS, _task("claim_n = 0"), "running", job=2, batch=None, also=("task",)),
    T("a running task was claimed above the watermark", RUNS, _task("claim_n = claim_n + 1000"), "running", job=2, batch=1000),
    T(
        "a task that nobody claimed runs",
        FRESH,
        _task("state = 'running', lane = 'running'"),
        "running",
        batch=None,
        also=("claims", "task"),
    ),
    T("an ended task runs", ENDED, _task("state = 'running', lane = 'running'"), "running", batch=None, also=("claims", "task")),
    T("a task that never ran is done", FRESH, _task("state = 'done', lane = NULL"), "task", batch=None),
    T("a done task is pending again", ENDED, _task("state = 'pending', lane = 'ready'"), "task"),
    T("a done task is dead", ENDED, _task("state = 'dead'"), "task"),
    T("a done task still waits", ENDED, _task("lane = 'ready'"), "task", also=("constraint",)),
    T("a pending task waits nowhere", FRESH, _task("lane = NULL"), "task", batch=None, also=("constraint",)),
    T("a pending task waits for a time without a try", FRESH, _task("lane = 'waiting', due_ms = 1"), "task", batch=None),
    T("a pending task is a suspect without a loss", FRESH, _task("lane = 'suspect'"), "task", batch=None),
    T("a task has a try more", ENDED, _task("tries = tries + 1"), "task"),
    T("a task has a strike more", ENDED, _task("strikes = strikes + 1"), "task"),
    T(
        "a task forgets its losses",
        "task, shard, n: SELECT t.id, t.shard, a.n FROM task AS t JOIN attempt AS a ON a.task = t.id AND a.try = t.tries "
        "WHERE t.job = {job} AND t.lost > 0 AND t.state <> 'running'",
        _task("lost = 0"),
        "task",
    ),
    T("a task has a solo loss more", ENDED, _task("solo = solo + 1"), "task"),
    T("a task was throttled once more", ENDED, _task("throttled = throttled + 1"), "task"),
    T("a task was put back once more", ENDED, _task("revisits = revisits + 1"), "task"),
    T("a task is marked as claimed alone", ENDED, _task("claim_solo = 1"), "task"),
    T("a batch claimed more", BATCH, resealed(_ledger("claimed = claimed + 1")), "claims", batch=None, mends=False),
]

SHAPE: list[Tampering] = [
    T("a table is gone", LAST, "DROP TABLE host", "table", batch=None),
    T("a column is gone", LAST, "ALTER TABLE host DROP COLUMN errors", "table", batch=None),
    T("a table has a column more", LAST, "ALTER TABLE task ADD COLUMN note TEXT", "table", batch=None),
    T("an index is gone", LAST, lose_index, "index", batch=None),
    T("an index covers other columns", LAST, change_index, "index", batch=None),
    T("the table of a dataset is gone", LAST, "DROP VIEW shop_product_view;; DROP TABLE shop_product", "table", batch=None),
    T(
        "the table of a dataset lost a column",
        LAST,
        "DROP VIEW shop_product_view;; ALTER TABLE shop_product DROP COLUMN price",
        "table",
        batch=None,
        also=("view",),
    ),
    T("the index of a dataset is gone", LAST, lose_dataset_index, "index", batch=None),
    T("the view of a dataset is gone", LAST, "DROP VIEW shop_product_view", "view", batch=None),
    T(
        "the definition of a dataset is none",
        LAST,
        "UPDATE dataset SET definition = 'nothing' WHERE name = 'shop_product'",
        "dataset",
        batch=None,
    ),
    T("a trigger changes rows", LAST, add_trigger, "trigger", batch=None),
    T(
        "a job is called sealed that is not",
        LAST,
        "INSERT INTO sealed (job, at_ms, tasks, done, skipped, dead, charged, vector) "
        "SELECT job, 1, 1, 1, 0, 0, 0, key_digest FROM job WHERE job = {job}",
        "sealed",
        batch=None,
        mends=False,
    ),
    T("a job's row is gone", LAST, "UPDATE job SET job = 77 WHERE job = 2", "orphan", batch=None, also=("total",)),
]

TAMPERINGS = [*LEDGER, *TRIES, *SOURCES, *KEYS, *RECORDS, *STATES, *SHAPE]
