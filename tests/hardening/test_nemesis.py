"""Workers that are killed, frozen and cut off from a database that is itself killed: in the end, the records of a quiet crawl.

On each kind of database that `LIMPET_DATABASES` names. The long forms are in `tests/crash/crowd.py`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from tests.crash.crowd import FREEZES, KILLS, Hits, Servers, crowd_cases, hit_crowd, outcome, proof, quiet
from tests.hardening.conftest import NewTeam
from tests.hardening.nemesis import haunted
from tests.servers.kinds import Databases

#: What the long form does in short: a fifth of the hits, closer together; each database and each way to be hit once.
SHORT_KILLS, SHORT_FREEZES = replace(KILLS, hits=4, hits_min=4, every=(20, 50)), replace(FREEZES, hits=2, hits_min=2, every=(20, 40))
SHORT = [("sqlite", SHORT_KILLS), ("mysql", SHORT_KILLS), ("postgres", SHORT_FREEZES)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_whatever_happens_to_workers_and_server_the_records_are_those_of_a_quiet_crawl(new_team: NewTeam, seed: int) -> None:
    """Kills, freezes beyond the lease, cut connections and an immediate restart, all of which happened; equal hash, and a proof."""
    crowd = new_team(products=400, hosts=8, seed=seed, latency_s=0.03, lease=1, **{"per-host": 1, "delay": 0.05})
    assert haunted(crowd, seed) == []


@pytest.mark.slow
@pytest.mark.parametrize(("databases", "how"), SHORT, indirect=["databases"], ids=lambda value: getattr(value, "name", None))
def test_a_crowd_of_four_that_is_hit_again_and_again_collects_what_one_collects(databases: Databases, tmp_path: Path, how: Hits) -> None:
    """The crash test of the promise, on a smaller shop; everything else is as in the long form."""
    flags = ("--backoff", "0.1")
    with quiet(Shop(products=160, hosts=4, faults="mild", seed=1), tmp_path, *flags) as (shop, expected):
        db = databases.new()
        report = hit_crowd(shop, db, replace(how, flags=(*how.flags, *flags)), seed=1, patience_s=120)
        assert report.is_perfect, (report.failings, report.errors)
        assert outcome(db) == expected
        assert proof(db) == []


def test_the_long_form_has_its_cases(tmp_path: Path) -> None:
    """Three databases, two ways to be hit and a nemesis, three seeds each."""
    with ExitStack() as stack:
        names = [name for name, _ in crowd_cases(stack) if not name.startswith("original")]
        assert len(names) == len(set(names)) == 27
        assert Servers(stack).new("sqlite", tmp_path).startswith("sqlite:///")
