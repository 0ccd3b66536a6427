"""KIVI (arXiv 2402.02750): keys per channel in groups of 32 tokens, values per token in groups of
32 channels.

This implementation keeps attention sinks exact and packs whole blocks, so 128 to 159 of the latest
tokens are exact. The authors' code quantises 128 keys at once when the residual window of 128 is
full, and values one by one (§3.3). Stored bits per element: 3.0 with bits=2, 5.0 with bits=4.

Good for: 4 bits without any fitting: it reads prompts fastest and decodes fast.
Bad for: 2 bits: on a small model one token in five changes.
"""

from __future__ import annotations

from tersekv.codecs.base import Method, Pair, check_range
from tersekv.codecs.uniform import Uniform


def build(bits: int = 2, group: int = 32) -> Pair:
    """Build the codecs.

    bits: 1 to 8 for both sides.
    group: tokens per scale of keys, channels per scale of values.
    """
    check_range("group", group, 1, 1024)
    return Pair(Uniform(bits, "channel", group), Uniform(bits, "token", group, side="values"))


METHOD = Method("KIVI", "arXiv 2402.02750", build)
