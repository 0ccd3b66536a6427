"""Tokens of a store that share a representation, as attention reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tersekv.kernels.attend import PackedPages
from tersekv.layouts.base import View


class ExactSegment(NamedTuple):
    """Tokens kept as floats [B, H, T, D]; positions: of the first one, or int64 [B, T] where batch rows differ, or
    int32 [B, H, T] where heads do (−1: no token)."""

    keys: Tensor
    values: Tensor
    positions: Tensor | int


class PackedSegment(NamedTuple):
    """Tokens kept as codes; token i stands at position first + i, or at positions int32 [T], or where heads differ
    [B, H, T] (−1: no token)."""

    keys: View
    values: View
    first: int
    tokens: int
    positions: Tensor | None = None

    @property
    def where(self) -> Tensor | int:
        """Position of the first token, or positions."""
        return self.first if self.positions is None else self.positions


def packed_pages_of(pages: Sequence[PackedSegment], heads: int) -> PackedPages | None:
    """Pages of one layer with `heads` key-value heads as attention reads them; None where there are none."""
    if not pages:
        return None
    return PackedPages(
        [page.keys.inner.operand for page in pages],
        [page.values.inner.operand for page in pages],
        [page.where for page in pages],
        [page.tokens for page in pages],
        (pages[0].keys.linear, pages[0].values.linear),
        heads,
    )


class WeightedSegment(NamedTuple):
    """Tokens that stand for others. log-weights float32 [B, H, T] are added to their scores: `numerator` where they
    count for Σ e^score·v, `denominator` where they count for Σ e^score; None where they do not. values: None without
    numerator. positions int32 [B, H, T], −1: no token."""

    keys: View
    values: View | None
    positions: Tensor
    numerator: Tensor | None
    denominator: Tensor | None
