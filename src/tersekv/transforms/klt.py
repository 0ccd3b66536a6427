"""The Karhunen-Loève transform in a metric, and how its basis is held in few bits.

Components that are uncorrelated, and whose squared errors add up in the metric, are y = Uᵀ·M^½·x with the eigenvectors
U of M^½·C·M^½; row d of the basis, M^−½·u_d, is what component d adds to x.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHRINK = 0.1
"""Share of its own mean in a metric that was estimated: few tokens carry most of the Fisher information."""

LARGEST = 31
"""Of an entry of a stored basis, of 6 bits."""


def packed_basis(rows: Tensor, channels: Tensor) -> dict[str, Tensor]:
    """Rows float64 [B, H, D, D] as `basis` uint8 [B, H, 3·D²/4], row after row, four entries of 6 bits in three bytes,
    low bits first, and `channels` float16 [B, H, D]: row d is a multiple of channels·(entries − 32). A component's
    scale takes the multiple in; encoding inverts what is stored."""
    channels = (channels / channels.amax(-1, keepdim=True)).clamp_min(1e-4).to(torch.float16)
    plain = rows / channels.double().unsqueeze(-2)
    entries = (plain / plain.abs().amax(-1, keepdim=True).clamp_min(1e-300) * LARGEST).round()
    span = torch.linalg.svdvals(entries)
    lost = span[..., -1] < 1e-3 * span[..., 0]
    own = torch.eye(entries.shape[-1], dtype=entries.dtype, device=entries.device) * LARGEST
    entries = torch.where(lost[..., None, None], own, entries)  # rounding has made rows dependent: the channels' own
    codes = (entries + LARGEST + 1).to(torch.int32).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, (-1, 4))
    words = (codes << torch.arange(0, 24, 6, device=codes.device)).sum(-1)
    split = words.unsqueeze(-1) >> torch.arange(0, 24, 8, device=codes.device) & 255
    return {"basis": split.flatten(-2).to(torch.uint8), "channels": channels}


def unpacked_basis(basis: Tensor, channels: Tensor) -> Tensor:
    """Rows float64 [B, H, D, D] of what `packed_basis` gave."""
    D = channels.shape[-1]
    split = basis.unflatten(-1, (-1, 3)).to(torch.int32) << torch.arange(0, 24, 8, device=basis.device)
    codes = split.sum(-1).unsqueeze(-1) >> torch.arange(0, 24, 6, device=basis.device) & 63
    entries = codes.flatten(-2)[..., : D * D].unflatten(-1, (D, D)) - LARGEST - 1
    return entries.double() * channels.double().unsqueeze(-2)


def fisher_metric(gradient: Tensor, diagonal: bool) -> Tensor:
    """E[g·gᵀ] float64 [B, H, D, D] of gradients [B, H, T, D], shrunk towards its mean; diagonal: without the rest."""
    g = gradient.double()
    moment = g.transpose(-1, -2) @ g / g.shape[2]
    if diagonal:
        moment = moment.diagonal(dim1=-2, dim2=-1).diag_embed()
    one = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.where(mean > 0, (1 - SHRINK) * moment + SHRINK * mean * one, one * torch.finfo(torch.float32).tiny)


def klt(covariance: Tensor, metric: Tensor) -> Tensor:
    """Rows float64 [..., D, D] of the basis, the component with the largest variance first."""
    root, inverse = _roots(metric)
    lengths, vectors = torch.linalg.eigh(root @ covariance @ root)
    order = lengths.argsort(-1, descending=True)
    vectors = vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors))
    return (inverse @ vectors).transpose(-1, -2)


def within(form: Tensor, rows: Tensor) -> Tensor:
    """rowᵀ·form·row for each row: [..., D]."""
    return (rows @ form @ rows.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1)


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and inverse square root of symmetric positive matrices [..., D, D]."""
    lengths, vectors = torch.linalg.eigh(metric)
    lengths = lengths.clamp_min(1e-9 * lengths.amax(-1, keepdim=True)).sqrt().unsqueeze(-2)
    back = vectors.transpose(-1, -2)
    return (vectors * lengths) @ back, (vectors / lengths) @ back
