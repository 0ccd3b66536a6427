"""RoPE angles of each cached key of a layer, to remove RoPE before packing and apply it on reading.

A token's position is its place in the cache minus its row's padding. In some models the frequencies
change with the sequence length. Keys then keep the frequencies of the call that added them. Each
run of tokens with the same frequencies records the longest row's length after its first call.
"""

from __future__ import annotations

import bisect
import itertools
import operator

import torch
from torch import Tensor

from tersekv.cache.schema import MOST, each, one_of, optional, require, tensor, whole
from tersekv.cache.state import State, Stateful
from tersekv.kernels.attend import Where
from tersekv.kernels.marks import Marks
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.rope import Rope

ROTARY = {
    "padding": lambda rotary: optional(tensor(torch.int64, None, low=0, high=MOST)),
    "starts": lambda rotary: each(whole()) if rotary.rope.varies else each(one_of(0), 1),
    "lengths": lambda rotary: each(whole()) if rotary.rope.varies else each(one_of(0), 1),
}


def rotary_runs(rotary: Rotary, place: str) -> None:
    """Check that runs of tokens are consecutive and each is within its length."""
    rising = rotary.starts[:1] == [0] and all(a < b for a, b in itertools.pairwise(rotary.starts))
    ends = [length + rotary._first for length in rotary.lengths]
    known = len(rotary.starts) == len(ends) and all(map(operator.le, rotary.starts, ends))
    require(rising and known, place, "has starts and lengths that are not valid for runs of tokens")


def angles_at_once(rope: Rope, tokens: int, device: torch.device, first: int = 0) -> Angles:
    """Return the angles of a text that a model reads in one call, from token `first` on."""
    rotary = Rotary(rope)
    rotary.note(0, tokens)
    return rotary.angles(first, tokens - first, device)


class Rotary(Stateful):
    """RoPE of the tokens of one layer. Places are counted from the cache's first token."""

    STATE, RULES = ROTARY, (rotary_runs,)

    def __init__(self, rope: Rope) -> None:
        self.rope = rope
        self.padding: Tensor | None = None  # int64 [B], on the CPU
        self.starts, self.lengths = [0], [0]

    def note(self, first: int, n: int, padding: Tensor | None = None) -> None:
        """Record that tokens first to first + n were added in one call.

        padding: int64 [B], given if a padded batch starts with this call.
        """
        self.padding = self.padding if padding is None else padding.cpu()
        if not self.rope.varies or not n:
            return
        at = bisect.bisect_left(self.starts, first)
        del self.starts[at:], self.lengths[at:]
        length = first + n - self._first
        if not at or self.rope.frequencies(self.lengths[at - 1]) != self.rope.frequencies(length):
            self.starts.append(first)
            self.lengths.append(length)

    @property
    def _first(self) -> int:
        """Place of the first token of the longest row, whose length gives the frequencies."""
        return 0 if self.padding is None else int(self.padding.min())

    def _one(self, first: int, stop: int) -> Rope | None:
        """Return the RoPE of all tokens from place `first` to `stop`; None if it is not one, or has no table."""
        if not self.rope.varies:
            return self.rope
        run = bisect.bisect_right(self.starts, first) - 1
        if run + 1 < len(self.starts) and self.starts[run + 1] < stop:
            return None
        rope = self.rope.at_length(self.lengths[run])
        return None if rope.varies else rope

    def angles(self, first: int, n: int, device: torch.device, own_sinks: bool = False) -> Angles:
        """Return the angles of n tokens from place `first` on.

        own_sinks: return those of each row's own first n tokens instead, after its padding.
        """
        own_sinks = own_sinks and self.padding is not None
        rope = self._one(0, MOST) if own_sinks else self._one(first, first + n)
        if rope is not None:
            return rope.angles(0 if own_sinks else first, n, None if own_sinks else self.padding, device)
        paddings = [0] if self.padding is None else [int(p) for p in self.padding]
        rows = [self._row(p if own_sinks else first, n, p, device) for p in paddings]
        cos, sin = (torch.stack(parts) for parts in zip(*rows, strict=True))
        return self.rope.given(cos, sin)

    def _row(self, first: int, n: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one batch row, if frequencies change with the sequence length."""
        parts = []
        place = first
        while place < first + n:
            run = bisect.bisect_right(self.starts, place) - 1
            stop = self.starts[run + 1] if run + 1 < len(self.starts) else first + n
            stop = min(stop, first + n)
            parts.append(self.rope.cos_sin(place - padding, stop - place, self.lengths[run], device))
            place = stop
        cos, sin = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        return cos, sin

    def tables(self, device: torch.device, centred: bool, head_dim: int) -> list[Tensor]:
        """Return the tables kept for keys of head_dim channels.

        They are the angle table, and RoPE's step table for centred keys or its offset table for
        others.
        """
        return self.rope.tables(device, stepped=centred, int16_channels=0 if centred else head_dim)

    def of(self, where: Where, n: int, device: torch.device) -> Angles | MarkedAngles:
        """Return the angles of n tokens. where: place of the first one, or the places of all."""
        if isinstance(where, int):
            return self.angles(where, n, device)
        if not isinstance(where, Marks):
            return self.at(where)
        rope = self._one(0, MOST)
        if rope is not None:
            return MarkedAngles(rope, where, self.padding)
        return self.at(where.positions(), None if where.ends is None else where.head // where.bits.shape[1])

    def at(self, places: Tensor, rows: Tensor | None = None) -> Angles:
        """Return the angles of tokens at `places`, int [n] or [B, H, n]; of empty ones, −1, any.

        rows: batch row of each token of places [1, 1, n] in any rows, int64 [n], or None.
        """
        places = places.clamp(min=0)
        rope = self._one(0, MOST)
        if rope is None:  # the table has a row for each token, or some later tokens have another one
            given = self.angles(0, int(places.max()) + 1, places.device)
            first = given.places if rows is None or len(given.places) == 1 else given.places[rows, 0].view(1, 1, -1)
            return given._replace(places=(first + places).to(torch.int32), tokens=places.shape[-1])
        if self.padding is not None:
            places = places - self.padding.to(places)[:, None, None]
        return rope.angles_at(places.clamp(min=0))

    def clear(self) -> None:
        """Remove all tokens."""
        self.padding = None
        self.starts, self.lengths = [0], [0]

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.padding = None if self.padding is None else self.padding.cpu()

    def to(self, device: torch.device | str) -> None:
        """Do nothing: the padding stays on the CPU."""
