"""A PostgreSQL primary and its streaming replica, which may be made to fall behind, and to take the primary's place.

with replica.pair() as both:                        asynchronous; `synchronous=True` waits for the replica with each COMMIT
    both.dsn("name")                                both servers in one address: whoever takes writes is meant
    both.deafen(); ...; both.fail_over()            what was acknowledged after `deafen` is lost
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.servers import postgres
from tests.servers.postgres import PostgresServer, free_port

#: How the replica calls itself.
NAME = "limpet_replica"

#: Seconds that a replica has to do what it is told.
PATIENCE_S = 60.0


@dataclass
class Pair:
    """Two servers: the one that takes writes, and the one that follows it."""

    primary: PostgresServer
    replica: PostgresServer
    is_deaf: bool = False

    def dsn(self, database: str) -> str:
        """The address of a database on whichever server takes writes."""
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
        return f"postgresql://postgres@{hosts}/{database}?target_session_attrs=read-write"

    def new_database(self) -> str:
        """The address of a new database, by way of both servers, once the replica has it."""
        name = self.primary.new_database().rpartition("/")[2]
        _until(lambda: self._has(name), "the replica has no such database")
        return self.dsn(name)

    def _has(self, name: str) -> bool:
        with psycopg.connect(self.replica.dsn(), autocommit=True) as there:
            return there.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone() is not None

    def sender(self) -> int:
        """The primary's process that sends the log to the replica."""
        with psycopg.connect(self.primary.dsn(), autocommit=True) as here:
            found = here.execute("SELECT pid FROM pg_stat_replication WHERE state = 'streaming'").fetchall()
        return int(found[0][0]) if found else 0

    def wait_for_no_sender(self) -> None:
        """Until the primary has noticed that the replica is gone."""
        _until(lambda: not self._slot_is_read(), "the primary still sends")

    def _slot_is_read(self) -> bool:
        with psycopg.connect(self.primary.dsn(), autocommit=True) as here:
            return here.execute("SELECT active FROM pg_replication_slots").fetchall() == [(True,)]

    def deafen(self) -> None:
        """From now on the replica hears nothing: the process that sends to it is frozen."""
        _until(lambda: self.sender() > 0, "the primary sends nothing")
        os.kill(self.sender(), signal.SIGSTOP)
        self.is_deaf = True

    def kill_primary(self) -> None:
        """As if its machine lost power: every process of it at once, so that nothing more is sent by any."""
        main = self.primary.process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text(encoding="ascii").split()
        for pid in (main, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.primary.process.wait()

    def promote(self) -> None:
        """Let the replica take writes."""
        subprocess.run(
            [self.replica.binaries / "pg_ctl", "-D", self.replica.folder / "data", "promote", "-w", "-t", "60"],
            check=True, stdout=subprocess.DEVNULL, cwd=self.replica.folder, **self.replica.identity,
        )  # fmt: skip


@contextlib.contextmanager
def pair(*, synchronous: bool = False, extra: str = "") -> Iterator[Pair]:
    """Both, for as long as the block runs; `extra` joins the configuration of each."""
    with tempfile.TemporaryDirectory(prefix="limpet-pair-") as made, postgres.running(extra, folder=Path(made)) as primary:
        home = Path(made) / "replica"
        home.mkdir(mode=0o700)
        if primary.identity:
            os.chown(home, primary.identity["user"], primary.identity["group"])
        subprocess.run(
            [primary.binaries / "pg_basebackup", "-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres", "-D", home / "data",
             "-X", "stream", "-C", "-S", NAME, "-R", "--no-sync", "-c", "fast"],
            check=True, stdout=subprocess.DEVNULL, cwd=home, **primary.identity,
        )  # fmt: skip
        port = free_port()
        with (home / "data" / "postgresql.auto.conf").open("a", encoding="utf-8") as file:
            told = f"host=127.0.0.1 port={primary.port} user=postgres application_name={NAME}"
            file.write(f"port = {port}\nunix_socket_directories = '{home}'\nhot_standby = on\nprimary_conninfo = '{told}'\n")
        (home / "log").touch()
        replica = PostgresServer(home, primary.binaries, port, postgres._launch(primary.binaries, home, primary.identity), primary.identity)
        try:
            postgres._wait(replica)
            both = Pair(primary, replica)
            _until(both.sender, "the replica does not stream")
            if synchronous:
                with psycopg.connect(primary.dsn(), autocommit=True) as here:
                    here.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{NAME}'")
                    here.execute("SELECT pg_reload_conf()")
                _until(lambda: _is_synchronous(primary), "the replica is not synchronous")
            yield both
        finally:
            replica.stop("immediate")
            if replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()


def _is_synchronous(primary: PostgresServer) -> bool:
    with psycopg.connect(primary.dsn(), autocommit=True) as here:
        return here.execute("SELECT sync_state FROM pg_stat_replication").fetchall() == [("sync",)]


def _until(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(what)
        time.sleep(0.02)
