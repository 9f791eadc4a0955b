"""Which value each setting has, and where it came from.

Flags win over environment (`LIMPET_DELAY_S=2`), environment over `limpet.toml` (`[spider.NAME]` over
`[limpet]`), that over the spider, and that over the table in `settings.py`. Every name and every
value is checked here, wherever it came from, and the message names the place and the nearest name.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from limpet.engine.channels import scheme_of
from limpet.errors import UsageError
from limpet.settings import SHARDS_MAX, Settings, documented
from limpet.store.dialect import public_dsn

#: Looked for in the folder that the command is given in.
FILE_NAME = "limpet.toml"
#: Environment variables of settings begin so.
PREFIX = "LIMPET_"
#: What limpet.toml and the environment may hold besides settings.
EXTRAS = {
    "db": "address of the database: sqlite:///file.db, or a path",
    "user_agent": "who asks, and where to complain: shopbot/1 (+https://example.com/bot)",
    "alerts": "addresses of people to be told, a list; in the environment with spaces between; only their schemes are ever shown",
}
#: Holds secrets: neither its value nor what is wrong with it is ever shown.
SECRET = "alerts"
#: Environment variables that are read elsewhere.
_OTHERS = frozenset({"config", "debug", "failpoint", "failpoint_log", "failpoint_gate", "shared", "crew", "params"})
#: A variable this close to a setting's name is a slip of the pen.
_SIMILAR = 0.85

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

#: The least and the most that makes sense; whatever is not named here begins at 0.
_LEAST: dict[str, float] = {
    "concurrency": 1, "commit_pages": 1, "commit_ms": 1, "commit_bytes": 1, "commit_pages_first": 1, "commit_ms_first": 1,
    "strikes": 1, "suspect_after": 1, "solo_losses": 1, "throttles": 1, "breaker": 1,
    "connect_timeout_s": 0.001, "read_timeout_s": 0.001, "total_timeout_s": 0.001, "handler_timeout_s": 0.001,
    "body_bytes_max": 1, "record_bytes_max": 1, "url_bytes_max": 16, "lease_s": 0.1, "max_depth": -1,
}  # fmt: skip
_MOST: dict[str, float] = {
    "concurrency": 10_000, "per_host": 10_000, "shards": SHARDS_MAX, "commit_pages": 1_000_000, "url_bytes_max": 2**16,
    "body_bytes_max": 2**30, "record_bytes_max": 2**28, "lease_s": 86_400, "hops_max": 1000,
}  # fmt: skip
_FOREVER = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class File:
    """A limpet.toml: its place, and its tables, checked."""

    path: str = ""
    everywhere: Mapping[str, object] = field(default_factory=dict)
    spiders: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of one command, and for each the place that it came from."""

    settings: Settings
    origins: Mapping[str, str]
    extras: Mapping[str, str]  # db, user_agent, alerts (with line ends between); "" where nobody says

    @property
    def alerts(self) -> list[str]:
        """The addresses of people to be told."""
        return self.extras[SECRET].split()

    def rows(self) -> list[tuple[str, object, str, str]]:
        """(name, value, origin, what it means), in the order of the table."""
        known = documented()
        settings = [(name, getattr(self.settings, name), self.origins[name], known[name][1]) for name in known]
        return [*settings, *((name, self._shown(name), self.origins[name], EXTRAS[name]) for name in EXTRAS)]

    def _shown(self, name: str) -> str:
        if name == "db":
            return public_dsn(self.extras[name])
        return ", ".join(f"{scheme_of(address) or '?'}://***" for address in self.alerts) if name == SECRET else self.extras[name]


def flag_of(name: str) -> str:
    """The flag of a setting; seconds are not said.

    >>> flag_of("delay_s"), flag_of("max_pages"), flag_of("solo_backoff_s")
    ('--delay', '--max-pages', '--solo-backoff')
    """
    return "--" + name.removesuffix("_s").replace("_", "-")


