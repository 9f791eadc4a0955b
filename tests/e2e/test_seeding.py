"""Rows and starts that come late, are wrong, or come to a job that takes no more: what `seed` and `run` make of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from limpet.engine.load import load
from limpet.engine.sources import source_of_csv, source_of_file
from limpet.store import open_store
from limpet.store.views import reading
from tests.conftest import on_sqlite
from tests.e2e.conftest import Ended, Limpet
from tests.e2e.sites import Reply, Served, serving
from tests.servers.kinds import Databases

SPIDER = '''
import csv
from decimal import Decimal

from limpet import Http, Spider, Start, Tx, call

asker = Spider("asker", user_agent="asker/1 (+http://127.0.0.1/bot)", shards=4)


@asker.task(key="n", cost=1)
async def one(n: int, x: Decimal | None = None, note: list | None = None, *, http: Http, tx: Tx) -> None:
    """A call."""
    await http.get(asker.params["api"], params={"n": n})
'''

START = '''

@asker.start
async def listed(start: Start):
    """The numbers of a file."""
    with open(asker.params["listed"], encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield call(one, n=int(row["n"]))
'''

#: Small windows: whatever happens, happens soon.
FLAGS = ("--quiet", "--commit-ms", "50", "--backoff", "0.05")
PATIENCE_S = 120


@dataclass
class Asker:
    """A spider of calls, its database, and the API that it asks."""

    call: Limpet
    site: Served
    folder: Path
    db: str
    held: set[int] = field(default_factory=set)  # numbers whose answer waits for `go`
    waiting: Event = field(default_factory=Event)
    go: Event = field(default_factory=Event)

    def answer(self, address: str, path: str, asked: int) -> Reply:
        """What the API says."""
        if int(path.partition("n=")[2] or -1) in self.held:
            self.waiting.set()
            self.go.wait(PATIENCE_S)
        return Reply("{}")

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        place = self.folder / name
        place.write_text(text, encoding="utf-8")
        return place

    def words(self, *more: str) -> list[str]:
        """The words of `limpet run`."""
        api, listed = f"api={self.site.url('/')}", f"listed={self.folder / 'listed.csv'}"
        return ["run", "s.py", "--db", self.db, "--param", api, "--param", listed, *FLAGS, *more]

    def run(self, *more: str) -> Ended:
        """One worker, to its end."""
        return self.call(*self.words(*more))

    def seed(self, name: str, *more: str) -> Ended:
        """The rows of a file, put in."""
        return self.call("seed", "s.py", "--db", self.db, "--from", self.folder / name, *more)

    def sources(self) -> list[tuple[str, int, bool]]:
        """The job's sources, in the order in which they came."""
        with reading(self.db) as store:
            rows = store.db.rows_text("SELECT kind, position, closed FROM source ORDER BY job, source")
            return [(str(kind), int(position), bool(closed)) for kind, position, closed in rows]


@pytest.fixture
def asker(limpet: Limpet, databases: Databases, tmp_path: Path) -> Iterator[Asker]:
    """A spider without a start."""
    made: list[Asker] = []
    with serving(lambda address, path, asked: made[0].answer(address, path, asked)) as site:
        made.append(Asker(limpet, site, tmp_path, databases.ready()))
        made[0].write("s.py", SPIDER)
        try:
            yield made[0]
        finally:
            made[0].go.set()


# -- a sealed slot ----------------------------------------------------------------------------------


def new_rows(asker: Asker) -> Ended:
    """Rows of a file that the job does not know."""
    asker.write("more.csv", "n\n1\n77\n")
    return asker.seed("more.csv", "--slot", "a")


def another_param(asker: Asker) -> Ended:
    """The same start with another parameter."""
    return asker.run("--slot", "a", "--param", "note=x")


def other_code(asker: Asker) -> Ended:
    """A start that was edited."""
    asker.write("s.py", SPIDER + START.replace('int(row["n"])', 'int(row["n"]) + 1'))
    return asker.run("--slot", "a")


