"""The frozen values that cross layers: what a try found, and what one batch does to one shard.

A part is self-contained: its own results, links, records and host rows, nothing merged with
another shard's. Its id is the digest of its content, so other content is another id, and the
same content is the same id after any number of failures. Nothing here reads a clock or draws
at random. Invariants: I1, I2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

from limpet.credentials import hidden
from limpet.task import Epoch, Outcome, ShardId, TaskId, TaskKey
from limpet.url import authority_of

DIGEST_BYTES = 16


def digest(*pieces: bytes) -> bytes:
    """16 bytes over the pieces, each with its length, so that no two lists share a text.

    BLAKE2b (RFC 7693): a fast non-cryptographic hash could be made to collide by a hostile site.
    """
    return blake2b(b"".join([len(piece).to_bytes(8, "big") + piece for piece in pieces]), digest_size=DIGEST_BYTES).digest()


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, every character as itself."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Link:
    """A task to be discovered. The shard, host and key follow from `text` alone."""

    shard: ShardId
    host: int  # 64 bits of the digest of the authority: the pace it shares
    key: TaskKey
    text: str  # canonical text that the key digests
    url: str  # as found: what is requested
    handler: str = ""  # "" where the spider's routes decide
    payload: str = ""  # canonical JSON of method, headers, body, data; "" for a plain GET
    priority: int = 0  # larger is sooner
    depth: int = 0  # of the first discovery
    hops: int = 0  # redirects so far
    chain: bytes = b""  # keys of the redirect chain, 16 bytes each


@dataclass(frozen=True, slots=True)
class Offer:
    """A record that a task emits: one row for one key of one dataset."""

    dataset: str
    key: bytes
    key_text: str
    content: bytes  # digest over the fields that are not volatile
    values: tuple[object, ...]  # as stored, in the order of the dataset's columns


class Billed(StrEnum):
    """What became of the money of one try. `reserved` is committed with the claim, before any request."""

    RESERVED = "reserved"
    CHARGED = "charged"
    REFUNDED = "refunded"  # asked, and not to be paid for
    VOID = "void"  # nothing was sent
    UNKNOWN = "unknown"  # sent, and nobody knows: counts as spent until it is settled


#: Micro-credits of a credit: money is counted in whole numbers.
CREDIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Charge:
    """What one try cost, as it ended."""

    state: Billed
    amount: int = 0  # micro-credits; 0 unless charged
    host: str = ""  # who was asked
    requests: int = 0  # sent
    reason: str = ""  # for people: "status 200", "time-out"
    anew: bool = False  # the next try wants another answer, under another idempotency key


#: Under this name the kept answers of a task hold which of its tries, last, wanted another answer than the one that was paid for.
ANEW = bytes(16)


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer that was paid for, kept until its task is done."""

    task: TaskId
    tries: int
    request: bytes  # digest of method, URL and body
    status: int
    url: str
    headers: str  # JSON: pairs
    body: bytes  # compressed
    amount: int = 0  # micro-credits that the try has cost so far


@dataclass(frozen=True, slots=True)
class RegisterWrite:
    """The next version of a shared value, written on the condition that `before` is still the last one."""

    name: str
    before: int
    value: str  # canonical JSON


@dataclass(frozen=True, slots=True)
class Seen:
    """What one try saw of an incremental sweep: lowest and highest value, as "type:text"."""

    name: str
    handler: str
    low: str
    high: str
    count: int
    gaps: bool = False  # whether what lies between this sweep and the one before is worth a warning


@dataclass(frozen=True, slots=True)
class Grant:
    """What an owner asks of its job's purse for one shard; alone in its commit, since the purse is one row for all."""

    cost: int = 0  # of the cheapest task that waits for money: less is of no use; 0 to give all of it back
    day: str = ""  # the day whose purse pays too; "" for none
    day_purse: str = ""
    day_budget: int | None = None  # micro-credits that the day's purse may hold; None for no limit


#: `rank` orders the tasks of one host: priority first, then depth, so that breadth comes first.
DEPTH_MAX = 2**20 - 1


