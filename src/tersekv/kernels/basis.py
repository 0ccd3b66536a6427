"""A linear basis quantised to 6 bits per entry: fitted, and products with it. Contract and torch reference.

Row d of a basis is the vector of component d: x = Σ_d y_d·row_d. A row is stored up to a factor, as
channels·(entries − 32) with entries of 6 bits. `basis` uint8 [1 or B, H, 3·D²/4] holds the rows one
after the other, four entries in three bytes, low bits first. `channels` is float16 [1 or B, H, D].

The Karhunen-Loève transform in a metric has the components y = Uᵀ·M^½·x with the eigenvectors U of
M^½·C·M^½, where M is the metric and C the covariance. They are uncorrelated, and their squared errors
add up in the metric. Row d of the basis, M^−½·u_d, is the contribution of component d to x.

Shapes: B batch, H key-value heads, R vectors per head, D channels and components.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.registry import like_first, operator

LARGEST = 31
"""Largest absolute value of an entry without its offset."""

MOST_CONDITION = 1e3
"""Largest condition number of a basis of one channel, in the Frobenius norm. It grows with √D."""


class QuantisedRows(NamedTuple):
    """Rows of a basis after rounding: entries float64 [B, H, D, D] without their offset, channels float16 [B, H, D],
    and the inverse of the entries, float64 [B, H, D, D].
    """

    entries: Tensor
    channels: Tensor
    inverse: Tensor

    def rows(self) -> Tensor:
        """Return the rows, float64 [B, H, D, D]."""
        return self.entries * self.channels.double().unsqueeze(-2)

    def dual(self) -> Tensor:
        """Return the rows whose products with a vector are its components, float64 [B, H, D, D]."""
        return (self.inverse / self.channels.double().unsqueeze(-1)).transpose(-1, -2)

    def packed(self) -> dict[str, Tensor]:
        """Return `basis` and `channels`."""
        codes = (self.entries + LARGEST + 1).to(torch.int32).flatten(-2)
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, (-1, 4))
        words = (codes << torch.arange(0, 24, 6, device=codes.device)).sum(-1)
        split = words.unsqueeze(-1) >> torch.arange(0, 24, 8, device=codes.device) & 255
        return {"basis": split.flatten(-2).to(torch.uint8), "channels": self.channels}


def quantised_rows(rows: Tensor, channels: Tensor, one_factor: bool = False) -> QuantisedRows:
    """Quantise rows float64 [B, H, D, D]. Each row is stored up to a factor of its own, or all of a head up to
    `one_factor`. The components' scales absorb factors, because encoding inverts the stored rows."""
    channels = stored_channels(channels)
    plain = rows / channels.double().unsqueeze(-2)
    largest = plain.abs().amax((-2, -1) if one_factor else -1, keepdim=True).clamp_min(1e-300)
    entries = (plain / largest * LARGEST).round()
    D = entries.shape[-1]
    inverse, singular = inverses(entries)
    condition = torch.linalg.vector_norm(entries, dim=(-2, -1)) * torch.linalg.vector_norm(inverse, dim=(-2, -1))
    lost = (singular | ~(condition <= MOST_CONDITION * D**0.5))[..., None, None]
    one = torch.eye(D, dtype=entries.dtype, device=entries.device)
    # where rounding made rows dependent, use the identity
    return QuantisedRows(torch.where(lost, LARGEST * one, entries), channels, torch.where(lost, one / LARGEST, inverse))


def stored_channels(channels: Tensor) -> Tensor:
    """Return factors [..., D] of channels as float16, relative to the largest."""
    return (channels / channels.amax(-1, keepdim=True)).clamp_min(1e-4).to(torch.float16)


class FittedBasis(NamedTuple):
    """A basis (see the top of the module) with, per component, its variance and the squared length of its row in the
    metric, float64 [B, H, D]."""

    basis: Tensor
    channels: Tensor
    variance: Tensor
    weight: Tensor


