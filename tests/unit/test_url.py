"""The URL key: its laws, its profiles and rules, its reasons, and what is derived from it."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limpet.errors import UrlRejected, UsageError
from limpet.url import (
    KEY_VERSION,
    MEMO_CHARS_MAX,
    OPTIONS,
    Canonical,
    KeyCache,
    KeyProfile,
    Place,
    SiteRule,
    canonicalise,
    digest16,
    explain,
    host_id,
    href,
    key_text,
    options_of,
    shard_of,
    shown,
)
from limpet.url_tables import PROFILES, QUERY_CODECS, STEPS

STANDARD = KeyProfile()
#: No deadline: cores are shared, and a slow moment is no broken law.
LAW = settings(deadline=None)

SCHEMES = st.sampled_from(["http://", "https://", "HTTP://", "http:", "http:///", "https:\\\\", "//", "/", "", " ", "?", "mailto:"])
USERS = st.sampled_from(["", "", "", "u:p@", "u%40:@", "@", ":@"])
HOSTS = st.sampled_from(
    [
        *("e.test", "E.Test.", "www.e.test", "www.www.e.test", "www.com", "b\u00fccher.e.test", "b%C3%BCcher.e.test", "0x7f.1"),
        *("1.2.3.4.", "[::1]", "e.test..", ".", "fa\u00df.de", "%65.test", "a..b", "e\u3002test", "xn--n3h.net", "xn--a"),
        *("localhost", "1.2.3.4.5", "%2e%2e", "www.%65.test", "e_e.test", "\ufffd.test", "%EF%BF%BD.test", "%C3%28.test"),
    ]
)
PORTS = st.sampled_from(["", "", "", ":", ":80", ":443", ":00080", ":8080", ":99999"])
BITS = [
    *(
        "a",
        "b",
        "A",
        "%41",
        "%7e",
        "%2F",
        "%2f",
        "%",
        "%%36%31",
        "%2541",
        "%E4",
        "%ef%bf%bd",
        "\ufffd",
        "\u00e9",
        "\U0001f41a",
        "..",
        ".",
    ),
    *(
        "%2e",
        "%2E.",
        "...",
        " ",
        "\t",
        "[",
        "]",
        "^",
        "|",
        "{",
        "\\",
        "'",
        '"',
        "<",
        "+",
        ";",
        ";jsessionid=1",
        ";JSESSIONID=2;x",
    ),
    *("utm_source", "gclid", "PHPSESSID", "\x00", "\x7f", ":", "@", "!", "index.html", "\ud800"),
]
PIECES = st.lists(st.sampled_from(BITS), max_size=3).map("".join)
PATHS = st.lists(PIECES, max_size=5).map(lambda pieces: "/" + "/".join(pieces))
QUERIES = st.lists(st.tuples(PIECES, st.sampled_from(["", "=", "=1", "=2", "=a=b"])).map("".join), max_size=5).map("&".join)
URLS = st.one_of(
    st.tuples(
        *(SCHEMES, USERS, HOSTS, PORTS, PATHS, st.one_of(st.just(""), QUERIES.map(lambda q: "?" + q))),
        st.sampled_from(["", "#", "#top", "#/a%41[b", "# "]),
    ).map("".join),
    st.text(st.characters(exclude_categories=()), max_size=30),
    st.text(st.characters(exclude_categories=()), max_size=30).map(lambda text: "http://e.test/" + text),
)
BASES = st.one_of(
    st.none(), st.sampled_from(["http://e.test/a/b?q#f", "https://u:p@www.e.test:8080/x//y/", "about:blank", "no base", ""]), URLS
)
CHARSETS = st.sampled_from(["utf-8", "UTF-8", "windows-1252", "latin1", "iso-2022-jp", "gb18030", "euc-kr", "utf-16", "idna", "no such"])
RULES = st.builds(
    lambda host, options, drop, keep: SiteRule.of(host, drop=drop, keep=() if drop else keep, **options),
    st.sampled_from(["*", "e.test", "*.e.test", "www.e.test", "[::1]", "*b\u00fccher*"]),
    st.dictionaries(st.sampled_from(OPTIONS), st.booleans(), max_size=4),
    st.lists(st.sampled_from(["a", "A*", "x[]", "*", "utm_*", "\u00e9"]), max_size=2),
    st.lists(st.sampled_from(["a", "b*", "%41"]), max_size=2),
)
PROFILES_DRAWN = st.builds(
    lambda name, options, rules: KeyProfile.of(name, rules=rules, **options),
    st.sampled_from(sorted(PROFILES[1])),
    st.dictionaries(st.sampled_from(OPTIONS), st.booleans(), max_size=4),
    st.lists(RULES, max_size=2),
)


def found(url: str, profile: KeyProfile = STANDARD, base: str | None = None, charset: str = "utf-8") -> Canonical | str:
    """The canonical form, or the reason why there is none."""
    try:
        return canonicalise(url, profile, base=base, charset=charset)
    except UrlRejected as rejected:
        return rejected.reason


# -- laws ---------------------------------------------------------------------------------------


@LAW
@given(URLS, PROFILES_DRAWN, BASES, CHARSETS)
@example("http://e.test/%%36%31", STANDARD, None, "utf-8")
@example("http://e.test/a/..;jsessionid=1", KeyProfile.of("aggressive"), None, "utf-8")
@example("http://e.test/?=&a", KeyProfile.of("aggressive"), None, "utf-8")
@example("http://www.e.test/?b&a", KeyProfile.of(rules=[SiteRule.of("www.e.test", strip_www=True, sort_query=False)]), None, "utf-8")
@example("http://e.test/#", KeyProfile.of(keep_fragment=True), None, "utf-8")
def test_the_key_of_a_key_and_of_a_request_is_the_key(url: str, profile: KeyProfile, base: str | None, charset: str) -> None:
    """key(key(u)) == key(u) == key(request_url(u)), and nothing but UrlRejected ever leaves."""
    once = found(url, profile, base, charset)
    if isinstance(once, str):
        assert once in {"not_a_url", "scheme", "host", "surrogate", "too_long"}
        return
    again = canonicalise(once.text, profile)
    of_request = canonicalise(once.request_url, profile)
    assert again.text == once.text
    assert of_request == once
    assert once.text.startswith(f"{once.scheme}://{once.authority}{once.path}")
    assert once.text.isascii()
    assert once.request_url.isascii()
    assert " " not in once.text
    assert once.key == digest16(once.text)


@LAW
@given(URLS, PROFILES_DRAWN, BASES, CHARSETS)
def test_no_byte_is_ever_replaced_by_the_replacement_character(url: str, profile: KeyProfile, base: str | None, charset: str) -> None:
    """U+FFFD stands in a key only as often as it stood in what was found."""
    result = found(url, profile, base, charset)
    if isinstance(result, Canonical):
        given_text = (url + (base or "")).upper()
        allowed = given_text.count("\ufffd") + given_text.count("%EF%BF%BD")
        assert result.text.count("%EF%BF%BD") <= allowed
        assert result.request_url.upper().count("%EF%BF%BD") <= allowed
        assert "\ufffd" not in result.text


@LAW
@given(URLS, PROFILES_DRAWN)
def test_explain_ends_at_the_key_and_shows_no_credentials(url: str, profile: KeyProfile) -> None:
    """The last step's text is the key; the steps are those of the version, in its order."""
    result = found(url, profile)
    if isinstance(result, Canonical):
        story = explain(url, profile)
        assert story[0].name == "parse"
        assert story[-1].text == result.text
        order = [p.name for p in STEPS[profile.version]]
        assert [step.name for step in story[1:]] == [name for name in order if name in {step.name for step in story[1:]}]
        assert not any("u:p@" in step.text for step in story)


