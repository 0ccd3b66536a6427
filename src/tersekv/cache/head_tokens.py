"""Base class of tokens that differ by head, because a policy evicts some: pools of tokens, and what chooses them.

The recent window (tail) holds the same tokens for all heads. Those that leave it enter a pool, or are
evicted. Tokens in pools keep their original positions and RoPE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import HeadShard
from tersekv.cache.placement import Placement
from tersekv.cache.pool import TokenPool
from tersekv.cache.schema import per_row, positions, require, whole
from tersekv.cache.segments import ExactSegment, WeightedSegment
from tersekv.cache.side import SideStore
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.cache.tail import first_tokens
from tersekv.errors import CacheError, UserError
from tersekv.layouts.base import View
from tersekv.policies.base import PROMPT_TOKENS, Selection
from tersekv.recipe import LayerPlan
from tersekv.transforms.rope import Rope

UNREADABLE = (
    "a cache whose policy evicts tokens can be read by tersekv's attention only, because heads evict different tokens; "
    "use `with tersekv.compress(model, recipe):`, or the policy window if the model's own code reads keys and values"
)


SELECTIVE = {
    "tail_tokens": lambda kept: whole(0, kept.policy.recent),
    "budget": per_row,
    "latest": per_row,
}


def selective_tokens(kept: HeadTokens, place: str) -> None:
    """Check that pools hold only tokens from before the tail."""
    tails = {side.tail.tokens for side in kept.sides}
    require(len(tails) == 1, f"{place}.tails", f"hold different numbers of keys and values {sorted(tails)}")
    first = kept.num_tokens - tails.pop()
    require(first >= 0, place, f"holds more tokens than the {kept.num_tokens} received")
    most = max(kept.num_tokens + kept.policy.recent + kept.flush_tokens, int(kept.policy.budget))
    fits = int(kept.budget.max()) <= most and bool((kept.latest <= kept.budget).all())
    require(fits, f"{place}.budget", f"keeps more than {most} tokens, or fewer than the latest")
    for i, pool in enumerate(kept.pools):
        positions(pool.positions, first, f"{place}.pools.{i}.positions")


class HeadTokens(Stateful, ABC):
    """Tokens of a full-attention layer that each KV head has kept under a `Selection`.

    sides: keys and values of the layer. Their tails and tiers hold tokens of this object.
    placement: that of the layer. It counts tokens received.
    rope: RoPE of the keys, needed if they are coded before RoPE.
    heads: this process's heads under tensor parallelism, or None.
    pools: see the subclasses.
    padding: int64 [B], leading positions of rows without a token, or None.
    tail_tokens: latest tokens that stay exact.
    budget: int64 [B], tokens kept per row. latest: int64 [B], of these, latest tokens that always stay.
    estimates, keeps_queries: see `Store`.
    """

    STATE: ClassVar[Spec] = SELECTIVE
    """State that a refused append restores, next to the pools.

    Values are replaced, never written in place.
    """
    RULES: ClassVar[Rules] = (selective_tokens,)
    PARTS: ClassVar[tuple[str, ...]] = ("pools",)

    estimates: ClassVar[bool] = False
    longest: Tensor | None = None

    def __init__(
        self,
        plan: LayerPlan,
        sides: Sequence[SideStore],
        placement: Placement,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        assert isinstance(plan.policy, Selection)
        self.plan, self.sides, self.placement, self.rope, self.heads = plan, sides, placement, rope, heads
        self.policy: Selection = plan.policy
        self.dtype, self.flush_tokens = sides[0].dtype, placement.block
        placement.most_sinks = 0  # sinks are in the pools
        self.restart()

    def restart(self) -> None:
        """Start over, without tokens."""
        for side in self.sides:
            side.tail.restart()
        self.padding: Tensor | None = None
        self.tail_tokens = 0
        self.budget = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        self.latest = torch.zeros_like(self.budget)
        self.pools = self._new_pools()

    @abstractmethod
    def _new_pools(self) -> list[TokenPool]:
        """Return empty pools."""

    @property
    def pool(self) -> TokenPool:
        """The first pool."""
        return self.pools[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.sides[0].sinks.device

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return self.sides[0].sinks.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.sides[0].sinks.shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return self.placement.tokens

    @property
    def deferred(self) -> bool:
        """True while a row may still be all padding."""
        return self.num_tokens == 0 or (self.padding is not None and int(self.padding.max()) >= self.num_tokens)

    @property
    def keeps_queries(self) -> bool:
        """True if queries are needed after their call."""
        return False

    # ------------------------------------------------------------------ reading

    @abstractmethod
    def exact_segments(self) -> list[ExactSegment]:
        """Return exact tokens of the pools, without empty segments."""

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return sampled tokens, see `Store`."""
        return []

    def packed(self, rate: int, first: int, tokens: int) -> tuple[Tensor, View, View]:
        """Return positions, keys and values of slots `first` to `first + tokens` of a tier."""
        pool = self.pools[rate]
        keys, values = pool.views(first, tokens)
        return pool.positions[:, :, first : first + tokens], keys, values

    def observed(self, queries: int) -> int:
        """Return how many of the latest `queries` queries the policy observes now."""
        due = self._is_prompt(queries) or (self.policy.remembers and queries > self.room())
        return self.policy.observed(queries) if due else 0

    def waiting_queries(self) -> Tensor | None:
        """Return the kept queries of the latest tokens, or None."""
        return None

    def keep(self, query: Tensor, seen: int, masked: bool) -> None:
        """Keep queries [B, Hq, n, D] of tokens that are about to be appended to `seen` others, see `Store`."""

    # ------------------------------------------------------------------ growing

    def _is_prompt(self, n: int) -> bool:
        return self.num_tokens == 0 or n >= PROMPT_TOKENS

    def room(self) -> int:
        """Return the number of generated tokens that can enter the tail before anything else changes."""
        tail, usual = self.sides[0].tail, self.tail_tokens + self.flush_tokens
        if self.policy.evicts == "step" or self.deferred or tail.usual != usual:
            return 0
        return max(0, min(PROMPT_TOKENS - 1, usual - 1 - tail.tokens))

    def receive(self, new: list[Tensor], padding: Tensor | None, votes: Tensor | None) -> None:
        """Append rounded tokens, choose which stay, and pack chosen ones that left the tail.

        padding: int64 [B], leading positions of each row without a token, or None.
        votes: attention that observed queries gave to held and new tokens, if `observed` says that it is needed.

        Raises:
            UserError: votes are missing, or a scale is too large. Nothing was added.
        """
        n, leave = new[0].shape[2], 0
        if votes is None and self.observed(n):
            raise UserError(UNREADABLE)
        if n <= self.room():
            self.placement.tokens += n
        else:
            before = self._mark()
            if self.deferred and padding is not None and int(padding.max()) > 0:
                self.pad(padding)
            try:
                leave = self._add(new, votes)
            except Exception:
                self._undo(before)
                raise
        for side, x in zip(self.sides, new, strict=True):  # last, because it is not undone
            side.tail.usual = self.tail_tokens + (0 if self.policy.evicts == "step" else self.flush_tokens)
            old = side.tail.tokens
            side.tail.drop_front(min(leave, old))
            side.tail.append(x[:, :, max(0, leave - old) :])
        self.placement.deferred = self.deferred

    def _add(self, new: list[Tensor], votes: Tensor | None) -> int:
        """Update everything but the tail.

        Return how many of the oldest tokens of tail and `new` leave it.
        """
        n, t = new[0].shape[2], self.sides[0].tail.tokens
        prompt = self._is_prompt(n)
        self.placement.tokens += n
        if prompt or self.policy.evicts != "never":
            self._set_budget()
        leave = 0 if self.deferred else max(0, t + n - self.tail_tokens)
        if not prompt and self.policy.evicts != "step":
            leave = leave // self.flush_tokens * self.flush_tokens
        if leave or (self.policy.remembers and votes is not None):
            self._take(new, votes, leave, prompt)
        return leave

    @abstractmethod
    def _take(self, new: list[Tensor], votes: Tensor | None, leave: int, prompt: bool) -> None:
        """Move the oldest `leave` tokens of the tail and of `new` into the pools, or evict them."""

    def pad(self, padding: Tensor | None) -> None:
        """Set the padding of rows."""
        self.padding = padding
        for pool in self.pools:
            pool.padding = padding

    def _mark(self) -> Any:
        figures = {name: getattr(self, name) for name in self.STATE}
        return [pool.mark() for pool in self.pools], figures, self.num_tokens, self.padding

    def _undo(self, before: Any) -> None:
        pools, figures, self.placement.tokens, padding = before
        for pool, mark in zip(self.pools, pools, strict=True):
            pool.undo(mark)
        self.__dict__.update(figures)
        self.pad(padding)

    def _received(self) -> list[int]:
        """Return the number of tokens that each row has received."""
        if self.padding is None:
            return [self.num_tokens] * self.batch_size
        received: list[int] = (self.num_tokens - self.padding).tolist()
        return received

    def _set_budget(self) -> None:
        """Set the number of tokens that each row keeps, from the number it has received."""
        kept = [self.policy.kept(n, self.plan.layer, self.plan.layers) for n in self._received()]
        self.budget = self.budget.new_tensor(kept)
        self.latest = self.budget.new_tensor([self.policy.latest(n) for n in kept])
        self.tail_tokens = min(self.policy.recent, int(self.latest.max()))

    def _leaving(self, new: list[Tensor], leave: int) -> tuple[list[Tensor], Tensor]:
        """Return the oldest `leave` tokens [B, H, m, D] of tail and `new`, and their positions.

        Positions are int32 [B, H, m]. Padding has position −1 and is replaced by the row's last
        token, so that it affects no scale or table.
        """
        t, n = self.sides[0].tail.tokens, new[0].shape[2]
        leaving = [first_tokens(side.tail.data, x, leave) for side, x in zip(self.sides, new, strict=True)]
        first = self.num_tokens - t - n
        positions = torch.arange(first, first + leave, dtype=torch.int32, device=self.device)
        positions = positions.expand(self.batch_size, self.kv_heads, -1)
        if self.padding is not None:
            hidden = positions < self.padding[:, None, None]
            positions = positions.masked_fill(hidden, -1)
            leaving = [torch.where(hidden[..., None], x[:, :, -1:], y) for x, y in zip(new, leaving, strict=True)]
        return leaving, positions

    def _sinks(self, positions: Tensor) -> Tensor:
        """Return the mask of positions that are attention sinks of their row."""
        first = 0 if self.padding is None else self.padding[:, None, None]
        return (positions >= 0) & (positions < first + self.policy.sinks)

    # ------------------------------------------------------------------ changing

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless n tokens can be rolled back: all, or at most those of the tail.

        Tokens that were evicted because of them are lost.
        """
        held = self.sides[0].tail.tokens
        if held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens; a policy that evicts tokens can roll back the latest {held} (see its "
                "option recent) or all"
            )

    def crop(self) -> None:
        """Follow a rollback of tokens of the tail, or of all."""
        if self.num_tokens == 0:
            self.restart()
        self.placement.deferred = self.deferred

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self._map(lambda x: x.index_select(0, rows))

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self._map(lambda x: x.to(device))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for pool in self.pools:
            pool.map(fn)
        for name in self.STATE:
            value: Any = getattr(self, name)
            if isinstance(value, tuple):
                setattr(self, name, type(value)(*(fn(x) if isinstance(x, Tensor) else x for x in value)))
            elif isinstance(value, Tensor):
                setattr(self, name, fn(value))
        self.pad(None if self.padding is None else fn(self.padding))

    def tables(self) -> list[Tensor]:
        """Return the tables needed next to those of the layer's tiers."""
        packed = self.plan.keys.needs_rope and any(pool.packed_tokens for pool in self.pools)
        return self.rope.tables(self.device) if self.rope is not None and packed else []

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and tails."""
        for pool in self.pools:
            loose = self._sinks(pool.positions[:, :, pool.packed_tokens :])
            pool.count(footprint, int(loose.sum(-1).max()) if loose.shape[2] else 0)
