"""Disks that are full, read-only, damaged, taken away or locked: a clear message, nothing lost, and the crawl goes on later."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import apsw
import pytest

from limpet.store.opening import connect
from tests.crash.judge import acks_in, lost
from tests.crash.nursery import Born
from tests.crash.sweep import IMPATIENT
from tests.crash.trial import Ground, Trial

#: `nobody` on Linux: a user who may read everything here and write nothing.
NOBODY = 65534


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes at a folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change a disk while it is in use."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def wal_bytes(trial: Trial) -> int:
    """The size of the WAL of an undisturbed crawl at its largest."""
    born, most = trial.start(), 0

    def look() -> bool:
        nonlocal most
        wal = Path(f"{trial.db}-wal")
        most = max(most, wal.stat().st_size if wal.exists() else 0)
        return False

    born.until(look)
    return most


# -- full -----------------------------------------------------------------------------------


@pytest.mark.needs_root
def test_a_crawl_on_a_disk_that_gets_full_stops_and_goes_on_when_there_is_space(medium: Ground) -> None:
    """At a third, at two thirds and near its end: soon, with exit code 4, and a proof passes on the full disk."""
    most = wal_bytes(medium.trial())
    with ExitStack() as stack:
        sizes = [int(most * share) for share in (0.3, 0.6, 0.8)]
        started = [begun(stack, medium, size) for size in sizes]
        for trial, _ in [stopped(stack, medium, size, *its) for size, its in zip(sizes, started, strict=True)]:
            assert trial.limpet("verify", "--full")[0] == 0
            remount(trial.db.parent, "size=64m")
            assert trial.wounds() == []
            trial.finish()
            assert trial.faults() == []


def on_small_disk(stack: ExitStack, trial: Trial, size: int) -> Trial:
    """The same trial, its database alone on a small disk."""
    trial.place = stack.enter_context(disk(trial.folder / "disk", size))
    return trial


def begun(stack: ExitStack, medium: Ground, size: int) -> tuple[Trial, Born]:
    """A crawl on a disk of that size, and its first life."""
    trial = on_small_disk(stack, medium.trial(), size)
    return trial, trial.start()


def is_full(trial: Trial) -> bool:
    """Whether there is no space left on the disk of a trial."""
    return os.statvfs(trial.db.parent).f_bfree <= 1


def stopped(stack: ExitStack, medium: Ground, size: int, trial: Trial, born: Born) -> tuple[Trial, Born]:
    """A life that ran into its full disk, and said so; one that needed less than the crawl that was measured has a smaller one."""
    while not born.until(partial(is_full, trial)) and born.ended() == 0:
        size = size * 3 // 4
        trial, born = begun(stack, medium, size)
    assert born.ended() == 4, born.printed()
    lines = [line for line in born.printed().splitlines() if "the disk is full" in line]
    assert len(lines) == len(set(lines)), "the same is said again and again"
    assert len(lines) <= 3
    assert all(line.count("lost") == 1 for line in lines)
    assert str(trial.db) in born.printed()
    return trial, born


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_a_crawl_whose_file_may_not_grow_stops_and_goes_on_when_it_may(medium: Ground, share: float) -> None:
    """RLIMIT_FSIZE, which needs no root: the write fails in the middle of the file."""
    trial = medium.trial()
    code, printed = trial.run(file_bytes_max=int(share * 3_000_000), constants=IMPATIENT)
    assert code == 4, printed
    assert str(trial.db) in printed
    assert trial.wounds() == []
    assert 0 < trial.books().states["done"] < 160
    trial.finish()
    assert trial.faults() == []


# -- read-only ------------------------------------------------------------------------------


@pytest.mark.needs_root
def test_a_crawl_on_a_disk_that_became_read_only_says_so_and_goes_on_when_it_is_not(small: Ground) -> None:
    """Stopped half way, mounted read-only, started: exit code 4, and a proof passes all the same."""
    with ExitStack() as stack:
        trial = on_small_disk(stack, half_done(small.trial()), 64 * 2**20)
        move(trial)
        remount(trial.db.parent, "ro")
        code, printed = trial.run()
        assert code == 4, printed
        assert str(trial.db) in printed
        assert trial.limpet("verify", "--full")[0] == 0
        remount(trial.db.parent, "rw")
        assert trial.wounds() == []
        trial.finish()
        assert trial.faults() == []


@pytest.mark.needs_root
def test_a_crawl_by_somebody_who_may_not_write_says_so(small: Ground) -> None:
    """Another user's file: exit code 4 with its name, and its owner goes on."""
    trial = half_done(small.trial())
    for folder in (small.folder, trial.folder):
        folder.chmod(0o755)
    before = trial.db.read_bytes()
    output = small.folder / "output-nobody"
    output.touch()
    life = replace(trial.life(acks=""), output=str(output), user=NOBODY)
    born = small.forks.run(life)
    assert small.forks.codes[born.pid] == 4, born.printed()
    assert str(trial.db) in born.printed()
    assert trial.db.read_bytes() == before
    trial.finish()
    assert trial.faults() == []


