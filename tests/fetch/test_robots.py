"""robots.txt: what a file allows, what an answer means, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import FetchError
from limpet.fetch.http import Client
from limpet.fetch.message import Answer
from limpet.fetch.robots import (
    ROBOTS_BYTES_MAX,
    ROBOTS_TTL_S,
    Outcome,
    Report,
    RobotsGate,
    Rules,
    crawl_delay_s,
    decode,
    outcome_of,
    product_token,
    robots_request,
)
from limpet.settings import Settings
from tests.fetch.hostile import Wire, serve
from tests.fetch.vectors import rows

DAY_S = 86400.0
FORBID = b"user-agent: *\ndisallow: /\n"
SOME = b"user-agent: *\ndisallow: /private\n"


# -- one file ------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "n", "row"), rows("robots_can_fetch.json", policy="rfc9309"))
def test_every_rfc_9309_row_of_the_vectors_is_met(folder: str, n: int, row: dict[str, Any]) -> None:
    """229 rows of the standard, 16 of its encoding; from Google's, Protego's and other tests."""
    body = bytes.fromhex(row["robots_hex"]) if "robots_hex" in row else row["robots"].encode()
    assert Rules(decode(body), product_token(row["ua"])).allowed(row["input"]) is row["expected"]


#: Rows of other policies that are not met, and why.
NOT_MET = {
    "google-only": "Google's matcher has no implicit allow of /robots.txt, wants the caller to escape URLs, "
    "and lets an unknown line such as <br /> end no group",
    "lib:protego": "agents are compared whole, as RFC 9309 section 2.2.1 says: `hedwig` is no prefix of "
    "`hedwig-news`, and `foo*bot` names nobody",
}


@pytest.mark.parametrize("policy", ["google-only", "lib:protego", "lib:robotspy"])
def test_where_other_parsers_differ_it_is_explained(policy: str) -> None:
    """For review: all of robotspy's rows are met, and at most these of the others are not."""
    missed = []
    for _, _, row in rows("robots_can_fetch.json", policy=policy):
        if Rules(decode(row["robots"].encode()), product_token(row["ua"])).allowed(row["input"]) is not row["expected"]:
            missed.append(row)
    own = len({(row["robots"], row["ua"], row["input"]) for row in missed})
    assert own == {"google-only": 7, "lib:protego": 5, "lib:robotspy": 0}[policy]
    assert bool(missed) is (policy in NOT_MET)


@pytest.mark.parametrize(("folder", "n", "row"), rows("robots_crawl_delay.json"))
def test_every_crawl_delay_of_the_vectors_is_met(folder: str, n: int, row: dict[str, Any]) -> None:
    """P93: fractions count; infinity, units and 1e300 are no delays."""
    assert crawl_delay_s(row["input"]) == row["expected"]


@pytest.mark.parametrize(("folder", "n", "row"), rows("robots_crawl_delay_files.json"))
def test_the_crawl_delay_is_that_of_our_group(folder: str, n: int, row: dict[str, Any]) -> None:
    """P93: of the group that names us, else of `*`; none without a group."""
    assert Rules(row["robots"], product_token(row["ua"])).crawl_delay_s == row["expected"]


def test_a_byte_order_mark_does_not_open_the_site() -> None:
    """P98 (scrapy#6195, BUbiNG#17): with it the first group is unreadable, and everything allowed."""
    text = "User-agent: *\nDisallow: /\n"
    for body in (b"\xef\xbb\xbf" + text.encode(), b"\xff\xfe" + text.encode("utf-16-le"), b"\xfe\xff" + text.encode("utf-16-be")):
        assert not Rules(decode(body), "limpet").allowed("http://a/x")


def test_a_rule_that_is_cut_in_half_is_dropped() -> None:
    """RFC 9309 section 2.5: 512,000 bytes count; half a rule would match more than the whole."""
    rule = b"disallow: /private-area\n"
    head = b"user-agent: *\n"
    filler = b"#" * (ROBOTS_BYTES_MAX - len(head) - len(rule)) + b"\n"
    fits = head + filler[1:] + rule
    assert len(fits) == ROBOTS_BYTES_MAX
    assert not Rules(decode(fits), "x").allowed("http://a/private-area")
    cut = head + filler + rule + rule
    assert Rules(decode(cut), "x").allowed("http://a/private-area")
    assert Rules(decode(cut), "x").allowed("http://a/priv")


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("shopbot/1 (+https://example.com/bot)", "shopbot"),
        ("Limpet", "Limpet"),
        ("my-bot_x/2", "my-bot_x"),
        ("1bot", ""),
        ("", ""),
    ],
)
def test_the_product_token_is_the_first_name_of_the_user_agent(header: str, token: str) -> None:
    """RFC 9309 section 2.2.1: letters, "-" and "_"."""
    assert product_token(header) == token


