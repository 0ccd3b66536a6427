"""What a compiled kernel knows of a leaf: a tuple of integers, fields by these names. Compilers before Triton 3.7 take
no other tuples as constants."""

from __future__ import annotations

import triton.language as tl

KIND: tl.constexpr = tl.constexpr(0)
CHANNELS: tl.constexpr = tl.constexpr(1)
"""Of the leaf's vectors: what a query or an output has; rows of the sketch for `signs`."""
PADDED: tl.constexpr = tl.constexpr(2)
"""Channels with padding, a power of two."""
BLOCK: tl.constexpr = tl.constexpr(3)
"""Tokens per block of the planes."""
FIRST: tl.constexpr = tl.constexpr(4)
"""Of keys with RoPE: the head's channel where theirs begin. Of values: where their output begins."""
MAPPED: tl.constexpr = tl.constexpr(5)
"""Padded channels of the vectors that a matrix makes of decoded ones in front of RoPE; 0: there is none."""

MAPPED_CHANNELS: tl.constexpr = tl.constexpr(6)
"""How many of those are channels."""

BITS: tl.constexpr = tl.constexpr(7)
GROUP: tl.constexpr = tl.constexpr(8)
PER_TOKEN: tl.constexpr = tl.constexpr(9)
HAS_OFFSET: tl.constexpr = tl.constexpr(10)
IS_INTEGER: tl.constexpr = tl.constexpr(11)
WORDS: tl.constexpr = tl.constexpr(12)
SCALES: tl.constexpr = tl.constexpr(13)
WIDE: tl.constexpr = tl.constexpr(14)
"""Scales are bfloat16 and may exceed float16."""

LEVELS: tl.constexpr = tl.constexpr(7)
LEVEL_BITS: tl.constexpr = tl.constexpr(8)
"""Of polar level 1; those of the others follow."""

STREAM_WORDS: tl.constexpr = tl.constexpr(7)
"""16-bit words of a trellis token's stream."""

SKETCH_ROWS: tl.constexpr = tl.constexpr(7)
"""Of signs with channels per block."""
PADDED_SKETCH_ROWS: tl.constexpr = tl.constexpr(8)
CHOSEN: tl.constexpr = tl.constexpr(9)
"""Channels that a block chooses."""
PADDED_CHOSEN: tl.constexpr = tl.constexpr(10)
OF_CHOSEN: tl.constexpr = tl.constexpr(11)
"""The sketch is of the chosen channels, else of all others."""

ANGLES_KIND: tl.constexpr = tl.constexpr(7)
"""Of a turned vector: where its angles come from, see `rope.py`."""

FLOAT32: tl.constexpr = tl.constexpr(7)
"""Exact tokens are float32."""
FLOAT8: tl.constexpr = tl.constexpr(8)
"""They are float8."""

EXACT: tl.constexpr = tl.constexpr(0)
GRID: tl.constexpr = tl.constexpr(1)
SIGNS: tl.constexpr = tl.constexpr(2)
POLAR: tl.constexpr = tl.constexpr(3)
SPARSE: tl.constexpr = tl.constexpr(4)
TRELLIS: tl.constexpr = tl.constexpr(5)
TURNED: tl.constexpr = tl.constexpr(6)
"""Holds no tokens: one vector that RoPE turns."""
SKETCH: tl.constexpr = tl.constexpr(7)
"""Signs whose channels differ between blocks."""
LAYOUTS = {
    "exact": EXACT, "grid": GRID, "signs": SIGNS, "signs per block": SKETCH, "polar": POLAR, "sparse": SPARSE,
    "trellis": TRELLIS,
}  # fmt: skip

# Where scales are multiplied (SCALES).
TO_COEFFICIENTS: tl.constexpr = tl.constexpr(0)
TO_PRODUCT: tl.constexpr = tl.constexpr(1)
TO_ELEMENTS: tl.constexpr = tl.constexpr(2)
