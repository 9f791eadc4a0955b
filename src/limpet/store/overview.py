"""How far a job is, at one moment: what `limpet status` prints. Nothing here writes.

A job of twenty million tasks is asked every few seconds, so its counts come from the ledger (one row a
batch) and from the short lanes of the index of open tasks. What can be had only by reading every task
(hosts, reasons of skips) is counted where there are few of them, or where it is asked for. Whether a job
is complete, and what it waits for, is in `standing.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from limpet.store import jobs
from limpet.store.bills import Balance, balance
from limpet.store.dialect import Database, quote
from limpet.store.examine_server import OldTransaction, oldest_transaction
from limpet.store.opening import Store
from limpet.store.sealing import Sealed, sealed_of
from limpet.store.shared import MarkRow, marks_of_job
from limpet.store.standing import standing
from limpet.store.tables import load_tables
from limpet.store.views import PAGE_ROWS, WINDOW_MS, WorkerRow, snapshot, workers_of_job
from limpet.task import Lane, State
from limpet.url import authority_of, digest16, host_id, shard_of

#: Tasks up to which everything is counted at each call: a quarter of a second.
WHOLE_MAX = 200_000
#: Paces that are looked at: the longest waits.
PACES_MAX = 1000
#: Hosts with a task ready that are looked at when the reason of a wait is asked for; of more none is named.
READY_HOSTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Books:
    """What a job's ledger adds up to. Times are milliseconds since 1970; `recent` ended in the last minute."""

    batches: int
    done: int
    skipped: int
    failed: int
    dead: int
    released: int
    throttled: int
    lost: int
    claimed: int
    discovered: int
    revisited: int
    first_ms: int
    last_ms: int
    recent: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class LaneCount:
    """The tasks that wait in one lane."""

    tasks: int = 0
    failed: int = 0  # of them, those in the state failed
    due_ms: int = 0  # when the first of them is due; 0 for at once, or for none


@dataclass(frozen=True, slots=True)
class PaceRow:
    """When a host may be asked next, and why not sooner."""

    host: int
    authority: str
    delay_ms: int
    next_ms: int
    pause: str
    errors: int
    held: str = ""  # why a person has paused it: it goes on when they say so


