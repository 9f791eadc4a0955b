"""What collecting once must come to, played at any size: the suite plays it small, `make crash` at the size of the promise.

Each scene asserts what must hold and gives the figures that it came to.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from limpet.batch import CREDIT
from limpet.errors import LimpetError
from limpet.store import shared
from limpet.store.dialect import Database
from limpet.store.opening import connect
from tests.collecting.collector import EXAMPLES, PATIENCE_S, Collector, environment, table
from tests.collecting.meter import Meter
from tests.collecting.provider import Provider

SLOTS = ("2026-11-29", "2026-11-30")
#: Slots for a scene that goes on until its fault was met.
LATER = tuple(f"2026-12-{day:02}" for day in range(1, 9))

#: Makes a collector of the database of a test: `new("serp", "--slot", "2026-11-30")`.
New = Callable[..., Collector]
Figures = dict[str, object]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Stage:
    """Where a scene is played."""

    new: New
    folder: Path
    provider: Meter


@dataclass(frozen=True)
class Kills:
    """How workers are hit: so many times, a time between so many requests or tasks."""

    number: int
    every: tuple[int, int]
    at_least: int
    workers: int = 4
    freeze_s: float = 0.0


# -- the rank tracker ------------------------------------------------------------------------------


def keywords(folder: Path, number: int) -> Path:
    """A CSV of so many keywords."""
    return table(folder / "keywords.csv", ["keyword"], [[f"keyword {n}"] for n in range(number)])


def serp(stage: Stage, slot: str, number: int, spider: str | Path = "serp") -> Collector:
    """The rank tracker of one slot."""
    listed = keywords(stage.folder, number)
    return stage.new(spider, "--slot", slot, "--param", f"api={stage.provider.url}/serp", "--param", f"keywords={listed}")


def variant(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """The rank tracker with other lines."""
    text = (EXAMPLES / "serp.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    place = folder / name
    place.write_text(text, encoding="utf-8")
    return place


def each_once(rows: list[dict[str, object]], number: int) -> bool:
    """Whether the ten results of every keyword are there, and none twice."""
    return len(rows) == len({(row["keyword"], row["day"], row["url"]) for row in rows}) == 10 * number


def paid(stage: Stage, number: int, kills: Kills) -> Figures:
    """Two slots under kills: a credit a call and nothing twice; ours agrees with the meter once the unknown ones are settled."""
    provider, hits = stage.provider, 0
    for slot in SLOTS:
        tracked = serp(stage, slot, number)
        hit, _ = tracked.together(
            lambda: provider.requests, workers=kills.workers, kills=kills.number, every=kills.every, seed=int(slot[-2:]),
            hold=provider.hold,
        )  # fmt: skip
        hits += hit
    assert hits >= kills.at_least
    assert provider.charged_twice == {}
    assert provider.charged == 2 * number * 1000
    told: list[str] = []
    asked, unknown = provider.requests, tracked.costs("outcome").get(("unknown",), 0)
    for slot in SLOTS:
        done = serp(stage, slot, number)
        assert each_once(done.export("result", "--slot", slot), number)
        assert done.run() == 6
        told.append(done.limpet("cost", "settle", "--idempotent", "--slot", slot, "--json", ok=(0, 6)))
        done.limpet("verify", "--full", "--slot", slot)
    assert provider.requests == asked
    sums = done.costs("outcome")
    assert (sums[("charged",)], sums.get(("unknown",), 0)) == (2 * number * CREDIT, 0), f"{sums}: {told}"
    return {"kills": hits, "requests": asked, "meter": provider.charged / 1000, "unknown before settle": unknown / CREDIT}


def unkeyed(stage: Stage, number: int, kills: Kills) -> Figures:
    """Without idempotency keys: each second charge is one that the ledger lists as unknown, and the provider's bill settles it."""
    spider = variant(stage.folder, "plain.py", ('idempotency_header="Idempotency-Key"', 'idempotency_header=""'))
    provider, hits = stage.provider, 0
    slots: list[str] = []
    for slot in (*SLOTS, *LATER):
        if len(slots) >= len(SLOTS) and provider.charged_twice:
            break  # else no kill has found a request under way yet
        slots.append(slot)
        tracked = serp(stage, slot, number, spider)
        hit, _ = tracked.together(
            lambda: provider.requests, workers=kills.workers, kills=kills.number, every=kills.every, seed=int(slot[-2:]),
            hold=provider.hold,
        )  # fmt: skip
        hits += hit
        assert each_once(tracked.export("result", "--slot", slot), number)
    twice = sum(provider.charged_twice.values())
    assert hits >= kills.at_least
    assert twice > 0  # else this shows nothing
    assert provider.charged == 1000 * (len(slots) * number + twice)
    unknown = tracked.costs("outcome")[("unknown",)]
    assert unknown >= twice * CREDIT
    for slot in slots:
        billed = provider.bill(slot, [f"keyword {n}" for n in range(number)])
        bill = table(stage.folder / f"bill-{slot}.csv", ["keyword", "day", "credits"], [[word, slot, credits] for word, credits in billed])
        tracked.limpet("cost", "settle", "--slot", slot, "--from", str(bill), "--file", str(spider), "--json", ok=(0, 6))
        tracked.limpet("verify", "--full", "--slot", slot)
    sums = tracked.costs("outcome")
    assert sums[("charged",)] * 1000 == provider.charged * CREDIT
    assert sums.get(("unknown",), 0) == 0
    return {"kills": hits, "meter": provider.charged / 1000, "charged twice": twice, "unknown before settle": unknown / CREDIT}