@pytest.mark.parametrize("late", [new_rows, another_param, other_code])
def test_a_sealed_slot_refuses_what_is_new_and_stays_proved(asker: Asker, late: Callable[[Asker], Ended]) -> None:
    """It says which slot and what to do; nothing is written, and the same run as before is finished as before."""
    asker.write("s.py", SPIDER + START)
    asker.write("listed.csv", "n\n1\n2\n3\n")
    for slot in ("a", "b"):
        assert asker.run("--slot", slot).code == 0
    assert asker.call("gc", "--slots-older", "0s", "--db", asker.db).code == 0
    asked, sources = asker.site.requests, asker.sources()
    assert asker.run("--slot", "a").code == 6
    ended = late(asker)
    assert ended.code == 2
    assert "job asker@a is sealed" in ended.err
    assert "a new slot (--slot) collects again" in ended.err
    assert (asker.site.requests, asker.sources()) == (asked, sources)
    assert asker.call("verify", "--full", "--db", asker.db, "--slot", "a").code == 0


# -- beside a worker --------------------------------------------------------------------------------


def test_a_worker_that_is_at_the_job_reads_what_is_put_in_meanwhile(asker: Asker) -> None:
    """It has all shards, so nobody else could: its run ends with the rows of both files done."""
    asker.write("a.csv", "n\n0\n1\n2\n")
    asker.write("b.csv", "n\n10\n11\n")
    asker.held = {0}
    assert asker.seed("a.csv").code == 0
    with subprocess.Popen([sys.executable, "-m", "limpet", *asker.words()], cwd=asker.folder) as worker:
        assert asker.waiting.wait(PATIENCE_S)
        beside = asker.seed("b.csv")
        assert (beside.code, "every shard has a worker" in beside.out) == (0, True)
        asker.go.set()
        assert worker.wait(PATIENCE_S) == 0
    assert asker.site.requests == 5
    assert all(closed for _, _, closed in asker.sources())


# -- rows that are none -----------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize(
    ("text", "new", "line", "said"),
    [
        ("n\n1\n2\n3,oops\n4\n", 3, 4, "2 fields; expected 1 (n)"),
        ("n,x\n1\n2,0.5\n", 1, 2, "1 field; expected 2"),
        ('n\n1\n"2\n3\n4\n', 3, 3, "a quote that is not closed"),
        ('n\n"1" disk\n2\n3\n', 2, 2, "',' expected after '\"'"),
        ("n\n1\n" + "2" * 140_000 + "\n3\n", 2, 3, "field larger than field limit"),
        ('n,note\n1,"' + "[" * 100_000 + '"\n2,[1]\n', 1, 2, "expected list"),
        ("n,x\n1,1e99999999\n2,1\n", 1, 2, "more than 1000 digits"),
        ("n,x\n1,1e-99999999\n2,1\n", 1, 2, "more than 1000 digits"),
        ("n\n1\ntwo\n3\n", 2, 3, "expected int"),
    ],
)
def test_a_bad_row_costs_that_row(asker: Asker, text: str, new: int, line: int, said: str) -> None:
    """It is named with its line and counted; those before and after it are tasks, and mended it is one too."""
    place = asker.write("a.csv", text)
    ended = asker.seed("a.csv", "--json")
    assert (ended.code, ended.json["new"], ended.json["rejected"]) == (0, new, 1)
    assert f"{place}, line {line}: " in ended.err
    assert said in ended.err
    assert len(ended.err) < 2000
    asker.write("a.csv", "n\n1\n2\n3\n4\n5\n")
    assert asker.seed("a.csv", "--json").json["new"] == 5 - new
    assert (asker.run().code, asker.site.requests) == (0, 5)


# -- a file that has changed ------------------------------------------------------------------------


def begun(asker: Asker, name: str) -> None:
    """A source that somebody put in and did not come to read."""
    spider, place = load(asker.folder / "s.py").spider, str(asker.folder / name)
    store = open_store(asker.db)
    source = source_of_csv(place, "one", {}) if name.endswith(".csv") else source_of_file(place)
    store.join(spider=spider.name, profile=spider.profile, sources=[source])
    store.close()


