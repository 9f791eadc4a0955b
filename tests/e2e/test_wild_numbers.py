"""Numbers that a handler may give and no database can hold: waits without end, priorities, prices, statuses. None of them stops a job."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limpet import Blocked, Call, FetchError, Request, Retry, Spider, UsageError
from limpet.batch import Claim
from limpet.engine.calls import COST_MAX, micro
from limpet.engine.handle import ending_of
from limpet.engine.keyed import reason_of, status_of
from limpet.engine.links import Linker
from limpet.engine.paying import budget_micro
from limpet.engine.sources import SourceReader, source_of_generator
from limpet.errors import HostPaused
from limpet.policy import AFTER_MAX_S, backoff_s, failed, throttle_wait_s, throttled
from limpet.scope import Scope
from limpet.settings import Settings
from limpet.store.jobs import SourceRow
from limpet.task import ShardId, TaskId, TaskKey
from tests.e2e.sites import GONE, Reply, page, serving
from tests.e2e.test_outages import until

#: What a database holds in a column of whole numbers.
INT_MAX = 2**63 - 1

WILD: list[Any] = [1e18, 1e300, float("inf"), 10**400, -1e18, -(10**400), float("-inf"), float("nan"), "soon", True, None, 2**64]

SPIDER = """
from limpet import Page, Retry, Spider, Tx

wild = Spider("wild")


@wild.page()
def never(page: Page, tx: Tx) -> None:
    raise Retry("in some aeons", after_s=1e18)
