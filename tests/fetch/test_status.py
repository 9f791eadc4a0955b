"""What a status means for the task."""

from __future__ import annotations

import pytest

from limpet.fetch.status import Meaning, verdict_of


@pytest.mark.parametrize(
    ("statuses", "meaning"),
    [
        ((200, 201, 203, 206, 299), Meaning.OK),
        ((404, 410), Meaning.GONE),
        ((429,), Meaning.THROTTLED),
        ((408, 421, 425, 500, 502, 503, 504, 520, 599), Meaning.RETRYABLE),
        ((401, 402, 403, 405, 418, 451, 300, 301, 304, 100, 101, 600, 999, 0), Meaning.REFUSED),
    ],
)
def test_each_status_has_one_meaning(statuses: tuple[int, ...], meaning: Meaning) -> None:
    """P100, P102: gone is not failed, and what no retry changes is not retried."""
    assert {verdict_of(status) for status in statuses} == {meaning}


def test_a_503_that_names_a_time_is_a_throttle() -> None:
    """P95: throttled is its own state, never broken; no other 5xx is."""
    assert verdict_of(503, has_retry_after=True) is Meaning.THROTTLED
    assert verdict_of(500, has_retry_after=True) is Meaning.RETRYABLE
