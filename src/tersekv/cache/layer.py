"""The cache of one layer: exact sinks | packed blocks | exact recent window (tail).

The cache is append-only: packed tokens are never decoded and packed again. Tokens are rounded to
the exact dtype before they are packed, and blocks start at fixed positions. The packed bytes
therefore do not depend on how tokens were fed, unless a codec is fitted on the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.coding import own_sinks, without_padding
from tersekv.cache.context_parallel import ELSEWHERE, OwnBlocks
from tersekv.cache.footprint import Footprint
from tersekv.cache.found_sinks import FoundTokens, found_are_packed
from tersekv.cache.layer_checks import LAYER, layer_padding, layer_tokens
from tersekv.cache.pages import ROLLBACK_TOKENS, PageSizes
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.placement import Move, Placement
from tersekv.cache.ranked_tokens import RankedTokens, ranked_are_packed
from tersekv.cache.rotary import Rotary
from tersekv.cache.segments import UNSEEN, ExactSegment, Observed, PackedSegment, packed_pages_of
from tersekv.cache.side import SideStore, extents
from tersekv.cache.state import Rules, Spec
from tersekv.cache.store import Store
from tersekv.errors import CacheError, UserError
from tersekv.kernels.attend import PackedPages, Where
from tersekv.policies.base import two_rates
from tersekv.recipe import LayerPlan
from tersekv.tensors import gathered, plain
from tersekv.transforms.rope import Rope


class LayerStore(Store):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer.

    keys, values: tensors with the shapes of the first tokens.
    window: the layer's sliding window in tokens, None for full attention. A sliding-window layer
        has no sinks and evicts packed tokens that no query can see any more.
    rope: RoPE of the layer's keys, needed if they are coded before RoPE.
    heads: this process's heads under tensor parallelism, or None.
    context_parallel: processes that share the packed tokens, or None.
    query_rope: RoPE of the layer, for policies that rank tokens; that of the keys by default.
    """

    STATE: ClassVar[Spec] = LAYER
    RULES: ClassVar[Rules] = (layer_tokens, layer_padding, found_are_packed, ranked_are_packed)
    PARTS: ClassVar[tuple[str, ...]] = ("placement", "sides", "rotary", "found", "ranked")
    MADE: ClassVar[tuple[str, ...]] = ("_pages",)

    @plain
    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
        context_parallel: ContextParallel | None = None,
        query_rope: Rope | None = None,
    ) -> None:
        rest = plan.policy.rest if window is None and two_rates(plan.keys, plan.values) else 0.0
        if rest:  # heads store different tokens, so nothing is stored jointly for all of them
            plan = plan.per_head()
        plan = plan._replace(keys=plan.keys.to(keys.device), values=plan.values.to(keys.device))
        self.plan, self.policy, self.window, self.heads = plan, plan.policy, window, heads
        blocks = plan.keys.layout(keys.shape[-1]).block_tokens, plan.values.layout(values.shape[-1]).block_tokens
        self.flush_tokens = math.lcm(*blocks)
        dtype = plan.policy.exact_dtype(keys.dtype)
        tail_tokens = plan.policy.recent + plan.policy.waiting_tokens(self.flush_tokens, window)
        self.rotary = Rotary(rope) if rope is not None and plan.keys.needs_rope else None
        sizes = PageSizes(self.flush_tokens, None if window is None else window + ROLLBACK_TOKENS)
        corrected = plan.policy.corrected_share
        self.keys = SideStore(plan.keys, keys, dtype, sizes, tail_tokens, self.rotary, heads, corrected, rest)
        self.values = SideStore(plan.values, values, dtype, sizes, tail_tokens, None, heads, 0.0, rest)
        self.sides = self.keys, self.values
        if not plan.policy.packs_generated:
            for side in self.sides:
                side.tail.grows = True
        self.padding: Tensor | None = None  # set while rows of a batch have sinks of their own
        self.placement = Placement(plan.policy, window, self.flush_tokens)
        self.room = 0  # lower bound of the tokens that can be added before some leave the window
        self._pages: PackedPages | None = None  # cached until packed blocks change
        most = plan.policy.most_found if window is None and two_rates(plan.keys, plan.values) else 0
        like = self.keys.sinks, self.values.sinks
        self.found = [FoundTokens(most, *like, heads)] if most else []
        rope = query_rope or rope
        self.ranked = [RankedTokens(plan.policy, self.flush_tokens, self.keys.sinks, rope)] if rest else []
        if self.ranked:
            self.keeps_queries, self.least_queries = True, 1
        self.own = None if context_parallel is None else OwnBlocks(context_parallel, self.flush_tokens, keys.device)

    # getters in C, because a step reads these numbers several times
    shape = property(attrgetter("keys.sinks.shape"), doc="See `Store`.")
    device = property(attrgetter("keys.sinks.device"), doc="See `Store`.")
    num_tokens = property(attrgetter("placement.tokens"), doc="Number of tokens received.")
    num_evicted = property(attrgetter("placement.evicted"), doc="Number of tokens that have left a sliding window.")
    deferred = property(attrgetter("placement.deferred"), doc="See `Placement`.")
    packed_first = property(attrgetter("placement.packed_first"), doc="Position of the first packed token.")
    packed_tokens = property(attrgetter("keys.packed_tokens"), doc="Number of packed tokens held here.")

    @property
    def context_parallel(self) -> ContextParallel | None:
        """The processes that share the packed tokens, or None if nothing is packed yet."""
        return self.own.processes if self.own is not None and self.placement.packed else None

    @property
    def packed_everywhere(self) -> bool:
        """True if all processes have packed tokens, or none has."""
        return self.own is None or self.own.everywhere(self.placement.packed)

    @property
    def latest_keys(self) -> Tensor:
        """Keys [B, H, n, D] of the latest tokens, which are exact."""
        return self.keys.tail.data

    @property
    def hidden(self) -> Tensor | None:
        """Positions of each row's padding and own sinks, int64 [B], to mask for other tokens; None without padding."""
        return None if self.padding is None else self.padding + self.keys.sinks.shape[2]

    @plain
    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens and pack those that leave the recent window.

        padding: int64 [B], leading positions of each batch row without a token, known from the
            first mask. Each row's own first tokens become its sinks.
        observed: losses, if `observes` says that they are needed.

        Raises:
            CacheError, UserError: values are not finite, or too large. Nothing was added.
        """
        n = keys.shape[2]
        new = [self.keys.tail.rounded(keys), self.values.tail.rounded(values)]
        if n <= self.room:  # nothing leaves the recent window
            if self.rotary is not None and self.rotary.rope.varies:
                self.rotary.note(self.num_tokens, n)
            self.keys.tail.append(new[0])
            self.values.tail.append(new[1])
            self.placement.tokens += n
            self.room -= n
            return
        if self.deferred and padding is not None and int(padding.max()) > 0:
            self.padding = padding
        if self.rotary is not None:
            self.rotary.note(self.num_tokens, n, self.padding if self.deferred else None)
        if not self.deferred or self.padding is None:
            self._add(new, False, observed)
        elif int(self.padding.max()) + max(1, self.placement.most_sinks) > self.num_tokens + n:
            for side, x in zip(self.sides, new, strict=True):  # a padded row cannot fill its sinks, or is empty
                side.tail.append(x)
            self.placement.tokens += n
        else:  # start over with all tokens, as if they had come in one call
            new = [torch.cat([side.tail.data, x], dim=2) for side, x in zip(self.sides, new, strict=True)]
            new = [without_padding(x, self.padding, self.placement.most_sinks) for x in new]
            self._add(new, True, observed)
            self.padding = self.padding if self.placement.most_sinks else None

    def observes(self, n: int) -> bool:
        """True if appending n tokens fits a codec that observes queries. Nothing is packed yet then."""
        codecs = [side.codec for side in self.sides]
        if not any(codec.needs_fit == "prompt" and codec.observes for codec in codecs):
            return False
        return self._next(n).leave > 0

    def record_past(self, past: bool) -> None:
        """Let a sliding window evict tokens at a crop only, or not."""
        self.placement.record_past = past

    def ranks(self, n: int) -> bool:
        """True if appending n tokens packs some of them at a lower rate."""
        return n > self.room and any(ranked.counts(self._next(n).leave)[1] for ranked in self.ranked)

    def _next(self, n: int) -> Move:
        """Return what appending n tokens changes."""
        placement = self.placement.fresh() if self.deferred else self.placement
        return placement.move(n + self.num_tokens - placement.tokens)

    def keep(self, query: Tensor, masked: bool = False) -> None:
        """Keep queries of tokens that are about to be appended, see `RankedTokens`."""
        for ranked in self.ranked:
            ranked.keep(query, self.num_tokens, masked)

    def _add(self, new: list[Tensor], restart: bool, observed: Observed) -> None:
        """Distribute new tokens to sinks, packed blocks and tail.

        restart: `new` includes the tail's tokens.
        """
        n, placement = new[0].shape[2], self.placement.fresh() if restart else self.placement
        move = placement.move(n)
        place = placement.tokens - placement.tail + move.sinks
        own = range(move.skip, move.leave) if self.own is None else self.own.run(placement.packed, move.leave)
        processes = None if self.own is None or not move.leave else self.own.processes
        hidden = None if self.padding is None else self.padding + self.placement.most_sinks
        highs = [ranked.choose(observed, own, place, move.sinks, hidden) for ranked in self.ranked if move.leave]
        parts = self.ranked[0].parts(highs[0]) if highs else [own, *[range(0)] * len(self.ranked)]
        prepared = [
            side.prepare(x, move.sinks, parts, move.leave, restart, place, loss, hidden, processes)
            for side, x, loss in zip(self.sides, new, observed.losses or (None, None), strict=True)
        ]
        for found in self.found if move.leave else ():
            leaving = [side.leaving(x, placement.tail, move) for side, x in zip(self.sides, new, strict=True)]
            found.look(leaving, place, hidden)
        placement.add(n, move)
        self.placement = placement
        for side, changes in zip(self.sides, prepared, strict=True):
            side.forget(move.forget)
            side.commit(changes)
        for ranked, high in zip(self.ranked, highs, strict=False):
            ranked.add(high)
        if move.leave or move.forget:
            self._pages = None
            if self.own is not None:
                self.own.add(place, own)
        self.room = placement.room()

    def exact_segments(self) -> list[ExactSegment]:
        """Return sinks and tail, without empty ones."""
        keys, values = self.sides
        segments = []
        if keys.sinks.shape[2]:
            first = 0 if self.padding is None else own_sinks(self.padding, self.placement.sinks)
            segments.append(ExactSegment(keys.sinks, values.sinks, first))
        if n := keys.tail.tokens:
            segments.append(ExactSegment(keys.tail._data[:, :, :n], values.tail._data[:, :, :n], self.num_tokens - n))
        for found in self.found:
            segments += found.segment()
        return segments

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed slots `first` to `first + tokens`, multiples of `flush_tokens`, or None.

        Slots count those of the codec's own rate first. The segment ends where a rate ends.
        """
        for rate, tier in enumerate(self.keys.tiers):
            left = tier.packed.tokens - first
            if left > 0:
                return self._packed(rate, first, left if tokens is None else min(tokens, left))
            first = -left
        return None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed tokens page by page, without copies, those of the codec's own rate first."""
        for rate, tiers in enumerate(zip(*(side.tiers for side in self.sides), strict=True)):
            yield from (self._packed(rate, *extent) for extent in extents(tiers))

    def pages(self) -> PackedPages | None:
        """Return all packed tokens as attention reads them, None if there are none; cached until they change."""
        if self._pages is None:
            pages = list(self.packed_pages())
            made = packed_pages_of(pages, self.kv_heads)
            if not all(page.keys.keeps and page.values.keeps for page in pages):
                return made
            self._pages = made
            if made is not None:
                made.kept = True
        return self._pages

    def _packed(self, rate: int, first: int, tokens: int) -> PackedSegment:
        where: Where = self.packed_first + first
        if self.own is not None:
            where = self.own.part(first, tokens)
        for ranked in self.ranked:
            where = ranked.marks(rate, first, tokens, self.packed_first)
        keys, values = (side.view(rate, first, tokens, where) for side in self.sides)
        return PackedSegment(keys, values, where, tokens, self.keys.tiers[rate].correction)

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all tokens held as [B, H, n, D], in order of position.

        Raises:
            UserError: other processes hold some of them.
        """
        if self.context_parallel is not None:
            raise UserError(f"{ELSEWHERE}: only tersekv's attention can read it, without output_attentions")
        pages = list(self.packed_pages())
        both = [[page.keys for page in pages], [page.values for page in pages]]
        packed = [[view.decode().to(dtype) for view in views] for views in both]
        if self.ranked and pages:
            order = self.ranked[0].order()
            packed = [[gathered(torch.cat(parts, dim=2), order)] for parts in packed]
        keys, values = (
            torch.cat([side.sinks.to(dtype), *parts, side.tail.data.to(dtype)], dim=2)
            for side, parts in zip(self.sides, packed, strict=True)
        )
        if self.padding is not None:
            own = own_sinks(self.padding, self.placement.sinks)[:, None, :, None]
            keys, values = (
                x.scatter(2, own.expand(-1, x.shape[1], -1, x.shape[-1]), side.sinks.to(dtype))
                for x, side in zip((keys, values), self.sides, strict=True)
            )
        for found in self.found:
            found.put((keys, values), 0)
        return keys, values

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless the n latest tokens can be rolled back."""
        held = self.keys.tail.tokens
        if self.context_parallel is not None and held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens: {ELSEWHERE}, and {held} are exact in all (the policy's option recent "
                "says how many at least)"
            )
        if self.ranked and self.packed_tokens and held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} of {self.num_tokens} tokens; under the policy mixed the latest {held} can be "
                "rolled back, or all"
            )
        self.placement.check_crop(n, None if self.padding is None else int(self.padding.max()))

    def is_whole(self, seen: int) -> bool:
        """True if, after an interrupted append, keys and values still hold the `seen` tokens."""
        held = {self.num_evicted + side.sinks.shape[2] + side.packed_tokens + side.tail.tokens for side in self.sides}
        return self.num_tokens == seen and held == {seen}

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens.

        Affected packed blocks are removed as a whole. Their other tokens return to the tail, decoded.

        Raises:
            CacheError: a sliding window, a padded batch or the cache holds too few tokens.
        """
        self.check_crop(n)
        first, from_tail = self.packed_first, min(n, self.placement.tail)
        removed, back = self.placement.crop(n)
        past = self.placement.past() if self.placement.record_past else 0
        self._pages, self.room = None, 0
        for side, codec in zip(self.sides, (self.plan.keys, self.plan.values), strict=True):
            side.tail.drop_back(from_tail)
            if self.num_tokens == 0:
                side.restart(codec)  # to be fitted on the next prompt
            elif removed:
                side.unpack_back(min(removed, side.packed_tokens), back, first)  # others may hold some
            if side.sinks.shape[2] > self.placement.sinks:
                side.sinks = side.sinks[:, :, : self.placement.sinks].clone()
            side.forget(past)
        for found in self.found:
            first = self.num_tokens - self.placement.tail
            found.put([side.tail.data for side in self.sides], first)
            found.crop(first, self.num_tokens == 0)
        if self.num_tokens == 0:
            self.padding = None
            self.own = self.own and OwnBlocks(self.own.processes, self.flush_tokens, self.device)
            for ranked in self.ranked:
                ranked.restart()
            if self.rotary is not None:
                self.rotary.clear()

    def _held(self) -> list[Any]:
        """Return the parts that hold tensors."""
        return [*self.sides, *self.found, *self.ranked, *([] if self.own is None else [self.own])]

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        rows, self._pages = rows.to(self.device), None
        for part in self._held():
            part.select(rows)
        self.padding = None if self.padding is None else self.padding.index_select(0, rows)
        if self.rotary is not None:
            self.rotary.select(rows)

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        self._pages = None
        self.plan = self.plan._replace(keys=self.plan.keys.to(device), values=self.plan.values.to(device))
        for part in self._held():
            part.to(device)
        self.padding = None if self.padding is None else self.padding.to(device)

    def tables(self) -> list[Tensor]:
        """Return the tables of both sides, without a codec's that is not fitted yet. Layers share some."""
        rope = []
        if self.rotary is not None and self.packed_tokens:
            rope = self.rotary.tables(self.device, self.keys.codec.centred, self.keys.head_dim)
        return [*rope, *(table for side in self.sides for table in side.tables())]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        rows = self.batch_size * self.kv_heads * min(self.num_tokens, self.window or self.num_tokens)
        footprint = Footprint(self.num_tokens, rows * sum(side.head_dim for side in self.sides))
        footprint.coded = {self.plan.coded: 1}
        for part in self._held():
            part.count(footprint)
        masks = len(self.found) * self.batch_size * (self.kv_heads if self.ranked else 1)  # of decode steps
        footprint.parts["selection"] += masks * self.packed_tokens
        return footprint
