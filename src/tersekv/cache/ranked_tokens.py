"""Ranks of a layer's packed tokens: each KV head has two rates, and its most important tokens the higher one.

A tier of the layer has the tokens of one rate. Tokens are ranked when they are packed. The most important
ones of a head enter the tier of its higher rate, the others that of its lower one, both in order of
position. One bit per token says which; positions follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.schema import require, tensor
from tersekv.cache.segments import Observed
from tersekv.cache.slots import Slots
from tersekv.cache.state import Spec, Stateful
from tersekv.errors import UserError
from tersekv.kernels.marks import BITS, Marks, pack_bits, places_of, unpack_bits
from tersekv.policies.base import TokenPolicy
from tersekv.policies.mixed import KEPT, Mixed
from tersekv.tensors import joined
from tersekv.transforms.rope import Rope

UNRANKED = (
    "the policy mixed ranks tokens by queries, which only tersekv's attention sees; use "
    "`with tersekv.compress(model, recipe):`, or, if the model's own code reads keys and values, a recipe without this "
    "policy, such as default"
)

UNMEASURED = (
    "mixed: allot=model has given this layer no rates, because the measurement of the model has none for it; make it "
    "again with `tersekv calibrate`, or use allot=layer"
)


def ranked_are_packed(store: Any, place: str) -> None:
    """Check that `high` has one bit per packed token, and that each head has the tokens of its rates."""
    for ranked in store.ranked:
        where = f"{place}.ranked.0.high"
        require(ranked.high.shape[2] * BITS == store.placement.packed, where, "has a wrong length")
        high = ranked.is_high().sum(-1).cpu()
        for number, tier in enumerate(store.tiers):
            wanted = sum(
                torch.where(ranked.tiers[:, i] == number, n, 0)
                for i, n in enumerate((high, store.placement.packed - high))
            )
            fits = bool((tier.blocks.cpu() * tier.block == wanted).all())
            require(fits, where, f"must name as many tokens as each head has in tier {number}")


class HeadRates:
    """The rates of each KV head of a layer.

    rates: see `LayerPlan`; None if the share `budget` of the tokens of all heads has the codec's bits, and the rest
        `rest` bits.
    lower: bits of the layer's tiers, except the first, whose codec has the bits of the plan.
    tiers: int64 [H, 2], number of the tier of each head's higher and lower rate, which differ.
    shares: share of each head's tokens that have the higher rate.
    """

    def __init__(self, heads: int, rates: Tensor | None, rest: float, budget: float) -> None:
        self.lower, self.tiers, self.shares = [rest], torch.tensor([[0, 1]] * heads), [budget] * heads
        if rates is not None:
            rates = rates.cpu()
            bits = tier_bits(rates)
            self.lower, self.shares = bits[1:], rates[:, 2].tolist()
            self.tiers = torch.tensor([[bits.index(of) for of in both] for both in rates[:, :2].tolist()])

    def users(self, tier: int) -> list[int]:
        """Return the heads that have tokens in a tier."""
        return [head for head, tiers in enumerate(self.tiers.tolist()) if tier in tiers]


def tier_bits(rates: Tensor) -> list[float]:
    """Return the bits of each tier of heads with these rates, the most first. rates: see `LayerPlan`."""
    bits: list[float] = rates[:, :2].unique().flip(0).tolist()
    return bits


class OfTier(NamedTuple):
    """Tokens that are packed in a tier.

    blocks: number of blocks of each head, int64 [B, H]. counts: number of tokens of each head.
    tokens: which they are, ascending, int64 [B, H, most of a head]. A head that has fewer gets any tokens in the other
        places. On the meta device any tensor.
    """

    blocks: Tensor
    counts: list[int]
    tokens: Tensor


class RankedTokens(Stateful):
    """The ranks of a layer's packed tokens under the policy `mixed`.

    block: number of tokens that are packed together.
    rates: those of the heads.
    high: uint8 [B, H, packed / 8], bit i % 8 of byte i // 8 is 1 if packed token i has its head's higher rate.
    query_rope: RoPE of the layer, or None if it cannot be removed.
    queries: [B, Hq, n, D] after RoPE, kept to rank tokens that are packed later.
    """

    STATE: ClassVar[Spec] = {
        "high": lambda ranked: tensor(torch.uint8, *ranked.high.shape[:2], None),
        "queries": lambda ranked: tensor(
            ranked.queries.dtype, len(ranked.queries), None, None, ranked.queries.shape[3]
        ),
    }

    def __init__(
        self, policy: TokenPolicy, block: int, keys: Tensor, query_rope: Rope | None, rates: HeadRates
    ) -> None:
        assert isinstance(policy, Mixed)
        if policy.allots and not policy.waits:
            raise UserError(UNMEASURED)
        self.policy, self.block, self.query_rope = policy, block, query_rope
        self.tiers, self.shares = rates.tiers, rates.shares
        self.high = keys.new_empty((*keys.shape[:2], 0), dtype=torch.uint8)
        self.queries = keys[:, :, :0]

    # ------------------------------------------------------------------ growing

    def counts(self, leave: int, unit: int = 0) -> list[int]:
        """Return how many of `leave` tokens that are packed together have each head's higher rate.

        unit: they are a multiple of it, by default of whole blocks.
        """
        return [self.policy.chosen(share, leave, unit or self.block) for share in self.shares]

    def keep(self, query: Tensor, seen: int, masked: bool) -> None:
        """Keep some of the queries [B, Hq, n, D] of tokens that are about to be appended to `seen` others.

        masked: some of several may be in the padding, so none is kept.
        """
        if masked and query.shape[2] > 1:
            return
        kept = self.policy.kept_queries(seen, query.shape[2])
        if kept:
            new = query.detach()[:, :, kept] if not query.is_meta else query[:, :, : len(kept)]
            new = new.to(self.queries.dtype)
            if self.queries.shape[2]:
                both = self.queries, new  # `out`, because autocast refuses to concatenate float16 without it
                new = joined(*both) if new.is_meta else torch.cat(both, dim=2, out=new.new_empty(0))
            self.queries = new[:, :, -KEPT:]

    def choose(self, observed: Observed, n: int, place: int, sinks: int, hidden: Tensor | None) -> Tensor:
        """Return the mask [B, H, n] of the n tokens from `place` on that have the higher rate.

        sinks: first new tokens, which are not among them.
        hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.

        Raises:
            UserError: some have the lower rate, and their importance was not observed.
        """
        counts = self.counts(n)
        if min(counts) == n or self.high.is_meta:
            return torch.ones((*self.high.shape[:2], n), dtype=torch.bool, device=self.high.device)
        if observed.importance is None:
            raise UserError(UNRANKED)
        score = observed.importance[:, :, sinks : sinks + n].float()
        most, at = torch.tensor(counts, device=score.device), torch.arange(n, device=score.device)
        if hidden is not None:  # a row with padding has fewer tokens to choose, and padding fills up
            hidden = (hidden - place).clamp(0, n)[:, None]
            chosen = torch.tensor([self.counts(n - p, 1) for p in hidden.flatten().tolist()], device=score.device)
            filled = most - torch.maximum(torch.minimum(chosen, most), most - hidden)
            score = score.masked_fill(at < hidden[..., None], float("-inf"))
            score = score.masked_fill(at < filled[..., None], float("inf"))
        order = score.argsort(dim=-1, descending=True, stable=True)
        chosen = (at < most[:, None]).expand_as(order)
        return torch.empty_like(order, dtype=torch.bool).scatter_(2, order, chosen)

    def by_tier(self, high: Tensor) -> list[OfTier]:
        """Return the tokens that are packed in each tier. high: what `choose` returned, not empty."""
        n, first, found = high.shape[2], self.tiers[:, 0].tolist(), []
        most = torch.tensor(self.counts(n)) // self.block
        both = torch.stack([most, n // self.block - most], dim=1)
        order = None if high.is_meta else high.argsort(dim=-1, descending=True, stable=True)  # the higher rate first
        for tier in range(1 + int(self.tiers.max())):
            blocks, tokens = (both * (self.tiers == tier)).sum(1), high
            counts = (blocks * self.block).tolist()
            if order is not None:
                begin = [0 if own == tier else n - count for own, count in zip(first, counts, strict=True)]
                numbers = (torch.arange(max(counts)) + torch.tensor(begin)[:, None]).clamp_(max=n - 1).to(high.device)
                tokens = order.gather(2, numbers.expand(len(order), -1, -1))
            found.append(OfTier(blocks.expand(high.shape[:2]), counts, tokens))
        return found

    def alike(self, counts: Sequence[Sequence[int]], heads: slice) -> Sequence[slice]:
        """Return slices of some heads that pack as many tokens in every tier. counts: of each tier, by head."""
        kinds, found, first = list(zip(*counts, strict=True)), [], heads.start
        for h in range(heads.start + 1, heads.stop + 1):
            if h == heads.stop or kinds[h] != kinds[first]:
                found.append(slice(first, h))
                first = h
        return found

    def add(self, high: Tensor) -> None:
        """Note the rates of tokens that were packed."""
        self.high = joined(self.high, pack_bits(high))

    # ------------------------------------------------------------------ reading

    def is_high(self) -> Tensor:
        """Return `high` as bool [B, H, packed]."""
        return unpack_bits(self.high)

    def where(self, tier: int, before: Tensor, count: Tensor, packed_first: int) -> Marks:
        """Return the positions of a page of a tier.

        before: number of each head's tokens in the tier's pages before. count: in this page; both int64 [B, H].
        packed_first: position of the first packed token.
        """
        value, ends = self.tiers[:, 0] == tier, count.flatten().cumsum(0).view_as(count)
        if bool((count == count[0, 0]).all()):
            return Marks(self.high, packed_first, int(count[0, 0]), value, before)
        return Marks(self.high, packed_first, int(ends[-1, -1]), value, before - (ends - count), ends)

    def positions(self, tier: int, slots: Slots, tokens: slice, packed_first: int) -> Tensor:
        """Return the positions int32 [B, H, n] of a tier's slots, −1 for an empty one."""
        _, there = slots.index(unit=slots.unit)
        numbers, there = there.cumsum(-1)[:, :, tokens] - 1, there[:, :, tokens]
        value = (self.tiers[:, 0] == tier).to(self.high.device)
        mask = self.is_high() == value[:, None]
        return torch.where(there, _places(mask, numbers.clamp(min=0)) + packed_first, -1).to(torch.int32)

    # ------------------------------------------------------------------ changing

    def restart(self) -> None:
        """Forget all tokens."""
        self.high, self.queries = self.high[:, :, :0], self.queries[:, :, :0]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        footprint.parts["selection"] += self.high.nbytes + self.queries.nbytes


def _places(mask: Tensor, numbers: Tensor) -> Tensor:
    """Return the indices int64 [B, H, n] of the numbered places [B, H, n] of each head of a mask [B, H, T]."""
    heads = torch.arange(mask.shape[0] * mask.shape[1], device=mask.device).repeat_interleave(numbers.shape[2])
    return places_of(mask.flatten(0, 1), heads, numbers.flatten()).view_as(numbers)
