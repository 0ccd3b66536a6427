"""SubGen's Algorithm 1 (arXiv 2402.06082): samples of a layer's tokens.

The cache has four parts: samples of values | clusters of keys | attention sinks | exact tail.

Every token that leaves the tail enters two sketches. Tokens enter in blocks, with the same
distribution as one by one. The `slots` of a sketch hold the positions of samples. The pools hold
each sampled token once, packed as usual, and remove it when no slot refers to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.clusters import Clusters
from tersekv.cache.footprint import Footprint
from tersekv.cache.head_tokens import SELECTIVE, HeadTokens
from tersekv.cache.pages import PageSizes
from tersekv.cache.pool import WEIGHT, TokenPool
from tersekv.cache.schema import Check, optional, record, require, tensor, whole
from tersekv.cache.segments import ExactSegment, WeightedSegment
from tersekv.cache.state import State, own
from tersekv.cache.tier import Tier
from tersekv.layouts.base import View
from tersekv.layouts.exact import ExactView
from tersekv.policies.subgen import SubGen

BLOCK_TOKENS = 1024
"""Number of tokens that enter the sketches, or are read from packed pages, at a time."""

NORM = "norm"


class Reservoir(NamedTuple):
    """Independent samples of a stream, weighted.

    Token by token, each of s slots is replaced with probability w/(μ + w). Here w is the token's
    weight and μ the sum of all weights before it. A slot then holds token i with probability
    w_i/Σw. A block with total weight W is drawn at once, with the same distribution. A slot gets
    one of its tokens with probability W/(μ + W), token i in proportion to w_i.

    slots: int32 [B, H, s], positions, sorted, −1 before the first token.
    weight: float64 [B, H], μ.
    """

    slots: Tensor
    weight: Tensor

    @staticmethod
    def empty(B: int, H: int, s: int, device: torch.device) -> Reservoir:
        """Return a reservoir before any token."""
        slots = torch.full((B, H, s), -1, dtype=torch.int32, device=device)
        return Reservoir(slots, torch.zeros(B, H, dtype=torch.float64, device=device))

    @staticmethod
    def schema(B: int, H: int) -> Check:
        """Return the check of a reservoir in a file, see `cache/schema.py`."""
        slots, weight = tensor(torch.int32, B, H, None, low=-1), tensor(torch.float64, B, H, low=0)
        return record({"slots": slots, "weight": weight})

    def check(self, below: int, place: str) -> None:
        """Raise UserError unless there are slots, sorted, with positions below `below`."""
        ordered = self.slots.shape[2] > 0 and bool((self.slots.diff(dim=-1) >= 0).all())
        require(ordered and int(self.slots.max()) < below, f"{place}.slots", f"must ascend, and be below {below}")

    def extended(self, weights: Tensor, positions: Tensor, generator: torch.Generator) -> Reservoir:
        """Return the reservoir after a block.

        weights: float64 [B, H, n], 0 for tokens that are never sampled.
        positions: int32 [B, H, n].
        """
        cumulated = weights.cumsum(-1)
        added = cumulated[..., -1:]
        total = self.weight.unsqueeze(-1) + added
        chance = torch.where(total > 0, added / total, 0.0)
        u, v = torch.rand((2, *self.slots.shape), dtype=torch.float64, generator=generator).to(weights.device)
        index = torch.searchsorted(cumulated, v * added, right=True).clamp(max=weights.shape[-1] - 1)
        slots = torch.where(u < chance, positions.gather(-1, index), self.slots)
        return Reservoir(slots.sort(dim=-1).values, total.squeeze(-1))


def counts(positions: Tensor, slots: Tensor) -> Tensor:
    """Return how many of slots [B, H, s] (sorted) hold each of positions [B, H, n], both int32."""
    positions = positions.contiguous()
    return torch.searchsorted(slots, positions, right=True) - torch.searchsorted(slots, positions)


def _clusters(kept: SampledTokens) -> Check:
    return optional(Clusters.schema(kept.pool.loose[0], kept.subgen.slots, limited=not kept.subgen.delta))


SAMPLED = {
    **SELECTIVE,
    "longest": lambda kept: tensor(torch.float32, kept.batch_size, kept.kv_heads, low=0),
    "draws": lambda kept: whole(),
    "reservoir": lambda kept: optional(Reservoir.schema(kept.batch_size, kept.kv_heads)),
    "clusters": _clusters,
}


def sampled_slots(kept: SampledTokens, place: str) -> None:
    """Check that samples refer to tokens that have left the tail."""
    first = kept.num_tokens - kept.sides[0].tail.tokens
    sampled = kept.pool.positions.shape[2] + kept.centers.positions.shape[2]
    require((kept.reservoir is None) == (kept.clusters is None), place, "has samples of only values or only keys")
    require(not sampled or kept.reservoir is not None, place, "has sampled tokens without samples")
    require(kept.first.packed_tokens == 0, f"{place}.pools.2", "packs tokens, and must keep all of them exact")
    if kept.reservoir is not None and kept.clusters is not None:
        kept.reservoir.check(first, f"{place}.reservoir")
        kept.clusters.check(first, f"{place}.clusters")


class SampledTokens(HeadTokens):
    """Tokens of SubGen's streaming variant, see the module.

    pools: sampled values with their keys, keys of clusters, and attention sinks. Packed values are in the
        tiers of the layer.
    tiers: packed keys of clusters, and two tiers of sinks that stay empty.
    longest: largest norm of a value so far, float32 [B, H].
    """

    estimates = True
    longest: Tensor
    STATE, RULES, PARTS = SAMPLED, (*HeadTokens.RULES, sampled_slots), ("tiers", *HeadTokens.PARTS)

    def restart(self) -> None:
        """Start over, without tokens."""
        super().restart()
        assert isinstance(self.policy, SubGen)
        self.subgen = self.policy
        self.longest = torch.zeros(self.batch_size, self.kv_heads, dtype=torch.float32, device=self.device)
        self.draws = 0
        self.reservoir: Reservoir | None = None  # its size depends on the first prompt
        self.clusters: Clusters | None = None

    def _new_pools(self) -> list[TokenPool]:
        keys, like = self.plan.keys, [side.tail.data for side in self.sides]
        own, shared = PageSizes(keys.layout(self.sides[0].head_dim).block_tokens), PageSizes(self.flush_tokens)
        self.tiers = [Tier(keys, like[0], own), Tier(keys, like[0], shared), Tier(self.plan.values, like[1], shared)]
        values = {NORM: torch.float32, WEIGHT: torch.float32}
        return [
            TokenPool([side.tiers[0] for side in self.sides], like, values, self.rope),
            TokenPool(self.tiers[:1], like[:1], {WEIGHT: torch.float32}, self.rope),
            TokenPool(self.tiers[1:], like, None, self.rope),
        ]

    @property
    def centers(self) -> TokenPool:
        """The keys of clusters."""
        return self.pools[1]

    @property
    def first(self) -> TokenPool:
        """The attention sinks."""
        return self.pools[2]

    def exact_segments(self) -> list[ExactSegment]:
        """Return attention sinks, if there are any."""
        return self.first.exact_segment()

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return samples of values for the numerator, and of clusters for the denominator."""
        if not self.centers.positions.shape[2]:
            return []
        samples = [WeightedSegment(v[0], v[1], at, weight, None) for v, at, weight in _parts(self.pool)]
        return samples + [WeightedSegment(v[0], None, at, None, weight) for v, at, weight in _parts(self.centers)]

    # ------------------------------------------------------------------ growing

    def _add(self, new: list[Tensor], votes: Tensor | None) -> int:
        norms = new[1].float().norm(dim=-1)
        if self.padding is not None:
            places = torch.arange(self.num_tokens, self.num_tokens + norms.shape[2], device=self.device)
            norms = norms.masked_fill(places < self.padding[:, None, None], 0.0)
        self.longest = torch.maximum(self.longest, norms.amax(-1))
        return super()._add(new, votes)

    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Keep sinks exact and add all other tokens to the sketches, see `HeadTokens`."""
        leaving, positions = self._leaving(new, leave)
        sinks = self._sinks(positions)
        if bool(sinks.any()):
            self.first.take(leaving, positions, sinks, {})
        positions = positions.masked_fill(sinks, -1)
        self._size()
        for start in range(0, leave, BLOCK_TOKENS):
            block = slice(start, min(leave, start + BLOCK_TOKENS))
            self._sketch([x[:, :, block] for x in leaving], positions[:, :, block])
        self._pack(leaving, positions)
        self._weigh()

    def _size(self) -> None:
        """Set the sizes of the sketches, which depend on the first prompt."""
        if self.reservoir is None:
            policy = self.subgen
            s, m = policy.sizes(int(self.budget.max()))
            self.reservoir = Reservoir.empty(self.batch_size, self.kv_heads, s, self.device)
            self.clusters = Clusters.empty(self.pool.loose[0], policy.slots, policy.delta, None if policy.delta else m)

    def _sketch(self, tokens: list[Tensor], positions: Tensor) -> None:
        """Add a block [B, H, n, D] to samples and clusters, then update the pools."""
        assert self.reservoir is not None
        assert self.clusters is not None
        seed = (self.subgen.seed * 1009 + self.plan.layer << 24) + self.draws
        generator = torch.Generator().manual_seed(seed % 2**63)
        self.draws += 1
        squares = tokens[1].double().square().sum(-1).masked_fill(positions < 0, 0.0)
        self.reservoir = self.reservoir.extended(squares, positions, generator)
        self.clusters = self.clusters.extended(tokens[0], positions, generator)
        norms = squares.log().float()
        named = self.reservoir.slots, self.clusters.slots.flatten(2)
        for pool, slots, held, fields in (
            (self.pool, named[0], tokens, {NORM: norms}),
            (self.centers, named[1], tokens[:1], {}),
        ):
            pool.keep(pool.alive & _named(pool.positions, slots))
            fields = fields | {WEIGHT: torch.zeros_like(norms)}
            pool.take(held, positions, (positions >= 0) & _named(positions, slots), fields)

    def _pack(self, leaving: list[Tensor], positions: Tensor) -> None:
        for pool in (self.pool, self.centers):
            n = len(pool.tiers)
            samples = leaving[:n]
            pool.pack(pool.alive[:, :, pool.packed_tokens :], samples, positions, None)

    def _weigh(self) -> None:
        """Compute log-weights of held tokens: count·μ/(s·‖v‖²) and Σ n/t."""
        assert self.reservoir is not None
        assert self.clusters is not None
        slots, mu = self.reservoir
        share = mu.log().float() - math.log(slots.shape[-1])
        count = counts(self.pool.positions, slots).float()
        self.pool.fields[WEIGHT] = count.log() + share.unsqueeze(-1) - self.pool.fields[NORM]
        self.centers.fields[WEIGHT] = self.clusters.log_weights(self.centers.positions)

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.reservoir = None if state["reservoir"] is None else Reservoir(**own(state["reservoir"]))
        self.clusters = None if state["clusters"] is None else Clusters(**own(state["clusters"]))

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        super().select(rows)
        for tier in self.tiers:
            tier.select(rows)

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        super().to(device)
        for tier in self.tiers:
            tier.to(device)

    def tables(self) -> list[Tensor]:
        """Return the tables needed next to those of the layer's tiers."""
        return [*super().tables(), *(table for tier in self.tiers for table in tier.tables())]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and tails."""
        super().count(footprint)
        for tier in self.tiers:
            tier.packed.count(footprint)
        if self.reservoir is not None and self.clusters is not None:
            centers, *figures = self.clusters[:4]
            footprint.parts["exact window"] += centers.numel() * centers.element_size()
            figures += [*self.reservoir, self.longest]
            footprint.parts["selection"] += sum(x.numel() * x.element_size() for x in figures)


Part = tuple[list[View], Tensor, Tensor]


def _parts(pool: TokenPool) -> list[Part]:
    """Return views of each side, positions and log-weights in parts.

    Packed tokens come BLOCK_TOKENS at a time, then the loose ones. There are no tokens if all
    values are 0.
    """
    P, t, weights = pool.packed_tokens, pool.flush_tokens, pool.fields[WEIGHT]
    step = max(1, BLOCK_TOKENS // t) * t
    parts: list[Part] = []
    for first in range(0, P, step):
        span = slice(first, min(P, first + step))
        views = pool.views(first, span.stop - first)
        parts.append((views, pool.positions[:, :, span], weights[:, :, span]))
    if pool.positions.shape[2] > P or P == 0:
        loose: list[View] = [ExactView({"x": x.unsqueeze(2)}) for x in pool.loose]
        parts.append((loose, pool.positions[:, :, P:], weights[:, :, P:]))
    return parts


def _named(positions: Tensor, slots: Tensor) -> Tensor:
    """Return the mask of positions [B, H, n] that are in their head's slots [B, H, s]."""
    return counts(positions, slots.sort(dim=-1).values) > 0
