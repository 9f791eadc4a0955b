"""Proof of the books: batches without a gap, each sealing the one before, and the attempt rows that they counted.

What is read here never changes, so ranges of batches are read piece by piece, beside living workers,
and no snapshot is held. Only a shard's row changes; it is read together with its last batch, in the one
statement that also gives the vector of watermarks. Invariants: I1, I2, and of I3 the stamps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter

from limpet.batch import DIGEST_BYTES, Kind
from limpet.store import ledger
from limpet.store.dialect import Database, Row
from limpet.store.proofs import Evidence, Head, Report, several
from limpet.task import Outcome

#: Ledger rows read at a time.
BATCHES = 500

#: Batches whose tasks, or whose records, are read at a time: 20 of 500 pages, the largest, are 10,000 rows.
PIECE = 20

_OUTCOMES = tuple(map(str, Outcome))
_COLUMNS = (*ledger.COLUMNS, "seal")
_REASONED = frozenset({str(Outcome.SKIPPED), str(Outcome.FAILED), str(Outcome.DEAD)})
_SIZE = DIGEST_BYTES.to_bytes(8, "big")

#: Heads of a try's digest that are remembered: (try, outcome, reason) repeat from row to row.
_HEADS_MAX = 10_000

Books = dict[str, object]


# -- the vector of watermarks -------------------------------------------------------------------


def read_heads(evidence: Evidence) -> dict[int, Head]:
    """The vector that is proved, and each shard's row held against its last batch, in one statement."""
    job, report = evidence.job, evidence.report
    heads: dict[int, Head] = {}
    for row in evidence.db.rows("verify_heads", job=job.id):
        shard, owner, epoch, watermark, verified, n, its_owner, its_epoch, its_kind, last, first = row
        heads[shard] = Head(epoch, min(watermark, last), verified)
        if last < watermark:
            message = f"shard {shard} has watermark {watermark}, its ledger ends with batch {last}"
            report.add("tail", message, shard=shard, n=last + 1)
        elif last > watermark:
            message = f"shard {shard} has watermark {watermark}, its ledger goes on to batch {last}"
            report.add("shard", message, shard=shard, n=watermark + 1)
        if first < 1:
            report.add("tail", f"shard {shard} has a batch {first}: the first is 1", shard=shard, n=first)
        if not 0 <= verified <= watermark:
            report.add("shard", f"shard {shard} was proved up to batch {verified}, but has {watermark}", shard=shard)
        if n is None:
            found, expected = (owner, epoch), (None, 0)
            if watermark:
                continue
        else:
            found, expected = (owner, epoch), (None if its_kind == Kind.RELEASE else its_owner, its_epoch)
        if found != expected:
            left = f"owner {expected[0]}, epoch {expected[1]} as batch {watermark} left it"
            report.add("shard", f"shard {shard}: expected {left}, found {owner}, {epoch}", shard=shard, n=watermark)
    for shard in sorted(set(range(job.shards)) - set(heads)):
        report.add("shard", f"shard {shard} of the {job.shards} of job {job.id} has no row", shard=shard)
    return heads


# -- batches ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Last:
    """What the next ledger row must follow on."""

    n: int
    seal: bytes | None  # None: not known, since a row is missing
    epoch: int
    owner: str
    kind: str


def prove_books(evidence: Evidence, shard: int, after: int, upto: int, *, thorough: bool = True) -> None:
    """I1 and I2 of the batches after one and up to another; without `thorough` the digests of tries are left out."""
    db, job, report = evidence.db, evidence.job.id, evidence.report
    last = _last_before(db, job, shard, after)
    while after < upto:
        rows = [
            dict(zip(_COLUMNS, row, strict=True))
            for row in db.rows("verify_ledger", job=job, shard=shard, after=after, upto=upto, most=BATCHES)
        ]
        if not rows:
            _note_gap(report, shard, last.n + 1, upto)
            return
        for row in rows:
            last = _prove_row(report, row, last)
        for low, high, piece in _pieces(after, rows, evidence.chunk) if evidence.sealed is None else ():
            _prove_tries(evidence, shard, low, high, piece, thorough=thorough)
        report.checked["batches"] += len(rows)
        after = last.n
    if last.n < upto:
        _note_gap(report, shard, last.n + 1, upto)


def _last_before(db: Database, job: int, shard: int, after: int) -> _Last:
    if after < 1:
        return _Last(0, b"", 0, "", str(Kind.RELEASE))
    rows = db.rows("verify_ledger", job=job, shard=shard, after=after - 1, upto=after, most=1)
    if not rows:
        return _Last(after, None, -1, "", "")
    row = dict(zip(_COLUMNS, rows[0], strict=True))
    return _Last(after, bytes(row["seal"]), row["epoch"], row["owner"], row["kind"])