def rank_of(priority: int, depth: int) -> int:
    """The place of a task among those of its host; smaller is sooner."""
    return -priority * (DEPTH_MAX + 1) + min(depth, DEPTH_MAX)


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed task, as it was read back after the commit that claimed it."""

    shard: ShardId
    id: TaskId
    key: TaskKey
    tries: int
    strikes: int
    lost: int
    throttled: int
    host: int
    text: str
    url: str
    handler: str
    payload: str
    priority: int
    depth: int
    hops: int
    chain: bytes
    solo: bool = False
    solo_losses: int = 0
    throttled_since_ms: int = 0
    revisits: int = 0  # times a person put it back: its former records may have to go

    @property
    def authority(self) -> str:
        """Host and port of the canonical text, without the scheme: the name of its pace."""
        return authority_of(self.text)


@dataclass(frozen=True, slots=True)
class Result:
    """How one try ended, with everything that commits with it."""

    claim: Claim
    outcome: Outcome
    reason: str = ""  # one stable word or phrase; never empty for skipped, failed, dead
    detail: str = ""  # for people: message, traceback; bounded, and without credentials
    status: int = 0  # HTTP status of the last answer, 0 for none
    strike: bool = False
    due_in_ms: int = 0  # FAILED, THROTTLED, RELEASED: not before so long after the commit
    park: bool = False  # RELEASED: no handler of this release knows it
    links: tuple[Link, ...] = ()
    offers: tuple[Offer, ...] = ()
    url: str = ""  # for people: address of the answer, or of the target of a move, where it differs from the claim's; without credentials
    moved_to: bytes = b""  # SKIPPED, moved: key of the target
    size: int = 0  # approximate bytes of links and offers, for the commit's byte limit
    is_final: bool = False  # DEAD: what the handler for final failures wrote commits with it
    charge: Charge | None = None  # of a try that costs; None where nothing was sent
    drops_kept: bool = False  # the answers that were kept for the task are of no further use
    tallies: tuple[tuple[str, int], ...] = ()
    registers: tuple[RegisterWrite, ...] = ()
    seen: tuple[Seen, ...] = ()
    _digest: bytes = field(default=b"", init=False, repr=False, compare=False)  # made once: a commit asks three times

    def __post_init__(self) -> None:
        if self.detail:  # whoever made it: an error of a library repeats a URL as it was
            object.__setattr__(self, "detail", hidden(self.detail))
        if self.url:  # a site may put user and password into the target of a redirect
            object.__setattr__(self, "url", hidden(self.url))

    def digest(self) -> bytes:
        """What this try offered: links by key, records by (dataset, key, content), then shared values where it has any."""
        if not self._digest:
            links = sorted({link.key for link in self.links})
            offers = sorted({(offer.dataset, offer.key): offer.content for offer in self.offers}.items())
            offered = (piece for (name, key), content in offers for piece in (name.encode(), key, content))
            object.__setattr__(self, "_digest", digest(*links, b"|", *offered, *self._shared()))
        return self._digest

    def _shared(self) -> tuple[bytes, ...]:
        if not (self.tallies or self.registers or self.seen):
            return ()
        shared = [
            sorted(self.tallies),
            sorted([r.name, r.before, r.value] for r in self.registers),
            sorted([s.name, s.handler, s.low, s.high, s.count] for s in self.seen),
        ]
        return (b"|", canonical_json(shared).encode())


@dataclass(frozen=True, slots=True)
class HostRow:
    """The pace of one host, committed with the batch that changed it. Times are relative."""

    host: int
    authority: str
    delay_ms: int  # between the end of an answer and the next request
    wait_ms: int  # until the next request may be sent, counted from the commit
    pause: str = ""  # why it waits longer than its delay, for `limpet status`
    errors: int = 0  # failures in a row


@dataclass(frozen=True, slots=True)
class RobotsRow:
    """What one origin's robots.txt said, committed with the batch that asked."""

    origin: str  # scheme://authority
    outcome: str  # parse | allow_all | disallow_all
    status: int
    body: bytes  # decoded rules as UTF-8, cut at 512,000 bytes
    ttl_ms: int  # how long it may be used, counted from the commit


