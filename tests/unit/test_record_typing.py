"""What a type checker sees of records: the marked lines of tests/typing are errors, and no other line is."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from limpet.record import record

MARKED = Path(__file__).parents[1] / "typing"
SOURCE = Path(inspect.getfile(record)).parents[1]


def test_mypy_reports_each_marked_line_and_no_other(tmp_path: Path) -> None:
    """mypy in strict mode sees the `__init__` that @record writes, and refuses what it would refuse at run time."""
    files = sorted(MARKED.glob("*.py"))
    expected = {
        (file.name, number, code)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for code in re.findall(r"# E: ([a-z-]+)$", line)
    }

    options = ["--strict", "--follow-imports=silent", "--config-file=", "--explicit-package-bases", f"--cache-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)],
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

    found = {
        (Path(name).name, int(number), code)
        for name, number, code in re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    }
    assert expected, "nothing is marked"
    assert found == expected, done.stdout + done.stderr
