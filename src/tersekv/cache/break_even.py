"""From how many tokens on a recipe makes a cache smaller than bfloat16 does."""

from __future__ import annotations

from tersekv.cache.estimate import CacheShape, predict
from tersekv.recipe import Recipe
from tersekv.units import LONGEST

STEP = 8
"""Tokens between the lengths that are looked at."""

UNPACKED_TOKENS = 512
"""More exact tokens than a window and a page add between two lengths at which tokens are packed."""


def break_even(shape: CacheShape, recipe: str | Recipe, batch: int = 1) -> int | None:
    """The length from which on a cache takes less than 16 bits per element, `STEP` tokens exactly; None if it never
    does. Shorter caches are held in exact sinks, exact recent tokens and tables, whose bytes packing has yet to repay.

    Raises:
        UserError: the recipe does not fit the head dims or layers.
    """
    recipe = Recipe.parse(recipe)
    token_bytes = shape.elements(1, batch) * 2

    def saved(tokens: int) -> int:
        return shape.elements(tokens, batch) * 2 - predict(shape, recipe, tokens, batch).total_bytes

    # Bytes rise with exact tokens and fall when these are packed: the last length that gains nothing counts.
    length = STEP
    while saved(length) <= min(UNPACKED_TOKENS, length // 2) * token_bytes:
        length *= 2
        if length > LONGEST:
            return None
    while length > STEP and saved(length - STEP) > 0:
        length -= STEP
    return length
