"""Tokens that a policy may keep in a given memory: the option `memory=512MB` of policies that evict.

The policy keeps as many tokens as fit for any length of the stream. All bytes of one sequence count,
as in a footprint: codes, tables, exact tokens, positions, and the slots of evicted tokens that share
a block with others.
"""

from __future__ import annotations

import dataclasses
import functools

from tersekv.errors import UserError
from tersekv.policies.base import MOST_TOKENS, UNLIMITED
from tersekv.recipe import Recipe, Term
from tersekv.sizes.cache_size import CacheShape, size
from tersekv.units import LONGEST, human_bytes, parse_bytes


def settled(recipe: Recipe, shape: CacheShape) -> Recipe:
    """Return the recipe with a number of tokens as budget in place of `memory`.

    Raises:
        UserError: the memory is too small for the policy's sinks and latest tokens.
    """
    memory = str(dict(recipe.tokens.options).get("memory", UNLIMITED))
    return recipe if memory == UNLIMITED else _settled(recipe, shape, memory)


@functools.lru_cache(maxsize=64)
def _settled(recipe: Recipe, shape: CacheShape, memory: str) -> Recipe:
    policy = recipe.policy()
    limit, least = parse_bytes(memory, "memory"), max(2, policy.sinks + policy.recent + 1)  # 1 is a fraction
    if (needed := most_bytes(with_budget(recipe, least), shape)) > limit:
        raise UserError(
            f"{recipe}: memory={memory} is too small; {policy.sinks} sinks, {policy.recent} recent tokens and "
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
    return size(shape, recipe, LONGEST, fullest=True).total_bytes
