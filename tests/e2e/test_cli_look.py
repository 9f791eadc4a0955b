"""`limpet status`, `dead`, `export` and `explain`: what is there, why it waits, and exactly so."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from pathlib import Path

import pytest

from limpet.batch import HostRow, Offer, RobotsRow, canonical_json
from limpet.cli.status import why_it_waits
from limpet.demo.replies import Site
from limpet.record import field as record_field
from limpet.record import record, record_type
from limpet.store import Store, jobs, open_store
from limpet.store import export as limpet_export
from limpet.store.dialect import statements
from limpet.store.overview import status
from limpet.store.sqlite import NOW_MS
from limpet.store.views import snapshot
from tests.e2e.conftest import Limpet
from tests.store.hands import (
    SETTINGS,
    Hand,
    dead,
    done,
    emitted,
    failed,
    found_job,
    host_in,
    link,
    pages,
    product_type,
    skipped,
    table_name,
)

Product = product_type()


@record(key="name", name="odd")
class Odd:
    """A column of every awkward kind."""

    name: str
    price: Decimal = Decimal("12.30")
    day: date = date(2026, 11, 30)
    at: datetime = datetime(2026, 11, 30, 12, tzinfo=UTC)
    raw: bytes = b"\x00\xff"
    is_new: bool = True
    ratio: float = 0.1
    tags: list[str] = record_field(default_factory=lambda: ["a", 'b"c'])
    note: str | None = None


@pytest.fixture
def store(limpet: Limpet) -> Iterator[Store]:
    """A database x.db in the test's folder, with a job of four shards and a dataset of products."""
    made = open_store("x.db", settings=SETTINGS)
    found_job(made)
    made.ensure_datasets("shop", {table_name(Product): Product})
    yield made
    made.close()


@pytest.fixture
def hand(store: Store) -> Iterator[Hand]:
    """A worker that owns every shard."""
    one = Hand.on(store)
    one.take()
    yield one
    one.leave()


def job_status(limpet: Limpet) -> dict[str, object]:
    """The one job, as `limpet status --json` has it."""
    (job,) = limpet("status", "--json").json["jobs"]
    found: dict[str, object] = job
    return found


# -- status -----------------------------------------------------------------------------------


def test_status_counts_every_task_once_whatever_became_of_it(limpet: Limpet, hand: Hand) -> None:
    """Discovered = done + skipped + dead + failed + running + pending, with each reason (P21, P73)."""
    hand.seed(*pages(0, 20))
    claims = hand.claim(12, 0)
    results = [
        *map(done, claims[:4]),
        *map(skipped, claims[4:7]),
        dead(claims[7]),
        dead(claims[8], "handler:KeyError"),
        failed(claims[9], 60_000),
    ]
    hand.finish(*results)
    job = job_status(limpet)
    assert job["tasks"] == {"known": 20, "pending": 8, "running": 2, "failed": 1, "done": 4, "skipped": 3, "dead": 2}
    assert job["dead_by_reason"] == {"handler:KeyError": 1, "status 500": 1}
    assert job["skipped_by_reason"] == {"gone": 3}
    assert job["hosts"] == [{"authority": host_in(0), "done": 4, "skipped": 3, "dead": 2, "failed": 1, "running": 2, "pending": 8}]
    assert job["state"] == "running"
    text = " ".join(limpet("status").out.split())
    for words in (
        "shop: running",
        "done 4",
        "skipped 3 gone 3",
        "dead 2 handler:KeyError 1, status 500 1",
        "failed 1 next try 20",
    ):
        assert words in text


