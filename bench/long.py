"""A long job: whether memory stays flat, and what the proof of the whole and an export cost at its end.

    python bench/long.py                      # 60,000 products on four hosts: about 100,000 tasks
    python bench/long.py --products 600000

The demo shop, in a process of its own, is crawled with `examples/shop.py`; resident memory is read each time another tenth of
the products has been stored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from limpet.demo.catalogue import Shop
from limpet.demo.site import spawned

ROOT = Path(__file__).parent.parent
#: Seconds between two looks at the job.
LOOK_S = 0.5


def resident_mb(pid: int) -> float:
    """The resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def ended(place: Path) -> int:
    """How many tries have ended, as the books of the job say."""
    if not place.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{place}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT COALESCE(SUM(done + skipped + dead), 0) FROM ledger").fetchone()[0])
    except sqlite3.OperationalError:  # not made yet
        return 0


def crawl(shop: Shop, place: Path) -> list[tuple[int, float]]:
    """Crawl the shop: (tasks ended, MB) on the way."""
    starts = [word for start in shop.starts() for word in ("--start", start)]
    command = [sys.executable, "-m", "limpet", "run", str(ROOT / "examples" / "shop.py"), "--db", f"sqlite:///{place}", "--quiet", *starts]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples = []
    while child.poll() is None:
        time.sleep(LOOK_S)
        tasks = ended(place)
        if child.poll() is None:
            samples.append((tasks, resident_mb(child.pid)))
    if child.returncode:
        raise SystemExit(f"the crawl ended with {child.returncode}")
    return samples


def timed(*command: str) -> tuple[float, str]:
    """Seconds of a command, and what it printed."""
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "limpet", *command], capture_output=True, text=True, check=True)
    return time.perf_counter() - began, ended.stdout


def main() -> None:
    """Crawl, prove, export, and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, default=60_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="limpet-bench-"))
    try:
        place = folder / "shop.db"
        began = time.perf_counter()
        with spawned(Shop(products=options.products, hosts=4, plain=True)) as shop:
            samples = crawl(shop, place)
        seconds = time.perf_counter() - began
        tasks = ended(place)
        size = place.stat().st_size / 2**20
        print(f"{tasks:,} tasks in {seconds:.0f} s ({tasks / seconds:.0f}/s), the proof included; {size:.0f} MB of file")
        for tenth in range(1, 11):
            reached = [mb for count, mb in samples if count >= tasks * tenth / 10]
            print(f"  {tenth * 10:>3} % of the tasks: {reached[0] if reached else samples[-1][1]:6.1f} MB resident")
        print(f"  at most {max(mb for _, mb in samples):.1f} MB")
        database = ("--db", f"sqlite:///{place}")
        nothing = min(timed("--version")[0] for _ in range(3))
        full = timed("verify", "--full", *database)[0] - nothing
        print(f"verify --full: {full:.1f} s, {full / tasks * 1e6:.0f} us a task")
        exported, said = timed("export", "product", "-o", str(folder / "x.jsonl"), "--json", *database)
        rows = json.loads(said).get("rows", options.products)
        size = (folder / "x.jsonl").stat().st_size / 2**20
        print(f"export: {exported - nothing:.1f} s for {rows:,} rows, {rows / (exported - nothing):,.0f} rows/s, {size:.0f} MB")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
