"""Jobs: made whole or not at all, once, and never complete with nothing done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet import failpoint
from limpet.batch import Outcome, Result
from limpet.errors import UsageError
from limpet.failpoint import JOB_STEPS, FailpointRaised
from limpet.settings import SHARDS_MAX
from limpet.store import Store, jobs, open_store
from limpet.store.standing import circles, counts_of, put_back, standing
from limpet.task import ShardId, TaskKey
from limpet.url import KeyProfile, SiteRule, digest16, host_id, shard_of
from tests.conftest import Databases, Hire
from tests.store.audit import audit
from tests.store.hands import (
    PROFILE,
    SETTINGS,
    SPIDER,
    Hand,
    column,
    counted,
    done,
    dump,
    failed,
    found_job,
    host_in,
    link,
    pages,
    released,
    skipped,
)

#: What HASH_VERSION 1 gives: the shards of some hosts, of 16, and the host and the key of http://example.com/.
GOLDEN_SHARDS = {"a.test": 7, "b.test": 12, "example.com": 6, "example.com:8080": 1, "xn--bcher-kva.example": 9}
GOLDEN_HOST = 1424565772579972710
GOLDEN_KEY = "9aba6a18c5a5d94534a3b99c485d4547"

START = jobs.Source("list", b"1" * 16, '["http://a.test/"]')


@pytest.fixture
def empty(make_store: Callable[..., Store]) -> Store:
    """An open database without a job."""
    return make_store()


def make(store: Store, *sources: jobs.Source, slot: str = "", profile: KeyProfile = PROFILE, shards: int = 4) -> jobs.Job:
    """Make or join the job of a slot."""
    return jobs.join(store.db, spider=SPIDER, slot=slot, profile=profile, shards=shards, sources=list(sources))


# -- made whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", JOB_STEPS[:-1])
def test_a_job_is_made_with_its_shards_and_its_source_or_not_at_all(
    empty: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str
) -> None:
    """5: a process that dies in the middle leaves nothing; the next one makes it whole."""
    before = dump(empty.db)
    monkeypatch.setenv("LIMPET_FAILPOINT_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(failpoint, "_PLAN", {step: (1, "raise")})
    monkeypatch.setattr(failpoint, "_HITS", Counter())
    with pytest.raises(FailpointRaised):
        make(empty, START)
    assert (tmp_path / "log").read_text().split() == [step]
    assert dump(empty.db) == before
    job = make(empty, START)
    assert len(column(empty.db, "shard", table="shard")) == 4
    assert [source.position for source in jobs.sources(empty.db, job.id)] == [0]


def test_a_job_committed_before_its_source_would_look_like_a_job_with_nothing_to_do(empty: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of 5: without the transaction, the process that comes next finds a job without starts."""
    monkeypatch.setattr(failpoint, "_PLAN", {"job_rows": (1, "raise")})
    monkeypatch.setattr(failpoint, "_HITS", Counter())
    with monkeypatch.context() as patched:
        patched.setattr(type(empty.db), "begin", lambda db: None)
        patched.setattr(type(empty.db), "rollback", lambda db: None)
        with pytest.raises(FailpointRaised):
            make(empty, START)
    job = jobs.find(empty.db, SPIDER, "")
    assert job is not None
    assert standing(empty.db, job.id).is_nothing


def test_a_trigger_that_fires_twice_starts_one_job(databases: Databases) -> None:
    """(spider, slot) is unique: of eight that start at once one makes the job, the others load it (P126)."""
    dsn, barrier = databases.new(), Barrier(8)
    open_store(dsn).close()

    def start(_: int) -> int:
        store = open_store(dsn, settings=SETTINGS)
        barrier.wait()
        job = store.join(spider=SPIDER, slot="2026-11-30", profile=PROFILE, sources=[START])
        store.close()
        return job.id

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(start, range(8)))
    store = open_store(dsn)
    assert len(ids) == 1
    assert len(jobs.every(store.db)) == 1
    assert len(jobs.sources(store.db, ids.pop())) == 1
    assert len(column(store.db, "shard", table="shard")) == 4
    store.close()


def test_slots_and_spiders_are_jobs_of_their_own(empty: Store) -> None:
    """A recrawl is a new slot; the names say which is which."""
    one, two = make(empty, slot="1"), make(empty, slot="2")
    other = jobs.join(empty.db, spider="other", slot="1", profile=PROFILE, shards=2, sources=[])
    assert len({one.id, two.id, other.id}) == 3
    assert [job.name for job in jobs.every(empty.db)] == ["shop@1", "shop@2", "other@1"]
    assert jobs.read(empty.db, two.id) == two
    with pytest.raises(UsageError, match="no job 99"):
        jobs.read(empty.db, 99)


def test_the_number_of_shards_is_fixed_when_the_job_is_made(empty: Store) -> None:
    """Whoever joins uses the job's, not its own."""
    make(empty, shards=4)
    assert make(empty, shards=9).shards == 4
    assert len(column(empty.db, "shard", table="shard")) == 4


