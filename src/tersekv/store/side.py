"""The keys, or the values, of one layer: exact sinks | packed blocks | exact tail."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tersekv.codecs import Codec
from tersekv.errors import CacheError
from tersekv.formats.base import View
from tersekv.store.blocks import BlockBuffer, TailBuffer
from tersekv.store.footprint import Footprint

ENCODE_TOKENS = 1024
"""Tokens encoded at a time, which bounds the float32 copies that encoding makes."""


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

    def fill_sinks(self, x: Tensor, capacity: int) -> Tensor:
        """Put the first tokens into the sinks until `capacity` are there; returns the others."""
        n = min(capacity - self.sinks.shape[2], x.shape[2])
        if n <= 0:
            return x
        self.sinks = torch.cat([self.sinks, x[:, :, :n]], dim=2)
        return x[:, :, n:]

    def fit(self, x: Tensor) -> None:
        """Fit a codec that learns from the prompt, once, on all tokens at hand: those held and the new ones."""
        if self.codec.fits_on == "prompt" and not self.codec.fitted:
            self.codec = self.codec.fit(torch.cat([self.sinks, self.tail.data, x], dim=2).float())

    def pack(self, x: Tensor, skip: int, flush: int) -> None:
        """Encode tokens `skip` to `flush` of tail and new ones; what follows them becomes the tail."""
        t, old = self.packed.layout.block_tokens, self.tail.tokens
        self.packed.reserve((flush - skip) // t)
        step = max(1, ENCODE_TOKENS // t) * t
        for start in range(skip, flush, step):
            stop = min(flush, start + step)
            parts = [self.tail.data[:, :, start : min(stop, old)], x[:, :, max(0, start - old) : max(0, stop - old)]]
            self.packed.append(self.codec.encode(torch.cat(parts, dim=2).float()))
        self.tail.drop_front(min(flush, old))
        self.tail.append(x[:, :, max(0, flush - old) :])

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
