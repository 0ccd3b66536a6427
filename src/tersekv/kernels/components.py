"""Components of a trellis codec: how they are stored after a fit, and what a search needs of them.

Contracts and torch references. Shapes: B batch, H key-value heads, D components.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.basis import basis_components
from tersekv.kernels.registry import operator
from tersekv.kernels.trellis_search import MOST_BITS

LEAST_IMPORTANCE = 1e-30


class Components(NamedTuple):
    """Fitted components: scale and weight float16 [B, H, D], importance float32 [B, H], bits uint8 [B, H, D]."""

    scale: Tensor
    importance: Tensor
    weight: Tensor
    bits: Tensor


def _fake(variance: Tensor, weight: Tensor, falls: Tensor, total: int, factor: float) -> Components:
    half = variance.new_empty(variance.shape, dtype=torch.float16)
    bits = variance.new_empty(variance.shape, dtype=torch.uint8)
    return Components(half, variance.new_empty(variance.shape[:2], dtype=torch.float32), torch.empty_like(half), bits)


@operator(
    "(Tensor variance, Tensor weight, Tensor falls, int total, float factor) -> (Tensor, Tensor, Tensor, Tensor)", _fake
)
def fitted_components(variance: Tensor, weight: Tensor, falls: Tensor, total: int, factor: float) -> Components:
    """Return scales, error weights and bits of components.

    Scales are standard deviations, at least 1/1000 of the largest, or 1 if all are 0. The weight 1 has the importance
    of a head's largest. Bits are those of `allotted`.

    Args:
        variance, weight: float64 [B, H, D], not negative.
        falls: float64 [8], by how much each further bit reduces the squared error of N(0, 1).
        total: bits of a head.
        factor: power of two that scales are multiplied with, but in heads where float16 cannot hold the products.
    """
    scale = variance.sqrt()
    largest = scale.amax(-1, keepdim=True)
    scale = torch.where(largest > 0, torch.maximum(scale, largest * 1e-3), 1.0).clamp(1e-6, 65504).half()
    longer = factor * scale.float()
    scale = torch.where(longer.amax(-1, keepdim=True) < 65504, longer, longer / factor).half()
    most = weight.amax(-1).clamp_min(LEAST_IMPORTANCE).float()
    bits = allotted(variance * weight, total, falls)
    return Components(scale, most, (weight / most.unsqueeze(-1)).half(), bits)


def allotted(loss: Tensor, total: int, falls: Tensor) -> Tensor:
    """Allocate bits uint8 [..., D] with Σ = total per row, minimising Σ loss·error[bits].

    Each further bit reduces the error by less, so bits go to the largest reductions; of equal ones, to the first.
    """
    D = loss.shape[-1]
    gain = loss.double().cpu().clamp_min(1e-300).unsqueeze(-1) * falls
    order = gain.flatten(-2).argsort(dim=-1, descending=True, stable=True)[..., :total]
    taken = torch.zeros((*loss.shape[:-1], D * MOST_BITS), dtype=torch.uint8).scatter_(-1, order, 1)
    return taken.unflatten(-1, (D, MOST_BITS)).sum(-1).to(torch.uint8).to(loss.device)


class Searched(NamedTuple):
    """Arguments of a search: matrix float32 [B, H, D, D] by which vectors become components in units of their scales,
    weight float32 [B, H, D] of errors in these units, and their expected sum float32 [B, H].
    """

    matrix: Tensor
    weight: Tensor
    expected: Tensor


def _fake_searched(
    basis: Tensor, channels: Tensor, scale: Tensor, weight: Tensor, bits: Tensor, error: Tensor
) -> Searched:
    rows, H, D = scale.shape
    floats = [scale.new_empty(shape, dtype=torch.float32) for shape in ((rows, H, D, D), (rows, H, D), (rows, H))]
    return Searched(*floats)


@operator(
    "(Tensor basis, Tensor channels, Tensor scale, Tensor weight, Tensor bits, Tensor error) -> "
    "(Tensor, Tensor, Tensor)",
    _fake_searched,
)
def search_arguments(
    basis: Tensor, channels: Tensor, scale: Tensor, weight: Tensor, bits: Tensor, error: Tensor
) -> Searched:
    """Return what a search needs of fitted components in a basis (`kernels/basis.py`).

    Args:
        scale, weight, bits: see `Components`.
        error: float32 [9], expected squared error by bits.
    """
    rows, H, D = scale.shape
    one = torch.eye(D, device=scale.device).expand(rows, H, D, D)
    return in_units(basis_components(one, basis, channels), scale, weight, bits, error)


def in_units(inverse: Tensor, scale: Tensor, weight: Tensor, bits: Tensor, error: Tensor) -> Searched:
    """Return the same for the inverse of the rows of any basis, float32 [B, H, D, D]."""
    own = weight.float() * scale.float().square()
    return Searched(inverse / scale.float().unsqueeze(-2), own, (own * error[bits.int()]).sum(-1))
