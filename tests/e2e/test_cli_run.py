"""`limpet run` and `limpet crawl`: what they collect, what they end in, and that they go on where they were."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import limpet.demo.spider
from limpet.cli.demo import own_name
from limpet.cli.progress import line_of
from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from limpet.engine.report import Progress
from tests.e2e.conftest import Limpet
from tests.e2e.gate import gated

SPIDER = limpet.demo.spider.__file__
FIELDS = ("url", "sku", "title", "price", "stock")


def starts(site: Site) -> list[str]:
    """The flags that name the shop's start pages."""
    return [word for start in site.shop.starts() for word in ("--start", start)]


def truth(site: Site) -> dict[str, dict[str, str]]:
    """What the shop knows of its products."""
    return {str(row["url"]): {name: str(row[name]) for name in FIELDS} for row in site.shop.truth() if row["outcome"] == "done"}


def products(limpet: Limpet, *flags: object) -> dict[str, dict[str, str]]:
    """What was collected, each product once."""
    rows = [json.loads(line) for line in limpet("export", "product", *flags).lines]
    found = {row["url"]: {name: str(row[name]) for name in FIELDS} for row in rows}
    assert len(found) == len(rows)
    return found


def wait_for_requests(site: Site, child: subprocess.Popen[Any], number: int) -> None:
    """Wait until the shop was asked so often, or the child has ended."""
    while site.stats.requests < number:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.01)
            return


def test_a_run_collects_everything_once_and_the_next_has_nothing_to_do(limpet: Limpet, shop: Site) -> None:
    """Exit 0 with the shop's own truth, and then 6, without another request for a page."""
    ended = limpet("run", SPIDER, *starts(shop), "--json")
    assert ended.code == 0, ended
    assert (ended.json["v"], ended.json["job"], ended.json["verified"], ended.json["db"]) == (1, "shop", True, "shop.db")
    assert products(limpet) == truth(shop)
    before = shop.stats.requests
    again = limpet("run", SPIDER, *starts(shop))
    assert again.code == 6
    assert "finished and verified" in again.out
    assert shop.stats.requests == before


