"""What is claimed and not yet started, and which of it may start now: the pace of every host in one place.

Decisions only; nothing here waits or sends. A host has a number of slots and a delay that is counted
from the end of its last answer; robots.txt, hops and retries count too. Errors only slow a host down.
Hosts that may start something stand in one line, so that each gets its turn.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from limpet import policy
from limpet.batch import Claim, HostRow, Result

#: Hosts without claims, requests or a pause that are remembered: the memory of a broad crawl stays flat.
IDLE_HOSTS_MAX = 20_000

#: Calls of one of our own hosts at once: more than `concurrency` ever lets run.
CALLS_MAX = 2**31

#: A host's delay is doubled for each failure in a row, up to this factor.
ERROR_FACTOR_MAX = 16

#: Seconds that a host waits at least after its n-th failure in a row, times n squared: errors only slow down.
ERROR_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class Doubt:
    """An ended try of which it is not known yet whether its page or its host is to blame; see outage.py."""

    result: Result  # what it ended in, if it was the page
    at_s: float


@dataclass(slots=True)
class Host:
    """The pace of one host."""

    id: int
    authority: str
    shard: int
    delay_s: float
    slots: int
    next_s: float  # nothing starts before
    pause: str = ""  # why it waits for longer than its delay
    held: str = ""  # why a person has paused it: nothing is started until they let it go on
    active: int = 0
    errors: int = 0
    away_ms: int = 0  # since when the host itself is away, in milliseconds since 1970; 0 while it is not
    away_s: float = 0.0  # when that was noticed, on the hand's clock
    has_answered: bool = False  # to this worker, or to one before it
    lined_up: bool = False  # stands in the line, or its timer is set
    changed: bool = False  # since it was last committed
    claims: deque[Claim] = field(default_factory=deque)
    doubts: list[Doubt] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Nothing claimed, nothing running, nothing in doubt."""
        return not self.claims and not self.active and not self.doubts

    @property
    def is_full(self) -> bool:
        """Whether nothing more may start beside what runs: one task alone asks whether a host that is away is back."""
        return self.active >= (1 if self.away_ms else self.slots)

    @property
    def group(self) -> str:
        """What is away together: a host, or all the hosts of ours on which one handler's calls lie (`serp+00` to `serp+63`)."""
        name, plus, bucket = self.authority.rpartition("+")
        return name if plus and len(bucket) == 2 and bucket.isdigit() else self.authority


