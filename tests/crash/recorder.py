"""Writes down what SQLite does to its files, by a VFS that passes everything on: what a power cut is replayed from.

One file of operations, in their order, with the acks of the crawl among them. Shared memory is not recorded: no power cut
leaves any. What a sync of a new WAL does to its folder, the replay knows (`powercut`).
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import apsw

from limpet.store import opening
from limpet.store.sqlite import Sqlite

NAME = "limpet-recorder"

#: Length of the head and of the bytes that follow it.
_FRAME = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was done, to the file of that number; a file that is made anew has a new number."""

    what: str  # open | write | truncate | sync | delete | ack
    file: int = 0
    name: str = ""  # open, delete: the file's name
    at: int = 0  # write: offset; truncate: size
    is_new: bool = False  # open: it was not there
    is_synced: bool = False  # delete: its folder was synced, too
    data: bytes = b""  # write; ack: lines


def operations(path: Path) -> Iterator[Operation]:
    """Read a recording back."""
    whole = path.read_bytes()
    at = 0
    while at < len(whole):
        head, size = _FRAME.unpack_from(whole, at)
        at += _FRAME.size
        values = json.loads(whole[at : at + head])
        yield Operation(**values, data=whole[at + head : at + head + size])
        at += head + size


class Recorder:
    """Records every database that this process opens from now on, until it is closed."""

    def __init__(self, path: str, synchronous: str = "FULL") -> None:
        self._out: BinaryIO = open(path, "wb")  # noqa: SIM115 - open as long as the recorder is
        self._lock = threading.Lock()  # the store, its heartbeat and its reader have threads of their own
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._vfs = _Vfs(self)

        def recorded(path: str, **more: Any) -> Sqlite:
            return Sqlite(path, **{**more, "vfs": NAME, "synchronous": synchronous})

        opening.__dict__["Sqlite"] = recorded

    def note(self, what: str, *, data: bytes = b"", **values: Any) -> None:
        """Write one operation down."""
        head = json.dumps({"what": what, **values}).encode()
        with self._lock:
            self._out.write(_FRAME.pack(len(head), len(data)) + head + data)

    def number(self, name: str, *, is_new: bool) -> int:
        """The number of a file of that name, as it is now."""
        if is_new or name not in self._numbers:
            self._count += 1
            self._numbers[name] = self._count
        return self._numbers[name]

    def acked(self, lines: list[str]) -> None:
        """The caller has been told that these are stored."""
        if lines:
            self.note("ack", data="\n".join(lines).encode())

    def close(self) -> None:
        """Nothing more is recorded."""
        self._out.close()


class _Vfs(apsw.VFS):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        super().__init__(NAME, "")

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        return _File(self._recorder, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self._recorder.note("delete", name=Path(filename).name, is_synced=bool(syncdir))


class _File(apsw.VFSFile):
    def __init__(self, recorder: Recorder, name: Any, flags: list[int]) -> None:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        is_new = path is not None and not Path(path).exists()
        super().__init__("", name, flags)
        self._recorder = recorder
        self._number = 0
        if path is not None:
            self._number = recorder.number(Path(path).name, is_new=is_new)
            recorder.note("open", file=self._number, name=Path(path).name, is_new=is_new)

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._recorder.note("write", file=self._number, at=offset, data=bytes(data))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._recorder.note("truncate", file=self._number, at=newsize)

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._recorder.note("sync", file=self._number)
