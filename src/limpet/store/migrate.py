"""The schema, from its first version on: numbered files, applied in order, one transaction each.

A database that a newer Limpet wrote is refused, never touched. Two processes that start at once on a
new file wait for each other: the version is read again under the write lock.
"""

from __future__ import annotations

import re
import time
import uuid
from importlib.resources import files

from limpet.errors import SchemaNewer, StoreError, UsageError
from limpet.store.dialect import Database, repeat_busy, split

#: Waits, in seconds, for another process that is bringing the database up to date.
BEGIN_WAITS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)

_VERSION = "SELECT value FROM meta WHERE name = 'schema'"
_FILE = re.compile(r"(\d{4})_(\w+)\.sql\Z")


def steps() -> list[tuple[int, str, str]]:
    """Every migration: (version, name, SQL), in order."""
    folder = files("limpet.store").joinpath("sql", "schema")
    found = [(match, entry) for entry in folder.iterdir() if (match := _FILE.match(entry.name))]
    return sorted((int(match[1]), match[2], entry.read_text(encoding="utf-8")) for match, entry in found)


def latest() -> int:
    """The schema version of this release."""
    return steps()[-1][0]


def version(db: Database) -> int:
    """The schema version of a database; 0 for an empty one, and for one whose first tables are being made."""
    if not db.has_table("meta"):
        return 0
    row = db.rows_text(_VERSION)
    if not row and db.ddl_commits:
        if _is_begun(db):
            return 0
        row = db.rows_text(_VERSION)  # it was being made until just now
    if not row or not str(row[0][0]).isdigit():
        raise UsageError(f"{db.place} has a table named meta, but no schema version in it: it is no database of Limpet's")
    return int(row[0][0])


def _is_begun(db: Database) -> bool:
    """Whether `meta` is ours, and empty: where each CREATE commits by itself, somebody makes the schema, or was killed while at it."""
    columns = db.rows_text(
        "SELECT COLUMN_NAME, COLUMN_KEY FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'meta'"
    )
    return {*columns} == {("name", "PRI"), ("value", "")} and not db.rows_text("SELECT 1 FROM meta LIMIT 1")


class NoJobYet(UsageError):
    """The file is there, and nothing is in it: nobody began, or somebody is about to."""


def check(db: Database) -> None:
    """Refuse a database of a newer release (SchemaNewer) and one that has still to be migrated (UsageError)."""
    found = version(db)
    if found > latest():
        raise SchemaNewer(f"{db.place} has schema {found}, this Limpet knows up to {latest()}: upgrade Limpet; nothing was changed")
    if found == 0 or is_in_the_making(db, found):
        raise NoJobYet(f"{db.place} holds no job yet: start one with `limpet crawl` or `limpet run`")
    if found < latest():
        raise UsageError(f"{db.place} has schema {found}, this Limpet needs {latest()}: run `limpet migrate --db {db.place}`")


def is_in_the_making(db: Database, found: int) -> bool:
    """Whether a database of an older schema holds no job: whoever makes it is between two steps, and nothing is there to be migrated."""
    return 0 < found < latest() and not db.rows_text("SELECT job FROM job LIMIT 1")


def migrate(db: Database) -> list[str]:
    """Bring a database to the schema of this release; the names of the steps that were applied."""
    try:
        return _apply(db)
    except StoreError:
        if version(db) < latest():
            raise
        return _apply(db)  # somebody else was faster, and this session's catalogue was older than its wait for the lock


def _apply(db: Database) -> list[str]:
    applied = []
    for number, name, sql in steps():
        if _has_reached(db, number):
            continue
        repeat_busy(db.begin_alone, tries=BEGIN_WAITS_S, wait=time.sleep)
        try:
            if version(db) < number:
                for statement in split(sql):
                    db.run_text(db.ddl(statement))
                _note(db, "schema", str(number))
                if number == 1:
                    _note(db, "database", uuid.uuid4().hex)
                applied.append(f"{number:04}_{name}")
            db.commit()
        except BaseException:
            db.rollback()
            raise
    found = version(db)
    if found > latest():
        raise SchemaNewer(f"{db.place} has schema {found}, this Limpet knows up to {latest()}: upgrade Limpet; nothing was changed")
    return applied


def _has_reached(db: Database, number: int) -> bool:
    """Whether a step was applied; no, too, where a server commits each statement of DDL by itself and somebody is at it."""
    try:
        return version(db) >= number
    except UsageError:  # told for certain once the lock is held
        return False


def _note(db: Database, name: str, value: str) -> None:
    db.run_text("DELETE FROM meta WHERE name = ?", (name,))
    db.run_text("INSERT INTO meta (name, value) VALUES (?, ?)", (name, value))