def test_sitemaps_belong_to_the_whole_file() -> None:
    """Whatever group they stand in, in order."""
    rules = Rules("Sitemap: http://a/1.xml\nuser-agent: x\nsitemap:http://a/2.xml\ndisallow: /", "limpet")
    assert rules.sitemaps == ("http://a/1.xml", "http://a/2.xml")
    assert rules.allowed("http://a/")


def test_a_delay_or_a_sitemap_between_agents_does_not_part_them() -> None:
    """protego: an unknown or Crawl-delay line closed the list of agents, and the first were left without rules."""
    text = "user-agent: a\ncrawl-delay: 5\nx-unknown: 1\nsitemap: http://h/s\nuser-agent: b\ndisallow: /"
    for token, delay in (("a", 5), ("b", None)):
        rules = Rules(text, token)
        assert not rules.allowed("http://h/x")
        assert rules.crawl_delay_s == delay


def test_robots_txt_itself_is_always_allowed() -> None:
    """RFC 9309 section 2.2.2."""
    assert Rules(FORBID.decode(), "limpet").allowed("http://a/robots.txt")


def test_odd_line_ends_inside_a_rule_do_not_break_it() -> None:
    """U+2028, form feed and the like are no line ends: what follows them is no directive."""
    text = "user-agent: *\ndisallow: /a\u2028allow: /\ndisallow: /b\x0callow: /b\n"
    rules = Rules(text, "limpet")
    assert rules.allowed("http://a/a")
    assert not rules.allowed("http://a/a%E2%80%A8allow:%20/")


@given(
    st.one_of(st.binary(max_size=300), st.text(max_size=300).map(lambda t: t.encode("utf-8", "surrogatepass"))),
    st.text(max_size=40),
)
def test_any_file_and_url_give_an_answer(body: bytes, path: str) -> None:
    """Never an exception, and no delay below nothing."""
    rules = Rules(decode(body), "limpet")
    assert rules.allowed("http://a/" + path) in (True, False)
    assert rules.crawl_delay_s is None or rules.crawl_delay_s >= 0


@given(st.lists(st.sampled_from(["*", "Limpet", "limpet", "limpetbot", "other"]), min_size=1, max_size=4))
def test_a_group_for_all_and_ours_never_mix(agents: list[str]) -> None:
    """Each agent has a path of its own: only those of our groups, or else of `*`, hold."""
    text = "\n".join(f"user-agent: {agent}\ndisallow: /{n}" for n, agent in enumerate(agents))
    ours = [agent.lower() == "limpet" for agent in agents]
    holds = ours if any(ours) else [agent == "*" for agent in agents]
    rules = Rules(text, "LIMPET")
    assert [not rules.allowed(f"http://a/{n}") for n in range(len(agents))] == holds


# -- what an answer means ------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds that pass when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Site:
    """Answers for URLs: a status, a body, a redirect target, or an error; and what was asked."""

    steps: dict[str, int | bytes | str | FetchError]
    asked: list[str] = field(default_factory=list)

    async def fetch(self, url: str) -> Answer:
        self.asked.append(url)
        await asyncio.sleep(0)
        step = self.steps[url]
        if isinstance(step, FetchError):
            raise step
        if isinstance(step, str):
            return Answer(url, 301, (("Location", step),))
        return Answer(url, step) if isinstance(step, int) else Answer(url, 200, body=step)


def gate(site: Site, clock: Clock | None = None, **options: Any) -> tuple[RobotsGate, list[Report]]:
    reports: list[Report] = []
    return RobotsGate(site.fetch, "limpet", clock or Clock(), on_report=reports.append, **options), reports


NETWORK = {
    "dns_error": FetchError("no such name", kind="dns"),
    "read_timeout": FetchError("nothing came", kind="timeout"),
    "connection_reset": FetchError("reset", kind="reset"),
}


