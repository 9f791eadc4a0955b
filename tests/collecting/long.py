"""The scenes of collecting at the size of the promise, for `make crash`, on each kind of database.

Where LIMPET_SHARED names a folder with the original test site, its paid API is asked as well as our own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

from tests.collecting import scenes
from tests.collecting.collector import EXAMPLES, Collector
from tests.collecting.meter import Meter, elsewhere
from tests.collecting.provider import providing
from tests.collecting.scenes import Figures, Kills, Stage
from tests.crash.crowd import KINDS, Case, Servers
from tests.crash.trial import memory_folder

Scene = Callable[[Stage], Figures]
#: Serves a provider that takes so many seconds for an answer.
Serves = Callable[[float], AbstractContextManager[Meter]]

#: Of answers, so that a kill finds requests under way.
SLOW_S = 0.02

#: On our own provider and on the original.
ON_ANY: dict[str, tuple[Scene, float]] = {
    "500 keywords, 2 days, kills": (partial(scenes.paid, number=500, kills=Kills(10, (20, 45), at_least=16)), 0.0),
    "the same without idempotency keys": (partial(scenes.unkeyed, number=500, kills=Kills(10, (20, 45), at_least=16)), SLOW_S),
    "a handler raises on 100 answers": (partial(scenes.raising, number=100), 0.0),
    "8 processes at once, 10 slots": (partial(scenes.triggered, number=50, processes=8, times=10), 0.0),
    "137 credits for 1,000 tasks": (partial(scenes.budget, number=1000, kills=Kills(8, (8, 14), at_least=6), limits=(137, 200)), 0.0),
}
#: On our own alone: what they need of a provider, or whether they need one at all.
ON_OURS: dict[str, tuple[Scene, float]] = {
    "30 tasks fail, and a backfill sends those": (partial(scenes.forced, number=500, failing=30), 0.0),
    "20 tallies under kills and freezes": (partial(scenes.tallies, number=20_000, kills=Kills(20, (300, 600), 15, freeze_s=3.0)), 0.0),
    "10,000 contended writes to registers": (partial(scenes.registers, number=10_000, workers=4, registers=20), 0.0),
    "10 rounds of a newest-first feed": (partial(scenes.fed, rounds=10, rising=False), 0.0),
    "10 rounds of an ascending feed": (partial(scenes.fed, rounds=10, rising=True), 0.0),
}


def collecting_cases(stack: ExitStack) -> Iterator[tuple[str, Case]]:
    """Each scene on each kind of database."""
    servers = Servers(stack)
    shared = os.environ.get("LIMPET_SHARED")
    for kind in KINDS:
        for name, (scene, latency_s) in {**ON_ANY, **ON_OURS}.items():
            yield f"collecting on {kind}: {name}", partial(play, servers, kind, scene, _ours, latency_s)
        if shared:
            original = partial(elsewhere, Path(shared) / "testsite/site.py")
            for name, (scene, latency_s) in ON_ANY.items():
                yield f"original collecting on {kind}: {name}", partial(play, servers, kind, scene, original, latency_s)


def _ours(latency_s: float) -> AbstractContextManager[Meter]:
    return providing(latency_s=latency_s)


def play(servers: Servers, kind: str, scene: Scene, serves: Serves, latency_s: float) -> list[str]:
    """One scene on a new database; it asserts what must hold, and its figures are printed."""
    with memory_folder() as folder, serves(latency_s) as provider:
        db = servers.new(kind, folder)

        def new(spider: str | Path, *arguments: str) -> Collector:
            place = spider if isinstance(spider, Path) else EXAMPLES / f"{spider}.py"
            return Collector(place, db, folder, arguments)

        figures = scene(Stage(new, folder, provider))
        print("    " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    return []
