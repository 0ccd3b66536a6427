"""Size of a cache computed from the shapes of a model and a recipe, without tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.growth import Calls, LayerSize, PagesSize, TailSize
from tersekv.cache.pages import PageSizes
from tersekv.cache.rate_allotment import evenly
from tersekv.cache.rotary import Rotary
from tersekv.codecs.transforms.rope import Rope
from tersekv.layouts.base import Layout
from tersekv.policies.base import Selection, TokenPolicy, two_rates
from tersekv.policies.subgen import SubGen
from tersekv.recipe import LayerPlan, Recipe


@dataclass(frozen=True)
class CacheShape:
    """Shape of a model's cache.

    windows: sliding window in tokens of each attention layer, None for full attention.
    dtype: the model's dtype.
    ropes: RoPE of each attention layer, the same object where layers share one. None if it is
        unknown and its tables are not counted; empty if all are unknown.
    query_heads: number of query heads, which the policy mixed needs.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    ropes: tuple[Rope | None, ...] = dataclasses.field(default=(), compare=False)
    query_heads: int = 0

    def elements(self, tokens: int, batch: int = 1) -> int:
        """Return the key and value elements of a full cache with so many tokens.

        A sliding-window layer holds the tokens of its window.
        """
        held = sum(tokens if window is None else min(tokens, window) for window in self.windows)
        return batch * held * self.kv_heads * (self.key_dim + self.value_dim)


LOST_BYTES = torch.float32.itemsize
"""Bytes of the lost variance of one channel of the keys (`cache/lost_variance.py`)."""


def size(
    shape: CacheShape,
    recipe: Recipe,
    tokens: int,
    batch: int = 1,
    piece: int = 0,
    generated: int = 0,
    scores: Tensor | None = None,
) -> Footprint:
    """Return the footprint of `batch` sequences of `tokens` tokens, see `estimate.predict`.

    recipe: without `memory`.
    """
    rows = batch * shape.kv_heads
    calls = Calls(tokens - generated, piece, generated)
    first = next(iter(calls.sizes()), 0)
    sizes: dict[tuple[TokenPolicy, int | None, int, bool], LayerSize] = {}
    footprints: list[Footprint] = []
    shared: dict[str, int] = {}
    rope_tables: dict[int, Tensor] = {}
    for index, window in enumerate(shape.windows):
        plan = recipe.plan(index, len(shape.windows))
        plan = plan if scores is None else plan._replace(scores=scores)
        plan = plan.in_layer(first, window, shape.key_dim, shape.value_dim)
        if plan.policy.allots and window is None and two_rates(plan.keys, plan.values):
            plan = evenly(plan, (shape.key_dim, shape.value_dim))
        if isinstance(plan.policy, Selection) and window is None:
            low = lower_plan(plan)
            footprint = _selected(plan.policy, plan, low, shape, calls, rows)
        else:
            low = lower_plan(plan, window)
            key = plan.policy, window, _flush(layout for layout, _ in _layouts(plan, shape)), low is not None
            if key not in sizes:
                sizes[key] = LayerSize.after(calls.sizes(), *key)
            footprint = _layer(sizes[key], plan if low is None else plan.per_head(), shape, rows, window)
            if low is not None:
                _rest(sizes[key], low, shape, rows, footprint)
                low = low if sizes[key].rest.tokens else None
        if low is not None:
            shared |= _lower_tables(low, shape, batch, footprint)
        footprint.parts = {part: round(size * rows) for part, size in footprint.parts.items()}
        for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
            tables = codec.table_bytes(dim)
            if footprint.parts["codes"] or not tables.of_sequence:
                footprint.parts["tables"] += tables.of_layer(shape.kv_heads, batch)
            shared |= tables.shared
        if footprint.parts["codes"] and plan.policy.corrected_share:
            footprint.parts["tables"] += LOST_BYTES * shape.key_dim * rows * (1 if low is None else 2)
        if footprint.parts["codes"]:
            rope_tables |= {table.data_ptr(): table for table in _rope_tables(shape, index, plan, window)}
        footprint.elements = min(tokens, window or tokens) * (shape.key_dim + shape.value_dim) * rows
        footprint.coded = {plan.coded: 1}
        footprints.append(footprint)
    total = Footprint.sum(footprints)
    total.tokens = tokens
    if tokens:
        total.parts["tables"] += sum(shared.values())
    total.parts["tables"] += sum(table.numel() * table.element_size() for table in rope_tables.values())
    return total


def _rope_tables(shape: CacheShape, layer: int, plan: LayerPlan, window: int | None) -> list[Tensor]:
    """Return the tables that a layer's keys need for RoPE. Layers with the same RoPE share them."""
    rope = shape.ropes[layer] if shape.ropes else None
    if rope is None or not plan.keys.needs_rope:
        return []
    device = torch.device("cpu")
    if isinstance(plan.policy, Selection) and window is None:
        return rope.tables(device)
    return Rotary(rope).tables(device, plan.keys.centred, shape.key_dim)


