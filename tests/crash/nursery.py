"""Starts lives of a crawler and follows them to their end: each a fork of one process that has everything imported.

    with nursery() as forks:
        life = forks.start(Life(arguments=["run", ...], output="..."))
        assert life.wait(10) == 0

A life is an ordinary process: it is killed, frozen and traced by its id.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.crawler import Life

ROOT = Path(__file__).parent.parent.parent

#: Seconds that anything here may take before a test fails instead of hanging.
PATIENCE_S = 60.0

#: Seconds between two looks at a condition.
LOOK_S = 0.002


@dataclass(slots=True)
class Born:
    """A life that was started."""

    forks: Nursery
    life: Life
    pid: int

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Its exit code, negative for a signal as `subprocess` has it; None where it still lives after so long."""
        return self.forks.wait(self.pid, timeout_s)

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; a life that does not end in time is killed, and fails the test."""
        code = self.wait(timeout_s)
        if code is None:
            self.kill()
            raise AssertionError(f"not ended after {timeout_s} s: {self.printed()}")
        return code

    def until(self, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
        """Look until the condition holds (True) or this process has ended (False); too long fails the test."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.wait(LOOK_S) is not None:
                return bool(condition())
            assert time.monotonic() < deadline, f"nothing came of it in {timeout_s} s: {self.printed()}"
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing where it has ended."""
        if self.pid not in self.forks.codes:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> int:
        """SIGKILL, and wait for the end; the exit code."""
        self.signal(signal.SIGKILL)
        return self.ended()

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped, all of it."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
        return False

    def printed(self) -> str:
        """What it has printed so far."""
        with suppress(OSError):
            return Path(self.life.output).read_text(encoding="utf-8", errors="replace")
        return ""


@dataclass(slots=True)
class Nursery:
    """The process that forks."""

    process: subprocess.Popen[bytes]
    codes: dict[int, int] = field(default_factory=dict)
    _born: list[int] = field(default_factory=list)
    _read: bytes = b""

    def start(self, life: Life) -> Born:
        """Begin a life."""
        assert self.process.stdin
        self.process.stdin.write(life.to_json().encode() + b"\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while not self._born:
            assert self._pump(PATIENCE_S), "the nursery has ended"
            assert time.monotonic() < deadline, "the nursery does not answer"
        return Born(self, life, self._born.pop())

    def run(self, life: Life, timeout_s: float = PATIENCE_S) -> Born:
        """A whole life, from start to end."""
        born = self.start(life)
        born.ended(timeout_s)
        return born

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a child, or None where it lives on."""
        deadline = time.monotonic() + timeout_s
        while pid not in self.codes:
            left = deadline - time.monotonic()
            if not self._pump(max(0.0, left)) and left <= 0:
                return None
        return self.codes[pid]

    def _pump(self, timeout_s: float) -> bool:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            return False
        read = os.read(self.process.stdout.fileno(), 65536)
        assert read, f"the nursery has ended with {self.process.wait()}"
        *lines, self._read = (self._read + read).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "pid" in told:
                self._born.append(told["pid"])
                self.codes.pop(told["pid"], None)  # ids come round again
            else:
                self.codes[told["ended"]] = told["code"]
        return True


@contextmanager
def nursery(prefix: Sequence[str] = ()) -> Iterator[Nursery]:
    """A nursery that ends with the block, and with it whatever it has started; `prefix` are words that its process is started by."""
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    command = [*prefix, sys.executable, "-m", "tests.crash.crawler", "--nursery"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": source}, start_new_session=True
    ) as process:
        try:
            yield Nursery(process)
        finally:
            assert process.stdin
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
