"""Workers of one job, on any kind of database: started, hit, and asked by its rows what became of it.

with team(forks, databases.new(), Shop(products=60, hosts=4), folder) as crowd:
    with crowd.unfinished():
        first, second = crowd.start(), crowd.start()
        crowd.until(lambda: crowd.shares() == [4, 4])
"""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.engine.load import load
from limpet.engine.sources import sources_of
from limpet.errors import LimpetError, StoreError, UsageError
from limpet.settings import Settings
from limpet.store import Store, hosts, jobs, open_store, requests
from limpet.store.dialect import Row, sqlite_path
from limpet.store.export import Tally, choose, chunks
from limpet.store.opening import connect
from limpet.store.sqlite import lock_holder_pid
from limpet.store.verify import verify
from limpet.store.views import snapshot
from tests.crash.crawler import Life
from tests.crash.nursery import LOOK_S, PATIENCE_S, Born, Nursery
from tests.crash.trial import SPIDERS
from tests.e2e.gate import Gate, gated

#: Eight shards, small windows, and a heartbeat of 0.4 s: whatever happens, happens soon, and a commit has several parts.
#: A site whose process stands still for a while is no outage, and strikes nobody.
FLAGS: Mapping[str, object] = {
    "shards": 8, "lease": 2, "commit-pages": 20, "commit-pages-first": 5, "commit-ms": 100, "backoff": 0.05,
    "connect-timeout": 60, "read-timeout": 60, "total-timeout": 120,
}  # fmt: skip

#: Seconds of a lease that does not end by itself, also where a process stands still for a while; its heartbeats make a test slower.
PATIENT_LEASE_S = 15

#: Seconds that anything may take before a test fails instead of hanging.
UNTIL_S = 2 * PATIENCE_S

#: Seconds that a condition has to come true in, once every worker has ended: its last rows, its last processes.
OVER_S = 30.0


