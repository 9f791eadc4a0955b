"""Collecting twice costs once: keyed tasks on a paid API, under kills, with several workers, on each database."""

from __future__ import annotations

from pathlib import Path

import pytest

from limpet.batch import CREDIT
from tests.collecting import scenes
from tests.collecting.collector import table
from tests.collecting.conftest import New, on_mysql, on_postgres, on_sqlite
from tests.collecting.provider import Provider, providing
from tests.collecting.scenes import SLOTS, Kills


@pytest.fixture
def stage(collector: New, provider: Provider, tmp_path: Path) -> scenes.Stage:
    """The database of the test and our own provider."""
    return scenes.Stage(collector, tmp_path, provider)


def test_every_call_is_charged_once_by_four_workers_that_are_killed(stage: scenes.Stage, provider: Provider) -> None:
    """Every try of a task sends the same idempotency key."""
    scenes.paid(stage, 40, Kills(3, (6, 12), at_least=4))
    assert len(provider.sent_keys) == 80
    assert all(len(keys) == 1 for keys in provider.sent_keys.values())


@on_sqlite
def test_without_idempotency_keys_each_second_charge_is_one_that_the_ledger_lists_as_unknown(
    stage: scenes.Stage, provider: Provider
) -> None:
    """Requests are slow, so that a kill finds some under way."""
    provider.latency_s = 0.02
    assert scenes.unkeyed(stage, 40, Kills(3, (8, 14), at_least=4))["charged twice"]


@on_postgres
def test_a_handler_that_raises_is_mended_and_its_answers_are_parsed_again_for_nothing(stage: scenes.Stage) -> None:
    """A hundred answers that were paid for are kept."""
    assert scenes.raising(stage, 100) == {"answers kept": 100, "requests after the mending": 0, "meter": 100}


def test_a_slot_that_several_processes_trigger_at_once_is_one_job(stage: scenes.Stage) -> None:
    """Whoever comes second finds it running, joins, or finds it done."""
    assert scenes.triggered(stage, 12, processes=4, times=2)["meter"] == 24


@pytest.mark.parametrize("databases", ["mysql", "sqlite"], indirect=True)
def test_a_budget_is_never_overspent_and_what_is_left_goes_on_with_more(stage: scenes.Stage) -> None:
    """37 of 120, with four workers that are killed; then exactly 23 more."""
    assert scenes.budget(stage, 120, Kills(2, (8, 14), at_least=1), (37, 60))["kills"]


@on_sqlite
def test_tasks_that_failed_are_all_that_a_backfill_sends(stage: scenes.Stage) -> None:
    """Thirty of sixty."""
    assert scenes.forced(stage, 60, 30)["requests of the backfill"] == 30


@on_mysql
def test_a_header_says_what_a_call_cost_and_seeds_of_other_spellings_are_one_task(
    collector: New, provider: Provider, tmp_path: Path
) -> None:
    """The map collector: 39.90419 and 39.904190 are one point; the credits of the header are those of the ledger."""
    points = [["tea", f"{39 + n / 7:.5f}", "116.4"] for n in range(12)]
    points += [["tea", f"{lat}0", "116.40000"] for _, lat, _ in points[:3]]
    listed = table(tmp_path / "points.csv", ["keyword", "lat", "lng"], points, encoding="utf-8-sig")
    mapped = collector("maps", "--slot", SLOTS[0], "--param", f"api={provider.url}/places", "--lease", "60")
    told = mapped.limpet("seed", str(mapped.spider), "--from", str(listed), "--slot", SLOTS[0])
    assert "12 new tasks" in told
    assert "0 new" in mapped.limpet("seed", str(mapped.spider), "--from", str(listed), "--slot", SLOTS[0])
    assert mapped.run() == 0
    assert len(provider.charges) == 12
    assert mapped.costs("outcome")[("charged",)] * 1000 == provider.charged * CREDIT
    mapped.limpet("verify", "--full")


@on_sqlite
def test_what_is_given_up_is_in_a_dataset_of_its_own(collector: New, provider: Provider) -> None:
    """The handler for final failures writes with the dead state; a task that is put back and done takes that away again."""
    detailed = collector("detail", "--slot", SLOTS[0], "--param", f"api={provider.url}", "--lease", "60")
    provider.broken = {'feature?{"id": "f3"}', 'feature?{"id": "f7"}'}
    assert detailed.run("--strikes", "2") == 3
    assert len(detailed.export("detail")) == 38
    gone = detailed.export("given_up")
    assert sorted(str(row["task"]).partition('"feature_id":')[2] for row in gone) == ['"f3"}', '"f7"}']
    assert {row["reason"] for row in gone} == {"status 500"}
    detailed.limpet("verify", "--full")
    provider.broken = set()
    detailed.limpet("retry")
    assert detailed.run() == 0
    assert len(detailed.export("detail")) == 40
    assert detailed.export("given_up") == []
    assert provider.charged == 20_000
    detailed.limpet("verify", "--full")


def test_the_twin_without_kept_answers_pays_again(tmp_path: Path) -> None:
    """The provider itself charges a call each time it is asked without a key: what the tests above measure can be seen."""
    with providing(failing=0) as provider:
        for _ in range(2):
            provider.answer("serp", {"keyword": "a", "day": "b"}, None)
        assert provider.charged_twice == {'serp?{"day": "b", "keyword": "a"}': 1}
        for _ in range(2):
            provider.answer("serp", {"keyword": "c", "day": "b"}, "key")
        assert len(provider.charged_twice) == 1


@on_sqlite
def test_a_key_that_is_another_one_each_time_is_warned_of(stage: scenes.Stage, tmp_path: Path) -> None:
    """A uuid in the key: nothing would ever be known again."""
    spider = scenes.variant(
        tmp_path, "fleeting.py", ("import csv\n", "import csv\nimport uuid\n"), ('keyword=row["keyword"]', "keyword=str(uuid.uuid4())")
    )
    tracked = scenes.serp(stage, SLOTS[0], 2, spider)
    assert tracked.run() == 0
    assert "looks like a UUID" in tracked.log()
