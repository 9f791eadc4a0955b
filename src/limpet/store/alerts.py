"""The outbox of alerts: what people are to be told, once for each incident, and what has become of it.

An incident's name comes from what is in the database, so that many workers and restarts raise it once: INSERT does
nothing where (job, kind, incident) is there. A halt and a breaker's pause are raised in the very transaction that
writes them, by the one who does. Nothing is ever sent from here, nor inside a transaction: a sender claims an alert by
compare-and-set, sends it, and then marks it. A sender that dies in between leaves it to the next one, so an alert
arrives at least once, and rarely twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from limpet.credentials import hidden
from limpet.store.dialect import Database, Row
from limpet.store.jobs import Job

T = TypeVar("T")

DEAD, VERIFY, HALTED, BUDGET, STALL, BREAKER, WENT_BACK, OUTAGE, TEST = (
    "dead", "verify", "halted", "budget", "stall", "breaker", "went back", "outage", "test",
)  # fmt: skip

#: Each kind: what is said of the job in the first line, and what a person can do, in the last.
KINDS: Mapping[str, tuple[str, str]] = {
    DEAD: ("dead letters", "`limpet dead` lists them with their reasons; `limpet retry` puts them back."),
    VERIFY: ("verify failed", "The job is halted. `limpet verify --full` says what is wrong, and whether `limpet repair` helps."),
    HALTED: ("halted", "Nothing is claimed. `limpet verify --full` says what is wrong, and whether `limpet repair` or a backup helps."),
    BUDGET: ("budget reached", "What is left stays pending, and goes on when the budget does."),
    STALL: ("stands still", "`limpet status` says what it waits for."),
    BREAKER: ("paused", "Mend the handler; a run with other code, `limpet retry` or `limpet resume` goes on."),
    WENT_BACK: (
        "the database went back in time",
        "Its tasks are collected again. Was a backup restored, or did a replica that lagged take over? Look for what else was lost.",
    ),
    OUTAGE: ("a host is away", "No task is blamed; it is asked again by itself. `limpet hosts` and `limpet status` show it."),
}

#: Characters of an alert: chat robots take 2,000 to 20,000 bytes.
TEXT_CHARS_MAX = 1500
#: Milliseconds for which a sender has an alert; then another may send it.
HOLD_MS = 180_000
#: Waits between two tries to send one alert, in seconds; the last one again and again.
WAITS_S = (5, 15, 60, 300, 900, 3600)
#: Alerts that nobody could be told of for so long are sent by a person's `limpet alert send` alone.
OLD_MS = 3 * 86_400_000
#: A database that went back is noticed by each of its workers: within so long it is one incident.
WENT_BACK_MS = 600_000

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TAKEN = re.compile(r"^taken by \[([0-9a-f ]*)\]")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, as its row has it."""

    id: int
    job: str
    kind: str
    incident: str
    text: str
    made_ms: int
    sent_ms: int
    busy_ms: int
    tries: int
    error: str

    @property
    def title(self) -> str:
        """Its first line."""
        return self.text.partition("\n")[0]

    @property
    def body(self) -> str:
        """What follows."""
        return self.text.partition("\n")[2]

    @property
    def taken_by(self) -> frozenset[str]:
        """The marks of the channels that took it in a try of which others failed."""
        found = _TAKEN.match(self.error)
        return frozenset(found[1].split()) if found else frozenset()


def text_of(kind: str, job: Job, detail: str, place: str) -> str:
    """What people read: the job and what is the matter; the details; what to do; where."""
    headline, advice = KINDS[kind]
    told = _CONTROLS.sub(" ", hidden(detail))
    told = told if len(told) <= TEXT_CHARS_MAX else told[: TEXT_CHARS_MAX - 1] + "…"
    return f"{job.name}: {headline}\n{told}\n{advice}\nJob {job.id} in {place}."


# -- raised --------------------------------------------------------------------------------


def put(db: Database, job: Job, kind: str, incident: str, detail: str) -> None:
    """Raise an alert in the caller's transaction; nothing where this incident was raised before."""
    db.run("alert_put", job=job.id, kind=kind, incident=incident[:200], text=text_of(kind, job, detail, db.place))


def put_now(db: Database, job: Job, kind: str, detail: str) -> None:
    """The same of what happens at this moment and is written by one alone: the database's clock names it."""
    put(db, job, kind, str(db.rows("clock")[0][0]), detail)


