"""A try that is cancelled before its first step is taken out of the table all the same."""

from __future__ import annotations

import asyncio

from limpet.engine.starting import start


def test_a_task_that_never_began_is_taken_out_and_told() -> None:
    """Two signals in a row: the second one cancels what the loop has not yet come to."""
    tasks: dict[int, asyncio.Task[None]] = {}
    told: list[str] = []

    async def trying() -> None:
        told.append("began")

    async def stopped() -> None:
        start(tasks, 1, trying(), lambda: told.append("never began"))
        tasks[1].cancel()
        while tasks:
            await asyncio.wait(tasks.values(), timeout=10)

    asyncio.run(stopped())
    assert told == ["never began"]


def test_a_task_that_began_takes_itself_out() -> None:
    """Whatever ends it."""
    tasks: dict[int, asyncio.Task[None]] = {}
    told: list[str] = []

    async def trying() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            told.append("ended")
            del tasks[1]

    async def stopped() -> None:
        start(tasks, 1, trying(), lambda: told.append("never began"))
        await asyncio.sleep(0)
        tasks[1].cancel()
        while tasks:
            await asyncio.wait(tasks.values(), timeout=10)

    asyncio.run(stopped())
    assert told == ["ended"]
