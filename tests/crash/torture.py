"""Hit a crawl again and again, let it finish, and hold what it collected against the truth.

    python -m limpet.demo.site truth --port 8800 --products 2000 > truth.jsonl
    python -m limpet.demo.site serve --port 8800 --products 2000 &
    python -m tests.crash.torture --truth truth.jsonl --stats http://127.0.0.1:8800/_stats --hits 20 --every 60 160 \\
        --crawl 'limpet run shop.py --db sqlite:////tmp/x.db --start http://127.0.0.1:8800/' \\
        --export 'limpet export product --db sqlite:////tmp/x.db --format jsonl'

Hits come by progress, as the site counts its requests: a clock would hit start-up on a loaded machine, and whatever loses
or doubles records would look perfect. A hit kills a worker's whole process group, which is then started anew, or (with a
pause) freezes it, so that others take it for dead before it wakes and tries to write. Nothing here knows Limpet: the crawl
resumes what it finds, and the export prints JSON lines with at least the fields of the truth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO
from urllib.request import urlopen

FIELDS = ("url", "sku", "title", "price", "stock")
#: Seconds between two looks at the site's count: far below the time that a hit's distance in requests takes.
LOOK_S = 0.01
#: Up to so many seconds pass between the goal and the hit, so that hits fall anywhere in a batch.
BLUR_S = 0.03
#: Characters of the workers' standard error that a report keeps: its end says why the last one stopped.
ERRORS_MAX = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordeal:
    """One crawl's trial: what is run, how it is hit, and what it must end with."""

    crawl: Sequence[str]
    export: Sequence[str]
    truth: Sequence[Mapping[str, object]]
    stats_url: str
    hits: int = 0
    every: tuple[int, int] = (60, 160)  # requests from one hit to the next: from, to
    workers: int = 1
    pause_s: float = 0.0  # freeze for so long instead of killing
    hits_min: int | None = None  # fewer hits than this prove nothing; none given: all of `hits`
    ok_exits: frozenset[int] = frozenset({0, 3, 6})
    patience_s: float = 300.0
    seed: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    after_hit: Callable[[int], None] | None = None  # told how many hits were made; for checks between two lives


@dataclass(frozen=True, slots=True)
class Difference:
    """How a collection differs from the truth: URLs, each kind in order."""

    missing: tuple[str, ...]
    double: tuple[str, ...]
    wrong: tuple[str, ...]
    extra: tuple[str, ...]
    torn: int
    expected: int
    collected: int

    @property
    def is_none(self) -> bool:
        """Whether the collection is the truth, each record once."""
        return not (self.missing or self.double or self.wrong or self.extra or self.torn)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of an ordeal. `failings` is empty exactly where the crawl passed it."""

    hits: int
    exits: dict[int, int]
    hung: int
    export_exit: int
    difference: Difference
    failings: tuple[str, ...]
    seconds: float
    site: dict[str, object]
    errors: str

    @property
    def is_perfect(self) -> bool:
        """Whether nothing is missing, double, wrong or extra, and enough hits were made."""
        return not self.failings


def torture(ordeal: Ordeal) -> Report:
    """Run the workers, hit them as often as asked, wait for their end, and compare; nothing of theirs is left running."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        hits, exits, hung = _run(ordeal, errors)
        printed = subprocess.run(
            ordeal.export, stdout=subprocess.PIPE, stderr=errors, env=_environment(ordeal), check=False, timeout=ordeal.patience_s
        )
        errors.seek(0)
        tail = errors.read().decode(errors="replace")[-ERRORS_MAX:]
    difference = compare(printed.stdout.splitlines(), ordeal.truth)
    return Report(
        hits=hits,
        exits=dict(exits),
        hung=hung,
        export_exit=printed.returncode,
        difference=difference,
        failings=tuple(_failings(ordeal, hits, exits, hung, printed.returncode, difference)),
        seconds=round(time.monotonic() - began, 2),
        site=_asked(ordeal.stats_url),
        errors=tail,
    )


def compare(lines: Iterable[bytes], truth: Iterable[Mapping[str, object]]) -> Difference:
    """Hold exported JSON lines against the truth; values are compared as text, a line that is no record counts as torn."""
    rows: list[dict[str, str]] = []
    torn = 0
    for line in lines:
        try:
            row = json.loads(line)
            rows.append({name: str(row[name]) for name in FIELDS})
        except (ValueError, KeyError, TypeError):
            torn += 1
    wanted = {str(row["url"]): {name: str(row[name]) for name in FIELDS} for row in truth if row["outcome"] == "done"}
    times = Counter(row["url"] for row in rows)
    return Difference(
        missing=tuple(sorted(wanted.keys() - times.keys())),
        double=tuple(sorted(url for url, count in times.items() if count > 1)),
        wrong=tuple(sorted(row["url"] for row in rows if row != wanted.get(row["url"], row))),
        extra=tuple(sorted(times.keys() - wanted.keys())),
        torn=torn,
        expected=len(wanted),
        collected=len(rows),
    )