@pytest.mark.parametrize("put_back", [False, True])
def test_the_counts_of_the_books_are_those_of_the_rows(store: Store, hand: Hand, put_back: bool) -> None:
    """A large job is counted from its ledger, and not one task is read for it: the same numbers come out."""
    hand.seed(*pages(0, 30), *pages(1, 10))
    claims = hand.claim(10)
    results = [
        *map(done, claims[:5]),
        *map(skipped, claims[5:8]),
        *map(dead, claims[8:12]),
        *(failed(claim, 60_000) for claim in claims[12:14]),
    ]
    hand.finish(*results)
    if put_back:
        store.db.run("put_request", job=1, shard=0, what="retry", argument='{"states":["dead","done","skipped"]}', who="test")
        hand.commit(hand.part(0))
    assert store.job is not None
    counted, read = (status(store, store.job, whole=whole) for whole in (False, True))
    assert counted.states == read.states
    assert (counted.hosts, counted.skipped_by_reason, counted.scheme_twins) == (None, None, None)
    assert sum(read.states.values()) == read.books.discovered == 40


def test_status_names_the_exact_reason_of_a_wait(limpet: Limpet, store: Store, hand: Hand) -> None:
    """Paused, halted, only retries left, every host waiting, nobody working: each is said, with its time (P103, P123)."""
    hand.seed(*pages(0, 2))
    assert "why" in job_status(limpet)
    assert job_status(limpet)["why"] == ""
    pause = HostRow(pages(0, 1)[0].host, host_in(0), 1000, 90_000, "status 429")
    hand.commit(hand.part(0, hosts=(pause,)))
    assert f"every host with a task ready has to wait: {host_in(0)} until " in str(job_status(limpet)["why"])
    assert "(status 429)" in str(job_status(limpet)["why"])
    hand.commit(hand.part(0, hosts=(replace(pause, pause=""),)))
    assert str(job_status(limpet)["why"]).startswith("at the pace of its hosts: the next request to ")
    hand.finish(*(failed(claim, 60_000) for claim in hand.claim(2, 0)))
    assert str(job_status(limpet)["why"]).startswith("only retries are left: 2, the first at ")
    store.pause("handler product failed 50 times in a row")
    assert str(job_status(limpet)["why"]).startswith("paused: handler product failed")
    store.halt("I1: a batch is missing")
    assert str(job_status(limpet)["why"]).startswith("halted: I1: a batch is missing")
    assert job_status(limpet)["state"] == "halted"


def test_status_says_when_nobody_works(limpet: Limpet, hand: Hand) -> None:
    """A worker that was killed is not taken for a living one, though its lease has not ended."""
    hand.seed(*pages(0, 3))
    hand.claim(2, 0)
    assert job_status(limpet)["state"] == "running"
    hand.leave()
    job = job_status(limpet)
    assert job["state"] == "stopped"
    assert str(job["why"]).startswith("no worker is running")
    assert "the 2 tasks it had in hand" in str(job["why"])
    assert "`limpet run`" in str(job["why"])


def test_a_stopped_job_has_no_time_of_arrival(limpet: Limpet, hand: Hand) -> None:
    """What was done of late says nothing about when a job will end on which nobody works."""
    hand.seed(*pages(0, 8))
    hand.finish(*map(done, hand.claim(4, 0)))
    assert job_status(limpet)["eta_s"] is not None
    assert " left" in limpet("status").out
    hand.leave()
    assert job_status(limpet)["eta_s"] is None
    assert " left" not in limpet("status").out


def test_a_crawl_that_its_page_limit_ended_says_how_it_goes_on(limpet: Limpet, shop: Site) -> None:
    """By its own command; that the limit was it is not known here, so it is left open."""
    assert limpet("crawl", shop.shop.starts()[0], "--max-pages", "5").code == 5
    out = limpet("status").out
    assert "the same `limpet crawl` goes on, with a larger --max-pages where that ended it" in out
    assert " left" not in out


def test_tries_that_a_kill_took_are_told_calmly(limpet: Limpet, store: Store, hand: Hand) -> None:
    """They are counted, tried again, and blamed on nobody."""
    hand.seed(*pages(0, 3))
    hand.claim(2, 0)
    hand.leave()
    other = Hand.on(store)
    other.bury(hand)
    other.take()
    assert "2 tries were in flight when a worker was killed; each is tried again" in limpet("status").out
    other.leave()


