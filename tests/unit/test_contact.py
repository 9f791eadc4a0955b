"""Who crawls others at length without saying who it is, is told so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from limpet.cli import main
from limpet.demo.catalogue import Shop
from limpet.demo.site import running
from limpet.engine import contact
from limpet.engine.contact import PAGES, USER_AGENT, missing_contact


@pytest.mark.parametrize(
    ("user_agent", "pages", "authorities", "is_told"),
    [
        (USER_AGENT, PAGES + 1, ["shop.test"], True),
        ("bot/1", PAGES + 1, ["127.0.0.1:80", "shop.test:8080"], True),
        (USER_AGENT, PAGES, ["shop.test"], False),
        (USER_AGENT, PAGES + 1, ["127.0.0.1:80", "[::1]", "localhost:8800"], False),
        ("bot/1 (+https://bot.test/)", PAGES + 1, ["shop.test"], False),
        ("bot/1 (me@bot.test)", PAGES + 1, ["shop.test"], False),
    ],
)
def test_a_name_without_a_contact_is_told_after_many_pages_of_others(
    user_agent: str, pages: int, authorities: list[str], is_told: bool
) -> None:
    """A URL or an address in the user agent is a contact; this machine needs none, and a trial is short."""
    assert (user_agent in missing_contact(user_agent, pages, authorities)) is is_told


@pytest.mark.parametrize("user_agent", ["bot/1", "bot/1 (+https://bot.test/)"])
def test_a_run_says_so_once(user_agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not once a heartbeat; here as if a loopback shop were somebody else's, and any page one too many."""
    monkeypatch.setattr(contact, "is_loopback", lambda authority: False)
    monkeypatch.setattr(contact, "PAGES", 0)
    with caplog.at_level(logging.WARNING), running(Shop(products=200, hosts=1), latency_s=0.02) as site:
        flags = ["--user-agent", user_agent, "--db", f"{tmp_path}/x.db", "--lease", "0.5", "--concurrency", "4"]
        assert main(["crawl", *site.shop.starts(), *flags]) == 0
    told = [line for line in caplog.messages if "names no contact" in line]
    assert len(told) == (user_agent == "bot/1")
