"""When a spider is due: periods of one named zone, each with a slot and one instant.

    Schedule.of("day", at="00:30", tz="Asia/Shanghai")      slots 2026-11-30, 2026-12-01, ...
    Schedule.of(cron="0 3 * * 1-5", tz="Europe/Berlin")     slots 2026-11-30T0300, ...

A slot is named in local time, so it is the same on every machine, whatever zone that is set to. It is due at
one instant, once over every change of clocks: a local time that does not exist is due at the first instant
after the gap, one that exists twice is due the first time. An hour or a day that clocks leave out has no slot,
and of the ticks of cron text that would be due at one instant, since clocks went forward, only the last has.

Instants come in as arguments, with a zone, and go out as UTC. Cron text is read by `cronsim`, as Debian's cron
reads it, on local times without a zone; what clocks do to those is decided here.
"""

from __future__ import annotations

import json
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from limpet.batch import canonical_json
from limpet.errors import UsageError

#: Slots that one question may name: ten years of hours.
SLOTS_MAX = 100_000
#: Years that slots may lie in: zones are known from about 1970 on, and one year is kept for what comes after.
YEAR_MIN, YEAR_MAX = 1970, 9990
#: No zone ever left out more than a day at once (Samoa, 2011), nor repeated more.
GAP_MAX = timedelta(days=1)

PERIODS = ("hour", "day", "week", "month")
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
#: How a slot of each period looks.
SHAPES = {"hour": "2026-11-30T05", "day": "2026-11-30", "week": "2026-W49", "month": "2026-11", "cron": "2026-11-30T0300"}

_BAD_CRON = (CronSimError, ValueError, TypeError, AssertionError, StopIteration)


