"""The URL tables: rows that Limpet meets in full, and a review of what other canonicalisers do.

`tests/vectors/README.md` says what the files are. With LIMPET_SHARED set, the originals in its folder
`vectors` are run beside our copies, and a file that is missing there is a failure.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from limpet.errors import UrlRejected
from limpet.url import OPTIONS, KeyProfile, canonicalise, href
from limpet.url_tables import scheme_of, trimmed

Row = dict[str, Any]

OURS = Path(__file__).parents[1] / "vectors"
SHARED = os.environ.get("LIMPET_SHARED")
FOLDERS = [OURS, *([Path(SHARED) / "vectors"] if SHARED else [])]
STANDARD = KeyProfile()


def rows(*names: str) -> list[Any]:
    """Each row of these files as one test case; a missing file is an error at once."""
    return [
        pytest.param(row, id=f"{'ours' if folder is OURS else 'original'}-{name}-{number}", marks=marks_of(folder))
        for folder in FOLDERS
        for name in names
        for number, row in enumerate(json.loads((folder / f"{name}.json").read_text("utf-8")))
    ]


def folders() -> list[Any]:
    """Our copies, and the originals where there are some."""
    return [pytest.param(folder, id="ours" if folder is OURS else "original", marks=marks_of(folder)) for folder in FOLDERS]


def marks_of(folder: Path) -> tuple[pytest.MarkDecorator, ...]:
    """The originals' cases carry a mark."""
    return () if folder is OURS else (pytest.mark.originals,)


def key(url: str, profile: KeyProfile = STANDARD, charset: str = "utf-8") -> str | None:
    """The key text; None where the URL is rejected."""
    try:
        return canonicalise(url, profile, charset=charset).text
    except UrlRejected:
        return None


def parsed(url: str, base: str | None = None, charset: str = "utf-8") -> str | None:
    """The WHATWG href; None where the parser refuses."""
    try:
        return href(url, base=base, charset=charset)
    except UrlRejected:
        return None


def profile_of(policy: str) -> KeyProfile:
    """`limpet-standard+strip_www=on` as a profile; the tables call `strip_slash` just `slash`."""
    name, *options = policy.removeprefix("limpet-").split("+")
    pairs = [option.split("=") for option in options]
    values = {"on": True, "off": False}
    switches: dict[str, Any] = {"strip_slash" if o == "slash" else o: values[v] for o, v in pairs}
    return KeyProfile.of(name, **switches)


# -- met in full --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", rows("url_limpet_key"))
def test_a_url_has_the_key_of_its_row(row: Row) -> None:
    """Policy `limpet-*`: null is a rejection."""
    assert key(row["input"], profile_of(row["policy"])) == row["expected"]


@pytest.mark.parametrize("row", rows("url_limpet_pairs"))
def test_a_pair_shares_a_key_or_does_not(row: Row) -> None:
    """Policy `limpet-*`, two URLs a row."""
    profile = profile_of(row["policy"])
    one, other = key(row["input"], profile), key(row["other"], profile)
    assert one is not None
    assert ("same" if one == other else "different") == row["expected"]


@pytest.mark.parametrize("row", rows("url_wpt_urltestdata", "url_ada_extra"))
def test_the_parser_is_the_one_of_browsers(row: Row) -> None:
    """Policy `whatwg-href`: input and base -> href."""
    assert parsed(row["input"], row["base"]) == row["expected"]


@pytest.mark.parametrize("row", rows("url_wpt_toascii", "url_wpt_idna_sample"))
def test_a_host_is_written_in_ascii_as_browsers_do(row: Row) -> None:
    """Policy `whatwg-host-toascii`: characters that would end the host are escaped, as in the tests' own runner."""
    host = "".join(f"%{ord(c):02X}" if c in ":/?#\\" else c for c in row["input"])
    whole = parsed(f"https://{host}/x")
    assert (whole and whole.removeprefix("https://").partition("/")[0]) == row["expected"]


@pytest.mark.parametrize("row", rows("url_wpt_percent_encoding"))
def test_the_charset_of_the_page_writes_the_query(row: Row) -> None:
    """Policy `whatwg-query-encoding`: one text, several charsets."""
    got = {charset: parsed("?" + row["input"], "http://e.test/", charset) for charset in row["expected"]}
    assert got == {charset: "http://e.test/?" + query for charset, query in row["expected"].items()}


#: Rows of RFC 3986 where WHATWG, which every browser and so every link follows, says otherwise.
RFC_NOT_WHATWG = {
    "http:g": "a browser takes `http:g` as relative to an http base (the row's own note says so)",
    "example://a/b/c/%7Bfoo%7D": "neither http nor https: Limpet makes no key of it, and WHATWG keeps %63 there",
}


