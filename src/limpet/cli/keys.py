"""`limpet explain --key`: a filter from URLs, or JSON lines, to key texts.

    http://Example.com/a/                                              -> http://example.com/a
    {"input": "?b=1", "base": "http://e.test/", "options": {...}}      -> http://e.test/?b=1

One line out for each line in. What is rejected gives an empty line, or null with --json, and its reason on stderr.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from limpet.cli import database
from limpet.cli.exits import Exit
from limpet.cli.printing import note
from limpet.cli.spool import stdin
from limpet.errors import UrlRejected, UsageError
from limpet.url import OPTIONS, KeyProfile, canonicalise, href

#: What is neither a profile nor an option: the parser alone, as browsers have it.
WHATWG = "whatwg-href"
#: Short names of options.
_SHORT = {"slash": "strip_slash", "sort": "sort_query"}
_SWITCH = {"on": True, "off": False, "true": True, "false": False, "1": True, "0": False, True: True, False: False}


def keys(args: argparse.Namespace) -> int:
    """Print the key text of each URL, a line for a line: empty, or null, where one is rejected."""
    default = profile_of(args.profile or "standard", args.option)
    if args.profile is None and not args.option and args.db:
        with database.read(args) as store:
            default = database.job_of(store, args).profile
    for ask in _asked(args, default):
        try:
            key = ask.key()
        except UrlRejected as rejected:
            note(f"rejected ({rejected.reason}): {rejected}")
            print("null" if args.json else "", flush=True)
        else:
            print(json.dumps(key) if args.json else key, flush=True)
    return Exit.COMPLETE


@dataclass(frozen=True, slots=True)
class Ask:
    """One question of a filter."""

    input: str
    profile: KeyProfile | None  # None: the parser alone
    base: str | None = None
    charset: str = "utf-8"

    def key(self) -> str:
        """The key text. Raises UrlRejected."""
        if self.profile is None:
            return href(self.input, base=self.base, charset=self.charset)
        return canonicalise(self.input, self.profile, base=self.base, charset=self.charset).text


def _asked(args: argparse.Namespace, default: KeyProfile | None) -> Iterator[Ask]:
    if args.urls:
        yield from (Ask(url, default, args.base) for url in args.urls)
        return
    for number, raw in enumerate(stdin(), 1):
        line = raw.decode("utf-8", "surrogateescape").removesuffix("\n")
        if line.lstrip()[:1] not in ("{", '"'):
            yield Ask(line, default, args.base)
            continue
        try:
            yield _from_json(json.loads(line), default, args.base)
        except json.JSONDecodeError as error:
            raise UsageError(f"line {number}: no JSON: {error}") from error
        except (UsageError, RecursionError) as error:
            raise UsageError(f"line {number}: {error}") from error


def _from_json(value: object, default: KeyProfile | None, base: str | None) -> Ask:
    if isinstance(value, str):
        return Ask(value, default, base)
    if not isinstance(value, dict) or not isinstance(value.get("input"), str):
        raise UsageError("expected a JSON object with input, and perhaps base, charset, profile and options")
    named, options = value.get("profile"), value.get("options") or {}
    if named is not None or options:
        default = profile_of(named or "standard", options)
    theirs = value.get("base", base)
    if not isinstance(theirs, str | None) or not isinstance(value.get("charset", "utf-8"), str):
        raise UsageError("base and charset are texts")
    return Ask(value["input"], default, theirs, value.get("charset", "utf-8"))


def profile_of(name: object, options: object = ()) -> KeyProfile | None:
    """A profile by its name, perhaps with options behind it, and further options; None for the parser alone.

    >>> profile_of("limpet-standard+strip_www=on").to_json()
    '{"name":"standard","options":{"strip_www":true},"rules":[],"version":1}'
    """
    if not isinstance(name, str):
        raise UsageError(f"profile {name!r}: expected exact, standard or aggressive")
    base, *more = name.split("+")
    if base == WHATWG:
        return None
    switches = dict([*_switches(more), *_switches(options)])
    return KeyProfile.of(base.removeprefix("limpet-"), rules=(), **switches)


def _switches(options: object) -> Iterator[tuple[str, bool]]:
    """Options as they are written: {"strip_www": true}, {"strip_www": "on"} or ["strip_www=on"]."""
    if isinstance(options, Mapping):
        pairs: Iterable[tuple[object, object]] = options.items()
    elif isinstance(options, (list, tuple)):
        pairs = [(name, value if mark else True) for name, mark, value in (str(option).partition("=") for option in options)]
    else:
        raise UsageError(f"options {options!r}: expected an object of names, each true or false")
    for name, value in pairs:
        word = value.lower() if isinstance(value, str) else value
        if not isinstance(word, (str, bool)) or word not in _SWITCH:
            raise UsageError(f"option {name} is {value!r}; expected on or off")
        if _SHORT.get(str(name), str(name)) not in OPTIONS:
            raise UsageError(f"key option {name!r} is unknown; there are {', '.join(OPTIONS)}")
        yield _SHORT.get(str(name), str(name)), _SWITCH[word]
