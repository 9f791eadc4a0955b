"""The outbox of alerts: raised once for each incident, claimed by one sender, kept until it was sent."""

from __future__ import annotations

import threading

import pytest

from limpet.store import Store, alerts, jobs
from limpet.store.alerts import Alert
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.verify import verify_job
from tests.conftest import Hire, on_servers
from tests.store.hands import change_sql, dead, done, link


def job_of(store: Store) -> jobs.Job:
    """The store's job."""
    assert store.job is not None
    return store.job


def raised(store: Store) -> list[tuple[str, str]]:
    """Kind and first line of every alert, oldest first."""
    return [(one.kind, one.title) for one in reversed(alerts.newest(store.db, most=100))]


def one_alert(store: Store, incident: str = "x") -> Alert:
    """The newest alert, after one was raised."""
    alerts.raise_one(store.db, job_of(store), alerts.OUTAGE, incident, "example.com does not answer")
    return alerts.newest(store.db, most=1)[0]


def test_an_incident_is_raised_once_by_however_many_workers(store: Store) -> None:
    """Its name decides; another name or kind is another one."""
    other = store.again()
    for db in (store.db, other.db, store.db):
        alerts.raise_one(db, job_of(store), alerts.OUTAGE, "a.test since 1", "it does not answer")
    alerts.raise_one(other.db, job_of(store), alerts.OUTAGE, "a.test since 2", "it does not answer")
    alerts.raise_one(other.db, job_of(store), alerts.STALL, "a.test since 1", "why")
    assert [kind for kind, _ in raised(store)] == ["outage", "outage", "stall"]
    other.close()


def test_two_that_raise_the_same_at_once_leave_one(store: Store) -> None:
    """Neither look nor lock decides, but the unique key: the second INSERT does nothing."""
    for _ in range(2):
        store.db.begin()
        alerts.put(store.db, job_of(store), alerts.OUTAGE, "a", "b")
        store.db.commit()
    assert len(raised(store)) == 1


def test_a_halt_and_the_breakers_pause_raise_their_alert_and_a_second_one_does_not(store: Store) -> None:
    """In the transaction that writes them: who comes second changes nothing, and raises nothing."""
    for _ in range(2):
        store.halt("I1: a gap")
        store.pause("handler f failed 50 times", b"code")
        store.db.run_text("UPDATE alert SET incident = kind")  # it was some time ago: the clock gives another name now
    assert raised(store) == [("halted", "shop: halted"), ("breaker", "shop: paused")]
    assert "I1: a gap" in alerts.newest(store.db, most=2)[1].body


def test_a_persons_pause_is_no_alert(store: Store) -> None:
    """Whoever paused it knows."""
    store.pause("by hand")
    assert raised(store) == []


def test_the_same_breaker_after_a_resume_is_another_incident(store: Store) -> None:
    """The database's clock names it, not its words."""
    store.pause("handler f failed 50 times", b"code")
    store.resume()
    store.db.run_text("UPDATE alert SET incident = '1'")  # it was some time ago
    store.pause("handler f failed 50 times", b"code")
    assert len(raised(store)) == 2


def test_a_failed_proof_is_one_incident_until_a_proof_passes(store: Store, hire: Hire) -> None:
    """It halts the job and raises; proved again in vain nothing is raised; mended and broken again it is."""
    hand = hire()
    hand.seed(link("http://a.test/1"))
    hand.finish(*(done(claim) for claim in hand.claim()))
    for number in (1, 1, 2):
        store.db.run_text("UPDATE task SET strikes = 3")
        assert not verify_job(store).ok
        assert not verify_job(store).ok
        if number == 1:
            store.db.run_text("UPDATE task SET strikes = 0")
            assert verify_job(store).ok
            store.db.run_text(
                "UPDATE alert SET incident = 'earlier ' || id" if store.db.name != "mysql" else "UPDATE alert SET incident = id"
            )
    assert raised(store) == [("verify", "shop: verify failed")] * 3


def test_an_alert_is_claimed_by_one_sender(store: Store) -> None:
    """A second one that saw it free too gets nothing."""
    one_alert(store)
    other = store.again()
    (row,) = other.db.rows("alert_due", after=0, spider="", any_spider=1, by_hand=0, old_ms=alerts.OLD_MS)
    assert alerts.claim(store.db) is not None
    assert other.db.run("alert_claim", id=row[0], busy_ms=row[8], tries=row[9], hold_ms=1) == 0
    assert alerts.claim(other.db) is None
    other.close()


