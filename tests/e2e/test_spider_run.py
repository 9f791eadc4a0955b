"""Whole runs of small spiders on small sites, each made for one promise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

import limpet
from limpet import Page, Request, Spider, Tx, record
from limpet.demo.catalogue import Shop
from limpet.demo.site import running
from limpet.engine.run import Report
from tests.e2e.conftest import Limpet
from tests.e2e.sites import GONE, Reply, Served, moved, page, serving


@record(key="url")
class Seen:
    """A page that was there."""

    url: str
    title: str


@record(key="word", scope="spider")
class Word:
    """A word of a title: one row for all slots, the newest."""

    word: str
    url: str


@record(key="url", scope="spider", policy="keep", name="first_seen")
class FirstSeen:
    """A page as the first slot found it."""

    url: str
    title: str


def reader(**options: object) -> Spider:
    """A spider that stores every page with its title, and follows every link."""
    patience = {"lease_s": 60.0, "connect_timeout_s": 120.0, "read_timeout_s": 120.0, "total_timeout_s": 300.0}
    spider = Spider("reader", records=[Seen], backoff_s=0.01, delay_s=0.0, **patience, **options)  # type: ignore[arg-type]

    @spider.page()
    async def seen(page: Page, tx: Tx) -> None:
        tx.emit(Seen(url=page.key_url, title=page.one("h1")))
        tx.follow(page.links())

    return spider


def ran(spider: Spider, db: Path, *starts: str, **options: object) -> Report:
    """The report of a run; without starts it goes on with those that the job has."""
    return asyncio.run(spider.run(db=f"sqlite:///{db}", start=[*starts] or None, **options))  # type: ignore[arg-type]


def rows(db: Path, dataset: str = "seen", **which: object) -> list[dict[str, object]]:
    """What is stored, in key order."""
    with limpet.open(str(db)) as collected:
        return collected.dataset(dataset, **which).rows()  # type: ignore[arg-type]


def seen(db: Path, site: Served, **which: object) -> dict[str, object]:
    """Path -> title of what is stored; a page that is stored twice fails."""
    found = {str(row["url"]).partition(f":{site.port}")[2]: row["title"] for row in rows(db, **which)}
    assert len(found) == len(rows(db, **which))
    return found


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where a database may be made."""
    return tmp_path / "x.db"


# -- runs, and their ends ------------------------------------------------------------------


def test_a_run_reports_and_the_next_has_nothing_to_do(db: Path) -> None:
    """Code 0 and what the rows say; then 6, without a request."""
    with running(Shop(products=20, hosts=2)) as site:
        report = ran(reader(hosts=["127.0.0.*"]), db, *site.shop.starts())
        assert (report.exit_code, report.job, report.verified, report.dead, report.pending) == (0, "reader", True, 0, 0)
        assert report.records == {"reader_seen": report.done}
        asked = site.stats.requests
        again = ran(reader(hosts=["127.0.0.*"]), db)
        assert (again.exit_code, again.requests, site.stats.requests) == (6, 0, asked)


def test_a_limit_of_pages_ends_a_run_and_without_it_the_run_goes_on(db: Path) -> None:
    """5, with no more pages than were asked for; then every page once, and none of the first again."""
    with serving(lambda host, path, times: page("/1", "/2", "/3", "/4", "/5", title=path)) as site:
        report = ran(reader(), db, site.url("/"), max_pages=3)
        assert (report.exit_code, report.done) == (5, 3)
        assert ran(reader(), db, max_pages=3).exit_code == 5  # already reached
        assert ran(reader(), db).exit_code == 0
        assert seen(db, site) == {path: path for path in ("/", "/1", "/2", "/3", "/4", "/5")}
        assert site.requests == 6


def test_a_limit_of_depth_leaves_out_what_lies_deeper(db: Path) -> None:
    """Links from the start are counted, and what is left out is never asked for."""
    with serving(lambda host, path, times: page(f"{path}x", title=path)) as site:
        assert ran(reader(), db, site.url("/"), max_depth=2).exit_code == 0
        assert sorted(seen(db, site)) == ["/", "/x", "/xx"]
        assert site.requests == 3


