"""Collecting twice costs once: keyed tasks on a paid API, under kills, with several workers, on each database."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from limpet.batch import CREDIT
from tests.collecting.collector import EXAMPLES, Collector, table
from tests.collecting.conftest import New
from tests.collecting.provider import Provider, providing

SLOTS = ("2026-11-29", "2026-11-30")


def serp(collector: New, provider: Provider, slot: str, keywords: Path, spider: str | Path = "serp") -> Collector:
    """The rank tracker of one slot."""
    return collector(spider, "--slot", slot, "--param", f"api={provider.url}/serp", "--param", f"keywords={keywords}")


def keywords(folder: Path, number: int) -> Path:
    """A CSV of so many keywords."""
    return table(folder / "keywords.csv", ["keyword"], [[f"keyword {n}"] for n in range(number)])


def variant(folder: Path, name: str, *changes: tuple[str, str]) -> Path:
    """The rank tracker with other lines."""
    text = (EXAMPLES / "serp.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    place = folder / name
    place.write_text(text, encoding="utf-8")
    return place


def test_every_call_is_charged_once_by_four_workers_that_are_killed(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Two slots: the provider's meter says one credit a call and nothing twice; ours agrees once the unknown ones are settled."""
    listed = keywords(tmp_path, 40)
    hits = 0
    for slot in SLOTS:
        hit, _ = serp(collector, provider, slot, listed).together(
            lambda: provider.requests, workers=4, kills=3, every=(6, 12), seed=int(slot[-2:])
        )
        hits += hit
    assert hits >= 4
    assert provider.charged_twice == {}
    assert provider.charged == 2 * 40 * 1000
    for slot in SLOTS:
        done = serp(collector, provider, slot, listed)
        rows = done.export("result", "--slot", slot)
        assert len(rows) == len({(row["keyword"], row["url"]) for row in rows}) == 400
        asked = provider.requests
        assert done.run() == 6
        assert provider.requests == asked
        done.limpet("cost", "settle", "--idempotent", "--slot", slot, "--json", ok=(0, 6))
        done.limpet("verify", "--full", "--slot", slot)
    sums = done.costs("outcome")
    assert sums[("charged",)] == 80 * CREDIT
    assert sums.get(("unknown",), 0) == 0
    assert all(len(keys) == 1 for call, keys in provider.sent_keys.items())


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_without_idempotency_keys_each_second_charge_is_one_that_the_ledger_lists_as_unknown(
    collector: New, provider: Provider, tmp_path: Path
) -> None:
    """And the provider's bill settles them: what it charged is what we say that it charged."""
    spider = variant(tmp_path, "plain.py", ('idempotency_header="Idempotency-Key"', 'idempotency_header=""'))
    provider.latency_s = 0.02  # so that a kill finds requests under way
    tracked = serp(collector, provider, SLOTS[0], keywords(tmp_path, 60), spider)
    hits, _ = tracked.together(lambda: provider.requests, workers=4, kills=4, every=(8, 14))
    assert hits >= 3
    second = sum(provider.charged_twice.values())
    assert second > 0  # else this shows nothing
    assert sum(charge == 1000 for charge in provider.charges.values()) + len(provider.charged_twice) == 60
    assert tracked.costs("outcome")[("unknown",)] >= second * CREDIT
    calls = {call: re.search(r'"keyword": "([^"]*)"', call) for call in provider.charges}
    bill = table(
        tmp_path / "bill.csv", ["keyword", "day", "credits"],
        [[found[1], SLOTS[0], provider.charges[call] / 1000] for call, found in calls.items() if found],
    )  # fmt: skip
    tracked.limpet("cost", "settle", "--from", str(bill), "--file", str(spider), "--json")
    sums = tracked.costs("outcome")
    assert sums[("charged",)] * 1000 == provider.charged * CREDIT
    assert sums.get(("unknown",), 0) == 0
    tracked.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["postgres"], indirect=True)
def test_a_handler_that_raises_is_mended_and_its_answers_are_parsed_again_for_nothing(
    collector: New, provider: Provider, tmp_path: Path
) -> None:
    """A hundred answers that were paid for are kept."""
    broken = variant(tmp_path, "tracker.py", ('reply.json()["results"]', 'reply.json()["rankings"]'))
    tracked = serp(collector, provider, SLOTS[0], keywords(tmp_path, 100), broken)
    assert tracked.run("--breaker", "1000") == 3
    assert provider.charged == 100_000
    assert len(tracked.limpet("dead", "--json", "--limit", "0").splitlines()) == 100
    tracked.limpet("retry", "--reason", "handler:KeyError")
    variant(tmp_path, "tracker.py")
    asked = provider.requests
    assert tracked.run() == 0
    assert (provider.requests, provider.charged) == (asked, 100_000)
    assert len(tracked.export("result")) == 1000
    tracked.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["mysql", "sqlite"], indirect=True)
