"""Whom the operator of a site can write to: who asks for many pages of others should say so in the user agent."""

from __future__ import annotations

from collections.abc import Iterable

from limpet.engine.hand import is_loopback

#: How we name ourselves where the spider does not.
USER_AGENT = "limpet/0.1 (no contact given; set user_agent)"

#: Pages of a run after which it is said: fewer are a trial.
PAGES = 1_000


def missing_contact(user_agent: str, pages: int, authorities: Iterable[str]) -> str:
    """What to say where so many pages came from others and the user agent names no URL and no address; "" where all is well.

    >>> missing_contact("bot/1", 2_000, ["127.0.0.1:80"]), missing_contact("bot/1 (me@a.test)", 2_000, ["a.test"])
    ('', '')
    """
    if pages <= PAGES or "http" in user_agent or "@" in user_agent or all(is_loopback(authority) for authority in authorities):
        return ""
    return f"{pages:,} pages were fetched, and the user agent {user_agent!r} names no contact: give one with --user-agent or to the spider"
