"""Values that tasks share: tallies, registers, high-water marks. None of them is a row that every commit waits for.

A tally has a row for each shard, written under the fence that is held anyway, and is summed on reading. A register is a
history: a write is the next version, on the condition that the version which the handler read is still the last; where it
is not, the task runs again, and no other. A high-water mark moves once, when its sweep is complete and nothing of it was
left unread: until then there are candidates, for each shard. Invariant: I9.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from limpet.batch import Part, RegisterWrite, Result, Seen
from limpet.mark import decode, kind_of, sorts_before
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.sealing import sealed_of
from limpet.task import Outcome, TaskId

#: In a ledger row's deltas: "~tally/<name>": [how much it changed].
TALLY = "~tally/"

#: Rows of tasks that are looked at in one statement, so that none of them takes long.
TASKS_CHUNK = 10_000


class RegistersLost(Exception):
    """Some tasks' writes met another's: they run again, and their batch is built anew without them. Never leaves the store."""

    def __init__(self, tasks: Iterable[TaskId]) -> None:
        super().__init__("registers were written by others meanwhile")
        self.tasks = frozenset(tasks)


# -- tallies ------------------------------------------------------------------------------------


def add_tallies(db: Database, part: Part) -> dict[str, list[int]]:
    """Add what the tries of a part counted; the deltas for its ledger row."""
    sums: dict[str, int] = defaultdict(int)
    for result in writing(part.results):
        for name, more in result.tallies:
            sums[name] += more
    for name, more in sorted(sums.items()):
        db.run("add_tally", job=part.job, shard=part.shard, name=name, more=more, n=part.n)
    return {f"{TALLY}{name}": [more] for name, more in sums.items() if more}


def writing(results: Iterable[Result]) -> Iterable[Result]:
    """The tries whose writes count: done, and dead ones for which a handler for final failures wrote."""
    return (result for result in results if result.outcome is Outcome.DONE or result.is_final)


# -- registers ----------------------------------------------------------------------------------


def write_registers(db: Database, spider: str, alive: Sequence[Part]) -> None:
    """Write every register of a commit, by name; RegistersLost names the tasks whose version was no longer the last."""
    writes = [(write, part, result) for part in alive for result in writing(part.results) for write in result.registers]
    lost = set()
    for write, part, result in sorted(writes, key=lambda w: (w[0].name, w[0].before, w[2].claim.id)):
        if not _wrote(db, spider, write, part, result):
            lost.add(result.claim.id)
    if lost:
        raise RegistersLost(lost)


def _wrote(db: Database, spider: str, write: RegisterWrite, part: Part, result: Result) -> bool:
    version = write.before + 1
    if db.one("last_version", spider=spider, name=write.name) != (write.before,):
        return False
    claim = result.claim
    db.run(
        "put_register", spider=spider, name=write.name, version=version, value=write.value, job=part.job, shard=part.shard, n=part.n,
        task=claim.id, **{"try": claim.tries},
    )  # fmt: skip
    writer = db.one("writer_of_register", spider=spider, name=write.name, version=version)
    return writer is not None and tuple(writer) == (part.job, part.shard, part.n, claim.id, claim.tries)


# -- high-water marks ---------------------------------------------------------------------------


def put_candidates(db: Database, part: Part) -> None:
    """Note what the tries of a part saw: the owner alone writes its shard's rows, so they are read, compared and written."""
    for (name, handler), seen in sorted(_merged(writing(part.results)).items()):
        row = db.one("read_candidate", job=part.job, shard=part.shard, name=name, handler=handler)
        if row is not None:
            seen = merge(seen, Seen(name, handler, str(row[0]), str(row[1]), int(row[2]), bool(row[3])))
        db.run(
            "put_candidate", job=part.job, shard=part.shard, name=name, handler=handler, low=seen.low, high=seen.high, seen=seen.count,
            gaps=int(seen.gaps), n=part.n,
        )  # fmt: skip


def _merged(results: Iterable[Result]) -> dict[tuple[str, str], Seen]:
    found: dict[tuple[str, str], Seen] = {}
    for result in results:
        for seen in result.seen:
            at = (seen.name, seen.handler)
            found[at] = merge(found[at], seen) if at in found else seen
    return found


def merge(one: Seen, other: Seen) -> Seen:
    """Both together: the lower low and the higher high. Values of two types stay apart: low has another type than high then."""
    low = other.low if sorts_before(other.low, one.low) else one.low
    high = other.high if sorts_before(one.high, other.high) else one.high
    return Seen(one.name, one.handler, low, high, one.count + other.count, one.gaps or other.gaps)


