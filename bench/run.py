"""Speed, as ratios in one interleaved run: Limpet with everything on, the ceiling, and others.

    make bench
    make bench BENCH="--rounds 7 --products 5000 --only limpet ceiling"

Every round runs each contender once, on one site that has all its answers in memory; a figure is the median
over the rounds. `pages/s` are answered requests from the first one to the end of the process, so start-up is left
out and the proof at the end is in; CPU is that of the whole process. The machine's load is the same for all, which
is why ratios are told. The site is the demo shop, or, where LIMPET_SHARED names the folder of originals, the test
site there, and then its own ceiling and Scrapy take part as well, run by `--peers-python`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from limpet.demo.catalogue import Shop
from limpet.demo.site import listen, spawned

ROOT = Path(__file__).parent.parent
#: Where the figures of each run are kept, one file a run.
RESULTS = ROOT / ".crash" / "bench"
#: The contender that the others are measured against.
CEILING = "ceiling"
#: Seconds between two looks for the first request: well below the start-up of any contender.
LOOK_S = 0.005
#: Seconds after which a contender hangs.
LAP_S_MAX = 600.0


@dataclass(frozen=True)
class Served:
    """A site that is being served."""

    port: int
    hosts: int

    @property
    def starts(self) -> list[str]:
        """The start page of each host."""
        return [f"http://127.0.0.{host + 1}:{self.port}/" for host in range(self.hosts)]

    def requests(self) -> int:
        """How many requests it has answered."""
        with urllib.request.urlopen(f"{self.starts[0]}_stats?only=requests") as answer:
            return int(json.load(answer)["requests"])


@dataclass(frozen=True)
class Contender:
    """A crawler: its command for a site and an empty folder of its own, and what its environment needs."""

    name: str
    command: Callable[[Served, Path], list[str]]
    environment: Callable[[Served, Path], Mapping[str, str]] = lambda site, folder: {}


@dataclass(frozen=True)
class Lap:
    """One run of one contender."""

    name: str
    requests: int
    seconds: float  # from the first request to the end of the process
    cpu_s: float
    rss_mb: float

    @property
    def pages_per_s(self) -> float:
        """Answered requests a second."""
        return self.requests / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds a page."""
        return 1000 * self.cpu_s / self.requests


@dataclass
class Race:
    """All laps so far."""

    laps: list[Lap] = field(default_factory=list)

    def median(self, name: str, figure: Callable[[Lap], float]) -> float:
        """The median of one figure of a contender."""
        return statistics.median(figure(lap) for lap in self.laps if lap.name == name)

    def ratio(self, name: str, over: str) -> float:
        """The median, over the rounds, of the ratio of two contenders' pages/s in one round."""
        pairs = zip(*([lap.pages_per_s for lap in self.laps if lap.name == one] for one in (name, over)), strict=False)
        return statistics.median(one / other for one, other in pairs)

    def table(self) -> str:
        """The figures for people."""
        names = list(dict.fromkeys(lap.name for lap in self.laps))
        over = CEILING if CEILING in names else names[0]
        lines = [f"{'contender':<18} {'pages/s':>8} {'(min-max)':>13} {'of ' + over:>14} {'CPU ms/page':>12} {'RSS MB':>7}"]
        for name in names:
            speeds = [lap.pages_per_s for lap in self.laps if lap.name == name]
            span = f"({min(speeds):.0f}-{max(speeds):.0f})"
            lines.append(
                f"{name:<18} {statistics.median(speeds):>8.0f} {span:>13} {self.ratio(name, over):>14.3f} "
                f"{self.median(name, lambda lap: lap.cpu_ms):>12.3f} {self.median(name, lambda lap: lap.rss_mb):>7.0f}"
            )
        return "\n".join(lines)


# -- contenders --------------------------------------------------------------------------------


def limpet(python: str) -> Contender:
    """`limpet run` with everything on: robots.txt, keys, one transaction, the proof of the whole job at the end."""

    def command(site: Served, folder: Path) -> list[str]:
        starts = [word for start in site.starts for word in ("--start", start)]
        return [python, "-m", "limpet", "run", str(ROOT / "examples" / "shop.py"), "--db", f"sqlite:///{folder}/shop.db", *starts]

    return Contender("limpet", command)


def ceiling(python: str, parser: str = "") -> Contender:
    """The ceiling of this folder."""
    name = f"{CEILING}-{parser}" if parser else CEILING
    flags = ["--parser", parser] if parser else []
    return Contender(name, lambda site, folder: [python, str(ROOT / "bench" / "ceiling.py"), *flags, *site.starts])


