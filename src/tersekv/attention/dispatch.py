"""Which op attends over a packed segment straight from its bytes, and why none does."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.formats.base import View
from tersekv.ops import backends


def direct(
    keys: View, values: View, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Out [B, H, R, Dv] and lse [B, H, R] of query rows [B, H, R, D], in one pass over packed bytes; None where no
    kernel reads these views.

    Raises:
        UserError: a kernel backend is forced and cannot.
    """
    call = (query, keys.operand, values.operand, mask, scaling, softcap)
    run = backends.kernel("attend_packed", *call)
    return run(*call) if run is not None else None


def explain(keys: View, values: View, head_dim: int) -> str:
    """Who attends over such segments: "cpu/avx512", or "reference: <why>"."""
    query = torch.zeros(1, 1, 1, head_dim, dtype=torch.float32)
    return backends.explain("attend_packed", query, keys.operand, values.operand, None, 1.0, None)
