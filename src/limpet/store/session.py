"""What a server's connection is in the middle of, and what becomes of it when the line breaks.

A connection that is lost outside a transaction is opened again by whoever needs it next, so an outage ends by
itself. One that is lost inside a transaction stays lost until that was rolled back: what was staged, fenced and
written on the old connection is gone with it, and half of a batch on a new one would be half a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from limpet.errors import StoreUnavailable

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Session:
    """The state of one connection. `open` makes a new one; the limits are seconds that one call may take."""

    place: str
    open: Callable[[], None]
    write_s: float  # inside a transaction that writes
    read_s: float  # outside, and in a snapshot
    readonly: bool = False  # opened for reading: nothing may be written on it
    under_way: bool = False  # a transaction of ours, from staging or BEGIN to COMMIT or ROLLBACK
    is_snapshot: bool = False  # it writes nothing
    is_lost: bool = False
    is_closed: bool = False

    @property
    def limit_s(self) -> float:
        """How long the next call may take."""
        return self.write_s if self.under_way and not self.is_snapshot else self.read_s

    def ready(self) -> None:
        """A connection to say something on; StoreUnavailable where there is none, or where it broke in a transaction."""
        if self.is_closed:
            raise StoreUnavailable(f"{self.place}: this connection was closed")
        if self.is_lost:
            if self.under_way:
                raise StoreUnavailable(f"{self.place}: the connection was lost inside a transaction, which wrote nothing")
            self.open()

    def may_write(self) -> None:
        """A connection to write on; StoreUnavailable on one that was opened for reading: behind a pooler no setting holds that."""
        if self.readonly:
            raise StoreUnavailable(f"{self.place}: this connection was opened for reading")
        self.ready()

    def again(self, action: Callable[[], Answer]) -> Answer:
        """Do what may be done twice (BEGIN, a read outside a transaction): an idle connection may turn out to be lost."""
        self.ready()
        try:
            return action()
        except StoreUnavailable:
            if self.under_way or not self.is_lost:
                raise
        self.open()
        return action()

    def begun(self, *, snapshot: bool = False) -> None:
        """A transaction is open."""
        self.under_way, self.is_snapshot = True, snapshot

    def ended(self) -> None:
        """No transaction is open."""
        self.under_way = self.is_snapshot = False

    def opened(self) -> None:
        """The connection is new."""
        self.is_lost = self.is_closed = False
        self.ended()
