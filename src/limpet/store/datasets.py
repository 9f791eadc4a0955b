"""Datasets: real tables, named after spider and type, with a real unique key.

Inside a job the result does not depend on timing: of several tasks that emit one key the lower task
key wins, and the others' offers are kept, to take its place should the winner, run again, no longer
emit it. Over slots the policy decides: `replace` (the greater slot wins), `keep` (the smaller slot
stays), `history` (a version per slot, where the content changed). The shard is never part of a key.

So step 3 is: insert where absent, read the keys in order, decide (`decide`, pure), write.
`tables.py` makes the tables. Invariants: I4, I5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from limpet.batch import Offer, Part, Result
from limpet.errors import StoreBusy
from limpet.store.dialect import Database, Row, quote
from limpet.store.jobs import Job
from limpet.store.tables import Table, check_shapes, pack, unpack
from limpet.task import Outcome, ShardId


class Verdict(Enum):
    """What becomes of an offer whose key has a row already."""

    NEW = "new"  # the row is this very offer
    RENEW = "renew"  # the same task, run again: its row is brought up to date
    WIN = "win"  # ours is the lower task key: the row's content becomes an offer, ours the row
    LOSE = "lose"  # the row stays, ours becomes an offer
    REPLACE = "replace"  # another slot's row gives way
    YIELD = "yield"  # another slot's row stays


@dataclass(frozen=True, slots=True)
class Standing:
    """The row that a key has."""

    task_key: bytes
    task: int
    tries: int
    job: int
    slot: str
    content: bytes
    closed: str = ""  # history: nobody emits it any more


@dataclass(frozen=True, slots=True)
class Bid:
    """One offer of one try, in one batch."""

    part: Part
    result: Result
    offer: Offer

    @property
    def task_key(self) -> bytes:
        """The key of the task that offers: the lower one wins."""
        return self.result.claim.key


class Counts:
    """What a batch did to each dataset: shard -> dataset -> [new, replaced, kept, removed, conflicts]."""

    def __init__(self) -> None:
        self.of: dict[ShardId, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0] * 5))

    def add(
        self, part: Part, dataset: str, *, new: int = 0, replaced: int = 0, kept: int = 0, removed: int = 0, conflicts: int = 0
    ) -> None:
        """Count a change on the shard whose batch made it."""
        row = self.of[part.shard][dataset]
        for place, more in enumerate((new, replaced, kept, removed, conflicts)):
            row[place] += more


def decide(standing: Standing, *, task: int, tries: int, task_key: bytes, job: int, slot: str, policy: str) -> Verdict:
    """Which of two claims to a key stands; a pure function, the same in any order of commits."""
    if standing.job == job:
        if standing.task == task:
            return Verdict.NEW if standing.tries == tries else Verdict.RENEW
        return Verdict.WIN if task_key < standing.task_key else Verdict.LOSE
    ours_first = slot > standing.slot if policy == "replace" else slot < standing.slot
    return Verdict.REPLACE if ours_first else Verdict.YIELD


def put_records(db: Database, job: Job, tables: Mapping[str, Table], alive: Sequence[Part]) -> Mapping[ShardId, Mapping[str, list[int]]]:
    """Write the records of every surviving part, by (dataset, key): what changed, by shard and dataset."""
    counts = Counts()
    bids: dict[str, list[Bid]] = defaultdict(list)
    revisited: list[tuple[Part, Result]] = []
    for part in alive:
        for result in part.results:
            if result.outcome is not Outcome.DONE and not result.is_final:
                continue  # other outcomes drop what the handler emitted
            if result.claim.revisits:
                revisited.append((part, result))
            last = {(offer.dataset, offer.key): offer for offer in result.offers}  # of a key emitted twice the last wins
            for offer in last.values():
                bids[offer.dataset].append(Bid(part, result, offer))
    for name in sorted(bids):
        Writer(db, job, tables[name], counts).put(bids[name])
    for part, result in revisited:
        for name in sorted(tables):
            Writer(db, job, tables[name], counts).remove_former(part, result)
    if written := tables.keys() if revisited else bids.keys():
        check_shapes(db, tables, written)
    return counts.of


class Writer:
    """Step 3 for one dataset: the only code that changes a record."""

    def __init__(self, db: Database, job: Job, table: Table, counts: Counts) -> None:
        self.db = db
        self.job = job
        self.table = table
        self.counts = counts
        self.scope = table.scope_of(job)
        self.name = quote(table.name)

    def put(self, bids: Sequence[Bid]) -> None:
        """Insert where absent, read the keys in order, decide, write."""
        if self.table.history:
            self._alone()
            self._put_versions(bids)
            return
        first, later = _lowest_first(bids)
        self._insert([self._row(bid) for bid in first], tail="ON CONFLICT (_scope, _key) DO NOTHING")
        standing = self._standing([bid.offer.key for bid in first])
        if len(standing) < len(first):
            raise StoreBusy(f"{self.table.name}: a record that was met was removed meanwhile by another worker")
        for bid in first:
            self._settle(bid, standing[bid.offer.key])
        for bid in later:
            self._settle(bid, self._standing([bid.offer.key])[bid.offer.key])

    def _alone(self) -> None:
        """Versions of one key in different slots have no row in common that could be locked: one writer at a time."""
        self.db.rows_text(f"SELECT d.name FROM dataset AS d WHERE d.name = ?{self.db.locked('d')}", (self.table.name,))

    def _insert(self, rows: Sequence[Row], *, tail: str = "") -> None:
        columns = self.table.columns
        self.db.stage(f"{self.name} ({', '.join(columns)})", len(columns), rows, tail=tail)

    def _row(self, bid: Bid) -> Row:
        offer, result, part = bid.offer, bid.result, bid.part
        return (
            self.scope, offer.key, self.job.slot, offer.key_text, offer.content, result.claim.key, result.claim.id, result.claim.tries,
            part.job, part.shard, part.n, "", *offer.values,
        )  # fmt: skip

    def _standing(self, keys: Sequence[bytes]) -> dict[bytes, Standing]:
        """The rows that these keys have now, which nobody else may change before COMMIT; in `history` those of this slot."""
        self.db.run_text("DELETE FROM stage_key")
        self.db.stage("stage_key", 2, [(self.scope, key) for key in keys])
        of_slot = " AND d._slot = ?" if self.table.history else ""
        rows = self.db.rows_text(
            f"SELECT d._key, d._task_key, d._task, d._try, d._job, d._slot, d._content, d._closed FROM stage_key AS k "
            f"JOIN {self.name} AS d ON d._scope = k.scope AND d._key = k.key{of_slot} ORDER BY d._key{self.db.locked('d')}",
            (self.job.slot,) if of_slot else (),
        )
        return {bytes(key): Standing(bytes(task_key), task, tries, job, slot, bytes(content), closed)
                for key, task_key, task, tries, job, slot, content, closed in rows}  # fmt: skip

    def _settle(self, bid: Bid, standing: Standing) -> None:
        claim, offer = bid.result.claim, bid.offer
        verdict = decide(
            standing,
            task=claim.id,
            tries=claim.tries,
            task_key=claim.key,
            job=self.job.id,
            slot=self.job.slot,
            policy=self.table.type.policy,
        )
        differs = int(offer.content != standing.content)
        if verdict is Verdict.NEW:
            self.counts.add(bid.part, self.table.name, new=1)
        elif verdict is Verdict.LOSE:
            self._keep_offer(bid)
            self.counts.add(bid.part, self.table.name, kept=1, conflicts=differs)
        elif verdict is Verdict.YIELD:
            self.counts.add(bid.part, self.table.name, kept=1)
        else:
            if verdict is Verdict.WIN:
                self._row_becomes_offer(offer.key, self.job.slot)
            self._overwrite(self._row(bid))
            self.counts.add(bid.part, self.table.name, replaced=1, conflicts=differs if verdict is Verdict.WIN else 0)

    def _overwrite(self, row: Row) -> None:
        columns = self.table.columns
        self.db.run_text(
            f"UPDATE {self.name} SET {', '.join(f'{column} = ?' for column in columns)} WHERE _scope = ? AND _key = ?"
            + (" AND _slot = ?" if self.table.history else ""),
            (*row, row[0], row[1], *((row[2],) if self.table.history else ())),
        )

    # -- offers ---------------------------------------------------------------------------

    def _keep_offer(self, bid: Bid) -> None:
        claim, offer, part = bid.result.claim, bid.offer, bid.part
        self.db.run(
            "put_offer", dataset=self.table.name, scope=self.scope, key=offer.key, slot=self.job.slot, task_key=claim.key, task=claim.id,
            job=part.job, shard=part.shard, n=part.n, key_text=offer.key_text, content=offer.content,
            row_json=pack(self.table.fields, offer.values),
            **{"try": claim.tries},
        )  # fmt: skip

    def _row_becomes_offer(self, key: bytes, slot: str) -> None:
        columns = ", ".join(self.table.columns)
        where = " AND _slot = ?" if self.table.history else ""
        (row,) = self.db.rows_text(
            f"SELECT {columns} FROM {self.name} WHERE _scope = ? AND _key = ?{where}", (self.scope, key, *((slot,) if where else ()))
        )
        _, _, slot, key_text, content, task_key, task, tries, job, shard, n, _, *values = row
        self.db.run(
            "put_offer", dataset=self.table.name, scope=self.scope, key=key, slot=slot, task_key=task_key, task=task,
            job=job, shard=shard, n=n, key_text=key_text, content=content, row_json=pack(self.table.fields, values), **{"try": tries},
        )  # fmt: skip

    def _lowest_offer(self, key: bytes, slot: str) -> Row | None:
        """The row that the lowest task key's offer makes, or None."""
        found = self.db.one("next_offer", dataset=self.table.name, scope=self.scope, key=key, slot=slot)
        if found is None:
            return None
        task_key, task, tries, job, shard, n, key_text, content, packed = found
        values = unpack(packed, self.table.fields)
        return (self.scope, key, slot, key_text, bytes(content), bytes(task_key), task, tries, job, shard, n, "", *values)

    def _drop_offer(self, key: bytes, slot: str, task_key: bytes) -> None:
        self.db.run("drop_offer", dataset=self.table.name, scope=self.scope, key=key, slot=slot, task_key=task_key)

    # -- a task that runs again -----------------------------------------------------------

    def remove_former(self, part: Part, result: Result) -> None:
        """Take away what this task emitted in a former try and no longer does; the next offer takes its place."""
        claim = result.claim
        mine = {offer.key for offer in result.offers if offer.dataset == self.table.name}
        self._hold_former(claim.id)
        gone = []
        for dataset, _scope, key, slot, task_key in self.db.rows("offers_of_task", task=claim.id):
            if dataset == self.table.name and bytes(key) not in mine:
                self._drop_offer(key, slot, task_key)
                gone.append((bytes(key), slot))
        rows = self.db.rows_text(
            f"SELECT _key, _slot FROM {self.name} WHERE _task = ? AND _try <> ? AND _job = ? AND _closed = '' ORDER BY _key",
            (claim.id, claim.tries, self.job.id),
        )
        if self.table.history:
            self._close_versions(part, [(bytes(key), slot) for key, slot in rows], gone)
            return
        for key, slot in rows:
            self._replace_or_remove(part, bytes(key), slot)

    def _hold_former(self, task: int) -> None:
        """Lock every row that a task wrote or offered to: another worker may offer the same key, or look for its heir, at this moment."""
        if self.table.history:
            self._alone()
            return
        keys = [row[2] for row in self.db.rows("offers_of_task", task=task) if row[0] == self.table.name]
        keys += [row[0] for row in self.db.rows_text(f"SELECT _key FROM {self.name} WHERE _task = ? AND _job = ?", (task, self.job.id))]
        self._standing(sorted({bytes(key) for key in keys}))

    def _replace_or_remove(self, part: Part, key: bytes, slot: str) -> None:
        heir = self._lowest_offer(key, slot)
        if heir is not None:
            self._overwrite(heir)
            self._drop_offer(key, slot, heir[5])
            self._note_heir(part, key)
            self.counts.add(part, self.table.name, replaced=1)
        else:
            self.db.run_text(f"DELETE FROM {self.name} WHERE _scope = ? AND _key = ?", (self.scope, key))
            self.counts.add(part, self.table.name, removed=1)

    def _note_heir(self, part: Part, key: bytes) -> None:
        """A record that stands from now on keeps the stamp of its own batch: `export --after` finds it by this note."""
        self.db.run("put_heir", dataset=self.table.name, scope=self.scope, key=key, job=part.job, shard=part.shard, n=part.n)

    # -- history: a version in each slot in which the content changed -----------------------------
    #
    # Of those who offer a key in a slot the lowest task key counts. It is a row where its content differs from
    # what counts in the slot before, and else an offer; so the rows do not depend on the order of slots either.

    def _put_versions(self, bids: Sequence[Bid]) -> None:
        by_key: dict[bytes, list[Bid]] = defaultdict(list)
        for bid in sorted(bids, key=lambda bid: bid.task_key):
            by_key[bid.offer.key].append(bid)
        met = self._met(sorted(by_key))
        fresh = [its[0] for key, its in by_key.items() if len(its) == 1 and key not in met]
        self._insert([self._row(bid) for bid in fresh])
        for bid in fresh:
            self.counts.add(bid.part, self.table.name, new=1)
        for key in sorted(by_key):
            if len(by_key[key]) > 1 or key in met:
                self._put_version(key, by_key[key])

    def _met(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that have a row or an offer in any slot."""
        self.db.run_text("DELETE FROM stage_key")
        self.db.stage("stage_key", 2, [(self.scope, key) for key in keys])
        rows = self.db.rows_text(
            f"SELECT k.key FROM stage_key AS k WHERE EXISTS (SELECT 1 FROM {self.name} AS d WHERE d._scope = k.scope AND d._key = k.key) "
            "OR EXISTS (SELECT 1 FROM offer AS o WHERE o.dataset = ? AND o.scope = k.scope AND o.key = k.key)",
            (self.table.name,),
        )
        return {bytes(row[0]) for row in rows}

    def _put_version(self, key: bytes, bids: Sequence[Bid]) -> None:
        """Offer every bid of one key; then see what counts in this slot, and in the next one that has the key."""
        slot, name = self.job.slot, self.table.name
        standing = self._standing([key]).get(key)
        for bid in bids:
            rival = standing is not None and not standing.closed and standing.task != bid.result.claim.id
            conflicts = int(rival and standing is not None and standing.content != bid.offer.content)
            if standing is not None and not standing.closed and standing.task == bid.result.claim.id:
                self._overwrite(self._row(bid))
                self.counts.add(bid.part, name, replaced=1)
            else:
                self._keep_offer(bid)
                self.counts.add(bid.part, name, conflicts=conflicts)
        counts = self._place(bids[0].part, key, slot)
        self._place_next(bids[0].part, key, slot)
        for bid in bids:
            if bid.result.claim.id != counts and (standing is None or bid.result.claim.id != standing.task):
                self.counts.add(bid.part, name, kept=1)

    def _place(self, part: Part, key: bytes, slot: str) -> int | None:
        """Bring one slot's version of a key up to date: the task whose row stands there now, or None."""
        found = self.db.rows_text(
            f"SELECT _task_key, _task, _content, _closed FROM {self.name} WHERE _scope = ? AND _key = ? AND _slot = ?",
            (self.scope, key, slot),
        )
        row = found[0] if found else None
        is_open = row is not None and row[3] == ""
        best = self._lowest_offer(key, slot)
        if best is not None and row is not None and is_open and best[5] >= bytes(row[0]):
            best = None
        if best is None and not is_open:
            return None
        content = best[4] if best is not None else bytes(row[2])  # type: ignore[index]
        is_changed = content != self._before(key, slot)
        if is_open and (best is not None or not is_changed):
            self._row_becomes_offer(key, slot)
        if not is_changed:
            if row is not None:
                self.db.run_text(f"DELETE FROM {self.name} WHERE _scope = ? AND _key = ? AND _slot = ?", (self.scope, key, slot))
                self.counts.add(part, self.table.name, removed=1)
                self._note_heir(part, key)  # an older version counts again
            return None
        if best is None:
            return int(row[1])  # type: ignore[index]
        if best[8:11] != (part.job, part.shard, part.n):
            self._note_heir(part, key)
        if row is not None:
            self._overwrite(best)
            self.counts.add(part, self.table.name, replaced=1)
        else:
            self._insert([best])
            self.counts.add(part, self.table.name, new=1)
        self._drop_offer(key, slot, best[5])
        return int(best[6])

    def _before(self, key: bytes, slot: str) -> bytes | None:
        """The content that counts in the last slot before this one that has the key; None where it was closed there, or nowhere."""
        rows = self.db.rows_text(
            "SELECT content, closed FROM ("
            f"SELECT _slot AS slot, 0 AS is_offer, _task_key AS task_key, _content AS content, _closed AS closed FROM {self.name} "
            "WHERE _scope = ? AND _key = ? AND _slot < ? "
            "UNION ALL SELECT slot, 1, task_key, content, '' FROM offer WHERE dataset = ? AND scope = ? AND key = ? AND slot < ?"
            ") AS versions ORDER BY slot DESC, is_offer, task_key LIMIT 1",
            (self.scope, key, slot, self.table.name, self.scope, key, slot),
        )
        return bytes(rows[0][0]) if rows and not rows[0][1] else None

    def _place_next(self, part: Part, key: bytes, slot: str) -> None:
        """The next slot that has the key may repeat this one now, or no longer do so."""
        rows = self.db.rows_text(
            f"SELECT MIN(slot) FROM (SELECT _slot AS slot FROM {self.name} WHERE _scope = ? AND _key = ? AND _slot > ? "
            "UNION ALL SELECT slot FROM offer WHERE dataset = ? AND scope = ? AND key = ? AND slot > ?) AS later",
            (self.scope, key, slot, self.table.name, self.scope, key, slot),
        )
        if rows[0][0] is not None:
            self._place(part, key, rows[0][0])

    def _close_versions(self, part: Part, rows: Sequence[tuple[bytes, str]], offers: Sequence[tuple[bytes, str]]) -> None:
        """Close the versions that a task no longer emits; where others offer the key, theirs count now."""
        for key, slot in rows:
            self.db.run_text(
                f"UPDATE {self.name} SET _closed = ? WHERE _scope = ? AND _key = ? AND _slot = ?", (slot or "closed", self.scope, key, slot)
            )
            self.counts.add(part, self.table.name, replaced=1)
        for key, slot in sorted({*rows, *offers}):
            self._place(part, key, slot)
            self._place_next(part, key, slot)


def _lowest_first(bids: Iterable[Bid]) -> tuple[list[Bid], list[Bid]]:
    """Bids by key: the lowest task key of each, and then the others."""
    first: dict[bytes, Bid] = {}
    later = []
    for bid in sorted(bids, key=lambda bid: (bid.offer.key, bid.task_key)):
        if bid.offer.key in first:
            later.append(bid)
        else:
            first[bid.offer.key] = bid
    return list(first.values()), later