@LAW
@given(PROFILES_DRAWN)
def test_a_profile_is_its_json(profile: KeyProfile) -> None:
    """to_json and from_json are inverse, and equal profiles have one text and one digest."""
    text = profile.to_json()
    again = KeyProfile.from_json(text)
    assert again == profile
    assert again.to_json() == text
    assert again.digest() == profile.digest() == digest16(text)
    assert pickle.loads(pickle.dumps(profile)) == profile


@LAW
@given(st.lists(st.tuples(URLS, BASES, CHARSETS), max_size=12), st.integers(1, 8), PROFILES_DRAWN)
@example([("?a", "http://e.test/x", "utf-8"), (" ?a", "http://e.test/y", "utf-8"), (" ?a", "http://e.test/x", "utf-8")], 8, STANDARD)
@example([("http:?a", "http://e.test/x", "utf-8"), ("http:?a", "http://e.test/y", "utf-8")], 8, STANDARD)
@example([("http://e.test/", "no base", "utf-8"), ("http://e.test/", None, "utf-8"), ("http://e.test/", "", "utf-8")], 8, STANDARD)
@example([("?\u00e9", "http://e.test/", "utf-8"), ("?\u00e9", "http://e.test/", "latin1")], 8, STANDARD)
@example([("a", "http://e.test/x/?/y", "utf-8"), ("a", "http://e.test/x/#/y", "utf-8")], 8, STANDARD)
def test_the_memo_answers_as_the_function_does(asked: list[tuple[str, str | None, str]], entries_max: int, profile: KeyProfile) -> None:
    """Whatever was asked before, in whatever order, and however small the memo is."""
    cache = KeyCache(profile, lambda canonical: canonical, entries_max=entries_max)
    for url, base, charset in asked * 2:
        expected = found(url, profile, base, charset)
        try:
            result: Canonical | str = cache.at(Place(base, charset), url)
        except UrlRejected as rejected:
            result = rejected.reason
        assert result == expected
        assert len(cache) <= max(2, entries_max)


