"""KIVI (arXiv 2402.02750): keys per channel in groups of 32 tokens, values per token in groups of 32 channels.

Ours keeps sinks exact and flushes whole blocks, so that between 128 and 159 of the latest tokens are exact; the
authors' code quantises 128 keys at once when the residual of 128 is full, and slides values one by one (§3.3). True
bits: 3.0 and 5.0 for 2 and 4.
"""

from __future__ import annotations

from tersekv.codecs.base import Method, Pair, check_range
from tersekv.codecs.uniform import Uniform


def build(bits: int = 2, group: int = 32) -> Pair:
    """bits: 1 to 8 for both sides; group: tokens per range of keys, channels per range of values."""
    check_range("group", group, 1, 1024)
    return Pair(Uniform(bits, "channel", group), Uniform(bits, "token", group, side="values"))


METHOD = Method("KIVI", "arXiv 2402.02750", build)
