"""Logs of the command line: through `logging`, on stderr, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from limpet.cli.printing import clean, without_credentials
from limpet.credentials import hidden

#: Attributes that every LogRecord has; others came by `extra=` and are fields of their own.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(level: str, form: Literal["text", "json"]) -> None:
    """Send Limpet's logs from this level on to stderr; a second call replaces the first."""
    handler = Stderr()
    handler.setFormatter(JsonLine() if form == "json" else Line("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, (JsonLine, Line))]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("limpet").setLevel(level.upper())


class Stderr(logging.Handler):
    """Writes to whatever stderr is at the time: it may be another one than when logging began."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # what logging does with it: never the end of a crawl
            self.handleError(record)


class Line(logging.Formatter):
    """A line of text, without credentials, and without the control characters that a site may have sent."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return clean(hidden(super().format(record)))


class JsonLine(logging.Formatter):
    """One JSON object, without credentials: at, level, logger, message, and whatever came as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(without_credentials(fields), default=str)
