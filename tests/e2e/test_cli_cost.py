"""`limpet cost settle --from`: a bill that cannot be read is named with its row, and nothing is settled."""

from __future__ import annotations

from pathlib import Path

import pytest

from limpet.batch import Billed
from limpet.store import Store, bills
from tests.conftest import Hire, on_sqlite
from tests.e2e.conftest import Limpet
from tests.e2e.test_cli_status import call, draw, ended
from tests.store.hands import found_job

SPIDER = """
from limpet import Spider

shop = Spider("shop")


@shop.task(key="n", cost=1)
async def ask(n: int, *, http, tx):
    await http.get("http://127.0.0.1:1/")
"""


@on_sqlite
@pytest.mark.parametrize(
    ("heading", "row", "said"),
    [
        ("task,credits", "call://x,Infinity", "credits 'Infinity': expected at most 1,000,000,000"),
        ("task,credits", "call://x,-inf", "credits '-inf': expected at most"),
        ("task,credits", "call://x,1e99999", "credits '1e99999': expected at most"),
        ("task,credits", "call://x,1e999999999999999999", "expected a number"),
        ("task,credits", "call://x,1000000001", "expected at most"),
        ("task,credits", "call://x,NaN", "credits 'NaN': expected a number"),
        ("task,credits", "call://x,sNaN", "expected a number"),
        ("task,credits", "call://x,", "credits '': expected a number"),
        ("task,credits", ",1", "names no task"),
        ("task,credits", "call://x,999999999\ncall://x,2", "row at byte 32: this and the rows before it come to more than"),
        ("n,credits", "abc,1", "n is 'abc': expected int"),
    ],
)
def test_a_bill_that_is_wrong_is_named_with_its_row(
    limpet: Limpet, store: Store, hire: Hire, tmp_path: Path, heading: str, row: str, said: str
) -> None:
    """Exit 2, and the charge is as unknown as before."""
    w = hire(0)
    w.seed(call(0))
    (one,) = draw(w, 0)
    ended(w, one, Billed.UNKNOWN)
    bill, spider = tmp_path / "bill.csv", tmp_path / "shop.py"
    bill.write_text(f"{heading}\n{row}\n", encoding="utf-8")
    spider.write_text(SPIDER, encoding="utf-8")
    found = limpet("cost", "settle", "--db", store.dsn, "--from", bill, "--file", spider)
    assert (found.code, found.out) == (2, "")
    assert f"{bill}, row at byte {len(heading) + 1 if 'byte' not in said else ''}" in found.err
    assert said in found.err
    assert "fault in Limpet" not in found.err
    assert len(bills.unknown(store.db, found_job(store))) == 1
