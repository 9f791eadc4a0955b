"""What is sent and what comes back: plain values, without a client behind them."""

from __future__ import annotations

from dataclasses import dataclass

#: How an answer's body was delimited (RFC 9112 section 6.3).
CONTENT_LENGTH = "content-length"
CHUNKED = "chunked"
CLOSE = "close"
NO_BODY = "none"

#: Framing ended, the decoder is at its end, the byte counts agree.
COMPLETE = "complete"
#: Delimited by the end of the connection: nothing tells a whole body from a cut one.
UNVERIFIED = "unverified"
#: Longer than `Request.cut_bytes`, and cut there because the caller asked for it.
CUT = "cut"


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `url` is sent as it is, byte for byte, without its fragment.

    `cookies` are sent in this order, unquoted. With `cut_bytes` a longer body is cut there, not refused.
    """

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    cookies: tuple[tuple[str, str], ...] = ()
    cut_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, whole: `body` is decompressed and no longer than the settings allow.

    `verdict` is COMPLETE, UNVERIFIED or CUT; anything worse was raised. `wire_bytes` counts the body
    as it was received. `hops` are the URLs that redirected here, oldest first.
    """

    url: str
    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    framing: str = CONTENT_LENGTH
    verdict: str = COMPLETE
    wire_bytes: int = 0
    elapsed_s: float = 0.0
    hops: tuple[str, ...] = ()

    def header(self, name: str) -> str | None:
        """The first header of that name, in any case; None without one.

        >>> Answer("http://a/", 200, headers=(("Content-Type", "text/html"),)).header("content-type")
        'text/html'
        """
        name = name.lower()
        return next((value for field, value in self.headers if field.lower() == name), None)
