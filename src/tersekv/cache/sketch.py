"""SubGen's Algorithm 1 (arXiv 2402.06082) as the cache of a layer.

It has four parts: samples of values | clusters of keys | attention sinks | exact tail.

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
from tersekv.cache.evicting import SELECTIVE, EvictingStore
from tersekv.cache.footprint import Footprint
from tersekv.cache.pool import WEIGHT, TokenPool
from tersekv.cache.schema import Check, optional, record, require, tensor, whole
from tersekv.cache.segments import ExactSegment, WeightedSegment
from tersekv.cache.state import State, own
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


def _clusters(store: SketchStore) -> Check:
    return optional(Clusters.schema(store.keys.loose, store.subgen.slots, limited=not store.subgen.delta))


SKETCH = {
    **SELECTIVE,
    "longest": lambda store: tensor(torch.float32, store.batch_size, store.kv_heads, low=0),
    "draws": lambda store: whole(),
    "reservoir": lambda store: optional(Reservoir.schema(store.batch_size, store.kv_heads)),
    "clusters": _clusters,
}


def sketch_slots(store: SketchStore, place: str) -> None:
    """Check that samples refer to tokens that have left the tail."""
    first = store.num_tokens - store.tails[0].tokens
    sampled = store.pool.positions.shape[2] + store.centers.positions.shape[2]
    require((store.reservoir is None) == (store.clusters is None), place, "has samples of only values or only keys")
    require(not sampled or store.reservoir is not None, place, "has sampled tokens without samples")
    require(store.first.packed_tokens == 0, f"{place}.pools.2", "packs tokens, and must keep all of them exact")
    if store.reservoir is not None and store.clusters is not None:
        store.reservoir.check(first, f"{place}.reservoir")
        store.clusters.check(first, f"{place}.clusters")


class SketchStore(EvictingStore):
    """Store of SubGen's streaming variant, see the module."""

    estimates = True
    STATE, RULES = SKETCH, (*EvictingStore.RULES, sketch_slots)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        super()._start(keys, values)
        assert isinstance(self.policy, SubGen)
        self.subgen = self.policy
        self.centers = TokenPool((self.plan.keys,), (keys,), self.dtype, {WEIGHT: torch.float32}, self.rope)
        self.first = TokenPool((self.plan.keys, self.plan.values), (keys, values), self.dtype, None, self.rope)
        self.longest = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
        self.draws = 0
        self.reservoir: Reservoir | None = None  # its size depends on the first prompt
        self.clusters: Clusters | None = None

    def _new_pool(self, keys: Tensor, values: Tensor) -> TokenPool:
        fields = {NORM: torch.float32, WEIGHT: torch.float32}
        return TokenPool((self.plan.keys, self.plan.values), (keys, values), self.dtype, fields, self.rope)

    @property
    def pools(self) -> list[TokenPool]:
        """All pools of the store."""
        return [self.pool, self.centers, self.first]

    @property
    def longest_value(self) -> Tensor:
        """Largest norm of a value so far, float32 [B, H]."""
        return self.longest

    def exact_segments(self) -> list[ExactSegment]:
        """Return attention sinks and tail, without empty ones."""
        segments = []
        if self.first.positions.shape[2]:
            keys, values = (side.loose for side in self.first.sides)
            segments.append(ExactSegment(keys, values, self.first.positions))
        if self.tails[0].tokens:
            keys, values = (tail.data for tail in self.tails)
            segments.append(ExactSegment(keys, values, self.num_tokens - keys.shape[2]))
        return segments

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
        """Keep sinks exact and add all other tokens to the sketches, see `EvictingStore`."""
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
            self.clusters = Clusters.empty(self.keys.loose, policy.slots, policy.delta, None if policy.delta else m)

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
            n = len(pool.sides)
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

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        if self.reservoir is not None and self.clusters is not None:
            centers, *figures = self.clusters[:4]
            footprint.parts["exact window"] += centers.numel() * centers.element_size()
            figures += [*self.reservoir, self.longest]
            footprint.parts["selection"] += sum(x.numel() * x.element_size() for x in figures)
        return footprint


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
        loose: list[View] = [ExactView({"x": side.loose.unsqueeze(2)}) for side in pool.sides]
        parts.append((loose, pool.positions[:, :, P:], weights[:, :, P:]))
    return parts


def _named(positions: Tensor, slots: Tensor) -> Tensor:
    """Return the mask of positions [B, H, n] that are in their head's slots [B, H, s]."""
    return counts(positions, slots.sort(dim=-1).values) > 0
