"""Runs of a spider as a user makes them, one or several processes, killed or not, and what the database says afterwards."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"

#: Seconds without progress after which a run hangs.
PATIENCE_S = 240.0
#: Seconds between two looks at what runs.
LOOK_S = 0.005
#: The same once nothing more is to be hit.
LOOK_LATER_S = 1.0
#: Small windows and a short lease: whatever happens, happens soon.
FLAGS = ("--quiet", "--lease", "2", "--commit-ms", "50", "--backoff", "0.05", "--outage-after", "0")


@dataclass
class Collector:
    """One job of a spider in one database."""

    spider: Path
    db: str
    folder: Path
    arguments: Sequence[str] = ()
    flags: Sequence[str] = FLAGS

    def command(self, *words: str) -> list[str]:
        """A command line of this Limpet's."""
        return [sys.executable, "-m", "limpet", *words]

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Begin a worker, which is a process of its own."""
        words = self.command("run", str(self.spider), "--db", self.db, *self.flags, *self.arguments, *more)
        with (self.folder / "worker.log").open("ab") as log:
            return subprocess.Popen(words, cwd=self.folder, stdout=log, stderr=log, env=environment(), start_new_session=True)

    def run(self, *more: str) -> int:
        """One worker, to its end; its exit code."""
        return self.start(*more).wait(PATIENCE_S)

    def limpet(self, *words: str, ok: Sequence[int] = (0,)) -> str:
        """What another command prints."""
        ran = subprocess.run(
            [*self.command(*words), "--db", self.db], cwd=self.folder, capture_output=True, text=True, env=environment(), check=False
        )
        assert ran.returncode in ok, f"limpet {' '.join(words)}: {ran.returncode}: {ran.stdout} {ran.stderr} {self.log()}"
        return ran.stdout

    def export(self, dataset: str, *more: str) -> list[dict[str, object]]:
        """The rows of a dataset."""
        return [json.loads(line) for line in self.limpet("export", dataset, *more).splitlines()]

    def costs(self, *by: str) -> dict[tuple[str, ...], int]:
        """Micro-credits, grouped; reserved ones too."""
        lines = self.limpet("cost", "--json", *[word for name in by for word in ("--by", name)], ok=(0, 6)).splitlines()
        rows = [json.loads(line) for line in lines]
        return {tuple(row[name] for name in by): row["micro"] for row in rows if "micro" in row}

    def log(self) -> str:
        """What the workers said."""
        place = self.folder / "worker.log"
        return place.read_text(errors="replace")[-4000:] if place.exists() else ""

    def together(
        self, progress: Callable[[], int], *, workers: int, kills: int, every: tuple[int, int], seed: int = 1, more: Sequence[str] = (),
        ok: Sequence[int] = (0, 3, 5, 6), freeze_s: float = 0.0, hold: Callable[[int | None], None] = lambda at: None,
    ) -> tuple[int, list[int]]:  # fmt: skip
        """Workers side by side, hit by their progress; (hits, exit codes). A worker that is killed is replaced.

        `hold` is told up to where progress may go until the next hit, and None once there is none to come.
        """
        crew = [self.start(*more) for _ in range(workers)]
        try:
            return self._watch(crew, progress, kills, every, random.Random(seed), more, ok, freeze_s, hold)
        finally:
            hold(None)
            for one in crew:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()

    def _watch(
        self, crew: list[subprocess.Popen[bytes]], progress: Callable[[], int], kills: int, every: tuple[int, int], rng: random.Random,
        more: Sequence[str], ok: Sequence[int], freeze_s: float, hold: Callable[[int | None], None],
    ) -> tuple[int, list[int]]:  # fmt: skip
        frozen: list[tuple[float, subprocess.Popen[bytes]]] = []
        look = threading.Event()
        hits, codes, seen, since = 0, [], progress(), time.monotonic()
        looked_s, at = since, seen + rng.randint(*every)
        hold(at if kills else None)
        while crew:
            if hits < kills or time.monotonic() > looked_s + LOOK_LATER_S:
                looked_s, found = time.monotonic(), progress()
                seen, since = (seen, since) if found == seen else (found, looked_s)
            assert time.monotonic() < since + PATIENCE_S, f"it hangs: {self.log()}"
            for one in [one for one in crew if one.poll() is not None]:
                crew.remove(one)
                codes.append(one.returncode)
                assert one.returncode in ok, f"a worker ended with {one.returncode}: {self.log()}"
            awake = [one for one in crew if one not in [asleep for _, asleep in frozen]]
            if hits < kills and awake and seen >= at:
                victim = rng.choice(awake)
                if freeze_s and hits % 2 == 0:
                    os.killpg(victim.pid, signal.SIGSTOP)
                    frozen.append((time.monotonic() + freeze_s, victim))
                else:
                    os.killpg(victim.pid, signal.SIGKILL)
                    victim.wait()
                    crew.remove(victim)
                    crew.append(self.start(*more))
                hits += 1
                at = progress() + rng.randint(*every)
                hold(at if hits < kills else None)
            for thawed in [one for one in frozen if one[0] <= time.monotonic()]:
                frozen.remove(thawed)
                if thawed[1].poll() is None:
                    os.killpg(thawed[1].pid, signal.SIGCONT)
            look.wait(LOOK_S)
        return hits, codes


def environment() -> dict[str, str]:
    """Where a child finds this Limpet."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def table(place: Path, heading: Sequence[str], rows: Sequence[Sequence[object]], encoding: str = "utf-8") -> Path:
    """A CSV file."""
    with place.open("w", encoding=encoding, newline="") as lines:
        csv.writer(lines).writerows([heading, *rows])
    return place
