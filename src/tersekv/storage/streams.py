"""Entropy coding of codes in pages: bands of components with one table each, which all pages share.

A table, and a page that is read with it:

    4 bytes             number of bands, little-endian; later components are 0
    2 bytes per band    length of its part
    parts               pcodec's header and metadata of the band, or its numbers of this page; nothing if all are 0

Components of a band have nearly one distribution, because components come in the order of their
variance. pcodec reaches a table's entropy at any rate; zstd needs whole bits per symbol.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.extras import require

BAND = 32
"""Components of a band. A page has 8,192 codes of it, which pay for the state of a coder."""

ZSTD_LEVEL, PCODEC_LEVEL = 3, 8


def pack(pages: Sequence[Sequence[Tensor]]) -> tuple[bytes, list[bytes]]:
    """Return the bytes of a table, and those of each page.

    pages: tensors int16 [components, tokens] of each page, each of which begins a band.
    """
    require_packages("a storage file")
    parts = [_packed(band) for band in zip(*([b for x in page for b in x.split(BAND)] for page in pages), strict=True)]
    while parts and not parts[-1][0]:
        parts.pop()
    return _joined([table for table, _ in parts]), [_joined([page[n] for _, page in parts]) for n in range(len(pages))]


def unpack(table: bytes, page: bytes, parts: Sequence[int], tokens: int) -> list[Tensor]:
    """Return the tensors int16 [k, tokens] of a page of `pack`, the last one without components that are 0.

    parts: components of each tensor, of the last one at most so many.

    Raises:
        UserError: the bytes are not those of such a page.
    """
    rows = [min(BAND, n - first) for n in parts for first in range(0, n, BAND)]
    metas, pages = _split(table, len(rows)), _split(page, len(rows))
    if len(metas) != len(pages):
        raise UserError(f"has {len(pages)} streams, and its table has {len(metas)}")
    out = np.zeros((max(sum(rows[: len(metas)]), sum(parts[:-1])), tokens), dtype=np.int16)
    at = 0
    for meta, data, height in zip(metas, pages, rows, strict=False):
        if meta:
            _unpack(meta, data, out[at : at + height].reshape(-1))
        elif data:
            raise UserError("has a stream without a table")
        at += height
    codes, found = torch.from_numpy(out), []
    for n in parts:
        found.append(codes[:n])
        codes = codes[n:]
    return found


def pack_bytes(data: bytes) -> bytes:
    """Return zstd's bytes of 16-bit numbers, all first bytes before all second ones."""
    import zstandard

    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(_planes(data, 2))


def unpack_bytes(data: bytes, size: int) -> bytes:
    """Return the `size` bytes of `pack_bytes`.

    Raises:
        UserError: the bytes are not those of so many.
    """
    import zstandard

    try:
        found = zstandard.frame_content_size(data)
        if found == size:  # a larger one is not allocated
            return _planes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False), size // 2)
    except zstandard.ZstdError as error:
        raise UserError("has a stream that zstd cannot read") from error
    raise UserError(f"has a stream of {found} bytes in place of {size}")


def require_packages(what: str) -> None:
    """Raise UserError, which begins with `what`, unless the packages of the extra are installed."""
    for package in ("zstandard", "pcodec"):
        require(what, package)


def _joined(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<I{len(parts)}H", len(parts), *map(len, parts)) + b"".join(parts)


def _split(data: bytes, most: int) -> list[bytes]:
    """Return the parts of `_joined`, at most so many."""
    n = struct.unpack("<I", data[:4])[0] if len(data) >= 4 else 0
    at = 4 + 2 * n
    if n > most or len(data) < at:
        raise UserError(f"has {len(data)} bytes and {n} streams, and at most {most} are possible")
    ends = at + np.cumsum(np.frombuffer(data, dtype="<u2", count=n, offset=4), dtype=np.int64)
    if (ends[-1] if n else at) != len(data):
        raise UserError(f"has {len(data)} bytes, and its streams end at {ends[-1] if n else at}")
    return [data[begin:end] for begin, end in zip([at, *ends[:-1]], ends, strict=False)]


def _planes(data: bytes, columns: int) -> bytes:
    """Return the bytes of a matrix with so many columns, column by column."""
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, columns).T.tobytes() if data else b""


def _packed(band: Sequence[Tensor]) -> tuple[bytes, list[bytes]]:
    """Return the table of a band's codes, and their bytes of each page."""
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec, wrapped

    if not any(bool(codes.any()) for codes in band):
        return b"", [b""] * len(band)
    numbers = torch.cat([codes.flatten() for codes in band]).numpy()
    pages = PagingSpec.exact_page_sizes([codes.numel() for codes in band])
    config = ChunkConfig(PCODEC_LEVEL, ModeSpec.classic(), DeltaSpec.no_op(), pages)
    file = wrapped.FileCompressor()
    chunk = file.chunk_compressor(numbers, config)
    return bytes(file.write_header() + chunk.write_meta()), [bytes(chunk.write_page(i)) for i in range(len(band))]


def _unpack(table: bytes, data: bytes, out: Any) -> None:
    """Decode a band's codes of a page."""
    from pcodec import wrapped

    try:
        file, header = wrapped.FileDecompressor.new(table)
        chunk, used = file.chunk_decompressor(table[header:], "i16")
        progress, read = chunk.read_page_into(data, len(out), out)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise UserError("has a stream that pcodec cannot read") from error
    if progress.n_processed != len(out) or not progress.finished or header + used != len(table) or read != len(data):
        raise UserError(f"has a stream of other than {len(out)} codes")
