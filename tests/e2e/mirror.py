"""A crawl that is killed again and again, beside what `wget --mirror` finds: the pages that both must have."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from limpet.url import KeyProfile, canonicalise
from tests.e2e.sites import Served

#: How wget tells of each file that it has fetched, with -nv.
_FETCHED = re.compile(r"URL: ?(\S+) \[[0-9/]+\] -> ")


@dataclass(frozen=True)
class Crawled:
    """What a crawl ended in, after all its kills."""

    pages: Counter[str]  # canonical URL of each HTML page -> rows
    kills: int  # that met a crawl at work
    requests: int  # for anything but robots.txt


def crawl_with_kills(site: Served, start: str, folder: Path, *, kills: int, every: tuple[int, int], seed: int = 1) -> Crawled:
    """Crawl a site, killed by SIGKILL after every so many requests, until the last run completes."""
    lots = random.Random(seed)
    command = [sys.executable, "-m", "limpet", "crawl", start, "--db", "mirror.db", "--quiet"]
    hit = 0
    for _ in range(kills):
        hit += _killed(command, folder, site, lots.randint(*every))
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 6), ended
    verified = subprocess.run([sys.executable, "-m", "limpet", "verify", "--full"], cwd=folder, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified
    exported = subprocess.run(
        [sys.executable, "-m", "limpet", "export", "page"], cwd=folder, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    rows = [json.loads(line) for line in exported.stdout.splitlines()]
    return Crawled(Counter(str(row["url"]) for row in rows if row["content_type"] == "text/html"), hit, site.requests)


def mirrored_by_wget(site: Served, start: str, folder: Path) -> set[str]:
    """The canonical URLs of the HTML pages that `wget --mirror` fetches, each as the URL of its file."""
    log = folder / "wget.log"
    target = folder / "wget"
    subprocess.run(["wget", "--mirror", "-nv", "-e", "robots=off", "-o", log, "-P", target, start], check=False)
    found = _FETCHED.findall(log.read_text(encoding="utf-8", errors="replace"))
    shutil.rmtree(target, ignore_errors=True)
    return {as_file(canonicalise(url, KeyProfile()).text) for url in found if is_html(url)}


def as_file(url: str) -> str:
    """The URL of the file that `wget --mirror` keeps a page in: it takes a folder and its index for one, and fetches one of them."""
    return f"{url}index.html" if url.endswith("/") else url


def is_html(url: str) -> bool:
    """Whether a static server sends a page at this URL: a folder's index, or a file of that extension."""
    path = url.partition("?")[0].partition("#")[0]
    return path.endswith(("/", ".html", ".htm"))


def _killed(command: list[str], folder: Path, site: Served, requests: int) -> bool:
    """Whether SIGKILL met a crawl at work, which had sent so many requests; the site answers none beyond them before."""
    until = site.requests + requests
    site.answer_until(until)
    child = subprocess.Popen(command, cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    look = threading.Event()
    while child.poll() is None and site.requests <= until:
        look.wait(0.001)
    with contextlib.suppress(ProcessLookupError):  # it ended before its time
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    site.answer_until(math.inf)
    return code == -signal.SIGKILL
