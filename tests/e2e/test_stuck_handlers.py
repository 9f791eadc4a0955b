"""Handlers that are not async and never return: the run stops and says why, asks for nothing more, and is over after enough starts."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.sites import GONE, Reply, Served, page, serving

#: Pages whose handler hangs, each on a host of its own, and pages that are well. Of four tries each, the hung ones take more threads
#: than one process may lose.
HUNG, WELL = 12, 3

#: Threads that one process may lose.
STUCK_MAX = 32

SPIDER = """
import time

from limpet import DeadTask, Page, Spider, Tx, record

stuck = Spider("stuck", user_agent="stuckbot/1 (+https://example.com/bot)")


@record(key="url")
class Lost:
    url: str


@stuck.page("/hang/{_}")
def hangs(page: Page, tx: Tx) -> None:
    time.sleep(1e6)


@stuck.page("/well/{_}")
def well(page: Page, tx: Tx) -> None:
    pass


@stuck.dead
def lost(task: DeadTask, tx: Tx) -> None:
    tx.emit(Lost(url=task.url))
"""

CALLS = """
import time

from limpet import Spider, Tx, call

stuck = Spider("stuck", user_agent="stuckbot/1 (+https://example.com/bot)")


@stuck.start
async def numbers():
    for number in range(12):
        yield call(hangs, number=number)


@stuck.task(key="number")
def hangs(number: int, tx: Tx) -> None:
    time.sleep(1e6)
"""

SETTINGS = {"HANDLER_TIMEOUT_S": "0.3", "BACKOFF_S": "0.01", "BACKOFF_MAX_S": "0.02", "OUTAGE_AFTER": "0", "LEASE_S": "60"}
PATIENCE = {"CONNECT_TIMEOUT_S": "120", "READ_TIMEOUT_S": "120", "TOTAL_TIMEOUT_S": "300"}

#: Seconds after which a run that does not end by itself is taken for one that never will.
HANG_S = 90


def answer(host: str, path: str, times: int) -> Reply:
    """What the site answers."""
    return GONE if path == "/robots.txt" else page()


@contextmanager
def serving_pages() -> Iterator[tuple[Served, list[str]]]:
    """The site, and the flags that name all of its pages."""
    with serving(answer, hosts=HUNG) as site:
        pages = [*(site.url("/hang/x", host) for host in range(HUNG)), *(site.url("/well/x", host) for host in range(WELL))]
        yield site, [word for url in pages for word in ("--start", url)]


def ran(folder: Path, *flags: str, spider: str = SPIDER) -> tuple[dict[str, Any], str]:
    """The report of one run in a process of its own, whose threads go with it; and what it said on stderr."""
    (folder / "stuck.py").write_text(spider, encoding="utf-8")
    words = [sys.executable, "-m", "limpet", "run", "stuck.py", "--json", *flags]
    settings = {f"LIMPET_{name}": value for name, value in {**SETTINGS, **PATIENCE}.items()}
    ended = subprocess.run(words, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, timeout=HANG_S, check=False)
    return json.loads(ended.stdout), ended.stderr


def tries(folder: Path) -> dict[str, int]:
    """How often each try ended as what, and for which reason."""
    with sqlite3.connect(folder / "stuck.db") as rows:  # after the run: nobody here has it open
        return dict(rows.execute("SELECT trim(outcome || ' ' || reason), COUNT(*) FROM attempt GROUP BY 1"))


def test_a_run_whose_handlers_all_hang_stops_and_says_why_and_is_over_after_another_start(tmp_path: Path) -> None:
    """Each start ends, and gets further: in the end the pages that hang are dead letters, each with its last words, and all others done."""
    with serving_pages() as (site, starts):
        first, said = ran(tmp_path, *starts)
        assert first["exit_code"] == 4
        assert f"{STUCK_MAX} handlers hang in threads" in first["message"]
        assert f"hangs ({STUCK_MAX})" in first["message"]
        assert "handlers hang in threads" in said
        struck = tries(tmp_path)["failed handler_timeout"] + tries(tmp_path).get("dead handler_timeout", 0)
        assert struck >= STUCK_MAX
        last, _ = ran(tmp_path, *starts)
        asked = sum(count for name, count in site.asked.items() if "/hang/" in name)
        given_back = sum(times for how, times in tries(tmp_path).items() if how.startswith("released"))
    assert (last["exit_code"], last["done"], last["dead"], last["verified"]) == (3, WELL, HUNG, True)
    assert last["records"] == {"stuck_lost": HUNG}
    assert 4 * HUNG <= asked <= 4 * HUNG + given_back


def test_a_crew_starts_another_process_in_the_place_of_one_whose_threads_all_hang(tmp_path: Path) -> None:
    """One command comes to the end of the job."""
    with serving_pages() as (_, starts):
        report, said = ran(tmp_path, *starts, "--workers", "1")
    assert (report["exit_code"], report["done"], report["dead"], report["verified"]) == (3, WELL, HUNG, True)
    assert "ended with exit code 4: another one takes its place" in said


def test_calls_that_hang_stop_the_run_as_pages_do(tmp_path: Path) -> None:
    """Keyed tasks have the same threads."""
    first, _ = ran(tmp_path, spider=CALLS)
    assert (first["exit_code"], f"{STUCK_MAX} handlers hang in threads" in first["message"]) == (4, True)
    last, _ = ran(tmp_path, spider=CALLS)
    assert (last["exit_code"], last["dead"], last["verified"]) == (3, HUNG, True)


def test_threads_that_are_free_again_stop_nothing(tmp_path: Path) -> None:
    """The twin: what is over its time and returns after all costs its own page alone, however often."""
    slow = SPIDER.replace("time.sleep(1e6)", "while True:\n        pass")  # ended at its next instruction
    with serving_pages() as (_, starts):
        report, _ = ran(tmp_path, *starts, spider=slow)
    assert (report["exit_code"], report["done"], report["dead"]) == (3, WELL, HUNG)
    assert "released handlers hang" not in tries(tmp_path)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("LIMPET_")]:
        monkeypatch.delenv(name)
