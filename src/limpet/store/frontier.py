"""What is claimed next, what a claim holds, and what people asked to have put back.

The owner alone claims in its shard, so a claim is a plain SELECT and an UPDATE by id. It goes round
the hosts that have a task ready, one step along an index for each, and takes of each host what its
pace lets start: what it touches does not depend on how many tasks wait. Invariants: I6, I7.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from limpet.batch import Claim, Part, Want
from limpet.errors import InvariantBroken
from limpet.store import charges
from limpet.store.dialect import Database, Row
from limpet.task import Lane, ShardId, TaskId, TaskKey

#: Due retries that join the ready lane in one batch.
PROMOTE_MAX = 2000

#: Waiting tasks of a shard among which those of a host that goes on are looked for.
HURRIED_MAX = 10_000

#: Hosts that one claim looks at in one shard: a claim among many paused hosts stays short.
HOSTS_MAX = 1000

#: Claimed tasks that are read back at once.
IDS_MAX = 500

#: Tasks that one batch puts back for a request; a longer request goes on in the next batch.
REVISIT_MAX = 1000

LOWEST_HOST = -(2**63)


#: Requests that are about a host: its pause by a person, and the end of that.
HOLDS = ("pause_host", "resume_host")


@dataclass(frozen=True, slots=True)
class Hold:
    """A host that a person has paused, or, without a reason, one that goes on."""

    shard: ShardId
    host: int
    authority: str
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What people had asked of one shard, and what was done of it."""

    put_back: int = 0
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class Claimed:
    """What step 6 did in one shard."""

    ids: Sequence[int] = ()
    last_host: int = LOWEST_HOST
    next_due_ms: int | None = None  # until the next retry of this shard is due
    suspect_due_ms: int | None = None  # until its next suspect is; None where it has none
    stopped: str = ""
    short_of: int = 0  # micro-credits of the cheapest one that could not be paid for; 0 where all could be
    money: Sequence[int] = (0, 0, 0, 0)  # as charges.MONEY says it


def claim(db: Database, part: Part, want: Want) -> Claimed:
    """Claim what `want` asks for in one shard, as step 6; nothing where the job is halted or paused."""
    halted, paused = db.one("job_stopped", job=part.job) or ("", "")
    if halted or paused:
        return Claimed(stopped=f"halted: {halted}" if halted else f"paused: {paused}")
    promote(db, part)
    means = charges.Means.of(db, part, want)
    ids, last_host = ([], want.after_host) if want.tasks <= 0 else _suspect(db, part, want) if want.solo else _round(db, part, want, means)
    reserved: list[list[object]] = []
    if ids:
        stage_ids(db, ids)
        if want.costs:
            paid, reserved = charges.reserve(db, part, ids, want, means)
            if len(paid) < len(ids):
                ids = paid
                stage_ids(db, ids)
    if ids:
        taken = db.run("claim", job=part.job, shard=part.shard, epoch=part.epoch, n=part.n, solo=int(want.solo))
        if taken != len(ids):
            raise InvariantBroken(f"{len(ids)} tasks were claimable in shard {part.shard}, {taken} could be claimed", invariant="I6")
    return Claimed(
        ids=ids,
        last_host=last_host,
        next_due_ms=_next_due(db, part, Lane.WAITING),
        suspect_due_ms=_next_due(db, part, Lane.SUSPECT),
        short_of=means.short_of,
        money=charges.put_reserved(db, reserved, int(db.one("clock")[0])) if reserved else (0, 0, 0, 0),  # type: ignore[index]
    )


def _next_due(db: Database, part: Part, lane: Lane) -> int | None:
    row = db.one("next_due", job=part.job, shard=part.shard, lane=str(lane))
    return None if row is None or row[0] is None else max(0, int(row[0]))


def promote(db: Database, part: Part) -> None:
    """Move retries whose wait is over into the ready lane."""
    due = [row[0] for row in db.rows("due", job=part.job, shard=part.shard, most=PROMOTE_MAX)]
    if due:
        stage_ids(db, due)
        db.run("promote", job=part.job, shard=part.shard)


