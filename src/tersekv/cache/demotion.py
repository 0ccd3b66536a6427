"""The cache of one layer whose tokens are demoted to a lower rate before they are evicted.

    pool at the codec's rate | pool at the lower rate | exact tail

The policy ranks tokens of both pools together. The codec's rate is for those that it would keep with
a smaller budget. A token whose rank falls below them is decoded and coded again with fewer bits from
the same fit, so its errors add up. No token returns to the higher rate. Of all tokens, those of the
lowest rank are evicted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tersekv.cache.pool import WEIGHT, TokenPool, gathered
from tersekv.cache.scored_eviction import VOTES, Leaving, Ranks, ScoredEvictionStore, best


class DemotingStore(ScoredEvictionStore):
    """Store of a policy with the option `rest`.

    rest: tokens of the lower rate. Its codecs share the fit of `pool`.
    """

    def _start(self, keys: Tensor, values: Tensor) -> None:
        super()._start(keys, values)
        codecs, rates = (self.plan.keys, self.plan.values), (self.policy.rest, self.pool)
        self.rest = TokenPool(codecs, (keys, values), self.dtype, self._fields(), self.rope, self.heads, 0.0, *rates)

    @property
    def pools(self) -> list[TokenPool]:
        """Both pools, that of the codec's rate first."""
        return [self.pool, self.rest]

    def _settle(self, leaving: Leaving, alive: Tensor, ranks: Ranks, room: Tensor, evicts: bool, prompt: bool) -> None:
        """Move tokens into the pools, see `ScoredEvictionStore`."""
        high, low = self._slots()
        is_low = torch.zeros_like(alive)
        is_low[:, :, high : high + low] = True
        candidates = alive & ~is_low
        lower, always = self._lower(ranks.candidates.positions)
        most = torch.maximum((room - lower).clamp(min=0), (candidates & always).sum(-1))
        over = candidates.sum(-1) - most
        demotes = bool((over >= (1 if prompt else self.flush_tokens)).any())
        demotes = demotes and (prompt or self.policy.evicts != "never")
        stays = best(ranks.of(always), candidates, most) if demotes else candidates
        demoted = candidates & ~stays
        weights = ranks.of(ranks.candidates.always) if evicts or demotes else torch.zeros_like(leaving.votes)
        samples, sampled = self._samples(leaving)
        sizes = [high, low, leaving.positions.shape[2]]
        of_high, of_low, of_leaving = (
            Slots(*parts)
            for parts in zip(
                *(x.split(sizes, dim=2) for x in (alive, stays, demoted, weights, leaving.votes)), strict=True
            )
        )
        falling = self._falling(leaving, of_high, of_leaving) if demotes else None
        self.pool.fields[WEIGHT], self.rest.fields[WEIGHT] = of_high.weights, of_low.weights
        self.pool.keep(of_high.stays)
        self.pool.take(leaving.tokens, leaving.positions, of_leaving.stays, of_leaving.fields())
        self.rest.keep(of_low.alive)
        if falling is not None:
            self.rest.add(*falling)
        limits: tuple[int | None, ...] = (None, None)
        if evicts or demotes:
            tokens = int(most.max()) + self.flush_tokens, int(lower.max())
            limits = tuple(self._most_blocks(pool, n) for pool, n in zip(self.pools, tokens, strict=True))
        self._fit(samples, sampled)
        for pool, limit in zip(self.pools, limits, strict=True):
            pool.pack(self._movable(pool), samples, sampled, limit)
            del pool.fields[WEIGHT]

    def _lower(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many tokens of each head have the lower rate, and which tokens never have it.

        The codec's rate is for what the policy would keep with a budget that is smaller by the former.
        """
        policy, budget = self.policy, self._head_budget().tolist()
        lower = [[policy.lower(n) for n in row] for row in budget]
        latest = [
            [policy.latest(n - k) for n, k in zip(*rows, strict=True)] for rows in zip(budget, lower, strict=True)
        ]
        first = self.num_tokens - torch.tensor(latest, device=self.device)
        always = self._sinks(positions) | (positions >= first.unsqueeze(-1))
        return torch.tensor(lower, device=self.device), always

    def _falling(self, leaving: Leaving, slots: Slots, others: Slots) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
        """Return the demoted tokens, their positions and fields, as `TokenPool.add` takes them."""
        demoted = torch.cat([slots.demoted, others.demoted], dim=2)
        order = (~demoted).int().argsort(dim=-1, stable=True)[:, :, : int(demoted.sum(-1).max())]
        P = self.pool.packed_tokens
        views = self.pool.views(0, P) if bool(slots.demoted[:, :, :P].any()) else []
        tokens = []
        for i, (side, x) in enumerate(zip(self.sides, leaving.tokens, strict=True)):
            packed = views[i].decode().to(side.dtype) if views else x.new_zeros((*x.shape[:2], P, x.shape[3]))
            tokens.append(gathered(torch.cat([packed, side.loose, x.to(side.dtype)], dim=2), order))
        positions = torch.cat([self.pool.positions, leaving.positions], dim=2).masked_fill(~demoted, -1)
        both = slots.fields(), others.fields()
        fields = {name: torch.cat([own[name] for own in both], dim=2).gather(2, order) for name in both[0]}
        return tokens, positions.gather(2, order), fields

    def _fit(self, samples: list[Tensor], positions: Tensor) -> None:
        """Fit the codecs if a pool is about to pack for the first time. Both rates share the fit."""
        if all(side.codec.needs_fit is None for side in self.sides):
            return
        if any(
            int(self._movable(pool).sum(-1).max()) >= self.flush_tokens for pool in self.pools if pool.positions.numel()
        ):
            self.pool.fit(samples, positions)
            for low, side in zip(self.rest.sides, self.pool.sides, strict=True):
                low.codec = side.codec.at_rate(self.policy.rest)


@dataclasses.dataclass(frozen=True)
class Slots:
    """Parts of masks and numbers [B, H, n] that belong to the slots of one pool, or to leaving tokens.

    alive: stays in the cache. stays: at the codec's rate. demoted: at the lower rate from now on.
    """

    alive: Tensor
    stays: Tensor
    demoted: Tensor
    weights: Tensor
    votes: Tensor

    def fields(self) -> dict[str, Tensor]:
        """Return the numbers that a pool keeps for each slot."""
        return {VOTES: self.votes, WEIGHT: self.weights}
