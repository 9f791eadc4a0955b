"""`limpet try FILE URL`: one page through its handler; records and links are printed, nothing is written."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, replace

from limpet import testing
from limpet.batch import canonical_json
from limpet.cli.exits import Exit
from limpet.cli.onepage import Fetched, fetch
from limpet.cli.parameters import params_of
from limpet.cli.printing import count, note, say, say_json, table
from limpet.cli.run import resolved_for
from limpet.engine.calls import Call
from limpet.engine.load import load
from limpet.engine.routes import Handler
from limpet.engine.spider import Spider
from limpet.errors import UsageError
from limpet.fetch.status import Meaning
from limpet.record import record_type
from limpet.task import Outcome

#: Links, and calls, that are printed; --json has them all.
LINKS_SHOWN = 40


def attempt(args: argparse.Namespace) -> int:
    """Fetch, route, handle, print. 0 where the task would be done or skipped, 3 where it would be dead or tried again."""
    spider = load(args.file, name=args.spider).spider
    spider.params.update(params_of(args))
    settings = resolved_for(args, spider).settings
    fetched = asyncio.run(fetch(args.url, spider, settings))
    if fetched.meaning is not Meaning.OK:
        return _refused(fetched, as_json=args.json)
    handler = _handler_for(spider, fetched, args.handler)
    ran = testing.run(handler.call, fetched.page)
    calls = [replace(one, arguments=spider.schema(one.handler).encode(one.arguments)) for one in ran.calls]  # as JSON has them
    if args.json:
        _show_json(fetched, handler, ran, calls)
    else:
        _show(fetched, handler, ran, calls)
    return Exit.COMPLETE if ran.outcome in (Outcome.DONE, Outcome.SKIPPED) else Exit.DEAD_LETTERS


def _handler_for(spider: Spider, fetched: Fetched, name: str | None) -> Handler:
    if name:
        handler = spider.handler(name)
        if handler is None:
            raise UsageError(f"spider {spider.name} has no handler {name!r}; it has {', '.join(spider.handler_names())}")
        return handler
    route = spider.route(fetched.page.key_url)
    if route is None:
        raise UsageError(f"no handler of spider {spider.name} takes {fetched.page.key_url}: a crawl would skip it (no handler)")
    return route.handler


def _refused(fetched: Fetched, *, as_json: bool) -> int:
    """An answer that is no page: what a crawl would make of it."""
    gone = fetched.meaning is Meaning.GONE
    outcome = {Meaning.GONE: "skipped", Meaning.THROTTLED: "throttled", Meaning.RETRYABLE: "failed"}.get(fetched.meaning, "dead")
    reason = "gone" if gone else f"status {fetched.answer.status}"
    if as_json:
        say_json(
            {
                "url": fetched.answer.url,
                "status": fetched.answer.status,
                "outcome": outcome,
                "reason": reason,
                "records": [],
                "links": [],
                "calls": [],
            }
        )
    else:
        say(f"{fetched.answer.url}: status {fetched.answer.status}; in a crawl this try would be {outcome}: {reason}")
    return Exit.COMPLETE if gone else Exit.DEAD_LETTERS


def _exported(record: object) -> dict[str, object]:
    kind = record_type(type(record))
    return kind.thaw(kind.freeze(record).values)


def _show(fetched: Fetched, handler: Handler, ran: testing.Ran, calls: list[Call]) -> None:
    page, answer = fetched.page, fetched.answer
    say(f"{page.url}")
    facts = [
        ("key", page.key_url),
        ("status", str(answer.status)),
        ("handler", f"{handler.name}()"),
        ("outcome", str(ran.outcome)),
    ]
    facts += [("reason", ran.reason)] if ran.reason else []
    facts += [("encoding", f"{page.encoding} ({page.encoding_how})")] if page.is_html else []
    facts += [("hops", " -> ".join(answer.hops))] if answer.hops else []
    facts += [("problem", problem) for problem in page.problems]
    say(table(facts))
    say(f"\n{count(len(ran.records), 'record')}")
    for record in ran.records:
        say(f"  {record_type(type(record)).name} {canonical_json(_exported(record))}")
    say(f"\n{count(len(ran.links), 'link')}")
    say(table([(link.handler or "(no handler)", link.key_url) for link in ran.links[:LINKS_SHOWN]]))
    if len(ran.links) > LINKS_SHOWN:
        say(f"  ... and {count(len(ran.links) - LINKS_SHOWN)} more")
    if calls:
        say(f"\n{count(len(calls), 'call')}")
        say(table([(one.handler, canonical_json(one.arguments)) for one in calls[:LINKS_SHOWN]]))
    if len(calls) > LINKS_SHOWN:
        say(f"  ... and {count(len(calls) - LINKS_SHOWN)} more")
    if ran.dropped:
        say("\nnot followed: " + ", ".join(f"{count(number)} {reason}" for reason, number in sorted(ran.dropped.items())))
    if ran.detail:
        note(ran.detail.rstrip())
    say("\nnothing was written")


def _show_json(fetched: Fetched, handler: Handler, ran: testing.Ran, calls: list[Call]) -> None:
    page = fetched.page
    say_json(
        {
            "url": page.url,
            "key_url": page.key_url,
            "status": fetched.answer.status,
            "handler": handler.name,
            "outcome": str(ran.outcome),
            "reason": ran.reason,
            "detail": ran.detail,
            "encoding": page.encoding,
            "hops": list(fetched.answer.hops),
            "problems": list(page.problems),
            "records": [{"dataset": record_type(type(record)).name, "record": _exported(record)} for record in ran.records],
            "links": [asdict(link) for link in ran.links],
            "calls": [asdict(one) for one in calls],
            "dropped": dict(ran.dropped),
        },
        is_data=True,
    )
