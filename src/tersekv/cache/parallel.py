"""A process's share of a layer: some heads (tensor) or packed tokens (context parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.layouts.base import PackedTensors
from tersekv.transforms.moments import Moments


@dataclass(frozen=True)
class HeadShard:
    """Heads `first` to `first + count` of a layer with `total` heads, under tensor parallelism.

    gather: function that returns all heads [B, total, T, D] for this process's [B, count, T, D].
        Every process calls it in the same order.
    """

    first: int
    count: int
    total: int
    gather: Callable[[Tensor], Tensor]

    def fit(self, codec: Codec, x: Tensor) -> Codec:
        """Fit a codec on x [B, count, T, D], as one process with all heads would."""
        if not codec.fit_spans_heads:
            return codec.fit(x)
        return codec.fit(self.gather(x)).of_heads(self.first, self.count)

    def fit_moments(self, codec: Codec, moments: Moments) -> Codec:
        """Fit a codec on sums over this process's heads, as one process with all heads would."""
        if not codec.fit_spans_heads:
            return codec.fit_moments(moments)
        metric = None if moments.metric is None else self.gather(moments.metric)
        total = self.gather(moments.total.unsqueeze(2)).squeeze(2)
        whole = Moments(moments.vectors, total, self.gather(moments.squares), metric)
        return codec.fit_moments(whole).of_heads(self.first, self.count)

    def encode(self, codec: Codec, x: Tensor) -> PackedTensors:
        """Encode x [B, count, N·t, D], with the same result as in one process with all heads."""
        if not codec.encode_spans_heads:
            return codec.encode(x)
        return codec.layout(x.shape[-1]).select_heads(codec.encode(self.gather(x)), self.first, self.count)


@dataclass(frozen=True)
class ContextParallel:
    """The processes that share a context.

    gather: function that returns the tensors of all processes in order of rank. All processes must
        call it together.
    """

    rank: int
    ranks: int
    gather: Callable[[Tensor], list[Tensor]]

    def run(self, units: int, turn: int) -> range:
        """Return this process's run of `units` blocks.

        Left-over blocks go to the ranks from `turn` on, one each.
        """
        each, left = divmod(units, self.ranks)
        sizes = [each + ((rank - turn) % self.ranks < left) for rank in range(self.rank + 1)]
        return range(sum(sizes[:-1]), sum(sizes))
