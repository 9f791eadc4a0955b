"""`limpet retry`, `pause`, `resume`, `migrate`, `backup`, `doctor`: what people change, and what they check."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import limpet.demo.spider
from limpet.batch import Kind
from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.demo.site import running
from limpet.errors import OwnershipLost
from limpet.store import Store, jobs, migrate, open_store, requests
from limpet.store.backup import backup
from limpet.store.verify import verify
from tests.e2e.conftest import Limpet
from tests.store.hands import (
    SETTINGS,
    Hand,
    attempts,
    counted,
    dead,
    done,
    dump,
    emitted,
    found_job,
    pages,
    product_type,
    skipped,
    states,
    table_name,
)

SPIDER = limpet.demo.spider.__file__
Product = product_type()


@pytest.fixture
def store(limpet: Limpet) -> Iterator[Store]:
    """A database x.db in the test's folder, with a job of four shards and a dataset of products."""
    made = open_store("x.db", settings=SETTINGS)
    found_job(made)
    made.ensure_datasets("shop", {table_name(Product): Product})
    yield made
    made.close()


@pytest.fixture
def letters(store: Store) -> Iterator[Hand]:
    """A worker whose job has two dead letters, a skipped task and two done ones in two shards; it owns the shards."""
    hand = Hand.on(store)
    hand.take()
    hand.seed(*pages(0, 3), *pages(1, 2))
    here, there = hand.claim(9, 0), hand.claim(9, 1)
    hand.finish(dead(here[0]), dead(here[1], "handler:KeyError"), done(here[2], offers=[emitted("a", 1)]))
    hand.finish(done(there[0]), skipped(there[1]))
    yield hand
    hand.leave()


def give_up(hand: Hand) -> None:
    """A clean stop: every shard is free, and the worker is gone."""
    for shard in list(hand.held):
        hand.release(shard)
    hand.leave()


def proved(store: Store) -> bool:
    """Whether every invariant holds."""
    return verify(store.db, jobs.read(store.db, 1), full=True).ok


# -- retry ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "put_back"),
    [
        ([], 2),
        (["--reason", "handler"], 1),
        (["--reason", "handler:KeyError"], 1),
        (["--state", "skipped"], 1),
        (["--state", "done"], 2),
        (["--state", "dead", "--state", "skipped", "--state", "done"], 5),
    ],
)
def test_retry_puts_back_what_was_asked_for_in_shards_that_nobody_owns(
    limpet: Limpet, store: Store, letters: Hand, flags: list[str], put_back: int
) -> None:
    """As numbered batches of a worker that is gone afterwards; everything else is as it was, and it verifies (P104)."""
    give_up(letters)
    before = counted(store.db)
    ended = limpet("retry", *flags, "--json")
    assert ended.code == 0, ended
    assert (ended.json["put_back"], ended.json["shards_waiting"]) == (put_back, 0)
    after = counted(store.db)
    assert after["pending"] == before["pending"] + put_back
    assert after.total() == before.total()
    assert proved(store)
    owners = {row[1] for row in store.db.rows("shards_of_job", job=1)}
    assert owners == {None}
    kinds = {row[0] for row in store.db.rows_text("SELECT kind FROM ledger WHERE revisited > 0")}
    assert kinds <= {str(Kind.REQUEST), str(Kind.RELEASE)}
    assert not [*Path().glob("limpet-worker-*.lock")]


def test_retry_of_urls_puts_back_exactly_these(limpet: Limpet, store: Store, letters: Hand) -> None:
    """Whatever they ended in, under any spelling; one that is unknown refuses them all."""
    give_up(letters)
    text = next(text for text, state in states(store.db).items() if state == "done")
    before = dump(store.db)
    refused = limpet("retry", text, "http://unknown.test/")
    assert refused.code == 2
    assert "no task with the key http://unknown.test/" in refused.err
    assert dump(store.db) == before
    assert limpet("retry", f"{text}/#x").code == 0
    assert [key for key, state in states(store.db).items() if state == "pending"] == [text]
    again = limpet("retry", text)
    assert again.code == 2
    assert "is pending: only what has ended can be put back" in again.err
    assert limpet("retry", text, "--reason", "x").code == 2


