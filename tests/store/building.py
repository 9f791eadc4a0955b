"""A little crawl of everything that a store can hold, driven through the real store, one legal operation at a time.

`Crawl` draws what each try ends in from a seeded lot: pages and records that share keys, retries, throttles, moves, skips,
dead letters. Its operations may come in any order; whatever they build is a legal database, which `verify` must pass.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace

from limpet.batch import Claim, HostRow, Link, Offer, Result, RobotsRow, Want
from limpet.store import Store, jobs, lease
from limpet.store.dialect import Row
from limpet.task import Outcome
from tests.store.hands import (
    SHARDS,
    Hand,
    dead,
    done,
    emitted,
    failed,
    found_job,
    host_in,
    link,
    product_type,
    released,
    skipped,
    table_name,
    throttled,
)

#: One dataset of each kind: of a job; of a spider, where the newer or the older slot wins; versions by slot.
KINDS = {
    "product": product_type(),
    "price": product_type("spider", "replace", "price"),
    "first": product_type("spider", "keep", "first"),
    "story": product_type("spider", "history", "story"),
}
TABLES = {name: table_name(kind) for name, kind in KINDS.items()}

#: Operations that may come in any order.
OPERATIONS = ("seed", "work", "work", "work", "claim", "kill", "stop", "alone", "put_back", "put_named_back", "note", "tomorrow")

#: Keys that all pages share, so that many emit the same one.
SKUS = 24

#: Milliseconds until a retry: at once, or never in a test, so that a crawl depends on its lot alone and not on the clock.
WAITS_MS = (0, 0, 10**7)


class Crawl:
    """A job under way, and the worker that it has now."""

    def __init__(self, store: Store, seed: int = 1, *, kinds: Iterable[str] = tuple(KINDS)) -> None:
        self.store = store
        store.settings = replace(store.settings, solo_backoff_s=())  # a task that killed its worker may try again at once
        self.kinds = {name: KINDS[name] for name in kinds}
        self.lot = random.Random(seed)
        self.slot = 0
        self.pages = 0
        if store.job is None:
            found_job(store, "0")
        store.ensure_datasets("shop", {TABLES[name]: kind for name, kind in self.kinds.items()})
        self.hand = Hand.on(store)
        self.hand.take()

    @property
    def job(self) -> jobs.Job:
        """The job of the slot that is crawled now."""
        return self.hand.job

    # -- operations ------------------------------------------------------------------------

    def do(self, *operations: str) -> Crawl:
        """Operations by name."""
        for operation in operations:
            getattr(self, operation)()
        return self

    def seed(self, number: int = 12, *, all_new: bool = False) -> None:
        """Pages from a new source, some of them known."""
        shard = self.lot.choice(sorted(self.hand.held))
        pages = [self._page(self.pages if all_new else None, priority=self.lot.choice((0, 0, 5, -3))) for _ in range(number)]
        self.hand.seed(*pages, shard=shard)

    def claim(self, most: int = 8) -> None:
        """A batch that only claims."""
        self.hand.claim(most)

    def work(self, most: int = 8) -> None:
        """End what is claimed, in batches of several shards, and claim anew."""
        by_shard: dict[int, list[Result]] = {}
        for claim in list(self.hand.claims.values()):
            if self.lot.random() < 0.9:
                by_shard.setdefault(claim.shard, []).append(self._end(claim))
        chosen = [shard for shard in self.hand.held if by_shard.get(shard) or self.lot.random() < 0.5]
        self.hand.commit(*(self._part(shard, by_shard.get(shard, [])) for shard in sorted(chosen)), want=Want(most, most))

    def alone(self) -> None:
        """Claim one suspect, with nothing else in hand; it may kill this worker too."""
        for shard in sorted(self.hand.held):
            if self.hand.claims:
                self.work(0)
            elif self.hand.claim(1, shard, solo=True):
                break
        if self.lot.random() < 0.7:
            self.kill()

    def kill(self) -> None:
        """The worker dies with what it has claimed; another takes its shards over."""
        dead_one, self.hand = self.hand, Hand.on(self.store)
        self.hand.bury(dead_one)
        self.hand.take()
        dead_one.leave()

    def stop(self) -> None:
        """A clean stop: everything claimed is given back, every shard given up; another worker begins."""
        self._give_up()
        self.hand = Hand.on(self.store)
        self.hand.take()

    def put_back(self) -> None:
        """A person has tasks put back by the state that they ended in."""
        states = self.lot.choice((["dead"], ["dead", "skipped"], ["done"]))
        self._ask(self.lot.sample(sorted(self.hand.held), 2), {"states": states})

    def put_named_back(self) -> None:
        """A person has tasks put back by name, ended or not."""
        ended = self.rows("SELECT id, shard FROM task WHERE job = ? ORDER BY id", self.job.id)
        for task, shard in self.lot.sample(ended, min(2, len(ended))):
            self._ask([shard], {"tasks": [task]})

    def note(self) -> None:
        """A batch of nothing but paces and robots.txt."""
        shard = self.lot.choice(sorted(self.hand.held))
        self.hand.commit(self._part(shard, [], always=True))

    def tomorrow(self) -> None:
        """A job of the next slot, with the same spider's datasets; the worker goes over to it."""
        self._give_up()
        self.slot += 1
        found_job(self.store, str(self.slot % 3))
        self.hand = Hand.on(self.store)
        self.hand.take()
        self.seed()
        self.claim()

    def finish(self) -> Crawl:
        """Work until nothing can be claimed any more."""
        for _ in range(60):
            self.work(50)
            if not self.hand.claims and not self.rows("SELECT 1 FROM task WHERE job = ? AND lane IS NOT NULL", self.job.id):
                break
        return self

    def leave(self) -> None:
        """Close what is open, without another word to the database."""
        self.hand.leave()

    # -- looking ---------------------------------------------------------------------------

    def rows(self, sql: str, *values: object) -> list[Row]:
        """What a query finds."""
        return self.hand.db.rows_text(sql, values)

    # -- how -------------------------------------------------------------------------------

    def _give_up(self) -> None:
        for shard in sorted(self.hand.held):
            self.hand.release(shard, *(released(c, reason="stopped") for c in self.hand.claims.values() if c.shard == shard))
        lease.retire(self.hand.db, self.hand.worker)
        self.hand.store.close()

    def _page(self, number: int | None = None, **more: object) -> Link:
        """A page of some host, new or known; its depth and address vary, its text decides."""
        number = self.lot.randrange(self.pages + 4) if number is None else number
        self.pages = max(self.pages, number + 1)
        host = host_in(number % SHARDS, number % 3)
        return link(f"http://{host}/p/{number}{self.lot.choice(('', '', '/', '#top'))}", depth=self.lot.randrange(4), **more)

    def _part(self, shard: int, results: list[Result], *, always: bool = False) -> object:
        hosts, robots = (), ()
        if always or self.lot.random() < 0.3:
            name = host_in(shard, self.lot.randrange(3))
            hosts = (HostRow(link(name).host, name, 100, 5, self.lot.choice(("", "status 429"))),)
            robots = (RobotsRow(f"http://{name}", "parse", 200, b"User-agent: *\nDisallow: /x", 1000),)
        return self.hand.part(shard, *results, hosts=hosts, robots=robots)

    def _end(self, claim: Claim) -> Result:
        lot = self.lot.random()
        if lot < 0.66:
            return done(claim, *(self._page() for _ in range(self.lot.randrange(4))), offers=self._offers(claim))
        if lot < 0.74:
            return dead(claim) if claim.strikes >= 3 else failed(claim, self.lot.choice(WAITS_MS))
        if lot < 0.80:
            return skipped(claim)
        if lot < 0.84:
            target = self._page()
            return Result(claim, Outcome.SKIPPED, reason="moved", links=(target,), moved_to=target.key, url=target.url)
        if lot < 0.89:
            return dead(claim, "handler:KeyError") if self.lot.random() < 0.5 else Result(claim, Outcome.DEAD, reason="status 410")
        return (
            throttled(claim, self.lot.choice(WAITS_MS))
            if lot < 0.94
            else released(claim, due_in_ms=self.lot.choice(WAITS_MS), park=self.lot.random() < 0.2)
        )

    def _offers(self, claim: Claim) -> list[Offer]:
        """Records of some datasets, each key once; prices differ from page to page, and from try to try."""
        found: dict[tuple[str, bytes], Offer] = {}
        for name, kind in self.kinds.items():
            for _ in range(self.lot.choice((0, 1, 1, 2))):
                offer = emitted(f"s{self.lot.randrange(SKUS)}", self.lot.randrange(3), seen=self.lot.randrange(10**6), kind=kind)
                found[name, offer.key] = offer
        return list(found.values())

    def _ask(self, shards: Iterable[int], argument: dict[str, object]) -> None:
        db = self.hand.db
        db.begin()
        for shard in shards:
            db.run("put_request", job=self.job.id, shard=shard, what="retry", argument=json.dumps(argument), who="a person")
        db.commit()


def a_crawl(store: Store, seed: int = 1, **more: object) -> Crawl:
    """One that has met everything: several workers, take-overs, dead letters, conflicts, removals, two slots."""
    crawl = Crawl(store, seed, **more)  # type: ignore[arg-type]
    crawl.do("seed", "seed", "claim", "work", "kill", "work", "note", "work", "kill", "work", "kill", "work", "alone")
    crawl.do("put_back", "work", "put_named_back", "work", "work", "stop", "seed", "work", "put_back", "work", "work")
    crawl.seed(all_new=True)
    crawl.do("tomorrow", "work", "work", "kill", "work", "put_back", "work", "put_named_back", "work", "work")
    return crawl
