"""The highest-ranked tokens of each KV head of a layer, in pools.

Tokens that leave the tail compete with those in the pool. Chosen tokens stay exact ("loose") until
they fill a block, which is then packed.

With the option `rest`, tokens are demoted to a lower rate before they are evicted:

    pool at the codec's rate | pool at the lower rate | exact tail

The policy ranks tokens of both pools together. The codec's rate is for those that it would keep with
a smaller budget. A token whose rank falls below them is decoded and coded again with fewer bits from
the same fit, so its errors add up. No token returns to the higher rate. Of all tokens, those of the
lowest rank are evicted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.candidates import VOTES, Leaving, Ranks, Slots, best
from tersekv.cache.footprint import Footprint
from tersekv.cache.head_tokens import SELECTIVE, HeadTokens
from tersekv.cache.pool import WEIGHT, TokenPool, most_blocks
from tersekv.cache.schema import require, tensor, whole
from tersekv.cache.segments import ExactSegment
from tersekv.errors import UserError
from tersekv.policies.base import Candidates
from tersekv.tensors import gathered

NO_SCORES = (
    "the token policy needs the importance of the model's heads: measure it with `tersekv calibrate`, and use the "
    "recipe under tersekv.compress or with tersekv.CompressedCache"
)


CHOSEN = {
    **SELECTIVE,
    "tail_votes": lambda kept: tensor(torch.float32, kept.batch_size, kept.kv_heads, None, low=0),
    "queries": lambda kept: tensor(kept.dtype, kept.batch_size, None, None, kept.sides[0].head_dim),
    "queries_end": lambda kept: whole(),
}


def kept_votes(kept: ChosenTokens, place: str) -> None:
    """Check that the tail has votes for each of its tokens if votes are remembered.

    Tokens whose queries are kept may have none yet.
    """
    tail = kept.sides[0].tail.tokens
    held, wanted = kept.tail_votes.shape[2], tail if kept.policy.remembers else 0
    later = kept.policy.evicts == "block"
    require(held == wanted or (later and held < wanted), f"{place}.tail_votes", f"has {held} tokens of {wanted}")
    queries, most = kept.queries.shape[2], tail if kept.keeps_queries else 0
    require(queries <= most, f"{place}.queries", f"has {queries} queries, and at most {most} are kept")


class ChosenTokens(HeadTokens):
    """Tokens of a policy that ranks them.

    pools: one for each tier: that of the codec's rate, and perhaps that of the lower rate.
    tail_votes: float32 [B, H, n], votes of tokens in the tail.
    queries: [B, Hq, n, D] after RoPE, of tokens whose votes are added up later. `queries_end` is the
        number of tokens with the last one.

    Tokens held are ordered: packed slots, loose slots, tail. Votes have this order, followed by
    those of new tokens. With several pools, the slots of each follow those of the one before.
    """

    STATE, RULES = CHOSEN, (*HeadTokens.RULES, kept_votes)

    def restart(self) -> None:
        """Start over, without tokens."""
        super().restart()
        keys = self.pool.loose[0]
        self.tail_votes = keys.new_empty((*keys.shape[:2], 0), dtype=torch.float32)
        self.queries, self.queries_end = keys, 0

    def _new_pools(self) -> list[TokenPool]:
        fields, like = {VOTES: torch.float32} if self.policy.remembers else {}, [side.tail.data for side in self.sides]
        tiers = zip(*(side.tiers for side in self.sides), strict=True)
        return [TokenPool(pair, like, fields, self.rope, self.heads) for pair in tiers]

    @property
    def keeps_queries(self) -> bool:
        """True if votes of several generated tokens are added up at once."""
        return self.policy.remembers and self.policy.evicts == "block"

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens, or None. A rollback has removed some of them."""
        left = self.queries.shape[2] - (self.queries_end - self.num_tokens)
        return self.queries[:, :, :left] if self.queries_end >= self.num_tokens and left > 0 else None

    def keep(self, query: Tensor, seen: int, masked: bool) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended to `seen` others. None is in the
        padding."""
        waiting, new = self.waiting_queries(), query.detach().to(self.dtype)
        self.queries = new if waiting is None else torch.cat([waiting, new], dim=2)
        self.queries_end = seen + query.shape[2]

    def exact_segments(self) -> list[ExactSegment]:
        """Return loose tokens of each pool, without empty segments."""
        return [segment for pool in self.pools for segment in pool.exact_segment()]

    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Move the oldest tokens into the pool, see `HeadTokens`.

        New votes are added to remembered ones.
        """
        held, n = self._slots(), new[0].shape[2]
        slots = sum(held)
        if votes is None:
            total = slots + self.sides[0].tail.tokens + n
            votes = self.tail_votes.new_zeros((self.batch_size, self.kv_heads, total))
        if self.policy.remembers:
            past = torch.cat([*(pool.fields[VOTES] for pool in self.pools), self.tail_votes], dim=2)
            votes = votes + torch.nn.functional.pad(past, (0, votes.shape[2] - past.shape[2]))
            self.queries = self.queries[:, :, :0]
            for pool, own in zip(self.pools, votes[:, :, :slots].split(held, dim=2), strict=True):
                pool.fields[VOTES] = own
            self.tail_votes = votes[:, :, slots + leave :].clone()
        if leave:
            self._choose(new, votes[:, :, : slots + leave], leave, prompt)

    def _slots(self) -> list[int]:
        """Return the number of slots of each pool."""
        return [pool.positions.shape[2] for pool in self.pools]

    def _choose(self, new: list[Tensor], votes: Tensor, leave: int, prompt: bool) -> None:
        """Move the oldest tokens after the pools into them, or evict them.

        votes: of the pools' slots and of these tokens.
        """
        after = self.sides[0].tail.tokens + new[0].shape[2] - leave  # tokens that stay in the tail
        tokens, positions = self._leaving(new, leave)
        leaving = Leaving(tokens, positions, votes)
        positions = torch.cat([*(pool.positions for pool in self.pools), positions], dim=2)
        room = (self._head_budget() - self._of_row(after)[:, None]).clamp(min=0)
        always = self._sinks(positions) | (positions >= (self.num_tokens - self.latest)[:, None, None])
        alive, evicts = positions >= 0, prompt or self.policy.evicts != "never"
        too_many = (alive.sum(-1) > room).any(-1, keepdim=True)
        evicts = evicts and bool(too_many.any())
        kept = room
        if evicts and not prompt and self.policy.evicts_ahead:
            kept = torch.where(too_many, room - room // 8, room)
        candidates = Candidates(votes, positions, self.num_tokens, kept, always, lambda: self._keys(tokens[0]))
        ranks = Ranks(candidates, self.policy)
        alive = best(ranks.of(always), alive, kept) if evicts else alive
        self._settle(leaving, alive, ranks, room, evicts, prompt)

    def _settle(self, leaving: Leaving, alive: Tensor, ranks: Ranks, room: Tensor, evicts: bool, prompt: bool) -> None:
        """Move tokens into the pools.

        alive: bool [B, H, T], slots of the pools and leaving tokens that stay.
        room: number of these that may stay, int64 [B, H] or [B, 1].
        evicts: some of them leave the cache.
        """
        sizes = [*self._slots(), leaving.positions.shape[2]]
        stays, demoted, demotes, limits = alive, torch.zeros_like(alive), False, [0]
        if len(self.pools) > 1:
            stays, demoted, limits = self._demoted(sizes, alive, ranks, room, prompt)
            demotes = bool(demoted.any())
        elif evicts:
            limits = [int(self._head_budget().max()) - self.tail_tokens]
        limited = evicts or demotes
        weights = ranks.of(ranks.candidates.always) if limited else torch.zeros_like(leaving.votes)
        samples, sampled = self._samples(leaving)
        parts = zip(*(x.split(sizes, dim=2) for x in (alive, stays, demoted, weights, leaving.votes)), strict=True)
        *of_pools, of_leaving = (Slots(*part) for part in parts)
        falling = self._falling(leaving, of_pools[0], of_leaving) if demotes else None
        for pool, slots in zip(self.pools, of_pools, strict=True):
            pool.fields[WEIGHT] = slots.weights
        self.pool.keep(of_pools[0].stays)
        self.pool.take(leaving.tokens, leaving.positions, of_leaving.stays, of_leaving.fields())
        if len(self.pools) > 1:
            self.pools[1].keep(of_pools[1].alive)
            if falling is not None:
                self.pools[1].add(*falling)
        self._fit(samples, sampled)
        for pool, most in zip(self.pools, limits, strict=True):
            pool.pack(self._movable(pool), samples, sampled, self._most_blocks(pool, most) if limited else None)
            del pool.fields[WEIGHT]

    def _demoted(
        self, sizes: list[int], alive: Tensor, ranks: Ranks, room: Tensor, prompt: bool
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Return masks of tokens that keep the codec's rate and that lose it, and the most tokens of each pool.

        sizes: slots of both pools, and leaving tokens. Others: see `_settle`.
        """
        candidates = alive.clone()
        candidates[:, :, sizes[0] : sizes[0] + sizes[1]] = False  # these have the lower rate
        lower, always = self._lower(ranks.candidates.positions)
        most = torch.maximum((room - lower).clamp(min=0), (candidates & always).sum(-1))
        over = candidates.sum(-1) - most
        demotes = bool((over >= (1 if prompt else self.flush_tokens)).any())
        demotes = demotes and (prompt or self.policy.evicts != "never")
        stays = best(ranks.of(always), candidates, most) if demotes else candidates
        return stays, candidates & ~stays, [int(most.max()) + self.flush_tokens, int(lower.max())]

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
        for i, (loose, x) in enumerate(zip(self.pool.loose, leaving.tokens, strict=True)):
            packed = views[i].decode().to(self.dtype) if views else x.new_zeros((*x.shape[:2], P, x.shape[3]))
            tokens.append(gathered(torch.cat([packed, loose, x.to(self.dtype)], dim=2), order))
        positions = torch.cat([self.pool.positions, leaving.positions], dim=2).masked_fill(~demoted, -1)
        both = slots.fields(), others.fields()
        fields = {name: torch.cat([own[name] for own in both], dim=2).gather(2, order) for name in both[0]}
        return tokens, positions.gather(2, order), fields

    def _fit(self, samples: list[Tensor], positions: Tensor) -> None:
        """Fit the codecs if a pool is about to pack for the first time. Both rates share the fit."""
        if len(self.pools) == 1 or all(side.codec.needs_fit is None for side in self.sides):
            return
        movable = [self._movable(pool).sum(-1) for pool in self.pools if pool.positions.numel()]
        if any(int(tokens.max()) >= self.flush_tokens for tokens in movable):
            self.pool.fit(samples, positions)
            for side in self.sides:
                side.tiers[1].codec = side.codec.at_rate(side.tiers[1].bits)

    def _movable(self, pool: TokenPool) -> Tensor:
        """Return the mask of a pool's loose slots that may be packed: all tokens but the sinks."""
        loose = pool.positions[:, :, pool.packed_tokens :]
        return (loose >= 0) & ~self._sinks(loose)

    def _samples(self, leaving: Leaving) -> tuple[list[Tensor], Tensor]:
        """Return the tokens that codecs are fitted on, and their positions: all exact ones but the tail, also
        evicted ones.
        """
        positions = torch.cat([self.pool.positions[:, :, self.pool.packed_tokens :], leaving.positions], dim=2)
        if all(side.codec.needs_fit is None for side in self.sides):
            return leaving.tokens, positions
        return [
            torch.cat([loose, x], dim=2) for loose, x in zip(self.pool.loose, leaving.tokens, strict=True)
        ], positions

    def _head_budget(self) -> Tensor:
        """Return the number of tokens that each head keeps, int64 [B, H], or [B, 1] for all heads.

        Raises:
            UserError: the policy needs the importance of heads, and the plan has none.
        """
        if not self.policy.needs_scores:
            return self.budget[:, None]
        if self.plan.scores is None:
            raise UserError(NO_SCORES)
        rows = zip(self.budget.tolist(), self._received(), strict=True)
        kept = [self.policy.of_heads(mean, n, self.plan.scores)[self.plan.layer] for mean, n in rows]
        own = slice(None) if self.heads is None else slice(self.heads.first, self.heads.first + self.heads.count)
        return torch.stack(kept)[:, own].to(self.device)

    def _of_row(self, n: int) -> Tensor:
        """Return how many of the latest n positions hold a token, per row."""
        rows = torch.full_like(self.budget, n)
        return rows if self.padding is None else torch.minimum(rows, self.num_tokens - self.padding)

    def _keys(self, leaving: Tensor) -> Tensor:
        """Return keys of the pools' slots and of tokens leaving the tail, float32 [B, H, T, D]."""
        parts = []
        for pool in self.pools:
            parts += [pool.views(0, pool.packed_tokens)[0].decode()] if pool.packed_tokens else []
            parts.append(pool.loose[0].float())
        return torch.cat([*parts, leaving.float()], dim=2)

    @staticmethod
    def _most_blocks(pool: TokenPool, tokens: int) -> int:
        """Return how many blocks a pool may have for so many tokens per head."""
        return most_blocks([tier.packed.layout for tier in pool.tiers], tokens, pool.flush_tokens)

    def crop(self) -> None:
        """Follow a rollback of tokens of the tail, or of all."""
        super().crop()
        self.tail_votes = self.tail_votes[:, :, : self.sides[0].tail.tokens]

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and tails."""
        super().count(footprint)
        footprint.parts["selection"] += self.tail_votes.nbytes + self.queries.nbytes
