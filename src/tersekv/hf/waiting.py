"""Calls of layers that wait for those of other layers, so that they are packed together.

Rates that are chosen on the prompt (`mixed` with `allot=prompt`) are shared out over all layers, so a layer cannot pack
its first tokens before the last layer has read the prompt. Until then the tokens of the call stay exact. A long prompt
that is fed in chunks keeps one chunk exact, and is allotted by that chunk.

A short prompt waits for those of the next layers, because one call for all takes less time than one for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.ranked_tokens import UNRANKED
from tersekv.cache.segments import Observed
from tersekv.cache.together import Call, encode_calls, kind_of
from tersekv.errors import UserError
from tersekv.policies.base import PROMPT_TOKENS, two_rates
from tersekv.recipe import LayerPlan
from tersekv.sizes.rate_allotment import USUAL, allotted

FEW = 2048
"""Tokens of a first call below which rates may fit the rest of a prompt badly."""

MOST_WAITING, MOST_WAITING_ON_GPU = 1 << 21, 1 << 24
"""Elements (`_size`) of all calls that wait for each other. Until they are packed their tokens stay exact."""

CHUNKED = (
    "the rates of {0} were chosen on the first {1} tokens, and more of the prompt follows: it loses more than if the "
    "prompt is read whole; use chunks of {2} tokens or more, for example prefill_chunk_size={2}"
)


class WaitingLayer(Protocol):
    """Interface of a layer whose calls can wait, see `CompressedLayer`."""

    cache: Any
    index: int
    plan: LayerPlan
    store: LayerStore | None
    sliding_window: int | None

    def choose_rates(self, plan: LayerPlan) -> None:
        """Use a plan with rates. Nothing is packed yet."""

    def add(self, keys: Tensor, values: Tensor, padding: Tensor | None, observed: Observed) -> None:
        """Append tokens to the store."""


class Waiting:
    """The calls that wait to be packed with others of their kind, or to get rates, by the layer's index.

    layers: of the cache, by index. rated: those that choose their rates together.
    """

    def __init__(self, layers: Mapping[int, WaitingLayer]) -> None:
        self.layers = layers
        self.rated = {i: layer for i, layer in layers.items() if _takes_part(layer)}
        self.calls: dict[int, Call] = {}
        self.rating: dict[int, Call] = {}  # those that wait for rates
        self.groups: list[tuple[Any, list[int]]] = []  # layers of the other calls, by their kind (`kind_of`)
        self.size = 0  # of these calls, see `_size`
        self.few = 0  # tokens of the call that has just chosen the rates, if they were few

    def take(self, index: int, call: Call) -> bool:
        """Return True if a call waits, or was packed together with others; False if the layer appends its tokens."""
        return (bool(self.rated) and self._chooses_rates(index, call)) or self._joins(index, call)

    def _joins(self, index: int, call: Call) -> bool:
        layer, size = self.layers.get(index), _size(call)
        # outside a forward pass the other layers may not follow, and a step appends before it attends
        if layer is None or layer.store is None or not layer.cache.progress.handles or call.keys.shape[2] == 1:
            return False
        if index in self.calls:
            self.finish()
        most = MOST_WAITING_ON_GPU if call.keys.is_cuda else MOST_WAITING
        kind = kind_of(layer.store, call) if 2 * size <= most else None
        if kind is not None:
            self.calls[index], self.size = call, self.size + size
            group = next((group for known, group in self.groups if known == kind), None)
            self.groups.append((kind, [index])) if group is None else group.append(index)
        if index == max(self.layers) or self.size + size > most:
            self.finish()
        return kind is not None

    def finish(self) -> None:
        """Pack the calls that wait to be packed together."""
        groups, self.groups, self.size = [group for _, group in self.groups], [], 0
        calls = {i: self.calls.pop(i) for group in groups for i in group}
        try:
            for group in groups:
                stores = [store for i in group if (store := self.layers[i].store) is not None]
                if len(stores) > 1:
                    calls |= zip(group, encode_calls(stores, [calls[i] for i in group]), strict=True)
            for i in sorted(calls):
                self.layers[i].add(*calls[i])
        finally:  # what was encoded is of these calls alone
            for store in filter(None, (self.layers[i].store for i in calls)):
                store.forget_ahead()

    def _chooses_rates(self, index: int, call: Call) -> bool:
        """Keep the first call of a layer that packs tokens, and return True; False for any other call.

        With that of the last layer all get their rates, and wait to be packed together.
        """
        layer = self.rated.get(index)
        if self.few:
            few, self.few = self.few, 0
            if layer is not None and not layer.plan.policy.waits and call.keys.shape[2] >= PROMPT_TOKENS:
                warnings.warn(CHUNKED.format(layer.cache.recipe.name, few, FEW), stacklevel=6)
        if layer is None or layer.store is None or not layer.plan.policy.waits:
            return False
        if index in self.rating:  # of a pass that was interrupted
            self.rating.clear()
        if not self.rating and not layer.store.ranks(call.keys.shape[2]):
            return False
        if call.observed.importance is None:
            raise UserError(UNRANKED)
        self.rating[index] = call
        if len(self.rating) == len(self.rated):
            calls, self.rating = self.rating, {}
            tokens = call.keys.shape[2]
            plans = self._allotted(calls)
            for i, layer in self.rated.items():
                layer.choose_rates(plans[i])
                if not self._joins(i, calls[i]):
                    layer.add(*calls[i])
            self.few = tokens if tokens < FEW else 0
        return True

    def _allotted(self, calls: Mapping[int, Call]) -> dict[int, LayerPlan]:
        found = {i: self._of_all_heads(self.rated[i], call.observed.spread) for i, call in calls.items()}
        known = {i: spread for i, spread in found.items() if spread is not None}
        plans, shape = {i: layer.plan for i, layer in self.rated.items()}, self.rated[min(found)].cache.shape
        spreads = USUAL.repeat(max(plans) + 1, shape.kv_heads, 1)
        if len(known) == len(found):
            spreads[list(known)] = torch.stack(list(known.values()))
        return allotted(plans, spreads, (shape.key_dim, shape.value_dim))

    @staticmethod
    def _of_all_heads(layer: WaitingLayer, spread: Tensor | None) -> Tensor | None:
        """Return the spread of all heads of a layer. Other processes may have some of them."""
        if spread is None:
            return None
        heads = layer.cache.heads(len(spread), layer.index)
        whole = spread if heads is None else heads.gather(spread[None, :, :, None])[0, :, :, 0]
        return whole.float().cpu()

    def tokens(self, index: int) -> int:
        """Return the number of tokens of a layer that wait."""
        call = self.calls.get(index) or self.rating.get(index)
        return 0 if call is None else call.keys.shape[2]

    def drop(self, index: int) -> int:
        """Remove the call of a layer, and return its number of tokens."""
        tokens = self.tokens(index)
        self.rating.pop(index, None)
        if (call := self.calls.pop(index, None)) is not None:
            self.size -= _size(call)
            self.groups = [(kind, [i for i in group if i != index]) for kind, group in self.groups]
        return tokens


def _size(call: Call) -> int:
    """Return the elements of a side, at least those of two covariances."""
    return max(x[:, :, 0].numel() * max(x.shape[2], 2 * x.shape[3]) for x in call[:2])


def _takes_part(layer: WaitingLayer) -> bool:
    """True if a layer has two rates, chosen on the prompt."""
    plan = layer.plan
    return plan.policy.waits and layer.sliding_window is None and two_rates(plan.keys, plan.values)
