"""What an address of PostgreSQL may say: read before libpq sees it, and what libpq and the server say of a wrong one.

libpq ends a password at its first @, or takes it for a port where a / comes before that. What then is left of it is a host, a
port or a database, which messages repeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from limpet.errors import UsageError
from limpet.store.dialect import public_dsn

#: What libpq is told where the address does not say it.
CONNECTION: Mapping[str, Any] = {
    "connect_timeout": 10, "application_name": "limpet", "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}  # fmt: skip

#: What libpq or the server says of an option of the address, where another attempt would hear the same.
_WRONG_OPTION = re.compile(
    r"invalid \S+ value: |invalid integer value|bad value for connect_timeout|could not match \d+|could not parse network address"
    r"|unrecognized configuration parameter|invalid value for parameter|invalid command-line argument|parameter \"[^\"]*\" cannot be"
    r"|permission denied to set parameter|error in service file"
)


def address(dsn: str) -> dict[str, Any]:
    """What libpq needs of an address; UsageError, which holds no piece of a password, where that is none.

    >>> address("postgresql://me:p%40ss@db:5433/crawl")["port"]
    '5433'
    """
    rest = dsn.partition("://")[2]
    place = rest.partition("@")[2] if "@" in rest.partition("/")[0] else rest
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:  # what it says may hold a piece of a password
        found = {"port": "none"}
    if "@" in place.partition("?")[0] or not all(map(_is_port, str(found.get("port") or "").split(","))):
        raise UsageError(
            f"{public_dsn(dsn)!r}: expected postgresql://user@host:5432/database, with /, ? and @ in a password as %2F, %3F, %40"
        )
    return {**CONNECTION, **found}


def wrong_option(told: str) -> str:
    """What to do where libpq or the server does not take an option of the address; "" where it is only away.

    >>> wrong_option('invalid sslmode value: "bogus"'), wrong_option("Connection refused")
    ('check what the address says after its ?', '')
    """
    return "check what the address says after its ?" if _WRONG_OPTION.search(told) else ""


def _is_port(text: str) -> bool:
    """Whether it may stand for a port: a number of one, or nothing, for the usual one."""
    return not text or (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535)
