"""Pickle caches, for `pickle`, `copy.copy`, `torch.save` and other processes.

A pickle holds the text config, the recipe and copies of every layer's `state()`, but no model. The
restored cache is bound to its model at the first call under `compress`. To keep a cache, prefer
`save`: its files are checked against the model and mapped into memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tersekv.cache.state import split
from tersekv.calibration.needs import attention_plans
from tersekv.errors import UserError
from tersekv.hf.base import ATTENTION_NAME, ModelCache
from tersekv.hf.layer import CompressedLayer, compressed_layers
from tersekv.hf.token_ids import TokenIds
from tersekv.recipe import Recipe
from tersekv.tensors import plain


@plain
def reduced(cache: ModelCache) -> tuple[Callable[..., ModelCache], tuple[Any, ...]]:
    """Return the value of `__reduce__`.

    Raises:
        UserError: the cache is shared by processes (tensor or context parallelism).
    """
    stores = [(layer.store, layer.index) for layer in compressed_layers(cache) if layer.store is not None]
    divided = any(cache.heads(store.kv_heads, index) is not None for store, index in stores)
    if divided or cache.context_parallel is not None:
        raise UserError("a cache that is split among processes cannot be pickled: each holds only a part of it")
    config = copy.copy(cache.config)
    if config._attn_implementation == ATTENTION_NAME:  # set only while compress is installed on the model
        config.__dict__["_attn_implementation_internal"] = None
    layers = [layer.state() if isinstance(layer, CompressedLayer) else copy.deepcopy(layer) for layer in cache.layers]
    progress = cache.progress.torn, cache.progress.steps, cache.progress.last, dict(cache.progress.done)
    return rebuilt, (type(cache), config, str(cache.recipe), layers, progress, copy.deepcopy(cache.token_ids))


@plain
def rebuilt(
    kind: type[ModelCache],
    config: Any,
    recipe: str,
    layers: list[Any],
    progress: tuple[Any, ...],
    token_ids: TokenIds,
) -> ModelCache:
    """Rebuild the cache of a pickle, on the device of its tensors."""
    parsed = Recipe.parse(recipe)
    cache = kind.of(config, parsed, attention_plans(parsed, config))
    for index, held in enumerate(layers):
        layer: Any = cache.layers[index]
        if isinstance(layer, CompressedLayer) and held["store"] is None:
            layer.adopt_rates(held, f"layers.{index}")
            learnt = {
                side: replace(getattr(layer.plan, side), fitted=held["plan"][side]) for side in ("keys", "values")
            }
            scores = held["plan"].get("scores")
            layer.plan, layer.record_past = layer.plan._replace(**learnt, scores=scores), held["record_past"]
            layer.first_tokens = held["first_tokens"]
        elif isinstance(layer, CompressedLayer):
            window = split({"recent": held["store"]["recent"]})[1]  # what is fitted may be on another device
            device = next(iter(window.values())).device
            layer.restore(held, held["shapes"][0][0], device, f"layers.{index}")
        else:
            cache.layers[index] = held
    cache.progress.torn, cache.progress.steps, cache.progress.last, cache.progress.done = progress
    cache.token_ids = token_ids
    return cache