@dataclass(frozen=True, slots=True)
class HostRow:
    """The tasks of one host, by state."""

    authority: str
    states: dict[str, int]

    @property
    def open(self) -> int:
        """Those that are not over."""
        return sum(self.states.get(state, 0) for state in (State.PENDING, State.RUNNING, State.FAILED))


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What somebody asked for, over all shards."""

    what: str
    argument: str
    who: str
    at_ms: int
    shards: int
    changed: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Status:
    """How far a job is, at one moment."""

    job: jobs.Job
    books: Books
    states: dict[str, int]
    lanes: dict[str, LaneCount]
    dead_by_reason: dict[str, int]
    workers: list[WorkerRow]
    paces: list[PaceRow]
    sources: list[jobs.SourceRow]
    requests: list[RequestRow]
    records: dict[str, int]
    watermarks: list[tuple[int, int, int, int]]  # shard, epoch, watermark, verified
    is_complete: bool
    lock_holder: str = ""
    waiting_hosts: list[PaceRow] = field(default_factory=list)  # hosts with tasks ready, none of which may be asked now
    oldest_open_ms: int | None = None  # when the oldest open task was found
    skipped_by_reason: dict[str, int] | None = None  # None: not counted, there are too many
    hosts: list[HostRow] | None = None
    sealed: Sealed | None = None  # its tasks and tries were removed
    oldest_transaction: OldTransaction | None = None  # of anybody's, on a server
    scheme_twins: int | None = None  # tasks that differ from another only in http and https
    money: Balance | None = None  # of a job that costs, or has a budget
    marks: list[MarkRow] = field(default_factory=list)

    @property
    def open(self) -> int:
        """Tasks that are not over."""
        return sum(self.states[state] for state in (State.PENDING, State.RUNNING, State.FAILED))

    @property
    def ended(self) -> int:
        """Tasks that are over."""
        return sum(self.states[state] for state in (State.DONE, State.SKIPPED, State.DEAD))


def status(store: Store, job: jobs.Job, *, whole: bool | None = None) -> Status:
    """How far the job is. `whole`: read every task, or never; None: where there are at most WHOLE_MAX."""
    with snapshot(store.db) as db:
        books = _books(db, job.id)
        whole = books.discovered <= WHOLE_MAX if whole is None else whole
        lanes = {str(lane): _lane(db, job.id, lane) for lane in (Lane.RUNNING, Lane.WAITING, Lane.SUSPECT, Lane.PARKED)}
        dead: dict[str, int] = dict(db.rows("view_dead", job=job.id))
        seal = sealed_of(db, job.id)
        is_complete = standing(db, job.id).is_complete
        states, oldest = _states_whole(db, job.id) if whole else (_states_of_books(db, job.id, books, lanes, sum(dead.values())), None)
        found = Status(
            job=job,
            books=books,
            states=_states_sealed(seal) if seal else states,
            sealed=seal,
            lanes=lanes,
            dead_by_reason=dead,
            workers=workers_of_job(db, job.id, books.now_ms),
            paces=[PaceRow(*row) for row in db.rows("view_paces", job=job.id, most=PACES_MAX)],
            sources=jobs.sources(db, job.id),
            requests=_requests(db, job.id),
            records=_records(db, job),
            watermarks=[tuple(row) for row in db.rows("watermarks", job=job.id)],
            is_complete=is_complete,
            lock_holder=getattr(store.db, "lock_holder", str)(),
            waiting_hosts=_waiting_hosts(db, job, books.now_ms),
            oldest_open_ms=oldest,
            skipped_by_reason=dict(db.rows("view_skipped", job=job.id)) if whole else None,
            hosts=_hosts(db, job) if whole else None,
            scheme_twins=_scheme_twins(db, job) if whole and not job.profile.merge_scheme else None,
            money=balance(db, job, books.now_ms),
            marks=marks_of_job(db, job, is_complete=is_complete, whole=whole),
        )
    return replace(found, oldest_transaction=oldest_transaction(store.db))


def _books(db: Database, job: int) -> Books:
    return Books(*map(int, db.rows("view_books", job=job, window_ms=WINDOW_MS)[0]))  # sums are decimals on some servers


def _requests(db: Database, job: int) -> list[RequestRow]:
    rows = db.rows("view_requests", job=job, most=PAGE_ROWS)
    return [RequestRow(what, argument, who, *map(int, numbers)) for what, argument, who, *numbers in rows]


def _lane(db: Database, job: int, lane: Lane) -> LaneCount:
    rows = db.rows("view_lane", job=job, lane=str(lane))
    due = [due_ms for _, _, due_ms in rows]
    return LaneCount(sum(n for _, n, _ in rows), sum(n for state, n, _ in rows if state == State.FAILED), min(due, default=0))


def _states_of_books(db: Database, job: int, books: Books, lanes: dict[str, LaneCount], dead: int) -> dict[str, int]:
    """How many tasks are in each state, without reading them. A retry that is due counts as pending here."""
    back: Counter[str] = Counter(dict(db.rows("put_back_by_outcome", job=job)))
    states = {
        State.RUNNING: lanes[Lane.RUNNING].tasks,
        State.FAILED: lanes[Lane.WAITING].failed + lanes[Lane.SUSPECT].failed,
        State.DONE: books.done - back["done"],
        State.SKIPPED: books.skipped - back["skipped"],
        State.DEAD: dead,
    }
    return {str(State.PENDING): books.discovered - sum(states.values()), **{str(state): n for state, n in states.items()}}


def _states_sealed(seal: Sealed) -> dict[str, int]:
    ended = {State.DONE: seal.done, State.SKIPPED: seal.skipped, State.DEAD: seal.dead}
    return {str(state): ended.get(state, 0) for state in State}


def _states_whole(db: Database, job: int) -> tuple[dict[str, int], int | None]:
    """How many tasks are in each state, by reading them, and when the oldest open one was found."""
    states = dict.fromkeys(map(str, State), 0)
    oldest: list[int] = []
    for state, lane, tasks, first in db.rows("view_states", job=job):
        states[state] += tasks
        if lane is not None:
            oldest.append(first)
    found = db.one("view_discovered_at", task=min(oldest)) if oldest else None
    return states, found[0] if found else None


def _records(db: Database, job: jobs.Job) -> dict[str, int]:
    """Rows of each dataset that this job can see."""
    counts = {}
    for name, table in load_tables(db, job.spider).items():
        own = "_scope = ? AND _closed = ''" if table.history else "_scope = ?"
        counts[table.type.name] = db.rows_text(f"SELECT COUNT(*) FROM {quote(name)} WHERE {own}", (table.scope_of(job),))[0][0]
    return counts


def _waiting_hosts(db: Database, job: jobs.Job, now_ms: int) -> list[PaceRow]:
    """The hosts that have tasks ready, where not one of them may be asked now; empty where some may."""
    paces = {row[0]: PaceRow(*row) for row in db.rows("view_paces", job=job.id, most=PACES_MAX)}
    waiting: list[PaceRow] = []
    for shard in range(job.shards):
        after = -(2**63)
        while (found := db.rows("ready_host_after", job=job.id, shard=shard, after=after)[0][0]) is not None:
            pace = paces.get(found)
            if pace is None or (not pace.held and pace.next_ms <= now_ms) or len(waiting) >= READY_HOSTS_MAX:
                return []
            waiting.append(pace)
            after = found
    return sorted(waiting, key=lambda pace: (bool(pace.held), pace.next_ms))


def _hosts(db: Database, job: jobs.Job) -> list[HostRow]:
    states: dict[int, dict[str, int]] = defaultdict(dict)
    some_task: dict[int, int] = {}
    for host, state, tasks, task in db.rows("view_hosts", job=job.id):
        states[host][state] = tasks
        some_task[host] = task
    rows = _folded([HostRow(_authority(db, job, host, some_task[host]), by) for host, by in states.items()])
    return sorted(rows, key=lambda row: (-row.open, -sum(row.states.values()), row.authority))


def _folded(rows: list[HostRow]) -> list[HostRow]:
    """The 64 hosts of ours on which a handler's calls lie are one line."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        found[provider_of(row.authority)].update(row.states)
    return [HostRow(authority, dict(states)) for authority, states in found.items()]


