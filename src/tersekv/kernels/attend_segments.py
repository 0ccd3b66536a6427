"""Attention of one query over several segments at once, packed ones and exact ones: contract and torch reference.

Shapes: B batch, H key-value heads, R query rows per key-value head, D head dim of keys, Dv of values. Segments hold
disjoint tokens, each a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tersekv.kernels.attend_packed import Operand, attend_packed
from tersekv.kernels.softmax import merge_segments


class Kept:
    """What a backend made of one segment's operands, by its name: for a segment that is attended to again and again.
    It may hold addresses, so that copies begin with nothing, also those that are pickled."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


class Segment(NamedTuple):
    """Keys and values of the same T tokens, any format of each; mask: see `attend_packed`. kept: of these operands,
    where they are the same ones at each call."""

    keys: Operand
    values: Operand
    mask: Tensor | None = None
    kept: Kept | None = None


def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ over the tokens of all segments, at least one, with its log-sum-exp.

    Query, scaling, softcap, returns: see `attend_packed`; out float32 [B, H, R, Dv] and lse float32 [B, H, R].
    """
    results = [attend_packed(query, *segment[:3], scaling, softcap) for segment in segments]
    return merge_segments([out for out, _ in results], [lse for _, lse in results])
