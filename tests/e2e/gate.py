"""A gate before the answers of a demo shop: shut, it lets no crawl get further, however slow the test's own process is.

with gated(Shop(products=120), latency_s=0.02) as (site, gate):
    gate.shut_after(60)
    child = ...; until(lambda: site.stats.requests > 60)
    child.kill()                        it has asked for more, and cannot be done
    gate.open()
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running


class Gate(io.StringIO):
    """The log of a demo shop, in which a line is written before each answer is sent: where that waits, the whole shop does."""

    def __init__(self) -> None:
        super().__init__()
        self._may_pass = threading.Condition()
        self._left = math.inf

    def write(self, text: str) -> int:
        """One line, once the gate is open."""
        with self._may_pass:
            self._may_pass.wait_for(lambda: self._left > 0)
            self._left -= 1
            return super().write(text)

    def shut_after(self, answers: int) -> None:
        """Let so many answers more pass, and then none. Whoever asked for one more is seen in the site's counts."""
        with self._may_pass:
            self._left = answers
            self._may_pass.notify_all()

    def open(self) -> None:
        """Let all pass."""
        with self._may_pass:
            self._left = math.inf
            self._may_pass.notify_all()


@contextmanager
def gated(shop: Shop, **options: Any) -> Iterator[tuple[Site, Gate]]:
    """Serve a shop behind a gate, which is open at first, and in the end."""
    gate = Gate()
    with running(shop, log=gate, **options) as site:
        try:
            yield site, gate
        finally:
            gate.open()
