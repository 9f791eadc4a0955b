"""What the URL key is made of, by version: the steps, the profiles that name them, the tables they read.

A job that was begun under version 1 must find the same keys for ever. So a step, a profile and a
table that decide on keys carry the number of the version they belong to and are never edited
afterwards: a change is a new number, with new entries beside the old ones. What calls the steps is
`url.py`; no URL is parsed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import ada_url

from limpet.errors import UrlRejected, UsageError

#: Names of query parameters that only say where a visitor came from, in lower case. Closed on purpose:
#: `ref`, `id`, `source` and their like are content on many sites, and a false merge loses a page.
TRACKING_NAMES_1 = frozenset(
    {
        *("gclid", "gclsrc", "gbraid", "wbraid", "dclid", "fbclid", "msclkid", "yclid", "ysclid", "ttclid", "twclid"),
        *("li_fat_id", "igshid", "igsh", "mc_cid", "mc_eid", "mkt_tok", "_hsenc", "_hsmi", "__hssc", "__hstc"),
        *("__hsfp", "hsctatracking", "srsltid", "_openstat", "vero_id", "oly_enc_id", "oly_anon_id", "wickedid"),
    }
)
#: And every name that begins with this: `utm_source`, but not `utmost`.
TRACKING_PREFIX_1 = "utm_"

#: Names of query parameters that carry a session, in lower case. `sid` is not among them: on too many
#: sites it names an article or a shop. A site rule can drop it where it is one.
SESSION_NAMES_1 = frozenset({"jsessionid", "phpsessid", "cfid", "cftoken"})
#: And every name that begins with this; the rest of it is drawn at random (ASPSESSIONIDQSTRBSTC).
SESSION_PREFIX_1 = "aspsessionid"


class Parts:
    """A parsed http URL on its way through the steps, with the rule of its site where it has one.

    `port` holds its colon, `query` its question mark and `fragment` its hash, or all are empty.
    """

    __slots__ = ("fragment", "host", "is_kept", "path", "port", "query", "scheme", "userinfo")

    def __init__(self, whole: str) -> None:
        """Cut a WHATWG serialisation; four attribute reads through cffi would cost 7 us, this 1 us."""
        self.scheme, _, rest = whole.partition("://")
        rest, mark, fragment = rest.partition("#")
        self.fragment = mark + fragment if fragment else ""
        rest, mark, query = rest.partition("?")
        self.query = mark + query
        authority, mark, path = rest.partition("/")
        self.path = mark + path
        self.userinfo, _, host = authority.rpartition("@")
        self.port = ""
        if ":" in host and host[-1] != "]":
            host, _, port = host.rpartition(":")
            self.port = ":" + port
        self.host = host
        self.is_kept: Callable[[str], bool] | None = None  # by name, the parameters that the site's rule leaves

    def text(self) -> str:
        """The URL as it stands."""
        user = "***@" if self.userinfo else ""
        return f"{self.scheme}://{user}{self.host}{self.port}{self.path}{self.query}{self.fragment}"

    def pairs(self) -> list[str]:
        """The pieces of the query between its ampersands, the only separator there is."""
        return self.query[1:].split("&") if self.query else []

    def set_pairs(self, pairs: Sequence[str]) -> None:
        """Put a query together again; without a piece there is none."""
        self.query = "?" + "&".join(pairs) if pairs else ""


# -- the steps of version 1 ---------------------------------------------------------------------


def drop_userinfo(parts: Parts) -> None:
    """Credentials never belong in a key, a log or a record."""
    parts.userinfo = ""


def drop_fragment(parts: Parts) -> None:
    """The part that is never sent."""
    parts.fragment = ""


def drop_root_dot(parts: Parts) -> None:
    """`e.test.` is `e.test`. The parser drops such a dot before it looks for an IPv4 address, so what is
    left is the same host to it; with two of them no resolver knows the name, and it may not claim a key.
    """
    if parts.host[-1] == ".":
        parts.host = parts.host[:-1]
        if not parts.host or parts.host[-1] == ".":
            raise UrlRejected(f"host ends in an empty label: {parts.host!r}", reason="host")


def merge_scheme(parts: Parts) -> None:
    """http is https. Both default ports go: the answer of http://e.test:443 is that of https://e.test."""
    parts.scheme = "https"
    if parts.port in {":80", ":443"}:
        parts.port = ""


def strip_www(parts: Parts) -> None:
    """Exactly `www.`, and never down to a bare top-level domain."""
    parts.host = without_www(parts.host)