def originals(shared: Path, python: str) -> list[Contender]:
    """The ceiling and Scrapy of the folder of originals."""

    def place(site: Served, folder: Path) -> dict[str, str]:
        return {"HOSTS": str(site.hosts), "PORT": str(site.port)}

    def scrapy_place(site: Served, folder: Path) -> dict[str, str]:
        return place(site, folder) | {"STATE": str(folder / "scrapy"), "STORE": "feed", "CONCURRENCY": "64"}

    peers = shared / "peers"
    scrapy = [python, "-m", "scrapy", "runspider", str(peers / "scrapy" / "shop.py")]
    return [
        Contender(CEILING, lambda site, folder: [python, str(peers / "common" / "ceiling.py")], place),
        Contender("scrapy-jobdir", lambda site, folder: scrapy, scrapy_place),
    ]


def contenders(options: argparse.Namespace, shared: Path | None) -> list[Contender]:
    """Those that take part, in the order of a round."""
    known = {one.name: one for one in (limpet(sys.executable), ceiling(sys.executable), ceiling(sys.executable, "lxml"))}
    if shared is not None:
        known |= {one.name: one for one in originals(shared, options.peers_python)}
    unknown = set(options.only or ()) - set(known)
    if unknown:
        raise SystemExit(f"no contender named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return [one for name, one in known.items() if name in (options.only or known)]


# -- a race ------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(options: argparse.Namespace, shared: Path | None) -> Iterator[Served]:
    """The site: the original where there is one, else the demo shop; in a process of its own."""
    shop = Shop(products=options.products, hosts=options.hosts, plain=True)
    if shared is None:
        with spawned(shop) as served:
            yield Served(served.port, served.hosts)
        return
    free, sockets = listen(shop)
    for one in sockets:
        one.close()
    shape = ["--port", str(free.port), "--products", str(free.products), "--hosts", str(free.hosts), f"--padding={options.padding}"]
    command = [options.peers_python, str(shared / "testsite" / "site.py"), "serve", *shape, "--cache", "--plain-links", "--plain-charset"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as site:
        try:
            assert site.stdout is not None
            if not site.stdout.readline().startswith("serving"):
                raise SystemExit(f"the site does not serve: {' '.join(command)}")
            yield Served(free.port, free.hosts)
        finally:
            site.terminate()


def lap(contender: Contender, site: Served, folder: Path) -> Lap:
    """Run a contender once, from nothing to its end."""
    before = site.requests()
    environment = {**os.environ, **contender.environment(site, folder)}
    with open(folder / "output.txt", "wb") as output:
        child = subprocess.Popen(contender.command(site, folder), env=environment, stdout=output, stderr=output, cwd=folder)
    began = time.perf_counter()
    first = began
    while site.requests() == before:
        ended = child.poll() is not None
        if ended or time.perf_counter() - began > LAP_S_MAX:
            child.kill()
            raise SystemExit(f"{contender.name} asked for nothing:\n{(folder / 'output.txt').read_text(errors='replace')}")
        time.sleep(LOOK_S)
        first = time.perf_counter()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - first
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{contender.name} ended with {child.returncode}:\n{(folder / 'output.txt').read_text(errors='replace')}")
    return Lap(contender.name, site.requests() - before, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def race(runners: Sequence[Contender], site: Served, rounds: int) -> Race:
    """Every contender once a round, after one that warms the site."""
    so_far = Race()
    for number in range(-1, rounds):
        for runner in runners[:1] if number < 0 else runners:
            folder = Path(tempfile.mkdtemp(prefix="limpet-bench-"))
            try:
                found = lap(runner, site, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if number < 0:
                continue
            so_far.laps.append(found)
            print(
                f"  round {number + 1}: {found.name:<18} {found.pages_per_s:7.0f} pages/s {found.cpu_ms:7.3f} ms of CPU a page", flush=True
            )
    return so_far


def main() -> None:
    """Race as the command line says, print the table, and keep the laps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders that take part; all, as without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--products", type=int, default=5000)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--padding", type=int, default=0, help="bytes of text that each product page has more (the original site alone)")
    parser.add_argument("--peers-python", default=sys.executable, help="an interpreter that has selectolax and scrapy")
    options = parser.parse_args()
    shared = Path(os.environ["LIMPET_SHARED"]) if os.environ.get("LIMPET_SHARED") else None
    with serving(options, shared) as site:
        found = race(contenders(options, shared), site, options.rounds)
    served = "the original site" if shared else "the demo shop"
    print(f"\n{options.products} products on {options.hosts} hosts, {options.rounds} rounds, {served}")
    print(found.table())
    RESULTS.mkdir(parents=True, exist_ok=True)
    place = RESULTS / f"speed-{time.strftime('%Y%m%d-%H%M%S')}.json"
    place.write_text(json.dumps([asdict(one) for one in found.laps], indent=1) + "\n", encoding="utf-8")
    print(f"laps: {place.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
