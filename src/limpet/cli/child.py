"""The command by which Limpet starts itself in a process of its own.

A child finds modules where this process does. `limpet` does not look into the folder that it is called in, so its children
do not either (`python -P`): a spider's file named calendar.py or attr.py would hide a module that they need. Its own folder is put on
the path when it is loaded (engine/load.py). Whoever called `python -m limpet` has that folder on the path, and so have the children.
"""

from __future__ import annotations

import sys


def limpet(*words: str) -> list[str]:
    """The words of a command: this Python, Limpet, and what it is told."""
    return [sys.executable, "-m" if _looks_here() else "-Pm", "limpet", *words]


def _looks_here() -> bool:
    """Whether this process has the folder it was called in on its path."""
    its = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(its, "name", "") == "limpet.__main__" and not sys.flags.safe_path
