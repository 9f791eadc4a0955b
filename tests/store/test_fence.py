"""The fence: what an owner of yesterday sends is dropped whole, and nothing else is dropped with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from limpet.batch import HostRow, Kind
from limpet.errors import InvariantBroken, OwnershipLost, WentBack
from limpet.store import Store, commit, lease
from limpet.task import Epoch
from tests.conftest import Databases, Hire, on_sqlite
from tests.store.audit import audit
from tests.store.hands import (
    Faulty,
    Hand,
    Held,
    change_sql,
    column,
    counted,
    done,
    dump,
    emitted,
    host_in,
    link,
    mutated,
    pages,
    records,
    states,
)


def two_shards_in_hand(hire: Hire) -> tuple[Hand, Hand]:
    """W holds a page claimed in shards 0 and 1; X waits beside it."""
    w, x = hire(0, 1), hire(take=False)
    w.seed(*pages(0, 1), *pages(1, 1))
    w.claim()
    return w, x


# -- a fenced part goes alone -------------------------------------------------------------------


def keeps_what_two_parts_share(hire: Hire) -> None:
    """A link and a record on a page of each shard; one shard is taken before the commit."""
    w, x = two_shards_in_hand(hire)
    first, second = sorted(w.claims.values(), key=lambda claim: claim.shard)
    shared = link(f"{host_in(3)}/shared")
    parts = [w.part(c.shard, done(c, shared, offers=[emitted("a", 1)])) for c in (first, second)]
    x.succeed_to_shard(w, 1)
    answer = w.commit(*parts)
    assert answer.fenced == (1,)
    assert [part.shard for part in answer.parts] == [0]
    assert f"http://{host_in(3)}/shared" in states(x.db), "the link of the part that lives is lost"
    assert records(x.db) == [("", "a", 1)], "the record of the part that lives is lost"
    assert counted(x.db) == {"done": 1, "pending": 2}
    audit(x.db, x.job.id)


def test_a_link_and_a_record_that_a_fenced_part_shares_stay_with_the_part_that_lives(hire: Hire) -> None:
    """2: each part carries its own copy; merging comes after the fences."""
    keeps_what_two_parts_share(hire)


@pytest.mark.parametrize("lost", ["links", "records"])
def test_merging_before_the_fences_would_lose_what_parts_share(hire: Hire, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The twin: de-duplicated over the whole commit before the fences, the copy that is kept goes with the fenced part."""
    from dataclasses import replace

    real = commit.transact

    def merged_early(db: object, context: object, parts: object, wants: object) -> object:
        seen: set[bytes] = set()
        kept = []
        for part in sorted(parts, key=lambda part: -part.shard):  # type: ignore[call-overload, union-attr]
            results = []
            for result in part.results:
                links = tuple(one for one in result.links if one.key not in seen)
                offers = tuple(one for one in result.offers if one.key not in seen)
                seen |= {one.key for one in (*links, *offers)}
                results.append(replace(result, **({"links": links} if lost == "links" else {"offers": offers})))
            kept.append(replace(part, results=tuple(results)))
        return real(db, context, kept, wants)  # type: ignore[arg-type]

    monkeypatch.setattr(commit, "transact", merged_early)
    with pytest.raises(AssertionError, match=f"the {lost[:-1]} of the part that lives is lost"):
        keeps_what_two_parts_share(hire)


def test_nothing_of_a_fenced_part_is_written_in_any_table(hire: Hire) -> None:
    """Not its links, records, attempts, pace or position of a source, although another part of the commit is."""
    w, x = two_shards_in_hand(hire)
    first, second = sorted(w.claims.values(), key=lambda claim: claim.shard)
    move = w.open_source(link(f"{host_in(2)}/list"))
    x.succeed_to_shard(w, 1)
    before = dump(x.db)
    result = done(second, link(f"{host_in(2)}/late"), offers=[emitted("late", 1)])
    late = w.part(1, result, hosts=(HostRow(1, "a", 1, 1),), sources=(move,))
    answer = w.commit(w.part(0, done(first)), late, want=5)
    assert answer.fenced == (1,)
    after = dump(x.db)
    assert {name for name in after if after[name] != before[name]} == {"task", "attempt", "ledger", "shard", "worker"}
    assert [row for row in after["ledger"] if row[1] == 1] == [row for row in before["ledger"] if row[1] == 1]
    audit(x.db, x.job.id)


