"""Layout `grid`: b-bit codes, a codebook, and a scale (and offset) per group.

x̂ = factor · (scale · table[code] + offset). Int, KIVI, NormalFloat, NUQ, Lloyd-Max and KVarN codecs
share this layout. They differ in the codebook and in how codes are chosen. A block of t tokens of
one head (t = 32 unless a group is longer) has up to four tensors:

    codes   int32 [lane groups, words, 16], drawn bit by bit in `kernels/lanes.py`
              keys:   lanes are the t tokens,   the packed axis is the D channels
              values: lanes are the D channels, the packed axis is the t tokens
    scale   16-bit float; axis "token":   [D/group, t], one per token and `group` neighbouring channels
            axis "channel": [t/group, D], one per channel and `group` neighbouring tokens
    offset  like scale, absent when the codec is symmetric
    factor  16-bit float, a second scale along the other axis, absent in most codecs: [t] for keys
            with axis "channel", [D] for values with axis "token"

Example: keys, t = 32, D = 64, 4 bits. 2 lane groups × 8 words × 16 lanes × 4 bytes = 1,024 bytes =
4 bits per element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels.attend_grid import Axis, GridSide, decode_grid
from tersekv.kernels.encode_grid import GridPlace, grouped, lanes_of
from tersekv.kernels.encode_grid import nearest_code as nearest_code
from tersekv.kernels.lanes import packed_shape
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec, Side, View
from tersekv.tensors import type_name

SCALE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Grid:
    """Layout of one side of a layer.

    group: elements per scale. 0 means one scale for all channels of a token (axis "token"), or one
        per channel for all tokens of the sequence (axis "channel"). The latter is stored outside
        the blocks, see `GridView`.
    tile: tokens of a block with a factor per token (keys per channel) or per channel (values per
        token), a multiple of 32; 0 for a layout without factors.
    """

    bits: int
    side: Side
    axis: Axis
    group: int
    affine: bool
    head_dim: int
    scale_dtype: torch.dtype = torch.float16
    tile: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise UserError(f"bits={self.bits} is out of range; a grid holds 1 to 8 bits per element")
        if self.axis == "token" and self.group and self.head_dim % self.group:
            raise UserError(
                f"group={self.group} does not divide the head dim {self.head_dim}; choose a divisor of "
                f"{self.head_dim}, or group=0 for one scale per token"
            )
        if self.axis == "channel" and self.group and BLOCK_TOKENS % self.group and self.group % BLOCK_TOKENS:
            raise UserError(
                f"group={self.group} tokens does not fit blocks of {BLOCK_TOKENS}; choose 1, 2, 4, 8, 16, 32 or a "
                "multiple of 32"
            )
        if self.tile and (self.axis == "channel") != (self.side == "keys"):
            raise ValueError("only keys per channel and values per token have factors")

    @property
    def block_tokens(self) -> int:
        """Number of tokens that are packed together."""
        if self.tile:
            return self.tile
        return max(BLOCK_TOKENS, self.group) if self.axis == "channel" else BLOCK_TOKENS

    @property
    def group_size(self) -> int:
        """Number of elements per scale within a block."""
        return self.group or (self.head_dim if self.axis == "token" else self.block_tokens)

    @property
    def place(self) -> GridPlace:
        """The layout as the kernels' argument."""
        return GridPlace(self.side, self.bits, self.axis, self.group_size, self.block_tokens)

    def scale_shape(self) -> tuple[int, int]:
        """Return the shape of one block's scales."""
        if self.axis == "token":
            return (self.head_dim // self.group_size, self.block_tokens)
        return (self.block_tokens // self.group_size, self.head_dim)

    def layout(self) -> Layout:
        """Return the packed tensors. A scale for the whole sequence is not one of them."""
        return _layout(self)

    def groups(self, x: Tensor) -> Tensor:
        """Group x [B, H, T, D] with the elements that share a scale on the last axis.

        axis "token": [B, H, N, D/group, t, group]; axis "channel": [B, H, N, t/group, D, group].
        Reducing the last axis gives the shape of the scales.
        """
        return grouped(x, self.place)

    def pack(self, codes: Tensor, scale: Tensor | None, offset: Tensor | None) -> PackedTensors:
        """Pack codes in the shape of `groups`.

        scale, offset: in their stored shape, or None if stored elsewhere.
        """
        return _planes(backends.pack_lanes(lanes_of(codes, self.place), self.bits), scale, offset)

    def encode(
        self, x: Tensor, table: Tensor | None, scale: Tensor | None, offset: Tensor | None, whole: bool = False
    ) -> PackedTensors:
        """Encode x float32 [B, H, T, D] as indices of the nearest codebook entries.

        table: the codebook, or None for integers.
        scale, offset: in their stored shape.
        whole: True if they are stored once for all blocks.
        """
        codes = backends.encode_grid(x, self.place, scale, offset, table)
        return _planes(codes, None, None) if whole else _planes(codes, scale, offset)


@functools.lru_cache(maxsize=256)  # asked for each layer and call
def _layout(grid: Grid) -> Layout:
    head_dim, tokens = grid.head_dim, grid.block_tokens
    extent = (head_dim, tokens) if grid.side == "keys" else (tokens, head_dim)
    planes = {"codes": PlaneSpec(packed_shape(grid.bits, *extent), torch.int32, "codes")}
    if grid.axis == "token" or grid.group:
        names = ("scale", "offset") if grid.affine else ("scale",)
        planes |= {n: PlaneSpec(grid.scale_shape(), grid.scale_dtype, "scales and norms") for n in names}
    if grid.tile:
        factors = grid.tile if grid.axis == "channel" else head_dim
        planes["factor"] = PlaneSpec((factors,), grid.scale_dtype, "scales and norms")
    return Layout(tokens, planes)


def _planes(codes: Tensor, scale: Tensor | None, offset: Tensor | None) -> PackedTensors:
    planes = {"codes": codes, "scale": scale, "offset": offset}
    return {name: plane for name, plane in planes.items() if plane is not None}


class GridView(View):
    """Packed tensors and codebook of a `Grid` segment.

    scale, offset: given if they are stored once for all blocks, [B, H, D].
    integers: True if the codebook is 0 … 2^b − 1.
    symmetric: True if its entries from the last to the first are those from the first to the last
        times −1.
    """

    format = "grid"

    def __init__(
        self,
        grid: Grid,
        planes: PackedTensors,
        table: Tensor,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        integers: bool = False,
        symmetric: bool = False,
    ) -> None:
        N = planes["codes"].shape[2]
        self.side = GridSide(
            side=grid.side,
            bits=grid.bits,
            axis=grid.axis,
            group=grid.group_size,
            block_tokens=grid.block_tokens,
            head_dim=grid.head_dim,
            codes=planes["codes"],
            scale=planes["scale"] if scale is None else _for_all_blocks(scale, N),
            offset=planes.get("offset") if offset is None else _for_all_blocks(offset, N),
            table=table,
            integers=integers,
            factor=planes.get("factor"),
            symmetric=symmetric,
        )

    @property
    def operand(self) -> GridSide:
        """The packed tensors as the kernels' argument."""
        return self.side

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        return decode_grid(self.side)


def _for_all_blocks(scale: Tensor, N: int) -> Tensor:
    """Expand [B, H, D] to [B, H, N, 1, D] without copying."""
    B, H, D = scale.shape
    return scale.reshape(B, H, 1, 1, D).expand(B, H, N, 1, D)


def per_row(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, table: Tensor) -> Tensor:
    """Apply fn(x, table) with one codebook [n], or row by row with the codebooks [B, n]."""
    if table.dim() == 1 or len(table) == 1:
        return fn(x, table.flatten())
    return torch.stack([fn(row, own) for row, own in zip(x, table, strict=True)])


def round_scale(x: Tensor, dtype: torch.dtype, what: str, remedy: str = "use the codec's option scales=bf16") -> Tensor:
    """Convert a scale, offset or radius to its stored 16-bit dtype.

    what: name of the value in the error message.

    Raises:
        UserError: a value is too large for the dtype. `remedy` ends the message.
    """
    stored = x.to(dtype)
    if not math.isfinite(float(stored.abs().amax())) if stored.numel() else False:
        raise UserError(
            f"{what} of {float(x.abs().amax()):.4g} exceeds {type_name(dtype)}'s {torch.finfo(dtype).max:.5g}; {remedy}"
        )
    return stored
