"""The cache of one layer: exact sinks | packed blocks | exact recent window.

The cache is append-only: packed tokens are never decoded and packed again. Tokens are rounded to
the exact dtype before they are packed, and blocks start at fixed positions. The packed bytes
therefore do not depend on how tokens were fed, unless a codec is fitted on the prompt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache import packing
from tersekv.cache.chosen_tokens import ChosenTokens
from tersekv.cache.coding import without_padding
from tersekv.cache.exact_tokens import ExactTokens, first_tokens
from tersekv.cache.footprint import Footprint
from tersekv.cache.found_sinks import FoundTokens, found_are_packed
from tersekv.cache.head_tokens import HeadTokens
from tersekv.cache.packed_side import PackedSide
from tersekv.cache.pages import ROLLBACK_TOKENS, PageSizes
from tersekv.cache.parallel import ELSEWHERE, ContextParallel, HeadShard, OwnBlocks
from tersekv.cache.placement import Placement
from tersekv.cache.ranked_tokens import HeadRates, RankedTokens, ranked_are_packed
from tersekv.cache.rotary import Rotary
from tersekv.cache.sampled_tokens import SampledTokens
from tersekv.cache.schema import optional, per_row, require
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.cache.slots import POSITIONS, Slots
from tersekv.cache.state import Rules, Spec, State
from tersekv.cache.store import LEAST_QUERIES, Store
from tersekv.cache.tier import Tier
from tersekv.errors import CacheError
from tersekv.kernels import backends
from tersekv.policies.base import two_rates
from tersekv.policies.subgen import SubGen
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain
from tersekv.threads import one_thread
from tersekv.transforms.rope import Rope


def layer_tokens(store: Any, place: str) -> None:
    """Check that keys and values hold the tokens that the placement names."""
    held, placed = (store.sinks.tokens, store.packed_tokens, store.recent.tokens), store.placement
    wanted = (0, *held[1:]) if store.chosen else (placed.sinks, placed.packed, placed.tail)
    require(held == wanted, place, f"holds {held} sinks, packed and recent tokens, and must hold {wanted}")


def layer_padding(store: Any, place: str) -> None:
    """Check that the padding of each row leaves room for its tokens."""
    if store.rotary is not None and store.rotary.padding is not None:
        padding = store.rotary.padding
        fits = len(padding) == store.batch_size and (store.deferred or int(padding.max()) <= store.num_tokens)
        require(fits, f"{place}.rotary.0.padding", f"does not fit {store.batch_size} rows of {store.num_tokens} tokens")
        same = store.padding is None or store.padding.tolist() == padding.tolist()
        require(same, f"{place}.rotary.0.padding", "is not the layer's")
    if store.padding is not None and not store.deferred:
        sinks, packed = store.sinks.tokens, store.packed_tokens
        fits = (sinks > 0 or store.by_head or not packed) and int(store.padding.max()) + sinks <= store.num_tokens
        require(fits, f"{place}.padding", f"leaves no room for {sinks} tokens of {store.num_tokens}")


def layer_index(store: Any, place: str) -> None:
    """Check that the keys of the indexer are those of all tokens."""
    for indexer in store.indexer:
        require(indexer.tokens == store.num_tokens, f"{place}.indexer.0.data", f"must have {store.num_tokens} tokens")


class LayerStore(Store):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer.

    keys, values: tensors with the shapes of the first tokens.
    window: the layer's sliding window in tokens, None for full attention. A sliding-window layer
        has no sinks and evicts packed tokens that no query can see any more.
    rope: RoPE of the layer's keys, needed if they are coded before RoPE.
    heads: this process's heads under tensor parallelism, or None. Samples are drawn, and their codecs
        fitted, for these heads.
    context_parallel: processes that share the packed tokens of a full-attention layer without eviction,
        or None.
    query_rope: RoPE of the layer, for policies that rank tokens; that of the keys by default.
    """

    STATE: ClassVar[Spec] = {"padding": lambda store: optional(per_row(store))}
    RULES: ClassVar[Rules] = (layer_tokens, layer_padding, layer_index, found_are_packed, ranked_are_packed)
    PARTS: ClassVar[tuple[str, ...]] = (
        "placement", "sinks", "tiers", "recent", "indexer", "rotary", "found", "ranked", "chosen"
    )  # fmt: skip
    MADE: ClassVar[tuple[str, ...]] = ("_pages",)

    @plain
    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
        context_parallel: ContextParallel | None = None,
        query_rope: Rope | None = None,
    ) -> None:
        if heads is not None:
            codecs = {side: getattr(plan, side).of_heads(heads.first, heads.count) for side in ("keys", "values")}
            rates = None if plan.rates is None else plan.rates[heads.first : heads.first + heads.count]
            if rates is not None:  # the highest of these heads may be lower than that of the layer
                codecs = {side: codec.at_rate(float(rates[:, :2].max())) for side, codec in codecs.items()}
            plan = plan._replace(**codecs, rates=rates)
        if isinstance(plan.policy, SubGen) and plan.policy.samples and window is None:
            # heads may fill blocks at different times, so processes could not synchronise
            other = replace(plan.policy, seed=(plan.policy.seed + (heads.first if heads else 0)) % 2**31)
            plan, heads = plan._replace(policy=other), None
        rest = plan.policy.rest if window is None and two_rates(plan.keys, plan.values) else 0.0
        evicts = window is None and plan.policy.drops
        if rest or evicts:  # heads store different tokens, so nothing is stored jointly for all of them
            plan = plan.per_head()
        plan = plan._replace(keys=plan.keys.to(keys.device), values=plan.values.to(keys.device))
        self.plan, self.policy, self.window, self.heads = plan, plan.policy, window, heads
        blocks = plan.keys.layout(keys.shape[-1]).block_tokens, plan.values.layout(values.shape[-1]).block_tokens
        self.flush_tokens = math.lcm(*blocks)
        dtype = plan.policy.exact_dtype(keys.dtype)
        self.rotary = Rotary(rope) if rope is not None and plan.keys.needs_rope and not evicts else None
        sizes = PageSizes(self.flush_tokens, None if window is None else window + ROLLBACK_TOKENS)
        empty = [x.new_empty((*x.shape[:2], 0, x.shape[3]), dtype=dtype) for x in (keys, values)]
        self.latent = plan.latent
        self.sinks = ExactTokens(empty, part="exact sinks", latent=self.latent)
        most = plan.policy.recent + plan.policy.waiting_tokens(self.flush_tokens, window)
        self.recent = ExactTokens(empty, most, grows=not plan.policy.packs_generated, latent=self.latent)
        index = keys.new_empty((len(keys), 1, 0, plan.index_dim))
        self.indexer = [ExactTokens([index], grows=True, part="selection")] if plan.index_dim else []
        of_heads = HeadRates(keys.shape[1], plan.rates if rest else None, rest, getattr(plan.policy, "budget", 0.0))
        self.keys = PackedSide(plan.keys, keys, sizes, plan.policy.corrected_share, users=of_heads.users(0))
        self.values = PackedSide(plan.values, values, sizes)
        self.sides = self.keys, self.values
        self.tiers = [Tier(*self.sides, latent=self.latent)]
        for number, bits in enumerate(of_heads.lower if rest else (), 1):
            users = of_heads.users(number)
            low = PackedSide(plan.keys, keys, sizes, plan.policy.corrected_share, bits, self.keys, users)
            rest_of_values = PackedSide(plan.values, values, sizes, 0.0, bits, self.values)
            self.tiers.append(Tier(low, rest_of_values, latent=self.latent))
        self.padding = None
        self.placement = Placement(plan.policy, window, self.flush_tokens)
        self.room = 0  # lower bound of the tokens that can be added before some leave the window
        self._pages = None  # cached until packed blocks change
        most = plan.policy.most_found if window is None and two_rates(plan.keys, plan.values) else 0
        self.found = [FoundTokens(most, empty, heads, self.latent)] if most else []
        ranking = plan.policy, self.flush_tokens, empty[0], query_rope or rope, of_heads
        self.ranked = [RankedTokens(*ranking)] if rest and not evicts else []
        for tier in self.tiers if self.ranked else ():
            tier.differ(Slots(empty[0], None, self.flush_tokens))
        kind = SampledTokens if plan.policy.samples else ChosenTokens
        self.chosen = [kind(plan, self.tiers, self.recent, self.placement, rope, heads)] if evicts else []
        self.by_head, self.estimates = evicts, any(chosen.estimates for chosen in self.chosen)
        self.keeps_queries = bool(self.ranked) or any(chosen.keeps_queries for chosen in self.chosen)
        self.least_queries = 1 if self.ranked or self.chosen else LEAST_QUERIES
        processes = context_parallel if window is None else None
        self.own = None if processes is None else OwnBlocks(processes, self.flush_tokens, keys.device)

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens and pack those that leave the recent window.

        padding: int64 [B], leading positions of each batch row without a token, known from the
            first mask. Each row's own first tokens become its sinks.
        observed: what `observes`, `ranks` and `observed` say that is needed.

        Raises:
            CacheError, UserError: values are not finite, or too large. Nothing was added.
        """
        if keys.shape[2] > self.room:
            self._receive(keys, values, padding, observed)
        else:  # nothing leaves the recent window
            self._extend(keys, values)

    def _extend(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens to the recent window. No tensor is made but by `reserve`, so this need not be `plain`."""
        recent, n = self.recent, keys.shape[2]
        at = recent.tokens
        if at + n > recent.buffers[0].shape[2]:
            recent.reserve(n)
        call = keys, values, *recent.buffers, at
        ahead, recent.written = recent.written, None
        written: bool | None = ahead is not None and ahead[0] is keys and ahead[1] == at  # by `attend_new`
        if not written:
            written = backends.write_tokens.direct(*call) if keys.is_cpu else None
        if written is None:
            written = backends.write_tokens.reference(*call)
        if not written:
            recent.rounded((keys, values))  # raises: says why
        if self.rotary is not None and self.rotary.rope.varies:
            self.rotary.note(self.num_tokens, n)
        recent.tokens = at + n
        self.placement.tokens += n
        self.room -= n

    @plain
    def _receive(self, keys: Tensor, values: Tensor, padding: Tensor | None, observed: Observed) -> None:
        """Append tokens of which some leave the recent window."""
        with one_thread(keys.numel()):
            new = self.recent.rounded((keys, values))
            if self.chosen:
                self._choose(self.chosen[0], new, padding, observed)
            else:
                self._keep(new, padding, observed)

    def _keep(self, new: list[Tensor], padding: Tensor | None, observed: Observed) -> None:
        """Append tokens that all heads keep, and pack those that leave the recent window."""
        n, most = new[0].shape[2], self.placement.most_sinks
        if self.deferred and padding is not None and int(padding.max()) > 0:
            self.padding = padding
        if self.rotary is not None:
            self.rotary.note(self.num_tokens, n, self.padding if self.deferred else None)
        if not self.deferred or self.padding is None:
            self._add(new, False, observed)
        elif int(self.padding.max()) + max(1, most) > self.num_tokens + n:
            self.recent.append(new)  # a padded row cannot fill its sinks, or is empty
            self.placement.tokens += n
        else:  # start over with all tokens, as if they had come in one call
            new = [torch.cat(both, dim=2) for both in zip(self.recent.data, new, strict=True)]
            self._add([without_padding(x, self.padding, most) for x in new], True, observed)
        if not (self.deferred or most) and self.packed_tokens:
            self.padding = None  # until then a fit must not take what fills it

    def record_past(self, past: bool) -> None:
        """Let a sliding window evict tokens at a crop only, or not."""
        self.placement.record_past = past

    def _choose(self, chosen: HeadTokens, new: list[Tensor], padding: Tensor | None, observed: Observed) -> None:
        """Append tokens of which each head keeps its own."""
        before = [tier.slots.held[POSITIONS] for tier in chosen.tiers]
        chosen.receive(new, padding, observed.votes)
        if any(tier.slots.held[POSITIONS] is not old for tier, old in zip(chosen.tiers, before, strict=True)):
            self._pages = None
        self.padding, self.room = chosen.padding, chosen.room()

    def _add(self, new: list[Tensor], restart: bool, observed: Observed) -> None:
        """Distribute new tokens to sinks, packed blocks and tail.

        restart: `new` includes the tail's tokens.
        """
        n, placement = new[0].shape[2], self.placement.fresh() if restart else self.placement
        move = placement.move(n)
        place = placement.tokens - placement.tail + move.sinks
        own = range(move.skip, move.leave) if self.own is None else self.own.run(placement.packed, move.leave)
        processes = None if self.own is None or not move.leave else self.own.processes
        hidden = None if self.padding is None else self.padding + self.placement.most_sinks
        highs = [ranked.choose(observed, move.leave, place, move.sinks, hidden) for ranked in self.ranked if move.leave]
        sinks, rest = [x[:, :, : move.sinks] for x in new], [x[:, :, move.sinks :] for x in new]
        old = [x[:, :, : placement.tail] for x in self.recent.data]
        tiers = self.ranked[0].by_tier(highs[0]) if highs else None
        call = packing.Packing(own, move.leave, place, hidden, processes, tiers)
        losses = observed.losses or (None, None)
        encoded = packing.encoded_sides(self, old, sinks, rest, call, losses) if move.leave else []
        for found in self.found if move.leave else ():
            found.look([first_tokens(*both, move.leave) for both in zip(old, rest, strict=True)], place, hidden)
        kept = placement.tail
        placement.add(n, move)
        self.placement = placement
        self._forget(move.forget)
        blocks = [of.blocks for of in tiers] if tiers else [None]
        for tier, *changes, count in zip(self.tiers, *encoded, blocks, strict=True) if encoded else ():
            tier.append(changes, None, count)
        self.sinks.append(sinks)
        self.recent.drop_front(self.recent.tokens if restart else min(move.leave, kept))
        self.recent.append([x[:, :, max(0, move.leave - kept) :] for x in rest])
        for ranked, high in zip(self.ranked, highs, strict=False):
            ranked.add(high)
        if move.leave or move.forget:
            self._pages = None
            if self.own is not None:
                self.own.add(place, own)
        self.room = placement.room()

    def _forget(self, tokens: int) -> None:
        """Remove that many of the oldest packed tokens, whole blocks."""
        for side in self.sides:
            side.packed.drop_front(tokens // side.packed.layout.block_tokens)

    @plain
    def index(self, keys: Tensor, past: int | None = None) -> Tensor:
        """Append keys [B, n, D] of the indexer and return those of all tokens.

        past: number of tokens before them, by default all. What an interrupted call has left is removed.
        """
        held = self.indexer[0]
        held.drop_back(held.tokens - (self.num_tokens if past is None else past))
        held.append([keys.detach().unsqueeze(1)])
        return held.keys.squeeze(1)

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless the n latest tokens can be rolled back."""
        held = self.recent.tokens
        for chosen in self.chosen:
            chosen.check_crop(n)
        if self.context_parallel is not None and held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens: {ELSEWHERE}, and {held} are exact in all (the policy's option recent "
                "says how many at least)"
            )
        if self.ranked and self.packed_tokens and held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} of {self.num_tokens} tokens; under the policy mixed the latest {held} can be "
                "rolled back, or all"
            )
        first = None if self.padding is None or self.chosen else int(self.padding.max())
        self.placement.check_crop(n, first)

    def is_whole(self, seen: int) -> bool:
        """True if, after an interrupted append, keys and values still hold the `seen` tokens."""
        exact = self.num_evicted + self.sinks.tokens + self.recent.tokens
        heads = self.batch_size * self.kv_heads if self.ranked else 1  # whose blocks are counted one after the other
        held = {exact + sum(tier.sides[i].packed.tokens for tier in self.tiers) // heads for i in range(2)}
        return self.num_tokens == seen and held == {seen} and not self.chosen  # it is unknown which tokens heads hold

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`.

        Affected packed blocks are removed as a whole. Their other tokens return to the window, decoded.

        Raises:
            CacheError: a sliding window, a padded batch or the cache holds too few tokens.
        """
        self.check_crop(n)
        gone = min(n, self.recent.tokens)
        removed, back = self.placement.crop(n)
        self._pages, self.room = None, 0
        self.recent.drop_back(gone)
        if removed and self.num_tokens:
            removed = min(removed, self.keys.packed.tokens)  # others may hold some
            if back:
                first = self.keys.packed.tokens - removed
                self.recent.append([view.decode()[:, :, :back] for view in self.views(0, first, removed)])
            for side in self.sides:
                side.packed.drop_back(removed // side.packed.layout.block_tokens)
        if not self.num_tokens or not (self.placement.packed or self.chosen):
            for tier in self.tiers:
                tier.restart([self.plan.keys, self.plan.values])  # to be fitted on the next prompt
        for indexer in self.indexer:
            indexer.drop_back(max(0, indexer.tokens - self.num_tokens))
        if self.sinks.tokens > self.placement.sinks:
            self.sinks.shrink(self.placement.sinks)
        if self.placement.record_past:
            self._forget(self.placement.past())
        for chosen in self.chosen:
            chosen.crop()
        for found in self.found:
            first = self.num_tokens - self.placement.tail
            found.put(self.recent.data, first)
            found.crop(first, self.num_tokens == 0)
        if self.num_tokens == 0:
            self.padding = None
            self.own = self.own and OwnBlocks(self.own.processes, self.flush_tokens, self.device)
            for ranked in self.ranked:
                ranked.restart()
            if self.rotary is not None:
                self.rotary.clear()

    def _hold(self, state: State, place: str) -> None:
        super()._hold(state, place)
        for chosen in self.chosen:
            chosen.padding = self.padding

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        super().select(rows.to(self.device))

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        super().to(device)
        self.plan = self.plan._replace(keys=self.plan.keys.to(device), values=self.plan.values.to(device))
        if self.own is not None:
            self.own.to(device)

    def tables(self) -> list[Tensor]:
        """Return the tables of both sides, without a codec's that is not fitted yet. Layers share some."""
        rope = []
        if self.rotary is not None and self.packed_tokens:
            rope = self.rotary.tables(self.device, self.keys.codec.centred, self.keys.head_dim)
        parts: list[Tier | HeadTokens] = [*self.tiers, *self.chosen]
        return [*rope, *(table for part in parts for table in part.tables())]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        rows = self.batch_size * self.kv_heads * min(self.num_tokens, self.window or self.num_tokens)
        elements = rows * sum(side.head_dim for side in self.sides)
        elements += self.batch_size * self.num_tokens * self.plan.index_dim
        footprint = Footprint(self.num_tokens, elements)
        footprint.coded = {self.plan.coded: 1}
        self.count(footprint)
        if self.own is not None:
            self.own.count(footprint)
        masks = len(self.found) * self.batch_size * (self.kv_heads if self.ranked else 1)  # of decode steps
        footprint.parts["selection"] += masks * self.packed_tokens
        return footprint
