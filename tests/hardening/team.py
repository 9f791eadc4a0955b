"""Workers of one job, on any kind of database: started, hit, and asked by its rows what became of it.

with team(forks, databases.new(), Shop(products=60, hosts=4), folder) as crowd:
    first, second = crowd.start(), crowd.start()
    crowd.until(lambda: crowd.shares() == [4, 4])
"""

from __future__ import annotations

import io
import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from limpet.errors import StoreError, UsageError
from limpet.store import jobs
from limpet.store.dialect import Row, sqlite_path
from limpet.store.export import Tally, choose, chunks
from limpet.store.opening import connect
from limpet.store.sqlite import lock_holder_pid
from limpet.store.verify import verify
from limpet.store.views import snapshot
from tests.crash.crawler import Life
from tests.crash.nursery import LOOK_S, PATIENCE_S, Born, Nursery
from tests.crash.trial import SPIDERS

#: Eight shards, small windows, and a heartbeat of 0.4 s: whatever happens, happens soon, and a commit has several parts.
FLAGS: Mapping[str, object] = {"shards": 8, "lease": 2, "commit-pages": 20, "commit-pages-first": 5, "commit-ms": 100, "backoff": 0.05}


#: Seconds that a condition has to come true in, once every worker has ended: its last rows, its last processes.
OVER_S = 10.0


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

    @contextmanager
    def unfinished(self) -> Iterator[None]:
        """Put a host on hold while the block runs: however slow the machine is, the crawl is not over before the block is."""
        host = self.site.shop.starts()[-1].removeprefix("http://").rstrip("/")
        self.until(lambda: self.limpet("pause", host, "--reason", "not yet")[0] == 0, what="a job")
        yield
        assert self.limpet("resume", host)[0] == 0

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

    def until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S, *, what: str = "it") -> float:
        """Look until the condition holds: the seconds that it took. Too long fails the test."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            is_over = bool(self.lives) and all(born.pid in self.forks.codes for born in self.lives)
            if (is_over and waited > OVER_S) or waited > timeout_s:
                told = "".join(f"\n--- {born.pid}, {self.forks.codes.get(born.pid)}: {born.printed()}" for born in self.lives)
                raise AssertionError(f"{what} did not come in {waited:.1f} s: {self.owned()}{told}")
            self.forks.wait(-1, LOOK_S)  # never born: a wait that nothing ends but its time
        return time.monotonic() - began

    def ended(self, *, ok: frozenset[int] = frozenset({0, 6}), timeout_s: float = PATIENCE_S) -> list[int]:
        """The exit codes of all workers, once every one has ended; all must be among `ok`, or a SIGKILL of the test's own."""
        codes = [born.ended(timeout_s) for born in self.lives]
        strange = [born.printed() for born, code in zip(self.lives, codes, strict=True) if code not in (*ok, -signal.SIGKILL)]
        assert not strange, "\n".join([str(codes), *strange])
        return codes

    # -- what the database says --------------------------------------------------------------

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Rows, on a connection of their own: any worker may just be holding anything. None while there is no table, or no server."""
        try:
            db = connect(self.db, readonly=True)
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
        """Process -> why it was certified dead, of those that were."""
        return dict(self.rows("SELECT pid, dead_reason FROM worker WHERE dead = 1"))

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
    """A site that is served, and workers that end with the block."""
    with running(shop, latency_s=latency_s, log=io.StringIO()) as site:
        made = Team(forks, db, site, folder, {**FLAGS, **flags}, server=server)
        try:
            yield made
        finally:
            for born in made.lives:
                born.kill()