@pytest.mark.parametrize("shards", [0, -1, SHARDS_MAX + 1])
def test_a_number_of_shards_that_cannot_be_is_refused(empty: Store, shards: int) -> None:
    """1 to 4096; nothing is made."""
    before = dump(empty.db)
    with pytest.raises(UsageError, match="shards"):
        make(empty, shards=shards)
    assert dump(empty.db) == before


# -- keys -----------------------------------------------------------------------------------------


def test_a_worker_that_would_compute_other_keys_is_refused(empty: Store) -> None:
    """11, 31: other site rules in the middle of a job would make a second task of every page."""
    make(empty, START)
    before = dump(empty.db)
    with pytest.raises(UsageError, match="other rules"):
        make(empty, jobs.Source("list", b"2" * 16, "[]"), profile=KeyProfile.of("aggressive"))
    assert dump(empty.db) == before


RULE = SiteRule.of("a.test", drop="sid")


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (KeyProfile.of(strip_www=True), r"this spider: strip_www is off in the job and on here\. Put"),
        (KeyProfile.of(strip_www=True, sort_values=True), "sort_values is off in the job and on here, strip_www is off"),
        (KeyProfile.of(rules=[RULE]), r"this spider: the site rule for a\.test is not in the job\. Put"),
        (replace(KeyProfile.of(), name="exact"), "the profile is standard in the job and exact here"),
    ],
)
def test_what_differs_between_the_rules_for_keys_is_named(empty: Store, profile: KeyProfile, words: str) -> None:
    """Options and sites, and no JSON to compare by eye."""
    make(empty, START)
    with pytest.raises(UsageError, match=words) as caught:
        make(empty, START, profile=profile)
    assert "{" not in str(caught.value)


@pytest.mark.parametrize("sql", ["UPDATE job SET key_version = 99", "UPDATE job SET hash_version = 99"])
def test_a_job_with_keys_of_a_newer_release_is_refused(empty: Store, sql: str) -> None:
    """A release that cannot compute them exactly does not go on with it."""
    make(empty)
    empty.db.run_text(sql)
    with pytest.raises(UsageError, match="upgrade Limpet"):
        make(empty)


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=30), st.integers(1, SHARDS_MAX))
def test_the_shard_is_a_function_of_the_authority_alone(host: str, shards: int) -> None:
    """11: the same on every machine, in every process, within the job's number."""
    assert 0 <= shard_of(host, shards) < shards
    assert shard_of(host, shards) == shard_of(host, shards)
    assert -(2**63) <= host_id(host) < 2**63


def test_hosts_keep_their_shards_from_release_to_release() -> None:
    """11: these numbers may only change with HASH_VERSION; workers of two releases would crawl pages twice."""
    assert jobs.HASH_VERSION == 1
    assert {host: shard_of(host, 16) for host in GOLDEN_SHARDS} == GOLDEN_SHARDS
    assert host_id("example.com") == GOLDEN_HOST
    assert digest16("http://example.com/").hex() == GOLDEN_KEY


def test_pages_of_one_host_lie_in_one_shard_whatever_their_scheme(hire: Hire) -> None:
    """Its owner paces it without asking anybody."""
    links = [link(f"{scheme}://{host_in(2)}/{i}") for scheme in ("http", "https") for i in range(3)]
    assert {(one.shard, one.host) for one in links} == {(ShardId(2), links[0].host)}


def test_one_text_is_one_task_in_a_job(hire: Hire) -> None:
    """The unique key is (job, shard, host, key): a second row of one text cannot be."""
    hand = hire()
    hand.seed(*pages(0, 3))
    hand.store.known.clear()
    assert hand.seed(*pages(0, 3)).discovered == 0
    assert len(set(column(hand.db, "key"))) == 3
    audit(hand.db, hand.job.id)


# -- sources ----------------------------------------------------------------------------------------


def test_the_same_starts_again_are_no_second_source(empty: Store) -> None:
    """Joining a job that runs adds nothing; other starts are another source, open like the first."""
    make(empty, START)
    make(empty, START)
    job = make(empty, START, jobs.Source("list", b"2" * 16, '["http://b.test/"]'))
    assert [(s.source, s.digest, s.closed) for s in jobs.sources(empty.db, job.id)] == [
        (1, b"1" * 16, False),
        (2, b"2" * 16, False),
    ]


def test_starts_added_to_a_finished_job_open_it_again(hire: Hire) -> None:
    """5: start URLs of a later run of slot "" are read, and the job is not complete until they are."""
    hand = hire()
    hand.seed(*pages(0, 1))
    hand.finish(*(done(claim) for claim in hand.claim()))
    assert standing(hand.db, hand.job.id).is_complete
    hand.store.join(spider=SPIDER, profile=PROFILE, sources=[jobs.Source("list", b"x" * 16, "[]")])
    assert not standing(hand.db, hand.job.id).is_complete


def test_a_file_that_moved_is_the_same_source_in_its_new_place(empty: Store) -> None:
    """Its content is what it is; the position is kept."""
    make(empty, jobs.Source("file", b"f" * 16, place="/old/list", host="one"))
    empty.db.run_text("UPDATE source SET position = 70")
    job = make(empty, jobs.Source("file", b"f" * 16, place="/new/list", host="two"))
    assert [(s.place, s.host, s.position) for s in jobs.sources(empty.db, job.id)] == [("/new/list", "two", 70)]


