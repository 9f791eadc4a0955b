"""Who is alive: death is a certificate, given once, and never to a worker that lives."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from limpet.errors import StoreUnavailable
from limpet.store import Store, lease, sqlite
from tests.conftest import Hire, on_sqlite
from tests.store.audit import audit
from tests.store.hands import Clock, Hand, change_sql, child, column, counted, done, dump, pages

#: A worker of its own process: takes what is free, claims, says so, and then does what it is told, a line each.
WORKER = """
import sys
from limpet.settings import Settings
from limpet.store import lease, open_store
from tests.store.hands import change_sql, Hand, done, found_job
store = open_store(sys.argv[1], settings=Settings(shards=4, lease_s=float(sys.argv[2])))
found_job(store)
hand = Hand.on(store)
hand.take()
hand.claim(3)
print(hand.worker.id, flush=True)
for line in sys.stdin:
    if line.strip() == "beat":
        print(lease.beat(hand.db, hand.worker), flush=True)
    else:
        answer = hand.finish(*(done(claim) for claim in list(hand.claims.values())))
        print(len(answer.parts), len(answer.fenced), flush=True)
"""

Start = Callable[..., tuple[Popen[str], str]]


@pytest.fixture
def start(store: Store) -> Iterator[Start]:
    """Starts workers in processes of their own: the process, and the worker's id."""
    started: list[Popen[str]] = []

    def one(lease_s: float = 600.0) -> tuple[Popen[str], str]:
        process = child(WORKER, store.dsn, str(lease_s))
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield one
    for process in started:
        process.kill()
        process.communicate()


def say(process: Popen[str], line: str) -> str:
    """Tell a worker to do something; what it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def over(hand: Hand, worker: str) -> None:
    """The lease of a worker is over, by the database's clock."""
    hand.db.run_text("UPDATE worker SET lease_until_ms = 1 WHERE worker = ?", (worker,))


def watching() -> tuple[lease.Watch, Clock]:
    """A watch that has seen nothing yet, and the clock that it reads."""
    clock = Clock()
    return lease.Watch(clock), clock


# -- the lock file: processes on one machine ----------------------------------------------------------


def test_a_killed_process_is_certified_dead_at_the_first_look(hire: Hire, start: Start) -> None:
    """Its lock is free: a restart after kill -9 does not wait for the lease of its predecessor (28d, P28)."""
    seeder = hire()
    seeder.seed(*pages(0, 5))
    for shard in range(4):
        seeder.release(shard)
    process, worker = start(lease_s=3600)
    hand = hire(take=False)
    (path,) = column(hand.db, "lock_path", "worker = ?", (worker,), table="worker")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.path.exists(str(path))
    assert lease.Watch(Clock()).look(hand.db, hand.worker.id) == [worker]
    assert hand.db.rows_text("SELECT dead, dead_reason FROM worker WHERE worker = ?", (worker,)) == [(1, "its process is gone")]
    assert not os.path.exists(str(path))
    assert sum(taken.lost for taken in hand.take()) == 3
    assert len(hand.claim()) == 5
    audit(hand.db, hand.job.id)


def test_a_frozen_process_is_not_dead_until_two_looks_say_so(hire: Hire, start: Start) -> None:
    """It holds its lock: the lease must be over, and its beat unchanged, at two looks a heartbeat apart."""
    hand = hire(0)
    hand.seed(*pages(0, 2))
    hand.release(0)
    process, worker = start(lease_s=600)
    process.send_signal(signal.SIGSTOP)
    watch, clock = watching()
    assert watch.look(hand.db, hand.worker.id) == []
    over(hand, worker)
    assert watch.look(hand.db, hand.worker.id) == []
    clock.now += 119
    assert watch.look(hand.db, hand.worker.id) == [], "less than a heartbeat after the first look"
    clock.now += 2
    assert watch.look(hand.db, hand.worker.id) == [worker]
    hand.take()
    (claim, *_) = hand.claim(1)
    process.send_signal(signal.SIGCONT)
    assert say(process, "beat") == "False"
    assert say(process, "commit") == "0 1"
    hand.finish(done(claim))
    assert counted(hand.db) == {"done": 1, "pending": 1}
    audit(hand.db, hand.job.id)


def test_a_living_process_beats_on_and_is_never_certified(hire: Hire, start: Start) -> None:
    """Its lease is over again and again, by a clock that jumps; it beats between the looks (28c)."""
    hand = hire(take=False)
    process, worker = start()
    watch, clock = watching()
    for _ in range(5):
        over(hand, worker)
        assert watch.look(hand.db, hand.worker.id) == []
        clock.now += 1000
        assert say(process, "beat") == "True"
    assert column(hand.db, "dead", "worker = ?", (worker,), table="worker") == [0]


