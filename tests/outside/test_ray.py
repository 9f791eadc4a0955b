"""Workers that a Ray cluster places: actors die, and a node of the two, and the crawl ends as any other."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from tests.crash.nursery import Nursery
from tests.crash.trial import SPIDERS
from tests.e2e.conftest import Limpet, limpet
from tests.hardening.team import PATIENT_LEASE_S, UNTIL_S, Team, team
from tests.servers import ray_cluster
from tests.servers.kinds import Databases
from tests.servers.ray_cluster import ENVIRONMENT, RayCluster

__all__ = ["limpet"]  # a fixture

SPIDER = SPIDERS / "shelf.py"


def of_a_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs a cluster, and a server that its nodes reach."""
    for mark in (
        pytest.mark.slow, pytest.mark.needs_ray, pytest.mark.xdist_group("ray"),
        pytest.mark.parametrize("databases", ["postgres"], indirect=True),
    ):  # fmt: skip
        test = mark(test)
    return test


@contextmanager
def command(crowd: Team, cluster: RayCluster, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`limpet run --ray`, in a process of its own."""
    words = [*crowd.words("run", workers=2, ray=cluster.address), "--log-level", "info"]
    words = [word for word in words if word != "--quiet"]
    words[words.index("--db") : words.index("--db") + 2] = []
    with log.open("wb") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "limpet", *words], env={**os.environ, **ENVIRONMENT, "LIMPET_DB": crowd.db},
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()


def parent_of(pid: int) -> int:
    """The process that started another: of a worker, its actor."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def raylet_of(pid: int) -> int:
    """The node's own process, two above a worker."""
    return parent_of(parent_of(pid))


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One for both tests: the last of them takes a node away."""
    with ray_cluster.running() as made:
        yield made


@of_a_cluster
def test_a_wish_to_stop_reaches_workers_elsewhere_once(forks: Nursery, databases: Databases, cluster: RayCluster, tmp_path: Path) -> None:
    """SIGTERM: both give up their shards and are retired, no try is lost, and the exit code says resumable."""
    log = tmp_path / "log"
    with team(forks, databases.new(), Shop(products=400, hosts=24), tmp_path, latency_s=0.5, lease=PATIENT_LEASE_S) as crowd:
        with crowd.unfinished(), command(crowd, cluster, log) as running:
            crowd.until(lambda: crowd.shares() == [4, 4] or running.poll() is not None, what="two workers")
            running.send_signal(signal.SIGTERM)
            assert running.wait(UNTIL_S) == 4, log.read_text(encoding="utf-8")
        assert set(crowd.dead().values()) == {"stopped"}
        assert crowd.outcomes()["lost"] == 0


@of_a_cluster
def test_actors_and_a_node_that_are_lost_are_replaced_and_the_job_completes(
    forks: Nursery, databases: Databases, cluster: RayCluster, tmp_path: Path
) -> None:
    """Two workers on two nodes; a node is lost, then an actor: each time another takes the place, and the proof passes.

    The node goes first: one worker is on it for certain, while Ray places what replaces an actor where it likes.
    """
    log = tmp_path / "log"
    with team(forks, databases.new(), Shop(products=400, hosts=24), tmp_path, latency_s=1.0) as crowd:
        crowd.hold()
        with command(crowd, cluster, log) as running:
            left: dict[int, int] = {}  # process of a worker -> its node

            def two(*, without: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
                assert running.poll() is None, log.read_text(encoding="utf-8")
                pids = crowd.owned().keys()
                if len(pids) != 2 or without & pids:
                    return False
                left.update({pid: raylet_of(pid) for pid in pids} if not left else {})
                return True

            crowd.until(two, what="two workers")
            assert len({*left.values()}) == 2  # spread over both nodes
            cluster.remove_node()
            lost = {pid for pid, raylet in left.items() if not is_alive(raylet)}
            assert len(lost) == 1
            crowd.until(lambda: two(without=lost), what="another place")
            (kept,) = left.keys() - lost
            os.kill(parent_of(kept), signal.SIGKILL)
            crowd.until(lambda: two(without={*left}), what="another actor")
            crowd.let_go()
            crowd.site.latency_s = 0.0
            assert running.wait(2 * UNTIL_S) == 0, log.read_text(encoding="utf-8")
            said = log.read_text(encoding="utf-8")
            assert said.count("was lost with its actor: another one takes its place") >= 2, said
        assert crowd.faults() == []


def test_without_ray_the_extra_is_named(limpet: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what else --ray needs: workers, and a database on a server."""
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else real(name))
    ended = limpet("run", SPIDER, "--ray", "auto", "--workers", "2", "--db", "postgresql://nobody@127.0.0.1:1/x")
    assert ended.code == 2
    assert "pip install 'limpet[ray]'" in ended.err


def test_ray_needs_workers_and_a_server(limpet: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any cluster is asked."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "--workers" in limpet("run", SPIDER, "--ray", "auto", "--db", "postgresql://nobody@127.0.0.1:1/x").err
    ended = limpet("run", SPIDER, "--ray", "auto", "--workers", "2", "--db", "x.db")
    assert (ended.code, "database on a server" in ended.err) == (2, True)
