"""Which kernels attend over packed tokens straight from their bytes, and why none does."""

from __future__ import annotations

import torch

from tersekv.kernels import backends
from tersekv.layouts.base import View


def explain(keys: View, values: View, head_dim: int) -> str:
    """Who attends over such tokens: "cpu/avx512", or "reference: <why>"."""
    query = torch.zeros(1, 1, 1, head_dim, dtype=torch.float32)
    return backends.explain(query, keys.operand, values.operand)
