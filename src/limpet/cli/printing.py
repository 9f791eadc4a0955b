"""What the command line prints: text for people, JSON for programs, and nothing that a page could smuggle into a terminal.

Credentials are hidden in all of it, but in JSON that repeats what the caller gave or collected (`is_data`).

Results go to stdout, everything else to stderr. JSON is one object a line with `"v": 1`: fields are
added to it, never renamed or taken away, as long as the number stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from limpet.credentials import hidden

#: The version of every JSON object that the command line prints.
JSON_VERSION = 1

#: Control characters but tab and newline: a title or a reason may hold them, and a terminal obeys them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def say(text: str = "") -> None:
    """Print a line of the result."""
    print(clean(hidden(text)), flush=True)


def note(text: str) -> None:
    """Print a line beside the result."""
    print(clean(hidden(text)), file=sys.stderr, flush=True)


def say_json(fields: Mapping[str, object], *, is_data: bool = False) -> None:
    """Print one JSON object, with its version first. `is_data`: as it is, since a program works on with it."""
    said = {"v": JSON_VERSION, **(fields if is_data else {name: without_credentials(value) for name, value in fields.items()})}
    print(json.dumps(said, ensure_ascii=False, default=str).translate(_SURROGATES), flush=True)


def without_credentials(value: object) -> object:
    """A value of JSON with what its texts hold of credentials hidden.

    >>> without_credentials({"detail": ["http://h/?key=x: status 500"], "n": 1})
    {'detail': ['http://h/?key=***: status 500'], 'n': 1}
    """
    if isinstance(value, str):
        return hidden(value)
    if isinstance(value, Mapping):
        return {name: without_credentials(each) for name, each in value.items()}
    return [without_credentials(each) for each in value] if isinstance(value, list | tuple) else value


class _Escaped(dict[int, str]):
    """Lone surrogates as JSON escapes them: no stream can encode them."""

    def __missing__(self, code: int) -> str:
        return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else chr(code)


_SURROGATES = _Escaped()


def clean(text: str) -> str:
    """The text with its control characters written out.

    >>> clean("a\\x1b[31mred\\n")
    'a\\\\x1b[31mred\\n'
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def count(number: int, noun: str = "", nouns: str = "") -> str:
    """A number with its noun.

    >>> count(1, "page"), count(1200, "page"), count(2, "try", "tries")
    ('1 page', '1,200 pages', '2 tries')
    """
    if not noun:
        return f"{number:,}"
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def duration(seconds: float) -> str:
    """A span of time, as people say it.

    >>> [duration(s) for s in (0.25, 12, 184, 7500, 200000)]
    ['0.2 s', '12 s', '3 min 4 s', '2 h 5 min', '2 d 7 h']
    """
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds % 1 else f"{seconds:.0f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def size(number: int) -> str:
    """Bytes, as people say them.

    >>> size(512), size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def moment(at_ms: int) -> str:
    """A point in time on this machine's own clock face, to the second.

    >>> moment(0).endswith("0")
    True
    """
    return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def table(rows: Iterable[Sequence[object]], *, indent: str = "  ") -> str:
    """Rows in columns; numbers stand to the right.

    >>> print(table([("a", 1), ("bcd", 1000)], indent=""))
    a        1
    bcd  1,000
    """
    cells = [list(row) for row in rows]
    if not cells:
        return ""
    shown = [[f"{cell:,}" if _is_number(cell) else str(cell) for cell in row] for row in cells]
    widths = [max(len(row[i]) for row in shown if i < len(row)) for i in range(max(map(len, shown)))]
    lines = []
    for row, texts in zip(cells, shown, strict=True):
        line = (t.rjust(w) if _is_number(c) else t.ljust(w) for c, t, w in zip(row, texts, widths, strict=False))
        lines.append(f"{indent}{'  '.join(line)}".rstrip())
    return "\n".join(lines)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int) and not isinstance(cell, bool)


def cut(text: str, most: int) -> str:
    """The text in at most so many characters.

    >>> cut("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"
