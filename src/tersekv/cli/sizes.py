"""Sentences about the size of a cache: against bfloat16's, against memory, and what is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tersekv.cli import output

if TYPE_CHECKING:
    from tersekv.cache.estimate import CacheShape
    from tersekv.cache.footprint import Footprint

COUNTED = (
    "Counted: all that the cache holds after a prompt fed at once (codes, scales, tables, exact tokens, slack), and "
    "weights in bfloat16. Not counted: activations, and what the program itself takes."
)


def while_generating(row: dict[str, Any], recipe: str) -> str:
    """Describe the bytes of a recipe whose last tokens are generated. row: `generating` of `estimate --json`."""
    name, share = short_name(recipe), row["slack_bytes"] / row["bytes"]
    text = f"{name} {output.human_bytes(row['bytes'])}, {share:.1%} of it room for tokens to come"
    return text + " (up to 1.5 times that, as attention decides which blocks keep empty slots)" * row["chooses"]


def short_name(recipe: str) -> str:
    """The preset that a canonical recipe is, or the recipe."""
    from tersekv.recipe import PRESETS, Recipe

    return next((name for name in PRESETS if str(Recipe.parse(name)) == recipe), recipe)


def against_bfloat16(held: int, bfloat16: int) -> str:
    """held: bytes of a cache; bfloat16: what it would take with 16 bits per element."""
    if held < bfloat16:
        return f"{bfloat16 / held:.2f} times smaller than in bfloat16"
    if held < 1.05 * bfloat16:
        return "as large as in bfloat16" if held == bfloat16 else "slightly larger than in bfloat16"
    return f"{held / bfloat16:.1f} times as large as in bfloat16"


def gains_from(recipe: str, tokens: int | None) -> str:
    """From how many tokens on a recipe gains; `tokens` as of `cache.estimate.break_even`."""
    name = short_name(recipe)
    if tokens is None:
        return f"{name} never makes a cache smaller"
    return f"{name} gains from some {tokens:,} tokens on"


def nothing_gained(footprint: Footprint, shape: CacheShape, recipe: str, batch: int = 1) -> str | None:
    """A sentence if the cache is as large as in bfloat16 or larger; None if it is smaller, or empty."""
    held, bfloat16 = footprint.total_bytes, footprint.elements * 2
    if not footprint.elements or held < bfloat16:
        return None
    from tersekv.cache.estimate import break_even

    gains = gains_from(recipe, break_even(shape, recipe, batch))
    return f"{footprint.tokens:,} tokens: the cache is {against_bfloat16(held, bfloat16)}; {gains}."


def verdict(row: dict[str, Any], room: int, most: int) -> str:
    """Yes or no for one context beside the weights. row: of `tersekv estimate --json`; most: tokens that do fit."""
    tokens, left = f"{row['tokens']:,} tokens", row["left_bytes"]
    if row["fits"]:
        return f"{tokens} fit: {output.human_bytes(left)} of {output.human_bytes(room)} left beside the weights"
    fewer = f"at most {most:,} do" if most else "not even one does"
    return f"{tokens} do not fit: {output.human_bytes(-left)} too many; {fewer}"


def no_room(weights: int, memory: int) -> str:
    """A sentence for weights that take all memory."""
    return (
        f"No cache fits: the weights take {output.human_bytes(weights)} in bfloat16, "
        f"and --memory is {output.human_bytes(memory)}"
    )