def test_status_says_which_source_cannot_be_read(store: Store, hand: Hand) -> None:
    """A list of starts on another machine, or gone, is named."""
    assert store.job is not None
    source = jobs.Source("file", b"x" * 16, place="/nowhere/starts.txt", host="elsewhere")
    store.job = jobs.join(store.db, spider="shop", slot="", profile=store.job.profile, shards=4, sources=[source])
    why = why_it_waits(status(store, store.job))
    assert why == "the starts in /nowhere/starts.txt on elsewhere cannot be read from here"


def test_status_counts_tasks_that_differ_only_in_the_scheme(limpet: Limpet, hand: Hand) -> None:
    """http and https are two tasks unless the key says otherwise; how many is shown."""
    host = host_in(0)
    hand.seed(link(f"http://{host}/a"), link(f"https://{host}/a"), link(f"http://{host}/b"), link(f"https://{host}/c"))
    assert job_status(limpet)["scheme_twins"] == 1
    assert "differ" in limpet("status").out


def test_the_fields_of_status_are_stable(limpet: Limpet, hand: Hand) -> None:
    """Version 1: fields are added, never renamed or taken away."""
    fields = (
        "job spider slot state complete verified halted paused why tasks lanes next_due_ms oldest_open_ms dead_by_reason "
        "skipped_by_reason hosts scheme_twins records rate_per_s eta_s slowest_host attempts revisited batches unproved_batches "
        "first_ms last_ms now_ms workers pauses sources requests"
    )
    assert set(job_status(limpet)) >= set(fields.split(" "))


