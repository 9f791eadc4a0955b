"""What is in a database after a crash, told by reading it: digests of datasets, dead letters, the proof, lost acks."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from limpet.store import jobs
from limpet.store.dialect import Database, quote
from limpet.store.export import Tally, choose, chunks, every
from limpet.store.opening import connect
from limpet.store.verify import verify
from limpet.store.views import dead_letters, snapshot


@dataclass(frozen=True, slots=True)
class Books:
    """What a database holds. Two crawls of one site that both completed have equal `digests`, however they went."""

    digests: dict[str, str]  # dataset -> SHA-256
    rows: dict[str, int]
    dead: dict[str, int]  # reason -> dead letters
    states: dict[str, int]
    fault: str  # what a full proof finds first; "" where it passes


def books(path: Path) -> Books:
    """Read the only job of a database, and prove it; nothing is written."""
    db = connect(str(path), readonly=True)
    try:
        job = jobs.every(db)[0]
        dead = Counter(letter.reason for letter in dead_letters(db, job))
        digests, rows = {}, {}
        with snapshot(db) as moment:
            for dataset in every(moment):
                tally = Tally()
                for _ in chunks(moment, choose(moment, dataset.name), "jsonl", tally):
                    pass
                digests[dataset.name], rows[dataset.name] = tally.sha256, tally.rows
        states: dict[str, int] = dict(db.rows_text("SELECT state, COUNT(*) FROM task GROUP BY state"))
        return Books(digests, rows, dict(dead), states, fault_of(db))
    finally:
        db.close()


def fault_of(db: Database) -> str:
    """What a full proof of every job finds first; "" where all pass, or there is no job yet."""
    for job in jobs.every(db):
        verdict = verify(db, job, full=True)
        if not verdict.ok:
            return verdict.summary()
    return ""


def owners(path: Path) -> dict[int, list[str]]:
    """Shard -> its owners as its batches have them, one after the other: somebody who was fenced off never comes again."""
    db = connect(str(path), readonly=True)
    try:
        found: dict[int, list[str]] = {}
        for shard, owner in db.rows_text("SELECT shard, owner FROM ledger ORDER BY shard, n"):
            line = found.setdefault(shard, [])
            if line[-1:] != [owner]:
                line.append(owner)
        return found
    finally:
        db.close()


def workers(path: Path) -> list[tuple[str, int, bool]]:
    """Every worker there has been: its id, its process, and whether its lease is over."""
    db = connect(str(path), readonly=True)
    try:
        sql = "SELECT worker, pid, lease_until_ms < unixepoch('subsec') * 1000 FROM worker ORDER BY started_ms, rowid"
        return [(worker, pid, bool(over)) for worker, pid, over in db.rows_text(sql)]
    finally:
        db.close()


def open_tasks(path: Path) -> list[str]:
    """The states of the tasks that have not ended."""
    db = connect(str(path), readonly=True)
    try:
        return [str(state) for (state,) in db.rows_text("SELECT state FROM task WHERE lane IS NOT NULL")]
    finally:
        db.close()


# -- acks -----------------------------------------------------------------------------------


def acks_in(path: Path) -> list[str]:
    """The acks that a life noted: `DATASET KEY` of each record and `task KEY` of each task; its last line may be torn."""
    return path.read_text().splitlines() if path.exists() else []


def stored(db: Database) -> set[str]:
    """Everything that the database holds, in the words of acks."""
    found = {f"task {bytes(key).hex()}" for (key,) in db.rows_text("SELECT key FROM task WHERE state = 'done'")}
    for (name,) in db.rows_text("SELECT name FROM dataset"):
        found |= {f"{name} {bytes(key).hex()}" for (key,) in db.rows_text(f"SELECT _key FROM {quote(name)}")}
    return found


def lost(db: Database, acks: Iterable[str]) -> list[str]:
    """The acks that the database knows nothing of."""
    return sorted(set(acks) - stored(db))


# -- the state that a crash left ----------------------------------------------------------------


def copied(path: Path, folder: Path) -> Path:
    """A copy of a database as a crash left it, without its shared memory: whoever reads the original would mend it."""
    folder.mkdir(exist_ok=True)
    copy = folder / path.name
    for suffix in ("", "-wal", "-journal", "-shm"):
        Path(f"{copy}{suffix}").unlink(missing_ok=True)
        if suffix != "-shm":
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def wounds(path: Path, acks: Iterable[str]) -> list[str]:
    """What is wrong with the state that a crash left, as somebody who opens it finds it; empty where nothing is.

    The file is opened for writing, as the next life would: give a copy. One that has no job yet is sound where nothing
    was acknowledged.
    """
    if not path.exists():
        return [f"acknowledged, and no file: {ack}" for ack in acks]
    db = connect(str(path), create=False)
    try:
        if not db.rows_text("SELECT 1 FROM sqlite_master WHERE name = 'job'"):
            return [f"acknowledged, and no table: {ack}" for ack in acks]
        found = [f"acknowledged and gone: {ack}" for ack in lost(db, acks)]
        fault = fault_of(db)
        return [*found, f"verify: {fault}"] if fault else found
    finally:
        db.close()
