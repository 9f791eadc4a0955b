"""Roles that may little: a crawl by one that changes rows alone, and an error that names the GRANT where even that is missing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.site import running as served
from tests.conftest import on_servers
from tests.crash.nursery import Nursery
from tests.crash.trial import SPIDERS
from tests.e2e.conftest import Limpet, limpet
from tests.hardening.team import team
from tests.servers.kinds import Databases

__all__ = ["limpet"]  # a fixture

pytestmark = on_servers

SPIDER = SPIDERS / "shelf.py"
ROLES = itertools.count(1)

#: What a role needs that changes rows alone.
GRANTS = {
    "postgres": [
        'GRANT CONNECT, TEMPORARY ON DATABASE "{database}" TO {role}',
        "GRANT USAGE ON SCHEMA public TO {role}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
    ],
    "mysql": ["GRANT SELECT, INSERT, UPDATE, DELETE, CREATE TEMPORARY TABLES ON {database}.* TO {role}@'127.0.0.1'"],
}


@dataclass
class Admin:
    """Somebody who may everything, in one database, and a role that may nothing in it."""

    dsn: str
    role: str

    @property
    def database(self) -> str:
        """Its name."""
        return self.dsn.partition("?")[0].rpartition("/")[2]

    @property
    def roles_dsn(self) -> str:
        """The address, as the role says it."""
        return re.sub(r"//\w+@", f"//{self.role}@", self.dsn)

    def run(self, sql: str) -> list[Any]:
        """Some statements, as the one who may; rows of the last."""
        if self.dsn.startswith("postgresql"):
            import psycopg

            with psycopg.connect(self.dsn, autocommit=True) as line:
                cursor = line.execute(sql)
                return cursor.fetchall() if cursor.description else []
        import pymysql
        from pymysql.constants import CLIENT

        from limpet.store.mysql import arguments

        found: list[Any] = []
        made = pymysql.connect(**arguments(self.dsn), autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS)
        with closing(made) as line, line.cursor() as cursor:
            cursor.execute(sql)
            found = list(cursor.fetchall())
            while cursor.nextset():
                found = list(cursor.fetchall())
        return found

    def tables(self) -> set[str]:
        """Every table and view."""
        schema = "'public'" if self.dsn.startswith("postgresql") else "DATABASE()"
        return {row[0] for row in self.run(f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}")}


@pytest.fixture
def admin(databases: Databases) -> Iterator[Admin]:
    """A new database, of which nobody else may anything."""
    made = Admin(databases.new(), f"crawler_{next(ROLES)}")
    if databases.name == "postgres":
        made.run(
            f'REVOKE ALL ON DATABASE "{made.database}" FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC; CREATE ROLE {made.role} LOGIN'
        )
    else:
        made.run(f"CREATE USER {made.role}@'127.0.0.1'")
    yield made
    if databases.name == "postgres":
        made.run(f"DROP OWNED BY {made.role}; DROP ROLE {made.role}")
    else:
        made.run(f"DROP USER {made.role}@'127.0.0.1'")


@contextmanager
def shop() -> Iterator[list[str]]:
    """A small one: the words of its starts."""
    with served(Shop(products=20, hosts=2)) as site:
        yield [word for start in site.shop.starts() for word in ("--start", start)]


def test_a_role_that_changes_rows_alone_runs_a_whole_crawl(
    admin: Admin, databases: Databases, forks: Nursery, limpet: Limpet, tmp_path: Path
) -> None:
    """`migrate --print` prints the SQL, somebody applies it, and two workers of the role crawl, one killed; nothing is made."""
    printed = limpet("migrate", "--print", SPIDER, "--db", admin.dsn)
    assert printed.code == 0
    assert admin.tables() == set()
    admin.run(printed.out)
    assert limpet("migrate", "--print", SPIDER, "--db", admin.dsn).out == ""
    for grant in GRANTS[databases.name]:
        admin.run(grant.format(database=admin.database, role=admin.role))
    before = admin.tables()
    assert {"task", "shard", "shelf_product", "shelf_product_view"} <= before
    with team(forks, admin.roles_dsn, Shop(products=150, hosts=8), tmp_path, latency_s=0.05, **{"per-host": 1}) as crowd:
        with crowd.unfinished():
            first, _ = crowd.start(), crowd.start()
            crowd.until(lambda: crowd.shares() == [4, 4])
            first.kill()
            crowd.start()
        crowd.ended()
        assert crowd.faults() == []
        assert crowd.limpet("status")[0] == 0
        assert crowd.limpet("export", "product")[0] == 0
        assert crowd.limpet("doctor")[0] == 0
    assert admin.tables() == before


def test_every_grant_that_an_error_names_is_the_one_that_is_missing(admin: Admin, limpet: Limpet) -> None:
    """From a role that may nothing: each run names one GRANT; with all of them the crawl completes."""
    admin.run(limpet("migrate", "--print", SPIDER, "--db", admin.dsn).out)
    given: list[str] = []
    with shop() as starts:
        for _ in range(6):
            ended = limpet("run", SPIDER, "--db", admin.roles_dsn, "--quiet", *starts)
            if ended.code == 0:
                break
            assert ended.code == 2, ended.err
            named = re.search(r"(GRANT [^;`]*(?:`[^`]*`\.\*[^;]*)?)", ended.err)
            assert named, ended.err
            assert named[1].strip() not in given, ended.err
            given.append(named[1].strip())
            admin.run(given[-1])
        assert ended.code == 0, (given, ended.err)
    assert given


def test_a_role_that_may_not_make_tables_is_told_how_they_are_made(admin: Admin, databases: Databases, limpet: Limpet) -> None:
    """In an empty database, and with the schema but without the tables of the spider."""
    for grant in GRANTS[databases.name]:
        admin.run(grant.format(database=admin.database, role=admin.role))
    with shop() as starts:
        for step in ("nothing", "schema"):
            if step == "schema":
                admin.run(limpet("migrate", "--print", "--db", admin.dsn).out)
                for grant in GRANTS[databases.name]:
                    admin.run(grant.format(database=admin.database, role=admin.role))
            ended = limpet("run", SPIDER, "--db", admin.roles_dsn, "--quiet", *starts)
            assert ended.code == 2, ended.err
            assert "limpet migrate --print FILE" in ended.err, ended.err
    assert "shelf_product" not in admin.tables()
