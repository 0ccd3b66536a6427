"""One vector per head, rotated by RoPE to each token: its sums, and keys without it. Contract and torch reference.

A channel of a rotated vector is a·cos + b·sin of its token, with a and b of the head.

Shapes: B batch, H key-value heads, T tokens, D channels. Cosines and sines are float32 [1 or B, 1 or H, T, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import operator


def _fake_sums(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    B, H, _, D = x.shape
    return x.new_empty((B, H, D), dtype=torch.float32), x.new_empty((B, H, D), dtype=torch.float32)


@operator("(Tensor x, Tensor cos, Tensor sin) -> (Tensor, Tensor)", _fake_sums)
def rotated_sums(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_t x_t·cos_t and Σ_t x_t·sin_t of x [B, H, T, D], float32 or, if x is, float64 [B, H, D]."""
    return (x * cos).sum(2), (x * sin).sum(2)


def _fake_without(x: Tensor, mean: Tensor, across: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))


@operator("(Tensor x, Tensor mean, Tensor across, Tensor cos, Tensor sin) -> Tensor", _fake_without)
def without_rotated_mean(x: Tensor, mean: Tensor, across: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x − mean·cos − across·sin, float32 [B, H, T, D], or float64 of such x.

    Args:
        x: float [B, H, T, D]. mean, across: float32 [1 or B, H, 1, D].
    """
    rotated = torch.mul(mean, cos).addcmul_(across, sin)
    in_place = rotated.shape == x.shape and not x.requires_grad  # so that only one copy is held
    return torch.sub(x, rotated, out=rotated) if in_place and x.dtype != torch.float64 else x - rotated