def raise_one(db: Database, job: Job, kind: str, incident: str, detail: str) -> None:
    """Raise an alert, in a transaction of its own; nothing where this incident was raised before."""
    if db.one("alert_there", job=job.id, kind=kind, incident=incident[:200]) is None:
        _alone(db, lambda: put(db, job, kind, incident, detail))


def raise_went_back(db: Database, job: Job, batches: int) -> None:
    """This worker had acknowledged batches that are gone. Several workers notice it within minutes: that is one incident."""
    detail = f"{batches:,} batches that this worker had acknowledged are gone."

    def write() -> None:
        db.rows("lock_shard", job=job.id, shard=0)  # one after the other: else two would both find none
        if not db.rows("alert_lately", job=job.id, kind=WENT_BACK, window_ms=WENT_BACK_MS)[0][0]:
            put_now(db, job, WENT_BACK, detail)

    _alone(db, write)


def raise_first_dead(db: Database, job: Job) -> bool:
    """Raise the first dead letter of a job since dead letters were last put back; whether there is any."""
    found = db.one("alert_first_dead", job=job.id)
    if found is None:
        return False
    text, reason = found
    raise_one(db, job, DEAD, f"first after {_put_back(db, job)} put back", f"The first dead letter: {text}: {reason}")
    return True


def raise_all_dead(db: Database, job: Job) -> None:
    """Raise how many dead letters a run left, where that is more than the first one."""
    reasons = db.rows("view_dead", job=job.id)
    count = sum(number for _, number in reasons)
    if count == 1:
        raise_first_dead(db, job)
    elif count:
        named = "; ".join(f"{reason} {number:,}" for reason, number in reasons[:5])
        raise_one(db, job, DEAD, f"{count} after {_put_back(db, job)} put back", f"{count:,} dead letters: {named}")


def raise_stall(db: Database, job: Job, why: str) -> None:
    """Raise that a job stands still. Where it stands names the incident: the same stall again is the same one."""
    known, done, skipped = db.one("ledger_sums", job=job.id) or (0, 0, 0)
    raise_one(db, job, STALL, f"{known} known, {done} done, {skipped} skipped: {why}", why)


def _put_back(db: Database, job: Job) -> int:
    return int(db.rows("alert_put_back", job=job.id)[0][0])


def _alone(db: Database, write: Callable[[], T]) -> T:
    db.begin()
    try:
        made = write()
        db.commit()
    except BaseException:
        db.rollback()
        raise
    return made


# -- sent ----------------------------------------------------------------------------------


def claim(db: Database, *, spider: str | None = None, after: int = 0, by_hand: bool = False) -> Alert | None:
    """The next alert that waits, which is this caller's to send for HOLD_MS; None where there is none.

    `spider`: of this one's jobs alone. `by_hand`: also what waits after a failure, and what is old.
    """
    which = {"spider": spider or "", "any_spider": int(spider is None), "by_hand": int(by_hand), "old_ms": OLD_MS}
    while (row := db.one("alert_due", after=after, **which)) is not None:
        found = _alert(row)
        claimed = _alone(db, lambda mine=found: db.run("alert_claim", id=mine.id, busy_ms=mine.busy_ms, tries=mine.tries, hold_ms=HOLD_MS))  # type: ignore[misc]
        if claimed:
            return found
        after = found.id  # another sender was faster
    return None


def sent(db: Database, alert: Alert) -> None:
    """Every channel took it."""
    _alone(db, lambda: db.run("alert_sent", id=alert.id, tries=alert.tries + 1))


def failed(db: Database, alert: Alert, error: str, taken_by: frozenset[str]) -> None:
    """Some channel did not take it: it waits, and goes to those alone that have not taken it."""
    wait_s = WAITS_S[min(alert.tries, len(WAITS_S) - 1)]
    taken = f"taken by [{' '.join(sorted(taken_by))}]; " if taken_by else ""
    _alone(db, lambda: db.run("alert_failed", id=alert.id, tries=alert.tries + 1, wait_ms=wait_s * 1000, error=f"{taken}{error}"[:1000]))


def newest(db: Database, *, most: int, waiting: bool = False) -> list[Alert]:
    """The newest alerts, or those that wait to be sent, newest first."""
    return [_alert(row) for row in db.rows("alert_list", most=most, waiting=int(waiting))]


def _alert(row: Row) -> Alert:
    number, spider, slot, *rest = row
    return Alert(number, f"{spider}@{slot}" if slot else spider, *rest)
