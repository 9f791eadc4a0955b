"""What the text after a flag may be: each function turns it into a value, or says what was expected."""

from __future__ import annotations

import argparse

from limpet.errors import UsageError
from limpet.store.opening import checked_slot

#: Workers of one command: more than cores do not help, and each has three connections to the database.
WORKERS_MAX = 256


def line_of_text(text: str) -> str:
    """A text that any database can hold, and that is one line."""
    if any(ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise argparse.ArgumentTypeError(f"{text!r} holds characters that are no text")
    return text


def slot(text: str) -> str:
    """The name of a slot, or a word for one."""
    try:
        return checked_slot(line_of_text(text))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 on")
    return int(text)


def number_of(text: str) -> str:
    """`auto`, or how many workers."""
    if text != "auto" and not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= WORKERS_MAX):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, or a number from 1 to {WORKERS_MAX}")
    return text


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")  # which may be a secret: no message repeats it
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name + equals!r}: expected NAME=VALUE, with a name as in Python")
    try:
        return name, line_of_text(value)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{name}: its value holds characters that are no text") from None


def batch(text: str) -> tuple[int, int]:
    """SHARD:N, as verify names a batch."""
    shard, colon, n = text.partition(":")
    if not (colon and shard.isdigit() and n.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected SHARD:N, such as 3:127, as verify names it")
    return int(shard), int(n)


def age(text: str) -> float:
    """Seconds of an age such as 90d, 12h or 30min.

    >>> age("90d"), age("1.5h")
    (7776000.0, 5400.0)
    """
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    seconds = {"d": 86_400, "h": 3600, "min": 60, "s": 1}.get(text[len(number) :])
    if seconds is None or not number.replace(".", "", 1).isdecimal() or not number.isascii() or len(number) > 12:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an age such as 90d, 12h, 30min or 5s")
    return float(number) * seconds
