"""CSV files of any size: by position, in their own encoding, with what is wrong named by its place."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet import UsageError
from limpet.engine.csvfile import ROW_BYTES_MAX, Csv, LineNumbers

FIELDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12)


def written(place: Path, rows: list[list[str]], encoding: str) -> Path:
    """A file with these rows."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    place.write_bytes(text.getvalue().encode(encoding))
    return place


def whole(place: Path, piece: int) -> list[dict[str, str]]:
    """All rows, read in pieces, each by a reader that begins anew."""
    found: list[dict[str, str]] = []
    position, is_done = 0, False
    while not is_done:
        rows, position, is_done = Csv.at(str(place)).read(position, piece)
        found += [dict(fields) for _, fields in rows]
    return found


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_a_file_is_read_in_its_own_encoding(tmp_path: Path, encoding: str) -> None:
    """With quoted line ends, commas and quotes."""
    rows = [["关键词", "二,\n三"], ['a "b"', "c"], ["é", ""]]
    place = written(tmp_path / "k.csv", [["keyword", "note"], *rows], encoding)
    assert whole(place, 1) == whole(place, 100) == [{"keyword": a, "note": b} for a, b in rows]


@given(st.lists(st.tuples(FIELDS, FIELDS).filter(any), min_size=1, max_size=8), st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_pieces_of_any_size_are_the_whole(tmp_path: Path, rows: list[tuple[str, str]], piece: int) -> None:
    """Wherever reading was ended, it goes on there."""
    place = written(tmp_path / "k.csv", [["a", "b"], *map(list, rows)], "utf-8")
    assert whole(place, piece) == [{"a": a, "b": b} for a, b in rows]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "found an empty file"),
        (b"a,a\n1,2\n", "names a column twice"),
        (b"\xff\xfea\x00", r"k\.csv is UTF-16"),
        (b"a,b\n1\n", "row at byte 4: 1 field; expected 2"),
        (b"a\r1\r", "line ends are CR alone"),
        (b'a\n"x\n', "row at byte 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, content: bytes, said: str) -> None:
    """Never a traceback."""
    place = tmp_path / "k.csv"
    place.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        whole(place, 10)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(UsageError, match="cannot read"):
        Csv.at(str(tmp_path / "none.csv"))


def told(place: Path, content: bytes, piece: int) -> list[str]:
    """Each row of a file, read in pieces: its fields, or its line and what is wrong with it."""
    place.write_bytes(content)
    table, numbers = Csv.at(str(place)), LineNumbers(str(place))
    found: list[str] = []
    position, is_done = 0, False
    while not is_done:
        rows, position, is_done = table.rows(position, piece)
        found += [f"{numbers.of(row.begins)}: {row.fault}" if row.fault else "|".join(row.fields) for row in rows]
    assert position == len(content)
    return found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'k\n5" disk\n6 disk\n7" disk\n', ['5" disk', "6 disk", '7" disk']),
        (b'k\n"5" disk\n6 disk\n', ["2: ',' expected after '\"'", "6 disk"]),
        (b'k\n"a\nb"\n"c\nd\n', ["a\nb", "4: a quote that is not closed", "d"]),
        (b"k\na,b\n\nc\n", ["2: 2 fields; expected 1 (k)", "c"]),
        (b"k\n" + b"x" * (ROW_BYTES_MAX + 9) + b"\ny\n", ["2: a line of more than 1,048,576 bytes", "y"]),
        (
            b'k\n"' + b"x\n" * (ROW_BYTES_MAX // 2) + b"y\n",
            ["2: field larger than field limit (131072)", *["x"] * (ROW_BYTES_MAX // 2 - 1), "y"],
        ),
        ("k\n价格\n".encode() + b"x\xffy\n" + "地图\n".encode(), ["价格", "3: not UTF-8: invalid start byte", "地图"]),
        (
            "k\n价格\n".encode("gb18030") + b"x\xff\n" + "地图\n".encode("gb18030"),
            ["价格", "3: not GB18030: illegal multibyte sequence", "地图"],
        ),
    ],
)
def test_what_is_no_row_is_told_with_its_line_and_the_next_ones_are_read(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    """Wherever a piece ends; a quote that is never closed costs one line and not the file."""
    assert told(tmp_path / "k.csv", content, 5000) == expected
    if len(content) < ROW_BYTES_MAX:
        assert told(tmp_path / "k.csv", content, 1) == expected
