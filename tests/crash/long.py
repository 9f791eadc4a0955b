"""The long forms of the crash tests, a line a case; what has passed is not done again until --fresh.

    make crash
    make crash CRASH="--only sweep power"       or  --list, --fresh

Each case is one that the suite has in short, or one that takes too long for it. State and failures are kept in `.crash/`.
With LIMPET_SHARED in the environment, the original site and crash test in that folder are run as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from limpet import failpoint
from limpet.demo.catalogue import FaultProfile, Shop
from limpet.demo.site import spawned
from tests.collecting.long import collecting_cases
from tests.crash import powercut, sweep
from tests.crash.crowd import crowd_cases
from tests.crash.nursery import ROOT, Nursery, nursery
from tests.crash.recorder import Operation, operations
from tests.crash.storm import storm
from tests.crash.torture import Ordeal, torture
from tests.crash.trial import FLAGS, Ground, Trial, ground, memory_folder

STATE = ROOT / ".crash"

#: Faults of each kind in the long sweeps.
KILLS, REFUSALS = 300, 200
#: One task a commit: 160 products are 340 commits, of a sync each.
NARROW: dict[str, Any] = {**FLAGS, "commit-pages": 1, "commit-pages-first": 1, "concurrency": 1}
#: Requests that one kill may cost, at most two windows: a window starts with 20 pages and doubles, and no life saw more than 160.
REPEATED_MAX = 2 * 160
#: Faults in one case: a line each would be 2,000 lines.
CHUNK = 20

#: What is wrong, a line each; empty where nothing is.
Case = Callable[[], list[str]]


@dataclass(slots=True)
class Workshop:
    """What the cases run on; made when it is first asked for."""

    stack: ExitStack
    _made: dict[str, Ground] = field(default_factory=dict)
    _forks: Nursery | None = None
    _recordings: dict[str, list[Operation]] = field(default_factory=dict)

    @property
    def forks(self) -> Nursery:
        """One nursery for all."""
        self._forks = self._forks or self.stack.enter_context(nursery())
        return self._forks

    def ground(self, products: int, hosts: int = 3) -> Ground:
        """A site of so many products."""
        name = f"{products} {hosts}"
        if name not in self._made:
            self._made[name] = self.stack.enter_context(ground(Shop(products=products, hosts=hosts), forks=self.forks))
        return self._made[name]

    def recording(self, synchronous: str) -> list[Operation]:
        """Every operation of a crawl of 100 products."""
        if synchronous not in self._recordings:
            trial = self.ground(100).trial(lease=0.3)
            path = trial.folder / "recording"
            constants = {"limpet.store.sqlite.WAL_PAGES": 150}
            code, printed = trial.run(recording=str(path), acks="", synchronous=synchronous, constants=constants)
            assert code == 0, printed
            self._recordings[synchronous] = list(operations(path))
            trial.remove()
        return self._recordings[synchronous]


@contextmanager
def removed(trial: Trial) -> Iterator[Trial]:
    """A trial whose folder is gone afterwards."""
    yield trial
    trial.remove()


# -- failpoints -----------------------------------------------------------------------------


def failpoint_cases(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """A kill at every hit of every step: a crawl comes to some of them 15 times, to `before_send` 66 times."""
    for name in failpoint.ALL:
        yield f"failpoint {name}", partial(every_hit, shop, name)


def every_hit(shop: Workshop, name: str) -> list[str]:
    """Kill at the first, second, third ... hit, until one is not met any more."""
    found: list[str] = []
    for hit in range(1, 200):
        with removed(shop.ground(24).trial()) as trial:
            log = trial.folder / "fired"
            code, printed = trial.run(failpoint=f"{name}@{hit}=kill", failpoint_log=str(log))
            if code == 0 and not log.exists():
                return found if hit > 1 else [f"{name} was never met"]
            if code != -9:
                return [*found, f"{name}@{hit}: exit code {code}: {printed}"]
            found += [f"{name}@{hit}: {wound}" for wound in trial.wounds()]
            trial.finish()
            found += [f"{name}@{hit}: {fault}" for fault in trial.faults()]
    return found


# -- sweeps ---------------------------------------------------------------------------------


def sweep_cases(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """The first 300 syncs and writes, and every deletion and truncation; three errors at the first 200 of two calls."""
    for call, calls in (("fdatasync", KILLS), ("pwrite64", KILLS), ("unlink", 6), ("ftruncate", 4)):
        for first in range(1, calls + 1, CHUNK):
            faults = [sweep.Fault(call, n) for n in range(first, min(first + CHUNK, calls + 1))]
            yield f"sweep KILL {call} {first}-{faults[-1].n}", partial(kill_at, shop, faults)
    for error in sweep.ERRORS:
        for call in ("fdatasync", "pwrite64"):
            for first in range(1, REFUSALS + 1, CHUNK):
                faults = [sweep.Fault(call, n, error, lasts=n % 4 == 0) for n in range(first, first + CHUNK)]
                yield f"sweep {error} {call} {first}-{faults[-1].n}", partial(refuse_at, shop, faults)


def kill_at(shop: Workshop, faults: Sequence[sweep.Fault]) -> list[str]:
    """Kill at each; the last deletions and truncations may not come, and say so, but the first must."""
    found: list[str] = []
    for fault in faults:
        with removed(shop.ground(160).trial(**NARROW)) as trial:
            wrong = sweep.killed(trial, fault)
        is_optional = fault.call in ("unlink", "ftruncate") and fault.n > 2
        found += [f"{fault}: {line}" for line in wrong if not (is_optional and "never fired" in line)]
    return found


def refuse_at(shop: Workshop, faults: Sequence[sweep.Fault]) -> list[str]:
    """Let each call fail, every fourth from then on."""
    found: list[str] = []
    for fault in faults:
        with removed(shop.ground(160).trial(**NARROW)) as trial:
            found += [f"{fault}: {line}" for line in sweep.failed(trial, fault)]
    return found


# -- power cuts -----------------------------------------------------------------------------


def power_cases(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """More than 5,000 disks, and 60 crawls that go on from one; the control must report a loss."""
    for seed in (1, 2):
        yield f"power cut, seed {seed}", partial(cut_power, shop, seed)
    yield "power cut, synchronous=NORMAL must lose", partial(must_lose, shop)
    for seed in range(1, 4):
        yield f"power cut, going on, seed {seed}", partial(go_on, shop, seed)


def cut_power(shop: Workshop, seed: int) -> list[str]:
    """Half of the disks that were asked for."""
    recording = shop.recording("FULL")
    with memory_folder() as folder:
        findings = powercut.inspect(powercut.cuts(recording, seed=seed, mixes=2), folder)
    print(f"    {findings.states} states, {findings.distinct} of them distinct")
    few = [f"only {findings.distinct} distinct states"] if findings.distinct < 2500 else []
    return few + findings.unopenable + findings.unproved + findings.lost


def must_lose(shop: Workshop) -> list[str]:
    """The control: what is not synced is lost, and the inspection sees it."""
    with memory_folder() as folder:
        findings = powercut.inspect(powercut.cuts(shop.recording("NORMAL"), seed=1, mixes=1, every=3), folder)
    print(f"    {len(findings.lost)} of {findings.states} states have lost what was acknowledged, as they must")
    return [*([] if findings.lost else ["nothing was lost"]), *findings.unopenable, *findings.unproved]


def go_on(shop: Workshop, seed: int) -> list[str]:
    """Twenty crawls, each from the disk of another cut to its end."""
    recording = shop.recording("FULL")
    states = list(powercut.cuts(recording, seed=seed, mixes=1, every=max(1, len(recording) // 20)))
    found: list[str] = []
    for number in range(20):
        content, acks = states[number * len(states) // 20]
        with removed(shop.ground(100).trial(lease=0.3)) as trial:
            powercut.lay(content, trial.folder)
            trial.acks.write_text("".join(f"{ack}\n" for ack in acks))
            found += [f"disk {number}: {wound}" for wound in trial.wounds()]
            trial.finish()
            found += [f"disk {number}: {fault}" for fault in trial.faults()]
    return found


# -- storms ---------------------------------------------------------------------------------


def storm_cases(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """200 kills 5 to 20 requests apart, three times."""
    for seed in range(1, 4):
        yield f"storm of 200 kills, seed {seed}", partial(storm_of, shop, seed)


def storm_of(shop: Workshop, seed: int) -> list[str]:
    """It completes, nobody is dead of it, and nothing that was acknowledged was ever gone."""
    place = shop.ground(1300, 4)
    with removed(place.trial(**{"commit-pages": 500, "commit-pages-first": 20, "commit-ms": 1000})) as trial:
        wounds: list[str] = []
        kills = storm(trial, kills=200, every=(5, 20), rng=random.Random(seed), after_kill=lambda: wounds.extend(trial.wounds()))
        trial.finish()
        few = [f"only {kills} kills until the crawl was complete"] if kills < 200 else []
        return few + wounds + trial.faults()


# -- the crash test itself --------------------------------------------------------------------


def torture_cases(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """examples/shop.py on 2,500 products and 4 hosts: 20 kills, 3 seeds, 3 profiles of faults."""
    profiles: tuple[FaultProfile, ...] = ("none", "mild", "harsh")
    for faults in profiles:
        for seed in (1, 2, 3):
            yield f"crash test, faults {faults}, seed {seed}", partial(crash_test, faults, seed)
    for seed in (1, 2):
        yield f"crash test, two workers killed, seed {seed}", partial(two_workers, seed, 0.0)
        yield f"crash test, two workers frozen, seed {seed}", partial(two_workers, seed, 3.0)
    if shared := os.environ.get("LIMPET_SHARED"):
        for faults in profiles:
            for seed in (1, 2, 3):
                yield f"original crash test, faults {faults}, seed {seed}", partial(original, Path(shared), faults, seed)


def limpet(*words: str) -> list[str]:
    """A command line of this Limpet's."""
    return [sys.executable, "-m", "limpet", *words]


