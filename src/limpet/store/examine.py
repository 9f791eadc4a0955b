"""What can be told of a database file from outside and from inside, for `limpet doctor`. Nothing here writes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import apsw

from limpet.store.sqlite import FIRST_SAFE_VERSION

#: File systems whose locks or shared memory SQLite's WAL cannot rely on (sqlite.org/wal.html, "All processes ... same host").
UNSAFE_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.sshfs",
    "fuse.s3fs",
    "vboxsf",
)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A database's file, and the disk that it is on."""

    bytes: int
    wal_bytes: int
    free_bytes: int
    file_system: str  # "" where the system does not say
    is_writable: bool
    lock_files: tuple[str, ...]  # of workers, beside it

    @property
    def is_on_unsafe_file_system(self) -> bool:
        """Whether the file system is one that a WAL is not safe on."""
        return self.file_system in UNSAFE_FILE_SYSTEMS


def file_facts(path: str) -> FileFacts:
    """Sizes, space and file system of a database file."""
    folder = os.path.dirname(os.path.abspath(path))
    return FileFacts(
        bytes=_size(path),
        wal_bytes=_size(f"{path}-wal"),
        free_bytes=shutil.disk_usage(folder).free,
        file_system=file_system_of(path),
        is_writable=os.access(path, os.W_OK) and os.access(folder, os.W_OK),
        lock_files=tuple(sorted(str(file) for file in Path(folder).glob("limpet-worker-*.lock"))),
    )


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def file_system_of(path: str) -> str:
    """The type of the file system that holds a path, as Linux names it; "" where the system does not say."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    place = os.path.realpath(path)
    mounts = [(fields[1].replace("\\040", " "), fields[2]) for line in lines if len(fields := line.split(" ")) > 2]
    holding = [(point, kind) for point, kind in mounts if place == point or place.startswith(point.rstrip("/") + "/")]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else ""


def sqlite_version() -> tuple[str, bool]:
    """The version of the SQLite in use, and whether it is free of the WAL-reset fault (sqlite.org/wal.html#walresetbug)."""
    text = apsw.sqlite_lib_version()
    return text, tuple(int(piece) for piece in text.split(".")[:3]) >= FIRST_SAFE_VERSION
