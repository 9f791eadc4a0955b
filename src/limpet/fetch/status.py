"""What an HTTP status means for the task that asked.

    2xx                        ok         the body is the page
    404, 410                   gone       skipped, reason "gone"
    429                        throttled  the host waits; no strike
    503 with Retry-After       throttled
    408, 425, 421              retryable  a strike; tried again
    5xx (also 503 without)     retryable
    401, 402, 403, 451, 4xx    refused    dead at once, reason "status 403": asking again changes nothing
    3xx                        refused    a redirect without a usable target, or one that was never asked for (304)
    1xx, below 100, from 600   refused    no HTTP; 999 is how some sites say that they block

Redirects that can be followed never come here: `redirects.py` takes them first.
"""

from __future__ import annotations

from enum import StrEnum


class Meaning(StrEnum):
    """What to do with the task."""

    OK = "ok"
    GONE = "gone"
    THROTTLED = "throttled"
    RETRYABLE = "retryable"
    REFUSED = "refused"


#: Statuses below 500 that another try can change: Request Timeout, Misdirected Request (RFC 9110), Too Early (RFC 8470).
RETRYABLE_4XX = frozenset({408, 421, 425})


def verdict_of(status: int, *, has_retry_after: bool = False) -> Meaning:
    """The meaning of a status; `has_retry_after` says whether the answer held a Retry-After header.

    >>> verdict_of(503), verdict_of(503, has_retry_after=True)
    (<Meaning.RETRYABLE: 'retryable'>, <Meaning.THROTTLED: 'throttled'>)
    """
    if 200 <= status <= 299:
        return Meaning.OK
    if status in (404, 410):
        return Meaning.GONE
    if status == 429 or (status == 503 and has_retry_after):
        return Meaning.THROTTLED
    if status in RETRYABLE_4XX or 500 <= status <= 599:
        return Meaning.RETRYABLE
    return Meaning.REFUSED