def test_a_budget_is_never_overspent_and_what_is_left_goes_on_with_more(collector: New, provider: Provider, tmp_path: Path) -> None:
    """37 of 120, with four workers that are killed; then exactly 23 more."""
    tracked = serp(collector, provider, SLOTS[0], keywords(tmp_path, 120))
    hits, codes = tracked.together(lambda: provider.requests, workers=4, kills=2, every=(8, 14), more=("--budget", "37"))
    assert hits >= 1
    assert set(codes) == {5}
    first = provider.charged
    unknown = tracked.costs("outcome").get(("unknown",), 0)
    assert first <= 37_000
    assert sum(tracked.costs("outcome").values()) == 37 * CREDIT
    assert tracked.run("--budget", "60") == 5
    assert sum(tracked.costs("outcome").values()) == 60 * CREDIT
    assert provider.charged - first <= 23_000
    assert provider.charged <= 60_000
    if not unknown:
        assert (first, provider.charged) == (37_000, 60_000)
    assert tracked.run("--budget", "inf") == 0
    assert len(tracked.export("result")) == 1200
    tracked.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_tasks_that_failed_are_all_that_a_backfill_sends(collector: New, provider: Provider, tmp_path: Path) -> None:
    """Thirty are forced to fail; the API is mended; exactly those thirty calls are made."""
    listed = keywords(tmp_path, 60)
    tracked = serp(collector, provider, SLOTS[0], listed)
    provider.broken = {f'serp?{{"day": "{SLOTS[0]}", "keyword": "keyword {n}"}}' for n in range(30)}
    assert tracked.run("--strikes", "2") == 3
    provider.broken = set()
    asked, before = provider.requests, provider.charged
    tracked.limpet(
        "backfill", str(tracked.spider), "--from", SLOTS[0], "--to", SLOTS[0], *tracked.arguments[2:], "--quiet", "--backoff", "0.05"
    )
    assert (provider.requests - asked, provider.charged - before) == (30, 30_000)
    assert provider.charged == 60_000
    assert len(tracked.export("result")) == 600
    tracked.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["mysql"], indirect=True)
def test_a_header_says_what_a_call_cost_and_seeds_of_other_spellings_are_one_task(
    collector: New, provider: Provider, tmp_path: Path
) -> None:
    """The map collector: 39.90419 and 39.904190 are one point; the credits of the header are those of the ledger."""
    points = [["tea", f"{39 + n / 7:.5f}", "116.4"] for n in range(12)]
    points += [["tea", f"{lat}0", "116.40000"] for _, lat, _ in points[:3]]
    listed = table(tmp_path / "points.csv", ["keyword", "lat", "lng"], points, encoding="utf-8-sig")
    mapped = collector("maps", "--slot", SLOTS[0], "--param", f"api={provider.url}/places")
    told = mapped.limpet("seed", str(mapped.spider), "--from", str(listed), "--slot", SLOTS[0])
    assert "12 new tasks" in told
    assert "0 new" in mapped.limpet("seed", str(mapped.spider), "--from", str(listed), "--slot", SLOTS[0])
    assert mapped.run() == 0
    assert len(provider.charges) == 12
    assert mapped.costs("outcome")[("charged",)] * 1000 == provider.charged * CREDIT
    mapped.limpet("verify", "--full")


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_what_is_given_up_is_in_a_dataset_of_its_own(collector: New, provider: Provider) -> None:
    """The handler for final failures writes with the dead state; a task that is put back and done takes that away again."""
    detailed = collector("detail", "--slot", SLOTS[0], "--param", f"api={provider.url}")
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


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True)
def test_a_key_that_is_another_one_each_time_is_warned_of(collector: New, provider: Provider, tmp_path: Path) -> None:
    """A uuid in the key: nothing would ever be known again."""
    spider = variant(
        tmp_path, "fleeting.py", ("import csv\n", "import csv\nimport uuid\n"), ('keyword=row["keyword"]', "keyword=str(uuid.uuid4())")
    )
    tracked = serp(collector, provider, SLOTS[0], keywords(tmp_path, 2), spider)
    assert tracked.run() == 0
    assert "looks like a UUID" in tracked.log()
