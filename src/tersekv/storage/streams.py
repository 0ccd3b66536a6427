"""Entropy coding of a page's codes: bands of components, each one stream of its own.

    4 bytes             number of bands, little-endian; later components are 0
    4 bytes per band    length of its stream; the highest bit is set for pcodec
    streams             zstd of int8 or int16 numbers, or pcodec of int16 numbers; nothing if all are 0

Components of a band have nearly one distribution, because components come in the order of their
variance. zstd costs 2 to 4 % more than the entropy above 2 bits per code and is the fastest to
read; below, its whole bits per symbol cost too much, and pcodec reaches the entropy.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.extras import require

BAND = 32
"""Components of a stream. With 256 tokens it has 8,192 codes, which pay for a stream's own table."""

ZSTD_BITS = 2.0
"""Entropy in bits per code from which zstd is used."""

ZSTD_LEVEL, PCODEC_LEVEL = 3, 8
PCODEC = 1 << 31


def entropy(codes: Tensor) -> float:
    """Return the entropy of integer codes in bits per code."""
    counts = torch.unique(codes, return_counts=True)[1].double()
    p = counts / counts.sum()
    return float(-(p * p.log2()).sum())


def pack(codes: Tensor) -> bytes:
    """Return the bytes of a page's codes int16 [components, tokens]."""
    require_packages("a storage file")
    parts = [_packed(band) for band in codes.split(BAND)]
    while parts and not parts[-1][0]:
        parts.pop()
    heads = [len(data) | (PCODEC if pcodec else 0) for data, pcodec in parts]
    return struct.pack(f"<{len(heads) + 1}I", len(heads), *heads) + b"".join(data for data, _ in parts)


def unpack(data: bytes, components: int, tokens: int) -> Tensor:
    """Return the codes int16 [k, tokens] of `pack`, without last components that are 0.

    components: at most so many.

    Raises:
        UserError: the bytes are not those of such codes.
    """
    bands = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else 0
    at, most = 4 + 4 * bands, -(-components // BAND)
    if bands > most or len(data) < at:
        raise UserError(f"has {len(data)} bytes and {bands} streams, and at most {most} are possible")
    out = np.zeros((min(components, bands * BAND), tokens), dtype=np.int16)
    for i, head in enumerate(struct.unpack(f"<{bands}I", data[4:at])):
        end = at + (head & ~PCODEC)
        if end > len(data):
            raise UserError(f"has {len(data)} bytes, and its stream {i} ends at {end}")
        if end > at:
            _unpack(data[at:end], bool(head & PCODEC), out[i * BAND : (i + 1) * BAND].reshape(-1))
        at = end
    if at != len(data):
        raise UserError(f"has {len(data)} bytes, and its streams end at {at}")
    return torch.from_numpy(out)


def pack_bytes(data: bytes) -> bytes:
    """Return zstd's bytes of 16-bit numbers, all first bytes before all second ones."""
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(_planes(data, 2))


def unpack_bytes(data: bytes, size: int) -> bytes:
    """Return the `size` bytes of `pack_bytes`.

    Raises:
        UserError: the bytes are not those of so many.
    """
    return _planes(_zstd(data, size), size // 2)


def require_packages(what: str) -> None:
    """Raise UserError, which begins with `what`, unless the packages of the extra are installed."""
    for package in ("zstandard", "pcodec"):
        require(what, package)


def _planes(data: bytes, columns: int) -> bytes:
    """Return the bytes of a matrix with so many columns, column by column."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, columns).T.tobytes() if data else b""


def _packed(band: Tensor) -> tuple[bytes, bool]:
    """Return the stream of some codes, and True if it is pcodec's."""
    import zstandard
    from pcodec import ChunkConfig, standalone

    if not bool(band.any()):
        return b"", False
    small = int(band.abs().max()) < 128
    numbers: Any = band.contiguous().reshape(-1).numpy()
    if entropy(band) > ZSTD_BITS:
        data = (band.to(torch.int8) if small else band).contiguous().numpy().tobytes()
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data), False
    return bytes(standalone.simple_compress(numbers, ChunkConfig(compression_level=PCODEC_LEVEL))), True


def _unpack(data: bytes, pcodec: bool, out: Any) -> None:
    """Decode one stream into int16 numbers."""
    if not pcodec:
        found = _zstd(data, len(out), 2 * len(out))
        out[:] = np.frombuffer(found, dtype=np.int8 if len(found) == len(out) else np.int16)
        return
    from pcodec import standalone

    try:
        progress = standalone.simple_decompress_into(data, out)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UserError("has a stream that pcodec cannot read") from error
    if progress.n_processed != len(out) or not progress.finished:
        raise UserError(f"has a stream of other than {len(out)} codes")


def _zstd(data: bytes, *sizes: int) -> bytes:
    """Return what zstd compressed, if it has one of these sizes. A larger one is not allocated."""
    import zstandard

    try:
        size = zstandard.frame_content_size(data)
        if size in sizes:
            return bytes(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise UserError("has a stream that zstd cannot read") from error
    raise UserError(f"has a stream of {size} bytes in place of {' or '.join(map(str, sizes))}")
