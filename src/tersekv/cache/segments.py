"""Tokens of a store that share a representation, as attention reads them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tersekv.layouts.base import Kept, View


class ExactSegment(NamedTuple):
    """Tokens kept as floats [B, H, T, D]; positions: of the first one, or int64 [B, T] where batch rows differ, or
    int32 [B, H, T] where heads do (−1: no token)."""

    keys: Tensor
    values: Tensor
    positions: Tensor | int


class PackedSegment(NamedTuple):
    """Tokens kept as codes; token i stands at position first + i, or at positions int32 [T], or where heads differ
    [B, H, T] (−1: no token). kept: see `Segment`; the views' own."""

    keys: View
    values: View
    first: int
    tokens: int
    positions: Tensor | None = None
    kept: Kept | None = None


def new_page(keys: View, values: View, first: int, tokens: int) -> PackedSegment:
    """A segment whose views stay the same ones from one call to the next."""
    return PackedSegment(keys, values, first, tokens, kept=Kept())


class WeightedSegment(NamedTuple):
    """Tokens that stand for others. log-weights float32 [B, H, T] are added to their scores: `numerator` where they
    count for Σ e^score·v, `denominator` where they count for Σ e^score; None where they do not. values: None without
    numerator. positions int32 [B, H, T], −1: no token."""

    keys: View
    values: View | None
    positions: Tensor
    numerator: Tensor | None
    denominator: Tensor | None