def _fake_fitted(covariance: Tensor, metric: Tensor) -> FittedBasis:
    B, H, D, _ = covariance.shape
    basis, channels = ((B, H, 3 * -(-(D**2) // 4)), torch.uint8), ((B, H, D), torch.float16)
    of_component = (B, H, D), torch.float64
    return FittedBasis(*(covariance.new_empty(of, dtype=t) for of, t in (basis, channels, of_component, of_component)))


@operator("(Tensor covariance, Tensor metric) -> (Tensor, Tensor, Tensor, Tensor)", _fake_fitted)
def fitted_basis(covariance: Tensor, metric: Tensor) -> FittedBasis:
    """Find the basis of the Karhunen-Loève transform, the component with the largest variance first.

    Rows are quantised before variances and weights are computed, so that both are those of the stored rows.

    Args:
        covariance: float64 [B, H, D, D].
        metric: float64 [B, H, D, D], positive definite, or its diagonal [B, H, D].
    """
    kept = quantised_rows(_klt(covariance, metric), diagonal_of(metric).rsqrt())
    variance = within(covariance, kept.dual()).clamp_min(0)
    return FittedBasis(**kept.packed(), variance=variance, weight=within(metric, kept.rows()))


def diagonal_of(metric: Tensor) -> Tensor:
    """Return the diagonal [B, H, D] of a metric [B, H, D, D], or of one that has only that."""
    return metric if metric.dim() == 3 else metric.diagonal(dim1=-2, dim2=-1)


def _klt(covariance: Tensor, metric: Tensor) -> Tensor:
    """Return the rows before rounding, float64 [B, H, D, D]."""
    if metric.dim() == 3:
        root = _roots(metric)
        vectors = _eigenvectors(root.unsqueeze(-1) * covariance * root.unsqueeze(-2))
        return (vectors / root.unsqueeze(-1)).transpose(-1, -2)
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
    """Return rowᵀ·form·row for each of the rows [..., D, D]: [..., D]. form: [..., D, D], or its diagonal [..., D]."""
    return ((rows @ form if form.dim() == rows.dim() else rows * form.unsqueeze(-2)) * rows).sum(-1)


def inverses(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses of matrices [..., D, D], and bool [...], True if there is none.

    A CPU inverts one at a time. After `torch.set_num_threads`, which `one_thread` calls too, torch fails to factorise
    several matrices of more than 150 channels in one call (pytorch/pytorch#142815).
    """
    each = [torch.linalg.inv_ex(one) for one in (rows.reshape(-1, *rows.shape[-2:]) if rows.is_cpu else rows[None])]
    inverse, info = (torch.stack(of) for of in zip(*each, strict=True))
    return inverse.view(rows.shape), info.view(rows.shape[:-2]) != 0


def packed_basis(rows: Tensor, channels: Tensor, one_factor: bool = False) -> dict[str, Tensor]:
    """Return `basis` and `channels` of `quantised_rows`."""
    return quantised_rows(rows, channels, one_factor).packed()


def unpacked_basis(basis: Tensor, channels: Tensor) -> Tensor:
    """Inverse of `packed_basis`: the quantised rows, float64 [B, H, D, D]."""
    D = channels.shape[-1]
    split = basis.unflatten(-1, (-1, 3)).to(torch.int32) << torch.arange(0, 24, 8, device=basis.device)
    codes = split.sum(-1).unsqueeze(-1) >> torch.arange(0, 24, 6, device=basis.device) & 63
    entries = codes.flatten(-2)[..., : D * D].unflatten(-1, (D, D)) - LARGEST - 1
    return entries.double() * channels.double().unsqueeze(-2)


@operator(
    "(Tensor x, Tensor basis, Tensor channels, bool combine) -> Tensor",
    like_first,
)
def basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> Tensor:
    """Products with the rows of a basis.

    Args:
        x: float32 [B, H, R, D].
        combine: True: Σ_d x_d·row_d. False: x·row_d for each d.

    Returns:
        float32 [B, H, R, D].
    """
    rows = unpacked_basis(basis, channels).float()
    return x @ (rows if combine else rows.transpose(-1, -2))


@operator("(Tensor x, Tensor basis, Tensor channels) -> Tensor", like_first)
def basis_components(x: Tensor, basis: Tensor, channels: Tensor) -> Tensor:
    """Components y of vectors in a basis, x = Σ_d y_d·row_d, computed in float64.

    Args:
        x: float32 [B, H, R, D].

    Returns:
        float32 [B, H, R, D].
    """
    return (x.double() @ inverses(unpacked_basis(basis, channels))[0]).float()
