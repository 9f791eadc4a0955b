"""THE ONE TRANSACTION: what was collected and how far the crawl got commit together, or not at all.

`transact` is the whole protocol on one screen, its steps numbered as in ARCHITECTURE.md. The order
of the steps is the only lock order; steps are the outer loop, shards the inner, and no transaction
takes a shard's row after step 1. Parts stay apart until their fences have been read: what a fenced
part would have written goes with it, and with nothing else.

What a definite COMMIT means is decided here too (`settle`): nothing that follows a commit (requests,
caches, progress) happens on an unknown outcome. Invariants: I1, I2, I3, I6.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from limpet.batch import ANEW, Claim, Kind, Link, Part, Result, Want, rank_of
from limpet.errors import (
    InvariantBroken,
    OutcomeUnknown,
    OwnershipLost,
    PoisonRow,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    UsageError,
    WentBack,
)
from limpet.failpoint import failpoint
from limpet.store import charges, datasets, frontier, ledger, shared
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.known import KnownKeys
from limpet.store.tables import Table
from limpet.task import Lane, Outcome, ShardId, lane_of, state_after

#: Waits, in seconds, before a transaction that met a busy database is repeated whole: 20 s in all.
BUSY_WAITS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0)

#: Waits between new connections that try to settle an unknown outcome; then the caller decides.
SETTLE_WAITS_S = (0.05, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a definite commit did. Claims are read back from it, never remembered from before."""

    parts: tuple[Part, ...]  # those that were written
    fenced: tuple[ShardId, ...] = ()  # those that were dropped: another owner has the shard
    claims: tuple[Claim, ...] = ()
    discovered: int = 0
    deltas: dict[str, list[int]] = field(default_factory=dict)  # dataset -> [new, replaced, kept, removed, conflicts]
    revisited: int = 0
    stopped: str = ""  # why nothing may be claimed: the job is halted or paused
    rounds: dict[int, int] = field(default_factory=dict)  # shard -> host at which the next claim goes on
    next_due_ms: dict[int, int | None] = field(default_factory=dict)  # shard -> until its next retry
    suspects_due_ms: dict[int, int] = field(default_factory=dict)  # shard -> until its next suspect is due
    unpaid: Mapping[int, int] = field(default_factory=dict)  # shard -> micro-credits of the cheapest task that it could not pay for
    holds: tuple[frontier.Hold, ...] = ()  # hosts that people paused, or let go on
    at_ms: int = 0
    claimed_ids: Mapping[int, Sequence[int]] | None = None  # shard -> what step 6 took; None where that has to be found out


@dataclass(frozen=True, slots=True)
class Context:
    """What a commit needs to know beside its parts."""

    job: Job
    tables: Mapping[str, Table]
    known: KnownKeys
    suspect_after: int = 3


def commit(db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want], *, unsettled: bool = False) -> Committed:
    """Commit the parts, in one transaction, and say for certain what became of them.

    A busy database is asked again. An unknown outcome is settled on a new connection first; where that
    cannot be had, OutcomeUnknown is raised, and the same parts must come again, `unsettled`: the flag is
    sticky, since a second error of another kind does not make the first outcome any better known.
    Also raises WentBack (drop everything), PoisonRow (bisect), StoreUnavailable (not written: wait, or
    stop resumable) and InvariantBroken (the job is halted).
    """
    if not parts:
        return Committed(())
    if len(parts) > 1 and any(part.grant for part in parts):
        raise UsageError("a grant is alone in its commit: it takes the row of a purse, which all shards share")
    for wait_s in (*BUSY_WAITS_S, None):
        try:
            return settle(db, context, parts, wants) if unsettled else transact(db, context, parts, wants)
        except StoreBusy:
            if wait_s is None:
                raise
            time.sleep(wait_s)
        except OutcomeUnknown:
            context.known.clear()
            if unsettled:
                raise
            return settle(db, context, parts, wants)
        except OwnershipLost:  # a shard lost, or a database that went back: what was known may be gone
            context.known.clear()
            raise
    raise AssertionError("the last wait is None")


