"""A MariaDB server from the system's package: started on a temporary folder and a free port, and ended with the tests."""

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

import pymysql
from pymysql.constants import CLIENT

from tests.servers.postgres import as_nobody, die_with_parent, free_port


@dataclass
class MariadbServer:
    """A running server."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    options: list[str]
    identity: dict[str, Any]
    made: int = 0

    def dsn(self, database: str = "mysql") -> str:
        """The address of one of its databases: without TLS, which costs 20 ms a connection, to read all authorities of the system."""
        return f"mysql://root@127.0.0.1:{self.port}/{database}?ssl_disabled=1"

    def new_database(self, schema: str = "", *, rows_of: str = "") -> str:
        """The address of a new database: an empty one, or one with what `schema_of` said of another, and its rows."""
        self.made += 1
        name = f"limpet_{self.made}"
        said = f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin; USE {name}; {schema}"
        if rows_of:
            other = name_of(rows_of)
            said += "".join(f"; REPLACE INTO {table} SELECT * FROM {other}.{table}" for table in self._tables(other, "BASE TABLE"))
        with self._admin() as admin, admin.cursor() as cursor:
            cursor.execute(said)
            while cursor.nextset():
                pass
        return self.dsn(name)

    def schema_of(self, dsn: str) -> str:
        """The statements that make the tables and views of a database again, and the rows of `meta`."""
        database = name_of(dsn)
        said = []
        with self._admin(database) as admin, admin.cursor() as cursor:
            for kind in ("BASE TABLE", "VIEW"):
                for name in self._tables(database, kind):
                    cursor.execute(f"SHOW CREATE {kind.removeprefix('BASE ')} `{name}`")
                    said.append(str((cursor.fetchone() or ())[1]).replace(f"`{database}`.", ""))
            cursor.execute("SELECT name, value FROM meta")
            said += [f"INSERT INTO meta VALUES ({admin.escape(name)}, {admin.escape(value)})" for name, value in cursor.fetchall()]
        return "; ".join(said)

    def _tables(self, database: str, kind: str) -> list[str]:
        with self._admin() as admin, admin.cursor() as cursor:
            cursor.execute("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_TYPE = %s", (database, kind))
            return [str(row[0]) for row in cursor.fetchall()]

    @contextlib.contextmanager
    def _admin(self, database: str = "mysql") -> Iterator[pymysql.Connection[Any]]:
        admin = pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            autocommit=True,
            client_flag=CLIENT.MULTI_STATEMENTS,
            ssl_disabled=True,
        )
        with contextlib.closing(admin):
            yield admin

    def kill(self) -> None:
        """End it as if the power failed."""
        self.process.kill()
        self.process.wait()

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast`, or `immediate`, which is a kill here."""
        if mode == "fast":
            self.process.terminate()
            self.process.wait(60)
        else:
            self.kill()

    def start(self) -> None:
        """Start it again on the same port and data."""
        self.process = _launch(self.folder, self.options, self.identity)
        _wait(self)


def name_of(dsn: str) -> str:
    """The name of the database in an address."""
    return dsn.partition("?")[0].rpartition("/")[2]


def is_installed() -> bool:
    """Whether the system has the server."""
    return shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None


def _launch(folder: Path, options: list[str], identity: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Under the other user from the start: a change of it later would undo `die_with_parent`."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            options, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent, **identity
        )


def _wait(server: MariadbServer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            pymysql.connect(host="127.0.0.1", port=server.port, user="root", connect_timeout=2, ssl_disabled=True).close()
            return
        except pymysql.Error:
            if server.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"MariaDB did not start: {(server.folder / 'log').read_text()[-2000:]}") from None
            time.sleep(0.05)


@contextlib.contextmanager
def running(*extra: str, folder: Path | None = None) -> Iterator[MariadbServer]:
    """A server for as long as the block runs, in a folder of its own inside `folder`; `extra` are options of it."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    daemon, install = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db", path=path)
    if daemon is None or install is None:
        raise RuntimeError("MariaDB is not installed: apt-get install mariadb-server")
    if folder is not None:
        folder.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="limpet-maria-", dir=folder) as name:
        folder = Path(name)
        folder.chmod(0o755)
        identity = as_nobody()
        if identity:
            os.chown(folder, identity["user"], identity["group"])
        data = folder / "data"
        made = subprocess.run(
            [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal", "--skip-test-db",
             "--innodb-log-file-size=8M", f"--tmpdir={folder}"],
            check=False, capture_output=True, text=True, cwd=folder, **identity,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"mariadb-install-db ended with {made.returncode}: {made.stdout[-2000:]} {made.stderr[-2000:]}")
        port = free_port()
        options = [
            daemon, "--no-defaults", f"--datadir={data}", f"--socket={folder}/s", f"--port={port}", "--bind-address=127.0.0.1",
            f"--pid-file={folder}/pid", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--skip-name-resolve",
            "--max-connections=80", f"--tmpdir={folder}", *extra,
        ]  # fmt: skip
        (folder / "log").touch()
        server = MariadbServer(folder, port, _launch(folder, options, identity), options, identity)
        try:
            _wait(server)
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
