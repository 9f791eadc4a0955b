"""Sources: lists of starts, read in batches as tasks are needed, from exactly where the database is.

A list of a few starts lies in the job's row; a file is named by its content's digest, so that the same
starts given twice are one source, and is read by byte offset in constant memory. A start that is no
URL is left out, with its line named.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from limpet.batch import DIGEST_BYTES, Link, SourceMove, canonical_json, digest
from limpet.engine.calls import Call, Start
from limpet.engine.csvfile import Csv, arguments_of
from limpet.engine.links import Linker
from limpet.engine.request import Request
from limpet.engine.spider import Spider
from limpet.errors import UrlRejected, UsageError
from limpet.store import jobs
from limpet.store.dialect import Database
from limpet.store.jobs import Source, SourceRow
from limpet.url import canonicalise

log = logging.getLogger("limpet.sources")

#: Lines of a source that one batch takes in: a few megabytes at the most.
LINES_MAX = 5000

#: Starts that are kept in the database itself; more of them belong in a file.
INLINE_MAX = 10_000

#: Seconds that one piece of a start generator may take: a commit waits for it.
GENERATE_S = 0.5

#: Bytes of one line of a source: a longer one is no URL.
LINE_BYTES_MAX = 65_536


def sources_of(spider: Spider, starts: Sequence[str] | None, starts_from: str | None, slot: str = "") -> list[Source]:
    """What a caller gives, or else the spider's own starts and generators; UsageError for one that is no URL."""
    found = []
    own = starts is None and starts_from is None
    listed = list(spider.starts if own else starts or ())
    for start in listed:
        try:
            canonicalise(start, spider.profile)
        except UrlRejected as error:
            raise UsageError(f"start {start!r}: {error}") from error
    if listed:
        found.append(source_of_list(listed, "list" if own else "given"))
    if starts_from is not None:
        found.append(source_of_file(starts_from))
    if own:
        found += [source_of_generator(function, Start(slot, spider.params)) for function in spider.generators]
    return found


def source_of_generator(function: Callable[..., object], start: Start) -> Source:
    """A source of a start generator: other code, parameters or slot are another source, in which known tasks vanish."""
    code = getattr(function, "__code__", None)
    body = code.co_code + repr(code.co_consts).encode() if code is not None else b""
    payload = canonical_json({"generator": getattr(function, "__name__", ""), "params": dict(start.params), "slot": start.slot})
    return Source("generator", digest(payload.encode(), body), payload=payload)


def source_of_csv(path: str, handler: str, shared: Mapping[str, str]) -> Source:
    """A source of a CSV file whose rows, with what they share, are calls of a handler; UsageError where it cannot be read."""
    payload = canonical_json({"task": handler, "shared": dict(shared)})
    try:
        return Source("csv", digest(payload.encode(), digest_of_file(path)), payload, os.path.abspath(path), socket.gethostname())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def wanted(db: Database, spider: str, slot: str, found: list[Source]) -> list[Source]:
    """The sources to add: a job that was begun with starts of its caller's does not take the spider's own as well."""
    job = jobs.find(db, spider, slot)
    if job is None:
        return found
    kinds = {row.kind for row in jobs.sources(db, job.id)}
    own = {"list", "generator"}
    return [source for source in found if source.kind not in own or own & kinds or kinds <= {"csv"}]


def source_of_list(starts: Sequence[str], kind: str = "list") -> Source:
    """A source of starts given one by one: `list` where the spider names them, `given` where its caller does."""
    if len(starts) > INLINE_MAX:
        raise UsageError(
            f"{len(starts)} starts given one by one: expected at most {INLINE_MAX}; put them into a file and name it with --from"
        )
    payload = canonical_json(list(starts))
    return Source(kind, digest(payload.encode()), payload=payload)


def source_of_file(path: str) -> Source:
    """A source of a file with a start on each line; UsageError where it cannot be read."""
    try:
        return Source("file", digest_of_file(path), place=os.path.abspath(path), host=socket.gethostname())
    except OSError as error:
        raise UsageError(f"cannot read the starts in {path}: {error.strerror}") from error