@LAW
@given(URLS, URLS, st.integers(1, 4096))
def test_the_shard_depends_on_the_canonical_text_alone(one: str, other: str, shards: int) -> None:
    """Spellings of one key share a shard, as pages of one host do."""
    a, b = found(one), found(other)
    if isinstance(a, Canonical):
        assert 0 <= shard_of(a.authority, shards) < shards
        assert shard_of(a.authority, shards) == shard_of(canonicalise(a.request_url, STANDARD).authority, shards)
        assert -(2**63) <= host_id(a.authority) < 2**63
        if isinstance(b, Canonical) and a.authority == b.authority:
            assert shard_of(a.authority, shards) == shard_of(b.authority, shards)


# -- what is stored must not change -------------------------------------------------------------


def test_version_1_never_changes() -> None:
    """Its steps, in this order, and its profiles: a job begun under it must find the same keys for ever."""
    assert [(p.name, p.when, p.unless) for p in STEPS[1]] == [
        ("drop_userinfo", "", ""),
        ("drop_root_dot", "", ""),
        ("drop_fragment", "", "keep_fragment"),
        ("merge_scheme", "merge_scheme", ""),
        ("strip_www", "strip_www", ""),
        ("normalise_percent", "", ""),
        ("plus_is_space", "plus_is_space", ""),
        ("strip_session", "strip_session", ""),
        ("collapse_slashes", "collapse_slashes", ""),
        ("strip_slash", "strip_slash", ""),
        ("strip_tracking", "strip_tracking", ""),
        ("site_parameters", "site_parameters", ""),
        ("blank_value_equals_absent", "blank_value_equals_absent", ""),
        ("drop_empty_pairs", "", ""),
        ("sort_query", "sort_query", ""),
        ("sort_values", "sort_values", ""),
        ("dedupe_pairs", "dedupe_pairs", ""),
    ]
    assert PROFILES[1]["exact"] == frozenset()
    assert PROFILES[1]["standard"] == {"sort_query", "strip_slash"}
    assert PROFILES[1]["aggressive"] == frozenset(OPTIONS) - {"keep_fragment"}


def test_stored_digests_never_change() -> None:
    """Keys, hosts, shards and profiles as rows of a database hold them."""
    canonical = canonicalise("http://Example.com/b?y=2&x=1", STANDARD)
    assert canonical.text == "http://example.com/b?x=1&y=2"
    assert canonical.key.hex() == "b3c02f24218bdb55a818195a852be0d8"
    assert host_id("example.com") == 1424565772579972710
    assert [shard_of("example.com", n) for n in (1, 16, 64)] == [0, 6, 38]
    assert STANDARD.to_json() == '{"name":"standard","options":{},"rules":[],"version":1}'
    assert STANDARD.digest().hex() == "3fad2286f46783beaff2d522553bcbdb"


