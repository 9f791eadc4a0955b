"""Four workers on one job and one of them hit again and again, on each kind of database: the promise in its long form.

Killed, the others take its shards over; frozen for longer than its lease, it wakes up as a zombie. In the end the dataset has
the SHA-256 of a crawl by one worker on SQLite to which nothing happened, and the proof of the whole database passes.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from limpet.demo.catalogue import Shop
from limpet.demo.site import spawned
from tests.crash.nursery import nursery
from tests.crash.torture import Ordeal, Report, torture
from tests.crash.trial import memory_folder
from tests.hardening.nemesis import DEEDS, haunted
from tests.hardening.team import team
from tests.servers import mariadb, postgres

ROOT = Path(__file__).parent.parent.parent

KINDS = ("sqlite", "postgres", "mariadb")
#: Products and hosts of the long form.
PRODUCTS, HOSTS = 2500, 4
#: Ends of a worker that are no failure: complete, with dead letters, nothing left to do.
OK_EXITS = frozenset({0, 3, 6})

#: What is wrong, a line each; empty where nothing is.
Case = Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Hits:
    """How the workers are hit."""

    name: str
    hits: int
    every: tuple[int, int]
    hits_min: int
    pause_s: float = 0.0
    flags: tuple[str, ...] = ()


KILLS = Hits("20 kills", 20, (60, 160), hits_min=18)
FREEZES = Hits("10 freezes", 10, (40, 80), hits_min=8, pause_s=3.0, flags=("--delay", "0.1", "--per-host", "2"))


@dataclass(slots=True)
class Servers:
    """Database servers, each started when it is first asked for."""

    stack: ExitStack
    _made: dict[str, postgres.PostgresServer | mariadb.MariadbServer] = field(default_factory=dict)

    def new(self, kind: str, folder: Path) -> str:
        """The address of a new, empty database of a kind."""
        if kind == "sqlite":
            return f"sqlite:///{folder}/{len(list(folder.iterdir()))}.db"
        if kind not in self._made:
            self._made[kind] = self.stack.enter_context(postgres.running() if kind == "postgres" else mariadb.running())
        return self._made[kind].new_database()

    def server(self, kind: str) -> postgres.PostgresServer | mariadb.MariadbServer | None:
        """The server of a kind, once it was asked for; None for SQLite, which has none."""
        return self._made.get(kind)


# -- what a crawl came to -----------------------------------------------------------------------


def limpet(*words: str) -> list[str]:
    """A command line of this Limpet's."""
    return [sys.executable, "-m", "limpet", *words]


