"""What a change of the schema would say to a database, as SQL for somebody who may make tables.

`Script` stands in for a connection: it reads from the real one, and keeps what would be written. So what is printed is what
`migrate` and `tables.ensure` say, word for word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from limpet.record import RecordType
from limpet.store import migrate
from limpet.store.dialect import Database, Row, Value
from limpet.store.tables import ensure


class Script:
    """A `Database`, as far as a change of the schema needs one."""

    ddl_commits = False

    def __init__(self, db: Database) -> None:
        self._db = db
        self.name, self.place = db.name, db.place
        self._is_empty = migrate.version(db) == 0
        self.lines: list[str] = []

    def begin_alone(self) -> None:
        """One transaction for each change, where the database has such."""
        self.lines.append("BEGIN")

    def commit(self) -> None:
        """Its end."""
        self.lines.append("COMMIT")

    def rollback(self) -> None:
        """Nothing was written."""

    def run_text(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Kept, not run."""
        self.lines.append(self._db.said(sql, values))
        return 0

    def rows_text(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """What the database has now; nothing while it has no table at all."""
        return [] if self._is_empty else self._db.rows_text(sql, values)

    def has_table(self, name: str) -> bool:
        """Whether the database has it now."""
        return self._db.has_table(name)

    def ddl(self, sql: str) -> str:
        """In the database's words."""
        return self._db.ddl(sql)


def script(db: Database, spider: str = "", records: Mapping[str, RecordType] | None = None) -> str:
    """The SQL that brings a database to this release's schema and gives a spider its tables; '' where all of it is there."""
    made = Script(db)
    migrate.migrate(made)  # type: ignore[arg-type]
    for name, record in sorted((records or {}).items()):
        ensure(made, spider, name, record)  # type: ignore[arg-type]
    if not made.lines:
        return ""
    if db.name == "mysql":  # names are quoted as the standard has it
        made.lines.insert(0, f"SET SESSION sql_mode = '{db.rows_text('SELECT @@SESSION.sql_mode')[0][0]}'")
    return "".join(f"{statement};\n" for statement in made.lines)
