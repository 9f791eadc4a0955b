"""After a power cut at any moment the file opens, its proof passes, and every acknowledged record is there."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import apsw
import pytest

from tests.crash.powercut import Disk, Findings, cuts, inspect, lay
from tests.crash.recorder import Operation, operations
from tests.crash.trial import Trial

NewTrial = Callable[..., Trial]

#: Checkpoints in the middle of a crawl that is too short for any.
SMALL_WAL = {"limpet.store.sqlite.WAL_PAGES": 100}


def recorded(trial: Trial, synchronous: str = "FULL") -> list[Operation]:
    """Every operation of an undisturbed crawl."""
    recording = trial.folder / "recording"
    code, printed = trial.run(recording=str(recording), acks="", synchronous=synchronous, constants=SMALL_WAL)
    assert code == 0, printed
    found = list(operations(recording))
    done = {(operation.what, operation.name[-4:]) for operation in found}
    assert done >= {("open", "l.db"), ("open", "-wal"), ("delete", "-wal"), ("ack", "")}
    assert sum(operation.what == "sync" for operation in found) > (25 if synchronous == "FULL" else 3)
    return found


def judged(trial: Trial, recording: list[Operation], *, every: int) -> Findings:
    """What several hundred disks hold."""
    return inspect(cuts(recording, seed=1, mixes=2, every=every), trial.folder / "disk")


def test_no_power_cut_loses_what_was_acknowledged(trial: Trial) -> None:
    """Nothing is lost, torn or unopenable on any disk that a cut can leave."""
    findings = judged(trial, recorded(trial), every=5)
    assert findings.is_clean, findings
    assert findings.distinct > 300


def test_a_store_that_does_not_sync_its_commits_is_found_out(trial: Trial) -> None:
    """The twin that must fail: with synchronous=NORMAL the file stays sound, and acknowledged records are gone."""
    findings = judged(trial, recorded(trial, "NORMAL"), every=10)
    assert findings.lost
    assert not findings.unopenable
    assert not findings.unproved


def test_a_crawl_goes_on_after_a_power_cut(new_trial: NewTrial) -> None:
    """From the disks of five cuts, each with another mix of what was not synced, to the records of an undisturbed crawl."""
    recording = recorded(new_trial(lease=0.3))
    states = list(cuts(recording, seed=2, mixes=1, every=len(recording) // 6))
    for content, acks in islice(states, 5, None, 3):
        trial = new_trial(lease=0.3)
        lay(content, trial.folder)
        trial.acks.write_text("".join(f"{ack}\n" for ack in acks))
        assert trial.wounds() == []
        trial.finish()
        assert trial.faults() == []


# -- the model itself -----------------------------------------------------------------------


def disk(*done: Operation) -> Disk:
    """A disk after some operations."""
    found = Disk()
    for operation in done:
        found.apply(operation)
    return found


MADE = Operation("open", 1, "a.db", is_new=True)
WAL = Operation("open", 2, "a.db-wal", is_new=True)
LONG = Operation("write", 2, data=b"x" * 5 * 512)


def test_a_file_whose_folder_was_never_synced_may_be_gone() -> None:
    """The sync of a new WAL makes the entry of both files sure; that of the database file alone does not."""
    rng = random.Random(1)
    assert disk(MADE, Operation("write", 1, data=b"x"), Operation("sync", 1)).cut(rng, 0) == {}
    assert disk(MADE, WAL, LONG, Operation("sync", 2)).cut(rng, 0) == {"a.db": b"", "a.db-wal": LONG.data}
    assert disk(MADE, WAL, Operation("sync", 2), Operation("delete", name="a.db-wal")).cut(rng, 0).keys() == {"a.db", "a.db-wal"}


def test_what_was_not_synced_may_be_there_in_part() -> None:
    """Sector by sector: of five, some mix leaves the second and not the first."""
    half_way = disk(MADE, WAL, Operation("sync", 2), LONG)
    mixes = {half_way.cut(random.Random(seed), 0.5)["a.db-wal"] for seed in range(50)}
    assert len(mixes) > 10
    assert any(mix[:512] == bytes(512) and mix[512:1024] == b"x" * 512 for mix in mixes)
    assert half_way.cut(random.Random(0), 0)["a.db-wal"] == b""
    assert half_way.cut(random.Random(0), 1)["a.db-wal"] == LONG.data


@pytest.mark.parametrize("name", ["open", "verify", "ack"])
def test_each_kind_of_damage_is_seen(trial: Trial, tmp_path: Path, name: str) -> None:
    """The inspection is not blind: a torn file, a missing row and a lost ack are three findings."""
    trial.finish()
    content = {"crawl.db": trial.db.read_bytes()}
    acks = trial.acks.read_text().splitlines()
    assert inspect(iter([(content, acks)]), tmp_path).is_clean
    if name == "open":
        content["crawl.db"] = content["crawl.db"][:512] + bytes(3584) + content["crawl.db"][4096:]
    elif name == "ack":
        acks.append("task 00")
    else:
        content["crawl.db"] = without_a_row(trial.db)
    findings = inspect(iter([(content, acks)]), tmp_path)
    found = {"open": findings.unopenable, "verify": findings.unproved, "ack": findings.lost}
    assert found[name]


def without_a_row(path: Path) -> bytes:
    """The file of a database that lacks an attempt row."""
    connection = apsw.Connection(str(path))
    connection.execute("DELETE FROM attempt WHERE task = (SELECT MIN(task) FROM attempt)")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return path.read_bytes()
