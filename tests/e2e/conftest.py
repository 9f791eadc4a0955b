"""The command line, called in this process with an own folder to stand in, and the demo shop to crawl."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from limpet.cli import main
from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running


@dataclass(frozen=True)
class Ended:
    """What a command ended in."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object that it printed."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def lines(self) -> list[str]:
        """What it printed, line by line."""
        return self.out.splitlines()


Limpet = Callable[..., Ended]

#: A process that stands still for a while keeps its lease, and neither it nor the site is thought to be away: so nothing is done twice.
PATIENCE = {"LEASE_S": "60", "CONNECT_TIMEOUT_S": "120", "READ_TIMEOUT_S": "120", "TOTAL_TIMEOUT_S": "300"}


@pytest.fixture
def limpet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Limpet:
    """Calls a command in a folder that is empty at first, in an environment whose only settings are those of a patient crawler."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LIMPET_")]:
        monkeypatch.delenv(name)
    for name, value in PATIENCE.items():
        monkeypatch.setenv(f"LIMPET_{name}", value)

    def call(*argv: object, stdin: str | bytes = b"") -> Ended:
        given = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        code = main([str(word) for word in argv])
        printed = capsys.readouterr()
        return Ended(int(code), printed.out, printed.err)

    return call


@pytest.fixture(scope="session")
def shop() -> Iterator[Site]:
    """A small shop without faults, on two hosts; the same for all tests, so nothing may depend on its counts."""
    with running(Shop(products=40, hosts=2)) as served:
        yield served
