"""Report which kernels compute attention directly on packed tokens."""

from __future__ import annotations

import torch

from tersekv.kernels import backends
from tersekv.layouts.base import View


def explain(keys: View, values: View, head_dim: int) -> str:
    """Return the name of the kernels that read these views, such as "cpu/avx512".

    "reference: <reason>" if no kernel can read them.
    """
    query = torch.zeros(1, 1, 1, head_dim, dtype=torch.float32)
    return backends.explain(query, keys.operand, values.operand)
