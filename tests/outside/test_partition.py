"""A worker whose network breaks: it reaches neither database nor anybody, others take over, and it comes back.

The worker lives in a network namespace. The server is reached by a cable that is cut; the site is served on the inside too, so
that nothing but the database keeps it from going on.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running as served
from limpet.demo.site import serve
from tests.crash.nursery import Born, Nursery, nursery
from tests.hardening.team import FLAGS, Team
from tests.servers import mariadb, postgres
from tests.servers.netns import Namespace, namespace

pytestmark = [pytest.mark.needs_namespaces, pytest.mark.slow, pytest.mark.parametrize("kind", ["mysql", "postgres"])]

LEASE_S = float(str(FLAGS["lease"]))
HEARTBEAT_S = LEASE_S / 5
#: Seconds that a loaded machine may add to anything, also by standing still.
SLACK_S = 30.0
#: Seconds of an answer while the crawl is to last, and afterwards.
SLOW_S, FAST_S = 1.0, 0.0


@contextmanager
def server(kind: str, away: Namespace) -> Iterator[tuple[str, str]]:
    """A server on loopback and on the cable: the addresses of one database, from here and from there."""
    if kind == "postgres":
        with postgres.running(f"\nlisten_addresses = '127.0.0.1,{away.here}'\n") as made:
            with (made.folder / "data" / "pg_hba.conf").open("a", encoding="utf-8") as file:
                file.write(f"host all all {away.network} trust\n")
            made.stop()
            made.start()
            dsn = made.new_database()
            yield dsn, dsn.replace("@127.0.0.1:", f"@{away.here}:")
        return
    with mariadb.running(f"--bind-address=127.0.0.1,{away.here}") as other:
        dsn = other.new_database()
        with other._admin() as admin, admin.cursor() as cursor:
            cursor.execute(f"CREATE USER root@'{away.there}'")
            cursor.execute(f"GRANT ALL ON *.* TO root@'{away.there}'")
        yield dsn, dsn.replace("@127.0.0.1:", f"@{away.here}:")


@contextmanager
def served_inside(site: Site, away: Namespace) -> Iterator[None]:
    """The site on the same addresses within the namespace."""
    sockets = away.listen([(site.shop.address(host), site.shop.port) for host in range(site.shop.hosts)])
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(site, sockets, stop)), name="shop-inside")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@dataclass
class Two:
    """Two places of one job: here, and behind the cable."""

    here: Team
    there: Team
    away: Namespace

    def batches_of(self, names: set[str]) -> int:
        """How many batches some workers have written."""
        marks = ",".join("?" * len(names))
        return int(self.here.rows(f"SELECT COUNT(*) FROM ledger WHERE owner IN ({marks})", *sorted(names))[0][0])

    def until_at_work(self, born: Born, used_up: set[str], *, batches: int = 7) -> None:
        """Wait until a worker has just written some batches under another name than those that are used up."""
        before = self.batches_of(self.here.names(born.pid) - used_up)
        self.here.until(lambda: self.batches_of(self.here.names(born.pid) - used_up) >= before + batches, what="batches of its own")

    def cut_off(self, victim: Born, other: Born) -> tuple[set[str], float]:
        """Cut the cable, and wait until another has all shards: the names that are used up, and the seconds that it took."""
        self.away.cut()
        names = self.here.names(victim.pid)
        return names, self.here.until(lambda: self.here.owned() == {other.pid: 8}, what="a take-over")


@contextmanager
def two(kind: str, forks: Nursery, folder: Path, *, products: int = 1_000, **more: object) -> Iterator[Two]:
    """A slow shop, a server, and a place for a worker on either side of the cable."""
    shop = Shop(products=products, hosts=24)  # so many that every shard has some
    with (
        namespace() as away, server(kind, away) as (near, far), served(shop, latency_s=SLOW_S, log=io.StringIO()) as site,
        served_inside(site, away), nursery(away.prefix) as inside,
    ):  # fmt: skip
        flags: dict[str, object] = {**FLAGS, "per-host": 1, **more}
        here, there = Team(forks, near, site, folder, flags), Team(inside, far, site, folder / "there", flags)
        there.folder.mkdir()
        try:
            yield Two(here, there, away)
        finally:
            for born in (*here.lives, *there.lives):
                born.kill()


def test_a_worker_that_is_cut_off_loses_its_shards_writes_nothing_old_and_comes_back(kind: str, forks: Nursery, tmp_path: Path) -> None:
    """Twice: back with its transaction still under way, and back after it has given up waiting for answers."""
    with two(kind, forks, tmp_path) as both:
        first, second = both.here.start(), both.there.start()
        both.here.until(lambda: both.here.shares() == [4, 4])
        used_up: set[str] = set()
        for is_late in (False, True):
            both.until_at_work(second, used_up)
            names, waited = both.cut_off(second, first)
            assert waited < LEASE_S + 3 * HEARTBEAT_S + SLACK_S
            assert any("lease is over" in reason for (reason,) in dead_reasons(both.here, names))
            written = both.batches_of(names)
            if is_late:
                both.here.until(lambda: second.printed().count("the database is away") > 0, what="its giving up")
            both.away.mend()
            both.here.until(lambda: both.here.shares() == [4, 4], what="its return")
            assert both.here.names(second.pid) > names
            assert both.batches_of(names) == written
            used_up |= names
        assert both.away.cuts == ["cut", "mended"] * 2
        both.here.site.latency_s = FAST_S
        both.here.ended()
        both.there.ended()
        assert both.batches_of(both.here.names(second.pid) - used_up) > 0
        assert both.here.faults() == []


def dead_reasons(crowd: Team, names: set[str]) -> list[tuple[str]]:
    """Why workers were certified dead."""
    return crowd.rows(f"SELECT dead_reason FROM worker WHERE dead = 1 AND worker IN ({','.join('?' * len(names))})", *sorted(names))  # type: ignore[return-value]


def test_without_the_fence_a_worker_that_was_cut_off_would_write_on(kind: str, forks: Nursery, tmp_path: Path) -> None:
    """The twin: it comes back with its batch in hand, and the books show it.

    If the cut fell into a transaction, the server has ended that, and the worker has dropped its batch; so it is made where
    a batch has just been written and the next is more than a second away, and made again if that went wrong.
    """
    with two(kind, forks, tmp_path, products=1_500, **{"commit-ms": 1500, "commit-pages": 100}) as both:
        first, second = both.here.start(), both.there.start(hooks={"mutants": ["no_fence_on_servers"]})
        both.here.until(lambda: both.here.shares() == [4, 4])
        used_up: set[str] = set()
        names: set[str] = set()
        written = 0

        def harm() -> bool:
            return both.batches_of(names) > written or any(born.wait(0) == 8 for born in (first, second))

        def is_back() -> bool:
            return harm() or both.here.names(second.pid) > names or first.wait(0) is not None

        for _ in range(6):
            both.until_at_work(second, used_up, batches=1)
            names, _ = both.cut_off(second, first)
            written = both.batches_of(names)
            both.away.mend()
            both.here.until(is_back, what="its return")
            if harm():
                break
            both.here.until(lambda: both.here.shares() == [4, 4], what="its share")
            used_up |= names
        both.here.site.latency_s = FAST_S
        for born in (first, second):
            born.wait()
        assert harm() or both.here.faults() != []
