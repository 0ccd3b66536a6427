"""The cache of one layer that keeps the highest-ranked tokens of each KV head: a pool | exact tail.

Tokens that leave the tail compete with those in the pool. Chosen tokens stay exact ("loose") until
they fill a block, which is then packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.evicting import SELECTIVE, EvictingStore
from tersekv.cache.footprint import Footprint
from tersekv.cache.pool import WEIGHT, TokenPool, most_blocks
from tersekv.cache.schema import require, tensor, whole
from tersekv.cache.segments import ExactSegment, PackedSegment, packed_pages_of
from tersekv.cache.side import extents
from tersekv.errors import UserError
from tersekv.kernels.attend import PackedPages
from tersekv.policies.base import Candidates, Selection

VOTES = "votes"

NO_SCORES = (
    "the token policy needs the importance of the model's heads: measure it with `tersekv calibrate`, and use the "
    "recipe under tersekv.compress or with tersekv.CompressedCache"
)


KEPT = {
    **SELECTIVE,
    "tail_votes": lambda store: tensor(torch.float32, store.batch_size, store.kv_heads, None, low=0),
    "queries": lambda store: tensor(store.dtype, store.batch_size, None, None, store.keys.head_dim),
    "queries_end": lambda store: whole(),
}


def kept_votes(store: ScoredEvictionStore, place: str) -> None:
    """Check that the tail has votes for each of its tokens if votes are remembered.

    Tokens whose queries are kept may have none yet.
    """
    held, wanted = store.tail_votes.shape[2], store.tails[0].tokens if store.policy.remembers else 0
    later = store.policy.evicts == "block"
    require(held == wanted or (later and held < wanted), f"{place}.tail_votes", f"has {held} tokens of {wanted}")
    kept, most = store.queries.shape[2], store.tails[0].tokens if store.keeps_queries else 0
    require(kept <= most, f"{place}.queries", f"has {kept} queries, and at most {most} are kept")


class Leaving(NamedTuple):
    """Tokens that leave the tail.

    tokens: of keys and of values, [B, H, m, D].
    positions: int32 [B, H, m].
    votes: float32 [B, H, T + m], of the T slots of the pools and of these tokens.
    """

    tokens: list[Tensor]
    positions: Tensor
    votes: Tensor


class Ranks:
    """Candidates, and the policy's weights of them. These are computed at first use."""

    def __init__(self, candidates: Candidates, policy: Selection) -> None:
        self.candidates, self._policy = candidates, policy

    @cached_property
    def _weights(self) -> Tensor:
        return self._policy.ranks(self.candidates)

    def of(self, always: Tensor) -> Tensor:
        """Return weights, float32 [B, H, T], with ∞ for tokens in the mask. The higher, the more important."""
        return self._weights.masked_fill(always, torch.inf)


