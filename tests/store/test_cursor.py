"""`export --after`: a former export and what was written since are together what a whole export holds."""

from __future__ import annotations

import threading
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.errors import UsageError
from limpet.record import RecordType
from limpet.store import Store, cursor, datasets
from limpet.store.cursor import PREFIX, Cursor
from limpet.store.dialect import Database
from limpet.store.export import choose, stored_rows
from limpet.store.views import snapshot
from tests.conftest import Databases, Hire, on_sqlite
from tests.store.hands import SHARDS, Hand, Product, done, emitted, found_job, link, pages, product_type, table_name
from tests.store.test_datasets import Crawls, batches_of

LAW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
KINDS = [
    product_type(scope, policy) for scope, policy in (("job", "replace"), ("spider", "replace"), ("spider", "keep"), ("spider", "history"))
]
NAMES = ("a", "b", "c")

Rows = dict[tuple[str, str], tuple[object, ...]]
Choosing = dict[str, object]
Writer = Callable[[int, threading.Event], threading.Thread]


def read(db: Database, after: str = "", **chosen: object) -> tuple[Rows, str]:
    """What an export reads, by slot (where rows of several are asked for) and key, and the cursor that it prints."""
    with snapshot(db):
        choice = choose(db, "product", **chosen)  # type: ignore[arg-type]
        now = cursor.take(db, choice)
        if after:
            choice = cursor.newer(db, choice, cursor.parse(after), now)
        rows = {(slot if choice.with_slot else "", str(sku)): (sku, *rest) for slot, sku, *rest in stored_rows(db, choice)}
        return rows, str(now)


class Reader:
    """Somebody who exports now and then, always what is new since the last time, and keeps what was read."""

    def __init__(self, db: Database, **chosen: object) -> None:
        self.db = db
        self.chosen = chosen
        self.rows: Rows = {}
        self.cursor = ""
        self.read = 0

    def catch_up(self) -> None:
        """One more export."""
        found, self.cursor = read(self.db, self.cursor, **self.chosen)
        self.rows.update(found)
        self.read += len(found)

    def missing(self) -> Rows:
        """Rows of a whole export that were not read as they are now."""
        whole, _ = read(self.db, **self.chosen)
        return {key: row for key, row in whole.items() if self.rows.get(key) != row}


def choices_of(kind: RecordType) -> list[Choosing]:
    """Every way to ask for rows of a dataset with the slots 1 and 2."""
    present: list[Choosing] = [{}] if kind.scope == "spider" else []
    return [*present, {"slot": "1"}, {"slot": "2"}, {"all_slots": True}]


# -- the law ------------------------------------------------------------------------------------


@settings(max_examples=20, **LAW)  # type: ignore[arg-type]
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_exports_after_one_another_miss_nothing_in_any_order_of_commits(
    databases: Databases, data: st.DataObject, kind: RecordType
) -> None:
    """Over two slots and two shards, tasks that run again and emit something else, and exports in between."""
    emits = st.dictionaries(st.sampled_from("xy"), st.integers(1, 3), max_size=2)
    with Crawls(databases, kind, "12", NAMES) as crawls:
        readers = [Reader(crawls.stores[0].db, **chosen) for chosen in choices_of(kind)]
        for slot in data.draw(st.permutations("1212")):
            names = NAMES if crawls.hands[slot].claims else sorted(data.draw(st.sets(st.sampled_from(NAMES), min_size=1)))
            if not crawls.hands[slot].claims:
                crawls.again(slot, names)
            for batch in batches_of(data.draw, names):
                crawls.commit(slot, [(name, data.draw(emits)) for name in batch])
                for reader in readers:
                    if data.draw(st.booleans()):
                        reader.catch_up()
        for reader in readers:
            reader.catch_up()
            assert not reader.missing(), reader.chosen
            before = reader.read
            reader.catch_up()
            assert reader.read == before  # nothing was written meanwhile


def retraction(crawls: Crawls) -> Reader:
    """A record's task no longer emits it: another's older offer stands for it, and a reader catches up."""
    low, high = sorted("ab", key=lambda name: link(f"{name}.test/").key)
    crawls.commit("", [(low, {"x": 1}), (high, {"x": 2})])
    reader = Reader(crawls.stores[0].db)
    reader.catch_up()
    crawls.again("", [low])
    crawls.commit("", [(low, {})])
    reader.catch_up()
    return reader


def test_a_record_that_takes_the_place_of_another_is_new_though_its_stamp_is_old(databases: Databases) -> None:
    """The batch that took the other one away has left a note."""
    with Crawls(databases, Product, [""], "ab") as crawls:
        reader = retraction(crawls)
        assert not reader.missing()
        assert reader.read == 2


