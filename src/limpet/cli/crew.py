"""Several worker processes of one command: `limpet run FILE --workers N`.

Each place in the crew is a `limpet worker` of its own, kept filled: a process that dies is replaced, after a wait that
doubles while its successors die too. Standard input is the line to each: a byte is a wish to stop, and its end means that
this process is gone; so nobody outlives it, and a wish that a terminal has sent to all of them counts once. What a worker
says on stderr comes out here, marked with its number; what it reports on stdout is kept for the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers

from limpet.cli import child, parameters
from limpet.cli.configuration import PREFIX
from limpet.cli.database import file_of
from limpet.cli.exits import Exit
from limpet.cli.parameters import passed_on
from limpet.cli.printing import clean, without_credentials
from limpet.cli.values import WORKERS_MAX
from limpet.credentials import hidden
from limpet.engine.oversight import Ended
from limpet.errors import UsageError
from limpet.settings import SHARDS_SERVER, SHARDS_SQLITE, Settings, documented

log = logging.getLogger("limpet.crew")

#: Environment variable that tells a worker its number in a crew.
NUMBER = f"{PREFIX}CREW"
#: Seconds before a dead worker's place is filled, doubled while its successors die young, and at most.
BACKOFF_S, BACKOFF_MAX_S = 0.1, 30.0
#: Seconds after which a worker has not died young.
YOUNG_S = 20.0
#: Young deaths in a row, in one place, after which it stays empty: by a signal, or since a server is away, it may still be
#: bad luck (30 take 11 minutes, as long as one that is at work waits for its server), while what says itself why it cannot
#: go on (a full disk, a fault) is not mended by another start.
KILLS_MAX, FAILURES_MAX = 30, 5
#: Seconds that workers have to end in, when this command ends for a reason of its own.
GRACE_S = 10.0
#: Bytes of one line of a worker's stderr; of a longer one the rest is a line of its own.
LINE_BYTES = 2**16

#: Ends that no successor would change: the job is over, stands still, or cannot be worked on.
FINAL = frozenset({Exit.COMPLETE, Exit.USAGE, Exit.DEAD_LETTERS, Exit.BUDGET, Exit.NOTHING_TO_DO, Exit.STALLED, Exit.VERIFY_FAILED})


@dataclass(slots=True)
class Crew:
    """So many workers of one job, each in a process of its own."""

    command: Sequence[str]
    environment: Mapping[str, str]
    size: int
    as_json: bool = False  # their logs are JSON lines
    is_server: bool = False  # the database is on a server, which may be away when a worker begins
    processes: dict[int, Process] = field(default_factory=dict)
    elsewhere: Callable[[int], Awaitable[tuple[Ended, str]]] | None = None  # lives a worker's life on another machine
    deaths: int = 0
    _wishes: int = 0
    _wished: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def living(self) -> int:
        """How many there are now."""
        return len(self.processes)

    async def work(self) -> list[Ended]:
        """Keep every place filled until its worker ends by itself; what each ended in."""
        places = [asyncio.create_task(self._keep(number)) for number in range(1, self.size + 1)]
        try:
            return list(await asyncio.gather(*places))
        finally:
            await self._end(places)

    def stop(self) -> None:
        """Pass a wish to stop on, once to each; a second one means sooner."""
        self._wishes += 1
        self._wished.set()
        for process in self.processes.values():
            _tell(process, b"s")

    async def _keep(self, number: int) -> Ended:
        """Fill one place, again and again."""
        young = 0
        for life in numbers(1):
            began = asyncio.get_running_loop().time()
            ended, how = await (self.elsewhere or self._live)(number)
            if self._wishes or ended.exit_code in FINAL:
                return ended
            self.deaths += 1
            young = young + 1 if asyncio.get_running_loop().time() - began < YOUNG_S else 1
            is_patient = ended.exit_code < 0 or (ended.exit_code == Exit.STOPPED and self.is_server)
            if young >= (KILLS_MAX if is_patient else FAILURES_MAX):
                log.error("worker %d %s, for the %dth time in a row: its place stays empty", number, how, young)
                return ended
            wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2 ** (young - 1))
            log.warning("worker %d %s: another one takes its place in %.1f s (life %d)", number, how, wait_s, life + 1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wished.wait(), wait_s)
                return ended
        raise AssertionError("numbers do not end")

    async def _live(self, number: int) -> tuple[Ended, str]:
        """One process from start to end: what it ended in, and how, for people."""
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=LINE_BYTES, env={**self.environment, NUMBER: str(number)}
        )
        self.processes[number] = process
        if self._wishes:  # they came while it was being started
            _tell(process, b"s" * self._wishes)
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            said, _ = await asyncio.gather(process.stdout.read(), _pass_on(process.stderr, number, as_json=self.as_json))
            code = await process.wait()
        finally:
            if process.returncode is not None:
                self.processes.pop(number, None)
        return ended_of(code, said), f"(process {process.pid}) {how_it_ended(code)}"

    async def _end(self, places: Sequence[asyncio.Task[Ended]]) -> None:
        """Whatever happened here, no worker stays behind: they stop as if told, and the last ones are killed."""
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
        if self.processes:
            await asyncio.wait([asyncio.create_task(process.wait()) for process in self.processes.values()], timeout=GRACE_S)
        for process in list(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for place in places:
            place.cancel()
        await asyncio.gather(*places, return_exceptions=True)


def _tell(process: Process, wishes: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError, RuntimeError):
            process.stdin.write(wishes)


async def _pass_on(lines: asyncio.StreamReader, number: int, *, as_json: bool) -> None:
    """A worker's stderr, line by line, with its number."""
    while True:
        try:
            line = await lines.readline()
        except ValueError:  # longer than the limit: what was read of it is dropped
            continue
        if not line:
            return
        text = line.decode("utf-8", "backslashreplace").rstrip("\n")
        print(_marked(text, number, as_json=as_json), file=sys.stderr, flush=True)