def digest_of_file(path: str) -> bytes:
    """The digest of a file's content."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    with open(path, "rb") as lines:
        while chunk := lines.read(1 << 20):
            whole.update(chunk)
    return whole.digest()


class SourceReader:
    """Reads the open sources of a job, one after the other."""

    def __init__(self, linker: Linker, rows: Iterable[SourceRow], spider: Spider, slot: str = "") -> None:
        self._linker = linker
        self.spider = spider
        self.start = Start(slot, spider.params)
        self._running: dict[int, tuple[Any, int]] = {}  # source -> its generator, and how much of it was read
        self._tables: dict[int, Csv] = {}
        self._open = [row for row in rows if not row.closed]
        self._checked: set[int] = set()
        self.rejected = 0

    def refresh(self, rows: Iterable[SourceRow]) -> None:
        """Look at the rows again: whoever had the shard before may have read on."""
        self._open = [row for row in rows if not row.closed]

    @property
    def is_done(self) -> bool:
        """Whether every source has been read to its end."""
        return not self._open

    def first(self) -> SourceRow:
        """The source that is read next."""
        return self._open[0]

    def is_generator(self) -> bool:
        """Whether the next one is a start generator, which `generate` reads."""
        return self._open[0].kind == "generator"

    async def generate(self) -> SourceMove:
        """The next tasks that a start generator yields. It is begun anew after a restart, and what it had yielded is passed over.

        One that this spider no longer has, or has with other code, parameters or slot, is closed. UsageError says what it raised,
        or yielded that is no task.
        """
        row = self._open[0]
        if row.source not in self._running:
            known = {source_of_generator(function, self.start).digest: function for function in self.spider.generators}
            if row.digest not in known:
                return SourceMove(row.source, row.position, row.position, closed=True)
            function = known[row.digest]
            takes_start = bool(inspect.signature(function).parameters)
            self._running[row.source] = (function(self.start) if takes_start else function()), 0
        generator, position = self._running.pop(row.source)
        links: dict[bytes, Link] = {}
        until_s = time.monotonic() + GENERATE_S
        closed, wanted = False, row.position + LINES_MAX
        while position < wanted and (position <= row.position or time.monotonic() < until_s):
            try:
                item = await anext(generator)
            except StopAsyncIteration:
                closed = True
                break
            except Exception as error:
                raise UsageError(f"the start {_name_in(row)} of spider {self.spider.name}: {type(error).__name__}: {error}") from error
            position += 1
            if position > row.position:
                link = self._link_of(row, position, item)
                links.setdefault(link.key, link)
        if not closed:
            self._running[row.source] = generator, position
        return SourceMove(row.source, row.position, max(position, row.position), closed, tuple(links.values()))

    def _link_of(self, row: SourceRow, position: int, item: object) -> Link:
        try:
            if isinstance(item, Call):
                return self.spider.schema(item.handler).link(item.arguments, shards=self._linker.shards, priority=item.priority)
            if isinstance(item, (str, Request)):
                return self._linker.asked(item if isinstance(item, Request) else Request(item))
        except (UrlRejected, UsageError) as error:
            raise UsageError(f"the start {_name_in(row)} of spider {self.spider.name}, item {position}: {error}") from error
        raise UsageError(
            f"the start {_name_in(row)} of spider {self.spider.name}, item {position}: {item!r}; expected a URL, a Request or a call"
        )

    def read(self) -> SourceMove:
        """The next lines of the first open source, as tasks; the caller commits the move."""
        row = self._open[0]
        if row.kind == "csv":
            return self._read_csv(row)
        lines, after, closed = self._lines_of_list(row) if row.kind in ("list", "given") else self._lines_of_file(row)
        links: dict[bytes, Link] = {}
        for number, line in lines:
            link = self._link(row, number, line)
            if link is not None:
                links.setdefault(link.key, link)
        return SourceMove(row.source, row.position, after, closed, tuple(links.values()))

    def moved(self, move: SourceMove) -> None:
        """The move was committed: go on from there."""
        row = self._open.pop(0)
        if not move.closed:
            self._open.insert(0, SourceRow(row.source, row.kind, row.digest, row.place, row.host, row.payload, move.after, closed=False))

    def _link(self, row: SourceRow, number: int, line: str) -> Link | None:
        try:
            return self._linker.asked(Request(line))
        except (UrlRejected, UsageError) as error:
            self.rejected += 1
            log.warning("%s, at %d: %r is no start: %s", row.place or "starts", number, line[:200], error)
            return None

    def _read_csv(self, row: SourceRow) -> SourceMove:
        """The next rows of a CSV file, as calls; a row that is none is said, counted and passed over."""
        if row.source not in self._tables:
            self._check(row)
            self._tables[row.source] = Csv.at(row.place)
        said = json.loads(row.payload)
        schema = self.spider.schema(str(said["task"]))
        table = self._tables[row.source]
        rows, after, closed = table.read(row.position, LINES_MAX)
        links: dict[bytes, Link] = {}
        for number, fields in rows:
            try:
                link = schema.link(arguments_of(schema, {**said["shared"], **fields}), shards=self._linker.shards)
            except UsageError as error:
                self.rejected += 1
                log.warning("%s, row at byte %d: %s", row.place, number, error)
                continue
            links.setdefault(link.key, link)
        return SourceMove(row.source, row.position, after, closed, tuple(links.values()))

    def _lines_of_list(self, row: SourceRow) -> tuple[list[tuple[int, str]], int, bool]:
        starts = json.loads(row.payload)
        piece = starts[row.position : row.position + LINES_MAX]
        after = row.position + len(piece)
        return list(enumerate(piece, row.position)), after, after >= len(starts)

    def _lines_of_file(self, row: SourceRow) -> tuple[list[tuple[int, str]], int, bool]:
        self._check(row)
        found: list[tuple[int, str]] = []
        with open(row.place, "rb") as lines:
            lines.seek(row.position)
            for _ in range(LINES_MAX):
                at = lines.tell()
                raw = lines.readline(LINE_BYTES_MAX)
                if not raw:
                    return found, at, True
                text = raw.decode("utf-8-sig" if at == 0 else "utf-8", "replace").strip()
                if text and not text.startswith("#"):
                    found.append((at, text))
            return found, lines.tell(), False

    def _check(self, row: SourceRow) -> None:
        """The file is the one that the job was started with; UsageError says what to do where it is not."""
        if row.source in self._checked:
            return
        if row.host != socket.gethostname() and not os.path.exists(row.place):
            raise UsageError(f"the starts in {row.place} lie on {row.host}: run a worker there, or give the same file again with --from")
        try:
            found = digest_of_file(row.place)
            if row.kind == "csv":
                found = digest(row.payload.encode(), found)
        except OSError as error:
            raise UsageError(f"cannot read the starts in {row.place}: {error.strerror}; give the same file again with --from") from error
        if found != row.digest:
            raise UsageError(
                f"{row.place} has changed since the job began: put the old file back, or give the new one with --from as a further source"
            )
        self._checked.add(row.source)


def _name_in(row: SourceRow) -> str:
    return str(json.loads(row.payload)["generator"])