# -- complete ---------------------------------------------------------------------------------------


def test_a_job_without_starts_or_tasks_is_nothing_to_do_and_never_complete(empty: Store) -> None:
    """5: exit 6, not 0 (P50)."""
    stands = standing(empty.db, make(empty).id)
    assert (stands.is_nothing, stands.is_complete) == (True, False)


def test_a_job_whose_starts_are_not_read_yet_is_neither(empty: Store) -> None:
    """There is something to come."""
    stands = standing(empty.db, make(empty, START).id)
    assert (stands.is_nothing, stands.is_complete) == (False, False)


def test_a_job_is_complete_when_every_task_has_ended(hire: Hire) -> None:
    """Done, skipped or dead; another slot's open tasks do not count."""
    hand = hire()
    hand.seed(*pages(0, 3))
    a, b, c = hand.claim()
    assert not standing(hand.db, hand.job.id).is_complete
    hand.finish(done(a), skipped(b), Result(c, Outcome.DEAD, reason="x"))
    found_job(hand.store, slot="another")
    assert standing(hand.db, 1).is_complete
    assert standing(hand.db, 2).is_nothing


def test_every_task_that_was_found_is_in_exactly_one_state_and_the_books_say_which(hire: Hire) -> None:
    """P21: known = done + skipped + dead + open, from the ledger alone, after retries, losses and revisits."""
    hand = hire()
    hand.seed(*pages(0, 8), *pages(1, 4))
    claims = hand.claim()
    ends = [done, skipped, failed, released, lambda claim: Result(claim, Outcome.DEAD, reason="status 500")]
    hand.finish(*(ends[i % 5](claim) for i, claim in enumerate(claims)))  # type: ignore[operator]
    hand.claim(2)
    hand.take(0, 1)
    for shard in (0, 1):
        hand.db.run("put_request", job=hand.job.id, shard=shard, what="retry", argument='{"states":["dead","skipped"]}', who="me")
    hand.finish(*(done(claim) for claim in hand.claim(1)))
    counts, states = counts_of(hand.db, hand.job.id), counted(hand.db)
    assert counts.known == 12 == sum(states.values())
    assert (counts.done, counts.skipped, counts.dead) == (states["done"], states["skipped"], states["dead"])
    assert counts.open == states["pending"] + states["running"] + states["failed"]
    audit(hand.db, hand.job.id)


# -- tasks that moved -------------------------------------------------------------------------------


def moved(hand: Hand, *moves: tuple[str, str]) -> dict[str, bytes]:
    """Pages that end as moved to another: name -> key."""
    names = sorted({name for move in moves for name in move})
    keys = {name: link(f"{name}.test/").key for name in names}
    hand.seed(*(link(f"{name}.test/") for name in names))
    targets = dict(moves)
    of_key = {key: name for name, key in keys.items()}
    results = []
    for claim in hand.claim():
        name = of_key[claim.key]
        if name in targets:
            target = keys[targets[name]]
            results.append(Result(claim, Outcome.SKIPPED, reason="moved", moved_to=target, links=(link(f"{targets[name]}.test/"),)))
        else:
            results.append(done(claim))
    hand.finish(*results)
    return keys


def test_two_that_moved_to_each_other_are_found_and_the_lower_key_is_put_back(hire: Hire) -> None:
    """12: both would be skipped, and the content of neither is ever collected."""
    hand = hire()
    keys = moved(hand, ("a", "b"), ("b", "a"))
    assert standing(hand.db, hand.job.id).is_complete
    found = circles(hand.db, hand.job.id)
    lowest = min(keys, key=lambda name: keys[name])
    assert column(hand.db, "key", "id = ?", (found[0][1],)) == [keys[lowest]]
    put_back(hand.db, hand.job.id, found, "me")
    assert not standing(hand.db, hand.job.id).is_complete
    (claim,) = hand.claim()
    assert claim.key == TaskKey(keys[lowest])
    hand.finish(done(claim))
    hand.claim()
    assert circles(hand.db, hand.job.id) == []
    assert standing(hand.db, hand.job.id).is_complete
    audit(hand.db, hand.job.id)


def test_longer_circles_are_found_once_and_chains_that_end_are_not(hire: Hire) -> None:
    """Three in a ring, a tail that leads into it, and a chain that leads to a page."""
    hand = hire()
    keys = moved(hand, ("a", "b"), ("b", "c"), ("c", "a"), ("t", "a"), ("x", "y"), ("y", "z"))
    ((_, task),) = circles(hand.db, hand.job.id)
    assert column(hand.db, "key", "id = ?", (task,)) == [min(keys[name] for name in "abc")]
    assert counted(hand.db) == {"skipped": 6, "done": 1}


def test_a_page_that_moved_to_itself_is_a_circle_of_one(hire: Hire) -> None:
    """It can come of a fault only, and is found all the same."""
    hand = hire()
    moved(hand, ("a", "a"))
    assert len(circles(hand.db, hand.job.id)) == 1
