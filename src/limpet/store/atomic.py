"""A file that appears whole or not at all: written beside its place, synced, renamed, and the folder synced.

What a killed writer leaves is `.NAME.part`; the next one takes it over, and two at once never share it,
since it is locked while it is written. Invariant: under its own name there is either the old file or the new one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from limpet.errors import UsageError

#: Times that the part is opened anew, where another writer has just renamed it.
OPEN_TRIES = 10


def part_of(path: str) -> str:
    """Where a file is written before it is whole.

    >>> part_of("/a/b.csv")
    '/a/.b.csv.part'
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.part")


def final_place(path: str) -> str:
    """Where a path leads: links are followed, so that what they point to is replaced. UsageError where no file can be."""
    place = os.path.realpath(path)
    folder = os.path.dirname(place)
    if os.path.isdir(place):
        raise UsageError(f"{path} is a folder; expected the name of a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: the folder {folder} does not exist")
    return place


def is_special(path: str) -> bool:
    """Whether a path is there and is no regular file (a device, a pipe): it is written to, never replaced."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


@contextmanager
def whole_file(path: str) -> Iterator[str]:
    """The path of an empty part to write; it stands at `path` once the block has ended well, and is gone if not."""
    place = final_place(path)
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