def _round(db: Database, part: Part, want: Want, means: charges.Means) -> tuple[list[int], int]:
    """Ids, host by host from where the last claim ended; and the host at which this one did.

    What cannot be paid for takes no place of what can, or costs nothing.
    """
    ids: list[int] = []
    host, wrapped, start = want.after_host, False, want.after_host
    floors = sorted(want.floors)
    for _ in range(HOSTS_MAX):
        found = _next_host(db, part, host, floors)
        if found is None:
            if wrapped or start <= LOWEST_HOST:
                return ids, LOWEST_HOST
            host, wrapped = LOWEST_HOST, True
            continue
        if wrapped and found > start:
            return ids, host
        host = found
        most = min(want.busy.get(host, want.per_host), want.tasks - len(ids))
        if most > 0:
            price = want.prices.get(host, 0)
            asked = min(most, means.tries_of(price) + 1) if price else most  # one more tells whether any is left unpaid
            found_ids = _ready_of(db, part, host, asked, want.floors.get(host))
            ids += means.cut(found_ids, price) if price else found_ids
        if len(ids) >= want.tasks:
            break
    return ids, host


def _next_host(db: Database, part: Part, after: int, floors: Sequence[int]) -> int | None:
    """The next host with a ready task, or with a floor: one that is claimed from for long has dead entries of an index before it."""
    at = bisect_right(floors, after)
    if at == len(floors):
        row = db.one("ready_host_after", job=part.job, shard=part.shard, after=after)
        return None if row is None or row[0] is None else int(row[0])
    row = db.one("ready_host_between", job=part.job, shard=part.shard, after=after, before=floors[at])
    return floors[at] if row is None or row[0] is None else int(row[0])


def _ready_of(db: Database, part: Part, host: int, most: int, floor: tuple[int, int] | None) -> list[int]:
    where = {"job": part.job, "shard": part.shard, "host": host, "most": most}
    if floor is None:
        return [row[0] for row in db.rows("ready_of_host", **where)]
    return [row[0] for row in db.rows("ready_above", **where, rank=floor[0], id=floor[1])]


def _suspect(db: Database, part: Part, want: Want) -> tuple[list[int], int]:
    """The first suspect that is due and whose host may be asked now."""
    for task, host in db.rows("suspects_due", job=part.job, shard=part.shard, most=HOSTS_MAX):
        if want.busy.get(host, want.per_host) > 0:
            return [task], want.after_host
    return [], want.after_host


def stage_ids(db: Database, ids: Iterable[int]) -> None:
    """Fill the staging table of ids."""
    db.run_text("DELETE FROM stage_id")
    db.stage("stage_id", 1, [(one,) for one in ids])


def read_claims(db: Database, part: Part, ids: Sequence[int] | None = None) -> list[Claim]:
    """What batch n of the part's shard holds claimed, as the rows say it.

    By the ids that were claimed, where they are known: the index of what runs may hold a dead entry for every task that ever
    ran, for as long as somebody on a server holds an old snapshot open.
    """
    if ids is None:
        rows = db.rows("read_claims", job=part.job, shard=part.shard, epoch=part.epoch, n=part.n)
        return [claim_of(row) for row in rows]
    found: list[Row] = []
    for start in range(0, len(ids), IDS_MAX):
        piece = ids[start : start + IDS_MAX]
        places = ", ".join("?" * len(piece))
        found += db.rows_text(
            "SELECT t.shard, t.id, t.key, t.tries, t.strikes, t.lost, t.solo, t.throttled, t.throttled_ms, t.host, t.revisits, "
            "t.claim_solo, x.text, x.url, x.handler, x.payload, x.priority, x.depth, x.hops, x.chain, t.rank "
            f"FROM task AS t JOIN task_text AS x ON x.id = t.id WHERE t.id IN ({places}) "
            "AND t.lane = 'running' AND t.claim_epoch = ? AND t.claim_n = ?",
            (*piece, part.epoch, part.n),
        )
    return [claim_of(row[:-1]) for row in sorted(found, key=lambda row: (row[-1], row[1]))]


def claim_of(row: Row) -> Claim:
    """A Claim from a row of `read_claims`."""
    (shard, task, key, tries, strikes, lost, solo_losses, throttled, since, host, revisits, solo,
     text, url, handler, payload, priority, depth, hops, chain) = row  # fmt: skip
    return Claim(
        shard=ShardId(shard), id=TaskId(task), key=TaskKey(bytes(key)), tries=tries, strikes=strikes, lost=lost,
        throttled=throttled, host=host, text=text, url=url or text, handler=handler, payload=payload, priority=priority,
        depth=depth, hops=hops, chain=bytes(chain), solo=bool(solo), solo_losses=solo_losses,
        throttled_since_ms=since, revisits=revisits,
    )  # fmt: skip


