"""The state machine: its table, and that schema, statements and docs say the same."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import apsw
import pytest

from limpet import task
from limpet.store.dialect import parse
from limpet.task import (
    CLAIMABLE,
    ENDED,
    EVENT_OF,
    OPEN,
    TRANSITIONS,
    Event,
    IllegalMove,
    Lane,
    Outcome,
    State,
    advance,
    lane_of,
    mermaid,
    reclaimed,
    state_after,
)

SQL_FOLDER = files("limpet.store").joinpath("sql")
SCHEMA = SQL_FOLDER.joinpath("schema", "0001_initial.sql").read_text(encoding="utf-8")
STATEMENTS = parse(SQL_FOLDER.joinpath("core.sql").read_text(encoding="utf-8"))

#: The whole machine, once more, by hand: state, event, where it leads.
MOVES = [
    ("pending", "claim", "running"),
    ("failed", "claim", "running"),
    ("running", "succeed", "done"),
    ("running", "skip", "skipped"),
    ("running", "retry", "failed"),
    ("running", "give_up", "dead"),
    ("running", "release", "pending"),
    ("running", "reclaim", "pending"),
    ("running", "reclaim", "failed"),
    ("running", "reclaim", "dead"),
    ("done", "revisit", "pending"),
    ("skipped", "revisit", "pending"),
    ("dead", "revisit", "pending"),
]
PAIRS = [*itertools.product(State, Event)]


# -- the table ----------------------------------------------------------------------------------------


def test_the_table_holds_these_moves_and_no_others() -> None:
    """Every move, by name."""
    assert {(str(a), str(e), str(b)) for (a, e), targets in TRANSITIONS.items() for b in targets} == set(MOVES)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_a_move_leads_where_the_table_says_or_raises(state: State, event: Event) -> None:
    """48 pairs: 12 are legal, and of those `reclaim` has three ends, which `advance` does not choose between."""
    targets = [b for a, e, b in MOVES if (a, e) == (state, event)]
    if len(targets) == 1:
        assert advance(state, event) is State(targets[0])
    else:
        with pytest.raises(IllegalMove, match=f"{state} --{event}-->"):
            advance(state, event)


def test_the_states_are_open_or_ended_and_only_open_ones_are_claimable() -> None:
    """Every state is one or the other."""
    assert set(State) == OPEN | ENDED
    assert not OPEN & ENDED
    assert {a for a, e in TRANSITIONS if e is Event.CLAIM} == CLAIMABLE < OPEN


def test_every_open_state_can_end_and_every_ended_state_is_left_by_hand_only() -> None:
    """No task is stuck, and no event of the crawl itself brings a finished one back."""
    reach = {state: {b for (a, _), targets in TRANSITIONS.items() for b in targets if a is state} for state in State}
    for _ in State:
        reach = {state: seen | {b for a in seen for b in reach[a]} for state, seen in reach.items()}
    assert all(reach[state] >= ENDED for state in OPEN)
    assert {e for a, e in TRANSITIONS if a in ENDED} == {Event.REVISIT}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.DONE, State.DONE),
        (Outcome.SKIPPED, State.SKIPPED),
        (Outcome.FAILED, State.FAILED),
        (Outcome.DEAD, State.DEAD),
        (Outcome.RELEASED, State.PENDING),
        (Outcome.THROTTLED, State.PENDING),
    ],
)
def test_every_outcome_of_a_try_leaves_its_task_in_one_state(outcome: Outcome, state: State) -> None:
    """By the event that the table names for it."""
    assert state_after(outcome) is state
    assert set(EVENT_OF) == set(Outcome)


def test_a_lost_try_has_no_state_of_its_own() -> None:
    """Where it leads depends on whether it was alone."""
    with pytest.raises(IllegalMove):
        state_after(Outcome.LOST)


@pytest.mark.parametrize(
    ("solo", "losses", "state"),
    [
        (False, 0, "pending"),
        (False, 99, "pending"),
        (True, 1, "failed"),
        (True, 2, "failed"),
        (True, 3, "dead"),
        (True, 4, "dead"),
    ],
)
def test_only_a_task_that_was_alone_is_blamed_for_a_death(solo: bool, losses: int, state: str) -> None:
    """A crowd blames nobody, however often; alone, the third loss is death."""
    assert reclaimed(solo=solo, solo_losses=losses, solo_losses_max=3) is State(state)
    assert reclaimed(solo=solo, solo_losses=losses, solo_losses_max=3) in TRANSITIONS[State.RUNNING, Event.RECLAIM]


@pytest.mark.parametrize(
    ("state", "due_ms", "lost", "lane"),
    [
        (State.PENDING, 0, 0, Lane.READY),
        (State.PENDING, 5, 0, Lane.WAITING),
        (State.FAILED, 5, 2, Lane.WAITING),
        (State.FAILED, 0, 0, Lane.READY),
        (State.PENDING, 0, 3, Lane.SUSPECT),
        (State.PENDING, 5, 3, Lane.SUSPECT),
        (State.FAILED, 5, 9, Lane.SUSPECT),
        (State.RUNNING, 0, 9, Lane.RUNNING),
        (State.DONE, 0, 9, Lane.NONE),
        (State.SKIPPED, 0, 0, Lane.NONE),
        (State.DEAD, 0, 3, Lane.NONE),
    ],
)
def test_the_lane_follows_from_the_state_and_its_counters(state: State, due_ms: int, lost: int, lane: Lane) -> None:
    """Where an open task waits; an ended one waits nowhere."""
    assert lane_of(state, due_ms=due_ms, lost=lost, suspect_after=3) is lane


# -- the schema says the same -------------------------------------------------------------------------------


def words_of(check: str, start: str) -> set[str]:
    """The quoted words of the first list after a text."""
    found = re.search(re.escape(start) + r"\s*\(([^)]*)\)", check)
    assert found, f"{start} is not in the schema"
    return set(re.findall(r"'(\w+)'", found[1]))


def test_the_check_constraints_list_exactly_the_states_and_outcomes() -> None:
    """No more, no fewer; a state that was renamed here must be renamed there."""
    table = SCHEMA[SCHEMA.index("CREATE TABLE task (") :]
    assert words_of(table, "CHECK (state IN") == set(State)
    attempt = SCHEMA[SCHEMA.index("CREATE TABLE attempt (") :]
    assert words_of(attempt, "CHECK (outcome IN") == set(Outcome)


@pytest.fixture(scope="module")
def database() -> apsw.Connection:
    """The schema, in memory."""
    connection = apsw.Connection(":memory:")
    connection.execute(SCHEMA)
    return connection


def can_be(database: apsw.Connection, state: str, lane: str | None, due_ms: int) -> bool:
    """Whether the schema takes a task like this."""
    database.execute("SAVEPOINT try")
    try:
        columns = "(job, shard, host, key, state, lane, due_ms, source_shard, source_n)"
        database.execute(f"INSERT INTO task {columns} VALUES (1, 0, 0, x'00', ?, ?, ?, 0, 1)", (state, lane, due_ms))
    except apsw.ConstraintError:
        return False
    finally:
        database.execute("ROLLBACK TO try")
        database.execute("RELEASE try")
    return True


LANES: list[str | None] = [None, *(str(lane) for lane in Lane if lane is not Lane.NONE), "", "another"]


#: An ended task has no lane, and nobody reads when it is due.
CASES = [case for case in itertools.product([*State, "another"], LANES, (0, 5)) if case[1:] != (None, 5)]


@pytest.mark.parametrize(("state", "lane", "due_ms"), CASES)
def test_the_schema_takes_the_lanes_that_a_state_can_be_in_and_no_others(
    database: apsw.Connection, state: str, lane: str | None, due_ms: int
) -> None:
    """What `lane_of` can give, a wait that is over, and a parked task: all else is refused by the database itself."""
    given = {
        (str(s), str(lane_of(s, due_ms=due, lost=lost, suspect_after=3)) or None, due)
        for s, due, lost in itertools.product(State, (0, 5), (0, 3))
        if due == 0 or s in CLAIMABLE
    }
    given |= {(str(s), str(lane), 0) for s in CLAIMABLE for lane in (Lane.PARKED, Lane.WAITING)}
    assert can_be(database, state, lane, due_ms) == ((state, lane, due_ms) in given)


def can_end(database: apsw.Connection, outcome: str, reason: str) -> bool:
    """Whether the schema takes an attempt row like this."""
    database.execute("SAVEPOINT try")
    columns = "(job, shard, n, task, try, outcome, reason, status, strike, solo, offered, links, records, url, detail, at_ms)"
    values = "(1, 0, 1, 1, 1, ?, ?, 0, 0, 0, x'', 0, 0, '', '', 0)"
    try:
        database.execute(f"INSERT INTO attempt {columns} VALUES {values}", (outcome, reason))
    except apsw.ConstraintError:
        return False
    finally:
        database.execute("ROLLBACK TO try")
        database.execute("RELEASE try")
    return True


@pytest.mark.parametrize("outcome", [*Outcome, "another"])
def test_the_schema_takes_no_end_without_its_reason(database: apsw.Connection, outcome: str) -> None:
    """I3: each skip, failure and death says why."""
    assert can_end(database, outcome, "why") == (outcome in set(Outcome))
    assert can_end(database, outcome, "") == (outcome in {"done", "released", "throttled", "lost"})


# -- the statements say the same -----------------------------------------------------------------------------

GUARDS = {
    "claim": {a for a, e in TRANSITIONS if e is Event.CLAIM},
    "finish": {State.RUNNING},
    "revisit": {a for a, e in TRANSITIONS if e is Event.REVISIT},
    "ended_among": {a for a, e in TRANSITIONS if e is Event.REVISIT},
    "revisit_candidates": {a for a, e in TRANSITIONS if e is Event.REVISIT},
    "dead_candidates": {State.DEAD},
    "promote": set(CLAIMABLE),
    "unpark": set(CLAIMABLE),
}


@pytest.mark.parametrize("name", sorted(GUARDS))
def test_every_guard_in_sql_names_the_states_that_the_table_lets_a_move_begin_in(name: str) -> None:
    """A move that the table does not hold is not made by a statement either."""
    text = re.sub(r"--.*", "", STATEMENTS[name])
    where = text[text.rindex("WHERE") :]
    guards = re.search(r"state (?:IN \(([^)]*)\)|= ('\w+'))", where)
    assert guards, f"{name} has no guard"
    assert set(re.findall(r"'(\w+)'", guards[1] or guards[2])) == GUARDS[name]


def test_no_statement_writes_a_state_that_is_none() -> None:
    """Nor reads one."""
    words = set()
    for name, sql in STATEMENTS.items():
        if re.search(r"\b(?:FROM|JOIN|UPDATE|INTO) task\b", sql) and not name.startswith(("verify_", "view_", "repair_")):
            words |= set(re.findall(r"\bstate (?:=|<>) '(\w+)'", sql))
            for group in re.findall(r"\bstate (?:NOT )?IN \(([^)]*)\)", sql):
                words |= set(re.findall(r"'(\w+)'", group))
    assert words <= set(State)
    assert words


# -- the docs say the same -----------------------------------------------------------------------------------


def test_the_diagram_has_every_move_once() -> None:
    """For the docs: a Mermaid state diagram made from the table."""
    first, start, *rows = mermaid().splitlines()
    assert (first, start.strip()) == ("stateDiagram-v2", "[*] --> pending")
    drawn = [re.fullmatch(r"    (\w+) --> (\w+): (\w+)", row) for row in rows]
    assert all(drawn)
    assert sorted((row[1], row[3], row[2]) for row in drawn if row) == sorted(MOVES)


def test_the_modules_own_sketch_is_the_table() -> None:
    """The first thing that a reader sees must not be the first thing that is wrong."""
    sketched = set()
    for line in (task.__doc__ or "").splitlines():
        if found := re.fullmatch(r"\s+([\w, ]+?)\s+--(\w+)-->\s+([\w| ]+)", line):
            sketched |= {(a.strip(), found[2], b.strip()) for a in found[1].split(",") for b in found[3].split("|")}
    assert sketched == set(MOVES)
