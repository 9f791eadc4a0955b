"""The books: one row per batch, numbered without a gap, each sealing the one before it.

`digest` covers the batch's attempt rows, which never change; `seal` covers the whole row and the
seal of row n - 1. What is new is counted from rows with this batch's stamp, inside the transaction,
never from a driver's row counts. Invariants: I1, I2, I3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from limpet.batch import Kind, Part, canonical_json, digest, tries_digest
from limpet.errors import InvariantBroken
from limpet.store.dialect import Database
from limpet.task import Outcome, ShardId

#: Counters of one dataset in a batch, in this order.
DELTAS = ("new", "replaced", "kept", "removed", "conflicts")

#: Columns of a row, in the order in which its seal covers them.
COLUMNS = (
    "job", "shard", "n", "kind", "batch_id", "owner", "epoch", "at_ms", "done", "skipped", "failed", "dead", "released",
    "throttled", "lost", "claimed", "discovered", "id_low", "id_high", "revisited", "deltas", "code", "digest", "previous",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """Tasks that a batch inserted: how many, and the lowest and highest of their ids."""

    count: int = 0
    low: int = 0
    high: int = 0


Deltas = Mapping[str, Sequence[int]]


def total(deltas: Iterable[Deltas]) -> dict[str, list[int]]:
    """The sum over several batches: dataset -> counters."""
    sums: dict[str, list[int]] = {}
    for one in deltas:
        for name, counts in one.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0] * len(counts)), counts, strict=True)]
    return sums


def noted(*several: Mapping[ShardId, Deltas]) -> dict[ShardId, dict[str, list[int]]]:
    """What several steps changed, shard by shard and name by name."""
    sums: dict[ShardId, dict[str, list[int]]] = {}
    for each in several:
        for shard, one in each.items():
            sums[shard] = total([sums.get(shard, {}), one])
    return sums


def close_books(
    db: Database,
    alive: Sequence[Part],
    found: Mapping[tuple[int, int], Found],
    deltas: Mapping[ShardId, Deltas],
    revisited: Mapping[ShardId, int],
    claimed: Mapping[ShardId, int],
) -> int:
    """Write row n of each shard, as step 7; the database's clock in milliseconds."""
    at_ms = int(db.one("clock")[0])  # type: ignore[index]
    for part in alive:
        outcomes = Counter(result.outcome for result in part.results)
        tries = [(r.claim.key, r.claim.tries, str(r.outcome), r.reason, r.digest()) for r in part.results]
        put(
            db, part, at_ms, outcomes, tries_digest(tries), found.get((part.shard, part.n), Found()),
            claimed=claimed.get(part.shard, 0), revisited=revisited.get(part.shard, 0), deltas=deltas.get(part.shard, {}),
        )  # fmt: skip
    if alive:
        db.run("renew", worker=alive[0].owner)
    return at_ms


def put(
    db: Database, part: Part, at_ms: int, outcomes: Mapping[Outcome, int], tries: bytes, found: Found,
    *, claimed: int = 0, revisited: int = 0, deltas: Deltas | None = None,
) -> None:  # fmt: skip
    """Write one row, sealed over the row before it."""
    row: dict[str, object] = {
        "job": part.job, "shard": part.shard, "n": part.n, "kind": str(part.kind), "batch_id": part.batch_id(), "owner": part.owner,
        "epoch": part.epoch, "at_ms": at_ms, **{str(outcome): outcomes.get(outcome, 0) for outcome in Outcome},
        "claimed": claimed, "discovered": found.count, "id_low": found.low, "id_high": found.high, "revisited": revisited,
        "deltas": canonical_json({name: list(counts) for name, counts in (deltas or {}).items() if any(counts)}),
        "code": part.code, "digest": tries, "previous": previous_seal(db, part),
    }  # fmt: skip
    db.run("put_ledger", **row, seal=seal(row))


def previous_seal(db: Database, part: Part) -> bytes:
    """The seal of row n - 1; empty before the first batch. A missing row is a broken I1."""
    if part.n == 1:
        return b""
    row = db.one("read_seal", job=part.job, shard=part.shard, n=part.n - 1)
    if row is None:
        raise InvariantBroken(f"shard {part.shard} of job {part.job} has no ledger row {part.n - 1}", invariant="I1")
    return bytes(row[0])


def seal(row: Mapping[str, object]) -> bytes:
    """The digest over a whole row, the previous seal included."""
    return digest(*(_bytes(row[name]) for name in COLUMNS))


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def kinds() -> frozenset[str]:
    """Every kind of batch that the schema knows."""
    return frozenset(map(str, Kind))