async def outcome(name: str, value: str) -> str:
    """The outcome of one row of the table, as that names it."""
    start, origin = "http://a/robots.txt", "http://a"
    match name:
        case "status" | "content_type":
            status = int(value.rpartition(" ")[2])
            answer: int | bytes = b"<html>" if name == "content_type" else status
            if outcome_of(status) is Outcome.RETRY_LATER:
                return "retry_later"
            return await outcome_for(Site({start: answer}), origin)
        case "network":
            return await outcome_for(Site({start: NETWORK[value]}), origin)
        case "redirects":
            hops = int(value)
            steps: dict[str, Any] = {start if n == 0 else f"http://h{n}/r": f"http://h{n + 1}/r" for n in range(hops)}
            return await outcome_for(Site({**steps, f"http://h{hops}/r": SOME}), origin)
        case "redirect_loop":
            return await outcome_for(Site({start: start}), origin)
        case "redirect_to_non_http":
            return await outcome_for(Site({start: "ftp://a/robots.txt"}), origin)
        case "redirect_to_other_host_path":
            site = Site({start: f"http://b{value}", f"http://b{value}": FORBID, "http://b/robots.txt": SOME})
            robots, _ = gate(site)
            assert not (await robots.rules(origin)).allowed("http://a/x")
            assert (await robots.rules("http://b")).allowed("http://b/x")
            return "parse_for_source_only"
        case "body_bytes":
            head, rule = b"user-agent: *\n", b"disallow: /\n"
            body = head + b"#" * (int(value) - len(head) - len(rule) - 1) + b"\n" + rule
            assert len(body) == int(value)
            text = decode(body)
            return "parse_first_512000_cut_at_line" if "disallow: /" not in text and text.endswith("#\n") else "?"
        case "unreachable_for_days":
            return await long_silence(float(value))
        case "cached_hours":
            clock, site = Clock(), Site({start: SOME})
            robots, _ = gate(site, clock)
            await robots.rules(origin)
            clock.now += float(value) * 3600
            await robots.rules(origin)
            return "refetch" if len(site.asked) == 2 else "use_cache"
        case "encoding":
            encoding = value.removesuffix("-bom")
            bom = b"\xef\xbb\xbf" if encoding == "utf-8" else b"\xff\xfe"
            return "decode" if decode(bom + "allow: /é".encode(encoding)) == "allow: /é" else "?"
    raise AssertionError(name)


async def outcome_for(site: Site, origin: str) -> str:
    robots, reports = gate(site)
    result = (await asyncio.gather(robots.rules(origin), return_exceptions=True))[0]
    if isinstance(result, Rules):
        return str(reports[0].outcome)
    assert isinstance(result, FetchError)
    return "disallow_all_until_reachable" if result.kind == "robots_unreachable" else result.kind


async def long_silence(days: float) -> str:
    """Two sites fall silent: one that was never reached, one whose file is known."""
    start, clock = "http://a/robots.txt", Clock()
    site = Site({start: 503})
    never, _ = gate(site, clock)
    known, _ = gate(Site({start: FORBID}), clock)
    await known.rules("http://a")
    known.fetch = site.fetch
    with pytest.raises(FetchError):
        await never.rules("http://a")
    clock.now += days * DAY_S
    assert not (await known.rules("http://a")).allowed("http://a/x")  # the last good file holds
    return "allow_all_or_last_good" if (await never.rules("http://a")).allowed("http://a/x") else "?"


@pytest.mark.parametrize(("folder", "n", "row"), rows("robots_fetch_outcome.json"))
async def test_every_fetch_outcome_of_the_vectors_is_met(folder: str, n: int, row: dict[str, Any]) -> None:
    """P100: 4xx allows, 5xx and silence forbid until reached, 429 waits; redirects, size, age and encoding."""
    name, _, value = row["input"].partition(":")
    if row["input"] == "content_type:text/html status 200":
        name, value = "content_type", "200"
    assert await outcome(name, value) == row["expected"]


