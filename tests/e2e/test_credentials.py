"""A key of a provider is in no log and in no row, whatever a run does with it; and the work is the same for all that."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from limpet.cli.arguments import parser
from limpet.cli.schedule import command_of
from tests.e2e.conftest import Limpet
from tests.e2e.sites import Reply, Served, moved, serving

SECRET = "Zq7s3cretZq7"

SPIDER = """
from limpet import Call, Skip, Spider, call

paid = Spider("paid", user_agent="paid/1 (+http://127.0.0.1/bot)")
paid.every("day", at="00:30", tz="UTC")


@paid.task(key="n", cost=1)
async def one(n: int, *, http, tx):
    key = paid.params["key"]
    if n == 3:
        await http.get("http://127.0.0.1:1/", params={"n": n, "api_key": key})
    if n == 4:
        raise RuntimeError(f"no answer of http://h.test/?token={key}, sent with {{'X-Api-Key': '{key}'}}")
    if n == 5:
        raise Skip(f"not at http://h.test/?token={key}")
    reply = await http.get(paid.params["api"], params={"n": n, "api_key": key}, headers={"Authorization": "Bearer " + key})
    if n == 2:
        reply.json()["x"]


@paid.start
async def asked(start):
    for n in range(7):
        yield call(one, n=n)
"""


def answer(address: str, path: str, asked: int) -> Reply:
    """500, a refusal, a redirect that repeats the query, or what was asked for."""
    query = parse_qs(urlsplit(path).query)
    assert query["api_key"] == [SECRET]
    if query["n"] == ["6"] and path.startswith("/?"):
        return moved("/next" + path[1:])
    return {"0": Reply(status=500), "1": Reply(status=403)}.get(query["n"][0], Reply("{}"))


@pytest.fixture
def site() -> Iterator[Served]:
    """The provider."""
    with serving(answer) as served:
        yield served


@pytest.fixture
def words(tmp_path: Path, site: Served) -> list[str]:
    """What every command is given."""
    (tmp_path / "paid.py").write_text(SPIDER, encoding="utf-8")
    return ["--db", "paid.db", "--param", f"api={site.url('/')}", "--param", f"key={SECRET}", "--strikes", "2", "--backoff", "0.01"]


def places_of(database: Path, text: str) -> set[str]:
    """table.column of each value that holds a text, and what lies in the file beyond any row."""
    with sqlite3.connect(database) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(table, row[1]) for table in tables for row in db.execute(f'PRAGMA table_info("{table}")')]
        sql = """SELECT count(*) FROM "{0}" WHERE instr(CAST("{1}" AS TEXT), ?)"""
        return {f"{table}.{column}" for table, column in columns if db.execute(sql.format(table, column), (text,)).fetchone()[0]}


def test_no_log_and_no_row_of_a_run_holds_a_key(limpet: Limpet, words: list[str], tmp_path: Path) -> None:
    """Failures of each kind, an answer that is kept, a schedule that misses slots, and everything that tells of them."""
    said = [
        limpet("run", "paid.py", *words, "--slot", "2026-11-29", "--log-level", "debug"),
        limpet("schedule", "paid.py", *words, "--quiet", "--at", "2026-12-02T01:00:00Z", "--log-level", "debug", "--log-format", "json"),
        limpet("dead", "--db", "paid.db", "--slot", "2026-11-29", "--detail"),
        limpet("dead", "--db", "paid.db", "--slot", "2026-11-29", "--json"),
        limpet("status", "--db", "paid.db", "--slot", "2026-11-29"),
        limpet("run", "paid.py", *words, "--slot", "2026-11-29", "--debug"),
    ]
    assert [ended.code for ended in said] == [3, 3, 0, 0, 0, 6]
    assert "limpet backfill paid.py --from 2026-11-30 --to 2026-12-01" in said[1].out
    assert "n=1&api_key=***" in said[2].out
    for ended in said:
        assert SECRET not in ended.out + ended.err
    assert limpet("verify", "--db", "paid.db", "--slot", "2026-11-29", "--full").code == 0
    assert places_of(tmp_path / "paid.db", "api_key=***") >= {"attempt.detail", "kept.url"}
    assert not places_of(tmp_path / "paid.db", SECRET)


def test_the_same_run_with_the_same_key_is_the_same_and_another_key_is_another_source(
    limpet: Limpet, words: list[str], tmp_path: Path
) -> None:
    """The row of a start does not hold its parameters; its digest knows them."""
    for key, sources in ((SECRET, 1), (SECRET, 1), ("another", 2)):
        limpet("run", "paid.py", *words, "--param", f"key={key}", "--slot", "a", "--budget", "0")
        with sqlite3.connect(tmp_path / "paid.db") as db:
            assert db.execute('SELECT count(*), min(payload LIKE \'%"key":"***"%\') FROM source').fetchone() == (sources, 1)


def test_a_process_that_works_for_another_shows_no_key_to_ps(words: list[str]) -> None:
    """The run of a daemon; workers of a crew are in the tests of the crew."""
    args = parser().parse_args(["schedule", "paid.py", *words])
    assert SECRET not in " ".join(command_of(args, datetime.now(UTC)))


def test_workers_are_told_the_key_all_the_same(words: list[str], tmp_path: Path, site: Served) -> None:
    """By the environment: they ask with it, and say nothing of it."""
    command = [sys.executable, "-m", "limpet", "run", "paid.py", *words, "--workers", "2", "--log-level", "info"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 3, ended.stderr
    assert site.requests >= 5
    assert SECRET not in ended.stdout + ended.stderr
    assert not places_of(tmp_path / "paid.db", SECRET)