def raising(stage: Stage, number: int) -> Figures:
    """A handler that raises on every answer, mended and retried: no further request, no further charge."""
    broken = variant(stage.folder, "tracker.py", ('reply.json()["results"]', 'reply.json()["rankings"]'))
    tracked, provider = serp(stage, SLOTS[0], number, broken), stage.provider
    assert tracked.run("--breaker", "1000000") == 3
    assert provider.charged == 1000 * number
    assert len(tracked.limpet("dead", "--json", "--limit", "0").splitlines()) == number
    tracked.limpet("retry", "--reason", "handler:KeyError")
    variant(stage.folder, "tracker.py")
    asked = provider.requests
    assert tracked.run() == 0
    assert (provider.requests, provider.charged) == (asked, 1000 * number)
    assert each_once(tracked.export("result"), number)
    tracked.limpet("verify", "--full")
    return {"answers kept": number, "requests after the mending": provider.requests - asked, "meter": provider.charged / 1000}


def triggered(stage: Stage, number: int, *, processes: int, times: int) -> Figures:
    """The same slot from many processes at once, again and again: one job a slot, and each call is charged once."""
    provider, listed = stage.provider, keywords(stage.folder, number)
    params = ("--param", f"api={provider.url}/serp", "--param", f"keywords={listed}")
    tracked = stage.new("serp")
    for day in range(1, times + 1):
        words = tracked.command(
            "schedule", str(tracked.spider), "--db", tracked.db, "--quiet", "--at", f"2026-11-{day:02}T18:00:00Z", *params
        )
        crowd = [_started(words, stage.folder) for _ in range(processes)]
        codes = [one.wait(PATIENCE_S) for one in crowd]
        assert codes == [0] * processes, f"{codes}: {(stage.folder / 'schedule.log').read_text(errors='replace')[-3000:]}"
        assert provider.charged == 1000 * number * day
    assert provider.charged_twice == {}
    assert counted(tracked.db, "SELECT COUNT(*) FROM job") == times
    for day in range(2, times + 2):
        assert each_once(tracked.export("result", "--slot", f"2026-11-{day:02}"), number)
    return {"processes": processes, "slots": times, "meter": provider.charged / 1000, "requests": provider.requests}


