"""Keys that are surely in the database: an exact, bounded memory of what was committed.

Nine links in ten are known, and this answers for them without a question. It holds only keys whose
commit was definite, so it may say "known" finally; it belongs to one life of the database and is
emptied on every new connection, lost shard and unknown outcome: a fail-over may have lost what it
remembers, and a link that it then called known would be lost with it.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Keys of one generation; two are kept. 16-byte keys cost 93 bytes each in a set: 190 MB at most.
KEYS_MAX = 1_000_000


class KnownKeys:
    """Two generations of a set: the older one is forgotten whole when the newer is full."""

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._newer: set[bytes] = set()
        self._older: set[bytes] = set()
        self._incarnation = ""

    def __contains__(self, key: bytes) -> bool:
        return key in self._newer or key in self._older

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def update(self, keys: Iterable[bytes]) -> None:
        """Remember keys that a definite commit wrote, or found there."""
        self._newer.update(keys)
        if len(self._newer) > self._keys_max:
            self._older, self._newer = self._newer, set()

    def clear(self) -> None:
        """Forget everything."""
        self._newer, self._older = set(), set()

    def belongs_to(self, incarnation: str) -> None:
        """Forget everything where the database's life is another than before."""
        if incarnation != self._incarnation:
            self.clear()
            self._incarnation = incarnation
