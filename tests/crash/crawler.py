"""One life of a crawler: `limpet` itself in a process of its own, with the hooks that a crash test needs.

    python -m tests.crash.crawler --nursery        a fork for each line of standard input, which is a `Life` as JSON
    python -m tests.crash.crawler LIFE.json        one life, in this very process

The nursery has everything imported, so a life begins in milliseconds. It answers each line with the process id, and says
when one has ended; it ends with its standard input, and its children with it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import limpet
from limpet import failpoint
from limpet.batch import Result
from limpet.store.dialect import statements
from limpet.store.opening import Store
from limpet.store.sqlite import NOW_MS
from limpet.task import Outcome

#: Modules of others that are imported late, by Limpet or by each other: a fork need not.
WARM = ("charset_normalizer", "cssselect", "lxml.html", "rich.progress")

#: Seconds between two looks for the tracer that is to come.
LOOK_S = 0.002

#: Seconds that a tracer may take to come.
TRACER_S = 60.0

#: linux/prctl.h
PR_SET_PTRACER = 0x59616D61


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What one process is to do, and what is done to it from inside."""

    arguments: Sequence[str]  # of `limpet`
    output: str  # file that takes what it prints
    failpoint: str = ""  # LIMPET_FAILPOINT
    failpoint_log: str = ""
    gate: str = ""
    hits: str = ""  # file that takes how often each failpoint was met, at a normal end
    acks: str = ""  # file that takes a line for each record, once its commit is definite
    constants: Mapping[str, object] = field(default_factory=dict)  # "module.NAME" -> value
    mutants: Sequence[str] = ()  # protections that are taken away: names of `mutants`
    recording: str = ""  # file that takes every write, sync, truncation and deletion
    synchronous: str = "FULL"  # of a recorded database
    file_bytes_max: int = 0  # RLIMIT_FSIZE
    files_max: int = 0  # RLIMIT_NOFILE
    memory_more: int = 0  # RLIMIT_AS: so many bytes more than it has at its start
    user: int = 0  # user id to become
    is_traced: bool = False  # wait for a tracer before anything else

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def live(life: Life) -> int:
    """The whole life; its exit code."""
    if life.is_traced:
        _wait_for_tracer()
    os.environ.update(LIMPET_FAILPOINT_LOG=life.failpoint_log, LIMPET_FAILPOINT_GATE=life.gate)
    failpoint._PLAN = failpoint.parse(life.failpoint)
    if life.hits:
        failpoint._PLAN = dict.fromkeys(failpoint.ALL, (10**9, "kill"))
    for name, value in life.constants.items():
        _set_constant(name, value)
    for name in life.mutants:
        getattr(importlib.import_module("tests.crash.mutants"), name)()
    if life.acks:
        _note_acks(life.acks)
    _limit(resource.RLIMIT_FSIZE, life.file_bytes_max)
    _limit(resource.RLIMIT_NOFILE, life.files_max)
    if life.memory_more:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + life.memory_more)
    if life.user:
        os.setgroups([])
        os.setgid(life.user)
        os.setuid(life.user)
    code = _command(life)
    if life.hits:
        Path(life.hits).write_text(json.dumps(failpoint._HITS))
    return code


def _command(life: Life) -> int:
    from limpet.cli import main

    if not life.recording:
        return main(life.arguments)
    from tests.crash.recorder import Recorder

    recorder = Recorder(life.recording, life.synchronous)
    _note_acks("", recorder)
    try:
        return main(life.arguments)
    finally:
        recorder.close()


def _limit(what: int, most: int) -> None:
    if most:
        resource.setrlimit(what, (most, most))


def _set_constant(name: str, value: object) -> None:
    module, _, constant = name.rpartition(".")
    place = importlib.import_module(module)
    assert hasattr(place, constant), f"there is no {name}"
    setattr(place, constant, tuple(value) if isinstance(value, list) else value)


def _wait_for_tracer() -> None:
    """Until somebody traces this process, who need not be its parent (prctl(2), PR_SET_PTRACER)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))
    deadline = time.monotonic() + TRACER_S
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text(encoding="ascii"):
        assert time.monotonic() < deadline, "no tracer has come"
        time.sleep(LOOK_S)
    time.sleep(LOOK_S)


# -- acks -----------------------------------------------------------------------------------


def _note_acks(path: str, recorder: object = None) -> None:
    """After each definite commit, note the records that it holds: whatever happens now, they must be there."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1
    honest = Store.commit

    def commit(self: Store, *parts: object, **more: object) -> object:
        done = honest(self, *parts, **more)  # type: ignore[arg-type]
        lines = [ack for committed in done for part in committed.parts for result in part.results for ack in acks_of(result)]
        if recorder is not None:
            recorder.acked(lines)  # type: ignore[attr-defined]
        elif lines:
            os.write(handle, "".join(f"{line}\n" for line in lines).encode())
        return done

    Store.commit = commit  # type: ignore[assignment, method-assign]


def acks_of(result: Result) -> list[str]:
    """A line for each record of a try that is done: its dataset and key; and one for the task itself."""
    if result.outcome is not Outcome.DONE:
        return []
    return [f"task {result.claim.key.hex()}", *(f"{offer.dataset} {offer.key.hex()}" for offer in result.offers)]


# -- the nursery ----------------------------------------------------------------------------


def nursery() -> int:
    """Fork a life for each line of standard input, until it ends; returns an exit code: in a child that of its life."""
    for name in (*WARM, *(found.name for found in pkgutil.walk_packages(limpet.__path__, "limpet."))):
        if not name.endswith("__main__"):
            importlib.import_module(name)
    statements("sqlite", NOW_MS)
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting = b""
    while True:
        ready, _, _ = select.select([0, reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _reap(children)
        if 0 in ready:
            read = os.read(0, 65536)
            if not read:
                break
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                child = os.fork()
                if not child:
                    return _born(line, reading, writing)
                children.add(child)
                _tell(pid=child)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return 0


def _reap(children: set[int]) -> None:
    for child in list(children):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            children.discard(child)
            _tell(ended=child, code=os.waitstatus_to_exitcode(status))


def _tell(**values: int) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


def _born(line: bytes, *handles: int) -> int:
    """What the fork does first: it has nothing of the nursery's left but its modules."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for handle in handles:
        os.close(handle)
    life = Life(**json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(life.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    os.setpgid(0, 0)
    return live(life)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    if list(arguments) == ["--nursery"]:
        return nursery()
    return live(Life(**json.loads(Path(arguments[0]).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