def forced(stage: Stage, number: int, failing: int) -> Figures:
    """Some tasks are forced to fail; once the API is mended, a backfill sends exactly those."""
    provider, tracked = stage.provider, serp(stage, SLOTS[0], number)
    assert isinstance(provider, Provider)
    provider.broken = {f'serp?{{"day": "{SLOTS[0]}", "keyword": "keyword {n}"}}' for n in range(failing)}
    assert tracked.run("--strikes", "2") == 3
    provider.broken = set()
    asked, before = provider.requests, provider.charged
    days = ("--from", SLOTS[0], "--to", SLOTS[0])
    tracked.limpet("backfill", str(tracked.spider), *days, *tracked.arguments[2:], "--quiet", "--backoff", "0.05")
    assert (provider.requests - asked, provider.charged - before) == (failing, 1000 * failing)
    assert provider.charged == 1000 * number
    assert each_once(tracked.export("result"), number)
    tracked.limpet("verify", "--full")
    return {"tasks": number, "failed": failing, "requests of the backfill": provider.requests - asked}


def budget(stage: Stage, number: int, kills: Kills, limits: tuple[int, int]) -> Figures:
    """Never above the budget, whoever is killed; with more, exactly so much more; in the end ours and the meter agree.

    What a kill left unknown counts as spent: the meter is below the budget by as much as no request of those came through.
    """
    first, second = limits
    provider, tracked = stage.provider, serp(stage, SLOTS[0], number)
    hits, codes = tracked.together(
        lambda: provider.requests, workers=kills.workers, kills=kills.number, every=kills.every, more=("--budget", str(first)),
        hold=provider.hold,
    )  # fmt: skip
    assert hits >= kills.at_least
    assert set(codes) == {5}
    unknown = tracked.costs("outcome").get(("unknown",), 0)
    met = provider.charged
    assert sum(tracked.costs("outcome").values()) == first * CREDIT
    assert first * CREDIT - unknown <= met * CREDIT // 1000 <= first * CREDIT
    _, codes = tracked.together(lambda: provider.requests, workers=kills.workers, kills=0, every=(1, 2), more=("--budget", str(second)))
    assert set(codes) == {5}
    more = provider.charged - met
    assert sum(tracked.costs("outcome").values()) == second * CREDIT
    assert (second - first) * CREDIT - unknown <= more * CREDIT // 1000 <= (second - first) * CREDIT
    assert tracked.run("--budget", "inf") == 0
    assert provider.charged_twice == {}
    assert provider.charged == 1000 * number
    assert each_once(tracked.export("result"), number)
    tracked.limpet("cost", "settle", "--idempotent", "--json", ok=(0, 6))
    sums = tracked.costs("outcome")
    assert (sums[("charged",)], sums.get(("unknown",), 0)) == (number * CREDIT, 0)
    tracked.limpet("verify", "--full")
    return {"kills": hits, "unknown at the kills": unknown / CREDIT, "meter": met / 1000, "more by the meter": more / 1000}


def _started(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "schedule.log").open("ab") as log:
        return subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment())


# -- tallies and registers ---------------------------------------------------------------------------

COUNTING = """
from collections.abc import AsyncIterator
from limpet import Call, Spider, Start, Tx, call

counting = Spider("counting")


@counting.task(key="number")
async def count(number: int, *, tx: Tx) -> None:
    for name in range(20):
        if number % (name + 1) == 0:
            tx.tally(f"divisible.{name + 1}")
    tx.tally("in_all", number)


@counting.start
async def numbers(start: Start) -> AsyncIterator[Call]:
    for number in range(int(start.params["numbers"])):
        yield call(count, number=number)
"""

ADDING = """
from collections.abc import AsyncIterator
from limpet import Call, Spider, Start, Tx, call

adding = Spider("adding")


@adding.task(key="number")
async def add(number: int, *, tx: Tx) -> None:
    register = await tx.register(f"sum.{number % int(adding.params['registers'])}")
    register.set((register.value or 0) + 1)
    tx.tally("writes")


@adding.start
async def numbers(start: Start) -> AsyncIterator[Call]:
    for number in range(int(start.params["numbers"])):
        yield call(add, number=number)
"""

