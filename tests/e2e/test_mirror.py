"""A tree of files, crawled with kills: every page that links lead to is stored, each once, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.mirror import as_file, crawl_with_kills, mirrored_by_wget
from tests.e2e.sites import serving_folder

#: Folders of the tree, and pages of each.
CHAPTERS, SECTIONS = 12, 20


def tree(folder: Path) -> set[str]:
    """Write a book of pages: the paths of those that can be reached from its index."""
    known = {"/", "/index.html", "/loose page.html"}
    written = {
        "index.html": "".join(f'<a href="./chapter{c}/">{c}</a>' for c in range(CHAPTERS)) + '<a href="loose%20page.html">l</a>',
        "loose page.html": '<base href="/chapter0/"><a href="s1.html#middle">by its base</a><a href="mailto:a@b.test">mail</a>',
        "unlinked.html": "nobody leads here",
        "style.css": "a { color: red }",
    }
    for c in range(CHAPTERS):
        written[f"chapter{c}/index.html"] = '<a href="s0.html">first</a><a href="/style.css">css</a><a href="../index.html?#x">top</a>'
        known.add(f"/chapter{c}/")
        for s in range(SECTIONS):
            links = f'<a href="s{s + 1}.html">next</a>' if s + 1 < SECTIONS else f'<a href="../chapter{(c + 1) % CHAPTERS}/s0.html">on</a>'
            written[f"chapter{c}/s{s}.html"] = (
                f'{links}<a href="./../chapter{c}/s{s // 2}.html#back">back</a><a href="missing.html">none</a>'
            )
            known.add(f"/chapter{c}/s{s}.html")
    for name, body in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"<!doctype html><title>{name}</title>{body}", encoding="utf-8")
    return known


def test_a_tree_that_is_crawled_with_kills_is_whole_and_stored_once(tmp_path: Path) -> None:
    """Ten kills; the pages stored are those that links lead to, as this test knows them and as wget finds them."""
    root, work = tmp_path / "tree", tmp_path / "work"
    work.mkdir()
    paths = tree(root)
    with serving_folder(root) as site:
        crawled = crawl_with_kills(site, site.url("/"), work, kills=10, every=(12, 25))
        assert crawled.kills >= 8
        expected = {f"{site.origin()}{path.replace(' ', '%20').rstrip('/') or '/'}" for path in paths}
        assert crawled.pages == dict.fromkeys(expected, 1)
        if shutil.which("wget"):
            assert mirrored_by_wget(site, site.url("/"), tmp_path) == {as_file(url) for url in expected}
        elif os.environ.get("CI"):
            pytest.fail("wget is missing, and CI must compare with it")
