"""Scales of rows and columns of a matrix that make their standard deviations equal.

This is Sinkhorn's algorithm for standard deviations (KVarN, arXiv 2606.03458). A step divides all
columns, then all rows, by their standard deviations. Of all steps, and of none, the scales with the
smallest imbalance are kept: the largest standard deviation over the smallest, of columns plus of
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_PER_STEP = 1e3
"""Largest factor, and the inverse of the smallest, by which a step divides."""

WIDEST = 1e3
"""Largest scale, and the inverse of the smallest, relative to the matrix's root mean square."""


def column_scales(x: Tensor, steps: int) -> Tensor:
    """Return the scales of the columns of matrices x [..., rows, columns]: float64 [..., columns].

    The sums are in float64, so that scales do not depend on how matrices are batched.
    """
    x = x.double()
    rms = x.square().mean((-2, -1), keepdim=True).sqrt()
    x = x / torch.where(rms == 0, 1.0, rms)
    squares = x.square()
    rows = x.new_ones((*x.shape[:-1], 1))
    columns = x.new_ones((*x.shape[:-2], 1, x.shape[-1]))
    spread = _row_spread(x.mT, squares.mT, rows.mT).mT / columns
    best, least = columns, _imbalance(_row_spread(x, squares, columns) / rows, spread)
    for _ in range(steps):
        columns = (columns * _within(spread, MOST_PER_STEP)).clamp(1 / WIDEST, WIDEST)
        across = _row_spread(x, squares, columns)
        rows = (rows * _within(across / rows, MOST_PER_STEP)).clamp(1 / WIDEST, WIDEST)
        spread = _row_spread(x.mT, squares.mT, rows.mT).mT / columns
        imbalance = _imbalance(across / rows, spread)
        better = imbalance <= least
        best, least = torch.where(better, columns, best), torch.where(better, imbalance, least)
    return (best * torch.where(rms == 0, 1.0, rms)).squeeze(-2)


def _row_spread(x: Tensor, squares: Tensor, columns: Tensor) -> Tensor:
    """Return the standard deviation of each row of x/columns, [..., rows, 1]."""
    n, weights = x.shape[-1], columns.reciprocal().mT
    mean = x @ weights / n
    return ((squares @ weights.square() - n * mean.square()) / max(1, n - 1)).clamp_min(0).sqrt()


def _within(x: Tensor, most: float) -> Tensor:
    return x.clamp(1 / most, most)


def _imbalance(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the sum of both ratios of standard deviations, [..., 1, 1]."""
    ratios = (x.amax((-2, -1), keepdim=True) / x.amin((-2, -1), keepdim=True).clamp_min(1e-8) for x in (rows, columns))
    return sum(ratios, torch.zeros((), dtype=rows.dtype, device=rows.device))
