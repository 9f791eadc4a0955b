"""Schedules: slots and instants over changes of clocks, whatever zone the machine is set to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet import Spider
from limpet.errors import UsageError
from limpet.schedule import SLOTS_MAX, Schedule, Slot, runs

NEW_YORK = "America/New_York"  # forward on 2026-03-08 at 02:00, back on 2026-11-01 at 02:00
ZONES = [NEW_YORK, "Asia/Shanghai", "Europe/Berlin", "UTC", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kathmandu", "America/Sao_Paulo"]


def at(text: str) -> datetime:
    """An instant, UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def named(slots: list[Slot]) -> list[str]:
    """Slots as `name due`, the day left out where it is the slot's own."""
    return [f"{slot.name} {slot.due:%d %H:%M}" for slot in slots]


# -- names and instants ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "name", "due"),
    [
        (Schedule.of("day", at="00:30", tz="Asia/Shanghai"), "2026-11-30", "2026-11-29T16:30"),
        (Schedule.of("day"), "2026-11-30", "2026-11-30T00:00"),
        (Schedule.of("hour", at=":15", tz="Asia/Kathmandu"), "2026-11-30T05", "2026-11-29T23:30"),
        (Schedule.of("week", day="monday", at="03:00"), "2026-W48", "2026-11-23T03:00"),
        (Schedule.of("week", day="Sun", at="03:00"), "2026-W53", "2027-01-03T03:00"),
        (Schedule.of("month", at="12:00", tz="Europe/Berlin"), "2026-07", "2026-07-01T10:00"),
        (Schedule.of("month", day=31), "2026-02", "2026-02-28T00:00"),
        (Schedule.of(cron="0 3 * * 1-5", tz="Asia/Shanghai"), "2026-11-30T0300", "2026-11-29T19:00"),
        # a time that does not exist is due at the first instant after the gap, one that exists twice the first time
        (Schedule.of("day", at="02:30", tz=NEW_YORK), "2026-03-08", "2026-03-08T07:00"),
        (Schedule.of("day", at="01:30", tz=NEW_YORK), "2026-11-01", "2026-11-01T05:30"),
        (Schedule.of(cron="30 2 * * *", tz=NEW_YORK), "2026-03-08T0230", "2026-03-08T07:00"),
        (Schedule.of("hour", tz="Australia/Lord_Howe"), "2026-10-04T02", "2026-10-03T15:30"),  # 02:00 to 02:30 is left out
        (Schedule.of("day", tz="America/Sao_Paulo"), "2018-11-04", "2018-11-04T03:00"),  # its midnight is left out
    ],
)
def test_a_slot_is_named_in_local_time_and_due_at_one_instant(schedule: Schedule, name: str, due: str) -> None:
    """The slot of that name is due then, is the last one then, and the next one a moment before."""
    assert schedule.due(name) == at(due)
    assert schedule.has(name)
    assert schedule.last_due(at(due)) == Slot(name, at(due))
    before = at(due) - timedelta(seconds=1)
    assert schedule.next_due(before) == Slot(name, at(due))
    assert schedule.last_due(before).due < at(due)
    assert schedule.slots(name, name) == [Slot(name, at(due))]


def test_hours_that_clocks_leave_out_have_no_slot_and_hours_that_come_twice_have_one() -> None:
    """One job for each logical hour."""
    hours = Schedule.of("hour", tz=NEW_YORK)
    forward = hours.between(at("2026-03-08T06:00"), at("2026-03-08T08:00"))
    assert named(forward) == ["2026-03-08T01 08 06:00", "2026-03-08T03 08 07:00", "2026-03-08T04 08 08:00"]
    back = hours.between(at("2026-11-01T05:00"), at("2026-11-01T08:00"))
    assert named(back) == ["2026-11-01T01 01 05:00", "2026-11-01T02 01 07:00", "2026-11-01T03 01 08:00"]
    assert hours.last_due(at("2026-11-01T06:30")).name == "2026-11-01T01"  # in the hour that comes again
    assert not hours.has("2026-03-08T02")


