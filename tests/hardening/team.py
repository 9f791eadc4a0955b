"""Workers of one job, on any kind of database: started, hit, and asked by its rows what became of it.

with team(forks, databases.new(), Shop(products=60, hosts=4), folder) as crowd:
    first, second = crowd.start(), crowd.start()
    crowd.until(lambda: crowd.shares() == [4, 4])
"""

from __future__ import annotations

import io
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from limpet.errors import StoreError, UsageError
from limpet.store import jobs
from limpet.store.dialect import Row
from limpet.store.export import Tally, choose, chunks
from limpet.store.opening import connect
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

    def arrivals(self) -> dict[str, list[float]]:
        """Host -> times at which its requests came, in order, as the site logged them."""
        assert isinstance(self.site.log, io.StringIO)
        found: dict[str, list[float]] = defaultdict(list)
        for line in self.site.log.getvalue().splitlines():
            at, page, _ = line.split("\t")
            found[page.partition("/")[0]].append(float(at))
        return {host: sorted(times) for host, times in found.items()}


@contextmanager
def team(forks: Nursery, db: str, shop: Shop, folder: Path, *, latency_s: float = 0.0, **flags: object) -> Iterator[Team]:
    """A site that is served, and workers that end with the block."""
    with running(shop, latency_s=latency_s, log=io.StringIO()) as site:
        made = Team(forks, db, site, folder, {**FLAGS, **flags})
        try:
            yield made
        finally:
            for born in made.lives:
                born.kill()