@pytest.mark.parametrize(
    ("profile", "url", "key"),
    [
        ("exact", "http://www.e.test:80/a//b/?b=2&a=1&&#f", "http://www.e.test/a//b/?b=2&a=1"),
        ("exact", "http://e.test/%7e/?", "http://e.test/~/"),
        ("aggressive", "http://www.e.test/a//b/?b=2&a=2&a=1&a=1&c=#f", "https://e.test/a/b?a=1&a=2&b=2&c"),
        ("aggressive", "http://e.test:443/?q=a+b&utm_id=1&PHPSESSID=2", "https://e.test/?q=a%20b"),
        ("aggressive", "https://e.test:80/a;jsessionid=1/b;JSESSIONID=2;v=1", "https://e.test/a/b;v=1"),
        ("standard+keep_fragment", "http://e.test/a/#/r[1]", "http://e.test/a#/r%5B1%5D"),
        ("standard+keep_fragment", "http://e.test/a#", "http://e.test/a"),
        ("standard+dedupe_pairs", "http://e.test/?b=1&a=2&b=1&b=0", "http://e.test/?a=2&b=1&b=0"),
        ("standard+sort_values", "http://e.test/?a-b=1&a=2&a=1", "http://e.test/?a=1&a=2&a-b=1"),
        ("standard", "http://e.test/?a-b=1&a=2&a=1", "http://e.test/?a=2&a=1&a-b=1"),
        ("standard+blank_value_equals_absent", "http://e.test/?b=&a==&=", "http://e.test/?a==&b"),
        ("standard+plus_is_space", "http://e.test/a+b?q=a+b%2B", "http://e.test/a+b?q=a%20b%2B"),
        ("standard+strip_www", "http://www.www.e.test/", "http://e.test/"),
        ("standard+strip_www", "http://www.com/", "http://www.com/"),
        ("standard+strip_www", "http://www2.e.test/", "http://www2.e.test/"),
        (
            "standard+strip_session",
            "http://e.test/a/..;jsessionid=1?ASPSESSIONIDQX=1&sid=2",
            "http://e.test/a/..;jsessionid=1?sid=2",
        ),
        ("standard+strip_tracking", "http://e.test/?UTM_X=1&fbclid&reference=1&igsh=2", "http://e.test/?reference=1"),
        ("standard+merge_scheme", "http://e.test:443/", "https://e.test/"),
        ("standard+collapse_slashes", "http://e.test//a///?x=//", "http://e.test/a?x=//"),
    ],
)
def test_each_option_makes_the_key_it_says(profile: str, url: str, key: str) -> None:
    """One case a line; the keys of version 1 are for ever."""
    name, _, option = profile.partition("+")
    options: dict[str, Any] = {option: True} if option else {}
    made = KeyProfile.of(name, **options)
    assert canonicalise(url, made).text == key


# -- the two forms ------------------------------------------------------------------------------


def test_the_request_is_what_was_found_and_the_key_is_not() -> None:
    """Order, slash and credentials stay on what is requested, and only there."""
    canonical = canonicalise("http://User:Pa@E.test/a/?B=1&A=2#x", STANDARD)
    assert canonical.request_url == "http://User:Pa@e.test/a/?B=1&A=2"
    assert canonical.text == "http://e.test/a?A=2&B=1"
    assert canonical.authority == "e.test"
    assert canonical.path == "/a"
    assert "Pa" not in repr(canonical)