@pytest.mark.parametrize("row", rows("url_rfc3986"))
def test_rfc_3986_holds_where_whatwg_agrees_with_it(row: Row) -> None:
    """Resolution by the parser, equivalence by the key; the two exceptions are exceptions still."""
    if "other" in row:
        one, other = key(row["input"]), key(row["other"])
        holds = one is not None and ("same" if one == other else "different") == row["expected"]
    else:
        holds = parsed(row["input"], row["base"]) == row["expected"]
    assert holds is (row["input"] not in RFC_NOT_WHATWG)


@pytest.mark.parametrize("folder", folders())
def test_our_copies_hold_every_row_of_the_originals(folder: Path) -> None:
    """Every file, row by row; a mark on a row of ours, `wrong`, is not a difference."""
    names = sorted(path.name for path in folder.glob("*.json"))
    assert names == sorted(path.name for path in OURS.glob("*.json"))
    for name in names:
        assert unmarked(OURS / name) == unmarked(folder / name), name


def unmarked(path: Path) -> list[Row]:
    """The rows of a file without our marks."""
    return [{k: v for k, v in row.items() if k != "wrong"} for row in json.loads(path.read_text("utf-8"))]


@pytest.mark.parametrize("name", sorted(path.stem for path in OURS.glob("*.json")))
def test_every_table_is_described_and_credited(name: str) -> None:
    """In the README of the tables; rows from elsewhere keep their sources."""
    assert name in (OURS / "README.md").read_text("utf-8")
    assert all(row["source"] and row["policy"] for row in json.loads((OURS / f"{name}.json").read_text("utf-8")))


# -- what other canonicalisers do ---------------------------------------------------------------
#
# A row is reviewed by the first explanation that holds for it. Each is checked on the row, not just
# asserted; what has none makes the test fail, and so does a row whose explanation changes.


def pairs_of(url: str) -> Counter[str]:
    """The pairs of a query, however they are ordered and separated."""
    return Counter(filter(None, re.split("[&;]", url.partition("#")[0].partition("?")[2])))


def unescaped(url: str) -> bytes:
    """All escapes undone, again and again."""
    before, after = b"", url.encode()
    while before != after:
        before, after = after, unquote_to_bytes(after)
    return after


def surt(url: str) -> str:
    """The sort-friendly form of the Internet Archive: host reversed and without www, lower case, pairs sorted."""
    front, _, query = url.lower().replace("://www.", "://").partition("?")
    host, _, path = front.partition("://")[2].partition("/")
    reversed_host = host.strip("[]") if host.startswith("[") else ",".join(reversed(host.split(".")))
    return f"{reversed_host})/{path}" + ("?" + "&".join(sorted(query.split("&"))) if query else "")


def is_utf_8_read_as_latin_1(row: Row, ours: str) -> bool:
    """The row's input holds bytes, one a character; the row's result is right for those bytes."""
    text = trimmed(row["input"]).partition("#")[0]
    if max(text) > "\xff":
        return False
    return unquote_to_bytes(text.encode("latin-1")) == unquote_to_bytes(row["expected"].partition("#")[0])


def is_only_fewer_pairs(row: Row, ours: str) -> bool:
    """The other drops pairs that we keep, and does nothing else."""
    theirs = key(row["expected"]) or row["expected"]
    return theirs.partition("?")[0] == ours.partition("?")[0] and pairs_of(theirs) < pairs_of(ours)


def same_by(option: str) -> Callable[[Row, str], bool]:
    """Both texts have one key where this option is on too."""
    switch: dict[str, Any] = {option: True}
    profile = KeyProfile.of(**switch)
    return lambda row, ours: None is not key(row["input"], profile, charset_of(row)) == key(row["expected"], profile)


def charset_of(row: Row) -> str:
    """The charset that a row gives to the other's function."""
    return str((row.get("options") or {}).get("encoding", "utf-8"))