def environment() -> dict[str, str]:
    """Where a child finds this Limpet."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def crawl(db: str, starts: Sequence[str], *flags: str, workers: int = 0) -> list[str]:
    """The command of one worker, or of a crew of so many."""
    asked = [word for start in starts for word in ("--start", start)]
    crew = ["--workers", str(workers)] if workers else []
    return limpet("run", str(ROOT / "examples/shop.py"), "--db", db, "--quiet", "--lease", "2", *flags, *crew, *asked)


def export(db: str) -> list[str]:
    """The command that prints the products."""
    return limpet("export", "product", "--db", db, "--format", "jsonl")


def outcome(db: str) -> tuple[str, int, list[str]]:
    """What a database holds in the end: SHA-256, records, dead letters; with what a full proof finds, where it fails."""
    said = json.loads(_told("export", "product", "--db", db, "-o", os.devnull, "--json"))
    dead = sorted(json.loads(line)["text"] for line in _told("dead", "--db", db, "--limit", "0", "--json").splitlines())
    return said["sha256"], said["rows"], dead


def proof(db: str) -> list[str]:
    """What a full proof says where it fails."""
    ran = subprocess.run(limpet("verify", "--full", "--db", db), capture_output=True, text=True, env=environment(), check=False)
    return [f"verify: {ran.stdout}{ran.stderr}"] if ran.returncode else []


def _told(*words: str) -> str:
    return subprocess.run(limpet(*words), capture_output=True, text=True, env=environment(), check=True).stdout


# -- our own harness and site ---------------------------------------------------------------------


def hit_crowd(shop: Shop, db: str, how: Hits, *, seed: int, workers: int = 4, patience_s: float = 300.0) -> Report:
    """Workers side by side, hit as `how` says, until the crawl is complete."""
    return torture(
        Ordeal(
            crawl=crawl(db, shop.starts(), *how.flags),
            export=export(db),
            truth=[*shop.truth()],
            stats_url=f"{shop.origin(0)}/_stats",
            hits=how.hits,
            hits_min=how.hits_min,
            every=how.every,
            pause_s=how.pause_s,
            workers=workers,
            ok_exits=OK_EXITS,
            seed=seed,
            patience_s=patience_s,
            environment=environment(),
        )
    )


@contextmanager
def quiet(shop: Shop, folder: Path, *flags: str) -> Iterator[tuple[Shop, tuple[str, int, list[str]]]]:
    """A served shop, and what one worker on SQLite to which nothing happens collects there."""
    with spawned(shop) as served:
        db = f"sqlite:///{folder}/quiet.db"
        ran = subprocess.run(crawl(db, served.starts(), *flags), capture_output=True, text=True, env=environment(), check=False)
        assert ran.returncode in OK_EXITS, ran.stderr
        yield served, outcome(db)


def crowd_cases(stack: ExitStack) -> Iterator[tuple[str, Case]]:
    """Every kind of database and way to be hit, three seeds each; the originals too, where they are."""
    servers = Servers(stack)
    shared = os.environ.get("LIMPET_SHARED")
    for kind in KINDS:
        for how in (KILLS, FREEZES):
            for seed in (1, 2, 3):
                yield f"crowd on {kind}, {how.name}, seed {seed}", partial(own, servers, kind, how, seed)
                if shared:
                    yield f"original crowd on {kind}, {how.name}, seed {seed}", partial(original, servers, Path(shared), kind, how, seed)

    for kind in KINDS:
        for seed in (1, 2, 3):
            yield f"nemesis on {kind}, seed {seed}", partial(nemesis, servers, kind, seed)


def nemesis(servers: Servers, kind: str, seed: int) -> list[str]:
    """Everything that can happen to workers and their server, three times over."""
    shop = Shop(products=700, hosts=8, seed=seed)
    flags = {"lease": 1, "per-host": 1, "delay": 0.05}
    with memory_folder() as folder, nursery() as forks:
        db = servers.new(kind, folder)
        with team(forks, db, shop, folder, latency_s=0.03, server=servers.server(kind), **flags) as crowd:
            return haunted(crowd, seed, DEEDS * 3)


def own(servers: Servers, kind: str, how: Hits, seed: int) -> list[str]:
    """Our own harness and site."""
    with memory_folder() as folder, quiet(Shop(products=PRODUCTS, hosts=HOSTS, faults="mild", seed=seed), folder) as (shop, expected):
        db = servers.new(kind, folder)
        report = hit_crowd(shop, db, how, seed=seed)
        found = outcome(db)
        print(f"    {report.hits} hits, {found[1]} records, {report.seconds} s, {found[0][:16]}, exits {report.exits}")
        differs = [f"expected {expected}, found {found}"] if found != expected else []
        return [*report.failings, *differs, *proof(db), *([report.errors] if report.failings else [])]


# -- the originals ----------------------------------------------------------------------------------


def original(servers: Servers, shared: Path, kind: str, how: Hits, seed: int) -> list[str]:
    """The harness and the site that the promise was made with."""
    site, harness = shared / "testsite/site.py", shared / "testsite/crashtest.py"
    if not (site.is_file() and harness.is_file()):
        return [f"{site} or {harness} is missing"]
    shape = [
        "--port",
        str(postgres.free_port()),
        "--products",
        str(PRODUCTS),
        "--hosts",
        str(HOSTS),
        "--faults",
        "mild",
        "--seed",
        str(seed),
    ]
    with memory_folder() as folder:
        truth = folder / "truth.jsonl"
        truth.write_bytes(subprocess.run([sys.executable, str(site), "truth", *shape], stdout=subprocess.PIPE, check=True).stdout)
        served = subprocess.Popen([sys.executable, str(site), "serve", *shape], stdout=subprocess.PIPE)
        try:
            assert served.stdout
            served.stdout.readline()
            return _hit_original(servers, harness, truth, shape[1], kind, how, seed, folder)
        finally:
            served.kill()
            served.communicate()


def _hit_original(servers: Servers, harness: Path, truth: Path, port: str, kind: str, how: Hits, seed: int, folder: Path) -> list[str]:
    starts = [f"http://127.0.0.{host}:{port}/" for host in range(1, HOSTS + 1)]
    reference = f"sqlite:///{folder}/quiet.db"
    subprocess.run(crawl(reference, starts), stdout=subprocess.DEVNULL, env=environment(), check=False)
    expected = outcome(reference)
    db = servers.new(kind, folder)
    command = [sys.executable, str(harness), "--truth", str(truth), "--stats", f"http://127.0.0.1:{port}/_stats", "--seed", str(seed)]
    command += ["--workers", "4", "--kills", str(how.hits), "--every", *map(str, how.every), "--ok-exit", *map(str, sorted(OK_EXITS))]
    command += ["--min-hits", str(how.hits_min), *(["--pause", f"{how.pause_s:g}"] if how.pause_s else [])]
    command += ["--crawl", shlex.join(crawl(db, starts, *how.flags)), "--export", shlex.join(export(db))]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    told: Mapping[str, object] = json.loads(ran.stdout) if ran.stdout.startswith("{") else {}
    print(f"    {' '.join(f'{name} {told.get(name)}' for name in ('perfect', 'hits', 'seconds', 'collected', 'exit_codes'))}")
    found = outcome(db)
    differs = [f"expected {expected}, found {found}"] if found != expected else []
    failed = [f"{ran.stdout[-2000:]} {ran.stderr[-3000:]}"] if ran.returncode else []
    return [*failed, *differs, *proof(db)]
