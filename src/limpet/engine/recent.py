"""A bounded memory: of more than so many, what was not asked for longest goes first."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by name. Losing one costs asking again for it, and nothing else.

    >>> known = Recent[int](2)
    >>> known.keep("a", 1), known.keep("b", 2), known.keep("a", 9), known.keep("c", 3)
    (1, 2, 1, 3)
    >>> [known.get(name) for name in "abc"], len(known)
    ([1, None, 3], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, Value] = {}

    def keep(self, name: str, value: Value) -> Value:
        """The value that the name has; this one, where it has none yet."""
        kept = self._values[name] = self._values.pop(name, value)
        while len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return kept

    def get(self, name: str) -> Value | None:
        """The value of a name; None where it has none, or no longer."""
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        """Whether a name has a value."""
        return name in self._values

    def __len__(self) -> int:
        """How many there are."""
        return len(self._values)

    def clear(self) -> None:
        """Forget all of them."""
        self._values.clear()