def crash_test(faults: FaultProfile, seed: int) -> list[str]:
    """Our own harness and site: perfect, the digest of an unkilled crawl, no breach of robots.txt, and a proof that passes."""
    with memory_folder() as folder, spawned(Shop(products=2500, hosts=4, faults=faults, seed=seed)) as shop:
        starts = [word for start in shop.starts() for word in ("--start", start)]
        ends, reports = [], []
        for name, hits in (("quiet", 0), ("killed", 20)):
            db = f"sqlite:///{folder}/{name}.db"
            reports.append(
                torture(
                    Ordeal(
                        crawl=limpet("run", str(ROOT / "examples/shop.py"), "--db", db, "--quiet", *starts),
                        export=limpet("export", "product", "--db", db),
                        truth=[*shop.truth()],
                        stats_url=f"{shop.origin(0)}/_stats",
                        hits=hits,
                        hits_min=18 if hits else 0,
                        seed=seed,
                        environment=environment(),
                    )
                )
            )
            ends.append((digest(db), dead(db), proved(db)))
    quiet, killed = reports
    again = int(str(killed.site["repeated"])) - 2 * int(str(quiet.site["repeated"])) - int(str(quiet.site["pages"]))
    print(f"    {killed.hits} kills, {killed.difference.collected} records, {again} requests repeated because of them, {killed.seconds} s")
    return [
        *(f"{name}: {failing}" for name, report in (("quiet", quiet), ("killed", killed)) for failing in report.failings),
        *([f"differs from the quiet crawl: {ends}"] if ends[0] != ends[1] else []),
        *([f"verify: {ends[1][2]}"] if ends[1][2] else []),
        *([f"{again} requests repeated by {killed.hits} kills: more than two windows each"] if again > killed.hits * REPEATED_MAX else []),
        *([f"{killed.site['breaches']} requests that robots.txt forbids"] if killed.site["breaches"] else []),
    ]


