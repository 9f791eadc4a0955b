"""Answers that only end with their connection: asked for again, and compared.

No byte of such an answer says whether it is whole, so one look proves nothing. Two looks that agree
do: a connection that dies by accident does not die twice at the same byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from limpet.errors import FetchError
from limpet.fetch.message import COMPLETE, UNVERIFIED, Answer, Request


async def confirm(exchange: Callable[[Request], Awaitable[Answer]], request: Request, answer: Answer) -> Answer:
    """The answer, asked for once more where it is unverified. `exchange` paces and may raise FetchError.

    A request that is not safe to repeat (RFC 9110 section 9.2.1) stays unverified.
    """
    if answer.verdict != UNVERIFIED or request.method not in ("GET", "HEAD"):
        return answer
    return agreed(answer, await exchange(request))


def agreed(first: Answer, second: Answer) -> Answer:
    """The better of two answers to one request, with what both together prove.

    Equal bodies prove each other. Where one is the beginning of the other it was cut, and the longer may be
    too: FetchError `truncated`, a strike. Other differences are a page that changes with each request: the
    second is kept, and stays `unverified`. A framed second answer needs no proof, a failed one (another status) gives none.
    """
    if second.status != first.status:
        return first
    if second.verdict != UNVERIFIED:
        return replace(second, hops=first.hops)
    if first.body == second.body:
        return replace(second, hops=first.hops, verdict=COMPLETE)
    if first.body.startswith(second.body) or second.body.startswith(first.body):
        raise FetchError(
            f"{first.url}: two answers without a marked end have {len(first.body):,} and {len(second.body):,} bytes: one was cut",
            kind="truncated",
        )
    return replace(second, hops=first.hops)