@dataclass(slots=True)
class Team:
    """Workers on one job, the site that they crawl, and what the database says of both."""

    forks: Nursery
    db: str
    site: Site
    folder: Path
    flags: dict[str, object]
    spider: str = "shelf"
    server: Any = None  # of the database; None for SQLite, which has none
    lives: list[Born] = field(default_factory=list)

    # -- workers ---------------------------------------------------------------------------

    def words(self, command: str = "run", **flags: object) -> list[str]:
        """The command line of a worker."""
        words = [command, str(SPIDERS / f"{self.spider}.py"), "--db", self.db, "--quiet"]
        for name, value in {**self.flags, **flags}.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        if command == "run":
            words += [word for start in self.site.shop.starts() for word in ("--start", start)]
        return words

    def start(self, command: str = "run", *, hooks: Mapping[str, Any] | None = None, **flags: object) -> Born:
        """Begin a worker, which is a process of its own."""
        output = str(self.folder / f"output-{len(self.lives)}")
        self.lives.append(self.forks.start(Life(arguments=self.words(command, **flags), output=output, **(hooks or {}))))
        return self.lives[-1]

    def beside(self, db: str, **flags: object) -> Team:
        """Another team on the same site, with a database of its own."""
        return Team(self.forks, db, self.site, self.folder, {**self.flags, **flags}, self.spider)

    def freeze(self, born: Born) -> None:
        """Stop a worker with all of its threads until somebody wakes it.

        Never while it holds the write lock of a SQLite file, which nobody can take from it: that has a test of its own.
        """
        while born.wait(0) is None:
            born.signal(signal.SIGSTOP)
            self.until(lambda: born.is_frozen or born.wait(0) is not None, what="a standstill")
            if not self.is_locked_by(born):
                return
            born.signal(signal.SIGCONT)
            self.forks.wait(-1, LOOK_S)

    def is_locked_by(self, born: Born) -> bool:
        """Whether a worker is inside a transaction of a SQLite file, which nobody else can write to meanwhile."""
        return self.db.startswith("sqlite") and lock_holder_pid(sqlite_path(self.db)) == born.pid

    @property
    def living(self) -> list[Born]:
        """Workers that have not ended."""
        return [born for born in self.lives if born.wait(0) is None]

    def stop_server(self) -> None:
        """End the server as if its power failed; every connection breaks."""
        if self.db.startswith("postgresql"):
            self.server.stop("immediate")
        else:
            self.server.kill()

    # -- what keeps a crawl from being over ------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate before the site's answers."""
        assert isinstance(self.site.log, Gate)
        return self.site.log

    def hosts(self) -> list[str]:
        """The hosts of the site."""
        return [start.removeprefix("http://").rstrip("/") for start in self.site.shop.starts()]

    @contextmanager
    def unfinished(self, *held: str) -> Iterator[None]:
        """Put hosts, or the last one alone, on hold, before there is any worker, until the block ends without an error.

        So the crawl is not over before the block is, however slow the machine is.
        """
        self.hold(*held)
        yield
        self.let_go(*held)

    def hold(self, *held: str) -> None:
        """Make the job, where there is none, and put hosts on hold, or the last one alone."""
        self.until(lambda: self._asked_to(held or self.hosts()[-1:], "not yet"), what="a hold")

    def let_go(self, *held: str) -> None:
        """End such a hold."""
        self.until(lambda: self._asked_to(held or self.hosts()[-1:], ""), what="the end of a hold")

    def _asked_to(self, held: Sequence[str], reason: str) -> bool:
        """Ask for the hold of hosts, or its end, as a command does; False where the database, or a worker, was in the way."""
        try:
            with self._joined() as store:
                for authority in held:
                    hosts.ask_hold(store, authority, reason, "test")
                requests.apply(store)
        except LimpetError:
            return False
        return True

    @contextmanager
    def _joined(self) -> Iterator[Store]:
        """The job, which is made where there is none yet, with the starts that workers are told."""
        spider = load(SPIDERS / f"{self.spider}.py").spider
        store = open_store(self.db, settings=Settings(shards=int(str(self.flags["shards"])), lease_s=60.0))
        try:
            sources = sources_of(spider, self.site.shop.starts(), None)
            store.join(spider=spider.name, profile=spider.profile, sources=sources)
            yield store
        finally:
            store.close()

    def host(self, authority: str) -> hosts.HostState:
        """What the database says of a host: what waits of it, what runs, and whether it is on hold."""
        with self._joined() as store:
            assert store.job is not None
            return hosts.one(store.db, store.job, authority)

    @contextmanager
    def holding(self, shard: int) -> Iterator[None]:
        """Hold the row of a shard on the server, as a session does that hangs, for as long as the block runs."""
        sql = f"SELECT watermark FROM shard WHERE job = 1 AND shard = {shard} FOR UPDATE"
        if self.db.startswith("postgresql"):
            import psycopg

            with psycopg.connect(self.db) as holder:
                holder.execute(sql)
                yield
            return
        import pymysql

        from limpet.store.mysql import arguments

        with closing(pymysql.connect(**arguments(self.db))) as other, other.cursor() as cursor:
            cursor.execute(sql)
            yield

    def limpet(self, *words: str) -> tuple[int, str]:
        """Another command on the same database, as from another machine: its exit code, and what it printed."""
        output = self.folder / f"output-{words[0]}"
        output.unlink(missing_ok=True)
        born = self.forks.run(Life(arguments=[*words, "--db", self.db], output=str(output)))
        return self.forks.codes[born.pid], born.printed()

    def until(self, condition: Callable[[], object], timeout_s: float = UNTIL_S, *, what: str = "it") -> float:
        """Look until the condition holds: the seconds that it took. Too long fails the test."""
        began = alive = time.monotonic()
        while not condition():
            now = time.monotonic()
            if not self.lives or any(born.pid not in self.forks.codes for born in self.lives):
                alive = now
            waited = now - began
            if now - alive > OVER_S or waited > timeout_s:
                told = "".join(f"\n--- {born.pid}, {self.forks.codes.get(born.pid)}: {born.printed()}" for born in self.lives)
                raise AssertionError(f"{what} did not come in {waited:.1f} s: {self.owned()}{told}")
            self.forks.wait(-1, LOOK_S)  # never born: a wait that nothing ends but its time
        return time.monotonic() - began

    def ended(self, *, ok: frozenset[int] = frozenset({0, 6}), timeout_s: float = UNTIL_S) -> list[int]:
        """The exit codes of all workers, once every one has ended; all must be among `ok`, or a SIGKILL of the test's own."""
        codes = [born.ended(timeout_s) for born in self.lives]
        strange = [born.printed() for born, code in zip(self.lives, codes, strict=True) if code not in (*ok, -signal.SIGKILL)]
        assert not strange, "\n".join([str(codes), *strange])
        return codes

    # -- what the database says --------------------------------------------------------------

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Rows, on a connection of their own: any worker may just be holding anything. None while there is no table, or no server."""
        try:
            db = connect(self.db, readonly=True, lease_s=60.0)
            try:
                return db.rows_text(sql, values)
            finally:
                db.close()
        except (StoreError, UsageError):
            return []

    def owned(self) -> dict[int, int]:
        """Process -> shards, of the living workers of the job; those without a shard have 0."""
        sql = """SELECT w.pid, COUNT(s.shard) FROM worker AS w LEFT JOIN shard AS s ON s.owner = w.worker
                  WHERE w.dead = 0 GROUP BY w.worker, w.pid ORDER BY w.pid"""
        found: Counter[int] = Counter()
        for pid, shards in self.rows(sql):
            found[pid] += int(shards)
        return dict(found)

    def shares(self) -> list[int]:
        """Shards of each living worker, the least first."""
        return sorted(self.owned().values())

    def owners(self) -> dict[int, list[str]]:
        """Shard -> its owners as its batches have them, one after the other."""
        found: dict[int, list[str]] = defaultdict(list)
        for shard, owner in self.rows("SELECT shard, owner FROM ledger ORDER BY shard, n"):
            if found[shard][-1:] != [owner]:
                found[shard].append(owner)
        return dict(found)

    def names(self, pid: int) -> set[str]:
        """The workers that a process has been."""
        return {row[0] for row in self.rows("SELECT worker FROM worker WHERE pid = ?", pid)}

    def dead(self) -> dict[int, str]:
        """Process -> why it was certified dead, of those that were; but for this one, which only asks."""
        return dict(self.rows("SELECT pid, dead_reason FROM worker WHERE dead = 1 AND pid <> ? ORDER BY started_ms", os.getpid()))

    def died_of(self, reason: str) -> set[int]:
        """The processes of which any worker was certified dead for a reason."""
        return {int(row[0]) for row in self.rows("SELECT pid FROM worker WHERE dead = 1 AND dead_reason = ?", reason)}

    def batches_of(self, names: Collection[str]) -> int:
        """How many batches workers of these names have committed."""
        return sum(int(count) for owner, count in self.rows("SELECT owner, COUNT(*) FROM ledger GROUP BY owner") if owner in names)

    def blamed(self) -> int:
        """Tasks that anything was held against, as strikes or as a death."""
        return int(self.rows("SELECT COUNT(*) FROM task WHERE strikes > 0 OR state = 'dead'")[0][0])

    def outcomes(self) -> Counter[str]:
        """How many tries ended how."""
        return Counter({outcome: int(tries) for outcome, tries in self.rows("SELECT outcome, COUNT(*) FROM attempt GROUP BY outcome")})

    # -- verdicts ----------------------------------------------------------------------------

    def digest(self) -> str:
        """The SHA-256 of the products."""
        db = connect(self.db, readonly=True)
        try:
            with snapshot(db) as moment:
                tally = Tally()
                for _ in chunks(moment, choose(moment, "product"), "jsonl", tally):
                    pass
            return tally.sha256
        finally:
            db.close()

    def faults(self) -> list[str]:
        """What is wrong with the ended crawl: proof, records, and who came back after he was fenced off; empty where nothing is."""
        db = connect(self.db, readonly=True)
        try:
            (job,) = jobs.every(db)
            verdict = verify(db, job, full=True)
            wanted = sum(row["outcome"] == "done" for row in self.site.shop.truth())
            found = int(db.rows_text("SELECT COUNT(*) FROM shelf_product")[0][0])
        finally:
            db.close()
        sql = "SELECT shard, epoch FROM ledger GROUP BY shard, epoch HAVING COUNT(DISTINCT owner) > 1"
        return [
            *([] if verdict.ok else [f"verify: {verdict.summary()}"]),
            *([f"{found} records, expected {wanted}"] if found != wanted else []),
            *(f"two workers wrote into shard {shard} in its epoch {epoch}" for shard, epoch in self.rows(sql)),
        ]

    def stats(self) -> dict[str, Any]:
        """What the site itself says."""
        with urlopen(f"{self.site.shop.origin(0)}/_stats", timeout=30) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def arrivals(self) -> dict[str, list[float]]:
        """Host -> times at which its requests came, in order, as the site logged them."""
        assert isinstance(self.site.log, io.StringIO)
        found: dict[str, list[float]] = defaultdict(list)
        for line in self.site.log.getvalue().splitlines():
            at, page, _ = line.split("\t")
            found[page.partition("/")[0]].append(float(at))
        return {host: sorted(times) for host, times in found.items()}


@contextmanager
def team(
    forks: Nursery, db: str, shop: Shop, folder: Path, *, latency_s: float = 0.0, server: Any = None, **flags: object
) -> Iterator[Team]:
    """A site that is served behind a gate, and workers that end with the block."""
    with gated(shop, latency_s=latency_s) as (site, _):
        made = Team(forks, db, site, folder, {**FLAGS, **flags}, server=server)
        try:
            yield made
        finally:
            for born in made.lives:
                born.kill()
