"""`limpet new` and `limpet demo`: what a newcomer meets first runs as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.site import running
from tests.e2e.conftest import Limpet


def test_a_new_spider_and_its_test_run_as_they_are(limpet: Limpet, tmp_path: Path) -> None:
    """The test passes, `try` shows a record, and the run collects every product of the host."""
    with running(Shop(products=30, hosts=1)) as site:
        start = site.shop.starts()[0]
        made = limpet("new", "lamps", "--start", start, "--json")
        assert made.json["files"] == ["lamps.py", "test_lamps.py"]
        tested = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_lamps.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert tested.returncode == 0, tested.stdout
        assert "3 passed" in tested.stdout
        assert limpet("try", "lamps.py", site.shop.url(3)).code == 0
        ended = limpet("run", "lamps.py")
        assert ended.code == 0, ended
        rows = [json.loads(line) for line in limpet("export", "product").lines]
        assert {row["url"] for row in rows} == {site.shop.url(number) for number in range(30)}


def test_without_a_start_the_spider_reads_the_demo_shop(limpet: Limpet, tmp_path: Path) -> None:
    """Its first line, its commands and its start are what the message says."""
    ended = limpet("new", "lamps")
    assert "limpet.demo.site serve --port 8800" in ended.out
    text = (tmp_path / "lamps.py").read_text(encoding="utf-8")
    assert 'start=["http://127.0.0.1:8800/"]' in text
    assert text.startswith('"""lamps: ')
    compile(text, "lamps.py", "exec")


def test_what_is_written_keeps_the_style_of_the_project(limpet: Limpet, tmp_path: Path) -> None:
    """ruff has nothing to say about it: a user's own checks pass from the first day."""
    limpet("new", "lamps")
    for command in (
        ["ruff", "check", "--select", "E,F,W,I,UP,B", "--line-length", "130"],
        ["ruff", "format", "--line-length", "130", "--check"],
    ):
        checked = subprocess.run([sys.executable, "-m", *command, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_demo_kills_its_crawl_and_has_every_product_once(limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed twice in the middle; the data is the shop's truth, verify is clean, no terminal is needed.

    The shop is slow, and the kills fall early: whoever kills may come late, and the crawl is not over yet.
    """
    monkeypatch.setattr("limpet.cli.demo.LATENCY_MS", 150)
    monkeypatch.setattr("limpet.cli.demo.KILLED_WITHIN", 0.3)
    ended = limpet("demo", "--products", "150", "--kills", "2", "--db", tmp_path / "d.db", "--json")
    assert ended.code == 0, ended
    told = ended.json
    assert told["perfect"] is True
    assert (told["kills"], told["missing"], told["double"], told["wrong"], told["extra"], told["breaches"]) == (2, 0, 0, 0, 0, 0)
    assert told["collected"] == told["expected"] > 100
    assert limpet("verify", "--full").code == 0
    assert limpet("status", "--json").json["jobs"][0]["state"] == "complete and verified"
