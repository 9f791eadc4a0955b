"""Proof of the tasks: where each came from, what it is, and that it stands where its history leaves it.

Tasks are read by ranges of ids, over all shards at once, so that each row is met once. What never
changes (source stamps, keys, texts) is held against the vector of watermarks that was read first; what
changes in place is read together with its attempt and revisit rows, in one statement a range, so that
it is of one moment while workers go on. Invariants: I3, I4, I6, I7.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from limpet.batch import Kind
from limpet.store.dialect import Database, Row
from limpet.store.proofs import Evidence, several
from limpet.store.verify_books import BATCHES, pieces, watermarks_now
from limpet.store.verify_history import History, histories, is_due_late, misplaced, not_running, over_cap, recount, unlawful
from limpet.url import authority_of, digest16, host_id

#: A deal of odd tasks in a range that makes it cheaper to read the histories of all its tasks at once.
ODD_SHARE = 0.2

#: Hosts whose number is remembered while texts are looked at.
HOSTS_MAX = 100_000

#: Lone texts that are named.
TEXTS_MAX = 1000

#: In a repair's deltas: tasks of a batch that are gone for good, as "~tasks/<shard>/<batch>": [0, 0, 0, gone, 0].
GONE = "~tasks"

Source = tuple[int, int]  # shard and batch that discovered a task


# -- all tasks of a job -------------------------------------------------------------------------


@dataclass(slots=True)
class _Sources:
    """Tasks by source, over all ranges: how many, and their lowest and highest id. One entry a batch, not a task."""

    counts: Counter[Source] = field(default_factory=Counter)
    lowest: dict[Source, int] = field(default_factory=dict)
    highest: dict[Source, int] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Take in a range of rows of `verify_keys`, which are in the order of their ids."""
        sources, ids = [*map(itemgetter(5, 6), rows)], [*map(itemgetter(0), rows)]
        self.counts.update(sources)
        self.highest.update(zip(sources, ids, strict=True))
        for source, task in dict(zip(reversed(sources), reversed(ids), strict=True)).items():
            self.lowest.setdefault(source, task)


def prove_tasks(evidence: Evidence) -> None:
    """I3, I4, I6 and I7 of every task, range by range."""
    db, job = evidence.db, evidence.job.id
    sources, keys = _Sources(), KeyProof(evidence)
    upto = 0
    for after, upto in ranges(evidence):
        rows = db.rows("verify_keys", job=job, after=after, upto=upto)
        sources.add(rows)
        keys.prove(rows)
        _prove_lone_texts(evidence, after, upto, len(rows))
        _prove_standing(evidence, after, upto, len(rows))
        evidence.report.checked["tasks"] += len(rows)
    if (booked := _bounds(evidence)[1]) > upto:
        _prove_lone_texts(evidence, upto, booked, 0)
    _prove_sources(evidence, sources)
    for shard in sorted(evidence.heads):
        _prove_claims(evidence, shard)
        _note_long_running(evidence, shard)


def ranges(evidence: Evidence) -> Iterator[tuple[int, int]]:
    """Ranges of ids (above, up to) that hold every task of the job; each has about as many rows, however far apart they are."""
    lowest, _, high = _bounds(evidence)
    after = lowest - 1
    while after < high:
        upto = (evidence.db.one("verify_chunk", after=after, most=evidence.chunk) or (None,))[0]
        if upto is None:
            return
        yield after, upto
        after = upto


def _bounds(evidence: Evidence) -> tuple[int, int, int]:
    """Lowest id of a task or of the books, highest id of the books, highest id of a task."""
    low, booked, lowest, high = evidence.db.one("verify_bounds", job=evidence.job.id) or (None, 0, None, 0)
    return min((start for start in (low, lowest) if start is not None), default=1), booked, high


def prove_touched(evidence: Evidence, shard: int, after: int, upto: int, *, thorough: bool = True) -> None:
    """The same of the tasks that some batches discovered or whose tries they ended, and of those that run now."""
    db, job = evidence.db, evidence.job.id
    where = {"job": job, "shard": shard, "after": after, "upto": upto}
    for n, kind, discovered, deltas, first, last, found in db.rows("verify_discovered", **where):
        _hold_discovered(evidence, (shard, n), kind, discovered, deltas, found, (first, last))
    odd = {row[0] for row in db.rows("running_tasks", job=job, shard=shard)}
    if thorough:
        keys = KeyProof(evidence)
        for low, high in pieces(after, upto):
            rows = db.rows("verify_new_keys", **where | {"after": low, "upto": high})
            keys.prove(rows)
            evidence.report.checked["tasks"] += len(rows)
        odd |= {row[0] for row in db.rows("verify_odd_tried", **where)}
    for task in sorted(odd):
        _prove_histories(evidence, task, task)
    _note_long_running(evidence, shard)


