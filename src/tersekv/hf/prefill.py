"""Caches filled from one exact prefill, and the bytes that transformers' own cache holds.

A prompt's own attention is exact with every recipe, so its keys and values are computed once per prompt and put into
as many caches as there are recipes, with the attention that policies see who observe queries. The bytes are those of a
prefill of its own; where `compress` reads the prompt through another function than the model does (softcaps, attention
sinks), they are so up to float32 rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tersekv.attention.observe import observe
from tersekv.attention.read import AttentionCall
from tersekv.cache.footprint import Footprint
from tersekv.hf.cache import CompressedCache, CompressedLayer
from tersekv.hf.calibration import Calibration, calibration_for
from tersekv.hf.capture import LayerTokens, capture, capture_calls
from tersekv.hf.config import attention_layers, text_config


def new_cache(
    model: PreTrainedModel, recipe: str | None, calibration: Calibration | None = None
) -> DynamicCache | CompressedCache:
    """An empty cache; recipe None is transformers' own. A calibration not given comes from the default place."""
    if recipe is None:
        return DynamicCache(config=model.config)
    return CompressedCache(model.config, recipe, calibration or calibration_for(model, recipe))


def shares_prefill(model: PreTrainedModel) -> bool:
    """Whether caches can be filled with captured tokens: all of the model's state is keys and values."""
    return all(kind.type != "linear" for kind in attention_layers(text_config(model.config)))


class Prefill:
    """The keys and values of the last prompt that was asked for, and its queries once a recipe observes them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._ids: Tensor | None = None
        self._with_calls = False
        self._captured: list[tuple[LayerTokens, AttentionCall | None]] = []

    def fill(self, cache: DynamicCache | CompressedCache, ids: Tensor) -> None:
        """Put the tokens ids [1, T] into an empty cache."""
        observes = isinstance(cache, CompressedCache) and cache.recipe.policy().observes
        if self._ids is None or not torch.equal(self._ids, ids) or (observes and not self._with_calls):
            self._with_calls |= observes  # from now on, since the next prompt will be asked for by as many recipes
            self._captured = []  # freed before the next ones are made
            self._ids, self._captured = ids, self._capture(ids)
        kinds = attention_layers(text_config(self.model.config))
        places = [index for index, kind in enumerate(kinds) if kind.type == "attention"]
        for index, ((keys, values), call) in zip(places, self._captured, strict=True):
            layer: Any = cache.layers[index]
            if isinstance(layer, CompressedLayer):
                layer.lazy_initialization(keys, values)
                assert layer.store is not None
                votes = observe(layer.store, keys, call) if observes and call is not None else None
                layer.append(keys, values, None, votes)
            else:
                layer.update(keys, values)

    def _capture(self, ids: Tensor) -> list[tuple[LayerTokens, AttentionCall | None]]:
        if self._with_calls:
            return list(capture_calls(self.model, ids))
        return [(tokens, None) for tokens in capture(self.model, ids)]


def held_by(cache: Any) -> Footprint:
    """The footprint of our cache, or of the tensors that transformers' own holds."""
    if isinstance(cache, CompressedCache):
        return cache.footprint()
    sides = [getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values")]
    tensors = [side for side in sides if side is not None]
    seen = cache.get_seq_length()
    # Layers with a sliding window hold fewer tokens than were seen; a ratio is against a cache of all of them.
    elements = sum(t.shape[0] * t.shape[1] * seen * t.shape[3] for t in tensors)
    return Footprint(seen, elements, {"exact": sum(t.untyped_storage().nbytes() for t in tensors)})