def test_a_kept_fragment_stays_on_the_request_too() -> None:
    """Else the key of the request would be another task's."""
    canonical = canonicalise("http://e.test/#/a", KeyProfile.of(keep_fragment=True))
    assert canonical.request_url == "http://e.test/#/a"
    assert canonicalise(canonical.request_url, KeyProfile.of(keep_fragment=True)) == canonical


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://e.test/Product/ABC", "http://e.test/product/abc", False),
        ("http://e.test/A", "HTTP://E.TEST/A", True),
        ("http://e.test/a%2525b", "http://e.test/a%25b", False),
        ("http://e.test/a%3Bb?x=1;y=2", "http://e.test/a;b?x=1;y=2", False),
        ("http://e.test/#main", "http://e.test/#footer", True),
        ("http://e.test/page2", "http://e.test/page2#s", True),
        ("http://e.test/blog?page=2#content", "http://e.test/blog", False),
        ("http://e.test:8080/", "http://e.test/", False),
        ("http://[::0:1]/", "http://[::1]/", True),
        ("http://[::1]:80/", "http://[::1]/", True),
        ("http://[::1]:8080/", "http://[::1]/", False),
    ],
)
def test_what_real_crawlers_confused_is_told_apart(one: str, other: str, is_same: bool) -> None:
    """Only scheme and host have no case; only the fragment is no part of a page."""
    assert (canonicalise(one, STANDARD).key == canonicalise(other, STANDARD).key) is is_same


@pytest.mark.parametrize(
    ("url", "base", "reason"),
    [
        ("/a", None, "not_a_url"),
        ("", None, "not_a_url"),
        ("a", "no base", "not_a_url"),
        ("http://e.test/", "no base", "not_a_url"),
        ("mailto:a@b.c", None, "scheme"),
        ("JavaScript:void(0)", "http://e.test/", "scheme"),
        ("ftp://e.test/", None, "scheme"),
        ("foo://[", None, "scheme"),
        ("#x", "about:blank", "scheme"),
        ("http://", None, "host"),
        ("http://e.test:99999/", None, "host"),
        ("http://1.2.3.4.5/", None, "host"),
        ("http://./", None, "host"),
        ("http://e.test../", None, "host"),
        ("http://1.2../", None, "host"),
        ("//[", "http://e.test/", "host"),
        ("http://e.test/\ud800", None, "surrogate"),
        ("http://e.test/?\udfff", None, "surrogate"),
        ("a", "http://e.test/\ud800", "surrogate"),
        ("http://e.test/" + "a" * 8179, None, "too_long"),
        ("http://e.test/" + "\u00e9" * 4090, None, "too_long"),
        ("http://e.test/" + "\u00e9" * 3000, None, "too_long"),
        ("http://e.test/" + "[" * 3000, None, "too_long"),
        ("a" * 5000, "http://e.test/" + "b" * 4000 + "/", "too_long"),
    ],
)
def test_a_rejected_url_gives_its_reason_as_one_word(url: str, base: str | None, reason: str) -> None:
    """The words are stable: they are stored and counted."""
    assert found(url, STANDARD, base) == reason


def test_the_longest_url_is_accepted() -> None:
    """The limit counts bytes and includes itself."""
    url = "http://e.test/" + "a" * (8192 - 14)
    assert canonicalise(url, STANDARD).text == url
    assert isinstance(canonicalise("http://e.test/#" + "a" * 100, STANDARD, bytes_max=115), Canonical)
    with pytest.raises(UrlRejected):
        canonicalise("http://e.test/", STANDARD, bytes_max=13)


def test_a_message_shows_no_password() -> None:
    """Rejections are logged; credentials are not."""
    with pytest.raises(UrlRejected) as caught:
        canonicalise("http://user:secret@e.test:99999/" + "a" * 500, STANDARD)
    assert "secret" not in str(caught.value)
    assert "user" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert shown("\ud800\n") == "'\\ud800\\n'"


@pytest.mark.parametrize(
    ("url", "base", "charset", "expected"),
    [
        ("?q=\u00e9", "http://e.test/", "windows-1252", "http://e.test/?q=%E9"),
        ("?q=\u00e9", "http://e.test/", "Latin1", "http://e.test/?q=%E9"),
        ("/\u00e9?\u20ac#\u00e9", "http://e.test/", "iso-8859-1", "http://e.test/%C3%A9?%80#%C3%A9"),
        ("?q=\u00e9", "http://e.test/", "utf-16le", "http://e.test/?q=%C3%A9"),
        ("?q=\u00e9", "http://e.test/", "nonsense", "http://e.test/?q=%C3%A9"),
        ("?q=\u4e2d", "http://e.test/", "gb2312", "http://e.test/?q=%D6%D0"),
        ("?q=\u00e9\t%41 '", "http://e.test/", "koi8-r", "http://e.test/?q=%26%23233%3B%41%20%27"),
        ("ws://e.test/?\u00e9", None, "latin1", "ws://e.test/?%C3%A9"),
        ("foo:?\u00e9", None, "latin1", "foo:?%C3%A9"),
        ("?\u00e9", "foo://h/", "latin1", "foo://h/?%C3%A9"),
    ],
)
def test_a_query_is_written_in_the_charset_of_its_page(url: str, base: str | None, charset: str, expected: str) -> None:
    """As browsers do: the query alone, of the schemes that have pages, UTF-8 elsewhere."""
    assert href(url, base=base, charset=charset) == expected


