"""`limpet explain --key`: URLs and JSON lines in, key texts out, a line for a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from limpet.cli.keys import profile_of
from limpet.errors import UsageError
from tests.e2e.conftest import Limpet

VECTORS = Path(__file__).parent.parent / "vectors"
SHARED = os.environ.get("LIMPET_SHARED")


def rows(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a table that are about keys or hrefs."""
    found: list[dict[str, Any]] = json.loads((folder / name).read_text(encoding="utf-8"))
    return [row for row in found if row["policy"].startswith("limpet-") or row["policy"] == "whatwg-href"]


def asked(row: dict[str, Any]) -> str:
    """A row as a line of JSON: its policy is the profile, with its options behind it or apart."""
    profile, *options = row["policy"].split("+")
    line = {"input": row["input"], "profile": profile}
    if row.get("base") is not None:
        line["base"] = row["base"]
    if options:
        line["options"] = dict(option.split("=") for option in options)
    return json.dumps(line)


TABLES = ["url_limpet_key.json", "url_ada_extra.json", "url_wpt_urltestdata.json"]
#: Our copies, and the originals where LIMPET_SHARED names their folder.
FOLDERS = [
    pytest.param(VECTORS, id="ours"),
    *([pytest.param(Path(SHARED) / "vectors", id="originals", marks=pytest.mark.originals)] if SHARED else []),
]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_tables_comes_out_as_it_should(limpet: Limpet, name: str, folder: Path) -> None:
    """The filter is the key function, and nothing beside it: a text, or an empty line with a reason on stderr."""
    table = rows(name, folder)
    ended = limpet("explain", "--key", stdin="".join(asked(row) + "\n" for row in table))
    assert ended.code == 0, ended.err
    assert table
    assert ended.out.split("\n")[:-1] == [row["expected"] or "" for row in table]
    assert ended.err.count("rejected (") == sum(row["expected"] is None for row in table)


def test_arguments_lines_and_json_lines_give_the_same_keys(limpet: Limpet) -> None:
    """However a URL comes in, its key is one."""
    url, key = "HTTP://Example.com:80/%7euser/?b=1&a=2#top", "http://example.com/~user?a=2&b=1\n"
    assert limpet("explain", "--key", url).out == key
    assert limpet("explain", "--key", stdin=url + "\n").out == key
    assert limpet("explain", "--key", stdin=json.dumps({"input": url})).out == key
    assert limpet("explain", "--key", stdin=json.dumps(url)).out == key


def test_what_is_rejected_keeps_its_line_and_says_why(limpet: Limpet) -> None:
    """Lines stay side by side with the input: an empty one, or null with --json."""
    lines = "http://a.test/\nmailto:a@b.c\n\nhttp://b.test/\n"
    ended = limpet("explain", "--key", stdin=lines)
    assert ended.out == "http://a.test/\n\n\nhttp://b.test/\n"
    assert "rejected (scheme)" in ended.err
    assert limpet("explain", "--key", "--json", stdin=lines).out == '"http://a.test/"\nnull\nnull\n"http://b.test/"\n'


def test_bytes_that_are_no_text_are_rejected_and_not_repaired(limpet: Limpet) -> None:
    """No U+FFFD is put into a key, and a lone surrogate is no text."""
    ended = limpet("explain", "--key", stdin=b'http://a.test/\xff\n{"input": "http://a.test/\\ud800"}\n')
    assert ended.out == "\n\n"
    assert ended.err.count("rejected (surrogate)") == 2


def test_a_base_and_a_charset_are_applied(limpet: Limpet) -> None:
    """What a link is resolved against, and the charset of its query, are part of the question."""
    assert limpet("explain", "--key", "--base", "http://e.test/a/b", "../c").out == "http://e.test/c\n"
    line = json.dumps({"input": "?q=\u20ac", "base": "http://e.test/", "charset": "windows-1252"})
    assert limpet("explain", "--key", stdin=line).out == "http://e.test/?q=%80\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"input": ', "line 1: no JSON"),
        ('{"url": "http://a.test/"}', "expected a JSON object with input"),
        ('{"input": 3}', "expected a JSON object with input"),
        ('{"input": "x", "base": 3}', "are texts"),
        ('{"input": "x", "profile": "odd"}', "'odd' is unknown"),
        ('{"input": "x", "profile": 3}', "expected exact, standard or aggressive"),
        ('{"input": "x", "options": {"odd": true}}', "'odd' is unknown"),
        ('{"input": "x", "options": {"strip_www": 3}}', "expected on or off"),
        ('{"input": "x", "options": 3}', "expected an object"),
        ('{"input": "x", "options": {"rules": true}}', "'rules' is unknown"),
    ],
)
def test_a_line_that_asks_nothing_sensible_is_named(limpet: Limpet, line: str, words: str) -> None:
    """A filter that guessed would give wrong keys without a word."""
    ended = limpet("explain", "--key", stdin=line)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_profiles_have_one_meaning_in_every_spelling() -> None:
    """A policy, an object of options and flags name the same profile."""
    spelled = [
        profile_of("limpet-standard+strip_www=on+slash=off"),
        profile_of("standard", {"strip_www": True, "strip_slash": "off"}),
        profile_of("standard", ["strip_www", "strip_slash=off"]),
    ]
    assert len({profile.to_json() for profile in spelled if profile}) == 1
    assert profile_of("whatwg-href") is None
    with pytest.raises(UsageError):
        profile_of("standard+frob=on")
