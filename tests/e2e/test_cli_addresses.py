"""Addresses of databases that are wrong: exit code 2, what to mend, and not a piece of a password."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Limpet
from tests.servers.kinds import Databases

PIECES = ("hun", "ter2")

#: A password whose @, / or ? is not escaped, as libpq would read it: its rest is a host, a port, a database or an option.
UNESCAPED = (
    "postgresql://root:hun@ter2@127.0.0.1:1/x",
    "postgresql://root:hun@@ter2@127.0.0.1:1/x",
    "postgresql://root:hun@ter2/@127.0.0.1:1/x",
    "postgresql://root:hun/ter2@127.0.0.1:1/x",
    "postgresql://root:1/hunter2@127.0.0.1:1/x",
    "postgresql://root:hun@te/ter2@127.0.0.1:1/x",
    "postgresql://root:hun?te@ter2@127.0.0.1:1/x",
    "postgresql://root:hun?te/ter2@127.0.0.1:1/x",
    "postgresql://root:hun@te?ter2@127.0.0.1:1/x",
)
#: What libpq refuses before it connects, and what the server does not take.
OPTIONS = {
    "sslmode=bogus": 'invalid sslmode value: "bogus"',
    "connect_timeout=abc": "bad value for connect_timeout: 'abc'",
    "keepalives_idle=abc": 'invalid integer value "abc" for connection option "keepalives_idle"',
    "target_session_attrs=any-one": 'invalid target_session_attrs value: "any-one"',
    "host=127.0.0.1,127.0.0.2&port=1,2,3": "could not match 3 port numbers to 2 hosts",
    "options=-cfoo%3Dbar": 'unrecognized configuration parameter "foo"',
    "options=-cwork_mem%3Dmuch": 'invalid value for parameter "work_mem": "much"',
    "options=-cserver_version%3D1": 'parameter "server_version" cannot be changed',
}
on_postgres = pytest.mark.parametrize("databases", ["postgres"], indirect=True)


@pytest.mark.parametrize("address", UNESCAPED)
def test_a_password_that_is_not_escaped_is_refused_before_anybody_hears_of_it(limpet: Limpet, address: str) -> None:
    """The message says how it is written, and shows none of it."""
    ended = limpet("status", "--db", address)
    assert (ended.code, ended.out) == (2, ""), ended
    assert "with /, ? and @ in a password as %2F, %3F, %40" in ended.err
    assert not [piece for piece in PIECES if piece in ended.err], ended.err


@pytest.mark.parametrize("port", ["abc", "0", "99999", "-1"])
def test_a_port_is_a_number_of_one(limpet: Limpet, port: str) -> None:
    """Nothing is asked of any server: 2, and not the 4 that a service manager starts again for ever."""
    ended = limpet("status", "--db", f"postgresql://me@127.0.0.1:{port}/x")
    assert (ended.code, "expected postgresql://user@host:5432/database" in ended.err) == (2, True), ended


@on_postgres
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("command", ["status", "crawl"])
def test_an_option_that_nobody_takes_is_the_user_s_to_mend(limpet: Limpet, databases: Databases, command: str, option: str) -> None:
    """Whether libpq says so or the server, before a job is begun and after."""
    words = ["crawl", "http://127.0.0.1:9/"] if command == "crawl" else [command]
    ended = limpet(*words, "--db", f"{databases.ready()}?{option}")
    assert (ended.code, ended.out) == (2, ""), ended
    assert OPTIONS[option] in ended.err
    assert "check what the address says after its ?" in ended.err


@on_postgres
def test_a_server_that_is_away_stays_worth_another_try(limpet: Limpet, databases: Databases) -> None:
    """4 where nobody listens, or nobody has that name; what libpq takes is taken: several hosts, a ? in a password, a setting."""
    assert limpet("status", "--db", "postgresql://me@127.0.0.1:1/x").code == 4
    assert limpet("status", "--db", "postgresql://me:p%40ss@no-such-host.invalid/x").code == 4
    assert limpet("status", "--db", "postgresql://me:p?ss@127.0.0.1:1,127.0.0.2:2/x").code == 4
    told = limpet("status", "--db", f"{databases.ready()}?options=-cwork_mem%3D8MB&sslmode=prefer")
    assert told.code == 0, told
