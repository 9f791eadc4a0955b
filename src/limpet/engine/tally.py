"""What a run did so far, from definite commits alone; kept over incarnations of its worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from limpet.store.commit import Committed
from limpet.task import Outcome


@dataclass(slots=True)
class Tally:
    """What this run did so far; kept over incarnations."""

    done: int = 0
    skipped: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0
    discovered: int = 0
    records: dict[str, int] = field(default_factory=dict)

    def add(self, committed: Committed) -> None:
        """Count what a definite commit holds."""
        for part in committed.parts:
            for result in part.results:
                self.done += result.outcome is Outcome.DONE
                self.skipped += result.outcome is Outcome.SKIPPED
                self.failed += result.outcome in (Outcome.FAILED, Outcome.THROTTLED)
                self.dead += result.outcome is Outcome.DEAD
        self.discovered += committed.discovered
        for name, (new, _replaced, _kept, removed, _conflicts) in committed.deltas.items():
            self.records[name] = self.records.get(name, 0) + new - removed
