"""A long crawl under a snapshot that somebody forgot: how far its rate falls on PostgreSQL, and who says what holds it back.

    python bench/snapshot.py                                # ten minutes, two workers
    make bench OF=snapshot BENCH="--minutes 2"

An open snapshot keeps every dead row of the hot tables in place, so that each claim and each fence reads past more of them.
The rate is taken before it is opened and in the last part of the time; it should fall by less than half. `limpet doctor` and
`limpet status` must name the process that holds it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import psycopg  # noqa: E402

from limpet.demo.catalogue import Shop  # noqa: E402
from limpet.demo.site import spawned  # noqa: E402
from tests.servers import postgres  # noqa: E402

#: What the forgotten connection calls itself.
NAME = "forgotten-report"
#: Parts of the time: until the rate is steady, while it is taken before, and while it is taken at the end.
WARM, BEFORE, AFTER = 0.1, 0.15, 0.15
#: Seconds after which `limpet doctor` takes a transaction for forgotten.
OLD_S = 60.0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description="The rate of a crawl under one long snapshot.")
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--control", action="store_true", help="open no snapshot: what the growing tables cost by themselves")
    made.add_argument("--out", type=Path, help="a file that takes the figures too")
    return made


def limpet(*words: str) -> str:
    """What a command prints."""
    return subprocess.run([sys.executable, "-m", "limpet", *words], check=False, capture_output=True, text=True).stdout


class Bench:
    """One database, and how much was done in it."""

    def __init__(self, dsn: str, main: int) -> None:
        self.dsn = dsn
        self.main = main  # the server's first process
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Print a figure, and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def one(self, sql: str) -> int:
        """A number from the database."""
        with psycopg.connect(self.dsn, autocommit=True) as line:
            row = line.execute(sql).fetchone()
        return int(row[0]) if row and row[0] is not None else 0

    def done(self) -> int:
        """Tries that have ended, by the books."""
        return self.one("SELECT SUM(done + skipped + dead) FROM ledger")

    def rate(self, seconds: float) -> tuple[float, float]:
        """Tasks a second over the next seconds, and milliseconds of the server's CPU for each, which a busy machine does not change."""
        before, cpu_before, began = self.done(), self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        tasks, cpu_s = self.done() - before, self.cpu_s() - cpu_before
        return tasks / (time.monotonic() - began), 1000 * cpu_s / max(1, tasks)

    def cpu_s(self) -> float:
        """Seconds of CPU that the processes of the server have used which live now."""
        ticks = 0
        for child in Path(f"/proc/{self.main}/task/{self.main}/children").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                ticks += sum(map(int, Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def dead_rows(self) -> str:
        """Dead rows of the hot tables, by the server's count."""
        with psycopg.connect(self.dsn, autocommit=True) as line:
            rows = line.execute(
                "SELECT relname, n_dead_tup, pg_relation_size(relid) / 1024 FROM pg_stat_user_tables"
                " WHERE relname IN ('task', 'shard', 'worker', 'host') ORDER BY relname"
            ).fetchall()
        return ", ".join(f"{name} {dead:,} dead, {kb:,} kB" for name, dead, kb in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where the rate fell by half, or nobody named the snapshot."""
    options = parser().parse_args(arguments)
    whole_s = options.minutes * 60
    with (
        TemporaryDirectory() as folder,
        postgres.running() as server,
        spawned(Shop(products=int(max(20_000, 1_000 * whole_s)), hosts=8)) as shop,
        (Path(folder) / "log").open("wb") as log,
    ):
        bench = Bench(server.new_database(), server.process.pid)
        starts = [word for start in shop.starts() for word in ("--start", start)]
        words = ["run", str(ROOT / "examples" / "shop.py"), "--db", bench.dsn, "--quiet", *starts]
        workers = [subprocess.Popen([sys.executable, "-m", "limpet", *words], stdout=log, stderr=log) for _ in range(options.workers)]
        try:
            failed = measured(bench, whole_s, control=options.control)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(f"{line}\n" for line in bench.lines), encoding="utf-8")
    return int(failed)


def measured(bench: Bench, whole_s: float, *, control: bool) -> bool:
    """Whether a figure is not as it should be."""
    while not bench.one("SELECT COUNT(*) FROM pg_class WHERE relname = 'ledger'") or not bench.done():
        time.sleep(0.2)
    time.sleep(WARM * whole_s)
    before, cpu_before = bench.rate(BEFORE * whole_s)
    bench.say(f"before: {before:.0f} tasks/s, {cpu_before:.2f} ms of the server's CPU each; {bench.dead_rows()}")
    with psycopg.connect(bench.dsn, application_name=NAME) as forgotten:
        forgotten.execute("SET idle_in_transaction_session_timeout = 0")
        forgotten.commit()
        forgotten.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        forgotten.execute("SELECT COUNT(*) FROM shard")
        if control:
            forgotten.rollback()
        held = time.monotonic()
        time.sleep(max(OLD_S + 1.0, (1 - WARM - BEFORE - AFTER) * whole_s))
        after, cpu_after = bench.rate(AFTER * whole_s)
        lasted = f"{'without' if control else 'with'} a snapshot held for {time.monotonic() - held:.0f} s"
        bench.say(f"{lasted}: {after:.0f} tasks/s, {cpu_after:.2f} ms of the server's CPU each; {bench.dead_rows()}")
        kept = after / before if before else 0.0
        bench.say(f"that is {kept:.2f} of the rate before (more than 0.50 is wanted){'' if kept > 0.5 else ': TOO SLOW'}")
        silent = [command for command in ("doctor", "status") if NAME not in limpet(command, "--db", bench.dsn)]
        bench.say(f"the snapshot is named by doctor and status{': NOT BY ' + ', '.join(silent) if silent else ''}")
    return not control and (kept <= 0.5 or bool(silent))


if __name__ == "__main__":
    sys.exit(main())
