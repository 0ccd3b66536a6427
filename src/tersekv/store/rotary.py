"""Which RoPE each cached key of a layer carries, so that it can be taken off before packing and put back on reading.

A token's position is its place in the cache, minus its row's padding. Where a model's frequencies change with the
length of the sequence, keys keep those of the call they came with: runs of tokens note the length at that time.
"""

from __future__ import annotations

import bisect
import functools

import torch
from torch import Tensor

from tersekv.formats.centred import Turned, TurnedRows
from tersekv.store.state import State, Stateful
from tersekv.store.states import ROTARY, rotary_runs
from tersekv.transforms.rope import Rope
from tersekv.transforms.rope_steps import STEPS


class Rotary(Stateful):
    """RoPE of the tokens of one layer; places count from the first token of the cache."""

    STATE, RULES = ROTARY, (rotary_runs,)

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.padding: Tensor | None = None  # int64 [B], on the CPU
        self.starts, self.lengths = [0], [0]

    def note(self, first: int, n: int, padding: Tensor | None = None) -> None:
        """Tokens first to first + n came in one call; padding int64 [B], where a batch has just begun with some."""
        self.padding = self.padding if padding is None else padding.cpu()
        if not self.rope.varies or not n:
            return
        at = bisect.bisect_left(self.starts, first)
        self.starts[at:], self.lengths[at:] = [first], [first + n]

    @property
    def shares(self) -> bool:
        """Whether `cos_sin` gives parts of the table that all layers share, not copies."""
        return self.padding is None and not self.rope.varies

    def cos_sin(self, first: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [1 or B, n, R]."""
        paddings = [0] if self.padding is None else [int(p) for p in self.padding]
        rows = [self._row(first, n, padding, device) for padding in paddings]
        if len(rows) == 1:
            return rows[0][0].unsqueeze(0), rows[0][1].unsqueeze(0)
        cos, sin = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return cos, sin

    def _row(self, first: int, n: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if not self.rope.varies:
            return self.rope.cos_sin(first - padding, n, 0, device)
        parts = []
        place = first
        while place < first + n:
            run = bisect.bisect_right(self.starts, place) - 1
            stop = self.starts[run + 1] if run + 1 < len(self.starts) else first + n
            stop = min(stop, first + n)
            parts.append(self.rope.cos_sin(place - padding, stop - place, self.lengths[run] - padding, device))
            place = stop
        cos, sin = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return cos, sin

    def take_off(self, x: Tensor, first: int, own_sinks: bool = False) -> Tensor:
        """Keys [B, H, n, D] from place `first` on, as they were before RoPE: float32. own_sinks: they are each row's
        first tokens, whatever its padding."""
        if not x.shape[2]:
            return x.float()
        if own_sinks and self.padding is not None:
            rows = [self._row(int(p), x.shape[2], int(p), x.device) for p in self.padding]
            cos, sin = (torch.stack(parts) for parts in zip(*rows, strict=True))
        else:
            cos, sin = self.cos_sin(first, x.shape[2], x.device)
        return self.rope.take_off(x.float(), cos, sin)

    def pull_back(self, gradient: Tensor, first: int) -> Tensor:
        """Gradients [B, H, n, D] with respect to keys from place `first` on, as those with respect to the keys before
        RoPE: float32."""
        return self.rope.pull_back(gradient.float(), *self.cos_sin(first, gradient.shape[2], gradient.device))

    def put(self, x: Tensor, first: int) -> Tensor:
        """Keys [B, H, n, D] from place `first` on, with their RoPE."""
        return self.rope.put(x, *self.cos_sin(first, x.shape[2], x.device))

    def turned(self, mean: Tensor, first: int, n: int) -> Tensor:
        """The constant part [1 or B, H, D] of keys as n tokens from place `first` on have it: [1 or B, H, n, D]."""
        return Turned(mean.float(), self.rope, *self.cos_sin(first, n, mean.device)).decode()

    def turned_view(self, mean: Tensor, first: int, n: int) -> Turned:
        """The same as a view, which holds no more than the table of all layers."""
        device = mean.device
        if self.padding is None or self.rope.varies:
            return Turned(mean, self.rope, *self.cos_sin(first, n, device), consecutive=not self.rope.varies)
        padding, rope = self.padding, self.rope

        @functools.cache
        def begins() -> tuple[Tensor, Tensor]:
            positions = torch.arange(first, first + n, STEPS, device=device) - padding.to(device)[:, None]
            cos, sin = rope.at(positions.abs())  # negative ones are padding's, but a block may begin there
            return cos, sin * positions.sign().unsqueeze(-1)

        return TurnedRows(mean, rope, n, lambda: self.cos_sin(first, n, device), begins)

    def tables(self, centred: bool, head_dim: int) -> list[Tensor]:
        """What is kept for keys of head_dim channels: of centred ones RoPE's steps, of others its turns."""
        if self.rope.varies:
            return self.rope.tables()
        return self.rope.tables(stepped=centred, turned=0 if centred else head_dim)

    def at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [1 or B, n, R] of tokens at `places` int [n], where they do not hang on the length."""
        padding = 0 if self.padding is None else self.padding.to(places)[:, None]
        return self.rope.at((places[None] - padding).clamp(min=0))

    def clear(self) -> None:
        """Forget all tokens."""
        self.padding = None
        self.starts, self.lengths = [0], [0]

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.padding = None if self.padding is None else self.padding.cpu()

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        if self.padding is not None:
            self.padding = self.padding[rows.cpu()]
