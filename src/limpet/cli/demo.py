"""`limpet demo`: a crawl of a small shop whose worker is killed on the way, and what came of it.

The shop is a process of its own on loopback; the crawl is `limpet run`, another process, which is ended by
SIGKILL when the shop has served so many requests more, and started again. In the end the data is held
against what the shop knows to be true.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from limpet.cli.child import limpet
from limpet.cli.exits import Exit
from limpet.cli.printing import count, duration, note, say, say_json, table
from limpet.demo import spider
from limpet.demo.catalogue import Shop
from limpet.demo.site import spawned
from limpet.errors import LimpetError, UsageError
from limpet.reading import open as open_collected
from limpet.store import jobs
from limpet.store.dialect import sqlite_path
from limpet.store.overview import status
from limpet.store.standing import counts_of
from limpet.store.views import reading

#: Milliseconds that each answer of the shop takes, so that there is something in flight to be killed.
LATENCY_MS = 15
#: Loopback hosts of the shop.
HOSTS = 4
#: Share of the crawl within which the kills fall.
KILLED_WITHIN = 0.85
#: Requests that the shop serves for each product: listings, redirects from old addresses, passing faults.
REQUESTS_PER_PRODUCT = 1.9
#: Seconds before a second try, a quarter of the default: the shop's faults pass at once, and nobody likes to wait.
BACKOFF_S = 0.25
#: Seconds until a crawl that does not end is given up.
PATIENCE_S = 300.0
#: Seconds between two looks at the shop's counter.
LOOK_S = 0.01


Progress = Callable[[int], None]
ShowKills = Callable[[int, int], None]


@dataclass(slots=True)
class Outcome:
    """What the demo came to."""

    db: str
    kills: int = 0
    exit_code: int = 0
    verify_code: int = 0
    expected: int = 0
    collected: int = 0
    missing: int = 0
    wrong: int = 0
    extra: int = 0
    double: int = 0
    dead: int = 0
    requests: int = 0
    repeated: int = 0
    repeated_by_faults: int = 0
    breaches: int = 0
    seconds: float = 0.0
    killed_at: list[int] = field(default_factory=list)

    @property
    def repeated_by_kills(self) -> int:
        """Requests that were sent again because the first one's worker was killed."""
        return max(0, self.repeated - self.repeated_by_faults)

    @property
    def is_perfect(self) -> bool:
        """Whether the data is the shop's truth, proved, and complete."""
        flaws = self.missing + self.wrong + self.extra + self.double + self.breaches
        return not flaws and self.verify_code == 0 and self.exit_code in (Exit.COMPLETE, Exit.DEAD_LETTERS)


def demo(args: argparse.Namespace) -> int:
    """Crawl, kill, resume, verify, compare, print; 0 only where the data equals the shop's truth."""
    db = _fresh_database(args.db)
    shop = Shop(products=max(1, args.products), hosts=HOSTS, faults=args.faults, seed=args.seed)
    began = time.monotonic()
    with spawned(shop, latency_ms=LATENCY_MS) as served:
        if not args.json:
            place = f"{count(served.hosts, 'loopback host')}, faults {served.faults}: {served.starts()[0]}"
            say(f"A shop of {count(served.products, 'product')} on {place}")
            say(f"Crawled into {db}\n")
        outcome = _crawl(served, db, args)
        _judge(outcome, served)
    outcome.seconds = time.monotonic() - began
    if args.json:
        say_json({**{name: getattr(outcome, name) for name in Outcome.__slots__}, "perfect": outcome.is_perfect})
    else:
        _show(outcome, served)
    return Exit.COMPLETE if outcome.is_perfect else Exit.VERIFY_FAILED


def _fresh_database(address: str | None) -> str:
    if address is None:
        return os.path.join(tempfile.mkdtemp(prefix="limpet-demo-"), "shop.db")
    path = os.path.abspath(sqlite_path(address))
    if os.path.exists(path):
        raise UsageError(f"{path} is there already: the demo wants a file of its own")
    return path


# -- crawl and kill ---------------------------------------------------------------------------


def _crawl(shop: Shop, db: str, args: argparse.Namespace) -> Outcome:
    """Run the crawl to its end, through so many kills."""
    outcome = Outcome(db)
    goals = _goals(shop, args.kills, random.Random(args.seed))
    with _progress(quiet=args.json) as show:
        for goal in [*goals, None]:
            with _started(_command(shop, db)) as child:
                is_hit = _wait(child, shop, goal, lambda served: show(served, outcome.kills))
                if not is_hit:
                    outcome.exit_code = child.returncode
                    break
                served = int(str(_stats(shop, only=True)["requests"]))
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            outcome.kills += 1
            outcome.killed_at.append(served)
            if not args.json:
                note(f"  SIGKILL {outcome.kills} after {count(served, 'request')}; {count(_done(db), 'page')} done in the database")
    verified = subprocess.run(limpet("verify", "--full", "--db", db), capture_output=True, text=True, check=False)
    outcome.verify_code = verified.returncode
    if verified.returncode:
        note(verified.stdout + verified.stderr)
    return outcome


