"""Two pages that send each other's readers away until a cookie is there: one of them has the content, wherever a kill fell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import apsw
import pytest

from tests.crash.trial import Trial

#: Steps around the commit in which both are moved, and around the one that puts one of them back.
STEPS = ["before_send@4", "before_send@5", "after_fence@2", "after_account@3", "after_commit@2", "after_commit@3", "after_commit@4"]


class Consent(BaseHTTPRequestHandler):
    """`/a` and `/b` redirect to each other where the cookie is missing; each waits for the other, so that both move at once."""

    protocol_version = "HTTP/1.1"
    both = threading.Barrier(2)

    def do_GET(self) -> None:
        """Answer one request."""
        place = self.path.split("?")[0]
        has_cookie = "consent=yes" in (self.headers.get("Cookie") or "")
        if place in ("/a", "/b") and not has_cookie:
            self._wait_for_the_other()
            self._send(302, b"", ("Location", "/b" if place == "/a" else "/a"), ("Set-Cookie", "consent=yes; Path=/"))
        elif place in ("/a", "/b"):
            self._send(200, b"<title>content</title><p class=sku>1</p>")
        elif place == "/robots.txt":
            self._send(404, b"")
        else:
            self._send(200, b"<title>start</title><a href=/a>a</a> <a href=/b>b</a>")

    def _wait_for_the_other(self) -> None:
        try:
            self.both.wait(0.3)
        except threading.BrokenBarrierError:
            self.both.reset()

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Type", "text/html"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    """The start page of a site with the two pages."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Consent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("step", [None, *STEPS])
def test_two_pages_that_move_to_each_other_end_in_the_content_of_one(trial: Trial, site: str, step: str | None) -> None:
    """Neither is lost, neither is dead, and the job is complete only once one of them has been read."""
    trial.starts, trial.spider = [site], "circle"
    log = trial.folder / "fired"
    if step is not None:
        code, printed = trial.run(failpoint=f"{step}=kill", failpoint_log=str(log))
        assert (code, log.exists()) == (-9, True), printed
        assert trial.wounds() == []
    trial.finish()
    books = trial.books()
    assert not books.fault
    assert books.states == {"done": 2, "skipped": 1}
    assert books.rows == {"content": 1}
    assert reasons(trial) <= {"", "moved", "its worker was lost"}


def reasons(trial: Trial) -> set[str]:
    """Why tries ended."""
    connection = apsw.Connection(str(trial.db))
    found = {reason for (reason,) in connection.execute("SELECT DISTINCT reason FROM attempt")}
    connection.close()
    return found


def test_both_really_move_at_once(new_trial: Callable[..., Trial], site: str) -> None:
    """The case that is meant: in one of a few crawls a page that was moved has been put back, and then read."""
    assert any(was_put_back(new_trial(), site) for _ in range(5))


def was_put_back(trial: Trial, site: str) -> bool:
    """Whether an undisturbed crawl had to put one of the two back."""
    trial.starts, trial.spider = [site], "circle"
    trial.finish()
    connection = apsw.Connection(str(trial.db))
    found = connection.execute("SELECT COUNT(*) FROM revisit").fetchall()
    connection.close()
    return bool(found[0][0])
