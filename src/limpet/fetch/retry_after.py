"""Retry-After: how long a server asks to wait (RFC 9110 section 10.2.3).

Stricter than Python's `int`, which takes "+30", "3_0" and digits of other scripts, and than
`email.utils`, which takes nearly anything for a date.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from limpet.fetch.message import Answer

#: Digits beyond these cannot change a value that is clamped anyway, and would only cost time to convert.
DIGITS_MAX = 12

_SECONDS = re.compile(r"[0-9]+\Z")
_MONTHS = {m: n for n, m in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)}
_MONTH = "(?P<month>" + "|".join(_MONTHS) + ")"
_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
#: The three forms of HTTP-date (RFC 9110 section 5.6.7): IMF-fixdate, RFC 850, asctime.
_DATES = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) {_MONTH} (?P<year>\d{{4}}) {_TIME} GMT\Z",
        rf"[A-Z][a-z]{{5,8}}, (?P<day>\d\d)-{_MONTH}-(?P<year>\d\d) {_TIME} GMT\Z",
        rf"[A-Z][a-z]{{2}} {_MONTH} (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})\Z",
    )
)


def retry_after_s(value: str | None, now: datetime, max_s: float) -> float | None:
    """Seconds to wait, 0 to `max_s`; None where the header is absent or no such value (use an own back-off).

    `now` is the time of the answer on the *server's* clock where it sent a Date header, so that a
    skewed clock does not count (`answered_at`). A date in the past means at once.
    """
    text = (value or "").strip(" \t")
    if _SECONDS.match(text):
        digits = text.lstrip("0")
        return max_s if len(digits) > DIGITS_MAX else min(float(digits or 0), max_s)
    when = http_date(text, now)
    if when is None:
        return None
    return min(max((when - now).total_seconds(), 0.0), max_s)


def asked_wait_s(answer: Answer, own_clock: datetime, max_s: float) -> float | None:
    """What the Retry-After of an answer asks for, by the server's own clock; None without a usable one."""
    value = answer.header("retry-after")
    return None if value is None else retry_after_s(value, answered_at(answer.header("date"), own_clock), max_s)


def answered_at(date_header: str | None, own_clock: datetime) -> datetime:
    """The time of an answer: its Date header, or our clock without a usable one."""
    return (date_header and http_date(date_header.strip(" \t"), own_clock)) or own_clock


def http_date(text: str, now: datetime) -> datetime | None:
    """An HTTP-date as an aware datetime in UTC; None where the text is none.

    A two-digit year more than 50 years ahead of `now` is in the past (RFC 9110 section 5.6.7).
    """
    match = next(filter(None, (form.match(text) for form in _DATES)), None)
    if match is None:
        return None
    year = int(match["year"])
    if len(match["year"]) == 2:
        year += now.year - now.year % 100
        year -= 100 if year > now.year + 50 else 0
    second = min(int(match["second"]), 59)  # 60 is a leap second, which datetime does not know
    try:
        return datetime(year, _MONTHS[match["month"]], int(match["day"]), int(match["hour"]), int(match["minute"]), second, tzinfo=UTC)
    except ValueError:
        return None
