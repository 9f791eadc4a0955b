"""One page, fetched as a crawl would fetch it: robots.txt obeyed, redirects followed, the answer judged."""

from __future__ import annotations

import time
from dataclasses import dataclass

from limpet.engine.contact import USER_AGENT
from limpet.engine.spider import Spider
from limpet.errors import FetchError
from limpet.fetch.http import Client
from limpet.fetch.message import Answer, Request
from limpet.fetch.page import Page
from limpet.fetch.redirects import Content, follow, origin_of
from limpet.fetch.robots import RobotsGate, product_token, robots_request
from limpet.fetch.status import Meaning, verdict_of
from limpet.settings import Settings
from limpet.url import canonicalise


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page, and what it took to get it."""

    page: Page
    answer: Answer
    meaning: Meaning


async def fetch(url: str, spider: Spider, settings: Settings) -> Fetched:
    """Fetch a page. Raises FetchError, of kind `robots` where robots.txt forbids it, and UrlRejected for what is no URL."""
    user_agent = spider.user_agent or USER_AGENT
    wanted = canonicalise(url, spider.profile, bytes_max=settings.url_bytes_max)
    async with Client(settings, user_agent=user_agent) as client:

        async def robots_file(address: str) -> Answer:
            return await client.exchange(robots_request(address))

        gate = RobotsGate(robots_file, product_token(user_agent), time.monotonic)

        async def allowed(address: str) -> None:
            if settings.robots and not (await gate.rules(origin_of(address))).allowed(address):
                raise FetchError(f"{address}: robots.txt forbids it (--no-robots asks all the same)", kind="robots", retryable=False)

        async def never(_key: bytes) -> bool:
            return False

        def key_of(address: str) -> tuple[bytes, str]:
            there = canonicalise(address, spider.profile)
            return there.key, there.authority

        try:
            await allowed(wanted.request_url)
            found = await follow(
                client, Request(wanted.request_url), own_key=wanted.key, chain=(), hops=0, key_of=key_of, is_moved=never,
                hops_max=settings.hops_max, before_hop=allowed, inside=True,
            )  # fmt: skip
        finally:
            await gate.close()
    assert isinstance(found, Content), "followed inside, a redirect never ends as moved"
    answer = found.answer
    page = Page(answer, requested_url=wanted.request_url, key_url=lambda address: canonicalise(address, spider.profile).text)
    return Fetched(page, answer, verdict_of(answer.status, has_retry_after=answer.header("retry-after") is not None))
