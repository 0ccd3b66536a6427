"""Rotations of vectors that are about to be coded: contracts and torch reference.

A random Hadamard rotation is R = H·diag(signs)·P: channels in a random order, random signs, and a Hadamard matrix in
blocks of the largest power of two that divides D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.registry import like_first, operator


@operator("(Tensor x, Tensor matrix) -> Tensor", like_first)
def rotate_dense(x: Tensor, matrix: Tensor) -> Tensor:
    """R·x, taken in float64: no code hangs on how tokens are batched.

    Args:
        x: float32 [..., D].
        matrix: R, float32 [D, D].

    Returns:
        float32 [..., D].
    """
    return torch.matmul(x.double(), matrix.T.double()).float()


@operator(
    "(Tensor x, Tensor matrix, Tensor order, Tensor signs) -> Tensor",
    like_first,
)
def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """The same of a random Hadamard rotation.

    Args:
        x: float32 [..., D].
        matrix: R, float32 [D, D]; all of its elements that are not 0 have one absolute value.
        order: int32 [D], the channel of x that column d of H meets. signs: float32 [D], ±1. They say the same as the
            matrix, to those who add instead of multiplying.

    Returns:
        float32 [..., D].
    """
    return rotate_dense.reference(x, matrix)