@pytest.mark.parametrize("codec", sorted(set(QUERY_CODECS.values())))
def test_every_charset_in_the_table_writes_any_query(codec: str) -> None:
    """No codec raises on what it lacks, nor swallows it."""
    url = href("?\u00e9\u4e2d\U0001f41a\ufffd\x80", base="http://e.test/", charset=codec)
    assert re.fullmatch(r"http://e\.test/\?(%[0-9A-F]{2}|[!-~])+", url)
    assert "?" not in url.partition("?")[2]


# -- profiles and rules -------------------------------------------------------------------------


def test_the_default_profile_is_the_standard_one() -> None:
    """By name, by default and by field."""
    assert KeyProfile() == KeyProfile.of() == KeyProfile.of("standard")
    assert options_of("standard") == {option: getattr(STANDARD, option) for option in OPTIONS}
    assert KEY_VERSION in STEPS


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KeyProfile.of("loose"), ["loose", "exact", "standard", "aggressive"]),
        (lambda: KeyProfile.of(sort=True), ["sort", "sort_query"]),
        (lambda: KeyProfile.of(sort_query=1), ["sort_query", "1"]),  # type: ignore[arg-type]
        (lambda: KeyProfile.of(version=99), ["99", "knows 1"]),
        (lambda: KeyProfile(version=True), ["True"]),
        (lambda: KeyProfile.of(rules=[SiteRule.of("e.test", no_such=True)]), ["no_such"]),
        (lambda: SiteRule.of("http://e.test/"), ["http://e.test/"]),
        (lambda: SiteRule.of("a..b"), ["a..b"]),
        (lambda: SiteRule.of("e.test", drop="a", keep="b"), ["drops and keeps"]),
    ],
)
def test_an_unknown_name_is_refused_and_the_known_ones_are_named(call: object, words: list[str]) -> None:
    """A spelling mistake in a profile must not silently change every key of a job."""
    with pytest.raises(UsageError) as caught:
        call()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "null", "{", '"standard"', '{"name":"standard"}', "[" * 100_000),
        '{"name":"standard","options":{},"rules":[],"version":2}',
        '{"name":"standard","options":{},"rules":[],"version":"1"}',
        '{"name":[],"options":{},"rules":[],"version":1}',
        '{"name":"standard","options":{"x":true},"rules":[],"version":1}',
        '{"name":"standard","options":{"strip_www":"yes"},"rules":[],"version":1}',
        '{"name":"standard","options":[],"rules":[],"version":1}',
        '{"name":"standard","options":{},"rules":[{"host":"e.test"}],"version":1}',
        '{"name":"standard","options":{},"rules":[7],"version":1}',
    ],
)
def test_json_that_is_no_profile_is_refused(text: str) -> None:
    """A stored profile that this release cannot compute is an error, never the default."""
    with pytest.raises(UsageError):
        KeyProfile.from_json(text)


def test_a_profile_stores_only_what_differs_from_its_name() -> None:
    """So that an option added later, and off, changes neither text nor digest of the jobs there are."""
    profile = KeyProfile.of("exact", strip_slash=True, sort_query=False, rules=[SiteRule.of("E.test", drop="sid")])
    assert json.loads(profile.to_json()) == {
        "name": "exact",
        "options": {"strip_slash": True},
        "rules": [{"drop": ["sid"], "host": "e.test", "keep": [], "options": {}}],
        "version": 1,
    }
    assert replace(profile, strip_slash=False).digest() != profile.digest()


