"""The URL key: which two URLs are one page, decided by one function.

Two texts come out of one URL, never one: `request_url` is what was found, as a browser would send it;
`text` is the canonical form, only ever compared, stored and digested. Nothing is requested by its key.
The parser is WHATWG's (ada-url); what follows it is a list of named steps, `STEPS`, and a `KeyProfile`
says which of them run. When unsure, a step does not merge: a false split costs one request, a false
merge loses a page.

Laws: the key of a key is itself; the key of `request_url` is the key of what was found; only UrlRejected
ever leaves; no byte is replaced by U+FFFD; the same version gives the same key for ever. So a version
in `url_tables.py` is never edited: a change is a new number beside it. Which links are followed is `scope.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, NewType, TypeVar

import ada_url

from limpet.errors import UrlRejected, UsageError
from limpet.url_tables import (
    PROFILES,
    SITE_PARAMETERS,
    STEPS,
    Parts,
    Pass,
    host_glob,
    host_pattern,
    normalise_percent,
    scheme_of,
    trimmed,
    with_query_in,
    without_www,
)

CanonicalUrl = NewType("CanonicalUrl", str)
Made = TypeVar("Made")

#: The version of the steps that a new job takes; stored in its profile.
KEY_VERSION = 1
#: Longest URL in bytes, as found, as requested and as key: servers refuse earlier, and traps grow without end.
URL_BYTES_MAX = 8192
#: 128 bits: at 10^9 keys the chance of one collision is 10^-21.
KEY_BYTES = 16
#: Characters of a URL that a message repeats.
SHOWN_CHARS_MAX = 200
#: URLs that a KeyCache remembers: about 15 MB of links at the usual 100 characters.
MEMO_ENTRIES_MAX = 16_384
#: Longest base and link, in characters together, that it remembers, so that its memory has a bound.
MEMO_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Canonical:
    """A URL in its two forms. All but `request_url` is canonical and free of credentials."""

    text: CanonicalUrl  # the key text of a plain GET
    request_url: str = field(repr=False)  # what to request; keeps user and password, so it stays out of logs
    authority: str  # host, or host:port where the port is not the default one
    scheme: str  # http or https
    path: str  # begins with a slash
    key: bytes  # digest16(text)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of `explain`: a step's name and the text after it."""

    name: str
    text: str


def canonicalise(
    url: str,
    profile: KeyProfile,
    *,
    base: str | None = None,
    charset: str = "utf-8",
    bytes_max: int = URL_BYTES_MAX,
) -> Canonical:
    """The canonical form of `url`, as it was found on a page in `charset` at `base`.

    Raises UrlRejected with reason `not_a_url` (relative, and nothing to resolve it against), `scheme` (neither
    http nor https), `host` (no valid host and port), `surrogate` (not text) or `too_long`.

    >>> canonicalise("HTTP://Example.com:80/%7euser/?b=1&a=2#top", KeyProfile()).text
    'http://example.com/~user?a=2&b=1'
    """
    if len(url) > bytes_max or (not url.isascii() and len(url.encode("utf-8", "surrogatepass")) > bytes_max):
        raise UrlRejected(f"URL is longer than {bytes_max} bytes: {shown(url)}", reason="too_long")
    whole = _requestable(url, base, charset)
    parts = Parts(whole)
    for step in profile.steps_for(parts):
        step.run(parts)
    text = parts.text()
    # A client never sends a fragment. It stays where it tells pages apart: else the key of `request_url`
    # would be another one.
    request_url = whole if parts.fragment else whole.partition("#")[0]
    if len(request_url) > bytes_max or len(text) > bytes_max:
        raise UrlRejected(f"URL is longer than {bytes_max} bytes when written out: {shown(url)}", reason="too_long")
    return Canonical(CanonicalUrl(text), request_url, parts.host + parts.port, parts.scheme, parts.path, digest16(text))


def explain(url: str, profile: KeyProfile, *, base: str | None = None, charset: str = "utf-8") -> list[Step]:
    """Each step that runs for `url`, in order, with the text after it; credentials are shown as `***`.

    >>> [f"{step.name}: {step.text}" for step in explain("http://e.test/a/?x", KeyProfile())][-2:]
    ['drop_empty_pairs: http://e.test/a?x', 'sort_query: http://e.test/a?x']
    """
    parts = Parts(_requestable(url, base, charset))
    story = [Step("parse", parts.text())]
    for step in profile.steps_for(parts):
        step.run(parts)
        story.append(Step(step.name, parts.text()))
    return story


def _requestable(url: str, base: str | None, charset: str) -> str:
    whole = href(url, base=base, charset=charset)
    if not whole.startswith(("http://", "https://")):
        raise UrlRejected(f"only http and https can be requested: {shown(url)}", reason="scheme")
    return whole


