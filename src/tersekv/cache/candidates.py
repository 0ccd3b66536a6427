"""Tokens that compete for a place in a layer whose policy evicts some, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.tier import WEIGHT
from tersekv.policies.base import Candidates, Selection

VOTES = "votes"


class Leaving(NamedTuple):
    """Tokens that leave the window.

    tokens: of keys and of values, [B, H, m, D].
    positions: int32 [B, H, m].
    votes: float32 [B, H, T + m], of the T slots of chosen tokens and of these tokens.
    """

    tokens: list[Tensor]
    positions: Tensor
    votes: Tensor


class Ranks:
    """Candidates, and the policy's weights of them. These are computed at first use."""

    def __init__(self, candidates: Candidates, policy: Selection) -> None:
        self.candidates, self._policy = candidates, policy

    @cached_property
    def _weights(self) -> Tensor:
        return self._policy.ranks(self.candidates)

    def of(self, always: Tensor) -> Tensor:
        """Return weights, float32 [B, H, T], with ∞ for tokens in the mask. The higher, the more important."""
        return self._weights.masked_fill(always, torch.inf)


@dataclass(frozen=True)
class Share:
    """Parts of masks and numbers [B, H, n] that belong to the slots of one tier, to loose tokens, or to leaving ones.

    alive: stays in the cache. stays: at the codec's rate. demoted: at the lower rate from now on.
    """

    alive: Tensor
    stays: Tensor
    demoted: Tensor
    weights: Tensor
    votes: Tensor

    def fields(self) -> dict[str, Tensor]:
        """Return the numbers that are kept for each slot."""
        return {VOTES: self.votes, WEIGHT: self.weights}


def best(weights: Tensor, alive: Tensor, room: Tensor) -> Tensor:
    """Return the mask of the `room` [B, H] tokens with the highest weight among `alive` [B, H, T].

    If weights are equal, the earlier token is chosen.
    """
    order = weights.masked_fill(~alive, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, places)
    return alive & (place < room[..., None])
