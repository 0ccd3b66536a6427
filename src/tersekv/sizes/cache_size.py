"""Size of a cache computed from the shapes of a model and a recipe, without tokens."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.filled import Stream, blank_tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.rotary import Rotary
from tersekv.policies.base import Selection, two_rates
from tersekv.recipe import LayerPlan, Recipe
from tersekv.sizes.rate_allotment import usual
from tersekv.transforms.rope import Rope


@dataclass(frozen=True)
class CacheShape:
    """Shape of a model's cache.

    windows: sliding window in tokens of each attention layer, None for full attention.
    dtype: the model's dtype.
    ropes: RoPE of each attention layer, the same object where layers share one. None if it is
        unknown and its tables are not counted; empty if all are unknown.
    query_heads: number of query heads, which the policy mixed needs.
    latent: see `AttentionShape`.
    index_dims: `LayerPlan.index_dim` of each layer; empty if all are 0.
    heads: KV heads of each layer; empty if all have `kv_heads`.
    """

    windows: tuple[int | None, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    ropes: tuple[Rope | None, ...] = dataclasses.field(default=(), compare=False)
    query_heads: int = 0
    latent: bool = False
    index_dims: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()

    def of_layer(self, layer: int) -> CacheShape:
        """Return the shape whose `kv_heads` are those of a layer."""
        return dataclasses.replace(self, kv_heads=self.heads[layer]) if self.heads else self

    def elements(self, tokens: int, batch: int = 1) -> int:
        """Return the key and value elements of a full cache with so many tokens.

        A sliding-window layer holds the tokens of its window.
        """
        heads = self.heads or [self.kv_heads] * len(self.windows)
        held = sum(min(tokens, window or tokens) * n for window, n in zip(self.windows, heads, strict=True))
        return batch * (held * (self.key_dim + self.value_dim) + tokens * sum(self.index_dims))


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
    whole, calls = shape, Calls(tokens - generated, piece, generated)
    first = next(iter(calls.sizes()), 0)
    held: dict[tuple[LayerPlan, int | None, int | None, int], tuple[Footprint, list[bool]]] = {}
    footprints: list[Footprint] = []
    shared: dict[str, int] = {}
    rope_tables: dict[int, Tensor] = {}
    for index, window in enumerate(whole.windows):
        shape = whole.of_layer(index)
        rows = batch * shape.kv_heads
        plan = recipe.plan(index, len(shape.windows))
        plan = plan.of_latents(shape.index_dims[index] if shape.index_dims else 0) if shape.latent else plan
        plan = plan if scores is None else plan._replace(scores=scores)
        plan = plan.in_layer(first, window, shape.key_dim, shape.value_dim)
        most_tiers = 2
        if plan.policy.allots and window is None and two_rates(plan.keys, plan.values):
            plan, most_tiers = usual(plan, (shape.key_dim, shape.value_dim), shape.kv_heads)
        low = lower_plan(plan, window)
        evicting = plan.policy if isinstance(plan.policy, Selection) and window is None else None
        budget = None if evicting is None else evicting.kept(_seen(evicting, calls), plan.layer, plan.layers)
        alike = plan._replace(layer=0, scores=None, rates=None) if budget is None or plan.scores is None else plan
        key = alike, window, budget, shape.kv_heads
        if key not in held:
            if budget is None:
                held[key] = _kept(plan, window, shape, calls, batch)
            else:
                held[key] = _selected(plan, shape, calls, batch, budget, fullest)
        footprint, tiers = copy.deepcopy(held[key])
        if low is not None and tiers[1]:
            shared |= _lower_tables(low, shape, batch, footprint, most_tiers - 1)
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
        footprint.elements += tokens * plan.index_dim * batch
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
    if plan.policy.drops and window is None:
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
        if plan.index_dim:
            store.index(tokens(n, 1, plan.index_dim)[:, 0])
        store.append(*both(n))
    return store.footprint(), [tier.tokens > 0 for tier in store.tiers]


def lower_plan(plan: LayerPlan, window: int | None = None) -> LayerPlan | None:
    """Return the plan with the codecs of the lower rate if a layer has two rates, else None."""
    rest = plan.policy.rest
    if window is not None or not rest or not two_rates(plan.keys, plan.values):
        return None
    return plan._replace(keys=plan.keys.at_rate(rest), values=plan.values.at_rate(rest)).per_head()


def _lower_tables(low: LayerPlan, shape: CacheShape, batch: int, footprint: Footprint, tiers: int) -> dict[str, int]:
    """Count the tables that differ at so many lower rates. Return the tables that layers share."""
    shared: dict[str, int] = {}
    for codec, dim in ((low.keys, shape.key_dim), (low.values, shape.value_dim)):
        tables, learns = codec.table_bytes(dim), codec.learns(1, 1, dim)
        if footprint.parts["codes"] or not tables.of_sequence:
            own = sum(dim * learns[name].dtype.itemsize for name in codec.rate_tensors)
            footprint.parts["tables"] += own * tiers * shape.kv_heads * (batch if tables.of_sequence else 1)
        shared |= tables.shared
    return shared


def _seen(policy: Selection, calls: Calls) -> int:
    """Return the number of tokens that the policy chooses from. Some policies never evict generated tokens."""
    return calls.prompt + (0 if policy.evicts == "never" else calls.generated)


def _selected(
    plan: LayerPlan, shape: CacheShape, calls: Calls, batch: int, budget: int, fullest: bool
) -> tuple[Footprint, list[bool]]:
    """Return the same as `_kept` under a policy that evicts tokens.

    The policy says how many tokens the heads keep, and the layer's own store counts what holds them.
    Heads are rows of a store with one head, because each is coded by itself.

    budget: tokens that the layer keeps. fullest: see `size`.
    """
    rows = batch * shape.kv_heads
    key = torch.empty((rows, 1, 0, shape.key_dim), dtype=shape.dtype, device="meta")
    store = LayerStore(plan, key, key.new_empty((rows, 1, 0, shape.value_dim)))
    chosen, flush = store.chosen[0], store.flush_tokens
    policy = chosen.policy
    stays, seen = policy.evicts == "never", _seen(policy, calls)
    usual = min(policy.recent, policy.latest(budget))
    waits = 0 if policy.evicts == "step" else flush
    late, recent, capacity = _recent(min(seen, usual), usual, waits, flush, calls.generated if stays else 0)
    store.recent.hold(blank_tokens(store.recent.buffers, capacity))
    store.recent.tokens = recent
    queries = key.new_empty((batch, shape.query_heads, flush, shape.key_dim))  # of tokens since the latest eviction
    sinks, slack = chosen.fill(Stream(seen, seen - min(seen, usual), budget, late, fullest), queries)
    footprint = store.footprint()
    of_sinks = sum(rows * sinks * x.shape[3] * x.element_size() for x in store.recent.buffers)
    for part, held in (("exact sinks", of_sinks), ("exact window", -of_sinks), ("slack", slack)):
        footprint.parts[part] += held
    return footprint, [tier.tokens > 0 for tier in store.tiers]


@functools.lru_cache(maxsize=256)
def _recent(tokens: int, usual: int, waits: int, flush: int, generated: int) -> tuple[int, int, int]:
    """Return the tokens that have left a recent window, those in it, and those that it has memory for.

    tokens: of the prompt. usual: most tokens before `waits` others wait for a block of `flush`.
    generated: tokens that enter one by one.
    """
    one = torch.empty((1, 1, 1, 1), device="meta")
    recent, late = ExactTokens([one], usual + waits), 0
    recent.append([one.expand(-1, -1, tokens, -1)])
    for _ in range(generated):
        leave = max(0, recent.tokens + 1 - usual) // flush * flush
        late += leave
        recent.drop_front(leave)
        recent.append([one])
    return late, recent.tokens, recent.capacity