def _prove_row(report: Report, row: Mapping[str, object], last: _Last) -> _Last:
    """I1 of one ledger row."""
    shard, n, epoch, owner, kind = (
        int(str(row["shard"])),
        int(str(row["n"])),
        int(str(row["epoch"])),
        str(row["owner"]),
        str(row["kind"]),
    )
    here = f"batch {n} of shard {shard}"
    if n != last.n + 1:
        _note_gap(report, shard, last.n + 1, n - 1)
        last = _Last(n - 1, None, -1, "", "")
    stored = _bytes(row["seal"])
    if ledger.seal(row) != stored:
        report.add("seal", f"{here}: its ledger row is not the one that was sealed", shard=shard, n=n)
    if last.seal is not None:
        if _bytes(row["previous"]) != last.seal:
            report.add("chain", f"{here} does not follow on the ledger row before it", shard=shard, n=n)
        if wrong := _wrong_owner(epoch, owner, kind, last):
            report.add("epoch", f"{here}: {wrong}", shard=shard, n=n)
    if len(_bytes(row["batch_id"])) != DIGEST_BYTES:
        report.add("batch_id", f"{here} has no batch id", shard=shard, n=n)
    return _Last(n, stored, epoch, owner, kind)


def _wrong_owner(epoch: int, owner: str, kind: str, last: _Last) -> str:
    """Only a take-over changes owner and epoch, and after a release nothing else can follow."""
    if kind == Kind.TAKEOVER:
        return "" if epoch == last.epoch + 1 else f"a take-over raises the epoch to {last.epoch + 1}, found {epoch}"
    if last.kind == Kind.RELEASE:
        return f"the shard had been given up, expected a take-over, found {kind}"
    if (epoch, owner) != (last.epoch, last.owner):
        return f"expected epoch {last.epoch} of {last.owner}, found {epoch} of {owner}"
    return ""


def _note_gap(report: Report, shard: int, first: int, last: int) -> None:
    which = f"batch {first} of shard {shard} is" if first == last else f"batches {first} to {last} of shard {shard} are"
    report.add("gap", f"{which} missing from the ledger", shard=shard, n=first)


def pieces(after: int, upto: int) -> Iterator[tuple[int, int]]:
    """Ranges of batches (above, up to) that are read at once."""
    return ((low, min(low + PIECE, upto)) for low in range(after, upto, PIECE))


def _pieces(after: int, rows: Sequence[Books], tries_max: int) -> Iterator[tuple[int, int, list[Books]]]:
    """Ranges of batches whose attempt rows are read at once: (above, up to, ledger rows)."""
    piece: list[Books] = []
    tries = 0
    for row in rows:
        piece.append(row)
        tries += max(0, sum(int(str(row[outcome])) for outcome in _OUTCOMES))
        if tries >= tries_max:
            upto = int(str(row["n"]))
            yield after, upto, piece
            after, piece, tries = upto, [], 0
    if piece:
        yield after, int(str(piece[-1]["n"])), piece


# -- tries --------------------------------------------------------------------------------------


def _prove_tries(evidence: Evidence, shard: int, low: int, high: int, books: Sequence[Books], *, thorough: bool) -> None:
    """I2 of some batches: the counts of their attempt and revisit rows, and the digest over the tries."""
    where = {"job": evidence.job.id, "shard": shard, "after": low, "upto": high}
    db, report = evidence.db, evidence.report
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    digests: dict[int, bytes] = {}
    if thorough:
        for n, group in groupby(_sorted_tries(evidence, shard, db.rows("verify_attempts", **where)), key=itemgetter(0)):
            tries = [*group]
            counts[n].update(map(itemgetter(3), tries))
            digests[n] = tries_digest(tries)
            _prove_reasons(report, shard, n, tries)
    else:
        for n, outcome, count in db.rows("verify_attempt_counts", **where):
            counts[n][outcome] = count
    revisits: dict[int, int] = dict(db.rows("verify_revisit_counts", **where))
    for row in books:
        n = int(str(row["n"]))
        its, digest = counts.pop(n, Counter()), digests.get(n, _NO_TRIES)
        _prove_counts(report, shard, n, row, its)
        if thorough and digest != _bytes(row["digest"]):
            report.add("digest", f"batch {n} of shard {shard}: its attempt rows are not those that it digested", shard=shard, n=n)
        if revisits.get(n, 0) != row["revisited"]:
            report.add(
                "revisits",
                f"batch {n} of shard {shard} put {row['revisited']} tasks back, {revisits.get(n, 0)} revisit rows say so",
                shard=shard,
                n=n,
            )
        report.checked["tries"] += sum(its.values())


def _prove_counts(report: Report, shard: int, n: int, row: Mapping[str, object], found: Mapping[str, int]) -> None:
    wrong = [
        f"{outcome}: counted {row[outcome]}, found {found.get(outcome, 0)}"
        for outcome in _OUTCOMES
        if row[outcome] != found.get(outcome, 0)
    ]
    wrong += [f"{outcome!r}: no outcome, found {count}" for outcome, count in found.items() if outcome not in _OUTCOMES]
    if wrong:
        report.add("tries", f"batch {n} of shard {shard} has other attempt rows than it counted: {'; '.join(wrong)}", shard=shard, n=n)


