"""Which op attends over packed segments straight from its bytes, and why none does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.attend_segments import Segment
from tersekv.layouts.base import View


def direct(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Out [B, H, R, Dv] and lse [B, H, R] of query rows [B, H, R, D] over all segments, in one pass over their bytes;
    None where no kernel reads them.

    Raises:
        UserError: a kernel backend is forced and cannot.
    """
    run = backends.kernel("attend_segments", query, segments, scaling, softcap)
    return run(query, segments, scaling, softcap) if run is not None else None


def explain(keys: View, values: View, head_dim: int) -> str:
    """Who attends over such segments: "cpu/avx512", or "reference: <why>"."""
    query = torch.zeros(1, 1, 1, head_dim, dtype=torch.float32)
    return backends.explain("attend_packed", query, keys.operand, values.operand, None, 1.0, None)
