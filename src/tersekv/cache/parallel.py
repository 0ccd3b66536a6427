"""What a process holds of a layer that several share: some key-value heads (tensor parallelism), or some of the packed
tokens (context parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.layouts.base import PackedTensors


@dataclass(frozen=True)
class HeadShard:
    """HeadShard `first` to `first + count` of a layer with `total`; other processes hold the others. gather: of
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

    def encode(self, codec: Codec, x: Tensor) -> PackedTensors:
        """`codec.encode` of x [B, count, N·t, D] as one process with all heads would have it."""
        if not codec.encode_spans_heads:
            return codec.encode(x)
        return codec.layout(x.shape[-1]).select_heads(codec.encode(self.gather(x)), self.first, self.count)


@dataclass(frozen=True)
class ContextParallel:
    """The processes that divide a context. gather: a tensor of each process, in their order; all call it in step."""

    rank: int
    ranks: int
    gather: Callable[[Tensor], list[Tensor]]

    def run(self, units: int, turn: int) -> range:
        """Of `units` blocks those of this process; what is left over goes to the processes from `turn` on, one each."""
        each, left = divmod(units, self.ranks)
        sizes = [each + ((rank - turn) % self.ranks < left) for rank in range(self.rank + 1)]
        return range(sum(sizes[:-1]), sum(sizes))