@pytest.mark.parametrize("change", ["another file", "gone", "host = 'elsewhere'", "boot = 'another boot'", "boot = ''", "lock_path = ''"])
def test_a_lock_that_may_be_another_one_says_nothing(hire: Hire, start: Start, change: str) -> None:
    """Another inode, machine or boot: the very file must open without being created, else nothing is known."""
    hand = hire(take=False)
    process, worker = start()
    (path,) = column(hand.db, "lock_path", "worker = ?", (worker,), table="worker")
    assert isinstance(path, str)
    if change == "another file":
        other = f"{path}.new"
        Path(other).touch()
        os.replace(other, path)
    elif change == "gone":
        os.unlink(path)
    else:
        hand.db.run_text(f"UPDATE worker SET {change} WHERE worker = ?", (worker,))
    process.send_signal(signal.SIGKILL)
    process.wait()
    watch, clock = watching()
    assert watch.look(hand.db, hand.worker.id) == []
    assert os.path.exists(path) == (change != "gone"), "a look must not create or remove the file"
    over(hand, worker)
    watch.look(hand.db, hand.worker.id)
    clock.now += 1000
    assert watch.look(hand.db, hand.worker.id) == [worker]


def test_without_the_check_of_the_file_a_living_worker_would_be_certified(
    hire: Hire, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: another file under the same name is free, although its worker lives (containers share a boot id)."""
    hand = hire(take=False)
    process, worker = start()
    (path,) = column(hand.db, "lock_path", "worker = ?", (worker,), table="worker")
    assert isinstance(path, str)
    os.unlink(path)
    Path(path).touch()
    assert lease.Watch(Clock()).look(hand.db, hand.worker.id) == []
    seen = os.stat(path)
    hand.db.run_text("UPDATE worker SET lock_inode = ?, lock_device = ? WHERE worker = ?", (seen.st_ino, seen.st_dev, worker))
    assert lease.Watch(Clock()).look(hand.db, hand.worker.id) == [worker]
    assert process.poll() is None


def test_a_worker_in_this_process_holds_its_lock_against_its_neighbours(hire: Hire) -> None:
    """The lock belongs to the worker, not to the process: several in one are told apart."""
    a, b = hire(0), hire(1)
    assert lease.Watch(Clock()).look(a.db, a.worker.id) == []
    os.close(b.worker.lock_file)
    b.worker = lease.Worker(b.worker.id, b.worker.lease_ms, b.worker.lock_path)
    assert lease.Watch(Clock()).look(a.db, a.worker.id) == [b.worker.id]


def test_a_worker_that_could_not_register_leaves_no_lock_behind(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row and file go together."""
    hand = hire(take=False)
    folder = Path(os.path.dirname(hand.db.place))
    before = sorted(folder.glob("*.lock"))
    workers = column(hand.db, "worker", table="worker")

    def full(db: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(type(hand.db), "commit", full)
    with pytest.raises(StoreUnavailable):
        hand.store.register()
    assert sorted(folder.glob("*.lock")) == before
    assert column(hand.db, "worker", table="worker") == workers


def test_a_worker_that_stops_retires_and_takes_its_lock_file_along(hire: Hire) -> None:
    """A clean stop: dead by its own hand, its shards free at once, its file gone."""
    a, b = hire(0), hire(take=False)
    a.release(0)
    lease.retire(a.db, a.worker)
    assert not os.path.exists(a.worker.lock_path)
    a.worker = lease.Worker(a.worker.id, a.worker.lease_ms, a.worker.lock_path)
    assert a.db.rows_text("SELECT dead, dead_reason FROM worker WHERE worker = ?", (a.worker.id,)) == [(1, "stopped")]
    assert lease.Watch(Clock()).look(b.db, b.worker.id) == []
    assert len(b.take(0)) == 1


# -- the lease ----------------------------------------------------------------------------------------


def test_a_worker_row_says_where_it_runs(hire: Hire) -> None:
    """Host, pid and boot are labels; the lease ends by the database's clock."""
    hand = hire(take=False)
    ((host, pid, boot, beat, lease_ms, until_ms, dead),) = hand.db.rows_text(
        "SELECT host, pid, boot, beat, lease_ms, lease_until_ms, dead FROM worker WHERE worker = ?", (hand.worker.id,)
    )
    assert (host, pid, boot, beat, lease_ms, dead) == (socket.gethostname(), os.getpid(), lease.boot_id(), 1, 600_000, 0)
    (now_ms,) = hand.db.one("clock")  # type: ignore[misc]
    assert 0 <= now_ms + lease_ms - until_ms < 60_000


def test_a_beat_renews_the_lease_and_counts(hire: Hire) -> None:
    """The counter is what two looks compare, not a time."""
    hand = hire(take=False)
    over(hand, hand.worker.id)
    assert lease.beat(hand.db, hand.worker)
    ((beat, until_ms),) = hand.db.rows_text("SELECT beat, lease_until_ms FROM worker")
    assert beat == 2
    assert until_ms > 1


def test_every_commit_is_a_heartbeat_too(hire: Hire) -> None:
    """A worker that commits needs no other proof of life."""
    hand = hire(0)
    over(hand, hand.worker.id)
    hand.commit(hand.part(0))
    ((beat, until_ms),) = hand.db.rows_text("SELECT beat, lease_until_ms FROM worker")
    assert beat == 2
    assert until_ms > 1


def test_death_is_final(hire: Hire) -> None:
    """Certified once, for ever: a late beat finds nothing, and another certificate changes nothing (P70)."""
    a, b = hire(0), hire(take=False)
    assert b.bury(a) == [a.worker.id]
    before = dump(a.db)
    assert lease.beat(a.db, a.worker) is False
    assert b.bury(a) == []
    lease.retire(a.db, a.worker)
    after = dump(a.db)
    before.pop("worker")
    workers = after.pop("worker")
    assert after == before
    reason = "its lease is over and it did not beat between two looks"
    assert next(row for row in workers if row[0] == a.worker.id)[-2:] == (1, reason)
    a.worker = lease.Worker(a.worker.id, a.worker.lease_ms, a.worker.lock_path)


def renewal_does_not_take_the_lease_back(hire: Hire) -> None:
    """P70: a paused worker's delayed heartbeat arrives after its shard was taken."""
    a, b = hire(0), hire(take=False)
    b.succeed_to(a)
    lease.beat(a.db, a.worker)
    assert column(b.db, "dead", "worker = ?", (a.worker.id,), table="worker") == [1]
    assert lease.shards(b.db, b.job.id)[0].owner == b.worker.id
    (until_ms,) = column(b.db, "lease_until_ms", "worker = ?", (a.worker.id,), table="worker")
    assert until_ms == 1, "a dead worker's lease was renewed"


def test_a_delayed_heartbeat_does_not_take_a_lease_back(hire: Hire) -> None:
    """The renewal is guarded by `dead = 0`."""
    renewal_does_not_take_the_lease_back(hire)


def test_a_renewal_without_its_guard_would_revive_the_dead(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of P70."""
    probe = hire(take=False)
    change_sql(monkeypatch, probe.db, "renew", " AND dead = 0", "")
    with pytest.raises(AssertionError, match="was renewed"):
        renewal_does_not_take_the_lease_back(hire)


def test_a_worker_that_beats_between_look_and_certificate_lives(hire: Hire) -> None:
    """The certificate is guarded by the beat that was looked at."""
    a, b = hire(0), hire(take=False)
    over(b, a.worker.id)
    watch, clock = watching()
    watch.look(b.db, b.worker.id)
    clock.now += 1000
    begin = b.db.begin

    def late_beat() -> None:
        lease.beat(a.db, a.worker)
        begin()

    b.db.begin = late_beat  # type: ignore[method-assign]
    assert watch.look(b.db, b.worker.id) == []
    assert column(b.db, "dead", "worker = ?", (a.worker.id,), table="worker") == [0]


def test_a_clock_that_jumped_forward_kills_nobody_who_beats(hire: Hire) -> None:
    """28c: all leases end at once; whoever beats between the two looks lives, the others are dead."""
    watcher, *workers = (hire(take=False) for _ in range(4))
    for worker in workers:
        over(watcher, worker.worker.id)
    watch, clock = watching()
    assert watch.look(watcher.db, watcher.worker.id) == []
    for worker in workers[:2]:
        lease.beat(worker.db, worker.worker)
        over(watcher, worker.worker.id)
    clock.now += 1000
    assert watch.look(watcher.db, watcher.worker.id) == [workers[2].worker.id]


def one_look_kills_the_living(hire: Hire) -> None:
    """A worker whose lease is over only because the clock jumped."""
    watcher, worker = hire(take=False), hire(take=False)
    over(watcher, worker.worker.id)
    assert lease.Watch(Clock()).look(watcher.db, watcher.worker.id) == [], "a living worker was certified dead"


def test_one_look_is_never_enough(hire: Hire) -> None:
    """Two of them, a heartbeat apart."""
    one_look_kills_the_living(hire)


def test_a_single_look_would_kill_the_living(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 28c."""
    monkeypatch.setattr(lease.Watch, "_twice_over", lambda watch, worker, beat, lease_ms, until_ms, now_ms, now: now_ms > until_ms)
    with pytest.raises(AssertionError, match="certified dead"):
        one_look_kills_the_living(hire)


def test_a_lease_that_ends_in_the_far_future_counts_as_over(hire: Hire) -> None:
    """28c: the clock went back; else the shards of a dead worker would wait for as long as it jumped."""
    watcher, worker = hire(take=False), hire(take=False)
    watcher.db.run_text("UPDATE worker SET lease_until_ms = lease_until_ms + 3600000 WHERE worker = ?", (worker.worker.id,))
    watch, clock = watching()
    assert watch.look(watcher.db, watcher.worker.id) == []
    clock.now += 1000
    assert watch.look(watcher.db, watcher.worker.id) == [worker.worker.id]


def test_a_worker_does_not_look_at_itself(hire: Hire) -> None:
    """Its own lease may be over, and it lives all the same."""
    hand = hire(take=False)
    over(hand, hand.worker.id)
    watch, clock = watching()
    watch.look(hand.db, hand.worker.id)
    clock.now += 1000
    assert watch.look(hand.db, hand.worker.id) == []


def test_a_worker_found_dead_starts_again_under_another_id_and_takes_its_shards_over(hire: Hire) -> None:
    """The same process, a new UUID; what it held comes back as lost."""
    a, b = hire(0), hire(take=False)
    a.seed(*pages(0, 3))
    a.claim(2)
    b.bury(a)
    assert not lease.beat(a.db, a.worker)
    os.close(a.worker.lock_file)
    former, a.worker = a.worker.id, a.store.register()
    (taken,) = a.take(0)
    assert former != a.worker.id
    assert taken.lost == 2
    assert len(a.claim()) == 3
    audit(a.db, a.job.id)


def a_dead_worker_takes_nothing(hire: Hire) -> None:
    """It was certified dead while it slept, and does not know it yet: a free shard is not for it."""
    a, b = hire(take=False), hire(take=False)
    b.bury(a)
    before = dump(a.db)
    assert a.take() == [], "the dead took a shard"
    assert dump(a.db) == before


def test_a_worker_that_is_dead_takes_no_shard_under_its_old_id(hire: Hire) -> None:
    """It has to begin anew first."""
    a_dead_worker_takes_nothing(hire)


def test_without_that_look_the_dead_would_hold_shards(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: every worker that came by would take them away again at once."""
    monkeypatch.setattr(lease, "_is_dead", lambda db, worker: False)
    with pytest.raises(AssertionError, match="the dead took"):
        a_dead_worker_takes_nothing(hire)


def test_workers_that_are_gone_are_forgotten_by_the_watch(hire: Hire) -> None:
    """Its memory is bounded by those who live."""
    watcher, worker = hire(take=False), hire(take=False)
    over(watcher, worker.worker.id)
    watch = lease.Watch(Clock())
    watch.look(watcher.db, watcher.worker.id)
    assert [*watch._first_look] == [worker.worker.id]
    lease.beat(worker.db, worker.worker)
    watch.look(watcher.db, watcher.worker.id)
    assert [*watch._first_look] == []
    over(watcher, worker.worker.id)
    watch.look(watcher.db, watcher.worker.id)
    lease.retire(worker.db, worker.worker)
    worker.worker = lease.Worker(worker.worker.id, 1, worker.worker.lock_path)
    watch.look(watcher.db, watcher.worker.id)
    assert [*watch._first_look] == []


# -- SQLite's own locks -------------------------------------------------------------------------------


def locks_of(path: str) -> list[str]:
    """The locks that this process has on a file, without their numbers, which change as others come and go."""
    inode = os.stat(path).st_ino
    lines = [line.partition(":")[2] for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(line for line in lines if f" {os.getpid()} " in line and f":{inode} " in line)


@pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="this system does not list its locks")
@on_sqlite
def test_asking_who_holds_the_write_lock_drops_no_lock_of_ours(hire: Hire) -> None:
    """A handle on the -shm file, closed, would take every lock of this process on it along, SQLite's own among them."""
    hand = hire(0)
    shm = f"{hand.db.place}-shm"
    hand.db.begin_read()  # type: ignore[attr-defined]
    hand.db.rows_text("SELECT 1 FROM job")
    before = locks_of(shm)
    assert len(before) >= 2
    assert sqlite.lock_holder_pid(hand.db.place) == 0
    assert locks_of(shm) == before
    with open(shm, "rb"):  # the twin: this is what it must not do
        pass
    assert locks_of(shm) == []
