"""Workers by hand: each step of a worker's life is one call, so that a test decides what happens between two.

Nothing here stands in for the store: a `Hand` speaks to it as the engine does. `Faulty` wraps a real
connection and lets a chosen COMMIT go wrong. What must hold afterwards is in `audit.py`.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType

import pytest

from limpet.batch import Claim, Kind, Link, Offer, Part, Result, SourceMove, Want
from limpet.errors import OutcomeUnknown
from limpet.record import RecordType, record, record_type
from limpet.record import field as record_field
from limpet.settings import Settings
from limpet.store import Store, jobs, lease, mysql_words, postgres
from limpet.store.commit import Committed
from limpet.store.dialect import Database, Row
from limpet.task import Epoch, Outcome, ShardId, TaskId, TaskKey
from limpet.url import KeyProfile, canonicalise, digest16, host_id, shard_of

SPIDER = "shop"
SHARDS = 4
PROFILE = KeyProfile.of()

#: Long enough that no lease ends by itself in a test.
SETTINGS = Settings(shards=SHARDS, lease_s=600.0)


def product_type(scope: str = "job", policy: str = "replace", name: str = "product") -> RecordType:
    """A record type of two lasting fields and a volatile one."""

    @record(key="sku", scope=scope, policy=policy, name=name)  # type: ignore[arg-type]
    class Product:
        sku: str
        price: int
        seen: int = record_field(default=0, volatile=True)

    return record_type(Product)


Product = product_type()


def table_name(kind: RecordType) -> str:
    """The table of a record type of the spider."""
    return f"{SPIDER}_{kind.name}"


def emitted(sku: str, price: int, *, seen: int = 0, kind: RecordType = Product) -> Offer:
    """What a task offers when it emits a product."""
    assert kind.cls is not None
    frozen = kind.freeze(kind.cls(sku=sku, price=price, seen=seen))
    return Offer(table_name(kind), frozen.key, frozen.key_text, frozen.content, frozen.values)


# -- links --------------------------------------------------------------------------------------


def link(url: str, *, shards: int = SHARDS, **more: object) -> Link:
    """The link to a URL, or to a path of a host: `a.test/1`."""
    seen = canonicalise(url if "://" in url else f"http://{url}", PROFILE)
    shard, host = ShardId(shard_of(seen.authority, shards)), host_id(seen.authority)
    return Link(shard, host, TaskKey(digest16(seen.text)), seen.text, seen.request_url, **more)  # type: ignore[arg-type]


def host_in(shard: int, number: int = 0, *, shards: int = SHARDS) -> str:
    """The name of a host whose tasks lie in a shard; other numbers are other hosts."""
    names = (f"h{i}.test" for i in count())
    return next(name for i, name in enumerate(n for n in names if shard_of(n, shards) == shard) if i == number)


def pages(shard: int, number: int, *, hosts: int = 1, start: int = 0, shards: int = SHARDS) -> list[Link]:
    """So many links into one shard, spread over hosts."""
    return [link(f"{host_in(shard, i % hosts, shards=shards)}/{i}", shards=shards) for i in range(start, start + number)]


# -- results ------------------------------------------------------------------------------------


def done(claim: Claim, *links: Link, offers: Iterable[Offer] = ()) -> Result:
    """A try that went well, with what it found."""
    return Result(claim, Outcome.DONE, links=links, offers=tuple(offers))


def failed(claim: Claim, due_in_ms: int = 1, reason: str = "timeout") -> Result:
    """A try that is a strike; due later."""
    return Result(claim, Outcome.FAILED, reason=reason, strike=True, due_in_ms=due_in_ms)


def dead(claim: Claim, reason: str = "status 500") -> Result:
    """A try after which its task is given up."""
    return Result(claim, Outcome.DEAD, reason=reason, strike=True)


def skipped(claim: Claim, reason: str = "gone") -> Result:
    """A try that found that there is nothing to collect."""
    return Result(claim, Outcome.SKIPPED, reason=reason)


def released(claim: Claim, **more: object) -> Result:
    """A try that was given back."""
    return Result(claim, Outcome.RELEASED, **more)  # type: ignore[arg-type]


def throttled(claim: Claim, due_in_ms: int) -> Result:
    """A try that the host put off."""
    return Result(claim, Outcome.THROTTLED, reason="status 429", due_in_ms=due_in_ms)


# -- workers ------------------------------------------------------------------------------------


def found_job(store: Store, slot: str = "") -> jobs.Job:
    """Make, or join, the spider's job of a slot."""
    return store.join(spider=SPIDER, slot=slot, profile=PROFILE)


