"""Bytes of a cache from shapes alone: what `LayerStore` would hold after one prefill of that many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tersekv.formats.base import Layout
from tersekv.recipe import LayerPlan, Recipe
from tersekv.store.blocks import spare_blocks, tail_capacity
from tersekv.store.footprint import Footprint
from tersekv.store.rollback import ROLLBACK_TOKENS


@dataclass(frozen=True)
class CacheShape:
    """windows: sliding window in tokens of each attention layer, None for full attention. dtype: the model's."""

    windows: tuple[int | None, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return len(self.windows) * self.kv_heads * (self.key_dim + self.value_dim)


def _llama(layers: int, heads: int) -> CacheShape:
    return CacheShape((None,) * layers, heads, 128, 128, torch.float16)


KNOWN = {
    "LLaMA-7B": _llama(32, 32),
    "LLaMA-13B": _llama(40, 40),
    "LLaMA-30B": _llama(60, 52),
    "LLaMA-65B": _llama(80, 64),
}
"""The models of KVQuant's tables (arXiv 2302.13971, Table 2), by name, without a config file."""


def predict(shape: CacheShape, recipe: str | Recipe, tokens: int, batch: int = 1) -> Footprint:
    """The footprint of `batch` sequences of `tokens` tokens, fed at once.

    Raises:
        UserError: the recipe does not fit the head dims or layers.
    """
    recipe = Recipe.parse(recipe)
    rows = batch * shape.kv_heads
    footprints: list[Footprint] = []
    shared: dict[str, int] = {}
    for index, window in enumerate(shape.windows):
        plan = recipe.plan(index, len(shape.windows))
        footprint = _layer(plan, shape, window, tokens)
        footprint.parts = {part: round(size * rows) for part, size in footprint.parts.items()}
        for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
            tables = codec.table_bytes(dim)
            if footprint.parts["codes"] or not tables.of_sequence:
                footprint.parts["tables"] += tables.of_layer(shape.kv_heads, batch)
            shared |= tables.shared
        footprint.elements = tokens * (shape.key_dim + shape.value_dim) * rows
        footprints.append(footprint)
    total = Footprint.sum(footprints)
    total.tokens = tokens
    if tokens:
        total.parts["tables"] += sum(shared.values())
    return total


def _layer(plan: LayerPlan, shape: CacheShape, window: int | None, tokens: int) -> Footprint:
    """One head of one layer, without tables."""
    layouts = plan.keys.layout(shape.key_dim), plan.values.layout(shape.value_dim)
    dims = shape.key_dim + shape.value_dim
    flush = math.lcm(*(layout.block_tokens for layout in layouts))
    exact_bytes = plan.policy.exact_dtype(shape.dtype).itemsize
    sinks = min(tokens, plan.policy.sink_tokens(window))
    packed = plan.policy.to_pack(tokens - sinks, flush)
    tail = tokens - sinks - packed
    if window is not None:
        outside = (tokens - window - ROLLBACK_TOKENS) // flush * flush
        packed -= min(packed, max(0, outside))
    footprint = Footprint(tokens)
    footprint.parts["exact sinks"] = sinks * dims * exact_bytes
    footprint.parts["exact window"] = tail * dims * exact_bytes
    if tail:
        footprint.parts["slack"] = (tail_capacity(tail, plan.policy.recent + flush) - tail) * dims * exact_bytes
    for layout in layouts:
        _count(layout, packed // layout.block_tokens, shape.kv_heads, footprint)
    return footprint


def _count(layout: Layout, blocks: int, heads: int, footprint: Footprint) -> None:
    for spec in layout.planes.values():
        footprint.parts[spec.kind] += blocks * spec.block_bytes(heads)  # type: ignore[assignment]
    if blocks:
        footprint.parts["slack"] += spare_blocks(blocks) * layout.block_bytes(heads)  # type: ignore[assignment]
