"""Which op attends over a packed segment straight from its bytes, and why none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersekv.formats.base import View
from tersekv.formats.exact import ExactView
from tersekv.formats.grid import GridView
from tersekv.ops import backends


def direct(
    keys: View, values: View, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """Out [B, H, R, Dv] and lse [B, H, R] of query rows [B, H, R, D], in one pass over packed bytes; None where no
    kernel reads these formats, so that they are decoded block by block."""
    op = _op(keys, values)
    if op is None:
        return None
    call = (query, *op[1], mask, scaling, softcap)
    run: Callable[..., Any] | None = backends.kernel(op[0], *call)
    return run(*call) if run is not None else None


def explain(keys: View, values: View, head_dim: int) -> str:
    """Who attends over such segments: "cpu/avx512", or "reference: <why>"."""
    op = _op(keys, values)
    if op is None:
        names = sorted({type(view).__name__.removesuffix("View").lower() for view in (keys, values)})
        return f"reference: no kernel reads {' with '.join(names)}"
    query = torch.zeros(1, 1, 1, head_dim)
    return backends.explain(op[0], query, *op[1], None, 1.0, None)


def _op(keys: View, values: View) -> tuple[str, tuple[Any, Any]] | None:
    """The op for two formats, and how they are handed to it."""
    if isinstance(keys, GridView) and isinstance(values, GridView):
        return "attend_grid", (keys.side, values.side)
    if isinstance(keys, ExactView) and isinstance(values, ExactView):
        return "attend_exact", (keys.x, values.x)
    return None
