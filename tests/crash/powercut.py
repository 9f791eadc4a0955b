"""Replays a recording into the disks that a power cut could have left, and looks into each.

What a file held at its last sync is there. Of what was written since, any 512-byte sector may be there or not, in any mix;
so may a file that was made, or deleted, since its folder was last synced. As SQLite's unix VFS does, the first sync of a
new journal or WAL syncs the folder as well; nothing syncs it for the database file itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from limpet.errors import LimpetError
from limpet.store.opening import connect
from tests.crash import judge
from tests.crash.recorder import Operation

SECTOR = 512

#: Names of files whose first sync syncs their folder, by their ends.
SYNC_THEIR_FOLDER = ("-journal", "-wal")


@dataclass(slots=True)
class File:
    """One file: what is surely on the disk, and what may be."""

    name: str
    sure: bytearray = field(default_factory=bytearray)
    since: list[Operation] = field(default_factory=list)
    was_synced: bool = False

    def sync(self) -> None:
        """All of it is sure now."""
        for done in self.since:
            _apply(self.sure, done)
        self.since.clear()
        self.was_synced = True

    def cut(self, rng: random.Random, share: float) -> bytes:
        """What a cut leaves of it, where each sector written since has that chance to be there."""
        left = bytearray(self.sure)
        for done in self.since:
            if share >= 1:
                _apply(left, done)
            elif share > 0:
                _apply_in_part(left, done, rng, share)
        return bytes(left)


def _apply(content: bytearray, done: Operation) -> None:
    if done.what == "truncate":
        del content[done.at :]
        return
    end = done.at + len(done.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[done.at : end] = done.data


def _apply_in_part(content: bytearray, done: Operation, rng: random.Random, share: float) -> None:
    if done.what == "truncate":
        if rng.random() < share:
            _apply(content, done)
        return
    at = 0
    while at < len(done.data):
        step = min(SECTOR - (done.at + at) % SECTOR, len(done.data) - at)
        if rng.random() < share:
            _apply(content, Operation("write", at=done.at + at, data=done.data[at : at + step]))
        at += step


Content = dict[str, bytes]

#: A disk that a cut left, and the acks given by then.
State = tuple[Content, Sequence[str]]


@dataclass(slots=True)
class Disk:
    """A folder of files, some of it surely on the disk. `acks` are those that were given so far."""

    files: dict[int, File] = field(default_factory=dict)
    sure: dict[str, int] = field(default_factory=dict)  # name -> number of the file
    since: list[tuple[str, int | None]] = field(default_factory=list)
    acks: list[str] = field(default_factory=list)

    def apply(self, done: Operation) -> None:
        """Go one operation on."""
        match done.what:
            case "open" if done.is_new:
                self.files[done.file] = File(done.name)
                self.since.append((done.name, done.file))
            case "write" | "truncate" if done.file:
                self.files[done.file].since.append(done)
            case "sync" if done.file:
                file = self.files[done.file]
                if not file.was_synced and file.name.endswith(SYNC_THEIR_FOLDER):
                    self._sync_folder()
                file.sync()
            case "delete":
                self.since.append((done.name, None))
                if done.is_synced:
                    self._sync_folder()
            case "ack":
                self.acks += done.data.decode().split("\n")

    def _sync_folder(self) -> None:
        self.sure = self._entries(random.Random(0), 1)
        self.since.clear()

    def _entries(self, rng: random.Random, share: float) -> dict[str, int]:
        entries = dict(self.sure)
        for name, number in self.since:
            if share >= 1 or rng.random() < share:
                if number is None:
                    entries.pop(name, None)
                else:
                    entries[name] = number
        return entries

    def cut(self, rng: random.Random, share: float) -> Content:
        """The folder as a cut could leave it: nothing since the last sync (0), all of it (1), or any mix."""
        return {name: self.files[number].cut(rng, share) for name, number in self._entries(rng, share).items()}


def cuts(recording: Sequence[Operation], *, seed: int, mixes: int, every: int = 1) -> Iterator[State]:
    """Disks that a cut after each operation (or each so many) could leave, with the acks given by then.

    Each has two states, none and all of what was not synced, and so many mixes.
    """
    rng = random.Random(seed)
    disk = Disk()
    for number, done in enumerate(recording):
        disk.apply(done)
        if number % every:
            continue
        for share in (0.0, 1.0, *(rng.choice((0.1, 0.5, 0.9)) for _ in range(mixes))):
            yield disk.cut(rng, share), tuple(disk.acks)


@dataclass(slots=True)
class Findings:
    """What was found on all disks together."""

    states: int = 0
    distinct: int = 0
    unopenable: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every disk opens, passes its proof, and has all that was acknowledged."""
        return not (self.unopenable or self.unproved or self.lost)


@dataclass(slots=True)
class Look:
    """What one disk holds; many cuts leave the same one."""

    error: str = ""
    fault: str = ""
    stored: frozenset[str] = frozenset()


def inspect(states: Iterator[State], folder: Path, name: str = "crawl.db") -> Findings:
    """Look into every state: it opens, the full proof passes, and what was acknowledged is there."""
    findings = Findings()
    seen: dict[bytes, Look] = {}
    for content, acks in states:
        findings.states += 1
        key = _digest(content)
        if key not in seen:
            seen[key] = look = _look(lay(content, folder) / name)
            findings.distinct += 1
            findings.unopenable += [f"state {findings.states}: {look.error}"] if look.error else []
            findings.unproved += [f"state {findings.states}: {look.fault}"] if look.fault else []
        missing = set(acks) - seen[key].stored
        if missing:
            findings.lost.append(f"state {findings.states}: {len(missing)} of {len(acks)} acknowledged are gone, such as {min(missing)}")
    return findings


def lay(content: Content, folder: Path) -> Path:
    """Write a disk's files into an empty folder."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def _digest(content: Content) -> bytes:
    whole = blake2b(digest_size=16)
    for name, data in sorted(content.items()):
        whole.update(f"{name} {len(data)} ".encode())
        whole.update(data)
    return whole.digest()


def _look(path: Path) -> Look:
    if not path.exists():
        return Look()
    try:
        db = connect(str(path))
    except LimpetError as error:
        return Look(error=str(error))
    try:
        if not db.rows_text("SELECT 1 FROM sqlite_master WHERE name = 'job'"):
            return Look()
        return Look(fault=judge.fault_of(db), stored=frozenset(judge.stored(db)))
    except LimpetError as error:
        return Look(error=str(error))
    finally:
        db.close()
