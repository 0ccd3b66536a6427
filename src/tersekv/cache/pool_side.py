"""One side of a pool: packed blocks, whose heads hold different tokens, and loose exact tokens."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tersekv.cache.heads import Heads
from tersekv.cache.pages import PageSizes
from tersekv.cache.side import SideStore
from tersekv.cache.state import Spec
from tersekv.cache.states import exact_tokens, pool_side
from tersekv.codecs import Codec


class PoolSide(SideStore):
    """One side; `loose` [B, H, L, D]: exact tokens that do not fill a block yet, and sinks."""

    STATE: ClassVar[Spec] = {"sinks": exact_tokens, "loose": exact_tokens}
    RULES = (*SideStore.RULES, pool_side)

    def __init__(self, codec: Codec, like: Tensor, dtype: torch.dtype, sizes: PageSizes, heads: Heads | None) -> None:
        super().__init__(dataclasses.replace(codec, per_head=True), like, dtype, sizes, 0, None, heads)
        self.loose = self.sinks

    def to(self, device: torch.device | str) -> None:
        """Move everything."""
        super().to(device)
        self.loose = self.loose.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        super().select(rows)
        self.loose = self.loose.index_select(0, rows)
