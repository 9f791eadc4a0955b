"""The state machine: every state a task can be in, and every legal move.

    pending  --claim-->    running
    running  --succeed-->  done
    running  --skip-->     skipped
    running  --retry-->    failed
    running  --give_up-->  dead
    running  --release-->  pending
    running  --reclaim-->  pending | failed | dead
    failed   --claim-->    running
    dead, skipped, done --revisit--> pending

This file does not know what a task is about, nor where it is kept. The CHECK constraints of
the schema, the guards in `store/sql/core.sql` and the diagram in the docs are tested against
the tables here. Invariants: I6, I7.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

TaskId = NewType("TaskId", int)
TaskKey = NewType("TaskKey", bytes)
ShardId = NewType("ShardId", int)
Epoch = NewType("Epoch", int)


class State(StrEnum):
    """Where a task stands. A URL is known because its task exists, in one of these."""

    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    DONE = "done"
    SKIPPED = "skipped"
    DEAD = "dead"


class Event(StrEnum):
    """What can happen to a task."""

    CLAIM = "claim"
    SUCCEED = "succeed"
    SKIP = "skip"
    RETRY = "retry"
    GIVE_UP = "give_up"
    RELEASE = "release"
    RECLAIM = "reclaim"
    REVISIT = "revisit"


class Outcome(StrEnum):
    """What one try ended in. Each claim ends in exactly one attempt row with one of these."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    DEAD = "dead"
    RELEASED = "released"
    THROTTLED = "throttled"
    LOST = "lost"


#: Every legal move. RECLAIM ends in PENDING for a try that was lost in a crowd, and in FAILED or
#: DEAD for one that was lost alone: `reclaimed` decides which.
TRANSITIONS: dict[tuple[State, Event], frozenset[State]] = {
    (State.PENDING, Event.CLAIM): frozenset({State.RUNNING}),  # tries + 1, before any request is sent
    (State.FAILED, Event.CLAIM): frozenset({State.RUNNING}),  # when it is due again
    (State.RUNNING, Event.SUCCEED): frozenset({State.DONE}),  # records, links, messages commit with it
    (State.RUNNING, Event.SKIP): frozenset({State.SKIPPED}),  # robots, gone, moved, out of scope, ...
    (State.RUNNING, Event.RETRY): frozenset({State.FAILED}),  # a strike; due later
    (State.RUNNING, Event.GIVE_UP): frozenset({State.DEAD}),  # strikes used up, or no retry can mend it
    (State.RUNNING, Event.RELEASE): frozenset({State.PENDING}),  # clean stop, throttle: no strike
    (State.RUNNING, Event.RECLAIM): frozenset({State.PENDING, State.FAILED, State.DEAD}),
    (State.DONE, Event.REVISIT): frozenset({State.PENDING}),  # by hand only
    (State.SKIPPED, Event.REVISIT): frozenset({State.PENDING}),
    (State.DEAD, Event.REVISIT): frozenset({State.PENDING}),
}

#: The event by which a try with this outcome leaves RUNNING.
EVENT_OF: dict[Outcome, Event] = {
    Outcome.DONE: Event.SUCCEED,
    Outcome.SKIPPED: Event.SKIP,
    Outcome.FAILED: Event.RETRY,
    Outcome.DEAD: Event.GIVE_UP,
    Outcome.RELEASED: Event.RELEASE,
    Outcome.THROTTLED: Event.RELEASE,
    Outcome.LOST: Event.RECLAIM,
}

CLAIMABLE = frozenset({State.PENDING, State.FAILED})
OPEN = frozenset({State.PENDING, State.RUNNING, State.FAILED})
ENDED = frozenset({State.DONE, State.SKIPPED, State.DEAD})


class IllegalMove(Exception):
    """A move that the table does not hold: a fault in Limpet, never in what it crawls."""


def advance(state: State, event: Event) -> State:
    """The state after `event`, where there is only one.

    >>> advance(State.PENDING, Event.CLAIM)
    <State.RUNNING: 'running'>
    >>> advance(State.DONE, Event.CLAIM)
    Traceback (most recent call last):
    ...
    limpet.task.IllegalMove: done --claim--> nowhere
    """
    targets = TRANSITIONS.get((state, event), frozenset())
    if len(targets) != 1:
        raise IllegalMove(f"{state} --{event}--> {' or '.join(sorted(targets)) or 'nowhere'}")
    return next(iter(targets))


def state_after(outcome: Outcome) -> State:
    """The state in which a try with this outcome, other than LOST, leaves its task."""
    return advance(State.RUNNING, EVENT_OF[outcome])


def reclaimed(*, solo: bool, solo_losses: int, solo_losses_max: int) -> State:
    """Where a lost try leaves its task; `solo_losses` counts this one where it ran solo.

    A crowd blames nobody. Alone, the task itself is the suspect: due later, dead at the cap.
    """
    if not solo:
        return State.PENDING
    return State.DEAD if solo_losses >= solo_losses_max else State.FAILED


class Lane(StrEnum):
    """Where an open task waits, and so whether an ordinary claim may reach it.

    Derived from the state and the counters, and kept beside them so that a claim reads one
    narrow index and never meets a row that it cannot take.
    """

    NONE = ""  # ended
    RUNNING = "running"  # claimed; a take-over finds it here
    READY = "ready"  # at once
    WAITING = "waiting"  # when it is due
    SUSPECT = "suspect"  # alone, when nothing else is left and it is due
    PARKED = "parked"  # not by this release: its handler is unknown here


def lane_of(state: State, *, due_ms: int, lost: int, suspect_after: int) -> Lane:
    """The lane of a task that has just entered `state`; `due_ms` 0 means at once."""
    if state not in CLAIMABLE:
        return Lane.RUNNING if state is State.RUNNING else Lane.NONE
    if lost >= suspect_after:
        return Lane.SUSPECT
    return Lane.WAITING if due_ms else Lane.READY


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the docs."""
    rows = [f"    {a} --> {b}: {e}" for (a, e), targets in TRANSITIONS.items() for b in sorted(targets)]
    return "\n".join(["stateDiagram-v2", "    [*] --> pending", *rows])
