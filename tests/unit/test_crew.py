"""What a crew of worker processes is told, how it is asked to stop, and what it comes to."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal

import pytest

from limpet.cli.arguments import parser
from limpet.cli.crew import NUMBER, _marked, crew_of, ended_of, how_it_ended, number_in_crew, size_of
from limpet.engine.oversight import Ended, Gauge, verdict
from limpet.engine.stopping import Stopping
from limpet.errors import StoreUnavailable, UsageError
from limpet.settings import Settings
from limpet.store.standing import Counts

# -- what they are told -----------------------------------------------------------------------


def asked(*words: str) -> argparse.Namespace:
    """The arguments of a call."""
    return parser().parse_args(list(words))


def test_a_crew_is_told_every_flag_and_no_password_is_on_its_command_line() -> None:
    """Settings, parameters and the address go by the environment, which `ps` does not show to others; the rest `worker` knows."""
    words = ["run", "shop.py", "--workers", "3", "--delay", "2", "--no-robots", "--solo-backoff", "5,120", "--user-agent", "me/1"]
    args = asked(*words, "--param", "country=fr", "--slot", "2026-12-01", "--log-format", "json", "--debug")
    crew = crew_of(args, Settings(), "postgresql://me:secret@db/crawl")
    assert (crew.size, crew.as_json) == (3, True)
    assert "secret" not in " ".join(crew.command)
    told = {name: crew.environment[f"LIMPET_{name}"] for name in ("DB", "DELAY_S", "ROBOTS", "SOLO_BACKOFF_S", "USER_AGENT")}
    address = "postgresql://me:secret@db/crawl"
    assert told == {"DB": address, "DELAY_S": "2.0", "ROBOTS": "false", "SOLO_BACKOFF_S": "5.0,120.0", "USER_AGENT": "me/1"}
    assert "LIMPET_CONCURRENCY" not in crew.environment
    worker = parser().parse_args([*crew.command[3:]])
    assert (worker.command, worker.file, worker.slot, worker.param) == ("worker", "shop.py", "2026-12-01", [])
    assert json.loads(crew.environment["LIMPET_PARAMS"]) == {"country": "fr"}
    assert (worker.json, worker.debug, worker.log_format) == (True, True, "json")


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1e3", "9999"])
def test_no_other_number_of_workers_is_taken(text: str) -> None:
    """A number from 1 on, or auto; the message says so."""
    with pytest.raises(SystemExit):
        asked("run", "shop.py", f"--workers={text}")


def test_auto_is_a_worker_for_each_processor_and_no_more_than_shards() -> None:
    """A worker without a shard would only wait."""
    assert size_of("auto", 1) == 1
    assert 1 <= size_of("auto", 1000) <= (os.cpu_count() or 1)
    assert size_of("7", 2) == 7


def test_a_worker_knows_its_number_once_and_passes_it_on_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handler starts is no member of the crew."""
    monkeypatch.setenv(NUMBER, "3")
    assert number_in_crew() == 3
    assert NUMBER not in os.environ
    assert number_in_crew() is None
    monkeypatch.setenv(NUMBER, "x")
    with pytest.raises(UsageError, match=NUMBER):
        number_in_crew()


# -- what they say ------------------------------------------------------------------------------


def test_each_line_of_a_worker_says_whose_it_is() -> None:
    """As text, and as JSON, also where a library prints what is none; control characters are written out."""
    assert _marked("WARNING x", 2, as_json=False) == "[worker 2] WARNING x"
    assert _marked("a\x1b[31m", 1, as_json=False) == "[worker 1] a\\x1b[31m"
    assert json.loads(_marked('{"level": "info", "message": "m"}', 3, as_json=True)) == {"level": "info", "message": "m", "worker": 3}
    assert json.loads(_marked("Traceback", 3, as_json=True)) == {"level": "error", "message": "Traceback", "worker": 3}
    assert json.loads(_marked("[1]", 3, as_json=True))["message"] == "[1]"


def test_what_a_worker_reported_is_read_and_what_it_could_not_say_is_empty() -> None:
    """A report, an error of the command line, nothing at all, and half a line."""
    assert ended_of(0, b'{"v": 1, "message": "complete", "requests": 12}\n') == Ended(0, "complete", 12)
    assert ended_of(2, b'{"v": 1, "error": {"kind": "UsageError", "message": "no file", "exit_code": 2}}\n') == Ended(2, "no file", 0)
    assert ended_of(-9, b"") == Ended(-9)
    assert ended_of(1, b'noise\n{"mess') == Ended(1)
    assert (how_it_ended(-signal.SIGSEGV), how_it_ended(3)) == ("was killed by SIGSEGV", "ended with exit code 3")


# -- stopping ---------------------------------------------------------------------------------------


async def turns(number: int = 3) -> None:
    """Let the loop see what came."""
    for _ in range(number):
        await asyncio.sleep(0)