class ScoredEvictionStore(EvictingStore):
    """Store of a policy that ranks tokens.

    queries: [B, Hq, n, D] after RoPE, of tokens whose votes are added up later. `queries_end` is the
        number of tokens with the last one.

    Tokens held are ordered: packed slots, loose slots, tail. Votes have this order, followed by
    those of new tokens. With several pools, the slots of each follow those of the one before.
    """

    STATE, RULES = KEPT, (*EvictingStore.RULES, kept_votes)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        super()._start(keys, values)
        self.tail_votes = keys.new_empty((*keys.shape[:2], 0), dtype=torch.float32)
        self.queries, self.queries_end = self.keys.loose[:, :, :0], 0
        self._pages: tuple[list[Tensor], PackedPages | None] | None = None  # with the positions it was built for

    def _fields(self) -> dict[str, torch.dtype]:
        """Return the numbers that pools keep for each slot."""
        return {VOTES: torch.float32} if self.policy.remembers else {}

    def _new_pool(self, keys: Tensor, values: Tensor) -> TokenPool:
        codecs, share = (self.plan.keys, self.plan.values), self.policy.corrected_share
        return TokenPool(codecs, (keys, values), self.dtype, self._fields(), self.rope, self.heads, share)

    @property
    def keeps_queries(self) -> bool:  # type: ignore[override]
        """True if votes of several generated tokens are added up at once."""
        return self.policy.remembers and self.policy.evicts == "block"

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens, or None. A rollback has removed some of them."""
        left = self.queries.shape[2] - (self.queries_end - self.num_tokens)
        return self.queries[:, :, :left] if self.queries_end >= self.num_tokens and left > 0 else None

    def keep(self, query: Tensor, masked: bool = False) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended. None is in the padding."""
        waiting, new = self.waiting_queries(), query.detach().to(self.dtype)
        self.queries = new if waiting is None else torch.cat([waiting, new], dim=2)
        self.queries_end = self.num_tokens + query.shape[2]

    def held(self) -> Iterator[PackedSegment | ExactSegment]:
        """Return the tokens held in the order of votes: packed and loose slots of each pool, then the tail."""
        exact = self.exact_segments()
        for pool in self.pools:
            yield from self._pages_of(pool)
            if pool.sides[0].loose.shape[2]:
                yield exact.pop(0)
        yield from exact

    def _pages_of(self, pool: TokenPool) -> Iterator[PackedSegment]:
        return (self._packed(pool, first, tokens) for first, tokens in extents(pool.sides))

    def exact_segments(self) -> list[ExactSegment]:
        """Return loose tokens of each pool and the tail, without empty ones."""
        segments = []
        for pool in self.pools:
            keys, values = pool.sides[0].loose, pool.sides[1].loose
            if n := keys.shape[2]:
                segments.append(ExactSegment(keys, values, pool.positions[:, :, -n:]))
        if tail := self.tails[0].tokens:
            segments.append(ExactSegment(self.tails[0].data, self.tails[1].data, self.num_tokens - tail))
        return segments

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed slots `first` to `first + tokens`, multiples of `flush_tokens`, or None.

        The segment ends where a pool ends.
        """
        for pool in self.pools:
            left = pool.packed_tokens - first
            if left > 0:
                return self._packed(pool, first, left if tokens is None else min(tokens, left))
            first = -left
        return None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed slots page by page, without copies."""
        return (page for pool in self.pools for page in self._pages_of(pool))

    def pages(self) -> PackedPages | None:
        """Return packed slots as attention reads them, None if there are none.

        The result is cached until slots change, which creates a new tensor of positions.
        """
        positions, made = self._pages or ([], None)
        for pool, known in itertools.zip_longest(self.pools, positions):
            if known is not pool.positions:
                break
        else:
            return made
        pages = list(self.packed_pages())
        made = packed_pages_of(pages, self.kv_heads)
        if all(page.keys.keeps and page.values.keeps for page in pages):
            self._pages = [pool.positions for pool in self.pools], made
        return made

    @staticmethod
    def _packed(pool: TokenPool, first: int, tokens: int) -> PackedSegment:
        keys, values = pool.views(first, tokens)
        positions = pool.positions[:, :, first : first + tokens]
        return PackedSegment(keys, values, positions, tokens, pool.sides[0].correction)

    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Move the oldest tokens into the pool, see `EvictingStore`.

        New votes are added to remembered ones.
        """
        held, n = self._slots(), new[0].shape[2]
        slots = sum(held)
        if votes is None:
            total = slots + self.tails[0].tokens + n
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
        after = self.tails[0].tokens + new[0].shape[2] - leave  # tokens that stay in the tail
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
        slots = self._slots()[0]
        weights = ranks.of(ranks.candidates.always) if evicts else torch.zeros_like(leaving.votes)
        samples, sampled = self._samples(leaving)
        self.pool.fields[WEIGHT] = weights[:, :, :slots]
        self.pool.keep(alive[:, :, :slots])
        fields = {VOTES: leaving.votes[:, :, slots:], WEIGHT: weights[:, :, slots:]}
        self.pool.take(leaving.tokens, leaving.positions, alive[:, :, slots:], fields)
        most = self._most_blocks(self.pool, int(self._head_budget().max()) - self.tail_tokens) if evicts else None
        self.pool.pack(self._movable(self.pool), samples, sampled, most)
        del self.pool.fields[WEIGHT]

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
            torch.cat([side.loose, x], dim=2) for side, x in zip(self.sides, leaving.tokens, strict=True)
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
            parts.append(pool.sides[0].loose.float())
        return torch.cat([*parts, leaving.float()], dim=2)

    @staticmethod
    def _most_blocks(pool: TokenPool, tokens: int) -> int:
        """Return how many blocks a pool may have for so many tokens per head."""
        return most_blocks([side.packed.layout for side in pool.sides], tokens, pool.flush_tokens)

    def _crop_tail(self, n: int) -> None:
        super()._crop_tail(n)
        self.tail_votes = self.tail_votes[:, :, : self.tails[0].tokens]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        footprint.parts["selection"] += self.tail_votes.nbytes + self.queries.nbytes
        return footprint


def best(weights: Tensor, alive: Tensor, room: Tensor) -> Tensor:
    """Return the mask of the `room` [B, H] tokens with the highest weight among `alive` [B, H, T].

    Of tokens with equal weight the earlier one is chosen.
    """
    order = weights.masked_fill(~alive, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, places)
    return alive & (place < room[..., None])
