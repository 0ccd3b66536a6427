"""The cache of one layer that keeps the highest-ranked tokens of each KV head: a pool | exact tail.

Tokens that leave the tail compete with those in the pool. Chosen tokens stay exact ("loose") until
they fill a block, which is then packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tersekv.cache.context_parallel import ContextParallelStore
from tersekv.cache.evicting import SELECTIVE, EvictingStore
from tersekv.cache.footprint import Footprint
from tersekv.cache.found_sinks import FoundSinksStore
from tersekv.cache.layer import LayerStore
from tersekv.cache.mixed_rates import MixedRatesStore
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.pool import WEIGHT, TokenPool
from tersekv.cache.prompt_packing import PromptPackingStore
from tersekv.cache.schema import require, tensor
from tersekv.cache.segments import ExactSegment, PackedSegment, packed_pages_of
from tersekv.cache.side import extents
from tersekv.cache.sketch import SketchStore
from tersekv.codecs.exact import Exact
from tersekv.codecs.transforms.rope import Rope
from tersekv.errors import UserError
from tersekv.kernels.attend import PackedPages
from tersekv.policies.base import Candidates, Selection
from tersekv.policies.mixed import Mixed
from tersekv.policies.subgen import SubGen
from tersekv.policies.window import Window
from tersekv.recipe import LayerPlan

SPARE = 1.5
"""Maximum packed slots of a pool, as a multiple of the tokens that it may hold.