@dataclass(frozen=True, slots=True)
class SourceMove:
    """A source's position, moved by compare-and-set, with the tasks that were read from it."""

    source: int
    before: int
    after: int
    closed: bool
    links: tuple[Link, ...] = ()


class Kind(StrEnum):
    """What a batch is for. Every fenced transaction is a batch."""

    WORK = "work"  # results, claims, sources
    TAKEOVER = "takeover"
    RELEASE = "release"  # a clean stop gives the shard up
    REQUEST = "request"  # what a person asked for
    REPAIR = "repair"


@dataclass(frozen=True, slots=True)
class Want:
    """How many tasks a part would like to claim, and on which hosts it must not."""

    tasks: int = 0
    per_host: int = 0  # at most so many of one host
    busy: dict[int, int] = field(default_factory=dict)  # host -> how many more it may take; absent: per_host
    solo: bool = False  # one suspect, alone
    after_host: int = -(2**63)  # where the round of hosts goes on
    floors: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # host -> (rank, id) up to which it was claimed already
    costs: Mapping[str, int] = field(default_factory=dict)  # handler -> micro-credits reserved for a try
    prices: Mapping[int, int] = field(default_factory=dict)  # host -> the same, of those on which all tasks are such a handler's
    day: str = ""  # the day whose purse pays too; "" for none


@dataclass(frozen=True, slots=True)
class Part:
    """What one batch does to one shard. Frozen before the first attempt to commit it."""

    job: int
    shard: ShardId
    owner: str
    epoch: Epoch
    n: int
    kind: Kind = Kind.WORK
    results: tuple[Result, ...] = ()
    hosts: tuple[HostRow, ...] = ()
    robots: tuple[RobotsRow, ...] = ()
    sources: tuple[SourceMove, ...] = ()
    kept: tuple[Kept, ...] = ()
    grant: Grant | None = None
    verified: int = 0  # verify's cursor moves here, 0 for no move
    code: bytes = b""  # digest of the spider's code

    def content_digest(self) -> bytes:
        """The frozen content: one line per try, then everything else that the batch writes."""
        tries = (
            digest(r.claim.key, r.claim.tries.to_bytes(8, "big"), r.outcome.encode(), r.reason.encode(), r.digest(), r.moved_to)
            for r in self.results
        )
        rest = canonical_json(
            [
                [[h.host, h.authority, h.delay_ms, h.wait_ms, h.pause, h.errors] for h in self.hosts],
                [[r.origin, r.outcome, r.status, r.body.hex(), r.ttl_ms] for r in self.robots],
                [[s.source, s.before, s.after, s.closed, [link.key.hex() for link in s.links]] for s in self.sources],
                self.verified,
                [[k.task, k.tries, k.request.hex(), k.status, k.amount, digest(k.body).hex()] for k in self.kept],
                [self.grant.cost, self.grant.day, self.grant.day_purse] if self.grant else None,
                [[r.claim.id, r.charge.state, r.charge.amount, r.charge.requests] for r in self.results if r.charge],
            ]
        )
        return digest(*tries, rest.encode("utf-8", "surrogatepass"))

    def batch_id(self) -> bytes:
        """The digest of (job, shard, owner, epoch, n, kind, content): other content, other id."""
        head = f"{self.job}|{self.shard}|{self.owner}|{self.epoch}|{self.n}|{self.kind}"
        return digest(head.encode(), self.content_digest())

    def without(self, bad: Iterable[TaskId]) -> Part:
        """The same part without the results of some tasks: other content, so another id."""
        dropped = set(bad)
        return replace(self, results=tuple(r for r in self.results if r.claim.id not in dropped))


def tries_digest(rows: Sequence[tuple[bytes, int, str, str, bytes]]) -> bytes:
    """The ledger's digest over attempt rows (key, try, outcome, reason, offered), in the order of (key, try).

    `verify` recounts it from the rows; the order is that of the rows themselves, not of the batch.
    """
    return digest(
        *(
            digest(key, tries.to_bytes(8, "big"), outcome.encode(), reason.encode(), offered)
            for key, tries, outcome, reason, offered in sorted(rows)
        )
    )
