"""The hosts of a job: what waits of each, its pace, and the pauses that people ask for.

A person's pause (`held`) lies beside the pace in the host's row, and no pace changes it. It is asked for by a request row
and applied by the owner of the host's shard, under its fence; so it holds for whoever has the shard, on whatever machine,
until it is taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from limpet.errors import UrlRejected, UsageError
from limpet.store import requests
from limpet.store.dialect import Database, Row
from limpet.store.jobs import Job
from limpet.store.opening import Store
from limpet.url import authority_of, canonicalise, host_id, shard_of

#: Paces that are looked at: the longest waits.
PACES_MAX = 1000

#: Fields that are counted from tasks, as the statements have them.
COUNTS = ("open", "ready", "running", "later")


@dataclass(frozen=True, slots=True)
class HostState:
    """One host: its open tasks, and when it may be asked next."""

    host: int
    authority: str
    shard: int
    open: int = 0
    ready: int = 0  # nothing but the pace, or a pause, keeps them from being claimed
    running: int = 0
    later: int = 0  # retries that are not due
    delay_ms: int | None = None  # None: not met yet
    next_ms: int = 0
    pause: str = ""  # why it waits for longer than its delay
    errors: int = 0  # failures in a row
    held: str = ""  # why a person has paused it


def busiest(db: Database, job: Job, *, most: int) -> list[HostState]:
    """The hosts with the most open tasks, and beside them those that a person has paused or that wait; held ones first."""
    found = {row[0]: _with_pace(db, job, row) for row in db.rows("view_open_hosts", job=job.id, most=most)}
    for host, *pace in db.rows("view_paces", job=job.id, most=PACES_MAX):
        if host not in found and (pace[5] or pace[3]):
            found[host] = _of(job, (host, *pace), (0, 0, 0, 0))
    return sorted(found.values(), key=lambda h: (not h.held, -h.open, h.authority))


def one(db: Database, job: Job, authority: str) -> HostState:
    """One host, met or not."""
    host, shard = host_id(authority), shard_of(authority, job.shards)
    tasks = db.one("view_open_of_host", job=job.id, shard=shard, host=host)
    if tasks is not None:
        return _with_pace(db, job, tasks)
    pace = db.one("view_pace", job=job.id, shard=shard, host=host)
    return _of(job, pace, (0, 0, 0, 0)) if pace else HostState(host, authority, shard)


def _with_pace(db: Database, job: Job, tasks: Row) -> HostState:
    host, some_task, *counts = (int(value) for value in tasks)
    pace = db.one("view_pace", job=job.id, shard=host % job.shards, host=host)
    if pace is not None:
        return _of(job, pace, counts)
    authority = authority_of(db.rows("view_text", task=some_task)[0][0])
    return replace(HostState(host, authority, host % job.shards), **_named(counts))


def _of(job: Job, pace: Row, counts: Sequence[int]) -> HostState:
    host, authority, delay_ms, next_ms, pause, errors, held = pace
    known = HostState(host, authority, host % job.shards, delay_ms=delay_ms, next_ms=next_ms, pause=pause, errors=errors, held=held)
    return replace(known, **_named(counts))


def _named(counts: Sequence[int]) -> dict[str, Any]:
    return dict(zip(COUNTS, counts, strict=True))


def authority_meant(text: str, job: Job) -> str:
    """The authority that a host or URL of a person's means, as the job's keys spell it; UsageError for what is none."""
    url = text if "://" in text else f"http://{text}/"
    try:
        return canonicalise(url, job.profile).authority
    except UrlRejected as error:
        raise UsageError(f"{text!r} is no host: expected example.com, example.com:8080 or a URL ({error})") from error


def ask_hold(store: Store, authority: str, reason: str, who: str) -> requests.Asked:
    """Ask for the pause of a host, or, with an empty reason, for its end."""
    assert store.job is not None, "hosts belong to a job"
    what = "pause_host" if reason else "resume_host"
    argument = {"host": host_id(authority), "authority": authority, "reason": reason}
    return requests.ask(store, what, argument, shards=[shard_of(authority, store.job.shards)], who=who)
