"""`python -m limpet`: the same as `limpet`."""

from __future__ import annotations

import sys

from limpet.cli import main

if __name__ == "__main__":
    sys.exit(main())