def normalise_percent(parts: Parts) -> None:
    """One pass over path, query and fragment: hex digits upper case, only unreserved characters decoded, and a
    stray `%` and what parsers disagree on encoded. A second pass finds nothing left to do.
    """
    parts.path = _PERCENT.sub(_percent, parts.path)
    if parts.query:
        parts.query = _PERCENT.sub(_percent, parts.query)
    if parts.fragment:
        parts.fragment = _PERCENT.sub(_percent, parts.fragment)


#: It begins with a set of characters, which `re` looks for at 3 times the speed of alternatives.
_PERCENT = re.compile(r'[%\[\]|^`{}\\"<> ](?:(?<=%)[0-9A-Fa-f]{2})?')
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")  # RFC 3986 section 2.3


def _percent(match: re.Match[str]) -> str:
    found = match[0]
    if len(found) == 1:
        return f"%{ord(found):02X}"
    character = chr(int(found[1:], 16))
    return character if character in _UNRESERVED else found.upper()


def plus_is_space(parts: Parts) -> None:
    """In a query `+` is the space that a form wrote, as `%20` is."""
    parts.query = parts.query.replace("+", "%20")


_PATH_SESSION = re.compile(r";jsessionid=[^;/]*", re.IGNORECASE)


def strip_session(parts: Parts) -> None:
    """`;jsessionid=` at any segment of the path, and the closed list of parameters."""
    if ";" in parts.path:
        # Never down to a dot segment: `/a/..;jsessionid=1` would climb the next time it is parsed.
        segments = parts.path.split("/")
        bare = [_PATH_SESSION.sub("", segment) for segment in segments]
        parts.path = "/".join(b if b not in {".", ".."} else s for b, s in zip(bare, segments, strict=True))
    parts.set_pairs([pair for pair in parts.pairs() if not _is_session(name_of(pair).lower())])


def _is_session(name: str) -> bool:
    return name in SESSION_NAMES_1 or name.startswith(SESSION_PREFIX_1)


def collapse_slashes(parts: Parts) -> None:
    """Several slashes in a row are one."""
    parts.path = re.sub("//+", "/", parts.path)


def strip_slash(parts: Parts) -> None:
    """All slashes at the end, but that of the root; one alone would leave `/a//` for a second run."""
    if parts.path[-1] == "/":
        parts.path = parts.path.rstrip("/") or "/"


def site_parameters(parts: Parts) -> None:
    """The parameters that the site's rule drops, or all that it does not keep."""
    if parts.is_kept is not None:
        parts.set_pairs([pair for pair in parts.pairs() if parts.is_kept(name_of(pair))])


def strip_tracking(parts: Parts) -> None:
    """The closed list of tracking parameters, whatever their case, at the top level only."""
    parts.set_pairs([pair for pair in parts.pairs() if not _is_tracking(name_of(pair).lower())])


def _is_tracking(name: str) -> bool:
    return name in TRACKING_NAMES_1 or name.startswith(TRACKING_PREFIX_1)


def blank_value_equals_absent(parts: Parts) -> None:
    """`?b=` is `?b`."""
    parts.set_pairs([pair[:-1] if pair.find("=") == len(pair) - 1 else pair for pair in parts.pairs()])


def drop_empty_pairs(parts: Parts) -> None:
    """`?` alone is none, and `?&a&&b&` is `?a&b`."""
    query = parts.query
    if query and (query[-1] in "?&" or "&&" in query or query[1] == "&"):
        parts.set_pairs([pair for pair in parts.pairs() if pair])


def sort_query(parts: Parts) -> None:
    """By name alone and stable: the order of different names carries no meaning, that of equal names does."""
    if "&" in parts.query:
        parts.set_pairs(sorted(parts.pairs(), key=name_of))


def sort_values(parts: Parts) -> None:
    """By name and then value: `?a=2&a=1` is `?a=1&a=2`."""
    parts.set_pairs(sorted(parts.pairs(), key=lambda pair: pair.partition("=")))


def dedupe_pairs(parts: Parts) -> None:
    """The first of equal pairs."""
    parts.set_pairs(list(dict.fromkeys(parts.pairs())))


def name_of(pair: str) -> str:
    """The name in a piece of a query, as it is written.

    >>> name_of("a%5B%5D=1=2")
    'a%5B%5D'
    """
    return pair.partition("=")[0]


