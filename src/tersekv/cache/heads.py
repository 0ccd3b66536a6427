"""Layers whose key-value heads are divided among processes (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.layouts.base import Layout, Planes


@dataclass(frozen=True)
class Heads:
    """Heads `first` to `first + count` of a layer with `total`; other processes hold the others. gather: of
    [B, count, T, D] makes all heads [B, total, T, D]; every process calls it in the same order."""

    first: int
    count: int
    total: int
    gather: Callable[[Tensor], Tensor]

    def fit(self, codec: Codec, x: Tensor) -> Codec:
        """`codec.fit` of x [B, count, T, D] as one process with all heads would have it."""
        if not codec.fit_spans_heads:
            return codec.fit(x)
        return codec.fit(self.gather(x)).of_heads(self.first, self.count)

    def encode(self, codec: Codec, layout: Layout, x: Tensor) -> Planes:
        """`codec.encode` of x [B, count, N·t, D] as one process with all heads would have it."""
        if not codec.encode_spans_heads:
            return codec.encode(x)
        return layout.select_heads(codec.encode(self.gather(x)), self.first, self.count)
