"""What surrounds a job on servers: poolers, replicas, networks that break, roles that may little.

What needs root, or a program that is not installed, is left out here, and the header names it; in CI nothing may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.nursery import Nursery, nursery
from tests.servers import netns, pgbouncer, ray_cluster
from tests.servers.kinds import chosen

#: Its database was left out by LIMPET_DATABASES, which the header of all tests says.
NOT_CHOSEN = "database"


def _lacking(item: pytest.Item) -> str:
    """What a test needs and this machine does not have; '' where it can run."""
    if item.get_closest_marker("needs_namespaces") and not netns.can_be_made():
        return "network namespaces (root, and iproute2)"
    kind = item.callspec.params.get("kind") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    if kind and kind not in chosen(os.environ)[0]:
        return NOT_CHOSEN
    if item.get_closest_marker("needs_postgres") and "postgres" not in chosen(os.environ)[0]:
        return NOT_CHOSEN
    if item.get_closest_marker("needs_ray") and not ray_cluster.is_installed():
        return "ray"
    if item.get_closest_marker("needs_pgbouncer") and not pgbouncer.is_installed():
        return "pgbouncer"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot be had here; in CI that is an error."""
    without = {item: why for item in items if (why := _lacking(item))}
    if not without:
        return
    named = ", ".join(sorted({*without.values()} - {NOT_CHOSEN}))
    if named and os.environ.get("CI") == "true":
        raise pytest.UsageError(f"cannot test what surrounds a job: {named} missing")
    config.hook.pytest_deselected(items=list(without))
    items[:] = [item for item in items if item not in without]


def pytest_report_header() -> str:
    """What is left out here."""
    had = {"namespaces": netns.can_be_made(), "pgbouncer": pgbouncer.is_installed(), "ray": ray_cluster.is_installed()}
    left_out = [name for name, there in had.items() if not there]
    return f"outside: {'left out: ' + ', '.join(left_out) if left_out else 'everything'}"


@pytest.fixture(scope="session")
def forks() -> Iterator[Nursery]:
    """One nursery for all."""
    with nursery() as opened:
        yield opened