# -- requests of people -----------------------------------------------------------------------


def apply_requests(db: Database, part: Part) -> Applied:
    """Apply what people asked of this shard, under its fence."""
    changed = 0
    holds: list[Hold] = []
    for request, what, argument, cursor in db.rows("open_requests", job=part.job, shard=part.shard):
        if changed >= REVISIT_MAX:
            break
        if what in HOLDS:
            hold = _hold_of(part, what, argument)
            db.run("hold_host", job=part.job, shard=part.shard, n=part.n, host=hold.host, authority=hold.authority, held=hold.reason)
            db.run("move_request", id=request, job=part.job, shard=part.shard, n=part.n, cursor=cursor, changed=1, applied=1)
            if not hold.reason:
                _hurry(db, part, hold.host)
            holds.append(hold)
            continue
        ids, cursor, finished = _to_revisit(db, part, json.loads(argument) | {"what": what}, cursor)
        if ids:
            _revisit(db, part, ids)
        changed += len(ids)
        db.run("move_request", id=request, job=part.job, shard=part.shard, n=part.n, cursor=cursor, changed=len(ids), applied=int(finished))
    return Applied(changed, tuple(holds))


def _hurry(db: Database, part: Part, host: int) -> None:
    """A host goes on: what waited only for the end of its pause may start at once. Retries keep the time of their own."""
    if ids := [row[0] for row in db.rows("released_waiting", job=part.job, shard=part.shard, host=host, most=HURRIED_MAX)]:
        stage_ids(db, ids)
        db.run("promote", job=part.job, shard=part.shard)


def applied_holds(db: Database, parts: Iterable[Part]) -> tuple[Hold, ...]:
    """What these batches did to hosts, read from the rows: of a commit that went through without an answer."""
    return tuple(
        _hold_of(part, what, argument)
        for part in parts
        for what, argument in db.rows("applied_holds", job=part.job, shard=part.shard, n=part.n)
    )


def _hold_of(part: Part, what: str, argument: str) -> Hold:
    asked = json.loads(argument)
    return Hold(part.shard, int(asked["host"]), str(asked["authority"]), str(asked["reason"]) if what == "pause_host" else "")


def _to_revisit(db: Database, part: Part, argument: dict[str, object], cursor: int) -> tuple[list[int], int, bool]:
    """Which tasks a request names next: (ids, new cursor, whether that was all)."""
    if "tasks" in argument:
        named = sorted(int(task) for task in argument["tasks"] if int(task) > cursor)[:REVISIT_MAX]  # type: ignore[attr-defined]
        if not named:
            return [], cursor, True
        stage_ids(db, named)
        rows = db.rows("ended_among", job=part.job, shard=part.shard)
        return [row[0] for row in rows], named[-1], False
    states = set(argument.get("states") or ["dead"])  # type: ignore[call-overload]
    query = "dead_candidates" if states == {"dead"} else "revisit_candidates"
    rows = db.rows(query, job=part.job, shard=part.shard, cursor=cursor, most=REVISIT_MAX)
    reason = str(argument.get("reason") or "")
    ids = [task for task, _tries, state, why, _text in rows if state in states and (not reason or reason_matches(why or "", reason))]
    return ids, rows[-1][0] if rows else cursor, len(rows) < REVISIT_MAX


def reason_matches(reason: str, asked: str) -> bool:
    """Whether a reason is the one asked for: the same, or one of its family.

    >>> reason_matches("handler:KeyError", "handler"), reason_matches("status 500", "status 500"), reason_matches("gone", "go")
    (True, True, False)
    """
    return reason == asked or reason.startswith((asked + ":", asked + " "))


def _revisit(db: Database, part: Part, ids: list[int]) -> None:
    stage_ids(db, ids)
    db.run("put_revisits", job=part.job, shard=part.shard, n=part.n)
    put_back = db.run("revisit", job=part.job, shard=part.shard)
    if put_back != len(ids):
        raise InvariantBroken(f"{len(ids)} tasks had ended in shard {part.shard}, {put_back} could be put back", invariant="I7")