def test_each_slot_is_a_job_of_its_own(db: Path) -> None:
    """A second slot collects again, and keeps its rows beside those of the first."""
    with serving(lambda host, path, times: page(title=f"visit {times}")) as site:
        for slot in ("2026-11-29", "2026-11-30"):
            assert ran(reader(), db, site.url("/"), slot=slot).exit_code == 0
        assert [seen(db, site, slot=slot) for slot in ("2026-11-29", "2026-11-30")] == [{"/": "visit 1"}, {"/": "visit 2"}]
        assert [row["slot"] for row in rows(db, all_slots=True)] == ["2026-11-29", "2026-11-30"]


def test_params_reach_the_handlers(db: Path) -> None:
    """What a run is given is what `spider.params` holds."""
    spider = Spider("marks", records=[Seen])

    @spider.page()
    def mark(page: Page, tx: Tx) -> None:
        tx.emit(Seen(url=page.key_url, title=spider.params["mark"]))

    with serving(lambda host, path, times: page()) as site:
        assert ran(spider, db, site.url("/"), params={"mark": "a=b"}).exit_code == 0
        assert seen(db, site) == {"/": "a=b"}


def test_a_second_run_joins_the_first_and_asks_for_nothing_again(limpet: Limpet, tmp_path: Path) -> None:
    """Two processes with one command: both end with 0, and each page was asked for once."""
    has_joined = Event()

    def answer(host: str, path: str, times: int) -> Reply:
        if path == "/robots.txt":
            return GONE
        if path != "/":
            has_joined.wait(120)
        return page(*(f"/{n}" for n in range(30)), title=path)

    with serving(answer) as site:
        command = [sys.executable, "-m", "limpet", "crawl", site.url("/"), "--db", "x.db"]
        first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            until(lambda: site.requests > 1, first)
            second = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
            until(lambda: living(tmp_path / "x.db") == 2, second)
        finally:
            has_joined.set()
        assert [first.wait(), second.wait()] == [0, 0]
        assert set(site.asked.values()) == {1}
        assert len(limpet("export", "page").lines) == 31
        assert limpet("verify", "--full").code == 0


