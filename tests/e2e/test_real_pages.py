"""Pages that nobody here wrote: Debian's manual of PostgreSQL, crawled with kills, and what wget finds of it.

`LIMPET_REAL_PAGES` names the folder of its pages; without it they are looked for where `python -m bench.real_pages --only-fetch` puts
them. CI fetches them there itself, and fails where it cannot; elsewhere the documentation of Python's own modules stands in.
"""

from __future__ import annotations

import os
import pydoc
import shutil
from html import escape
from pathlib import Path

import pytest
from bench.real_pages import PLACE, fetch, pages_of

from tests.e2e.mirror import as_file, crawl_with_kills, is_html, mirrored_by_wget
from tests.e2e.sites import serving_folder

#: Modules whose documentation stands in for the manual.
MODULES = ("argparse", "ast", "asyncio", "calendar", "csv", "decimal", "difflib", "email", "html", "http", "json", "logging", "zipfile")


def real_pages(folder: Path) -> Path:
    """The manual's pages; written from this Python's documentation where there is no manual."""
    given = os.environ.get("LIMPET_REAL_PAGES", "")
    found = Path(given) if given else fetch() if os.environ.get("CI") else pages_of(PLACE)
    if found is not None:
        assert (found / "index.html").exists(), f"LIMPET_REAL_PAGES={given}: no index.html there"
        return found
    folder.mkdir()
    writer = pydoc.HTMLDoc()
    for name in MODULES:
        (folder / f"{name}.html").write_text(writer.page(name, writer.document(pydoc.locate(name), name)), encoding="utf-8")
    (folder / "index.html").write_text("".join(f'<a href="{escape(name)}.html">{name}</a>' for name in MODULES), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_real_pages_that_are_crawled_with_kills_are_those_that_wget_finds(tmp_path: Path) -> None:
    """Ten kills; every HTML page is stored once, and no other."""
    folder = real_pages(tmp_path / "pages")
    pages = sum(is_html(path.name) for path in folder.iterdir())
    every = (60, 140) if pages > 1000 else (1, 2)
    with serving_folder(folder) as site:
        crawled = crawl_with_kills(site, site.url("/index.html"), tmp_path, kills=10, every=every)
        assert crawled.kills >= (9 if pages > 1000 else 3)
        assert set(crawled.pages.values()) == {1}
        if shutil.which("wget"):
            assert {as_file(url) for url in crawled.pages} == mirrored_by_wget(site, site.url("/index.html"), tmp_path)
        else:
            assert not os.environ.get("CI"), "wget is missing, and CI must compare with it"
            assert len(crawled.pages) >= len(MODULES)
