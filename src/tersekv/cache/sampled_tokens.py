"""SubGen's Algorithm 1 (arXiv 2402.06082): samples of a layer's tokens.

The cache has four parts: samples of values | clusters of keys | attention sinks | exact window.

Every token that leaves the window enters two sketches. Tokens enter in blocks, with the same
distribution as one by one. The `slots` of a sketch hold the positions of samples. Each sampled
token is held once, packed as usual, and removed when no slot refers to it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.clusters import Clusters
from tersekv.cache.exact_tokens import ExactTokens
from tersekv.cache.filled import Stream, fill_any, fill_slots
from tersekv.cache.footprint import Footprint
from tersekv.cache.head_tokens import SELECTIVE, HeadTokens
from tersekv.cache.packed_side import PackedSide
from tersekv.cache.pages import PageSizes
from tersekv.cache.schema import Check, optional, record, require, tensor, whole
from tersekv.cache.segments import ExactSegment, WeightedSegment
from tersekv.cache.slots import Slots
from tersekv.cache.state import State, own
from tersekv.cache.tier import WEIGHT, Tier
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
    return optional(Clusters.schema(kept.recent.keys, kept.subgen.slots, limited=not kept.subgen.delta))


OUTGROWN = (
    "subgen:variant=stream has {} samples of values, which its first call was given; the budget for {:,} tokens has "
    "{}: read a long prompt in one call, or give budget as a number of tokens"
)

SAMPLED = {
    **SELECTIVE,
    "longest": lambda kept: tensor(torch.float32, kept.batch_size, kept.kv_heads, low=0),
    "draws": lambda kept: whole(),
    "reservoir": lambda kept: optional(Reservoir.schema(kept.batch_size, kept.kv_heads)),
    "clusters": _clusters,
}


def sampled_slots(kept: SampledTokens, place: str) -> None:
    """Check that samples refer to tokens that have left the window."""
    first = kept.num_tokens - kept.recent.tokens
    sampled = sum(len(held.slots) for held in kept.slots)
    require((kept.reservoir is None) == (kept.clusters is None), place, "has samples of only values or only keys")
    require(not sampled or kept.reservoir is not None, place, "has sampled tokens without samples")
    if kept.reservoir is not None and kept.clusters is not None:
        kept.reservoir.check(first, f"{place}.reservoir")
        kept.clusters.check(first, f"{place}.clusters")


class SampledTokens(HeadTokens):
    """Tokens of SubGen's streaming variant, see the module.

    tiers, loose: sampled values with their keys, and keys of clusters. Attention sinks are loose, too.
    own: the tier of the keys of clusters.
    longest: largest norm of a value so far, float32 [B, H].
    """

    estimates = True
    longest: Tensor
    STATE, RULES, PARTS = SAMPLED, (*HeadTokens.RULES, sampled_slots), ("own", *HeadTokens.PARTS)

    def restart(self) -> None:
        """Start over, without tokens."""
        super().restart()
        assert isinstance(self.policy, SubGen)
        self.subgen = self.policy
        self.longest = torch.zeros(self.batch_size, self.kv_heads, dtype=torch.float32, device=self.device)
        self.draws = 0
        self.reservoir: Reservoir | None = None  # its size depends on the first prompt
        self.clusters: Clusters | None = None

    def _empty(self) -> None:
        like, keys = self.recent.buffers, self.plan.keys
        self.own = Tier(PackedSide(keys, like[0], PageSizes(keys.layout(like[0].shape[3]).block_tokens)))
        self.tiers = [self.tiers[0], self.own]
        fields = {NORM: torch.float32, WEIGHT: torch.float32}, {WEIGHT: torch.float32}
        self.loose = [ExactTokens(like, fields=fields[0]), ExactTokens(like[:1], fields=fields[1])]
        self.loose.append(ExactTokens(like, fields={}))
        for tier, names in zip(self.tiers, fields, strict=True):
            tier.differ(Slots(like[0], names))

    def exact_segments(self) -> list[ExactSegment]:
        """Return attention sinks, if there are any."""
        return self.loose[2].segment()

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return samples of values for the numerator, and of clusters for the denominator."""
        if not any(len(held.slots) for held in self.slots[2:]):
            return []
        samples = [WeightedSegment(v[0], v[1], at, weight, None) for v, at, weight in self._views(0)]
        return samples + [WeightedSegment(v[0], None, at, None, weight) for v, at, weight in self._views(1)]

    def _views(self, i: int) -> Iterator[Part]:
        """Yield views of each side, positions and log-weights of samples (i = 0) or clusters (1) in parts.

        Packed tokens come BLOCK_TOKENS at a time, then the loose ones. There are no tokens if all
        values are 0.
        """
        tier, loose = self.tiers[i], self.loose[i]
        step = max(1, BLOCK_TOKENS // tier.block) * tier.block
        for first in range(0, tier.tokens, step):
            span = slice(first, min(tier.tokens, first + step))
            at = tier.slots.positions[:, :, span]
            views = tier.views(first, span.stop - first, self.angles(at))
            yield views, at, tier.slots.fields[WEIGHT][:, :, span]
        if loose.tokens or not tier.tokens:
            exact: list[View] = [ExactView({"x": x.unsqueeze(2)}) for x in loose.data]
            yield exact, loose.slots.positions, loose.slots.fields[WEIGHT]

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
            self.loose[2].take(leaving, positions, sinks, {})
        positions = positions.masked_fill(sinks, -1)
        self._size(prompt)
        for start in range(0, leave, BLOCK_TOKENS):
            block = slice(start, min(leave, start + BLOCK_TOKENS))
            self._sketch([x[:, :, block] for x in leaving], positions[:, :, block])
        for tier, loose in zip(self.tiers, self.loose, strict=False):
            self._pack(tier, loose, loose.slots.alive, leaving[: len(tier.sides)], positions)
        self._weigh()

    def _size(self, prompt: bool) -> None:
        """Set the sizes of the sketches, which depend on the first prompt."""
        policy = self.subgen
        s, m = policy.sizes(int(self.budget.max()))
        if self.reservoir is not None:
            if prompt and s > 2 * (held := self.reservoir.slots.shape[2]):
                warnings.warn(OUTGROWN.format(held, self.num_tokens, s), stacklevel=2)
        else:
            self.reservoir = Reservoir.empty(self.batch_size, self.kv_heads, s, self.device)
            self.clusters = Clusters.empty(self.recent.keys, policy.slots, policy.delta, None if policy.delta else m)

    def _sketch(self, tokens: list[Tensor], positions: Tensor) -> None:
        """Add a block [B, H, n, D] to samples and clusters, then keep the tokens that these name."""
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
        fields = {NORM: norms, WEIGHT: torch.zeros_like(norms)}
        for tier, loose, slots in zip(self.tiers, self.loose, named, strict=False):
            for held in (tier, loose):
                held.keep(held.slots.alive & _named(held.slots.positions, slots))
            chosen = (positions >= 0) & _named(positions, slots)
            loose.take(tokens[: len(tier.sides)], positions, chosen, fields)

    def _weigh(self) -> None:
        """Compute log-weights of held tokens: count·μ/(s·‖v‖²) and Σ n/t."""
        assert self.reservoir is not None
        assert self.clusters is not None
        named, mu = self.reservoir
        share = mu.log().float() - math.log(named.shape[-1])
        samples, clusters = self.slots[:2], self.slots[2:]
        for slots in (held.slots for held in samples):
            count = counts(slots.positions, named).float()
            slots.note(**{WEIGHT: count.log() + share.unsqueeze(-1) - slots.fields[NORM]})
        for slots in (held.slots for held in clusters):
            slots.note(**{WEIGHT: self.clusters.log_weights(slots.positions)})

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        self.reservoir = None if state["reservoir"] is None else Reservoir(**own(state["reservoir"]))
        self.clusters = None if state["clusters"] is None else Clusters(**own(state["clusters"]))

    def tables(self) -> list[Tensor]:
        """Return the tables needed next to those of the layer's tiers."""
        return [*super().tables(), *self.own.tables()]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and window."""
        super().count(footprint)
        self.own.count(footprint)
        if self.reservoir is not None and self.clusters is not None:
            centers, *figures = self.clusters[:4]
            footprint.parts["exact window"] += centers.numel() * centers.element_size()
            figures += [*self.reservoir, self.longest]
            footprint.parts["selection"] += sum(x.numel() * x.element_size() for x in figures)

    def fill(self, stream: Stream, queries: Tensor) -> tuple[int, int]:
        # all samples differ, and the maximum number of clusters exists; with a given δ there can be more
        like, policy = self.recent.buffers[0], self.subgen
        s, m = policy.sizes(stream.budget)
        sinks = min(policy.sinks, stream.left)
        sampled = stream.left - sinks
        values, clusters = min(s, sampled), min(m, sampled)
        keys = min(clusters * policy.slots, sampled)
        self.reservoir = Reservoir.empty(len(like), 1, s, like.device)
        none = Clusters.empty(like, policy.slots, policy.delta, None)
        centers, members, slots = (x.new_empty((*x.shape[:2], clusters, *x.shape[3:])) for x in none[:3])
        self.clusters = none._replace(centers=centers, members=members, slots=slots)
        fill_slots(None, self.loose[2], [], sinks, sinks)
        each = zip(self.tiers, self.loose, (values, keys), strict=False)
        return sinks, sum(fill_any(tier, loose, n, 0, n) for tier, loose, n in each)


Part = tuple[list[View], Tensor, Tensor]


def _named(positions: Tensor, slots: Tensor) -> Tensor:
    """Return the mask of positions [B, H, n] that are in their head's slots [B, H, s]."""
    return counts(positions, slots.sort(dim=-1).values) > 0