def resolve(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: File,
    *,
    spider: str = "",
    own: Mapping[str, object] | None = None,
) -> Resolved:
    """Every setting by the order of the module's first lines. `own`: what the spider itself says.

    Raises UsageError, naming the place, for a value of another type or out of its range.
    """
    places: list[tuple[str, Mapping[str, object]]] = [
        ("spider", own or {}),
        (f"{file.path} [limpet]", file.everywhere),
        (f"{file.path} [spider.{spider}]", file.spiders.get(spider, {})),
        ("environment", of_environment(environment)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {name: default for name, (default, _) in documented().items()}
    values |= dict.fromkeys(EXTRAS, "")
    origins = dict.fromkeys(values, "default")
    for place, given in places:
        for name, value in given.items():
            if name not in values or (place == "spider" and value == ""):
                continue
            shown = f"{PREFIX}{name.upper()}" if place == "environment" else f"flag {flag_of(name)}" if place == "flag" else place
            values[name] = checked(name, value, shown)
            origins[name] = shown
    extras = {name: values.pop(name) for name in EXTRAS}
    return Resolved(Settings(**values), origins, extras)


def of_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """The settings among the environment's variables. UsageError for one that is nearly the name of a setting."""
    known = documented()
    found: dict[str, object] = {}
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in _OTHERS:
            continue
        if name in EXTRAS:
            found[name] = text
        elif name in known:
            found[name] = parsed(name, text, variable)
        elif near := get_close_matches(name, [*known, *EXTRAS], 1, _SIMILAR):
            raise UsageError(f"the environment has {variable}, which is no setting: did you mean {PREFIX}{near[0].upper()}?")
    return found


def read_file(path: str | None, folder: str = ".") -> File:
    """The named file, or the limpet.toml of the folder where there is one.

    Raises UsageError for a file that cannot be read, is no TOML, or holds a name that is no setting.
    """
    place = Path(path) if path else Path(folder) / FILE_NAME
    if not path and not place.is_file():
        return File()
    shown = path or FILE_NAME
    try:
        tables = tomllib.loads(place.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{shown}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{shown} is no TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{shown}: lists or tables in it are nested too deeply; settings are no lists of lists") from error
    for name in tables:
        if name not in ("limpet", "spider"):
            near = _like(name, ("limpet", "spider"))
            raise UsageError(f"{shown}: unknown {name!r}; settings stand below [limpet] or [spider.NAME]{near}")
    spiders = tables.get("spider", {})
    if not isinstance(spiders, dict):
        raise UsageError(f"{shown}: spider is {spiders!r}; expected tables [spider.NAME]")
    everywhere = _table(f"{shown} [limpet]", tables.get("limpet", {}))
    return File(shown, everywhere, {name: _table(f"{shown} [spider.{name}]", table) for name, table in spiders.items()})


def _table(where: str, table: object) -> dict[str, object]:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is {table!r}; expected a table of settings")
    known = [*documented(), *EXTRAS]
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{where}: unknown setting {name!r}{_like(name, known)}")
        checked(name, value, where)
    return table


def _like(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1, 0.4)
    return f"; did you mean {near[0]!r}?" if near else ""


def parsed(name: str, text: str, where: str) -> object:
    """The value of a setting that was written as text; UsageError where it is none of its type."""
    default = documented()[name][0]
    try:
        if isinstance(default, bool):
            return _WORDS[text.strip().lower()]
        if isinstance(default, int):
            return int(text)
        if isinstance(default, tuple):
            return tuple(float(piece) for piece in text.split(",") if piece.strip())
        return float(text)
    except (ValueError, KeyError) as error:
        raise UsageError(f"{where}: {text!r} is no value of {name}: expected {_kind(default)}") from error


def checked(name: str, value: object, where: str) -> object:
    """The value of a setting, whole numbers as floats where floats are meant. UsageError for a wrong type or range."""
    if name == SECRET:
        return _addresses(value, where)
    if name in EXTRAS:
        if not isinstance(value, str) or any(ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise UsageError(f"{where}: {name} is {value!r}; expected a line of text")
        return value
    default = documented()[name][0]
    fits = (int, float) if isinstance(default, float) else (list, tuple) if isinstance(default, tuple) else type(default)
    if not isinstance(value, fits) or (isinstance(value, bool) and not isinstance(default, bool)):
        raise UsageError(f"{where}: {name} is {value!r}; expected {_kind(default)}")
    if isinstance(value, (list, tuple)):
        return tuple(_in_range(name, float(_number(name, each, where)), where) for each in value)
    if isinstance(value, bool):
        return value
    number = _in_range(name, value, where)  # type: ignore[arg-type]
    return float(number) if isinstance(default, float) else number


def _addresses(value: object, where: str) -> str:
    """Addresses of people, given as a list or as text, with line ends between them; what is wrong is said without them."""
    given = value.split() if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
        raise UsageError(f'{where}: {SECRET} is no list of addresses; expected such as ["mailto://...", "dingtalk://..."]')
    for number, address in enumerate(given, 1):
        if not scheme_of(address) or not address.isprintable() or " " in address:
            raise UsageError(f"{where}: {SECRET}: address {number} is none: expected scheme://..., without spaces")
    return "\n".join(given)


def _number(name: str, value: object, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{where}: {name} holds {value!r}; expected numbers")
    return value


def _in_range(name: str, value: int | float, where: str) -> int | float:
    if name in ("delay_s", "budget", "budget_day") and value == -1:
        return value  # 1, or 0 on loopback
    least = _LEAST.get(name, 0)
    most = _MOST.get(name, _FOREVER if name.endswith(("_s", "_hours")) else 2**53)
    if name in ("budget", "budget_day") and value == math.inf:
        return value
    if not math.isfinite(value) or not least <= value <= most:
        raise UsageError(f"{where}: {name} is {value}; expected {least:g} to {most:g}")
    return value


def _kind(default: object) -> str:
    kinds = {bool: "true or false", int: "a whole number", float: "a number", tuple: "numbers with commas between them"}
    return kinds[type(default)]
