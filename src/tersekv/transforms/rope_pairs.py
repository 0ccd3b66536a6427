"""Convert a model's RoPE function to rotations of channel pairs, which kernels apply."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Apply = Callable[[Tensor, Tensor, Tensor], Tensor]


def pairs_of(apply: Apply, D: int, unique: Tensor, equal: Tensor) -> Tensor | None:
    """Return `Rope.channels` of D channels, derived from `apply` on unit vectors.

    The result is checked with a random vector. None if `apply` is not a rotation of channel pairs.

    unique: distinct columns of cos and sin, int64.
    equal: index of each column among these, int64 [R].
    """
    columns = len(equal)
    generator = torch.Generator().manual_seed(0)
    value = torch.arange(1, columns + 1, dtype=torch.float32).expand(1, D, -1)
    unit, zero = torch.eye(D).view(1, 1, D, D), torch.zeros(1, D, columns)
    rotated = apply(unit, value, zero)[0, 0].T  # [to, from]: the column of cos, or 1 if unchanged
    across = apply(unit, zero, value)[0, 0].T - apply(unit, zero, zero)[0, 0].T
    moved = across.abs().sum(1) > 0
    partner = across.abs().argmax(1)
    entry = across.gather(1, partner[:, None])[:, 0]
    rows = torch.stack([partner, rotated.diagonal() - 1, entry.abs() - 1, entry.sign()], 1)
    rows[~moved] = torch.tensor([-1.0, 0.0, 0.0, 0.0])
    rows = rows.round().long().clamp(min=-1, max=max(D, columns) - 1)
    if bool((rows[moved, 1:3].amin(1) < 0).any() if bool(moved.any()) else False):
        return None
    rows[:, 1:3] = equal[rows[:, 1:3].clamp(min=0)]
    x, angle = torch.randn(1, 1, 3, D, generator=generator), torch.randn(1, 3, len(unique), generator=generator)
    cos, sin = angle.cos(), angle.sin()
    expected = x * torch.where(moved, cos[:, None][..., rows[:, 1]], 1.0)
    expected += torch.where(moved, rows[:, 3] * x[..., rows[:, 0]] * sin[:, None][..., rows[:, 2]], 0.0)
    if not torch.allclose(apply(x, cos[..., equal], sin[..., equal]), expected, atol=1e-5):
        return None
    return rows.to(torch.int32).contiguous()
