"""Attention over disjoint sets of tokens, joined by their log-sum-exps: the splits of one launch, and segments."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(out, lse, outs, lses, splits, R, channels, SPLITS: tl.constexpr, CHANNELS_: tl.constexpr):
    """Grid (B·H, R). outs float32 [B·H, splits, R, channels] and lses [B·H, splits, R] to out and lse of all."""
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, CHANNELS_)
    most = float("-inf")
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part = tl.load(lses + (head * splits + s) * R + row, mask=s < splits, other=float("-inf"))
        most = tl.maximum(most, tl.max(part, axis=0))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    x = tl.zeros((CHANNELS_,), tl.float32)
    for s0 in range(0, splits, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        part = tl.load(lses + (head * splits + s) * R + row, mask=s < splits, other=float("-inf"))
        weight = tl.exp(part - base)
        total += tl.sum(weight, axis=0)
        at = ((head * splits + s)[:, None] * R + row) * channels + c[None, :]
        y = tl.load(outs + at, mask=(s < splits)[:, None] & (c < channels)[None, :], other=0.0)
        x += tl.sum(y * weight[:, None], axis=0)
    tl.store(out + (head * R + row) * channels + c, x / tl.where(total == 0, 1.0, total), mask=c < channels)
    tl.store(lse + head * R + row, tl.where(total == 0, float("-inf"), base + tl.log(total)))


@triton.jit
def merge_parts(out, lse, outs, lses, channels, PARTS: tl.constexpr, CHANNELS_: tl.constexpr):
    """Grid (B·H·R). outs and lses: tuples of PARTS tensors [B·H·R, channels] and [B·H·R], to one."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHANNELS_)
    most = float("-inf")
    for i in tl.static_range(PARTS):
        most = tl.maximum(most, tl.load(lses[i] + row))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    x = tl.zeros((CHANNELS_,), tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[i] + row) - base)
        total += weight
        x += tl.load(outs[i] + row * channels + c, mask=c < channels, other=0.0) * weight
    tl.store(out + row * channels + c, x / tl.where(total == 0, 1.0, total), mask=c < channels)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), base + tl.log(total)))
