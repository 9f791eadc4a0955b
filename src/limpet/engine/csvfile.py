"""A CSV file of any size, read piece by piece from a byte position: rows with the names of its heading.

UTF-8 with or without a byte order mark and GB18030 are told apart by their bytes; the csv module reads the rows, quoted line
ends included. Positions are bytes, so that reading goes on there after a restart without what lies before. A row that cannot
be read costs that row: of one that the csv module refuses, its first line is left out and reading goes on at the next one.
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

#: Bytes of a file that are looked at in one step for the number of a line.
STEP_BYTES = 1 << 20


class BadRow(ValueError):
    """Why some lines are no row."""


@dataclass(frozen=True, slots=True)
class Row:
    """What lies between two places of a file: fields, or why there are none."""

    begins: int
    ends: int
    fields: tuple[str, ...] = ()
    fault: str = ""


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
                encoding, skip = encoding_of(sample, whole=len(sample) < SAMPLE_BYTES, place=place)
                lines.seek(skip)
                first = next(_rows(lines, encoding), None)
        except OSError as error:
            raise UsageError(f"cannot read {place}: {error.strerror}") from error
        if first is not None and first.fault:
            raise UsageError(f"{place}: expected a heading that names the columns, found a first line that is no row: {first.fault}")
        if first is None or not any(first.fields):
            raise UsageError(f"{place}: expected a heading that names the columns, found an empty file")
        names = tuple(name.strip() for name in first.fields)
        if len(set(names)) < len(names):
            raise UsageError(f"{place}: the heading names a column twice: {', '.join(names)}")
        return cls(place, encoding, names, first.ends)

    def read(self, position: int, most: int) -> tuple[list[tuple[int, Mapping[str, str]]], int, bool]:
        """Up to so many rows from a byte position, 0 for the first: (where each begins and its fields, where the next does, was that all).

        UsageError, naming file and place, for a row that cannot be read: for whoever needs all of them, such as a bill.
        """
        rows, after, closed = self.rows(position, most)
        for row in rows:
            if row.fault:
                raise UsageError(f"{self.place}, row at byte {row.begins}: {row.fault}")
        return [(row.begins, self.named(row)) for row in rows], after, closed

    def rows(self, position: int, most: int) -> tuple[list[Row], int, bool]:
        """Up to so many rows from a byte position, 0 for the first, those that cannot be read with what is wrong with them; empty lines
        are none. Then where the next one begins, and whether that was all.
        """
        found: list[Row] = []
        at = max(position, self.begins)
        with open(self.place, "rb") as lines:
            lines.seek(at)
            for row in _rows(lines, self.encoding):
                at = row.ends
                if not row.fault and not any(row.fields):
                    continue
                found.append(row if row.fault else self._checked(row))
                if len(found) >= most:
                    return found, at, False
        return found, at, True

    def named(self, row: Row) -> dict[str, str]:
        """The fields of a row by the names of the heading."""
        return dict(zip(self.heading, row.fields, strict=True))

    def _checked(self, row: Row) -> Row:
        if len(row.fields) == len(self.heading):
            return row
        fields = "1 field" if len(row.fields) == 1 else f"{len(row.fields)} fields"
        return Row(row.begins, row.ends, (), f"{fields}; expected {len(self.heading)} ({', '.join(self.heading)})")


class LineNumbers:
    """Which line of a file a byte lies in; asked for in order, the file is looked through once."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._at, self._line = 0, 1

    def of(self, position: int) -> int:
        """The number of the line, from 1 on."""
        if position < self._at:
            self._at, self._line = 0, 1
        with open(self._place, "rb") as lines:
            lines.seek(self._at)
            while self._at < position and (piece := lines.read(min(STEP_BYTES, position - self._at))):
                self._at += len(piece)
                self._line += piece.count(b"\n")
        return self._line


def encoding_of(sample: bytes, *, whole: bool, place: str = "the file") -> tuple[str, int]:
    """The encoding of a text by its first bytes, and how many of them are a byte order mark. UsageError, naming the place, for UTF-16.

    A few bytes that are wrong do not decide: of UTF-8 and GB18030 it is the one in which more lines are text.

    >>> encoding_of("关键词".encode("gb18030"), whole=True), encoding_of(b"a", whole=True)
    (('gb18030', 0), ('utf-8', 0))
    """
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8", 3
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{place} is UTF-16: expected UTF-8 or GB18030; save it as UTF-8")
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(sample, final=whole)
    except UnicodeDecodeError:
        lines = sample.split(b"\n")
        if not whole and len(lines) > 1:
            lines.pop()  # its end is not there
        return min(("utf-8", "gb18030"), key=lambda encoding: sum(not _is_text(line, encoding) for line in lines)), 0
    return "utf-8", 0


def _is_text(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _rows(lines: BinaryIO, encoding: str) -> Iterator[Row]:
    """Each row from here on."""
    while True:
        row = _row(lines, encoding)
        if row is None:
            return
        yield row


def _row(lines: BinaryIO, encoding: str) -> Row | None:
    """The next row, or the next line where it begins none; None at the end."""
    began = lines.tell()
    first = lines.readline(ROW_BYTES_MAX)
    if not first:
        return None
    ended = lines.tell()
    try:
        if len(first) >= ROW_BYTES_MAX and not first.endswith(b"\n"):
            ended = _end_of_line(lines)
            raise BadRow(f"a line of more than {ROW_BYTES_MAX:,} bytes")
        fields = next(csv.reader(_texts(first, lines, encoding), strict=True), [])
    except (BadRow, csv.Error) as error:
        lines.seek(ended)
        return Row(began, ended, (), _told(first, error))
    return Row(began, lines.tell(), tuple(fields))


def _texts(first: bytes, lines: BinaryIO, encoding: str) -> Iterator[str]:
    """The lines of one row as text, as many as whoever reads it asks for. BadRow for one that is none, and for too many."""
    line, size = first, 0
    while line:
        size += len(line)
        if size > ROW_BYTES_MAX:
            raise BadRow(f"more than {ROW_BYTES_MAX:,} bytes; is a quote not closed?")
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            raise BadRow(f"not {encoding.upper()}: {error.reason}") from error
        line = lines.readline(ROW_BYTES_MAX)


def _told(first: bytes, error: Exception) -> str:
    """What is wrong, in words that fit a file on a disk."""
    if "new-line character" in str(error) and b"\r" in first.rstrip(b"\r\n"):
        return "its line ends are CR alone: save the file with LF or CRLF"
    return "a quote that is not closed" if str(error) == "unexpected end of data" else str(error)


def _end_of_line(lines: BinaryIO) -> int:
    while (piece := lines.readline(ROW_BYTES_MAX)) and not piece.endswith(b"\n"):
        pass
    return lines.tell()


def arguments_of(schema: CallSchema, fields: Mapping[str, str]) -> dict[str, object]:
    """The arguments that a row is. UsageError for a field that is no argument, or cannot be read as one."""
    found: dict[str, object] = {}
    for name, text in fields.items():
        argument = schema.arguments.get(name)
        if argument is None:
            raise UsageError(f"column {name!r}: {schema.handler} takes {', '.join(schema.arguments)}")
        found[name] = argument.read(text)
    return found
