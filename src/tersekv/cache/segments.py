"""Segments, which attention reads from a store, and the sums over queries that it gives to a store.

A segment has tokens with the same representation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.attend import PackedPages, Where
from tersekv.layouts.base import View
from tersekv.transforms.moments import TokenLoss

Losses = tuple[TokenLoss | None, TokenLoss | None]
"""Losses by errors in the keys and in the values of all tokens so far."""

STEPS = 32
"""The spread of attention is known at shares of the tokens that are multiples of 1/STEPS."""


class Observed(NamedTuple):
    """Sums over queries, which a store needs before it appends tokens. None where it needs none.

    votes: float32 [B, H, held + n], attention that observed queries gave to held and new tokens.
    importance: float32 [B, H, T], of the tokens in the recent window and then of the new ones.
    spread: float32 [H, STEPS + 1], how attention spreads over ranked tokens (`attention/spread.py`).
    """

    votes: Tensor | None = None
    importance: Tensor | None = None
    losses: Losses | None = None
    spread: Tensor | None = None


UNSEEN = Observed()
"""Nothing was observed."""


class ExactSegment(NamedTuple):
    """Exact tokens [B, H, T, D].

    positions: position of the first token; or int64 [B, T] if batch rows differ; or int32 [B, H, T]
        if heads differ, −1 for no token.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | int


class PackedSegment(NamedTuple):
    """Packed tokens.

    where: position of the first one, and the others follow; or int32 [T]; or if heads differ int32
        [B, H, T], −1 for no token, or marks.
    correction: float32 [B, H, D], see `softmax.score_bias`, or None. Segments of one rate share it.
    ends: see `PackedPages`.
    """

    keys: View
    values: View
    where: Where
    tokens: int
    correction: Tensor | None = None
    ends: Tensor | None = None


def latent_key(latents: Tensor, rotated: Tensor) -> Tensor:
    """Return the keys of latent attention [B, 1, T, R + D]: latents [B, 1, T, R], then rotated keys [B, 1, T, D].

    Nothing is copied if both are channels of one tensor, as those of `ExactTokens` are.
    """
    R, both = latents.shape[-1], (latents, rotated)
    if latents.data_ptr() + R * latents.itemsize == rotated.data_ptr() and latents.stride() == rotated.stride():
        first, second = (x.untyped_storage().data_ptr() for x in both)
        if first == second:
            return latents.as_strided((*latents.shape[:-1], R + rotated.shape[-1]), latents.stride())
    return torch.cat(both, dim=-1)


def packed_pages_of(
    pages: Sequence[PackedSegment],
    heads: int,
    shared: int = 0,
    padded: Callable[[], PackedPages | None] | None = None,
) -> PackedPages | None:
    """Return the pages of a layer with `heads` KV heads as attention reads them, or None.

    shared, padded: see `PackedPages`.
    """
    if not pages:
        return None
    return PackedPages(
        [page.keys.inner.operand for page in pages],
        [page.values.inner.operand for page in pages],
        [page.where for page in pages],
        [page.tokens for page in pages],
        (pages[0].keys.linear, pages[0].values.linear),
        heads,
        [page.correction for page in pages],
        shared,
        [page.ends for page in pages],
        padded,
    )


class WeightedSegment(NamedTuple):
    """Sampled tokens whose log-weights float32 [B, H, T] are added to their scores.

    numerator: log-weights in Σ e^score·v, or None if the tokens do not count there.
    denominator: log-weights in Σ e^score, or None if the tokens do not count there.
    values: None if there is no numerator.
    positions: int32 [B, H, T], −1 for no token.
    """

    keys: View
    values: View | None
    positions: Tensor
    numerator: Tensor | None
    denominator: Tensor | None
