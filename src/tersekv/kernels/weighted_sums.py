"""Sums over weighted vectors: contract and torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import operator

PART_TOKENS = 256
"""Vectors whose products are summed in float32."""


def _fake(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    B, H, _, D = x.shape
    return x.new_empty((B, H, D), dtype=torch.float64), x.new_empty((B, H, D, D), dtype=torch.float64)


@operator("(Tensor x, Tensor weights) -> (Tensor, Tensor)", _fake)
def weighted_sums(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over T vectors, in float32 over parts of them.

    Args:
        x: float32 [B, H, T, D]. weights: float32 [B, H, T].

    Returns:
        Σ_t w_t·x_t, float64 [B, H, D], and Σ_t w_t·x_t·x_tᵀ, float64 [B, H, D, D].
    """
    B, H, _, D = x.shape
    scaled, squares = x * weights.unsqueeze(-1), x.new_zeros((B, H, D, D), dtype=torch.float64)
    total = x.new_zeros((B, H, D), dtype=torch.float64)
    for part, plain in zip(scaled.split(PART_TOKENS, 2), x.split(PART_TOKENS, 2), strict=True):
        total += part.sum(2)
        squares += part.transpose(-1, -2) @ plain
    return total, squares
