"""Keyed tasks: the schema that a signature is, one text for each key, and what is refused with its place named."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet import Call, Http, Page, Spider, Tariff, Tx, UsageError, call, places
from limpet.engine.calling import Bill, authority_of
from limpet.engine.calls import BUCKETS, CallSchema, micro
from limpet.errors import FetchError
from limpet.fetch.message import Answer
from limpet.url import digest16, host_id


def schema_of(spider: Spider, name: str = "ask") -> CallSchema:
    """The schema of a handler."""
    return spider.schema(name)


def mapped() -> Spider:
    """A spider with a key of several kinds."""
    spider = Spider("maps")

    @spider.task(key=("keyword", "lat", "day"), cost="0.25")
    async def ask(
        keyword: str, lat: Annotated[Decimal, places(3)], day: date, *, depth: int = 1, at: datetime | None = None, http: Http, tx: Tx
    ) -> None:
        """Asks."""

    return spider


ARGUMENTS = {"keyword": "tea", "lat": Decimal("39.9041"), "day": date(2026, 11, 30)}


def test_the_text_of_a_call_is_its_key_and_nothing_else() -> None:
    """Handler, place, canonical JSON; what is not in the key travels as payload."""
    link = schema_of(mapped()).link({**ARGUMENTS, "depth": 3}, shards=16)
    authority, _, key = link.text.removeprefix("call://").partition("/")
    assert key == '{"day":"2026-11-30","keyword":"tea","lat":"39.904"}'
    assert authority.startswith("ask+")
    assert 0 <= int(authority[4:]) < BUCKETS
    assert (link.key, link.host, link.shard) == (digest16(link.text), host_id(authority), host_id(authority) % 16)
    assert link.text == schema_of(mapped()).link({**ARGUMENTS, "lat": Decimal("39.90410")}, shards=16).text
    assert schema_of(mapped()).decode(link.payload) == {**ARGUMENTS, "lat": Decimal("39.904"), "depth": 3, "at": None}


@given(st.decimals(-180, 180, allow_nan=False), st.integers(0, 5))
def test_a_number_has_one_text_however_it_is_written(number: Decimal, zeros: int) -> None:
    """Trailing zeros, exponents and minus nought."""
    schema = schema_of(mapped())
    longer = Decimal(f"{number:f}" + ("." if "." not in f"{number:f}" else "") + "0" * zeros)
    assert schema.text({**ARGUMENTS, "lat": number}) == schema.text({**ARGUMENTS, "lat": longer})
    assert "-0.000" not in schema.text({**ARGUMENTS, "lat": Decimal("-0.0001")})


@given(st.text(min_size=1).filter(lambda text: "\0" not in text and text.isprintable()))
def test_arguments_come_back_as_they_were(text: str) -> None:
    """Through the queue's JSON."""
    schema = schema_of(mapped())
    when = datetime(2026, 11, 30, 8, tzinfo=timezone(timedelta(hours=8)))
    found = schema.decode(schema.link({**ARGUMENTS, "keyword": text, "at": when}, shards=4).payload)
    assert (found["keyword"], found["at"]) == (text, when)
    assert isinstance(found["at"], datetime)
    assert found["at"].tzinfo is UTC


