"""Many hosts at a pace, shared by several workers: the rate in all, and how soon it is back when one of them is killed.

    python bench/hosts.py                                   # 4 workers, 50 hosts at 2 requests a second each, PostgreSQL
    make bench OF=hosts BENCH="--workers 4 --seconds 30"

The pace of a host is its worker's, so the whole can be no faster than hosts / (delay + latency), whoever has them; a share is
that divided by the workers. The demo shop is served by this process, on loopback; PostgreSQL comes from the wheel of the tests.
Told: pages/s in all, over shares of one worker (at least 3.5 of 4); seconds from a SIGKILL, and from a freeze, until the others
are at that rate again (at most the lease and three heartbeats).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from limpet.demo.catalogue import Shop  # noqa: E402
from limpet.demo.replies import Site  # noqa: E402
from limpet.demo.site import running  # noqa: E402
from tests.servers import postgres  # noqa: E402

#: Seconds over which a rate is taken.
WINDOW_S = 3.0
#: Part of the former rate that counts as all of it.
FULL = 0.85
#: Seconds that anything may take before the bench gives up.
PATIENCE_S = 120.0


@dataclass
class Meter:
    """How many requests a site has seen, by time."""

    site: Site
    seen: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> float:
        """Requests a second over the last window."""
        now = time.monotonic()
        self.seen.append((now, self.site.stats.requests))
        self.seen = [(at, count) for at, count in self.seen if at > now - 2 * WINDOW_S]
        early = [pair for pair in self.seen if pair[0] <= now - WINDOW_S] or self.seen[:1]
        (then, before), (_, after) = early[-1], self.seen[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def until(self, condition: Callable[[float], bool]) -> float:
        """Look until the rate meets a condition: the seconds that it took."""
        began = time.monotonic()
        while not condition(self.look()):
            if time.monotonic() - began > PATIENCE_S:
                raise SystemExit(f"gave up after {PATIENCE_S} s at {self.look():.1f} requests/s")
            time.sleep(0.1)
        return time.monotonic() - began


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description="The rate of several workers over many hosts at a pace.")
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--hosts", type=int, default=50)
    made.add_argument("--delay", type=float, default=0.5, help="seconds between two requests to a host (0.5)")
    made.add_argument("--seconds", type=float, default=20.0, help="how long the rate is measured (20)")
    made.add_argument("--lease", type=float, default=10.0)
    made.add_argument("--out", type=Path, help="a file that takes the figures too")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a figure is not as it should be."""
    options = parser().parse_args(arguments)
    allowed = options.hosts / options.delay
    pages = int(allowed * (options.seconds + 6 * options.lease + 60))
    lines = []
    with TemporaryDirectory() as folder, postgres.running() as server, running(Shop(products=pages, hosts=options.hosts)) as site:
        starts = [word for start in site.shop.starts() for word in ("--start", start)]
        words = ["run", str(ROOT / "examples" / "shop.py"), "--db", server.new_database(), "--quiet", "--lease", str(options.lease)]
        words += ["--delay", str(options.delay), "--per-host", "1", "--concurrency", str(options.hosts), *starts]
        with (Path(folder) / "log").open("wb") as log:
            workers = [subprocess.Popen([sys.executable, "-m", "limpet", *words], stdout=log, stderr=log) for _ in range(options.workers)]
            try:
                lines = measured(options, Meter(site), workers, allowed)
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(f"{text}\n", encoding="utf-8")
    return int(any("TOO" in line for line in lines))


def measured(options: argparse.Namespace, meter: Meter, workers: Sequence[subprocess.Popen[bytes]], allowed: float) -> list[str]:
    """The figures, a line each."""
    share = allowed / options.workers
    bound = options.lease * 1.6
    meter.until(lambda rate: rate > 0.5 * allowed)
    time.sleep(options.lease)  # until all have joined, and have an even share
    before, began = meter.site.stats.requests, time.monotonic()
    time.sleep(options.seconds)
    rate = (meter.site.stats.requests - before) / (time.monotonic() - began)
    shares = rate / share
    lines = [
        f"{options.workers} workers, {options.hosts} hosts, {options.delay} s between requests: at most {allowed:.0f} requests/s",
        f"in all {rate:.1f} requests/s = {shares:.2f} shares of one worker{verdict_on(rate / allowed)}",
    ]
    for name, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        victim = workers[0] if name == "killed" else workers[1]
        os.kill(victim.pid, number)
        took = back_again(meter, FULL * rate, bound)
        slow = took > bound + WINDOW_S
        told = f"after {took:.1f} s (lease + 3 heartbeats: {bound:.0f} s)"
        lines.append(f"one {name}: the others at {FULL:.0%} of that again {told}{': TOO LATE' if slow else ''}")
        if number == signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
    return lines


def back_again(meter: Meter, full: float, bound_s: float) -> float:
    """Seconds from now until the rate is below `full` for the last time, as far as it is looked at; 0 where it never is."""
    hit, last = time.monotonic(), 0.0
    while (now := time.monotonic() - hit) < bound_s + 3 * WINDOW_S:
        if meter.look() < full:
            last = now
        time.sleep(0.1)
    return max(0.0, last - WINDOW_S / 2)


def verdict_on(part: float) -> str:
    """What to say of a rate that is this part of what the hosts allow: at least 3.5 of 4 shares, and never more than all."""
    return ": TOO FEW" if part < 3.5 / 4 else ": TOO FAST, the hosts allow less" if part > 1.02 else ""


if __name__ == "__main__":
    sys.exit(main())