def transact(db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want]) -> Committed:
    """The transaction itself, steps 0 to 7."""
    parts = sorted(parts, key=lambda part: part.shard)
    failpoint("before_stage")
    try:
        offered = stage(db, context, parts)  # 0. before any shared row is touched
        failpoint("after_stage")
        db.begin()
        failpoint("after_begin")
        alive, fenced = fence(db, parts)  # 1. still ours? each row count is read before anything else is sent
        failpoint("after_fence")
        done = write(db, context, alive, wants)  # 2. to 7.
        db.commit()
    except BaseException:
        db.rollback()
        raise
    failpoint("after_commit")
    try:
        return acknowledge(db, context, done, fenced, offered)
    except StoreCorrupt:
        raise
    except StoreError as error:  # written, but not read back: to be found in the ledger, and never to be sent again as new
        raise OutcomeUnknown(f"{db.place}: the commit went through, but what it claimed could not be read: {error}") from error


def write(db: Database, context: Context, alive: Sequence[Part], wants: Mapping[ShardId, Want]) -> Committed:
    """Steps 2 to 7, under fences that hold."""
    found = discover(db, context.job)  # 2.
    failpoint("after_discover")
    deltas = datasets.put_records(db, context.job, context.tables, alive)  # 3.
    failpoint("after_records")
    finish(db, alive)  # 4.
    failpoint("after_finish")
    applied, notes = account(db, context.job, alive)  # 5.
    failpoint("after_account")
    claimed = {part.shard: frontier.claim(db, part, wants.get(part.shard, Want())) for part in alive}  # 6.
    failpoint("after_claim")
    revisited = {shard: done.put_back for shard, done in applied.items()}
    noted = ledger.noted(deltas, notes, {shard: {charges.MONEY: c.money} for shard, c in claimed.items()})
    at_ms = ledger.close_books(db, alive, found, noted, revisited, {shard: len(c.ids) for shard, c in claimed.items()})  # 7.
    failpoint("after_ledger")
    return Committed(
        parts=tuple(alive),
        discovered=sum(f.count for f in found.values()),
        deltas=ledger.total(deltas.values()),
        revisited=sum(revisited.values()),
        stopped=next((c.stopped for c in claimed.values() if c.stopped), ""),
        unpaid={shard: c.short_of for shard, c in claimed.items() if c.short_of},
        rounds={shard: c.last_host for shard, c in claimed.items()},
        next_due_ms={shard: c.next_due_ms for shard, c in claimed.items()},
        suspects_due_ms={shard: c.suspect_due_ms for shard, c in claimed.items() if c.suspect_due_ms is not None},
        holds=tuple(hold for done in applied.values() for hold in done.holds),
        at_ms=at_ms,
        claimed_ids={shard: c.ids for shard, c in claimed.items()},
    )


# -- 0. stage ---------------------------------------------------------------------------------


def stage(db: Database, context: Context, parts: Sequence[Part]) -> dict[ShardId, list[bytes]]:
    """Bind every row into the staging tables; the keys that each part offers, for the cache.

    Each part is de-duplicated in itself alone: were a link that two parts share kept in one of them,
    and that one fenced, it would be lost for ever.
    """
    db.unstage()
    offered: dict[ShardId, list[bytes]] = {}
    links: list[tuple[object, ...]] = []
    tries: list[tuple[object, ...]] = []
    for part in parts:
        fresh = _fresh_links(context.known, part)
        offered[part.shard] = [link.key for link in fresh]
        links += [_link_row(part, link) for link in fresh]
        tries += [_try_row(part, result, context.suspect_after) for result in part.results]
    db.stage("stage_link", 15, links)
    db.stage("stage_try", 22, tries)
    return offered


