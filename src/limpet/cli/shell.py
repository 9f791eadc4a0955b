"""`limpet shell URL`: a Python prompt with `page`, as a handler would see it."""

from __future__ import annotations

import argparse
import asyncio
import code
import sys

from limpet.cli.exits import Exit
from limpet.cli.onepage import fetch
from limpet.cli.printing import note
from limpet.cli.run import resolved_for
from limpet.cli.spool import stdin
from limpet.engine.spider import Spider
from limpet.fetch.page import Page

BANNER = """page    {page}
css     page.css("h1::text").getall()      one  page.one("h1")
links   page.links()                       get  page = get(URL)
Ctrl-D ends it; nothing is written."""


def shell(args: argparse.Namespace) -> int:
    """A prompt, or with -c a piece of code, that has `page` and `get`. 1 where the code raised."""
    if args.code is None:
        stdin()  # before anything is fetched
    spider = Spider("shell")
    settings = resolved_for(args, spider).settings

    def get(url: str) -> Page:
        """Fetch a page."""
        return asyncio.run(fetch(url, spider, settings)).page

    page = get(args.url)
    names = {"page": page, "get": get, "css": page.css, "xpath": page.xpath, "one": page.one, "links": page.links}
    if args.code is not None:
        return Exit.COMPLETE if _run(args.code, names) else Exit.INTERNAL
    if sys.stdin.isatty():
        _complete_with(names)
        code.interact(banner=BANNER.format(page=page), local=names, exitmsg="")
        return Exit.COMPLETE
    return Exit.COMPLETE if _run(sys.stdin.read(), names) else Exit.INTERNAL


def _run(text: str, names: dict[str, object]) -> bool:
    """Run code that came as text; whether it raised nothing. A single expression prints its value, as at a prompt."""
    failed: list[str] = []

    class Once(code.InteractiveInterpreter):
        """Runs one text, and remembers whether it went wrong."""

        def write(self, data: str) -> None:
            """What a prompt would show of an error."""
            failed.append(data)
            note(data.rstrip())

    interpreter = Once(names)
    kind = "single" if "\n" not in text.strip() else "exec"
    if interpreter.runsource(text.strip() + "\n" * (kind == "exec"), "<shell>", kind):
        note("the code is not complete")
        return False
    return not failed


def _complete_with(names: dict[str, object]) -> None:
    """Tab completes the names, where the system has readline."""
    try:
        import readline
        import rlcompleter
    except ImportError:
        return
    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")