def provider_of(authority: str) -> str:
    """What people know a host by: itself, and `ranks (calls)` for each of those on which a handler's calls lie.

    >>> provider_of("ranks+07"), provider_of("shop.example:8080")
    ('ranks (calls)', 'shop.example:8080')
    """
    name, plus, _ = authority.rpartition("+")
    return f"{name} (calls)" if plus else authority


def _authority(db: Database, job: jobs.Job, host: int, task: int) -> str:
    row = db.one("view_authority", job=job.id, shard=host % job.shards, host=host)
    return str(row[0]) if row else authority_of(db.rows("view_text", task=task)[0][0])


def _scheme_twins(db: Database, job: jobs.Job) -> int:
    """Tasks whose text under the other scheme is a task too: `merge_scheme` would make one of each two.

    Looked up from the side that has fewer: nearly every crawl is of one scheme, and a look-up costs ten times a row.
    """
    schemes = Counter(text.partition("://")[0] for text in _texts(db, job))
    fewer, other = ("http", "https") if schemes["http"] <= schemes["https"] else ("https", "http")
    if not schemes[fewer]:
        return 0
    twins = 0
    for text in _texts(db, job):
        scheme, _, rest = text.partition("://")
        if scheme == fewer:
            authority = authority_of(text)
            key = {"host": host_id(authority), "key": digest16(f"{other}://{rest}")}
            twins += db.one("task_by_key", job=job.id, shard=shard_of(authority, job.shards), **key) is not None
    return twins


def _texts(db: Database, job: jobs.Job) -> Iterator[str]:
    after = 0
    while rows := db.rows("view_texts", job=job.id, after=after, most=PAGE_ROWS):
        after = rows[-1][0]
        yield from (text for _, text in rows)
