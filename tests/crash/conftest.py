"""Grounds for crash tests; each test has a crawl of its own on them, and the folder goes with the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from limpet.demo.catalogue import Shop
from tests.crash.nursery import Nursery, nursery
from tests.crash.trial import Ground, Trial, ground


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What only root or Linux can do is skipped elsewhere, and fails in CI, which is both."""
    if os.environ.get("CI") == "true":
        return
    for item in items:
        if os.geteuid() != 0 and item.get_closest_marker("needs_root"):
            item.add_marker(pytest.mark.skip(reason="only root may mount as this test does"))
        if sys.platform != "linux" and "forks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="processes are watched by /proc, which Linux has"))


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """One nursery for all."""
    with nursery() as opened:
        yield opened


@pytest.fixture(scope="session")
def small(forks: Nursery) -> Iterator[Ground]:
    """24 products on 3 hosts: 78 tasks, 15 commits, a fifth of a second."""
    with ground(Shop(products=24, hosts=3), forks=forks) as made:
        yield made


@pytest.fixture(scope="session")
def medium(forks: Nursery) -> Iterator[Ground]:
    """150 products: 312 tasks, a second, and a WAL of 4 MB."""
    with ground(Shop(products=150, hosts=3), forks=forks) as made:
        yield made


@pytest.fixture(scope="session")
def large(forks: Nursery) -> Iterator[Ground]:
    """500 products."""
    with ground(Shop(products=500, hosts=4), forks=forks) as made:
        yield made


@pytest.fixture(scope="session")
def slow(forks: Nursery) -> Iterator[Ground]:
    """200 products whose pages take their time, so that a crawl can be met in its middle."""
    with ground(Shop(products=200, hosts=3), latency_s=0.02, forks=forks) as made:
        yield made


@pytest.fixture
def trial(small: Ground) -> Iterator[Trial]:
    """A crawl of the small site."""
    made = small.trial()
    yield made
    made.remove()


@pytest.fixture
def new_trial(small: Ground) -> Iterator[Callable[..., Trial]]:
    """Makes crawls of the small site, one after the other."""
    made: list[Trial] = []

    def make(*spider: str, **flags: Any) -> Trial:
        made.append(small.trial(*spider, **flags))
        return made[-1]

    yield make
    for one in made:
        one.remove()
