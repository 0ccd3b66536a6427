"""Rotations of vectors before they are encoded: contracts and torch reference.

A random Hadamard rotation is R = H·diag(signs)·P: channels in a random order, random signs, and a
Hadamard matrix in blocks of the largest power of two that divides D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import operator


def _like_first(x: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


@operator("(Tensor x, Tensor matrix) -> Tensor", _like_first)
def rotate_dense(x: Tensor, matrix: Tensor) -> Tensor:
    """R·x, computed in float64 so that no code depends on how tokens are batched.

    Args:
        x: [..., D] of any float dtype.
        matrix: R, float32 [D, D].

    Returns:
        float32 [..., D].
    """
    return torch.matmul(x.double(), matrix.T.double()).float()


@operator(
    "(Tensor x, Tensor matrix, Tensor order, Tensor signs) -> Tensor",
    _like_first,
)
def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """R·x for a random Hadamard rotation R.

    `order` and `signs` describe the same rotation as `matrix`, for kernels that add instead of
    multiplying.

    Args:
        x: [..., D] of any float dtype.
        matrix: R, float32 [D, D]; all nonzero elements have the same absolute value.
        order: int32 [D], the channel of x that is multiplied with column d of H.
        signs: float32 [D], ±1.

    Returns:
        float32 [..., D].
    """
    return rotate_dense.reference(x, matrix)
