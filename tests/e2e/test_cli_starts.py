"""Starts that come once, not at all, or in lines that are none: kept, refused, passed over, and said so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from limpet.engine.run import run
from limpet.engine.sources import LINE_BYTES_MAX
from limpet.engine.spider import Spider
from limpet.errors import UsageError
from tests.e2e.conftest import Limpet
from tests.e2e.sites import Served, page, serving

CRAWL = ("crawl", "--db", "x.db", "--delay", "0", "--max-depth", "0")


@pytest.fixture
def site() -> Iterator[Served]:
    """A site on which every path is a page."""
    with serving(lambda address, path, asked: page()) as served:
        yield served


def asked(site: Served) -> set[str]:
    """The paths that were fetched."""
    return {name.removeprefix("127.0.0.1") for name in site.asked} - {"/robots.txt"}


def in_a_shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash, in which `limpet` is this one."""
    words = f'limpet() {{ "{sys.executable}" -m limpet "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", words], cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("given", ["<(echo URL)", "/dev/stdin < starts.txt", "/dev/fd/7 7< starts.txt", "<(echo URL) --workers 2"])
def test_starts_that_are_gone_in_the_next_run_are_kept_as_a_file(tmp_path: Path, site: Served, given: str) -> None:
    """Read, fetched, and there again: the next run finds them done, and nothing has changed."""
    (tmp_path / "starts.txt").write_text(site.url("/a") + "\n", encoding="utf-8")
    workers = given.endswith("--workers 2")
    if workers:
        (tmp_path / "any.py").write_text(
            'from limpet import Spider\nspider = Spider("any", lease_s=60)\n@spider.page()\ndef one(page, tx): ...\n', encoding="utf-8"
        )
    command = f"limpet {'run any.py' if workers else 'crawl'} --db x.db --from {given.replace('URL', site.url('/a'))}"
    first = in_a_shell(tmp_path, command)
    assert first.returncode == 0, first
    assert "has changed" not in first.stderr
    assert asked(site) == {"/a"}
    (kept,) = tmp_path.glob("limpet-starts-*.txt")
    assert kept.read_text(encoding="utf-8") == site.url("/a") + "\n"
    again = in_a_shell(tmp_path, command)
    assert (again.returncode, "has changed" in again.stderr) == (6, False), again


def test_a_pipe_with_a_name_is_read_like_any_other(limpet: Limpet, site: Served, tmp_path: Path) -> None:
    """A fifo is copied once; a folder is no list of starts, and an empty device an empty one."""
    os.mkfifo("pipe")
    with subprocess.Popen(["bash", "-c", f"echo {site.url('/a')} > pipe"], cwd=tmp_path):
        assert limpet(*CRAWL, "--from", "pipe").code == 0
    assert asked(site) == {"/a"}
    refused = limpet(*CRAWL, "--from", tmp_path)
    assert (refused.code, "cannot read the starts" in refused.err) == (2, True), refused
    assert limpet("crawl", "--db", "y.db", "--from", os.devnull).code == 6


def test_python_is_told_that_a_pipe_is_no_file_of_starts(tmp_path: Path) -> None:
    """The engine keeps no file of its own: UsageError before anything is made."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="expected a file, which is read as the crawl goes on"):
        asyncio.run(run(Spider("any"), db=str(tmp_path / "x.db"), starts_from=str(tmp_path / "pipe"), handle_signals=False))
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("command", ["crawl --db x.db --from -", "explain --key", "shell http://127.0.0.1:9/"])
def test_a_closed_stdin_is_said_to_be_closed(tmp_path: Path, command: str) -> None:
    """Exit code 2, no fault of Limpet's, and nothing is made."""
    ended = in_a_shell(tmp_path, f"limpet {command} <&-")
    assert ended.returncode == 2, ended
    assert "standard input is closed: give a file, or let something be read from (< FILE)" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_line_that_is_too_long_is_no_start(limpet: Limpet, site: Served, tmp_path: Path) -> None:
    """It is passed over to its end, wherever that is, and said once with its line; the next line is read."""
    much = 3 * LINE_BYTES_MAX
    lines = ["x" * LINE_BYTES_MAX + site.url("/sneaky"), site.url("/a"), "y" * much + site.url("/far"), "#" + "z" * much + site.url("/c")]
    (tmp_path / "starts.txt").write_text("\n".join([*lines, site.url("/b")]) + "\n" + "w" * much, encoding="utf-8")
    ended = limpet(*CRAWL, "--from", "starts.txt")
    assert ended.code == 0, ended
    assert asked(site) == {"/a", "/b"}
    told = [line for line in ended.err.splitlines() if "has more than 65536 bytes" in line]
    assert [line.partition(", line ")[2].partition(":")[0] for line in told] == ["1", "3", "6"], ended.err
    assert len(max(told, key=len)) < 400


def test_a_line_of_the_longest_permitted_length_is_read_whole(limpet: Limpet, site: Served, tmp_path: Path) -> None:
    """With its end, and at the end of the file without one."""
    line = site.url("/a").ljust(LINE_BYTES_MAX)
    (tmp_path / "starts.txt").write_text(f"{line}\n{line.replace('/a', '/b')}", encoding="utf-8")
    assert limpet(*CRAWL, "--from", "starts.txt").code == 0
    assert asked(site) == {"/a", "/b"}
