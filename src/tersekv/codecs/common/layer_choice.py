"""Choice of the codec of a layer for `trellis` with `basis=auto`, from the shape of the layer alone.

A basis fitted on few vectors costs more bytes than it saves, and codes the tokens with most of the
weight worst. Figures: docs/measured/presets.md.
"""

from __future__ import annotations

import math
from typing import Literal

from tersekv.codecs.uniform import Uniform
from tersekv.layouts.base import Side

VECTORS_PER_CHANNEL = (12, 16)
"""Tokens per channel of a head below which no basis is fitted, and those of heads of `WIDE` channels. With fewer the
basis costs more bytes than it saves beside integers of `INTEGER_BITS`."""

WIDE = 256
"""Channels of a head from which on a basis is fitted at `INTEGER_BITS` and more only: with 3.5 bits some texts
diverged more than with integers, and a basis with fewer codes important tokens worst."""

LEAST_CHOSEN = 3.5
"""Bits from which on the rate is chosen, too: that of the preset `default`."""

INTEGER_BITS, INTEGER_GROUP = 4, 32
"""Bits and groups of the integers in layers without a basis, those of `kivi:bits=4`."""


def chosen(bits: float, held: int, head_dim: int) -> tuple[Literal["auto", "channels", "integers"], float]:
    """Return basis and bits of a layer; "auto" stands for a fitted basis.

    A layer that holds fewer than VECTORS_PER_CHANNEL tokens per channel gets integers in groups, as `kivi`
    has them. Rates below LEAST_CHOSEN stay what they are: such a layer, and one with heads of WIDE channels,
    keeps its channels. So does a layer with more than INTEGER_BITS + 1 bits, which integers would lose.

    bits: of the recipe. held: tokens that the layer is expected to hold.
    """
    wide = head_dim >= WIDE
    if held < VECTORS_PER_CHANNEL[wide] * head_dim or (wide and bits < LEAST_CHOSEN):
        integers = LEAST_CHOSEN <= bits <= INTEGER_BITS + 1
        return ("integers", INTEGER_BITS) if integers else ("channels", bits)
    return "auto", max(bits, INTEGER_BITS) if wide else bits


def integers_of_kivi(side: Side, head_dim: int, pre_rope: bool, per_head: bool) -> Uniform:
    """Return the codec of one side of `kivi:bits=4`."""
    group = math.gcd(INTEGER_GROUP, head_dim) if side == "values" else INTEGER_GROUP
    axis: Literal["channel", "token"] = "channel" if side == "keys" else "token"
    return Uniform(INTEGER_BITS, axis, group, side=side, pre_rope=pre_rope, per_head=per_head)
