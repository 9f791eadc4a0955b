"""Every error Limpet raises: the class says what the caller must do.

    UsageError      fix the call, the spider, the flags or the environment
    OwnershipLost   drop the batch; never retry it
    StoreError      the database said no (StoreBusy is safe to repeat)
    FetchError      the web said no (`retryable` says whether to ask again)
    HandlerOutcome  a handler's own verdict on its task: Retry, Skip, Dead, Blocked

A message says what, which one, what was expected and what was found. It never
holds a credential: what it repeats passes through `credentials.hidden`, and addresses
of databases through `store.dialect.public_dsn`.
"""

from __future__ import annotations

from limpet.credentials import hidden


class LimpetError(Exception):
    """The root of all errors that Limpet raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(hidden(arg) if isinstance(arg, str) else arg for arg in args))


class UsageError(LimpetError):
    """The call, spider, flag, file or environment is wrong: fix it and call again (exit 2)."""


class UrlRejected(UsageError):
    """A text that is no URL Limpet can request, with the reason as one stable word in `reason`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RecordError(UsageError):
    """A record, or the type of one, that cannot be stored as it is."""


class IncompatibleRecord(RecordError):
    """A record type whose table already exists with another shape: rename it, or migrate the table."""


class Missing(UsageError):
    """A selector that a handler relies on matched nothing on the page."""


class HandlerRevoked(LimpetError):
    """A handler wrote after its time-out: its `tx` no longer takes anything."""


class OwnershipLost(LimpetError):
    """The shard has another owner, or a newer epoch: drop the batch, never retry it."""


class WentBack(OwnershipLost):
    """The database is older than what this process has seen of it: drop every shard and cache."""


class StoreError(LimpetError):
    """The database refused; no task is to blame and nothing was written."""


class DatasetChanged(StoreError):
    """A dataset has other fields than this process knows: another spider file has changed it meanwhile."""


class StoreBusy(StoreError):
    """Another writer was in the way: the whole transaction is safe to repeat."""


class StoreUnavailable(StoreError):
    """The database cannot take writes now (disk full, read-only, I/O error): wait, or stop resumable."""


class OutcomeUnknown(StoreError):
    """COMMIT was sent and its answer never came: resolve before anything else is done."""


class RightMissing(StoreError):
    """The database lets this role not do what the work needs; the message names the GRANT that does."""


class StoreCorrupt(StoreError):
    """The file is no database, or a damaged one: nothing more is written to it."""


class SchemaNewer(StoreError):
    """The database was written by a newer Limpet: upgrade this installation."""


class PoisonRow(StoreError):
    """The database refused the *data* of a batch: bisect to the row that it refuses."""


class InvariantBroken(StoreError):
    """Rows contradict the protocol. The job is halted; `invariant` names which one (I1 ... I10)."""

    def __init__(self, message: str, *, invariant: str) -> None:
        super().__init__(message)
        self.invariant = invariant


class FetchError(LimpetError):
    """A request that brought no usable answer.

    `kind` is one stable word (timeout, connect, dns, tls, reset, truncated, too_large, bad_answer,
    redirect_loop, status, robots_unreachable, ...). `retryable` says whether another try can help.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        retryable: bool = True,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.status = status
        self.retry_after_s = retry_after_s


class HandlerOutcome(LimpetError):
    """Raised by a handler to end its task otherwise than done; what it emitted is dropped."""


class Retry(HandlerOutcome):
    """Try this task again later; counts as a strike."""

    def __init__(self, reason: str = "asked by the handler", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_s = after_s


class Skip(HandlerOutcome):
    """End this task as skipped, with a reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Dead(HandlerOutcome):
    """Give this task up at once, with a reason; it waits as a dead letter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Blocked(HandlerOutcome):
    """The site shows a block page: throttle the host; no strike."""

    def __init__(self, reason: str = "blocked", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after_s = after_s


class HostPaused(LimpetError):
    """The host that a keyed task would ask waits for longer than a task can: the task goes back, and nobody is to blame."""

    def __init__(self, authority: str, *, after_s: float, reason: str) -> None:
        super().__init__(f"{authority} waits for {after_s:.1f} s: {reason or 'its pace'}")
        self.after_s = after_s
