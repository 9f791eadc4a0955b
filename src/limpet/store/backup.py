"""A copy of a database that is in use: of one moment, checked, and there whole or not at all.

SQLite's online backup reads under a snapshot that is held, so a working crawl neither stops it nor makes
it begin again, and what commits meanwhile is not in the copy. The copy is checked by SQLite, page by page
and index by index, before it gets its name; `limpet verify --full --db COPY` proves the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import apsw

from limpet.errors import StoreCorrupt, StoreUnavailable, UsageError
from limpet.store import migrate
from limpet.store.atomic import BESIDE, final_place, whole_file
from limpet.store.sqlite import Sqlite, explain

#: Pages copied between two looks at the progress: 16 MiB.
STEP_PAGES = 4096


@dataclass(frozen=True, slots=True)
class Copy:
    """A backup that was made and checked."""

    path: str
    bytes: int
    schema: int


def backup(source: str, target: str, *, force: bool = False, on_progress: Callable[[int, int], None] | None = None) -> Copy:
    """Copy the SQLite file `source` to `target` and check the copy.

    `on_progress` is told (pages copied, pages in all). Raises UsageError where the target is there and `force`
    is not given, StoreCorrupt where the copy is not sound, StoreUnavailable where the disk refuses.
    """
    place = final_place(target, database=source)
    if os.path.exists(place) and not force:
        raise UsageError(f"{target} is there already: name another file, or replace it with --force")
    if leftovers := [end for end in BESIDE if os.path.exists(place + end)]:
        raise UsageError(f"{target}{leftovers[0]} is there: {target} is in use as a database, so it cannot be replaced")
    with whole_file(place, database=source) as part:
        _remove_beside(part)  # of a copy that was killed: a journal would be played into the new one
        _copy(source, part, on_progress)
        schema = _check(part)
    return Copy(place, os.path.getsize(place), schema)


def _copy(source: str, part: str, on_progress: Callable[[int, int], None] | None) -> None:
    live = Sqlite(source, create=False, readonly=True)
    try:
        copy = apsw.Connection(part)
        try:
            copy.execute("PRAGMA journal_mode = OFF")  # it is synced whole, and renamed then
            copy.execute("PRAGMA synchronous = OFF")
            live.begin_read()
            live.rows_text("SELECT COUNT(*) FROM sqlite_master")  # the snapshot begins with the first read
            with copy.backup("main", live.connection, "main") as steps:
                while not steps.done:
                    steps.step(STEP_PAGES)
                    if on_progress:
                        on_progress(steps.page_count - steps.remaining, steps.page_count)
        finally:
            copy.close()
    except (apsw.FullError, apsw.IOError, apsw.ReadOnlyError, apsw.CantOpenError) as error:
        raise StoreUnavailable(f"{part}: {explain(error, part)}") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise StoreCorrupt(f"{source} cannot be copied, it is damaged: {error}") from error
    finally:
        live.rollback()
        live.close()


def _check(part: str) -> int:
    """The schema version of a sound copy. The connection's own files are gone again when this returns."""
    try:
        copy = Sqlite(part, create=False)
        try:
            if flaws := copy.integrity_check():
                raise StoreCorrupt(f"the copy is not sound: {'; '.join(flaws[:3])}")
            return migrate.version(copy)
        finally:
            copy.close()
    finally:
        _remove_beside(part)


def _remove_beside(part: str) -> None:
    for end in BESIDE:
        with contextlib.suppress(OSError):
            os.unlink(part + end)
