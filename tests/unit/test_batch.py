"""What crosses layers: other content is another id, the same content the same, whatever happened in between."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.batch import (
    Claim,
    HostRow,
    Kind,
    Link,
    Offer,
    Part,
    Result,
    RobotsRow,
    SourceMove,
    Want,
    canonical_json,
    digest,
    tries_digest,
)
from limpet.task import Epoch, Outcome, ShardId, TaskId, TaskKey

KEY = TaskKey(b"k" * 16)
LINK = Link(ShardId(0), 7, TaskKey(b"l" * 16), "http://a.test/x", "http://a.test/x")
OTHER_LINK = replace(LINK, key=TaskKey(b"m" * 16), text="http://a.test/y")
OFFER = Offer("shop_product", b"o" * 16, '["a"]', b"c" * 16, ("a", 1))
HOST = HostRow(7, "a.test", 1000, 1000)
ROBOTS = RobotsRow("http://a.test", "parse", 200, b"User-agent: *", 60_000)
MOVE = SourceMove(1, 0, 5, False, (LINK,))


def claim(number: int = 1, key: TaskKey = KEY, tries: int = 1) -> Claim:
    """A claimed task."""
    return Claim(ShardId(0), TaskId(number), key, tries, 0, 0, 0, 7, "http://a.test/", "http://a.test/", "", "", 0, 0, 0, b"")


RESULT = Result(claim(), Outcome.DONE, links=(LINK,), offers=(OFFER,))
PART = Part(1, ShardId(0), "me", Epoch(1), 2, results=(RESULT,), hosts=(HOST,), robots=(ROBOTS,), sources=(MOVE,))


# -- digests ----------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20)), st.lists(st.binary(max_size=20)))
def test_no_two_lists_of_pieces_share_a_digest(a: list[bytes], b: list[bytes]) -> None:
    """Each piece goes in with its length: ("ab", "c") is not ("a", "bc")."""
    assert (digest(*a) == digest(*b)) == (a == b)
    assert len(digest(*a)) == 16


def test_a_digest_is_the_same_in_every_release() -> None:
    """It is stored: another function would break every seal there is."""
    assert digest().hex() == "cae66941d9efbd404e4d88758ea67670"
    assert digest(b"a", b"bc").hex() == "f657d58ed59382298356d21c95353a31"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values)
def test_a_value_has_one_json_text_and_comes_back_from_it(value: object) -> None:
    """Sorted keys, no spaces."""
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


def test_what_json_cannot_say_is_refused() -> None:
    """NaN is no JSON, and compares with nothing."""
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))
    assert canonical_json({"b": [1, "ä"], "a": None}) == '{"a":null,"b":[1,"ä"]}'


# -- the batch id -------------------------------------------------------------------------------------

CHANGES = {
    "job": replace(PART, job=2),
    "shard": replace(PART, shard=ShardId(1)),
    "owner": replace(PART, owner="you"),
    "epoch": replace(PART, epoch=Epoch(2)),
    "number": replace(PART, n=3),
    "kind": replace(PART, kind=Kind.RELEASE),
    "verify's cursor": replace(PART, verified=1),
    "a task": replace(PART, results=(replace(RESULT, claim=claim(key=TaskKey(b"x" * 16))),)),
    "a try": replace(PART, results=(replace(RESULT, claim=claim(tries=2)),)),
    "an outcome": replace(PART, results=(replace(RESULT, outcome=Outcome.DEAD),)),
    "a reason": replace(PART, results=(replace(RESULT, reason="why"),)),
    "a move": replace(PART, results=(replace(RESULT, moved_to=b"t" * 16),)),
    "a link less": replace(PART, results=(replace(RESULT, links=()),)),
    "a link more": replace(PART, results=(replace(RESULT, links=(LINK, OTHER_LINK)),)),
    "a record less": replace(PART, results=(replace(RESULT, offers=()),)),
    "a record's content": replace(PART, results=(replace(RESULT, offers=(replace(OFFER, content=b"d" * 16),)),)),
    "a record's key": replace(PART, results=(replace(RESULT, offers=(replace(OFFER, key=b"p" * 16),)),)),
    "a record's dataset": replace(PART, results=(replace(RESULT, offers=(replace(OFFER, dataset="other"),)),)),
    "a result less": replace(PART, results=()),
    "a result more": replace(PART, results=(RESULT, replace(RESULT, claim=claim(2, TaskKey(b"z" * 16))))),
    "a host less": replace(PART, hosts=()),
    "a host's delay": replace(PART, hosts=(replace(HOST, delay_ms=1),)),
    "a host's wait": replace(PART, hosts=(replace(HOST, wait_ms=1),)),
    "a host's pause": replace(PART, hosts=(replace(HOST, pause="429"),)),
    "a host's errors": replace(PART, hosts=(replace(HOST, errors=1),)),
    "robots less": replace(PART, robots=()),
    "robots' body": replace(PART, robots=(replace(ROBOTS, body=b"x"),)),
    "robots' outcome": replace(PART, robots=(replace(ROBOTS, outcome="allow_all"),)),
    "a source less": replace(PART, sources=()),
    "a source's position": replace(PART, sources=(replace(MOVE, after=6),)),
    "a source's start": replace(PART, sources=(replace(MOVE, before=1),)),
    "a source's end": replace(PART, sources=(replace(MOVE, closed=True),)),
    "a source's links": replace(PART, sources=(replace(MOVE, links=()),)),
}


def test_every_change_of_content_is_another_id() -> None:
    """3: 33 parts, 34 ids."""
    ids = [PART.batch_id(), *(part.batch_id() for part in CHANGES.values())]
    assert len(set(ids)) == len(CHANGES) + 1


def test_the_same_content_is_the_same_id_however_often_it_is_made() -> None:
    """Nothing random, no clock: after any number of failures the id is the one that may be in the ledger."""
    again = Part(1, ShardId(0), "me", Epoch(1), 2, results=(RESULT,), hosts=(HOST,), robots=(ROBOTS,), sources=(MOVE,))
    assert again.batch_id() == PART.batch_id() == PART.batch_id()


def test_what_is_only_for_people_makes_no_other_id() -> None:
    """A traceback, the digest of the code, the size of the result: kept, but not content."""
    told = replace(PART, code=b"other", results=(replace(RESULT, detail="traceback", size=99),))
    assert told.batch_id() == PART.batch_id()


def test_a_part_without_some_of_its_tasks_is_another_part() -> None:
    """The others stay, in their order."""
    results = tuple(Result(claim(i, TaskKey(bytes([i]) * 16)), Outcome.DONE) for i in range(5))
    whole = replace(PART, results=results)
    some = whole.without([TaskId(1), TaskId(3)])
    assert [result.claim.id for result in some.results] == [0, 2, 4]
    assert some.batch_id() != whole.batch_id()
    assert (some.n, some.hosts, some.sources) == (whole.n, whole.hosts, whole.sources)
    assert whole.without([]).batch_id() == whole.batch_id()


def test_a_batch_id_takes_texts_that_no_encoding_has() -> None:
    """A lone surrogate in a pause must cost its own batch, not the digest."""
    assert len(replace(PART, hosts=(replace(HOST, pause="\ud800"),)).batch_id()) == 16


# -- what a try offered -----------------------------------------------------------------------------------


@given(st.permutations([LINK, OTHER_LINK, LINK]), st.permutations([OFFER, replace(OFFER, key=b"p" * 16)]))
def test_what_a_try_offered_has_one_digest_in_any_order(links: list[Link], offers: list[Offer]) -> None:
    """After de-duplication: links by key, records by dataset and key."""
    offered = Result(claim(), Outcome.DONE, links=tuple(links), offers=tuple(offers)).digest()
    assert offered == Result(claim(), Outcome.DONE, links=(LINK, OTHER_LINK), offers=(OFFER, replace(OFFER, key=b"p" * 16))).digest()


def test_of_two_records_with_one_key_the_last_is_what_was_offered() -> None:
    """As it is what is stored."""
    last = replace(OFFER, content=b"e" * 16)
    both = Result(claim(), Outcome.DONE, offers=(OFFER, last)).digest()
    assert both == Result(claim(), Outcome.DONE, offers=(last,)).digest()
    assert both != Result(claim(), Outcome.DONE, offers=(OFFER,)).digest()


def test_a_link_is_no_record() -> None:
    """What was offered as one is not mistaken for the other."""
    assert Result(claim(), Outcome.DONE, links=(LINK,)).digest() != Result(claim(), Outcome.DONE).digest()
    assert Result(claim(), Outcome.DONE).digest() == digest(b"|")


rows = st.tuples(
    st.binary(min_size=16, max_size=16),
    st.integers(1, 9),
    st.sampled_from(list(Outcome)),
    st.text(max_size=5),
    st.binary(max_size=4),
)


@given(st.lists(rows, max_size=6), st.randoms())
def test_the_digest_of_a_batchs_tries_does_not_depend_on_their_order(
    tries: list[tuple[bytes, int, str, str, bytes]], random: object
) -> None:
    """`verify` recounts it from rows, which come in the order of their key."""
    mixed = list(tries)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert tries_digest(mixed) == tries_digest(tries)


def test_a_digest_of_tries_covers_every_field() -> None:
    """Key, number, outcome, reason, what was offered."""
    row = (b"k" * 16, 1, "done", "", b"o")
    others = [(b"x" * 16, 1, "done", "", b"o"), (b"k" * 16, 2, "done", "", b"o"), (b"k" * 16, 1, "dead", "", b"o")]
    others += [(b"k" * 16, 1, "done", "why", b"o"), (b"k" * 16, 1, "done", "", b"p")]
    assert len({tries_digest([one]) for one in [row, *others]} | {tries_digest([])}) == 7


# -- small things -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "authority"),
    [
        ("http://a.test/x/y?z", "a.test"),
        ("https://a.test:8443/", "a.test:8443"),
        ("http://[::1]:80/", "[::1]:80"),
        ("http://a.test", "a.test"),
    ],
)
def test_a_claim_knows_the_name_of_its_pace(text: str, authority: str) -> None:
    """Host and port, without the scheme."""
    assert replace(claim(), text=text).authority == authority


def test_nothing_wanted_is_nothing_claimed() -> None:
    """The default of every part."""
    assert (Want().tasks, Want().solo) == (0, False)


def test_values_that_cross_layers_cannot_be_changed() -> None:
    """Frozen before the first attempt to commit."""
    for value in (LINK, OFFER, RESULT, PART, HOST, ROBOTS, MOVE, claim(), Want()):
        with pytest.raises(FrozenInstanceError):
            setattr(value, fields(value)[0].name, 3)  # type: ignore[arg-type]
        assert not hasattr(value, "__dict__")
