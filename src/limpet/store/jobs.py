"""Jobs, their shards and their sources: made in one transaction, joined by whoever comes after.

A job row without its starts would be a job that is complete with nothing collected, so the job, its
shards and its first source are one transaction, and the loser of a race loads what the winner made.
A worker that cannot compute exactly the job's keys refuses it, and a sealed job takes no further source.
Invariants: I1, I4.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from limpet.batch import canonical_json
from limpet.credentials import hidden_values
from limpet.errors import UsageError
from limpet.failpoint import failpoint
from limpet.settings import SHARDS_MAX
from limpet.store.dialect import Database
from limpet.store.sealing import refuse_sealed, sealed_of
from limpet.store.standing import standing
from limpet.url import KEY_VERSION, OPTIONS, KeyProfile

log = logging.getLogger("limpet.sources")

#: Version of the functions that give a shard and a host from a canonical text.
HASH_VERSION = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a spider, as its row says it."""

    id: int
    spider: str
    slot: str
    shards: int
    key_version: int
    hash_version: int
    key_profile: str
    key_digest: bytes
    created_ms: int
    halted: str
    paused: str
    paused_code: bytes
    verified: bytes

    @property
    def profile(self) -> KeyProfile:
        """The rules by which this job tells one URL from another."""
        return KeyProfile.from_json(self.key_profile)

    @property
    def name(self) -> str:
        """For people: the spider, and the slot where there is one."""
        return f"{self.spider}@{self.slot}" if self.slot else self.spider


@dataclass(frozen=True, slots=True)
class Source:
    """A list of starts: inline, a start generator, or a file on one machine."""

    kind: str  # list | given | generator | file | csv
    digest: bytes
    payload: str = ""  # a JSON array of the starts; of a generator and a csv, an object
    place: str = ""  # of a file: its path
    host: str = ""  # of a file: the machine that has it

    def told(self) -> str:
        """What it gives, for people."""
        if self.kind == "generator":
            return f"what the start {json.loads(self.payload)['generator']} gives with other code or parameters"
        return f"what {self.place} gives" if self.place else "another list of starts"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A source as the database has it."""

    source: int
    kind: str
    digest: bytes
    place: str
    host: str
    payload: str
    position: int
    closed: bool

    def starts(self) -> list[str]:
        """The starts that the row itself holds; none of a file."""
        return [str(start) for start in json.loads(self.payload)] if self.payload and self.kind in ("list", "given") else []


def find(db: Database, spider: str, slot: str) -> Job | None:
    """The job (spider, slot), or None."""
    row = db.one("find_job", spider=spider, slot=slot)
    return _job(row) if row else None


def read(db: Database, job: int) -> Job:
    """The job's row as it is now."""
    row = db.one("read_job", job=job)
    if row is None:
        raise UsageError(f"no job {job} in {db.place}")
    return _job(row)


def every(db: Database) -> list[Job]:
    """Every job of the database, oldest first."""
    return [_job(row) for row in db.rows("list_jobs")]


def join(db: Database, *, spider: str, slot: str, profile: KeyProfile, shards: int, sources: list[Source]) -> Job:
    """Make the job with its shards and sources, or load it and add the sources that are new; all in one transaction.

    Raises UsageError where an existing job has other rules for keys than this release or spider, or is sealed and a source is new.
    """
    if not 1 <= shards <= SHARDS_MAX:
        raise UsageError(f"{shards} shards: expected 1 to {SHARDS_MAX}")
    try:
        db.begin()
        failpoint("job_begin")
        _put_job(db, spider, slot, profile, shards)
        job = _found(db, spider, slot)
        if not db.rows("shards_of_job", job=job.id):  # made here: whoever loses the race sees the winner's shards
            for shard in range(shards):
                db.run("put_shard", job=job.id, shard=shard)
        else:
            refuse_other_keys(job, profile)
        failpoint("job_rows")
        _put_sources(db, job, sources)
        db.commit()
        failpoint("job_commit")
    except BaseException:
        db.rollback()
        raise
    return job


def _put_job(db: Database, spider: str, slot: str, profile: KeyProfile, shards: int) -> None:
    if not find(db, spider, slot):
        db.run(
            "put_job", spider=spider, slot=slot, shards=shards, key_version=profile.version, hash_version=HASH_VERSION,
            key_profile=profile.to_json(), key_digest=profile.digest(),
        )  # fmt: skip


