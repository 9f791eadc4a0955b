"""A CSV file of any size, read piece by piece from a byte position: rows with the names of its heading.

UTF-8 with or without a byte order mark, UTF-16 with one, and GB18030 are told apart by their bytes; the csv module reads the
rows, quoted line ends included. Positions are bytes, so that reading goes on there after a restart without what lies before.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from limpet.engine.calls import CallSchema
from limpet.errors import UsageError

#: Bytes of a row: more is a file without line ends, or a quote that is never closed.
ROW_BYTES_MAX = 2**20

#: Bytes that are looked at for the encoding.
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Csv:
    """A CSV file: its encoding, its heading, and where its rows begin."""

    place: str
    encoding: str
    heading: tuple[str, ...]
    begins: int

    @classmethod
    def at(cls, place: str) -> Csv:
        """Look at a file. UsageError where it cannot be read or has no heading."""
        try:
            with open(place, "rb") as lines:
                sample = lines.read(SAMPLE_BYTES)
                encoding, skip = encoding_of(sample, whole=len(sample) < SAMPLE_BYTES)
                lines.seek(skip)
                first = next(_rows(lines, encoding, place), None)
        except OSError as error:
            raise UsageError(f"cannot read {place}: {error.strerror}") from error
        if first is None or not any(first[1]):
            raise UsageError(f"{place}: expected a heading that names the columns, found an empty file")
        _, heading, begins = first
        names = tuple(name.strip() for name in heading)
        if len(set(names)) < len(names):
            raise UsageError(f"{place}: the heading names a column twice: {', '.join(names)}")
        return cls(place, encoding, names, begins)

    def read(self, position: int, most: int) -> tuple[list[tuple[int, Mapping[str, str]]], int, bool]:
        """Up to so many rows from a byte position, 0 for the first: (where each begins and its fields, where the next does, was that all).

        UsageError, naming file and place, for a row that cannot be read.
        """
        found: list[tuple[int, Mapping[str, str]]] = []
        at = max(position, self.begins)
        with open(self.place, "rb") as lines:
            lines.seek(at)
            for began, fields, ended in _rows(lines, self.encoding, self.place):
                at = ended
                if not any(fields):
                    continue
                if len(fields) != len(self.heading):
                    raise UsageError(
                        f"{self.place}, row at byte {began}: {len(fields)} fields; expected {len(self.heading)} ({', '.join(self.heading)})"
                    )
                found.append((began, dict(zip(self.heading, fields, strict=True))))
                if len(found) >= most:
                    return found, at, False
        return found, at, True


def encoding_of(sample: bytes, *, whole: bool) -> tuple[str, int]:
    """The encoding of a text by its first bytes, and how many of them are a byte order mark.

    >>> encoding_of("关键词".encode("gb18030"), whole=True), encoding_of(b"a", whole=True)
    (('gb18030', 0), ('utf-8', 0))
    """
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8", 3
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError("UTF-16: expected UTF-8 or GB18030; save the file as UTF-8")
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(sample, final=whole)
    except UnicodeDecodeError:
        return "gb18030", 0
    return "utf-8", 0


def _rows(lines: BinaryIO, encoding: str, place: str) -> Iterator[tuple[int, list[str], int]]:
    """Each row from here on: (where it begins, its fields, where the next begins)."""
    while True:
        began = lines.tell()
        text = ""
        while True:
            raw = lines.readline(ROW_BYTES_MAX)
            if not raw and not text:
                return
            try:
                text += raw.decode(encoding)
            except UnicodeDecodeError as error:
                raise UsageError(f"{place}, row at byte {began}: not {encoding.upper()}: {error.reason}") from error
            if not raw or text.count('"') % 2 == 0:
                break
            if len(text) > ROW_BYTES_MAX:
                raise UsageError(f"{place}, row at byte {began}: more than {ROW_BYTES_MAX:,} bytes; is a quote not closed?")
        try:
            fields = next(csv.reader([text], strict=True), [])
        except csv.Error as error:
            raise UsageError(f"{place}, row at byte {began}: {error}") from error
        yield began, fields, lines.tell()


def arguments_of(schema: CallSchema, fields: Mapping[str, str]) -> dict[str, object]:
    """The arguments that a row is. UsageError for a field that is no argument, or cannot be read as one."""
    found: dict[str, object] = {}
    for name, text in fields.items():
        argument = schema.arguments.get(name)
        if argument is None:
            raise UsageError(f"column {name!r}: {schema.handler} takes {', '.join(schema.arguments)}")
        found[name] = argument.read(text)
    return found
