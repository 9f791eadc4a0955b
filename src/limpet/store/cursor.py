"""How far an export has read: a vector of watermarks, as one opaque text, by which the next export finds what is new.

Every record names the batch that wrote it: job, shard, number. An export reads the watermarks in the same snapshot
as its rows; whatever a later export finds stamped above them is new. A record that stands since another was taken
away keeps its own, older stamp; the batch that did it left a row in `heir`, which is looked at as well.

The text holds a version, a checksum, what was exported, and of which database, so that no other one is taken for it.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from limpet.batch import digest
from limpet.errors import UsageError
from limpet.store import jobs
from limpet.store.dialect import Database
from limpet.store.export import Choice

#: How the text begins; another number is another form.
PREFIX = "limpet1-"
#: Bytes of a digest in a cursor: it guards against mistakes, and not against anybody.
DIGEST_BYTES = 8
CHECKSUM_BYTES = 4
#: Bytes that a cursor may unpack to: ten years of days, with 64 shards each, are half a megabyte.
BYTES_MAX = 16 * 2**20
#: Above every number of a batch: nothing of such a job is new.
NOTHING_NEW = 2**62

Watermarks = Mapping[int, Sequence[int]]  # job -> watermark of each shard


@dataclass(frozen=True, slots=True)
class Cursor:
    """What an export has read."""

    what: bytes  # digest of the choice of rows
    where: bytes  # digest of the jobs, which no other database has
    watermarks: Watermarks

    def __str__(self) -> str:
        """The text that `parse` reads."""
        packed = bytearray(self.what + self.where)
        _put(packed, len(self.watermarks))
        before = 0
        for job, its in sorted(self.watermarks.items()):
            for number in (job - before, len(its), *its):
                _put(packed, number)
            before = job
        packed += digest(bytes(packed))[:CHECKSUM_BYTES]
        return PREFIX + urlsafe_b64encode(zlib.compress(bytes(packed), 9)).decode().rstrip("=")


def parse(text: str) -> Cursor:
    """The cursor that an export printed; UsageError for any other text."""
    text = text.strip()
    if text.startswith("limpet") and not text.startswith(PREFIX) and text[6:7].isdigit():
        raise UsageError(f"the cursor {_cut(text)} has another form than this release's, {PREFIX}...: export the whole once more")
    garbled = UsageError(f"{_cut(text)} is no cursor of an export, or was changed on its way: expected {PREFIX}..., as one printed it")
    body = text.removeprefix(PREFIX)
    if body == text or not text.isascii():
        raise garbled
    try:
        unpacking = zlib.decompressobj()
        packed = unpacking.decompress(urlsafe_b64decode(body + "=" * (-len(body) % 4)), BYTES_MAX)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise garbled from error
    content, checksum = packed[:-CHECKSUM_BYTES], packed[-CHECKSUM_BYTES:]
    if not unpacking.eof or unpacking.unused_data or len(content) < 2 * DIGEST_BYTES or digest(content)[:CHECKSUM_BYTES] != checksum:
        raise garbled
    numbers = _numbers(content[2 * DIGEST_BYTES :])
    watermarks, job = {}, 0
    for _ in range(next(numbers)):
        job += next(numbers)
        watermarks[job] = [next(numbers) for _ in range(next(numbers))]
    return Cursor(content[:DIGEST_BYTES], content[DIGEST_BYTES : 2 * DIGEST_BYTES], watermarks)


def take(db: Database, choice: Choice) -> Cursor:
    """How far an export of these rows reads; in the snapshot in which it reads them."""
    watermarks: dict[int, list[int]] = {}
    only = choice.values[0] if choice.of_one_job else None
    for job, _shard, watermark in db.rows("cursor_watermarks", spider=choice.spider):
        if only in (None, job):
            watermarks.setdefault(job, []).append(watermark)
    return Cursor(_what(choice), _where(db, watermarks), watermarks)


def newer(db: Database, choice: Choice, after: Cursor, now: Cursor) -> Choice:
    """Those of the rows that were written after a former export, in the snapshot in which `now` was taken.

    Raises UsageError for the cursor of other rows or of another database, and where the database went back in time.
    """
    if after.what != now.what:
        raise UsageError("the cursor is of other rows: give the dataset, --slot and --all-slots as they were when it was printed")
    known = {job: its for job, its in now.watermarks.items() if job in after.watermarks}
    if after.where != _where(db, after.watermarks) or any(len(its) != len(after.watermarks[job]) for job, its in known.items()):
        raise UsageError(f"the cursor is of another database than {db.place}, or one of its jobs is gone: export the whole once more")
    if any(had > has for job, its in known.items() for had, has in zip(after.watermarks[job], its, strict=True)):
        raise UsageError(f"{db.place} is older than the cursor: it was put back to a former state, so export the whole once more")
    changed = {job for job, its in now.watermarks.items() if list(its) != list(after.watermarks.get(job, ()))}
    if not changed:
        return replace(choice, where="1 = 0", values=())
    written = f"d._n > {_last_read(after, changed, 'd._job', 'd._shard')}"
    promoted = (
        "EXISTS (SELECT 1 FROM heir AS h WHERE h.dataset = ? AND h.scope = d._scope AND h.key = d._key "
        f"AND h.n > {_last_read(after, changed, 'h.job', 'h.shard')})"
    )
    return replace(choice, where=f"({choice.where}) AND ({written} OR {promoted})", values=(*choice.values, choice.table.name))


def _last_read(after: Cursor, changed: set[int], job: str, shard: str) -> str:
    """SQL for the last batch that was read of a job's shard; 0 of a job that is new since."""
    cases = []
    for number, its in sorted(after.watermarks.items()):
        of_shard = f"CASE {shard} {' '.join(f'WHEN {each} THEN {n}' for each, n in enumerate(its))} ELSE 0 END"
        cases.append(f"WHEN {number} THEN {of_shard if number in changed and its else NOTHING_NEW}")
    return f"CASE {job} {' '.join(cases)} ELSE 0 END" if cases else "0"


def _what(choice: Choice) -> bytes:
    return digest(choice.table.name.encode(), choice.where.encode(), repr((choice.values, choice.with_slot)).encode())[:DIGEST_BYTES]


def _where(db: Database, watermarks: Watermarks) -> bytes:
    """A digest of the jobs, with the millisecond in which each was made."""
    named = [(job.id, job.spider, job.slot, job.created_ms) for job in jobs.every(db) if job.id in watermarks]
    return digest(repr(sorted(named)).encode())[:DIGEST_BYTES]


def _put(packed: bytearray, number: int) -> None:
    """Append a whole number, seven bits a byte, the lowest first."""
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def _numbers(packed: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in packed:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
