"""Bytes of a cache from shapes alone: what a layer's store would hold after one prefill of that many tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from tersekv.formats.base import Layout
from tersekv.recipe import LayerPlan, Recipe
from tersekv.store.footprint import Footprint
from tersekv.store.pages import PageSizes
from tersekv.store.rollback import ROLLBACK_TOKENS
from tersekv.store.tail import tail_capacity
from tersekv.tokens.base import Selection
from tersekv.tokens.subgen import SubGen


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
    if isinstance(plan.policy, Selection) and window is None:
        return _selected(plan.policy, plan, shape, tokens)
    layouts = [plan.keys.layout(shape.key_dim), plan.values.layout(shape.value_dim)]
    dims = shape.key_dim + shape.value_dim
    flush = math.lcm(*(layout.block_tokens for layout in layouts))
    exact_bytes = plan.policy.exact_dtype(shape.dtype).itemsize
    sinks = min(tokens, plan.policy.sink_tokens(window))
    packed = plan.policy.to_pack(tokens - sinks, flush, tokens, window)
    tail = tokens - sinks - packed
    if window is not None:
        outside = (tokens - window - ROLLBACK_TOKENS) // flush * flush
        packed -= min(packed, max(0, outside))
    footprint = Footprint(tokens)
    footprint.parts["exact sinks"] = sinks * dims * exact_bytes
    footprint.parts["exact window"] = tail * dims * exact_bytes
    _count_slack(footprint, tail, plan.policy.recent + flush, dims * exact_bytes)
    sizes = PageSizes(flush, None if window is None else window + ROLLBACK_TOKENS)
    for layout in layouts:
        _count(layout, packed, sizes, shape.kv_heads, footprint)
    return footprint


def _selected(policy: Selection, plan: LayerPlan, shape: CacheShape, tokens: int) -> Footprint:
    """The same under a policy that drops tokens."""
    flush = math.lcm(*(layout.block_tokens for layout, _ in _layouts(plan, shape)))
    itemsize = policy.exact_dtype(shape.dtype).itemsize
    both = (shape.key_dim + shape.value_dim) * itemsize
    budget = policy.kept(tokens, plan.layer, plan.layers)
    usual = min(policy.recent, policy.latest(budget))
    tail = min(tokens, usual)
    footprint = Footprint(tokens)
    footprint.parts["exact window"] = tail * both
    _count_slack(footprint, tail, usual + (0 if policy.evicts == "step" else flush), both)
    if isinstance(policy, SubGen) and policy.samples:
        sinks = min(policy.sinks, tokens - tail)
        _sampled(footprint, plan, shape, policy, budget, tokens - tail - sinks)
        footprint.parts["selection"] += 4 * sinks
    else:
        sinks = min(policy.sinks, min(tokens, budget) - tail)
        _pool(footprint, _layouts(plan, shape), min(tokens, budget) - tail - sinks, itemsize)
        footprint.parts["selection"] = 4 * (min(tokens, budget) - tail) * (2 if policy.remembers else 1)
        footprint.parts["selection"] += 4 * tail if policy.remembers else 0
    footprint.parts["exact sinks"] = sinks * both
    return footprint


def _layouts(plan: LayerPlan, shape: CacheShape) -> list[tuple[Layout, int]]:
    """Of both sides under a policy that drops tokens: heads hold nothing together."""
    sides = (plan.keys, shape.key_dim), (plan.values, shape.value_dim)
    return [(dataclasses.replace(codec, per_head=True).layout(dim), dim) for codec, dim in sides]


def _pool(footprint: Footprint, layouts: list[tuple[Layout, int]], tokens: int, itemsize: int) -> None:
    """Chosen tokens, packed but for those that fill no block."""
    flush = math.lcm(*(layout.block_tokens for layout, _ in layouts))
    for layout, dim in layouts:
        _count(layout, tokens // flush * flush, PageSizes(flush), 1, footprint)
        footprint.parts["exact window"] += tokens % flush * dim * itemsize


def _most(footprint: Footprint, layouts: list[tuple[Layout, int]], tokens: int, itemsize: int) -> None:
    """At most so many tokens, of which any number may fill no block; of a page, one block may be all that is used."""
    flush = math.lcm(*(layout.block_tokens for layout, _ in layouts))
    packed, sizes = tokens // flush * flush, PageSizes(flush)
    _pool(footprint, layouts, packed, itemsize)
    if packed:
        more = sizes.slack(flush) - sizes.slack(packed)
        footprint.parts["slack"] += sum(more * x.block_bytes() / x.block_tokens for x, _ in layouts)  # type: ignore[assignment]
    footprint.parts["exact window"] += min(tokens, flush - 1) * itemsize * sum(dim for _, dim in layouts)


def _sampled(
    footprint: Footprint, plan: LayerPlan, shape: CacheShape, policy: SubGen, budget: int, stream: int
) -> None:
    """Sketches of `stream` tokens, at most: as if no two samples were the same, and as many clusters as there is room
    for (more, where δ is given and the stream has more)."""
    s, m = policy.sizes(budget)
    values, clusters = min(s, stream), min(m, stream)
    keys = min(clusters * policy.slots, stream)
    layouts, itemsize = _layouts(plan, shape), policy.exact_dtype(shape.dtype).itemsize
    _most(footprint, layouts, values, itemsize)
    _most(footprint, layouts[:1], keys, itemsize)
    footprint.parts["exact window"] += clusters * shape.key_dim * itemsize
    # position, norm, weight; position, weight; slots and μ; members and slots; δ and the longest value
    footprint.parts["selection"] += 12 * values + 8 * keys + 4 * s + 8 + 4 * clusters * (1 + policy.slots) + 8


def _count_slack(footprint: Footprint, tail: int, usual: int, token_bytes: int) -> None:
    """What a tail that usually grows to `usual` tokens has allocated beyond its tokens."""
    if tail:
        footprint.parts["slack"] += (tail_capacity(tail, usual) - tail) * token_bytes


def _count(layout: Layout, tokens: int, sizes: PageSizes, heads: int, footprint: Footprint) -> None:
    """Packed tokens that come at once, and the slack of their pages."""
    for spec in layout.planes.values():
        token_bytes = spec.block_bytes(heads) / layout.block_tokens
        footprint.parts[spec.kind] += tokens * token_bytes  # type: ignore[assignment]
        footprint.parts["slack"] += sizes.slack(tokens) * token_bytes  # type: ignore[assignment]
