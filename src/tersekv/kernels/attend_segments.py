"""Attention of one query over several packed and unpacked segments at once: contract and torch
reference.

Shapes: B batch, H key-value heads, R query rows per key-value head, D head dim of keys, Dv of
values. Segments hold disjoint tokens; their lengths may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tersekv.kernels.attend_packed import Operand, attend_packed
from tersekv.kernels.registry import operator
from tersekv.kernels.softmax import merge_segments


class Segment(NamedTuple):
    """Keys and values of the same T tokens, each in any layout. mask: see `attend_packed`. is_page:
    True if many steps read the segment, so that a backend prepares it once. ends: see `PackedPages`."""

    keys: Operand
    values: Operand
    mask: Tensor | None = None
    is_page: bool = False
    ends: Tensor | None = None


@operator()
def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ over the tokens of all segments, with its log-sum-exp; at least
    one segment.

    Query, scaling, softcap, returns: see `attend_packed`; out float32 [B, H, R, Dv] and lse float32
    [B, H, R].
    """
    results = [attend_packed.reference(query, *segment[:3], scaling, softcap) for segment in segments]
    return merge_segments.reference([out for out, _ in results], [lse for _, lse in results])