def two_workers(seed: int, pause_s: float) -> list[str]:
    """Two on one file, one of them hit each time: killed, or frozen for longer than its lease of a second."""
    with memory_folder() as folder, spawned(Shop(products=1500, hosts=4, seed=seed)) as shop:
        starts = [word for start in shop.starts() for word in ("--start", start)]
        db = f"sqlite:///{folder}/crawl.db"
        report = torture(
            Ordeal(
                crawl=limpet("run", str(ROOT / "examples/shop.py"), "--db", db, "--quiet", "--lease", "1", *starts),
                export=limpet("export", "product", "--db", db),
                truth=[*shop.truth()],
                stats_url=f"{shop.origin(0)}/_stats",
                hits=15,
                hits_min=8,
                every=(40, 120),
                workers=2,
                pause_s=pause_s,
                seed=seed,
                environment=environment(),
            )
        )
        fault, letters = proved(db), dead(db)
    print(f"    {report.hits} hits, {report.difference.collected} records, {report.seconds} s")
    return [*report.failings, *([f"verify: {fault}"] if fault else []), *letters]


def original(shared: Path, faults: str, seed: int) -> list[str]:
    """The harness and the site that the promise was made with; missing there, it fails."""
    site, harness = shared / "testsite/site.py", shared / "testsite/crashtest.py"
    if not (site.is_file() and harness.is_file()):
        return [f"{site} or {harness} is missing"]
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = str(probe.getsockname()[1])
    shape = ["--port", port, "--products", "2500", "--hosts", "4", "--faults", faults, "--seed", str(seed)]
    stats = f"http://127.0.0.1:{port}/_stats"
    with memory_folder() as folder:
        truth = folder / "truth.jsonl"
        truth.write_bytes(subprocess.run([sys.executable, str(site), "truth", *shape], stdout=subprocess.PIPE, check=True).stdout)
        served = subprocess.Popen([sys.executable, str(site), "serve", *shape], stdout=subprocess.PIPE)
        try:
            assert served.stdout
            served.stdout.readline()
            starts = [word for host in range(1, 5) for word in ("--start", f"http://127.0.0.{host}:{port}/")]
            ends = []
            for name, kills in (("quiet", "0"), ("killed", "20")):
                db = f"sqlite:///{folder}/{name}.db"
                crawl = limpet("run", str(ROOT / "examples/shop.py"), "--db", db, "--quiet", *starts)
                command = [sys.executable, str(harness), "--truth", str(truth), "--stats", stats, "--kills", kills, "--seed", str(seed)]
                command += ["--every", "60", "160", "--min-hits", "18" if kills != "0" else "0", "--ok-exit", "0", "3", "6"]
                command += ["--crawl", shlex.join(crawl), "--export", shlex.join(limpet("export", "product", "--db", db))]
                ran = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
                ends.append((digest(db), dead(db), proved(db)))
                if ran.returncode:
                    return [f"{name}: {ran.stdout[-2000:]} {ran.stderr[-2000:]}"]
        finally:
            served.kill()
            served.communicate()
    print(f"    {' '.join(ran.stdout.split())[:300]}")
    return [] if ends[0] == ends[1] and not ends[1][2] else [f"differs from the quiet crawl: {ends}"]


