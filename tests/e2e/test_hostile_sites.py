"""What a site may do to a crawl: URLs beyond the limit, credentials in redirects. Its pages are judged, and nothing else breaks."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from limpet.engine.recent import Recent
from limpet.engine.run import run
from limpet.settings import Settings
from tests.e2e.conftest import Limpet
from tests.e2e.sites import GONE, Reply, moved, page, serving
from tests.e2e.test_alerts import follower, ran

#: A path that no URL within the default limit (8,192 bytes) can have.
LONG = "/" + "x" * 9000


def attempts(db: Path) -> list[tuple[str, str]]:
    """Outcome and reason of each try, with what became of its URL."""
    with sqlite3.connect(db) as rows:  # after the run: nobody here has it open
        return sorted(rows.execute("SELECT outcome, reason FROM attempt"))


# -- URLs beyond the limit -------------------------------------------------------------------


def test_a_robots_txt_that_redirects_beyond_the_limit_is_a_redirect_that_leads_nowhere(tmp_path: Path) -> None:
    """It is taken for unavailable (RFC 9309 section 2.3.1.3): the pages are fetched, and the long URL is not."""

    def answer(host: str, path: str, times: int) -> Reply:
        return moved(LONG) if path == "/robots.txt" else page("/a", "/b") if path == "/" else page()

    with serving(answer) as site:
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"))
        assert not any(LONG in name for name in site.asked)
    assert (report.exit_code, report.done, report.dead) == (0, 3, 0)


def test_a_robots_txt_is_asked_for_where_the_url_limit_is_shorter_than_its_own(tmp_path: Path) -> None:
    """The limit is for URLs that pages name: what a robots.txt forbids stays forbidden."""

    def answer(host: str, path: str, times: int) -> Reply:
        return Reply("user-agent: *\ndisallow: /b", content_type="text/plain") if path == "/robots.txt" else page("/a", "/b")

    with serving(answer) as site:
        limit = len(site.url("/a"))
        assert limit < len(site.url("/robots.txt"))
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), url_bytes_max=limit)
        assert site.asked["127.0.0.1/b"] == 0
    assert (report.exit_code, report.done, report.skipped) == (0, 2, 1)


@pytest.mark.parametrize(("target", "status", "ended"), [
    ("/short", 301, ("skipped", "moved")),
    ("/short", 302, ("skipped", "moved")),
    (LONG, 302, ("dead", "bad redirect")),
])  # fmt: skip
def test_a_page_found_under_a_larger_limit_is_judged_by_its_answer(
    tmp_path: Path, target: str, status: int, ended: tuple[str, str]
) -> None:
    """A redirect is one, also where the page's own URL is longer than this run lets URLs be."""
    own = "/" + "o" * 3000

    def answer(host: str, path: str, times: int) -> Reply:
        return GONE if path == "/robots.txt" else page(own) if path == "/" else moved(target, status) if path == own else page()

    with serving(answer) as site:
        found = ran(follower(), tmp_path / "x.db", start=site.url("/"), max_pages=1)
        assert (found.exit_code, found.done, found.pending) == (5, 1, 1)
        ran(follower(), tmp_path / "x.db", start=site.url("/"), url_bytes_max=2000)
    assert ended in attempts(tmp_path / "x.db")
    assert not [reason for _, reason in attempts(tmp_path / "x.db") if reason.startswith("internal")]


def test_a_page_found_under_a_larger_limit_may_send_back_to_itself(tmp_path: Path) -> None:
    """A consent page: a cookie is set, and the same URL, which was accepted once, is asked for again."""
    own = "/" + "o" * 3000

    def answer(host: str, path: str, times: int) -> Reply:
        if path == own and times == 1:
            return Reply(status=302, headers={"Location": own, "Set-Cookie": "consent=yes"})
        return GONE if path == "/robots.txt" else page(own) if path == "/" else page()

    with serving(answer) as site:
        ran(follower(), tmp_path / "x.db", start=site.url("/"), max_pages=1)
        report = ran(follower(), tmp_path / "x.db", start=site.url("/"), url_bytes_max=2000)
    assert (report.exit_code, report.done, report.dead) == (0, 2, 0)