def _found(db: Database, spider: str, slot: str) -> Job:
    job = find(db, spider, slot)
    assert job is not None, "a job that was just made is there"
    return job


def _put_sources(db: Database, job: Job, given: Sequence[Source]) -> None:
    """Put in what is new, bring what is known up to date, and have a start generator asked again where no task of anybody's is there."""
    known = {(row.kind, row.digest) for row in sources(db, job.id)}
    new = [source for source in given if (source.kind, source.digest) not in known]
    if new:  # `gc` locks every shard to seal a job, and finds the open source, or this finds the seal
        db.rows("lock_shard", job=job.id, shard=0)
        refuse_sealed(db, job, so=f"{new[0].told()} cannot be added to it")
    elif sealed_of(db, job.id) is not None:
        return
    is_nothing = standing(db, job.id).is_nothing
    for source in given:
        _put_source(db, job, source)
        if source.kind == "generator" and is_nothing:
            db.run("ask_generator_again", job=job.id, digest=source.digest)


def _put_source(db: Database, job: Job, source: Source) -> None:
    payload = source.payload if source.kind != "generator" else _without_credentials(source.payload)
    db.run("put_source", job=job.id, kind=source.kind, digest=source.digest, place=source.place, host=source.host, payload=payload)
    if source.place:  # the same file under another name, or brought to this machine
        db.run("relocate_source", job=job.id, kind=source.kind, digest=source.digest, place=source.place, host=source.host)
        replaced = db.run(
            "drop_replaced_sources", job=job.id, kind=source.kind, digest=source.digest, place=source.place, host=source.host,
            payload=payload,
        )  # fmt: skip
        if replaced:
            log.warning("%s: this file replaces what it was before, and what was not yet read of that is left out", source.place)


def _without_credentials(payload: str) -> str:
    """What the row of a start generator says of its parameters, for people. Each run has its own, and whether they are the same is
    told by the source's digest, which covers them as they are.
    """
    said = json.loads(payload)
    if "params" in said:
        said["params"] = hidden_values(said["params"])
    return canonical_json(said)


def refuse_other_keys(job: Job, profile: KeyProfile) -> None:
    """UsageError where this process would compute other keys or shards than the job's."""
    if job.hash_version != HASH_VERSION or job.key_version > KEY_VERSION:
        raise UsageError(
            f"job {job.name} has keys of version {job.key_version} and shards of version {job.hash_version}; "
            f"this release knows up to {KEY_VERSION} and {HASH_VERSION}: upgrade Limpet to go on with it"
        )
    if profile.digest() != job.key_digest:
        raise UsageError(
            f"job {job.name} tells URLs apart by other rules than this spider: {_differing(job.profile, profile)}. "
            "Put the spider's key options back, or start a new slot with --slot"
        )


def _differing(theirs: KeyProfile, ours: KeyProfile) -> str:
    """What a job's profile and ours do not have in common, by name."""
    switch = {True: "on", False: "off"}
    options = [(option, getattr(theirs, option), getattr(ours, option)) for option in OPTIONS]
    pieces = [f"{option} is {switch[had]} in the job and {switch[has]} here" for option, had, has in options if had != has]
    had, has = ({rule.host: rule for rule in profile.rules} for profile in (theirs, ours))
    for host in sorted(had.keys() | has.keys()):
        if host not in has or host not in had:
            pieces.append(f"the site rule for {host} is {'only in the job' if host in had else 'not in the job'}")
        elif had[host] != has[host]:
            pieces.append(f"the site rule for {host} says something else")
    if not pieces and theirs.name != ours.name:
        pieces.append(f"the profile is {theirs.name} in the job and {ours.name} here")
    return ", ".join(pieces) or "the order of the site rules, or their version"


def sources(db: Database, job: int) -> list[SourceRow]:
    """Every source of a job."""
    return [SourceRow(s, kind, bytes(digest), place, host, payload, position, bool(closed))
            for s, kind, digest, place, host, payload, position, closed in db.rows("sources", job=job)]  # fmt: skip


def _job(row: tuple[object, ...]) -> Job:
    values = [bytes(value) if isinstance(value, bytes | memoryview) else value for value in row]
    return Job(*values)  # type: ignore[arg-type]
