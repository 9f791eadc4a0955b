"""Every default and limit of Limpet, in one table, each with its reason.

`Settings` is what a job runs under. Flags win over environment, environment over
`limpet.toml`, that over the spider, that over the table here (`limpet config` shows which).
Units stand last in each name. Nothing here reads a clock, a file or the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

#: Shards on SQLite: one process writes, so shards only bound what one take-over reclaims.
SHARDS_SQLITE = 16
#: Shards on a server: enough for 64 workers to own one each.
SHARDS_SERVER = 64
#: Largest number of shards a job may have: a commit fences each of its shards one by one.
SHARDS_MAX = 4096


def option(default: Any, doc: str) -> Any:
    """A setting with its default and the sentence that `limpet config` and the docs print."""
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The limits one run works under. Every value is an option of the command line."""

    # -- politeness ------------------------------------------------------------------------
    concurrency: int = option(16, "requests in flight in all")
    per_host: int = option(0, "requests in flight per host; 0 means 1, or 8 with no delay")
    delay_s: float = option(-1.0, "seconds between requests to a host, from the end of the last answer; -1 means 1, or 0 on loopback")
    crawl_delay_max_s: float = option(300.0, "a larger Crawl-delay of robots.txt is cut to this, and reported")
    retry_after_max_s: float = option(3600.0, "a larger Retry-After is cut to this")
    robots: bool = option(True, "obey robots.txt")
    nofollow: bool = option(False, "do not follow links marked rel=nofollow, nor pages whose robots meta says so")

    # -- the commit window -----------------------------------------------------------------
    commit_pages: int = option(500, "pages in a commit at the most: row-by-row commits cost others 42 % of their speed")
    commit_ms: int = option(1000, "milliseconds between commits at the most")
    commit_bytes: int = option(16 * 2**20, "bytes of records and links in a commit at the most")
    commit_pages_first: int = option(20, "pages in the first commit after a start; doubles up to commit_pages, so a crash loop still moves")
    commit_ms_first: int = option(50, "milliseconds until the first commit after a start; doubles up to commit_ms")
    poison_rows_max: int = option(
        5, "rows that the database refuses in one batch before the shard stops: more is a broken release, not poison"
    )

    # -- giving up -------------------------------------------------------------------------
    strikes: int = option(4, "failed tries until a task is dead: the first and three more")
    backoff_s: float = option(1.0, "seconds before the second try; times 4 for each further one, with jitter")
    backoff_max_s: float = option(600.0, "longest wait before a further try")
    suspect_after: int = option(3, "lost tries that make a task a suspect, to be run alone")
    solo_losses: int = option(3, "workers that a task may kill while it runs alone")
    solo_backoff_s: tuple[float, ...] = option(
        (5.0, 120.0), "waits after the first and second death of a worker under a task run alone: longer than a storm of kills"
    )
    throttles: int = option(20, "times a task may be throttled until it is dead")
    throttle_hours: float = option(24.0, "hours a task may be throttled until it is dead, or a host away until it is given up")
    outage_after: int = option(
        5, "failures in a row of different tasks of a host that make an outage of it, which strikes nobody; 0: never"
    )
    breaker: int = option(50, "unexpected exceptions in a row from one handler that pause the job")

    # -- money -----------------------------------------------------------------------------
    budget: float = option(-1.0, "credits that the job may spend; -1 leaves what an earlier run said (no limit at first), inf is no limit")
    budget_day: float = option(-1.0, "credits that all jobs of the spider may spend on one day of its time zone; -1 means no limit")

    # -- time-outs -------------------------------------------------------------------------
    connect_timeout_s: float = option(10.0, "to open a connection")
    read_timeout_s: float = option(10.0, "between two pieces of an answer")
    total_timeout_s: float = option(60.0, "for one request, whole")
    handler_timeout_s: float = option(60.0, "for a handler; its tx is revoked then")

    # -- sizes -----------------------------------------------------------------------------
    body_bytes_max: int = option(16 * 2**20, "bytes of a body, decompressed")
    record_bytes_max: int = option(2**20, "bytes of a record")
    url_bytes_max: int = option(8192, "bytes of a URL")
    hops_max: int = option(10, "redirects of a task")
    links_per_page_max: int = option(50_000, "links that one task may follow")

    # -- ownership -------------------------------------------------------------------------
    lease_s: float = option(10.0, "life of a worker on the database's clock; heartbeat and margin are a fifth of it each")
    outage_s: float = option(600.0, "a database server may be away so long before a run stops, resumable; SQLite stops at once")
    shards: int = option(0, "shards of a new job; 0 means 16 on SQLite, 64 on a server")

    # -- scope -----------------------------------------------------------------------------
    max_pages: int = option(0, "pages of the job at the most; 0 means no limit")
    max_depth: int = option(-1, "links from a start page at the most; -1 means no limit")
    max_dead: int = option(0, "dead letters that still count as success (exit 0)")

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats: a fifth of the lease."""
        return self.lease_s / 5

    @property
    def margin_s(self) -> float:
        """Seconds before the lease's end at which a worker stops sending: a fifth of the lease."""
        return self.lease_s / 5


def documented() -> dict[str, tuple[object, str]]:
    """Every setting: name -> (default, sentence). What `limpet config` and the docs print."""
    return {f.name: (f.default, str(f.metadata["doc"])) for f in fields(Settings)}