# -- credentials in a redirect ---------------------------------------------------------------

#: What a site puts into the targets of its redirects.
USER, PASSWORD = "someone", "Zq7s3cretZq7"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Guarded(BaseHTTPRequestHandler):
    """`/inside` and `/away` redirect to a page that wants user and password, and name them in the target."""

    def do_GET(self) -> None:
        """A redirect, the page for whoever has the password, or a refusal."""
        port = self.server.server_port  # type: ignore[attr-defined]
        targets = {"/inside": "127.0.0.1", "/away": "localhost"}
        status, fields, body = 404, {}, b""
        if self.path in targets:
            status, fields = 302, {"Location": f"http://{USER}:{PASSWORD}@{targets[self.path]}:{port}/kept{self.path}"}
            if self.path == "/inside":
                fields["Set-Cookie"] = "a=b"
        elif self.path.startswith("/kept/"):
            status, body = (200, b"<h1>welcome</h1>") if self.headers.get("Authorization") == BASIC else (401, b"")
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", "Content-Length": str(len(body)), **fields}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def guarded() -> Iterator[int]:
    """The port on which that site is served; `localhost` is another host of it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        serving_it = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving_it.start()
        yield server.server_port
        server.shutdown()
        serving_it.join()


def test_a_password_in_the_target_of_a_redirect_is_sent_and_told_nobody(limpet: Limpet, tmp_path: Path, guarded: int) -> None:
    """The page behind it is fetched; the row of no try has it, and `explain` does not show it, as text or JSON."""
    starts = [f"http://127.0.0.1:{guarded}/{name}" for name in ("inside", "away")]
    ended = limpet("crawl", *starts, "--db", "x.db", "--delay", "0", "--log-level", "debug")
    assert ended.code == 0, ended
    with sqlite3.connect(tmp_path / "x.db") as rows:
        tries = rows.execute("SELECT outcome, reason, url, detail FROM attempt").fetchall()
    assert sorted(outcome for outcome, *_ in tries) == ["done", "done", "skipped", "skipped"]
    assert f"http://***@localhost:{guarded}/kept/away" in [url for *_, url, _ in tries]
    told = [limpet("explain", url, "--db", "x.db", *flags) for url in [*starts, *kept(guarded)] for flags in ((), ("--json",))]
    for text in [ended.out + ended.err, str(tries), *(one.out + one.err for one in told)]:
        assert PASSWORD not in text
    assert all(one.code == 0 for one in told)


def kept(port: int) -> list[str]:
    """The pages behind the redirects."""
    return [f"http://127.0.0.1:{port}/kept/inside", f"http://localhost:{port}/kept/away"]


# -- more origins than are remembered --------------------------------------------------------


def test_a_crawl_of_more_origins_than_are_remembered_obeys_each_robots_txt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten is read again from the database, or asked for again; and no more than the bound is remembered."""
    sizes: list[int] = []

    class Watched(Recent[Any]):
        def keep(self, name: str, value: Any) -> Any:
            kept = super().keep(name, value)
            sizes.append(len(self))
            return kept

    for place in ("engine.attempt", "fetch.robots"):
        monkeypatch.setattr(f"limpet.{place}.ORIGINS_MAX", 2)
    monkeypatch.setattr("limpet.engine.attempt.Recent", Watched)

    def answer(host: str, path: str, times: int) -> Reply:
        return Reply("user-agent: *\ndisallow: /no", content_type="text/plain") if path == "/robots.txt" else page("/no", "/yes", "/more")

    with serving(answer, hosts=8) as site:
        starts = [site.url("/", host) for host in range(8)]
        settings = Settings(delay_s=0.0, lease_s=60.0)
        report = asyncio.run(run(follower(), db=f"sqlite:///{tmp_path / 'x.db'}", starts=starts, settings=settings, handle_signals=False))
        assert not any(name.endswith("/no") for name in site.asked)
    assert (report.exit_code, report.done, report.skipped) == (0, 24, 8)
    assert max(sizes) == 2
