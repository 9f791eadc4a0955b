"""`limpet diff` and `limpet export --after`: what changed from slot to slot, and what is new since an export."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Ended, Limpet
from tests.e2e.daily import Daily, daily
from tests.servers.kinds import Databases

COUNTS = {"new": 1, "gone": 1, "changed": 2, "same": 1}


@pytest.fixture
def prices(databases: Databases, tmp_path: Path) -> Iterator[Daily]:
    """A spider of five products, with a database of its own."""
    with daily(tmp_path, db=databases.ready()) as made:
        yield made


@pytest.fixture
def two_days(limpet: Limpet, prices: Daily) -> Daily:
    """Two slots: product 0 is gone, 4 is new, 1 and 3 cost more on the second day."""
    prices.missing = {4}
    assert limpet("run", prices.file, "--db", prices.db, "--slot", "2026-11-29").code == 0
    prices.missing = {0}
    prices.price = lambda number: 100 + number + 5 * (number in (1, 3))
    assert limpet("run", prices.file, "--db", prices.db, "--slot", "2026-11-30").code == 0
    return prices


def diff(limpet: Limpet, prices: Daily, *more: object) -> Ended:
    """The command, from the first day to the second."""
    ended = limpet("diff", "price", "--slot", "2026-11-29", "--slot", "2026-11-30", "--db", prices.db, *more)
    assert ended.code == 0, ended
    return ended


def test_a_diff_is_told_in_lines_objects_and_cells(limpet: Limpet, two_days: Daily) -> None:
    """The same changes in every form, in key order; the numbers on stderr."""
    text = diff(limpet, two_days)
    assert sorted(text.lines) == ["+ sku=4  price: 104", "- sku=0  price: 100", "~ sku=1  price: 101 -> 106", "~ sku=3  price: 103 -> 108"]
    assert "1 new, 1 gone, 2 changed, 1 same" in text.err
    found = [json.loads(line) for line in diff(limpet, two_days, "--format", "jsonl").lines]
    assert [one["key"]["sku"] for one in found] == [line.split()[1].removeprefix("sku=") for line in text.lines]
    by_sku = {one["key"]["sku"]: one for one in found}
    assert by_sku["4"] == {"change": "new", "key": {"sku": "4"}, "new": {"sku": "4", "price": 104}}
    assert by_sku["0"] == {"change": "gone", "key": {"sku": "0"}, "old": {"sku": "0", "price": 100}}
    assert by_sku["1"]["fields"] == {"price": {"old": 101, "new": 106}}
    cells = list(csv.DictReader(io.StringIO(diff(limpet, two_days, "--format", "csv").out)))
    assert [cell for cell in cells if cell["sku"] in "13"] == [
        {"change": "changed", "sku": sku, "field": "price", "old": f"10{sku}", "new": str(105 + int(sku))}
        for sku in [one["key"]["sku"] for one in found if one["change"] == "changed"]
    ]
    assert {(cell["change"], cell["sku"], cell["old"], cell["new"]) for cell in cells} >= {
        ("new", "4", "", "104"),
        ("gone", "0", "100", ""),
    }


def test_numbers_come_as_json_and_rows_into_a_file(limpet: Limpet, two_days: Daily, tmp_path: Path) -> None:
    """`--json` alone gives the numbers; with a file its rows are there, whole."""
    numbers = {"v": 1, "dataset": "price", "slots": ["2026-11-29", "2026-11-30"], **COUNTS}
    assert diff(limpet, two_days, "--json").json == numbers
    ended = diff(limpet, two_days, "--json", "--format", "jsonl", "-o", tmp_path / "d.jsonl")
    assert ended.json == numbers
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 4
    assert len(diff(limpet, two_days, "--json", "--format", "jsonl").lines) == 4
    assert diff(limpet, two_days, "--json", "--fields", "sku").json | {"changed": 0, "same": 3} == {**numbers, "changed": 0, "same": 3}
    assert diff(limpet, two_days, "--json", "--fields", "sku").json["changed"] == 0


def test_what_cannot_be_compared_is_refused(limpet: Limpet, two_days: Daily) -> None:
    """One slot, three, an unknown dataset, slot or field."""
    for words, expected in [
        (["price", "--slot", "2026-11-29"], "give --slot twice"),
        (["price", *["--slot", "2026-11-29"] * 3], "give --slot twice"),
        (["nothing", "--slot", "2026-11-29", "--slot", "2026-11-30"], "no dataset 'nothing'"),
        (["price", "--slot", "2026-11-29", "--slot", "2026-12-01"], "no job of slot '2026-12-01'"),
        (["price", "--slot", "2026-11-29", "--slot", "2026-11-30", "--fields", "size"], "no lasting field 'size'"),
    ]:
        ended = limpet("diff", *words, "--db", two_days.db)
        assert ended.code == 2
        assert expected in ended.err


# -- export --after -----------------------------------------------------------------------------


def rows_of(ended: Ended) -> dict[tuple[str, str], int]:
    """(slot, sku) -> price, of what was exported."""
    assert ended.code == 0, ended
    found = [json.loads(line) for line in ended.lines]
    return {(row.get("slot", ""), row["sku"]): row["price"] for row in found}


def cursor_of(ended: Ended) -> str:
    """The cursor that an export printed beside its rows."""
    (line,) = [line for line in ended.err.splitlines() if line.startswith("cursor: ")]
    return line.removeprefix("cursor: ")


def test_an_export_and_one_after_it_are_together_the_whole(limpet: Limpet, prices: Daily, tmp_path: Path) -> None:
    """A crawl goes on between them; a slot more is new as well; each export prints its cursor."""
    export = ["export", "price", "--db", prices.db, "--all-slots"]
    flags = ["--db", prices.db, "--slot", "2026-11-29"]
    assert limpet("run", prices.file, *flags, "--max-pages", "3").code == 5
    first = limpet(*export)
    rows = rows_of(first)
    assert 0 < len(rows) < 5
    assert limpet("run", prices.file, *flags).code == 0
    then = limpet(*export, "--after", cursor_of(first))
    assert not rows_of(then).keys() & rows.keys()
    rows |= rows_of(then)
    assert limpet("run", prices.file, "--db", prices.db, "--slot", "2026-11-30").code == 0
    (tmp_path / "cursor").write_text(cursor_of(then) + "\n")
    ended = limpet(*export, "--after", "@cursor", "--json", "-o", "new.jsonl")
    assert (ended.code, ended.json["rows"]) == (0, 5)
    rows |= rows_of(Ended(0, Path("new.jsonl").read_text(), ""))
    assert rows == rows_of(limpet(*export))
    assert rows_of(limpet(*export, "--after", ended.json["cursor"])) == {}


def test_a_cursor_that_is_garbled_or_of_other_rows_is_refused(limpet: Limpet, two_days: Daily) -> None:
    """Exit 2, saying which of the two."""
    export = ["export", "price", "--db", two_days.db]
    cursor = cursor_of(limpet(*export, "--slot", "2026-11-29"))
    for words, expected in [
        (["--slot", "2026-11-29", "--after", cursor[:-3]], "is no cursor"),
        (["--slot", "2026-11-29", "--after", "12"], "is no cursor"),
        (["--slot", "2026-11-30", "--after", cursor], "of other rows"),
        (["--all-slots", "--after", cursor], "of other rows"),
        (["--slot", "2026-11-29", "--after", "@nowhere"], "nowhere: No such file"),
    ]:
        ended = limpet(*export, *words)
        assert ended.code == 2
        assert expected in ended.err
        assert ended.out == ""
