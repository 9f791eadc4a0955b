"""Handlers that block: the event loop is freed, the thread is left, or the process ends; and only one task pays."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from limpet.engine.handle import Ending, How, handle
from limpet.engine.routes import handler_of
from limpet.engine.threads import HandlersStuck, HandlerThreads
from limpet.engine.tx import Tx
from limpet.engine.watchdog import Watchdog
from limpet.errors import HandlerRevoked, Retry
from tests.unit.test_handle import LONG_S, Row, ended, tx_and_page

#: A time-out that everything here that blocks reaches. After a second one the watchdog ends the process, which is this one:
#: so long that the interpreter gets its turn in between on a busy machine, too.
SHORT_S = 0.4

# Handlers that block the loop.


def sleeps() -> None:
    time.sleep(1e6)


def spins() -> None:
    while True:
        pass


def spins_and_swallows_exceptions() -> None:
    while True:
        with contextlib.suppress(Exception):
            while True:
                pass


def hopeless_regex() -> None:
    re.fullmatch(r"(a|aa)+b", "a" * 200)


def blocks_on_a_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


def blocks_on_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


LOOPS = [pytest.param(None, id="asyncio")]
with contextlib.suppress(ImportError):
    import uvloop

    LOOPS.append(pytest.param(uvloop.new_event_loop, id="uvloop"))
BLOCKERS = [sleeps, spins, spins_and_swallows_exceptions, hopeless_regex, blocks_on_a_socket, blocks_on_a_lock]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("block", BLOCKERS, ids=lambda function: function.__name__)
def test_a_handler_that_blocks_the_loop_costs_its_own_task_only(block: Callable[[], None], loop: Any) -> None:
    """It is interrupted where it stands, and the next one runs in the same loop."""

    async def blocks(tx: Tx) -> None:
        tx.emit(Row(id=1))
        await asyncio.sleep(0)
        block()

    with Watchdog(SHORT_S) as watchdog:
        ending = ended(blocks, timeout_s=SHORT_S, watchdog=watchdog, loop=loop)
        assert (ending.kind, ending.is_strike) == (How.TIMED_OUT, True)
        assert block.__name__ in ending.detail

        async def after(tx: Tx) -> None:
            await asyncio.sleep(0)

        assert ended(after, watchdog=watchdog, loop=loop).kind is How.DONE
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_PROF) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_loop_in_another_thread_is_freed_too() -> None:
    """Signals reach the main thread alone: there it is an asynchronous exception."""
    found: list[Ending] = []

    async def blocks(tx: Tx) -> None:
        spins()

    async def after(tx: Tx) -> None:
        await asyncio.sleep(0)

    def scene() -> None:
        with Watchdog(SHORT_S) as watchdog:
            found.extend(ended(function, timeout_s=SHORT_S, watchdog=watchdog) for function in (blocks, after))

    thread = threading.Thread(target=scene)
    thread.start()
    thread.join(30)
    assert [ending.kind for ending in found] == [How.TIMED_OUT, How.DONE]


def test_a_quick_handler_is_never_interrupted() -> None:
    """Steps of other handlers do not add up to one."""

    async def quick(tx: Tx) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    began = time.monotonic()
    with Watchdog(SHORT_S) as watchdog:
        while time.monotonic() - began < 4 * SHORT_S:
            assert ended(quick, watchdog=watchdog).kind is How.DONE


SCENE = """
import asyncio, collections, contextlib, itertools, sys, threading, time
from tests.unit.test_blocking import Watchdog, ended, How
async def blocks(tx):
    print("started", flush=True)
    {block}
def scene():
    with Watchdog({timeout_s}) as watchdog:
        print(ended(blocks, timeout_s={timeout_s}, watchdog=watchdog).kind.value, flush=True)
{run}
"""
IN_MAIN, IN_THREAD = "scene()", "threading.Thread(target=scene).start()"
KILLED = [
    # Python code that swallows every exception; a sleep that no exception reaches; C code that holds the interpreter.
    ("while True:\n        with contextlib.suppress(BaseException):\n            while True: pass", IN_MAIN, signal.SIGKILL),
    ("time.sleep(1e6)", IN_THREAD, signal.SIGKILL),
    ("collections.deque(itertools.repeat(None), maxlen=0)", IN_MAIN, signal.SIGVTALRM),
    ("collections.deque(itertools.repeat(None), maxlen=0)", IN_THREAD, signal.SIGVTALRM),
]


def started(block: str, run: str, timeout_s: float) -> subprocess.Popen[str]:
    """A process in which a handler has just begun to block."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCENE).format(block=block, run=run, timeout_s=timeout_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "started\n", process.communicate()[1]
    return process