def _flush(layouts: Iterable[Layout]) -> int:
    return math.lcm(*(layout.block_tokens for layout in layouts))


def _layer(size: LayerSize, plan: LayerPlan, shape: CacheShape, rows: int, window: int | None) -> Footprint:
    """Return the footprint of one head of one layer, without tables.

    rows: heads of all sequences.
    """
    both = (shape.key_dim + shape.value_dim) * plan.policy.exact_dtype(shape.dtype).itemsize
    footprint = Footprint()
    footprint.parts["exact sinks"] = size.sinks * both
    footprint.parts["exact window"] = size.tail.tokens * both
    footprint.parts["slack"] = size.tail.slack * both
    for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
        _count(codec.layout(dim), size.pages, shape.kv_heads, footprint, rows)
    if plan.policy.most_found and window is None and two_rates(plan.keys, plan.values):
        found = min(plan.policy.most_found, size.pages.tokens)
        footprint.parts["exact sinks"] += found * both
        footprint.parts["selection"] += (8 * found + size.pages.tokens) / shape.kv_heads + 16  # type: ignore[assignment]
    return footprint


def lower_plan(plan: LayerPlan, window: int | None = None) -> LayerPlan | None:
    """Return the plan with the codecs of the lower rate if a layer has two rates, else None."""
    policy = plan.policy
    rest = policy.rest
    if window is not None or not rest or not two_rates(plan.keys, plan.values):
        return None
    return plan._replace(keys=plan.keys.at_rate(rest), values=plan.values.at_rate(rest)).per_head()


def _rest(size: LayerSize, low: LayerPlan, shape: CacheShape, rows: int, footprint: Footprint) -> None:
    """Count tokens of the lower rate, the map of rates and the kept queries."""
    of_queries = size.queries * shape.query_heads * shape.key_dim * low.policy.exact_dtype(shape.dtype).itemsize
    ranked = size.pages.tokens + size.rest.tokens
    footprint.parts["selection"] += ranked / 8 + of_queries / shape.kv_heads  # type: ignore[assignment]
    for codec, dim in ((low.keys, shape.key_dim), (low.values, shape.value_dim)):
        _count(codec.layout(dim), size.rest, 1, footprint, rows)


def _lower_tables(low: LayerPlan, shape: CacheShape, batch: int, footprint: Footprint) -> dict[str, int]:
    """Count the tables that differ at the lower rate. Return the tables that layers share."""
    shared: dict[str, int] = {}
    for codec, dim in ((low.keys, shape.key_dim), (low.values, shape.value_dim)):
        tables, learns = codec.table_bytes(dim), codec.learns(1, 1, dim)
        if footprint.parts["codes"] or not tables.of_sequence:
            own = sum(dim * learns[name].dtype.itemsize for name in codec.rate_tensors)
            footprint.parts["tables"] += own * (batch if tables.of_sequence else 1) / batch  # type: ignore[assignment]
        shared |= tables.shared
    return shared


def _selected(
    policy: Selection, plan: LayerPlan, low: LayerPlan | None, shape: CacheShape, calls: Calls, rows: int
) -> Footprint:
    """Return the same as `_layer` under a policy that evicts tokens.

    low: the plan of the lower rate, or None.
    """
    layouts = layouts_of_heads(plan, shape)
    flush = _flush(layout for layout, _ in layouts)
    itemsize = policy.exact_dtype(shape.dtype).itemsize
    both = (shape.key_dim + shape.value_dim) * itemsize
    stays = policy.evicts == "never"  # generated tokens are never evicted
    seen = calls.prompt if stays else calls.prompt + calls.generated
    budget = policy.kept(seen, plan.layer, plan.layers)
    usual = min(policy.recent, policy.latest(budget))
    tail = TailSize(usual + (0 if policy.evicts == "step" else flush))
    tail.change(0, min(seen, usual))
    late = 0  # generated tokens that have left the tail
    for _ in range(calls.generated if stays else 0):
        leave = max(0, tail.tokens + 1 - usual) // flush * flush
        late += leave
        tail.change(leave, 1)
    footprint = Footprint()
    footprint.parts["exact window"] = tail.tokens * both
    footprint.parts["slack"] = tail.slack * both
    chosen = min(seen, usual)
    if isinstance(policy, SubGen) and policy.samples:
        sinks = min(policy.sinks, seen - chosen)
        _sampled(footprint, plan, shape, policy, budget, seen - chosen - sinks)
        footprint.parts["selection"] += 4 * sinks
    else:
        sinks = min(policy.sinks, min(seen, budget) - chosen)
        budgets = [budget]
        if policy.needs_scores and plan.scores is not None:
            budgets = policy.of_heads(budget, seen, plan.scores)[plan.layer].tolist()
        pools = [min(seen, one) - chosen - sinks for one in budgets]  # of each head; all have the slots of the largest
        if low is None:
            slots = _pool(footprint, layouts, pools, late, flush, itemsize, rows)
        else:
            high = [
                min(pool, max(0, one - chosen - sinks - policy.lower(one)))
                for pool, one in zip(pools, budgets, strict=True)
            ]
            rest = [pool - own for pool, own in zip(pools, high, strict=True)]
            slots = _pool(footprint, layouts, high, late, flush, itemsize, rows)
            slots += _pool(footprint, layouts_of_heads(low, shape), rest, 0, flush, itemsize, rows)
        footprint.parts["selection"] = 4 * (slots + sinks) * (2 if policy.remembers else 1)
        footprint.parts["selection"] += 4 * tail.tokens if policy.remembers else 0
    footprint.parts["exact sinks"] = sinks * both
    return footprint