async def test_a_silent_site_is_asked_again_with_growing_patience() -> None:
    """P64: each refusal says when the next try is; in between nobody asks; it ends at the first answer."""
    clock, site = Clock(), Site({"http://a/robots.txt": 503})
    robots, reports = gate(site, clock, retry_s=1.0)
    waits = []
    for _ in range(5):
        for _ in range(3):
            with pytest.raises(FetchError) as caught:
                await robots.rules("http://a")
        assert (caught.value.kind, caught.value.retryable, caught.value.status) == ("robots_unreachable", True, 503)
        assert caught.value.retry_after_s is not None
        waits.append(caught.value.retry_after_s)
        clock.now += caught.value.retry_after_s
    assert (waits, len(site.asked)) == ([1, 2, 4, 8, 16], 5)
    site.steps["http://a/robots.txt"] = SOME
    assert (await robots.rules("http://a")).allowed("http://a/x")
    assert reports[-1] == Report("http://a", Outcome.PARSE, 200, SOME, ROBOTS_TTL_S, "")


async def test_the_wait_that_the_server_asks_for_is_kept() -> None:
    """429 with Retry-After: no try before that."""
    clock, site = Clock(), Site({"http://a/robots.txt": 429})
    robots, reports = gate(site, clock, retry_after=lambda answer: 120.0)
    with pytest.raises(FetchError) as caught:
        await robots.rules("http://a")
    assert (caught.value.retry_after_s, caught.value.status) == (120, 429)
    assert (reports[0].outcome, reports[0].ttl_s) == (Outcome.DISALLOW_ALL, 120)


async def test_401_and_403_allow_unless_the_gate_is_strict() -> None:
    """RFC 9309 section 2.3.1.3 lets them allow; some sites mean the contrary."""
    for status in (401, 403):
        site = Site({"http://a/robots.txt": status})
        assert (await gate(site)[0].rules("http://a")).allowed("http://a/x")
        assert not (await gate(site, strict=True)[0].rules("http://a")).allowed("http://a/x")


async def test_another_hosts_own_file_met_on_the_way_is_known_for_it_too() -> None:
    """Only where its path is exactly /robots.txt, and only where nothing fresher is known."""
    site = Site({"http://a/robots.txt": "https://a/robots.txt", "https://a/robots.txt": FORBID})
    robots, reports = gate(site)
    assert not (await robots.rules("http://a")).allowed("http://a/x")
    assert not (await robots.rules("https://a")).allowed("https://a/x")
    assert site.asked == ["http://a/robots.txt", "https://a/robots.txt"]
    assert [report.origin for report in reports] == ["https://a", "http://a"]


async def test_origins_are_scheme_host_and_port() -> None:
    """kreuzcrawl#46: the rules of one port are not those of another."""
    site = Site({"http://a/robots.txt": FORBID, "http://a:81/robots.txt": SOME})
    robots, _ = gate(site)
    assert not (await robots.rules("http://a")).allowed("http://a/x")
    assert (await robots.rules("http://a:81")).allowed("http://a:81/x")


# -- who waits -----------------------------------------------------------------------------


def slow(body: int | bytes | FetchError | Exception) -> tuple[Callable[[str], Awaitable[Answer]], asyncio.Event, list[str]]:
    """A fetch that answers when its event is set."""
    go, asked = asyncio.Event(), list[str]()

    async def fetch(url: str) -> Answer:
        asked.append(url)
        await go.wait()
        if isinstance(body, Exception):
            raise body
        return Answer(url, body) if isinstance(body, int) else Answer(url, 200, body=body)

    return fetch, go, asked


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_fetch_is_in_flight_and_every_waiter_obeys_it() -> None:
    """scrapy#2014 and its like let all but the first waiter through."""
    fetch, go, asked = slow(FORBID)
    robots = RobotsGate(fetch, "limpet", Clock())
    waiters = [asyncio.create_task(robots.rules("http://a")) for _ in range(20)]
    await settle()
    late = asyncio.create_task(robots.rules("http://a"))
    assert not any(waiter.done() for waiter in waiters)
    go.set()
    rules = await asyncio.gather(*waiters, late)
    assert not any(r.allowed("http://a/x") for r in rules)
    assert asked == ["http://a/robots.txt"]


async def test_every_waiter_is_put_off_by_a_fetch_that_fails() -> None:
    """Nobody slips through an error."""
    fetch, go, asked = slow(FetchError("no answer", kind="timeout"))
    robots = RobotsGate(fetch, "limpet", Clock())
    waiters = [asyncio.create_task(robots.rules("http://a")) for _ in range(20)]
    await settle()
    go.set()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert {getattr(result, "kind", result) for result in results} == {"robots_unreachable"}
    assert len(asked) == 1


