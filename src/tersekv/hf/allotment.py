"""Rates of layers that are chosen on the prompt (`mixed` with `allot=prompt`).

Rates are shared out over all layers, so a layer cannot pack its first tokens before the last layer has
read the prompt. Until then the tokens of the call stay exact. A long prompt that is fed in chunks keeps
one chunk exact, and is allotted by that chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.ranked_tokens import UNRANKED
from tersekv.cache.segments import Observed
from tersekv.errors import UserError
from tersekv.policies.base import PROMPT_TOKENS, two_rates
from tersekv.recipe import LayerPlan
from tersekv.sizes.rate_allotment import USUAL, allotted

FEW = 2048
"""Tokens of a first call below which rates may fit the rest of a prompt badly."""

CHUNKED = (
    "the rates of {0} were chosen on the first {1} tokens, and more of the prompt follows: it loses more than if the "
    "prompt is read whole; use chunks of {2} tokens or more, for example prefill_chunk_size={2}"
)


class Call(NamedTuple):
    """A call of `CompressedLayer.append` that waits for those of the other layers."""

    keys: Tensor
    values: Tensor
    padding: Tensor | None
    observed: Observed


class AllottedLayer(Protocol):
    """Interface of a layer whose rates can be chosen on the prompt, see `CompressedLayer`."""

    cache: Any
    index: int
    plan: LayerPlan
    store: LayerStore | None
    sliding_window: int | None

    def choose_rates(self, plan: LayerPlan) -> None:
        """Use a plan with rates. Nothing is packed yet."""

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None, observed: Observed) -> None:
        """Append tokens to the store."""


class Allotment:
    """The calls of a cache that wait, and the layers that choose their rates together, by index."""

    def __init__(self, layers: Mapping[int, AllottedLayer]) -> None:
        self.layers = {i: layer for i, layer in layers.items() if _takes_part(layer)}
        self.calls: dict[int, Call] = {}
        self.few = 0  # tokens of the call that has just chosen the rates, if they were few

    def waits(self, index: int, call: Call) -> bool:
        """Keep the first call of a layer that packs tokens, and return True; False for any other call.

        The call of the last layer appends those of all, with their rates.
        """
        layer = self.layers.get(index)
        if self.few:
            few, self.few = self.few, 0
            if layer is not None and not layer.plan.policy.waits and call.keys.shape[2] >= PROMPT_TOKENS:
                warnings.warn(CHUNKED.format(layer.cache.recipe.name, few, FEW), stacklevel=5)
        if layer is None or layer.store is None or not layer.plan.policy.waits:
            return False
        if index in self.calls:  # of a pass that was interrupted
            self.calls.clear()
        if not self.calls and not layer.store.ranks(call.keys.shape[2]):
            return False
        if call.observed.importance is None:
            raise UserError(UNRANKED)
        self.calls[index] = call
        if len(self.calls) == len(self.layers):
            calls, self.calls = self.calls, {}
            tokens = call.keys.shape[2]
            plans = self._allotted(calls)
            for i, layer in self.layers.items():
                layer.choose_rates(plans[i])
                layer.append(*calls[i])
            self.few = tokens if tokens < FEW else 0
        return True

    def _allotted(self, calls: Mapping[int, Call]) -> dict[int, LayerPlan]:
        found = {i: self._of_all_heads(self.layers[i], call.observed.spread) for i, call in calls.items()}
        known = {i: spread for i, spread in found.items() if spread is not None}
        plans, shape = {i: layer.plan for i, layer in self.layers.items()}, self.layers[min(found)].cache.shape
        spreads = USUAL.repeat(max(plans) + 1, shape.kv_heads, 1)
        if len(known) == len(found):
            spreads[list(known)] = torch.stack(list(known.values()))
        return allotted(plans, spreads, (shape.key_dim, shape.value_dim))

    @staticmethod
    def _of_all_heads(layer: AllottedLayer, spread: Tensor | None) -> Tensor | None:
        """Return the spread of all heads of a layer. Other processes may have some of them."""
        if spread is None:
            return None
        heads = layer.cache.heads(len(spread), layer.index)
        whole = spread if heads is None else heads.gather(spread[None, :, :, None])[0, :, :, 0]
        return whole.float().cpu()

    def tokens(self, index: int) -> int:
        """Return the number of tokens of a layer that wait."""
        call = self.calls.get(index)
        return 0 if call is None else call.keys.shape[2]

    def drop(self, index: int) -> int:
        """Remove the call of a layer, and return its number of tokens."""
        tokens = self.tokens(index)
        self.calls.pop(index, None)
        return tokens


def _takes_part(layer: AllottedLayer) -> bool:
    """True if a layer has two rates, chosen on the prompt."""
    plan = layer.plan
    return plan.policy.waits and layer.sliding_window is None and two_rates(plan.keys, plan.values)