#: Explanations for a row where we give a key: name -> whether it holds for (row, our text).
EXPLAINED: dict[str, Callable[[Row, str], bool]] = {
    "equal": lambda row, ours: ours == row["expected"],
    "does less: its text has our key": lambda row, ours: key(row["expected"]) == ours,
    **{f"merges as {option} would": same_by(option) for option in OPTIONS if option not in {"sort_query", "strip_slash"}},
    "drops port and query": lambda row, ours: row["policy"].startswith("gsb") and re.sub(r":\d+(?=/)|\?.*", "", ours) == row["expected"],
    "drops pairs that are content": is_only_fewer_pairs,
    "sorts at ; too, which is no separator": lambda row, ours: pairs_of(row["expected"]) == pairs_of(ours) and ";" in ours,
    "spells or decodes reserved escapes otherwise": lambda row, ours: (
        unquote_to_bytes(row["expected"].removesuffix("=")) == unquote_to_bytes(ours)
    ),
    "unescapes again and again": lambda row, ours: unescaped(row["expected"]) == unescaped(ours),
    "is a SURT": lambda row, ours: unquote_to_bytes(row["expected"].replace("?&", "?")) == unquote_to_bytes(surt(ours)),
    "merges the schemes, into http": lambda row, ours: ours.replace("https://www.", "http://") == row["expected"],
    "takes a host of dots for 0.0.0.0": lambda row, ours: re.sub(r"//[.]+/", "//0.0.0.0/", ours) == row["expected"],
    "strips www with digits": lambda row, ours: ours.replace("www232.", "") == row["expected"],
    "strips /(S(...)) from the path": lambda row, ours: re.sub(r"/\(S\(\w+\)\)", "", ours) == row["expected"],
    "lower-cases the path": lambda row, ours: ours.replace("www.", "").lower() == row["expected"],
    "drops empty labels in the host": lambda row, ours: ours.replace("...", ".") == row["expected"],
    "cuts the URL where it thinks that it ends": lambda row, ours: bool(
        re.match(re.escape(row["expected"]) + r'/?(https://|["<{&]|%22|%3C|%7B)', ours)
    ),
    "follows a link within a link": lambda row, ours: "url=" + row["expected"] in ours,
    "falls back to UTF-8 where the charset lacks a letter": lambda row, ours: "%26%23" in ours and key(row["input"]) == row["expected"],
    "reads bytes of UTF-8 as Latin-1": is_utf_8_read_as_latin_1,
}


def explanation(row: Row) -> str:
    """Why our result differs from the row's, in the words of this table; "" where nothing explains it."""
    url, expected = row["input"], row["expected"]
    if row["policy"].startswith(("path-dot-segments", "host-ipv4", "surt:alpha", "surt:massage", "surt:strip", "surt:unescape")):
        return explanation_of_piece(row)
    ours = parsed(url) if row["policy"].startswith("whatwg-href") else key(url, charset=charset_of(row))
    if ours is None:
        if expected is None:
            return "equal"
        scheme = scheme_of(trimmed(url))
        if scheme not in {"http", "https"} and (not scheme or not row["policy"].startswith("whatwg-href")):
            return "takes what is no http URL"
        return "takes a host that browsers refuse" if parsed(url) is None else "takes a host that ends in an empty label"
    if expected is None:
        return ""
    return next((name for name, holds in EXPLAINED.items() if holds(row, ours)), "")


def explanation_of_piece(row: Row) -> str:
    """The same for rows about a piece of a URL."""
    policy, text, expected = row["policy"], row["input"], row["expected"]
    if policy.startswith("path-dot-segments"):
        front = "http://h" if policy.endswith(":special") else "foo://h"
        ours = parsed(front + text)
        if ours == front + expected:
            return "equal"
        return "takes a backslash for a letter" if "\\" in text else ""
    if policy.startswith("host-ipv4"):
        ours = parsed(f"http://{text}/")
        is_ipv4 = ours is not None and ours[-2].isdigit()
        return "equal" if (ours == f"http://{expected}/" if expected else not is_ipv4) else ""
    return "is a piece of a SURT"


