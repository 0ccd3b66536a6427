"""Masks that differ between heads, for ops whose masks are [B, q, T]: heads become batch rows, by views alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tersekv.ops.attend_grid import GridSide

Attended = tuple[Tensor, Tensor]


def heads_as_rows(
    run: Callable[..., Attended], query: Tensor, keys: Any, values: Any, mask: Tensor, *rest: Any
) -> Attended:
    """run(query, keys, values, mask, *rest) for query [B, H, R, D], keys and values as tensors [B, H, T, D] or grid
    segments, mask bool [B, H, q, T]: out [B, H, R, Dv] and lse [B, H, R]."""
    shape = query.shape[:2]
    out, lse = run(_rows(query), _side(keys), _side(values), mask.flatten(0, 1), *rest)
    return out.squeeze(1).unflatten(0, shape), lse.squeeze(1).unflatten(0, shape)


def _side(side: Any) -> Any:
    if not isinstance(side, GridSide):
        return _rows(side)
    offset = None if side.offset is None else _rows(side.offset)
    return side._replace(codes=_rows(side.codes), scale=_rows(side.scale), offset=offset)


def _rows(x: Tensor) -> Tensor:
    """[B, H, ...] -> [B·H, 1, ...]"""
    return x.flatten(0, 1).unsqueeze(1)
