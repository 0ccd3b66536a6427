"""Encode vectors to the packed signs of a sketch (layout `signs`): contract and torch reference.

Shapes: t tokens per block, D channels, M rows of the sketch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import operator


def pack_signs(sketched: Tensor) -> Tensor:
    """Pack sketched vectors [..., M] to uint8 [..., ceil(M/8)]; a bit is 1 where the entry is >= 0."""
    M = sketched.shape[-1]
    positive = torch.nn.functional.pad(sketched >= 0, (0, -M % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=sketched.device)
    return (positive.unflatten(-1, (-1, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def pack_blocks(sketched: Tensor) -> Tensor:
    """Pack the sketched vectors of blocks [..., t, M] to `signs` [..., ceil(M/8), t]."""
    return pack_signs(sketched).transpose(-1, -2).contiguous()


def _fake(x: Tensor, sketch: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], (sketch.shape[0] + 7) // 8, x.shape[-2]), dtype=torch.uint8)


@operator("(Tensor x, Tensor sketch) -> Tensor", _fake)
def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """Signs of S·x, computed in float64 so that no sign depends on how tokens are batched.

    Args:
        x: float32 [..., t, D]. sketch: S, float32 [M, D].

    Returns:
        uint8 [..., ceil(M/8), t], bit 1 where the product is >= 0, least significant first; bits
        past M are 0.
    """
    return pack_blocks(torch.matmul(x.double(), sketch.T.double()))