@dataclass(frozen=True, slots=True)
class Held:
    """What keeps a mark where it is although its sweep is complete. False where nothing does; its text is for people."""

    dead: int = 0  # dead tasks of its handlers
    skipped: tuple[tuple[str, int], ...] = ()  # and those of which Limpet read nothing: (reason, how many)
    types: tuple[str, ...] = ()  # of its values, where there are several: they have no order

    def __bool__(self) -> bool:
        return bool(self.dead or self.skipped or self.types)

    def __str__(self) -> str:
        dead = [f"dead tasks of its handlers: {self.dead}"] if self.dead else []
        types = [f"values of several types: {', '.join(self.types)}"] if self.types else []
        return "; ".join([*dead, *(f"skipped as {reason}: {number}" for reason, number in self.skipped), *types])


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of one mark when its sweep was complete."""

    name: str
    value: str = ""  # where it is now; "" where it is held back
    gap: str = ""  # what lies between this sweep and the one before, unseen
    held: Held = Held()


#: From a task's text to the handler that the routes lead to; "" where that is not known.
HandlerOf = Callable[[str], str]


def _any_handler(text: str) -> str:
    return ""


def move_marks(db: Database, job: Job, handler_of: HandlerOf = _any_handler) -> list[Moved]:
    """Move the marks of a job that is complete, once: to the largest candidate, unless tasks of its handlers were left unread.

    Any number of workers may call this at once: a version is written by whoever is first. Of a sealed job nobody can say any
    more what was left unread: its marks stay.
    """
    sweeps = sweeps_of(db, job)
    if not sweeps or sealed_of(db, job.id) is not None:
        return []
    last = {name: _last(db, job, name)[1] for name in sweeps}
    is_any_behind = any(_is_behind(last[name], seen) for name, (seen, _) in sweeps.items())
    unread = _unread(db, job.id, handler_of) if is_any_behind else {}
    return [_move(db, job, seen, held_back(seen, handlers, last[name], unread)) for name, (seen, handlers) in sorted(sweeps.items())]


def held_back(seen: Seen, handlers: Iterable[str], last: str, unread: Mapping[str, Counter[str]]) -> Held:
    """What keeps a mark from the highest value that its sweep saw."""
    why: Counter[str] = sum((unread.get(handler, Counter()) for handler in {"", *handlers}), Counter())
    dead = why.pop("", 0)
    return Held(dead, tuple(sorted(why.items())), _types(seen, last))


def _types(seen: Seen, last: str) -> tuple[str, ...]:
    types = {kind_of(value) for value in (seen.low, seen.high, last) if value}
    return tuple(sorted(types)) if len(types) > 1 else ()


def _is_behind(last: str, seen: Seen) -> bool:
    return not last or bool(_types(seen, last)) or sorts_before(last, seen.high)


def _unread(db: Database, job: int, handler_of: HandlerOf) -> dict[str, Counter[str]]:
    """Tasks that are over and of which no handler has read anything: handler -> ("" for a dead one, or why it was skipped) -> how many.

    "" stands for the handlers of routes that are not known.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    row = db.one("verify_bounds", job=job)
    after, high = (int(row[2]) - 1, int(row[3])) if row and row[2] is not None else (0, 0)
    while after < high:
        ((upto,),) = db.rows("verify_chunk", after=after, most=TASKS_CHUNK)
        if upto is None:
            break
        for handler, text, why in db.rows("unread_tasks", job=job, after=after, upto=upto):
            found[str(handler) or handler_of(str(text))][str(why)] += 1
        after = int(upto)
    return found


def sweeps_of(db: Database, job: Job) -> dict[str, tuple[Seen, set[str]]]:
    """What a job's sweep has seen so far: mark -> (all of it, the handlers that saw it)."""
    sweeps: dict[str, tuple[Seen, set[str]]] = {}
    for name, handler, low, high, count, gaps in db.rows("candidates_of_job", job=job.id):
        seen = Seen(name, handler, low, high, int(count), bool(gaps))
        if name in sweeps:
            sweeps[name] = (merge(sweeps[name][0], seen), sweeps[name][1] | {handler})
        else:
            sweeps[name] = (seen, {handler})
    return sweeps