def half_done(trial: Trial) -> Trial:
    """The same trial after a clean stop in the middle of the crawl."""
    code, printed = trial.run(flags={"max-pages": 20})
    assert code == 5, printed
    assert not Path(f"{trial.db}-wal").exists()
    return trial


def move(trial: Trial) -> None:
    """Take the database to the place that the trial has now."""
    shutil.move(trial.folder / "crawl.db", trial.db)


# -- taken away, locked -----------------------------------------------------------------------


def test_a_database_that_is_moved_while_it_is_open_is_not_written_to_any_more(medium: Ground) -> None:
    """What is written to a file without a name would be gone with it; put back, the crawl goes on."""
    trial = medium.trial()
    born = trial.held(constants=IMPATIENT)
    elsewhere = trial.folder / "elsewhere"
    elsewhere.mkdir()
    for suffix in ("", "-wal"):
        Path(f"{trial.db}{suffix}").rename(elsewhere / f"{trial.db.name}{suffix}")
    trial.let_go()
    assert born.ended() == 4, born.printed()
    assert "moved or deleted while it was open" in born.printed()
    assert not trial.db.exists()
    for suffix in ("", "-wal"):
        if (left := elsewhere / f"{trial.db.name}{suffix}").exists():
            left.rename(f"{trial.db}{suffix}")
    assert trial.wounds() == []
    trial.finish()
    assert trial.faults() == []


def locked(trial: Trial) -> apsw.Connection:
    """The write lock, held by this process."""
    connection = apsw.Connection(str(trial.db))
    connection.set_busy_timeout(10_000)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def test_a_crawl_beside_another_program_that_holds_the_file_names_it(trial: Trial) -> None:
    """At its start: exit code 4, the message names the other process, and the file is as it was."""
    other = locked(half_done(trial))
    code, printed = trial.run()
    assert code == 4, printed
    assert f"process {os.getpid()}" in printed
    assert str(trial.db) in printed
    other.execute("ROLLBACK")
    other.close()
    trial.finish()
    assert trial.faults() == []


def test_a_crawl_waits_for_another_program_that_writes_for_a_moment(medium: Ground) -> None:
    """In its middle: it neither ends nor loses anything."""
    trial = medium.trial()
    born = trial.held()
    other = locked(trial)
    trial.let_go()
    assert born.wait(0.6) is None
    reader = connect(str(trial.db), readonly=True)
    assert lost(reader, acks_in(trial.acks)) == []  # nothing is acknowledged that could not be written meanwhile
    reader.close()
    other.execute("ROLLBACK")
    other.close()
    assert born.ended() == 0, born.printed()
    assert trial.faults() == []


# -- damaged --------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["task", "task_text", "attempt", "ledger", "shard", "shelf_product", "shelf_stock"])
def test_a_damaged_file_is_never_passed(trial: Trial, table: str) -> None:
    """512 bytes of each table that counts: verify fails, and a crawl that goes on never ends as complete.

    The twin: undamaged, the same file passes and the same crawl completes.
    """
    half_done(trial)
    whole = trial.db.read_bytes()
    damage(trial.db, table)
    code, printed = trial.limpet("verify", "--full")
    assert code == 8, printed
    trial.db.write_bytes(whole)
    damage(trial.db, table)
    code, printed = trial.run()
    assert code == 8, printed
    for suffix in ("-wal", "-shm"):
        Path(f"{trial.db}{suffix}").unlink(missing_ok=True)
    trial.db.write_bytes(whole)
    assert trial.limpet("verify", "--full")[0] == 0
    trial.finish()
    assert trial.faults() == []


def damage(path: Path, table: str) -> None:
    """Turn over the last 512 bytes of a leaf page of a table: cells are filled in from there."""
    connection = apsw.Connection(str(path))
    sql = "SELECT pageno, pgsize FROM dbstat WHERE name = ? AND pagetype = 'leaf' ORDER BY ncell DESC LIMIT 1"
    page, size = next(iter(connection.execute(sql, (table,))))
    connection.close()
    with open(path, "r+b") as file:
        file.seek(page * size - 512)
        content = file.read(512)
        file.seek(page * size - 512)
        file.write(bytes(byte ^ 0xFF for byte in content))


@pytest.mark.parametrize("content", [b"", b"not a database, whatever its name says\n" * 100, bytes(8192)])
def test_a_file_that_is_no_database_is_refused_or_begun(trial: Trial, content: bytes) -> None:
    """An empty file is begun; any other is refused, and left as it is."""
    trial.db.write_bytes(content)
    if not content:
        trial.finish()
        assert trial.faults() == []
        return
    code, printed = trial.run()
    assert code in (2, 8), printed
    assert str(trial.db) in printed
    assert trial.db.read_bytes() == content