def _prove_reasons(report: Report, shard: int, n: int, tries: Sequence[Row]) -> None:
    """I3: each skip, failure and death has its reason."""
    for _, _, _, outcome, reason, _, task in tries:
        if not reason and outcome in _REASONED:
            report.add(
                "reason",
                f"batch {n} of shard {shard}: task {task} ended as {outcome} without a reason",
                shard=shard,
                n=n,
                task=task,
            )


def _sorted_tries(evidence: Evidence, shard: int, rows: Iterable[Row]) -> list[Row]:
    """Attempt rows by batch, key and try: the order in which they were digested."""
    tries = [*rows]
    if any(row[1] is None for row in tries):
        for n, _, number, _, _, _, task in filter(lambda row: row[1] is None, tries):
            message = f"batch {n} of shard {shard}: try {number} is of task {task}, which the shard does not have"
            evidence.report.add("try", message, shard=shard, n=n, task=task)
        tries = [(row[0], row[1] or b"", *row[2:]) for row in tries]
    tries.sort()
    return tries


def tries_digest(rows: Iterable[Row]) -> bytes:
    """What `limpet.batch.tries_digest` says of (n, key, try, outcome, reason, offered, task), sorted; three times as fast."""
    pieces = []
    for _, key, number, outcome, reason, offered, _ in rows:
        head = _HEADS.get((number, outcome, reason)) or _head(number, outcome, reason)
        pieces.append(_SIZE)
        pieces.append(
            blake2b(
                b"".join((len(key).to_bytes(8, "big"), key, head, len(offered).to_bytes(8, "big"), offered)),
                digest_size=DIGEST_BYTES,
            ).digest()
        )
    return blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).digest()


def _head(number: int, outcome: str, reason: str) -> bytes:
    """The pieces between key and offer, as `limpet.batch.digest` takes them in."""
    if len(_HEADS) >= _HEADS_MAX:
        _HEADS.clear()
    pieces = (number.to_bytes(8, "big", signed=number < 0), outcome.encode(), reason.encode("utf-8", "surrogatepass"))
    head = _HEADS[number, outcome, reason] = b"".join(len(piece).to_bytes(8, "big") + piece for piece in pieces)
    return head


_HEADS: dict[tuple[int, str, str], bytes] = {}
_NO_TRIES = tries_digest(())


# -- stamps -------------------------------------------------------------------------------------


def prove_stamps(evidence: Evidence, shards: Iterable[int]) -> None:
    """I3: no attempt, revisit or ledger row is stamped above its shard's watermark, which is read after them."""
    db, job, report = evidence.db, evidence.job.id, evidence.report
    stamps = {shard: db.one("verify_stamps", job=job, shard=shard) or () for shard in shards}
    watermarks = watermarks_now(evidence)
    for shard, found in stamps.items():
        upto = watermarks.get(shard, 0)
        for name, low, high in zip(("attempt", "revisit"), found[::2], found[1::2], strict=False):
            if low is not None and low < 1:
                report.add("above", f"shard {shard} has {name} rows of batch {low}: the first batch is 1", shard=shard, n=low)
            if high is not None and high > upto:
                report.add("above", f"shard {shard} has {name} rows of batch {high}, its watermark is {upto}", shard=shard, n=high)


def prove_notes(evidence: Evidence) -> None:
    """I3 of what a later batch may write again: paces, robots, moves, the ends of requests."""
    db, job, report = evidence.db, evidence.job, evidence.report
    notes = db.rows("verify_notes", job=job.id)
    moved = db.rows("verify_moved", job=job.id, most=1000)
    watermarks = watermarks_now(evidence)
    for name, shard, low, high in notes:
        upto = watermarks.get(shard, high if 0 <= shard < job.shards else 0)
        if low < 1 or high > upto:
            message = f"shard {shard} has {name} rows of batches {low} to {high}, its batches are 1 to {upto}"
            report.add("note", message, shard=shard, n=high if high > upto else low)
    for shard, task, n in moved:
        report.add(
            "note",
            f"task {task} is said to have moved in batch {n} of shard {shard}, but did not end as skipped there",
            shard=shard,
            n=n,
            task=task,
        )


def watermarks_now(evidence: Evidence) -> dict[int, int]:
    """The vector of watermarks, read again."""
    return {shard: watermark for shard, _, watermark, _ in evidence.db.rows("watermarks", job=evidence.job.id)}


def prove_strays(evidence: Evidence) -> None:
    """Rows that belong to no shard or no job."""
    db, job, report = evidence.db, evidence.job, evidence.report
    for name, count in db.rows("verify_strays", job=job.id, shards=job.shards):
        if count:
            report.add(
                "orphan",
                f"{several(count, 'row')} of {name} in shards that job {job.id} does not have: it has 0 to {job.shards - 1}",
            )
    for place, name in enumerate(("shard", "task", "ledger", "attempt")):
        after = -(2**63)
        while (found := (db.one("verify_next_jobs", after=after) or (None,) * 4)[place]) is not None:
            if db.one("read_job", job=found) is None:
                report.add("orphan", f"rows of {name} belong to job {found}, which does not exist")
            after = found


def _bytes(value: object) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else b""
