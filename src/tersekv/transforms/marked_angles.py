"""RoPE angles of tokens whose positions are the bits of a mask."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.marks import Marks
from tersekv.transforms.angles import Angles
from tersekv.transforms.rope import Rope


class MarkedAngles:
    """Angles of marked tokens, with the attributes of `Angles`. Positions are listed only on demand.

    rope: RoPE of the layer, which must not vary.
    padding: int64 [B], subtracted from the positions of each batch row, or None.
    """

    is_given = consecutive = False

    def __init__(self, rope: Rope, marks: Marks, padding: Tensor | None) -> None:
        self.rope, self.marks, self.padding = rope, marks, padding
        self.tokens = marks.tokens
        self.is_small = marks.bits.is_cpu  # kernels for other devices read listed positions

    @property
    def table(self) -> Tensor:
        """Table of `rope_table.py` on the device of the marks."""
        return self.rope.table(self.marks.bits.device)

    @property
    def places(self) -> Tensor:
        """Position of each token, int32 [B, H, T]."""
        return self.listed().places

    def listed(self) -> Angles:
        """Return the same with listed positions."""
        first: int | Tensor = 0
        if self.padding is not None:
            rows = self.padding.to(self.marks.bits.device)
            ends = self.marks.ends
            first = rows[:, None, None] if ends is None else rows[self.marks.head // ends.shape[1]].view(1, 1, -1)
        return self.rope.angles_at((self.marks.positions() - first).clamp(min=0))

    def native(self, native: ModuleType, D: int, stepped: bool) -> tuple[Any, Tensor]:
        """Return the native RoPE of D channels, and the place of the first bit, int32 [1 or B, 1, 1]."""
        first = torch.tensor([self.marks.first]) - (0 if self.padding is None else self.padding)
        return self.rope.native(native, self.table, D, stepped), first.to(torch.int32).view(-1, 1, 1)

    def rows(self) -> tuple[Tensor, Tensor]:
        """See `Angles.rows`."""
        return self.listed().rows()

    def by_channel(self, D: int) -> tuple[Tensor, Tensor]:
        """See `Angles.by_channel`."""
        return self.listed().by_channel(D)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """See `Angles.cos_sin`."""
        return self.listed().cos_sin()