def host_glob(pattern: str) -> re.Pattern[str]:
    """The expression for a host pattern with `*`, to be matched in full; `*.e.test` covers e.test too.

    >>> [h for h in ("e.test", "a.b.e.test", "be.test") if host_glob("*.e.test").fullmatch(h)]
    ['e.test', 'a.b.e.test']
    """
    text = host_pattern(pattern)
    below, rest = ("(?:.*[.])?", text[2:]) if text.startswith("*.") else ("", text)
    return re.compile(below + ".*".join(map(re.escape, rest.split("*"))))


def host_pattern(pattern: str) -> str:
    """A host pattern in the letters of canonical hosts: lower case, IDN as `xn--`. UsageError where it is none."""
    labels = pattern.strip().lower().removesuffix(".").split(".")
    ascii_labels = [label if label.isascii() else ada_url.idna_to_ascii(label).decode() for label in labels]
    if not all(ascii_labels) or re.search(r"[/@?#\s\\]", pattern.strip()):
        raise UsageError(f"a host pattern is a host name with * in it, not {pattern!r}")
    return ".".join(ascii_labels)


def without_www(host: str) -> str:
    """`host` without `www.`, as long as two labels stay.

    >>> without_www("www.example.com"), without_www("www.com"), without_www("www2.e.test")
    ('example.com', 'www.com', 'www2.e.test')
    """
    while host.startswith("www.") and host.count(".") >= 2:
        host = host[4:]
    return host


@dataclass(frozen=True, slots=True)
class Pass:
    """A step as a version lists it: it runs always, or `when` an option is on, or `unless` one is."""

    name: str
    run: Callable[[Parts], None]
    when: str = ""
    unless: str = ""


def _when(*steps: Callable[[Parts], None]) -> Iterator[Pass]:
    return (Pass(step.__name__, step, when=step.__name__) for step in steps)


def _always(*steps: Callable[[Parts], None]) -> Iterator[Pass]:
    return (Pass(step.__name__, step) for step in steps)


#: The one switch that is no option of a profile: on where the rule of a site drops or keeps parameters.
SITE_PARAMETERS = "site_parameters"

#: Version -> its steps, in order. After the host they go from the outside in: escapes first, so that no later
#: step depends on spelling; what makes pieces empty before empty pieces go; the order of the query last.
STEPS: Mapping[int, tuple[Pass, ...]] = MappingProxyType(
    {
        1: (
            *_always(drop_userinfo, drop_root_dot),
            Pass("drop_fragment", drop_fragment, unless="keep_fragment"),
            *_when(merge_scheme, strip_www),
            *_always(normalise_percent),
            *_when(plus_is_space, strip_session, collapse_slashes, strip_slash, strip_tracking),
            Pass("site_parameters", site_parameters, when=SITE_PARAMETERS),
            *_when(blank_value_equals_absent),
            *_always(drop_empty_pairs),
            *_when(sort_query, sort_values, dedupe_pairs),
        )
    }
)

#: Version -> profile -> the options that are on in it. `exact` stays closest to what was found; `aggressive`
#: merges all it can, so it leaves off only `keep_fragment`, which tells pages apart.
PROFILES: Mapping[int, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        1: MappingProxyType(
            {
                "exact": frozenset(),
                "standard": frozenset({"sort_query", "strip_slash"}),
                "aggressive": frozenset(
                    {
                        *("merge_scheme", "strip_www", "plus_is_space", "strip_session", "collapse_slashes"),
                        *("strip_slash", "strip_tracking", "blank_value_equals_absent", "sort_query", "sort_values"),
                        "dedupe_pairs",
                    }
                ),
            }
        )
    }
)


# -- the charset of a page ------------------------------------------------------------------------


def with_query_in(charset: str, url: str, base: str) -> str:
    """`url` with its query percent-encoded in `charset` (WHATWG URL, percent-encode after encoding).

    Raises UnicodeEncodeError for a lone surrogate, which is no text in any charset.
    """
    url.encode()
    text = trimmed(url)
    front, hash_mark, fragment = text.partition("#")
    front, question_mark, query = front.partition("?")
    codec = QUERY_CODECS.get(charset.strip().lower())
    scheme = scheme_of(text) or scheme_of(trimmed(base))
    if codec is None or query.isascii() or scheme not in CHARSET_SCHEMES:
        return url
    written = "".join(map(_QUERY_BYTE.__getitem__, _encoded(query, codec)))
    return f"{front}{question_mark}{written}{hash_mark}{fragment}"


def trimmed(url: str) -> str:
    """`url` without what the parser drops first: blanks and control characters around it, line ends and tabs in it."""
    return url.strip(_C0_AND_SPACE).translate(_NO_NEWLINES)


