"""A fault at the Nth system call, by strace: the process is killed there, or the call fails.

The signal comes on entry, before the call acts. Calls are counted by thread; the store's thread makes nearly all of those
that matter. Without `--seccomp-bpf`: with it strace 6.1 never delivers the signal, and says nothing. So each case proves
that its fault fired, and a sweep of faults that never fire fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash.nursery import Born
from tests.crash.trial import Trial

#: The calls that change a database file, as patterns: some machines have `unlinkat` alone.
CALLS = {"fdatasync": "fdatasync", "pwrite64": "pwrite64", "unlink": "/^unlink(at)?$", "ftruncate": "ftruncate"}
ERRORS = ("EIO", "ENOSPC", "EROFS")

#: Wide windows for the life after the fault: it only has to complete.
WIDE: Mapping[str, object] = {"commit-pages": 100, "commit-pages-first": 20, "concurrency": 8}

#: Waits of a store that takes nothing, cut short: a disk that is full for ever would cost each case seconds.
IMPATIENT: Mapping[str, object] = {"limpet.engine.worker.PATIENCE_S": 0.1, "limpet.store.commit.SETTLE_WAITS_S": [0.01, 0.01]}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the Nth call."""

    call: str
    n: int
    error: str = ""  # "" kills
    lasts: bool = False  # from the Nth call on

    def __str__(self) -> str:
        return f"{self.error or 'KILL'} at {self.call} {self.n}{'+' if self.lasts else ''}"

    @property
    def injection(self) -> str:
        """As strace spells it."""
        effect = f"error={self.error}" if self.error else "signal=KILL"
        return f"{CALLS[self.call]}:{effect}:when={self.n}{'+' if self.lasts else ''}"


def has_strace() -> bool:
    """Whether strace is here, and may trace a process of its own."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode == 0


@contextmanager
def traced(born: Born, log: Path, *, call: str, fault: Fault | None = None) -> Iterator[None]:
    """Trace a life that waits for it; its calls are in `log` once it has ended."""
    command = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS[call]}"]
    command += ["-e", f"inject={fault.injection}"] if fault else []
    with subprocess.Popen([*command, "-p", str(born.pid)], stderr=subprocess.PIPE) as tracer:
        try:
            yield
        finally:
            born.kill()
            assert tracer.stderr
            said = tracer.stderr.read().decode()
            assert tracer.wait(30) == 0, f"strace: {said}"


def run_traced(trial: Trial, fault: Fault, **hooks: Any) -> tuple[int, str, bool]:
    """A life with a fault: its exit code, what it printed, and whether the fault fired."""
    log = trial.folder / f"calls-{len(trial.lives)}"
    born = trial.start(is_traced=True, **hooks)
    with traced(born, log, call=fault.call, fault=fault):
        code = born.ended()
    fired = code == -9 if not fault.error else "(INJECTED)" in log.read_text()
    log.unlink()
    return code, born.printed(), fired


def calls_of(trial: Trial, call: str, **hooks: Any) -> int:
    """How often the busiest thread of an undisturbed life makes a call: a fault beyond that never fires."""
    log = trial.folder / "calls"
    born = trial.start(is_traced=True, **hooks)
    with traced(born, log, call=call):
        assert born.ended() == 0, born.printed()
    lines = re.findall(rf"^(\d+) +{call}", log.read_text(), re.MULTILINE)
    return max(Counter(lines).values(), default=0)


def killed(trial: Trial, fault: Fault, **hooks: Any) -> list[str]:
    """Kill a crawl at a call, look at what is left, and let it finish: what is wrong; empty where nothing is."""
    code, printed, fired = run_traced(trial, fault, **hooks)
    if not fired:
        return [f"{fault} never fired: exit code {code}: {printed}"]
    found = trial.wounds()
    trial.finish(flags=WIDE)
    return found + trial.faults()


def failed(trial: Trial, fault: Fault) -> list[str]:
    """Let a call of a crawl fail, look at what is left, and let it finish: what is wrong; empty where nothing is.

    The life may go on to its end. Where it does not, it says so by its exit code, and names the file.
    """
    code, printed, fired = run_traced(trial, fault, constants=IMPATIENT)
    if not fired:
        return [f"{fault} never fired: exit code {code}: {printed}"]
    found = trial.wounds()
    if code == 0:
        found += trial.faults()
    elif code != 4 or str(trial.db.parent) not in printed or "Traceback" in printed:
        found.append(f"{fault}: exit code {code}, and printed {printed!r}")
    trial.finish(flags=WIDE)
    return found + trial.faults()
