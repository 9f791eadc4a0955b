"""Scope: which links are followed, and which paths only a trap makes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet.errors import UsageError
from limpet.scope import SCOPES, Scope, host_of, registrable_domain, same_site, trap_reason
from limpet.url import Canonical, KeyProfile, canonicalise

#: No deadline: cores are shared, and a slow moment is no broken law.
LAW = settings(deadline=None)


def at(url: str) -> Canonical:
    """A URL under the standard profile."""
    return canonicalise(url, KeyProfile())


@pytest.mark.parametrize(
    ("kind", "start", "link", "is_allowed"),
    [
        ("host", "http://e.test/a", "https://e.test/b", True),
        ("host", "http://e.test/a", "http://www.e.test/b", False),
        ("host", "http://e.test/a", "http://e.test:8080/b", False),
        ("host", "http://127.0.0.1:8800/", "http://127.0.0.1:8801/", False),
        ("domain", "http://a.example.co.uk/", "http://b.example.co.uk:8080/", True),
        ("domain", "http://a.example.co.uk/", "http://other.co.uk/", False),
        ("domain", "http://me.github.io/", "http://you.github.io/", False),
        ("domain", "http://b\u00fccher.example.com/", "http://example.com/", True),
        ("domain", "http://127.0.0.1:8800/", "http://127.0.0.1:8801/", True),
        ("domain", "http://127.0.0.1/", "http://127.0.0.2/", False),
        ("domain", "http://[::1]:80/", "http://[::1]:81/", True),
        ("domain", "http://localhost/", "http://localhost:81/", True),
        ("domain", "http://notexample.com/", "http://example.com/", False),
        ("prefix", "http://e.test/docs/", "http://e.test/docs", True),
        ("prefix", "http://e.test/docs/", "http://e.test/docs/a?b", True),
        ("prefix", "http://e.test/docs/", "http://e.test/docs2/a", False),
        ("prefix", "http://e.test/docs", "http://e.test/docs/a", True),
        ("prefix", "http://e.test/docs/a.html", "http://e.test/docs/b", True),
        ("prefix", "http://e.test/docs/a.html?x=/", "http://e.test/", False),
        ("prefix", "http://e.test/v1.0/", "http://e.test/v1.1", False),
        ("prefix", "http://e.test/v1.0/#x", "http://e.test/v1.0/a", True),
        ("prefix", "http://e.test/a/../b%7e/", "http://e.test/b~/c", True),
        ("prefix", "http://e.test/docs/", "http://other.test/docs/", False),
        ("prefix", "http://e.test", "http://e.test/a", True),
        ("any", "http://e.test/", "http://other.test/", True),
    ],
)
def test_a_scope_allows_what_its_kind_says(kind: str, start: str, link: str, is_allowed: bool) -> None:
    """By the starts alone, whatever page the link is on."""
    scope = Scope.of(kind, [at(start)])
    assert scope.allows(at(link)) is is_allowed
    assert scope.allows(at(start))


def test_starts_that_are_not_known_beforehand_stay_on_their_own_site() -> None:
    """A million starts from a file: the page on which a link stands is in scope, so its site is."""
    link = at("http://b.example.com/")
    assert Scope.of("domain").allows(link, "a.example.com")
    assert Scope.of("host").allows(link, "b.example.com")
    assert not Scope.of("host").allows(link, "a.example.com")
    assert not Scope.of("domain").allows(link, "a.example.org")
    assert not Scope.of("domain").allows(link)
    assert not Scope.of("prefix").allows(link, "b.example.com")


@pytest.mark.parametrize(
    ("hosts", "link", "is_allowed"),
    [
        ("127.0.0.*", "http://127.0.0.7:8801/", True),
        ("127.0.0.*", "http://127.0.1.7/", False),
        ("*.e.test", "http://a.b.e.test/", True),
        ("*.e.test", "http://e.test/", True),
        ("*.e.test", "http://be.test/", False),
        ("*.E.TEST.", "http://a.e.test/", True),
        ("*.b\u00fccher.test", "http://a.b\u00fccher.test/", True),
        ("e.test:81", "http://e.test:81/", True),
        ("e.test:81", "http://e.test/", False),
        ("[::1]", "http://[::1]:81/", True),
        ("e-test", "http://eatest/", False),
        ("*", "http://anything/", True),
    ],
)
def test_host_patterns_add_hosts_to_any_kind(hosts: str, link: str, is_allowed: bool) -> None:
    """In a pattern only `*` is special."""
    for kind in ("host", "domain", "prefix"):
        assert Scope.of(kind, [at("http://start.example/")], hosts=hosts).allows(at(link)) is is_allowed
    assert Scope.of("host", hosts=[hosts, "other"]) == Scope.of("host", hosts=["other", hosts])


@pytest.mark.parametrize("call", [lambda: Scope.of("site"), lambda: Scope.of("host", hosts="http://e.test"), lambda: Scope(hosts=("",))])
def test_a_scope_that_is_none_is_refused(call: object) -> None:
    """A misspelt scope must not crawl the world, nor nothing."""
    with pytest.raises(UsageError):
        call()  # type: ignore[operator]


def test_a_link_that_is_refused_says_why() -> None:
    """One stable word; traps can be let through."""
    trap = at("http://e.test/a/a/a/a/a")
    assert Scope.of("host", [at("http://e.test/")]).refusal(trap) == "repeated_segment"
    assert Scope.of("any").refusal(trap) == "repeated_segment"
    assert Scope.of("host").refusal(trap) == "scope"
    assert Scope.of("any", traps=False).refusal(trap) == ""
    assert SCOPES == ("prefix", "host", "domain", "any")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/", ""),
        ("/a/a/a", ""),
        ("/a/a/a/a", "repeated_segment"),
        ("/a/b/a/c/a/d/a/", "repeated_segment"),
        ("/www.x.com/www.x.com/www.x.com/www.x.com", "repeated_segment"),
        ("/2026/11/11/11", ""),
        ("/web/2020/http://e.test/http://e.test", ""),
        ("/a////b", ""),
        ("/a/////b", "repeated_segment"),
        ("//////", "repeated_segment"),
        ("/a/b/a/b", ""),
        ("/x/a/b/a/b/a/b/y", "growing_path"),
        ("/a/b/c/a/b/c/a/b/c", "growing_path"),
        ("/a/b/a/c/a/d", ""),
        ("/?q=&q=&q=", ""),
        ("/?q=&q=&q=&q=", "repeated_pair"),
        ("/?id=1&id=2&id=3&id=4&id=5", ""),
        ("/a/a?a/a", ""),
        ("/?u=%252525", ""),
        ("/?u=%2525252525", "growing_escape"),
        ("/%25252525", "growing_escape"),
        ("/100%25/25252525", ""),
    ],
)
def test_only_the_shapes_of_traps_are_named(path: str, reason: str) -> None:
    """Real paths repeat a little; traps repeat without end."""
    assert trap_reason(path) == reason


def test_the_limit_of_repeats_is_an_option() -> None:
    """For sites that do repeat."""
    assert trap_reason("/a/a/a/a", repeats_max=4) == ""
    assert trap_reason("/a/a", repeats_max=1) == "repeated_segment"


def test_a_hostile_path_is_judged_in_no_time() -> None:
    """8 KiB of segments made to look almost like a run, at every width."""
    path = "/" + "/".join(["a", "b", "a"] + [str(n % 1360) for n in range(4080)])
    started = time.process_time()
    trap_reason(path)
    assert time.process_time() - started < 0.1


@LAW
@given(st.text(max_size=60))
def test_no_path_raises(path: str) -> None:
    """Whatever it holds."""
    assert trap_reason(path) in {"", "repeated_segment", "growing_path", "repeated_pair", "growing_escape"}


@pytest.mark.parametrize(
    ("authority", "domain"),
    [
        ("e.test", "e.test"),
        ("a.b.c.e.test:8080", "e.test"),
        ("example.co.uk", "example.co.uk"),
        ("co.uk", "co.uk"),
        ("com", "com"),
        ("github.io", "github.io"),
        ("me.github.io", "me.github.io"),
        ("a.me.github.io", "me.github.io"),
        ("www.xn--85x722f.com.cn", "xn--85x722f.com.cn"),
        ("www.city.kawasaki.jp", "city.kawasaki.jp"),
        ("a.b.c.kawasaki.jp", "b.c.kawasaki.jp"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:8800", "127.0.0.1"),
        ("[2001:db8::1]", "[2001:db8::1]"),
        ("[2001:db8::1]:8080", "[2001:db8::1]"),
        ("localhost:80", "localhost"),
        ("a..b", "a..b"),
        ("", ""),
    ],
)
def test_a_host_has_one_registrable_domain(authority: str, domain: str) -> None:
    """By the Public Suffix List; what has none stands for itself."""
    assert registrable_domain(authority) == domain
    assert registrable_domain(domain) == domain
    assert same_site(authority, domain)


@LAW
@given(st.sampled_from(["e.test", "1.2.3.4", "[::1]", "[::ffff:1]", "a.b", "xn--a"]), st.one_of(st.none(), st.integers(0, 65535)))
def test_a_host_is_its_authority_without_the_port(host: str, port: int | None) -> None:
    """For names and both kinds of address."""
    assert host_of(host if port is None else f"{host}:{port}") == host


def test_the_suffix_list_is_read_only_when_a_domain_is_asked_for() -> None:
    """It takes 70 ms, and most crawls stay on a host."""
    program = (
        "import sys; from limpet.scope import Scope; from limpet.url import KeyProfile, canonicalise;"
        "c = canonicalise('http://e.test/', KeyProfile()); Scope.of('host', [c]).allows(c);"
        "assert 'publicsuffixlist' not in sys.modules; Scope.of('domain', [c]);"
        "assert 'publicsuffixlist' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