def test_without_that_note_it_would_be_missing(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: stamps alone."""
    fired: list[bytes] = []
    monkeypatch.setattr(datasets.Writer, "_note_heir", lambda writer, part, key: fired.append(key))
    with Crawls(databases, Product, [""], "ab") as crawls:
        assert retraction(crawls).missing()
    assert fired


# -- many shards, and a writer meanwhile -----------------------------------------------------------


def emit_some(hand: Hand, shard: int, number: int) -> None:
    """One batch of a shard: a task is claimed and done, with a record of its own and one that all of them share."""
    hand.seed(*pages(shard, number + 1, start=number), shard=shard)
    offers = [emitted(f"{shard}-{number}", number), emitted(f"shared-{number % 7}", shard * 1000 + number)]
    for claim in hand.claim(10, shard):
        hand.finish(done(claim, offers=offers))


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    """A worker on a thread of its own that commits so many rounds to every shard; after the first it waits until it may go on."""
    started: list[threading.Thread] = []

    def start(rounds: int, may_go_on: threading.Event) -> threading.Thread:
        def work() -> None:
            hand = Hand.on(store)
            hand.take()
            try:
                for number in range(rounds):
                    for shard in range(SHARDS):
                        emit_some(hand, shard, number)
                    may_go_on.wait(60)
            finally:
                hand.leave()

        started.append(threading.Thread(target=work))
        started[-1].start()
        return started[-1]

    yield start
    for thread in started:
        thread.join()


def test_exports_beside_a_writer_are_together_the_whole(store: Store, writer: Writer) -> None:
    """However its commits and our snapshots fall: no row is missing, and no batch is read as new twice."""
    may_go_on = threading.Event()
    thread = writer(12, may_go_on)
    with closing(store.again(readonly=True)) as reading:
        reader = Reader(reading.db)
        while thread.is_alive():
            reader.catch_up()
            may_go_on.set()
        exports_beside, before = reader.cursor, reader.read
        reader.catch_up()
        assert exports_beside
        assert not reader.missing()
        assert len(reader.rows) >= SHARDS * 12
        reader.catch_up()
        assert reader.read - before <= len(reader.rows)
        assert read(reading.db, reader.cursor)[0] == {}


def test_a_cursor_taken_after_the_rows_would_miss_some(store: Store, hire: Hire) -> None:
    """The twin: watermarks of a later moment than the rows'."""
    hand = hire()
    emit_some(hand, 0, 0)
    rows, _ = read(store.db)
    emit_some(hand, 1, 0)  # commits between the rows and the cursor
    _, late = read(store.db)
    rows.update(read(store.db, late)[0])
    assert read(store.db)[0].keys() - rows.keys()


# -- the text -----------------------------------------------------------------------------------


vectors = st.dictionaries(st.integers(1, 2**40), st.lists(st.integers(0, 2**50), max_size=70), max_size=20)


@given(vectors)
def test_a_cursor_is_read_back_as_it_was(watermarks: dict[int, list[int]]) -> None:
    """Any jobs, shards and watermarks, in a text that a shell takes as one word."""
    taken = Cursor(b"w" * 8, b"d" * 8, watermarks)
    text = str(taken)
    assert cursor.parse(text) == cursor.parse(f" {text}\n") == taken
    assert all(char.isalnum() or char in "-_" for char in text)


def test_a_cursor_is_short() -> None:
    """A job of 64 shards: some 200 characters; a year of days with 16 shards, each with a thousand batches: some kilobytes."""
    assert len(str(Cursor(b"w" * 8, b"d" * 8, {1: [*range(100, 164)]}))) < 200
    assert len(str(Cursor(b"w" * 8, b"d" * 8, {job: [1000 + (job * shard) % 97 for shard in range(16)] for job in range(365)}))) < 16_000


TEXT = str(Cursor(b"w" * 8, b"d" * 8, {1: [1, 2, 3], 7: [900]}))


@given(place=st.integers(0, len(TEXT) - 1), char=st.characters(codec="utf-8"), cut=st.booleans())
def test_a_garbled_cursor_is_refused(place: int, char: str, cut: bool) -> None:
    """One character another, or the end cut off; padding bits that say nothing are no change."""
    text = TEXT[:place] if cut else TEXT[:place] + char + TEXT[place + 1 :]
    try:
        found = cursor.parse(text)
    except UsageError:
        return
    assert str(found) == TEXT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no cursor"),
        ("nonsense", "is no cursor"),
        (PREFIX, "is no cursor"),
        (PREFIX + "AAAA", "is no cursor"),
        (TEXT + "AAAA", "is no cursor"),
        ("limpet2-" + TEXT.removeprefix(PREFIX), "another form than this release's"),
        (PREFIX + urlsafe_b64encode(zlib.compress(b"\0" * 10**8)).decode(), "is no cursor"),
    ],
)
def test_what_is_no_cursor_is_refused(text: str, expected: str) -> None:
    """Also what would unpack to more than there is room for."""
    with pytest.raises(UsageError, match=expected):
        cursor.parse(text)
    assert urlsafe_b64decode(TEXT.removeprefix(PREFIX) + "==")


def test_a_cursor_of_other_rows_is_refused(databases: Databases) -> None:
    """Another slot, all slots instead of one, another dataset."""
    with Crawls(databases, KINDS[3], "12", NAMES) as crawls:
        db = crawls.stores[0].db
        cursors = {str(chosen): read(db, **chosen)[1] for chosen in choices_of(KINDS[3])}
        for chosen in choices_of(KINDS[3]):
            for of, text in cursors.items():
                if of != str(chosen):
                    with pytest.raises(UsageError, match="is of other rows"):
                        read(db, text, **chosen)


@on_sqlite
def test_a_cursor_of_another_database_or_of_its_own_future_is_refused(
    databases: Databases, make_store: Callable[..., Store], hire: Hire, store: Store
) -> None:
    """A database that was put back to a former state has batches of the same numbers with other rows in them."""
    other = make_store()
    found_job(other)
    other.ensure_datasets("shop", {table_name(Product): Product})
    other.db.run_text("UPDATE job SET created_ms = created_ms + 1")
    with pytest.raises(UsageError, match="is of another database"):
        read(store.db, read(other.db)[1])
    emit_some(hire(0), 0, 0)
    future = read(store.db)[1]
    store.db.run_text("UPDATE shard SET watermark = watermark - 1 WHERE shard = 0")
    with pytest.raises(UsageError, match="put back to a former state"):
        read(store.db, future)
