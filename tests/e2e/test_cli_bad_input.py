"""What a user can give that is wrong in odd ways: each ends in exit code 2 and a message that says what to mend."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from limpet.engine.load import load
from limpet.engine.run import run
from limpet.engine.sources import sources_of
from limpet.engine.spider import Spider
from limpet.errors import UsageError
from limpet.store import open_store
from limpet.store.opening import SLOT_CHARS_MAX, lock_folder_of
from limpet.store.views import reading
from tests.conftest import on_servers
from tests.e2e.conftest import Ended, Limpet
from tests.servers.kinds import Databases
from tests.store.hands import found_job

SPIDER = """
from limpet import Http, Spider, Tx
spider = Spider("any", start=START, user_agent="any/1 (+http://127.0.0.1/bot)")
@spider.page()
def page(page, tx): ...
@spider.task(key="n")
async def call(n: int, *, http: Http, tx: Tx) -> None: ...
"""

LONG = "s" * (SLOT_CHARS_MAX + 1)
MANY = "8e2f" * 3000


def written(text: str = SPIDER, start: str = "[]", name: str = "any.py") -> str:
    """The file of a spider, in the folder of the call."""
    Path(name).write_text(text.replace("START", start), encoding="utf-8")
    return name


def expect_refusal(ended: Ended, *words: str) -> None:
    """Exit code 2, the words, and neither a traceback nor a fault of Limpet's."""
    assert (ended.code, ended.out) == (2, ""), ended
    assert not [word for word in ("Traceback", "fault in Limpet") if word in ended.err], ended.err
    assert [word for word in words if word not in ended.err] == [], ended.err


# -- slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [LONG, MANY])
@pytest.mark.parametrize(
    "command",
    [
        "run any.py --slot SLOT", "worker any.py --slot SLOT", "crawl http://127.0.0.1:9/ --slot SLOT",
        "seed any.py --from rows.csv --slot SLOT", "backfill any.py --from SLOT --to today",
        "backfill any.py --from today --to SLOT", "status --slot SLOT", "export any --slot SLOT", "diff any --slot 1 --slot SLOT",
    ],
)  # fmt: skip
def test_a_slot_that_is_too_long_is_refused_everywhere(limpet: Limpet, tmp_path: Path, command: str, slot: str) -> None:
    """The same limit for every command and database, said before anything is made; the slot itself is not repeated whole."""
    written()
    Path("rows.csv").write_text("n\n1\n", encoding="utf-8")
    ended = limpet(*command.replace("SLOT", slot).split(), "--db", "x.db")
    expect_refusal(ended, f"{len(slot)} characters; expected at most {SLOT_CHARS_MAX}")
    assert len(ended.err) < 400
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("slot", [LONG, "a\nb", "a\0", "\ud800", 3])
def test_python_is_told_of_a_slot_that_is_none(tmp_path: Path, slot: object) -> None:
    """By UsageError, before a database is made."""
    with pytest.raises(UsageError, match="slot "):
        asyncio.run(run(Spider("any"), db=str(tmp_path / "x.db"), slot=slot, handle_signals=False))  # type: ignore[arg-type]
    assert not (tmp_path / "x.db").exists()


def test_the_longest_slot_is_a_job_on_every_database(databases: Databases) -> None:
    """Of characters that take four bytes each; one more is refused, and no job is there of it."""
    store = open_store(databases.ready())
    longest = "\U0001f41a" * SLOT_CHARS_MAX
    found_job(store, longest)
    with pytest.raises(UsageError, match="expected at most"):
        found_job(store, longest + "x")
    assert store.db.rows_text("SELECT slot FROM job") == [(longest,)]
    store.close()


# -- starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("[3, None]", "start holds 3; expected URLs, each a str"),
        ("['http://a.test/', None]", "start holds None"),
        ("3", "start is 3; expected a list of URLs"),
        ("(n for n in [3])", "start holds 3"),
        ("(1 / 0 for n in [3])", "start cannot be read: ZeroDivisionError: division by zero"),
    ],
)
def test_starts_that_are_none_are_the_spider_s_to_mend(limpet: Limpet, tmp_path: Path, start: str, words: str) -> None:
    """Said of the spider by its name, before a database is made."""
    expect_refusal(limpet("run", written(start=start), "--db", "x.db"), "spider any: ", words)
    assert not (tmp_path / "x.db").exists()