def test_ticks_of_cron_that_fall_into_a_gap_are_one() -> None:
    """`*/15` is not due four times at once when clocks go forward, and not twice when they go back."""
    quarters = Schedule.of(cron="*/15 * * * *", tz=NEW_YORK)
    forward = quarters.between(at("2026-03-08T06:45"), at("2026-03-08T07:15"))
    assert named(forward) == ["2026-03-08T0145 08 06:45", "2026-03-08T0300 08 07:00", "2026-03-08T0315 08 07:15"]
    back = quarters.between(at("2026-11-01T05:45"), at("2026-11-01T07:15"))
    assert named(back) == ["2026-11-01T0145 01 05:45", "2026-11-01T0200 01 07:00", "2026-11-01T0215 01 07:15"]
    assert quarters.next_due(at("2026-11-01T05:50")).name == "2026-11-01T0200"
    assert not quarters.has("2026-03-08T0215")


def test_a_day_that_a_zone_left_out_has_no_slot() -> None:
    """Samoa went from 29 to 31 December 2011."""
    days = Schedule.of("day", at="10:00", tz="Pacific/Apia")
    assert [slot.name for slot in days.slots("2011-12-28", "2012-01-01")] == ["2011-12-28", "2011-12-29", "2011-12-31", "2012-01-01"]


@settings(deadline=None, max_examples=150)
@given(
    zone=st.sampled_from(ZONES),
    kind=st.sampled_from(["hour", "day", "week", "month", "cron"]),
    minute=st.integers(0, 1439),
    now=st.datetimes(datetime(2011, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)),
)
def test_every_instant_lies_between_the_last_slot_and_the_next(zone: str, kind: str, minute: int, now: datetime) -> None:
    """Dues only grow, names are never given twice, and each function agrees with the others."""
    time = f"{minute // 60:02}:{minute % 60:02}"
    cron = f"{minute % 60} {minute // 60} * * *" if minute % 2 else "*/20 * * * *"
    schedule = Schedule.of(cron=cron, tz=zone) if kind == "cron" else Schedule.of(kind, at=time[2:] if kind == "hour" else time, tz=zone)
    last, following = schedule.last_due(now), schedule.next_due(now)
    assert last.due <= now < following.due
    assert schedule.last_due(following.due) == following
    assert schedule.next_due(last.due) == following
    assert schedule.slots(last.name, following.name) == [last, following]
    assert schedule.between(last.due, following.due) == [last, following]
    assert schedule.due(last.name) == last.due


@pytest.mark.parametrize("zone", [NEW_YORK, "Asia/Shanghai"])
def test_every_day_of_a_year_is_due_once(zone: str) -> None:
    """365 slots, 365 instants, each on its own local day."""
    days = Schedule.of("day", at="02:30", tz=zone)
    year = days.slots("2026-01-01", "2026-12-31")
    assert len({slot.name for slot in year}) == len({slot.due for slot in year}) == 365
    assert days.between(year[0].due, year[-1].due) == year
    assert [days.today(slot.due) for slot in year] == [slot.name for slot in year]


# -- today, spans, text ---------------------------------------------------------------------------


def test_today_is_the_local_day_or_the_week_or_month_that_it_is_in() -> None:
    """At 17:00 UTC it is tomorrow in Shanghai."""
    now = at("2026-11-30T17:00")
    assert Schedule.of("day", at="23:00", tz="Asia/Shanghai").today(now) == "2026-12-01"
    assert Schedule.of("day").today(now) == "2026-11-30"
    assert Schedule.of("week", tz="Asia/Shanghai").today(now) == "2026-W49"
    assert Schedule.of("month", tz="Asia/Shanghai").today(now) == "2026-12"
    assert Schedule.of(cron="0 3 * * *", tz="Asia/Shanghai").today(now) == "2026-12-01T0300"


@pytest.mark.parametrize(("schedule", "number"), [(Schedule.of("hour"), "24 slots"), (Schedule.of(cron="0 3 * * 6"), "0 slots")])
def test_today_is_refused_where_a_day_has_several_slots_or_none(schedule: Schedule, number: str) -> None:
    """It says how many, and asks for one."""
    with pytest.raises(UsageError, match=f"2026-11-30 has {number}.*name one"):
        schedule.today(at("2026-11-30T12:00"))


def test_stretches_of_slots_end_where_one_is_left_out() -> None:
    """So that one command makes each stretch."""
    every = Schedule.of("day").slots("2026-11-01", "2026-11-10")
    some = [every[0], every[1], every[4], every[8], every[9]]
    assert [(first.name[8:], last.name[8:]) for first, last in runs(some, every)] == [("01", "02"), ("05", "05"), ("09", "10")]
    assert runs([], every) == []