#: Files of other canonicalisers.
OTHERS = [
    *("crawler_commons", "w3lib", "url_normalize", "courlan", "urlcanon", "webarchive_commons", "heritrix_rules"),
    "google_safebrowsing",
]
#: Policy -> explanation -> rows, as they were read through one by one.
REVIEWED: dict[str, dict[str, int]] = {
    "cc-basic": {
        "equal": 46,
        "merges as collapse_slashes would": 6,
        "takes what is no http URL": 3,
        "does less: its text has our key": 2,
        "drops pairs that are content": 1,
        "merges as blank_value_equals_absent would": 1,
    },
    "courlan:clean_url": {
        "equal": 1,
        "cuts the URL where it thinks that it ends": 1,
        "does less: its text has our key": 1,
        "drops pairs that are content": 1,
        "merges as strip_tracking would": 1,
        "spells or decodes reserved escapes otherwise": 1,
    },
    "courlan:normalize_url": {
        "equal": 10,
        "does less: its text has our key": 5,
        "drops pairs that are content": 3,
        "merges as strip_tracking would": 1,
    },
    "courlan:scrub_url": {
        "equal": 1,
        "cuts the URL where it thinks that it ends": 6,
        "does less: its text has our key": 1,
        "follows a link within a link": 1,
        "takes what is no http URL": 1,
    },
    "gsb": {
        "equal": 8,
        "takes a host that browsers refuse": 5,
        "drops port and query": 3,
        "takes what is no http URL": 3,
        "unescapes again and again": 2,
    },
    "heritrix-rule:FixupQueryString": {
        "does less: its text has our key": 1,
    },
    "host-ipv4": {
        "equal": 26,
    },
    "ia-aggressive": {
        "equal": 1,
        "merges as strip_www would": 3,
    },
    "ia-basic": {
        "equal": 11,
        "takes a host that browsers refuse": 4,
        "takes what is no http URL": 2,
        "unescapes again and again": 2,
        "drops empty labels in the host": 1,
    },
    "ia-ordinary": {
        "equal": 2,
        "does less: its text has our key": 1,
        "takes a host that ends in an empty label": 1,
    },
    "ia-surt-key": {
        "is a SURT": 6,
        "takes what is no http URL": 5,
    },
    "path-dot-segments:nonspecial": {
        "equal": 186,
        "takes a backslash for a letter": 4,
    },
    "path-dot-segments:special": {
        "equal": 184,
        "takes a backslash for a letter": 6,
    },
    "surt:Canonicalizer.DefaultIA": {
        "equal": 1,
    },
    "surt:Canonicalizer.IA": {
        "equal": 1,
        "merges as strip_www would": 3,
    },
    "surt:alphaRorderQuery": {
        "is a piece of a SURT": 6,
    },
    "surt:defaultIASurt": {
        "takes what is no http URL": 5,
        "is a SURT": 3,
    },
    "surt:google": {
        "equal": 6,
        "takes a host that browsers refuse": 4,
        "takes what is no http URL": 2,
        "unescapes again and again": 2,
    },
    "surt:googleSupplementalFromSurt": {
        "equal": 1,
        "takes what is no http URL": 1,
    },
    "surt:massageHost": {
        "is a piece of a SURT": 3,
    },
    "surt:stripPathSessionId": {
        "is a piece of a SURT": 2,
    },
    "surt:unescapeRepeatedly": {
        "is a piece of a SURT": 3,
    },
    "url_normalize:url_normalize": {
        "equal": 18,
        "takes what is no http URL": 15,
        "does less: its text has our key": 4,
        "drops pairs that are content": 3,
        "merges as strip_tracking would": 3,
    },
    "urlcanon-aggressive": {
        "equal": 2,
        "takes what is no http URL": 6,
        "merges as strip_www would": 5,
        "drops pairs that are content": 1,
        "lower-cases the path": 1,
        "merges as strip_session would": 1,
        "merges the schemes, into http": 1,
        "strips /(S(...)) from the path": 1,
        "strips www with digits": 1,
    },
    "urlcanon-semantic-precise": {
        "equal": 42,
        "takes what is no http URL": 61,
        "takes a host that ends in an empty label": 10,
        "takes a host that browsers refuse": 7,
        "reads bytes of UTF-8 as Latin-1": 6,
        "does less: its text has our key": 5,
        "unescapes again and again": 5,
        "merges as sort_values would": 2,
    },
    "w3lib:canonicalize_url": {
        "equal": 29,
        "does less: its text has our key": 6,
        "spells or decodes reserved escapes otherwise": 3,
        "drops pairs that are content": 2,
        "falls back to UTF-8 where the charset lacks a letter": 1,
        "merges as blank_value_equals_absent would": 1,
        "merges as plus_is_space would": 1,
        "sorts at ; too, which is no separator": 1,
        "takes what is no http URL": 1,
    },
    "w3lib:safe_url_string": {
        "equal": 37,
        "does less: its text has our key": 61,
        "takes what is no http URL": 19,
        "takes a host that browsers refuse": 1,
    },
    "whatwg-href": {
        "equal": 44,
        "takes a host of dots for 0.0.0.0": 12,
        "takes a host that browsers refuse": 5,
        "spells or decodes reserved escapes otherwise": 2,
        "takes what is no http URL": 1,
    },
}


def reviewed(folder: Path) -> dict[str, Counter[str]]:
    """Policy (its words before any bracket) -> explanation -> rows, for all files of other canonicalisers."""
    counts: dict[str, Counter[str]] = {}
    for name in OTHERS:
        for row in json.loads((folder / f"url_{name}.json").read_text("utf-8")):
            why = explanation(row) or f"NOT EXPLAINED: {row['input']!r} -> {row['expected']!r}, ours {key(row['input'])!r}"
            counts.setdefault(row["policy"].partition(" (")[0], Counter())[why] += 1
    return counts


@pytest.mark.parametrize("folder", folders())
def test_every_difference_from_other_canonicalisers_is_explained(folder: Path) -> None:
    """And the number of rows behind each explanation is the one that was reviewed."""
    assert {policy: dict(counts) for policy, counts in reviewed(folder).items()} == REVIEWED
