"""The cache of a layer whose packed tokens are distributed over processes (context parallelism).

All processes see all tokens and keep the same sinks and recent window, which are short. Of the
tokens packed in one call, each process keeps a run of whole blocks, in the order of ranks. A
prompt's blocks are distributed evenly; while decoding, consecutive blocks go to consecutive ranks.
Blocks have the same positions and bytes as in a single process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.segments import PackedSegment
from tersekv.codecs.transforms.rope import Rope
from tersekv.errors import CacheError, UserError
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain

ELSEWHERE = "other processes hold packed tokens of this cache (context_parallel)"


class ContextParallelStore(LayerStore):
    """A full-attention layer that holds the packed tokens of this process.

    places: their positions, int32 [T].
    """

    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        context_parallel: ContextParallel,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        super().__init__(plan, keys, values, None, rope, heads)
        self.processes = context_parallel
        self._clear()

    def _clear(self) -> None:
        self.places = torch.empty(0, dtype=torch.int32, device=self.device)
        self.turn = self.packed_anywhere = 0

    @property
    def context_parallel(self) -> ContextParallel | None:  # type: ignore[override]
        """The processes that share this layer's packed tokens, or None if nothing is packed yet."""
        return self.processes if self.packed_anywhere else None

    @property
    def packed_everywhere(self) -> bool:  # type: ignore[override]
        """True if all processes have packed tokens, or none has."""
        return not 0 < self.packed_anywhere < self.processes.ranks * self.flush_tokens

    def _own(self, skip: int, flush: int) -> range:
        run = self.processes.run(flush // self.flush_tokens, self.turn)
        return range(run.start * self.flush_tokens, run.stop * self.flush_tokens)

    def _note(self, place: int, own: range, flush: int) -> None:
        new = torch.arange(place + own.start, place + own.stop, dtype=torch.int32, device=self.device)
        self.places = torch.cat([self.places, new])
        self.turn = (self.turn + flush // self.flush_tokens) % self.processes.ranks
        self.packed_anywhere += flush

    def _packed(self, first: int, tokens: int) -> PackedSegment:
        places = self.places[first : first + tokens]
        keys, values = (side.view_at(first, tokens, places) for side in self.sides)
        return PackedSegment(keys, values, 0, tokens, places, self.keys.correction)

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Raise UserError, because other processes hold some of the tokens."""
        raise UserError(f"{ELSEWHERE}: only tersekv's attention can read it, without output_attentions")

    def check_crop(self, n: int) -> None:
        """Check that the n latest tokens can be rolled back: all, or at most those of the tail.

        Raises:
            CacheError: n is larger.
        """
        if self.keys.tail.tokens < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens: {ELSEWHERE}, and {self.keys.tail.tokens} are exact in all (the policy's "
                "option recent says how many at least)"
            )
        super().check_crop(n)

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`."""
        super().crop(n)
        if self.num_tokens == 0:
            self._clear()

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        super().to(device)
        self.places = self.places.to(device)

    def footprint(self) -> Footprint:
        """Return the bytes of this process, without tables. `elements` counts all tokens."""
        footprint = super().footprint()
        footprint.parts["selection"] += self.places.numel() * self.places.element_size()
        return footprint
