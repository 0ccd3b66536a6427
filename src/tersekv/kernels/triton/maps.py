"""The parts of one token's attention before and after the packed tokens: queries in the components
of the codes, and the output in the model's type.

`map_query` is part of the launch that reads exact tokens (`attend_kernel.attend`), because both
need the query alone. So is `write_tokens`, because that launch reads new tokens where the model left
them. `finish` merges splits, also those of many queries, which have no map. Outputs
of packed tokens are mapped back after merging, because the map is linear.

A map of D channels (`kernels/attend.Map`) is a tuple of kernel arguments, whose kind is OF: a
rotation float32 [D, D] with strides of batch row and head; or a basis of 6-bit entries and its
channels, each with these strides; or any tensor for the identity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.pack_kernels import basis_entries

IDENTITY: tl.constexpr = tl.constexpr(0)
ROTATION: tl.constexpr = tl.constexpr(1)
BASIS: tl.constexpr = tl.constexpr(2)


@triton.jit
def _entries(map, b, h, d, c, D, OF: tl.constexpr):
    """Load components d at channels c of a map, float32. Entries outside the map are finite."""
    at = map[0] + b.to(tl.int64) * map[1] + h.to(tl.int64) * map[2]
    ok = (d < D) & (c < D)
    if OF == ROTATION:
        return tl.load(at + d * D + c, mask=ok, other=0.0)
    else:
        factors = map[3] + b.to(tl.int64) * map[4] + h.to(tl.int64) * map[5] + c
        return basis_entries(at, d, c, ok, D) * tl.load(factors, mask=c < D, other=0.0).to(tl.float32)


@triton.jit
def map_query(
    mapped, width, map, D, query, channels, tile, head, H, R, first, end, OF: tl.constexpr, OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write a tile of OUTPUTS channels of mapped queries, float32 [B·H, R, width], in rows `first` to
    `end` of a head. query [B·H, R, channels]: components of the first D channels, then the other
    channels, then all channels again if `width` has room for them."""
    b, h = head // H, head % H
    o, k = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, CHANNELS)
    if OF != IDENTITY:
        entries = _entries(map, b, h, o[:, None], k[None, :], D, OF)
    for r in range(first, end):
        row = head.to(tl.int64) * R + r
        x = tl.load(query + row * channels + o % channels, mask=o < width, other=0.0).to(tl.float32)
        if OF != IDENTITY:
            q = tl.load(query + row * channels + k, mask=k < D, other=0.0).to(tl.float32)
            x = tl.where(o < D, tl.sum(entries * q[None, :], axis=1), x)
        tl.store(mapped + row * width + o, x, mask=o < width)


@triton.jit
def write_tokens(written, head, H, CHANNELS: tl.constexpr):
    """Copy new tokens of a head. written: pairs of a tensor and its copy. Each is a pointer, strides of
    batch row, head and token, and the numbers of channels and tokens."""
    b, h, c = (head // H).to(tl.int64), (head % H).to(tl.int64), tl.arange(0, CHANNELS)
    for i in tl.static_range(len(written) // 2):
        x, to = written[2 * i], written[2 * i + 1]
        for n in range(x[5]):
            token = tl.load(x[0] + b * x[1] + h * x[2] + n * x[3] + c, mask=c < x[4])
            tl.store(to[0] + b * to[1] + h * to[2] + n * to[3] + c, token, mask=c < x[4])


@triton.jit
def map_queries(
    mapped, width, map, D, query, channels, H, R, OF: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """`map_query` where there are no exact tokens. Grid (tiles, B·H)."""
    head = tl.program_id(1)
    map_query(mapped, width, map, D, query, channels, tl.program_id(0), head, H, R, 0, R, OF, OUTPUTS, CHANNELS)


@triton.jit
def finish(
    out, out_b, out_h, out_g, out_i, lse, outs, lses, first_mapped, splits, map, mean, mean_b, mean_h, sinks, H, R, q,
    channels, OF: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Merge splits to the output of a layer. Grid (B·H, R, tiles of OUTPUTS channels).

    outs float32 [B·H, splits, R, channels] and lses [B·H, splits, R]; splits from `first_mapped` on
    are of inner vectors, which the map and the mean (float32) lead to channels. out has any type and
    strides of batch row, head, grouped head and query; row r is grouped head r // q and query r % q.
    sinks: logits [H·R/q] that take part in the softmax without a value. lse: float32 [B·H, R].
    """
    head, row, b, h = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(0) // H, tl.program_id(0) % H
    o, k = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, CHANNELS)
    most = float("-inf")
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part = tl.load(lses + (head * splits + s) * R + row, mask=s < splits, other=float("-inf"))
        most = tl.maximum(most, tl.max(part, axis=0))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    x = tl.zeros((OUTPUTS,), tl.float32)
    of_inner = 0.0  # weight of inner vectors
    inner = tl.zeros((CHANNELS,), tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part = tl.load(lses + (head * splits + s) * R + row, mask=s < splits, other=float("-inf"))
        weight = tl.exp(part - base)
        total += tl.sum(weight, axis=0)
        at = ((head * splits + s)[:, None] * R + row) * channels
        own = s < splits
        mapped = own & (s >= first_mapped)
        of_inner += tl.sum(tl.where(mapped, weight, 0.0), axis=0)
        if OF != IDENTITY:
            own = s < first_mapped
            y = tl.load(outs + at + k[None, :], mask=mapped[:, None] & (k < channels)[None, :], other=0.0)
            inner += tl.sum(y * weight[:, None], axis=0)
        y = tl.load(outs + at + o[None, :], mask=own[:, None] & (o < channels)[None, :], other=0.0)
        x += tl.sum(y * weight[:, None], axis=0)
    if OF != IDENTITY:
        x += tl.sum(_entries(map, b, h, k[:, None], o[None, :], channels, OF) * inner[:, None], axis=0)
    if HAS_MEAN:
        at = mean + b.to(tl.int64) * mean_b + h.to(tl.int64) * mean_h + o
        x += of_inner * tl.load(at, mask=o < channels, other=0.0).to(tl.float32)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    whole = tl.where(total == 0, float("-inf"), base + tl.log(total))
    if HAS_SINKS:
        share /= 1.0 + tl.exp(tl.load(sinks + h * (R // q) + row // q).to(tl.float32) - whole)
    to = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + (row // q).to(tl.int64) * out_g + row % q * out_i
    tl.store(to + o, (x * share).to(out.dtype.element_ty), mask=o < channels)
    tl.store(lse + head * R + row, whole)
