"""A job with a million pending tasks beside one with ten thousand: the start of a run, its memory, a claim, a resume.

    python bench/frontier.py                      # builds both databases through the store, in a temporary folder
    python bench/frontier.py --tasks 10000 1000000 --rounds 5

Both jobs lie on one site of four loopback hosts that answers every page at once. `first request` is counted from the start of
the process; `start-up` is what the same process takes to its first request in an empty job, imports and all, so the difference is
what the waiting tasks cost. Each run ends after 300 pages; `resume` is the same after a SIGKILL.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from limpet.batch import Kind, Link, Part, SourceMove, Want
from limpet.settings import Settings
from limpet.store import Store, jobs, lease, open_store
from limpet.task import ShardId, TaskKey
from limpet.url import KeyProfile, digest16, host_id

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.sites import Reply, Served, serving  # noqa: E402 - the site that the suite uses

SPIDER = "shop"
HOSTS = 4
PAGES = 300
#: What every page is: a product without links.
PRODUCT = Reply('<h1 class="title">x</h1><i class="sku">1</i><i class="price">1.00</i><i class="stock">1</i>')
#: Tasks that one batch of the builder puts in.
BATCH = 20_000


def build(place: Path, addresses: tuple[str, ...], port: int, tasks: int) -> None:
    """A job of the spider `shop` with so many pending tasks, put in through the store's own batches."""
    settings = Settings(lease_s=600.0)
    store = open_store(f"sqlite:///{place}", settings=settings)
    source = jobs.Source("list", digest16("bench"), "[]")
    job = store.join(spider=SPIDER, profile=KeyProfile.of(), sources=[source])
    me = store.register()
    taken = [got for row in lease.shards(store.db, job.id) if (got := store.take_over(row, me)) is not None]
    marks = {one.shard: (one.epoch, one.watermark) for one in taken}
    first = taken[0].shard
    hosts = [(authority, host_id(authority)) for authority in (f"{address}:{port}" for address in addresses)]
    moves = -(-tasks // BATCH)
    for number in range(moves):
        links = []
        for n in range(number * BATCH, min((number + 1) * BATCH, tasks)):
            authority, host = hosts[n % HOSTS]
            text = f"http://{authority}/p/{n}"
            links.append(Link(ShardId(host % job.shards), host, TaskKey(digest16(text)), text, text, depth=1))
        move = SourceMove(1, number, number + 1, number + 1 == moves, tuple(links))
        commit(store, job.id, me.id, first, marks, sources=(move,))
    for shard in marks:
        commit(store, job.id, me.id, shard, marks, kind=Kind.RELEASE)
    lease.retire(store.db, me)
    store.close()


def commit(store: Store, job: int, owner: str, shard: ShardId, marks: dict[ShardId, tuple[int, int]], **more: object) -> None:
    """One batch of one shard."""
    epoch, watermark = marks[shard]
    store.commit([Part(job=job, shard=shard, owner=owner, epoch=epoch, n=watermark + 1, **more)])  # type: ignore[arg-type]
    marks[shard] = (epoch, watermark + 1)


def first_request(place: Path, site: Served, *, kill: bool = False) -> tuple[float, float]:
    """Seconds from the start of a run to its first page, and its peak memory in MB; killed after 300 pages, or ended by its limit."""
    before = settled(site)
    done = pages_done(place) if place.exists() else 0
    command = [sys.executable, "-m", "limpet", "run", str(ROOT / "examples" / "shop.py"), "--db", f"sqlite:///{place}", "--quiet"]
    began = time.perf_counter()
    child = subprocess.Popen(
        [*command, "--start", site.url("/"), "--max-pages", str(done + PAGES)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait(lambda: site.requests > before, child)
    seconds = time.perf_counter() - began
    if kill:
        wait(lambda: site.requests > before + PAGES // 2, child)
        os.killpg(child.pid, signal.SIGKILL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return seconds, usage.ru_maxrss / 1024


def settled(site: Served) -> int:
    """The requests of a site once nothing of a killed run is under way any more."""
    while (before := site.requests) != (time.sleep(0.1) or site.requests):
        pass
    return before


def wait(is_so: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    """Wait for a condition while the child lives."""
    while not is_so():
        if child.poll() is not None:
            raise SystemExit(f"the run ended too early, with {child.returncode}")
        time.sleep(0.002)


def pages_done(place: Path) -> int:
    """How many pages a job has, as its books say."""
    store = open_store(f"sqlite:///{place}", create=False, readonly=True)
    row = store.db.one("done_so_far", job=1)
    store.close()
    return int(row[0]) if row else 0


def claims(place: Path) -> tuple[float, float]:
    """Milliseconds of a batch that claims 500 tasks, and of one that claims none, on a copy that nobody runs on."""
    copy = place.with_suffix(".copy")
    shutil.copy(place, copy)
    store = open_store(f"sqlite:///{copy}", settings=Settings(lease_s=600.0))
    job = store.join(spider=SPIDER, profile=KeyProfile.of())
    me = store.register()
    taken = [got for row in lease.shards(store.db, job.id) if (got := store.take_over(row, me)) is not None]
    marks = {one.shard: (one.epoch, one.watermark) for one in taken}
    spent: dict[int, list[float]] = {0: [], 500: []}
    shards = {host_id(f"127.0.0.{n + 1}:{port_of(store)}") % job.shards for n in range(HOSTS)}
    for _ in range(4):
        for shard in shards:
            for want, times in spent.items():
                epoch, watermark = marks[ShardId(shard)]
                part = Part(job=job.id, shard=ShardId(shard), owner=me.id, epoch=epoch, n=watermark + 1)
                began = time.perf_counter()
                store.commit([part], {ShardId(shard): Want(want, want)})
                times.append(time.perf_counter() - began)
                marks[ShardId(shard)] = (epoch, watermark + 1)
    store.close()
    copy.unlink()
    return statistics.median(spent[500]) * 1000, statistics.median(spent[0]) * 1000


def port_of(store: Store) -> str:
    """The port of the site that the job is about."""
    ((text,),) = store.db.rows_text("SELECT text FROM task_text ORDER BY id LIMIT 1")
    return str(text).rpartition(":")[2].partition("/")[0]


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="limpet-bench-"))
    try:
        with serving(lambda host, path, times: PRODUCT, hosts=HOSTS) as site:
            for tasks in options.tasks:
                began = time.perf_counter()
                # In a process of its own: the memory that a child may have used at its birth is that of its parent.
                builder = multiprocessing.get_context("spawn").Process(
                    target=build, args=(folder / f"{tasks}.db", site.addresses, site.port, tasks)
                )
                builder.start()
                builder.join()
                size = (folder / f"{tasks}.db").stat().st_size / 2**20
                print(f"built {tasks:>9,} pending tasks in {time.perf_counter() - began:.1f} s, {size:.0f} MB", flush=True)
            figures: dict[str, list[tuple[float, float]]] = {}
            for number in range(options.rounds):
                figures.setdefault("start-up", []).append(first_request(folder / f"empty{number}.db", site))
                for tasks in options.tasks:
                    place = folder / f"{tasks}.db"
                    figures.setdefault(f"{tasks:,}: first request", []).append(first_request(place, site, kill=True))
                    figures.setdefault(f"{tasks:,}: resume after SIGKILL", []).append(first_request(place, site))
            print(f"{'':<36} {'seconds':>8} {'MB':>7}   medians of {options.rounds}")
            for name, found in figures.items():
                print(f"{name:<36} {statistics.median(s for s, _ in found):>8.2f} {statistics.median(mb for _, mb in found):>7.1f}")
            for tasks in options.tasks:
                with_claims, without = claims(folder / f"{tasks}.db")
                print(f"{tasks:>9,} pending: a batch that claims 500 {with_claims:.1f} ms, one that claims none {without:.1f} ms")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