@dataclass(frozen=True, slots=True)
class Slot:
    """One logical period: its name, and the instant (UTC) at which it is due."""

    name: str
    due: datetime


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `spider.every(...)` says; made by `of`, which checks it."""

    period: str  # hour | day | week | month | cron
    tz: str
    minute: int = 0  # minutes after the period's hour, or after midnight of its day
    day: int = 1  # of the week (1 is Monday) or of the month; the last one of a shorter month
    cron: str = ""

    @classmethod
    def of(cls, period: str | None = None, *, at: str = "", day: str | int | None = None, cron: str = "", tz: str = "UTC") -> Schedule:
        """A schedule; UsageError, saying what was expected, for anything that is none."""
        if (period is None) == (not cron):
            raise UsageError(f'a schedule is every("day", ...) or every(cron="0 3 * * *"), and not both; found {period!r} and {cron!r}')
        _zone(tz)
        if cron:
            if at or day is not None:
                raise UsageError("a schedule by cron text says the time in it: leave at= and day= out")
            return cls("cron", tz, cron=_checked_cron(cron))
        if period not in PERIODS:
            raise UsageError(f"every({period!r}): expected one of {', '.join(PERIODS)}, or cron=")
        return cls(period, tz, _minute_of(period, at), _day_of(period, day))

    def __str__(self) -> str:
        """For people: 'every day at 00:30, Asia/Shanghai'."""
        if self.period == "cron":
            return f"cron {self.cron!r}, {self.tz}"
        at = f"{self.minute // 60:02}:{self.minute % 60:02}" if self.period != "hour" else f":{self.minute:02}"
        on = f" on {WEEKDAYS[self.day - 1]}" if self.period == "week" else f" on day {self.day}" if self.period == "month" else ""
        return f"every {self.period}{on} at {at}, {self.tz}"

    # -- slots and instants --------------------------------------------------------------------

    def due(self, name: str) -> datetime:
        """When the slot of that name is due, UTC; UsageError where it is no slot of this schedule."""
        return self._instant(self._tick_of(name))

    def has(self, name: str) -> bool:
        """Whether that is the name of a slot of this schedule."""
        try:
            tick = self._tick_of(name)
        except UsageError:
            return False
        return self._exists(tick)

    def last_due(self, now: datetime) -> Slot:
        """The slot that was due last at an instant."""
        local = self._local(now)
        for tick in self._ticks_down(local + self._repeated(now)):
            if self._instant(tick) <= now and self._exists(tick):
                return self._slot(tick)
        raise UsageError(f"{self}: nothing was ever due before {now.isoformat()}")

    def next_due(self, now: datetime) -> Slot:
        """The slot that is due next, after an instant."""
        for tick in self._ticks_up(self._local(now)):
            if self._instant(tick) > now and self._exists(tick):
                return self._slot(tick)
        raise UsageError(f"{self}: nothing is ever due after {now.isoformat()}")

    def between(self, first: datetime, last: datetime) -> list[Slot]:
        """Every slot that is due from one instant to another, both included."""
        found = []
        for tick in self._ticks_up(self._local(first) - GAP_MAX):
            due = self._instant(tick)
            if due > last:
                break
            if due >= first and self._exists(tick):
                found.append(self._slot(tick))
                _check_number(found)
        return found

    def slots(self, first: str, last: str) -> list[Slot]:
        """Every slot from one name to another, both included; UsageError where the first comes after the last."""
        begin, end = self._tick_of(first), self._tick_of(last)
        if begin > end:
            raise UsageError(f"from {first} to {last}: the first slot comes after the last one")
        found = []
        for tick in self._ticks_up(begin):
            if tick > end:
                break
            if self._exists(tick):
                found.append(self._slot(tick))
                _check_number(found)
        return found

    def today(self, now: datetime) -> str:
        """The slot of the local day, or of the week or month that it is in; UsageError where a day has none or several."""
        local = self._local(now)
        if self.period in ("day", "week", "month"):
            return self._name_of(local)
        midnight = datetime.combine(local, time())
        ticks = takewhile(lambda tick: tick < midnight + timedelta(days=1), self._ticks_up(midnight))
        names = [self._name_of(tick) for tick in ticks if self._exists(tick)]
        if len(names) != 1:
            named = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
            raise UsageError(f"today: {local:%Y-%m-%d} has {len(names)} slots of {self} ({named}): name one")
        return names[0]

    # -- as text -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """This schedule as text; `from_json` reads it."""
        return canonical_json({"period": self.period, "tz": self.tz, "minute": self.minute, "day": self.day, "cron": self.cron})

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule that `to_json` wrote.

        >>> daily = Schedule.of("day", at="00:30", tz="Asia/Shanghai")
        >>> Schedule.from_json(daily.to_json()) == daily
        True
        """
        said = json.loads(text)
        return cls(said["period"], said["tz"], said["minute"], said["day"], said["cron"])

    # -- ticks: local times at which periods are due, without a zone ------------------------------

    def _ticks_up(self, begin: datetime) -> Iterator[datetime]:
        """Ticks from a local time on, in order."""
        if self.period == "cron":
            yield from _of_cron(self.cron, begin - timedelta(seconds=1))
            return
        tick = self._tick_in(begin)
        while tick.year < YEAR_MAX:
            if tick >= begin:
                yield tick
            tick = self._tick_in(self._start(tick) + _LONGEST[self.period])

    def _ticks_down(self, begin: datetime) -> Iterator[datetime]:
        """Ticks up to a local time, backwards."""
        if self.period == "cron":
            yield from _of_cron(self.cron, begin + timedelta(seconds=1), reverse=True)
            return
        tick = self._tick_in(begin)
        while tick.year >= YEAR_MIN:
            if tick <= begin:
                yield tick
            tick = self._tick_in(self._start(tick) - timedelta(minutes=1))

    def _start(self, local: datetime) -> datetime:
        """The local time at which the period of another begins."""
        if self.period == "hour":
            return local.replace(minute=0, second=0, microsecond=0)
        midnight = datetime.combine(local, time())
        if self.period == "week":
            return midnight - timedelta(days=midnight.isoweekday() - 1)
        return midnight.replace(day=1) if self.period == "month" else midnight

    def _tick_in(self, local: datetime) -> datetime:
        """The tick of the period that a local time lies in."""
        start = self._start(local)
        days = self.day - 1 if self.period == "week" else 0
        if self.period == "month":
            days = min(self.day, monthrange(start.year, start.month)[1]) - 1
        return start + timedelta(days=days, minutes=self.minute)

    def _exists(self, tick: datetime) -> bool:
        """Whether the period has any time at all: clocks that go forward may leave an hour, or a day, out."""
        start = tick if self.period == "cron" else self._start(tick)
        if self.period in ("week", "month") or self._instant(start).astimezone(_zone(self.tz)).replace(tzinfo=None, fold=0) == start:
            return True
        following = next(_of_cron(self.cron, tick), None) if self.period == "cron" else start + _LONGEST[self.period]
        return following is None or self._instant(start) != self._instant(following)

    # -- names ---------------------------------------------------------------------------------

    def _slot(self, tick: datetime) -> Slot:
        return Slot(self._name_of(tick), self._instant(tick))

    def _name_of(self, local: datetime) -> str:
        if self.period == "week":
            year, week, _ = local.isocalendar()
            return f"{year:04}-W{week:02}"
        return local.strftime({"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m", "cron": "%Y-%m-%dT%H%M"}[self.period])

    def _tick_of(self, name: str) -> datetime:
        """The tick that a slot is named after; UsageError where none is."""
        expected = UsageError(f"{name!r} is no slot of {self}: expected one like {SHAPES[self.period]}")
        try:
            local = _parsed(self.period, name)
        except ValueError as error:
            raise expected from error
        if not YEAR_MIN <= local.year < YEAR_MAX or self._name_of(local) != name:
            raise expected
        if self.period != "cron":
            return self._tick_in(local)
        if next(_of_cron(self.cron, local - timedelta(seconds=1)), None) != local:
            raise UsageError(f"{name!r} is no slot of {self}: it has no tick then")
        return local

    # -- what clocks do --------------------------------------------------------------------------

    def _local(self, instant: datetime) -> datetime:
        return instant.astimezone(_zone(self.tz)).replace(tzinfo=None, fold=0)

    def _repeated(self, instant: datetime) -> timedelta:
        """How much of the local time after an instant has been there before: clocks went back."""
        local = instant.astimezone(_zone(self.tz))
        if not local.fold:
            return timedelta(0)
        return (local.replace(fold=0).utcoffset() or timedelta(0)) - (local.utcoffset() or timedelta(0))

    def _instant(self, tick: datetime) -> datetime:
        """The instant of a local time: the first one where there are two, the end of the gap where there is none."""
        zone = _zone(self.tz)
        found = tick.replace(tzinfo=zone, fold=0).astimezone(UTC)
        if found.astimezone(zone).replace(tzinfo=None, fold=0) == tick:
            return found
        return _end_of_gap(zone, tick.replace(tzinfo=zone, fold=1).astimezone(UTC), found)


