"""Layout `exact`: unquantised tokens in 16- or 32-bit floats.

x   [t, D] per block of t = 32 tokens: token-major rows, D floats each
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec, View

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def exact_layout(head_dim: int, dtype: torch.dtype) -> Layout:
    """Return the layout with its only tensor `x`."""
    return Layout(BLOCK_TOKENS, {"x": PlaneSpec((BLOCK_TOKENS, head_dim), dtype, "codes", token_axis=0)})


class ExactView(View):
    """An unpacked segment: `x` [B, H, N, t, D]."""

    format = "exact"

    def __init__(self, planes: PackedTensors) -> None:
        self.x = planes["x"].flatten(2, 3)

    @property
    def operand(self) -> Tensor:
        """Tokens [B, H, T, D]."""
        return self.x

    def decode(self) -> Tensor:
        """Return x as float32 [B, H, T, D]."""
        return self.x.to(torch.float32)

    def floats(self, dtype: torch.dtype) -> Tensor:
        return self.x.to(dtype)
