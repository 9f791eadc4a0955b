"""Content codings, undone within bounds."""

from __future__ import annotations

import contextlib
import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterator

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import FetchError
from limpet.fetch.decode import ACCEPT_ENCODING, PIECE_BYTES, ZSTD_STEP_BYTES, Body

CAP = 2**20


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


ENCODERS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress, lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :])],
    "deflate": [zlib.compress, raw_deflate],
    "br": [brotli.compress],
    "zstd": [zstandard.compress, lambda data: zstandard.compress(data[:7]) + zstandard.compress(data[7:])],
}
CASES = [(coding, encode) for coding, encoders in ENCODERS.items() for encode in encoders]


def fed(coding: str, pieces: list[bytes], bytes_max: int = CAP, *, cut: bool = False) -> bytes:
    body = Body(coding, bytes_max, cut=cut)
    for piece in pieces:
        body.feed(piece)
    return body.finish()


def test_every_coding_that_is_asked_for_is_tested_here() -> None:
    """A coding in Accept-Encoding is one that can be undone."""
    assert set(ACCEPT_ENCODING.split(", ")) == set(ENCODERS)


@given(st.sampled_from(CASES), st.binary(max_size=2000), st.data())
def test_a_body_comes_out_the_same_however_it_arrives(case: tuple[str, Callable[[bytes], bytes]], body: bytes, data: st.DataObject) -> None:
    """Cut into any pieces on the way."""
    coding, encode = case
    packed = encode(body)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(packed)), max_size=6)))
    pieces = [packed[a:b] for a, b in zip([0, *cuts], [*cuts, len(packed)], strict=True)]
    assert fed(coding, pieces) == body


@given(st.sampled_from(CASES), st.binary(min_size=1, max_size=500), st.data())
def test_no_beginning_of_a_compressed_body_passes_as_whole(
    case: tuple[str, Callable[[bytes], bytes]], body: bytes, data: st.DataObject
) -> None:
    """Cut anywhere but at the end of a member: truncated, never a shorter body."""
    coding, encode = case
    packed = encode(body)
    at = data.draw(st.integers(1, len(packed) - 1))
    with contextlib.suppress(FetchError):
        shorter = fed(coding, [packed[:at]])
        assert any(shorter == body[:n] and packed[:at] == ENCODERS[coding][0](shorter) for n in (len(body) // 2, 7))


@given(st.sampled_from(CASES), st.binary(max_size=300), st.binary(min_size=1, max_size=20), st.booleans())
def test_bytes_behind_the_end_are_an_error(case: tuple[str, Callable[[bytes], bytes]], body: bytes, more: bytes, at_once: bool) -> None:
    """Left over in the same piece or in a later one."""
    coding, encode = case
    packed = encode(body)
    with pytest.raises(FetchError):
        fed(coding, [packed + more] if at_once else [packed, more])


@given(st.sampled_from([*ENCODERS, "gzip, br", ""]), st.lists(st.binary(max_size=300), max_size=5))
def test_any_bytes_end_in_a_body_or_a_fetch_error(coding: str, pieces: list[bytes]) -> None:
    """Nothing else ever leaves, and never more than the cap."""
    with contextlib.suppress(FetchError):
        assert len(fed(coding, pieces, 1000)) <= 1000


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES])
@pytest.mark.parametrize(("coding", "encode"), CASES)
def test_the_bound_of_a_piece_loses_nothing(coding: str, encode: Callable[[bytes], bytes], size: int) -> None:
    """At exactly the size that a decoder hands out at once."""
    assert fed(coding, [encode(bytes(size))], 2**21) == bytes(size)


@pytest.mark.parametrize(("coding", "encode"), CASES)
def test_the_cap_counts_decompressed_bytes(coding: str, encode: Callable[[bytes], bytes]) -> None:
    """P109: the limit itself passes, one byte more is too_large, and cut where that was asked for."""
    packed = encode(bytes(5000))
    assert len(fed(coding, [packed], 5000)) == 5000
    with pytest.raises(FetchError) as caught:
        fed(coding, [packed], 4999)
    assert (caught.value.kind, caught.value.retryable) == ("too_large", False)
    assert len(fed(coding, [packed], 4999, cut=True)) == 4999


def test_nothing_at_all_is_an_empty_body() -> None:
    """Content-Encoding of an empty body: nothing was cut."""
    assert [fed(coding, []) for coding in ENCODERS] == [b""] * len(ENCODERS)


@pytest.mark.parametrize("coding", ["compress", "gzip, gzip, gzip", "br;q=1"])
def test_other_codings_are_refused(coding: str) -> None:
    """Not retryable: the server will not change."""
    with pytest.raises(FetchError) as caught:
        Body(coding, CAP)
    assert (caught.value.kind, caught.value.retryable) == ("bad_answer", False)


def gigabyte() -> Iterator[bytes]:
    """A gzip bomb: 1 GB from 1 MB, in the pieces in which a network brings it."""
    squeeze = zlib.compressobj(9, wbits=-15)
    block = squeeze.compress(bytes(2**20)) + squeeze.flush(zlib.Z_FULL_FLUSH)
    yield gzip.compress(b"")[:10]
    for _ in range(0, 1024, 64):
        yield block * 64


def test_a_bomb_of_a_gigabyte_takes_no_memory() -> None:
    """faults.md, statement 17: aborted at the cap, at most 32 MB over the cap; stacked, brotli and zstd too."""
    flat = b"".join(gigabyte())
    assert len(flat) < 2 * 2**20
    bombs = {
        "gzip": list(gigabyte()),
        "gzip, gzip": [gzip.compress(flat)],
        "br": [brotli.compress(bytes(2**27), quality=5)],
        "zstd": [zstandard.compress(bytes(2**27))],
    }
    for coding, pieces in bombs.items():
        tracemalloc.start()
        with pytest.raises(FetchError) as caught:
            fed(coding, pieces, 4 * 2**20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert caught.value.kind == "too_large"
        assert peak < 4 * 2**20 + 32 * 2**20, coding


def test_zstd_windows_are_bounded() -> None:
    """RFC 9659: a stream may not ask for more than 8 MiB of window."""
    huge = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True))
    stream = huge.compressobj()
    packed = stream.compress(bytes(ZSTD_STEP_BYTES)) + stream.flush()
    with pytest.raises(FetchError) as caught:
        fed("zstd", [packed])
    assert caught.value.kind == "bad_answer"
