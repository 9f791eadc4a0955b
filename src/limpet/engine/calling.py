"""What a keyed task asks the world with, and the bill of its try.

`Http` is Limpet's fetch layer, bound to one try: it paces by host, obeys the lease, sends the task's idempotency key, and
notes what each request cost. An answer that was paid for is kept, in a commit of its own, before the handler sees it: whatever
happens afterwards, the next try reads it and sends nothing. Nothing is repeated here; another try is the task's.
"""

from __future__ import annotations

import asyncio
import json as json_text
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

from limpet.batch import ANEW, CREDIT, Billed, Charge, Claim, Kept, canonical_json, digest
from limpet.credentials import hidden
from limpet.engine.calls import COST_MAX, CallSchema
from limpet.engine.request import Request
from limpet.errors import Blocked, FetchError, Skip, UsageError
from limpet.fetch.message import Answer
from limpet.fetch.message import Request as Sent
from limpet.fetch.page import Page
from limpet.fetch.status import Meaning, verdict_of
from limpet.settings import Settings

#: Kinds of FetchError of a request that never reached anybody: nothing can have been charged.
NEVER_SENT = frozenset({"connect", "dns", "tls", "bad_request", "local"})

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class Throttled(Blocked):
    """The provider asks for patience, by its status."""

    def __init__(self, status: int, after_s: float | None) -> None:
        super().__init__(f"status {status}", after_s=after_s)
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: `status`, `headers`, `content`; `text`, `json()` and `page` are made of it."""

    answer: Answer
    is_kept: bool = False  # paid for in an earlier try: nothing was sent

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.answer.status

    @property
    def url(self) -> str:
        """The URL that answered."""
        return self.answer.url

    @property
    def content(self) -> bytes:
        """The body, decompressed."""
        return self.answer.body

    @property
    def page(self) -> Page:
        """The answer as a page, with its selectors."""
        return Page(self.answer)

    @property
    def text(self) -> str:
        """The body as text, by header, BOM, meta element or its look."""
        return self.page.text

    def header(self, name: str) -> str | None:
        """The first header of that name, in any case."""
        return self.answer.header(name)

    def json(self) -> Any:
        """The body, read as JSON. Raises ValueError."""
        return json_text.loads(self.answer.body)


@dataclass(slots=True)
class Bill:
    """What one try has cost so far."""

    schema: CallSchema
    requests: int = 0
    host: str = ""
    outcomes: list[str] = field(default_factory=list)  # charged | refunded | unknown, one for each request that was sent
    credits: int = 0  # as headers tell, in micro-credits
    is_told: bool = False  # a header told
    reason: str = ""
    under_way: int = 0  # sent, and not yet answered

    @property
    def is_paid(self) -> bool:
        """Whether the handler costs anything."""
        return self.schema.cost > 0

    @property
    def so_far(self) -> int:
        """Micro-credits that are known to be charged."""
        return self.credits if self.is_told else self.schema.cost if "charged" in self.outcomes else 0

    def charge(self) -> Charge | None:
        """The end of the bill; None where the handler costs nothing."""
        if not self.is_paid:
            return None
        outcomes = [*self.outcomes, *["unknown"] * self.under_way]
        if not outcomes:
            return Charge(Billed.VOID, host=self.host, requests=self.requests, reason=self.reason)
        if "unknown" in outcomes:
            return Charge(Billed.UNKNOWN, self.schema.cost, self.host, self.requests, self.reason or "cut off")
        if "charged" in outcomes:
            return Charge(Billed.CHARGED, self.so_far, self.host, self.requests, self.reason)
        return Charge(Billed.REFUNDED, 0, self.host, self.requests, self.reason)

    def sent(self) -> None:
        """Note a request that is sent now; it stays under way where its try is cut off."""
        self.requests += 1
        self.under_way += 1

    def took(self, answer: Answer) -> bool:
        """Note an answer; whether it was charged."""
        said = self.schema.tariff.says(str(answer.status))
        self.outcomes.append(said)
        self.under_way -= 1
        self.reason = f"status {answer.status}"
        told = answer.header(self.schema.tariff.credits_header) if self.schema.tariff.credits_header else None
        if told is not None:
            credits = _credits_in(told)
            if credits is None:  # then it costs what the handler says
                self.reason += f", {self.schema.tariff.credits_header} is no number of credits: {told[:50]!r}"
            else:
                self.credits += credits
                self.is_told = True
        return said == "charged"

    def failed(self, error: FetchError) -> None:
        """Note a request that was sent and brought no answer."""
        self.under_way -= 1
        self.reason = error.kind.replace("_", " ")
        if error.kind not in NEVER_SENT:
            self.outcomes.append(self.schema.tariff.says("timeout" if error.kind == "timeout" else "lost"))


def _credits_in(text: str) -> int | None:
    """Micro-credits that a header says; None where it is no number, or none that an answer can cost.

    >>> _credits_in(" 1.5 "), _credits_in("-5"), _credits_in("1e999999"), _credits_in("NaN"), _credits_in("0")
    (1500000, None, None, None, 0)
    """
    try:
        credits = Decimal(text.strip())
        return int(credits * CREDIT) if 0 <= credits <= COST_MAX else None  # a header that says more is wrong
    except ArithmeticError:  # no number at all, or one that cannot be compared
        return None


@dataclass(slots=True)
class Http:
    """Requests of one keyed task: `await http.get(url, params={...})`, `await http.post(url, json={...})`.

    Returns a Reply for a status of 2xx. With `check`, as is the default, any other is what it means for the task: 404 and 410
    skip it (`gone`), 429 throttles the provider, 5xx and lost connections are a strike, the rest is dead. With `check=False` the
    reply is returned whatever its status.
    """

    claim: Claim
    bill: Bill
    job: str  # names the job for idempotency keys: the same for all its tries
    send_paced: Callable[[Sent, Callable[[], None]], Awaitable[Answer]]  # calls the function when it sends
    retry_after: Callable[[Answer], float | None]
    read_kept: Callable[[Claim, bytes], Awaitable[tuple[int, str, str, bytes] | None]]
    keep: Callable[[int, Kept], Awaitable[None]]
    hops_max: int = Settings().hops_max
    has_kept: bool = False  # something is kept for this task
    is_over: bool = False  # its handler has ended: nothing more is asked, and nothing kept
    _ordinals: dict[bytes, int] = field(default_factory=dict)
    _asking: set[asyncio.Future[None]] = field(default_factory=set)
    _since: bytes | None = None  # which try asked for another answer, last

    async def end(self) -> None:
        """The handler has ended. What it left under way is waited for, since it is charged: so it is known what it cost."""
        self.is_over = True
        if self._asking:
            await asyncio.wait(self._asking)

    async def get(self, url: str, *, params: Mapping[str, object] | None = None, headers: Headers = (), check: bool = True) -> Reply:
        """A GET; `params` join the query, in their order."""
        return await self.send(Request.get(_with_params(url, params), headers=headers), check=check)

    async def post(
        self,
        url: str,
        *,
        json: object = None,
        form: Mapping[str, object] | None = None,
        body: bytes | str | None = None,
        params: Mapping[str, object] | None = None,
        headers: Headers = (),
        check: bool = True,
    ) -> Reply:
        """A POST of exactly one of `json`, `form`, `body`."""
        return await self.send(Request.post(_with_params(url, params), json=json, form=form, body=body, headers=headers), check=check)

    async def send(self, request: Request, *, check: bool = True) -> Reply:
        """Any Request; its `data` and `priority` have no meaning here."""
        if self.is_over:
            raise UsageError(f"{self.claim.text}: its handler has ended, and asks for nothing more: {request.url[:200]!r}")
        if not request.url.startswith(("http://", "https://")):
            raise UsageError(f"{self.claim.text}: http asks for http and https, not {request.url[:200]!r}")
        which = digest(request.method.encode(), request.url.encode(), request.body)
        nth = self._ordinals[which] = self._ordinals.get(which, 0) + 1
        which = which if nth == 1 else digest(which, str(nth).encode())  # the same asked twice in one try is two requests
        if self.claim.tries > 1 and (kept := await self.read_kept(self.claim, which)) is not None:
            self.has_kept = True
            status, url, headers, body = kept
            pairs = tuple((str(name), str(value)) for name, value in json_text.loads(headers))
            return Reply(Answer(url, status, headers=pairs, body=zlib.decompress(body)), is_kept=True)
        asking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking.add(asking)
        try:
            answer = await self._ask(request, which)
        finally:
            self._asking.discard(asking)
            asking.set_result(None)
        if check:
            self._check(answer)
        return Reply(answer)

    async def _ask(self, request: Request, which: bytes) -> Answer:
        headers = request.headers
        name = self.bill.schema.tariff.idempotency_header
        if name and not any(field.lower() == name.lower() for field, _ in headers):
            headers = (*headers, (name, digest(self.job.encode(), self.claim.key, which, *await self._anew()).hex()))
        meter = _Meter(self.bill, self.send_paced)
        answer = await _followed(meter, Sent(request.url, request.method, headers, request.body), self.hops_max, name)
        if meter.is_charged and self.bill.is_paid and not self.is_over:
            body = await asyncio.to_thread(zlib.compress, answer.body, 6) if len(answer.body) > 65536 else zlib.compress(answer.body, 6)
            kept = Kept(
                self.claim.id, self.claim.tries, which, answer.status, hidden(answer.url), canonical_json(answer.headers), body,
                self.bill.so_far,
            )  # fmt: skip
            self.has_kept = True
            await self.keep(self.claim.shard, kept)
        return answer

    async def _anew(self) -> tuple[bytes, ...]:
        """What sets the idempotency keys apart from those of tries whose answers the handler did not want; nothing before the first."""
        if self._since is None:
            found = await self.read_kept(self.claim, ANEW) if self.claim.tries > 1 else None
            self._since = str(found[0]).encode() if found else b""
        return (self._since,) if self._since else ()

    def _check(self, answer: Answer) -> None:
        after_s = self.retry_after(answer)
        meaning = verdict_of(answer.status, has_retry_after=after_s is not None)
        if meaning is Meaning.OK:
            return
        if meaning is Meaning.GONE:
            raise Skip("gone")
        if meaning is Meaning.THROTTLED:
            raise Throttled(answer.status, after_s)
        raise FetchError(
            f"{answer.url} answered {answer.status}", kind="status", retryable=meaning is Meaning.RETRYABLE, status=answer.status,
            retry_after_s=after_s,
        )  # fmt: skip


@dataclass(slots=True)
class _Meter:
    """Sends, paced by whom it asks, and notes what each request cost."""

    bill: Bill
    send_paced: Callable[[Sent, Callable[[], None]], Awaitable[Answer]]
    is_charged: bool = False  # the last answer was

    async def exchange(self, request: Sent) -> Answer:
        """One request, one answer."""
        self.bill.host = authority_of(request.url)
        is_sent = False

        def sent() -> None:
            nonlocal is_sent
            is_sent = True
            self.bill.sent()

        try:
            answer = await self.send_paced(request, sent)
        except FetchError as error:
            if is_sent:
                self.bill.failed(error)
            raise
        self.is_charged = self.bill.took(answer)
        return answer


async def _followed(meter: _Meter, request: Sent, hops_max: int, idempotency_header: str) -> Answer:
    """The answer at the end of all redirects. A key of idempotency is between us and the one who was asked first, like a credential."""
    from limpet.fetch.redirects import Content, follow  # brings the HTTP client, for which whoever describes a spider does not wait

    async def no_matter(_: object) -> Any:
        return None

    private = frozenset({idempotency_header.lower()} if idempotency_header else ())
    content = await follow(
        meter, request, own_key=b"", chain=(), hops=0, key_of=lambda url: (b"", ""), is_moved=no_matter, hops_max=hops_max,
        before_hop=no_matter, inside=True, private=private,
    )  # fmt: skip
    assert isinstance(content, Content), "what is followed inside never moves"
    return content.answer


def authority_of(url: str) -> str:
    """Host and port of a URL, in lower case.

    >>> authority_of("https://API.example.com/v1?key=secret")
    'api.example.com'
    """
    rest = url.partition("://")[2]
    end = min((at for mark in "/?#" if (at := rest.find(mark)) >= 0), default=len(rest))
    return rest[:end].rpartition("@")[2].lower()


def _with_params(url: str, params: Mapping[str, object] | None) -> str:
    if not params:
        return url
    return f"{url}{'&' if '?' in url else '?'}{urlencode(list(params.items()), doseq=True)}"