def _layouts(plan: LayerPlan, shape: CacheShape) -> list[tuple[Layout, int]]:
    """Return the layouts of both sides with their head dims."""
    return [(plan.keys.layout(shape.key_dim), shape.key_dim), (plan.values.layout(shape.value_dim), shape.value_dim)]


def layouts_of_heads(plan: LayerPlan, shape: CacheShape) -> list[tuple[Layout, int]]:
    """Return the layouts if heads store different tokens, without data shared by heads."""
    return _layouts(plan.per_head(), shape)


def _pool(
    footprint: Footprint,
    layouts: list[tuple[Layout, int]],
    heads: list[int],
    late: int,
    flush: int,
    itemsize: int,
    rows: int,
) -> int:
    """Count the chosen tokens of a pool, and return its slots.

    heads: tokens chosen of the prompt by each head. late: generated tokens added one block at a time.
    """
    blocks, loose = max(n // flush for n in heads), max(n % flush for n in heads)
    packed = PagesSize(PageSizes(flush))
    packed.append(blocks * flush)
    for _ in range((loose + late) // flush):
        packed.append(flush)
    slots = packed.tokens + (loose + late) % flush
    _chosen(footprint, layouts, packed, slots, itemsize, rows)
    return slots


def _chosen(
    footprint: Footprint, layouts: list[tuple[Layout, int]], packed: PagesSize, tokens: int, itemsize: int, rows: int
) -> None:
    """Count chosen tokens: packed blocks, and exact tokens that fill no block."""
    for layout, dim in layouts:
        _count(layout, packed, 1, footprint, rows)
        footprint.parts["exact window"] += (tokens - packed.tokens) * dim * itemsize


def _most(footprint: Footprint, layouts: list[tuple[Layout, int]], tokens: int, itemsize: int) -> None:
    """Count the upper bound for at most so many tokens.

    Any number of them may fill no block, and a page may have only one block in use.
    """
    flush = _flush(layout for layout, _ in layouts)
    packed, sizes = PagesSize(PageSizes(flush)), PageSizes(flush)
    packed.append(tokens // flush * flush)
    _chosen(footprint, layouts, packed, packed.tokens, itemsize, 1)
    if packed.tokens:
        more = sizes.slack(flush) - sizes.slack(packed.tokens)
        footprint.parts["slack"] += sum(more * x.block_bytes() / x.block_tokens for x, _ in layouts)  # type: ignore[assignment]
    footprint.parts["exact window"] += min(tokens, flush - 1) * itemsize * sum(dim for _, dim in layouts)


def _sampled(
    footprint: Footprint, plan: LayerPlan, shape: CacheShape, policy: SubGen, budget: int, stream: int
) -> None:
    """Count the upper bound of the sketches of `stream` tokens.

    It assumes that all samples differ, and that the maximum number of clusters exists. With a given
    δ, a stream can have more clusters than that.
    """
    s, m = policy.sizes(budget)
    values, clusters = min(s, stream), min(m, stream)
    keys = min(clusters * policy.slots, stream)
    layouts, itemsize = layouts_of_heads(plan, shape), policy.exact_dtype(shape.dtype).itemsize
    _most(footprint, layouts, values, itemsize)
    _most(footprint, layouts[:1], keys, itemsize)
    footprint.parts["exact window"] += clusters * shape.key_dim * itemsize
    # position, norm, weight; position, weight; slots and μ; members and slots; δ and the longest
    # value
    footprint.parts["selection"] += 12 * values + 8 * keys + 4 * s + 8 + 4 * clusters * (1 + policy.slots) + 8


def _count(layout: Layout, pages: PagesSize, heads: int, footprint: Footprint, rows: int) -> None:
    """Count packed tokens of one side, and the slack of their pages."""
    for spec in layout.planes.values():
        used, slack = pages.bytes(spec, layout.block_tokens, heads, rows)
        footprint.parts[spec.kind] += used  # type: ignore[assignment]
        footprint.parts["slack"] += slack  # type: ignore[assignment]
