"""Pure decisions about what comes next for a task: wait, try again, give up. No clock, no randomness.

Back-off is by class of error, with jitter that the caller draws. An interruption is no failure: only
strikes meet the cap. A throttle is no strike, is counted, and has a cap of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from limpet.batch import Claim
from limpet.settings import Settings
from limpet.task import Outcome

#: Each further wait of a back-off is so many times the one before: 1, 4, 16 s.
BACKOFF_FACTOR = 4.0

#: Share of a wait that jitter may take away or add, so that what failed together does not return together.
JITTER = 0.25

#: First wait after a throttle that names no time; doubled for each further one.
THROTTLE_WAIT_S = 5.0

#: Longest wait that a handler's Retry may ask for: what comes later than a week is another slot's.
AFTER_MAX_S = 7 * 24 * 3600.0

#: Waits that are counted up: of so many, each is long beyond its limit, and a power of more is no number any more.
DOUBLINGS_MAX = 64

MS_PER_HOUR = 3_600_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """In what a try ends, and when the next one is due."""

    outcome: Outcome
    reason: str
    strike: bool = False
    due_in_ms: int = 0


def backoff_s(failures: int, settings: Settings, jitter: float) -> float:
    """Seconds before another try after so many failures; `jitter` is drawn from 0 to 1.

    >>> [backoff_s(n, Settings(), 0.5) for n in (1, 2, 3, 9)]
    [1.0, 4.0, 16.0, 600.0]
    """
    wait = min(settings.backoff_s * BACKOFF_FACTOR ** (min(max(1, failures), DOUBLINGS_MAX) - 1), settings.backoff_max_s)
    return wait * (1 + JITTER * (2 * jitter - 1))


def failed(claim: Claim, reason: str, settings: Settings, jitter: float, *, after_s: float | None = None) -> Verdict:
    """A failure that another try may mend: a strike, then later; dead once the strikes are used up."""
    strikes = claim.strikes + 1
    if strikes >= settings.strikes:
        return Verdict(Outcome.DEAD, reason, strike=True)
    wait_s = backoff_s(strikes, settings, jitter) if after_s is None else within(after_s, AFTER_MAX_S)
    return Verdict(Outcome.FAILED, reason, strike=True, due_in_ms=max(1, round(wait_s * 1000)))


def throttled(claim: Claim, reason: str, settings: Settings, now_ms: int, jitter: float, *, after_s: float | None = None) -> Verdict:
    """The host asks for patience: no strike, a due time, and a cap by number and by hours."""
    times = claim.throttled + 1
    since_ms = claim.throttled_since_ms
    if times >= settings.throttles or (since_ms and now_ms - since_ms > settings.throttle_hours * MS_PER_HOUR):
        return Verdict(Outcome.DEAD, "throttled")
    return Verdict(Outcome.THROTTLED, reason, due_in_ms=max(1, round(throttle_wait_s(times, settings, jitter, after_s) * 1000)))


def throttle_wait_s(times: int, settings: Settings, jitter: float, after_s: float | None = None) -> float:
    """Seconds that a throttled host waits: what it asked for, else more each time."""
    if after_s is not None:
        return within(after_s, settings.retry_after_max_s)
    return float(min(THROTTLE_WAIT_S * 2 ** (min(times, DOUBLINGS_MAX) - 1), settings.backoff_max_s) * (1 + JITTER * jitter))


def within(wait_s: float, most_s: float) -> float:
    """A wait that somebody asked for, from 0 to the longest one; what is no number is none.

    >>> [within(wait_s, 60.0) for wait_s in (5, -1, 1e300, float("nan"))]
    [5, 0.0, 60.0, 0.0]
    """
    return min(max(0.0, wait_s), most_s)


# -- a host that is away ------------------------------------------------------------------------

_OUTAGE = re.compile(r"outage since (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z): ")


def outage_wait_s(away_s: float, settings: Settings, jitter: float) -> float:
    """Seconds until a host that has been away for so long is asked again: as long again, so the wait doubles.

    >>> [outage_wait_s(away_s, Settings(), 0.5) for away_s in (0, 3, 40, 9000)]
    [1.0, 3.0, 40.0, 600.0]
    """
    return min(max(away_s, settings.backoff_s), settings.backoff_max_s) * (1 + JITTER * (2 * jitter - 1))


def outage_text(since_ms: int, reason: str) -> str:
    """What the row of a host says that is away: for people, and for its next owner.

    >>> outage_text(1796047503250, "connect")
    'outage since 2026-11-30T14:05:03.250Z: connect'
    """
    at = datetime.fromtimestamp(since_ms / 1000, UTC)
    return f"outage since {at:%Y-%m-%dT%H:%M:%S}.{since_ms % 1000:03}Z: {reason}"


def outage_since_ms(text: str) -> int:
    """Since when the host is away whose row says that, in milliseconds since 1970; 0 where it says something else.

    >>> outage_since_ms("outage since 2026-11-30T14:05:03.250Z: connect"), outage_since_ms("status 429")
    (1796047503250, 0)
    """
    found = _OUTAGE.match(text)
    if found is None:
        return 0
    at = datetime.strptime(f"{found[1][:-5]}+0000", "%Y-%m-%dT%H:%M:%S%z")
    return round(at.timestamp()) * 1000 + int(found[1][-4:-1])