def until(is_so: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    """Wait for a condition, as long as the child lives."""
    while not is_so():
        assert child.poll() is None, "it ended before that"


def living(db: Path) -> int:
    """How many workers a database knows to be alive."""
    with contextlib.closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM worker WHERE dead = 0").fetchone()[0])


def test_a_task_whose_handler_is_gone_is_parked_and_a_release_that_has_it_goes_on(db: Path) -> None:
    """7, saying so, without a strike or a request; then complete."""

    def release(*, has_later: bool) -> Spider:
        spider = Spider("release", records=[Seen])

        async def later(page: Page, tx: Tx) -> None:
            tx.emit(Seen(url=page.key_url, title=page.one("h1")))

        @spider.page("/")
        async def first(page: Page, tx: Tx) -> None:
            tx.follow("/later", to="later")

        if has_later:
            spider.page("/elsewhere")(later)
        return spider

    with serving(lambda host, path, times: page(title=path)) as site:
        assert ran(release(has_later=True), db, site.url("/"), max_pages=1).exit_code == 5
        report = ran(release(has_later=False), db)
        assert (report.exit_code, report.dead, report.pending, site.requests) == (7, 0, 1, 1)
        assert "parked" in report.message
        assert ran(release(has_later=True), db).exit_code == 0
        assert seen(db, site) == {"/later": "/later"}


# -- what is fetched -----------------------------------------------------------------------


def test_every_charset_comes_out_as_it_was_written(db: Path) -> None:
    """UTF-16, GB18030, Shift_JIS, KOI8-R and others; said by the header, by the page, by a BOM, or by nobody."""
    title = {
        "utf-8": "naïve 東京 Größe", "utf-16": "naïve 東京", "utf-16-le": "海 山 Größe", "gb18030": "中文 目录",
        "shift_jis": "日本語の題名",
        "koi8-r": "Обувь и сумки", "windows-1252": "crème brûlée, 5 €", "iso-8859-2": "Łąka i źródło", "euc-kr": "한국어 제목",
    }  # fmt: skip

    def answer(host: str, path: str, times: int) -> Reply:
        if path == "/robots.txt":
            return GONE
        if path == "/":
            return page(*(f"/{how}/{name}" for name in title for how in ("header", "meta")), "/bom/utf-16", "/none/utf-8")
        _, how, name = path.split("/")
        declared = f'<meta charset="{name}">' if how == "meta" and not name.startswith("utf-16") else ""
        text = f"<!doctype html>{declared}<h1>{title[name]}</h1>"
        said = f"text/html; charset={name}" if how == "header" or (how == "meta" and name == "utf-16-le") else "text/html"
        return Reply(text.encode(name), content_type=said.replace("utf-16-le", "utf-16le"))

    with serving(answer) as site:
        assert ran(reader(), db, site.url("/")).exit_code == 0
        found = seen(db, site)
        assert found.pop("/") == "a page"
        assert found == {path: title[path.rpartition("/")[2]] for path in found}
        assert len(found) == 2 * len(title) + 2


def test_robots_is_obeyed_by_every_task_that_waits_for_it(db: Path) -> None:
    """Forty tasks of one host start together, before its robots.txt has come: it is asked for once, and none goes past it."""
    rules = Reply("User-agent: *\nDisallow: /private/\n", content_type="text/plain")
    with serving(lambda host, path, times: rules if path == "/robots.txt" else page(title=path)) as site:
        starts = [site.url(path) for path in (*(f"/private/{n}" for n in range(40)), "/open")]
        report = ran(reader(concurrency=64, per_host=64), db, *starts)
        assert (report.exit_code, report.done, report.skipped) == (0, 1, 40)
        assert site.asked == {"127.0.0.1/robots.txt": 1, "127.0.0.1/open": 1}


def test_the_demo_shop_sees_no_breach(db: Path) -> None:
    """Every listing links to what robots.txt forbids; nobody goes there."""
    with running(Shop(products=60, hosts=3)) as site:
        assert ran(reader(hosts=["127.0.0.*"]), db, *site.shop.starts()).exit_code == 0
        assert site.stats.breaches.total() == 0
        assert site.stats.repeated == 0


# -- redirects -----------------------------------------------------------------------------


def test_pages_that_moved_are_stored_once_under_their_new_address(db: Path) -> None:
    """By one hop or several, on the same host or another, linked under both addresses or under the old one alone."""
    away = "http://127.0.0.2:{port}/away"

    def answer(host: str, path: str, times: int) -> Reply:
        targets = {"/old": moved("/new"), "/older": moved("/old", 302), "/gone-away": moved(away.format(port=site.port), 307)}
        if path == "/":
            return page("/old", "/older", "/gone-away", "/new", "/plain")
        return targets.get(path) or (page(title=path) if path in ("/new", "/plain", "/away") else GONE)

    with serving(answer, hosts=2) as site:
        report = ran(reader(hosts=["127.0.0.*"]), db, site.url("/"))
        assert (report.exit_code, report.done) == (0, 4)
        assert seen(db, site) == {"/": "a page", "/new": "/new", "/plain": "/plain", "/away": "/away"}


@pytest.mark.parametrize("hosts", [1, 2])
def test_two_that_moved_to_each_other_at_once_are_not_lost(db: Path, hosts: int) -> None:
    """Each redirects its first visitor to the other for good, and has a page for the next: one of them is stored in the end."""

    def answer(host: str, path: str, times: int) -> Reply:
        if path == "/robots.txt":
            return GONE
        other = {"/a": site.url("/b", hosts - 1), "/b": site.url("/a")}[path]
        return moved(other) if times == 1 else page(title=path)

    with serving(answer, hosts=hosts) as site:
        report = ran(reader(hosts=["127.0.0.*"]), db, site.url("/a"), site.url("/b", hosts - 1))
        assert (report.exit_code, report.done, report.dead) == (0, 1, 0)
        ((path, title),) = seen(db, site).items()
        assert {path, str(title)} <= {"/a", "/b"}  # whichever came second may have followed the first, whose move was known by then


def test_a_circle_without_a_page_is_a_dead_letter_and_nothing_else(db: Path) -> None:
    """Three that redirect to each other for ever: the strikes of one are used up, and the job ends."""
    circle = {"/a": "/b", "/b": "/c", "/c": "/a"}

    def answer(host: str, path: str, times: int) -> Reply:
        return moved(circle[path]) if path in circle else GONE if path == "/robots.txt" else page("/a", "/b", "/c", "/fine", title=path)

    with serving(answer) as site:
        report = ran(reader(strikes=2), db, site.url("/"))
        assert (report.exit_code, report.done, report.pending) == (3, 2, 0)
        assert report.dead >= 1
        assert sorted(seen(db, site)) == ["/", "/fine"]
        assert site.requests < 100


def test_a_consent_cycle_ends_at_its_own_page(db: Path) -> None:
    """A cookie is set, and the way leads back: the page is stored, once, under the address that was asked for."""

    def answer(host: str, path: str, times: int) -> Reply:
        if path == "/robots.txt":
            return GONE
        if path == "/consent":
            return Reply(status=302, headers={"Location": "/page", "Set-Cookie": "consent=yes; Path=/"})
        return moved("/consent", 302) if times == 1 else page(title="behind the consent")

    with serving(answer) as site:
        assert ran(reader(), db, site.url("/page")).exit_code == 0
        assert seen(db, site) == {"/page": "behind the consent"}


# -- what is stored ------------------------------------------------------------------------


def test_one_handler_writes_into_two_datasets(db: Path) -> None:
    """Both hold what it emitted."""
    spider = Spider("two", records=[Seen, Word])

    @spider.page()
    async def both(page: Page, tx: Tx) -> None:
        tx.emit(Seen(url=page.key_url, title=page.one("h1")))
        for word in page.one("h1").split():
            tx.emit(Word(word=word, url=page.key_url))

    with serving(lambda host, path, times: page(title="alder and birch")) as site:
        report = ran(spider, db, site.url("/"))
        assert (report.exit_code, report.records) == (0, {"two_seen": 1, "two_word": 3})
        assert sorted(str(row["word"]) for row in rows(db, "word")) == ["alder", "and", "birch"]


def test_datasets_of_the_spider_have_one_row_over_all_slots(db: Path) -> None:
    """`replace` holds what the greater slot found, `keep` what the smaller did, in whatever order the slots are run."""
    spider = Spider("slots", records=[Word, FirstSeen])

    @spider.page()
    async def both(page: Page, tx: Tx) -> None:
        tx.emit(Word(word="today", url=f"{page.key_url}{page.one('h1')}"))
        tx.emit(FirstSeen(url=page.key_url, title=page.one("h1")))

    with serving(lambda host, path, times: page(title=f"visit-{times}")) as site:
        for slot in ("2", "3", "1"):
            assert ran(spider, db, site.url("/"), slot=slot).exit_code == 0
        assert [str(row["url"]).rpartition("/")[2] for row in rows(db, "word")] == ["visit-2"]
        assert [row["title"] for row in rows(db, "first_seen")] == ["visit-3"]


def test_requests_with_a_method_and_a_body_are_tasks_of_their_own(db: Path) -> None:
    """The same address with another body is another task; `data` arrives as it was given."""
    spider = Spider("forms", records=[Seen])

    @spider.page("/")
    async def first(page: Page, tx: Tx) -> None:
        for query in ("a", "b"):
            tx.enqueue(Request("/find?q=" + query), data={"query": query})

    @spider.page("/find")
    async def found(page: Page, tx: Tx) -> None:
        tx.emit(Seen(url=page.key_url, title=page.data["query"]))

    with serving(lambda host, path, times: page(title=path)) as site:
        assert ran(spider, db, site.url("/")).exit_code == 0
        assert seen(db, site) == {"/find?q=a": "a", "/find?q=b": "b"}


# -- many starts ---------------------------------------------------------------------------


@pytest.mark.slow
def test_many_starts_are_streamed_in_flat_memory(tmp_path: Path) -> None:
    """Twenty-five times as many starts, read to their end and each ended as a task, take no more than a few megabytes more.

    robots.txt forbids them all, so nothing but the starts themselves is measured.
    """
    few, many = 2_000, 50_000
    rules = Reply("User-agent: *\nDisallow: /\n", content_type="text/plain")
    with serving(lambda host, path, times: rules) as site:
        peaks = [peak_mb(tmp_path, site, starts) for starts in (few, many)]
        assert site.asked == {"127.0.0.1/robots.txt": 2}
    assert peaks[1] < peaks[0] + 40


def peak_mb(folder: Path, site: Served, starts: int) -> float:
    """The peak memory of a crawl that begins at so many starts; all of them must have ended."""
    listed = folder / f"{starts}.txt"
    listed.write_text("".join(f"{site.url(f'/{n}')}\n" for n in range(starts)), encoding="utf-8")
    command = [sys.executable, "-m", "limpet", "crawl", "--from", listed, "--db", f"{starts}.db", "--json"]
    with open(folder / "report.json", "wb+") as report:
        child = subprocess.Popen(command, cwd=folder, stdout=report)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        report.seek(0)
        told = json.load(report)
    assert (told["exit_code"], told["skipped"], told["pending"]) == (0, starts, 0)
    return usage.ru_maxrss / 1024
