"""Metrics of the Karhunen-Loève transform (`kernels/basis.fitted_basis`)."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels.basis import diagonal_of
from tersekv.kernels.basis import roots as roots
from tersekv.transforms.moments import Moments

SHRINK = {"corpus": 0.1, "prompt": 0.55}
"""Share of its mean that replaces a part of an estimated metric, by calibration.

Shrinkage is needed because few tokens carry most of the Fisher information, and because later
questions read other tokens than a prompt's own queries (docs/methods/trellis.md, "Without a corpus").
"""


def shrunk(moment: Tensor, share: float) -> Tensor:
    """Return a metric E[g·gᵀ] float64 [B, H, D, D], or its diagonal [B, H, D], shrunk towards its mean; a tiny one if
    it is 0.

    share: of the mean, see `SHRINK`.
    """
    diagonal = diagonal_of(moment)
    mean, one = diagonal.mean(-1, keepdim=True), torch.ones_like(diagonal)
    if moment.dim() == 4:
        mean, one = mean.unsqueeze(-1), one.diag_embed()
    return torch.where(mean > 0, (1 - share) * moment + share * mean * one, one * torch.finfo(torch.float32).tiny)


def metric_of(moments: Moments, metric: str, calibration: str, diagonal: bool) -> Tensor:
    """Return the mean metric of vectors, `shrunk`; ones [B, H, D] if they have none, or the option `metric` is none.

    diagonal: take the diagonal only.
    """
    if moments.metric is None or metric == "none":
        return torch.ones_like(moments.total)
    mean = moments.metric / max(1, moments.vectors)
    return shrunk(mean.diagonal(dim1=-2, dim2=-1) if diagonal else mean, SHRINK[calibration])


def stored(x: Tensor) -> Tensor:
    """Return x as float16, limited to its range."""
    return x.clamp(-65504, 65504).to(torch.float16)
