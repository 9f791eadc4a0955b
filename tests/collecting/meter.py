"""What a provider says that it was asked and paid for: our own one, or another with the same API that is asked by HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

from tests.servers.postgres import free_port


class Meter(Protocol):
    """The surface that the scenes need of a provider. Credits are thousandths."""

    @property
    def url(self) -> str:
        """Where its API is."""

    @property
    def requests(self) -> int:
        """How often it was asked."""

    @property
    def charged(self) -> int:
        """What it charged in all."""

    @property
    def charged_twice(self) -> dict[str, int]:
        """Calls that it charged more than once, with how often beyond that."""

    def bill(self, day: str, keywords: list[str]) -> list[tuple[str, float]]:
        """Keyword and credits of each call of a day."""

    def hold(self, at: int | None) -> None:
        """Answer no more than so many requests in all until this is said again, where it can; None: all of them."""


class Elsewhere:
    """A test site in a process of its own, which counts in `/_stats`."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        """Where its API is."""
        return f"http://127.0.0.1:{self.port}/api"

    def hold(self, at: int | None) -> None:
        """It cannot: a size at which it does not matter is played on it."""

    def stats(self) -> dict[str, object]:
        """Everything that it says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/_stats", timeout=30) as reply:
            found: dict[str, object] = json.load(reply)
            return found

    @property
    def requests(self) -> int:
        """How often it was asked, by its cheap form."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/_stats?only=requests", timeout=30) as reply:
            return int(json.load(reply)["requests"])

    @property
    def charged(self) -> int:
        """A credit for each charge."""
        return 1000 * int(str(self.stats()["charges"]))

    @property
    def charged_twice(self) -> dict[str, int]:
        """Its resources are paths with a query."""
        found = self.stats()["charged_twice"]
        assert isinstance(found, dict)
        return {resource: number - 1 for resource, number in found.items()}

    def bill(self, day: str, keywords: list[str]) -> list[tuple[str, float]]:
        """It names those calls alone that it charged twice; each other keyword that was asked for cost a credit."""
        twice: dict[str, int] = {}
        for resource, more in self.charged_twice.items():
            query = dict(parse_qsl(urlsplit(resource).query))
            if query["day"] == day:
                twice[query["keyword"]] = more
        return [(keyword, 1.0 + twice.get(keyword, 0)) for keyword in keywords]


@contextmanager
def elsewhere(site: Path, latency_s: float) -> Iterator[Elsewhere]:
    """The original test site, served while the block runs."""
    port = free_port()
    shape = ["--port", str(port), "--products", "10", "--hosts", "1", "--latency", str(int(1000 * latency_s))]
    with subprocess.Popen([sys.executable, str(site), "serve", *shape], stdout=subprocess.PIPE) as served:
        try:
            assert served.stdout
            served.stdout.readline()
            yield Elsewhere(port)
        finally:
            served.kill()
