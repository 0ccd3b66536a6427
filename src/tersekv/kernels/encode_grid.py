"""Encode vectors to packed codes of the `grid` layout: contract and torch reference.

Every codec of that layout has three steps: the range of each group, the nearest codebook entries
(or nearest integers), and the packing of their codes (`lanes`). `group_ranges` is the first step,
`encode_grid` the other two.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, D head dim. A *plane* is
the shape of a scale: [B, H, N, D/group, t] with axis "token", [B, H, N, t/group, D] with axis
"channel".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.attend_grid import Axis, Side
from tersekv.kernels.lanes import pack_lanes, packed_shape
from tersekv.kernels.registry import operator


class GridPlace(NamedTuple):
    """Layout of codes of `bits` bits, and the groups that share a scale: see
    `attend_grid.GridSide`."""

    side: Side
    bits: int
    axis: Axis
    group: int
    block_tokens: int

    def plane(self, T: int, D: int) -> tuple[int, int, int]:
        """Return the last three sizes of the scale of T tokens with D channels."""
        t, N = self.block_tokens, T // self.block_tokens
        return (N, D // self.group, t) if self.axis == "token" else (N, t // self.group, D)


def grouped(x: Tensor, place: GridPlace) -> Tensor:
    """Reshape x [B, H, T, D] to [plane, group]: the last axis has the elements that share a scale."""
    blocks = x.unflatten(2, (-1, place.block_tokens))
    if place.axis == "token":
        return blocks.unflatten(-1, (-1, place.group)).transpose(-3, -2)
    return blocks.unflatten(-2, (-1, place.group)).transpose(-1, -2)


def pack_groups(codes: Tensor, place: GridPlace) -> Tensor:
    """Pack codes in the shape of `grouped`, any integer dtype, to int32
    [B, H, N, lane groups, words, 16]."""
    return pack_lanes.reference(lanes_of(codes, place), place.bits)


def lanes_of(codes: Tensor, place: GridPlace) -> Tensor:
    """Reshape codes in the shape of `grouped` to one matrix [packed, lanes] per block."""
    codes = codes.transpose(-3, -2) if place.axis == "token" else codes.transpose(-1, -2)
    by_token = codes.flatten(-2) if place.axis == "token" else codes.flatten(-3, -2)  # [B, H, N, t, D]
    return by_token.transpose(-1, -2) if place.side == "keys" else by_token


def nearest_code(x: Tensor, table: Tensor) -> Tensor:
    """Index (uint8) of the nearest entry of an ascending table [2**bits], for x of any shape. Ties
    go to the lower entry."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(x.contiguous(), middles).to(torch.uint8)


PLACE = "str side, int bits, str axis, int group, int block_tokens"
"""Fields of a `GridPlace` in an operator's schema."""


def _fake_ranges(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    shape = *x.shape[:2], *GridPlace(*fields).plane(*x.shape[2:])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _fake_codes(x: Tensor, *rest: Any) -> Tensor:
    place = GridPlace(*rest[:5])
    B, H, T, D = x.shape
    D = int(D)  # torch.compile must not treat this size as dynamic: the layout fixes it
    extent = (D, place.block_tokens) if place.side == "keys" else (place.block_tokens, D)
    shape = (B, H, T // place.block_tokens, *packed_shape(place.bits, *extent))
    return x.new_empty(shape, dtype=torch.int32)


@operator(f"(Tensor x, {PLACE}) -> (Tensor, Tensor)", _fake_ranges)
def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """Return two planes, float32: the least and the largest element of each group of x.

    x: [B, H, T, D] of any float dtype.
    """
    groups = grouped(x.float(), place)
    return groups.amin(-1), groups.amax(-1)


@operator(f"(Tensor x, {PLACE}, Tensor? scale, Tensor? offset, Tensor? table) -> Tensor", _fake_codes)
def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """Quantise (x − offset)/scale and pack the codes.

    Args:
        x: [B, H, T, D] of any float dtype, T whole blocks, any strides.
        scale, offset: planes of any float dtype, or tensors that broadcast to them; None for 1 and
            0. A scale of 0 counts as 1.
        table: float32 [2**bits], ascending: the nearest entry, ties to the lower one. None: the
            nearest of the integers 0 … 2**bits − 1, ties to the even one.

    Returns:
        int32 [B, H, N, lane groups, words, 16], see `lanes`.
    """
    groups = grouped(x.float(), place)
    if offset is not None:
        groups = groups - offset.float().unsqueeze(-1)
    if scale is not None:
        step = scale.float().unsqueeze(-1)
        groups = groups / torch.where(step == 0, 1.0, step)
    if table is None:
        codes = groups.round().clamp_(0, 2**place.bits - 1).to(torch.uint8)
    else:
        codes = nearest_code(groups, table)
    return pack_groups(codes, place)
