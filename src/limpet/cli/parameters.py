"""Values for `spider.params`: from --param, from the process that started this one, from the environment.

`--param key=@ENV:NAME` takes the value from the environment when it is needed, so the secret itself stands on no command line.
Processes that a command starts are told all of them by the environment too, which `ps` does not show to others.
"""

from __future__ import annotations

import argparse
import json
import os

from limpet.cli.configuration import PREFIX
from limpet.credentials import hidden_value
from limpet.errors import UsageError

#: Environment variable that tells a process the parameters of the one that started it, as JSON.
PASSED_ON = f"{PREFIX}PARAMS"
#: A value that begins so is that of an environment variable.
BY_NAME = "@ENV:"


def params_of(args: argparse.Namespace) -> dict[str, str]:
    """The parameters of a command. UsageError for a variable that the environment does not have."""
    return {name: _value(name, value) for name, value in given(args)}


def given(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The parameters as they were given; what the process that started this one has passed on is read once, and passed on to nobody."""
    if (text := os.environ.pop(PASSED_ON, "")) and hasattr(args, "param"):
        args.param = [*_read(text), *args.param]
    return list(getattr(args, "param", ()))


def passed_on(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """What tells another process parameters."""
    return {PASSED_ON: json.dumps(dict(pairs))} if pairs else {}


def shown(args: argparse.Namespace) -> list[str]:
    """The flags that give the same parameters, as they may be shown: a secret only by the name of its variable."""
    words: list[str] = []
    for name, value in given(args):
        words += ["--param", f"{name}={value if value.startswith(BY_NAME) else hidden_value(name, value)}"]
    return words


def _value(name: str, value: str) -> str:
    if not value.startswith(BY_NAME):
        return value
    variable = value.removeprefix(BY_NAME)
    if variable not in os.environ:
        raise UsageError(f"--param {name}={value}: the environment has no {variable!r}")
    return os.environ[variable]


def _read(text: str) -> list[tuple[str, str]]:
    try:
        return [(str(name), str(value)) for name, value in json.loads(text).items()]
    except (ValueError, AttributeError):  # what it says may be a secret
        raise UsageError(f"{PASSED_ON} is set by limpet for processes that it starts: expected JSON") from None