def href(url: str, *, base: str | None = None, charset: str = "utf-8") -> str:
    """What a browser makes of `url`: the WHATWG serialisation, of any scheme, fragment and credentials included.

    `charset` is that of the page on which `url` was found: the query is written in it. Raises UrlRejected.

    >>> href("../c d?q=\u00e9", base="http://e.test/a/b", charset="windows-1252")
    'http://e.test/c%20d?q=%E9'
    """
    try:
        if charset != "utf-8" and not url.isascii():
            url = with_query_in(charset, url, base or "")
        return ada_url.normalize_url(url) if base is None else ada_url.join_url(base, url)
    except ValueError:
        raise _rejection(url, base) from None


def _rejection(url: str, base: str | None) -> UrlRejected:
    """Why the parser refused: it does not say, so this looks again, off the hot path."""
    for text in (url, base or ""):
        if text.encode("utf-8", "replace") != text.encode("utf-8", "surrogatepass"):
            return UrlRejected(f"URL holds a lone surrogate, so it is no text: {shown(text)}", reason="surrogate")
    if base is not None and not ada_url.check_url(base):
        return UrlRejected(f"the base is no URL: {shown(base)}", reason="not_a_url")
    scheme = scheme_of(trimmed(url))
    if not scheme and base is None:
        return UrlRejected(f"a relative URL, and no base to resolve it against: {shown(url)}", reason="not_a_url")
    if scheme not in {"", "http", "https"}:
        return UrlRejected(f"only http and https can be requested: {shown(url)}", reason="scheme")
    return UrlRejected(f"no valid host and port: {shown(url)}", reason="host")


def shown(url: str) -> str:
    """`url` as a message or log may repeat it: quoted, cut, and without user and password."""
    bare = re.sub(r"(?<=[/\\:])[^/\\?#]*@", "***@", url[: 2 * SHOWN_CHARS_MAX])
    return ascii(bare if len(bare) <= SHOWN_CHARS_MAX else bare[:SHOWN_CHARS_MAX] + "...")


@dataclass(frozen=True, slots=True)
class SiteRule:
    """What one site needs otherwise: options that differ there, and parameters dropped or kept.

    `host` is a pattern with `*`; `*.e.test` covers e.test too, and a leading `www.` never matters. `keep`
    leaves only the parameters it names, `drop` all but those; a name may end in `*`, and is compared as a URL
    writes it: `x[]` is `x%5B%5D`.
    """

    host: str
    options: tuple[tuple[str, bool], ...] = ()
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    _host: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.drop and self.keep:
            raise UsageError(f"a rule for {self.host!r} both drops and keeps parameters: choose one")
        _fill(self, "options", tuple(sorted(dict(self.options).items())))
        _fill(self, "drop", tuple(sorted({_as_written(name) for name in self.drop})))
        _fill(self, "keep", tuple(sorted({_as_written(name) for name in self.keep})))
        _fill(self, "host", without_www(host_pattern(self.host)))
        _fill(self, "_host", host_glob(self.host))

    @classmethod
    def of(cls, host: str, *, drop: str | Iterable[str] = (), keep: str | Iterable[str] = (), **options: bool) -> SiteRule:
        """A rule with its options by keyword.

        >>> SiteRule.of("*.shop.test", drop=["sid"], strip_slash=False).options
        (('strip_slash', False),)
        """
        return cls(host, tuple(options.items()), _names(drop), _names(keep))

    def covers(self, host: str) -> bool:
        """Whether the rule holds for a host; the same for the host of a URL and for that of its key."""
        return self._host.fullmatch(without_www(host.removesuffix("."))) is not None

    def keeps(self, name: str) -> bool:
        """Whether a parameter of this name stays."""
        if self.keep:
            return _is_named(name, self.keep)
        return not _is_named(name, self.drop)


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name == p or (p[-1:] == "*" and name.startswith(p[:-1])) for p in patterns)


def _as_written(name: str) -> str:
    """The name of a parameter as the steps meet it: parsed and percent-normalised."""
    parts = Parts(href("http://h/?" + name))
    normalise_percent(parts)
    return parts.query[1:]


def _fill(frozen: object, name: str, value: object) -> None:
    """Set a field of a frozen value while it is made."""
    object.__setattr__(frozen, name, value)