def test_a_spider_file_is_a_command_line_of_its_own(shop: Site, tmp_path: Path) -> None:
    """`python shop.py` is `limpet run shop.py`."""
    ended = subprocess.run(
        [sys.executable, SPIDER, *starts(shop), "--db", "x.db", "--lease", "60"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 0, ended
    assert "complete and verified" in ended.stdout
    assert ended.stderr == ""  # no bar, no log, in a pipe


def test_dead_letters_are_told_by_the_exit_code_and_tolerated_where_asked(limpet: Limpet) -> None:
    """3 with dead letters, 0 where --max-dead allows so many; the records are those of the pages that were given."""
    with running(Shop(products=60, hosts=1, faults="harsh", seed=5)) as site:
        dead = sum(row["outcome"] == "dead" for row in site.shop.truth())
        assert dead
        flags = [*starts(site), "--backoff", "0.01", "--strikes", "4"]
        assert limpet("run", SPIDER, *flags, "--db", "a.db").code == 3
        assert limpet("run", SPIDER, *flags, "--db", "b.db", "--max-dead", dead).code == 0
        assert products(limpet, "--db", "a.db") == products(limpet, "--db", "b.db") == truth(site)
        letters = limpet("dead", "--db", "a.db", "--json").lines
        assert len(letters) == dead
        assert {json.loads(line)["reason"] for line in letters} == {"status 500"}


def test_crawl_stores_every_page_of_a_host_once_without_any_code(limpet: Limpet, shop: Site) -> None:
    """The dataset `page` holds what an obedient crawl of one host meets, under canonical URLs."""
    assert limpet("crawl", shop.shop.starts()[0]).code == 0
    rows = {row["url"]: row for row in map(json.loads, limpet("export", "page").lines)}
    mine = {str(row["url"]) for row in shop.shop.truth() if shop.shop.host_of(int(str(row["url"]).rpartition("/")[2])) == 0}
    listings = {url for url in shop.shop.listing_urls() if url.startswith(shop.shop.origin(0))}
    assert set(rows) == mine | listings
    product = rows[shop.shop.url(0)]
    record = shop.shop.record(0)
    assert product["title"] == record["title"]
    assert product["canonical"] == product["url"]
    assert (product["status"], product["language"], product["content_type"]) == (200, "en", "text/html")
    assert str(record["price"]) in product["text"]
    assert product["words"] == len(product["text"].split())
    assert product["links_out"] > 6
    assert product["body"] is None
    assert not any("/staff/" in url for url in rows)


def test_crawl_keeps_bodies_where_asked_and_the_digest_does_not_depend_on_the_way(limpet: Limpet, shop: Site) -> None:
    """Two crawls that begin at other pages give one SHA-256; bodies come in base64."""
    first, second = shop.shop.starts()
    limpet("crawl", first, second, "--keep", "body", "--db", "a.db")
    limpet("crawl", second, first, f"{first}c/lamps?sort=name&page=1#x", "--keep", "body", "--db", "b.db")
    digests = [limpet("export", "page", "-o", "x.jsonl", "--db", db, "--json").json["sha256"] for db in ("a.db", "b.db")]
    assert digests[0] == digests[1]
    row = json.loads(Path("x.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["body"]


def test_a_page_limit_ends_a_crawl_with_5_and_a_larger_one_goes_on(limpet: Limpet, shop: Site) -> None:
    """The limit stops, and nothing is lost by it."""
    start = shop.shop.starts()[0]
    ended = limpet("crawl", start, "--max-pages", "10", "--json")
    assert ended.code == 5
    assert 0 < ended.json["done"] <= 10
    assert limpet("crawl", start).code == 0


def test_a_long_file_of_starts_is_read_while_its_pages_are_fetched(limpet: Limpet, tmp_path: Path) -> None:
    """20,000 lines: pages are done before the last of them is read, and nothing beyond the page limit is asked for."""
    with running(Shop(products=20_000, hosts=1)) as site:
        lines = "".join(f"{site.shop.url(number)}\n" for number in range(20_000))
        (tmp_path / "starts.txt").write_text(lines, encoding="utf-8")
        flags = ("--from", "starts.txt", "--max-depth", "0")
        ended = limpet("crawl", *flags, "--max-pages", "50", "--json")
        assert (ended.code, ended.json["done"]) == (5, 50)
        (source,) = limpet("status", "--json").json["jobs"][0]["sources"]
        db = sqlite3.connect("crawl.db")
        (first_done,) = db.execute("SELECT MIN(at_ms) FROM ledger WHERE done > 0").fetchone()
        (last_read,) = db.execute("SELECT MAX(at_ms) FROM ledger WHERE discovered > 0").fetchone()
        db.close()
        assert first_done <= last_read or source["position"] < len(lines)
        assert site.stats.requests < 100
        assert limpet("crawl", *flags, "--max-pages", "80", "--json").json["done"] == 80


@pytest.mark.parametrize(
    ("called", "shown"),
    [("limpet", "limpet"), ("bin/limpet", "bin/limpet"), ("/nowhere/else/limpet", "/nowhere/else/limpet"), ("/usr/bin/pytest", "limpet")],
)
def test_the_demo_names_commands_that_can_be_copied(called: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this folder on where the program lies below it, else by its whole path, and never by a way up and down again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called, "demo"])
    assert own_name() == shown


def test_depth_is_counted_from_the_start(limpet: Limpet, shop: Site) -> None:
    """Depth 0 is the start alone."""
    assert limpet("crawl", shop.shop.starts()[0], "--max-depth", "0").code == 0
    assert [json.loads(line)["url"] for line in limpet("export", "page").lines] == shop.shop.starts()[:1]


def test_prefix_follows_only_what_lies_below_the_start(limpet: Limpet, shop: Site) -> None:
    """`--scope prefix` stays in the folder."""
    assert limpet("crawl", f"{shop.shop.origin(0)}/c/lamps/?page=1&sort=name", "--scope", "prefix").code == 0
    assert {json.loads(line)["url"].partition("?")[0] for line in limpet("export", "page").lines} == {f"{shop.shop.origin(0)}/c/lamps"}


def test_starts_from_stdin_are_kept_beside_the_database_and_read_once(limpet: Limpet, shop: Site, tmp_path: Path) -> None:
    """The same stdin is the same source: it is one file, named after its content, and the second run has nothing to do."""
    lines = "".join(f"{start}\n" for start in shop.shop.starts())
    assert limpet("run", SPIDER, "--from", "-", "--db", "x.db", stdin=lines).code == 0
    assert products(limpet) == truth(shop)
    (spooled,) = tmp_path.glob("limpet-starts-*.txt")
    assert spooled.read_text(encoding="utf-8") == lines
    assert limpet("run", SPIDER, "--from", "-", "--db", "x.db", stdin=lines).code == 6
    assert [*tmp_path.glob("limpet-starts-*")] == [spooled]


def test_no_starts_at_all_are_nothing_to_do(limpet: Limpet) -> None:
    """A job without a single task is never complete."""
    for argv in (["crawl"], ["crawl", "--from", "-"], ["run", SPIDER]):
        ended = limpet(*argv, "--db", "x.db")
        assert ended.code == 6, argv
        assert "nothing to do" in ended.out


def test_settings_come_from_the_file_in_the_folder(limpet: Limpet, shop: Site, tmp_path: Path) -> None:
    """limpet.toml holds for the run itself, and a flag is stronger."""
    (tmp_path / "limpet.toml").write_text('[limpet]\ndb = "there.db"\n[spider.crawl]\nmax_depth = 0\n', encoding="utf-8")
    start = shop.shop.starts()[0]
    assert limpet("crawl", start).code == 0
    assert len(limpet("export", "page", "--db", "there.db").lines) == 1
    assert limpet("crawl", start, "--slot", "deeper", "--max-depth", "1").code == 0
    assert len(limpet("export", "page", "--slot", "deeper").lines) > 1


def test_params_reach_the_spider(limpet: Limpet, shop: Site, tmp_path: Path) -> None:
    """`--param` is what a handler reads from `spider.params`."""
    (tmp_path / "marks.py").write_text(
        "from limpet import Spider, record\n"
        'spider = Spider("marks")\n'
        '@record(key="url")\nclass Mark:\n    url: str\n    mark: str\n'
        "@spider.page()\ndef page(page, tx):\n    tx.emit(Mark(url=page.key_url, mark=spider.params['mark']))\n",
        encoding="utf-8",
    )
    start = shop.shop.starts()[0]
    assert limpet("run", "marks.py", "--start", start, "--param", "mark=a=b").code == 0
    assert json.loads(limpet("export", "mark").out) == {"url": start, "mark": "a=b"}


def test_try_prints_records_and_links_and_writes_nothing(limpet: Limpet, shop: Site, tmp_path: Path) -> None:
    """One handler, one page; no database is made."""
    url = shop.shop.url(4)
    ended = limpet("try", SPIDER, url, "--json")
    assert ended.code == 0
    tried = ended.json
    assert (tried["handler"], tried["outcome"], tried["key_url"]) == ("product", "done", url)
    assert [row["record"]["sku"] for row in tried["records"]] == ["LP-000004"]
    assert {link["handler"] for link in tried["links"]} == {"product", "listing"}
    assert "nothing was written" in limpet("try", SPIDER, url).out
    assert [*tmp_path.iterdir()] == []


def test_try_prints_the_calls_that_a_page_enqueues(limpet: Limpet, shop: Site, tmp_path: Path) -> None:
    """With their arguments as JSON has them, apart from its links."""
    (tmp_path / "priced.py").write_text(
        "from datetime import date\nfrom limpet import Spider, call\n"
        'spider = Spider("priced")\n'
        '@spider.task(key=("sku", "day"))\nasync def price(sku: str, day: date, http, tx):\n    pass\n'
        "@spider.page()\ndef page(page, tx):\n    tx.enqueue(call(price, sku=page.one('.sku'), day=date(2026, 11, 30)), priority=2)\n",
        encoding="utf-8",
    )
    ended = limpet("try", "priced.py", shop.shop.url(4), "--json")
    arguments = {"sku": "LP-000004", "day": "2026-11-30"}
    assert ended.json["calls"] == [{"handler": "price", "arguments": arguments, "priority": 2}]
    assert ended.json["links"] == []
    text = limpet("try", "priced.py", shop.shop.url(4)).out
    assert "1 call\n" in text
    assert '{"day":"2026-11-30","sku":"LP-000004"}' in text


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/c/none", 0, "skipped: gone"),
        ("/staff/lamps", 7, "robots.txt forbids it"),
        ("/old/4", 0, "product"),
        ("/", 0, "listing()"),
    ],
)
def test_try_says_what_a_crawl_would_make_of_a_page(limpet: Limpet, shop: Site, path: str, code: int, words: str) -> None:
    """What is gone, forbidden or redirected is said as such."""
    ended = limpet("try", SPIDER, f"{shop.shop.origin(0)}{path}")
    assert ended.code == code, ended
    assert words in ended.out + ended.err
    assert "Traceback" not in ended.err


def test_try_shows_the_traceback_of_a_handler_that_fails(limpet: Limpet, shop: Site) -> None:
    """3: in a crawl the page would be a dead letter; the line that failed is named."""
    ended = limpet("try", SPIDER, shop.shop.starts()[0], "--handler", "product")
    assert ended.code == 3
    assert "handler:Missing" in ended.out
    assert "matches nothing" in ended.err
    assert "has no handler 'other'" in limpet("try", SPIDER, shop.shop.starts()[0], "--handler", "other").err


def test_shell_runs_code_with_the_page(limpet: Limpet, shop: Site) -> None:
    """`page` is there as in a handler; code that raises gives its traceback, as a prompt would."""
    url = shop.shop.url(4)
    assert limpet("shell", url, "-c", 'page.one(".sku")').out == "'LP-000004'\n"
    assert limpet("shell", url, stdin='title = one("h1")\nprint(title)\n').out == f"{shop.shop.record(4)['title']}\n"
    assert limpet("shell", url, stdin=f'print(get("{shop.shop.url(2)}").one(".sku"))\n').out == "LP-000002\n"
    failed = limpet("shell", url, "-c", "1 / 0")
    assert failed.code == 1
    assert "ZeroDivisionError" in failed.err
    assert limpet("shell", "http://127.0.0.1:9/", "-c", "1").code == 7


def test_config_says_where_each_value_came_from(limpet: Limpet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flags, environment, file, spider and defaults, each with its name."""
    (tmp_path / "limpet.toml").write_text("[limpet]\nstrikes = 3\n", encoding="utf-8")
    monkeypatch.setenv("LIMPET_BREAKER", "9")
    ended = limpet("config", SPIDER, "--lease", "3", "--json")
    rows = ended.json["settings"]
    found = {name: (rows[name]["value"], rows[name]["from"]) for name in ("lease_s", "breaker", "strikes", "per_host", "robots")}
    assert found == {
        "lease_s": (3.0, "flag --lease"),
        "breaker": (9, "LIMPET_BREAKER"),
        "strikes": (3, "limpet.toml [limpet]"),
        "per_host": (8, "spider"),
        "robots": (True, "default"),
    }
    assert "flag --lease" in limpet("config", SPIDER, "--lease", "3").out


def test_a_killed_run_goes_on_where_it_was(limpet: Limpet, tmp_path: Path) -> None:
    """SIGKILL in the middle; the same command completes it, and the data is whole."""
    with gated(Shop(products=120, hosts=2), latency_s=0.02) as (site, gate):
        gate.shut_after(60)
        command = [sys.executable, "-m", "limpet", "run", SPIDER, *starts(site), "--db", "x.db"]
        child = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
        wait_for_requests(site, child, 61)
        os.killpg(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        gate.open()
        assert "stopped" in limpet("status").out
        assert limpet("run", SPIDER, *starts(site)).code == 0
        assert products(limpet) == truth(site)


def test_an_interrupted_run_stops_and_is_resumable(limpet: Limpet, tmp_path: Path) -> None:
    """Ctrl-C twice ends it with 4; the same command completes it."""
    with gated(Shop(products=120, hosts=2), latency_s=0.02) as (site, gate):
        gate.shut_after(60)
        command = [sys.executable, "-m", "limpet", "run", SPIDER, *starts(site), "--db", "x.db", "--json"]
        child = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, text=True)
        wait_for_requests(site, child, 61)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=120)
        gate.open()
        assert child.returncode == 4, out
        assert json.loads(out)["exit_code"] == 4
        assert limpet("run", SPIDER, *starts(site)).code == 0
        assert products(limpet) == truth(site)


def test_logs_are_text_or_json_on_stderr(limpet: Limpet) -> None:
    """A log is a record a line; results stay alone on stdout."""
    flags = ["--from", "-", "--db", "x.db", "--log-format", "json"]
    ended = limpet("run", SPIDER, *flags, stdin="not a url\n")
    records = [json.loads(line) for line in ended.err.splitlines()]
    assert records
    assert {"at", "level", "logger", "message"} <= set(records[0])
    assert "limpet.sources" in limpet("run", SPIDER, "--from", "-", "--db", "y.db", stdin="not a url\n").err


def test_a_terminal_gets_a_progress_bar_and_a_pipe_gets_none(tmp_path: Path) -> None:
    """On a terminal pages and speed are shown while it runs; results stay on stdout. The site waits until they are."""
    with gated(Shop(products=60, hosts=1), latency_s=0.02) as (site, gate):
        gate.shut_after(20)
        ours, theirs = pty.openpty()
        command = [
            sys.executable,
            "-m",
            "limpet",
            "run",
            SPIDER,
            *starts(site),
            "--db",
            "x.db",
            "--per-host",
            "2",
            "--lease",
            "10",
            "--read-timeout",
            "120",
        ]
        child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(ours, 65536):
                shown += piece
                if b"pages" in shown and b"in flight" in shown:
                    gate.open()
        os.close(ours)
        out, _ = child.communicate()
        assert child.returncode == 0
        assert b"pages" in shown
        assert b"in flight" in shown
        assert b"complete and verified" in out
        assert b"\x1b" not in out


def test_the_line_beside_the_bar_says_what_is_known() -> None:
    """Counts with their nouns, and the reason of a wait without control characters."""
    progress = Progress(
        done=1200, skipped=3, failed=1, dead=1, known=2000, in_flight=16, pages_per_s=99.6, waiting="host \x1b[2J" + "x" * 99
    )
    line = line_of(progress)
    assert line.startswith("1,200 pages · 100/s · 16 in flight · 3 skipped · 1 dead letter · host \\x1b[2Jxxx")
    assert len(line) < 140
