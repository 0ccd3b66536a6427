"""A view of keys that were coded before RoPE: it is put back as they are read."""

from __future__ import annotations

from torch import Tensor

from tersekv.formats.base import View
from tersekv.transforms.rope import Rope


class Roped(View):
    """x̂ = RoPE(inner). RoPE depends on the token, so it stays in the token loop; cos and sin are
    [1 or B, T, R], or [B, H, T, R]; shared: they are parts of a table that others hold. consecutive: a token's position
    is the one before it plus one, and all have the same frequencies, so that a kernel need not read all of them."""

    kind = "roped"

    def __init__(
        self, view: View, rope: Rope, cos: Tensor, sin: Tensor, shared: bool = False, consecutive: bool = False
    ) -> None:
        self.keeps = view.keeps and shared  # type: ignore[misc]
        self.before, self.rope, self.cos, self.sin, self.consecutive = view, rope, cos, sin, consecutive
        self.format = f"roped {view.format}"  # type: ignore[misc]

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self.rope.put(self.before.decode(), self.cos, self.sin)