def _move(db: Database, job: Job, seen: Seen, held: Held) -> Moved:
    version, last, _ = _last(db, job, seen.name)
    if not _is_behind(last, seen):
        return Moved(seen.name, value=last)
    if held:
        return Moved(seen.name, held=held)
    before = {str(name): str(value) for name, value in db.rows("marks_before", spider=job.spider, at_ms=job.created_ms, job=job.id)}
    since = before.get(seen.name, "")
    is_gap = seen.gaps and since and sorts_before(since, seen.low)
    gap = f"nothing between {decode(since)} and {decode(seen.low)} was seen" if is_gap else ""
    while True:
        if last and not sorts_before(last, seen.high):
            return Moved(seen.name, value=last, gap=gap)
        db.begin()
        try:
            db.run("put_mark", spider=job.spider, name=seen.name, version=version + 1, value=seen.high, low=seen.low, gap=gap, job=job.id)
            db.commit()
        except BaseException:
            db.rollback()
            raise
        version, last, _ = _last(db, job, seen.name)
        if types := _types(seen, last):  # somebody else's sweep, meanwhile
            return Moved(seen.name, held=Held(types=types))


def _last(db: Database, job: Job, name: str) -> tuple[int, str, int]:
    """Version and value of a mark, and the job that moved it there; (0, "", 0) before the first."""
    row = db.one("last_mark", spider=job.spider, name=name)
    return (int(row[0]), str(row[1]), int(row[2])) if row else (0, "", 0)


# -- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MarkRow:
    """One high-water mark, as a job sees it. Values are "type:text"; "" before the first."""

    name: str
    value: str  # where it is now
    low: str = ""  # the lowest value that this job's sweep saw so far
    high: str = ""
    seen: int = 0  # how many values it saw; of two pages the same value counts twice
    is_moved: bool = False  # by this job's sweep, last
    gap: str = ""  # what its move left behind, unseen
    held: str | None = ""  # why it stays where it is; None where that was not asked for

    @property
    def is_behind(self) -> bool:
        """Whether the sweep saw what is beyond the mark."""
        return bool(self.seen) and (not self.value or sorts_before(self.value, self.high))


def marks_of_job(db: Database, job: Job, *, is_complete: bool, whole: bool = True) -> list[MarkRow]:
    """The marks that a job's sweep has seen values of; while it goes on those of its spider that it has seen none of, too.

    `whole`: find out what holds a mark back that stays behind a complete sweep, which looks at every task of the job.
    """
    sweeps = sweeps_of(db, job)
    names = {*sweeps}
    if not is_complete:
        names |= {str(name) for name, _ in db.rows("marks_before", spider=job.spider, at_ms=job.created_ms, job=job.id)}
    rows = {name: _mark_row(db, job, name, sweeps[name][0] if name in sweeps else None) for name in sorted(names)}
    staying = {name for name, row in rows.items() if row.is_behind and not row.is_moved} if is_complete else set()
    is_sealed = bool(staying) and sealed_of(db, job.id) is not None
    unread = _unread(db, job.id, _any_handler) if staying and whole and not is_sealed else {}
    for name in staying:
        if is_sealed:
            rows[name] = replace(rows[name], held="its tasks were removed before it moved")
        elif held := held_back(*sweeps[name], rows[name].value, unread):
            rows[name] = replace(rows[name], held=str(held))
        elif not whole:
            rows[name] = replace(rows[name], held=None)
    return list(rows.values())


def _mark_row(db: Database, job: Job, name: str, seen: Seen | None) -> MarkRow:
    version, value, mover = _last(db, job, name)
    if seen is None:
        return MarkRow(name, value)
    types = _types(seen, value)
    found = MarkRow(name, value, seen.low, seen.high, seen.count, held=str(Held(types=types)) if types else "")
    if mover != job.id or types:
        return found
    gaps = (str(row[4]) for row in db.rows("marks_of_spider", spider=job.spider) if (row[0], int(row[1])) == (name, version))
    return replace(found, is_moved=True, gap=next(gaps, ""))


def tallies(db: Database, job: int) -> dict[str, int]:
    """Every tally of a job, summed over its shards."""
    return {str(name): int(value) for name, value in db.rows("sum_tallies", job=job)}


def registers(db: Database, spider: str) -> dict[str, tuple[int, object]]:
    """Every register of a spider: name -> (version, value)."""
    return {str(name): (int(version), json.loads(value)) for name, version, value in db.rows("list_registers", spider=spider)}
