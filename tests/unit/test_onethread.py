"""The way from the loop to the store: calls one after the other, and questions that share one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Event

import pytest

from limpet.engine.onethread import OneThread, Together
from limpet.errors import StoreBusy, StoreUnavailable


class Asked:
    """Answers yes for keys that begin with "y", and keeps what it was asked; the first call waits until it may go on."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.may_answer = Event()

    def __call__(self, keys: Sequence[bytes]) -> set[bytes]:
        self.calls.append(list(keys))
        if b"error" in keys:
            raise StoreUnavailable("the disk is gone")
        self.may_answer.wait(60)
        return {key for key in keys if key.startswith(b"y")}


def test_questions_that_come_together_are_one_call() -> None:
    """Those of one turn of the loop share a call, those that come meanwhile the next; each gets its own answer."""

    async def main() -> None:
        thread, asked = OneThread("test"), Asked()
        together = Together(thread, asked)
        first = [asyncio.create_task(together.ask(key)) for key in (b"y1", b"n1", b"y1")]
        while not asked.calls:
            await asyncio.sleep(0)
        later = [asyncio.create_task(together.ask(key)) for key in (b"n2", b"y2")]
        await asyncio.sleep(0)
        asked.may_answer.set()
        assert await asyncio.gather(*first, *later) == [True, False, True, False, True]
        assert asked.calls == [[b"y1", b"n1", b"y1"], [b"n2", b"y2"]]
        thread.close()

    asyncio.run(main())


def test_an_error_reaches_everybody_who_asked_and_nobody_after() -> None:
    """The next question is asked anew."""

    async def main() -> None:
        thread, asked = OneThread("test"), Asked()
        asked.may_answer.set()
        together = Together(thread, asked)
        failed = await asyncio.gather(together.ask(b"error"), together.ask(b"y"), return_exceptions=True)
        assert [type(error) for error in failed] == [StoreUnavailable, StoreUnavailable]
        assert await together.ask(b"y")
        thread.close()

    asyncio.run(main())


def test_who_is_cancelled_takes_nobody_along() -> None:
    """The others of the same call get their answers."""

    async def main() -> None:
        thread, asked = OneThread("test"), Asked()
        together = Together(thread, asked)
        one, other = (asyncio.create_task(together.ask(b"y")) for _ in range(2))
        while not asked.calls:
            await asyncio.sleep(0)
        one.cancel()
        asked.may_answer.set()
        assert await other
        with pytest.raises(asyncio.CancelledError):
            await one
        thread.close()

    asyncio.run(main())


def test_a_transaction_that_meets_a_busy_database_is_asked_for_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two refusals are no refusal; where it goes on for too long, the caller hears of it. No other error is asked about twice."""
    asked: list[str] = []

    def refuse(times: int, error: Exception) -> int:
        asked.append("")
        if len(asked) <= times:
            raise error
        return len(asked)

    async def main() -> None:
        thread = OneThread("test")
        assert await thread.call_when_free(refuse, 2, StoreBusy("locked")) == 3
        asked.clear()
        with pytest.raises(StoreUnavailable):
            await thread.call_when_free(refuse, 2, StoreUnavailable("gone"))
        assert len(asked) == 1
        monkeypatch.setattr("limpet.engine.onethread.BUSY_S", 0.0)
        with pytest.raises(StoreBusy):
            await thread.call_when_free(refuse, 10**6, StoreBusy("locked"))
        thread.close()

    asyncio.run(main())