def test_starts_that_are_made_as_they_are_read_are_read() -> None:
    """A generator of URLs is taken, and only then asked."""
    asked: list[int] = []
    spider = Spider("any", start=(asked.append(n) or f"http://a.test/{n}" for n in range(2)))  # type: ignore[func-returns-value]
    assert asked == []
    (source,) = sources_of(spider, None, None)
    assert (asked, source.payload) == ([0, 1], '["http://a.test/0","http://a.test/1"]')


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "[" * 5000 + "]" * 5000])
def test_a_configuration_that_is_nested_too_deeply_is_said_to_be(limpet: Limpet, text: str) -> None:
    """limpet.toml, by its name."""
    Path("limpet.toml").write_text(text, encoding="utf-8")
    expect_refusal(limpet("config"), "limpet.toml: lists or tables in it are nested too deeply")


@pytest.mark.parametrize("where", ["any.py", "beside.py"])
def test_an_expression_that_python_cannot_compile_is_said_to_be_too_deep(limpet: Limpet, where: str) -> None:
    """In the spider's file, or in one that it imports."""
    deep = "x = " + "+".join("1" * 50_000) + "\n"
    written(deep + SPIDER if where == "any.py" else "import beside\n" + SPIDER)
    Path("beside.py").write_text(deep, encoding="utf-8")
    expect_refusal(limpet("run", "any.py", "--db", "x.db"), f"{where}: an expression in it is nested too deeply for Python")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise type('Odd', (BaseException,), {})('no')", "any.py:1: Odd: no"),
        ("raise GeneratorExit", "any.py:1: GeneratorExit"),
        ("import asyncio; raise asyncio.CancelledError('off')", "any.py:1: CancelledError: off"),
        ("import sys; sys.exit(3)", "ends the process while it is loaded"),
    ],
)
def test_whatever_a_file_raises_while_it_is_loaded_is_said_with_its_line(limpet: Limpet, line: str, words: str) -> None:
    """Also what is no Exception."""
    expect_refusal(limpet("run", written(f"{line}\n{SPIDER}"), "--db", "x.db"), words)


def test_ctrl_c_while_a_file_is_loaded_is_ctrl_c(limpet: Limpet) -> None:
    """4, and the file can be loaded anew in this process."""
    file = written(f"import pathlib\nif pathlib.Path('stop').exists():\n    raise KeyboardInterrupt\n{SPIDER}")
    Path("stop").touch()
    assert limpet("run", file, "--db", "x.db").code == 4
    Path("stop").unlink()
    assert load(file).spider.name == "any"


def test_a_file_with_two_spiders_says_which_flag_names_one(limpet: Limpet) -> None:
    """`--spider`, which every command with such a file has."""
    file = written(SPIDER + SPIDER.replace("spider", "other").replace('"any"', '"another"'))
    for command in (["run", file], ["migrate", file, "--print"], ["config", file], ["schedule", file]):
        expect_refusal(limpet(*command, "--db", "x.db"), "holds several spiders (any, another): name one with --spider")
    store = open_store("x.db")
    found_job(store)
    store.close()
    assert limpet("migrate", file, "--spider", "another", "--db", "x.db").code == 6


# -- places -----------------------------------------------------------------------------------


@on_servers
def test_a_file_in_the_place_of_the_lock_files_is_said_to_be_in_the_way(
    limpet: Limpet, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which folder, what it is for, and what to do; and no task is begun."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = Path(lock_folder_of(""))
    place.rmdir()
    place.touch()
    dsn = databases.ready()
    words = f"{place} is a file; expected a folder, in which workers of databases on servers keep their lock files"
    expect_refusal(limpet("crawl", "http://127.0.0.1:9/", "--db", dsn), words, "remove what is there, or name another place with TMPDIR")
    with reading(dsn) as store:
        assert store.db.rows_text("SELECT COUNT(*) FROM worker") == [(0,)]


# -- streams that are closed --------------------------------------------------------------------

THINGS = """
from limpet import Http, Spider, Tx, call, record
spider = Spider("any")
@record(key="n")
class Thing:
    n: int
@spider.task(key="n")
async def one(n: int, *, http: Http, tx: Tx) -> None:
    tx.emit(Thing(n=n))
@spider.start
async def begin(start):
    yield call(one, n=1)
"""


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (("config",), ">&-", 0),
        (("status", "--db", "x.db"), ">&- 2>&-", 0),
        (("run", "any.py", "--db", "x.db"), "<&- >&- 2>&-", 6),
        (("run", "any.py", "--db", "x.db", "--workers", "2"), "<&- >&- 2>&-", 6),
        (("export", "thing", "--db", "x.db"), ">&-", 2),
    ],
)
def test_standard_streams_may_be_closed(limpet: Limpet, words: tuple[str, ...], closed: str, code: int) -> None:
    """By a service manager of old, say: what is printed goes nowhere, and never into a file that got the number; data is not lost so."""
    assert limpet("run", written(THINGS), "--db", "x.db").code == 0
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "limpet", *words]
    ended = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended
    if code == 2:
        assert "standard output is closed" in ended.stderr
    assert limpet("verify", "--full", "--db", "x.db").code == 0
