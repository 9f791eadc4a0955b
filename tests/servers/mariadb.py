"""A MariaDB server from the system's package: started on a temporary folder and a free port, and ended with the tests."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pymysql

from tests.servers.postgres import _die_with_parent, free_port


@dataclass
class MariadbServer:
    """A running server."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    options: list[str]
    made: int = 0

    def dsn(self, database: str = "mysql") -> str:
        """The address of one of its databases."""
        return f"mysql://root@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of a new, empty database."""
        self.made += 1
        name = f"limpet_{self.made}"
        with contextlib.closing(pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)) as admin:
            admin.cursor().execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
        return self.dsn(name)

    def kill(self) -> None:
        """End it as if the power failed."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Start it again on the same port and data."""
        self.process = _launch(self.folder, self.options)
        _wait(self)


def is_installed() -> bool:
    """Whether the system has the server."""
    return shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None


def _launch(folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    log = (folder / "log").open("ab")
    return subprocess.Popen(options, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, preexec_fn=_die_with_parent)


def _wait(server: MariadbServer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            pymysql.connect(host="127.0.0.1", port=server.port, user="root", connect_timeout=2).close()
            return
        except pymysql.Error:
            if server.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"MariaDB did not start: {(server.folder / 'log').read_text()[-2000:]}") from None
            time.sleep(0.05)


@contextlib.contextmanager
def running(*extra: str) -> Iterator[MariadbServer]:
    """A server for as long as the block runs."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    daemon, install = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db", path=path)
    if daemon is None or install is None:
        raise RuntimeError("MariaDB is not installed: apt-get install mariadb-server")
    with tempfile.TemporaryDirectory(prefix="limpet-maria-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        user = []
        if not os.geteuid():
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
            user = ["--user=nobody"]
        data = folder / "data"
        subprocess.run(
            [install, "--no-defaults", f"--datadir={data}", *user, "--auth-root-authentication-method=normal", "--skip-test-db",
             "--innodb-log-file-size=8M"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        port = free_port()
        options = [
            daemon, "--no-defaults", *user, f"--datadir={data}", f"--socket={folder}/s", f"--port={port}", "--bind-address=127.0.0.1",
            f"--pid-file={folder}/pid", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--skip-name-resolve",
            "--max-connections=80", *extra,
        ]  # fmt: skip
        (folder / "log").touch()
        server = MariadbServer(folder, port, _launch(folder, options), options)
        try:
            _wait(server)
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
