"""Which names say that a value is a credential, and that nothing which repeats a text repeats one."""

from __future__ import annotations

import argparse
import io
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet.batch import Claim, Result
from limpet.cli.arguments import parser
from limpet.cli.crew import crew_of
from limpet.cli.logs import JsonLine, Line
from limpet.cli.parameters import BY_NAME, PASSED_ON, params_of, shown
from limpet.cli.schedule import backfill_command
from limpet.credentials import HIDDEN, WORDS, hidden, hidden_value, is_secret
from limpet.errors import FetchError, UsageError
from limpet.settings import Settings
from limpet.task import Outcome, ShardId, TaskId, TaskKey

SECRET = "Zq7s3cretZq7"


@pytest.mark.parametrize(
    "name",
    [
        "key", "KEY", "api_key", "apikey", "apiKey", "APIKey", "api-key", "access_token", "accessToken", "token2", "client_secret",
        "password", "passwd", "auth", "Authorization", "Proxy-Authorization", "Cookie", "signature", "X-Amz-Signature",
        "X-Amz-Credential", "credentials", "x[token]", "AWSAccessKeyId", "sig",
    ],
)  # fmt: skip
def test_a_whole_word_of_a_name_says_that_its_value_is_a_credential(name: str) -> None:
    """In any case, and however words are put together."""
    assert is_secret(name)
    assert hidden(f"https://h.test/v1?q=tea&{name}={SECRET}&n=1") == f"https://h.test/v1?q=tea&{name}={HIDDEN}&n=1"


@pytest.mark.parametrize(
    "name",
    ["keyword", "keywords", "Keyword", "KEYWORDS", "author", "authority", "monkey", "sort", "design", "passenger", "signal", "q", ""],
)
def test_other_words_are_no_credentials(name: str) -> None:
    """A part of a word says nothing."""
    assert not is_secret(name)
    assert hidden(f"https://h.test/v1?{name}=tea: status 500") == f"https://h.test/v1?{name}=tea: status 500"


@pytest.mark.parametrize(
    "text",
    [
        f"https://h.test/?api_key={SECRET}: no answer in time",
        f"'https://h.test/#access_token={SECRET}'",
        f"https://h.test/?q=1;token={SECRET}",
        f"https://h.test/?api%5Fkey={SECRET}",
        f"https://me:{SECRET}@h.test/",
        f"http://{SECRET}@h.test/",
        f"postgresql://me:a/{SECRET}?@db.test/x",
        f"postgresql://me@db.test/x?password={SECRET}",
        f"Authorization: Basic {SECRET}==",
        f"GET / HTTP/1.1\r\nX-Api-Key: {SECRET}\r\nHost: h",
        f"sent with Bearer {SECRET}",
        f"{{'api_key': '{SECRET}', 'n': 1}}",
        f'{{"token": "{SECRET}"}}',
        f"{{'key': b'{SECRET}'}}",
    ],
)
def test_no_form_of_a_credential_in_a_text_is_shown(text: str) -> None:
    """By everything that shows, logs or keeps a text; what stands around it stays."""
    said = hidden(text)
    assert SECRET not in said
    assert HIDDEN in said
    assert SECRET not in str(UsageError(text))
    assert SECRET not in str(FetchError(text, kind="reset"))
    claim = Claim(ShardId(0), TaskId(1), TaskKey(b""), 1, 0, 0, 0, 0, "t", "u", "h", "", 0, 0, 0, b"")
    assert Result(claim, Outcome.DEAD, reason="x", detail=text).detail == said
    for form in (Line("%(message)s"), JsonLine()):
        assert SECRET not in logged(text, form)


def logged(text: str, form: logging.Formatter) -> str:
    """What a log has of a text, as a message and in a traceback."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(form)
    log = logging.Logger("limpet.test")
    log.addHandler(handler)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("%s", text, extra={"place": text})
    return lines.getvalue()


def test_sentences_about_keys_stay_as_they_are() -> None:
    """What has no value is no credential."""
    for text in (
        "key: expected a str, found 1", "record type Price has key=('sku',)", "http://h.test:8080/a@b?x=1", "a 'key', 'token' or 'sku'",
        "http://h.test/?key=", "no auth: a page", "mark orders: 2026-12-01 00:30", "call://serp.ranks+07/{\"keyword\":\"tea\"}",
    ):  # fmt: skip
        assert hidden(text) == text


@given(st.text(st.sampled_from("?&#;=:@/'\"{} aké*\\\n") | st.characters(), max_size=200))
def test_hiding_never_raises_and_twice_is_once(text: str) -> None:
    """Whatever a site says."""
    assert hidden(hidden(text)) == hidden(text)


@given(st.sampled_from(sorted(WORDS)), st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=40))
def test_a_value_is_hidden_whole(name: str, value: str) -> None:
    """However long it is."""
    assert hidden(f"http://h.test/?a=1&{name}={value} answered 500") == f"http://h.test/?a=1&{name}={HIDDEN} answered 500"
    assert hidden_value(name, value) == HIDDEN


# -- parameters of a command ----------------------------------------------------------------------


def asked(*words: str) -> argparse.Namespace:
    """The arguments of a call."""
    return parser().parse_args(list(words))


def test_a_command_that_is_shown_has_no_credentials() -> None:
    """`limpet schedule` prints it, and its output is kept as a log."""
    db = f"postgresql://me:{SECRET}@db.test/prices"
    args = asked(
        "schedule", "prices.py", "--db", db, "--param", f"api_key={SECRET}", "--param", f"token={BY_NAME}TOKEN", "--param", "keywords=a"
    )
    told = backfill_command(args, "2026-11-30", "2026-12-01")
    assert SECRET not in told
    assert told.endswith(
        f"--db 'postgresql://me:{HIDDEN}@db.test/prices' --param 'api_key={HIDDEN}' --param token={BY_NAME}TOKEN --param keywords=a"
    )


def test_a_value_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is needed; the message names a variable that is not there, and no value."""
    args = asked("run", "prices.py", "--param", f"api_key={BY_NAME}PRICES_KEY", "--param", "city=Oslo")
    with pytest.raises(UsageError, match="PRICES_KEY"):
        params_of(args)
    monkeypatch.setenv("PRICES_KEY", SECRET)
    assert params_of(args) == {"api_key": SECRET, "city": "Oslo"}
    assert shown(args) == ["--param", f"api_key={BY_NAME}PRICES_KEY", "--param", "city=Oslo"]


def test_another_process_is_told_parameters_by_the_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line shows none; what a handler starts there is told nothing."""
    crew = crew_of(asked("run", "prices.py", "--workers", "2", "--slot", "a", "--param", f"key={SECRET}"), Settings(), "x.db")
    assert SECRET not in " ".join(crew.command)
    worker = parser().parse_args([*crew.command[3:]])
    monkeypatch.setenv(PASSED_ON, crew.environment[PASSED_ON])
    assert params_of(worker) == params_of(worker) == {"key": SECRET}
    assert params_of(asked("worker", "prices.py")) == {}


def test_a_parameter_that_is_wrong_is_named_without_its_value(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the parser nor of what another process has passed on."""
    for word in (f"api-key={SECRET}", f"key={SECRET}\x01"):
        with pytest.raises(SystemExit):
            asked("run", "prices.py", "--param", word)
    assert SECRET not in "".join(capsys.readouterr())
    monkeypatch.setenv(PASSED_ON, json.dumps([SECRET]))
    with pytest.raises(UsageError) as error:
        params_of(asked("run", "prices.py"))
    assert SECRET not in str(error.value)