@dataclass
class Held:
    """What a worker knows of a shard that it has."""

    epoch: Epoch
    watermark: int


@dataclass
class Hand:
    """One worker with a connection of its own: what it owns, and what it holds claimed."""

    store: Store
    worker: lease.Worker
    held: dict[int, Held] = field(default_factory=dict)
    claims: dict[TaskId, Claim] = field(default_factory=dict)

    @classmethod
    def on(cls, store: Store) -> Hand:
        """A new worker of the store's job, on a connection of its own."""
        mine = store.again()
        return cls(mine, mine.register())

    @property
    def db(self) -> Database:
        """Its connection."""
        return self.store.db

    @property
    def job(self) -> jobs.Job:
        """Its job."""
        assert self.store.job is not None
        return self.store.job

    def leave(self) -> None:
        """Close the connection and let the lock file go, as the end of the process would."""
        self.store.close()
        if self.worker.lock_file >= 0:
            os.close(self.worker.lock_file)
            self.worker = lease.Worker(self.worker.id, self.worker.lease_ms, self.worker.lock_path)

    # -- shards --------------------------------------------------------------------------------

    def take(self, *shards: int) -> list[lease.Taken]:
        """Take over the shards named, or all, where nobody who lives has them; what was had."""
        rows = [row for row in lease.shards(self.db, self.job.id) if not shards or row.shard in shards]
        taken = [got for row in rows if (got := self.store.take_over(row, self.worker)) is not None]
        for one in taken:
            self.take_note(one)
        return taken

    def take_note(self, taken: lease.Taken) -> None:
        """Remember a shard that was taken over: nothing of an earlier life of it."""
        self.forget(taken.shard)
        self.held[taken.shard] = Held(taken.epoch, taken.watermark)

    def forget(self, shard: int) -> None:
        """Drop a shard with what was claimed in it."""
        self.held.pop(shard, None)
        self.claims = {task: claim for task, claim in self.claims.items() if claim.shard != shard}

    def bury(self, *others: Hand) -> list[str]:
        """Find other workers dead: their leases end, and two looks lie a heartbeat apart."""
        for other in others:
            self.db.run_text("UPDATE worker SET lease_until_ms = 1 WHERE worker = ?", (other.worker.id,))
        clock = Clock()
        watch = lease.Watch(clock)
        watch.look(self.db, self.worker.id)
        clock.now += 1e6
        return watch.look(self.db, self.worker.id)

    def succeed_to(self, *others: Hand) -> list[lease.Taken]:
        """Bury other workers and take what they had over."""
        shards = {shard for other in others for shard in other.held}
        self.bury(*others)
        return self.take(*shards) if shards else []

    def succeed_to_shard(self, other: Hand, shard: int) -> list[lease.Taken]:
        """Take one shard of another worker, which goes on with the others: as after a death that was none."""
        self.bury(other)
        taken = self.take(shard)
        self.db.run_text("UPDATE worker SET dead = 0 WHERE worker = ?", (other.worker.id,))
        return taken

    # -- batches -------------------------------------------------------------------------------

    def part(self, shard: int, *results: Result, **more: object) -> Part:
        """What this worker would commit next to a shard."""
        its = self.held[shard]
        ours = {"job": self.job.id, "shard": shard, "owner": self.worker.id, "epoch": its.epoch, "n": its.watermark + 1}
        return Part(**ours, results=results, **more)  # type: ignore[arg-type]

    def send(self, *parts: Part, want: Want | int | Mapping[int, Want] = 0) -> list[Committed]:
        """Commit parts, and remember what became of them."""
        if isinstance(want, int):
            want = Want(want, want)
        wants = {part.shard: want for part in parts} if isinstance(want, Want) else dict(want)
        answers = self.store.commit(parts, wants)
        for answer in answers:
            for part in answer.parts:
                self.held[part.shard].watermark = part.n
                for result in part.results:
                    self.claims.pop(result.claim.id, None)
                if part.kind is Kind.RELEASE:
                    self.forget(part.shard)
            self.claims.update({claim.id: claim for claim in answer.claims})
            for shard in answer.fenced:
                self.forget(shard)
        return answers

    def commit(self, *parts: Part, want: Want | int | Mapping[int, Want] = 0) -> Committed:
        """The same, where one piece is expected."""
        (answer,) = self.send(*parts, want=want)
        return answer

    def finish(self, *results: Result, want: int = 0) -> Committed:
        """Commit the results of any shards together."""
        by_shard: dict[int, list[Result]] = defaultdict(list)
        for result in results:
            by_shard[result.claim.shard].append(result)
        return self.commit(*(self.part(shard, *its) for shard, its in by_shard.items()), want=want)

    def claim(self, most: int = 1000, *shards: int, **more: object) -> list[Claim]:
        """Claim in every shard held, or in those named, in a batch of its own."""
        parts = [self.part(shard) for shard in sorted(self.held) if not shards or shard in shards]
        return list(self.commit(*parts, want=Want(most, most, **more)).claims)  # type: ignore[arg-type]

    def seed(self, *links: Link, shard: int | None = None) -> Committed:
        """Put links in through a source of their own, which is read to its end."""
        shard = min(self.held) if shard is None else shard
        move = self.open_source(*links)
        return self.commit(self.part(shard, sources=(move,)))

    def open_source(self, *links: Link) -> SourceMove:
        """A new source, and the move that reads it to its end."""
        number = len(jobs.sources(self.db, self.job.id)) + 1
        source = jobs.Source("list", number.to_bytes(16, "big"), "[]")
        jobs.join(self.db, spider=self.job.spider, slot=self.job.slot, profile=PROFILE, shards=self.job.shards, sources=[source])
        return SourceMove(number, 0, 1, True, links)

    def release(self, shard: int, *results: Result) -> Committed:
        """Give a shard up, as a clean stop does."""
        return self.commit(self.part(shard, *results, kind=Kind.RELEASE))


