"""An outage of a host: when it is the host that is away, and not a page of it that fails.

A failure that might be the host's (no connection, a reset, a time-out, a 5xx) is in doubt at first. An answer of the
host decides it: the page is to blame, and gets its strike. `outage_after` different tasks that failed in a row, with no
answer between, decide it too: the host is away. Then nobody gets a strike, the host is paused for as long as it has been
away already (from `backoff_s` up to `backoff_max_s`), one task at a time asks whether it is back, and its first answer
ends the outage. A host that stays away for longer than `throttle_hours` is given up: its tasks get their strikes.

The state is the host's row: `pause` says since when, `errors` how many failures, and both commit with the released tasks;
so a take-over goes on with the outage. Keyed calls of one handler lie on 64 hosts of ours, which are one provider: they
are judged together.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from limpet import policy
from limpet.batch import Claim, Result
from limpet.engine.hand import Doubt, Hand, Host
from limpet.settings import Settings
from limpet.task import Outcome

log = logging.getLogger("limpet.outage")

#: The reason of a try that an outage ended.
REASON = "outage of host"

#: Reasons of a failure that may be the host's. A page that asks for another try by `Retry` has words of its own.
HOST_REASONS = frozenset({"connect", "reset", "timeout", "tls", "dns", "robots unreachable"})

#: Seconds that a failure stays in doubt: at a delay of one second, as long as it takes to ask a few more pages of a slow host.
DOUBT_S = 60.0

#: Hosts with failures in a row that are remembered.
STREAKS_MAX = 20_000

#: How a failure says that a name has no address; a name that never had one is no host that is away.
_NO_NAME = "cannot resolve"


@dataclass(slots=True)
class _Streak:
    """Failures of one host, or one provider, without an answer between them."""

    began_ms: int
    began_s: float
    tasks: set[int] = field(default_factory=set)  # those that had not failed before


async def _never(shard: int, host: int) -> bool:
    return False


@dataclass(slots=True)
class Outages:
    """What the tries of one worker tell about the hosts that they asked. Decides; neither waits nor sends nor writes."""

    hand: Hand
    settings: Settings
    clock: Callable[[], float]
    has_worked: Callable[[int, int], Awaitable[bool]] = _never  # (shard, host) -> whether a task of it was ever done
    on_outage: Callable[[str, int, str], None] = lambda host, since_ms, reason: None
    now_ms: Callable[[], int] = lambda: round(time.time() * 1000)
    lot: Callable[[], float] = random.random
    _streaks: dict[str, _Streak] = field(default_factory=dict)
    _decided: list[Result] = field(default_factory=list)
    _given_back: list[Claim] = field(default_factory=list)

    async def weigh(self, result: Result) -> Result | None:
        """What a try really ended in; None while that is in doubt, and `take` has it later."""
        host = self.hand.hosts[result.claim.host]
        if not _may_be_the_hosts(result):
            if 0 < result.status < 500:  # 0: nobody was asked, or an answer that was paid for earlier was read again
                self._answered(host, self.hand.started.get(result.claim.id, self.clock()))
            return result
        if not self.settings.outage_after or not await self._is_known_name(host, result):
            return result
        if away := self._away(host.group):
            return self._released(host, result, away[0].away_ms) if self._is_borne(away[0].away_ms) else result
        return self._doubt(host, result)

    def take(self) -> list[Result]:
        """Results that were in doubt and no longer are; each is returned once."""
        decided, self._decided = self._decided, []
        return decided

    def take_given_back(self) -> list[Claim]:
        """Claims whose host turned out to be away before they were started; each is returned once."""
        back, self._given_back = self._given_back, []
        return back

    def settle(self, *, at_rest: bool) -> None:
        """Decide what has been in doubt for too long, and at rest, when nobody is left to ask, all of it: strikes."""
        if not self.hand.in_doubt:
            return
        long_ago_s = self.clock() - DOUBT_S
        for host in self.hand.hosts.values():
            late = [doubt for doubt in host.doubts if at_rest or doubt.at_s <= long_ago_s]
            self._decided += [doubt.result for doubt in late]
            self.hand.resolve(host, late)

    # -- inside ----------------------------------------------------------------------------

    async def _is_known_name(self, host: Host, result: Result) -> bool:
        """Whether the host has a name that works, or worked: a name that never did is a dead link, and strikes."""
        if result.reason != "dns" and not (result.reason == "robots unreachable" and _NO_NAME in result.detail):
            return True
        if not host.has_answered:
            host.has_answered = await self.has_worked(host.shard, host.id)
        return host.has_answered

    def _away(self, group: str) -> list[Host]:
        """The hosts of a group that are away, the longest first."""
        return sorted((h for h in self.hand.away.values() if h.group == group), key=lambda h: h.away_ms)

    def _is_borne(self, since_ms: int) -> bool:
        return self.now_ms() - since_ms <= self.settings.throttle_hours * policy.MS_PER_HOUR

    def _doubt(self, host: Host, result: Result) -> Result | None:
        streak = self._streaks.get(host.group)
        is_fresh = result.claim.strikes == 0
        if streak is None:
            if not is_fresh:
                return result  # it has failed while the host was well: no sign of anything new
            streak = self._streaks[host.group] = _Streak(self.now_ms(), self.clock())
            while len(self._streaks) > STREAKS_MAX:
                del self._streaks[next(iter(self._streaks))]
        if is_fresh:
            streak.tasks.add(result.claim.id)
        if len(streak.tasks) < self.settings.outage_after:
            self.hand.doubt(host, Doubt(result, self.clock()))
            return None
        del self._streaks[host.group]
        for one in self._doubtful(host):
            self._decided += [self._released(one, doubt.result, streak.began_ms) for doubt in one.doubts]
            self.hand.resolve(one, list(one.doubts))
        return self._released(host, result, streak.began_ms)

    def _released(self, host: Host, result: Result, since_ms: int) -> Result:
        """No strike: its task is due when the host is asked again."""
        now_s = self.clock()
        if not host.away_ms or host.next_s <= now_s:
            self._pause(host, since_ms, result.reason, now_s)
        return replace(
            result, outcome=Outcome.RELEASED, reason=REASON, detail=f"{result.reason}: {result.detail}".rstrip(": "), strike=False,
            due_in_ms=max(1, round((host.next_s - now_s) * 1000)), links=(), offers=(), tallies=(), registers=(), seen=(), size=0,
            is_final=False, drops_kept=False, charge=result.charge and replace(result.charge, anew=False),
        )  # fmt: skip

    def _pause(self, host: Host, since_ms: int, reason: str, now_s: float) -> None:
        wait_s = policy.outage_wait_s(max(0, self.now_ms() - since_ms) / 1000, self.settings, self.lot())
        if not host.away_ms:
            log.warning("%s is away: %s; nobody is blamed, it is asked again in %.0f s", host.authority, reason, wait_s)
        self._given_back += self.hand.leave_alone(host, since_ms, now_s, now_s + wait_s, policy.outage_text(since_ms, reason))
        self.on_outage(host.group, since_ms, reason)

    def _answered(self, host: Host, started_s: float) -> None:
        """The host is there: what was in doubt was its pages' fault, and an outage is over.

        An answer to what was asked before the first failure says nothing: it was on its way.
        """
        host.has_answered = True
        streak = self._streaks.get(host.group)
        if streak is not None and started_s > streak.began_s:
            del self._streaks[host.group]
            for one in self._doubtful(host):
                self._decided += [doubt.result for doubt in one.doubts]
                self.hand.resolve(one, list(one.doubts))
        for one in self._away(host.group) if self.hand.away else ():
            if started_s > one.away_s:
                log.warning("%s is back", one.authority)
                self.hand.is_back(one, self.clock())

    def _doubtful(self, host: Host) -> list[Host]:
        """The hosts of a group that have anything in doubt."""
        return [h for h in self.hand.hosts.values() if h.doubts and h.group == host.group]


def _may_be_the_hosts(result: Result) -> bool:
    """Whether a result is a failure that every page of the host would have, were the host away."""
    if not result.strike or result.outcome not in (Outcome.FAILED, Outcome.DEAD):
        return False
    return result.reason in HOST_REASONS or (500 <= result.status <= 599 and result.reason == f"status {result.status}")
