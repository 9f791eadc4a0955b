"""Processes that a command starts find the modules that the command itself finds: a file of the user's hides none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from limpet.cli.arguments import parser
from limpet.cli.crew import crew_of
from limpet.cli.schedule import command_of
from limpet.settings import Settings
from tests.e2e.sites import Served, page, serving

#: `limpet` as its script calls it: the folder that it is called in is not on the path.
LIMPET = (sys.executable, "-Pc", "import sys; from limpet.cli import main; sys.exit(main())")

SPIDER = """
from limpet import Spider
from names import NAME

spider = Spider(NAME, start=["START"], user_agent="named/1 (+http://127.0.0.1/bot)", lease_s=60)


@spider.page()
def one(page, tx): ...
"""


@pytest.fixture
def site() -> Iterator[Served]:
    """A site of one page."""
    with serving(lambda address, path, asked: page()) as served:
        yield served


@pytest.mark.parametrize("name", ["calendar", "attr"])
def test_workers_of_a_spider_that_is_named_like_a_module_do_its_work(tmp_path: Path, site: Served, name: str) -> None:
    """calendar.py is no calendar to them, and what lies beside it is found."""
    (tmp_path / f"{name}.py").write_text(SPIDER.replace("START", site.url("/")), encoding="utf-8")
    (tmp_path / "names.py").write_text(f'NAME = "{name}"\n', encoding="utf-8")
    command = [*LIMPET, "run", f"{name}.py", "--db", "x.db", "--workers", "2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    assert "ImportError" not in ended.stderr
    assert json.loads(ended.stdout)["done"] == 1


def test_every_command_of_a_child_keeps_the_folder_of_the_call_off_the_path() -> None:
    """Those of workers and of a schedule: `-P`, where this process has not been begun by `python -m limpet`."""
    run = parser().parse_args(["run", "calendar.py", "--workers", "2"])
    due = parser().parse_args(["schedule", "calendar.py", "--daemon"])
    for command in (crew_of(run, Settings(), "x.db").command, command_of(due, datetime.now(UTC))):
        assert list(command[:3]) == [sys.executable, "-Pm", "limpet"]


def test_who_calls_python_m_limpet_has_the_same_path_in_its_workers(tmp_path: Path, site: Served) -> None:
    """Then the folder of the call is on the path, and a spider that lies elsewhere takes modules from there."""
    (tmp_path / "spiders").mkdir()
    (tmp_path / "spiders" / "named.py").write_text(SPIDER.replace("START", site.url("/")), encoding="utf-8")
    (tmp_path / "names.py").write_text('NAME = "named"\n', encoding="utf-8")
    command = [sys.executable, "-m", "limpet", "run", "spiders/named.py", "--db", "x.db", "--workers", "2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended
    assert json.loads(ended.stdout)["done"] == 1
