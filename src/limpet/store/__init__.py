"""The only package that speaks SQL. Synchronous: a transaction that no `await` can interrupt.

Read it in this order: `commit.py` (the one transaction), `lease.py` (who may commit), `frontier.py`
(what is claimed), `datasets.py` (records), `ledger.py` (the books), `verify.py` (the proof).
"""

from __future__ import annotations

from limpet.store.opening import Store, open_store

__all__ = ["Store", "open_store"]