def scheme_of(url: str) -> str:
    """The scheme of a trimmed URL in lower case, "" where it has none."""
    found = _SCHEME.match(url)
    return found[0].lower() if found else ""


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?=:)")
_C0_AND_SPACE = "".join(map(chr, range(0x21)))
_NO_NEWLINES = str.maketrans("", "", "\t\n\r")
#: Byte of a query -> how it is written (WHATWG URL, special-query percent-encode set).
_QUERY_BYTE = [chr(n) if 0x20 < n < 0x7F and chr(n) not in "\"#<>'" else f"%{n:02X}" for n in range(256)]


def _encoded(query: str, codec: str) -> bytes:
    try:
        return query.encode(codec)
    except UnicodeEncodeError:
        return "".join(_or_reference(character, codec) for character in query).encode(codec)


def _or_reference(character: str, codec: str) -> str:
    """The character, or as browsers do `&#8224;`, percent-encoded, where the charset lacks it."""
    try:
        character.encode(codec)
    except UnicodeEncodeError:
        return f"%26%23{ord(character)}%3B"
    return character


#: Schemes whose query is written in the page's charset; every other one uses UTF-8 (WHATWG URL, query state).
CHARSET_SCHEMES = frozenset({"http", "https", "ftp", "file"})

#: Codec -> labels by which pages call it (WHATWG Encoding, section 4.2) and Python's own names. The codec is
#: the one that agrees with the standard's encoder: latin-1 is windows-1252 there, euc-kr is windows-949.
#: UTF-16 is not here: the standard's output encoding for it is UTF-8.
_LABELS = {
    "cp866": "866 cp866 csibm866 ibm866",
    "iso8859_2": "csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2",
    "iso8859_3": "csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3",
    "iso8859_4": "csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4",
    "iso8859_5": "csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 iso_8859-5:1988",
    "iso8859_6": "arabic asmo-708 csisolatinarabic csiso88596e csiso88596i ecma-114 iso-8859-6 iso-8859-6-e iso-8859-6-i "
    "iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987",
    "iso8859_7": "csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 iso88597 iso_8859-7 "
    "iso_8859-7:1987 sun_eu_greek",
    "iso8859_8": "csisolatinhebrew csiso88598e csiso88598i hebrew iso-8859-8 iso-8859-8-e iso-8859-8-i iso-ir-138 iso8859-8 "
    "iso88598 iso_8859-8 iso_8859-8:1988 logical visual",
    "iso8859_10": "csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6",
    "iso8859_13": "iso-8859-13 iso8859-13 iso885913",
    "iso8859_14": "iso-8859-14 iso8859-14 iso885914",
    "iso8859_15": "csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9",
    "iso8859_16": "iso-8859-16 iso8859-16",
    "koi8_r": "cskoi8r koi koi8 koi8-r koi8_r",
    "koi8_u": "koi8-ru koi8-u koi8_u",
    "mac_roman": "csmacintosh mac macintosh x-mac-roman mac-roman mac_roman",
    "mac_cyrillic": "x-mac-cyrillic x-mac-ukrainian mac-cyrillic mac_cyrillic",
    "cp874": "dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874 cp874",
    "cp1250": "cp1250 windows-1250 x-cp1250",
    "cp1251": "cp1251 windows-1251 x-cp1251",
    "cp1252": "ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 iso8859-1 iso88591 iso_8859-1 "
    "iso_8859-1:1987 l1 latin1 latin-1 us-ascii windows-1252 x-cp1252",
    "cp1253": "cp1253 windows-1253 x-cp1253",
    "cp1254": "cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 iso_8859-9:1989 l5 latin5 windows-1254 x-cp1254",
    "cp1255": "cp1255 windows-1255 x-cp1255",
    "cp1256": "cp1256 windows-1256 x-cp1256",
    "cp1257": "cp1257 windows-1257 x-cp1257",
    "cp1258": "cp1258 windows-1258 x-cp1258",
    "gbk": "chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk",
    "gb18030": "gb18030",
    "cp950": "big5 big5-hkscs big5hkscs cn-big5 csbig5 x-x-big5 cp950",
    "euc_jp": "cseucpkdfmtjapanese euc-jp x-euc-jp euc_jp",
    "iso2022_jp": "csiso2022jp iso-2022-jp iso2022jp iso2022_jp",
    "cp932": "csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis cp932",
    "cp949": "cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 windows-949 euc_kr cp949",
}

#: Label of a charset, in lower case -> the codec that writes a query in it. What is not here is UTF-8.
QUERY_CODECS = {label: codec for codec, labels in _LABELS.items() for label in labels.split()}
