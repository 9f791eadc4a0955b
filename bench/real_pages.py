"""Pages that nobody here wrote: Debian's manual of PostgreSQL, crawled with ten kills, beside what `wget --mirror` finds.

    python -m bench.real_pages                    # fetch the package's files, crawl, compare
    python -m bench.real_pages --only-fetch       # print the folder of the pages, fetched where it is not there yet

The package is only unpacked, into .crash/real-pages: nothing is installed, and no server of this machine is touched.
`tests/e2e/test_real_pages.py` is the same in the suite.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.e2e.mirror import as_file, crawl_with_kills, mirrored_by_wget
from tests.e2e.sites import serving_folder

ROOT = Path(__file__).parent.parent
#: Where the package is unpacked.
PLACE = ROOT / ".crash" / "real-pages"
#: Its releases, newest first: a Debian has one of them.
PACKAGES = tuple(f"postgresql-doc-{version}" for version in (15, 17, 16, 18, 14, 13))


def pages_of(place: Path) -> Path | None:
    """The folder of pages in an unpacked package; None where there is none."""
    return next((folder.parent for folder in sorted(place.glob("**/html/index.html"))), None)


def fetch(place: Path = PLACE) -> Path:
    """The folder of the manual's pages, downloaded and unpacked where it is not there yet. Raises RuntimeError without a package."""
    found = pages_of(place)
    if found is not None:
        return found
    place.mkdir(parents=True, exist_ok=True)
    for number, package in enumerate((*PACKAGES, *PACKAGES)):
        if number == len(PACKAGES):  # perhaps this machine has no lists of packages yet
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        found = _downloaded(package, place)
        if found is not None:
            return found
    raise RuntimeError(f"none of {', '.join(PACKAGES)} can be had by apt-get download")


def _downloaded(package: str, place: Path) -> Path | None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        if subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, check=False).returncode:
            return None
        (archive,) = Path(folder).glob("*.deb")
        half_way = Path(folder) / "half-way"
        subprocess.run(["dpkg-deb", "-x", archive, half_way], check=True)
        shutil.move(half_way, place / package)  # whole or not at all
    return pages_of(place / package)


def main() -> None:
    """Fetch, crawl with kills, compare, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-fetch", action="store_true")
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    folder = fetch()
    if options.only_fetch:
        print(folder)
        return
    with tempfile.TemporaryDirectory() as work, serving_folder(folder) as site:
        began = time.perf_counter()
        crawled = crawl_with_kills(site, site.url("/index.html"), Path(work), kills=options.kills, every=(60, 140))
        seconds = time.perf_counter() - began
        expected = mirrored_by_wget(site, site.url("/index.html"), Path(work))
    print(f"{len(list(folder.glob('**/*.html')))} files, {len(expected)} pages found by wget, {len(crawled.pages)} stored")
    print(f"{crawled.kills} kills, {crawled.requests} requests, {seconds:.0f} s with the proof of the whole at the end")
    stored = {as_file(url) for url in crawled.pages}
    twice = {url: rows for url, rows in crawled.pages.items() if rows > 1}
    missing, more = sorted(expected - stored), sorted(stored - expected)
    print(f"stored twice: {twice or 'none'}; missing: {missing[:10] or 'none'}; more than wget: {more[:10] or 'none'}")
    sys.exit(bool(twice or missing or more))


if __name__ == "__main__":
    main()