# -- I3: sources --------------------------------------------------------------------------------


def _prove_sources(evidence: Evidence, sources: _Sources) -> None:
    """Each batch discovered as many tasks as name it, within the ids that it noted; every other source is no batch."""
    db, job, report = evidence.db, evidence.job.id, evidence.report
    for shard, head in sorted(evidence.heads.items()):
        after = 0
        while rows := db.rows("verify_discoveries", job=job, shard=shard, after=after, upto=head.watermark, most=BATCHES):
            for n, kind, discovered, deltas, low, high in rows:
                source = (shard, n)
                ids = (sources.lowest[source], sources.highest[source]) if source in sources.counts else (low, high)
                _hold_discovered(evidence, source, kind, discovered, deltas, sources.counts.pop(source, 0), (low, high), ids)
            after = rows[-1][0]
    watermarks = watermarks_now(evidence)
    for (shard, n), found in sorted(sources.counts.items()):
        upto = watermarks.get(shard, 0)
        if shard in evidence.heads and evidence.heads[shard].watermark < n <= upto:
            continue  # discovered since the vector was read
        if shard not in watermarks and 0 <= shard < evidence.job.shards:
            continue  # the shard's row is missing: that has been said
        first = sources.lowest[shard, n]
        why = "which discovered nothing" if 0 < n <= upto else "which is above the watermark, or none"
        message = f"{several(found, 'task')} named batch {n} of shard {shard} as the source, {why}; the first is {first}"
        report.add("source", message, shard=shard, n=n, task=first)


