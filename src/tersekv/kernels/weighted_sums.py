"""Weights of tokens, and sums over weighted vectors: contracts and torch references."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import like_first, operator

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


@operator("(Tensor weights, float plain) -> Tensor", like_first)
def relative_weights(weights: Tensor, plain: float) -> Tensor:
    """Return weights float [B, H, T] with mean 1 in each head, of which a share is the same for all tokens.

    Args:
        weights: not negative. Where all are 0, or their mean is not finite, all become 1.
        plain: the share.
    """
    mean = weights.mean(-1, keepdim=True, dtype=torch.float64)
    relative = weights / mean * (1 - plain) + plain
    return torch.where((mean > 0) & (mean < torch.inf), relative, 1.0).to(weights.dtype)
