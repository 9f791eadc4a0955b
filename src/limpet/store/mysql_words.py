"""MySQL's and MariaDB's words for what core.sql and the schema say in SQLite's. Text to text; nothing here runs.

Texts are compared byte for byte, trailing spaces too, so that two slots or names are one exactly where they are one
in Python: a collation that pads, as `utf8mb4_bin` does, takes "a" and "a " for the same.
"""

from __future__ import annotations

import re
from functools import cache

#: The collations that compare code points and do not pad: each server knows one of them.
MARIADB_COLLATION = "utf8mb4_nopad_bin"
MYSQL_COLLATION = "utf8mb4_0900_bin"

#: Words of ours that are MySQL's too; quoted in every statement.
RESERVED = ("key", "rank", "cursor")

_NAMED = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_WORD = re.compile(rf"(?<![\w:\"`'])({'|'.join(RESERVED)})\b(?![\"'(])")
_UPSERT = re.compile(r"ON CONFLICT \([^)]*\) DO UPDATE\s+SET")


@cache
def translate(sql: str) -> str:
    """A statement of core.sql with PyMySQL's placeholders and MySQL's words for an upsert.

    >>> translate("SELECT key FROM moved WHERE job = :job")
    'SELECT `key` FROM moved WHERE job = %(job)s'
    """
    return _UPSERT.sub("ON DUPLICATE KEY UPDATE", _NAMED.sub(r"%(\1)s", quoted(sql.replace("%", "%%"))))


@cache
def quoted(sql: str) -> str:
    """SQL with the names quoted that are words of MySQL's own."""
    return "\n".join(line if line.lstrip().startswith("--") else _WORD.sub(r"`\1`", line) for line in sql.split("\n"))


@cache
def positional(sql: str) -> str:
    """SQL with `?` for values, with PyMySQL's placeholders."""
    return quoted(sql.replace("%", "%%").replace("?", "%s")) if "?" in sql else quoted(sql)


#: Columns of bytes that are keys or digests: short, and indexed.
_SHORT_BYTES = (
    r"key|_key|task_key|_task_key|target|digest|key_digest|batch_id|code|paused_code|verified|previous|seal|offered|content|_content"
    r"|request|vector"
)
#: Columns of text that are names and words, some of them in a key (which holds 3072 bytes): an origin has up to 270
#: characters, a name of ours less. Every other text may be long.
_SHORT_TEXT = (
    r"name|spider|slot|_slot|_closed|worker|owner|boot|host|kind|state|lane|outcome|what|who|origin|authority|handler|type"
    r"|scope|policy|dataset|day|incident"
)
_SHORT_TEXT_CHARS = 300


#: There are no partial indexes: what those pick by their WHERE is a column of these.
_INDEXES = {
    "task_dead": "CREATE INDEX task_dead ON task (job, state, shard, id)",
    "request_open": "CREATE INDEX request_open ON request (job, applied_n, shard, id)",
}


def schema(sql: str, collation: str) -> str:
    """A statement of the schema, in SQLite's form, as MySQL and MariaDB say it.

    >>> schema("CREATE TABLE moved (key BLOB NOT NULL, n INTEGER NOT NULL) WITHOUT ROWID", "")
    'CREATE TABLE IF NOT EXISTS moved (`key` VARBINARY(64) NOT NULL, n BIGINT NOT NULL)'
    """
    text = f"CHARACTER SET utf8mb4 COLLATE {collation}"
    for pattern, said in (
        (r"^CREATE TABLE ", "CREATE TABLE IF NOT EXISTS "),
        (r"\bINTEGER PRIMARY KEY\b", "BIGINT AUTO_INCREMENT PRIMARY KEY"),
        (r"\bINTEGER\b", "BIGINT"),
        (rf"((?:^|[(,])\s*)({_SHORT_BYTES})(\s+)BLOB\b", r"\1\2\3VARBINARY(64)"),
        (r"\bBLOB\b", "LONGBLOB"),
        (rf"((?:^|[(,])\s*)({_SHORT_TEXT})(\s+)TEXT\b", rf"\1\2\3VARCHAR({_SHORT_TEXT_CHARS}) {text}"),
        (r"\bTEXT(\s+NOT NULL DEFAULT) ''", rf"LONGTEXT {text}\1 ('')"),
        (r"\bTEXT\b", f"LONGTEXT {text}"),
        (r"\bREAL\b", "DOUBLE"),
        (r"\bx''", "''"),
        (r"\) WITHOUT ROWID", ")"),
    ):
        sql = re.sub(pattern, said, sql, flags=re.MULTILINE)
    sql = re.sub(r"\A(CREATE INDEX .*?\))\s+WHERE .*\Z", r"\1", sql, flags=re.DOTALL)
    index = re.match(r"CREATE INDEX (\w+) ", sql)
    return quoted(_INDEXES.get(index[1], sql) if index else sql)
