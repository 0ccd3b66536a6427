"""Choice of the codec of a layer for `trellis` with `basis=auto`, from the shape of the layer alone.

A basis fitted on few vectors costs more bytes than it saves, and codes the tokens with most of the
weight worst. Figures: docs/presets.md.
"""

from __future__ import annotations

import math
from typing import Literal

from tersekv.codecs.uniform import Uniform
from tersekv.layouts.base import Side

VECTORS_PER_CHANNEL = 12
"""Tokens per channel of a head below which no basis is fitted. 8 are too few, 16 are enough."""

WIDE, WIDE_BITS = 256, 4.5
"""Channels of a head from which on channels are kept, and the bits that they need to equal `kivi:bits=4`."""

LEAST_CHOSEN = 3.5
"""Bits from which on the rate is chosen, too: that of the preset `default`."""

INTEGER_BITS, INTEGER_GROUP = 4, 32
"""Bits and groups of the integers in layers with few tokens, those of `kivi:bits=4`."""


def chosen(bits: float, held: int, head_dim: int) -> tuple[Literal["auto", "channels", "integers"], float]:
    """Return basis and bits of a layer; "auto" stands for a fitted basis.

    A layer that holds fewer than VECTORS_PER_CHANNEL tokens per channel gets integers in groups, as
    `kivi` has them. Heads of WIDE channels or more keep their channels and get WIDE_BITS at least.
    Rates below LEAST_CHOSEN stay what they are: only the basis is chosen.

    bits: of the recipe. held: tokens that the layer is expected to hold.
    """
    few, wide = held < VECTORS_PER_CHANNEL * head_dim, head_dim >= WIDE
    if bits < LEAST_CHOSEN:
        return "channels" if few or wide else "auto", bits
    if few:
        return "integers", INTEGER_BITS
    if wide:
        return "channels", max(bits, WIDE_BITS)
    return "auto", bits


def integers_of_kivi(side: Side, head_dim: int, pre_rope: bool, per_head: bool) -> Uniform:
    """Return the codec of one side of `kivi:bits=4`."""
    group = math.gcd(INTEGER_GROUP, head_dim) if side == "values" else INTEGER_GROUP
    axis: Literal["channel", "token"] = "channel" if side == "keys" else "token"
    return Uniform(INTEGER_BITS, axis, group, side=side, pre_rope=pre_rope, per_head=per_head)
