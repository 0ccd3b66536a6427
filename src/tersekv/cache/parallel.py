"""A process's share of a layer: some heads (tensor parallelism) or packed tokens (context parallelism).

Under context parallelism all processes see all tokens and keep the same sinks and recent window, which
are short. Of the tokens packed in one call, each process keeps a run of whole blocks, in the order of
ranks. A prompt's blocks are distributed evenly; while decoding, consecutive blocks go to consecutive
ranks. Blocks have the same positions and bytes as in a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
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


ELSEWHERE = "other processes hold packed tokens of this cache (context_parallel)"


class OwnBlocks:
    """The packed tokens of this process.

    places: their positions, int32 [T].
    """

    def __init__(self, processes: ContextParallel, block: int, device: torch.device) -> None:
        self.processes, self.block = processes, block
        self.places = torch.empty(0, dtype=torch.int32, device=device)

    def run(self, packed: int, tokens: int) -> range:
        """Return which of `tokens` that are packed now are this process's. packed: those of all before."""
        blocks = self.processes.run(tokens // self.block, packed // self.block % self.processes.ranks)
        return range(blocks.start * self.block, blocks.stop * self.block)

    def add(self, place: int, own: range) -> None:
        """Note that the tokens `own`, counted from position `place`, were packed here."""
        new = torch.arange(place + own.start, place + own.stop, dtype=torch.int32, device=self.places.device)
        self.places = torch.cat([self.places, new])

    def everywhere(self, packed: int) -> bool:
        """True if all processes have packed tokens, or none has. packed: those of all."""
        return not 0 < packed < self.processes.ranks * self.block

    def part(self, first: int, tokens: int) -> Tensor:
        """Return the positions of packed tokens `first` to `first + tokens` of this process."""
        return self.places[first : first + tokens]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        footprint.parts["selection"] += self.places.nbytes

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.places = self.places.to(device)