def test_calls_of_one_handler_are_spread_over_all_places() -> None:
    """So over all shards."""
    schema = schema_of(mapped())
    hosts = {schema.link({**ARGUMENTS, "keyword": str(n)}, shards=16).host for n in range(2000)}
    assert len(hosts) == BUCKETS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"keyword": "tea"}, "ask needs lat"),
        ({**ARGUMENTS, "lng": 1}, "ask does not take lng"),
        ({**ARGUMENTS, "lat": 39.9}, "argument lat is 39.9: expected Decimal, found float"),
        ({**ARGUMENTS, "lat": Decimal("NaN")}, "expected a number"),
        ({**ARGUMENTS, "lat": Decimal("1e99999999")}, "more than 1000 digits"),
        ({**ARGUMENTS, "day": datetime(2026, 11, 30, tzinfo=UTC)}, "argument day is"),
        ({**ARGUMENTS, "depth": True}, "argument depth is True: expected int, found bool"),
        ({**ARGUMENTS, "at": datetime(2026, 11, 30)}, "without a zone"),
        ({**ARGUMENTS, "keyword": "a\0b"}, "NUL"),
        ({**ARGUMENTS, "keyword": "x" * 9000}, "a key of more than 8,192 bytes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_name(arguments: dict[str, object], said: str) -> None:
    """Where the task is made, not when it runs."""
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        schema_of(mapped()).link(arguments, shards=4)


def _float(lat: float, *, tx: Tx) -> None: ...
def _unplaced(lat: Decimal, *, tx: Tx) -> None: ...
def _strange(lat: Page, *, tx: Tx) -> None: ...
def _bare(lat, *, tx: Tx) -> None: ...  # type: ignore[no-untyped-def]
def _sync(lat: str, *, http: Http) -> None: ...


@pytest.mark.parametrize(
    ("function", "key", "said"),
    [
        (_float, "lat", "one way of writing it"),
        (_unplaced, "lat", "one way of writing it"),
        (_strange, "lat", "annotated"),
        (_bare, "lat", "annotated nothing"),
        (_sync, "lat", "write `async def _sync`"),
        (_float, ("lng",), "key 'lng' is no argument"),
        (_float, (), "a keyed task needs key="),
    ],
)
def test_a_signature_that_is_no_schema_is_refused_when_the_file_is_loaded(function: object, key: object, said: str) -> None:
    """Naming function and parameter."""
    with pytest.raises(UsageError, match=said):
        Spider("maps").task(key=key)(function)  # type: ignore[arg-type,type-var]


@pytest.mark.parametrize("cost", ["a", -1, "0.0000001", float("nan")])
def test_a_cost_that_is_no_number_of_credits_is_refused(cost: object) -> None:
    """Six decimal places at the most."""
    with pytest.raises(UsageError, match="cost"):
        micro(cost, "ask()")


def test_a_release_adds_arguments_with_a_default_and_drops_others() -> None:
    """A queue outlives both."""
    old = schema_of(mapped()).link({**ARGUMENTS, "depth": 2}, shards=4).payload
    spider = Spider("maps")

    @spider.task(key=("keyword", "day"))
    async def ask(keyword: str, day: date, lang: str = "en", *, tx: Tx) -> None:
        """Asks."""

    assert spider.schema("ask").decode(old) == {"keyword": "tea", "day": date(2026, 11, 30), "lang": "en"}

    other = Spider("maps")

    @other.task(key="zone")
    async def ask2(zone: str, *, tx: Tx) -> None:
        """Asks."""

    with pytest.raises(UsageError, match="ask2 needs zone"):
        other.schema("ask2").decode(old)


def test_a_call_names_its_handler_by_function_or_by_name() -> None:
    """And its arguments by name."""
    assert call("ask", priority=3, keyword="tea") == Call("ask", {"keyword": "tea"}, 3)
    assert call(_sync, lat="x").handler == "_sync"


# -- the bill ----------------------------------------------------------------------------------------


def bill(tariff: Tariff | None = None, cost: int = 1_000_000) -> Bill:
    """A bill of one try."""
    return Bill(CallSchema("ask", ("a",), {}, cost, tariff or Tariff()))


def answer(status: int, *headers: tuple[str, str]) -> Answer:
    """An answer of the provider."""
    return Answer("http://api.test/", status, headers=headers)


def test_a_bill_ends_in_what_is_known_of_it() -> None:
    """Nothing sent: void. All refunded: refunded. One charged: charged. One cut off: unknown."""
    one = bill()
    assert str(one.charge().state) == "void"  # type: ignore[union-attr]
    one.took(answer(503))
    one.failed(FetchError("refused", kind="connect"))
    one.failed(FetchError("slow", kind="timeout"))
    assert str(one.charge().state) == "refunded"  # type: ignore[union-attr]
    assert one.took(answer(200))
    assert (str(one.charge().state), one.charge().amount) == ("charged", 1_000_000)  # type: ignore[union-attr]
    one.under_way = 1
    assert (str(one.charge().state), one.charge().amount) == ("unknown", 1_000_000)  # type: ignore[union-attr]
    assert bill(cost=0).charge() is None
    lost = bill()
    lost.failed(FetchError("reset", kind="reset"))
    assert str(lost.charge().state) == "unknown"  # type: ignore[union-attr]


def test_a_header_tells_what_a_call_took_and_nonsense_in_it_is_noted() -> None:
    """The sum over the requests of a try."""
    one = bill(Tariff(credits_header="X-Credits"))
    one.took(answer(200, ("x-credits", "2.5")))
    one.took(answer(200, ("X-Credits", "1")))
    assert one.charge().amount == 3_500_000  # type: ignore[union-attr]
    odd = bill(Tariff(credits_header="X-Credits"))
    odd.took(answer(200, ("X-Credits", "many")))
    assert odd.charge().amount == 1_000_000  # type: ignore[union-attr]
    assert "no number" in odd.charge().reason  # type: ignore[union-attr]


def test_a_tariff_says_it_for_each_outcome_and_refuses_words_that_are_none() -> None:
    """A status of its own before its class."""
    tariff = Tariff(charged=("2xx", "404"), refunded=("4xx",))
    assert [tariff.says(outcome) for outcome in ("200", "404", "403", "500", "lost")] == [
        "charged", "charged", "refunded", "unknown", "unknown"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="tariff: outcome 'ok'"):
        Tariff(charged=("ok",))


def test_the_provider_of_a_url_is_named_without_secrets() -> None:
    """No user, no key of the query."""
    assert authority_of("https://me:secret@API.test:8443/v1?key=k") == "api.test:8443"


def test_a_uuid_in_a_key_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not for each of a million tasks."""
    spider = Spider("fleeting")

    @spider.task(key="run")
    async def odd(run: UUID, *, tx: Tx) -> None:
        """Asks."""

    for n in range(3):
        spider.schema("odd").link({"run": UUID(int=n)}, shards=4)
    assert len([record for record in caplog.records if "looks like a UUID" in record.message]) == 1