def test_without_the_guard_two_senders_have_one_alert(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    change_sql(
        monkeypatch, store.db, "alert_claim", " AND busy_ms = :busy_ms AND tries = :tries", " AND :busy_ms = :busy_ms AND :tries = :tries"
    )
    one_alert(store)
    (row,) = store.db.rows("alert_due", after=0, spider="", any_spider=1, by_hand=0, old_ms=alerts.OLD_MS)
    assert alerts.claim(store.db) is not None
    assert store.db.run("alert_claim", id=row[0], busy_ms=row[8], tries=row[9], hold_ms=1) == 1


def test_what_a_sender_that_died_held_is_sent_by_another(store: Store) -> None:
    """After its time; and where it was only slow, its late word changes nothing."""
    one_alert(store)
    slow = alerts.claim(store.db)
    assert slow is not None
    assert alerts.claim(store.db) is None
    store.db.run_text("UPDATE alert SET busy_ms = 1")  # HOLD_MS later
    second = alerts.claim(store.db)
    assert second is not None
    alerts.failed(store.db, slow, "too late", frozenset())
    assert alerts.newest(store.db, most=1)[0].error == ""
    alerts.sent(store.db, second)
    assert alerts.newest(store.db, most=1)[0].sent_ms > 0
    assert alerts.claim(store.db, by_hand=True) is None


def test_a_failure_waits_ever_longer_and_remembers_who_has_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand it is sent at once; what others took is not said to them again."""
    monkeypatch.setattr(alerts, "WAITS_S", tuple(100 * wait_s for wait_s in alerts.WAITS_S))  # the first is over in no slow moment
    one_alert(store)
    waits = []
    for _ in range(len(alerts.WAITS_S) + 1):
        mine = alerts.claim(store.db, by_hand=True)
        assert mine is not None
        before_ms = store.db.rows("clock")[0][0]
        alerts.failed(store.db, mine, "json: status 500", mine.taken_by | {"0a1b2c3d"})
        found = alerts.newest(store.db, most=1)[0]
        after_ms = store.db.rows("clock")[0][0]
        waits.append((found.busy_ms - after_ms, found.busy_ms - before_ms))  # however long it took: at least, at most
        assert found.taken_by == {"0a1b2c3d"}
        assert alerts.claim(store.db) is None
    expected = [*alerts.WAITS_S, alerts.WAITS_S[-1]]
    assert all(least <= 1000 * wait_s <= most for (least, most), wait_s in zip(waits, expected, strict=True)), waits


def test_old_alerts_wait_for_a_person(store: Store) -> None:
    """Nobody is woken for what happened last week, when somebody names the first address today."""
    one_alert(store)
    store.db.run_text("UPDATE alert SET made_ms = made_ms - ?", (alerts.OLD_MS + 1,))
    assert alerts.claim(store.db) is None
    assert alerts.claim(store.db, by_hand=True) is not None


def test_a_worker_sends_what_its_own_spider_has_to_say(store: Store) -> None:
    """Of any slot; another spider's people are not told."""
    one_alert(store)
    assert alerts.claim(store.db, spider="other") is None
    mine = alerts.claim(store.db, spider="shop")
    assert mine is not None
    assert mine.job == "shop"


def test_a_database_that_went_back_is_one_incident_for_all_its_workers(store: Store) -> None:
    """They notice it within minutes; an hour later it is another one."""
    other = store.again()
    alerts.raise_went_back(store.db, job_of(store), 3)
    alerts.raise_went_back(other.db, job_of(store), 5)
    assert raised(store) == [("went back", "shop: the database went back in time")]
    store.db.run_text("UPDATE alert SET made_ms = made_ms - ?, incident = 'earlier'", (alerts.WENT_BACK_MS + 1,))
    alerts.raise_went_back(other.db, job_of(store), 5)
    assert len(raised(store)) == 2
    other.close()


@on_servers
def test_two_workers_that_notice_it_at_the_same_moment_tell_of_one_incident(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one looks while the first has written and not committed; it waits for that."""
    other = store.again()
    second = threading.Thread(target=lambda: alerts.raise_went_back(other.db, job_of(store), 5))
    put_now = alerts.put_now

    def put_beside_another(db: Database, job: Job, kind: str, detail: str) -> None:
        monkeypatch.undo()
        put_now(db, job, kind, detail)
        second.start()
        second.join(0.5)  # time enough for one who does not wait

    monkeypatch.setattr(alerts, "put_now", put_beside_another)
    alerts.raise_went_back(store.db, job_of(store), 3)
    second.join()
    assert raised(store) == [("went back", "shop: the database went back in time")]
    other.close()


def test_dead_letters_are_named_by_how_many_and_how_often_they_were_put_back(store: Store, hire: Hire) -> None:
    """The first one, then the count where it grew; nothing twice."""
    hand = hire()
    hand.seed(*(link(f"http://a.test/{number}") for number in range(3)))
    claims = hand.claim()
    assert not alerts.raise_first_dead(store.db, job_of(store))
    for claim in claims[:2]:
        hand.finish(dead(claim))
        for _ in range(2):
            assert alerts.raise_first_dead(store.db, job_of(store))
            alerts.raise_all_dead(store.db, job_of(store))
    bodies = [one.body.splitlines()[0] for one in reversed(alerts.newest(store.db, most=10))]
    assert bodies == [f"The first dead letter: {claims[0].text}: status 500", "2 dead letters: status 500 2"]


def test_the_text_of_an_alert_is_bounded_and_holds_no_control_characters(store: Store) -> None:
    """What a page could smuggle in is written out of it."""
    alerts.raise_one(store.db, job_of(store), alerts.STALL, "x" * 1000, "\x1b[31mred\ud800" + "y" * 5000)
    found = alerts.newest(store.db, most=1)[0]
    assert "\x1b" not in found.text
    assert len(found.text) < 2 * alerts.TEXT_CHARS_MAX
    assert found.body.splitlines()[-1].startswith(f"Job {job_of(store).id} in ")
