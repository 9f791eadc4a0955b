"""Poison: when the database refuses a batch's *data*, find the row, and let the rest commit.

Only errors of data are bisected (PoisonRow); a full disk or a lost connection blames no task. A half
is another part, with other content and so another id, and claims nothing. The task of a row that is
refused by itself is dead, and its commit carries nothing else of it. More than a few in one batch are
a broken release, not poison: the shard stops.

Where the database fails half way, the pieces that were written cannot be sent again, so the shards of
the others are given up like fenced ones: they come back by take-over, and no task is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from limpet.batch import Kind, Part, Result, Want
from limpet.errors import OutcomeUnknown, OwnershipLost, PoisonRow, StoreBusy, StoreError, StoreUnavailable, WentBack
from limpet.store.commit import Committed, Context, commit
from limpet.store.dialect import Database
from limpet.store.shared import RegistersLost
from limpet.task import Outcome, ShardId, TaskId

#: Characters of the database's message that a dead letter keeps.
MESSAGE_MAX = 500


def commit_bisecting(
    db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want], *, poison_rows_max: int
) -> list[Committed]:
    """Commit the parts; where their data is refused, piece by piece. Every piece that was written, in order."""
    try:
        return [commit_without_losers(db, context, parts, wants)]
    except PoisonRow:
        pass
    written: list[Committed] = []
    poison: list[Result] = []
    for done, part in enumerate(parts):
        try:
            _in_pieces(db, context, part, written, poison, poison_rows_max)
        except (StoreBusy, StoreUnavailable, OutcomeUnknown, OwnershipLost) as error:
            if isinstance(error, WentBack) or not (written or isinstance(error, OutcomeUnknown)):
                raise  # nothing is written: the caller still has the whole of it
            return [*written, Committed((), fenced=tuple(rest.shard for rest in parts[done:]))]
    return written


def commit_without_losers(
    db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want], *, unsettled: bool = False
) -> Committed:
    """Commit; a task whose write of a register came too late goes back to be run again, and the rest is built anew."""
    while True:
        try:
            return commit(db, context, parts, wants, unsettled=unsettled)
        except RegistersLost as lost:
            parts = [replace(part, results=tuple(_again(result, lost.tasks) for result in part.results)) for part in parts]
            unsettled = False  # it was found not to be written


def _again(result: Result, lost: frozenset[TaskId]) -> Result:
    if result.claim.id not in lost:
        return result
    return Result(result.claim, Outcome.RELEASED, reason="a register had another version by then", charge=result.charge)


def _in_pieces(db: Database, context: Context, part: Part, written: list[Committed], poison: list[Result], poison_rows_max: int) -> None:
    pieces = [part]
    n = part.n
    while pieces:
        piece = replace(pieces.pop(0), n=n)
        if pieces and piece.kind is Kind.RELEASE:
            piece = replace(piece, kind=Kind.WORK)  # the pieces after it still need the shard
        try:
            written.append(commit_without_losers(db, context, [piece], {}))
        except PoisonRow as refusal:
            pieces = [*_smaller(piece, refusal, poison), *pieces]
            if len(poison) > poison_rows_max:
                raise StoreError(
                    f"shard {part.shard}: the database refuses the data of more than {poison_rows_max} tasks of one batch: "
                    f"a broken release, not poison. The last refusal: {refusal}"
                ) from refusal
            continue
        if written[-1].fenced:
            return
        n += 1


def _smaller(piece: Part, error: PoisonRow, poison: list[Result]) -> list[Part]:
    """Two halves; or, of a single try, the same try as dead. What is not a try's goes with the first half."""
    results = piece.results
    if len(results) > 1:
        half = len(results) // 2
        bare = replace(piece, hosts=(), robots=(), sources=(), kept=(), grant=None, verified=0)
        return [replace(piece, results=results[:half]), replace(bare, results=results[half:])]
    if not results or (results[0].outcome is Outcome.DEAD and results[0].reason == "poison"):
        raise StoreError(f"shard {piece.shard}: the database refuses what belongs to no task: {error}") from error
    poison.append(results[0])
    return [replace(piece, results=(_dead(results[0], error),))]


def _dead(result: Result, error: PoisonRow) -> Result:
    return Result(
        claim=result.claim, outcome=Outcome.DEAD, reason="poison", status=result.status,
        detail=f"the database refused what this page gave: {str(error)[:MESSAGE_MAX]}", charge=result.charge,
    )  # fmt: skip
