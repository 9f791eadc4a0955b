"""The crash harness itself: it passes a crawler that keeps its place and names what is wrong with one that does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from tests.crash.torture import Ordeal, Report, compare, main, torture

#: A crawler of a few lines that collects the truth's pages in order; its file is all that it remembers. As `forgetful` it
#: notes its place before the record is written, as `doubtful`
#: only after every fifth record.
CRAWLER = """
import json, os, pathlib, sys, urllib.request
def note(place, number):
    pathlib.Path(place + ".new").write_text(str(number))
    os.replace(place + ".new", place)
truth, out, kind = sys.argv[1:]
place, out = out + ".place", open(out, "ab", buffering=0)
rows = [json.loads(line) for line in open(truth)]
start = int(open(place).read()) if os.path.exists(place) else 0
for number, row in enumerate(rows[start:], start):
    if kind == "forgetful":
        note(place, number + 2)
    urllib.request.urlopen(row["url"]).read()
    out.write(json.dumps(row).encode() + b"\\n")
    if kind == "doubtful" and number % 5 == 0:
        note(place, number + 1)
    if kind == "honest":
        note(place, number + 1)
"""

Row = dict[str, str | int]


@pytest.fixture
def site() -> Iterator[Site]:
    """A shop without faults, slow enough to hit a crawl of it."""
    with running(Shop(products=60, hosts=1), latency_s=0.03) as served:
        yield served


def ordeal(site: Site, folder: Path, kind: str, hits: int, every: tuple[int, int] = (4, 9), pause_s: float = 0.0) -> Ordeal:
    """The toy crawler of a kind, to be hit so often."""
    truth = folder / "truth.jsonl"
    truth.write_text("".join(json.dumps(row) + "\n" for row in site.shop.truth()))
    crawl = [sys.executable, "-c", CRAWLER, str(truth), str(folder / "out"), kind]
    export = [sys.executable, "-c", f"print(open({str(folder / 'out')!r}).read(), end='')"]
    stats_url = f"{site.shop.origin(0)}/_stats"
    return Ordeal(crawl=crawl, export=export, truth=[*site.shop.truth()], stats_url=stats_url, hits=hits, every=every, pause_s=pause_s)


def test_a_crawl_that_is_not_hit_is_perfect(site: Site, tmp_path: Path) -> None:
    """No hits, no difference, and the site's counts are in the report."""
    report = torture(ordeal(site, tmp_path, "doubtful", hits=0))
    assert report.is_perfect, report
    assert (report.hits, report.exits, report.site["requests"]) == (0, {0: 1}, 60)


def test_a_crawl_that_loses_its_place_is_named_with_what_is_missing(site: Site, tmp_path: Path) -> None:
    """A crawler that notes its place too early loses a page a kill."""
    report = torture(ordeal(site, tmp_path, "forgetful", hits=5))
    assert report.hits >= 1
    assert not report.is_perfect
    assert report.difference.missing
    assert not report.difference.wrong


def test_a_crawl_that_repeats_itself_is_named_with_what_is_double(site: Site, tmp_path: Path) -> None:
    """A crawler that notes its place too late has records twice, and asks for pages again."""
    report = torture(ordeal(site, tmp_path, "doubtful", hits=5))
    assert report.difference.double
    assert any("double" in failing for failing in report.failings)
    assert int(str(report.site["repeated"])) > 0


def test_a_crawl_that_is_frozen_goes_on_where_it_stood(site: Site, tmp_path: Path) -> None:
    """Freezing loses nothing, however early or late the place is noted."""
    report = torture(ordeal(site, tmp_path, "forgetful", hits=3, pause_s=0.05))
    assert report.hits >= 1
    assert report.difference.is_none, report


def test_a_crawl_that_is_over_too_soon_proves_nothing(site: Site, tmp_path: Path) -> None:
    """Fewer hits than asked for are a failing of their own, unless fewer were allowed."""
    report = torture(ordeal(site, tmp_path, "honest", hits=3, every=(40, 40)))
    assert report.hits < 3
    assert [failing for failing in report.failings if "over too soon" in failing]


def test_checks_between_two_lives_are_told_how_many_hits_there_were(site: Site, tmp_path: Path) -> None:
    """`after_hit` is called once a hit, in order."""
    told: list[int] = []
    trial = ordeal(site, tmp_path, "doubtful", hits=4)
    report = torture(replace(trial, after_hit=told.append))
    assert told == [*range(1, report.hits + 1)] != []


def test_a_crawler_that_fails_is_named_with_its_exit_code_and_its_last_words(site: Site, tmp_path: Path) -> None:
    """The exit code and the end of standard error are in the report, the export's too."""
    command = [sys.executable, "-c", "import sys; sys.exit('no crawler today')"]
    truth = [*site.shop.truth()]
    report: Report = torture(Ordeal(crawl=command, export=command, truth=truth, stats_url=f"{site.shop.origin(0)}/_stats"))
    assert report.exits == {1: 1}
    assert {*report.failings} >= {"exit codes [1], expected [0, 3, 6]", "the export ended with exit code 1"}
    assert "no crawler today" in report.errors


def test_a_crawl_that_hangs_is_ended_and_named(site: Site, tmp_path: Path) -> None:
    """After the patience is over nothing of the crawl is left running."""
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    trial = Ordeal(crawl=command, export=["true"], truth=[], stats_url=f"{site.shop.origin(0)}/_stats", patience_s=0.3)
    report = torture(trial)
    assert report.hung == 1
    assert not report.is_perfect


ROW: Row = {"outcome": "done", "url": "http://x/p/1", "sku": "A", "title": "t", "price": "1.00", "stock": 3}


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([], "missing"),
        ([ROW, ROW], "double"),
        ([ROW | {"stock": 4}], "wrong"),
        ([ROW, ROW | {"url": "http://x/p/2"}], "extra"),
    ],
)
def test_each_kind_of_difference_is_seen(rows: list[Mapping[str, object]], kind: str) -> None:
    """One record too few, too many, changed or foreign."""
    difference = compare([json.dumps(row).encode() for row in rows], [ROW, {"outcome": "gone", "url": "http://x/p/2"}])
    assert {name for name in ("missing", "double", "wrong", "extra") if getattr(difference, name)} == {kind}
    assert not difference.is_none


@pytest.mark.parametrize("line", [b'{"url": "http://x/p/1", "sku"', b"", b"[]", b'{"url": "http://x/p/1"}', b"\xff"])
def test_half_a_record_is_torn(line: bytes) -> None:
    """A line that is no record is counted, and never read as one."""
    difference = compare([json.dumps(ROW).encode(), line], [ROW])
    assert (difference.torn, difference.is_none) == (1, False)
    assert not difference.missing


def test_the_command_line_prints_a_report_and_its_verdict(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 and `perfect` for a crawl that kept its place."""
    trial = ordeal(site, tmp_path, "doubtful", hits=0)
    script = tmp_path / "toy.py"
    script.write_text(CRAWLER)
    crawl = f"{sys.executable} {script} {tmp_path / 'truth.jsonl'} {tmp_path / 'out'} honest"
    arguments = ["--crawl", crawl, "--export", f"cat {tmp_path / 'out'}", "--truth", str(tmp_path / "truth.jsonl")]
    assert main([*arguments, "--stats", trial.stats_url]) == 0
    assert json.loads(capsys.readouterr().out)["perfect"] is True
