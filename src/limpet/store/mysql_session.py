"""How a session with MySQL and MariaDB is asked for and set: what an address may say, what every session has, keep-alives."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql

from limpet.errors import UsageError
from limpet.store.dialect import public_dsn

#: What an address may say after its `?`: a socket of this machine, and what becomes of TLS, which is otherwise used where the server
#: has it, and not checked.
_SWITCHES = frozenset({"ssl_disabled", "ssl_verify_cert", "ssl_verify_identity"})
OPTIONS = _SWITCHES | {"unix_socket", "ssl_ca", "ssl_cert", "ssl_key"}


def arguments(dsn: str) -> dict[str, Any]:
    """What the driver needs of `mysql://user:password@host:port/database?ssl_ca=...`; UsageError for what it does not know.

    >>> arguments("mysql://me:p%40ss@db:3307/crawl")["port"]
    3307
    """
    try:
        parts = urlsplit(dsn)
        port = parts.port or 3306
    except ValueError:  # what it says may hold a piece of a password
        raise UsageError(
            f"{public_dsn(dsn)!r}: expected mysql://user@host:3306/database, with /, ? and @ in a password as %2F, %3F, %40"
        ) from None
    if not parts.path.strip("/"):
        raise UsageError(f"{public_dsn(dsn)!r} names no database: expected mysql://user@host:3306/database")
    found: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1", "port": port, "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""), "database": unquote(parts.path.strip("/")),
    }  # fmt: skip
    query = dict(parse_qsl(parts.query))
    if unknown := query.keys() - OPTIONS:
        named = ", ".join(sorted(filter(str.isidentifier, unknown)))  # anything else may be a piece of a password
        raise UsageError(f"{public_dsn(dsn)!r}: after the ? there may be {', '.join(sorted(OPTIONS))}; found {named}")
    return found | {name: value not in ("0", "false") if name in _SWITCHES else value for name, value in query.items()}


def settings_of(half_lease_s: int, *, readonly: bool) -> dict[str, object]:
    """What a session is set to: everything that would cut, guess or wait too long.

    >>> settings_of(5, readonly=False)["wait_timeout"]
    5
    """
    wanted: dict[str, object] = {
        "time_zone": "+00:00", "sql_mode": "STRICT_ALL_TABLES,ANSI_QUOTES,PIPES_AS_CONCAT,NO_ENGINE_SUBSTITUTION", "autocommit": 1,
        "innodb_lock_wait_timeout": min(5, half_lease_s),
        # EXISTS asks an index, once for each row: "is anything left?" must not make a list of everything that is.
        "optimizer_switch": "semijoin=off,materialization=off",
    }  # fmt: skip
    if readonly:
        return wanted | {"wait_timeout": 3600}
    # Frozen between two statements, or in the middle of one: either way its locks end before its lease.
    return wanted | {"wait_timeout": half_lease_s, "net_read_timeout": half_lease_s, "net_write_timeout": half_lease_s}


def keep_alive(connection: pymysql.Connection[Any]) -> None:
    """Have the system find out about a peer that is gone, within some 15 s."""
    line = getattr(connection, "_sock", None)
    if line is None or line.family not in (socket.AF_INET, socket.AF_INET6):
        return
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
