"""Which value a setting has: flags over environment over limpet.toml over the spider over the defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.cli.configuration import EXTRAS, File, checked, flag_of, of_environment, parsed, read_file, resolve
from limpet.errors import UsageError
from limpet.settings import Settings, documented

#: Values of `strikes` by the place that says it, from weak to strong; 4 is the default.
PLACES = ("spider", "limpet", "spider table", "environment", "flag")


def resolved(said: dict[str, int]) -> tuple[Settings, str]:
    """The settings where some places say `strikes`, and the origin of it."""

    def at(place: str) -> dict[str, Any]:
        return {"strikes": said[place]} if place in said else {}

    environment = {f"LIMPET_{name.upper()}": str(value) for name, value in at("environment").items()}
    file = File("limpet.toml", at("limpet"), {"shop": at("spider table"), "other": {"strikes": 99}})
    found = resolve(at("flag"), environment, file, spider="shop", own=at("spider"))
    return found.settings, found.origins["strikes"]


@given(st.dictionaries(st.sampled_from(PLACES), st.integers(1, 50)))
def test_the_strongest_place_that_says_a_value_has_its_way(said: dict[str, int]) -> None:
    """Whatever the others say, and nobody's word is the default's."""
    settings, origin = resolved(said)
    strongest = next((place for place in reversed(PLACES) if place in said), None)
    assert settings.strikes == (said[strongest] if strongest else 4)
    assert settings == Settings(strikes=settings.strikes)
    expected = {
        None: "default", "spider": "spider", "limpet": "limpet.toml [limpet]", "spider table": "limpet.toml [spider.shop]",
        "environment": "LIMPET_STRIKES", "flag": "flag --strikes",
    }  # fmt: skip
    assert origin == expected[strongest]


def outcome(call: Callable[[], object]) -> object:
    """What a call gives, or the refusal that it raises; nothing else may leave it."""
    try:
        return call()
    except UsageError as refusal:
        return refusal


def test_every_setting_is_a_flag_of_its_own() -> None:
    """No two settings share a flag, and seconds are not said in any."""
    flags = [flag_of(name) for name in documented()]
    assert len(set(flags)) == len(flags)
    assert not any(flag.endswith("-s") for flag in flags)


@pytest.mark.parametrize("name", documented())
def test_every_default_is_a_value_that_would_be_taken(name: str) -> None:
    """The table of defaults keeps its own rules, written as text too."""
    default, doc = documented()[name]
    assert doc
    assert checked(name, default, "here") == default
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
    assert parsed(name, text, "here") == default


@given(
    st.sampled_from([*documented(), *EXTRAS]),
    st.text() | st.integers() | st.floats() | st.booleans() | st.lists(st.floats()) | st.none(),
)
def test_any_value_is_taken_as_it_is_or_refused_with_the_place_named(name: str, value: object) -> None:
    """Nothing but UsageError ever leaves, and what is taken is of the setting's own type."""
    taken = outcome(lambda: checked(name, value, "limpet.toml [limpet]"))
    if isinstance(taken, UsageError):
        assert str(taken).startswith("limpet.toml [limpet]: ")
        assert name in str(taken)
    else:
        assert isinstance(taken, str if name in EXTRAS else type(documented()[name][0]))


@given(st.sampled_from([*documented()]), st.text())
def test_any_text_is_a_value_or_refused(name: str, text: str) -> None:
    """Flags and variables are texts: nothing but UsageError leaves for any of them."""
    taken = outcome(lambda: parsed(name, text, "here"))
    if isinstance(taken, UsageError):
        assert str(taken).startswith("here: ")
    else:
        assert isinstance(taken, type(documented()[name][0]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limpet]\nconcurency = 3", "unknown setting 'concurency'; did you mean 'concurrency'?"),
        ("[limpet]\ndelay = 3", "did you mean 'delay_s'?"),
        ("[limpet]\nstrikes = 2.5", "strikes is 2.5; expected a whole number"),
        ("[limpet]\nstrikes = true", "strikes is True"),
        ("[limpet]\nsolo_backoff_s = [1, 'x']", "expected numbers"),
        ("[limpet]\nlease_s = inf", "lease_s is inf"),
        ("[limpet]\ndb = 3", "db is 3; expected a line of text"),
        ("[spider.shop]\nfoo = 1", "[spider.shop]: unknown setting 'foo'"),
        ("[spiders.shop]\nstrikes = 1", "unknown 'spiders'"),
        ("strikes = 4", "below [limpet]"),
        ("spider = 4", "expected tables [spider.NAME]"),
        ("limpet = 4", "expected a table"),
        ("[spider]\nshop = 4", "expected a table"),
        ("[limpet", "is no TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_nearest_name(tmp_path: Path, text: str, words: str) -> None:
    """A setting that is ignored in silence is worse than none."""
    (tmp_path / "limpet.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        read_file(None, str(tmp_path))
    assert words in str(refused.value)
    assert str(refused.value).startswith("limpet.toml")


def test_a_folder_without_a_file_says_nothing(tmp_path: Path) -> None:
    """The file is for those who want one; a named one has to be there."""
    assert read_file(None, str(tmp_path)) == File()
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(str(tmp_path / "limpet.toml"))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are no TOML."""
    (tmp_path / "limpet.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(None, str(tmp_path))


def test_variables_of_others_are_left_alone() -> None:
    """Only LIMPET_ is looked at, and what other parts of Limpet read is no setting."""
    assert of_environment({"PATH": "/bin", "LIMPET_FAILPOINT": "x=kill", "LIMPET_DEBUG": "1", "LIMPET_COLOUR_OF_SHELL": "grey"}) == {}
    assert of_environment({"LIMPET_DB": "x.db", "LIMPET_MAX_PAGES": "7"}) == {"db": "x.db", "max_pages": 7}


def test_whole_numbers_are_taken_for_seconds() -> None:
    """`delay_s = 2` in a file is two seconds, as a float."""
    found = resolve({}, {}, File("limpet.toml", {"delay_s": 2}), own={})
    assert repr(found.settings.delay_s) == "2.0"


def test_every_row_says_value_origin_and_meaning() -> None:
    """`limpet config` prints every setting, and db and user_agent beside them."""
    rows = resolve({"user_agent": "me/1"}, {}, File()).rows()
    assert [name for name, *_ in rows] == [*documented(), *EXTRAS]
    assert all(origin and doc for _, _, origin, doc in rows)
    assert ("user_agent", "me/1", "flag --user-agent", EXTRAS["user_agent"]) in rows
