"""Tasks of the event loop that take themselves out of a table when they end, also one that was cancelled before its first step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def start(tasks: dict[int, asyncio.Task[None]], key: int, trying: Coroutine[Any, Any, None], never_began: Callable[[], None]) -> None:
    """Run a coroutine that takes `key` out of `tasks` itself, in a `finally`.

    Cancelled before its first step, none of it runs, its `finally` neither: whoever waits until the table is empty would wait
    for ever. Then `never_began` is called, once the key is out.
    """
    task = tasks[key] = asyncio.create_task(trying)

    def ended(_: asyncio.Task[None]) -> None:
        if tasks.get(key) is task:
            del tasks[key]
            never_began()

    task.add_done_callback(ended)
