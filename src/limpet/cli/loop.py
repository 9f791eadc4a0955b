"""The event loop of a command: uvloop's where the extra `fast` is installed, else asyncio's own.

A crawl is held up by its event loop more than by its disk: uvloop took a tenth off the CPU time of a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine to its end; Ctrl-C cancels it, as `asyncio.run` has it."""
    with asyncio.Runner(loop_factory=_fastest()) as runner:
        return runner.run(coroutine)


def _fastest() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        found: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return found
