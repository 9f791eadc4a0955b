"""High-water marks of a job that is complete: moved, and people told what holds one back, or what a sweep has left out."""

from __future__ import annotations

import logging

from limpet.engine.spider import Spider
from limpet.store.dialect import Database
from limpet.store.jobs import Job
from limpet.store.shared import move_marks

log = logging.getLogger("limpet.marks")


def settle_marks(db: Database, job: Job, spider: Spider) -> None:
    """Move the marks of a complete job; a warning for each that stays, and for each gap. Again it changes nothing."""

    def handler_of(text: str) -> str:
        route = spider.route(text)
        return route.handler.name if route else ""

    for moved in move_marks(db, job, handler_of):
        held = moved.held
        if held:
            log.warning("mark %s stays where it is: %s; %s", moved.name, held, _help(has_types=bool(held.types), has_dead=bool(held.dead)))
        if moved.gap:
            log.warning("mark %s: a gap: %s", moved.name, moved.gap)


def _help(*, has_types: bool, has_dead: bool) -> str:
    if has_types:
        return "let its handlers note values of one type: a new slot moves it"
    return "`limpet dead` lists them" if has_dead else "`limpet retry --state skipped` asks again"
