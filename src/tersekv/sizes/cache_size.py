"""Size of a cache computed from the shapes of a model and a recipe, without tokens."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.blocks import BlockBuffer
from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.pages import PageSizes, blank
from tersekv.cache.rotary import Rotary
from tersekv.cache.tier import most_blocks
from tersekv.layouts.base import Layout
from tersekv.policies.base import Selection, two_rates
from tersekv.policies.subgen import SubGen
from tersekv.recipe import LayerPlan, Recipe
from tersekv.sizes.rate_allotment import evenly
from tersekv.transforms.rope import Rope


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


class Calls(NamedTuple):
    """Calls that feed tokens: a prompt, then single tokens.

    prompt: tokens of the prompt.
    piece: tokens per call of the prompt, 0 for one call.
    generated: tokens fed one by one after it.
    """

    prompt: int
    piece: int = 0
    generated: int = 0

    def sizes(self) -> Iterator[int]:
        """Return the number of tokens of each call."""
        step = self.piece or self.prompt
        for first in range(0, self.prompt, max(1, step)):
            yield min(step, self.prompt - first)
        yield from (1 for _ in range(self.generated))


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
    fullest: bool = False,
) -> Footprint:
    """Return the footprint of `batch` sequences of `tokens` tokens, see `estimate.predict`.

    recipe: without `memory`.
    fullest: layers that evict count with the most slots that any stream of more tokens than their budget leaves.
    """
    rows = batch * shape.kv_heads
    calls = Calls(tokens - generated, piece, generated)
    first = next(iter(calls.sizes()), 0)
    held: dict[tuple[LayerPlan, int | None], tuple[Footprint, list[bool]]] = {}
    footprints: list[Footprint] = []
    shared: dict[str, int] = {}
    rope_tables: dict[int, Tensor] = {}
    for index, window in enumerate(shape.windows):
        plan = recipe.plan(index, len(shape.windows))
        plan = plan if scores is None else plan._replace(scores=scores)
        plan = plan.in_layer(first, window, shape.key_dim, shape.value_dim)
        if plan.policy.allots and window is None and two_rates(plan.keys, plan.values):
            plan = evenly(plan, (shape.key_dim, shape.value_dim))
        low = lower_plan(plan, window)
        if isinstance(plan.policy, Selection) and window is None:
            footprint, tiers = _selected(plan.policy, plan, low, shape, calls, batch, fullest)
        else:
            key = plan._replace(layer=0, scores=None, rates=None), window
            if key not in held:
                held[key] = _kept(*key, shape, calls, batch)
            footprint, tiers = copy.deepcopy(held[key])
        if low is not None and tiers[1]:
            shared |= _lower_tables(low, shape, batch, footprint)
        for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
            tables = codec.table_bytes(dim)
            if footprint.parts["codes"] or not tables.of_sequence:
                footprint.parts["tables"] += tables.of_layer(shape.kv_heads, batch)
            shared |= tables.shared
        if footprint.parts["codes"] and plan.policy.corrected_share:
            footprint.parts["tables"] += LOST_BYTES * shape.key_dim * rows * sum(tiers)
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


FED, STEP = 1 << 22, 1 << 20
"""Most tokens of a prompt that are fed, and the step in which longer prompts grow."""


def _kept(
    plan: LayerPlan, window: int | None, shape: CacheShape, calls: Calls, batch: int
) -> tuple[Footprint, list[bool]]:
    """Return the footprint of a layer that keeps all tokens, without tables, and which tiers have tokens.

    The layer's own store is fed with tokens on the device meta, which have shapes only. Beyond `FED`
    tokens of a prompt, the bytes grow as they do before.
    """
    if window is None and calls.prompt > FED:
        steps = -(-(calls.prompt - FED) // STEP)
        fed = calls.prompt - steps * STEP
        (last, tiers), (before, _) = (
            _kept(plan, window, shape, calls._replace(prompt=n), batch) for n in (fed, fed - STEP)
        )
        last.parts = {part: size + steps * (size - before.parts[part]) for part, size in last.parts.items()}
        return last, tiers

    def tokens(n: int, heads: int, dim: int) -> Tensor:
        return torch.empty((batch, heads, n, dim), dtype=shape.dtype, device="meta")

    def both(n: int) -> tuple[Tensor, Tensor]:
        return tokens(n, shape.kv_heads, shape.key_dim), tokens(n, shape.kv_heads, shape.value_dim)

    store = LayerStore(plan, *both(0), window)
    for n in calls.sizes():
        if store.keeps_queries:
            store.keep(tokens(n, shape.query_heads, shape.key_dim))
        store.append(*both(n))
    return store.footprint(), [tier.tokens > 0 for tier in store.tiers]


def _flush(layouts: Iterable[Layout]) -> int:
    return math.lcm(*(layout.block_tokens for layout in layouts))


def lower_plan(plan: LayerPlan, window: int | None = None) -> LayerPlan | None:
    """Return the plan with the codecs of the lower rate if a layer has two rates, else None."""
    rest = plan.policy.rest
    if window is not None or not rest or not two_rates(plan.keys, plan.values):
        return None
    return plan._replace(keys=plan.keys.at_rate(rest), values=plan.values.at_rate(rest)).per_head()


def _lower_tables(low: LayerPlan, shape: CacheShape, batch: int, footprint: Footprint) -> dict[str, int]:
    """Count the tables that differ at the lower rate. Return the tables that layers share."""
    shared: dict[str, int] = {}
    for codec, dim in ((low.keys, shape.key_dim), (low.values, shape.value_dim)):
        tables, learns = codec.table_bytes(dim), codec.learns(1, 1, dim)
        if footprint.parts["codes"] or not tables.of_sequence:
            own = sum(dim * learns[name].dtype.itemsize for name in codec.rate_tensors)
            footprint.parts["tables"] += own * shape.kv_heads * (batch if tables.of_sequence else 1)
        shared |= tables.shared
    return shared


def _selected(
    policy: Selection,
    plan: LayerPlan,
    low: LayerPlan | None,
    shape: CacheShape,
    calls: Calls,
    batch: int,
    fullest: bool,
) -> tuple[Footprint, list[bool]]:
    """Return the same as `_kept` under a policy that evicts tokens.

    low: the plan of the lower rate, or None. fullest: see `size`.
    """
    layouts, rows = layouts_of_heads(plan, shape), batch * shape.kv_heads
    flush = _flush(layout for layout, _ in layouts)
    dtype, dims = policy.exact_dtype(shape.dtype), shape.key_dim + shape.value_dim
    stays = policy.evicts == "never"  # generated tokens are never evicted
    seen = calls.prompt if stays else calls.prompt + calls.generated
    budget = policy.kept(seen, plan.layer, plan.layers)
    usual = min(policy.recent, policy.latest(budget))
    like = torch.empty((batch, shape.kv_heads, 1, dims), dtype=dtype, device="meta")
    waits = 0 if policy.evicts == "step" else flush
    recent, late, slack = _recent(min(seen, usual), usual, waits, flush, calls.generated if stays else 0)
    footprint = Footprint()
    _loose(footprint, recent, like)
    footprint.parts["slack"] += like.nbytes * slack
    chosen, tiers = min(seen, usual), [True]
    if isinstance(policy, SubGen) and policy.samples:
        sinks = min(policy.sinks, seen - chosen)
        selection = _sampled(footprint, plan, shape, policy, budget, seen - chosen - sinks, batch) + 4 * sinks
    else:
        sinks = min(policy.sinks, min(seen, budget) - chosen)
        budgets = [budget]
        if policy.needs_scores and plan.scores is not None:
            budgets = policy.of_heads(budget, seen, plan.scores)[plan.layer].tolist()
        pools = [min(seen, one) - chosen - sinks for one in budgets]  # of each head; all have the slots of the largest
        rest = [0 if low is None else min(pool, policy.lower(n)) for pool, n in zip(pools, budgets, strict=True)]
        high = [pool - lower for pool, lower in zip(pools, rest, strict=True)]
        lower = None if low is None else layouts_of_heads(low, shape)
        if fullest:
            ahead = math.ceil(budget / 8) if policy.evicts_ahead else 0  # evicted down to 7/8, then filled again
            slots = _fullest(footprint, layouts, max(high) + sinks, ahead, low is not None, like)
            slots += 0 if lower is None else _fullest(footprint, lower, max(rest), ahead, False, like)
        else:
            slots = _pool(footprint, layouts, high, late, like)
            slots += 0 if lower is None else _pool(footprint, lower, rest, 0, like)
        tiers = [True] if low is None else [max(high) + late >= flush, max(rest) >= flush]
        if fullest and policy.remembers and policy.evicts == "block":  # queries of tokens since the latest eviction
            footprint.parts["selection"] += batch * shape.query_heads * shape.key_dim * flush * dtype.itemsize
        selection = 4 * (slots + sinks) * (2 if policy.remembers else 1)
        selection += 4 * recent if policy.remembers else 0
    footprint.parts["selection"] += rows * selection
    footprint.parts["exact sinks"] = rows * sinks * dims * dtype.itemsize
    return footprint, tiers


@functools.lru_cache(maxsize=256)
def _recent(tokens: int, usual: int, waits: int, flush: int, generated: int) -> tuple[int, int, int]:
    """Return the tokens of a recent window, those that have left it, and those that it has room for.

    tokens: of the prompt. usual: most tokens before `waits` others wait for a block of `flush`.
    generated: tokens that enter one by one.
    """
    one = torch.empty((1, 1, 1, 1), device="meta")
    tail, late = ExactTokens([one], usual + waits), 0
    tail.append([one.expand(-1, -1, tokens, -1)])
    for _ in range(generated):
        leave = max(0, tail.tokens + 1 - usual) // flush * flush
        late += leave
        tail.drop_front(leave)
        tail.append([one])
    return tail.tokens, late, tail.capacity - tail.tokens


def layouts_of_heads(plan: LayerPlan, shape: CacheShape) -> list[tuple[Layout, int]]:
    """Return the layouts of both sides with their head dims, if heads store different tokens."""
    plan = plan.per_head()
    return [(plan.keys.layout(shape.key_dim), shape.key_dim), (plan.values.layout(shape.value_dim), shape.value_dim)]


def _pool(footprint: Footprint, layouts: list[tuple[Layout, int]], heads: list[int], late: int, like: Tensor) -> int:
    """Count the chosen tokens of a pool, and return its slots.

    heads: tokens chosen of the prompt by each head. late: generated tokens added one block at a time.
    like: an exact token [B, H, 1, D], without content.
    """
    flush = _flush(layout for layout, _ in layouts)
    blocks, loose = max(n // flush for n in heads), max(n % flush for n in heads)
    added = [blocks * flush, *[flush] * ((loose + late) // flush)]
    _packed(footprint, layouts, added, like)
    _loose(footprint, (loose + late) % flush, like)
    return sum(added) + (loose + late) % flush


def _packed(footprint: Footprint, layouts: list[tuple[Layout, int]], added: list[int], like: Tensor) -> None:
    """Count packed tokens that are added in calls of so many, whole blocks."""
    sizes = PageSizes(_flush(layout for layout, _ in layouts))
    heads = like.shape[0] * like.shape[1]  # each is coded by itself
    for layout, _ in layouts:
        buffer = BlockBuffer(layout, heads, 1, like.device, sizes)
        for tokens in filter(None, added):
            buffer.append(blank(layout, heads, 1, tokens // layout.block_tokens, like.device))
        buffer.count(footprint)


def _loose(footprint: Footprint, tokens: int, like: Tensor) -> None:
    """Count exact tokens that fill no block."""
    footprint.parts["exact window"] += like.nbytes * tokens


def _most(footprint: Footprint, layouts: list[tuple[Layout, int]], tokens: int, like: Tensor) -> None:
    """Count the upper bound for at most so many tokens.

    Any number of them may fill no block, and a page may have only one block in use.
    """
    flush = _flush(layout for layout, _ in layouts)
    packed, sizes = tokens // flush * flush, PageSizes(flush)
    _packed(footprint, layouts, [packed], like)
    if packed:
        spare = sizes.next(flush, packed) - flush - sizes.slack(packed)
        spare_bytes = sum(spare * layout.block_bytes() / layout.block_tokens for layout, _ in layouts)
        footprint.parts["slack"] += math.ceil(spare_bytes * like.shape[0] * like.shape[1])
    _loose(footprint, min(tokens, flush - 1), like)


def _fullest(
    footprint: Footprint, layouts: list[tuple[Layout, int]], tokens: int, ahead: int, demotes: bool, like: Tensor
) -> int:
    """Count the upper bound of a pool that keeps so many tokens per head, and return its slots.

    ahead: tokens that may be added before it evicts. demotes: its tokens move to another pool, a block at a time.
    """
    flush = _flush(layout for layout, _ in layouts)
    blocks = most_blocks([layout for layout, _ in layouts], tokens + demotes * flush, flush) + 1
    blocks += math.ceil(ahead / flush) + 1 if ahead else 0
    _most(footprint, layouts, blocks * flush, like)
    _loose(footprint, flush, like)
    return (blocks + 2) * flush


def _sampled(
    footprint: Footprint, plan: LayerPlan, shape: CacheShape, policy: SubGen, budget: int, stream: int, batch: int
) -> int:
    """Count the upper bound of the sketches of `stream` tokens. Return the bytes of a head's selection.

    It assumes that all samples differ, and that the maximum number of clusters exists. With a given
    δ, a stream can have more clusters than that.
    """
    s, m = policy.sizes(budget)
    values, clusters = min(s, stream), min(m, stream)
    keys = min(clusters * policy.slots, stream)
    layouts, dtype = layouts_of_heads(plan, shape), policy.exact_dtype(shape.dtype)
    both = torch.empty((batch, shape.kv_heads, 1, shape.key_dim + shape.value_dim), dtype=dtype, device="meta")
    key = both[..., : shape.key_dim]
    _most(footprint, layouts, values, both)
    _most(footprint, layouts[:1], keys, key)
    _loose(footprint, clusters, key)
    # position, norm, weight; position, weight; slots and μ; members and slots; δ and the longest
    # value
    return 12 * values + 8 * keys + 4 * s + 8 + 4 * clusters * (1 + policy.slots) + 8
