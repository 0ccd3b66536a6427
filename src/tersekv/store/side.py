"""The keys, or the values, of one layer: exact sinks | packed blocks | exact tail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.codecs import Codec
from tersekv.errors import CacheError
from tersekv.formats.base import Planes, View
from tersekv.store.blocks import BlockBuffer, TailBuffer
from tersekv.store.footprint import Footprint

ENCODE_TOKENS = 1024
"""Tokens encoded at a time, which bounds the float32 copies that encoding makes."""


class Prepared(NamedTuple):
    """New tokens of one side, encoded: the codec (perhaps newly fitted), new sinks, planes to append, how many of the
    oldest tokens leave the tail, and the tokens [B, H, n, D] that enter it."""

    codec: Codec
    sinks: Tensor
    planes: list[Planes]
    leave_tail: int
    enter_tail: Tensor


class SideStore:
    """Tokens [B, H, n, D] of one side, in the order they came. `tail_tokens`: capacity of the tail."""

    def __init__(self, codec: Codec, like: Tensor, dtype: torch.dtype, tail_tokens: int) -> None:
        B, H, _, self.head_dim = like.shape
        self.codec = codec
        self.dtype = dtype
        self.sinks = like.new_empty((B, H, 0, self.head_dim), dtype=dtype)
        self.packed = BlockBuffer(codec.layout(self.head_dim), B, H, like.device)
        self.tail = TailBuffer(B, H, self.head_dim, dtype, like.device, tail_tokens)

    def rounded(self, x: Tensor) -> Tensor:
        """New tokens in the exact type.

        Raises:
            CacheError: they are not finite, or too large for that type.
        """
        rounded = (x.detach() if x.requires_grad else x).to(self.dtype)
        # elsewhere than on a CPU a check would wait for the device at every token
        checked = x.is_cpu or x.shape[2] > 1
        # a sum is quick and finite for ordinary tokens; the exact test runs only where it is not
        if checked and not math.isfinite(rounded.sum(dtype=torch.float32).item()) and not rounded.isfinite().all():
            raise CacheError(self._why_not_finite(x))
        return rounded

    def _why_not_finite(self, x: Tensor) -> str:
        if not bool(torch.isfinite(x).all()):
            return "NaN or Inf; the model's own computation has overflowed (try bfloat16 or float32 weights)"
        return (
            f"values up to {float(x.abs().max()):.3g}, which {str(self.dtype).removeprefix('torch.')} cannot hold; "
            "use the policy option exact=bf16 or exact=fp32 (window:exact=bf16+…)"
        )

    def prepare(self, x: Tensor, sinks: int, skip: int, flush: int, restart: bool) -> Prepared:
        """What adding tokens [B, H, n, D] will change, with nothing changed yet.

        The first `sinks` of them become sinks. Of the tail and the others, the first `flush` are packed (whole blocks),
        of which `skip` need not be kept at all; what follows them becomes the tail. restart: `x` holds what the tail
        held, too. A codec that learns from the prompt is fitted before it packs for the first time, on all tokens at
        hand.

        Raises:
            UserError: a scale that its type cannot hold.
        """
        first, x = x[:, :, :sinks], x[:, :, sinks:]
        tail = self.tail.data[:, :, :0] if restart else self.tail.data
        codec, planes, old = self.codec, [], tail.shape[2]
        if flush:
            if codec.fits_on == "prompt" and not codec.fitted:
                codec = codec.fit(torch.cat([self.sinks, first, tail, x], dim=2).float())
            t = self.packed.layout.block_tokens
            step = max(1, ENCODE_TOKENS // t) * t
            for start in range(skip, flush, step):
                stop = min(flush, start + step)
                parts = [tail[:, :, start : min(stop, old)], x[:, :, max(0, start - old) : max(0, stop - old)]]
                planes.append(codec.encode(torch.cat(parts, dim=2).float()))
        leave = self.tail.tokens if restart else min(flush, old)
        return Prepared(codec, first, planes, leave, x[:, :, max(0, flush - old) :])

    def commit(self, new: Prepared) -> None:
        """Change what was prepared."""
        self.codec = new.codec
        if new.sinks.shape[2]:
            self.sinks = torch.cat([self.sinks, new.sinks], dim=2)
        if new.planes:
            self.packed.reserve(sum(next(iter(planes.values())).shape[2] for planes in new.planes))
        for planes in new.planes:
            self.packed.append(planes)
        self.tail.drop_front(new.leave_tail)
        self.tail.append(new.enter_tail)

    def view(self, first: int, tokens: int) -> View:
        """Packed tokens `first` to `first + tokens`, whole blocks."""
        t = self.packed.layout.block_tokens
        return self.codec.view(self.packed.planes(first // t, (first + tokens) // t), self.head_dim)

    def unpack_back(self, tokens: int, keep: int) -> None:
        """Drop the `tokens` latest packed tokens, whole blocks; the first `keep` return to the tail, decoded."""
        if keep:
            self.tail.append(self.view(self.packed.tokens - tokens, tokens).decode()[:, :, :keep].to(self.dtype))
        self.packed.drop_back(tokens // self.packed.layout.block_tokens)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Sinks, packed tokens and tail as [B, H, n, D]."""
        parts = [self.sinks.to(dtype)]
        if self.packed.tokens:
            parts.append(self.view(0, self.packed.tokens).decode().to(dtype))
        return torch.cat([*parts, self.tail.data.to(dtype)], dim=2)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every buffer by fn(buffer)."""
        self.packed.map(fn)
        self.tail.map(fn)
        self.sinks = fn(self.sinks)

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without tables."""
        footprint.parts["exact sinks"] += self.sinks.numel() * self.sinks.element_size()
        self.packed.count(footprint)
        self.tail.count(footprint)
