"""Starts that can be read only once, kept as a file: standard input, a pipe, `<(...)`.

A job reads its starts as it goes on, from where the database is, and over many runs: a pipe would be empty by then.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from typing import BinaryIO

from limpet.cli.database import file_of
from limpet.errors import UsageError
from limpet.store.atomic import is_special, whole_file

#: Bytes that are copied at a time.
_BYTES = 2**20
#: Names that each process has for files of its own: in the next run they lead to others, also where these are regular files.
_OF_A_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/")


def lasting(given: str, address: str) -> str:
    """The path of starts that are there in the next run too: the file given, or what came by it, spooled beside the database at `address`.

    `-` is stdin. UsageError where they cannot be read.
    """
    folder = os.path.dirname(file_of(address)) or os.getcwd()
    if given == "-":
        return spool(stdin(), folder)
    if os.path.isdir(given) or not (is_special(given) or os.path.abspath(given).startswith(_OF_A_PROCESS)):
        return given
    with open(given, "rb") as stream:
        return spool(stream, folder)


def stdin() -> BinaryIO:
    """Standard input. UsageError where whoever started this process has closed it."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: give a file, or let something be read from (< FILE)")
    return sys.stdin.buffer


def spool(stream: BinaryIO, folder: str) -> str:
    """Copy a stream into a file of the folder that is named after its content; its path.

    The same starts give the same file, so a crawl that is run again with them goes on where it was.
    """
    digest = blake2b(digest_size=8)
    half_way = os.path.join(folder, f".limpet-starts-{os.getpid()}")
    try:
        with whole_file(half_way) as part, open(part, "wb") as file:
            while chunk := stream.read(_BYTES):
                digest.update(chunk)
                file.write(chunk)
        place = os.path.join(folder, f"limpet-starts-{digest.hexdigest()}.txt")
        os.replace(half_way, place)
    except FileNotFoundError as error:
        raise UsageError(f"cannot keep the starts in {folder}: {error.strerror}") from error
    return place
