"""Which op attends over a packed segment straight from its bytes, and why none does."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.formats.base import View
from tersekv.ops import backends
from tersekv.ops.heads import heads_as_rows

OPS = {("grid", "grid"): "attend_grid", ("exact", "exact"): "attend_exact"}
"""The op for the formats of keys and values; where there is none, segments are decoded block by block."""


def direct(
    keys: View, values: View, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Out [B, H, R, Dv] and lse [B, H, R] of query rows [B, H, R, D], in one pass over packed bytes; None where no
    kernel reads these formats.

    Raises:
        UserError: a kernel backend is forced and cannot.
    """
    op = OPS.get((keys.format, values.format))
    if op is None:
        if backends.chosen() not in ("auto", "reference"):
            raise UserError(f"backend {backends.chosen()!r} is forced: {_no_op(keys, values)}")
        return None
    call = (query, keys.operand, values.operand, mask, scaling, softcap)
    if mask is not None and mask.dim() == 4:
        run = backends.kernel(op, query, keys.operand, values.operand, mask.flatten(0, 1), scaling, softcap)
        if run is None:
            return None
        return heads_as_rows(run, query, keys.operand, values.operand, mask, scaling, softcap)
    run = backends.kernel(op, *call)
    return run(*call) if run is not None else None


def explain(keys: View, values: View, head_dim: int) -> str:
    """Who attends over such segments: "cpu/avx512", or "reference: <why>"."""
    op = OPS.get((keys.format, values.format))
    if op is None:
        return f"reference: {_no_op(keys, values)}"
    query = torch.zeros(1, 1, 1, head_dim, dtype=torch.float32)
    return backends.explain(op, query, keys.operand, values.operand, None, 1.0, None)


def _no_op(keys: View, values: View) -> str:
    known = {name for pair in OPS for name in pair}
    lacking = sorted({keys.format, values.format} - known)
    if lacking:
        return f"no kernel reads the format {' and '.join(lacking)}"
    return f"no kernel reads {keys.format} keys with {values.format} values"
