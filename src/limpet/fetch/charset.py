"""Bytes to text. What is declared is believed while the bytes agree with it.

    1. a byte order mark        wins over everything (WHATWG Encoding, section 6)
    2. the Content-Type header  then
    3. <meta> or <?xml?>        within the first 4,096 bytes
    4. the bytes themselves     UTF-8 where they are valid UTF-8, UTF-16 by its zero bytes,
                                else what charset-normalizer makes of a prefix, else windows-1252

Where header and meta differ, UTF-8 is taken if the bytes are valid UTF-8, which other text hardly
ever is by chance; and a declaration that the bytes contradict gives way to one that they fit.
Nothing here raises: what no reading fits is read by the first declaration, with U+FFFD for the rest.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import NamedTuple

from charset_normalizer import from_bytes

from limpet.fetch.charset_labels import CODECS, NAME_OF, SINGLE_BYTE

#: Bytes in which a <meta> is looked for. Browsers read 1,024; pages put it later.
META_BYTES = 4096
#: Bytes that detection sees: it takes some milliseconds for these, and minutes for a large page.
DETECT_BYTES = 8192
#: Where nothing else is known (WHATWG HTML, section 13.2.3.2, for most of the world).
FALLBACK = "windows-1252"

_HEADER = re.compile(r"""charset\s*=\s*["']?\s*([^\s"';,]+)""", re.IGNORECASE)
_META = re.compile(rb"""<meta\b[^>]*?\bcharset\s*=\s*["']?\s*([^\s"'/>;]+)""", re.IGNORECASE)
_XML = re.compile(rb"""\A\s*<\?xml\b[^>]*?\bencoding\s*=\s*["']([^"']+)["']""")
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_HIGH = bytes(range(0x80, 0x100))
_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16le"), (b"\xfe\xff", "utf-16be"))


class Decoded(NamedTuple):
    """A text, the encoding by which it was read (a WHATWG name in lower case), and who said so.

    `how` is bom, header, meta, valid (nothing declared, and it is UTF-8), detected or fallback.
    """

    text: str
    encoding: str
    how: str


def decode(body: bytes, content_type: str | None = None) -> Decoded:
    """The text of a body, by its bytes and its Content-Type header.

    >>> decode("café".encode("latin-1"), "text/html; charset=ISO-8859-1")
    Decoded(text='café', encoding='windows-1252', how='header')
    """
    if body[:1] in (b"\xef", b"\xff", b"\xfe"):
        for bom, name in _BOMS:
            if body.startswith(bom):
                return Decoded(body[len(bom) :].decode(CODECS[name][0], "replace"), name, "bom")
    header = name_of(match[1]) if content_type and (match := _HEADER.search(content_type)) else None
    zeros = _by_zero_bytes(body)
    if header == "utf-8" and not zeros:
        try:
            return Decoded(body.decode(), "utf-8", "header")  # most pages
        except UnicodeDecodeError:
            pass
    return _weighed(body, header, zeros)


def name_of(label: str) -> str | None:
    """The encoding that a label means, None for one that means none.

    >>> name_of(" GB2312 "), name_of("latin1"), name_of("utf-7")
    ('gbk', 'windows-1252', None)
    """
    return NAME_OF.get(label.strip().lower())


def declared_in(body: bytes) -> str | None:
    """The encoding that the beginning of a page declares; where it claims UTF-16 in ASCII, it is UTF-8."""
    head = _COMMENT.sub(b"", body[:META_BYTES])
    match = _XML.match(head) or _META.search(head)
    name = name_of(match[1].decode("latin-1")) if match else None
    if name in ("utf-16le", "utf-16be"):
        return "utf-8"
    return FALLBACK if name == "x-user-defined" else name


def _weighed(body: bytes, header: str | None, zeros: str | None) -> Decoded:
    """The first declaration that the bytes fit, else the reading that fits best."""
    declared = [(name, how) for name, how in ((header, "header"), (declared_in(body), "meta")) if name is not None]
    if zeros is not None and not any(name == zeros for name, _ in declared):
        declared.insert(0, (zeros, "detected"))
    if len(declared) > 1 and declared[1][0] == "utf-8" and not body.isascii():
        declared.reverse()
    for name, how in declared:
        if (text := _fitting(body, name)) is not None:
            return Decoded(text, name, how)
    if (text := _fitting(body, "utf-8")) is not None:
        return Decoded(text, "utf-8", "detected" if declared else "valid")
    if declared and (declared[0][0] != "utf-8" or _is_mostly_utf8(body)):
        name, how = declared[0]
        return Decoded(_forced(body, name), name, how)
    guessed = _detected(body)
    name, how = (guessed, "detected") if guessed else declared[0] if declared else (FALLBACK, "fallback")
    return Decoded(_forced(body, name), name, how)


def _fitting(body: bytes, name: str) -> str | None:
    """The text, where every byte means something in that encoding."""
    if name not in CODECS:
        return _forced(body, name)
    for codec in CODECS[name]:
        try:
            return body.decode(codec)
        except UnicodeDecodeError:
            continue
    if name in SINGLE_BYTE and "\ufffd" not in (text := _forced(body, name)):
        return text
    return None


def _forced(body: bytes, name: str) -> str:
    """The text, with U+FFFD for what means nothing."""
    if name == "replacement":
        return "\ufffd" if body else ""
    if name == "x-user-defined" or name in SINGLE_BYTE:
        return codecs.charmap_decode(body, "strict", _table(name))[0]
    return body.decode(CODECS[name][0], "replace")


@cache
def _table(name: str) -> str:
    """The 256 characters of a single-byte encoding. Bytes that Python leaves undefined in 80 to 9F are
    C1 controls there (WHATWG Encoding, index of each), others U+FFFD."""
    if name == "x-user-defined":
        return "".join(chr(byte if byte < 0x80 else 0xF700 + byte) for byte in range(256))
    codec = CODECS[name][0]

    def character(byte: int) -> str:
        text = bytes([byte]).decode(codec, "replace")
        return chr(byte) if text == "\ufffd" and 0x80 <= byte <= 0x9F else text

    return "".join(map(character, range(256)))


def _by_zero_bytes(body: bytes) -> str | None:
    """UTF-16 without a byte order mark: markup begins with "<" and a zero byte, in one order or the other."""
    head = body[:4]
    if len(head) == 4 and head[0] and head[2] and not head[1] and not head[3]:
        return "utf-16le"
    if len(head) == 4 and head[1] and head[3] and not head[0] and not head[2]:
        return "utf-16be"
    return None


def _is_mostly_utf8(body: bytes) -> bool:
    """Whether a text that claims to be UTF-8 is one with some damage, rather than something else."""
    text = body[:DETECT_BYTES].decode("utf-8", "replace")
    damaged = text.count("\ufffd")
    return sum(not char.isascii() for char in text) - damaged >= damaged


def _detected(body: bytes) -> str | None:
    """What charset-normalizer makes of a prefix that does not end within a character.

    A byte below 80 ends a character in all of these encodings, and two above make one in most.
    """
    prefix = body[:DETECT_BYTES]
    if len(body) > DETECT_BYTES:
        above = len(prefix) - len(prefix.rstrip(_HIGH))
        prefix = prefix[: len(prefix) - above % 2]
    matches = from_bytes(prefix, cp_isolation=list(_CANDIDATES))
    best = matches.best()
    if best is None:
        return None
    ties = [match for match in matches if match.chaos <= best.chaos and match.coherence >= best.coherence]
    if any("cp1252" in match.could_be_from_charset for match in ties):
        return FALLBACK  # of several that fit equally, by far the most frequent
    return _CANDIDATES.get(best.encoding)


#: What is worth guessing, by charset-normalizer's names. UTF-8 and UTF-16 are recognised before, and of each
#: family the widest is enough.
_CANDIDATES = {
    "gb18030": "gb18030",
    "big5hkscs": "big5",
    "cp932": "shift_jis",
    "euc_jp": "euc-jp",
    "iso2022_jp": "iso-2022-jp",
    "cp949": "euc-kr",
    **{f"cp{n}": f"windows-{n}" for n in (1252, 1250, 1251, 1253, 1254, 1255, 1256, 1257, 1258)},
    "cp874": "windows-874",
    "koi8_r": "koi8-r",
    "cp866": "ibm866",
    "iso8859_2": "iso-8859-2",
    "iso8859_5": "iso-8859-5",
    "iso8859_7": "iso-8859-7",
}