#: What the plan of each statement of a short status must hold: the range of an index, never all tasks.
PLANS = {
    "view_books": "ledger USING PRIMARY KEY (job=?)",
    "view_lane": "t USING INDEX task_open (job=? AND shard=? AND lane=?)",
    "view_dead": "t USING INDEX task_dead (job=?)",
    "view_paces": "host USING PRIMARY KEY (job=?)",
    "open_work": "USING COVERING INDEX task_open (job=? AND shard=? AND lane>?)",
    "ready_host_after": "task USING COVERING INDEX task_open (job=? AND shard=? AND lane=? AND due_ms=? AND host>?)",
    "put_back_by_outcome": "r USING PRIMARY KEY (job=?)",
    "view_texts": "x USING INTEGER PRIMARY KEY (rowid>?)",
    "view_dead_letters": "t USING INDEX task_dead (job=? AND shard=? AND id>?)",
    "unknown_in_shard": "m USING COVERING INDEX charge_open (job=? AND shard=? AND state=?)",
    "reserved_charges": "m USING COVERING INDEX charge_open (job=? AND shard=? AND state=?)",
    "money_left": "m USING COVERING INDEX charge_open (job=? AND shard=? AND state=?)",
    "read_purse": "purse USING INDEX sqlite_autoindex_purse_1 (name=?)",
    "read_escrow": "escrow USING PRIMARY KEY (job=? AND shard=?)",
    "candidates_of_job": "candidate USING PRIMARY KEY (job=?)",
    "last_mark": "mark USING PRIMARY KEY (spider=? AND name=?)",
    "marks_before": "q USING PRIMARY KEY (spider=? AND name=?)",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_short_status_reads_ranges_of_indices_and_books_alone(store: Store, name: str) -> None:
    """Its cost does not depend on how many tasks there are: the plans say so (P116)."""
    sql = statements("sqlite", NOW_MS)[name]
    asked = dict.fromkeys(words_of(sql), 1)
    plan = [row[3] for row in store.db.rows_text(f"EXPLAIN QUERY PLAN {sql}", asked)]  # type: ignore[arg-type]
    assert any(PLANS[name] in step for step in plan), plan


def words_of(sql: str) -> set[str]:
    """The parameters of a statement."""
    return set(re.findall(r"(?<!\w):(\w+)", sql))


# -- dead -------------------------------------------------------------------------------------


def test_dead_lists_each_letter_with_its_reason_and_message(limpet: Limpet, hand: Hand) -> None:
    """By reason or family of reasons, with the last line of the message, or all of it (P104)."""
    hand.seed(*pages(0, 3))
    one, two, three = hand.claim(3, 0)
    hand.finish(replace(dead(one, "handler:KeyError"), detail="Traceback\n  here\nKeyError: 'sku'"), dead(two, "status 500"), done(three))
    assert [json.loads(line)["reason"] for line in limpet("dead", "--json").lines] == ["handler:KeyError", "status 500"]
    assert limpet("dead", "--reason", "handler").out.count("http") == 1
    text = limpet("dead").out
    assert "KeyError: 'sku'" in text
    assert "  here" not in text
    assert "  here" in limpet("dead", "--detail").out
    limited = limpet("dead", "--limit", "1")
    assert limited.out.count("http") == 1
    assert "and more" in limited.err


def test_what_a_site_sent_cannot_command_the_terminal(limpet: Limpet, hand: Hand) -> None:
    """Control characters are written out."""
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim(1, 0)
    hand.finish(replace(dead(claim, "odd \x1b[2J"), detail="\x1b]0;owned\x07"))
    for command in ("dead", "status"):
        assert "\x1b" not in limpet(command).out
        assert "\\x1b" in limpet(command).out


# -- export -----------------------------------------------------------------------------------


def collect(hand: Hand, skus: range, *, seen: int = 0) -> None:
    """A task for each record."""
    hand.seed(*pages(0, len(skus), start=skus.start))
    hand.finish(
        *(
            done(claim, offers=[emitted(f"s{number}", number, seen=seen)])
            for claim, number in zip(hand.claim(len(skus), 0), skus, strict=True)
        )
    )


def test_an_export_is_in_key_order_and_its_digest_is_that_of_the_lasting_fields(limpet: Limpet, hand: Hand) -> None:
    """The SHA-256 can be made again from the lines by anybody, and volatile fields are no part of it."""
    collect(hand, range(50), seen=7)
    ended = limpet("export", "product")
    rows = [json.loads(line) for line in ended.lines]
    keys = [Product.freeze(Product.cls(**row)).key for row in rows]  # type: ignore[misc]
    assert len(rows) == 50
    assert keys == sorted(keys)
    lines = "".join(canonical_json({name: row[name] for name in ("sku", "price")}) + "\n" for row in rows)
    assert sha256(lines.encode()).hexdigest() in ended.err
    (chosen,) = limpet("export", "product", "-o", "x.csv", "--format", "csv", "--json").out.splitlines()
    assert json.loads(chosen)["sha256"] in ended.err


def test_the_digest_depends_neither_on_the_order_of_commits_nor_on_the_time(limpet: Limpet, hand: Hand, store: Store) -> None:
    """Other batches, other workers, other volatile values: the same dataset."""
    collect(hand, range(20), seen=1)
    other = open_store("y.db", settings=SETTINGS)
    found_job(other)
    other.ensure_datasets("shop", {table_name(Product): Product})
    second = Hand.on(other)
    second.take()
    for numbers in (range(10, 20), range(10)):
        collect(second, numbers, seen=2)
    second.leave()
    other.close()
    digests = {limpet("export", "product", "--db", db, "-o", "out", "--json").json["sha256"] for db in ("x.db", "y.db")}
    assert len(digests) == 1


def test_csv_and_jsonl_say_the_same_of_every_kind_of_column(limpet: Limpet, store: Store, hand: Hand) -> None:
    """Scales, times, bytes, lists, and what is not there; quotes and line ends stay in their cell."""
    kind = record_type(Odd)
    store.ensure_datasets("shop", {"shop_odd": kind})
    hand.store.tables.update(store.tables)
    hand.seed(*pages(0, 1))
    (claim,) = hand.claim(1, 0)
    frozen = kind.freeze(Odd(name='comma, "quote"\nline', note="=1+1"))
    hand.finish(done(claim, offers=[Offer("shop_odd", frozen.key, frozen.key_text, frozen.content, frozen.values)]))
    as_json = json.loads(limpet("export", "odd").out)
    (as_csv,) = csv.DictReader(io.StringIO(limpet("export", "odd", "--format", "csv").out, newline=""))
    assert as_json == {
        "name": 'comma, "quote"\nline', "price": "12.30", "day": "2026-11-30", "at": "2026-11-30T12:00:00.000000Z", "raw": "AP8=",
        "is_new": True, "ratio": 0.1, "tags": ["a", 'b"c'], "note": "=1+1",
    }  # fmt: skip
    expected = {name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for name, value in as_json.items()}
    assert as_csv == expected


def test_an_empty_dataset_is_an_empty_export(limpet: Limpet, hand: Hand) -> None:
    """No line but the head of a CSV; the digest of nothing."""
    assert limpet("export", "product").out == ""
    assert limpet("export", "product", "--format", "csv").out == "sku,price,seen\n"
    assert sha256(b"").hexdigest() in limpet("export", "product").err


def test_a_file_appears_whole_or_not_at_all(limpet: Limpet, hand: Hand, tmp_path: Path) -> None:
    """An export that is killed leaves the old file, and the next one ends whole and leaves nothing beside it (P12)."""
    collect(hand, range(30))
    target = tmp_path / "out.jsonl"
    target.write_text("the old one\n", encoding="utf-8")
    script = (
        "import os, signal, limpet.cli.look as look, limpet.store.export as export\n"
        "export.CHUNK_ROWS = 5\n"
        "def killed(file, pieces):\n"
        "    file.write(next(pieces)); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "look._write = killed\n"
        "import sys; from limpet.cli import main; sys.exit(main(sys.argv[1:]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, "export", "product", "--db", "x.db", "-o", str(target)], check=False)
    assert killed.returncode == -9
    assert target.read_text(encoding="utf-8") == "the old one\n"
    assert (tmp_path / ".out.jsonl.part").exists()
    assert limpet("export", "product", "-o", target).code == 0
    assert len(target.read_text(encoding="utf-8").splitlines()) == 30
    assert not (tmp_path / ".out.jsonl.part").exists()


def test_a_failed_export_leaves_the_old_file(limpet: Limpet, hand: Hand, tmp_path: Path) -> None:
    """A folder that is none, an unknown dataset, a disk that is full: the old file stays as it was."""
    target = tmp_path / "out.jsonl"
    target.write_text("the old one\n", encoding="utf-8")
    assert limpet("export", "product", "-o", "nowhere/out.jsonl").code == 2
    assert limpet("export", "products", "-o", target).code == 2
    assert "product (of shop)" in limpet("export", "products").err
    if os.path.exists("/dev/full"):
        assert limpet("export", "product", "-o", "/dev/full").code in (0, 4)
    assert target.read_text(encoding="utf-8") == "the old one\n"


def test_an_export_goes_to_a_link_s_target_and_into_a_pipe(limpet: Limpet, hand: Hand, tmp_path: Path) -> None:
    """A link stays a link, and what is no file is written to, not replaced."""
    collect(hand, range(3))
    (tmp_path / "real.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    assert limpet("export", "product", "-o", "link.jsonl").code == 0
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len((tmp_path / "real.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    assert limpet("export", "product", "-o", os.devnull).code == 0
    assert not os.path.isfile(os.devnull)


def test_slots_are_named_where_there_are_several(limpet: Limpet, store: Store, hand: Hand) -> None:
    """Rows of several jobs are never mixed by accident: one is named, or all are asked for."""
    collect(hand, range(2))
    found_job(store, slot="b")
    later = Hand.on(store)
    later.take()
    collect(later, range(3))
    later.leave()
    refused = limpet("export", "product")
    assert refused.code == 2
    assert "there are '', 'b'" in refused.err
    assert len(limpet("export", "product", "--slot", "").lines) == 2
    assert len(limpet("export", "product", "--slot", "b").lines) == 3
    both = [json.loads(line) for line in limpet("export", "product", "--all-slots").lines]
    assert sorted(row["slot"] for row in both) == ["", "", "b", "b", "b"]
    assert limpet("export", "product", "--slot", "c").code == 2
    assert limpet("export", "product", "--slot", "b", "--all-slots").code == 2
    assert limpet("export").lines[1].split()[:3] == ["product", "shop", "5"]


def test_memory_does_not_grow_with_the_rows(store: Store, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read as they are written: after the first piece no further row has been read."""
    collect(hand, range(40))
    monkeypatch.setattr(limpet_export, "CHUNK_ROWS", 5)
    with snapshot(store.db) as db:
        pieces = limpet_export.chunks(db, limpet_export.choose(db, "product"), "jsonl", tally := limpet_export.Tally())
        next(pieces)
        assert tally.rows == 5
        assert sum(1 for _ in pieces) == 8
        assert tally.rows == 40


# -- explain ----------------------------------------------------------------------------------


def test_explain_tells_key_robots_state_and_tries(limpet: Limpet, hand: Hand) -> None:
    """Each step to the key, what robots.txt said, where the task stands, and how each try ended."""
    host = host_in(0)
    robots = RobotsRow(f"http://{host}", "parse", 200, b"User-agent: *\nDisallow: /private\nCrawl-delay: 3\n", 60_000)
    hand.seed(*pages(0, 2))
    hand.commit(hand.part(0, robots=(robots,)))
    first = next(claim for claim in hand.claim(2, 0) if claim.text.endswith("/0"))
    hand.finish(failed(first))
    ended = limpet("explain", f"HTTP://{host.upper()}/0/#top", "--json").json
    assert ended["key"] == f"http://{host}/0"
    assert ended["steps"][0]["name"] == "parse"
    assert ended["robots"]["verdict"].startswith("allowed to ")
    assert "Crawl-delay of 3 s" in ended["robots"]["verdict"]
    assert ended["task"]["state"] == "failed"
    assert [(row["number"], row["outcome"], row["reason"], row["strike"]) for row in ended["task"]["attempts"]] == [
        (1, "failed", "timeout", True)
    ]
    text = limpet("explain", f"http://{host}/0", f"http://{host}/private/1").out
    assert "try 1" in text
    assert "forbidden to " in text
    assert "unknown: the job has no task with this key" in text


def test_explain_needs_no_database_and_says_what_is_rejected(limpet: Limpet) -> None:
    """The steps alone, and for what is no URL the reason, with exit 2."""
    assert limpet("explain", "http://a.test/?b&a").out.splitlines()[0] == "http://a.test/?b&a"
    rejected = limpet("explain", "mailto:a@b.c")
    assert rejected.code == 2
    assert "rejected (scheme)" in rejected.out


def test_explain_takes_scope_and_route_from_the_spider(limpet: Limpet, tmp_path: Path) -> None:
    """With the spider's file: which handler takes it, and whether a link to it is followed."""
    (tmp_path / "s.py").write_text(
        'from limpet import Spider\nspider = Spider("s", start=["http://a.test/x/"], scope="prefix")\n'
        '@spider.page("/x/{number}")\ndef item(page, tx, number): ...\n',
        encoding="utf-8",
    )
    inside, outside = (limpet("explain", url, "--file", "s.py", "--json").json for url in ("http://a.test/x/7", "http://a.test/y"))
    assert (inside["route"], inside["scope"]) == ("item(number='7')", "followed from any page (scope prefix)")
    assert outside["route"] == "no handler takes it: a crawl would skip it"
    assert outside["scope"].startswith("not followed as a link (scope)")
