"""A PgBouncer in transaction mode, from the system's package: in front of a PostgreSQL server of the tests, on a free port.

Its pool has fewer connections to the server than its clients have to it, so that a client really finds itself on another one
with each transaction: a test asks `backends` whether it did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.servers.postgres import PostgresServer, as_nobody, die_with_parent, free_port

#: Connections to the server for each database: two for each of two workers that commit, less one.
POOL = 3

CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
admin_users = postgres
pool_mode = {mode}
default_pool_size = {pool}
max_client_conn = 200
server_round_robin = 1
server_login_retry = 0.2
query_wait_timeout = 10
logfile = {folder}/log
"""


@dataclass
class Pooler:
    """A running PgBouncer."""

    server: PostgresServer
    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def through(self, dsn: str) -> str:
        """A database's address, by way of this pooler."""
        return dsn.replace(f":{self.server.port}/", f":{self.port}/")

    def kill(self) -> None:
        """End it at once, and every connection through it."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Start it again on the same port."""
        self.process = _launch(self.folder)
        _wait(self)

    def transactions(self) -> int:
        """How many it has carried since it was started, for all databases of the server but its own."""
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/pgbouncer", autocommit=True) as console:
            console.prepare_threshold = None
            found = psycopg.ClientCursor(console).execute("SHOW TOTALS").fetchall()
        return int(dict(found).get("total_xact_count", 0))


def is_installed() -> bool:
    """Whether the system has it."""
    return _program() is not None


def _program() -> str | None:
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _launch(folder: Path) -> subprocess.Popen[bytes]:
    identity: dict[str, Any] = as_nobody()
    return subprocess.Popen(
        [str(_program()), "--quiet", folder / "configuration"], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, preexec_fn=die_with_parent, **identity,
    )  # fmt: skip


def _wait(pooler: Pooler) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(f"postgresql://postgres@127.0.0.1:{pooler.port}/postgres", connect_timeout=2).close()
            return
        except psycopg.OperationalError as error:
            if pooler.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PgBouncer did not start: {error} {(pooler.folder / 'log').read_text()[-2000:]}") from None
            time.sleep(0.05)


@contextlib.contextmanager
def running(server: PostgresServer, *, pool: int = POOL, mode: str = "transaction", user: str = "postgres") -> Iterator[Pooler]:
    """A pooler for as long as the block runs; `mode` is `transaction`, or `session` for comparison."""
    if not is_installed():
        raise RuntimeError("PgBouncer is not installed: apt-get install pgbouncer")
    with tempfile.TemporaryDirectory(prefix="limpet-bouncer-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        identity = as_nobody()
        if identity:
            os.chown(folder, identity["user"], identity["group"])
        port = free_port()
        said = CONFIGURATION.format(server=server.port, port=port, folder=folder, pool=pool, mode=mode)
        (folder / "configuration").write_text(said, encoding="utf-8")
        (folder / "users").write_text(f'"{user}" ""\n', encoding="utf-8")
        pooler = Pooler(server, folder, port, _launch(folder))
        try:
            _wait(pooler)
            yield pooler
        finally:
            if pooler.process.poll() is None:
                pooler.kill()
