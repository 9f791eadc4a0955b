"""What tasks share, as a handler sees it: registers that carry their version, and high-water marks.

Nothing is written at the call. A register's new value commits with the task, on the condition that nobody has written it
since it was read; else this task alone runs again. A mark's value is what the sweeps before this job had reached, the same for
all of its tries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from limpet.batch import RegisterWrite, Seen, canonical_json
from limpet.engine.request import check_json
from limpet.errors import UsageError
from limpet.mark import Mark, decode, encode, kind_of, less, overlapped

#: Bytes of a register's value: each version is a row of its own.
REGISTER_BYTES_MAX = 65536

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")

Order = Literal["asc", "desc"]


def checked_name(what: str, name: object) -> str:
    """The name of a tally, register or mark. UsageError where it is none."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{what} {name!r}: expected letters, digits and _ . : -, at most 100")
    return name


@dataclass(slots=True)
class Register:
    """A shared value as it was read: `value` (None before the first write) and `version`; `set` writes the next one."""

    name: str
    version: int
    value: object
    check_open: Callable[[], None] = field(repr=False)
    _written: str | None = None

    def set(self, value: object) -> None:
        """Write the next version, when the task commits; a lost race runs the task again. `value` is plain JSON."""
        self.check_open()
        check_json(value, f"register {self.name}")
        text = canonical_json(value)
        if len(text.encode()) > REGISTER_BYTES_MAX:
            raise UsageError(f"register {self.name}: more than {REGISTER_BYTES_MAX:,} bytes")
        self._written, self.value = text, value

    def write(self) -> RegisterWrite | None:
        """What is to be committed; None where nothing was set."""
        return None if self._written is None else RegisterWrite(self.name, self.version, self._written)

    @classmethod
    def of(cls, name: str, version: int, text: str | None, check_open: Callable[[], None]) -> Register:
        """A register as the database has it."""
        return cls(name, version, None if text is None else json.loads(text), check_open)


@dataclass(slots=True)
class HighWaterMark:
    """How far the sweeps before this one came: `value` (None before the first), less the overlap; `seen` notes what this one sees.

    The mark moves once, when the whole sweep is complete and no task of the handlers that noted values is dead, or was skipped
    by Limpet: to the highest value that was seen, in whatever order.
    """

    name: str
    order: Order
    handler: str
    reached: Mark | None
    overlap: object
    check_open: Callable[[], None] = field(repr=False)
    _low: str = ""
    _high: str = ""
    _count: int = 0

    @property
    def value(self) -> Mark | None:
        """What the last complete sweep reached, moved back by the overlap; None before the first."""
        return None if self.reached is None else overlapped(self.reached, self.overlap)

    def seen(self, value: Mark) -> None:
        """Note a value of this sweep. UsageError where it has no order, or another type than the values before."""
        self.check_open()
        text = self._encoded(value)
        if not self._count or less(text, self._low):
            self._low = text
        if not self._count or less(self._high, text):
            self._high = text
        self._count += 1

    def is_new(self, value: Mark) -> bool:
        """Whether a value is beyond what was reached, overlap included: newest-first sweeps stop at the first that is not."""
        floor = self.value
        return floor is None or less(encode(floor), self._encoded(value))

    def _encoded(self, value: Mark) -> str:
        """The text of a value that is of one type with the others."""
        try:
            text = encode(value)
        except UsageError as error:
            raise UsageError(f"mark {self.name}: {error}") from None
        known = encode(self.reached) if self.reached is not None else self._low
        if known and kind_of(known) != kind_of(text):
            raise UsageError(f"mark {self.name}: {value!r} is of type {kind_of(text)}, the values before are of type {kind_of(known)}")
        return text

    def note(self) -> Seen | None:
        """What is to be committed; None where nothing was seen."""
        gaps = self.order == "desc" or bool(self.overlap)
        return Seen(self.name, self.handler, self._low, self._high, self._count, gaps) if self._count else None


def mark_of(
    name: str, order: object, handler: str, reached: Mapping[str, str], overlap: object, check_open: Callable[[], None]
) -> HighWaterMark:
    """A mark for one task. UsageError for an order that is none."""
    if order not in ("asc", "desc"):
        raise UsageError(f'mark {name}: order {order!r}; expected "asc" (oldest first) or "desc" (newest first)')
    text = reached.get(checked_name("mark", name))
    return HighWaterMark(name, "asc" if order == "asc" else "desc", handler, decode(text) if text else None, overlap, check_open)
