"""4-bit integers per token in groups of 64 channels (FlexGen, arXiv 2303.06865, §4).

Good for: comparisons with int4 caches of other tools.
Bad for: quality: default diverges less with fewer bits.
"""

from __future__ import annotations

from tersekv.codecs.base import Method, Pair
from tersekv.codecs.uniform import Uniform


def build(group: int = 64) -> Pair:
    """Build the codecs.

    group: channels per scale (64 in FlexGen, 128 in Atom).
    """
    return Pair(Uniform(4, "token", group), Uniform(4, "token", group, side="values"))


METHOD = Method("4-bit integers per token", "FlexGen, arXiv 2303.06865", build)
