"""Karhunen-Loève transform in a metric.

The components are y = Uᵀ·M^½·x with the eigenvectors U of M^½·C·M^½, where M is the metric and C
the covariance. They are uncorrelated, and their squared errors add up in the metric. Row d of the
basis, M^−½·u_d, is the contribution of component d to x.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHRINK = {"corpus": 0.1, "prompt": 0.55}
"""Share of its mean that replaces a part of an estimated metric, by calibration.

Shrinkage is needed because few tokens carry most of the Fisher information, and because later
questions read other tokens than a prompt's own queries (docs/methods/trellis.md, "Without a corpus").
"""


def shrunk(moment: Tensor, share: float) -> Tensor:
    """Return a metric E[g·gᵀ] float64 [B, H, D, D], shrunk towards its mean; a tiny one if it is 0.

    share: of the mean, see `SHRINK`.
    """
    one = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.where(mean > 0, (1 - share) * moment + share * mean * one, one * torch.finfo(torch.float32).tiny)


def klt(covariance: Tensor, metric: Tensor) -> Tensor:
    """Return the basis rows float64 [..., D, D], the component with the largest variance first."""
    diagonal = metric.diagonal(dim1=-2, dim2=-1)
    if torch.equal(metric, diagonal.diag_embed()):
        root = _roots(diagonal)
        vectors = _eigenvectors(root.unsqueeze(-1) * covariance * root.unsqueeze(-2))
        return (root.reciprocal().unsqueeze(-1) * vectors).transpose(-1, -2)
    root, inverse = roots(metric)
    return (inverse @ _eigenvectors(root @ covariance @ root)).transpose(-1, -2)


def _roots(squares: Tensor) -> Tensor:
    """Return square roots of [..., D], of at least 1e-9 of the largest."""
    return squares.clamp_min(1e-9 * squares.amax(-1, keepdim=True)).sqrt()


def _eigenvectors(form: Tensor) -> Tensor:
    """Return the eigenvectors as columns, that of the largest eigenvalue first."""
    return torch.linalg.eigh(form).eigenvectors.flip(-1)


def roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return square root and inverse square root of symmetric positive matrices [..., D, D]."""
    lengths, vectors = torch.linalg.eigh(metric)
    lengths = _roots(lengths).unsqueeze(-2)
    back = vectors.transpose(-1, -2)
    return (vectors * lengths) @ back, (vectors / lengths) @ back


def within(form: Tensor, rows: Tensor) -> Tensor:
    """Return rowᵀ·form·row for each row: [..., D]."""
    return ((rows @ form) * rows).sum(-1)


def scales(variance: Tensor) -> Tensor:
    """Return standard deviations float16 [B, H, D], at least 1/1000 of the largest, or 1 if all are 0."""
    scale = variance.sqrt()
    largest = scale.amax(-1, keepdim=True)
    return stored(torch.where(largest > 0, torch.maximum(scale, largest * 1e-3), 1.0).clamp_min(1e-6))


def stored(x: Tensor) -> Tensor:
    """Return x as float16, limited to its range."""
    return x.clamp(-65504, 65504).to(torch.float16)
