"""Encode vectors of trellis codecs: of one, or of several with other heads and bits in one search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.layouts.base import PackedTensors
from tersekv.layouts.trellis import BLOCK_TOKENS

GAINS_TRIED = (2, 5)
"""Gain steps above the least-squares gain with which codes are searched again.

Larger gains help because a component beyond the end of its codebook costs more than wider steps do.
"""


class ByHead(NamedTuple):
    """Arguments of `kernels/trellis.pack_vectors` for each head, [1 or B, H, ...]."""

    shift: Tensor
    inverse: Tensor
    weight: Tensor
    bits: Tensor
    enough: Tensor


def searched(parts: Sequence[tuple[Any, slice, Tensor]]) -> list[PackedTensors]:
    """Encode tokens x float32 [B, heads, N·t, D] of some heads of several codecs, see `Trellis.encode`.

    A row of the search holds vectors with the same bits: a head's tokens of all batch rows, or of one. All rows
    must have the same length, so a longer one is cut into several.
    """
    known = _by_codec([codec for codec, _, _ in parts])
    found = [ByHead(*(t[:, heads] for t in known[id(codec)])) for codec, heads, _ in parts]
    rows = [_rows(x, own) for (_, _, x), own in zip(parts, found, strict=True)]
    length = math.gcd(*(x.shape[1] for x in rows))
    cut = [x.shape[1] // length for x in rows]
    vectors = concatenated([x.reshape(-1, length, x.shape[-1]) for x in rows])
    shift, inverse, weight, bits, enough = (
        concatenated([t.flatten(0, 1) for t in each]) for each in zip(*found, strict=True)
    )
    times = [n for x, n in zip(rows, cut, strict=True) for _ in range(len(x))]
    of = torch.tensor([row for row, n in enumerate(times) for _ in range(n)]).to(vectors.device, non_blocking=True)
    if len(of) > len(times):  # the matrices, which are large, are not copied
        shift, weight, bits, enough = (t[of] for t in (shift, weight, bits, enough))
    words = [codec.words(x.shape[-1]) for codec, _, x in parts]
    entries = parts[0][0].entries(str(vectors.device))
    packed = backends.pack_vectors(
        vectors, shift, inverse, of, weight, bits, entries, max(words), list(GAINS_TRIED), enough
    )
    parts[0][0].check_gain(packed[2])
    sizes = [len(x) * n for x, n in zip(rows, cut, strict=True)]
    streams = packed[0].unflatten(1, (-1, BLOCK_TOKENS)).transpose(-1, -2).contiguous()
    gains = packed[1].unflatten(1, (-1, BLOCK_TOKENS))
    each = zip(parts, words, found, streams.split(sizes), gains.split(sizes), strict=True)
    return [
        {"stream": _blocks(x, of, stream[..., :own, :]), "gain": _blocks(x, of, gain)}
        for (_, _, x), own, of, stream, gain in each
    ]


def _by_codec(codecs: Sequence[Any]) -> dict[int, ByHead]:
    """Return the arguments of each codec by its id. They are computed together for layers with the same options."""
    alike: list[list[Any]] = []
    for codec in {id(codec): codec for codec in codecs}.values():
        group = next((group for group in alike if _same_options(codec, group[0])), None)
        alike.append([codec]) if group is None else group.append(codec)
    known: dict[int, ByHead] = {}
    for codec, *others in alike:
        done = (other for other, *_ in alike if id(other) in known and codec.differs_in_bits(other))
        like = None if others else next((known[id(other)] for other in done), None)
        group = [codec, *others]
        heads = [one.fitted["bits"].shape[1] for one in group]
        parts = zip(*(t.split(heads, 1) for t in type(codec).joined(group).searched_by(like)), strict=True)
        known |= {id(one): ByHead(*part) for one, part in zip(group, parts, strict=True)}
    return known


def _same_options(codec: Any, other: Any) -> bool:
    """Return True if both have the same options and tensors fitted of the same shapes, but for the number of heads."""
    shapes, of_other = ({name: (len(t), *t.shape[2:]) for name, t in of.fitted.items()} for of in (codec, other))
    return bool(codec == other) and shapes == of_other


def concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the tensors one after the other; a single one is not copied."""
    return torch.cat(list(tensors), dim) if len(tensors) > 1 else tensors[0]


def _in_order(x: Tensor, of: ByHead) -> bool:
    """True if each batch row has its own bits, or is the only one."""
    return len(x) == 1 or len(of.bits) > 1


def _rows(x: Tensor, of: ByHead) -> Tensor:
    """Return x [B, H, T, D] as rows [B·H, T, D], or [H, B·T, D] if batch rows share bits."""
    return x.flatten(0, 1) if _in_order(x, of) else x.transpose(0, 1).flatten(1, 2)


def _blocks(x: Tensor, of: ByHead, rows: Tensor) -> Tensor:
    """Return blocks of rows of x, [rows, n, ...], as [B, H, N, ...]."""
    B, H, T, _ = x.shape
    if _in_order(x, of):
        return rows.reshape(B, H, T // BLOCK_TOKENS, *rows.shape[2:])
    return rows.reshape(H, B, T // BLOCK_TOKENS, *rows.shape[2:]).transpose(0, 1).contiguous()