class Clock:
    """A process's own clock, which moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -- faults -------------------------------------------------------------------------------------


class Faulty:
    """A real connection whose COMMITs go as planned.

    "lost" never arrives, "unheard" takes effect without an answer, "" is as ever.
    `meanwhile` happens once, after the fault and before anybody can look.
    """

    def __init__(self, db: Database, *plan: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.db = db
        self.plan = list(plan)
        self.meanwhile = meanwhile
        self.fired = 0
        self.said: list[str] = []  # statements, in order

    def __getattr__(self, name: str) -> object:
        return getattr(self.db, name)

    def run(self, statement: str, **values: object) -> int:
        """Run, and note it."""
        self.said.append(statement)
        return self.db.run(statement, **values)

    def commit(self) -> None:
        """COMMIT, as planned."""
        fault = self.plan.pop(0) if self.plan else ""
        if not fault:
            self.said.append("commit")
            return self.db.commit()
        self.fired += 1
        if fault == "lost":
            self.db.rollback()
        else:
            self.db.commit()
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        raise OutcomeUnknown(f"{self.db.place}: the connection broke at COMMIT")


def refuse(db: Database, *skus: str) -> None:
    """Make the table of products refuse some values, or every row: a rule that somebody else gave the database."""
    words = ", ".join(f"'{sku}'" for sku in skus)
    rule = f"NEW.sku IN ({words})" if skus else "NEW.sku IS NOT NULL"
    name = f"refuse_{skus[0] if skus else 'all'}"
    if db.name == "sqlite":
        db.run_text(f"CREATE TRIGGER {name} BEFORE INSERT ON shop_product WHEN {rule} BEGIN SELECT RAISE(ABORT, 'refused by a rule'); END")
    elif db.name == "mysql":
        said = f"IF {rule} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused by a rule'; END IF"
        db.run_text(f"CREATE TRIGGER {name} BEFORE INSERT ON shop_product FOR EACH ROW {said}")
    else:
        body = "BEGIN RAISE EXCEPTION 'refused by a rule'; END"
        db.run_text(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS '{body.replace(chr(39), 2 * chr(39))}'")
        db.run_text(f"CREATE TRIGGER {name} BEFORE INSERT ON shop_product FOR EACH ROW WHEN ({rule}) EXECUTE FUNCTION {name}()")


def break_commit(hand: Hand, *plan: str, meanwhile: Callable[[], object] = lambda: None) -> Faulty:
    """Let the next COMMITs of a worker go as planned."""
    faulty = Faulty(hand.store.db, *plan, meanwhile=meanwhile)
    hand.store.db = faulty  # type: ignore[assignment]
    return faulty


def mutated(function: FunctionType, old: str, new: str) -> FunctionType:
    """The same function with a piece of its text changed: a planted bug."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{function.__name__} has {source.count(old)} times {old!r}"
    made: dict[str, FunctionType] = {}
    exec("from __future__ import annotations\n" + textwrap.dedent(source).replace(old, new), {**function.__globals__}, made)
    mutant = FunctionType(made[function.__name__].__code__, function.__globals__, function.__name__, function.__defaults__)
    mutant.__kwdefaults__ = function.__kwdefaults__
    return mutant


