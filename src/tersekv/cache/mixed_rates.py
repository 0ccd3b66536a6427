"""The cache of one layer that packs a prompt's tokens at two rates; no token is evicted.

    sinks | packed tokens of both rates | exact recent window

Packed tokens of the codec's own rate are in `side.packed`, those of the lower rate in `side.rest`,
each in order of position. `high` has one bit per token: 1 for the codec's rate. Positions follow from
it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.layer_checks import LAYER
from tersekv.cache.mixed_side import MixedSide, Split
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import require, tensor
from tersekv.cache.segments import Observed, PackedSegment
from tersekv.cache.side import SideStore, extents
from tersekv.cache.state import Rules
from tersekv.codecs import Codec
from tersekv.codecs.transforms.rope import Rope
from tersekv.errors import CacheError, UserError
from tersekv.kernels.marks import BITS, Marks, pack_bits, places_of, unpack_bits
from tersekv.policies.mixed import KEPT, Mixed
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain

UNRANKED = (
    "the policy mixed ranks tokens by queries, which only tersekv's attention sees; use "
    "`with tersekv.compress(model, recipe):`, or the policy window"
)


UNMEASURED = (
    "mixed: allot=model has given this layer no rates, because the measurement of the model has none for it; make it "
    "again with `tersekv calibrate`, or use allot=layer"
)


def rates_agree(store: MixedRatesStore, place: str) -> None:
    """Check that `high` has one bit per packed token, with as many tokens of each rate in every head."""
    held = {(side.packed.tokens, side.rest.tokens) for side in store.sides}
    require(len(held) == 1, f"{place}.sides", f"hold different numbers of tokens at each rate {sorted(held)}")
    packed, rest = held.pop()
    require(store.high.shape[2] * BITS == packed + rest, f"{place}.high", "has a wrong length")
    count = store.is_high().sum(-1)
    require(bool((count == packed).all()), f"{place}.high", f"must name {packed} tokens in every head")


class MixedRatesStore(LayerStore):
    """Full-attention layer under the policy `mixed`.

    high: uint8 [B, H, packed / 8], bit i % 8 of byte i // 8 is 1 if packed token i has the codec's rate.
    query_rope: RoPE of the layer, or None if it cannot be removed.
    queries: [B, Hq, n, D] after RoPE, kept to rank tokens that are packed later.
    """

    keeps_queries, least_queries = True, 1
    STATE = LAYER | {
        "high": lambda store: tensor(torch.uint8, store.batch_size, store.kv_heads, None),
        "queries": lambda store: tensor(store.queries.dtype, store.batch_size, None, None, store.keys.head_dim),
    }
    RULES: ClassVar[Rules] = (*LayerStore.RULES, rates_agree)

    sides: tuple[MixedSide, MixedSide]

    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
        query_rope: Rope | None = None,
    ) -> None:
        assert isinstance(plan.policy, Mixed)
        assert window is None
        if plan.policy.allots:
            raise UserError(UNMEASURED)
        self.mixed = plan.policy
        # heads store different tokens, so nothing is stored jointly for all of them
        own = {side: dataclasses.replace(getattr(plan, side), per_head=True) for side in ("keys", "values")}
        super().__init__(plan._replace(**own), keys, values, None, rope, heads)
        self.query_rope = query_rope or rope
        self.high = keys.new_empty((*keys.shape[:2], 0), dtype=torch.uint8)
        self.queries = self.keys.sinks[:, :, :0]

    def _side(self, codec: Codec, *arguments: Any) -> SideStore:
        return MixedSide(codec, self.mixed.rest, *arguments)

    # ------------------------------------------------------------------ growing

    def ranks(self, n: int) -> bool:
        """True if appending n tokens packs some of them at the lower rate."""
        if n <= self.room:
            return False
        placement = self.placement.fresh() if self.deferred else self.placement
        return self._counts(placement.move(n + self.num_tokens - placement.tokens).leave)[1] > 0

    def keep(self, query: Tensor, masked: bool = False) -> None:
        """Keep some of the queries [B, Hq, n, D] of the tokens that are about to be appended.

        masked: some of several may be in the padding, so none is kept.
        """
        if masked and query.shape[2] > 1:
            return
        kept = self.mixed.kept_queries(self.num_tokens, query.shape[2])
        if kept:
            new = query.detach()[:, :, kept].to(self.queries.dtype)
            self.queries = torch.cat([self.queries, new], dim=2)[:, :, -KEPT:] if self.queries.shape[2] else new

    def _counts(self, flush: int) -> tuple[int, int]:
        """Return how many of `flush` tokens that are packed together have each rate."""
        high = self.mixed.chosen(flush, self.flush_tokens)
        return high, flush - high

    def _add(self, new: list[Tensor], restart: bool, observed: Observed) -> None:
        """Distribute new tokens, see `LayerStore`."""
        placement = self.placement.fresh() if restart else self.placement
        before = placement.tokens - placement.tail
        sinks, flush, *_ = placement.move(new[0].shape[2])
        losses: Any = observed.losses
        if not flush:
            return super()._add(new, restart, observed)
        if self._counts(flush)[1] == 0:
            high = torch.ones((*new[0].shape[:2], flush), dtype=torch.bool, device=self.device)
        elif observed.importance is None:
            raise UserError(UNRANKED)
        else:
            high = self._choice(observed.importance[:, :, sinks : sinks + flush], before + sinks)
            losses = [Split(places_of(high), places_of(~high), loss) for loss in losses or (None, None)]
        super()._add(new, restart, Observed(losses=losses))  # `MixedSide.prepare` takes a `Split`
        self.high = torch.cat([self.high, pack_bits(high)], dim=2)
        return None

    def _choice(self, importance: Tensor, place: int) -> Tensor:
        """Return the mask [B, H, n] of the tokens from `place` on that have the codec's rate.

        Every row has as many. A row with padding has fewer tokens to choose, and padding fills up.
        """
        n = importance.shape[2]
        most = self._counts(n)[0]
        score = importance.float()
        if self.padding is not None:
            hidden = (self.padding + self.policy.sink_tokens(None) - place).clamp(0, n)
            own = torch.tensor([self.mixed.chosen(n - p, 1) for p in hidden.tolist()], device=score.device)
            filled = most - torch.maximum(own.clamp(max=most), most - hidden)
            at = torch.arange(n, device=score.device)
            score = score.masked_fill((at < hidden[:, None])[:, None], float("-inf"))
            score = score.masked_fill((at < filled[:, None])[:, None], float("inf"))
        order = score.argsort(dim=-1, descending=True, stable=True)[:, :, :most]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(2, order, True)

    # ------------------------------------------------------------------ reading

    def is_high(self) -> Tensor:
        """Return `high` as bool [B, H, packed]."""
        return unpack_bits(self.high)

    def _extents(self) -> Iterator[tuple[bool, int, Marks]]:
        """Yield, for pages of each rate: is it the lower one, first slot, and positions."""
        for first, tokens in extents(self.sides):
            yield False, first, Marks(self.high, self.packed_first, tokens, True, first)
        ends = [0, *self.sides[0].rest.ends]
        for first, last in itertools.pairwise(ends):
            yield True, first, Marks(self.high, self.packed_first, last - first, False, first)

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed tokens page by page, those of the codec's rate first."""
        return (self._segment(*extent) for extent in self._extents())

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return slots `first` to `first + tokens`, or up to the end of a page, or None.

        Slots count those of the codec's rate first.
        """
        offset = 0
        for rest, start, where in self._extents():
            if first < offset + where.tokens:
                skip = first - offset
                left = where.tokens - skip
                take = left if tokens is None else min(tokens, left)
                return self._segment(rest, start + skip, where.part(skip, take))
            offset += where.tokens
        return None

    def _segment(self, rest: bool, first: int, where: Marks) -> PackedSegment:
        keys, values = (side.view_of(rest, first, where) for side in self.sides)
        return PackedSegment(keys, values, 0, where.tokens, where, self.sides[0].correction_of(rest))

    def _in_order(self, side: SideStore, dtype: torch.dtype) -> Tensor:
        assert isinstance(side, MixedSide)
        out = side.sinks.new_empty((*side.sinks.shape[:2], self.packed_tokens, side.head_dim), dtype=dtype)
        for rest, first, where in self._extents():
            x = side.view_of(rest, first, where).decode().to(dtype)
            at = (where.positions() - self.packed_first).long().unsqueeze(-1)
            out.scatter_(2, at.expand_as(x), x)
        return torch.cat([side.sinks.to(dtype), out, side.tail.data.to(dtype)], dim=2)

    # ------------------------------------------------------------------ changing

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless n tokens can be rolled back: all, or those that are not packed."""
        super().check_crop(n)
        most = self.keys.tail.tokens
        if self.packed_tokens and most < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} of {self.num_tokens} tokens; under the policy mixed the latest {most} can be "
                "rolled back, or all"
            )

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`."""
        self.check_crop(n)
        everything = n == self.num_tokens
        if everything:
            self.high, self.queries = self.high[:, :, :0], self.queries[:, :, :0]
            for side in self.sides:
                side.restart()
        super().crop(n)
        if everything:
            for side in self.sides:
                side.restart()

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        super().select(rows)
        self.high, self.queries = (x.index_select(0, rows.to(self.device)) for x in (self.high, self.queries))

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        super().to(device)
        self.high, self.queries = self.high.to(device), self.queries.to(device)

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        footprint.parts["selection"] += self.high.nbytes + self.queries.nbytes
        return footprint
