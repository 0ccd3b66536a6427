"""Fill caches from one exact prefill, and count the bytes of transformers' own caches.

The prefill's own attention is exact with every recipe. Keys and values are therefore computed once
per prompt and copied into one cache per recipe. Policies and codecs that observe queries get them,
too. The packed bytes equal those of a separate prefill. With softcaps or attention sinks
`compress` uses another attention function than the model, and they are equal up to float32
rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tersekv.attention.observe import observe
from tersekv.attention.read import AttentionCall
from tersekv.cache.footprint import Footprint
from tersekv.cache.segments import Losses, Observed
from tersekv.calibration.calibration import Calibration
from tersekv.calibration.capture import LayerTokens, capture_prompt
from tersekv.calibration.find import calibration_for
from tersekv.hf.cache import CompressedCache, CompressedLayer
from tersekv.hf.compress import compress
from tersekv.models.config import attention_layers, text_config
from tersekv.versions import cache_argument


def new_cache(
    model: PreTrainedModel, recipe: str | None, calibration: Calibration | None = None
) -> DynamicCache | CompressedCache:
    """Return an empty cache; recipe None gives transformers' own. Without `calibration` the one in
    the model's default folder is used."""
    if recipe is None:
        return DynamicCache(config=model.config)
    return CompressedCache(model.config, recipe, calibration or calibration_for(model, recipe))


def shares_prefill(model: PreTrainedModel) -> bool:
    """True if caches can be filled with captured tokens, because the model's whole state is keys
    and values."""
    return all(kind.type != "linear" for kind in attention_layers(text_config(model.config)))


class Prefill:
    """Keys, values and last logits of the latest prompt, and its queries once a recipe observes
    them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._ids: Tensor | None = None
        self._with_calls = False
        self._captured: list[tuple[LayerTokens, AttentionCall | None]] = []
        self._logits = torch.empty(0)

    def fill(self, cache: DynamicCache | CompressedCache, ids: Tensor) -> Tensor:
        """Fill an empty cache with the tokens ids [1, T]. Return the exact logits [vocabulary] of the
        last one. A cache that reads prompts twice gets a pass of its own."""
        if isinstance(cache, CompressedCache) and cache.reads_twice:
            with compress(self.model, cache):
                given = cache_argument(self.model, cache)
                return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits[0, -1]
        observes = isinstance(cache, CompressedCache) and cache.observes
        if self._ids is None or not torch.equal(self._ids, ids) or (observes and not self._with_calls):
            self._with_calls |= observes  # stays True, because the next prompt gets the same recipes
            self._ids, self._captured = None, []  # free them before the next ones are made
            self._captured, (self._logits,) = capture_prompt(self.model, ids, self._with_calls)
            self._ids = ids
        fill_layers(self.model, cache, self._captured)
        return self._logits


def fill_layers(
    model: PreTrainedModel,
    cache: DynamicCache | CompressedCache,
    captured: Sequence[tuple[LayerTokens, AttentionCall | None]],
    losses: Mapping[int, Losses] | None = None,
) -> None:
    """Fill an empty cache with the keys and values of each attention layer.

    Policies and codecs that observe queries get them from the layer's call. Without calls, codecs
    get `losses` by layer.
    """
    kinds = attention_layers(text_config(model.config))
    places = [index for index, kind in enumerate(kinds) if kind.type == "attention"]
    for index, ((keys, values), call) in zip(places, captured, strict=True):
        layer: Any = cache.layers[index]
        if isinstance(layer, CompressedLayer):
            layer.lazy_initialization(keys, values)
            assert layer.store is not None
            known = Observed(losses=(losses or {}).get(index))
            observed = known if call is None else observe(layer.store, keys, values, call)
            layer.append(keys, values, None, observed)
        else:
            layer.update(keys, values)


def held_by(cache: Any) -> Footprint:
    """Return the footprint of our cache, or that of the tensors in transformers' own cache."""
    if isinstance(cache, CompressedCache):
        return cache.footprint()
    seen, elements, tensors = cache.get_seq_length(), 0, []
    for layer in cache.layers:
        held = min(seen, getattr(layer, "sliding_window", None) or seen)  # as `Footprint.elements` counts
        for x in (getattr(layer, side, None) for side in ("keys", "values")):
            if x is None:
                continue
            elements += x.shape[0] * x.shape[1] * held * x.shape[3]
            tensors.append(x)
    return Footprint(seen, elements, {"exact": sum(t.untyped_storage().nbytes() for t in tensors)})
