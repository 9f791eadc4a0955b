"""Sources: lists of starts, read in batches as tasks are needed, from exactly where the database is.

A list of a few starts lies in the job's row; a file is named by its content's digest, so that the same
starts given twice are one source, and is read by byte offset in constant memory. A start that is no
URL, and a row that is no call, is left out, with its line named. A file that cannot be read, or is another
one by now, is set aside: everything else goes on.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, BinaryIO

from limpet.batch import DIGEST_BYTES, Link, SourceMove, canonical_json, digest
from limpet.engine.calls import Call, Start
from limpet.engine.csvfile import Csv, LineNumbers, arguments_of
from limpet.engine.links import Linker
from limpet.engine.onethread import OneThread
from limpet.engine.request import Request
from limpet.engine.spider import Spider, check_start
from limpet.errors import UrlRejected, UsageError
from limpet.store import jobs
from limpet.store.atomic import is_special
from limpet.store.dialect import Database
from limpet.store.jobs import Source, SourceRow
from limpet.store.opening import checked_slot
from limpet.task import ShardId
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
    """What a caller gives, or else the spider's own starts and generators; UsageError for a start that is no URL, a slot that is none."""
    checked_slot(slot)
    found = []
    own = starts is None and starts_from is None
    listed = _listed(spider.starts if own else starts or (), spider.name)
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


def _listed(starts: Iterable[str], spider: str) -> list[str]:
    """Starts as they are given; UsageError for what raises while it gives them, or gives what is no text."""
    try:
        listed = list(starts)
    except Exception as error:
        raise UsageError(f"spider {spider}: start cannot be read: {type(error).__name__}: {error}") from error
    for start in listed:
        check_start(spider, start)
    return listed


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


def nothing_in(spider: Spider) -> str:
    """What to say of a job whose starts were read and gave no task."""
    if spider.generators:
        names = ", ".join(getattr(function, "__name__", "?") for function in spider.generators)
        return f"nothing to do: its start ({names}) gave no task; the next `limpet run` asks again"
    return "nothing to do: none of the starts is a page"


def source_of_list(starts: Sequence[str], kind: str = "list") -> Source:
    """A source of starts given one by one: `list` where the spider names them, `given` where its caller does."""
    if len(starts) > INLINE_MAX:
        raise UsageError(
            f"{len(starts)} starts given one by one: expected at most {INLINE_MAX}; put them into a file and name it with --from"
        )
    payload = canonical_json(list(starts))
    return Source(kind, digest(payload.encode()), payload=payload)


