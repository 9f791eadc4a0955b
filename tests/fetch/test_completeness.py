"""Bodies that only end with their connection, looked at twice."""

from __future__ import annotations

import pytest

from limpet.errors import FetchError
from limpet.fetch.completeness import agreed, confirm
from limpet.fetch.http import Client
from limpet.fetch.message import COMPLETE, UNVERIFIED, Answer, Request
from limpet.settings import Settings
from tests.fetch.hostile import PAGE, Wire, serve


def closed(body: bytes, **fields: object) -> Answer:
    return Answer("http://a/", **{"status": 200, "body": body, "framing": "close", "verdict": UNVERIFIED, **fields})  # type: ignore[arg-type]


def test_two_equal_bodies_prove_each_other() -> None:
    """A connection that dies by accident does not die twice at the same byte."""
    assert agreed(closed(b"whole"), closed(b"whole")).verdict == COMPLETE


@pytest.mark.parametrize(("first", "second"), [(b"who", b"whole"), (b"whole", b"who")])
def test_a_body_that_begins_another_was_cut(first: bytes, second: bytes) -> None:
    """One of the two was, so the longer may be too: another try."""
    with pytest.raises(FetchError, match="one was cut") as caught:
        agreed(closed(first), closed(second))
    assert (caught.value.kind, caught.value.retryable) == ("truncated", True)


def test_bodies_that_differ_otherwise_prove_nothing() -> None:
    """A page that changes with each request: the later is kept, still unverified."""
    answer = agreed(closed(b"at 1"), closed(b"at 2"))
    assert (answer.body, answer.verdict) == (b"at 2", UNVERIFIED)


def test_a_second_answer_with_framing_needs_no_proof_and_one_with_another_status_gives_none() -> None:
    """The first stays where the second is an error page."""
    assert agreed(closed(b"who"), closed(b"whole", verdict=COMPLETE)).verdict == COMPLETE
    assert agreed(closed(b"who"), closed(b"oops", status=503)) == closed(b"who")


def test_the_hops_are_those_of_the_first() -> None:
    """The second look goes straight to where the redirects led."""
    assert agreed(closed(b"x", hops=("http://a/0",)), closed(b"x")).hops == ("http://a/0",)


async def test_an_unverified_body_is_asked_for_once_more() -> None:
    """faults.md section 5: refetched once and compared; a complete one is not."""
    async with serve() as site, Client(Settings(), user_agent="x") as client:
        for name, asked in (("close_fin", 2), ("sound", 3)):
            request = Request(site.url(name))
            answer = await confirm(client.exchange, request, await client.exchange(request))
            assert (answer.verdict, answer.body, len(site.heads)) == (COMPLETE, PAGE, asked)


async def test_a_post_is_not_repeated_for_a_proof() -> None:
    """It may have an effect: its answer stays unverified."""

    async def unframed(w: Wire) -> None:
        await w.sent(w.head_of(), PAGE)
        w.writer.close()

    async with serve(unframed) as site, Client(Settings(), user_agent="x") as client:
        request = Request(site.url("x"), "POST", body=b"pay")
        assert (await confirm(client.exchange, request, await client.exchange(request))).verdict == UNVERIFIED
        assert len(site.heads) == 1


async def test_a_second_look_that_is_cut_is_an_error_not_a_proof() -> None:
    """The error of the second request is the task's."""
    first = closed(PAGE)
    async with serve() as site, Client(Settings(), user_agent="x") as client:
        with pytest.raises(FetchError) as caught:
            await confirm(client.exchange, Request(site.url("close_rst")), first)
    assert caught.value.kind == "reset"
