"""`limpet alert`: what people were told, what waits to be sent, and whether the addresses work."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import asdict

from limpet.cli import database
from limpet.cli.configuration import Resolved, read_file, resolve
from limpet.cli.exits import Exit
from limpet.cli.printing import count, cut, moment, note, say, say_json
from limpet.engine.alerting import send_next
from limpet.engine.channels import Channel, channels_of
from limpet.errors import UsageError
from limpet.store import alerts, open_store
from limpet.store.alerts import Alert

#: Characters of a reason in a line.
REASON_CHARS = 160


def alert(args: argparse.Namespace) -> int:
    """List alerts, send those that wait, or try every address."""
    return {"list": _list, "send": _send, "test": _test}[args.what](args)


# -- list -------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    with database.read(args) as store:
        found = [one for one in alerts.newest(store.db, most=args.limit) if args.spider in (None, one.job.partition("@")[0])]
    if args.json:
        say_json({"alerts": [asdict(one) for one in found]})
        return Exit.COMPLETE
    for one in found:
        say(f"{moment(one.made_ms)}  {one.title}\n    {_state(one)}\n    {one.body.partition(chr(10))[0]}")
    note(f"{count(len(found), 'alert')}" + (", and perhaps more: --limit" if len(found) == args.limit else ""))
    return Exit.COMPLETE


def _state(one: Alert) -> str:
    if one.sent_ms:
        return f"sent {moment(one.sent_ms)}" + (f", the {one.tries}th try" if one.tries > 1 else "")
    if one.error:
        return f"not sent after {count(one.tries, 'try', 'tries')}: {cut(one.error, REASON_CHARS)}; again {moment(one.busy_ms)}"
    return "being sent" if one.busy_ms else "waits to be sent"


# -- send -------------------------------------------------------------------------------------


def _send(args: argparse.Namespace) -> int:
    """Send what waits, also what failed a moment ago; 6 where nothing does, 7 where an address did not take it."""
    channels: dict[str, list[Channel]] = {}
    sent = failed = after = 0
    store = open_store(database.of(args), create=False)
    try:
        waiting = {one.job.partition("@")[0] for one in alerts.newest(store.db, most=10_000, waiting=True)}
        for spider in sorted(waiting if args.spider is None else waiting & {args.spider}):
            channels[spider] = _channels(args, spider)
            after = 0
            while (one := send_next(store.db, channels[spider], spider=spider, after=after, by_hand=True)) is not None:
                found, why = one
                after = found.id
                sent, failed = sent + (not why), failed + bool(why)
                _say(args, found, why)
    finally:
        store.close()
    if not args.json:
        note(f"{count(sent, 'alert')} sent" + (f", {failed} not" if failed else ""))
    return Exit.STALLED if failed else Exit.COMPLETE if sent else Exit.NOTHING_TO_DO


def _say(args: argparse.Namespace, found: Alert, why: str) -> None:
    if args.json:
        say_json({"id": found.id, "job": found.job, "kind": found.kind, "sent": not why, "why": why})
    else:
        say(f"{found.title}: {f'not taken: {why}' if why else 'sent'}")


def _resolved(args: argparse.Namespace, spider: str) -> Resolved:
    return resolve({}, os.environ, read_file(args.config), spider=spider)


def _channels(args: argparse.Namespace, spider: str) -> list[Channel]:
    found = channels_of(_resolved(args, spider).alerts)
    if not found:
        raise UsageError("nobody is to be told: name addresses in limpet.toml (alerts = [...]) or LIMPET_ALERTS; see docs/alerts.md")
    return found


# -- test -------------------------------------------------------------------------------------


def _test(args: argparse.Namespace) -> int:
    """Send one to each address, and say which took it; 7 where one did not."""
    results = []
    for number, channel in enumerate(_channels(args, args.spider or ""), 1):
        why = channel.send("limpet: a test", f"An alert looks like this one. Sent by `limpet alert test` on {socket.gethostname()}.")
        results.append((number, channel.scheme, why))
        if not args.json:
            say(f"{number}. {channel.scheme}://***  {f'not taken: {why}' if why else 'taken'}")
    if args.json:
        say_json({"channels": [{"number": number, "scheme": scheme, "taken": not why, "why": why} for number, scheme, why in results]})
    return Exit.STALLED if any(why for _, _, why in results) else Exit.COMPLETE
