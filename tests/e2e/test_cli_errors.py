"""Whatever a user can get wrong ends in a message and an exit code, never in a traceback, and changes nothing."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from limpet.cli.exits import READER_GONE, Exit, code_of
from limpet.errors import (
    FetchError,
    InvariantBroken,
    LimpetError,
    OutcomeUnknown,
    OwnershipLost,
    RecordError,
    RightMissing,
    SchemaNewer,
    StoreBusy,
    StoreCorrupt,
    StoreUnavailable,
    UrlRejected,
    UsageError,
    WentBack,
)
from limpet.store import open_store
from tests.e2e.conftest import Ended, Limpet

SPIDER = 'from limpet import Spider\nspider = Spider("good", start=["http://127.0.0.1:9/"])\n@spider.page()\ndef p(page, tx): ...\n'


def expect_refusal(ended: Ended, code: int, *words: str) -> None:
    """A wrong call: its code, one message that says the words, nothing on stdout, no traceback."""
    assert ended.code == code, ended
    assert "Traceback" not in ended.err
    assert ended.out == ""
    for word in words:
        assert word in ended.err


CALLS: list[tuple[list[str], str]] = [
    ([], "usage: limpet"),
    (["crwal", "http://a.test/"], "invalid choice: 'crwal'"),
    (["status", "--frobnicate"], "limpet status: unrecognized arguments: --frobnicate\n(`limpet status --help` says more)"),
    (["run", "good.py", "stray"], "limpet run: unrecognized arguments: stray"),
    (["--frobnicate"], "limpet: unrecognized arguments: --frobnicate"),
    (["run"], "required: FILE"),
    (["run", "good.py", "--concurrency", "many"], "'many' is no value of concurrency"),
    (["run", "good.py", "--concurrency", "0"], "concurrency is 0; expected 1 to"),
    (["run", "good.py", "--delay", "nan"], "delay_s is nan"),
    (["run", "good.py", "--delay", "-3"], "delay_s is -3"),
    (["run", "good.py", "--lease", "0"], "lease_s is 0"),
    (["run", "good.py", "--solo-backoff", "5,x"], "'5,x' is no value of solo_backoff_s"),
    (["run", "good.py", "--solo-backoff", "5,-1"], "solo_backoff_s is -1"),
    (["run", "good.py", "--shards", "5000"], "shards is 5000"),
    (["run", "good.py", "--slot", "a\nb"], "no text"),
    (["run", "good.py", "--slot", "\udcff"], "no text"),
    (["run", "good.py", "--param", "x"], "expected NAME=VALUE"),
    (["run", "good.py", "--param", "a b=1"], "expected NAME=VALUE"),
    (["run", "good.py", "--start", "not a url"], "not a url"),
    (["run", "good.py", "--start", "ftp://a.test/"], "only http and https"),
    (["run", "good.py", "--from", "missing.txt"], "missing.txt"),
    (["run", "good.py", "--spider", "other"], "holds no spider 'other'"),
    (["run", "missing.py"], "there is no such file"),
    (["run", "."], "is a folder"),
    (["run", "syntax.py"], "syntax.py:1"),
    (["run", "raises.py"], "raises.py:2: ZeroDivisionError"),
    (["run", "exits.py"], "ends the process while it is loaded"),
    (["run", "imports.py"], "No module named 'nowhere_at_all'"),
    (["run", "empty.py"], "holds no Spider"),
    (["run", "two.py"], "holds several spiders"),
    (["run", "handlerless.py"], "has no handler"),
    (["run", "keyless.py"], "key"),
    (["run", "bytes.py"], "bytes.py"),
    (["run", "good.py", "--db", "no/such/folder/x.db"], "does not exist"),
    (["run", "good.py", "--db", "."], "is a folder"),
    (["run", "good.py", "--db", "text.db"], "no SQLite database"),
    (["run", "good.py", "--db", "foreign.db"], "none of Limpet's"),
    (["run", "good.py", "--db", "oracle://me:secret@db/x"], "'oracle://me:***@db/x': expected"),
    (["run", "good.py", "--db", "sqlite://x.db"], "sqlite:///"),
    (["run", "good.py", "--config", "missing.toml"], "missing.toml: cannot be read"),
    (["run", "good.py", "--config", "broken.toml"], "is no TOML"),
    (["run", "good.py", "--config", "unknown.toml"], "did you mean 'concurrency'?"),
    (["run", "good.py", "--config", "typed.toml"], "robots is 'yes'; expected true or false"),
    (["run", "good.py", "--config", "range.toml"], "strikes is 0"),
    (["run", "good.py", "--config", "table.toml"], "did you mean 'limpet'?"),
    (["crawl", "example.com"], "write https://example.com"),
    (["crawl", "http://"], "no valid host"),
    (["crawl", "http://127.0.0.1:9/", "--scope", "world"], "invalid choice: 'world'"),
    (["try", "good.py"], "required: URL"),
    (["try", "good.py", "mailto:a@b.c"], "only http and https"),
    (["status"], "no job database is here"),
    (["status", "--db", "missing.db"], "no database at"),
    (["dead", "--db", "empty.db"], "holds no job yet"),
    (["status", "--db", "empty.db", "--slot", "x"], "holds no job yet"),
    (["verify", "--db", "missing.db"], "no database at"),
    (["export", "product", "--db", "missing.db"], "no database at"),
    (["dead", "--db", "text.db"], "no SQLite database"),
    (["retry", "--db", "missing.db"], "no database at"),
    (["backup", "copy.db", "--db", "missing.db"], "no database at"),
    (["doctor", "--db", "missing.db"], "no database at"),
    (["migrate", "--db", "missing.db"], "no database at"),
    (["explain"], "expected a URL"),
    (["explain", "http://a.test/", "--profile", "strict"], "'strict' is unknown"),
    (["explain", "http://a.test/", "--option", "frob=on"], "'frob' is unknown"),
    (["explain", "http://a.test/", "--option", "strip_www=perhaps"], "expected on or off"),
    (["new", "Shop"], "cannot name a spider"),
    (["new", "class"], "Python's own"),
    (["new", "json"], "Python's own"),
    (["new", "good"], "is there already"),
    (["new", "fine", "--folder", "nowhere"], "is no folder"),
    (["new", "fine", "--start", "nonsense"], "nonsense"),
    (["demo", "--kills", "-1"], "expected a whole number"),
    (["demo", "--db", "text.db"], "is there already"),
    (["repair", "3-4"], "expected SHARD:N"),
    (["config", "missing.py"], "there is no such file"),
]

FILES = {
    "good.py": SPIDER,
    "syntax.py": "def (:\n",
    "raises.py": "import limpet\n1 / 0\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "imports.py": "import nowhere_at_all\n",
    "empty.py": "",
    "two.py": SPIDER + SPIDER.replace("spider", "other").replace("good", "bad"),
    "handlerless.py": 'from limpet import Spider\nspider = Spider("bare")\n',
    "keyless.py": "from limpet import record\n@record\nclass A:\n    x: int\n",
    "bytes.py": "\ufeff\x00",
    "text.db": "just some text, longer than a header\n",
    "empty.db": "",
    "broken.toml": "[limpet\n",
    "unknown.toml": "[limpet]\nconcurency = 3\n",
    "typed.toml": '[limpet]\nrobots = "yes"\n',
    "range.toml": "[spider.good]\nstrikes = 0\n",
    "table.toml": "[limped]\nstrikes = 4\n",
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and "-" not in file.suffix}


@pytest.mark.parametrize(("argv", "words"), CALLS, ids=[" ".join(argv)[:60] or "nothing" for argv, _ in CALLS])
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(limpet: Limpet, tmp_path: Path, argv: list[str], words: str) -> None:
    """Exit 2, the words that help, no traceback, and every file as it was."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    foreign = sqlite3.connect(tmp_path / "foreign.db")
    foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    if argv == ["status"]:
        (tmp_path / "empty.db").unlink()
    before = contents(tmp_path)
    expect_refusal(limpet(*argv), Exit.USAGE, words)
    after = contents(tmp_path)
    assert after.items() >= before.items()
    assert set(after) - set(before) <= {"good.db", "crawl.db"}


