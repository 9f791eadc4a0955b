"""THE LEASE and THE FENCE's token: who is alive, who owns a shard, and how it changes hands.

The lease is the worker's row. Death is a certificate: a guarded UPDATE makes a row dead, once, for
ever, after two looks more than a heartbeat apart that both find the lease over and the beat counter
unchanged. On one host a held file lock tells at once. Only a shard without a living owner is taken,
one shard a transaction, in separate statements, its row first of all: as one statement a take-over
works on the snapshot from before its wait, and what the ghost claimed meanwhile runs for ever.

Invariants: I1, I6, I7. What is fenced by these tokens: `commit.fence`.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from limpet.batch import Kind, Part, digest, tries_digest
from limpet.errors import InvariantBroken
from limpet.failpoint import failpoint
from limpet.settings import Settings
from limpet.store import charges, ledger
from limpet.store.dialect import Database
from limpet.task import Epoch, Lane, Outcome, ShardId, State, lane_of, reclaimed


@dataclass(frozen=True, slots=True)
class Worker:
    """One process incarnation, registered and holding its file lock."""

    id: str
    lease_ms: int
    lock_path: str
    lock_file: int = -1


@dataclass(frozen=True, slots=True)
class Taken:
    """A shard that is ours now."""

    shard: ShardId
    epoch: Epoch
    watermark: int
    verified: int
    lost: int  # tries of the former owner that ended as lost
    dead: int  # of them, tasks that are dead now: they killed workers while they ran alone


# -- workers ----------------------------------------------------------------------------------


def register(db: Database, *, lease_s: float, lock_folder: str, job: int = 0) -> Worker:
    """Write a new worker row, holding a lock on a file of its own for as long as this process lives."""
    worker = uuid.uuid4().hex
    path = os.path.join(lock_folder, f"limpet-worker-{worker}.lock")
    lock_file, device, inode = _hold(path)
    lease_ms = max(1, round(lease_s * 1000))
    try:
        db.begin()
        db.run(
            "register", worker=worker, job=job, host=socket.gethostname(), pid=os.getpid(), boot=boot_id(),
            lock_path=path if lock_file >= 0 else "", lock_device=device, lock_inode=inode, lease_ms=lease_ms,
        )  # fmt: skip
        db.commit()
    except BaseException:
        db.rollback()
        _let_go(lock_file, path)
        raise
    return Worker(worker, lease_ms, path, lock_file)


def beat(db: Database, worker: Worker) -> bool:
    """Renew the lease; False where this worker has been certified dead, and must start again under a new id."""
    db.begin()
    try:
        alive = db.run("renew", worker=worker.id) == 1
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return alive


def retire(db: Database, worker: Worker) -> None:
    """End a worker that has given up its shards, and remove its lock file."""
    try:
        db.begin()
        db.run("retire", worker=worker.id)
        db.commit()
    except BaseException:
        db.rollback()
        raise
    _let_go(worker.lock_file, worker.lock_path)


class Watch:
    """Looks at the workers, and certifies the death of those that are.

    `clock` is this process's own, in seconds; it only measures that two looks are a heartbeat apart.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first_look: dict[str, tuple[int, float]] = {}

    def look(self, db: Database, me: str) -> list[str]:
        """Certify every death that can be told now; the ids of those found dead."""
        rows = db.rows("living_workers")
        now = self._clock()
        found = []
        for worker, host, _pid, boot, path, device, inode, worker_beat, lease_ms, until_ms, now_ms in rows:
            if worker == me:
                continue
            if lock_is_free(host, boot, path, device, inode):
                reason = "its process is gone"
            elif self._twice_over(worker, worker_beat, lease_ms, until_ms, now_ms, now):
                reason = "its lease is over and it did not beat between two looks"
            else:
                continue
            if _certify(db, worker, worker_beat, reason):
                found.append(worker)
                self._first_look.pop(worker, None)
                _remove(path)
        self._first_look = {w: seen for w, seen in self._first_look.items() if any(w == row[0] for row in rows)}
        return found

    def _twice_over(self, worker: str, worker_beat: int, lease_ms: int, until_ms: int, now_ms: int, now: float) -> bool:
        """Whether this is the second look at a lease that is over. One that ends two leases ahead counts as over: the clock went back."""
        if now_ms <= until_ms <= now_ms + 2 * lease_ms:
            self._first_look.pop(worker, None)
            return False
        seen = self._first_look.get(worker)
        if seen is None or seen[0] != worker_beat:
            self._first_look[worker] = (worker_beat, now)
            return False
        return now - seen[1] > lease_ms / 5000


def _certify(db: Database, worker: str, worker_beat: int, reason: str) -> bool:
    db.begin()
    try:
        done = db.run("certify_dead", worker=worker, beat=worker_beat, reason=reason) == 1
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return done


# -- the file lock ----------------------------------------------------------------------------