def _fresh_links(known: KnownKeys, part: Part) -> list[Link]:
    links: dict[bytes, Link] = {}
    for result in part.results:
        for link in result.links:
            if link.key not in known:
                links.setdefault(link.key, link)
    for move in part.sources:
        for link in move.links:
            if link.key not in known:
                links.setdefault(link.key, link)
    return list(links.values())


def _link_row(part: Part, link: Link) -> tuple[object, ...]:
    rank = rank_of(link.priority, link.depth)
    url = "" if link.url == link.text else link.url
    return (
        part.job, link.shard, link.host, link.key, rank, part.shard, part.n,
        link.text, url, link.handler, link.payload, link.priority, link.depth, link.hops, link.chain,
    )  # fmt: skip


def _try_row(part: Part, result: Result, suspect_after: int) -> tuple[object, ...]:
    claim = result.claim
    state = state_after(result.outcome)
    lane = Lane.PARKED if result.park else lane_of(state, due_ms=result.due_in_ms, lost=claim.lost, suspect_after=suspect_after)
    due_in_ms = result.due_in_ms if lane in (Lane.WAITING, Lane.SUSPECT) else 0
    records = len({(offer.dataset, offer.key) for offer in result.offers})
    return (
        part.job, part.shard, part.n, claim.id, claim.tries, part.epoch, str(state), str(lane) or None,
        due_in_ms, int(result.strike), 0, 0, int(result.outcome is Outcome.THROTTLED), int(claim.solo),
        str(result.outcome), result.reason, result.status, result.digest(), len(result.links), records, result.url, result.detail,
    )  # fmt: skip


# -- 1. fence ---------------------------------------------------------------------------------


