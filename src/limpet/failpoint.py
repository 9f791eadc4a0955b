"""Named places where a test may make the process die, stop, raise or wait. Nothing when unset.

`LIMPET_FAILPOINT="after_fence@3=kill"` kills the process the third time it comes to `after_fence`;
several are separated by `;`. Actions: kill (SIGKILL), stop (SIGSTOP), raise (FailpointRaised),
wait (until the file that LIMPET_FAILPOINT_GATE names exists). Each hit appends its name to the file
that LIMPET_FAILPOINT_LOG names, so that a test can prove that its fault fired.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

from limpet.errors import LimpetError, UsageError

#: Every step of the commit and take-over paths, in order. A test drives each of them.
COMMIT_STEPS = (
    "before_stage",
    "after_stage",
    "after_begin",
    "after_fence",
    "after_discover",
    "after_records",
    "after_finish",
    "after_account",
    "after_claim",
    "after_ledger",
    "after_commit",
)
TAKEOVER_STEPS = ("takeover_begin", "takeover_fence", "takeover_reclaim", "takeover_ledger", "takeover_commit")
JOB_STEPS = ("job_begin", "job_rows", "job_commit")
ENGINE_STEPS = ("before_send", "after_answer", "between_emits", "before_freeze", "after_acknowledge", "before_retire")
GC_STEPS = ("gc_sealed", "gc_batch")
#: Those of a crawl, and all that there are.
ALL = (*COMMIT_STEPS, *TAKEOVER_STEPS, *JOB_STEPS, *ENGINE_STEPS)
NAMES = (*ALL, *GC_STEPS)


class FailpointRaised(LimpetError):
    """Raised by a failpoint whose action is `raise`."""


def parse(text: str) -> dict[str, tuple[int, str]]:
    """The plan that the environment variable holds: name -> (which hit, action).

    >>> parse("after_fence@3=kill;before_send=raise")
    {'after_fence': (3, 'kill'), 'before_send': (1, 'raise')}
    """
    plan = {}
    for piece in filter(None, text.split(";")):
        place, _, action = piece.partition("=")
        name, _, hit = place.partition("@")
        if name not in NAMES or action not in ("kill", "stop", "raise", "wait") or not (hit or "1").isdigit():
            raise UsageError(
                f"LIMPET_FAILPOINT: {piece!r} is no failpoint: expected name[@N]=kill|stop|raise|wait with a name of {', '.join(NAMES)}"
            )
        plan[name] = (int(hit or 1), action)
    return plan


_PLAN = parse(os.environ.get("LIMPET_FAILPOINT", ""))
_HITS: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Do here what the environment asks for; nothing where it asks for nothing."""
    if _PLAN and name in _PLAN:
        _hit(name)


def _hit(name: str) -> None:
    _HITS[name] += 1
    at, action = _PLAN[name]
    if _HITS[name] != at:
        return
    log = os.environ.get("LIMPET_FAILPOINT_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as lines:
            lines.write(f"{name}\n")
    if action == "raise":
        raise FailpointRaised(f"failpoint {name}")
    if action == "wait":
        gate = os.environ.get("LIMPET_FAILPOINT_GATE", "")
        while not os.path.exists(gate):
            time.sleep(0.01)
    else:  # to this very thread: sent to the process, SIGSTOP is taken by another one, and this one still comes to the next step
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
