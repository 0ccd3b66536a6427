"""Ranks of a layer's packed tokens: some have the codec's own rate, the others a lower one.

Tokens are ranked when they are packed. Of each head the most important ones enter the first tier, the
others the second, both in order of position. One bit per token says which; positions follow from it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.schema import require, tensor
from tersekv.cache.segments import Observed
from tersekv.cache.state import Spec, Stateful
from tersekv.errors import UserError
from tersekv.kernels.marks import BITS, Marks, pack_bits, places_of, unpack_bits
from tersekv.policies.base import TokenPolicy
from tersekv.policies.mixed import KEPT, Mixed
from tersekv.tensors import joined
from tersekv.transforms.rope import Rope

UNRANKED = (
    "the policy mixed ranks tokens by queries, which only tersekv's attention sees; use "
    "`with tersekv.compress(model, recipe):`, or the policy window"
)

UNMEASURED = (
    "mixed: allot=model has given this layer no rates, because the measurement of the model has none for it; make it "
    "again with `tersekv calibrate`, or use allot=layer"
)


def ranked_are_packed(store: Any, place: str) -> None:
    """Check that `high` has one bit per packed token, with as many tokens of each rate in every head."""
    for ranked in store.ranked:
        high, low = (tier.tokens for tier in store.tiers)
        where = f"{place}.ranked.0.high"
        require(ranked.high.shape[2] * BITS == high + low, where, "has a wrong length")
        count = ranked.is_high().sum(-1)
        require(bool((count == high).all()), where, f"must name {high} tokens in every head")


class RankedTokens(Stateful):
    """The ranks of a layer's packed tokens under the policy `mixed`.

    block: number of tokens that are packed together.
    high: uint8 [B, H, packed / 8], bit i % 8 of byte i // 8 is 1 if packed token i has the codec's rate.
    query_rope: RoPE of the layer, or None if it cannot be removed.
    queries: [B, Hq, n, D] after RoPE, kept to rank tokens that are packed later.
    """

    STATE: ClassVar[Spec] = {
        "high": lambda ranked: tensor(torch.uint8, *ranked.high.shape[:2], None),
        "queries": lambda ranked: tensor(
            ranked.queries.dtype, len(ranked.queries), None, None, ranked.queries.shape[3]
        ),
    }

    def __init__(self, policy: TokenPolicy, block: int, keys: Tensor, query_rope: Rope | None) -> None:
        assert isinstance(policy, Mixed)
        if policy.allots and not policy.waits:
            raise UserError(UNMEASURED)
        self.policy, self.block, self.query_rope = policy, block, query_rope
        self.high = keys.new_empty((*keys.shape[:2], 0), dtype=torch.uint8)
        self.queries = keys[:, :, :0]

    # ------------------------------------------------------------------ growing

    def counts(self, leave: int) -> tuple[int, int]:
        """Return how many of `leave` tokens that are packed together have each rate."""
        high = self.policy.chosen(leave, self.block)
        return high, leave - high

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
            self.queries = joined(self.queries, new)[:, :, -KEPT:] if self.queries.shape[2] else new

    def choose(self, observed: Observed, own: range, place: int, sinks: int, hidden: Tensor | None) -> Tensor:
        """Return the mask [B, H, n] of the tokens `own` of those from `place` on that have the codec's rate.

        sinks: first new tokens, which are not among them.
        hidden: int64 [B], tokens at smaller positions are padding or sinks of a row, or None.

        Raises:
            UserError: some have the lower rate, and their importance was not observed.
        """
        n = len(own)
        most, low = self.counts(n)
        if not low or self.high.is_meta:
            return torch.ones((*self.high.shape[:2], n), dtype=torch.bool, device=self.high.device)
        if observed.importance is None:
            raise UserError(UNRANKED)
        score = observed.importance[:, :, sinks : sinks + n].float()
        if hidden is not None:  # a row with padding has fewer tokens to choose, and padding fills up
            hidden = (hidden - place).clamp(0, n)
            chosen = torch.tensor([self.policy.chosen(n - p, 1) for p in hidden.tolist()], device=score.device)
            filled = most - torch.maximum(chosen.clamp(max=most), most - hidden)
            at = torch.arange(n, device=score.device)
            score = score.masked_fill((at < hidden[:, None])[:, None], float("-inf"))
            score = score.masked_fill((at < filled[:, None])[:, None], float("inf"))
        order = score.argsort(dim=-1, descending=True, stable=True)[:, :, :most]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(2, order, True)

    def parts(self, high: Tensor) -> list[range | Tensor]:
        """Return the tokens of each tier, see `Packing`. high: what `choose` returned."""
        n = high.shape[2]
        most, low = self.counts(n)
        if not low or high.is_meta:
            return [range(most), range(most, n)]
        return [places_of(high), places_of(~high)]

    def add(self, high: Tensor) -> None:
        """Note the rates of tokens that were packed."""
        self.high = joined(self.high, pack_bits(high))

    # ------------------------------------------------------------------ reading

    def is_high(self) -> Tensor:
        """Return `high` as bool [B, H, packed]."""
        return unpack_bits(self.high)

    def where(self, rate: int, first: int, tokens: int, packed_first: int) -> Marks:
        """Return the positions of slots `first` to `first + tokens` of a tier.

        packed_first: position of the first packed token.
        """
        return Marks(self.high, packed_first, tokens, rate == 0, first)

    def order(self) -> Tensor:
        """Return the slot of each packed token in order of position, int64 [B, H, packed].

        Slots count those of the codec's rate first.
        """
        return self.is_high().logical_not().int().argsort(dim=2, stable=True).argsort(dim=2)

    # ------------------------------------------------------------------ changing

    def restart(self) -> None:
        """Forget all tokens."""
        self.high, self.queries = self.high[:, :, :0], self.queries[:, :, :0]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        footprint.parts["selection"] += self.high.nbytes + self.queries.nbytes