async def test_a_file_that_cannot_be_had_is_named_once() -> None:
    """The fetch's own error begins with the address, as that of whoever asks for the rules does."""
    address = "http://127.0.0.1:1/robots.txt"
    robots, _ = gate(Site({address: FetchError(f"{address}: cannot connect to 127.0.0.1:1: connection refused", kind="connect")}))
    with pytest.raises(FetchError) as caught:
        await robots.rules("http://127.0.0.1:1")
    assert str(caught.value) == f"{address}: cannot connect to 127.0.0.1:1: connection refused"


async def test_a_waiter_that_is_cancelled_does_not_take_the_others_along() -> None:
    """Not even the one that began the fetch."""
    fetch, go, asked = slow(SOME)
    robots = RobotsGate(fetch, "limpet", Clock())
    first, second = (asyncio.create_task(robots.rules("http://a")) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    assert first.cancelled()
    assert not second.done()
    go.set()
    assert (await second).allowed("http://a/x")
    assert len(asked) == 1


async def test_an_unexpected_error_reaches_every_waiter_and_is_not_remembered() -> None:
    """The lease is over, say: nothing is known, and the next to ask asks again."""
    fetch, go, asked = slow(PermissionError("the lease is over"))
    robots = RobotsGate(fetch, "limpet", Clock())
    waiters = [asyncio.create_task(robots.rules("http://a")) for _ in range(2)]
    await settle()
    go.set()
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(result) for result in results] == [PermissionError] * 2
    with pytest.raises(PermissionError):
        await robots.rules("http://a")
    assert len(asked) == 2


async def test_closing_ends_what_is_in_flight() -> None:
    """A waiter of a closed gate is cancelled with it."""
    fetch, _, _ = slow(SOME)
    robots = RobotsGate(fetch, "limpet", Clock())
    waiter = asyncio.create_task(robots.rules("http://a"))
    await settle()
    await robots.close()
    with pytest.raises(asyncio.CancelledError):
        await waiter


# -- over restarts -------------------------------------------------------------------------


@pytest.mark.parametrize("step", [SOME, 404, 503])
async def test_what_is_reported_can_be_loaded_again(step: int | bytes) -> None:
    """Rules, and the time of the next try, survive a restart; nothing is asked before it is due."""
    clock = Clock()
    robots, reports = gate(Site({"http://a/robots.txt": step}), clock)
    with pytest.raises(FetchError) if step == 503 else contextlib.nullcontext():
        await robots.rules("http://a")
    kept = reports[-1]
    site = Site({"http://a/robots.txt": FORBID})
    again, news = gate(site, clock)
    again.preload(kept.origin, str(kept.outcome), kept.body, kept.ttl_s, status=kept.status)
    if step == 503:
        with pytest.raises(FetchError):
            await again.rules("http://a")
    else:
        rules = await again.rules("http://a")
        assert rules.allowed("http://a/x")
        assert rules.allowed("http://a/private") is (step == 404)
    assert (site.asked, news) == ([], [])
    clock.now += kept.ttl_s
    assert not (await again.rules("http://a")).allowed("http://a/x")


async def test_loading_never_replaces_fresher_knowledge() -> None:
    """What this process fetched itself counts."""
    robots, _ = gate(Site({"http://a/robots.txt": FORBID}))
    await robots.rules("http://a")
    robots.preload("http://a", "allow_all", b"", 10.0)
    assert not (await robots.rules("http://a")).allowed("http://a/x")


async def test_a_file_of_any_size_is_read_up_to_its_limit_over_the_wire() -> None:
    """A robots.txt larger than the body limit still holds, and costs no more than its first part."""

    async def large(w: Wire) -> None:
        w.send(w.head_of(b"Content-Length: 30000000", b"Content-Type: text/plain"), FORBID, b"# x\n" * 200_000)
        await w.reader.read()

    async with serve(large) as site, Client(Settings(), user_agent="x") as client:
        robots = RobotsGate(lambda url: client.exchange(robots_request(url)), "limpet", Clock())
        assert not (await robots.rules(site.url("")[:-1])).allowed(site.url("x"))