def change_sql(patch: pytest.MonkeyPatch, db: Database, name: str, old: str, new: str) -> None:
    """Change a piece of a statement, in the words of core.sql, for every connection of this kind of database: a planted bug."""
    sql, said = db._sql, _SAID[db.name]  # type: ignore[attr-defined]
    assert sql[name].count(said(old)) == 1, f"{name} has {sql[name].count(said(old))} times {said(old)!r}"
    patch.setitem(sql, name, sql[name].replace(said(old), said(new)))


def child(script: str, *arguments: str, **more: object) -> subprocess.Popen[str]:
    """A Python process that can import what this one can; it prints when it is where the test wants it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, text=True, **pipes, **more)  # type: ignore[call-overload]


# -- looking ------------------------------------------------------------------------------------


#: Kind of database -> what it makes of the words of core.sql.
_SAID: dict[str, Callable[[str], str]] = {"sqlite": str, "postgres": postgres.translate, "mysql": mysql_words.translate}

#: Kind of database -> the names of its tables, Limpet's and the datasets'.
_TABLES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
    "postgres": "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename COLLATE \"C\"",
    "mysql": "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_TYPE = 'BASE TABLE' ORDER BY 1",
}


def tables(db: Database) -> list[str]:
    """Every table of a database, but those of the connection alone."""
    return [name for (name,) in db.rows_text(_TABLES[db.name])]


def in_words_of(db: Database, sql: str) -> str:
    """SQL of a test, whose bytes are written x'00', as this database says it."""
    return re.sub(r"\bx'([0-9a-f]*)'", r"'\\x\1'", sql) if db.name == "postgres" else sql


def drop_index(db: Database, name: str, table: str) -> None:
    """An index is gone."""
    db.run_text(f"DROP INDEX {name}" + (f" ON {table}" if db.name == "mysql" else ""))


def columns_of(db: Database, name: str) -> list[str]:
    """The columns of a table or view, in order."""
    if db.name == "sqlite":
        return [row[1] for row in db.rows_text(f"PRAGMA table_info({name})")]
    here = "current_schema()" if db.name == "postgres" else "DATABASE()"
    sql = f"SELECT column_name, ordinal_position FROM information_schema.columns WHERE table_schema = {here} AND table_name = ? ORDER BY 2"
    return [row[0] for row in db.rows_text(sql, (name,))]


def shape(db: Database) -> dict[str, list[str]]:
    """The tables of a database and the view of products, each with its columns."""
    return {name: columns_of(db, name) for name in (*tables(db), "shop_product_view")}


def dump(db: Database) -> dict[str, list[Row]]:
    """Everything that a database holds."""
    return {name: sorted(db.rows_text(f'SELECT * FROM "{name}"'), key=repr) for name in tables(db)}


def states(db: Database) -> dict[str, str]:
    """Text of each task -> its state."""
    return dict(db.rows_text("SELECT x.text, t.state FROM task AS t JOIN task_text AS x ON x.id = t.id"))


def counted(db: Database) -> Counter[str]:
    """How many tasks are in each state."""
    return Counter(states(db).values())


def column(db: Database, name: str, where: str = "1 = 1", values: Iterable[object] = (), *, table: str = "task") -> list[object]:
    """One column of some rows, by id."""
    return [row[0] for row in db.rows_text(f"SELECT {name} FROM {table} WHERE {where} ORDER BY 1", tuple(values))]


def attempts(db: Database) -> list[tuple[int, int, str, str]]:
    """(task, try, outcome, reason) of every attempt row."""
    return [(t, n, o, r) for t, n, o, r in db.rows_text("SELECT task, try, outcome, reason FROM attempt ORDER BY task, try")]


def records(db: Database, table: str = "shop_product") -> list[Row]:
    """The lasting content of a dataset, as its view shows it, in key order."""
    return db.rows_text(f"SELECT slot, sku, price FROM {table}_view ORDER BY sku, slot")
