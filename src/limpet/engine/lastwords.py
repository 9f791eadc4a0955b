"""The handler for final failures: what a spider writes for a task that is given up commits with the dead state.

It is called for every dead letter but those that nobody is there to call it for: a task that killed its worker, and one whose
data the database refused. What it raises is noted with the dead letter, which stays one; nothing that it wrote is kept then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from limpet.batch import Claim, Result
from limpet.engine.handle import How, handle
from limpet.engine.keyed import DETAIL_MAX, written
from limpet.engine.routes import Handler
from limpet.engine.threads import HandlerThreads
from limpet.engine.tx import Terms, Tx
from limpet.engine.watchdog import Watchdog

log = logging.getLogger("limpet.dead")


@dataclass(frozen=True, slots=True)
class DeadTask:
    """A task that is given up, as the handler for final failures sees it."""

    text: str  # the canonical text
    url: str  # as found
    handler: str  # "" where the routes decided
    reason: str
    detail: str  # message or traceback
    status: int  # of the last answer; 0 for none
    tries: int
    arguments: Mapping[str, object]  # of a keyed task, as JSON has them
    data: object  # what a page's task was enqueued with

    @classmethod
    def of(cls, result: Result) -> DeadTask:
        """The task of a try that ended as dead."""
        claim = result.claim
        kept = json.loads(claim.payload or "{}")
        return cls(
            claim.text, claim.url, claim.handler, result.reason, result.detail, result.status, claim.tries, kept.get("arguments", {}),
            kept.get("data"),
        )  # fmt: skip


async def last_words(
    handler: Handler, result: Result, *, terms: Terms, tables: Mapping[str, str], timeout_s: float, watchdog: Watchdog,
    threads: HandlerThreads,
) -> Result:  # fmt: skip
    """The dead result, with what the handler for final failures wrote. Raises CancelledError, and HandlersStuck where none can start."""
    claim: Claim = result.claim
    tx = Tx(terms, claim, None)
    given = {"task": DeadTask.of(result)} if "task" in handler.takes else {}
    ending = await handle(handler, None, tx, given, timeout_s=timeout_s, watchdog=watchdog, threads=threads)
    if ending.kind is How.DONE:
        return replace(written(result, tx, tables), is_final=True)
    log.warning("%s: %s() ended as %s, %s; nothing that it wrote is kept", claim.text, handler.name, ending.kind, ending.reason)
    return replace(
        result, detail=f"{result.detail}\n{handler.name}() ended as {ending.kind}: {ending.reason}\n{ending.detail}"[-DETAIL_MAX:]
    )
