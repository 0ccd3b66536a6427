"""Bases over the layers of a group: few components have most of the energy of all its layers.

The vectors of a token in the layers of a group, one after the other, are one vector x of n numbers.
Its components are y = A·(x − μ), and x̂ = μ + Rᵀ·ŷ. The rows of R are a Karhunen-Loève transform
(`transforms/klt.py`) in a metric M, which has a block per layer and KV head. Squared errors of y
are errors of x in that metric, so one step for all components is reverse water-filling: components
below the water level round to 0 and cost nothing.

Rows are int8 with a scale each. A = (R·M·Rᵀ)⁻¹·R·M gives the components with the least error in the
metric for the rows as stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.tensors import TensorSpec
from tersekv.transforms.klt import roots as roots_of
from tersekv.transforms.klt import shrunk

NUMBERS = 3072
"""Numbers of a group's vectors, at most, in bases of a corpus. SmolLM2: 15 layers save .24 bits of 1.2
against six layers, with as many as 34,000 tokens to fit on."""

TOKENS_PER_NUMBER = 8
"""Tokens of the corpus for each number of a group's vectors, at least; with fewer, groups are smaller."""

OWN_NUMBERS = 1152
"""The same in bases of a prompt, which the file holds."""

TOKENS_PER_FEATURE = 32
"""Tokens for each component that predicts the weight of a token."""

PRIOR = 0.1
"""Share of the metric's mean in a metric, see `klt.shrunk`."""


class Sums(NamedTuple):
    """Sums over the vectors x [T, n] of a group: their number, Σ x, Σ x·xᵀ, float64."""

    vectors: int
    total: Tensor
    squares: Tensor

    @staticmethod
    def of(x: Tensor) -> Sums:
        """Return the sums over x float32 [T, n]."""
        return Sums(len(x), x.sum(0, dtype=torch.float64), (x.T @ x).double())

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the vectors of both."""
        return Sums(self.vectors + other.vectors, self.total + other.total, self.squares + other.squares)

    def covariance(self) -> Tensor:
        """Return E[(x − μ)·(x − μ)ᵀ]."""
        mean = self.total / self.vectors
        return self.squares / self.vectors - mean[:, None] * mean

    def block(self, first: int, last: int) -> Sums:
        """Return the sums over numbers first to last of each vector."""
        return Sums(self.vectors, self.total[first:last], self.squares[first:last, first:last])


class Basis(NamedTuple):
    """Basis of one side of a group. Component d adds scale_d·channels·rows_d to x.

    mean: float16 [n]. rows: int8 [k, n]. scale: float32 [k], of the rows. channels: float32 [n], so
    that rounding rows costs alike in all channels.
    variance: float32 [k], of the components. metric: float32 [n / D, D, D]. weight: float32 [n], log2 of
    a token's weight is (x − μ)·weight. Only writing needs these.
    """

    mean: Tensor
    rows: Tensor
    scale: Tensor
    channels: Tensor
    variance: Tensor
    metric: Tensor
    weight: Tensor

    def head(self, k: int) -> Basis:
        """Return the basis with the first k components."""
        return self._replace(rows=self.rows[:k], scale=self.scale[:k], variance=self.variance[:k])

    def analysis(self) -> Tensor:
        """Return A float32 [k, n]."""
        rows = self.rows.float() * self.scale[:, None] * self.channels
        if len(rows) == rows.shape[1]:  # if the rows span the space, A = R⁻ᵀ whatever the metric is
            inverse, info = torch.linalg.inv_ex(rows)
            if not info:
                return inverse.T
        D = self.metric.shape[-1]
        measured = torch.einsum("kbd,bde->kbe", rows.unflatten(1, (-1, D)), self.metric).flatten(1)
        return torch.linalg.solve(measured @ rows.T, measured)

    def components(self, x: Tensor, analysis: Tensor) -> Tensor:
        """Return y float32 [k, T] of x [T, n]. analysis: see there."""
        return analysis @ (x.float() - self.mean.float()).T

    def weights(self, x: Tensor) -> Tensor:
        """Return log2 of the weights of the tokens of x [T, n], float32 [T]."""
        return (x.float() - self.mean.float()) @ self.weight

    @property
    def nbytes(self) -> int:
        """Bytes of what reading needs."""
        return sum(tensor.nbytes for tensor in self[:4])


def specs(n: int, k: int | None = None) -> dict[str, TensorSpec]:
    """Return the tensors of a basis that a file with it has, for vectors of n numbers."""
    single, low = torch.float32, torch.finfo(torch.float32).tiny
    return {
        "mean": TensorSpec(torch.float16, (n,)),
        "rows": TensorSpec(torch.int8, (k, n)),
        "scale": TensorSpec(single, (k,), low=low),
        "channels": TensorSpec(single, (n,), low=low),
    }


def fitted(sums: Sums, metric: Tensor, weighed: Tensor | None = None) -> Basis:
    """Return the basis for sums over a group's vectors.

    metric: float64 [n / D, D, D], E[g·gᵀ] of the loss's gradients g, or any other.
    weighed: float64 [n], E[(x − μ)·w] of the tokens' log2 weights w; without it they all weigh alike.
    """
    metric = shrunk(metric[None], PRIOR)[0]
    root, inverse = (torch.block_diag(*blocks) for blocks in roots_of(metric))
    lengths, vectors = torch.linalg.eigh(root @ sums.covariance() @ root)
    variance, order = lengths.clamp_min(0).sort(descending=True)
    weight = torch.zeros_like(variance)
    if weighed is not None:  # least squares on the first components, which are uncorrelated
        used = order[: 1 + sums.vectors // TOKENS_PER_FEATURE]
        used = used[lengths[used] > 1e-9 * variance[0]]
        analysis = vectors[:, used].T @ root
        weight = analysis.T @ (analysis @ weighed / lengths[used])
    channels = metric.diagonal(dim1=1, dim2=2).flatten().rsqrt()
    rows = (inverse @ vectors[:, order]).T / channels
    scale = rows.abs().amax(1).clamp_min(1e-30) / 127
    kept = (sums.total / sums.vectors).clamp(-65504, 65504).half()
    return Basis(
        kept,
        (rows / scale[:, None]).round().to(torch.int8),
        scale.float(),
        channels.float(),
        variance.float(),
        metric.float(),
        weight.float(),
    )


def plain_metric(sums: Sums, layers: int, D: int) -> Tensor:
    """Return a metric in which the errors of each of a group's layers are relative to its energy."""
    energy = sums.covariance().diagonal().reshape(layers, -1).mean(1).clamp_min(1e-30)
    blocks = len(sums.total) // D // layers
    return (
        torch.eye(D, dtype=torch.float64).repeat(layers * blocks, 1, 1)
        / energy.repeat_interleave(blocks)[:, None, None]
    )


def groups_of(windows: Sequence[int | None], size: int) -> list[list[int]]:
    """Return the places of consecutive layers with the same sliding window, by group: at most `size`, in equal shares.

    Layers with different windows hold different tokens.
    """
    by_window: dict[int | None, list[int]] = {}
    for place, window in enumerate(windows):
        by_window.setdefault(window, []).append(place)
    groups = []
    for places in by_window.values():
        n = -(-len(places) // size)
        cuts = [i * len(places) // n for i in range(n + 1)]
        groups += [places[first:last] for first, last in itertools.pairwise(cuts)]
    return groups
