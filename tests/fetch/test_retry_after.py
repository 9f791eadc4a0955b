"""Retry-After: how long a server asks to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.fetch.message import Answer
from limpet.fetch.retry_after import asked_wait_s, http_date, retry_after_s
from tests.fetch.vectors import rows

NOW = datetime(2015, 10, 21, 7, 27, tzinfo=UTC)
DAY = 86400.0


@pytest.mark.parametrize(("folder", "n", "row"), rows("http_retry_after.json"))
def test_every_row_of_the_vectors_is_met(folder: str, n: int, row: dict[str, Any]) -> None:
    """RFC 9110 section 10.2.3, and the ways in which Python's own parsers are too lenient."""
    assert retry_after_s(row["input"], parsedate_to_datetime(row["now"]), DAY) == row["expected"]


@pytest.mark.parametrize(
    "text",
    ["Wed, 21 Oct 2015 07:28:30 GMT", "Wednesday, 21-Oct-15 07:28:30 GMT", "Wed Oct 21 07:28:30 2015"],
)
def test_the_three_forms_of_a_date_are_read(text: str) -> None:
    """P92: both header forms; a date in any of the three that RFC 9110 section 5.6.7 allows."""
    assert retry_after_s(text, NOW, DAY) == 90


@pytest.mark.parametrize(
    "text",
    [None, "", "-5", "1.5", "1e3", "12\n", "Wed, 21 Oct 2015 07:28:30 +0000", "Wed, 31 Feb 2015 07:28:30 GMT",
     "Wed, 21 Oct 2015 25:00:00 GMT", "2015-10-21T07:28:30Z", "wed, 21 oct 2015 07:28:30 gmt"],
)  # fmt: skip
def test_what_is_no_value_is_ignored(text: str | None) -> None:
    """None: use an own back-off. Never a wait that nobody asked for."""
    assert retry_after_s(text, NOW, DAY) is None


def test_a_two_digit_year_is_the_nearest_past_century_or_the_next_fifty_years() -> None:
    """RFC 9110 section 5.6.7."""
    assert http_date("Sunday, 06-Nov-94 08:49:37 GMT", NOW) == datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert http_date("Friday, 06-Nov-65 08:49:37 GMT", NOW) == datetime(2065, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert http_date("Saturday, 06-Nov-66 08:49:37 GMT", NOW) == datetime(1966, 11, 6, 8, 49, 37, tzinfo=UTC)


def test_a_skewed_clock_does_not_count() -> None:
    """The wait is between the server's own Date and its own Retry-After."""
    fields = (("Date", "Wed, 21 Oct 2015 07:27:00 GMT"), ("Retry-After", "Wed, 21 Oct 2015 07:29:00 GMT"))
    answer = Answer("http://a/", 429, fields)
    assert asked_wait_s(answer, NOW + timedelta(hours=5), 3600) == 120
    assert asked_wait_s(answer, NOW - timedelta(hours=5), 3600) == 120
    assert asked_wait_s(Answer("http://a/", 429, (("retry-after", "7"),)), NOW, 3600) == 7
    assert asked_wait_s(Answer("http://a/", 429), NOW, 3600) is None


@given(st.text(), st.floats(0, 1e6))
def test_any_text_gives_none_or_a_wait_within_the_cap(text: str, cap: float) -> None:
    """Whatever a server sends."""
    wait_s = retry_after_s(text, NOW, cap)
    assert wait_s is None or 0 <= wait_s <= cap


@given(st.integers(0, 10**30))
def test_whole_seconds_are_taken_up_to_the_cap(seconds: int) -> None:
    """Without overflow, however large."""
    assert retry_after_s(str(seconds), NOW, DAY) == min(seconds, DAY)
