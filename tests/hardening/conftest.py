"""One nursery for all."""

from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery, nursery


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """One nursery for all."""
    with nursery() as opened:
        yield opened
