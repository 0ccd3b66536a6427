"""Caches filled from one exact prefill, and the bytes that transformers' own cache holds.

A prompt's own attention is exact with every recipe, so its keys and values are computed once per prompt and put into
as many caches as there are recipes. The bytes are those of a prefill of its own; where `compress` reads the prompt
through another function than the model does (softcaps, attention sinks), they are so up to float32 rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tersekv.hf.cache import CompressedCache, CompressedLayer
from tersekv.hf.calibration import Calibration, calibration_for
from tersekv.hf.capture import LayerTokens, capture
from tersekv.hf.config import attention_layers, text_config
from tersekv.recipe import Recipe
from tersekv.store.footprint import Footprint


def new_cache(
    model: PreTrainedModel, recipe: str | None, calibration: Calibration | None = None
) -> DynamicCache | CompressedCache:
    """An empty cache; recipe None is transformers' own. A calibration not given comes from the default place."""
    if recipe is None:
        return DynamicCache(config=model.config)
    return CompressedCache(model.config, recipe, calibration or calibration_for(model, recipe))


def shares_prefill(model: PreTrainedModel, recipe: str | None) -> bool:
    """Whether a cache can be filled with captured tokens: all of the model's state is keys and values, and the token
    policy does not look at queries."""
    observes = recipe is not None and Recipe.parse(recipe).policy().observes
    return not observes and all(kind.type != "linear" for kind in attention_layers(text_config(model.config)))


class Prefill:
    """The keys and values of the last prompt that was asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._ids: Tensor | None = None
        self._tokens: list[LayerTokens] = []

    def fill(self, cache: DynamicCache | CompressedCache, ids: Tensor) -> None:
        """Put the tokens ids [1, T] into an empty cache."""
        if self._ids is None or not torch.equal(self._ids, ids):
            self._tokens = []  # freed before the next ones are made
            self._ids, self._tokens = ids, capture(self.model, ids)
        kinds = attention_layers(text_config(self.model.config))
        places = [index for index, kind in enumerate(kinds) if kind.type == "attention"]
        for index, (keys, values) in zip(places, self._tokens, strict=True):
            layer: Any = cache.layers[index]
            if isinstance(layer, CompressedLayer):
                layer.lazy_initialization(keys, values)
                layer.append(keys, values)
            else:
                layer.update(keys, values)


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