@dataclass(frozen=True, slots=True)
class KeyProfile:
    """Which steps run: a named profile with options that differ from it, rules per site, and the version.

    Each option is the step of that name in `url_tables.py`. A profile is stored with its job, as JSON.
    """

    name: str = "standard"  # exact | standard | aggressive
    sort_query: bool = True
    strip_slash: bool = True
    merge_scheme: bool = False
    strip_www: bool = False
    strip_tracking: bool = False
    strip_session: bool = False
    collapse_slashes: bool = False
    keep_fragment: bool = False
    dedupe_pairs: bool = False
    sort_values: bool = False
    blank_value_equals_absent: bool = False
    plus_is_space: bool = False
    rules: tuple[SiteRule, ...] = ()
    version: int = KEY_VERSION
    _steps: tuple[Pass, ...] = field(init=False, repr=False, compare=False)
    _steps_by_rule: tuple[tuple[Pass, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        options_of(self.name, self.version)
        mine = {name: getattr(self, name) for name in OPTIONS}
        _check_options(mine)
        _fill(self, "_steps", _enabled(self.version, mine))
        per_rule = []
        for rule in self.rules:
            _check_options(dict(rule.options))
            theirs = mine | dict(rule.options) | {SITE_PARAMETERS: bool(rule.drop or rule.keep)}
            per_rule.append(_enabled(self.version, theirs))
        _fill(self, "_steps_by_rule", tuple(per_rule))

    @classmethod
    def of(cls, name: str = "standard", *, rules: Iterable[SiteRule] = (), version: int = KEY_VERSION, **options: bool) -> KeyProfile:
        """The named profile, with options that differ from it. UsageError names what is unknown.

        >>> KeyProfile.of("exact", strip_www=True).to_json()
        '{"name":"exact","options":{"strip_www":true},"rules":[],"version":1}'
        """
        _check_options(options)
        return cls(name=name, rules=tuple(rules), version=version, **(options_of(name, version) | options))

    def steps_for(self, parts: Parts) -> tuple[Pass, ...]:
        """The steps for a URL; the first rule that covers its host holds."""
        if not self.rules:  # the usual case, and a loop over nothing costs 0.6 us
            return self._steps
        for rule, steps in zip(self.rules, self._steps_by_rule, strict=True):
            if rule.covers(parts.host):
                parts.is_kept = rule.keeps
                return steps
        return self._steps

    def to_json(self) -> str:
        """The one text of this profile. It holds only what differs from the named profile, so that a later
        option, off in every profile of this version, changes no stored text.
        """
        named = options_of(self.name, self.version)
        rules = [{"host": r.host, "options": dict(r.options), "drop": r.drop, "keep": r.keep} for r in self.rules]
        differ = {option: getattr(self, option) for option in OPTIONS if getattr(self, option) != named[option]}
        return json.dumps(
            {"name": self.name, "options": differ, "rules": rules, "version": self.version},
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str) -> KeyProfile:
        """The profile that `to_json` wrote. UsageError where it is none, or one of a later version."""
        try:
            value = json.loads(text)
            rules = [SiteRule.of(r["host"], drop=r["drop"], keep=r["keep"], **r["options"]) for r in value["rules"]]
            return cls.of(value["name"], rules=rules, version=value["version"], **value["options"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"not the JSON of a key profile: {text[:SHOWN_CHARS_MAX]!r}") from error

    def digest(self) -> bytes:
        """16 bytes of `to_json`: profiles with one digest make the same keys."""
        return digest16(self.to_json())


#: Every option of a profile, in the order of the alphabet.
OPTIONS = tuple(sorted({p.when or p.unless for steps in STEPS.values() for p in steps} - {"", SITE_PARAMETERS}))


def options_of(name: str, version: int = KEY_VERSION) -> dict[str, bool]:
    """Each option as the named profile has it. UsageError for an unknown name or version."""
    if version not in STEPS or version is True:
        known = ", ".join(map(str, STEPS))
        raise UsageError(f"key version {version!r} is unknown; this Limpet knows {known}: upgrade it")
    if name not in PROFILES[version]:
        raise UsageError(f"key profile {name!r} is unknown; there are {', '.join(PROFILES[version])}")
    return {option: option in PROFILES[version][name] for option in OPTIONS}


def _check_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            raise UsageError(f"key option {name!r} is unknown; there are {', '.join(OPTIONS)}")
        if not isinstance(value, bool):
            raise UsageError(f"key option {name} is on or off, not {value!r}")


def _enabled(version: int, options: Mapping[str, bool]) -> tuple[Pass, ...]:
    return tuple(p for p in STEPS[version] if options.get(p.when, not p.when) and not options.get(p.unless, False))


def digest16(text: str) -> bytes:
    """16 bytes of BLAKE2b (RFC 7693): a hostile site can make a fast hash collide, and hide a page by it."""
    return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def key_text(text: str, method: str = "GET", body: bytes = b"") -> str:
    """The key text of a request to the canonical `text`: that itself for a plain GET, else with method and body.

    A URL holds no space, so no two requests share a text.

    >>> key_text("http://e.test/"), key_text("http://e.test/", "head")
    ('http://e.test/', 'HEAD http://e.test/ -')
    """
    method = method.upper()
    if method == "GET" and not body:
        return text
    return f"{method} {text} {blake2b(body, digest_size=KEY_BYTES).hexdigest() if body else '-'}"


def authority_of(text: str) -> str:
    """The authority in a key text, which may begin with a method.

    >>> authority_of("POST http://e.test:81/a 1f"), authority_of("call://serp.ranks+07/{}")
    ('e.test:81', 'serp.ranks+07')
    """
    return text.partition("://")[2].partition("/")[0]


def host_id(authority: str) -> int:
    """A host as a signed 64-bit integer, which every database can hold and index."""
    return int.from_bytes(blake2b(authority.encode(), digest_size=8).digest(), "big", signed=True)


def shard_of(authority: str, shards: int) -> int:
    """The shard of a host's tasks, 0 to `shards` - 1: a function of the canonical text alone, so that pages of
    one host share a shard, and every worker and every release finds the same one.
    """
    return host_id(authority) % shards


class Place:
    """Where the links of a page stand: of its base, no more than decides on what a link means.

    Nothing for an absolute URL, the origin for `/a`, the folder for `a`, all of it for `?a`.
    """

    __slots__ = ("_folder", "_nowhere", "_origin", "_whole", "base", "charset")

    def __init__(self, base: str | None, charset: str = "utf-8") -> None:
        self.base = base
        self.charset = charset
        self._nowhere = self._origin = self._folder = self._whole = ""
        if base is None:
            return
        try:
            whole = href(base).partition("#")[0]
        except UrlRejected:  # on a broken base every link is rejected, an absolute one too
            self._nowhere = self._origin = self._folder = self._whole = f"broken {base}"
            return
        self._origin = self._folder = self._whole = whole
        if whole.startswith(("http://", "https://")):
            path_at = whole.index("/", len("https://"))
            self._origin = whole[:path_at]
            self._folder = whole[: whole.partition("?")[0].rindex("/") + 1]

    def of(self, url: str) -> str:
        """The part of the base, and of its charset, on which this link depends."""
        first = url[:1]
        if first == "/":
            place = self._origin
        elif url.startswith(("https://", "http://")):
            place = self._nowhere
        else:
            # A blank goes before the parser looks, so it can hide a `?`; so can a scheme (`http:?a` is `?a`).
            place = self._whole if first <= " " or first in "?#" or ":" in url else self._folder
        return place if self.charset == "utf-8" or url.isascii() else f"{self.charset} {place}"


class KeyCache(Generic[Made]):
    """A bounded memo from (where a link stands, link) to what is made of its canonical form: menus repeat on every page.

    Two generations: the older one is dropped whole when the younger is full, and what is asked for again
    moves to the younger. It is a memo of a pure function, so losing it changes no key, and threads may
    share it: at worst two of them make the same thing.
    """

    def __init__(
        self,
        profile: KeyProfile,
        make: Callable[[Canonical], Made],
        *,
        bytes_max: int = URL_BYTES_MAX,
        entries_max: int = MEMO_ENTRIES_MAX,
    ) -> None:
        self.profile = profile
        self._make = make
        self._bytes_max = bytes_max
        self._generation_max = max(1, entries_max // 2)
        self._young: dict[tuple[str, str], Made | UrlRejected] = {}
        self._old: dict[tuple[str, str], Made | UrlRejected] = {}

    def at(self, place: Place, url: str) -> Made:
        """What is made of a link at a place, at a tenth of the price where it is known. Raises UrlRejected."""
        stands = (place.of(url), url)
        found = self._young.get(stands) or self._recalled(stands, place)
        if isinstance(found, UrlRejected):
            raise UrlRejected(*found.args, reason=found.reason)  # a new one: a raised one gathers tracebacks
        return found

    def __len__(self) -> int:
        """The number of URLs remembered, in both generations; at most `entries_max`."""
        return len(self._young) + len(self._old)

    def _recalled(self, stands: tuple[str, str], place: Place) -> Made | UrlRejected:
        """What the older generation knows, else made anew; remembered in the younger unless it is long."""
        found = self._old.get(stands)
        if found is None:
            try:
                found = self._make(canonicalise(stands[1], self.profile, base=place.base, charset=place.charset, bytes_max=self._bytes_max))
            except UrlRejected as rejected:
                found = UrlRejected(*rejected.args, reason=rejected.reason)
        if len(stands[0]) + len(stands[1]) <= MEMO_CHARS_MAX:
            if len(self._young) >= self._generation_max:
                self._old, self._young = self._young, {}
            self._young[stands] = found
        return found
