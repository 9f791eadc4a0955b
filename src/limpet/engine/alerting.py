"""Alerts while a job runs: which conditions people are told of, and the thread that tells them.

A thread of its own, with a connection of its own, writes what is raised and sends what waits in the outbox, so that no
commit, no request and no handler ever waits for a mail server. What is raised in the transaction that writes it (a halt,
a breaker's pause) only has to be sent. At the end of a run the thread has a few seconds; what it could not send stays in
the outbox for the next worker of the spider, or for `limpet alert send`.

Without an address to send to nothing is asked of the database: what is raised lies in the outbox, for `limpet alert list`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from limpet.engine.channels import Channel, channels_of
from limpet.engine.report import EXIT_LIMIT, EXIT_STALLED, EXIT_USAGE, Report
from limpet.errors import LimpetError
from limpet.store import alerts
from limpet.store.alerts import Alert
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.opening import Store

log = logging.getLogger("limpet.alerts")

#: Seconds between two looks at the outbox and for a first dead letter.
LOOK_S = 2.0
#: Seconds that the end of a run waits for alerts that are being sent.
FAREWELL_S = 20.0
#: Alerts that wait to be written: more is a flood of hosts, of which the log tells too.
RAISED_MAX = 1000

#: A function that raises something, given the connection and the job.
Raising = Callable[[Database, Job], None]


def send_next(
    db: Database, channels: Sequence[Channel], *, spider: str | None = None, after: int = 0, by_hand: bool = False
) -> tuple[Alert, str] | None:
    """Send the next alert that waits: the alert, and why not, "" where every channel took it. None where none waits."""
    found = alerts.claim(db, spider=spider, after=after, by_hand=by_hand)
    if found is None:
        return None
    taken, failed = set(found.taken_by), []
    for channel in channels:
        if channel.mark in taken:
            continue
        if why := channel.send(f"limpet: {found.title}", found.body):
            failed.append(f"{channel.scheme}: {why}")
        else:
            taken.add(channel.mark)
    if failed:
        alerts.failed(db, found, "; ".join(failed), frozenset(taken))
    else:
        alerts.sent(db, found)
    return found, "; ".join(failed)


class Alarms:
    """Raises and sends the alerts of one job for as long as it runs here; `async with` around the run."""

    def __init__(self, store: Store, job: Job, addresses: Sequence[str] = ()) -> None:
        self._store = store
        self._job = job
        self._channels = channels_of(addresses)
        self._raised: deque[Raising] = deque(maxlen=RAISED_MAX)
        self._told_dead = False
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="limpet-alerts", daemon=True)

    async def __aenter__(self) -> Alarms:
        if self._channels:
            self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write what was raised, and send for a few seconds what waits."""
        self._stop.set()
        self._wake.set()
        await asyncio.to_thread(self._end)

    # -- raising, from the loop: never waits ---------------------------------------------------

    def tell(self, kind: str, incident: str, detail: str) -> None:
        """Raise an alert of any kind: written at once where anybody is to be told, and else at the end of the run."""
        self._raise(lambda db, job: alerts.raise_one(db, job, kind, incident, detail))

    def host_is_away(self, host: str, since_ms: int, reason: str) -> None:
        """A host, or the provider of one handler's calls, is away; since when names the incident."""
        self.tell(alerts.OUTAGE, f"{host} since {since_ms}", f"{host} does not answer: {reason}.")

    def ended(self, report: Report, *, alone: bool = True) -> Report:
        """What a run came to. `alone`: no other worker of the job goes on."""
        if alone and report.dead:
            self._raise(alerts.raise_all_dead)
        if alone and report.exit_code in (EXIT_STALLED, EXIT_USAGE) and not report.message.startswith("the job is paused"):
            self._raise(lambda db, job: alerts.raise_stall(db, job, report.message))
        if alone and report.exit_code == EXIT_LIMIT and report.message.startswith("the budget"):
            self.tell(alerts.BUDGET, report.message, report.message)
        return report

    def _raise(self, raising: Raising) -> None:
        self._raised.append(raising)
        self._wake.set()

    # -- the thread ------------------------------------------------------------------------

    def _end(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(FAREWELL_S)
            if self._thread.is_alive():
                log.warning("an alert is still being sent: what is not sent stays in the outbox (`limpet alert send`)")
        elif self._raised:
            self._with_a_connection(self._write)

    def _run(self) -> None:
        db: Store | None = None
        while True:
            is_last = self._stop.is_set()
            self._wake.clear()
            try:
                db = db or self._store.again()
                self._look(db.db)
                self._write(db.db)
                while send_next(db.db, self._channels, spider=self._job.spider) is not None:
                    pass
            except LimpetError as error:  # the database is away, or busy: the crawl says so itself
                log.debug("alerts wait: %s", error)
                if db is not None:
                    db.close()
                    db = None
            except Exception:  # whatever a channel does, the crawl goes on
                log.exception("alerts: an internal error")
            if is_last:
                break
            self._wake.wait(LOOK_S)
        if db is not None:
            db.close()

    def _with_a_connection(self, action: Callable[[Database], None]) -> None:
        try:
            store = self._store.again()
            try:
                action(store.db)
            finally:
                store.close()
        except LimpetError as error:
            log.debug("alerts are not written: %s", error)

    def _write(self, db: Database) -> None:
        while self._raised:
            self._raised[0](db, self._job)
            self._raised.popleft()

    def _look(self, db: Database) -> None:
        """The first dead letter of a run is told while it runs."""
        if not self._told_dead:
            self._told_dead = alerts.raise_first_dead(db, self._job)
