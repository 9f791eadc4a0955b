"""Where a password may stand, and where it never shows: not in a log, an error, a row, a traceback, nor in `ps`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.replies import Site
from limpet.store.dialect import public_dsn
from limpet.store.opening import connect
from tests.conftest import on_servers
from tests.crash.trial import SPIDERS
from tests.e2e.conftest import Limpet, limpet
from tests.e2e.gate import Gate, gated
from tests.servers.kinds import Databases

__all__ = ["limpet"]  # a fixture

pytestmark = on_servers

#: As it is, and as it stands in an address.
SECRET, IN_ADDRESS = "Tide/pool?42@home", "Tide%2Fpool%3F42%40home"

#: A program that waits.
WAITING = "input()"

ROLES = itertools.count(1)
SPIDER = str(SPIDERS / "shelf.py")


@dataclass
class Place:
    """A database whose server asks for a password, and everything that was printed by whoever worked with it."""

    admin: str  # the address of one who needs none
    role: str
    call: Limpet
    printed: str = ""

    def dsn(self, password: str = IN_ADDRESS, database: str = "") -> str:
        """The address of the role, with a password or without one."""
        scheme, _, rest = self.admin.partition("://")
        where = rest.rpartition("@")[2]
        if database:
            where = f"{where.rpartition('/')[0]}/{database}"
        return f"{scheme}://{self.role}{':' if password else ''}{password}@{where}"

    def limpet(self, *words: object, db: str = "", **environment: str) -> int:
        """A command whose address is in its environment: its exit code."""
        with pytest.MonkeyPatch.context() as patched:
            for name in [name for name in os.environ if name.startswith("PG")]:
                patched.delenv(name)
            for name, value in {"LIMPET_DB": db or self.dsn(), **environment}.items():
                patched.setenv(name, value)
            ended = self.call(*words)
        self.printed += ended.out + ended.err
        return ended.code


@pytest.fixture
def place(databases: Databases, limpet: Limpet) -> Iterator[Place]:
    """A role with a password, in a new database of its own."""
    made = Place(databases.new(), f"keeper_{next(ROLES)}", limpet)
    if databases.name == "postgres":
        import psycopg

        rules = databases.server.folder / "data" / "pg_hba.conf"  # type: ignore[attr-defined]
        before = rules.read_text(encoding="utf-8")
        rules.write_text(f"host all {made.role} 127.0.0.1/32 scram-sha-256\n{before}", encoding="utf-8")
        with psycopg.connect(made.admin, autocommit=True) as admin:
            admin.execute(f"CREATE ROLE {made.role} LOGIN SUPERUSER PASSWORD '{SECRET}'")
            admin.execute("SELECT pg_reload_conf()")
        while lets_in(made.dsn("")):  # the server reads its rules anew when it comes to it
            pass
        yield made
        rules.write_text(before, encoding="utf-8")
        with psycopg.connect(made.admin, autocommit=True) as admin:
            admin.execute("SELECT pg_reload_conf()")
        return
    import pymysql

    from limpet.store.mysql import arguments

    with closing(pymysql.connect(**arguments(made.admin), autocommit=True)) as line, line.cursor() as cursor:
        cursor.execute(f"CREATE USER {made.role}@'127.0.0.1' IDENTIFIED BY '{SECRET}'")
        cursor.execute(f"GRANT ALL ON *.* TO {made.role}@'127.0.0.1'")
    yield made


def lets_in(dsn: str) -> bool:
    """Whether a PostgreSQL server takes somebody without a password."""
    import psycopg

    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def gated_shop() -> Iterator[tuple[Site, Gate]]:
    """A shop that can be made to wait until it has been looked at."""
    with gated(Shop(products=60, hosts=4)) as both:
        yield both


def command_lines(of: int) -> list[str]:
    """What `ps` shows of a process and all that it started."""
    found, left = [], [of]
    while left:
        pid = left.pop()
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            left += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
    return found


def rows_of(dsn: str) -> str:
    """Every row of every table, as text."""
    db = connect(dsn, readonly=True)
    try:
        tables = [name for name, made in db.catalogue().items() if made.kind == "table"]
        return "".join(repr(row) for name in tables for row in db.rows_text(f'SELECT * FROM "{name}"'))
    finally:
        db.close()


def shows(text: str) -> bool:
    """Whether any part of the password is in a text."""
    return any(part in text for part in (SECRET, IN_ADDRESS, "Tide", "pool?42", "pool%3F42"))


def test_a_password_is_in_nothing_that_a_working_crew_leaves_behind(place: Place, gated_shop: tuple[Site, Gate], tmp_path: Path) -> None:
    """Two workers with all their logs; every command that says where it works; `ps`, and each row of the database."""
    shop, gate = gated_shop
    gate.shut_after(20)
    starts = [word for start in shop.shop.starts() for word in ("--start", start)]
    words = ["run", SPIDER, "--workers", "2", "--log-level", "debug", "--log-format", "json", "--read-timeout", "60", *starts]
    log = tmp_path / "log"
    seen: list[str] = []
    with log.open("w") as file:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LIMPET_")} | {"LIMPET_DB": place.dsn()}
        crew = subprocess.Popen(
            [sys.executable, "-m", "limpet", *words], env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
        look = threading.Event()
        while crew.poll() is None:
            seen += command_lines(crew.pid)
            if any("limpet worker" in line for line in seen) and shop.stats.requests > 20:
                gate.open()
            look.wait(0.05)
    assert crew.returncode == 0, log.read_text(encoding="utf-8")
    assert sum("limpet worker" in line for line in {*seen}) >= 1
    for words in (
        ["status"], ["status", "--json"], ["doctor"], ["doctor", "--json"], ["config", SPIDER], ["verify"], ["migrate", "--print"],
        ["run", SPIDER, "--json"], ["export", "product"], ["migrate", SPIDER], ["explain", shop.shop.starts()[0]],
    ):  # fmt: skip
        assert place.limpet(*words) in (0, 6), place.printed
    left = {"ps": "".join(seen), "log": log.read_text(encoding="utf-8"), "printed": place.printed, "rows": rows_of(place.dsn())}
    assert {name for name, text in left.items() if shows(text)} == set()
    assert shows(command_lines_with(place)), "what is given on the command line is there for all to see: the test looks in the right place"


def command_lines_with(place: Place) -> str:
    """`ps` where the address stands on the command line."""
    waiting = subprocess.Popen([sys.executable, "-c", WAITING, place.dsn()], stdin=subprocess.PIPE)
    try:
        while WAITING not in (seen := "".join(command_lines(waiting.pid))):  # it has begun
            assert waiting.poll() is None
        return seen
    finally:
        waiting.communicate(b"\n")


FAILING = [
    ("another password", {"password": "Tidepool"}, 2),
    ("no such database", {"database": "nowhere"}, 2),
    ("one that cannot be read", {"password": "Tide/pool?42@home"}, 2),
    ("no password", {"password": ""}, 2),
]


@pytest.mark.parametrize(("given", "code"), [row[1:] for row in FAILING], ids=[row[0] for row in FAILING])
def test_a_password_is_in_no_error(place: Place, databases: Databases, given: dict[str, str], code: int) -> None:
    """Refused at the door, and said so, with its traceback; the password is nowhere, not even one that was never right."""
    if given == {"password": ""} and databases.name == "mysql":
        given = {"password": "Tide"}  # without one MySQL says the same
    for words in (["run", SPIDER, "--debug"], ["status", "--debug", "--json"], ["doctor"], ["worker", SPIDER], ["migrate"]):
        assert place.limpet(*words, db=place.dsn(**given)) in (code, 7), (words, place.printed)
    assert place.role in place.printed or "***" in place.printed
    assert not shows(place.printed), place.printed


def test_a_server_that_is_away_is_named_without_its_password(place: Place) -> None:
    """Nobody listens there: resumable, and the address in the message is the public one."""
    gone = place.dsn().replace("127.0.0.1:", "127.0.0.99:")
    assert place.limpet("run", SPIDER, "--debug", db=gone) == 4
    assert public_dsn(gone) in place.printed
    assert not shows(place.printed)


def test_postgresql_takes_its_password_from_where_libpq_does(place: Place, databases: Databases, tmp_path: Path) -> None:
    """A password file, a service file, the environment; without any of them it says which there are. MySQL: in LIMPET_DB alone."""
    if databases.name == "mysql":
        assert place.limpet("doctor") == 0, place.printed
        assert place.limpet("doctor", db=place.dsn("")) in (2, 7)
        return
    port, database = place.admin.rpartition(":")[2].split("/")
    passwords, services = tmp_path / "passwords", tmp_path / "services"
    escaped = SECRET.replace(":", "\\:")
    passwords.write_text(f"127.0.0.1:{port}:{database}:{place.role}:{escaped}\n", encoding="utf-8")
    passwords.chmod(0o600)
    service = f"[crawl]\nhost=127.0.0.1\nport={port}\ndbname={database}\nuser={place.role}\npassword={SECRET}\n"
    services.write_text(service, encoding="utf-8")
    bare = place.dsn("")
    for db, environment in (
        (bare, {"PGPASSFILE": str(passwords)}),
        (bare, {"PGPASSWORD": SECRET}),
        ("postgresql://?service=crawl", {"PGSERVICEFILE": str(services)}),
        ("postgresql:///?service=crawl", {"PGSERVICEFILE": str(services)}),
        (f"{bare}?passfile={passwords}", {}),
    ):
        assert place.limpet("migrate", SPIDER, db=db, **environment) in (0, 6), (db, place.printed)
        assert place.limpet("doctor", db=db, **environment) == 0, (db, place.printed)
    assert place.limpet("run", SPIDER, db=bare) == 2
    assert "PGPASSFILE" in place.printed
    assert not shows(place.printed)