def _goals(shop: Shop, kills: int, lots: random.Random) -> list[int]:
    """Numbers of requests after which a kill falls: spread over the crawl, each somewhere in its own part."""
    whole = shop.products * REQUESTS_PER_PRODUCT * KILLED_WITHIN
    part = whole / max(1, kills)
    return [max(1, round(part * number + lots.uniform(0.3, 1.0) * part)) for number in range(kills)]


def _command(shop: Shop, db: str) -> list[str]:
    limpet_run = limpet("run", str(spider.__file__), "--db", db)
    starts = [word for start in shop.starts() for word in ("--start", start)]
    return [*limpet_run, "--json", "--log-level", "error", "--backoff", str(BACKOFF_S), *starts]


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own; whatever goes wrong here, it does not stay behind."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _wait(child: subprocess.Popen[bytes], shop: Shop, goal: int | None, show: Progress) -> bool:
    """Wait until the shop has served so many requests, or the child has ended; whether the goal was met first."""
    deadline = time.monotonic() + PATIENCE_S
    while child.poll() is None:
        served = int(str(_stats(shop, only=True)["requests"]))
        show(served)
        if goal is not None and served >= goal:
            return True
        if time.monotonic() > deadline:
            raise LimpetError(f"the crawl did not end within {duration(PATIENCE_S)}")
        time.sleep(LOOK_S)
    return False


def _stats(shop: Shop, *, only: bool = False) -> dict[str, object]:
    with urllib.request.urlopen(f"{shop.origin(0)}/_stats{'?only=requests' if only else ''}", timeout=30) as answer:
        report: dict[str, object] = json.load(answer)
        return report


def _done(db: str) -> int:
    with suppress(LimpetError), reading(db) as store:
        return counts_of(store.db, 1).done
    return 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[ShowKills]:
    """What shows (requests served, kills so far) on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda served, kills: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("starting"), console=Console(stderr=True), transient=True, redirect_stderr=True) as live:
        yield lambda served, kills: live.update(Text(f"{count(served, 'request')} served, {count(kills, 'kill')}"))


# -- judge and show ---------------------------------------------------------------------------


def _judge(outcome: Outcome, shop: Shop) -> None:
    """Hold what was collected against the shop's truth, and count what it took."""
    truth = {str(row["url"]): row for row in shop.truth() if row["outcome"] == "done"}
    with open_collected(outcome.db) as collected:
        rows = collected.dataset("product").rows()
    fields = ("url", "sku", "title", "price", "stock")
    found = {row["url"]: row for row in rows}
    outcome.expected, outcome.collected = len(truth), len(rows)
    outcome.double = len(rows) - len(found)
    outcome.missing = len(truth.keys() - found.keys())
    outcome.extra = len(found.keys() - truth.keys())
    outcome.wrong = sum(any(str(found[url][name]) != str(truth[url][name]) for name in fields) for url in truth.keys() & found.keys())
    stats = _stats(shop)
    outcome.requests, outcome.repeated, outcome.breaches = (int(str(stats[name])) for name in ("requests", "repeated", "breaches"))
    with reading(outcome.db) as store:
        now = status(store, jobs.every(store.db)[0])
    outcome.dead = now.states["dead"]
    outcome.repeated_by_faults = now.books.failed + now.books.throttled


def _show(outcome: Outcome, shop: Shop) -> None:
    faultless = outcome.is_perfect
    say("\nComplete and verified." if faultless else "\nThis is NOT what the shop has:")
    flaws = [(outcome.missing, "missing"), (outcome.wrong, "wrong"), (outcome.double, "double"), (outcome.extra, "extra")]
    verdict = "exactly those of the shop"
    if not faultless:
        verdict = f"of {outcome.expected:,}: " + ", ".join(f"{number} {flaw}" for number, flaw in flaws)
    repeated = f"{outcome.repeated_by_faults:,} after faults of the shop, {outcome.repeated_by_kills:,} because of the kills"
    rows: list[tuple[object, ...]] = [
        ("products", outcome.collected, verdict),
        ("dead letters", outcome.dead, "pages that the shop never gives" if outcome.dead else ""),
        ("kills", outcome.kills, "by SIGKILL, in the middle of the crawl"),
        ("requests", outcome.requests, f"{outcome.repeated:,} of them repeated: {repeated}"),
        ("breaches", outcome.breaches, "requests that robots.txt forbids"),
        ("time", f"{duration(outcome.seconds)}"),
    ]
    say(table(rows))
    limpet_command, db = own_name(), shlex.quote(outcome.db)
    example = next((str(row["url"]) for row in shop.truth() if row["outcome"] == "done"), shop.starts()[0])
    say("\nLook further:")
    for command in ("status", "export product --format csv", "dead", f"explain {example}", "verify --full"):
        say(f"  {limpet_command} {command} --db {db}")


def own_name() -> str:
    """How this program was called, for commands to copy: from this folder on where it lies below, else by its whole path."""
    called = os.path.abspath(sys.argv[0])
    if os.path.basename(called) != "limpet" or os.sep not in sys.argv[0]:
        return "limpet"
    below = os.path.relpath(called)
    return shlex.quote(called if below.startswith(os.pardir) else below)