def test_one_wish_that_comes_by_two_ways_is_one_and_a_second_is_a_second() -> None:
    """A terminal signals the whole group, and the command passes it on to each: a worker counts the larger number."""

    async def live() -> list[int]:
        heard: list[int] = []
        stopping = Stopping(lambda: heard.append(stopping.count))
        reading, writing = os.pipe()
        with stopping.listening(to_signals=True, to_parent=reading):
            os.kill(os.getpid(), signal.SIGINT)
            os.write(writing, b"s")
            await turns()
            assert stopping.count == 1
            os.write(writing, b"s")
            await turns()
            os.kill(os.getpid(), signal.SIGTERM)
            await turns()
            assert stopping.count == 2
        os.close(reading)
        os.close(writing)
        return heard

    assert asyncio.run(live()) == [1, 2]


def test_the_end_of_the_parent_is_a_wish_to_stop() -> None:
    """The line closes, however it died; where it had asked before, that is no second wish."""

    async def live(before: bytes) -> int:
        stopping = Stopping(lambda: None)
        reading, writing = os.pipe()
        with stopping.listening(to_signals=False, to_parent=reading):
            os.write(writing, before)
            await turns()
            os.close(writing)
            await turns()
        os.close(reading)
        return stopping.count

    assert [asyncio.run(live(before)) for before in (b"", b"s", b"ss")] == [1, 1, 2]


def test_signals_are_only_heard_while_the_block_runs() -> None:
    """Afterwards they mean what they meant before."""
    before = signal.getsignal(signal.SIGTERM)

    async def live() -> int:
        stopping = Stopping(lambda: None)
        with stopping.listening(to_signals=True):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) == before
        return stopping.count

    assert asyncio.run(live()) == 0


def test_who_listens_inside_another_takes_no_signal_from_it_and_knows_what_it_has_heard() -> None:
    """A worker that waits for jobs listens all the time, and each job's work for itself: no signal falls between two of them."""

    async def live() -> list[int]:
        outer, first, second = (Stopping(lambda: None) for _ in range(3))
        with outer.listening(to_signals=True):
            with first.listening(to_signals=True):
                os.kill(os.getpid(), signal.SIGTERM)
                await turns()
            os.kill(os.getpid(), signal.SIGTERM)
            await turns()
            with second.listening(to_signals=True):
                await turns()
        return [outer.count, first.count, second.count]

    assert asyncio.run(live()) == [2, 1, 2]


# -- what it comes to -----------------------------------------------------------------------------


VERDICTS = [
    ("stopped by a signal", [Ended(4), Ended(4)], {"stops": 1}, 4, "run the same command again"),
    ("a signal wins over a stall", [Ended(7, "parked"), Ended(4)], {"stops": 1}, 4, "run the same command again"),
    ("the page limit", [Ended(5), Ended(5)], {"pages_done": 10, "pages_max": 10}, 5, "larger --max-pages"),
    ("a fault of ours", [Ended(7, "parked"), Ended(1, "TypeError: x")], {}, 1, "TypeError: x"),
    ("a wrong call", [Ended(2, "no handler"), Ended(7, "parked")], {}, 2, "no handler"),
    ("a stall", [Ended(0), Ended(7, "only parked tasks are left")], {}, 7, "only parked tasks are left"),
    ("a full disk", [Ended(4, "the disk is full"), Ended(4)], {}, 4, "the disk is full"),
    ("killed again and again", [Ended(-9), Ended(-9)], {}, 4, "run the same command again"),
]


@pytest.mark.parametrize(("ended", "more", "code", "words"), [row[1:] for row in VERDICTS], ids=[row[0] for row in VERDICTS])
def test_a_crew_that_leaves_an_open_job_says_why(ended: list[Ended], more: dict[str, int], code: int, words: str) -> None:
    """The database has said already that the job is neither complete, nor halted, nor paused."""
    found, message = verdict(ended, **{"stops": 0, "pages_done": 0, "pages_max": 0, **more})
    assert (found, words in message) == (code, True), message


def test_the_gauge_goes_on_while_the_database_is_away_and_tells_the_rate_of_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pages in two seconds are five a second; an error leaves the last counts."""
    monkeypatch.setattr("limpet.engine.oversight.LOOK_S", 0.0)

    async def live() -> list[tuple[int, float]]:
        seconds = iter([0.0, 0.0, 2.0, 2.0, 3.0, 3.0])
        answers = iter([Counts(20, 0, 0, 0, {}), StoreUnavailable("away"), Counts(20, 15, 0, 0, {})])
        seen: list[tuple[int, float]] = []
        done = asyncio.Event()

        async def read() -> Counts:
            answer = next(answers)
            if isinstance(answer, StoreUnavailable):
                raise answer
            return answer

        gauge = Gauge(read, clock=lambda: next(seconds))

        def note(counts: Counts) -> None:
            seen.append((counts.done, gauge.done_per_s))
            if len(seen) == 2:
                done.set()

        gauge.on_read = note
        keeping = asyncio.create_task(gauge.keep())
        await asyncio.wait_for(done.wait(), 60)
        keeping.cancel()
        return seen

    assert asyncio.run(live()) == [(0, 0.0), (15, 5.0)]
