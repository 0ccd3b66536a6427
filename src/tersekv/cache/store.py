"""Questions that attention and transformers ask a store of one layer. Defaults: it keeps all tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.context_parallel import OwnBlocks
from tersekv.cache.footprint import Footprint
from tersekv.cache.found_sinks import FoundTokens
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.ranked_tokens import RankedTokens
from tersekv.cache.rotary import Rotary
from tersekv.cache.segments import UNSEEN, ExactSegment, Observed, PackedSegment, WeightedSegment, packed_pages_of
from tersekv.cache.state import Stateful
from tersekv.kernels.attend import PackedPages

LEAST_QUERIES = 8
"""Calls with fewer queries show too few of the tokens that later queries read, so codecs do not observe them."""


class Store(Stateful, ABC):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer.

    by_head: True if heads hold different tokens.
    least_queries: calls with fewer queries are not observed.
    keeps_queries: True if queries are needed after their call.
    estimates: True if attention is estimated from weighted samples.
    found: found tokens, which are exact and packed, too; none, or one object.
    shape: [B, H, ·, D] of keys. device: that of the tensors.
    keys, values, sides: the two sides, and both.
    num_tokens: tokens received. num_evicted: of these, the first ones that have left all heads.
    deferred: True while no row is known to have a token.
    padding: int64 [B], leading positions of rows without a token, or None.
    flush_tokens: number of tokens that are packed together.
    window: the layer's sliding window in tokens, None for full attention.
    packed_tokens: number of packed tokens held here.
    latest_keys: keys [B, H, n, D] of the latest tokens, which are exact.
    heads: this process's heads under tensor parallelism, or None.
    rotary: RoPE angles of the keys, if they are packed without RoPE and all heads hold the same.
    ranked: ranks of packed tokens with two rates; none, or one object.
    own: this process's packed tokens under context parallelism, or None.
    """

    by_head: ClassVar[bool] = False
    least_queries: int = LEAST_QUERIES
    keeps_queries: bool = False
    estimates: ClassVar[bool] = False
    found: Sequence[FoundTokens] = ()
    own: OwnBlocks | None = None
    ranked: Sequence[RankedTokens] = ()
    sides: Sequence[Any]
    keys: Any
    values: Any
    shape: Any
    device: Any
    num_tokens: Any
    num_evicted: Any
    deferred: Any
    policy: Any
    padding: Tensor | None
    flush_tokens: int
    window: int | None = None
    packed_tokens: Any
    latest_keys: Any
    heads: HeadShard | None
    rotary: Rotary | None = None

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return int(self.shape[0])

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self.shape[1])

    # ------------------------------------------------------------------ reading

    @property
    @abstractmethod
    def hidden(self) -> Tensor | None:
        """Positions of each row to mask for tokens that all heads hold, int64 [B]; None for none."""

    @abstractmethod
    def exact_segments(self) -> list[ExactSegment]:
        """Return the segments of exact tokens, without empty ones."""

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed slots `first` to `first + tokens`, multiples of `flush_tokens`, or None."""
        return None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed slots page by page, without copies."""
        return iter(())

    def pages(self) -> PackedPages | None:
        """Return packed slots as attention reads them, None if there are none."""
        return packed_pages_of(list(self.packed_pages()), self.kv_heads)

    def held(self) -> Iterator[PackedSegment | ExactSegment]:
        """Return the tokens held, in the order of votes."""
        yield from self.packed_pages()
        yield from self.exact_segments()

    @abstractmethod
    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens held as [B, H, n, D], in order of position.

        Raises:
            UserError: heads or processes hold different tokens.
        """

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens that have not voted yet, or None."""
        return None

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

    # ------------------------------------------------------------------ growing and changing

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens and pack those that leave the recent window.

        padding: int64 [B], leading positions of each row without a token, known from the first mask.
        observed: what `observes`, `ranks` and `observed` say that is needed.

        Raises:
            CacheError, UserError: values are not finite, or too large. Nothing was added.
        """

    @abstractmethod
    def is_whole(self, seen: int) -> bool:
        """True if, after an interrupted append, keys and values are known to hold the `seen` tokens."""

    @abstractmethod
    def check_crop(self, n: int) -> None:
        """Raise CacheError unless the n latest tokens can be rolled back."""

    @abstractmethod
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""

    @abstractmethod
    def tables(self) -> list[Tensor]:
        """Return the tables of both sides next to the packed tensors. Layers share some."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