@pytest.mark.parametrize(("block", "run", "ends_by"), KILLED)
def test_what_heeds_nothing_ends_the_process(block: str, run: str, ends_by: signal.Signals) -> None:
    """After a second time-out: then the task is a lost try, and as a suspect is found out."""
    process = started(block, run, 0.3)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (-ends_by, "")
    assert "most recent call first" in err  # where it stood
    assert ("http://h.test/a" in err) is (ends_by is signal.SIGKILL)  # the kernel does not know the task


def test_time_for_which_the_process_was_stopped_is_nobodys() -> None:
    """SIGSTOP for longer than both time-outs, then SIGCONT: the handler goes on to its end."""
    timeout_s = 3.0
    process = started("sys.stdin.readline()", IN_MAIN, timeout_s)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.2 * timeout_s)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate("go on\n", timeout=60)
    assert (process.returncode, out) == (0, "done\n"), err


# Handlers that are not async, in threads.


def in_threads(*functions: Callable[..., object], size: int = 2, timeout_s: float = LONG_S, **options: Any) -> list[Ending]:
    """What handlers end in that run side by side in threads."""

    async def scene() -> list[Ending]:
        threads = HandlerThreads(size, **options)
        try:
            return await asyncio.gather(*(one(function, threads) for function in functions))
        finally:
            threads.close()

    async def one(function: Callable[..., object], threads: HandlerThreads) -> Ending:
        tx, page = tx_and_page()
        return await handle(handler_of(function), page, tx, {}, timeout_s=timeout_s, threads=threads)

    return asyncio.run(scene())


def test_sync_handlers_run_side_by_side() -> None:
    """Each waits for the other: one after the other they would never end."""
    meet = threading.Barrier(2)

    def meets(tx: Tx) -> None:
        meet.wait(30)
        tx.emit(Row(id=1))

    assert [ending.kind for ending in in_threads(meets, meets)] == [How.DONE, How.DONE]


def test_no_more_sync_handlers_run_than_there_are_threads() -> None:
    """The rest waits, and waiting is not a part of its time."""
    running: list[int] = []
    most: list[int] = []

    def counts(tx: Tx) -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0)
        running.pop()

    assert {ending.kind for ending in in_threads(*[counts] * 50, size=3)} == {How.DONE}
    assert max(most) <= 3


def test_a_sync_handler_may_raise_whatever_it_likes() -> None:
    """Also what a future would refuse."""

    def stops(tx: Tx) -> None:
        raise StopIteration

    def exits(tx: Tx) -> None:
        raise SystemExit

    def retries(tx: Tx) -> None:
        raise Retry("not yet")

    kinds = [(ending.kind, ending.reason) for ending in in_threads(stops, exits, retries)]
    assert kinds[1:] == [(How.CRASHED, "handler:SystemExit"), (How.RETRY, "not yet")]
    assert kinds[0][0] is How.CRASHED


def test_a_sync_handler_over_its_time_is_left_and_its_late_write_raises() -> None:
    """P30: its thread goes on, but its tx takes nothing any more."""
    go_on, seen = threading.Event(), threading.Event()
    late: list[object] = []

    def waits(tx: Tx) -> None:
        socket_like_wait(go_on)
        try:
            tx.emit(Row(id=1))
        except HandlerRevoked as error:
            late.append(error)
        finally:
            seen.set()

    def socket_like_wait(event: threading.Event) -> None:
        with contextlib.suppress(BaseException):
            event.wait(30)

    (ending,) = in_threads(waits, timeout_s=SHORT_S)
    assert (ending.kind, ending.is_strike) == (How.TIMED_OUT, True)
    go_on.set()
    assert seen.wait(30)
    assert [type(error) for error in late] == [HandlerRevoked]


def test_python_code_in_a_thread_is_interrupted_at_its_time_out() -> None:
    """It would take its share of the interpreter for ever."""
    ended_threads = threading.Event()

    def spins_in_a_thread(tx: Tx) -> None:
        try:
            spins()
        finally:
            ended_threads.set()

    (ending,) = in_threads(spins_in_a_thread, timeout_s=SHORT_S)
    assert ending.kind is How.TIMED_OUT
    assert ended_threads.wait(30)


def test_where_all_threads_are_stuck_the_engine_is_told() -> None:
    """No task is blamed for it."""
    go_on = threading.Event()

    def hangs(tx: Tx) -> None:
        with contextlib.suppress(BaseException):
            go_on.wait(30)

    async def scene() -> None:
        threads = HandlerThreads(1, stuck_max=2)
        for _ in range(2):
            tx, page = tx_and_page()
            ending = await handle(handler_of(hangs), page, tx, {}, timeout_s=SHORT_S, threads=threads)
            assert ending.kind is How.TIMED_OUT
        assert threads.stuck == 2
        tx, page = tx_and_page()
        with pytest.raises(HandlersStuck, match="2 handlers hang in threads"):
            await handle(handler_of(hangs), page, tx, {}, timeout_s=SHORT_S, threads=threads)
        assert tx.offers() == ()
        go_on.set()

    asyncio.run(scene())