"""

PAGES = 8  # more than a job bears of rows that the database refuses


def claim(**changes: int) -> Claim:
    """A claimed page."""
    counts = {"tries": 1, "strikes": 0, "lost": 0, "throttled": 0, "host": 1, "priority": 0, "depth": 0, "hops": 0, **changes}
    return Claim(
        shard=ShardId(0), id=TaskId(1), key=TaskKey(b"k" * 16), text="http://e.test/", url="http://e.test/", handler="", payload="",
        chain=b"", **counts,
    )  # fmt: skip


def test_pages_that_wait_for_ever_are_put_off_and_stop_nothing(tmp_path: Path) -> None:
    """Each has its strike and a due time that is some days ahead; the job goes on, and stops when it is asked to."""
    (tmp_path / "wild.py").write_text(SPIDER, encoding="utf-8")

    def answer(host: str, path: str, times: int) -> Reply:
        return GONE if path == "/robots.txt" else page()

    def failures() -> int:
        if not (tmp_path / "wild.db").exists():
            return 0
        with sqlite3.connect(f"file:{tmp_path}/wild.db?mode=ro", uri=True) as rows:
            if not rows.execute("SELECT 1 FROM sqlite_master WHERE name = 'attempt'").fetchone():
                return 0
            return int(rows.execute("SELECT COUNT(*) FROM attempt WHERE outcome = 'failed'").fetchone()[0])

    environment = {name: value for name, value in os.environ.items() if not name.startswith("LIMPET_")}
    with serving(answer, hosts=PAGES) as site:
        starts = [word for host in range(PAGES) for word in ("--start", site.url("/", host))]
        command = [sys.executable, "-m", "limpet", "run", "wild.py", *starts, "--lease", "60"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
            until(lambda: failures() == PAGES or running.poll() is not None, "every page to be put off")
            running.send_signal(signal.SIGTERM)
            said, _ = running.communicate()
    assert running.returncode == 4, said
    with sqlite3.connect(tmp_path / "wild.db") as rows:
        assert rows.execute("SELECT reason, COUNT(*) FROM attempt WHERE reason <> '' GROUP BY 1").fetchall() == [("in some aeons", PAGES)]
        now_ms, due_ms = rows.execute("SELECT MAX(at_ms), MAX(due_ms) FROM attempt, task").fetchone()
    assert 0 < due_ms - now_ms <= AFTER_MAX_S * 1000


@pytest.mark.parametrize("after_s", WILD, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("error", [
    lambda after_s: Retry(after_s=after_s),
    lambda after_s: Blocked(after_s=after_s),
    lambda after_s: FetchError("busy", kind="status", retry_after_s=after_s),
])  # fmt: skip
def test_whatever_a_handler_gives_as_a_wait_is_one_that_ends(error: Callable[[Any], BaseException], after_s: Any) -> None:
    """Negative is at once, beyond all measure is the longest one, and what is no number leaves it to the engine."""
    settings = Settings()
    ending = ending_of(error(after_s))
    waits = [
        failed(claim(), "x", settings, 0.5, after_s=ending.after_s).due_in_ms / 1000,
        throttled(claim(), "x", settings, 0, 0.5, after_s=ending.after_s).due_in_ms / 1000,
        throttle_wait_s(1, settings, 0.5, ending.after_s),
    ]
    most = [AFTER_MAX_S, settings.retry_after_max_s, settings.retry_after_max_s]
    assert all(0 <= wait_s <= bound for wait_s, bound in zip(waits, most, strict=True))
    if after_s in (1e18, 1e300, float("inf"), 10**400, 2**64) and after_s is not True:
        assert waits == most


def test_a_wait_that_makes_sense_is_kept() -> None:
    """The twin: a minute, and two days."""
    assert [failed(claim(), "x", Settings(), 0.5, after_s=wait_s).due_in_ms for wait_s in (60, 172_800)] == [60_000, 172_800_000]


def test_a_back_off_ends_after_any_number_of_failures() -> None:
    """Where somebody allows thousands of strikes or throttles."""
    settings = Settings(strikes=10**6, throttles=10**6)
    assert backoff_s(10**5, settings, 0.5) == settings.backoff_max_s
    assert throttle_wait_s(10**5, settings, 0.0) == settings.backoff_max_s


@pytest.mark.parametrize(("status", "kept"), [(503, 503), (10**30, 0), (-1, 0), (None, 0), ("503", 0), (True, 0)])
def test_a_status_and_a_kind_that_a_handler_made_up_are_ones_that_a_row_can_hold(status: Any, kept: int) -> None:
    """A keyed call notes both."""
    error = FetchError("x", kind="no\0such\nkind " * 100, status=status)
    ending = ending_of(error)
    assert status_of(error) == kept
    assert "\0" not in reason_of(ending)
    assert "\n" not in reason_of(ending)
    assert len(reason_of(ending)) <= 200


def test_a_pause_that_a_handler_made_up_ends() -> None:
    """It is the engine's own word for a provider that waits, and anybody's to raise."""
    assert failed(claim(), "x", Settings(), 0.5, after_s=ending_of(HostPaused("h", after_s=1e300, reason="")).after_s).due_in_ms <= INT_MAX


@pytest.mark.parametrize("priority", [10**30, -(10**30), 1.5, True])
@pytest.mark.parametrize("kind", ["request", "call"])
def test_a_start_whose_priority_is_none_is_named(kind: str, priority: Any) -> None:
    """It would be a place in the queue that no column can hold; a link's priority is checked already."""
    spider = Spider("wild")

    @spider.task(key="n")
    async def one(n: int) -> None:
        """A call."""

    @spider.start
    async def starts() -> Any:
        yield Call("one", {"n": 1}, priority) if kind == "call" else Request("http://e.test/", priority=priority)

    with pytest.raises(UsageError, match="priority"):
        asyncio.run(first_of(spider))


@pytest.mark.parametrize("digits", [5000, 1001])
def test_a_start_whose_argument_has_thousands_of_digits_is_named(digits: int) -> None:
    """JSON would refuse it, or another reader of it."""
    spider = Spider("wild")

    @spider.task(key="n")
    async def one(n: int) -> None:
        """A call."""

    @spider.start
    async def starts() -> Any:
        yield Call("one", {"n": 10**digits})

    with pytest.raises(UsageError, match="digits"):
        asyncio.run(first_of(spider))


async def first_of(spider: Spider) -> object:
    """What a spider's first start gives first."""
    linker = Linker(spider.profile, Scope.of("host", []), shards=1)
    reader = SourceReader(linker, [], spider, "")
    given = source_of_generator(spider.generators[0], reader.start)
    reader.refresh([SourceRow(1, given.kind, given.digest, given.place, given.host, given.payload, 0, closed=False)])
    return await reader.generate()


def test_no_price_is_beyond_what_a_purse_can_hold() -> None:
    """A handler's cost is refused with its name, and a budget beyond all money is the most there is."""
    with pytest.raises(UsageError, match="cost"):
        micro(1e18, "serp()")
    assert micro(COST_MAX, "serp()") <= INT_MAX
    assert budget_micro(1e300) is not None
    assert (budget_micro(1e300) or 0) <= INT_MAX
    assert budget_micro(float("inf")) is None
