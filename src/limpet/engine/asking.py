"""What tries ask of the database while they run, each on the thread that reads. Nothing here writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from limpet.batch import Claim
from limpet.engine.onethread import OneThread
from limpet.store import standing
from limpet.store.jobs import Job
from limpet.store.opening import Store


@dataclass(frozen=True, slots=True)
class Asking:
    """Answers about one job."""

    reading: OneThread
    reader: Store
    job: Job

    def moved_among(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys whose tasks have moved; runs on the reading thread, for several tries at once."""
        return standing.moved_among(self.reader.db, self.job.id, keys)

    async def robots_of(self, origin: str, shard: int) -> tuple[str, int, bytes, float] | None:
        """What is kept of a robots.txt: outcome, status, rules, seconds that it may be used yet."""
        row = await self.reading.call(self.reader.db.one, "robots_of_origin", job=self.job.id, shard=shard, origin=origin)
        return None if row is None else (row[0], row[1], bytes(row[2]), row[3] / 1000)

    async def has_worked(self, shard: int, host: int) -> bool:
        """Whether a task of this host is done."""
        return await self.reading.call(self.reader.db.one, "host_has_worked", job=self.job.id, shard=shard, host=host) is not None

    async def marks(self) -> dict[str, str]:
        """The high-water marks that the sweeps before this job reached, pinned to when the job was made."""
        rows = await self.reading.call(
            self.reader.db.rows, "marks_before", spider=self.job.spider, at_ms=self.job.created_ms, job=self.job.id
        )
        return {str(name): str(value) for name, value in rows}

    async def register(self, name: str) -> tuple[int, str | None]:
        """A register as it is now: version and JSON; (0, None) before its first write."""
        row = await self.reading.call(self.reader.db.one, "read_register", spider=self.job.spider, name=name)
        return (int(row[0]), str(row[1])) if row else (0, None)

    async def kept(self, claim: Claim, request: bytes) -> tuple[int, str, str, bytes] | None:
        """An answer that was paid for in an earlier try: status, URL, headers as JSON, compressed body."""
        row = await self.reading.call(self.reader.db.one, "read_kept", job=self.job.id, shard=claim.shard, task=claim.id, request=request)
        return (int(row[0]), str(row[1]), str(row[2]), bytes(row[3])) if row else None
