"""What one repair works with, and what it gathers until it closes its books."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from limpet.batch import Part
from limpet.settings import Settings
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.proofs import Finding
from limpet.store.tables import Table


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A record that was taken away because it could not be trusted, as it was."""

    dataset: str
    key_text: str
    task: int
    values: dict[str, object]

    def to_json(self) -> dict[str, object]:
        """For `--json`, and for people who want to look at it."""
        return {"dataset": self.dataset, "key": self.key_text, "task": self.task, "values": self.values}


@dataclass(slots=True)
class Work:
    """A repair under way. Nothing of it is definite before its one COMMIT."""

    db: Database
    job: Job
    settings: Settings
    tables: Mapping[str, Table]
    take_over: Callable[[int], Part]  # makes a shard ours, in this transaction
    owned: dict[int, Part] = field(default_factory=dict)  # shard -> the take-over of it
    put_back: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # shard -> tasks to be tried again
    gone: Counter[tuple[int, int]] = field(default_factory=Counter)  # (shard, batch) -> tasks it discovered that are no more
    adopted: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # shard -> tasks that its repair discovers
    withdrawn: list[Withdrawn] = field(default_factory=list)
    changes: int = 0  # rows that were written, beside the books
    mended: Counter[str] = field(default_factory=Counter)
    beyond: list[Finding] = field(default_factory=list)

    def own(self, shard: int) -> Part:
        """The take-over of a shard, made where it is first needed."""
        if shard not in self.owned:
            self.owned[shard] = self.take_over(shard)
        return self.owned[shard]

    def ask_back(self, shard: int, tasks: Iterable[int]) -> None:
        """Have tasks tried again; those that have not ended will be anyway."""
        self.own(shard)
        self.put_back[shard].update(tasks)

    def give_up(self, finding: Finding) -> None:
        """Note that a finding could not be mended after all."""
        self.beyond.append(finding)
