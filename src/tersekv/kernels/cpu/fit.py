"""Fits on a prompt by the C++ extension. It raises `NotTaken` for inputs that it does not support."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.kernels import basis, components, cpu, rotated_mean
from tersekv.kernels import observed_loss as observed
from tersekv.kernels import weighted_sums as sums
from tersekv.kernels.basis import FittedBasis
from tersekv.kernels.components import Components, Searched
from tersekv.tensors import last_contiguous
from tersekv.threads import threads


@rotated_mean.rotated_sums.by("cpu")
def rotated_sums(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels/rotated_mean.py`."""
    along, across = (x.new_empty((*x.shape[:2], x.shape[3]), dtype=torch.float32) for _ in range(2))
    cpu.loaded().rotated_sums(last_contiguous(x), cos.contiguous(), sin.contiguous(), along, across, threads())
    return along, across


@rotated_mean.without_rotated_mean.by("cpu")
def without_rotated_mean(x: Tensor, mean: Tensor, across: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels/rotated_mean.py`."""
    out = x.new_empty(x.shape, dtype=torch.float32)
    cpu.loaded().without_rotated_mean(
        last_contiguous(x), *(t.squeeze(2).contiguous() for t in (mean, across)), cos.contiguous(), sin.contiguous(),
        out, threads(),
    )  # fmt: skip
    return out


@sums.weighted_sums.by("cpu")
def weighted_sums(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels/weighted_sums.py`: x float32 [B, H, T, D] to float64 [B, H, D] and [B, H, D, D]."""
    B, H, _, D = x.shape
    total = x.new_empty((B, H, D), dtype=torch.float64)
    squares = x.new_empty((B, H, D, D), dtype=torch.float64)
    weights = weights.float().expand(x.shape[:3]).contiguous()
    cpu.loaded().weighted_sums(
        x.contiguous().flatten(0, 1), weights.flatten(0, 1), total.flatten(0, 1),
        squares.flatten(0, 1), threads(),
    )  # fmt: skip
    return total, squares


@sums.relative_weights.by("cpu")
def relative_weights(weights: Tensor, plain: float) -> Tensor:
    """See `kernels/weighted_sums.py`."""
    out = torch.empty_like(weights, memory_format=torch.contiguous_format)
    cpu.loaded().relative_weights(weights.contiguous().flatten(0, -2), plain, out.flatten(0, -2))
    return out


@components.fitted_components.by("cpu")
def fitted_components(variance: Tensor, weight: Tensor, falls: Tensor, total: int, factor: float) -> Components:
    """See `kernels/components.py`."""
    scale, own = (variance.new_empty(variance.shape, dtype=torch.float16) for _ in range(2))
    most = variance.new_empty(variance.shape[:-1], dtype=torch.float32)
    bits = variance.new_empty(variance.shape, dtype=torch.uint8)
    cpu.loaded().fitted_components(
        variance.contiguous().flatten(0, 1), weight.contiguous().flatten(0, 1), falls, total, factor,
        *(x.flatten(0, 1) for x in (scale, most, own, bits)),
    )  # fmt: skip
    return Components(scale, most, own, bits)


@components.search_arguments.by("cpu")
def search_arguments(
    basis: Tensor, channels: Tensor, scale: Tensor, weight: Tensor, bits: Tensor, error: Tensor
) -> Searched:
    """See `kernels/components.py`."""
    rows, H, D = scale.shape
    matrix, own, expected = (error.new_empty(shape) for shape in ((rows, H, D, D), (rows, H, D), (rows, H)))
    cpu.loaded().search_arguments(
        *(x.contiguous() for x in (basis, channels, scale, weight, bits, error)), matrix, own, expected, threads()
    )
    return Searched(matrix, own, expected)


@observed.observed_loss.by("cpu")
def observed_loss(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    counts: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/observed_loss.py`."""
    (B, H, R, _), T = query.shape, keys.shape[2]
    of_keys, of_values, shares = query.new_empty((B, H, T)), query.new_empty((B, H, T)), query.new_empty((B, H, R))
    cpu.loaded().observed_loss(
        query.contiguous().flatten(0, 1), last_contiguous(keys), last_contiguous(values), _seen(mask, T),
        counts.float().contiguous(), None if sinks is None else sinks.contiguous(), scaling, softcap or 0.0,
        *(x.flatten(0, 1) for x in (of_keys, of_values, shares)), threads(),
    )  # fmt: skip
    return of_keys, of_values, shares


@observed.squared_weights.by("cpu")
def squared_weights(
    query: Tensor, keys: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """See `kernels/observed_loss.py`."""
    out = query.new_empty(keys.shape[:3])
    cpu.loaded().squared_weights(
        query.contiguous().flatten(0, 1), last_contiguous(keys), _seen(mask, keys.shape[2]),
        None if sinks is None else sinks.contiguous(), scaling, softcap or 0.0, out.flatten(0, 1), threads(),
    )  # fmt: skip
    return out


def _seen(mask: Tensor, tokens: int) -> Tensor | None:
    """Extend a mask of the last tokens to all. None if all are seen."""
    if not mask.shape[2]:
        return None
    return torch.nn.functional.pad(mask, (tokens - mask.shape[2], 0), value=True).contiguous()


@basis.fitted_basis.by("cpu")
def fitted_basis(covariance: Tensor, metric: Tensor) -> FittedBasis:
    """See `kernels/basis.py`."""
    B, H, D, _ = covariance.shape
    metric = metric.expand(B, *metric.shape[1:]).contiguous()
    channels = basis.stored_channels(basis.diagonal_of(metric).rsqrt()).contiguous()
    codes = covariance.new_empty((B * H, 3 * D**2 // 4), dtype=torch.uint8)
    variance, weight = covariance.new_empty((B, H, D)), covariance.new_empty((B, H, D))
    cpu.loaded().fitted_basis(
        covariance.contiguous().flatten(0, 1), metric.flatten(0, 1), channels.double().flatten(0, 1),
        basis.MOST_CONDITION, codes, variance.flatten(0, 1), weight.flatten(0, 1), threads(),
    )  # fmt: skip
    return FittedBasis(codes.view(B, H, -1), channels, variance, weight)