def boot_id() -> str:
    """Names this boot of this machine; '' where the system does not say (then file locks prove nothing)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _hold(path: str) -> tuple[int, int, int]:
    """Create and lock a file: (descriptor, device, inode); (-1, 0, 0) where the system has no such locks.

    It gets its name once it is locked: whoever looks which files are locked would else hold it for a moment before us.
    """
    handle, draft = -1, f"{path}.new"
    try:
        import fcntl

        handle = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(draft, path)
    except (ImportError, OSError):
        if handle >= 0:
            os.close(handle)
            Path(draft).unlink(missing_ok=True)
        return -1, 0, 0
    seen = os.fstat(handle)
    return handle, seen.st_dev, seen.st_ino


def lock_is_free(host: str, boot: str, path: str, device: int, inode: int) -> bool:
    """True only where the worker's own file opens here, without being created, and nobody holds it.

    Another machine, another boot, another file under the same name (containers share a boot id): says nothing.
    """
    if not path or host != socket.gethostname() or not boot or boot != boot_id():
        return False
    import fcntl

    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        seen = os.fstat(handle)
        if (seen.st_dev, seen.st_ino) != (device, inode):
            return False
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not take each other for its owner
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def waiting_lock(folder: str) -> Iterator[None]:
    """Show for as long as the block runs that a worker is there, though it may have no job yet."""
    path = os.path.join(folder, f"limpet-waiting-{os.getpid()}.lock")
    _remove(path)  # of an earlier process of this number
    handle, _, _ = _hold(path)
    try:
        yield
    finally:
        _let_go(handle, path)


def held_locks(folder: str) -> int:
    """How many workers of this machine hold their lock file in a folder: they are there, whatever the database says."""
    try:
        import fcntl
    except ImportError:
        return 0
    held = 0
    for path in [*Path(folder).glob("limpet-worker-*.lock"), *Path(folder).glob("limpet-waiting-*.lock")]:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            held += 1
        finally:
            os.close(handle)
    return held


def _let_go(handle: int, path: str) -> None:
    if handle >= 0:
        _remove(path)
        os.close(handle)


def _remove(path: str) -> None:
    try:
        if path:
            os.unlink(path)
    except OSError:
        pass


# -- shards -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardRow:
    """Who owns a shard, and how far it got."""

    shard: ShardId
    owner: str | None
    epoch: Epoch
    watermark: int
    verified: int
    owner_lives: bool


def shards(db: Database, job: int) -> list[ShardRow]:
    """Every shard of a job."""
    return [ShardRow(ShardId(s), owner, Epoch(epoch), watermark, verified, owner is not None and dead == 0)
            for s, owner, epoch, watermark, verified, dead in db.rows("shards_of_job", job=job)]  # fmt: skip


def take_over(db: Database, job: int, row: ShardRow, me: Worker, settings: Settings, code: bytes = b"") -> Taken | None:
    """Make a shard ours, and end what its former owner left running; None where somebody else was faster, or we are dead.

    One transaction of separate statements. Of unknown outcome: owner = me and epoch = e + 1 means it is ours.
    """
    epoch, n = Epoch(row.epoch + 1), row.watermark + 1
    part = Part(job=job, shard=row.shard, owner=me.id, epoch=epoch, n=n, kind=Kind.TAKEOVER, code=code)
    failpoint("takeover_begin")
    try:
        db.unstage()
        db.begin()
        taken = db.run("take_over", me=me.id, job=job, shard=row.shard, epoch=row.epoch, watermark=row.watermark)
        if taken != 1 or _is_dead(db, me):
            db.rollback()
            return None
        failpoint("takeover_fence")
        lost, dead = reclaim(db, part, settings)
        failpoint("takeover_ledger")
        db.commit()
    except BaseException:
        db.rollback()
        raise
    failpoint("takeover_commit")
    return Taken(row.shard, epoch, n, row.verified, lost, dead)


def _is_dead(db: Database, worker: Worker) -> bool:
    """Certified dead, a worker gets no shard any more under this id: it does not know yet what it has lost."""
    row = db.one("read_worker", worker=worker.id)
    return row is None or bool(row[6])


def reclaim(db: Database, part: Part, settings: Settings) -> tuple[int, int]:
    """End every running try of a shard as lost, with its books: (how many, how many tasks died of it).

    A try lost in a crowd blames nobody. One lost alone is a solo loss: later, and dead at the cap.
    """
    running = db.rows("running_tasks", job=part.job, shard=part.shard)
    nothing = digest(b"|")  # what a lost try offered: no links, no records
    staged, tries, dead = [], [], 0
    for task, key, try_number, lost, solo, was_solo, epoch in running:
        solo_losses = solo + was_solo
        state = reclaimed(solo=bool(was_solo), solo_losses=solo_losses, solo_losses_max=settings.solo_losses)
        due_in_ms = solo_backoff_ms(solo_losses, settings) if state is State.FAILED else 0
        lane = lane_of(state, due_ms=due_in_ms, lost=lost + 1, suspect_after=settings.suspect_after)
        dead += state is State.DEAD
        reason = "killed its worker" if state is State.DEAD else "its worker was lost"
        tries.append((bytes(key), try_number, str(Outcome.LOST), reason, nothing))
        staged.append((
            part.job, part.shard, part.n, task, try_number, epoch, str(state), str(lane) or None, due_in_ms if lane is Lane.SUSPECT else 0,
            0, 1, was_solo, 0, was_solo, str(Outcome.LOST), reason, 0, nothing, 0, 0, "", "",
        ))  # fmt: skip
    db.stage("stage_try", 22, staged)
    if staged and db.run("finish") != len(staged):
        raise InvariantBroken(f"{len(staged)} tasks were running in shard {part.shard}, but not all could be reclaimed", invariant="I6")
    failpoint("takeover_reclaim")
    db.run("put_attempts")
    db.run("unpark", job=part.job, shard=part.shard, suspect_after=settings.suspect_after)
    money = {charges.MONEY: charges.reclaim(db, part)}
    at_ms = int(db.one("clock")[0])  # type: ignore[index]
    ledger.put(db, part, at_ms, Counter({Outcome.LOST: len(staged)}), tries_digest(tries), ledger.Found(), deltas=money)
    return len(staged), dead


def solo_backoff_ms(solo_losses: int, settings: Settings) -> int:
    """Milliseconds until a task that killed its worker alone is tried again: longer than a storm of kills."""
    waits = settings.solo_backoff_s
    if not waits:
        return 0
    return round(1000 * waits[min(solo_losses, len(waits)) - 1])