def source_of_file(path: str) -> Source:
    """A source of a file with a start on each line; UsageError where it cannot be read, or only once."""
    if is_special(path) and not os.path.isdir(path):
        raise UsageError(f"cannot read the starts in {path}: expected a file, which is read as the crawl goes on; found a pipe or device")
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
    """Reads the open sources of a job, one after the other.

    A source belongs to a shard by its number, and is read by whoever has that shard.
    """

    def __init__(self, linker: Linker, rows: Iterable[SourceRow], spider: Spider, slot: str = "") -> None:
        self._linker = linker
        self.spider = spider
        self.start = Start(slot, spider.params)
        self._running: dict[int, tuple[Any, int]] = {}  # source -> its generator, and how much of it was read
        self._tables: dict[int, Csv] = {}
        self._open = [row for row in rows if not row.closed]
        self._aside: dict[int, tuple[SourceRow, str]] = {}  # source -> its row as it was, and why it cannot be read
        self._checked: dict[int, tuple[object, ...]] = {}  # source -> place and state of its file when that was the right one
        self._lines: dict[int, LineNumbers] = {}
        self.rejected = 0

    def refresh(self, rows: Iterable[SourceRow]) -> None:
        """Look at the rows again: others may have read on, added sources, or given a file again."""
        self._open = [row for row in rows if not row.closed]
        self._aside = {row.source: self._aside[row.source] for row in self._open if row == self._aside.get(row.source, ("",))[0]}

    @property
    def is_done(self) -> bool:
        """Whether every source has been read to its end."""
        return not self._open

    @property
    def trouble(self) -> str:
        """Why a source cannot be read here; "" where none was set aside."""
        return next((why for _, why in self._aside.values()), "")

    def turn_to(self, shards: int, owned: Container[ShardId]) -> ShardId | None:
        """Put first what whoever owns these of a job's shards is to read next; its shard, None where nothing is."""
        for row in self._open:
            shard = ShardId(row.source % shards)
            if shard in owned and row.source not in self._aside:
                self._open.remove(row)
                self._open.insert(0, row)
                return shard
        return None

    async def next_move(self, reading: OneThread) -> SourceMove | None:
        """The next tasks of the first open source; None where its file cannot be read, which is then set aside.

        UsageError for what a start generator raised, or yielded that is no task.
        """
        row = self._open[0]
        if row.kind == "generator":
            return await self.generate()
        try:
            return await reading.call(self.read)
        except UsageError as error:
            self._aside[row.source] = row, str(error)
            log.warning("%s; going on without it", error)
            return None

    async def generate(self) -> SourceMove:
        """The next tasks that a start generator yields. It is begun anew after a restart, and what it had yielded is passed over.

        One that this spider no longer has, or has with other code, parameters or slot, is closed. UsageError says what it raised,
        or yielded that is no task.
        """
        row = self._open[0]
        if row.source not in self._running or self._running[row.source][1] > row.position:  # it is asked again from its beginning
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
        """The next lines of the first open source, as tasks; the caller commits the move. UsageError where its file cannot be read."""
        row = self._open[0]
        try:
            return self._read_csv(row) if row.kind == "csv" else self._read_lines(row)
        except OSError as error:
            raise self._unreadable(row, error) from error

    def _read_lines(self, row: SourceRow) -> SourceMove:
        lines, after, closed = self._lines_of_list(row) if row.kind in ("list", "given") else self._lines_of_file(row)
        links: dict[bytes, Link] = {}
        for number, line in lines:
            link = self._link(row, number, line)
            if link is not None:
                links.setdefault(link.key, link)
        return SourceMove(row.source, row.position, after, closed, tuple(links.values()))

    def moved(self, move: SourceMove) -> None:
        """The move was committed: go on from there."""
        if self._open and self._open[0].source == move.source:
            row = self._open.pop(0)
            if not move.closed:
                self._open.insert(0, replace(row, position=move.after))

    def _link(self, row: SourceRow, number: int, line: str) -> Link | None:
        try:
            return self._linker.asked(Request(line))
        except (UrlRejected, UsageError) as error:
            self._reject(row, number, f"{line[:200]!r} is no start: {error}")
            return None

    def _reject(self, row: SourceRow, number: int, why: str) -> None:
        """Count and say what is passed over: of a file by its line, of a list by its place from 0 on."""
        self.rejected += 1
        if not row.place:
            log.warning("starts, at %d: %s", number, why)
            return
        log.warning("%s, line %d: %s", row.place, self._lines.setdefault(row.source, LineNumbers(row.place)).of(number), why)

    def _read_csv(self, row: SourceRow) -> SourceMove:
        """The next rows of a CSV file, as calls; a row that is none is said, counted and passed over."""
        self._check(row)
        if row.source not in self._tables:
            self._tables[row.source] = Csv.at(row.place)
        said = json.loads(row.payload)
        schema = self.spider.schema(str(said["task"]))
        table = self._tables[row.source]
        rows, after, closed = table.rows(row.position, LINES_MAX)
        links: dict[bytes, Link] = {}
        for found in rows:
            if found.fault:
                self._reject(row, found.begins, found.fault)
                continue
            try:
                link = schema.link(arguments_of(schema, {**said["shared"], **table.named(found)}), shards=self._linker.shards)
            except UsageError as error:
                self._reject(row, found.begins, str(error))
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
                raw = lines.readline(LINE_BYTES_MAX + 1)
                if not raw:
                    return found, at, True
                is_whole = len(raw) <= LINE_BYTES_MAX or raw.endswith(b"\n")
                if not is_whole:
                    _skip_line(lines)
                text = raw.decode("utf-8-sig" if at == 0 else "utf-8", "replace").strip()
                if text.startswith("#"):
                    continue
                if not is_whole:
                    self._reject(row, at, f"{text[:80]!r}... is no start: it has more than {LINE_BYTES_MAX} bytes")
                elif text:
                    found.append((at, text))
            return found, lines.tell(), False

    def _check(self, row: SourceRow) -> None:
        """The file is the one that was put in; UsageError says what to do where it is not. Read whole only where it looks changed."""
        if row.host != socket.gethostname() and not os.path.exists(row.place):
            raise UsageError(
                f"the starts in {row.place} lie on {row.host}: run a worker there, or give the same file again: {self._how(row)}"
            )
        state = os.stat(row.place)
        looks = (row.place, state.st_mtime_ns, state.st_size, state.st_ino)
        if self._checked.get(row.source) == looks:
            return
        found = digest_of_file(row.place)
        if (digest(row.payload.encode(), found) if row.kind == "csv" else found) != row.digest:
            raise UsageError(
                f"{row.place} has changed since it was put in: put the old file back, or give this one, which then replaces what was "
                f"not yet read of the old one: {self._how(row)}"
            )
        self._checked[row.source] = looks
        self._tables.pop(row.source, None)
        self._lines.pop(row.source, None)

    def _unreadable(self, row: SourceRow, error: OSError) -> UsageError:
        return UsageError(f"cannot read the starts in {row.place}: {error.strerror}; give a file at its place: {self._how(row)}")

    def _how(self, row: SourceRow) -> str:
        """The command by which a file is given again."""
        words = ["limpet", "run", "FILE", "--from", row.place]
        if row.kind == "csv":
            said = json.loads(row.payload)
            words = ["limpet", "seed", "FILE", "--from", row.place, "--task", said["task"]]
            words += [word for name, value in said["shared"].items() for word in ("--set", f"{name}={value}")]
        return f"`{shlex.join([*words, *(['--slot', self.start.slot] if self.start.slot else [])])}`"


def _skip_line(lines: BinaryIO) -> None:
    """Read to the end of a line, however far that is: its rest is no line of its own."""
    while (piece := lines.readline(LINE_BYTES_MAX)) and not piece.endswith(b"\n"):
        pass


def _name_in(row: SourceRow) -> str:
    return str(json.loads(row.payload)["generator"])