def _hold_discovered(
    evidence: Evidence, source: Source, kind: str, discovered: int, deltas: str, found: int, noted: tuple[int, int],
    ids: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """The number that a batch noted against the number of tasks that name it, less those that a repair found gone."""
    shard, n = source
    if kind == Kind.REPAIR:
        discovered += gone_of(deltas)
    if found < discovered:
        discovered -= corrected(evidence.db, evidence.job.id, source)
    here = f"batch {n} of shard {shard}"
    if found != discovered:
        fault, verb = ("missing", "are there") if found < discovered else ("forged", "name it")
        evidence.report.add(fault, f"{here} discovered {several(discovered, 'task')}, {found} {verb}", shard=shard, n=n)
    elif ids is not None and found and not (noted[0] <= ids[0] and ids[1] <= noted[1]):
        message = f"{here} noted ids {noted[0]} to {noted[1]}, its tasks have {ids[0]} to {ids[1]}"
        evidence.report.add("range", message, shard=shard, n=n)


def gone_of(deltas: str) -> int:
    """How many tasks a repair's batch noted as gone: it counts them off its own discoveries."""
    return sum(counts[3] for name, counts in json.loads(deltas).items() if name.startswith(GONE))


def corrected(db: Database, job: int, source: Source) -> int:
    """How many tasks of a batch later repairs noted as gone."""
    name = f"{GONE}/{source[0]}/{source[1]}"
    return sum(json.loads(deltas).get(name, (0,) * 5)[3] for (deltas,) in db.rows("verify_corrections", job=job, shard=source[0]))


# -- I4: keys -----------------------------------------------------------------------------------


class _Places(dict[str, tuple[int, int]]):
    """Authority -> (shard, host), remembered: a page's host is that of thousands of others."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self._shards = shards

    def __missing__(self, authority: str) -> tuple[int, int]:
        if len(self) >= HOSTS_MAX:
            self.clear()
        host = host_id(authority)
        place = self[authority] = (host % self._shards, host)  # what url.shard_of says, without a second digest
        return place


class KeyProof:
    """Holds keys, shards and hosts against texts."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._places = _Places(evidence.job.shards)

    def prove(self, rows: Sequence[Row]) -> None:
        """I4 of rows of `verify_keys`, and that each rank is its priority and depth."""
        places = self._places
        for row in rows:
            text = row[4]
            if text is None or row[3] != digest16(text) or places[authority_of(text)] != (row[1], row[2]) or row[7]:
                self._explain(row)

    def _explain(self, row: Row) -> None:
        task, shard, host, key, text, source_shard, source_n, odd = row
        n = source_n if source_shard == shard else None
        faults = {}
        if text is None:
            faults["text"] = "it has no text"
        else:
            shown = repr(text[:200])
            if key != digest16(text):
                faults["key"] = f"{key.hex()} is not the key of {shown}"
            if (expected := self._places[authority_of(text)]) != (shard, host):
                faults["place"] = f"{shown} belongs into shard {expected[0]}, host {expected[1]}; found {shard}, {host}"
            if odd:
                faults["rank"] = "its rank does not follow from its priority and depth"
        for fault, why in faults.items():
            self._evidence.report.add(fault, f"task {task} of shard {shard}: {why}", shard=shard, n=n, task=task)


def _prove_lone_texts(evidence: Evidence, after: int, upto: int, tasks: int) -> None:
    """A text is there for a task. Counted first: a range is rarely shared by several jobs."""
    db = evidence.db
    count = (db.one("verify_count_texts", after=after, upto=upto) or (0,))[0]
    if count == tasks:
        return
    for (task,) in db.rows("verify_lone_texts", after=after, upto=upto, most=TEXTS_MAX):
        evidence.report.add("lone_text", f"text {task} has no task", task=task)


# -- I6, I7: where tasks stand ------------------------------------------------------------------


def _prove_standing(evidence: Evidence, after: int, upto: int, tasks: int) -> None:
    """Recount the histories of the tasks that are not at one look where they must be."""
    odd = [row[0] for row in evidence.db.rows("verify_odd_tasks", job=evidence.job.id, after=after, upto=upto)]
    if len(odd) > ODD_SHARE * tasks:
        _prove_histories(evidence, odd[0], odd[-1])
    else:
        for task in odd:
            _prove_histories(evidence, task, task)


def _prove_histories(evidence: Evidence, low: int, high: int) -> None:
    for history in histories(evidence.db.rows("verify_histories", job=evidence.job.id, low=low, high=high)):
        _prove_history(evidence, history)


def _prove_history(evidence: Evidence, history: History) -> None:
    """I6 and I7 of one task."""
    task, n = history.task, history.tries[-1].n if history.tries else None
    faults = {}
    if why := unlawful(history):
        faults["history"] = why
    else:
        account = recount(history)
        faults["task"] = "; ".join(misplaced(history, account))
        faults["cap"] = over_cap(account, evidence.limits) if evidence.limits else ""
        if why := not_running(history, account):
            faults["running"], n = why, task.claim_n or n
    for fault, why in faults.items():
        if why:
            evidence.report.add(fault, f"task {task.id} of shard {task.shard}: {why}", shard=task.shard, n=n, task=task.id)
    if is_due_late(history):
        evidence.report.notes.append(f"task {task.id} of shard {task.shard} is due more than 30 days after its last try")


def _prove_claims(evidence: Evidence, shard: int) -> None:
    """I7: over the shard, each claim ended in one attempt row, or is open."""
    row = evidence.db.one("verify_claims", job=evidence.job.id, shard=shard)
    if row is None:
        return
    _, claimed, ended, running = row
    if claimed != ended + running:
        message = f"shard {shard} claimed {claimed} times; {ended} tries ended and {running} run"
        evidence.report.add("claims", message, shard=shard)


def _note_long_running(evidence: Evidence, shard: int) -> None:
    """I6: a try older than the longest time-out plus a lease is reported, not failed."""
    limits = evidence.limits
    age_s = 600.0 if limits is None else limits.total_timeout_s * limits.hops_max + limits.handler_timeout_s + limits.lease_s
    where = {"job": evidence.job.id, "shard": shard, "age_ms": round(age_s * 1000)}
    count, oldest_ms = evidence.db.one("verify_long_running", **where) or (0, 0)
    if count:
        since = f"claimed more than {age_s:.0f} s ago, the first {oldest_ms / 1000:.0f} s"
        evidence.report.notes.append(f"shard {shard}: {several(count, 'task')} of a living worker, {since}")