def fence(db: Database, parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Prove the owner of each shard, in order: (parts whose fence held, parts to be dropped whole).

    Raises WentBack where the database is older than what this process has seen, InvariantBroken where
    the shard's row fits no story.
    """
    alive, fenced = [], []
    for part in parts:
        rows = db.run(
            "fence",
            job=part.job,
            shard=part.shard,
            owner=part.owner,
            epoch=part.epoch,
            n=part.n,
            kind=str(part.kind),
            verified=part.verified,
        )
        if rows == 1:
            alive.append(part)
            continue
        judge(db, part)
        fenced.append(part)
    for part in fenced:
        db.run_text("DELETE FROM stage_link WHERE source_shard = ?", (part.shard,))
        db.run_text("DELETE FROM stage_try WHERE shard = ?", (part.shard,))
    return alive, fenced


def judge(db: Database, part: Part) -> None:
    """Return where the shard simply has another owner; raise what else its row means."""
    row = db.one("read_shard", job=part.job, shard=part.shard)
    where = f"shard {part.shard} of job {part.job}"
    if row is None:
        raise WentBack(f"{where} is gone: the database was replaced by an older one")
    owner, epoch, watermark, _verified = row
    if watermark < part.n - 1 or epoch < part.epoch:
        raise WentBack(f"{where} went back: expected epoch {part.epoch}, watermark {part.n - 1}; found {epoch}, {watermark}")
    if owner != part.owner or epoch > part.epoch:
        return
    raise InvariantBroken(
        f"{where} is ours (epoch {epoch}) but its watermark is {watermark}, not {part.n - 1}: somebody wrote under our name", invariant="I1"
    )


# -- 2. discover ------------------------------------------------------------------------------


def discover(db: Database, job: Job) -> dict[tuple[int, int], ledger.Found]:
    """Insert the tasks that are new: (source shard, batch) -> how many, and their range of ids."""
    before = db.one("highest_task")[0]  # type: ignore[index]
    db.run("discover")
    db.run("discover_text", before=before)
    return {
        (shard, n): ledger.Found(count, low, high) for shard, n, count, low, high in db.rows("count_discovered", before=before, job=job.id)
    }


# -- 4. finish --------------------------------------------------------------------------------


def finish(db: Database, alive: Sequence[Part]) -> None:
    """Move the tasks of every try on, by id, from running; fewer rows than tries is a broken invariant."""
    expected = sum(len(part.results) for part in alive)
    if expected:
        found = db.run("finish")
        if found != expected:
            raise InvariantBroken(f"{expected} tasks should have been running under our epoch, {found} were", invariant="I6")


# -- 5. account -------------------------------------------------------------------------------


def account(db: Database, job: Job, alive: Sequence[Part]) -> tuple[dict[ShardId, frontier.Applied], dict[ShardId, ledger.Deltas]]:
    """Write attempt rows, paces, robots, positions of sources, money and shared values; do what people asked for.

    Shard -> what was done of that, and what the ledger notes beside the counts of datasets.
    """
    db.run("put_attempts")
    for part in alive:
        for result in part.results:
            if result.moved_to:
                db.run(
                    "put_moved",
                    job=part.job,
                    key=result.claim.key,
                    target=result.moved_to,
                    shard=part.shard,
                    task=result.claim.id,
                    n=part.n,
                )
            elif result.claim.revisits:
                db.run("drop_moved", job=part.job, key=result.claim.key)
            if result.drops_kept:
                db.run("drop_kept", job=part.job, shard=part.shard, task=result.claim.id)
            if result.charge is not None and result.charge.anew:
                db.run(
                    "put_kept", job=part.job, shard=part.shard, n=part.n, task=result.claim.id, request=ANEW, status=result.claim.tries,
                    url="", headers="[]", body=b"", **{"try": result.claim.tries},
                )  # fmt: skip
        for host in part.hosts:
            db.run(
                "put_host", job=part.job, shard=part.shard, n=part.n, host=host.host, authority=host.authority,
                delay_ms=host.delay_ms, wait_ms=host.wait_ms, pause=host.pause, errors=host.errors,
            )  # fmt: skip
        for robots in part.robots:
            db.run(
                "put_robots", job=part.job, shard=part.shard, n=part.n, origin=robots.origin, outcome=robots.outcome,
                status=robots.status, body=robots.body, ttl_ms=robots.ttl_ms,
            )  # fmt: skip
        for move in part.sources:
            moved = db.run("move_source", job=part.job, source=move.source, before=move.before, after=move.after, closed=int(move.closed))
            if moved != 1:
                raise OwnershipLost(f"source {move.source} of job {part.job} was read on by another worker from {move.before}")
        for kept in part.kept:
            db.run(
                "put_kept", job=part.job, shard=part.shard, n=part.n, task=kept.task, request=kept.request, status=kept.status,
                url=kept.url, headers=kept.headers, body=kept.body, **{"try": kept.tries},
            )  # fmt: skip
            db.run("note_cost", job=part.job, shard=part.shard, n=part.n, task=kept.task, amount=kept.amount, **{"try": kept.tries})
    notes: dict[ShardId, ledger.Deltas] = {}
    settled = {part.shard: charges.settle(db, part) for part in alive}
    drawn = charges.give_back(db, job, [part for part in alive if part.kind is Kind.RELEASE])
    drawn |= {part.shard: charges.draw(db, job, part, part.grant) for part in alive if part.grant is not None}
    for part in alive:
        money = [a + b for a, b in zip(settled[part.shard], drawn.get(part.shard, (0, 0, 0, 0)), strict=True)]
        notes[part.shard] = {charges.MONEY: money, **shared.add_tallies(db, part)}
        shared.put_candidates(db, part)
    shared.write_registers(db, job.spider, alive)  # by name, over all shards: the last rows that others may want too
    return {part.shard: frontier.apply_requests(db, part) for part in alive}, notes


# -- after COMMIT -----------------------------------------------------------------------------


def acknowledge(
    db: Database, context: Context, done: Committed, fenced: Sequence[Part], offered: Mapping[ShardId, Iterable[bytes]]
) -> Committed:
    """What a definite commit allows: caches are fed, and claims are read back from the rows themselves."""
    if fenced:
        context.known.clear()
    else:
        for part in done.parts:
            context.known.update(offered[part.shard])
    ids = done.claimed_ids
    claims = [claim for part in done.parts for claim in frontier.read_claims(db, part, None if ids is None else ids[part.shard])]
    return Committed(
        parts=done.parts,
        fenced=tuple(part.shard for part in fenced),
        claims=tuple(claims),
        discovered=done.discovered,
        deltas=done.deltas,
        revisited=done.revisited,
        stopped=done.stopped,
        rounds=done.rounds,
        next_due_ms=done.next_due_ms,
        suspects_due_ms=done.suspects_due_ms,
        unpaid=done.unpaid,
        holds=done.holds,
        at_ms=done.at_ms,
    )


# -- the unknown outcome ----------------------------------------------------------------------


def settle(db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want]) -> Committed:
    """Find out, under lock and on a new connection, what became of a COMMIT without an answer.

    Read from the rows, in this order: the ledger has our batch id (committed, whatever the epoch is now);
    the shard went back; it is another's; it is ours at n - 1 (not committed, and no ghost can any more,
    for it would hold the row: run it again here). Anything else halts the job.
    """
    for wait_s in SETTLE_WAITS_S:
        try:
            db.reopen()
            return _settle_once(db, context, sorted(parts, key=lambda part: part.shard), wants)
        except (InvariantBroken, OwnershipLost, PoisonRow, StoreCorrupt):
            raise
        except StoreError as error:
            last = error
            time.sleep(wait_s)
    raise OutcomeUnknown(f"{db.place}: whether the last commit was written cannot be found out: {last}") from last


def _settle_once(db: Database, context: Context, parts: Sequence[Part], wants: Mapping[ShardId, Want]) -> Committed:
    try:
        offered = stage(db, context, parts)
        db.begin()
        for part in parts:  # in order; a ghost that could still commit holds one of these rows
            db.one("lock_shard", job=part.job, shard=part.shard)
        verdicts = {part.shard: was_committed(db, part) for part in parts}
        committed = [part for part in parts if verdicts[part.shard] is True]
        missing = [part for part in parts if verdicts[part.shard] is False]
        if committed and missing:
            raise InvariantBroken("one commit, but some of its shards have it and some have not", invariant="I1")
        if committed:
            db.run("renew", worker=committed[0].owner)  # a real write: visible is not yet durable
            done = Committed(tuple(committed), holds=frontier.applied_holds(db, committed), at_ms=db.one("clock")[0])  # type: ignore[index]
            fenced = [part for part in parts if verdicts[part.shard] is None or not _still_ours(db, part)]
        else:
            alive, fenced = fence(db, parts)
            done = write(db, context, alive, wants)
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return acknowledge(db, context, done, fenced, offered)


def was_committed(db: Database, part: Part) -> bool | None:
    """True: the ledger has our batch; False: not, and the shard is still ours; None: the shard is another's."""
    row = db.one("read_batch_id", job=part.job, shard=part.shard, n=part.n)
    if row is not None and bytes(row[0]) == part.batch_id():
        return True
    shard = db.one("read_shard", job=part.job, shard=part.shard)
    if shard is not None and shard[0] == part.owner and shard[1] == part.epoch and shard[2] == part.n - 1:
        return False
    judge(db, part)
    return None


def _still_ours(db: Database, part: Part) -> bool:
    row = db.one("read_shard", job=part.job, shard=part.shard)
    if part.kind is Kind.RELEASE:
        return True
    return row is not None and row[0] == part.owner and row[1] == part.epoch


def check_parts(parts: Iterable[Part]) -> None:
    """A commit holds at most one part of a shard: UsageError otherwise."""
    shards = [part.shard for part in parts]
    if len(set(shards)) != len(shards):
        raise UsageError(f"two parts of one shard in one commit: {sorted(shards)}")