VARIABLES = [
    ("LIMPET_CONCURRENCY", "x", "LIMPET_CONCURRENCY: 'x' is no value"),
    ("LIMPET_CONCURRENCY", "0", "concurrency is 0"),
    ("LIMPET_CONCURENCY", "3", "did you mean LIMPET_CONCURRENCY?"),
    ("LIMPET_ROBOTS", "perhaps", "expected true or false"),
    ("LIMPET_DB", "text.db", "no SQLite database"),
]


@pytest.mark.parametrize(("name", "value", "words"), VARIABLES)
def test_a_wrong_variable_of_the_environment_is_named(
    limpet: Limpet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    """The environment is checked like flags, and a slip of the pen is not silently ignored."""
    (tmp_path / "good.py").write_text(SPIDER, encoding="utf-8")
    (tmp_path / "text.db").write_text("just some text, longer than a header\n", encoding="utf-8")
    monkeypatch.setenv(name, value)
    expect_refusal(limpet("run", "good.py"), Exit.USAGE, words)


def test_two_databases_in_the_folder_are_named_and_neither_is_taken(limpet: Limpet, tmp_path: Path) -> None:
    """The only job database of the folder is taken, and never one of several."""
    for name in ("a.db", "b.db"):
        open_store(str(tmp_path / name)).close()
    expect_refusal(limpet("status"), Exit.USAGE, "a.db, b.db", "--db")
    (tmp_path / "b.db").unlink()
    assert "a.db holds no job yet" in limpet("status").out


def test_status_of_a_crawl_that_is_just_starting_is_no_error(limpet: Limpet, tmp_path: Path) -> None:
    """The file is there before its tables, and those before the job: whoever looks again and again sees no error in between."""
    (tmp_path / "bare.db").touch()
    open_store(str(tmp_path / "tables.db")).close()
    for name in ("bare.db", "tables.db"):
        ended = limpet("status", "--db", name)
        assert (ended.code, ended.err) == (0, ""), ended
        assert f"{name} holds no job yet" in ended.out
        assert limpet("status", "--db", name, "--json").json["jobs"] == []


def test_the_url_of_every_command_is_explained(limpet: Limpet) -> None:
    """`--help` says what each argument is for."""
    for command in ("try", "shell", "explain"):
        assert re.search(r"^  URL +[a-z]", limpet(command, "--help").out, re.MULTILINE), command


def newer(path: Path) -> None:
    """A database of a release that is yet to come."""
    open_store(str(path)).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = '999' WHERE name = 'schema'")
    db.commit()
    db.close()


def torn(path: Path) -> None:
    """A database whose inner pages are no pages any more."""
    open_store(str(path)).close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [(newer, Exit.USAGE, "upgrade Limpet"), (torn, Exit.VERIFY_FAILED, "damaged")],
    ids=["newer", "torn"],
)
@pytest.mark.parametrize("command", ["status", "verify", "dead", "retry", "export product", "backup copy.db", "explain http://a.test/"])
def test_a_database_that_cannot_be_used_is_left_as_it_is(
    limpet: Limpet, tmp_path: Path, make: Callable[[Path], None], code: Exit, words: str, command: str
) -> None:
    """A newer schema and a damaged file are said in plain words, and not one byte of them changes."""
    path = tmp_path / "x.db"
    make(path)
    before = path.read_bytes()
    ended = limpet(*command.split(), "--db", path)
    assert ended.code == code, ended
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert path.read_bytes() == before
    assert not (tmp_path / "copy.db").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (UrlRejected("x", reason="host"), 2),
        (RecordError("x"), 2),
        (SchemaNewer("x"), 2),
        (RightMissing("x"), 2),
        (FileNotFoundError(2, "No such file", "x"), 2),
        (StoreBusy("x"), 4),
        (StoreUnavailable("x"), 4),
        (OutcomeUnknown("x"), 4),
        (OSError(28, "No space left on device"), 4),
        (KeyboardInterrupt(), 4),
        (FetchError("x", kind="dns"), 7),
        (StoreCorrupt("x"), 8),
        (InvariantBroken("x", invariant="I1"), 8),
        (OwnershipLost("x"), 9),
        (WentBack("x"), 9),
        (LimpetError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_each_error_has_the_exit_code_of_its_class(error: BaseException, code: int) -> None:
    """One table says what an error means, and it is the one of the docs."""
    assert code_of(error) == code


def test_an_error_is_an_object_with_json(limpet: Limpet) -> None:
    """Programs read the error as fields, people as a line on stderr."""
    ended = limpet("status", "--json")
    assert ended.json == {
        "v": 1,
        "error": {"kind": "UsageError", "message": ended.err.removeprefix("limpet: ").strip(), "exit_code": 2},
    }


def test_a_traceback_is_printed_only_where_it_is_asked_for(limpet: Limpet) -> None:
    """`--debug` shows where an error was raised."""
    assert "Traceback" in limpet("status", "--debug").err


def test_help_names_every_command_and_every_exit_code(limpet: Limpet) -> None:
    """`limpet --help` and the help of each command end well, and the groups are those of the docs."""
    ended = limpet("--help")
    assert ended.code == 0
    run, look = ["demo", "new", "crawl", "run", "try"], ["status", "verify", "dead", "export", "explain", "shell"]
    mend, operate = ["retry", "repair", "migrate", "backup"], ["pause", "resume", "doctor", "config"]
    for command in (*run, *look, *mend, *operate):
        assert f" {command} " in ended.out
        helped = limpet(command, "--help")
        assert helped.code == 0
        assert helped.out.startswith(f"usage: limpet {command}")
    for code in Exit:
        assert f"  {int(code)} " in ended.out


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`limpet ... | head` ends quietly, with the code that shells give to such an end."""
    lines = tmp_path / "urls.txt"
    lines.write_text("http://a.test/some/page\n" * 20_000, encoding="utf-8")
    script = f"{sys.executable} -m limpet explain --key < {lines} | head -n 1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (READER_GONE, "http://a.test/some/page\n", "")
