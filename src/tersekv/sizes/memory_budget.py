"""Tokens that a policy may keep in a given memory: the option `memory=512MB` of policies that evict.

The policy keeps as many tokens as fit for any length of the stream. All bytes of one sequence count,
as in a footprint: codes, tables, exact tokens, positions, and the slots of evicted tokens that share
a block with others.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS
from tersekv.cache.pool import most_blocks
from tersekv.errors import UserError
from tersekv.layouts.base import Layout
from tersekv.policies.base import MOST_TOKENS, UNLIMITED, Selection
from tersekv.recipe import LayerPlan, Recipe, Term
from tersekv.sizes.cache_size import CacheShape, layouts_of_heads, lower_plan, size
from tersekv.units import LONGEST, human_bytes, parse_bytes


def settled(recipe: Recipe, shape: CacheShape) -> Recipe:
    """Return the recipe with a number of tokens as budget in place of `memory`.

    Raises:
        UserError: the memory is too small for the policy's sinks and latest tokens.
    """
    policy = recipe.policy()
    if not isinstance(policy, Selection) or policy.memory == UNLIMITED:
        return recipe
    return _settled(recipe, shape, policy)


@functools.lru_cache(maxsize=64)
def _settled(recipe: Recipe, shape: CacheShape, policy: Selection) -> Recipe:
    limit, least = parse_bytes(policy.memory, "memory"), policy.sinks + policy.recent + 1
    if (needed := most_bytes(with_budget(recipe, least), shape)) > limit:
        raise UserError(
            f"{recipe}: memory={policy.memory} is too small; {policy.sinks} sinks, {policy.recent} recent tokens and "
            f"the tables of this model need {human_bytes(needed)}: give more, or set sinks and recent lower"
        )
    low, high, end = least, 2 * least, MOST_TOKENS + 1  # the end is reached if all layers slide, for example
    while high < end and most_bytes(with_budget(recipe, high), shape) <= limit:
        low, high = high, min(2 * high, end)
    while high - low > 1:
        middle = (low + high) // 2
        fits = most_bytes(with_budget(recipe, middle), shape) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return with_budget(recipe, low)


def with_budget(recipe: Recipe, tokens: int) -> Recipe:
    """Return the recipe whose policy keeps so many tokens."""
    options = {name: value for name, value in recipe.tokens.options if name != "memory"}
    options["budget"] = float(tokens)
    return dataclasses.replace(recipe, tokens=Term(recipe.tokens.name, tuple(sorted(options.items()))))


def most_bytes(recipe: Recipe, shape: CacheShape) -> int:
    """Return the most bytes that one sequence of any length holds under a policy with a number of
    tokens as budget.
    """
    total = size(shape, recipe, LONGEST).total_bytes
    for layer, window in enumerate(shape.windows):
        plan = recipe.plan(layer, len(shape.windows))
        if window is None and isinstance(plan.policy, Selection) and not plan.policy.samples:
            total += _most_spare(plan, plan.policy, shape)
    return total


def _most_spare(plan: LayerPlan, policy: Selection, shape: CacheShape) -> int:
    """Return the most bytes of slots without a token in one layer, beyond those `size` counts."""
    budget, layouts = int(policy.budget), layouts_of_heads(plan, shape)
    usual, low = min(policy.recent, policy.latest(budget)), lower_plan(plan)
    lower = 0 if low is None else policy.lower(budget)
    spare = _of_pool(policy, layouts, budget - usual - lower, policy.sinks, shape, demotes=low is not None)
    if low is not None:
        spare += _of_pool(policy, layouts_of_heads(low, shape), lower, 0, shape)
    kept = policy.remembers and policy.evicts == "block"  # queries of tokens that came since the latest eviction
    queries = shape.query_heads * shape.key_dim * _flush(layouts) if kept else 0
    return math.ceil(shape.kv_heads * spare) + queries * policy.exact_dtype(shape.dtype).itemsize


def _of_pool(
    policy: Selection,
    layouts: list[tuple[Layout, int]],
    tokens: int,
    sinks: int,
    shape: CacheShape,
    demotes: bool = False,
) -> float:
    """Return the most bytes of slots without a token in one head of a pool for so many tokens.

    demotes: its tokens move to another pool, a block at a time.
    """
    flush = _flush(layouts)
    blocks = most_blocks([layout for layout, _ in layouts], tokens + demotes * flush, flush)
    if policy.evicts_ahead:  # evicted down to 7/8, then filled again
        blocks += math.ceil(policy.budget / 8 / flush) + 1
    slots = (blocks + 1) * flush - (tokens - sinks)
    page = max(MIN_PAGE_TOKENS, blocks * flush // GROWTH) + flush
    packed = sum(layout.block_bytes() / layout.block_tokens for layout, _ in layouts)
    exact = (shape.key_dim + shape.value_dim) * policy.exact_dtype(shape.dtype).itemsize
    selection = 4 * (2 if policy.remembers else 1)
    return (slots + page) * packed + slots * selection + 2 * flush * exact


def _flush(layouts: list[tuple[Layout, int]]) -> int:
    return math.lcm(*(layout.block_tokens for layout, _ in layouts))
