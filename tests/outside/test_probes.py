"""`limpet status --check live` and `ready`, as a service manager asks them, against workers at work: both tell the truth."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from limpet.demo.catalogue import Shop
from tests.conftest import on_servers
from tests.crash.nursery import Nursery, nursery
from tests.hardening.team import Team, team
from tests.servers.kinds import Databases

pytestmark = [on_servers, pytest.mark.slow]

YES, NO, NOBODY_KNOWS = 0, 7, 4


@contextmanager
def outage(server: Any) -> Iterator[None]:
    """The server is away for as long as the block runs."""
    server.stop("immediate") if hasattr(server, "stop") else server.kill()
    try:
        yield
    finally:
        server.start()


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    """Whose workers keep their file locks apart from those of everybody else on this machine, as those of a pod are."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nursery() as opened:
        yield opened


def test_the_checks_tell_the_truth_of_a_worker_that_works_freezes_and_dies(forks: Nursery, databases: Databases, tmp_path: Path) -> None:
    """What a pod is asked, from before there is a job to after its worker is gone."""
    with team(forks, databases.new(), Shop(products=400, hosts=24), tmp_path, latency_s=1.0) as crowd:
        assert answers(crowd) == (YES, YES)  # no job yet: nothing to be alive or ready for
        with crowd.unfinished():
            born = crowd.start()
            crowd.until(lambda: crowd.shares() == [8])
            crowd.until(lambda: answers(crowd) == (YES, YES), what="a worker that is ready")
            assert crowd.limpet("pause", "--job", "--reason", "lunch")[0] == 0
            assert answers(crowd) == (YES, NO)  # whoever is not ready gets no work; that is no reason to kill it
            born.ended()
            assert crowd.limpet("resume", "--job")[0] == 0
            assert answers(crowd) == (NO, NO)
            born = crowd.start()
            crowd.until(lambda: crowd.shares() == [8])
            born.signal(signal.SIGSTOP)
            crowd.until(lambda: answers(crowd) == (NO, NO), what="the end of its lease")
            born.signal(signal.SIGCONT)
            crowd.until(lambda: answers(crowd) == (YES, YES), what="its return")
            with outage(databases.server):  # type: ignore[attr-defined]
                assert answers(crowd) == (YES, NOBODY_KNOWS)  # a database that is away is no reason to kill a worker that waits for it
            crowd.until(lambda: answers(crowd) == (YES, YES), what="its return after the outage")
            born.kill()
            crowd.until(lambda: answers(crowd) == (NO, NO), what="its death")
            with outage(databases.server):  # type: ignore[attr-defined]
                assert answers(crowd) == (NO, NOBODY_KNOWS)
        crowd.site.latency_s = 0.0
        crowd.start()
        crowd.until(lambda: all(life.wait(0) is not None for life in crowd.lives), what="the end")
        assert answers(crowd) == (YES, YES)
        assert crowd.faults() == []


def answers(crowd: Team) -> tuple[int, int]:
    """What both checks end with."""
    return crowd.limpet("status", "--check", "live")[0], crowd.limpet("status", "--check", "ready")[0]