#: Why a task may run again that did nothing wrong; the last one where a worker lost its lease, as it got no turn for so long.
INNOCENT = {"a register had another version by then", "stopped", "its shard is handed over"}
LAPSED = "its worker was lost"


def written(folder: Path, name: str, text: str) -> Path:
    """The file of a spider."""
    place = folder / f"{name}.py"
    place.write_text(text, encoding="utf-8")
    return place


def tallies(stage: Stage, number: int, kills: Kills) -> Figures:
    """Workers add to twenty tallies, some killed, some frozen for longer than their lease: totals are exact.

    Nothing holds these tasks up, so they may be done before they are hit: then another slot is hit, until there were hits enough.
    """
    spider, hits, job = written(stage.folder, "counting", COUNTING), 0, 0
    while hits < kills.at_least and job < len(LATER):
        slot, job = LATER[job], job + 1
        counting = stage.new(spider, "--slot", slot, "--param", f"numbers={number}", "--commit-pages", "20")
        counting.run("--max-pages", "1")
        before = done(counting.db)
        hit, _ = counting.together(
            partial(done, counting.db), workers=kills.workers, kills=kills.number, every=kills.every, freeze_s=kills.freeze_s
        )
        hits += hit
        assert done(counting.db) == job * number > before
        found = looked(counting.db, partial(shared.tallies, job=job))
        assert found["in_all"] == sum(range(number))
        assert [found[f"divisible.{n}"] for n in range(1, 21)] == [len(range(0, number, n)) for n in range(1, 21)]
        counting.limpet("verify", "--full", "--slot", slot)
    assert hits >= kills.at_least
    return {"tasks": number, "kills and freezes": hits, "batches": counted(counting.db, "SELECT COUNT(*) FROM ledger")}


def registers(stage: Stage, number: int, workers: int = 3, registers: int = 5) -> Figures:
    """A few contended registers: as many versions as tasks, and only a lost race runs a task again."""
    flags = ("--commit-pages", "10", "--concurrency", "4")
    adding = stage.new(written(stage.folder, "adding", ADDING), "--param", f"numbers={number}", "--param", f"registers={registers}", *flags)
    adding.run("--max-pages", "1")
    adding.together(lambda: done(adding.db), workers=workers, kills=0, every=(1, 2))
    values = looked(adding.db, lambda db: shared.registers(db, "adding"))
    again = looked(adding.db, lambda db: db.rows_text("SELECT reason, COUNT(*) FROM attempt WHERE outcome <> 'done' GROUP BY reason"))
    assert sum(version for version, _ in values.values()) == number
    assert sum(int(str(value)) for _, value in values.values()) == number
    assert looked(adding.db, lambda db: shared.tallies(db, 1))["writes"] == number
    began_anew = counted(adding.db, "SELECT COUNT(*) FROM worker") > 1 + workers
    assert {str(reason) for reason, _ in again} <= (INNOCENT | {LAPSED} if began_anew else INNOCENT)
    assert not counted(adding.db, "SELECT SUM(strike) FROM attempt")
    adding.limpet("verify", "--full")
    return {
        "writes": number,
        "registers": registers,
        "workers": workers,
        "again": {str(reason): int(str(times)) for reason, times in again},
    }


def looked(db: str, ask: Callable[[Database], Found]) -> Found:
    """What a question to a database gives, on a connection of its own."""
    opened = connect(db, readonly=True)
    try:
        return ask(opened)
    finally:
        opened.close()


def counted(db: str, sql: str) -> int:
    """A number; 0 while there is no such table."""
    try:
        return int(str(looked(db, lambda opened: opened.rows_text(sql))[0][0] or 0))
    except LimpetError:
        return 0


def done(db: str) -> int:
    """Tasks that are done."""
    return counted(db, "SELECT SUM(done) FROM ledger")