def environment() -> dict[str, str]:
    """Where a child finds this Limpet."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def told(*words: str) -> tuple[int, str]:
    """What a command of Limpet's says, and its exit code."""
    ran = subprocess.run(limpet(*words), capture_output=True, text=True, env=environment(), check=False)
    return ran.returncode, ran.stdout + ran.stderr


def digest(db: str) -> str:
    """The SHA-256 of the products."""
    return (
        told("export", "product", "--db", db, "-o", os.devnull, "--json")[1].partition('"sha256": "')[2][:64]
        or told("export", "product", "--db", db, "-o", os.devnull)[1].partition("SHA-256 ")[2][:64]
    )


def dead(db: str) -> list[str]:
    """The dead letters."""
    lines = told("dead", "--db", db, "--limit", "0", "--json")[1].splitlines()
    return sorted(f"{row['text']} {row['reason']}" for row in map(json.loads, lines))


def proved(db: str) -> str:
    """What a full proof says where it fails."""
    code, said = told("verify", "--full", "--db", db)
    return said if code else ""


# -- running them -----------------------------------------------------------------------------


def every_case(shop: Workshop) -> Iterator[tuple[str, Case]]:
    """All of them, in order."""
    for cases in (failpoint_cases, sweep_cases, power_cases, storm_cases, torture_cases):
        yield from cases(shop)
    yield from crowd_cases(shop.stack)
    yield from collecting_cases(shop.stack)


def run(name: str, case: Case) -> list[str]:
    """One case; a case that raises has failed."""
    try:
        return case()
    except Exception as error:
        return [f"{type(error).__name__}: {error}", traceback.format_exc()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 where any case has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="name the cases, and whether they have passed")
    parser.add_argument("--fresh", action="store_true", help="forget what has passed")
    options = parser.parse_args(arguments)
    STATE.mkdir(exist_ok=True)
    passed_file = STATE / "passed.jsonl"
    if options.fresh:
        passed_file.unlink(missing_ok=True)
    lines = passed_file.read_text(encoding="utf-8").splitlines() if passed_file.exists() else []
    passed = {json.loads(line)["case"] for line in lines}
    with ExitStack() as stack:
        cases = [(n, c) for n, c in every_case(Workshop(stack)) if not options.only or any(word in n for word in options.only)]
        if options.list:
            print("\n".join(f"{'passed' if name in passed else '      '}  {name}" for name, _ in cases))
            return 0
        failed = sum(not _told(name, case, passed_file) for name, case in cases if name not in passed)
    print(f"{len(cases)} cases, {failed} failed, {sum(name in passed for name, _ in cases)} had passed before")
    return int(failed > 0)


def _told(name: str, case: Case, passed_file: Path) -> bool:
    began = time.monotonic()
    print(f"{name} ...", flush=True)
    wrong = run(name, case)
    seconds = round(time.monotonic() - began, 1)
    print(f"{'FAILED' if wrong else 'passed'}  {name}  {seconds} s", *wrong, sep="\n    ", flush=True)
    place = STATE / "failed.jsonl" if wrong else passed_file
    with place.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": name, "seconds": seconds, "wrong": wrong}) + "\n")
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
