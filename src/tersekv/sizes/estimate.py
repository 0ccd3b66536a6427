"""Size of a cache computed from shapes, and the length where it gets smaller than bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape, size
from tersekv.sizes.memory_budget import settled
from tersekv.transforms.rope import standard_rope
from tersekv.units import LONGEST


def _llama(layers: int, heads: int) -> CacheShape:
    return CacheShape((None,) * layers, heads, 128, 128, torch.float16, (standard_rope(128),) * layers)


KNOWN = {
    "LLaMA-7B": _llama(32, 32),
    "LLaMA-13B": _llama(40, 40),
    "LLaMA-30B": _llama(60, 52),
    "LLaMA-65B": _llama(80, 64),
}
"""Models of KVQuant's tables by name (arXiv 2302.13971, Table 2), known without a config file."""


def predict(
    shape: CacheShape,
    recipe: str | Recipe,
    tokens: int,
    batch: int = 1,
    piece: int = 0,
    generated: int = 0,
    scores: Tensor | None = None,
) -> Footprint:
    """Return the footprint of `batch` sequences of `tokens` tokens.

    piece: tokens per call while the prompt is fed, 0 for one call.
    generated: number of last tokens that are fed one by one.
    scores: importance of the heads, for policies that need it (`LayerPlan`). Without it heads count
        as equally important, which changes the result by less than a block of exact tokens per head.

    For policies that evict tokens the prompt counts as fed in one call. Otherwise attention decides
    which blocks keep slots of evicted tokens. For policies that also evict generated tokens, such
    slots are not counted.

    Raises:
        UserError: the recipe does not fit the head dims or layers.
    """
    return size(shape, settled(Recipe.parse(recipe), shape), tokens, batch, piece, generated, scores)


CHUNK = 512
"""Prompt tokens per forward pass that peaks are compared at."""

SCRATCH = 20_000_000
"""Bytes that a forward pass takes whatever the model: libraries' buffers and fragments of freed memory."""


PAST_MASK, SLIDING_MASK = 5, 10
"""Bytes per query and token of masks: of chunks after the first, and of sliding windows. Measured, with the copies that
torch's attention makes."""


class Widths(NamedTuple):
    """Widths of a decoder: hidden states, gated MLP, and vocabulary."""

    hidden: int
    mlp: int
    vocabulary: int


def prefill_bytes(
    widths: Widths, shape: CacheShape, tokens: int, batch: int = 1, chunk: int = 0, width: int = 2
) -> int:
    """Return the bytes that reading a prompt takes beside weights and cache.

    The moment with the most tensors is in the MLP (gate, up, and their product) or in the attention
    (queries, keys and values, before and after RoPE). A product of matrices copies one weight matrix.
    Chunks after the first and sliding windows have a mask. Logits are those of the last token. Scores
    never exist as a whole, as torch's fused attention and ours compute them in tiles.

    chunk: tokens per forward pass, 0 for all at once. width: bytes per activation and weight.
    """
    queries, held = shape.query_heads * shape.key_dim, shape.kv_heads * (shape.key_dim + shape.value_dim)
    each = max(4 * widths.hidden + 3 * widths.mlp, 2 * widths.hidden + 5 * queries + 2 * held)
    read = min(chunk or tokens, tokens)
    slides = max((window for window in shape.windows if window is not None), default=0)
    mask = PAST_MASK * read * (tokens - read) + SLIDING_MASK * read * min(tokens, read + slides) * bool(slides)
    matrix = width * widths.hidden * max(widths.mlp, queries)
    return batch * (width * read * each + mask + 4 * widths.vocabulary) + matrix + SCRATCH


def last_change(a: Callable[[int], int], b: Callable[[int], int]) -> tuple[int | None, int]:
    """Compare two sizes by length. Return the length from which on their order stays, and the order:
    -1 if `a` is smaller there, 0 if they are equal, else 1.

    The length is None if the order is the same at every length. Sizes grow in blocks, so near that
    length the order may change several times. Its error is 2 % or `STEP` tokens.
    """

    def order(tokens: int) -> int:
        x, y = a(tokens), b(tokens)
        return (x > y) - (x < y)

    high, found = LONGEST_COMPARED, order(LONGEST_COMPARED)
    while order(low := max(STEP, high * 2 // 3)) == found:
        if low == STEP:
            return None, found
        high = low
    while high - low > max(STEP, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if order(middle) == found else (middle, high)
    return high, found


LONGEST_COMPARED = 1 << 20
"""Longest length at which recipes are compared."""

STEP = 8
"""Step between the lengths that are tried, in tokens."""

UNPACKED_TOKENS = 512
"""Upper bound of the exact tokens that accumulate between two packings."""


def break_even(shape: CacheShape, recipe: str | Recipe, batch: int = 1) -> int | None:
    """Return the length from which on a cache takes less than 16 bits per element, or None.

    The result is exact to `STEP` tokens. Shorter caches consist mostly of exact sinks, exact recent
    tokens and tables, so packing saves less than these cost.

    Raises:
        UserError: the recipe does not fit the head dims or layers.
    """
    recipe = Recipe.parse(recipe)
    token_bytes = shape.elements(1, batch) * 2

    def saved(tokens: int) -> int:
        return shape.elements(tokens, batch) * 2 - predict(shape, recipe, tokens, batch).total_bytes

    # Bytes rise with exact tokens and fall when these are packed. The last length without savings
    # counts.
    length = STEP
    while saved(length) <= min(UNPACKED_TOKENS, length // 2) * token_bytes:
        length *= 2
        if length > LONGEST:
            return None
    while length > STEP and saved(length - STEP) > 0:
        length -= STEP
    return length
