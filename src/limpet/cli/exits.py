"""Exit codes, and the one place in which an error becomes one.

0  complete and verified; or the command did what it was asked
1  internal error: a fault in Limpet. `--debug` prints its traceback
2  usage: the call, spider, configuration or file is wrong
3  complete, with dead letters; of `try`, the page would be one
4  stopped, resumable: run the same command again (also: database busy, disk full, Ctrl-C, handlers that hang in every thread)
5  budget reached
6  nothing to do
7  stalled, and the message says why (also: a page that could not be fetched for `try` or `shell`)
8  verify failed, or the file is damaged
9  ownership lost: another worker has the shard now
"""

from __future__ import annotations

import errno
import sys
import traceback
from enum import IntEnum

from limpet.cli.printing import clean, note, say_json
from limpet.credentials import hidden
from limpet.errors import (
    FetchError,
    InvariantBroken,
    LimpetError,
    OutcomeUnknown,
    OwnershipLost,
    RightMissing,
    SchemaNewer,
    StoreBusy,
    StoreCorrupt,
    StoreUnavailable,
    UsageError,
)


class Exit(IntEnum):
    """What the process ends with."""

    COMPLETE = 0
    INTERNAL = 1
    USAGE = 2
    DEAD_LETTERS = 3
    STOPPED = 4
    BUDGET = 5
    NOTHING_TO_DO = 6
    STALLED = 7
    VERIFY_FAILED = 8
    OWNERSHIP_LOST = 9


#: What a shell gives to a program whose reader has gone (128 + SIGPIPE): `limpet export ... | head`.
READER_GONE = 141

#: Errors of the operating system that pass when there is space, or the disk is well again.
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM})

#: The first class that fits decides.
_CODES: tuple[tuple[type[BaseException], Exit], ...] = (
    (UsageError, Exit.USAGE),
    (SchemaNewer, Exit.USAGE),
    (RightMissing, Exit.USAGE),
    (OwnershipLost, Exit.OWNERSHIP_LOST),
    (InvariantBroken, Exit.VERIFY_FAILED),
    (StoreCorrupt, Exit.VERIFY_FAILED),
    (StoreBusy, Exit.STOPPED),
    (StoreUnavailable, Exit.STOPPED),
    (OutcomeUnknown, Exit.STOPPED),
    (FetchError, Exit.STALLED),
    (KeyboardInterrupt, Exit.STOPPED),
)


def code_of(error: BaseException) -> Exit:
    """The exit code that an error means."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError):
        return Exit.STOPPED if error.errno in _DISK else Exit.USAGE
    return Exit.INTERNAL


def tell(error: BaseException, *, as_json: bool = False, debug: bool = False) -> Exit:
    """Say on stderr what an error means, with its traceback only where asked; the exit code."""
    code = code_of(error)
    message = _message(error)
    if debug:
        print(clean(hidden("".join(traceback.format_exception(error)))), end="", file=sys.stderr)
    if as_json:
        say_json({"error": {"kind": type(error).__name__, "message": message, "exit_code": int(code)}})
    note(f"limpet: {message}")
    if code is Exit.INTERNAL and not debug:
        note("limpet: this is a fault in Limpet: the same command with --debug prints where it happened")
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    if isinstance(error, LimpetError):
        return str(error)
    return f"{type(error).__name__}: {error}"