@pytest.mark.parametrize(
    ("rule", "url", "key"),
    [
        (SiteRule.of("e.test", drop=["sid", "x[]"]), "http://e.test/?sid=1&x[]=2&%73id=3&b", "http://e.test/?b"),
        (SiteRule.of("e.test", drop="s*"), "http://e.test/?sid=1&S=2&b", "http://e.test/?S=2&b"),
        (SiteRule.of("e.test", keep=["id", "\u00e9"]), "http://e.test/?q=1&\u00e9=2&id=3", "http://e.test/?%C3%A9=2&id=3"),
        (SiteRule.of("e.test", keep="id"), "http://other.test/?q=1", "http://other.test/?q=1"),
        (SiteRule.of("e.test", drop="sid"), "http://www.e.test/?sid=1", "http://www.e.test/"),
        (SiteRule.of("www.e.test", drop="sid"), "http://e.test/?sid=1", "http://e.test/"),
        (SiteRule.of("*.e.test", strip_slash=False), "http://e.test/a/", "http://e.test/a/"),
        (SiteRule.of("*.e.test", strip_slash=False), "http://a.b.e.test./a/", "http://a.b.e.test/a/"),
        (SiteRule.of("*.e.test", strip_slash=False), "http://be.test/a/", "http://be.test/a"),
        (SiteRule.of("*.B\u00fccher.test", collapse_slashes=True), "http://b\u00fccher.test//a", "http://xn--bcher-kva.test/a"),
        (SiteRule.of("127.0.0.*", sort_query=False), "http://127.1:81/?b&a", "http://127.0.0.1:81/?b&a"),
        (SiteRule.of("e.test", keep_fragment=True), "http://e.test/#/a", "http://e.test/#/a"),
    ],
)
def test_a_site_rule_changes_the_keys_of_its_site_alone(rule: SiteRule, url: str, key: str) -> None:
    """Through the one function that makes every key."""
    assert canonicalise(url, KeyProfile.of(rules=[rule])).text == key


def test_the_first_rule_that_covers_a_host_holds() -> None:
    """Rules are read in their order, and a host has one."""
    profile = KeyProfile.of(rules=[SiteRule.of("a.e.test", drop="x"), SiteRule.of("*.e.test", drop="y")])
    assert canonicalise("http://a.e.test/?x&y", profile).text == "http://a.e.test/?y"
    assert canonicalise("http://b.e.test/?x&y", profile).text == "http://b.e.test/?x"


# -- what is derived ----------------------------------------------------------------------------


def test_requests_that_differ_in_method_or_body_have_other_keys() -> None:
    """A plain GET is its URL alone."""
    text = "http://e.test/?a=1"
    texts = [
        key_text(text),
        key_text(text, "POST"),
        key_text(text, "POST", b"a"),
        key_text(text, "PUT", b"a"),
        key_text(text, "GET", b"a"),
    ]
    assert texts[0] == text
    assert len(set(texts)) == len(texts)
    assert key_text(text, "post", b"a") == texts[2]


def test_hosts_spread_over_the_shards() -> None:
    """No shard of 16 gets more than twice its share of 4,096 hosts."""
    counts = [0] * 16
    for n in range(4096):
        counts[shard_of(f"host{n}.test", 16)] += 1
    assert max(counts) < 512
    assert min(counts) > 128


def test_the_memo_does_not_keep_long_urls() -> None:
    """So its memory has a bound; the answer is the same."""
    cache = KeyCache(STANDARD, lambda canonical: canonical)
    long = "http://e.test/" + "a" * MEMO_CHARS_MAX
    assert cache.at(Place(None), long) == canonicalise(long, STANDARD)
    assert len(cache) == 0
    assert cache.at(Place(None), "http://e.test/") is cache.at(Place(None), "http://e.test/")


def test_a_rejection_from_the_memo_is_a_new_one() -> None:
    """A raised exception gathers tracebacks, and with them the frames of every page that met it."""
    cache = KeyCache(STANDARD, lambda canonical: canonical)
    raised = []
    for _ in range(2):
        with pytest.raises(UrlRejected, match="only http") as caught:
            cache.at(Place("http://e.test/"), "mailto:a@b.c")
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert raised[0].args == raised[1].args
