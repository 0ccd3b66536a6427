"""A view of keys that were coded before RoPE: RoPE is applied as they are read."""

from __future__ import annotations

from torch import Tensor

from tersekv.codecs.transforms.rope import Angles, Rope
from tersekv.layouts.base import View


class Roped(View):
    """x̂ = RoPE(inner). RoPE depends on the token's position, so it stays in the token loop; angles: of the view's
    tokens."""

    kind = "roped"

    def __init__(self, view: View, rope: Rope, angles: Angles) -> None:
        self.keeps = view.keeps and angles.is_small  # type: ignore[misc]
        self.before, self.rope, self.angles = view, rope, angles
        self.format = f"roped {view.format}"  # type: ignore[misc]

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self.rope.put(self.before.decode(), *self.angles.cos_sin())
