"""The repository's copies of the test vectors, and the originals where LIMPET_SHARED names their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

OWN = Path(__file__).parents[1] / "vectors"


def folders() -> list[Path]:
    """Where vectors are read from. A folder that was named must be there: nothing is skipped in silence."""
    shared = os.environ.get("LIMPET_SHARED")
    return [OWN, Path(shared) / "vectors"] if shared else [OWN]


def rows(name: str, *, policy: str = "") -> list[Any]:
    """(folder, row number, row) of each row of a file whose policy begins so, from every folder."""
    found = []
    for folder in folders():
        with (folder / name).open(encoding="utf-8") as file:
            found += [(folder.parent.name, n, row) for n, row in enumerate(json.load(file)) if row["policy"].startswith(policy)]
    assert found
    return found
