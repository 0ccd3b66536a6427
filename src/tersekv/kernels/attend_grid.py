"""Packed tokens of the `grid` layout as attention reads them: contract and torch reference.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, D head dim.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.lanes import unpack_lanes

Axis = Literal["token", "channel"]
Side = Literal["keys", "values"]


class GridSide(NamedTuple):
    """The keys or the values of a packed segment: x̂ = factor · (scale · table[code] + offset).

    - codes: int32 [B, H, N, Lg, W, 16], see `lanes`. Keys: lanes are tokens, packed axis is
      channels. Values: lanes are channels, packed axis is tokens. The first three axes may have any
      stride, the rest is contiguous.
    - scale, offset: float16 or bfloat16. axis "token": [B, H, N, D/group, t], one per token and
      group of channels. axis "channel": [B, H, N, t/group, D], one per channel and group of tokens.
      N may have stride 0 (one range for all blocks). offset may be None (0).
    - table: the codebook, float32 [2**bits], or [B, 2**bits] if each batch row has its own.
    - integers: True if the table is 0 … 2**bits − 1, so that a kernel needs no look-up.
    - symmetric: True if table[2**bits − 1 − i] = −table[i], so that a kernel looks up half of it.
    - factor: a second scale along the other axis, float16 or bfloat16, or None (1). axis "channel"
      of keys: [B, H, N, t], one per token. axis "token" of values: [B, H, N, D], one per channel of
      a block. Other grids have none.
    """

    side: Side
    bits: int
    axis: Axis
    group: int
    block_tokens: int
    head_dim: int
    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    table: Tensor
    integers: bool = False
    factor: Tensor | None = None
    symmetric: bool = False

    def native(self, native: ModuleType) -> Any:
        """Return the grid as an object of the C++ extension, which validates the tensors and keeps
        references."""
        grid = native.grid(
            of_keys=self.side == "keys",
            bits=self.bits,
            per_token=self.axis == "token",
            group=self.group,
            block_tokens=self.block_tokens,
            head_dim=self.head_dim,
            codes=self.codes,
            scale=self.scale,
            offset=self.offset,
            table=self.table,
        )
        return grid if self.factor is None else native.scaled(grid, self.factor)

    def decode(self) -> Tensor:
        """Decode to x̂, float32 [B, H, N·t, D]."""
        return decode_grid(self)


def decode_grid(grid: GridSide) -> Tensor:
    """Decode a grid to x̂, float32 [B, H, N·t, D]."""
    t, D = grid.block_tokens, grid.head_dim
    if grid.side == "keys":
        codes = unpack_lanes(grid.codes, grid.bits, D, t).transpose(-1, -2)
    else:
        codes = unpack_lanes(grid.codes, grid.bits, t, D)
    x = _entries(grid.table, codes)  # [B, H, N, t, D]
    x = x * _per_element(grid.scale, grid)
    if grid.offset is not None:
        x = x + _per_element(grid.offset, grid)
    if grid.factor is not None:
        x = x * grid.factor.float().unsqueeze(-1 if grid.axis == "channel" else -2)
    return x.flatten(2, 3)


def _entries(table: Tensor, codes: Tensor) -> Tensor:
    if table.dim() == 1:
        return table[codes.long()]
    rows = torch.arange(len(table), device=codes.device).view(-1, *[1] * (codes.dim() - 1))
    return table[rows, codes.long()]


def _per_element(scale: Tensor, grid: GridSide) -> Tensor:
    """Broadcast a scale or offset to [B, H, N, t, D], float32."""
    if grid.axis == "token":
        return scale.float().transpose(-1, -2).repeat_interleave(grid.group, dim=-1)
    return scale.float().repeat_interleave(grid.group, dim=-2)
