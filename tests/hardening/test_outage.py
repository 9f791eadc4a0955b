"""A database server that goes away in the middle of a crawl, and comes back: workers wait, and go on; nobody is blamed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import on_servers
from tests.hardening.conftest import NewTeam
from tests.hardening.team import UNTIL_S, Team

AWAY = "the database is away, waiting"


def told(crowd: Team, what: str) -> int:
    """How many workers have printed something."""
    return sum(what in born.printed() for born in crowd.lives)


@on_servers
def test_workers_wait_for_a_server_that_is_away_and_go_on_when_it_is_back(new_team: NewTeam) -> None:
    """It stays away until every worker has noticed, and dies once more for a moment; every page comes in, and none has a strike."""
    crowd = new_team(products=120, lease=1, **{"per-host": 1, "delay": 0.03})
    with crowd.unfinished():
        with crowd.unfinished(crowd.hosts()[0]):
            workers = [crowd.start() for _ in range(3)]
            crowd.until(lambda: len(crowd.owned()) == 3 and crowd.site.stats.requests > 30)
            crowd.stop_server()
            crowd.until(lambda: told(crowd, AWAY) == 3, what="a wait of everybody")
            assert len(crowd.living) == 3
            asked = crowd.site.stats.requests
            crowd.server.start()
        crowd.until(lambda: crowd.site.stats.requests > asked + 20, what="some more requests")
        assert len(crowd.living) == 3
        crowd.stop_server()
        crowd.server.start()
    assert {born.ended() for born in workers} <= {0, 6}, [born.printed() for born in workers]
    assert crowd.blamed() == 0
    assert crowd.faults() == []


@pytest.mark.parametrize("databases", ["postgres"], indirect=True)
def test_workers_that_wait_for_nobody_end_resumable_and_a_later_one_goes_on(new_team: NewTeam) -> None:
    """The twin: with `--outage 0` the same outage ends them, with exit code 4; what they had is not lost."""
    crowd = new_team(products=120, lease=1, **{"per-host": 1, "delay": 0.03, "outage": 0})
    with crowd.unfinished():
        workers = [crowd.start() for _ in range(2)]
        crowd.until(lambda: len(crowd.owned()) == 2 and crowd.site.stats.requests > 30)
        crowd.stop_server()
        assert [born.ended() for born in workers] == [4, 4]
        crowd.server.start()
    crowd.start()
    crowd.ended(ok=frozenset({0, 4}))
    assert crowd.blamed() == 0
    assert crowd.faults() == []


@on_servers
def test_a_crew_outlives_an_outage_in_which_one_of_it_is_killed(new_team: NewTeam) -> None:
    """Its successors cannot start while the server is away; their place is filled when it is back, and the command ends with 0."""
    crowd = new_team(products=120, workers=2, **{"per-host": 1, "delay": 0.03})
    hooks = {"constants": {"limpet.cli.crew.FAILURES_MAX": 2}}
    with crowd.unfinished():
        born = crowd.start(hooks=hooks)
        crowd.until(lambda: crowd.shares() == [4, 4], what="a crew")
        victim = min(crowd.owned())
        crowd.stop_server()
        os.kill(victim, signal.SIGKILL)
        crowd.until(lambda: "(life 4)" in born.printed(), what="a third successor")
        crowd.server.start()
    assert born.ended(UNTIL_S) == 0, born.printed()
    assert "place stays empty" not in born.printed()
    assert crowd.blamed() == 0
    assert crowd.faults() == []


@on_servers
def test_a_server_that_goes_away_when_the_crawl_has_ended_is_waited_for_too(new_team: NewTeam) -> None:
    """Between the last commit and the proof: the worker asks again when it is back, and ends with a verified job."""
    crowd = new_team(products=20, delay=0)
    gate = crowd.folder / "gate"
    log = crowd.folder / "fired"
    born = crowd.start(hooks={"failpoint": "before_retire@1=wait", "failpoint_log": str(log), "gate": str(gate)})
    crowd.until(log.exists, what="the end of the crawl")
    crowd.stop_server()
    gate.touch()
    crowd.until(lambda: AWAY in born.printed(), what="a wait")
    crowd.server.start()
    assert born.ended() == 0, born.printed()
    assert "complete and verified" in born.printed()
    assert crowd.faults() == []