def _marked(text: str, number: int, *, as_json: bool) -> str:
    """A line of worker `number`.

    >>> _marked("WARNING limpet.worker: lost", 2, as_json=False), _marked('{"level": "info"}', 2, as_json=True)
    ('[worker 2] WARNING limpet.worker: lost', '{"level": "info", "worker": 2}')
    """
    if not as_json:
        return f"[worker {number}] {clean(hidden(text))}"
    try:
        fields = json.loads(text)
        assert isinstance(fields, dict)
    except (ValueError, AssertionError):
        fields = {"level": "error", "message": text}
    return json.dumps(without_credentials({**fields, "worker": number}), ensure_ascii=False)


def ended_of(code: int, said: bytes) -> Ended:
    """What a process reported on its stdout, with its exit code."""
    fields: dict[str, object] = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                fields = found
    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else fields.get("message")
    return Ended(code, str(message or ""), int(str(fields.get("requests") or 0)))


def how_it_ended(code: int) -> str:
    """How a process ended, for people.

    >>> how_it_ended(-9), how_it_ended(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# -- what they are told ----------------------------------------------------------------------------


def crew_of(args: argparse.Namespace, settings: Settings, address: str) -> Crew:
    """The crew that the arguments of `limpet run` ask for."""
    command = child.limpet("worker", args.file, "--json", "--quiet", "--slot", args.slot)
    command += ["--log-level", args.log_level, "--log-format", args.log_format]
    for flag, value in (("--spider", args.spider), ("--config", args.config)):
        command += [flag, value] if value else []
    command += ["--debug"] if args.debug else []
    shards = settings.shards or (SHARDS_SQLITE if file_of(address) else SHARDS_SERVER)
    return Crew(command, environment_of(args, address), size_of(args.workers, shards), args.log_format == "json", not file_of(address))


def environment_of(args: argparse.Namespace, address: str) -> dict[str, str]:
    """This process's own, with the settings that were flags; the address and the parameters too: secrets stay out of `ps`."""
    given = {name: value for name in (*documented(), "user_agent") if (value := getattr(args, name, None)) is not None}
    settings = {f"{PREFIX}{name.upper()}": _text_of(value) for name, value in given.items()}
    return {**os.environ, f"{PREFIX}DB": address, **settings, **passed_on(parameters.given(args))}


def _text_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def size_of(asked: str, shards: int) -> int:
    """How many workers: a number, or `auto`, one for each processor that this process may use, and never more than shards."""
    if asked == "auto":
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(usable, shards, WORKERS_MAX))
    return int(asked)


def number_in_crew() -> int | None:
    """The number of this worker, where a crew has started it."""
    text = os.environ.pop(NUMBER, "")  # a handler may start a `limpet` of its own
    if not text:
        return None
    if not text.isdigit():
        raise UsageError(f"{NUMBER} is set by `limpet run --workers` for its workers: found {text!r}")
    return int(text)
