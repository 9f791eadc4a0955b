"""One nursery for all, and teams on new databases of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from tests.crash.nursery import Nursery, nursery
from tests.hardening.team import Team, team
from tests.servers.kinds import Databases

NewTeam = Callable[..., Team]


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """One nursery for all."""
    with nursery() as opened:
        yield opened


@pytest.fixture
def new_team(forks: Nursery, databases: Databases, tmp_path: Path) -> Iterator[NewTeam]:
    """Makes a team on a new database, with a shop of 80 products on 4 hosts that takes 20 ms for each answer."""
    with ExitStack() as stack:

        def make(*, products: int = 80, hosts: int = 4, seed: int = 1, latency_s: float = 0.02, **flags: object) -> Team:
            shop = Shop(products=products, hosts=hosts, faults="none", seed=seed)
            server = getattr(databases, "server", None)
            return stack.enter_context(team(forks, databases.ready(), shop, tmp_path, latency_s=latency_s, server=server, **flags))

        yield make
