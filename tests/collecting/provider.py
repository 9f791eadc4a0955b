"""A paid API of our own on loopback: it counts what it charges, knows a call again by its idempotency key, and fails now and then.

/api/serp?keyword=&day=        ten results, one credit
/api/places                    POST {keyword, lat, lng}: places, as many credits as it says
/api/features?page=            a list, free of charge; /api/feature?id= one of them, half a credit
/api/feed?before= or ?after=   orders, newest first or oldest first, ten a page
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

FEATURES, PAGE = 40, 10


def lot(*words: object) -> int:
    """A number that is the same for the same words."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=4).digest(), "big")


@dataclass
class Provider:
    """What the API is, and what its meter says."""

    port: int
    latency_s: float = 0.0
    failing: int = 10  # one first request in so many is answered with 500, and not charged; 0: none
    broken: set[str] = field(default_factory=set)  # calls that are always answered with 500
    gone: set[str] = field(default_factory=set)  # calls that are answered with 404
    busy: bool = False  # the next request is answered with 429, and a long time to wait
    says_credits: str = ""  # what the header says that a call cost, whatever it did cost
    orders: list[int] = field(default_factory=list)
    requests: int = 0
    charges: Counter[str] = field(default_factory=Counter)  # call -> credits, in thousandths
    attempts: Counter[str] = field(default_factory=Counter)
    replays: dict[str, tuple[int, bytes, str]] = field(default_factory=dict)
    sent_keys: dict[str, set[str]] = field(default_factory=dict)  # call -> idempotency keys that came with it
    lock: threading.Lock = field(default_factory=threading.Lock)
    held_at: int | None = None  # requests beyond so many wait, and are not counted yet

    def __post_init__(self) -> None:
        self._moved = threading.Condition(self.lock)

    def hold(self, at: int | None) -> None:
        """Answer no more than so many requests in all until this is said again; None: all of them."""
        with self.lock:
            self.held_at = at
            self._moved.notify_all()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def charged(self) -> int:
        """Credits in all, in thousandths."""
        return self.charges.total()

    @property
    def charged_twice(self) -> dict[str, int]:
        """Calls that were charged more than once, with how often beyond that."""
        with self.lock:
            return {call: number // self.price(call) - 1 for call, number in self.charges.items() if number > self.price(call)}

    def bill(self, day: str, keywords: list[str]) -> list[tuple[str, float]]:
        """Keyword and credits of each call for search results of a day."""
        calls = {word: f"serp?{json.dumps({'day': day, 'keyword': word}, sort_keys=True)}" for word in keywords}
        return [(word, self.charges[called] / 1000) for word, called in calls.items()]

    @staticmethod
    def price(call: str) -> int:
        """What a call costs, in thousandths of a credit."""
        path = call.partition("?")[0]
        return {"serp": 1000, "places": 1000 * (1 + lot(call) % 3), "feature": 500}.get(path, 0)

    def answer(self, path: str, query: dict[str, str], key: str | None) -> tuple[int, bytes, str]:
        """Status, body, and what the call cost as a header says it."""
        call = f"{path}?{json.dumps(query, sort_keys=True)}"
        with self.lock:
            self._moved.wait_for(lambda: self.held_at is None or self.requests < self.held_at)
            self.requests += 1
            self.attempts[call] += 1
            if self.busy:
                self.busy = False
                return 429, b"", "0"
            if key:
                self.sent_keys.setdefault(call, set()).add(key)
                if key in self.replays:
                    return self.replays[key]
            if call in self.gone:
                return 404, b"", "0"
            if call in self.broken or (self.failing and lot("fails", call) % self.failing == 0 and self.attempts[call] == 1):
                return 500, b'{"error": "not charged"}', "0"
            price = self.price(call)
            if price:
                self.charges[call] += price
            found = 200, json.dumps(self.body(path, query)).encode(), f"{price / 1000:g}"
            if key:
                self.replays[key] = found
            return found

    def body(self, path: str, query: dict[str, str]) -> object:
        """What is answered, the same each time but for the feed."""
        if path == "serp":
            rows = [
                {"rank": n + 1, "title": f"{query['keyword']} {n}", "url": f"https://e.test/{lot(query, n) % 9973}/{n}"} for n in range(10)
            ]
            return {"results": rows}
        if path == "places":
            at = lot(query["lat"], query["lng"]) % 50
            return {"places": [{"id": f"p{(at + n) % 60}", "name": f"place {(at + n) % 60}", "lat": "1.5", "lng": "2.5"} for n in range(4)]}
        if path == "features":
            first = (int(query["page"]) - 1) * PAGE
            return {"features": [f"f{n}" for n in range(first, min(first + PAGE, FEATURES))], "more": first + PAGE < FEATURES}
        if path == "feature":
            return {"rating": f"{lot(query) % 50 / 10}", "reviews": lot(query) % 1000}
        if "after" in query:
            page = sorted(n for n in self.orders if n > int(query["after"]))[:PAGE]
            return {"orders": [{"number": n, "item": f"item {n}"} for n in page]}
        before = int(query.get("before", 0) or 10**9)
        page = sorted((n for n in self.orders if n < before), reverse=True)[:PAGE]
        return {"orders": [{"number": n, "item": f"item {n}"} for n in page]}


@contextmanager
def providing(**more: object) -> Iterator[Provider]:
    """The API, served from threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            self._send(split.path, dict(parse_qsl(split.query)))

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._send(urlsplit(self.path).path, json.loads(self.rfile.read(length)))

        def _send(self, path: str, query: dict[str, str]) -> None:
            status, body, cost = provider.answer(path.removeprefix("/api/"), query, self.headers.get("Idempotency-Key"))
            if provider.latency_s:
                time.sleep(provider.latency_s)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Credits-Charged", provider.says_credits or cost)
            if status == 429:
                self.send_header("Retry-After", "600")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing: pytest shows what matters."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

        def handle_error(self, request: object, client_address: object) -> None:
            """A client was killed in the middle: that is what these tests do."""

    server = Server(("127.0.0.1", 0), Handler)
    provider = Provider(server.server_port, **more)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