def test_retry_with_nothing_to_put_back_says_so(limpet: Limpet, store: Store, letters: Hand) -> None:
    """Exit 6, and not one batch is written."""
    give_up(letters)
    batches = store.db.rows_text("SELECT COUNT(*) FROM ledger")
    assert limpet("retry", "--reason", "status 404").code == 6
    assert counted(store.db)["pending"] == 0
    limpet("retry")
    assert limpet("retry").code == 6
    assert store.db.rows_text("SELECT COUNT(*) FROM ledger") > batches


def test_a_living_owner_applies_the_request_and_nobody_else(
    limpet: Limpet, store: Store, letters: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard of a worker that is alive is left to it: the row waits until its next batch."""
    monkeypatch.setattr("limpet.cli.mend.PATIENCE_S", 0.0)
    epochs = [row[2] for row in store.db.rows("shards_of_job", job=1)]
    ended = limpet("retry", "--json")
    assert (ended.code, ended.json["put_back"], ended.json["shards_waiting"]) == (0, 0, 1)
    assert "it applies the request in its next batch" in limpet("retry").out
    assert counted(store.db)["pending"] == 0
    assert [row[2] for row in store.db.rows("shards_of_job", job=1)] == epochs
    assert letters.commit(letters.part(0)).revisited == 2
    assert counted(store.db)["pending"] == 2


def test_retry_takes_over_the_shards_of_a_worker_that_was_killed(limpet: Limpet, store: Store, letters: Hand) -> None:
    """Its lock file is free, so nobody waits for its lease; what it had in hand is lost without blame, and it verifies."""
    letters.seed(*pages(0, 2, start=50))
    assert len(letters.claim(9, 0)) == 2
    letters.leave()
    ended = limpet("retry", "--json")
    assert (ended.code, ended.json["put_back"], ended.json["shards_waiting"]) == (0, 2, 0)
    assert counted(store.db)["running"] == 0
    assert [row[2] for row in attempts(store.db)].count("lost") == 2
    assert proved(store)


def test_retry_ends_a_pause(limpet: Limpet, store: Store, letters: Hand) -> None:
    """The breaker's pause is over, whether or not anything was put back."""
    give_up(letters)
    store.pause("handler product failed 50 times in a row", b"code")
    assert limpet("retry", "--reason", "nothing like it").code == 0
    assert jobs.read(store.db, 1).paused == ""


def test_a_shard_lost_meanwhile_is_told_by_9_and_what_was_asked_stays_asked(
    limpet: Limpet, store: Store, letters: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker takes the shard over in the middle of a retry: nothing is written under the old epoch."""
    give_up(letters)
    thief = Hand.on(store)
    steps = iter([True])
    commit = requests._commit

    def stolen(mine: Store, part: object) -> int:
        if next(steps, False):
            thief.store.db.run_text("UPDATE worker SET dead = 1 WHERE worker = ?", (part.owner,))  # type: ignore[attr-defined]
            thief.take(part.shard)  # type: ignore[attr-defined]
        return commit(mine, part)  # type: ignore[arg-type]

    monkeypatch.setattr(requests, "_commit", stolen)
    ended = limpet("retry")
    assert ended.code == 9, ended
    assert "has another owner now" in ended.err
    assert counted(store.db)["pending"] == 0
    assert thief.commit(thief.part(0)).revisited == 2
    assert proved(store)
    thief.leave()


def test_a_request_is_made_of_a_job(store: Store) -> None:
    """A store that has joined none is refused, and one with a huge argument too; no row is written."""
    from limpet.errors import UsageError

    job, store.job = store.job, None
    with pytest.raises(UsageError):
        requests.apply(store)
    store.job = job
    with pytest.raises(UsageError, match="ask for fewer"):
        requests.ask(store, "retry", {"tasks": [10**9] * 200_000}, shards=[0], who="test")
    assert store.db.rows_text("SELECT COUNT(*) FROM request") == [(0,)]
    assert issubclass(OwnershipLost, Exception)


# -- a whole job, mended ----------------------------------------------------------------------


def test_a_raising_handler_pauses_the_job_and_retry_after_the_fix_completes_it(limpet: Limpet, tmp_path: Path) -> None:
    """50 in a row pause it with 7; the mended spider and `limpet retry` collect every page, once."""
    with running(Shop(products=80, hosts=1)) as site:
        good = Path(SPIDER).read_text(encoding="utf-8")
        (tmp_path / "s.py").write_text(good.replace("sku=page.one", "sku=page.two"), encoding="utf-8")
        start = ["--start", site.shop.starts()[0], "--db", "x.db"]
        paused = limpet("run", "s.py", *start)
        assert paused.code == 7, paused
        assert "paused" in limpet("status").out
        assert "AttributeError" in limpet("dead").out
        assert limpet("run", "s.py", *start).code == 7
        (tmp_path / "s.py").write_text(good, encoding="utf-8")
        assert limpet("retry", "--reason", "handler").code == 0
        assert limpet("run", "s.py", *start).code == 0
        assert len(limpet("export", "product").lines) == 80


def test_pause_holds_a_job_until_resume(limpet: Limpet, shop: Site) -> None:
    """A run of a paused job says why and fetches nothing; resume ends it, and says 6 where there was no pause."""
    start = shop.shop.starts()[0]
    assert limpet("crawl", start, "--max-pages", "5", "--db", "x.db").code == 5
    assert limpet("pause", "--reason", "site owner asked").code == 0
    asked = shop.stats.requests
    held = limpet("crawl", start)
    assert held.code == 7
    assert "site owner asked" in held.out
    assert shop.stats.requests == asked
    assert "paused: site owner asked" in limpet("status").out
    assert limpet("resume").code == 0
    assert limpet("resume").code == 6
    assert limpet("crawl", start).code == 0


# -- verify -----------------------------------------------------------------------------------


def test_verify_passes_a_sound_job_and_names_what_is_broken(limpet: Limpet, store: Store, letters: Hand) -> None:
    """0 where everything holds; 8 with the invariant and the batch where a row was altered, and the job is halted."""
    give_up(letters)
    assert limpet("verify", "--full").code == 0
    assert limpet("verify", "--json").json["clean"] is True
    store.db.run_text("UPDATE attempt SET reason = 'forged' WHERE reason = 'status 500'")
    ended = limpet("verify", "--full")
    assert ended.code == 8
    assert "I2" in ended.out
    assert "halted" in ended.out
    assert jobs.read(store.db, 1).halted
    findings = limpet("verify", "--full", "--json")
    assert findings.code == 8
    assert findings.json["findings"][0]["invariant"] == "I2"


# -- repair -----------------------------------------------------------------------------------


def test_repair_has_lost_records_collected_again(limpet: Limpet, shop: Site) -> None:
    """A row that somebody deleted is found by verify, put back by repair as a new batch, and there again after the next run."""
    starts = [word for start in shop.shop.starts() for word in ("--start", start)]
    assert limpet("run", SPIDER, *starts, "--db", "x.db").code == 0
    before = limpet("export", "product").lines
    db = sqlite3.connect("x.db")
    db.execute("DELETE FROM shop_product WHERE sku = 'LP-000004'")
    db.commit()
    db.close()
    broken = limpet("verify", "--full")
    assert broken.code == 8
    assert "`limpet repair` mends it" in broken.out
    halted = limpet("run", SPIDER, *starts)
    assert halted.code == 8
    for words in (halted.out, limpet("status").out):
        assert "whether `limpet repair` or a backup helps" in words
    mended = limpet("repair")
    assert mended.code == 0, mended
    assert "put back" in mended.out
    assert limpet("run", SPIDER, *starts).code == 0
    assert limpet("export", "product").lines == before
    assert limpet("verify", "--full").code == 0


def test_repair_of_named_batches_puts_their_tasks_back(limpet: Limpet, store: Store, letters: Hand) -> None:
    """The tasks whose tries ended there are tried again; a batch that does not exist is refused and changes nothing."""
    give_up(letters)
    (shard, n) = store.db.rows_text("SELECT shard, n FROM attempt WHERE outcome = 'dead' LIMIT 1")[0]
    refused = limpet("repair", f"{shard}:{n + 90}")
    assert refused.code == 2
    assert counted(store.db)["pending"] == 0
    ended = limpet("repair", f"{shard}:{n}", "--json")
    assert ended.code == 0, ended
    assert ended.json["rounds"][0]["put_back"] == 3
    assert counted(store.db)["pending"] == 3
    assert proved(store)


def test_repair_of_a_sound_job_has_nothing_to_do_and_of_a_forged_past_says_so(limpet: Limpet, store: Store, letters: Hand) -> None:
    """6 where nothing is wrong; 8, and the word backup, where the past itself was altered; the rows stay as they are."""
    give_up(letters)
    assert limpet("repair").code == 6
    store.db.run_text("UPDATE attempt SET reason = 'forged' WHERE reason = 'status 500'")
    before = attempts(store.db)
    assert "no repair mends this: restore a backup" in limpet("verify", "--full").out
    ended = limpet("repair")
    assert ended.code == 8
    assert "restore a backup" in ended.out
    assert attempts(store.db) == before


# -- migrate ----------------------------------------------------------------------------------


def test_migrate_brings_an_old_file_up_to_date_and_prints_what_it_would_do(limpet: Limpet, tmp_path: Path) -> None:
    """--print changes nothing; without it the schema is there; a second time there is nothing to do."""
    sqlite3.connect("x.db").close()
    printed = limpet("migrate", "--print", "--db", "x.db")
    assert printed.code == 0
    assert "CREATE TABLE task" in printed.out
    assert (tmp_path / "x.db").stat().st_size == 0
    applied = limpet("migrate", "--db", "x.db", "--json")
    assert (applied.code, applied.json["before"], applied.json["schema"]) == (0, 0, migrate.latest())
    assert limpet("migrate", "--db", "x.db").code == 6
    assert limpet("migrate", "--print", "--db", "x.db").out == ""


# -- backup -----------------------------------------------------------------------------------


def test_a_backup_is_the_database_and_proves_itself(limpet: Limpet, store: Store, letters: Hand, tmp_path: Path) -> None:
    """Every row is in it, verify passes on it, and nothing is left beside it."""
    give_up(letters)
    ended = limpet("backup", "copy.db", "--db", "x.db", "--json")
    assert ended.code == 0
    assert ended.json["bytes"] == os.path.getsize("copy.db")
    copy = open_store("copy.db", create=False)
    assert dump(copy.db) == dump(store.db)
    copy.close()
    assert limpet("verify", "--full", "--db", "copy.db").code == 0
    assert not [file for file in tmp_path.iterdir() if "copy" in file.name and file.name != "copy.db"]


def test_a_backup_beside_its_database_says_that_the_next_command_has_to_name_one(limpet: Limpet, store: Store) -> None:
    """The only job database of a folder is found without its name; a copy under another ending, or elsewhere, changes nothing."""
    assert "job databases" not in limpet("backup", "copy.old").err
    assert "this folder has 2 job databases now (copy.db, x.db): name one with --db" in limpet("backup", "copy.db").err
    assert limpet("status").code == 2
    assert limpet("status", "--db", "x.db").code == 0


def test_a_backup_replaces_nothing_unless_it_is_told_to(limpet: Limpet, store: Store, tmp_path: Path) -> None:
    """Not the database itself, not a file that is there, and not one that is in use."""
    (tmp_path / "copy.db").write_text("mine", encoding="utf-8")
    for argv, words in (
        (["x.db"], "is the database itself"),
        (["copy.db"], "is there already"),
        (["nowhere/copy.db"], "does not exist"),
    ):
        refused = limpet("backup", *argv, "--db", "x.db")
        assert (refused.code, words in refused.err) == (2, True), refused
    assert (tmp_path / "copy.db").read_text(encoding="utf-8") == "mine"
    assert limpet("backup", "copy.db", "--force", "--db", "x.db").code == 0
    assert migrate.version(open_and_close("copy.db")) == migrate.latest()


def open_and_close(path: str) -> object:
    """A reader of a database."""
    return open_store(path, create=False, readonly=True).db


def test_a_backup_beside_a_working_crawl_is_of_one_moment(limpet: Limpet, store: Store, tmp_path: Path) -> None:
    """Batches are committed while it copies; the copy verifies, and has none of a batch in part."""
    hand = Hand.on(store)
    hand.take()
    hand.seed(*pages(0, 400))
    stop, committed = threading.Event(), []

    def work() -> None:
        mine = open_store("x.db", create=False, settings=SETTINGS)
        mine.job, hand.store = store.job, mine
        while not stop.is_set() and (claims := hand.claim(2, 0)):
            hand.finish(*map(done, claims))
            committed.append(len(claims))
        mine.close()

    def begin(_copied: int, _pages: int) -> None:
        if not worker.is_alive() and not committed:
            worker.start()
        while len(committed) < 2 and worker.is_alive():
            stop.wait(0.001)

    worker = threading.Thread(target=work)
    backup(str(tmp_path / "x.db"), str(tmp_path / "copy.db"), on_progress=begin)
    stop.set()
    worker.join()
    assert len(committed) >= 2
    copy = open_store("copy.db", create=False, readonly=True)
    assert verify(copy.db, jobs.read(copy.db, 1), full=True).ok
    assert not [row for row in attempts(copy.db) if row[2] == "done"]
    copy.close()
    os.close(hand.worker.lock_file)


def test_a_killed_backup_leaves_nothing_under_its_name(limpet: Limpet, store: Store, tmp_path: Path) -> None:
    """SIGKILL in the middle of the copy; the next one is whole, and takes what was left away."""
    script = (
        "import os, signal, sys\nfrom limpet.store import backup\n"
        "backup.backup(sys.argv[1], sys.argv[2], on_progress=lambda done, all: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, "x.db", "copy.db"], cwd=tmp_path, check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "copy.db").exists()
    assert limpet("backup", "copy.db", "--db", "x.db").code == 0
    assert not [*tmp_path.glob(".copy*")]


# -- doctor -----------------------------------------------------------------------------------


def test_doctor_looks_at_everything_and_finds_a_sound_database_well(limpet: Limpet, store: Store, letters: Hand) -> None:
    """Versions, SQLite, file system, WAL, disk, integrity, locks, workers and jobs; 0 where nothing is wrong."""
    ended = limpet("doctor", "--json")
    assert ended.code == 0, ended
    looked_at = {finding["what"] for finding in ended.json["findings"]}
    assert looked_at >= {
        "limpet", "python", "sqlite", "libraries", "extras", "database", "wal", "file system", "disk", "schema", "integrity",
        "write lock", "workers", "job",
    }  # fmt: skip
    (workers,) = (finding for finding in ended.json["findings"] if finding["what"] == "workers")
    assert f"process {os.getpid()}" in workers["message"]


def test_doctor_tells_a_damaged_file_by_8_and_a_halted_job_by_7(limpet: Limpet, store: Store, tmp_path: Path) -> None:
    """What must be mended first decides on the exit code, and every other check is made all the same."""
    store.halt("I1: a batch is missing")
    halted = limpet("doctor")
    assert halted.code == 7
    assert "halted: I1: a batch is missing" in halted.out
    assert limpet("backup", "torn.db", "--db", "x.db").code == 0
    with open("torn.db", "r+b") as file:
        file.seek(8192)
        file.write(b"\x07" * 20_000)
    torn = limpet("doctor", "--db", "torn.db", "--json")
    assert torn.code == 8
    assert "integrity" in {finding["what"] for finding in torn.json["findings"] if finding["verdict"] == "fault"}


def test_doctor_needs_no_database(limpet: Limpet) -> None:
    """Where there is none it says so, and checks the rest."""
    ended = limpet("doctor")
    assert ended.code == 0
    assert "no job database is here" in ended.out
    assert json.loads(limpet("doctor", "--json").out)["v"] == 1
