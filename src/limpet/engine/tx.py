"""`tx`: the only way in which a handler writes. All of it commits with the task, or none of it.

It buffers and opens nothing. What cannot be stored is refused at the call, with the task and the
field named, so that the traceback points at the line that made it. At the handler's time-out it is
revoked: what was written is dropped, and a late write raises. Once the handler has returned it
is closed in the same way, but keeps what it holds for the commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

from parsel import Selector

from limpet.batch import Claim, Link, Offer, RegisterWrite, Seen
from limpet.engine.calls import Call
from limpet.engine.links import Here, Linker
from limpet.engine.request import Request, check_priority
from limpet.engine.routes import Handler
from limpet.engine.sharing import HighWaterMark, Order, Register, checked_name, mark_of
from limpet.engine.spider import Spider
from limpet.errors import HandlerRevoked, RecordError, UrlRejected, UsageError
from limpet.fetch.page import Anchor, Page
from limpet.record import RecordType, record_type
from limpet.settings import Settings

#: Bytes of records and links that one task may hold: four times what a commit waits for.
TASK_BYTES_MAX = 64 * 2**20
#: A link's own bytes beside its texts: keys, numbers, and its row's head.
LINK_BYTES = 64

#: What a task may add to a tally: its sum fits in 64 bits over many millions of tasks.
TALLY_MAX = 10**12

#: Why a link of a page was left out: it has no address; `links_per_page_max`; rel=nofollow.
NO_HREF = "no_href"
TOO_MANY = "too_many"
NOFOLLOW = "nofollow"

#: The attribute that leads on from an element; any other element is a mistake in the selector.
_LEADS = {"a": "href", "area": "href", "link": "href", "iframe": "src", "frame": "src"}

#: Where no route takes a task.
_NOBODY = Handler("", lambda: None, is_async=False, takes=frozenset(), needs=frozenset())

Target: TypeAlias = "str | Anchor | Selector"
To: TypeAlias = "Callable[..., object] | Handler | str"


@dataclass(frozen=True, slots=True)
class Terms:
    """What all tasks of a job may write: the same object for each `Tx`."""

    spider: Spider
    linker: Linker
    types: Mapping[type, RecordType]
    record_bytes_max: int = 2**20
    links_max: int = 50_000
    nofollow: bool = False
    takes_any_type: bool = False  # in a user's own tests: any @record class
    marks: Mapping[str, str] = field(default_factory=dict)  # high-water marks, as the sweeps before this job left them
    read_register: Callable[[str], Awaitable[tuple[int, str | None]]] | None = None  # (version, value as JSON) as it is now

    @classmethod
    def of(
        cls, spider: Spider, linker: Linker, settings: Settings, *, marks: Mapping[str, str] = MappingProxyType({}),
        read_register: Callable[[str], Awaitable[tuple[int, str | None]]] | None = None,
    ) -> Terms:  # fmt: skip
        """The terms of a job of this spider."""
        types = {kind.cls: kind for kind in spider.record_types().values() if kind.cls}
        return cls(
            spider, linker, types, settings.record_bytes_max, settings.links_per_page_max, settings.nofollow, marks=marks,
            read_register=read_register,
        )  # fmt: skip


class Tx:
    """What one task writes: records, links, requests. Not for more than one handler call."""

    __slots__ = (
        "_again", "_claim", "_closed", "_counted", "_followed", "_here", "_is_revoked", "_links", "_marks", "_offers", "_page",
        "_registers", "_terms", "dropped", "replaced", "size",
    )  # fmt: skip

    def __init__(self, terms: Terms, claim: Claim, page: Page | None) -> None:
        self._terms = terms
        self._claim = claim
        self._page = page
        self._closed = ""
        self._is_revoked = False
        self._followed = 0
        self._here: Here | None = None  # made when the first link is followed
        self._offers: dict[tuple[str, bytes], tuple[Offer, object]] = {}
        self._links: dict[bytes, Link] = {}
        self._again: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._registers: dict[str, Register] = {}
        self._marks: dict[str, HighWaterMark] = {}
        self.dropped: Counter[str] = Counter()  # links that are not followed, by reason
        self.replaced = 0  # records whose key this task had emitted before: the last wins
        self.size = 0  # bytes of records and links, about

    def __repr__(self) -> str:
        return f"<Tx of {self._claim.text}: {len(self._offers)} records, {len(self._links)} links>"

    # What a handler calls.

    def emit(self, record: object) -> None:
        """Store a record. Of two with one key the last wins, and `replaced` counts it.

        Raises RecordError, naming field and task, for a value that cannot be stored.
        """
        self._check_open()
        kind = self._terms.types.get(type(record)) or self._stranger(record)
        try:
            frozen = kind.freeze(record, bytes_max=self._terms.record_bytes_max)
        except RecordError as error:
            raise RecordError(f"{error}; emitted by {self._claim.text}") from None
        at = (kind.name, frozen.key)
        if at in self._offers:
            self.replaced += 1
        self._offers[at] = (Offer(kind.name, frozen.key, frozen.key_text, frozen.content, frozen.values), record)
        self._grow(frozen.size)

    def follow(self, target: Target | Iterable[Target], *, to: To | None = None, priority: int = 0, data: object = None) -> None:
        """Follow a link of the page, or many: those in scope and in no trap become tasks, unless they are known.

        A target is a URL (relative ones are joined to the page's base), an Anchor of this page's `links()`, a selector
        of an element such as `page.css("a.next")` or of its `::attr(href)`. `to` names the handler, else
        the spider's patterns decide; a larger `priority` is sooner; `data` arrives as `page.data`.
        What is not followed is counted in `dropped`, by reason.
        """
        self._check_open()
        if self._page is None:
            raise UsageError(f"{self._claim.text}: follow takes links of a page, and this task has none: tx.enqueue(...) asks for URLs")
        handler, payload = self._sent_to(to), self._carried(priority, data)
        if self._terms.nofollow and self._page.is_nofollow:
            self.dropped[NOFOLLOW] += sum(1 for _ in _addresses(target))
            return
        page, heeds, links_max = self._page, self._terms.nofollow, self._terms.links_max
        is_plain = not (handler or payload or priority)
        find = (self._here or self._stand()).found
        for href, element in _addresses(target):
            self._followed += 1
            if self._followed > links_max:  # before it costs anything: a hostile page may hold a million
                self.dropped[TOO_MANY] += 1
            elif heeds and (page.is_nofollow or _is_nofollow(element)):
                self.dropped[NOFOLLOW] += 1
            elif not href:
                self.dropped[NO_HREF] += 1
            elif isinstance(link := find(href), str):
                self.dropped[link] += 1
            elif is_plain:
                self._add(link)
            else:
                self._discover(link, handler, payload, priority)

    def enqueue(
        self, request: str | Request | Call, *, to: To | None = None, priority: int = 0, data: object = None, dedup: bool = True
    ) -> None:
        """Ask for a URL, a Request or a call (`call(handler, ...)`) by itself: neither the scope nor the trap rule applies to it.

        With `dedup=False` it is a task of its own, even where one for the same URL exists; a try of this task
        that asks again gives the same one. Raises UrlRejected.
        """
        self._check_open()
        if isinstance(request, Call):
            self._enqueue_call(request, priority, refused=to is not None or data is not None or not dedup)
            return
        asked = self._as_request(request, priority, data)
        handler, depth, linker = self._sent_to(to), self._claim.depth + 1, self._terms.linker
        if 0 <= linker.depth_max < depth:
            self.dropped["depth"] += 1
            return
        again = self._ordinal(asked) if not (dedup and asked.dedup) else ""
        try:
            link = linker.asked(
                asked,
                handler=handler.name if handler else "",
                base=self._base(),
                charset=self._page.encoding if self._page else "utf-8",
                depth=depth,
                again=again,
            )
        except UrlRejected as error:
            raise UrlRejected(f"{error}; enqueued by {self._claim.text}", reason=error.reason) from None
        self._check_room(link)
        self._check_captures(link, handler)
        self._add(link)

    def tally(self, name: str, more: int = 1) -> None:
        """Add to a shared counter of the job. It is written for each shard and summed on reading: no two tasks wait for each other.

        It counts tries that were kept, each once. A task that is put back (`limpet retry`) and done again adds again.
        """
        self._check_open()
        _check_more(name, more)
        self._counted[checked_name("tally", name)] += more

    async def register(self, name: str) -> Register:
        """A shared value of the spider, as it is now: `r = await tx.register("cursor")`, `r.value`, `r.set(...)`.

        What is set commits with the task; where somebody has written the register since it was read, this task runs again.
        """
        self._check_open()
        known = self._registers.get(checked_name("register", name))
        if known is not None:
            return known
        if self._terms.read_register is None:
            raise UsageError(f"register {name}: there is no database here")
        version, text = await self._terms.read_register(name)
        self._check_open()
        return self._registers.setdefault(name, Register.of(name, version, text, self._check_open))

    def mark(self, name: str, *, order: Order = "asc", overlap: object = None) -> HighWaterMark:
        """A high-water mark: `mark.value` is what the sweeps before this job reached, `mark.seen(v)` notes what this one sees.

        `order` is that in which the source gives its rows, oldest first ("asc") or newest first ("desc"). `overlap` (an int, a
        Decimal, a timedelta) moves the value back, for rows that come late. The mark moves when the job is complete, and no task of
        the handlers that noted values is dead, or was skipped by Limpet (`gone`): their rows nobody has seen.
        """
        self._check_open()
        known = self._marks.get(name)
        if known is None:
            handler = self._claim.handler or getattr(self._terms.spider.route(self._claim.text), "handler", _NOBODY).name
            known = self._marks[name] = mark_of(name, order, handler, self._terms.marks, overlap, self._check_open)
        return known

    # What the engine calls.

    def revoke(self, why: str = "its time was over") -> None:
        """Drop what was written, and take nothing more."""
        self._closed, self._is_revoked = why, True
        self._offers, self._links, self.size = {}, {}, 0
        self._counted, self._registers, self._marks = Counter(), {}, {}

    def close(self) -> None:
        """Take nothing more: the handler has returned."""
        self._closed = self._closed or "its handler had returned"

    def links(self) -> tuple[Link, ...]:
        """The tasks to discover, each key once, in the order of the page."""
        return () if self._is_revoked else tuple(self._links.values())  # a thread may be in the middle of a write

    def offers(self) -> tuple[Offer, ...]:
        """The records to store, each key once."""
        return () if self._is_revoked else tuple(offer for offer, _ in self._offers.values())

    def tallies(self) -> tuple[tuple[str, int], ...]:
        """What was counted, by name."""
        return () if self._is_revoked else tuple(sorted((name, more) for name, more in self._counted.items() if more))

    def registers(self) -> tuple[RegisterWrite, ...]:
        """The registers that were set."""
        writes = () if self._is_revoked else tuple(register.write() for register in self._registers.values())
        return tuple(write for write in writes if write is not None)

    def seen(self) -> tuple[Seen, ...]:
        """What was seen of incremental sweeps."""
        notes = () if self._is_revoked else tuple(mark.note() for mark in self._marks.values())
        return tuple(note for note in notes if note is not None)

    def records(self) -> list[object]:
        """The records as they were emitted."""
        return [record for _, record in self._offers.values()]

    # How.

    def _check_open(self) -> None:
        if self._closed:
            raise HandlerRevoked(f"{self._claim.text}: written to after {self._closed}; nothing of this is stored")

    def _grow(self, size: int) -> None:
        self.size += size
        if self.size > TASK_BYTES_MAX:
            raise UsageError(f"{self._claim.text}: more than {TASK_BYTES_MAX:,} bytes of records and links in one task")

    def _stranger(self, record: object) -> RecordType:
        kind = record_type(type(record))  # RecordError where it is none
        if not self._terms.takes_any_type:
            raise RecordError(
                f"{type(record).__name__} is no record type of spider {self._terms.spider.name}, so it has no table: import it "
                f"in the spider's module, or write Spider(records=[{type(record).__name__}]); emitted by {self._claim.text}"
            )
        return kind

    def _stand(self) -> Here:
        """Where this page's links stand, found out once."""
        claim, linker, page = self._claim, self._terms.linker, self._page
        assert page is not None, "follow has looked"
        self._here = linker.on(self._base() or page.url, charset=page.encoding, authority=claim.authority, depth=claim.depth + 1)
        return self._here

    def _base(self) -> str | None:
        """What relative URLs are joined to; only a page of HTML is searched for its <base>."""
        if self._page is None:
            return None
        return self._page.base_url if self._page.is_html else self._page.url

    def _sent_to(self, to: To | None) -> Handler | None:
        if to is None:
            return None
        name = to if isinstance(to, str) else to.name if isinstance(to, Handler) else getattr(to, "__name__", repr(to))
        known = self._terms.spider.handler(name)
        if known is None or (callable(to) and known.call is not to):
            names = ", ".join(self._terms.spider.handler_names())
            raise UsageError(f"to={name}: no handler of spider {self._terms.spider.name}, which has {names}")
        return known

    def _carried(self, priority: int, data: object) -> str:
        """The payload of followed links; both are checked once a call, not once a link."""
        check_priority(priority)
        if data is None:
            return ""
        return Request("", data=data).payload()

    def _as_request(self, request: str | Request, priority: int, data: object) -> Request:
        check_priority(priority)
        if isinstance(request, str):
            return Request(request, data=data, priority=priority)
        if not isinstance(request, Request):
            raise UsageError(f"enqueue takes one URL or Request, not a {type(request).__name__}; follow takes links")
        if data is None and not priority:
            return request
        return replace(request, data=request.data if data is None else data, priority=priority or request.priority)

    def _enqueue_call(self, asked: Call, priority: int, *, refused: bool) -> None:
        if refused:
            raise UsageError(f"enqueue(call({asked.handler}, ...)): a call has no to=, data= or dedup=; its key tells it from others")
        depth = self._claim.depth + 1
        if 0 <= self._terms.linker.depth_max < depth:
            self.dropped["depth"] += 1
            return
        schema = self._terms.spider.schema(asked.handler)
        link = schema.link(asked.arguments, shards=self._terms.linker.shards, priority=priority or asked.priority, depth=depth)
        self._check_room(link)
        self._add(link)

    def _check_room(self, link: Link) -> None:
        if len(self._links) >= self._terms.links_max and link.key not in self._links:
            raise UsageError(f"{self._claim.text}: more than {self._terms.links_max:,} links and requests in one task")

    def _ordinal(self, asked: Request) -> str:
        """This task's key and a number, so that the same try, run again, asks for the same tasks."""
        at = f"{asked.method} {asked.url} {asked.body.hex()}"
        self._again[at] += 1
        return f"{self._claim.key.hex()} {self._again[at]}"

    def _discover(self, link: Link, handler: Handler | None, payload: str, priority: int) -> None:
        link = replace(link, handler=handler.name if handler else "", payload=payload, priority=priority)
        self._check_captures(link, handler)
        self._add(link)

    def _add(self, link: Link) -> None:
        key = link.key
        known = self._links.get(key)
        if key == self._claim.key or (known is not None and not _says_more(link, known)):
            return  # it is this task, or what is there already
        self._links[key] = link
        self._grow(LINK_BYTES + len(link.text) + len(link.url) + len(link.payload))

    def _check_captures(self, link: Link, handler: Handler | None) -> None:
        """A task that its handler could not be called for would be dead; better is the line that made it."""
        if handler and handler.needs and self._terms.spider.route_to(handler.name, link.text) is None:
            needs = ", ".join(sorted(handler.needs))
            raise UsageError(f"to={handler.name}: it needs {needs}, which no pattern of it captures from {link.text}")


def _says_more(link: Link, known: Link) -> bool:
    """Of two links with one key the sooner one stays, then the one that names a handler or carries data, then the first."""
    return (link.priority, bool(link.handler), bool(link.payload)) > (known.priority, bool(known.handler), bool(known.payload))


def _addresses(target: object) -> Iterator[tuple[str, object]]:
    """Each link as it is written, "" where it has no address, with what may say rel=nofollow."""
    if isinstance(target, Anchor):
        yield target.href, target
    elif isinstance(target, str):
        yield target, None
    elif isinstance(target, Selector):
        yield _address_of(target.root)
    elif isinstance(target, Iterable) and not isinstance(target, (bytes, Mapping)):
        for inner in target:
            if isinstance(inner, Anchor):  # what `page.links()` holds: the usual case, without a generator for each
                yield inner.href, inner
            else:
                yield from _addresses(inner)
    elif target is None:
        raise UsageError('follow(None): the selector matched nothing; follow(page.css("a.next")) is fine without a match')
    else:
        raise UsageError(f"follow takes URLs, anchors and selectors, not a {type(target).__name__}")


def _address_of(root: object) -> tuple[str, object]:
    if isinstance(root, str):
        return root, None
    tag, attributes = getattr(root, "tag", None), getattr(root, "attrib", None)
    if not isinstance(tag, str) or attributes is None:
        raise UsageError(f"follow takes selectors of elements and texts, not of a {type(root).__name__}")
    leads = _LEADS.get(tag.rpartition("}")[2].lower())
    if leads is None and "href" not in attributes:
        raise UsageError(f"follow: the selector matched <{tag}>, which leads nowhere; expected <a>, or ::attr(href)")
    return attributes.get(leads or "href", ""), root


def _is_nofollow(element: object) -> bool:
    if isinstance(element, Anchor):
        return element.is_nofollow
    return element is not None and "nofollow" in str(getattr(element, "attrib", {}).get("rel", "")).lower().split()


def _check_more(name: str, more: object) -> None:
    if isinstance(more, bool) or not isinstance(more, int) or abs(more) > TALLY_MAX:
        raise UsageError(f"tally {name}: {more!r}; expected an int from -{TALLY_MAX:,} to {TALLY_MAX:,}")