def test_a_commit_whose_parts_are_all_fenced_writes_nothing(hire: Hire) -> None:
    """Every shard is another's: the database does not change, and no error hides it."""
    w, x = two_shards_in_hand(hire)
    parts = [w.part(claim.shard, done(claim)) for claim in w.claims.values()]
    x.succeed_to(w)
    before = dump(x.db)
    answer = w.commit(*parts, want=5)
    assert (answer.parts, set(answer.fenced), answer.claims) == ((), {0, 1}, ())
    assert dump(x.db) == before
    assert w.held == {}


# -- zombies ------------------------------------------------------------------------------------


def a_zombie_writes_nothing(hire: Hire) -> None:
    """W is taken for dead while it works; X fetches the page again; W wakes up and commits."""
    w, x = hire(0), hire(take=False)
    w.seed(*pages(0, 1))
    (claim,) = w.claim()
    late = w.part(0, done(claim, offers=[emitted("a", 1)]))
    (taken,) = x.succeed_to(w)
    assert taken.epoch == late.epoch + 1, "a token that does not grow protects nothing"
    (again,) = x.claim()
    assert w.commit(late).fenced == (0,), "the zombie wrote"
    x.finish(done(again, offers=[emitted("a", 2)]))
    assert records(x.db) == [("", "a", 2)]
    audit(x.db, x.job.id)


def test_a_zombie_writes_nothing_and_the_token_grows_at_each_take_over(hire: Hire) -> None:
    """The epoch is checked and raised (P42, P68, P70)."""
    a_zombie_writes_nothing(hire)