#: At least as long as the period, and less than two of it.
_LONGEST = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=31)}


def _end_of_gap(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    """The instant at which clocks went forward, between two that lie around it (PEP 495: fold reads a gap by either offset)."""
    offset = after.astimezone(zone).utcoffset()
    low, high = int(before.timestamp()), int(after.timestamp())
    while low < high:
        middle = (low + high) // 2
        if datetime.fromtimestamp(middle, UTC).astimezone(zone).utcoffset() == offset:
            high = middle
        else:
            low = middle + 1
    return datetime.fromtimestamp(high, UTC)


def _parsed(period: str, name: str) -> datetime:
    """The local time that a slot's name says; ValueError where it says none."""
    if not name.isascii():
        raise ValueError(name)
    if period == "week":
        year, _, week = name.partition("-W")
        return datetime.combine(date.fromisocalendar(int(year), int(week), 1), time())
    forms = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m", "cron": "%Y-%m-%dT%H%M"}
    return datetime.strptime(name, forms[period])


def _of_cron(text: str, begin: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    """Ticks of cron text after (or before) a local time; none where it finds none within 50 years."""
    ticks = CronSim(text, begin, reverse=reverse)
    while True:
        try:
            yield next(ticks)
        except (StopIteration, OverflowError, ValueError):
            return


def _checked_cron(text: str) -> str:
    fields = text.split()
    if len(fields) != 5:
        raise UsageError(f"cron text {text!r}: expected five fields (minute, hour, day, month, day of the week), found {len(fields)}")
    try:
        CronSim(text, datetime(2000, 1, 1)).__next__()
    except _BAD_CRON as error:
        raise UsageError(f"cron text {text!r}: {str(error) or 'it is never due'}") from error
    return " ".join(fields)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as error:
        raise UsageError(f"tz={name!r}: expected the name of a time zone, such as Asia/Shanghai or UTC") from error


def _minute_of(period: str, at: str) -> int:
    """Minutes after the start of the hour, or of the day."""
    if not at:
        return 0
    hour, colon, minute = at.partition(":")
    is_hour = period == "hour"
    fits = colon and len(minute) == 2 and minute.isdecimal() and minute.isascii() and int(minute) < 60
    fits = fits and (hour == "" if is_hour else len(hour) in (1, 2) and hour.isdecimal() and hour.isascii() and int(hour) < 24)
    if not fits:
        raise UsageError(f"every({period!r}, at={at!r}): expected a time such as {':15' if is_hour else '00:30'}")
    return int(minute) + 60 * int(hour or 0)


def _day_of(period: str, day: str | int | None) -> int:
    if day is None:
        return 1
    if period == "week" and isinstance(day, str):
        found = [number for number, name in enumerate(WEEKDAYS, 1) if len(day) >= 3 and name.startswith(day.lower())]
        if found:
            return found[0]
    if period == "month" and isinstance(day, int) and 1 <= day <= 31 and not isinstance(day, bool):
        return day
    expected = {"week": "a day of the week, such as 'monday'", "month": "a number from 1 to 31"}.get(period, "no day")
    raise UsageError(f"every({period!r}, day={day!r}): expected {expected}")


def _check_number(found: list[Slot]) -> None:
    if len(found) > SLOTS_MAX:
        raise UsageError(f"more than {SLOTS_MAX:,} slots from {found[0].name} on: ask for fewer at once")


def runs(slots: list[Slot], among: list[Slot]) -> list[tuple[Slot, Slot]]:
    """Some of a schedule's slots as stretches without a hole: pairs of first and last, in order. `among`: all slots there are."""
    places = {slot.name: place for place, slot in enumerate(among)}
    wanted = [places[slot.name] for slot in slots]
    begins = [0, *(at + 1 for at, (left, right) in enumerate(pairwise(wanted)) if right != left + 1)]
    ends = [*(begin - 1 for begin in begins[1:]), len(slots) - 1]
    return [(slots[begin], slots[end]) for begin, end in zip(begins, ends, strict=True)] if slots else []
