"""What each try is billed: what was sent and no more, whatever becomes of the try, its handler or its answers."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from limpet.batch import CREDIT
from tests.collecting.collector import Collector
from tests.collecting.conftest import New, on_sqlite
from tests.collecting.provider import Provider
from tests.collecting.scenes import counted, looked, written

pytestmark = on_sqlite

ASKING = """
import asyncio
from collections.abc import AsyncIterator
from limpet import Call, DeadTask, Http, Retry, Skip, Spider, Start, Tariff, Tx, call

asking = Spider("asking")
TARIFF = Tariff(charged=("2xx",), refunded=("4xx", "5xx"), credits_header="X-Credits-Charged", idempotency_header="Idempotency-Key")


@asking.task(key="number", cost=1, tariff=TARIFF)
async def ask(number: int, *, http: Http, tx: Tx) -> None:
    api, asked = asking.params["api"], {"keyword": number, "day": "d"}
    BODY


@asking.start
async def numbers(start: Start) -> AsyncIterator[Call]:
    for number in range(int(start.params["numbers"])):
        yield call(ask, number=number)
"""


def asking(
    collector: New, provider: Provider, folder: Path, body: str, *, number: int, more: str = "", flags: tuple[str, ...] = ()
) -> Collector:
    """A spider of paid calls whose handler does as `body` says."""
    spider = written(folder, "asking", ASKING.replace("BODY", body) + more)
    lasting = ("--lease", "60")  # nobody has to wait for a lease here, and a try that is lost with one is billed as unknown
    return collector(spider, *lasting, "--param", f"api={provider.url}/serp", "--param", f"numbers={number}", *flags)


def charges(db: str) -> dict[str, int]:
    """How many tries were billed in each way."""
    rows = looked(db, lambda opened: opened.rows_text("SELECT state, COUNT(*) FROM charge GROUP BY state"))
    return {str(state): int(str(number)) for state, number in rows}


def stop_when(life_of: Collector, condition: str) -> None:
    """Start a run, and stop it by Ctrl-C as soon as a number in the database is no longer zero."""
    life = life_of.start()
    while life.poll() is None and not counted(life_of.db, condition):
        pass
    life.send_signal(signal.SIGINT)
    assert life.wait(60) == 4


def test_a_call_that_only_waits_for_its_provider_has_sent_nothing(collector: New, provider: Provider, tmp_path: Path) -> None:
    """One answer of 429 pauses the provider: whoever waits for that is not billed, and is not unknown either."""
    provider.busy, provider.failing = True, 0
    waiting = asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=40, flags=("--per-host", "2"))
    stop_when(waiting, "SELECT COUNT(*) FROM attempt WHERE outcome = 'released'")
    found = charges(waiting.db)
    assert found.get("unknown", 0) == 0
    assert found["refunded"] == 1
    assert found["void"] > 1
    assert found.get("charged", 0) * 1000 == provider.charged


def test_what_was_paid_is_billed_though_the_try_is_cut_off_in_its_last_words(collector: New, provider: Provider, tmp_path: Path) -> None:
    """The answer is kept, so the next try asks for nothing: it must be on the bill of this one."""
    provider.failing = 0
    more = """

@asking.dead
async def given_up(task: DeadTask, tx: Tx) -> None:
    await asyncio.Event().wait()
"""
    failing = asking(collector, provider, tmp_path, "raise KeyError((await http.get(api, params=asked)).status)", number=4, more=more)
    stop_when(failing, "SELECT CASE WHEN COUNT(*) = 4 THEN 1 ELSE 0 END FROM kept")
    assert charges(failing.db) == {"charged": 4}
    assert provider.charged == 4000


@pytest.mark.parametrize("said", ["-5", "1e30", "1e999999", "5000000000000", "NaN", "much"])
def test_a_header_that_is_no_number_of_credits_counts_as_what_a_call_costs(
    collector: New, provider: Provider, tmp_path: Path, said: str
) -> None:
    """No budget is passed, nothing is lost, and nothing overflows."""
    provider.says_credits, provider.failing = said, 0
    flags = ("--budget", "3")
    paying = asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=5, flags=flags)
    assert paying.run() == 5
    assert paying.costs("outcome") == {("charged",): 3 * CREDIT}
    assert provider.charged == 3000
    paying.limpet("verify", "--full")


def test_a_handler_that_wants_another_answer_gets_one_and_each_is_billed(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Under one idempotency key the provider would give the same answer again, and charge it once."""
    provider.failing = 0
    body = 'await http.get(api, params=asked)\n    raise Retry("not yet")'
    again = asking(collector, provider, tmp_path, body, number=3, flags=("--strikes", "3"))
    assert again.run() == 3
    assert provider.charged == 9000
    assert all(len(keys) == 3 for keys in provider.sent_keys.values())
    assert again.costs("outcome") == {("charged",): 9 * CREDIT}


def test_a_request_that_its_handler_left_under_way_is_billed_and_not_kept(collector: New, provider: Provider, tmp_path: Path) -> None:
    """An answer that was kept for a task that is done would stand in the books for ever."""
    provider.failing = 0
    body = """both = [asyncio.create_task(http.get(api, params={**asked, "page": page})) for page in (1, 2)]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)"""
    leaving = asking(collector, provider, tmp_path, body, number=20)
    assert leaving.run() == 0
    assert provider.charged == 40_000
    assert counted(leaving.db, "SELECT SUM(requests) FROM charge") == 40
    assert counted(leaving.db, "SELECT COUNT(*) FROM kept") == 0
    leaving.limpet("verify", "--full")


def test_a_skipped_call_is_parsed_again_for_nothing(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Its answer was paid for."""
    provider.failing = 0
    skipping = asking(collector, provider, tmp_path, 'await http.get(api, params=asked)\n    raise Skip("nothing of use")', number=3)
    assert skipping.run() == 0
    asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=3)
    skipping.limpet("retry", "--state", "skipped")
    assert skipping.run() == 0
    assert (provider.charged, provider.requests) == (3000, 3)
    assert counted(skipping.db, "SELECT SUM(done) FROM ledger") == 3
    skipping.limpet("verify", "--full")


def test_what_a_killed_worker_held_is_drawn_anew_under_the_budget_of_the_next(
    collector: New, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a budget leaves large allowances behind; the next one has a budget."""
    provider.failing = 0
    paying = asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=400)
    with monkeypatch.context() as patch:
        patch.setenv("LIMPET_FAILPOINT", "before_send@30=kill")
        assert paying.run("--concurrency", "4") == -9
    assert counted(paying.db, "SELECT SUM(allowance) FROM escrow") > 400 * CREDIT
    assert paying.run("--budget", "60") == 5
    assert sum(paying.costs("outcome").values()) == 60 * CREDIT
    assert provider.charged <= 60_000
    paying.limpet("verify", "--full")


def test_what_a_sealed_job_cost_stays_known(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Its tries are gone, its sum is not."""
    provider.failing = 0
    flags = ("--slot", "a")
    paying = asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=3, flags=flags)
    assert paying.run() == 0
    later = asking(collector, provider, tmp_path, "await http.get(api, params=asked)", number=1, flags=("--slot", "b"))
    assert later.run() == 0
    paying.limpet("gc", "--slots-older", "0d")
    assert counted(paying.db, "SELECT COUNT(*) FROM sealed") >= 1
    assert paying.costs("outcome") == {("charged",): 4 * CREDIT}
