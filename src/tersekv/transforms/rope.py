"""Rotary position embeddings (RoFormer, arXiv 2104.09864), taken off keys before coding and put back on reading.

Before RoPE a key's channels have ranges and outliers that stay where they are over the sequence; RoPE mixes pairs of
channels by an angle that depends on the position, and spreads them (KVQuant, arXiv 2401.18079, §3.2). RoPE is
orthogonal up to a factor, so it can be taken off the key that a cache receives. The model's own code says how (all its
rope types, partial rotation, layouts); whatever it says, taking off and putting back cancel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CosSin = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rope:
    """RoPE of one layer.

    cos_sin(positions int64 [n], length): cos and sin [n, R] as the model makes them for a sequence that has `length`
    tokens so far (it matters where frequencies change with the length: dynamic NTK, LongRoPE). apply(x, cos, sin):
    rotates x [B, H, n, D] by cos and sin [1 or B, n, R], linear in them. varies: whether `length` matters.
    """

    def __init__(self, cos_sin: CosSin, apply: Apply, varies: bool = False) -> None:
        self._cos_sin, self._apply, self.varies = cos_sin, apply, varies
        self._table: tuple[Tensor, Tensor] | None = None

    def cos_sin(self, first: int, n: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [n, R] of positions first to first + n; negative positions (padding) are allowed."""
        if self.varies or first < 0:
            cos, sin = self._made(torch.arange(first, first + n), length)
        else:
            cos, sin = (x[first : first + n] for x in self._up_to(first + n))
        return cos.to(device), sin.to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [..., R] of any positions ≥ 0, as for a short sequence."""
        cos, sin = self._up_to(int(positions.max()) + 1 if positions.numel() else 1)
        return cos.to(positions.device)[positions], sin.to(positions.device)[positions]

    def _up_to(self, n: int) -> tuple[Tensor, Tensor]:
        """A table of at least n positions, kept: all layers with this RoPE share it."""
        if self._table is None or len(self._table[0]) < n:
            capacity = -(-n // 1024) * 1024
            self._table = self._made(torch.arange(capacity), 1)
        return self._table

    def _made(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self._cos_sin(positions, length)
            return cos.float().cpu(), sin.float().cpu()

    def tables(self) -> list[Tensor]:
        """What is kept."""
        return list(self._table or ())

    def put(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated x [B, H, n, D]; cos and sin [1 or B, n, R], or [B, H, n, R] where heads differ."""
        if cos.dim() == 3:
            return self._apply(x, cos, sin)
        turned = self._apply(x.flatten(0, 1).unsqueeze(1), cos.flatten(0, 1), sin.flatten(0, 1))
        return turned.squeeze(1).unflatten(0, x.shape[:2])

    def take_off(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Inverse of `put`, also where cos and sin carry a factor (YaRN)."""
        squared = cos * cos + sin * sin
        return self.put(x, cos / squared, -sin / squared)

    def pull_back(self, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The gradient with respect to what `put` was given, from that with respect to what it returned: its transpose,
        which differs from its inverse where cos and sin carry a factor (YaRN)."""
        return self.put(gradient, cos, -sin)


def standard_rope(R: int, theta: float = 10_000.0) -> Rope:
    """Llama's RoPE on the first R channels: frequencies θ^(−2i/R), channel i paired with i + R/2."""
    frequency = theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def cos_sin(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * torch.cat([frequency, frequency])
        return angle.cos(), angle.sin()

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., :R].chunk(2, dim=-1)
        turned = x[..., :R] * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
        return torch.cat([turned, x[..., R:]], dim=-1)

    return Rope(cos_sin, apply)
