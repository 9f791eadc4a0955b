"""From what handlers follow to tasks: canonical form, scope, traps, and why a link was left out.

The hot path of a crawl: nearly every link of a page was seen on another page before. So the finished
`Link` and what the scope said are remembered, within bounds, by where the link stands and how it is
spelled. This is a memo of pure functions: losing it, or filling it from two threads at once, changes no task.
Whether a task is known is not decided here; only the database knows that (I4).
"""

from __future__ import annotations

import sys
from dataclasses import replace

from limpet.batch import Link
from limpet.engine.request import Request
from limpet.errors import UrlRejected
from limpet.scope import Scope
from limpet.task import ShardId, TaskKey
from limpet.url import URL_BYTES_MAX, Canonical, KeyCache, KeyProfile, Place, canonicalise, digest16, host_id, key_text

#: Hosts whose number is remembered: a page's links name few.
HOSTS_MAX = 4096
#: The reason of a link that is deeper than `max_depth`; the others are UrlRejected's and the scope's.
DEPTH = "depth"


class Linker:
    """Makes the links of one job: by its key profile, scope, number of shards and depth."""

    def __init__(self, profile: KeyProfile, scope: Scope, *, shards: int, url_bytes_max: int = URL_BYTES_MAX, depth_max: int = -1) -> None:
        self.profile = profile
        self.scope = scope
        self.shards = shards
        self.url_bytes_max = url_bytes_max
        self.depth_max = depth_max
        self._hosts: dict[str, int] = {}
        self._seen = KeyCache(profile, _Seen, bytes_max=url_bytes_max)

    def on(self, base: str, *, charset: str, authority: str, depth: int) -> Here:
        """The links of one page: `base` is what they are joined to, `authority` that of the page, `depth` that of its links."""
        return Here(self, self._seen, Place(base, charset), authority, depth)

    def canonical(self, url: str) -> Canonical:
        """The canonical form of an absolute URL, remembered like those of links. Raises UrlRejected."""
        return self._seen.at(_NOWHERE, url).canonical

    def accepted(self, url: str) -> Canonical:
        """The same of what is asked for whatever its length: a task's own URL, found under a larger limit, or a robots.txt."""
        return canonicalise(url, self.profile, bytes_max=sys.maxsize)

    def asked(
        self,
        request: Request,
        *,
        handler: str = "",
        base: str | None = None,
        charset: str = "utf-8",
        depth: int = 0,
        again: str = "",
    ) -> Link:
        """The link to what a start, a handler or a person asks for by itself: no scope, no trap rule.

        `again` joins the key text, where the same request shall be another task. Raises UrlRejected.
        """
        canonical = canonicalise(request.url, self.profile, base=base, charset=charset, bytes_max=self.url_bytes_max)
        link = self.link(canonical, handler=handler, payload=request.payload(), priority=request.priority, depth=depth)
        text = key_text(canonical.text, request.method, request.body)
        if again:
            text = f"{text} again {again}"  # a URL holds no space, so this is the text of nothing else
        return link if text == link.text else replace(link, text=text, key=TaskKey(digest16(text)))

    def link(
        self,
        canonical: Canonical,
        *,
        handler: str = "",
        payload: str = "",
        priority: int = 0,
        depth: int = 0,
        hops: int = 0,
        chain: bytes = b"",
    ) -> Link:
        """A plain GET of a canonical URL, as a task of this job."""
        host = self._hosts.get(canonical.authority)
        if host is None:
            host = self._numbered(canonical.authority)
        return Link(
            shard=ShardId(host % self.shards),  # what url.shard_of says, without a second digest
            host=host,
            key=TaskKey(canonical.key),
            text=canonical.text,
            url=canonical.request_url,
            handler=handler,
            payload=payload,
            priority=priority,
            depth=depth,
            hops=hops,
            chain=chain,
        )

    def _numbered(self, authority: str) -> int:
        if len(self._hosts) >= HOSTS_MAX:
            self._hosts = {}
        host = self._hosts[authority] = host_id(authority)
        return host


class Here:
    """What the links of one page lead to."""

    __slots__ = ("_authority", "_depth", "_is_too_deep", "_linker", "_place", "_seen")

    def __init__(self, linker: Linker, seen: KeyCache[_Seen], place: Place, authority: str, depth: int) -> None:
        self._linker = linker
        self._seen = seen
        self._place = place
        self._authority = authority
        self._depth = depth
        self._is_too_deep = 0 <= linker.depth_max < depth

    def found(self, url: str) -> Link | str:
        """The link to what the page holds, or in one stable word the reason why it is not followed."""
        if self._is_too_deep:
            return DEPTH
        try:
            seen = self._seen.at(self._place, url)
        except UrlRejected as rejected:
            return rejected.reason
        asked_by, refusal = seen.asked
        if asked_by != self._authority:
            refusal = self._linker.scope.refusal(seen.canonical, self._authority)
            seen.asked = (self._authority, refusal)
        if refusal:
            return refusal
        link = seen.link
        if link is None or link.depth != self._depth:
            link = seen.link = self._linker.link(seen.canonical, depth=self._depth)
        return link


class _Seen:
    """What is remembered of one URL; each attribute is replaced whole, so that threads may share it."""

    __slots__ = ("asked", "canonical", "link")

    def __init__(self, canonical: Canonical) -> None:
        self.canonical = canonical
        self.link: Link | None = None  # as it was last made: links of one depth are one object
        self.asked: tuple[str | None, str] = (None, "")  # authority of the page that asked last, and the refusal


#: Where an absolute URL stands.
_NOWHERE = Place(None)
