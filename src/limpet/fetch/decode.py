"""Content codings, undone while streaming, never above a bound.

A decoder here answers three questions that the usual one-call functions hide: how much comes out
at most (a bomb of 1 MB holds 1 GB), whether the stream's own end was reached (a gzip body cut in
two with a matching Content-Length is silently accepted by five well-known clients), and whether
bytes were left over behind it. Codings: gzip (RFC 1952, any number of members), deflate (zlib, and
raw as some servers send it), br and zstd where their packages are installed.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Protocol

from limpet.errors import FetchError

#: Bytes that a decoder may hand out at once: what a bomb can take before the cap is looked at.
PIECE_BYTES = 256 * 1024
#: Codings on top of each other. One is normal; each further one multiplies what a bomb can hold.
CODINGS_MAX = 2
#: Window of zstd, the limit of RFC 9659 for HTTP: the decoder allocates what the stream asks for.
ZSTD_WINDOW_BYTES = 8 * 2**20
#: Compressed bytes given to zstd at once. Its Python decoder has no output limit, and 4 bytes can say
#: "128 KiB of one byte", so this bounds a step to 8 MiB. (One call for all is 1.2 times as fast.)
ZSTD_STEP_BYTES = 256
#: Names that servers send for no coding at all.
NO_CODING = frozenset({"", "identity", "none", "utf-8", "utf8", "binary", "8bit"})


class Decoder(Protocol):
    """One coding of one body."""

    is_ended: bool  # its own end marker was read, and nothing came after it
    is_hungry: bool  # all input is used up: more is needed before more comes out

    def decode(self, data: bytes) -> bytes:
        """About `PIECE_BYTES` at most; call again with b"" while it is not hungry."""


class Body:
    """Collects one body: feed it what arrives, then take what `finish` returns.

    `codings` is the Content-Encoding header. Raises FetchError: `too_large` at the first byte
    above `bytes_max`, `bad_answer` for damage and bytes left over, `truncated` for a missing end.
    With `cut` a longer body is cut at `bytes_max` instead, and `is_full` says so.
    """

    __slots__ = ("_counts", "_decoders", "_pieces", "bytes_max", "cut", "is_full", "url", "wire_bytes")

    def __init__(self, codings: str, bytes_max: int, *, url: str = "", cut: bool = False) -> None:
        self.url = url
        self.bytes_max = bytes_max
        self.cut = cut
        self.is_full = False
        self.wire_bytes = 0
        self._pieces: list[bytes] = []
        self._decoders = decoders_for(codings, url) if codings else ()
        self._counts = [0] * (len(self._decoders) + 1)

    def feed(self, data: bytes) -> None:
        """Take bytes as they came over the wire. Nothing more is taken once it is full."""
        self.wire_bytes += len(data)
        for piece in self._through(0, data):
            self._pieces.append(piece)
            if self.is_full:
                break

    def finish(self) -> bytes:
        """The body, where its decoders agree that it is all of it."""
        if self.is_full:
            return b"".join(self._pieces)[: self.bytes_max]
        if self.wire_bytes and not all(decoder.is_ended for decoder in self._decoders):
            raise FetchError(
                f"{self.url}: the compressed body ends before its own end marker, after {self.wire_bytes:,} bytes",
                kind="truncated",
            )
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def _through(self, level: int, data: bytes) -> Iterator[bytes]:
        """What comes out of the decoders from `level` on, piece by piece."""
        self._count(level, len(data))
        if level == len(self._decoders):
            if data:
                yield data
            return
        decoder = self._decoders[level]
        while True:
            try:
                piece = decoder.decode(data)
            except _DAMAGE as error:
                raise FetchError(f"{self.url}: the compressed body is damaged: {error}", kind="bad_answer") from error
            yield from self._through(level + 1, piece)
            if decoder.is_hungry:
                return
            data = b""

    def _count(self, level: int, size: int) -> None:
        """The cap holds at every level: compressed bytes beyond it are nonsense too."""
        self._counts[level] += size
        if self._counts[level] <= self.bytes_max:
            return
        if not self.cut:
            raise FetchError(f"{self.url}: the body is larger than {self.bytes_max:,} bytes", kind="too_large", retryable=False)
        self.is_full = True


def decoders_for(codings: str, url: str) -> Sequence[Decoder]:
    """The decoders of a Content-Encoding header, in the order in which they are undone.

    A coding that Limpet did not ask for cannot be undone and no retry mends it: `bad_answer`, not retryable.
    """
    names = [name for part in codings.split(",") if (name := part.strip().lower()) not in NO_CODING]
    unknown = [name for name in names if name not in _DECODERS]
    if unknown or len(names) > CODINGS_MAX:
        raise FetchError(
            f"{url}: content coding {codings!r}, expected at most {CODINGS_MAX} of {', '.join(sorted(_DECODERS))}",
            kind="bad_answer",
            retryable=False,
        )
    return [_DECODERS[name]() for name in reversed(names)]


class Gzip:
    """RFC 1952: any number of members. Anything else behind the last one is an error, not ignored."""

    __slots__ = ("_inflate", "is_ended", "is_hungry")

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(31)
        self.is_ended = False
        self.is_hungry = True

    def decode(self, data: bytes) -> bytes:
        """What comes next of the members, at most one piece; raises where one is damaged."""
        inflate = self._inflate
        if inflate.eof:
            data = inflate.unused_data + data
            if not data:
                self.is_hungry = True
                return b""
            inflate = self._inflate = zlib.decompressobj(31)
        out = inflate.decompress(inflate.unconsumed_tail + data, PIECE_BYTES)
        # At the bound there may be more inside without input left over, so it is asked once more.
        self.is_hungry = not (inflate.unconsumed_tail or inflate.unused_data or len(out) == PIECE_BYTES)
        self.is_ended = inflate.eof and not inflate.unused_data
        return out


class Deflate:
    """RFC 9110 section 8.4.1.2: zlib (RFC 1950), or raw deflate (RFC 1951) as many servers send it."""

    __slots__ = ("_head", "_inflate", "is_ended", "is_hungry")

    def __init__(self) -> None:
        self._head = b""
        self._inflate: Any = None
        self.is_ended = False
        self.is_hungry = True

    def decode(self, data: bytes) -> bytes:
        """What comes next, at most one piece; the first two bytes tell which of the two formats it is."""
        if self._inflate is None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return b""
            is_zlib = data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._inflate = zlib.decompressobj(15 if is_zlib else -15)
        inflate = self._inflate
        if inflate.unused_data or (inflate.eof and data):
            raise zlib.error("bytes left over behind its end")
        out: bytes = inflate.decompress(inflate.unconsumed_tail + data, PIECE_BYTES)
        self.is_hungry = not (inflate.unconsumed_tail or inflate.unused_data or len(out) == PIECE_BYTES)
        self.is_ended = inflate.eof and not inflate.unused_data
        return out


class Brotli:
    """RFC 7932. The decoder itself refuses bytes behind the end."""

    __slots__ = ("_stream", "is_ended", "is_hungry")

    def __init__(self) -> None:
        assert _brotli is not None
        self._stream = _brotli.Decompressor()
        self.is_ended = False
        self.is_hungry = True

    def decode(self, data: bytes) -> bytes:
        """What comes next, at most one piece."""
        out: bytes = self._stream.process(data, output_buffer_limit=PIECE_BYTES)
        # At the bound it says that it takes more, though it may still have to reach its end.
        self.is_hungry = self._stream.can_accept_more_data() and len(out) < PIECE_BYTES
        self.is_ended = self._stream.is_finished()
        return out


class Zstd:
    """RFC 8878: any number of frames."""

    __slots__ = ("_input", "_stream", "is_ended", "is_hungry")

    def __init__(self) -> None:
        self._input = b""
        self._stream = self._frame()
        self.is_ended = False
        self.is_hungry = True

    @staticmethod
    def _frame() -> Any:
        assert _zstandard is not None
        return _zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()

    def decode(self, data: bytes) -> bytes:
        """What comes next of the frames, a small step at a time: one byte may stand for many."""
        pending, at, pieces, size = self._input + data, 0, [], 0
        while at < len(pending) and size < PIECE_BYTES:
            if self._stream.eof:
                self._stream = self._frame()
            step = pending[at : at + ZSTD_STEP_BYTES]
            piece = self._stream.decompress(step)
            at += len(step) - len(self._stream.unused_data)
            pieces.append(piece)
            size += len(piece)
        self._input = pending[at:]
        self.is_hungry = not self._input
        self.is_ended = self.is_hungry and self._stream.eof
        return b"".join(pieces)


def _optional(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_brotli = _optional("brotli")
_zstandard = _optional("zstandard")
_DAMAGE: tuple[type[Exception], ...] = (
    zlib.error,
    *((_brotli.error,) if _brotli else ()),
    *((_zstandard.ZstdError,) if _zstandard else ()),
)
_DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": Gzip,
    "x-gzip": Gzip,
    "deflate": Deflate,
    **({"br": Brotli} if _brotli else {}),
    **({"zstd": Zstd} if _zstandard else {}),
}
#: What Limpet asks for: all that it can undo.
ACCEPT_ENCODING = ", ".join(name for name in _DECODERS if name != "x-gzip")
