"""Workers that are killed, frozen and cut off from a database that is itself killed: in the end, the records of a quiet crawl.

On each kind of database that `LIMPET_DATABASES` names; the hits are drawn from a seed, and come by the crawl's progress.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from limpet.demo.catalogue import Shop
from tests.crash.crowd import FREEZES, KILLS, Servers, hit_crowd, outcome, proof, quiet
from tests.crash.nursery import Born, Nursery
from tests.hardening.team import Team, team
from tests.servers.kinds import Databases

#: What a nemesis does, one after the other; one immediate restart of the server falls in the middle.
DEEDS = ("kill", "freeze", "cut", "kill", "freeze", "cut", "restart", "kill", "cut", "freeze", "kill")

#: Requests from one deed to the next.
EVERY = (15, 40)


@dataclass(slots=True)
class Nemesis:
    """Hits a team, by lot."""

    crowd: Team
    server: Any  # None for SQLite, which has none
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)

    def living(self) -> list[Born]:
        """Workers that have not ended."""
        return [born for born in self.crowd.lives if born.wait(0) is None]

    def act(self, deed: str) -> None:
        """Do it to a worker that is at work, or to the server; nothing where nobody is left."""
        working = [born for born in self.living() if self.crowd.owned().get(born.pid)]
        if not working:
            return
        victim = self.rng.choice(working)
        if deed == "kill":
            victim.kill()
            self.crowd.start()
        elif deed == "freeze":
            self._freeze(victim)
        elif self.server is None:
            return
        elif deed == "cut":
            self._cut()
        else:
            self._restart()
        self.done[deed] += 1

    def _freeze(self, victim: Born) -> None:
        """Until another has certified it dead; then it wakes."""
        names = self.crowd.names(victim.pid)
        victim.signal(signal.SIGSTOP)
        self.crowd.until(lambda: victim.is_frozen or victim.wait(0) is not None)
        dead = "SELECT COUNT(*) FROM worker WHERE dead = 0 AND worker IN ({})".format(",".join("?" * len(names)))
        self.crowd.until(lambda: self.crowd.rows(dead, *names) == [(0,)] or len(self.living()) == 1, what="its death")
        victim.signal(signal.SIGCONT)

    def _cut(self) -> None:
        """End the connections of one or two sessions on the server, whatever they are at."""
        if self.crowd.db.startswith("postgresql"):
            import psycopg

            with psycopg.connect(self.crowd.db, autocommit=True) as admin:
                sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'limpet' AND datname = current_database() ORDER BY pid"
                for (pid,) in self._some(admin.execute(sql).fetchall()):
                    admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
            return
        import pymysql

        from limpet.store.mysql import arguments

        with closing(pymysql.connect(**arguments(self.crowd.db), autocommit=True)) as admin, admin.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.PROCESSLIST WHERE id <> CONNECTION_ID() AND db = DATABASE() ORDER BY id")
            for (session,) in self._some(list(cursor.fetchall())):
                try:
                    cursor.execute(f"KILL {int(session)}")
                except pymysql.err.OperationalError:  # it has ended by itself
                    continue

    def _some(self, rows: list[Any]) -> list[Any]:
        return self.rng.sample(rows, min(len(rows), 2))

    def _restart(self) -> None:
        """As if the power failed, and came back."""
        if self.crowd.db.startswith("postgresql"):
            self.server.stop("immediate")
        else:
            self.server.kill()
        self.server.start()


def asked(crowd: Team) -> int:
    """Requests that the site has seen."""
    return crowd.site.stats.requests


def reach(crowd: Team, nemesis: Nemesis, requests: int) -> bool:
    """Whether the crawl got so far before it ended."""
    crowd.until(lambda: asked(crowd) >= requests or not nemesis.living(), what="progress")
    return bool(nemesis.living())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_whatever_happens_to_workers_and_server_the_records_are_those_of_a_quiet_crawl(
    forks: Nursery, databases: Databases, tmp_path: Path, seed: int
) -> None:
    """Kills, freezes beyond the lease, cut connections and one immediate restart; equal hash, and the proof passes."""
    shop = Shop(products=260, hosts=8, faults="none", seed=seed)
    with team(forks, databases.new(), shop, tmp_path, latency_s=0.03, lease=1, **{"per-host": 2}) as crowd:
        nemesis = Nemesis(crowd, getattr(databases, "server", None), random.Random(seed))
        for _ in range(4):
            crowd.start()
        crowd.until(lambda: len(crowd.owned()) == 4)
        for deed in DEEDS:
            if not reach(crowd, nemesis, asked(crowd) + nemesis.rng.randint(*EVERY)):
                break
            nemesis.act(deed)
        crowd.ended()
        assert min(nemesis.done[deed] for deed in ("kill", "freeze")) >= 2, nemesis.done
        assert nemesis.server is None or (nemesis.done["cut"] >= 2 and nemesis.done["restart"] == 1), nemesis.done
        assert crowd.outcomes()["dead"] == 0
        assert crowd.faults() == []
        digest = crowd.digest()
        quiet_one = Team(forks, f"sqlite:///{tmp_path}/quiet.db", crowd.site, tmp_path, dict(crowd.flags))
        assert quiet_one.start().ended() == 0
        assert digest == quiet_one.digest()


@pytest.mark.slow
@pytest.mark.parametrize("how", [KILLS, FREEZES], ids=lambda how: how.name)
def test_a_crowd_of_four_that_is_hit_again_and_again_collects_what_one_collects(databases: Databases, tmp_path: Path, how: Any) -> None:
    """The crash test of the promise, in short: a smaller shop, fewer hits, and everything else as in the long form."""
    from dataclasses import replace

    short = replace(how, hits=5 if how is KILLS else 2, hits_min=4 if how is KILLS else 2)
    with quiet(Shop(products=400, hosts=4, faults="mild", seed=1), tmp_path) as (shop, expected):
        db = databases.new()
        report = hit_crowd(shop, db, short, seed=1, patience_s=120)
        assert report.is_perfect, (report.failings, report.errors)
        assert outcome(db) == expected
        assert proof(db) == []


def test_the_long_form_has_its_cases(tmp_path: Path) -> None:
    """Three databases, two ways to be hit, three seeds each."""
    from contextlib import ExitStack

    from tests.crash.crowd import crowd_cases

    with ExitStack() as stack:
        names = [name for name, _ in crowd_cases(stack) if not name.startswith("original")]
        assert len(names) == len(set(names)) == 18
        assert Servers(stack).new("sqlite", tmp_path).startswith("sqlite:///")
