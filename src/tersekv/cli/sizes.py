"""Sentences about the size of a cache, compared with bfloat16 and with memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tersekv.cli import output

if TYPE_CHECKING:
    from tersekv.cache.footprint import Footprint
    from tersekv.sizes.cache_size import CacheShape

COUNTED = (
    "Counted: the whole cache after a prefill in one pass (codes, scales, tables, exact tokens, slack), and weights in "
    "bfloat16. A peak also counts activations of the prompt, read in one pass or in chunks. Not counted: the memory of "
    "the program itself."
)


def peak(whole: int, chunks: int, memory: str | None = None) -> str:
    """Return a phrase about the peak memory of reading a prompt at once and in chunks, and which of them
    fits into `memory`."""
    from tersekv.sizes.estimate import CHUNK
    from tersekv.units import parse_bytes

    said = (
        f"{output.human_bytes(whole)} with weights and activations in bfloat16 while the prompt is read at once, "
        f"{output.human_bytes(chunks)} in chunks of {CHUNK}"
    )
    if memory is None or whole <= (limit := parse_bytes(memory, "memory")):
        return said
    return f"{said}: {f'only the latter fits into {memory}' if chunks <= limit else f'both are more than {memory}'}"


def compared(recipe: str, other: str, tokens: int | None, order: int) -> str:
    """Return a sentence about which of two recipes has the smaller cache. tokens, order: from `last_change`."""
    a, b = short_name(recipe), short_name(other)
    if tokens is None:
        return f"{a} is {('smaller than', 'as large as', 'larger than')[order + 1]} {b} at every length."
    length = f"some {round(tokens, -1):,} tokens"
    if order == 0:
        return f"{a} is as large as {b} from {length} on."
    return f"{a} is smaller than {b} {f'from {length} on' if order < 0 else f'below {length}'}."


def while_generating(row: dict[str, Any], recipe: str) -> str:
    """Describe the bytes of a recipe whose last tokens are generated. row: `generating` of `estimate --json`."""
    name, share = short_name(recipe), row["slack_bytes"] / row["bytes"]
    text = f"{name} {output.human_bytes(row['bytes'])}, {share:.1%} of it reserved for further tokens"
    return text + " (up to 1.5 times that, as attention decides which blocks keep empty slots)" * row["chooses"]


def equal_layers(recipe: str) -> str:
    """Return a sentence about a recipe whose policy gives layers rates of their own."""
    return (
        f"{short_name(recipe)}: all layers count alike here, with the recipe's bits. A cache has these bits on "
        "average for a prompt, and about half a bit more for generated tokens."
    )


def by_layer(recipe: str, layers: dict[str, int]) -> str:
    """Return a sentence about a recipe whose layers are coded differently. layers: their number by code."""
    each = "; ".join(f"{n} {'layer' if n == 1 else 'layers'} with {name}" for name, n in layers.items())
    return f"{short_name(recipe)} codes {each}."


def short_name(recipe: str) -> str:
    """Return the name of the preset that equals a canonical recipe, else the recipe."""
    from tersekv.recipe import PRESETS, Recipe

    return next((name for name in PRESETS if str(Recipe.parse(name)) == recipe), recipe)


def against_bfloat16(held: int, bfloat16: int) -> str:
    """Return a phrase that compares a cache with bfloat16. held: its bytes; bfloat16: its bytes
    with 16 bits per element."""
    if held < bfloat16:
        return f"{bfloat16 / held:.2f} times smaller than in bfloat16"
    if held < 1.05 * bfloat16:
        return "as large as in bfloat16" if held == bfloat16 else "slightly larger than in bfloat16"
    return f"{held / bfloat16:.1f} times as large as in bfloat16"


def gains_from(recipe: str, tokens: int | None) -> str:
    """Return a phrase about the number of tokens from which a recipe saves memory. tokens: from
    `cache.estimate.break_even`."""
    name = short_name(recipe)
    if tokens is None:
        return f"{name} never makes a cache smaller"
    return f"{name} gains from some {tokens:,} tokens on"


def nothing_gained(footprint: Footprint, shape: CacheShape, recipe: str) -> str | None:
    """Return a sentence if the cache is at least as large as in bfloat16; None if it is smaller or
    empty."""
    held, bfloat16 = footprint.total_bytes, footprint.elements * 2
    if not footprint.elements or held < bfloat16:
        return None
    from tersekv.sizes.estimate import break_even

    gains = gains_from(recipe, break_even(shape, recipe))
    return f"{footprint.tokens:,} tokens: the cache is {against_bfloat16(held, bfloat16)}; {gains}."


def verdict(row: dict[str, Any], room: int, most: int) -> str:
    """Return a phrase that says if one context fits next to the weights. row: from `estimate
    --json`; most: the most tokens that fit."""
    tokens, left = f"{row['tokens']:,} tokens", row["left_bytes"]
    if row["fits"]:
        return f"{tokens} fit: {output.human_bytes(left)} of {output.human_bytes(room)} left beside the weights"
    fewer = f"at most {most:,} do" if most else "not even one does"
    return f"{tokens} do not fit: {output.human_bytes(-left)} too many; {fewer}"


def no_room(weights: int, memory: int) -> str:
    """Return a sentence for weights that already exceed the memory."""
    return (
        f"No cache fits: the weights take {output.human_bytes(weights)} in bfloat16, "
        f"and --memory is {output.human_bytes(memory)}"
    )