def test_of_a_file_that_has_changed_the_rest_waits_and_everything_else_is_done(asker: Asker) -> None:
    """The message names the command that puts the new one in its place; then the job is completed."""
    place = asker.write("a.csv", "n\n1\n2\n")
    asker.write("b.csv", "n\n7\n8\n")
    begun(asker, "a.csv")
    asker.write("a.csv", "n\n1\n2\n3\n")
    assert asker.seed("b.csv").code == 0
    for _ in range(2):
        stalled = asker.run("--json")
        assert (stalled.code, stalled.json["done"]) == (7, 2)
        assert f"`limpet seed FILE --from {place} --task one`" in stalled.json["message"]
    again = asker.seed("a.csv", "--json")
    assert (again.code, again.json["new"]) == (0, 3)
    assert f"{place}: this file replaces what it was before" in again.err
    assert asker.run("--json").json["done"] == 5
    assert len(asker.sources()) == 2
    assert asker.call("verify", "--full", "--db", asker.db).code == 0


@on_sqlite
def test_the_old_file_put_back_is_read_on(asker: Asker) -> None:
    """Its source was replaced, so it is a new one; and one that was read to its end stays known."""
    asker.write("a.csv", "n\n1\n")
    begun(asker, "a.csv")
    asker.write("a.csv", "n\n1\n2\n")
    assert asker.seed("a.csv", "--json").json["new"] == 2
    asker.write("a.csv", "n\n1\n")
    assert not asker.seed("a.csv", "--json").json["known"]
    assert asker.seed("a.csv", "--json").json["known"]


@on_sqlite
def test_a_file_that_is_gone_stops_nothing_else(asker: Asker) -> None:
    """The run says in the end which file is wanted, and by which command it is given."""
    asker.write("a.csv", "n\n1\n")
    asker.write("b.csv", "n\n7\n")
    begun(asker, "a.csv")
    assert asker.seed("b.csv").code == 0
    (asker.folder / "a.csv").unlink()
    stalled = asker.run("--json")
    assert (stalled.code, stalled.json["done"]) == (7, 1)
    assert "cannot read the starts in" in stalled.json["message"]


@on_sqlite
def test_the_rest_of_a_list_of_starts_is_replaced_too(asker: Asker) -> None:
    """`run --from` with a file that has changed goes on with what it is now."""
    asker.write("s.py", SPIDER + "\n\n@asker.page()\ndef any_page(page, tx):\n    pass\n")
    asker.write("starts.txt", f"{asker.site.url('/p')}\n")
    begun(asker, "starts.txt")
    asker.write("starts.txt", f"{asker.site.url('/q')}\n")
    stalled = asker.run("--json", "--start", asker.site.url("/r"))
    assert (stalled.code, stalled.json["done"]) == (7, 1)
    assert f"`limpet run FILE --from {asker.folder / 'starts.txt'}`" in stalled.json["message"]
    ended = asker.run("--json", "--from", "starts.txt")
    assert (ended.code, ended.json["done"]) == (0, 2)
    assert [kind for kind, _, _ in asker.sources()] == ["given", "file"]


# -- starts that give nothing, or fail --------------------------------------------------------------


def test_a_start_that_gave_nothing_is_asked_again(asker: Asker) -> None:
    """As often as there is no task; once there is one, what was read is read."""
    asker.write("s.py", SPIDER + START)
    asker.write("listed.csv", "n\n")
    for _ in range(2):
        empty = asker.run()
        assert (empty.code, "its start (listed) gave no task" in empty.out) == (6, True)
    asker.write("listed.csv", "n\n1\n2\n")
    assert asker.run().code == 0
    asker.write("listed.csv", "n\n1\n2\n3\n")
    assert (asker.run().code, asker.site.requests) == (6, 2)
    assert asker.call("verify", "--full", "--db", asker.db).code == 0


@on_sqlite
def test_a_start_that_fails_is_a_usage_error_and_goes_on_once_it_is_mended(asker: Asker) -> None:
    """A file of the user's with a row that is none: what was wrong is said, with the start's name."""
    asker.write("s.py", SPIDER + START)
    asker.write("listed.csv", "n\none\n")
    ended = asker.run("--json")
    assert ended.code == 2
    assert "the start listed of spider asker: ValueError" in ended.json["message"]
    asker.write("listed.csv", "n\n1\n")
    assert asker.run().code == 0
