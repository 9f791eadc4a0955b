"""Workers on a Ray cluster: `limpet run FILE --ray ADDRESS --workers N`.

Ray only places workers: an actor for each, spread over the nodes, in which a `limpet worker` runs as a process of its own.
Who owns which shard is in the database, as everywhere, so an actor or a node that is lost is a worker that died: another
takes its shards over, and a new actor takes its place. Standard input of the process is the line to it, and ends with the
actor. Ray is imported where it is used: it is an extra, and large.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.cli.configuration import PREFIX
from limpet.cli.crew import NUMBER, Crew, crew_of, ended_of, how_it_ended
from limpet.cli.database import file_of
from limpet.cli.parameters import params_of, passed_on
from limpet.engine.oversight import Ended
from limpet.errors import UsageError
from limpet.settings import Settings

log = logging.getLogger("limpet.crew")

#: What a worker elsewhere is told of this process's environment: settings, and where libpq finds a password.
PASSED_ON = (PREFIX, "PG")
#: An actor that is lost is a worker that was killed.
LOST = -9


class Place:
    """What runs on a node: one worker process, kept for as long as its actor lives."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._wishes = 0
        self._lock = threading.Lock()

    def live(self, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bytes]:
        """The process from start to end: its exit code, and what it printed. Its log goes where Ray keeps the actor's."""
        with self._lock:
            self._process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
            )
            self._tell(self._wishes)
        assert self._process.stdout is not None
        said = self._process.stdout.read()
        return self._process.wait(), said

    def stop(self) -> None:
        """Pass a wish to stop on."""
        with self._lock:
            self._wishes += 1
            self._tell(1)

    def _tell(self, wishes: int) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"s" * wishes)
                self._process.stdin.flush()


@dataclass(slots=True)
class RayCrew:
    """A crew whose workers are elsewhere; its places are kept filled as those of any other."""

    crew: Crew
    ray: Any
    words: Sequence[str]
    environment: Mapping[str, str]
    actors: dict[int, Any] = field(default_factory=dict)

    @property
    def living(self) -> int:
        """How many there are now."""
        return len(self.actors)

    async def work(self) -> list[Ended]:
        """Keep every place filled until its worker ends by itself; what each ended in."""
        self.crew.elsewhere = self._live
        try:
            return await self.crew.work()
        finally:
            for actor in self.actors.values():
                self.ray.kill(actor)
            self.ray.shutdown()

    def stop(self) -> None:
        """Pass a wish to stop on, once to each; a second one means sooner."""
        self.crew.stop()
        for actor in self.actors.values():
            actor.stop.remote()

    async def _live(self, number: int) -> tuple[Ended, str]:
        """One actor from start to end."""
        made = self.ray.remote(num_cpus=1, max_concurrency=2, max_restarts=0)(Place)
        actor = self.actors[number] = made.options(scheduling_strategy="SPREAD").remote()
        try:
            answer = actor.live.remote(self.words, {**self.environment, NUMBER: str(number)})
            code, said = await asyncio.wrap_future(answer.future())
        except self.ray.exceptions.RayError as error:
            told = str(error).strip().splitlines()
            return Ended(LOST, told[0] if told else type(error).__name__), "was lost with its actor"
        finally:
            self.actors.pop(number, None)
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)
        return ended_of(code, said), how_it_ended(code)


def ray_crew_of(args: argparse.Namespace, settings: Settings, address: str) -> RayCrew:
    """The crew that `--ray ADDRESS --workers N` asks for; UsageError without Ray, a server, or a cluster at that address."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray needs the extra: pip install 'limpet[ray]', here and on every node")
    if not getattr(args, "workers", None):
        raise UsageError("--ray places workers: say how many with --workers")
    if file_of(address):
        raise UsageError("--ray needs a database on a server: other machines do not reach a file of this one")
    crew = crew_of(args, settings, address)
    ray = _connected(args.ray)
    room = int(ray.cluster_resources().get("CPU", 0))
    if room < crew.size:
        log.warning("the cluster has %d processors, one for each worker: %d wait until there are more", room, crew.size - room)
    # The spider's file is named by its whole path, which has to lead to it on every node.
    words = [os.path.abspath(word) if word == args.file else word for word in crew.command[1:]]
    told = {name: value for name, value in crew.environment.items() if name.startswith(PASSED_ON)}
    told |= passed_on(list(params_of(args).items()))  # read here: other variables of this environment are not there
    return RayCrew(crew, ray, words, told)


def _connected(address: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(f"no Ray cluster answers at {address}: {str(error).strip().splitlines()[0]}") from error
    return ray
