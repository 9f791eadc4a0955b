"""Workers that are killed, frozen and cut off from a database that is itself killed; what is done to whom is drawn from a seed.

The hits come by the crawl's progress: by a clock, they would meet start-ups on a loaded machine.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.crash.nursery import Born
from tests.hardening.team import Team

#: What a nemesis does, one after the other; one immediate restart of the server falls in the middle.
DEEDS = ("kill", "freeze", "cut", "restart", "cut", "kill", "freeze", "kill")

#: Requests from one deed to the next.
EVERY = (10, 30)
#: Answers that the site gives while a deed is done. It gives no more, so the crawl is not over before the last deed.
MEANWHILE = 10
#: Answers of which nobody makes another request: to those who were killed or frozen meanwhile.
IN_VAIN = 20


@dataclass(slots=True)
class Nemesis:
    """Hits a team, by lot."""

    crowd: Team
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)

    def act(self, deed: str) -> None:
        """Do it to a worker that is at work, or to the server; nothing where nobody is left."""
        working: list[Born] = []

        def is_anybody() -> bool:
            owned = self.crowd.owned()
            working[:] = [born for born in self.crowd.living if owned.get(born.pid)]
            return bool(working) or not self.crowd.living

        self.crowd.until(is_anybody, what="somebody at work")
        if not working:
            return
        victim = self.rng.choice(working)
        if deed == "kill":
            victim.kill()
            self.crowd.start()
        elif deed == "freeze":
            self._freeze(victim)
        elif self.crowd.server is None:
            return
        elif deed == "cut":
            self._cut()
        else:
            self._restart()
        self.done[deed] += 1

    def _freeze(self, victim: Born) -> None:
        """Until another has certified it dead; then it wakes."""
        self.crowd.freeze(victim)
        names = self.crowd.names(victim.pid)
        dead = "SELECT COUNT(*) FROM worker WHERE dead = 0 AND worker IN ({})".format(",".join("?" * len(names)))
        self.crowd.until(lambda: self.crowd.rows(dead, *names) == [(0,)] or len(self.crowd.living) == 1, what="its death")
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
        self.crowd.stop_server()
        self.crowd.server.start()


def asked(crowd: Team) -> int:
    """Requests that the site has seen."""
    return crowd.site.stats.requests


def reach(crowd: Team, requests: int) -> bool:
    """Whether the crawl got so far before it ended."""
    crowd.until(lambda: asked(crowd) >= requests or not crowd.living, what="progress")
    return bool(crowd.living)


def haunted(crowd: Team, seed: int, deeds: Sequence[str] = DEEDS, *, workers: int = 4) -> list[str]:
    """Let so many workers crawl while everything happens to them; what is wrong in the end, empty where nothing is."""
    nemesis = Nemesis(crowd, random.Random(seed))
    crowd.gate.shut_after(MEANWHILE)
    for _ in range(workers):
        crowd.start()
    crowd.until(lambda: len(crowd.owned()) == workers, what="a full team")
    for deed in deeds:
        more = nemesis.rng.randint(*EVERY)
        crowd.gate.shut_after(more + IN_VAIN)
        if not reach(crowd, asked(crowd) + more):
            break
        crowd.gate.shut_after(MEANWHILE)
        nemesis.act(deed)
    crowd.gate.open()
    crowd.ended()
    wanted = Counter(deed for deed in deeds if crowd.server is not None or deed in ("kill", "freeze"))
    quiet = crowd.beside(f"sqlite:///{crowd.folder}/quiet.db", delay=0)
    quiet.start().ended()
    digests = [crowd.digest(), quiet.digest()]
    return [
        *([] if nemesis.done == wanted else [f"done {dict(nemesis.done)}, expected {dict(wanted)}"]),
        *([] if digests[0] == digests[1] else [f"other records: {digests}"]),
        *([f"{dead} tasks are dead"] if (dead := crowd.outcomes()["dead"]) else []),
        *crowd.faults(),
    ]
