"""A small site, a nursery and a folder in memory: the ground on which a crawl is broken off and taken up again.

Files lie on a RAM disk where there is one: what a process that is killed has written stays with the kernel there, too, and
a sync costs nothing, so a whole crawl takes a fifth of a second. Power cuts are another matter, and have `powercut`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from tests.crash.crawler import Life
from tests.crash.judge import Books, acks_in, books, copied, wounds
from tests.crash.nursery import Born, Nursery, nursery

SPIDERS = Path(__file__).parent / "spiders"

#: Small windows, so that a short crawl has many commits; four shards and three hosts, so that a commit has several parts.
FLAGS: Mapping[str, object] = {"shards": 4, "commit-pages": 6, "commit-pages-first": 3, "commit-ms": 50, "lease": 10, "backoff": 0.05}

#: Lives that a crawl may take to its end after its last fault: more is a loop.
LIVES_MAX = 5

#: Request before which a life that is held stands still: in the middle of the crawl, and after several commits.
HELD_AT = 60


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that is gone after the block: in memory where the system has such a place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="limpet-crash-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class Ground:
    """What many trials share: the site, the nursery, and what an uninterrupted crawl of each spider ends with."""

    site: Site
    forks: Nursery
    folder: Path
    count: int = 0
    _quiet: dict[str, Books] = field(default_factory=dict)

    def trial(self, spider: str = "shelf", /, **flags: Any) -> Trial:
        """A new crawl, with a folder of its own."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        return Trial(self, folder, spider, {**FLAGS, **flags})

    def quiet(self, spider: str) -> Books:
        """What the crawl ends with where nothing happens to it."""
        if spider not in self._quiet:
            trial = self.trial(spider)
            trial.finish()
            self._quiet[spider] = trial.books()
            assert not self._quiet[spider].fault
            trial.remove()
        return self._quiet[spider]


@dataclass(slots=True)
class Trial:
    """One crawl, in as many lives as it takes."""

    ground: Ground
    folder: Path
    spider: str
    flags: dict[str, object]
    starts: Sequence[str] = ()
    params: dict[str, object] = field(default_factory=dict)
    lives: list[Born] = field(default_factory=list)
    file: Path | None = None  # of the spider, if it is none of `spiders`
    place: Path | None = None  # where the database is, if not in the folder

    @property
    def db(self) -> Path:
        """The database file."""
        return (self.place or self.folder) / "crawl.db"

    @property
    def acks(self) -> Path:
        """The file of acks, of all lives."""
        return self.folder / "acks"

    # -- lives -----------------------------------------------------------------------------

    def life(self, **hooks: Any) -> Life:
        """The next life of the crawl; `hooks` are fields of `Life`, and `flags` are settings for this life alone."""
        flags = {**self.flags, **hooks.pop("flags", {})}
        command = ["run", str(self.file or SPIDERS / f"{self.spider}.py"), "--db", f"sqlite:///{self.db}", "--quiet"]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        for start in self.starts or self.ground.site.shop.starts():
            command += ["--start", start]
        for name, value in self.params.items():
            command += ["--param", f"{name}={value}"]
        output = str(self.folder / f"output-{len(self.lives)}")
        return Life(**{"arguments": command, "output": output, "acks": str(self.acks), **hooks})

    def start(self, **hooks: Any) -> Born:
        """Begin a life."""
        self.lives.append(self.ground.forks.start(self.life(**hooks)))
        return self.lives[-1]

    def held(self, **hooks: Any) -> Born:
        """A life that stands still in its middle until `let_go`: its loop does, and its heart beats on."""
        log = self.folder / f"held-{len(self.lives)}"
        born = self.start(failpoint=f"before_send@{HELD_AT}=wait", failpoint_log=str(log), gate=str(self.folder / "gate"), **hooks)
        assert born.until(log.exists), born.printed()
        return born

    def let_go(self) -> None:
        """The life that is held goes on."""
        (self.folder / "gate").touch()

    def run(self, **hooks: Any) -> tuple[int, str]:
        """A whole life: its exit code, and what it printed."""
        born = self.start(**hooks)
        return born.ended(), born.printed()

    def limpet(self, *command: str, **hooks: Any) -> tuple[int, str]:
        """Another command of Limpet's on this database: its exit code, and what it printed."""
        output = self.folder / f"output-{'-'.join(command[:1])}-{len(self.lives)}"
        output.unlink(missing_ok=True)
        life = Life(arguments=[*command, "--db", f"sqlite:///{self.db}"], output=str(output), **hooks)
        born = self.ground.forks.run(life)
        return self.ground.forks.codes[born.pid], born.printed()

    def finish(self, ok: frozenset[int] = frozenset({0, 6}), **hooks: Any) -> None:
        """Live on until the crawl is complete and verified, without any further fault."""
        for _ in range(LIVES_MAX):
            code, printed = self.run(**hooks)
            if code in ok:
                return
            assert code == 4, f"exit code {code}: {printed}"
        raise AssertionError(f"not complete after {LIVES_MAX} more lives: {printed}")

    # -- verdicts --------------------------------------------------------------------------

    def books(self) -> Books:
        """What the database holds."""
        return books(self.db)

    def wounds(self) -> list[str]:
        """What is wrong with the database as the last life left it, told from a copy; empty where nothing is."""
        return wounds(copied(self.db, self.folder / "copy"), acks_in(self.acks))

    def faults(self, *, dead: Mapping[str, int] | None = None) -> list[str]:
        """How the ended crawl differs from one that nothing happened to; empty where it does not."""
        found, quiet = self.books(), self.ground.quiet(self.spider)
        faults = [f"verify: {found.fault}"] if found.fault else []
        if found.dead != dict(dead or {}):
            faults.append(f"dead letters {found.dead}, expected {dict(dead or {})}")
        if not dead and found.digests != quiet.digests:
            faults.append(f"other records: {found.rows}, expected {quiet.rows}; {found.digests}, expected {quiet.digests}")
        return faults

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.folder)


@contextmanager
def ground(shop: Shop, *, latency_s: float = 0.0, forks: Nursery | None = None) -> Iterator[Ground]:
    """A site that is served, a folder, and a nursery (or the given one)."""
    with memory_folder() as folder, running(shop, latency_s=latency_s) as site:
        if forks is not None:
            yield Ground(site, forks, folder)
            return
        with nursery() as own:
            yield Ground(site, own, folder)