def test_an_epoch_that_is_not_raised_protects_nothing(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of P68: with the increment gone the promise breaks."""
    probe = hire(take=False)
    change_sql(monkeypatch, probe.db, "take_over", "epoch = epoch + 1", "epoch = epoch + 0")
    monkeypatch.setattr(lease, "take_over", mutated(lease.take_over, "Epoch(row.epoch + 1)", "Epoch(row.epoch)"))  # type: ignore[arg-type]
    with pytest.raises((AssertionError, InvariantBroken)):
        a_zombie_writes_nothing(hire)


def test_a_fence_whose_row_count_is_not_read_protects_nothing(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 13: were the statements after the fence sent all the same, the zombie would write."""
    monkeypatch.setattr(commit, "fence", lambda db, parts: (list(parts), []))
    with pytest.raises((AssertionError, InvariantBroken)):
        a_zombie_writes_nothing(hire)


def test_nothing_is_said_after_a_fence_that_did_not_hold(hire: Hire) -> None:
    """13: the row count is read before anything else is sent, and the shard's row is judged at once."""
    w, x = hire(0), hire(take=False)
    part = w.part(0)
    x.succeed_to(w)
    said = Faulty(w.store.db)
    w.store.db = said  # type: ignore[assignment]
    w.commit(part)
    assert said.said[:1] == ["fence"]
    assert "put_ledger" not in said.said


def test_an_owner_that_was_fenced_gets_the_shard_back_by_take_over_only(hire: Hire) -> None:
    """14: committing on under the new watermark is fenced too; a take-over from oneself reclaims what was forgotten."""
    w, x = hire(0), hire(take=False)
    w.seed(*pages(0, 2))
    x.succeed_to_shard(w, 0)
    x.release(0)
    w.held[0] = Held(Epoch(1), 4)
    assert w.commit(w.part(0)).fenced == (0,)
    (taken,) = w.take(0)
    assert taken.epoch == 3
    w.claim()
    forgotten = dict(w.claims)
    (taken,) = w.take(0)  # it lost its memory, not its shard
    assert (taken.epoch, taken.lost) == (4, 2)
    assert counted(w.db) == {"pending": 2}
    assert forgotten
    audit(w.db, w.job.id)


def test_a_clean_stop_gives_the_shard_up_and_keeps_the_epoch(hire: Hire) -> None:
    """No owner, the same epoch: whoever comes next raises it (32)."""
    w, x = hire(0), hire(take=False)
    late = w.part(0)
    w.release(0)
    assert w.db.rows_text("SELECT owner, epoch FROM shard WHERE shard = 0") == [(None, 1)]
    assert w.commit(late).fenced == (0,)
    (taken,) = x.take(0)
    assert (taken.epoch, taken.lost) == (2, 0)
    audit(x.db, x.job.id)


def test_a_part_with_a_number_that_is_not_next_halts_the_job(hire: Hire) -> None:
    """Ours by owner and epoch, but with a watermark that fits no story: somebody wrote under our name."""
    w = hire(0)
    old = w.part(0)
    w.commit(w.part(0, kind=Kind.WORK))
    before = dump(w.db)
    with pytest.raises(InvariantBroken) as caught:
        w.commit(old)
    assert caught.value.invariant == "I1"
    after = dump(w.db)
    assert {name for name in after if after[name] != before[name]} == {"alert", "job"}


# -- a database that went back ------------------------------------------------------------------


def put_back(store: Store, databases: Databases) -> Callable[[], None]:
    """Keep a copy of the store's database; the answer restores it beneath everybody."""
    return databases.copy(store.dsn)


def test_a_database_that_went_back_drops_everything(store: Store, hire: Hire, databases: Databases) -> None:
    """8: an older copy is restored beneath a living worker: WentBack, and nothing is written on the wrong time line."""
    w = hire(0, 1)
    w.seed(*pages(0, 3), *pages(1, 3))
    restore = put_back(store, databases)
    w.claim(2)
    w.finish(*(done(claim) for claim in w.claims.values()))
    w.claim(1)
    parts = [w.part(claim.shard, done(claim)) for claim in w.claims.values()]
    restore()
    before = dump(w.db)
    with pytest.raises(WentBack):
        w.commit(*parts)
    assert dump(w.db) == before
    w.take(0, 1)
    w.claim()
    w.finish(*(done(claim) for claim in w.claims.values()))
    assert counted(w.db) == {"done": 6}
    audit(w.db, w.job.id)


@pytest.mark.parametrize("how", ["watermark", "epoch", "gone"])
def test_every_sign_of_an_older_database_is_told_from_a_fence(hire: Hire, how: str) -> None:
    """A lower watermark or epoch, or no shard row, is no other owner: the process drops all it has."""
    w, x = hire(0), hire(take=False)
    w.take(0)
    part = w.part(0)
    sql = {
        "watermark": "UPDATE shard SET watermark = 0 WHERE shard = 0",
        "epoch": "UPDATE shard SET epoch = 1, owner = 'x' WHERE shard = 0",
        "gone": "DELETE FROM shard WHERE shard = 0",
    }[how]
    x.db.run_text(sql)
    before = dump(x.db)
    with pytest.raises(WentBack):
        w.commit(part)
    assert dump(x.db) == before


def test_an_epoch_that_two_time_lines_share_is_told_apart_by_owner_and_watermark(store: Store, hire: Hire, databases: Databases) -> None:
    """8: W took the shard on the lost time line, X takes it on this one, under the very same epoch."""
    w, x = hire(take=False), hire(take=False)
    restore = put_back(store, databases)
    w.take(0)
    part = w.part(0)
    restore()
    x.take(0)
    assert (part.epoch, part.n) == (x.held[0].epoch, x.held[0].watermark + 1)
    before = dump(x.db)
    assert w.commit(part).fenced == (0,)
    assert dump(x.db) == before


def test_a_fence_on_the_epoch_alone_would_let_both_time_lines_write(
    store: Store, hire: Hire, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of 8: without the owner in the fence, W's batch is written into X's shard."""
    w, x = hire(take=False), hire(take=False)
    restore = put_back(store, databases)
    w.take(0)
    part = w.part(0)
    restore()
    x.take(0)
    change_sql(monkeypatch, w.db, "fence", "owner = :owner AND", ":owner <> '' AND")
    assert w.commit(part).fenced == ()


@on_sqlite
def test_a_file_that_was_put_in_the_place_of_the_open_one_takes_no_commit(hire: Hire) -> None:
    """A restored backup is another file under the same name: what went into the old one would be gone with it."""
    w = hire(0)
    w.seed(*pages(0, 2))
    (claim, _) = w.claim()
    place = w.db.place
    shutil.copy(place, f"{place}.older")
    part = w.part(0, done(claim))
    for leftover in ("-wal", "-shm"):
        os.unlink(place + leftover)
    os.replace(f"{place}.older", place)
    with pytest.raises(OwnershipLost):
        w.commit(part)


# -- what is remembered -------------------------------------------------------------------------


def no_link_is_lost_with_a_time_line(store: Store, hire: Hire, databases: Databases) -> None:
    """W inserts a link, the database goes back, W crawls the parent again."""
    w = hire(0)
    w.seed(*pages(0, 1))
    restore = put_back(store, databases)
    (claim,) = w.claim()
    child = link(f"{host_in(0)}/child")
    w.finish(done(claim, child))
    assert child.key in w.store.known
    restore()
    with pytest.raises(WentBack):
        w.commit(w.part(0))
    w.take(0)
    (claim,) = w.claim()
    w.finish(done(claim, child))
    assert f"http://{host_in(0)}/child" in states(w.db), "the link is lost for ever"


def test_known_keys_are_forgotten_with_a_lost_time_line(store: Store, hire: Hire, databases: Databases) -> None:
    """7: a cache that outlived the database would call the link known, and nobody would ever look for it again."""
    no_link_is_lost_with_a_time_line(store, hire, databases)


def test_known_keys_that_survive_a_fail_over_lose_links(
    store: Store, hire: Hire, databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of 7: a cache that is never cleared."""
    from limpet.store.known import KnownKeys

    monkeypatch.setattr(KnownKeys, "clear", lambda keys: None)
    with pytest.raises(AssertionError, match="lost for ever"):
        no_link_is_lost_with_a_time_line(store, hire, databases)


def test_known_keys_are_those_of_definite_commits_only(hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of a batch that was rolled back is not known: the next try inserts it."""
    w = hire(0)
    w.seed(*pages(0, 1))
    (claim,) = w.claim()
    child = link(f"{host_in(0)}/child")
    part = w.part(0, done(claim, child))
    with monkeypatch.context() as patched:
        patched.setattr(commit.ledger, "close_books", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            w.commit(part)
    assert child.key not in w.store.known
    assert w.commit(part).discovered == 1
    assert child.key in w.store.known


def test_known_keys_are_forgotten_on_a_new_connection_and_on_a_lost_shard(hire: Hire) -> None:
    """7: a reconnect may lead to another database, a fence may come of a fail-over."""
    w, x = hire(0, 1), hire(take=False)
    w.seed(*pages(0, 3))
    assert len(w.store.known) == 3
    w.db.reopen()
    w.commit(w.part(0))
    assert len(w.store.known) == 0
    w.seed(*pages(1, 3))
    assert len(w.store.known) == 3
    part = w.part(0)
    x.succeed_to_shard(w, 0)
    assert w.commit(part).fenced == (0,)
    assert len(w.store.known) == 0


def test_known_keys_are_bounded_and_forget_by_generations() -> None:
    """Two generations of at most so many keys: a key is forgotten only long after it was met."""
    from limpet.store.known import KnownKeys

    known = KnownKeys(keys_max=10)
    for number in range(100):
        known.update([b"%d" % number])
        assert len(known) <= 22
        assert b"%d" % number in known
    assert b"0" not in known


def test_taking_over_does_not_touch_the_lease_of_who_lives(hire: Hire) -> None:
    """A shard with a living owner is not taken, however often one tries."""
    w, x = hire(0), hire(take=False)
    before = column(w.db, "owner", table="shard")
    assert [row.owner_lives for row in lease.shards(x.db, x.job.id)] == [True, False, False, False]
    assert x.take(0) == []
    assert column(w.db, "owner", table="shard") == before
    assert w.commit(w.part(0)).fenced == ()
