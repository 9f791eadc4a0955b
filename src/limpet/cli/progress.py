"""The progress bar of a run on a terminal; nothing at all where stderr is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from limpet.cli.printing import clean, count, cut

if TYPE_CHECKING:
    from limpet.engine.report import Progress

#: Characters of the reason for a wait, on one line with the rest.
WAITING_CHARS = 60


def line_of(progress: Progress) -> str:
    """What stands beside the bar."""
    pieces = [f"{count(progress.done, 'page')}", f"{progress.pages_per_s:.0f}/s"]
    pieces += [f"{count(progress.in_flight)} in flight"] if progress.in_flight else []
    pieces += [count(progress.workers, "worker")] if progress.workers else []
    pieces += [f"{count(progress.skipped)} skipped"] if progress.skipped else []
    pieces += [count(progress.dead, "dead letter")] if progress.dead else []
    pieces += [cut(clean(progress.waiting), WAITING_CHARS)] if progress.waiting else []
    return " · ".join(pieces)


@contextmanager
def bar(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """What takes the progress of a run, or None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = Console(stderr=True)
    with Bar(BarColumn(bar_width=24), TextColumn("{task.fields[shown]}", markup=False), console=console, transient=True) as shown:
        task = shown.add_task("", total=None, shown=Text("starting"))

        def update(progress: Progress) -> None:
            ended = progress.done + progress.skipped + progress.dead
            shown.update(task, total=max(1, progress.known), completed=ended, shown=line_of(progress))

        yield update