# -- feeds -------------------------------------------------------------------------------------------

#: From the oldest to the newest, where `examples/feed.py` goes the other way.
ASCENDING = """
from collections.abc import AsyncIterator
from limpet import Call, Http, Spider, Start, Tx, call, record

rising = Spider("rising")
LATE = 10


@record(key="number", scope="spider")
class Order:
    number: int
    item: str


@rising.task(key="after")
async def orders(after: int, *, http: Http, tx: Tx) -> None:
    mark = tx.mark("orders", order="asc", overlap=LATE)
    if after < 0:
        after = mark.value or 0
    found = (await http.get(rising.params["api"], params={"after": after})).json()["orders"]
    for order in found:
        mark.seen(order["number"])
        tx.emit(Order(number=order["number"], item=order["item"]))
    if found:
        tx.enqueue(call(orders, after=found[-1]["number"]))


@rising.start
async def oldest(start: Start) -> AsyncIterator[Call]:
    yield call(orders, after=-1)
"""


def fed(stage: Stage, rounds: int, *, rising: bool, seed: int = 7) -> Figures:
    """Rounds of an incremental feed, each killed in the middle while rows arrive, some late: none missing, none double, marks right."""
    provider, rng = stage.provider, random.Random(seed)
    assert isinstance(provider, Provider)
    spider = written(stage.folder, "rising", ASCENDING) if rising else "feed"
    newest, kills = 0, 0
    late: list[int] = []
    for round_ in range(rounds):
        provider.orders += [newest + n for n in range(1, 26) if n != 20] + late
        late = [newest + 20]  # comes in the next round, below what is newest by then
        newest += 25
        feed = stage.new(spider, "--slot", f"{round_:02}", "--param", f"api={provider.url}/feed")
        kills += _killed(feed, provider, rng)
        newest += _between_pages(provider, newest)
        assert feed.run() in (0, 6)
        rows = sorted(int(str(row["number"])) for row in feed.export("order"))
        assert len(rows) == len(set(rows))
        missing = [number for number in provider.orders if number not in rows]
        assert set(missing) <= set(late) | set(range(newest - BETWEEN + 1, newest + 1))
        assert marks_of(feed)[-1] == max(rows)
    provider.orders += late
    feed = stage.new(spider, "--slot", f"{rounds:02}", "--param", f"api={provider.url}/feed")
    assert feed.run() == 0
    rows = sorted(int(str(row["number"])) for row in feed.export("order"))
    assert rows == sorted(provider.orders)
    assert kills >= rounds // 2
    marks = marks_of(feed)
    assert marks == sorted(marks)
    assert marks[-1] == newest == max(rows)
    assert len(marks) >= rounds
    feed.limpet("verify", "--full", "--slot", f"{rounds:02}")
    return {"rounds": rounds + 1, "kills": kills, "orders": len(rows), "last mark": marks[-1]}


#: Orders that come while a round is under way.
BETWEEN = 3


def _between_pages(provider: Provider, newest: int) -> int:
    """Orders that come between two pages of a sweep: a newest-first one has passed them already."""
    provider.orders += [newest + n for n in range(1, BETWEEN + 1)]
    return BETWEEN


def _killed(feed: Collector, provider: Provider, rng: random.Random) -> int:
    """Kill one life of a run after a page or two, before it gets another; whether that happened."""
    wanted = provider.requests + rng.randint(1, 2)
    provider.hold(wanted)
    life = feed.start()
    try:
        while life.poll() is None:
            if provider.requests >= wanted:
                life.kill()
                return int(life.wait() == -9)
        return 0
    finally:
        provider.hold(None)


def marks_of(feed: Collector) -> list[int]:
    """The high-water mark after each sweep."""
    rows = looked(feed.db, lambda db: db.rows("marks_of_spider", spider=feed.spider.stem))
    return [int(str(row[2]).partition(":")[2]) for row in rows]
