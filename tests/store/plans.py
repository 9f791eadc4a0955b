"""A database with many tasks, made in seconds by the database itself, and how it means to reach them: its own EXPLAIN.

    python -m tests.store.plans [--tasks 2000000] [sqlite postgres mysql]      the plans of the hot statements, a line each

A plan is told in one form for all databases: each long table with the index by which it is reached (`task.open`), or as
`task: scan`. `HOT` says by which it may be.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from limpet.store import Store, open_store
from limpet.store.dialect import Database
from tests.servers.kinds import NAMES, Kinds
from tests.store.hands import SETTINGS, found_job

SHARDS = 64
HOSTS = 16  # of each shard
PER_BATCH = 50  # tasks that each batch of a shard discovered

#: Statement of a batch, a claim, a take-over, a look or a proof -> the only ways in which it may reach long tables.
HOT = {
    "due": {"task.open"}, "ready_host_after": {"task.open"}, "ready_of_host": {"task.open"}, "ready_above": {"task.open"},
    "ready_host_between": {"task.open"}, "ready_in_shard": {"task.open"}, "released_waiting": {"task.open", "task.id", "attempt.try"},
    "suspects_due": {"task.open"}, "next_due": {"task.open"}, "running_tasks": {"task.open"}, "unpark": {"task.open"},
    "claim": {"task.id"}, "promote": {"task.id"}, "finish": {"task.id"}, "revisit": {"task.id"}, "ended_among": {"task.id"},
    "put_revisits": {"task.id"}, "count_discovered": {"task.id"}, "highest_task": {"task.id"},
    "discover": {"task.key"}, "discover_text": {"task.id", "task.key"}, "task_by_key": {"task.key", "attempt.try"},
    "read_claims": {"task.open", "task_text.id"}, "read_seal": {"ledger.n"}, "read_batch_id": {"ledger.n"},
    "open_work": {"task.open", "task.key", "request.open"},
    "dead_candidates": {"task.dead", "task.id", "task_text.id", "attempt.try"},
    "revisit_candidates": {"task.id", "task.dead", "task_text.id", "attempt.try"},
    "unread_tasks": {"task.id", "task_text.id", "attempt.try"},
    "verify_ledger": {"ledger.n"}, "verify_attempts": {"attempt.n", "task.id"}, "verify_attempt_counts": {"attempt.n"},
    "verify_revisit_counts": {"revisit.n"}, "verify_discovered": {"ledger.n", "task.id"}, "verify_discoveries": {"ledger.n"},
    "verify_new_keys": {"ledger.n", "task.id", "task_text.id"}, "verify_keys": {"task.id", "task_text.id"}, "verify_chunk": {"task.id"},
    "verify_odd_tasks": {"task.id", "attempt.try", "revisit.task"}, "verify_count_texts": {"task_text.id"},
    "verify_odd_tried": {"attempt.n", "task.id", "attempt.try", "revisit.task"}, "verify_lone_texts": {"task_text.id", "task.id"},
    "verify_histories": {"task.id", "attempt.try", "revisit.task", "ledger.n"}, "verify_claims": {"ledger.n", "task.open"},
    "verify_stamps": {"attempt.n", "ledger.n", "revisit.n"},
    "reserved_charges": {"charge.open", "charge.try"}, "unknown_in_shard": {"charge.open", "charge.try"}, "money_left": {"charge.open"},
}  # fmt: skip

#: Index of a long table -> what it is called by each database.
NAMED = {
    "task.id": ("INTEGER PRIMARY KEY", "task_pkey", "PRIMARY"),
    "task.key": ("sqlite_autoindex_task_1", "task_job_shard_host_key_key", "job"),
    "task.open": ("task_open", "task_open", "task_open"), "task.dead": ("task_dead", "task_dead", "task_dead"),
    "task_text.id": ("INTEGER PRIMARY KEY", "task_text_pkey", "PRIMARY"), "ledger.n": ("PRIMARY KEY", "ledger_pkey", "PRIMARY"),
    "attempt.n": ("PRIMARY KEY", "attempt_pkey", "PRIMARY"), "attempt.try": ("sqlite_autoindex_attempt_2", "attempt_task_try_key", "task"),
    "revisit.n": ("PRIMARY KEY", "revisit_pkey", "PRIMARY"), "revisit.task": ("revisit_task", "revisit_task", "revisit_task"),
    "request.open": ("request_open", "request_open", "request_open"),
    "charge.try": ("PRIMARY KEY", "charge_pkey", "PRIMARY"), "charge.open": ("charge_open", "charge_open", "charge_open"),
}  # fmt: skip
LONG = {name.partition(".")[0] for name in NAMED}

#: What the hot statements call the long tables.
ALIASES = {"t": "task", "c": "task", "x": "task_text", "a": "attempt", "b": "attempt", "l": "ledger", "r": "revisit",
           "m": "charge", "p": "charge"}  # fmt: skip


@dataclass(frozen=True)
class Filled:
    """A database with so many tasks of one job: three fifths ended, two thousand running, the rest waiting."""

    store: Store
    tasks: int

    @property
    def db(self) -> Database:
        """Its connection."""
        return self.store.db

    def stage(self) -> None:
        """What a batch of many pages stages: links, a third of them new, tries, and ids to claim."""
        self.db.unstage()
        links = [(1, i % SHARDS, i % SHARDS * HOSTS + 3, b"%016d" % (i * 37 + 10**12 * (i % 3 == 0)), 0, 5, 12, f"http://h/{i}",
                  "", "", "", 0, 0, 0, b"") for i in range(5000)]  # fmt: skip
        first = 3 * self.tasks // 5 + 1
        tries = [
            (1, i % SHARDS, 12, first + i, 1, 1, "done", None, 0, 0, 0, 0, 0, 0, "done", "", 200, b"", 1, 1, "", "") for i in range(500)
        ]
        self.db.stage("stage_link", 15, links)
        self.db.stage("stage_try", 22, tries)
        self.db.stage("stage_id", 1, [(first + i,) for i in range(100)])

    def ways(self, name: str) -> list[str]:
        """How the database means to reach the rows of long tables, with what a statement is asked at work."""
        words = re.findall(r"(?<![:\w]):(\w+)|%\((\w+)\)s", _bare(self._said(name)))
        asked = {one or other: _VALUES.get(one or other, 1) for one, other in words}
        third = self.tasks // 3
        ids = {"after": third, "upto": third + 1000, "low": third, "high": third + 1000, "before": self.tasks, "cursor": third}
        batches = any(word in name for word in ("ledger", "attempt", "tried", "discover", "new_keys", "revisit_counts"))
        asked |= {word: value for word, value in (ids | ({"after": 10, "upto": 14} if batches else {})).items() if word in asked}
        if name == "ready_host_after":
            asked["after"] = -(2**62)
        read = {"sqlite": _sqlite, "postgres": _postgres, "mysql": _mysql}[self.db.name]
        return sorted({way for way in read(self.db, self._said(name), asked) if way})

    def _said(self, name: str) -> str:
        return str(self.db._sql[name])  # type: ignore[attr-defined]


_VALUES: Mapping[str, object] = {
    "name": "job:1", "shard": 5, "host": 5 * HOSTS, "n": 12, "solo": 0, "most": 100, "lane": "waiting", "owner": "w", "key": b"0" * 16,
    "suspect_after": 3,
}  # fmt: skip


def fill(store: Store, tasks: int) -> Filled:
    """Tasks, texts, attempts, books and revisits, by a few statements; a server counts them, as it does by itself after a while.

    Here it does so once: to count again in the middle of a question would change the plan, or leave it for a moment without any count.
    """
    db = store.db
    found_job(store)
    for table in sorted(LONG):
        if db.name == "mysql":
            db.run_text(f"ALTER TABLE {table} STATS_AUTO_RECALC = 0")
        elif db.name == "postgres":
            db.run_text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
    places = range(len(str(tasks - 1)))
    digits = " UNION ALL ".join(f"SELECT {digit}" for digit in range(1, 10))
    number = " + ".join(f"{10**place} * d{place}.x" for place in places)
    tens = ", ".join(f"d AS d{place}" for place in places)
    numbers = f"WITH d(x) AS (SELECT 0 UNION ALL {digits}), n(i) AS (SELECT {number} FROM {tens})"
    for table, columns, values, most in _contents(db.name, tasks):
        db.run_text(f"INSERT INTO {table} ({columns}) {numbers} SELECT {values} FROM n WHERE i < {most} ORDER BY i")
    for table in sorted(LONG):
        if db.name == "mysql":
            db.rows_text(f"ANALYZE TABLE {table}")
        elif db.name == "postgres":
            db.run_text(f"ANALYZE {table}")
    return Filled(store, tasks)


def _contents(database: str, tasks: int) -> Iterator[tuple[str, str, str, int]]:
    """(table, columns, values of row i, how many rows)."""
    key = {
        "sqlite": "CAST(printf('%016d', i) AS BLOB)",
        "postgres": "convert_to(lpad(CAST(i AS TEXT), 16, '0'), 'UTF8')",
        "mysql": "CAST(LPAD(i, 16, '0') AS BINARY(16))",
    }[database]
    over = "DIV" if database == "mysql" else "/"
    ended, running = 3 * tasks // 5, 3 * tasks // 5 + 32 * SHARDS
    shard, n = f"i % {SHARDS}", f"(i {over} {SHARDS * PER_BATCH}) + 1"
    outcome = "CASE i % 97 WHEN 0 THEN 'dead' WHEN 1 THEN 'failed' ELSE 'done' END"
    state = f"CASE WHEN i < {ended} THEN {outcome} WHEN i < {running} THEN 'running' ELSE 'pending' END"
    lane = f"CASE WHEN i < {ended} THEN CASE i % 97 WHEN 1 THEN 'waiting' END WHEN i < {running} THEN 'running' ELSE 'ready' END"
    due = f"CASE WHEN i < {ended} AND i % 97 = 1 THEN 9000000000000 + i ELSE 0 END"
    yield (
        "task", "id, job, shard, host, key, state, lane, due_ms, rank, tries, claim_epoch, claim_n, source_shard, source_n",
        f"i + 1, 1, {shard}, {shard} * {HOSTS} + (i {over} {SHARDS}) % {HOSTS}, {key}, {state}, {lane}, {due}, i % 7, "
        f"CASE WHEN i < {running} THEN 1 ELSE 0 END, 1, {n}, {shard}, {n}", tasks,
    )  # fmt: skip
    yield (
        "task_text", "id, text, url, handler, payload, priority, depth, hops, chain",
        f"i + 1, 'http://host.test/a/page/of/some/length', '', '', '', 0, i % 7, 0, {key}", tasks,
    )  # fmt: skip
    yield (
        "attempt", "job, shard, n, task, try, outcome, reason, status, strike, solo, offered, links, records, url, detail, at_ms",
        f"1, {shard}, {n} + 1, i + 1, 1, {outcome}, 'why', 200, 0, 0, {key}, 1, 1, '', '', 0", ended,
    )  # fmt: skip
    yield "revisit", "job, shard, n, task, after_try", f"1, {shard}, {n} + 2, 50 * i + 1, 1", ended // 50
    yield "request", "job, shard, what, argument, who, at_ms, applied_n", f"1, {shard}, 'retry', '{{}}', 'me', 0, {n}", tasks // 20
    yield (
        "charge", "job, shard, task, try, handler, host, day, state, reserved, amount, requests, reason, n, at_ms",
        f"1, {shard}, i + 1, 1, 'ask', 'api.test', '', "
        f"CASE i % 5000 WHEN 0 THEN 'unknown' WHEN 1 THEN 'reserved' ELSE 'charged' END, 1, 1, 1, '', {n} + 1, 0", ended,
    )  # fmt: skip
    low = f"(i {over} {SHARDS}) * {SHARDS * PER_BATCH}"
    yield (
        "ledger",
        "job, shard, n, kind, batch_id, owner, epoch, at_ms, done, skipped, failed, dead, released, throttled, lost, claimed, discovered, "
        "id_low, id_high, revisited, deltas, code, digest, previous, seal",
        f"1, {shard}, (i {over} {SHARDS}) + 1, 'work', {key}, 'w', 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, {PER_BATCH}, {low} + 1, "
        f"{low} + {SHARDS * PER_BATCH}, 0, '{{}}', {key}, {key}, {key}, {key}", tasks // PER_BATCH,
    )  # fmt: skip


# -- plans, as each database tells them ----------------------------------------------------------


def _bare(sql: str) -> str:
    return re.sub(r"'[^']*'|--.*", "", sql)


def _way(database: int, alias: str, index: str | None) -> str:
    """By which index a table is reached; "" for one that is not long."""
    table = ALIASES.get(alias, alias)
    if table not in LONG:
        return ""
    its = (way for way, names in NAMED.items() if way.startswith(f"{table}.") and names[database] == index)
    return next(its, f"{table}: {index or 'scan'}")


def _sqlite(db: Database, sql: str, asked: Mapping[str, object]) -> Iterator[str]:
    found = r"(SCAN|SEARCH) (\w+)(?: EXISTS)?(?: USING (?:COVERING )?(?:INDEX )?(INTEGER PRIMARY KEY|PRIMARY KEY|\w+))?"
    for row in db.connection.execute(f"EXPLAIN QUERY PLAN {sql}", asked):  # type: ignore[attr-defined]
        if step := re.match(found, row[3]):
            yield _way(0, step[2], None if step[1] == "SCAN" else step[3] or "INTEGER PRIMARY KEY")


def _postgres(db: Database, sql: str, asked: Mapping[str, object]) -> Iterator[str]:
    ((plan,),) = db.connection.execute(f"EXPLAIN (FORMAT JSON) {sql}", asked).fetchall()  # type: ignore[attr-defined]
    nodes: list[tuple[dict[str, Any], str]] = [(plan[0]["Plan"], "")]
    while nodes:
        node, table = nodes.pop()
        table = node.get("Relation Name", table)
        nodes += [(inner, table) for inner in node.get("Plans", ())]
        if "Scan" in node["Node Type"] and node["Node Type"] not in ("Bitmap Heap Scan", "Subquery Scan"):
            yield _way(1, table, node.get("Index Name"))


def _mysql(db: Database, sql: str, asked: Mapping[str, object]) -> Iterator[str]:
    for _, _, alias, kind, _, index, _, _, _, more in db._execute(f"EXPLAIN {sql}", asked)[1]:  # type: ignore[attr-defined]
        if more and "index map: 0x1)" in more:  # a range of the first index, of other bounds for each row
            kind, index = "range", "PRIMARY"
        if alias:
            yield _way(2, alias, None if kind in ("ALL", "index") else index)


# -- the long form -------------------------------------------------------------------------------


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the plans of the hot statements, and what is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tasks", type=int, default=2_000_000)
    parser.add_argument("kinds", nargs="*", default=[*NAMES])
    asked = parser.parse_args(None if arguments is None else [*arguments])
    kinds = Kinds()
    for kind in asked.kinds:
        start = time.monotonic()
        store = open_store(kinds.of(kind).ready(), settings=replace(SETTINGS, shards=SHARDS))
        filled = fill(store, asked.tasks)
        filled.stage()
        print(f"{kind}: {asked.tasks:,} tasks, made in {time.monotonic() - start:.0f} s")
        for name, allowed in HOT.items():
            ways = filled.ways(name)
            print(f"  {'    ' if set(ways) <= allowed else 'BAD '} {name:24} {', '.join(ways)}")
        store.db.rollback()
        store.close()
    kinds.close()


if __name__ == "__main__":
    main()
