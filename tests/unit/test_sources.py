"""Which source a worker reads next, and what it makes of one that it cannot read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from limpet import Spider
from limpet.engine.links import Linker
from limpet.engine.onethread import OneThread
from limpet.engine.sources import SourceReader
from limpet.scope import Scope
from limpet.store.jobs import SourceRow
from limpet.task import ShardId

SHARDS = 4


def listed(source: int, start: str) -> SourceRow:
    """A list of one start."""
    return SourceRow(source, "given", bytes(16), "", "", f'["{start}"]', 0, closed=False)


def filed(source: int, place: Path) -> SourceRow:
    """A file of starts."""
    return SourceRow(source, "file", bytes(16), str(place), "", "", 0, closed=False)


def reader_of(*rows: SourceRow) -> SourceReader:
    """A reader of these sources."""
    spider = Spider("any")
    return SourceReader(Linker(spider.profile, Scope.of(spider.scope, [], hosts=spider.hosts), shards=SHARDS), rows, spider)


def owned(*shards: int) -> set[ShardId]:
    """Some shards."""
    return {ShardId(shard) for shard in shards}


def test_a_worker_turns_to_the_sources_of_its_own_shards() -> None:
    """Those of others do not stand in the way, and come again once their shards are had."""
    reader = reader_of(listed(1, "http://a.test/"), listed(2, "http://b.test/"))
    assert reader.turn_to(SHARDS, owned(2, 3)) == 2
    move = reader.read()
    assert (move.source, [link.text for link in move.links]) == (2, ["http://b.test/"])
    reader.moved(move)
    assert reader.turn_to(SHARDS, owned(2, 3)) is None
    assert not reader.is_done
    assert reader.turn_to(SHARDS, owned(1)) == 1


@pytest.mark.parametrize("is_given_again", [False, True])
def test_what_cannot_be_read_is_set_aside_until_its_row_has_changed(tmp_path: Path, is_given_again: bool) -> None:
    """The next one is read meanwhile; what is wrong is known for as long as it is."""
    gone = filed(1, tmp_path / "gone.txt")
    reader = reader_of(gone, listed(2, "http://b.test/"))

    async def tried() -> None:
        reading = OneThread("reading")
        try:
            assert reader.turn_to(SHARDS, owned(1, 2)) == 1
            assert await reader.next_move(reading) is None
        finally:
            reading.close()

    asyncio.run(tried())
    assert reader.turn_to(SHARDS, owned(1, 2)) == 2
    assert "gone.txt" in reader.trouble
    reader.refresh([replace(gone, place=str(tmp_path / "there.txt")) if is_given_again else gone])
    assert reader.turn_to(SHARDS, owned(1, 2)) == (1 if is_given_again else None)
    assert bool(reader.trouble) is not is_given_again
