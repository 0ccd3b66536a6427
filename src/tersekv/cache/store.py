"""Questions that attention and transformers ask a store of one layer. Defaults: it keeps all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from tersekv.cache.context_parallel import OwnBlocks
from tersekv.cache.found_sinks import FoundTokens
from tersekv.cache.parallel import ContextParallel
from tersekv.cache.segments import WeightedSegment
from tersekv.cache.state import Stateful

LEAST_QUERIES = 8
"""Calls with fewer queries show too few of the tokens that later queries read, so codecs do not observe them."""


class Store(Stateful):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer.

    by_head: True if heads hold different tokens.
    least_queries: calls with fewer queries are not observed.
    keeps_queries: True if queries are needed after their call.
    estimates: True if attention is estimated from weighted samples.
    found: found tokens, which are exact and packed, too; none, or one object.
    shape: [B, H, ·, D] of keys. device: that of the tensors.
    own: this process's packed tokens under context parallelism, or None.
    """

    by_head: ClassVar[bool] = False
    least_queries: int = LEAST_QUERIES
    keeps_queries: bool = False
    estimates: ClassVar[bool] = False
    found: Sequence[FoundTokens] = ()
    own: OwnBlocks | None = None
    sides: Sequence[Any]
    shape: Any
    device: Any

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return int(self.shape[0])

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self.shape[1])

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The processes that share the packed tokens, or None if nothing is packed yet."""
        return None

    @property
    def packed_everywhere(self) -> bool:
        """True if all processes have packed tokens, or none has."""
        return True

    def record_past(self, past: bool) -> None:
        """Let a sliding window evict tokens at a crop only, or not."""

    def ranks(self, n: int) -> bool:
        """True if appending n tokens needs their importance."""
        return False

    def observed(self, queries: int) -> int:
        """Return how many of the latest `queries` queries vote for tokens."""
        return 0

    def observes(self, n: int) -> bool:
        """True if appending n tokens fits a codec that observes queries."""
        return False

    def keep(self, query: Tensor, masked: bool = False) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended.

        masked: the call has a mask, so some of several queries may be in the padding.
        """

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return sampled tokens with log-weights for softmax's numerator and denominator."""
        return []

    @property
    def longest_value(self) -> Tensor | None:
        """Largest norm of a value so far, float32 [B, H], if attention is an estimate, which it bounds."""
        return None
