"""Packed tokens of a layer that are distributed over processes (context parallelism).

All processes see all tokens and keep the same sinks and recent window, which are short. Of the
tokens packed in one call, each process keeps a run of whole blocks, in the order of ranks. A
prompt's blocks are distributed evenly; while decoding, consecutive blocks go to consecutive ranks.
Blocks have the same positions and bytes as in a single process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import ContextParallel

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