def test_a_schedule_is_kept_as_text_and_told_to_people() -> None:
    """What is read back is equal."""
    for schedule, told in [
        (Schedule.of("day", at="00:30", tz="Asia/Shanghai"), "every day at 00:30, Asia/Shanghai"),
        (Schedule.of("hour", at=":05"), "every hour at :05, UTC"),
        (Schedule.of("week", day="fri"), "every week on friday at 00:00, UTC"),
        (Schedule.of("month", day=15, at="1:00"), "every month on day 15 at 01:00, UTC"),
        (Schedule.of(cron="0  3 * * MON#1", tz="UTC"), "cron '0 3 * * MON#1', UTC"),
    ]:
        assert str(schedule) == told
        assert Schedule.from_json(schedule.to_json()) == schedule


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "and not both"),
        ({"period": "day", "cron": "* * * * *"}, "and not both"),
        ({"period": "year"}, "expected one of hour, day, week, month"),
        ({"period": "day", "tz": "Asia/Nowhere"}, "the name of a time zone"),
        ({"period": "day", "tz": "../etc/passwd"}, "the name of a time zone"),
        ({"period": "day", "at": "24:00"}, "expected a time such as 00:30"),
        ({"period": "day", "at": "7"}, "expected a time such as 00:30"),
        ({"period": "hour", "at": "10:15"}, "expected a time such as :15"),
        ({"period": "day", "day": 3}, "expected no day"),
        ({"period": "week", "day": "someday"}, "a day of the week"),
        ({"period": "week", "day": 3}, "a day of the week"),
        ({"period": "month", "day": 32}, "a number from 1 to 31"),
        ({"period": "month", "day": True}, "a number from 1 to 31"),
        ({"cron": "* * * *"}, "five fields"),
        ({"cron": "* * * * * *"}, "five fields"),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 0 31 2 *"}, "Bad day-of-month"),
        ({"cron": "0 0 * * MON#1/2"}, "cron text"),
        ({"cron": "0 3 * * *", "at": "03:00"}, "says the time in it"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_was_expected(said: dict[str, object], expected: str) -> None:
    """When the spider is loaded, not at the first due instant."""
    with pytest.raises(UsageError, match=expected):
        Schedule.of(**said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (Schedule.of("day"), "2026-11-3"),
        (Schedule.of("day"), "2026-02-29"),
        (Schedule.of("day"), "2026-11-30T05"),
        (Schedule.of("day"), "٢٠٢٦-11-30"),
        (Schedule.of("day"), ""),
        (Schedule.of("day"), "0001-01-01"),
        (Schedule.of("week"), "2025-W53"),
        (Schedule.of("month"), "2026-13"),
        (Schedule.of(cron="0 3 * * *"), "2026-11-30T0301"),
    ],
)
def test_a_name_that_is_no_slot_is_refused(schedule: Schedule, name: str) -> None:
    """It says what a slot looks like, or that there is no tick."""
    with pytest.raises(UsageError, match="is no slot of"):
        schedule.due(name)
    assert not schedule.has(name)


def test_a_span_is_bounded_and_runs_forward() -> None:
    """A slip of the pen makes no million of jobs."""
    with pytest.raises(UsageError, match=f"more than {SLOTS_MAX:,} slots"):
        Schedule.of("hour").slots("2000-01-01T00", "2026-01-01T00")
    with pytest.raises(UsageError, match="comes after"):
        Schedule.of("day").slots("2026-11-30", "2026-11-29")


# -- every ----------------------------------------------------------------------------------------


def test_every_is_a_call_and_a_decorator() -> None:
    """The function stays what it was; a second schedule is refused."""
    plain, decorated = Spider("plain"), Spider("decorated")
    plain.every("day", at="00:30", tz="Asia/Shanghai")

    def handler() -> None:
        """Nothing."""

    assert decorated.every(cron="0 3 * * *")(handler) is handler
    assert plain.schedule == Schedule.of("day", at="00:30", tz="Asia/Shanghai")
    assert decorated.schedule == Schedule.of(cron="0 3 * * *")
    assert Spider("none").schedule is None
    with pytest.raises(UsageError, match="has a schedule already"):
        plain.every("hour")
