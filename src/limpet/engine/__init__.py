"""Joins what is fetched to what is stored: what users write, the loop that works, and its end.

Read it in this order: `spider.py` (what a user writes), `run.py` (a run from start to report),
`worker.py` (the loop), `attempt.py` (one try), `committer.py` (what the next commit holds).
"""
