"""Small sites for tests: pages given by a function or by a folder, served on loopback from threads, with every request counted."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HTML = "text/html; charset=utf-8"


@dataclass(frozen=True)
class Reply:
    """What a site answers."""

    body: str | bytes = ""
    status: int = 200
    content_type: str = HTML
    headers: dict[str, str] = field(default_factory=dict)


GONE = Reply("<title>no such page</title>", 404)

#: (address of the host, path with its query, how often it was asked for, this time included) -> what it answers.
Answer = Callable[[str, str, int], Reply]


def moved(target: str, status: int = 301) -> Reply:
    """A redirect."""
    return Reply(status=status, headers={"Location": target})


def page(*links: str, title: str = "a page") -> Reply:
    """A page of links."""
    return Reply(f"<!doctype html><title>{title}</title><h1>{title}</h1>" + "".join(f'<a href="{link}">{link}</a>' for link in links))


class Served:
    """A site that is being served on one or more addresses, all on one port."""

    def __init__(self, addresses: tuple[str, ...], port: int) -> None:
        self.addresses = addresses
        self.port = port
        self.asked: Counter[str] = Counter()  # "127.0.0.1/path?query" -> requests
        self.lock = threading.Lock()
        self.limit = math.inf  # further requests are counted, and wait
        self._may_answer = threading.Condition(self.lock)

    def origin(self, host: int = 0) -> str:
        """The origin of a host, without a slash at its end."""
        return f"http://{self.addresses[host]}:{self.port}"

    def url(self, path: str, host: int = 0) -> str:
        """A URL of a host."""
        return self.origin(host) + path

    @property
    def requests(self) -> int:
        """All requests but those for robots.txt."""
        with self.lock:
            return self._pages()

    def _pages(self) -> int:
        return sum(count for name, count in self.asked.items() if not name.endswith("/robots.txt"))

    def answer_until(self, requests: float) -> None:
        """Answer until there were so many requests, and let all others wait; as often as one likes."""
        with self.lock:
            self.limit = requests
            self._may_answer.notify_all()

    def note(self, address: str, path: str) -> int:
        """Count a request: how often this was asked for."""
        with self.lock:
            self.asked[address + path] += 1
            times, number = self.asked[address + path], self._pages()
            self._may_answer.wait_for(lambda: number <= self.limit)
            return times


@contextmanager
def serving(answer: Answer, *, hosts: int = 1) -> Iterator[Served]:
    """Serve what a function answers, on 127.0.0.1, 127.0.0.2, ...; it may be asked by several threads at once."""

    def handler(site: Served, address: str) -> type[BaseHTTPRequestHandler]:
        class Asked(_Quiet):
            def do_GET(self) -> None:
                reply = answer(address, self.path, site.note(address, self.path))
                body = reply.body if isinstance(reply.body, bytes) else reply.body.encode()
                self.send_response(reply.status)
                for name, value in {"Content-Type": reply.content_type, "Content-Length": str(len(body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        return Asked

    with _listening(handler, hosts) as site:
        yield site


@contextmanager
def serving_folder(folder: Path) -> Iterator[Served]:
    """Serve the files of a folder, by their extensions."""

    def handler(site: Served, address: str) -> type[BaseHTTPRequestHandler]:
        class File(_Quiet, SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

            def do_GET(self) -> None:
                site.note(address, self.path)
                super().do_GET()

        return File

    with _listening(handler, 1) as site:
        yield site


class _Quiet(BaseHTTPRequestHandler):
    """Keeps connections, sends an answer in one piece, and tells nothing of it."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body apart would wait for each other, 40 ms a page

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed in the middle of an answer is what these tests are about."""


@contextmanager
def _listening(handler: Callable[[Served, str], type[BaseHTTPRequestHandler]], hosts: int) -> Iterator[Served]:
    addresses = tuple(f"127.0.0.{host + 1}" for host in range(hosts))
    first = _Server((addresses[0], 0), _Quiet)
    site = Served(addresses, first.server_port)
    servers = [first, *(_Server((address, site.port), _Quiet) for address in addresses[1:])]
    threads = []
    for server, address in zip(servers, addresses, strict=True):
        server.RequestHandlerClass = handler(site, address)
        threads.append(threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name=f"site {address}"))
        threads[-1].start()
    try:
        yield site
    finally:
        site.answer_until(math.inf)
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()
