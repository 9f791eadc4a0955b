"""Where commands write: never over a database, what SQLite keeps beside one, or the lock of a worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from limpet.store import Store, open_store
from tests.e2e.conftest import Ended, Limpet
from tests.store.hands import SETTINGS, Hand, done, emitted, found_job, pages, product_type, table_name

Product = product_type()

#: What a command must not replace, by its name in the test's folder, and what the message calls it.
KEPT = {
    "x.db": "is the database itself",
    "./x.db": "is the database itself",
    "link.db": "is the database itself",
    "hard.db": "is the database itself",
    "x.db-wal": "is the -wal file of the database",
    "x.db-shm": "is the -shm file of the database",
    "x.db-journal": "is the -journal file of the database",
    "link-wal": "is the -wal file of the database",
    "y.db-wal": "is the -wal file of",
    "the lock": "is the lock of a worker",
}
WRITERS = {
    "export": ("export", "product", "--all-slots", "-o"),
    "diff": ("diff", "product", "--slot", "1", "--slot", "2", "-o"),
    "backup": ("backup", "--force"),
}


@pytest.fixture
def hand(limpet: Limpet) -> Iterator[Hand]:
    """A worker of slot 3 at work on x.db, which has a product in slots 1 and 2; links lead to it, and y.db is another database."""
    store = open_store("x.db", settings=SETTINGS)
    for slot, price in (("1", 100), ("2", 200)):
        collect(store, slot, price)
    store.close()
    shutil.copy("x.db", "y.db")
    os.link("x.db", "hard.db")
    os.symlink("x.db", "link.db")
    os.symlink("x.db-wal", "link-wal")
    store = open_store("x.db", create=False, settings=SETTINGS)
    found_job(store, "3")
    worker = Hand.on(store)
    worker.take()
    worker.seed(*pages(0, 2))
    yield worker
    worker.leave()
    store.close()


def collect(store: Store, slot: str, price: int) -> None:
    """Do the one page of a slot."""
    found_job(store, slot)
    store.ensure_datasets("shop", {table_name(Product): Product})
    hand = Hand.on(store)
    hand.take()
    hand.seed(*pages(0, 1))
    hand.finish(done(hand.claim(1, 0)[0], offers=[emitted("s1", price, kind=Product)]))
    hand.leave()


def there(folder: Path) -> dict[str, int]:
    """Every file of a folder, by what it is and not by its name alone."""
    return {file.name: file.lstat().st_ino for file in folder.iterdir()}


def written(limpet: Limpet, writer: str, target: str, *, db: str = "x.db") -> Ended:
    """A command that writes to a file."""
    return limpet(*WRITERS[writer], target, "--db", db)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", KEPT)
def test_nothing_is_written_over_a_database_or_what_belongs_to_one(
    limpet: Limpet, hand: Hand, tmp_path: Path, writer: str, target: str
) -> None:
    """Exit code 2 and a message; every file is the one that it was, and the database proves itself beside its worker."""
    name = os.path.basename(hand.worker.lock_path) if target == "the lock" else target
    before = there(tmp_path)
    ended = written(limpet, writer, name)
    assert (ended.code, ended.out) == (2, ""), ended
    assert f"{name} {KEPT[target]}" in ended.err
    assert "which is never replaced: name another file" in ended.err
    assert there(tmp_path) == before
    proved = limpet("verify", "--full", "--db", "x.db")
    assert proved.code == 0, proved


@pytest.mark.parametrize("db", ["link.db", "sqlite:///x.db"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_database_is_the_same_by_whatever_name_it_is_read(limpet: Limpet, hand: Hand, tmp_path: Path, writer: str, db: str) -> None:
    """Through a link, and by its address."""
    before = there(tmp_path)
    ended = written(limpet, writer, "x.db", db=db)
    assert (ended.code, "is the database itself" in ended.err) == (2, True), ended
    assert there(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_half_written_file_is_no_database_either(limpet: Limpet, hand: Hand, tmp_path: Path, writer: str) -> None:
    """What is written first has a name of its own, which may be that of the database."""
    hand.leave()
    os.rename("y.db", ".out.part")
    before = there(tmp_path)
    ended = written(limpet, writer, "out", db=".out.part")
    assert (ended.code, "is the database itself" in ended.err) == (2, True), ended
    assert there(tmp_path).items() >= before.items()


@pytest.mark.parametrize("writer", ["export", "diff"])
def test_rows_replace_no_other_database(limpet: Limpet, hand: Hand, tmp_path: Path, writer: str) -> None:
    """A file of rows is a file of rows: only a backup replaces a database, where it is told to."""
    ended = written(limpet, writer, "y.db")
    assert (ended.code, "y.db is another database" in ended.err) == (2, True), ended
    assert limpet("verify", "--full", "--db", "y.db").code == 0
    assert written(limpet, "backup", "y.db").code == 0


@pytest.mark.parametrize("writer", WRITERS)
def test_what_only_has_such_a_name_is_written(limpet: Limpet, hand: Hand, tmp_path: Path, writer: str) -> None:
    """A name that ends as a log's does beside a file that is no database, and a file that was written before."""
    (tmp_path / "mine").write_text("no database\n", encoding="utf-8")
    for _ in range(2):
        assert written(limpet, writer, "mine-wal").code == 0
    assert (tmp_path / "mine-wal").stat().st_size