class Hand:
    """Claims in hand, by host. All times are seconds of one clock, passed in."""

    def __init__(self, *, delay_s: float, slots: int, slots_with_delay: int) -> None:
        self._delay_s = delay_s
        self._slots = slots
        self._slots_with_delay = slots_with_delay
        self._line: deque[Host] = deque()
        self._timers: list[tuple[float, int]] = []
        self.hosts: dict[int, Host] = {}
        self.unstarted = 0
        self.running = 0
        self.in_doubt = 0
        self.away: dict[int, Host] = {}
        self.started: dict[int, float] = {}  # running task -> since when

    # -- claims come in and go out ---------------------------------------------------------

    def host(self, claim: Claim, now: float) -> Host:
        """The pace of a claim's host; a new one may start at once."""
        return self.hosts.get(claim.host) or self._met(claim.host, claim.authority, claim.shard, now)

    def _met(self, host_id: int, authority: str, shard: int, now: float) -> Host:
        if len(self.hosts) >= IDLE_HOSTS_MAX:
            self._forget_idle(now)
        delay_s, slots = self._pace_of(authority)
        host = self.hosts[host_id] = Host(host_id, authority, shard, delay_s, slots, now)
        return host

    def _pace_of(self, authority: str) -> tuple[float, int]:
        """Delay and slots of a host. One of ours, on which calls lie, has no pace: the provider that they ask has (keyed.py)."""
        if "+" in authority:
            return 0.0, CALLS_MAX
        delay_s = (0.0 if is_loopback(authority) else 1.0) if self._delay_s < 0 else self._delay_s
        return delay_s, self._slots or (self._slots_with_delay if delay_s > 0 else 8)

    def add(self, claims: Iterable[Claim], now: float) -> None:
        """Take claims into the hand, in their order."""
        for claim in claims:
            host = self.host(claim, now)
            host.claims.append(claim)
            self.unstarted += 1
            self._line_up(host, now)

    def take(self, now: float) -> Claim | None:
        """The next claim that may start, counted as running; None where none may yet."""
        self._ring(now)
        while self._line:
            host = self._line.popleft()
            host.lined_up = False
            if not host.claims or host.is_full or host.held:
                continue
            if host.next_s > now:
                self._line_up(host, now)
                continue
            claim = host.claims.popleft()
            host.active += 1
            self.unstarted -= 1
            self.running += 1
            self.started[claim.id] = now
            self._line_up(host, now)
            return claim
        return None

    def ended(self, claim: Claim, now: float, *, failed: bool = False) -> None:
        """A task of this host has ended: its delay runs from now."""
        host = self.hosts[claim.host]
        host.active -= 1
        self.running -= 1
        self.started.pop(claim.id, None)
        host.errors = host.errors + 1 if failed or host.away_ms else 0
        self.answered(host, now)
        self._line_up(host, now)

    def answered(self, host: Host, now: float) -> None:
        """An answer of this host has ended; the next request waits for its delay."""
        wait_s = host.delay_s
        if host.errors and not host.away_ms:
            wait_s = max(
                wait_s * min(2**host.errors, ERROR_FACTOR_MAX),
                ERROR_WAIT_S * min(host.errors, 20) ** 2 if host.errors > 3 else 0.0,
            )
        if wait_s:
            host.next_s = max(host.next_s, now + wait_s)
            host.changed = True
        if host.pause and not host.away_ms and host.next_s <= now + wait_s:
            host.pause = ""
            host.changed = True

    def pause(self, host: Host, until_s: float, reason: str) -> list[Claim]:
        """Nothing of this host starts before `until_s`; its unstarted claims, to be given back."""
        if until_s > host.next_s:
            host.next_s, host.pause, host.changed = until_s, reason, True
        back = list(host.claims)
        host.claims.clear()
        self.unstarted -= len(back)
        return back

    def hold(self, host: Host, until_s: float, reason: str) -> None:
        """A short pause: nothing of this host starts before `until_s`, and its claims stay in hand."""
        if until_s > host.next_s:
            host.next_s, host.pause, host.changed = until_s, reason, True

    def heed(self, host_id: int, authority: str, shard: int, held: str, now: float) -> list[Claim]:
        """A person has paused a host, or lets it go on: its unstarted claims, to be given back. What runs may end."""
        host = self.hosts.get(host_id) or self._met(host_id, authority, shard, now)
        host.held = held
        if not held:
            if host.away_ms:  # whoever lets it go on knows that it is back: ask it now
                host.next_s, host.changed = now, True
            self._line_up(host, now)
            return []
        back = list(host.claims)
        host.claims.clear()
        self.unstarted -= len(back)
        return back

    def slow(self, host: Host, delay_s: float) -> None:
        """Raise a host's delay, as robots.txt asks: one request at a time from now on."""
        if delay_s > host.delay_s:
            host.delay_s, host.changed = delay_s, True
            host.slots = self._slots or self._slots_with_delay

    def drop(self, shard: int | None = None) -> list[Claim]:
        """Every unstarted claim, or those of one shard, out of the hand."""
        back: list[Claim] = []
        for host in self.hosts.values():
            if shard is None or host.shard == shard:
                back += host.claims
                host.claims.clear()
        self.unstarted -= len(back)
        for host in self.hosts.values() if self.in_doubt else ():
            if shard is None or host.shard == shard:
                back += [doubt.result.claim for doubt in host.doubts]
                self.resolve(host, list(host.doubts))
        return back

    # -- a host that may be away -----------------------------------------------------------

    def doubt(self, host: Host, doubt: Doubt) -> None:
        """Keep an ended try until it is known who is to blame."""
        host.doubts.append(doubt)
        self.in_doubt += 1

    def resolve(self, host: Host, doubts: Iterable[Doubt]) -> None:
        """These are known now, or of no interest any more."""
        for doubt in doubts:
            host.doubts.remove(doubt)
            self.in_doubt -= 1

    def leave_alone(self, host: Host, since_ms: int, now: float, until_s: float, reason: str) -> list[Claim]:
        """The host is away: nothing starts before `until_s`, and then one task at a time; its unstarted claims, to be given back."""
        if not host.away_ms:
            host.away_ms, host.away_s = since_ms, now
        self.away[host.id] = host
        return self.pause(host, until_s, reason)

    def is_back(self, host: Host, now: float) -> None:
        """The host has answered: its pace is what it was."""
        host.away_ms, host.away_s, host.pause, host.errors = 0, 0.0, "", 0
        host.next_s, host.changed = min(host.next_s, now + host.delay_s), True
        self.away.pop(host.id, None)
        self._line_up(host, now)

    # -- what the worker asks --------------------------------------------------------------

    def next_start_s(self) -> float | None:
        """When the next timer rings; None where no host waits for a time."""
        return self._timers[0][0] if self._timers else None

    def startable(self, now: float) -> bool:
        """Whether something may start now."""
        self._ring(now)
        return any(h.claims and not h.is_full and h.next_s <= now and not h.held for h in self._line)

    def may_take(self, host: Host, now: float, horizon_s: float) -> int:
        """How many further tasks of this host its pace lets start within the horizon."""
        if host.held or host.next_s > now + horizon_s:
            return 0
        if host.away_ms:
            return max(0, 1 - len(host.claims) - host.active)
        if host.delay_s <= 0:
            return 2**31
        return max(0, int((now + horizon_s - max(now, host.next_s)) / host.delay_s) + 1 - len(host.claims))

    def is_short_of(self, host_id: int, now: float, within_s: float) -> bool:
        """Whether a host has no claim in hand, and may be asked within so many seconds; so may one that was never met."""
        host = self.hosts.get(host_id)
        return host is None or not (host.claims or host.held or host.next_s > now + within_s)

    def rows(self, shard: int, now: float) -> tuple[HostRow, ...]:
        """Paces of a shard that changed since they were last committed."""
        found = []
        for host in self.hosts.values():
            if host.changed and host.shard == shard:
                host.changed = False
                wait_ms = max(0, round((host.next_s - now) * 1000))
                found.append(HostRow(host.id, host.authority, round(host.delay_s * 1000), wait_ms, host.pause, host.errors))
        return tuple(found)

    def restore(
        self, host_id: int, authority: str, shard: int, *, delay_s: float, wait_s: float, pause: str, errors: int, held: str, now: float
    ) -> None:
        """Bring back a committed pace. After a take-over a host waits one full delay first."""
        own, slots = self._pace_of(authority)
        if delay_s > own and not self._slots:
            slots = self._slots_with_delay
        delay_s = max(delay_s, own)
        host = Host(host_id, authority, shard, delay_s, slots, now + max(wait_s, delay_s), pause, held, errors=errors)
        self.hosts[host_id] = host
        if since_ms := policy.outage_since_ms(pause):
            host.away_ms, host.away_s = since_ms, now
            self.away[host_id] = host

    def holds(self, shard: int) -> bool:
        """Whether anything of a shard is claimed or running."""
        return any(h.shard == shard and not h.is_idle for h in self.hosts.values())

    def waiting(self, now: float) -> str:
        """For people: the host that waits longest, and why; "" where none does."""
        if held := [h for h in self.hosts.values() if h.held]:
            return f"{held[0].authority}{f' and {len(held) - 1} more' if len(held) > 1 else ''} on hold: {held[0].held}"
        paused = [h for h in self.hosts.values() if h.pause and h.next_s > now]
        if not paused:
            return ""
        last = max(paused, key=lambda h: h.next_s)
        return f"{len(paused)} hosts paused; {last.authority} for {last.next_s - now:.0f} s: {last.pause}"

    # -- inside ----------------------------------------------------------------------------

    def _line_up(self, host: Host, now: float) -> None:
        if host.lined_up or not host.claims or host.is_full or host.held:
            return
        host.lined_up = True
        if host.next_s > now:
            heapq.heappush(self._timers, (host.next_s, host.id))
        else:
            self._line.append(host)

    def _ring(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, host_id = heapq.heappop(self._timers)
            host = self.hosts.get(host_id)
            if host is not None and host.lined_up:
                host.lined_up = False
                self._line_up(host, now)

    def _forget_idle(self, now: float) -> None:
        self.hosts = {i: h for i, h in self.hosts.items() if not h.is_idle or h.changed or h.held or h.away_ms or h.next_s > now}


def is_loopback(authority: str) -> bool:
    """Whether an authority is this machine: no politeness is owed there.

    >>> is_loopback("127.0.0.2:8800"), is_loopback("[::1]:80"), is_loopback("localhost.example.com")
    (True, True, False)
    """
    host = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