def _failings(ordeal: Ordeal, hits: int, exits: Counter[int], hung: int, export_exit: int, difference: Difference) -> Iterable[str]:
    hits_min = ordeal.hits if ordeal.hits_min is None else ordeal.hits_min
    if hits < hits_min:
        yield f"{hits} hits, {hits_min} wanted: the crawl was over too soon, so use a larger site or smaller steps"
    if hung:
        yield f"{hung} of {ordeal.workers} workers had not ended {ordeal.patience_s} s after the last hit"
    if strange := sorted(exits.keys() - ordeal.ok_exits):
        yield f"exit codes {strange}, expected {sorted(ordeal.ok_exits)}"
    if export_exit:
        yield f"the export ended with exit code {export_exit}"
    for kind in ("missing", "double", "wrong", "extra"):
        if urls := getattr(difference, kind):
            yield f"{len(urls)} {kind}: {', '.join(urls[:5])}"
    if difference.torn:
        yield f"{difference.torn} lines of the export are no records"


def _run(ordeal: Ordeal, errors: IO[bytes]) -> tuple[int, Counter[int], int]:
    """The whole life of the workers: hits made, exit codes, and how many hung."""
    rng = random.Random(ordeal.seed)
    with ExitStack() as stack:
        workers = [_Worker(ordeal, errors) for _ in range(ordeal.workers)]
        for worker in workers:
            stack.callback(worker.end)
        hits = 0
        while hits < ordeal.hits and (victim := _next_victim(ordeal, rng, workers)):
            if ordeal.pause_s:
                victim.freeze(ordeal.pause_s)
            else:
                victim.kill_and_restart()
            hits += 1
            if ordeal.after_hit:
                ordeal.after_hit(hits)
        deadline = time.monotonic() + ordeal.patience_s
        codes = [worker.wait(max(0.1, deadline - time.monotonic())) for worker in workers]
        return hits, Counter(code for code in codes if code is not None), codes.count(None)


def _next_victim(ordeal: Ordeal, rng: random.Random, workers: Sequence[_Worker]) -> _Worker | None:
    """Wait for the next hit's time and draw whom it hits; None once every worker has ended, or hangs."""
    goal = _served(ordeal) + rng.randint(*ordeal.every)
    deadline = time.monotonic() + ordeal.patience_s
    while _served(ordeal) < goal:
        alive = [worker for worker in workers if worker.is_alive]
        if not alive or time.monotonic() > deadline:
            return None
        alive[0].wait(LOOK_S)
    victim = rng.choice(workers)
    victim.wait(rng.uniform(0, BLUR_S))
    return victim if victim.is_alive else next((worker for worker in workers if worker.is_alive), None)


class _Worker:
    """A command that runs in a process group of its own, and again after each kill."""

    def __init__(self, ordeal: Ordeal, errors: IO[bytes]) -> None:
        self._ordeal = ordeal
        self._errors = errors
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._ordeal.crawl,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=_environment(self._ordeal),
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None where it still runs after so long."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def freeze(self, pause_s: float) -> None:
        self._signal(signal.SIGSTOP)
        self.wait(pause_s)
        self._signal(signal.SIGCONT)

    def kill_and_restart(self) -> None:
        self.end()
        self._process = self._start()

    def end(self) -> None:
        if self.is_alive:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _environment(ordeal: Ordeal) -> dict[str, str]:
    return {**os.environ, **ordeal.environment}


def _served(ordeal: Ordeal) -> int:
    return int(str(_asked(f"{ordeal.stats_url}?only=requests")["requests"]))


def _asked(url: str) -> dict[str, object]:
    with urlopen(url, timeout=30) as answer:
        told: dict[str, object] = json.load(answer)
        return told


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: prints the report as one JSON line; exit code 0 only where the crawl is perfect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crawl", required=True, type=shlex.split)
    parser.add_argument("--export", required=True, type=shlex.split)
    parser.add_argument("--truth", required=True, type=Path, help="JSON lines with url and outcome, and the record where it is done")
    parser.add_argument("--stats", required=True, dest="stats_url", help="address of the site's /_stats")
    parser.add_argument("--hits", type=int, default=0)
    parser.add_argument("--hits-min", type=int, help="fewer are a failed test (default: all of them)")
    parser.add_argument("--every", type=int, nargs=2, default=(60, 160), help="requests between two hits: from, to")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, dest="pause_s", help="freeze for so many seconds, do not kill")
    parser.add_argument("--patience", type=float, default=300.0, dest="patience_s", help="seconds to finish in after the last hit")
    parser.add_argument("--ok-exit", type=int, nargs="*", default=[0, 3, 6], dest="ok_exits")
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args(arguments))
    with options.pop("truth").open(encoding="utf-8") as lines:
        truth = [json.loads(line) for line in lines]
    ok_exits, every = frozenset(options.pop("ok_exits")), tuple(options.pop("every"))
    report = torture(Ordeal(truth=truth, ok_exits=ok_exits, every=every, **options))
    print(json.dumps({"perfect": report.is_perfect, **asdict(report)}, ensure_ascii=False))
    return int(not report.is_perfect)


if __name__ == "__main__":
    sys.exit(main())