This limits how many slots can become empty before whole blocks are evicted.
"""

VOTES = "votes"

NO_SCORES = (
    "the token policy needs the importance of the model's heads: measure it with `tersekv calibrate`, and use the "
    "recipe under tersekv.compress or with tersekv.CompressedCache"
)


KEPT = {**SELECTIVE, "tail_votes": lambda store: tensor(torch.float32, store.batch_size, store.kv_heads, None, low=0)}


def kept_votes(store: ScoredEvictionStore, place: str) -> None:
    """Check that the tail has votes for each of its tokens if votes are remembered."""
    held, wanted = store.tail_votes.shape[2], store.tails[0].tokens if store.policy.remembers else 0
    require(held == wanted, f"{place}.tail_votes", f"has {held} tokens of {wanted}")


class ScoredEvictionStore(EvictingStore):
    """Store of a policy that ranks tokens.

    Tokens held are ordered: packed slots, loose slots, tail. Votes have this order, followed by
    those of new tokens.
    """

    STATE, RULES = KEPT, (*EvictingStore.RULES, kept_votes)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        super()._start(keys, values)
        self.tail_votes = keys.new_empty((*keys.shape[:2], 0), dtype=torch.float32)
        self._pages: tuple[Tensor, PackedPages | None] | None = None  # cached with the positions that it was built for

    def _new_pool(self, keys: Tensor, values: Tensor) -> TokenPool:
        fields = {VOTES: torch.float32} if self.policy.remembers else {}
        codecs, share = (self.plan.keys, self.plan.values), self.policy.corrected_share
        return TokenPool(codecs, (keys, values), self.dtype, fields, self.rope, self.heads, share)

    @property
    def packed_tokens(self) -> int:
        """Number of packed slots."""
        return self.pool.packed_tokens

    def exact_segments(self) -> list[ExactSegment]:
        """Return loose tokens and tail, without empty ones."""
        segments, P = [], self.packed_tokens
        if self.pool.positions.shape[2] > P:
            segments.append(ExactSegment(self.keys.loose, self.values.loose, self.pool.positions[:, :, P:]))
        tail = self.tails[0].tokens
        if tail:
            segments.append(ExactSegment(self.tails[0].data, self.tails[1].data, self.num_tokens - tail))
        return segments

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed slots `first` to `first + tokens`, multiples of `flush_tokens`, or None."""
        tokens = self.packed_tokens - first if tokens is None else min(tokens, self.packed_tokens - first)
        return self._packed(first, tokens) if tokens > 0 else None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed slots page by page, without copies."""
        return (self._packed(first, tokens) for first, tokens in extents(self.sides))

    def pages(self) -> PackedPages | None:
        """Return packed slots as attention reads them, None if there are none.

        The result is cached until slots change, which creates a new tensor of positions.
        """
        if self._pages is None or self._pages[0] is not self.pool.positions:
            pages = list(self.packed_pages())
            made = packed_pages_of(pages, self.kv_heads, self.keys.correction)
            if not all(page.keys.keeps and page.values.keeps for page in pages):
                return made
            self._pages = self.pool.positions, made
        return self._pages[1]

    def _packed(self, first: int, tokens: int) -> PackedSegment:
        keys, values = self.pool.views(first, tokens)
        return PackedSegment(keys, values, 0, tokens, self.pool.positions[:, :, first : first + tokens])

    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Move the oldest tokens into the pool, see `EvictingStore`.

        New votes are added to remembered ones.
        """
        slots, n = self.pool.positions.shape[2], new[0].shape[2]
        if votes is None:
            held = slots + self.tails[0].tokens
            votes = self.tail_votes.new_zeros((self.batch_size, self.kv_heads, held + n))
        if self.policy.remembers:
            past = torch.cat([self.pool.fields[VOTES], self.tail_votes], dim=2)
            votes = votes + torch.nn.functional.pad(past, (0, n))
            self.pool.fields[VOTES] = votes[:, :, :slots]
            self.tail_votes = votes[:, :, slots + leave :].clone()
        if leave:
            self._choose(new, votes[:, :, : slots + leave], leave, prompt)

    def _choose(self, new: list[Tensor], votes: Tensor, leave: int, prompt: bool) -> None:
        """Move the oldest tokens after the pool into it, or evict them.

        votes: of the pool's slots and of these tokens.
        """
        slots, evicts = self.pool.positions.shape[2], prompt or self.policy.evicts != "never"
        after = self.tails[0].tokens + new[0].shape[2] - leave  # tokens that stay in the tail
        leaving, positions = self._leaving(new, leave)
        positions = torch.cat([self.pool.positions, positions], dim=2)
        alive, weights = positions >= 0, torch.zeros_like(votes)
        room = (self._head_budget() - self._of_row(after)[:, None]).clamp(min=0)
        too_many = (alive.sum(-1) > room).any(-1, keepdim=True)
        evicts = evicts and bool(too_many.any())
        if evicts:
            if not prompt and self.policy.evicts == "block":
                room = torch.where(too_many, room - room // 8, room)
            always = self._sinks(positions) | (positions >= (self.num_tokens - self.latest)[:, None, None])
            candidates = Candidates(votes, positions, self.num_tokens, room, always, lambda: self._keys(leaving[0]))
            weights = self.policy.ranks(candidates).masked_fill(always, torch.inf)
            alive = best(weights, alive, room)
        samples, sampled = self._samples(leaving), positions[:, :, self.packed_tokens :]
        self.pool.fields[WEIGHT] = weights[:, :, :slots]
        self.pool.keep(alive[:, :, :slots])
        fields = {VOTES: votes[:, :, slots:], WEIGHT: weights[:, :, slots:]}
        self.pool.take(leaving, positions[:, :, slots:], alive[:, :, slots:], fields)
        loose = self.pool.positions[:, :, self.packed_tokens :]
        most = self._most_blocks() if evicts else None
        self.pool.pack((loose >= 0) & ~self._sinks(loose), samples, sampled, most)
        del self.pool.fields[WEIGHT]

    def _samples(self, leaving: list[Tensor]) -> list[Tensor]:
        """Return the tokens that codecs are fitted on: all exact ones but the tail, also evicted
        ones.
        """
        if all(side.codec.needs_fit is None for side in self.sides):
            return leaving
        return [torch.cat([side.loose, x], dim=2) for side, x in zip(self.sides, leaving, strict=True)]

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
        """Return keys of the pool's slots and of tokens leaving the tail, float32 [B, H, T, D]."""
        packed = [self.pool.views(0, self.packed_tokens)[0].decode()] if self.packed_tokens else []
        return torch.cat([*packed, self.keys.loose.float(), leaving.float()], dim=2)

    def _most_blocks(self) -> int:
        tokens = max(0, int(self._head_budget().max()) - self.tail_tokens)
        return math.ceil(SPARE * tokens / self.flush_tokens) + 1

    def _crop_tail(self, n: int) -> None:
        super()._crop_tail(n)
        self.tail_votes = self.tail_votes[:, :, : self.tails[0].tokens]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        footprint.parts["selection"] += self.tail_votes.numel() * self.tail_votes.element_size()
        return footprint


def best(weights: Tensor, alive: Tensor, room: Tensor) -> Tensor:
    """Return the mask of the `room` [B, H] tokens with the highest weight among `alive` [B, H, T].

    Of tokens with equal weight the earlier one is chosen.
    """
    order = weights.masked_fill(~alive, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    place = torch.empty_like(order).scatter_(-1, order, places)
    return alive & (place < room[..., None])


def new_store(
    plan: LayerPlan,
    keys: Tensor,
    values: Tensor,
    window: int | None = None,
    rope: Rope | None = None,
    heads: HeadShard | None = None,
    context_parallel: ContextParallel | None = None,
) -> LayerStore | EvictingStore:
    """Build the store of a layer. In sliding-window layers every policy keeps all tokens of the
    window.

    rope, heads: see `LayerStore`. Samples are drawn, and their codecs fitted, for this process's
        heads.
    context_parallel: processes that share the packed tokens of a full-attention layer without
        eviction.
    """
    if heads is not None:
        codecs = {side: getattr(plan, side).of_heads(heads.first, heads.count) for side in ("keys", "values")}
        plan = plan._replace(**codecs)
    if isinstance(plan.policy, SubGen) and plan.policy.samples and window is None:
        # heads may fill blocks at different times, so processes could not synchronise
        other = replace(plan.policy, seed=(plan.policy.seed + (heads.first if heads else 0)) % 2**31)
        return SketchStore(plan._replace(policy=other), keys, values, rope)
    if isinstance(plan.policy, Selection) and window is None:
        return ScoredEvictionStore(plan, keys, values, rope, heads)
    finds = isinstance(plan.policy, Window) and plan.policy.found > 0 and window is None
    if finds and context_parallel is not None:
        raise UserError("found=… is not available with context_parallel, whose processes hold different tokens")
    if finds and not (isinstance(plan.keys, Exact) and isinstance(plan.values, Exact)):
        return FoundSinksStore(plan, keys, values, None, rope, heads)
    if context_parallel is not None and window is None:
        return ContextParallelStore(plan, keys, values, context_parallel, rope, heads)
    if isinstance(plan.policy, Mixed) and window is None and plan.policy.mixes(plan.keys, plan.values):
        return MixedRatesStore(plan, keys, values, None, rope, heads)
    store = LayerStore if plan.policy.packs_generated else PromptPackingStore
    return store(plan, keys, values, window, rope, heads)
