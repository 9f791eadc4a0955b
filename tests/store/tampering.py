"""Ways in which somebody, or a bad disk, could change a database behind Limpet's back, and what `verify` must say.

A `Tampering` picks a place in a crawl that `building.a_crawl` made, changes it there, and names the faults that must be found:
exactly these. What it picked stands in its SQL as `{shard}`, `{n}`, `{task}` and so on. Where the past itself is altered, the
ledger can be sealed anew over it, as one would who knows how: `resealed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from limpet.store import ledger
from limpet.store.dialect import Database
from limpet.store.proofs import FAULTS, Remedy
from limpet.store.tables import pack, unpack
from tests.store.hands import drop_index, emitted, in_words_of, link

Picked = dict[str, object]
Change = Callable[[Database, Picked], None]

HERE = "WHERE job = {job} AND shard = {shard} AND n = {n}"

#: What is picked: names of the columns, and a query; of its rows the first in the order of the first two columns.
BATCH = (
    "shard, n: SELECT shard, n FROM ledger AS l "
    "WHERE job = {job} AND n > 2 AND done > 1 AND kind = 'work' AND deltas LIKE '%product%' "
    "AND EXISTS (SELECT 1 FROM ledger AS m WHERE m.job = l.job AND m.shard = l.shard AND m.n = l.n + 1 AND m.kind = 'work')"
)
FOUND_MANY = BATCH.replace("done > 1", "discovered > 1")
LAST = "shard, n: SELECT shard, MAX(n) FROM ledger WHERE job = {job} GROUP BY shard"
ENDED = (
    "task, shard, n, try: SELECT a.task, a.shard, a.n, a.try "
    "FROM attempt AS a JOIN task AS t ON t.id = a.task AND t.tries = a.try "
    "WHERE a.job = {job} AND t.state = 'done' AND t.tries = 1 AND a.records > 0"
)
TRIED = "task, shard, n, try: SELECT a.task, a.shard, a.n, a.try FROM attempt AS a WHERE a.job = {job} AND a.outcome = "
FRESH = (
    "task, shard, n: SELECT id, source_shard, source_n FROM task "
    "WHERE job = {job} AND tries = 0 AND state = 'pending' AND shard = source_shard"
)
RUNS = "task, shard, n: SELECT id, shard, claim_n FROM task WHERE job = {job} AND state = 'running'"
PUT_BACK = (
    "task, shard, n: SELECT r.task, r.shard, r.n FROM revisit AS r JOIN task AS t ON t.id = r.task "
    "WHERE r.job = {job} AND t.tries > r.after_try"
)
RECORD = (
    "row, task, shard, n: SELECT d._id, d._task, d._shard, d._n FROM shop_product AS d JOIN task AS t ON t.id = d._task "
    "WHERE d._job = {job} AND t.tries = 1 AND t.state = 'done' "
    "AND NOT EXISTS (SELECT 1 FROM offer AS o WHERE o.dataset = 'shop_product' AND o.scope = d._scope AND o.key = d._key)"
)
OPPOSED = RECORD.replace("NOT EXISTS", "EXISTS")
OFFER = (
    "task, shard, n: SELECT o.task, o.shard, o.n FROM offer AS o JOIN task AS t ON t.id = o.task "
    "WHERE o.job = {job} AND o.dataset = 'shop_product' AND t.state = 'done' AND t.tries = o.try "
    "AND NOT EXISTS (SELECT 1 FROM offer AS p WHERE p.dataset = o.dataset AND p.task = o.task AND p.key <> o.key)"
)
OFFERED = "WHERE dataset = 'shop_product' AND task = {task} AND shard = {shard} AND n = {n}"


@dataclass(frozen=True)
class Tampering:
    """One way, and what must be found."""

    name: str
    pick: str
    change: str | Change
    fault: str  # found at the picked shard, and batch where `batch` says so
    also: tuple[str, ...] = ()  # what else is broken by it
    job: int = 1
    batch: int | None = 0  # the finding names the picked batch, this many further on; None: it names no batch, or another one
    mends: bool | None = None  # whether a repair makes it clean again; None: where all of its faults have a remedy

    @property
    def invariant(self) -> str:
        """What it breaks first of all."""
        return FAULTS[self.fault].invariant

    @property
    def faults(self) -> set[str]:
        """Everything that must be found, and nothing else."""
        return {self.fault, *self.also}

    @property
    def needs_a_file(self) -> bool:
        """Whether a server holds rows to what this breaks: CHECKs, and the types of columns."""
        return "constraint" in self.faults or "type" in self.name

    @property
    def is_mended(self) -> bool:
        """Whether a repair must make the job clean again."""
        return all(FAULTS[fault].remedy is not Remedy.NONE for fault in self.faults) if self.mends is None else self.mends

    def apply(self, db: Database) -> Picked:
        """Change the database; what was picked."""
        names, _, query = self.pick.partition(": ")
        rows = db.rows_text(f"{query.format(job=self.job)} ORDER BY 1, 2 LIMIT 1")
        assert rows, f"{self.name}: the crawl has nothing of this kind"
        picked: Picked = {"job": self.job, **dict(zip(names.split(", "), rows[0], strict=True))}
        if db.name == "sqlite":
            db.run_text("PRAGMA ignore_check_constraints = ON")
        db.begin()
        if callable(self.change):
            self.change(db, picked)
        else:
            for statement in self.change.split(";; "):
                changed = db.run_text(in_words_of(db, statement.format(**picked)))
                assert changed or statement.startswith(("DROP", "ALTER", "CREATE")), f"{self.name}: nothing changed"
        db.commit()
        if db.name == "sqlite":
            db.run_text("PRAGMA ignore_check_constraints = OFF")
        return picked


# -- sealing over -------------------------------------------------------------------------------


def reseal(db: Database, picked: Picked, *, only: bool = False) -> None:
    """Seal the picked batch again, and all batches after it, as one would who knows how; or it alone."""
    where = "job = ? AND shard = ? AND n = ?"
    job, shard, first = picked["job"], picked["shard"], int(str(picked["n"]))
    before = db.rows_text(f"SELECT seal FROM ledger WHERE {where}", (job, shard, first - 1))
    previous = before[0][0] if before else b""
    query = f"SELECT {', '.join(ledger.COLUMNS)} FROM ledger WHERE job = ? AND shard = ? AND n >= ? ORDER BY n"
    for row in db.rows_text(query, (job, shard, first)):
        books = dict(zip(ledger.COLUMNS, row, strict=True)) | {"previous": previous}
        previous = ledger.seal(books)
        db.run_text(f"UPDATE ledger SET previous = ?, seal = ? WHERE {where}", (books["previous"], previous, job, shard, books["n"]))
        if only:
            return


def resealed(sql: str, *, only: bool = False) -> Change:
    """A change after which the ledger is sealed over again."""

    def change(db: Database, picked: Picked) -> None:
        assert db.run_text(in_words_of(db, sql.format(**picked)))
        reseal(db, picked, only=only)

    return change


def resealed_deltas(change_counts: Callable[[list[int]], list[int]]) -> Change:
    """Other counts of a dataset, sealed over again."""

    def change(db: Database, picked: Picked) -> None:
        where = "job = ? AND shard = ? AND n = ?"
        place = (picked["job"], picked["shard"], picked["n"])
        deltas = json.loads(db.rows_text(f"SELECT deltas FROM ledger WHERE {where}", place)[0][0])
        deltas["shop_product"] = change_counts(deltas.get("shop_product", [0] * 5))
        db.run_text(f"UPDATE ledger SET deltas = ? WHERE {where}", (json.dumps(deltas, separators=(",", ":")), *place))
        reseal(db, picked)

    return change


def swap_with_offer(db: Database, picked: Picked) -> None:
    """The record and an offer of its key change places: the higher task key has won."""
    here = OFFERED.format(**picked)
    offer = db.rows_text(f"SELECT key, task_key, task, try, n, shard, content, row_json FROM offer {here}")[0]
    query = "SELECT _id, _task_key, _task, _try, _n, _shard, _content, sku, price, seen FROM shop_product WHERE _key = ?"
    row = db.rows_text(query, (offer[0],))[0]
    db.run_text(
        "UPDATE shop_product SET _task_key = ?, _task = ?, _try = ?, _n = ?, _shard = ?, _content = ?, price = ?, seen = ? WHERE _id = ?",
        (*offer[1:7], *unpack(offer[7], ["price", "seen"]), row[0]),
    )
    db.run_text(
        f"UPDATE offer SET task_key = ?, task = ?, try = ?, n = ?, shard = ?, content = ?, row_json = ? {here}",
        (*row[1:7], pack(["sku", "price", "seen"], row[7:])),
    )


def forge_task(db: Database, picked: Picked) -> None:
    """A task that nobody discovered, with a text and a key that fit, said to come from a batch that did discover something."""
    page = link("http://forged.test/")
    ((task,),) = db.rows_text("SELECT MAX(id) + 1 FROM task")
    db.run_text(
        "INSERT INTO task (id, job, shard, host, key, state, lane, source_shard, source_n) "
        "VALUES (?, ?, ?, ?, ?, 'pending', 'ready', ?, ?)",
        (task, picked["job"], page.shard, page.host, page.key, picked["shard"], picked["n"]),
    )
    db.run_text("INSERT INTO task_text VALUES (?, ?, '', '', '', 0, 0, 0, ?)", (task, page.text, b""))


def lose_index(db: Database, picked: Picked) -> None:
    """The index of open tasks is gone."""
    drop_index(db, "task_open", "task")


def change_index(db: Database, picked: Picked) -> None:
    """The index of dead letters is one of something else."""
    drop_index(db, "task_dead", "task")
    db.run_text("CREATE INDEX task_dead ON task (shard)")


def lose_dataset_index(db: Database, picked: Picked) -> None:
    """The index by which a task's records are found is gone."""
    drop_index(db, "shop_product_task", "shop_product")


def add_trigger(db: Database, picked: Picked) -> None:
    """Somebody has something done after each change of a task."""
    if db.name == "postgres":
        db.run_text("CREATE FUNCTION sly() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        db.run_text("CREATE TRIGGER sly AFTER UPDATE ON task FOR EACH ROW EXECUTE FUNCTION sly()")
    else:
        each, body = ("FOR EACH ROW", "SET @sly = 1") if db.name == "mysql" else ("", "BEGIN SELECT 1; END")
        db.run_text(f"CREATE TRIGGER sly AFTER UPDATE ON task {each} {body}")


def forge_record(db: Database, picked: Picked) -> None:
    """A record more, with hashes that fit and the stamp of a try that offered others."""
    columns = "_scope, _slot, _task_key, _task, _try, _job, _shard, _n, _closed"
    offer = emitted("forged", 1)
    db.run_text(
        f"INSERT INTO shop_product ({columns}, _key, _key_text, _content, sku, price, seen) "
        f"SELECT {columns}, ?, ?, ?, ?, ?, ? FROM shop_product WHERE _id = ?",
        (offer.key, offer.key_text, offer.content, *offer.values, picked["row"]),
    )
