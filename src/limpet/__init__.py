"""Limpet: a crawler that cannot lose its place.

What a user writes is imported from here; everything else has its place in a module of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from limpet.engine.calling import Http, Reply
from limpet.engine.calls import Call, Start, Tariff, call, places
from limpet.engine.lastwords import DeadTask
from limpet.engine.request import Request
from limpet.engine.spider import Spider
from limpet.engine.tx import Tx
from limpet.errors import (
    Blocked,
    Dead,
    FetchError,
    HandlerRevoked,
    LimpetError,
    Missing,
    OwnershipLost,
    RecordError,
    Retry,
    Skip,
    StoreError,
    UsageError,
)
from limpet.fetch.page import Anchor, Page
from limpet.record import field, record
from limpet.url import KeyProfile, SiteRule

if TYPE_CHECKING:
    from limpet.reading import open

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`limpet.open` brings the store with it, which most of a command line never needs: it is imported when it is asked for."""
    if name == "open":
        from limpet.reading import open

        return open
    raise AttributeError(f"module 'limpet' has no attribute {name!r}")


__all__ = [
    "Anchor",
    "Blocked",
    "Call",
    "Dead",
    "DeadTask",
    "FetchError",
    "HandlerRevoked",
    "Http",
    "KeyProfile",
    "LimpetError",
    "Missing",
    "OwnershipLost",
    "Page",
    "RecordError",
    "Reply",
    "Request",
    "Retry",
    "SiteRule",
    "Skip",
    "Spider",
    "Start",
    "StoreError",
    "Tariff",
    "Tx",
    "UsageError",
    "call",
    "field",
    "open",
    "places",
    "record",
]
