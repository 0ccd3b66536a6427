"""Reading half of the cache of one layer: what attention and transformers ask. `LayerStore` holds and changes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from tersekv.cache.coding import own_sinks
from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.found_sinks import FoundTokens
from tersekv.cache.head_tokens import UNREADABLE, HeadTokens
from tersekv.cache.packed_side import PackedSide
from tersekv.cache.parallel import ELSEWHERE, ContextParallel, HeadShard, OwnBlocks
from tersekv.cache.placement import Move, Placement
from tersekv.cache.ranked_tokens import RankedTokens
from tersekv.cache.rotary import Rotary
from tersekv.cache.segments import ExactSegment, PackedSegment, WeightedSegment, packed_pages_of
from tersekv.cache.slots import POSITIONS
from tersekv.cache.state import Stateful
from tersekv.cache.tier import Tier
from tersekv.errors import UserError
from tersekv.kernels.attend import PackedPages, Where
from tersekv.layouts.base import View
from tersekv.policies.base import TokenPolicy
from tersekv.tensors import gathered, plain

LEAST_QUERIES = 8
"""Calls with fewer queries show too few of the tokens that later queries read, so codecs do not observe them."""


class Store(Stateful):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer, for reading.

    policy, window: see `LayerStore`.
    sinks, recent: exact tokens.
    tiers: packed tokens of the codec's own rate, and perhaps of a lower one.
    keys, values, sides: the two sides of the first tier, and both.
    latent: see `LayerPlan`. Then the sides hold latents and rotated keys, which segments join.
    indexer: keys by which an indexer of the model chooses tokens, which stay exact; none, or one object.
    placement: which tokens are exact, packed or evicted.
    padding: int64 [B], leading positions of rows without a token, while rows have sinks of their own or nothing is
        packed, or if heads differ; or None.
    flush_tokens: number of tokens that are packed together.
    heads: this process's heads under tensor parallelism, or None.
    rotary: RoPE angles of the keys, if they are packed without RoPE and all heads hold the same.
    found: found tokens, which are exact and packed, too; none, or one object.
    ranked: ranks of packed tokens with two rates; none, or one object.
    chosen: tokens that differ by head, because the policy evicts some; none, or one object.
    own: this process's packed tokens under context parallelism, or None.
    by_head: True if heads hold different tokens.
    estimates: True if attention is estimated from weighted samples.
    least_queries: calls with fewer queries are not observed.
    keeps_queries: True if queries are needed after their call.
    """

    policy: TokenPolicy
    window: int | None
    sinks: ExactTokens
    recent: ExactTokens
    tiers: list[Tier]
    keys: PackedSide
    values: PackedSide
    sides: tuple[PackedSide, PackedSide]
    latent: bool
    indexer: Sequence[ExactTokens]
    placement: Placement
    padding: Tensor | None
    flush_tokens: int
    heads: HeadShard | None
    rotary: Rotary | None
    found: Sequence[FoundTokens]
    ranked: Sequence[RankedTokens]
    chosen: Sequence[HeadTokens]
    own: OwnBlocks | None
    room: int
    by_head: bool
    estimates: bool
    least_queries: int
    keeps_queries: bool
    _pages: PackedPages | None

    # getters in C, because a step reads these numbers several times
    shape = property(attrgetter("keys.shape"), doc="Shape [B, H, ·, D] of keys.")
    num_tokens = property(attrgetter("placement.tokens"), doc="Number of tokens received.")
    num_evicted = property(attrgetter("placement.evicted"), doc="Number of first tokens that have left all heads.")
    deferred = property(attrgetter("placement.deferred"), doc="True while a row may have no token, see `Placement`.")
    packed_first = property(attrgetter("placement.packed_first"), doc="Position of the first packed token.")

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.recent.buffers[0].device

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens held here, of all rates."""
        return self.placement.packed if self.ranked else sum(tier.tokens for tier in self.tiers)

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return int(self.shape[0])

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return int(self.shape[1])

    @property
    def value_dim(self) -> int:
        """Number of channels of values as attention reads them."""
        return (self.keys if self.latent else self.values).head_dim

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The processes that share the packed tokens, or None if nothing is packed yet."""
        return self.own.processes if self.own is not None and self.placement.packed else None

    @property
    def packed_everywhere(self) -> bool:
        """True if all processes have packed tokens, or none has."""
        return self.own is None or self.own.everywhere(self.placement.packed)

    @property
    def hidden(self) -> Tensor | None:
        """Positions of each row's padding and own sinks, int64 [B], to mask for other tokens; None without padding."""
        return None if self.padding is None else self.padding + self.sinks.tokens

    # ------------------------------------------------------------------ queries

    def observes(self, n: int) -> bool:
        """True if appending n tokens fits a codec that observes queries. Nothing is packed yet then."""
        codecs = [side.codec for side in self.sides]
        if self.chosen or not any(codec.needs_fit == "prompt" and codec.observes for codec in codecs):
            return False
        return self._next(n).leave > 0

    def watches(self, n: int) -> bool:
        """True if a call that appends n tokens is of interest to a policy or a codec."""
        return bool(self.ranked or self.chosen) or self.observes(n)

    def ranks(self, n: int) -> bool:
        """True if appending n tokens packs some of them at a lower rate, by their importance."""
        if n <= self.room or not self.ranked:
            return False
        leave = self._next(n).leave
        return leave > 0 and (self.policy.waits or min(self.ranked[0].counts(leave)) < leave)

    def observed(self, queries: int) -> int:
        """Return how many of the latest `queries` queries vote for tokens."""
        return sum(chosen.observed(queries) for chosen in self.chosen)

    def keep(self, query: Tensor, masked: bool = False) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended.

        masked: the call has a mask, so some of several queries may be in the padding.
        """
        for ranked in self.ranked:
            ranked.keep(query, self.num_tokens, masked)
        for chosen in self.chosen:
            chosen.keep(query, self.num_tokens, masked)

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens that have not voted yet, or None."""
        return self.chosen[0].waiting_queries() if self.chosen else None

    def leaves(self) -> int:
        """Return how many tokens of the window leave it to be packed when one is appended.

        It is 0 where these tokens and the fitted codecs do not suffice to encode them as packing would.
        """
        own = self.chosen or self.ranked or self.own or self.heads
        if own or self.room > 0 or self.deferred or (self.rotary is not None and self.rotary.rope.varies):
            return 0
        for side in self.sides:
            if side.codec.needs_fit or side.codec.encode_spans_heads or (side.corrected and side.lost is None):
                return 0
        move = self._next(1)
        return 0 if move.sinks or move.skip or move.leave > self.recent.tokens else move.leave

    def forget_ahead(self) -> None:
        """Forget what was encoded ahead and is not packed."""
        for side in (side for tier in self.tiers for side in tier.sides):
            side.ahead = None

    def _next(self, n: int) -> Move:
        """Return what appending n tokens changes."""
        placement = self.placement.fresh() if self.deferred else self.placement
        return placement.move(n + self.num_tokens - placement.tokens)

    # ------------------------------------------------------------------ tokens

    def exact_segments(self) -> list[ExactSegment]:
        """Return sinks, tokens that fill no block, window and found tokens, without empty ones."""
        segments = []
        if self.sinks.tokens:
            first = 0 if self.padding is None else own_sinks(self.padding, self.placement.sinks)
            keys, values = self.sinks.buffers  # no call at every step, unless channels are joined
            segments += self.sinks.segment(first) if self.latent else [ExactSegment(keys, values, first)]
        for chosen in self.chosen:
            segments += chosen.exact_segments()
        if n := self.recent.tokens:
            keys, values = self.recent.buffers
            first = self.num_tokens - n
            joined = self.recent.segment(first) if self.latent else None
            segments += joined or [ExactSegment(keys[:, :, :n], values[:, :, :n], first)]
        for found in self.found:
            segments += found.segment()
        return segments

    @plain
    def spare_room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the places of new tokens after those of the window; None if some tokens leave it then, or must be
        rounded."""
        recent, n = self.recent, keys.shape[2]
        if n > self.room or any(x.dtype != held.dtype for x, held in zip((keys, values), recent.buffers, strict=True)):
            return None
        recent.reserve(n)
        key_buffer, value_buffer = (x[:, :, recent.tokens : recent.tokens + n] for x in recent.buffers)
        return key_buffer, value_buffer

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed slots `first` to `first + tokens`, multiples of `flush_tokens`, or None.

        Slots count those of the codec's own rate first. The segment ends where a rate ends.
        """
        for rate, tier in enumerate(() if self.estimates else self.tiers):
            left = tier.tokens - first
            if left > 0:
                return self._packed(rate, first, left if tokens is None else min(tokens, left))
            first = -left
        return None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed tokens page by page, without copies, those of the codec's own rate first."""
        for rate in range(0 if self.estimates else len(self.tiers)):
            yield from self._packed_at(rate)

    def _packed_at(self, rate: int) -> Iterator[PackedSegment]:
        return (self._packed(rate, *extent) for extent in self.tiers[rate].extents)

    def pages(self) -> PackedPages | None:
        """Return all packed tokens as attention reads them, None if there are none; cached until they change."""
        if self._pages is None:
            if not self.packed_tokens:
                return None
            pages = list(self._kernel_pages())
            padded = (
                partial(Store._padded, weakref.proxy(self)) if any(page.ends is not None for page in pages) else None
            )
            made = packed_pages_of(pages, self.kv_heads, self.value_dim if self.latent else 0, padded)
            if not all(page.keys.keeps and page.values.keeps for page in pages):
                return made
            self._pages = made
            if made is not None:
                made.kept = True
        return self._pages

    def _kernel_pages(self) -> Iterator[PackedSegment]:
        """Return the same as `packed_pages`, but of heads with different numbers of blocks pages without empty ones."""
        for rate in range(0 if self.estimates else len(self.tiers)):
            yield from self._ragged(rate) if self.tiers[rate].ragged else self._packed_at(rate)

    def _ragged(self, rate: int) -> Iterator[PackedSegment]:
        tier, first = self.tiers[rate], 0
        before = torch.zeros(tier.slots.heads, dtype=torch.int64)
        for number, blocks in enumerate(tier.slots.counts):
            count = blocks.cpu() * tier.block
            for ranked in self.ranked:
                marks = ranked.where(rate, before, count, self.packed_first)
                angles = None if self.rotary is None else self.rotary.of(marks, marks.tokens, self.device)
                keys, values = tier.page_views(number, angles, marks.ends is None)
                yield PackedSegment(keys, values, marks, marks.tokens, tier.keys.correction, marks.ends)
                before = before + count
            for chosen in self.chosen:
                ends, tokens = count.flatten().cumsum(0).view_as(count), int(count.sum())
                at = tier.slots.held[POSITIONS][first : first + tokens]
                keys, values = tier.page_views(number, chosen.angles(at.view(1, 1, -1), ends), False)
                yield PackedSegment(keys, values, at, tokens, tier.keys.correction, ends)
                first += tokens

    def _padded(self) -> PackedPages | None:
        """Return `pages` with equally many blocks in all heads, as the torch reference reads them."""
        return packed_pages_of(list(self.packed_pages()), self.kv_heads, self.value_dim if self.latent else 0)

    def _packed(self, rate: int, first: int, tokens: int) -> PackedSegment:
        keys, values = self.views(rate, first, tokens, joint=True)
        where = self._where(rate, first, tokens)
        if self.ranked and self.hidden is not None:
            where = torch.as_tensor(where)
            where = where.masked_fill(where < self.hidden[:, None, None], -1)
        return PackedSegment(keys, values, where, tokens, self.tiers[rate].keys.correction)

    def views(self, rate: int, first: int, tokens: int, joint: bool = False) -> list[View]:
        """Return packed tokens of both sides. joint: as attention reads them, see `Tier.views`."""
        tier, angles = self.tiers[rate], None
        if self.rotary is not None:
            angles = self.rotary.of(self._where(rate, first, tokens), tokens, self.device)
        for chosen in self.chosen:
            angles = chosen.angles(tier.slots.positions[:, :, first : first + tokens])
        return tier.views(first, tokens, angles, joint)

    def _where(self, rate: int, first: int, tokens: int) -> Where:
        """Return the positions of slots `first` to `first + tokens` of a tier, see `PackedSegment`."""
        slots, part = self.tiers[rate].slots, slice(first, first + tokens)
        for ranked in self.ranked:
            return ranked.positions(rate, slots, part, self.packed_first)
        if slots is not None:
            return slots.positions[:, :, part]
        return self.packed_first + first if self.own is None else self.own.part(first, tokens)

    def held(self) -> Iterator[PackedSegment | ExactSegment]:
        """Return the tokens held in the order of votes: packed and exact slots of each rate, then the window."""
        exact = self.exact_segments()
        for chosen in self.chosen:
            for rate, loose in enumerate(chosen.loose):
                yield from self._packed_at(rate)
                if loose.tokens:
                    yield exact.pop(0)
        yield from exact

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return sampled tokens with log-weights for softmax's numerator and denominator."""
        return [segment for chosen in self.chosen for segment in chosen.weighted_segments()]

    @property
    def longest_value(self) -> Tensor | None:
        """Largest norm of a value so far, float32 [B, H], if attention is an estimate, which it bounds."""
        longest, window = self.chosen[0].longest if self.chosen else None, self.recent.data[1]
        if longest is None or not window.shape[2]:
            return longest
        return torch.maximum(longest, window.float().norm(dim=-1).amax(-1))

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens held as [B, H, n, D], in order of position.

        Of latent attention they are latents and rotated keys.

        Raises:
            UserError: heads or processes hold different tokens.
        """
        if self.chosen:
            raise UserError(UNREADABLE)
        if self.context_parallel is not None:
            raise UserError(f"{ELSEWHERE}: only tersekv's attention can read it, without output_attentions")
        extents = [(rate, *extent) for rate, tier in enumerate(self.tiers) for extent in tier.extents]
        views = zip(*(self.views(*extent) for extent in extents), strict=True)
        packed = [[view.decode().to(dtype) for view in side] for side in views] or [[], []]
        if self.ranked and extents:
            at = torch.cat([torch.as_tensor(self._where(*extent)) for extent in extents], dim=2) - self.packed_first
            number = torch.arange(at.shape[2], device=at.device).expand(at.shape)
            order = number.new_empty((*at.shape[:2], self.packed_tokens + 1))  # empty slots come last
            order.scatter_(2, torch.where(at < 0, self.packed_tokens, at).long(), number)
            packed = [[gathered(torch.cat(parts, dim=2), order[:, :, :-1])] for parts in packed]
        keys, values = (
            torch.cat([sinks.to(dtype), *parts, recent.to(dtype)], dim=2)
            for sinks, parts, recent in zip(self.sinks.data, packed, self.recent.data, strict=True)
        )
        if self.padding is not None:
            own = own_sinks(self.padding, self.placement.sinks)[:, None, :, None]
            keys, values = (
                x.scatter(2, own.expand(-1, x.shape[1], -1, x.shape[-1]), sinks.to(dtype))
                for x, sinks in zip((keys, values), self.sinks.data, strict=True)
            )
        for found in self.found:
            found.put((keys, values), 0)
        return keys, values
