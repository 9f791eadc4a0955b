"""A file that appears whole or not at all: written beside its place, synced, renamed, and the folder synced.

What a killed writer leaves is `.NAME.part`; the next one takes it over, and two at once never share it,
since it is locked while it is written. Invariants: under its own name there is either the old file or the new one;
a database, what SQLite keeps beside one, and the lock of a worker are never replaced by what is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from limpet.errors import UsageError
from limpet.store.sqlite import is_sqlite_file

#: Times that the part is opened anew, where another writer has just renamed it.
OPEN_TRIES = 10

#: What SQLite keeps beside a database. A log that is lost, or another's, takes with it what was committed.
BESIDE = ("-wal", "-shm", "-journal")

#: By these a worker shows that it is alive (store/lease.py).
_LOCK = re.compile(r"limpet-(worker|waiting)-.*\.lock")


def part_of(path: str) -> str:
    """Where a file is written before it is whole.

    >>> part_of("/a/b.csv")
    '/a/.b.csv.part'
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.part")


def final_place(path: str, *, database: str = "") -> str:
    """Where a path leads: links are followed, so that what they point to is replaced.

    UsageError where no file can be, and where one must not be: `database` is the file that is read from, or "".
    """
    place = os.path.realpath(path)
    folder = os.path.dirname(place)
    if os.path.isdir(place):
        raise UsageError(f"{path} is a folder; expected the name of a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: the folder {folder} does not exist")
    for written in (place, part_of(place)):
        if kept := _kept_as(written, database):
            raise UsageError(f"{path} is {kept}, which is never replaced: name another file")
    return place


def _kept_as(file: str, database: str) -> str:
    """What a file is that must stay as it is; "" for any other. By name too, since SQLite makes its own when it wants them."""
    if database and _is_same(file, os.path.realpath(database)):
        return "the database itself"
    for end in BESIDE:
        if database and _is_same(file, os.path.realpath(database) + end):
            return f"the {end} file of the database"
        other = file.removesuffix(end)
        if other != file and os.path.isfile(other) and is_sqlite_file(other):
            return f"the {end} file of {other}"
    return "the lock of a worker" if _LOCK.fullmatch(os.path.basename(file)) else ""


def _is_same(one: str, other: str) -> bool:
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def is_special(path: str) -> bool:
    """Whether a path is there and is no regular file (a device, a pipe): it is written to, never replaced."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


@contextmanager
def whole_file(path: str, *, database: str = "") -> Iterator[str]:
    """The path of an empty part to write; it stands at `path` once the block has ended well, and is gone if not.

    `database` as `final_place` has it.
    """
    place = final_place(path, database=database)
    part = part_of(place)
    handle = _hold(part, path)
    try:
        os.ftruncate(handle, 0)
        yield part
        sync(part)
        os.replace(part, place)
        sync(os.path.dirname(place))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    finally:
        os.close(handle)


def sync(path: str) -> None:
    """Have a file, or the names in a folder, on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hold(part: str, path: str) -> int:
    """Open the part and lock it; UsageError where somebody writes it now."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two writers are the user's to avoid
        return os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    for _ in range(OPEN_TRIES):
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(part)
        except BlockingIOError as error:
            os.close(handle)
            raise UsageError(f"{path} is being written by another process just now") from error
        except FileNotFoundError:  # renamed or removed since it was opened
            os.close(handle)
            continue
        if os.path.samestat(here, os.fstat(handle)):
            return handle
        os.close(handle)
    raise UsageError(f"{path} is being written by other processes just now")
