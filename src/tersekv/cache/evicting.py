"""Base class of stores that evict tokens: pools of chosen tokens, and an exact tail.

The tail (recent window) holds the same tokens for all heads. Tokens in pools keep their original
positions and RoPE.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import HeadShard
from tersekv.cache.pool import TokenPool
from tersekv.cache.schema import optional, per_row, positions, require, whole
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.cache.state import Rules, Spec
from tersekv.cache.store import Store
from tersekv.cache.tail import TailBuffer, first_tokens
from tersekv.errors import CacheError, UserError
from tersekv.policies.base import PROMPT_TOKENS, Selection
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain
from tersekv.transforms.rope import Rope

UNREADABLE = (
    "a cache whose policy evicts tokens can be read by tersekv's attention only, because heads evict different tokens; "
    "use `with tersekv.compress(model, recipe):`, or the policy window if the model's own code reads keys and values"
)


SELECTIVE = {
    "padding": lambda store: optional(per_row(store)),
    "num_tokens": lambda store: whole(),
    "tail_tokens": lambda store: whole(0, store.policy.recent),
    "budget": per_row,
    "latest": per_row,
}


def selective_tokens(store: EvictingStore, place: str) -> None:
    """Check that pools hold only tokens from before the tail."""
    tails = {tail.tokens for tail in store.tails}
    require(len(tails) == 1, f"{place}.tails", f"hold different numbers of keys and values {sorted(tails)}")
    first = store.num_tokens - tails.pop()
    require(first >= 0, place, f"holds more tokens than the {store.num_tokens} received")
    most = max(store.num_tokens + store.policy.recent + store.flush_tokens, int(store.policy.budget))
    fits = int(store.budget.max()) <= most and bool((store.latest <= store.budget).all())
    require(fits, f"{place}.budget", f"keeps more than {most} tokens, or fewer than the latest")
    for i, pool in enumerate(store.pools):
        positions(pool.positions, first, f"{place}.pools.{i}.positions")
        given = None if store.padding is None else store.padding.tolist()
        alike = (None if pool.padding is None else pool.padding.tolist()) == given
        require(alike, f"{place}.pools.{i}.padding", "is not the layer's")


class EvictingStore(Store):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of a full-attention layer under a `Selection`."""

    STATE: ClassVar[Spec] = SELECTIVE
    """State that a refused append restores, next to the pools.

    Values are replaced, never written in place.
    """
    RULES: ClassVar[Rules] = (selective_tokens,)
    PARTS = ("pools", "tails")

    shape = property(attrgetter("keys.loose.shape"), doc="See `Store`.")
    device = property(attrgetter("keys.loose.device"), doc="See `Store`.")
    num_evicted = 0  # no range of positions is evicted for all heads
    by_head, least_queries = True, 1

    @plain
    def __init__(
        self, plan: LayerPlan, keys: Tensor, values: Tensor, rope: Rope | None = None, heads: HeadShard | None = None
    ) -> None:
        assert isinstance(plan.policy, Selection)
        self.plan, self.rope, self.heads = plan, rope, heads
        self.policy: Selection = plan.policy
        self.dtype = plan.policy.exact_dtype(keys.dtype)
        self._start(keys, values)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Reset to no tokens, for keys and values with these shapes."""
        B, H = keys.shape[:2]
        self.pool = self._new_pool(keys, values)
        self.keys, self.values = self.sides = self.pool.sides
        self.flush_tokens = self.pool.flush_tokens
        room = self.dtype, keys.device, 0, self.policy.recent + self.flush_tokens
        self.tails = [TailBuffer(B, H, x.shape[3], *room) for x in (keys, values)]
        self.padding: Tensor | None = None
        self.num_tokens = self.tail_tokens = 0  # tail_tokens: latest tokens that stay exact
        self.budget = torch.zeros(B, dtype=torch.int64, device=keys.device)  # tokens kept per row
        self.latest = torch.zeros_like(self.budget)  # latest tokens per row that always stay

    @abstractmethod
    def _new_pool(self, keys: Tensor, values: Tensor) -> TokenPool:
        """Return an empty pool for keys and values with these shapes."""

    @property
    def pools(self) -> list[TokenPool]:
        """All pools of the store."""
        return [self.pool]

    @property
    def packed_tokens(self) -> int:
        """Number of packed slots."""
        return sum(pool.packed_tokens for pool in self.pools)

    @property
    def deferred(self) -> bool:
        """True while a row may still be all padding."""
        return self.num_tokens == 0 or (self.padding is not None and int(self.padding.max()) >= self.num_tokens)

    @property
    def latest_keys(self) -> Tensor:
        """Keys [B, H, n, D] of the latest tokens, which are exact."""
        return self.tails[0].data

    @property
    def hidden(self) -> Tensor | None:
        """Number of positions of each row before its first token, int64 [B]."""
        return self.padding

    def observed(self, queries: int) -> int:
        """Return how many of the latest `queries` queries the policy observes now."""
        due = self._is_prompt(queries) or (self.policy.remembers and not self._only_grows(queries))
        return self.policy.observed(queries) if due else 0

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Raise UserError, because heads have evicted different tokens."""
        raise UserError(UNREADABLE)

    def _is_prompt(self, n: int) -> bool:
        return self.num_tokens == 0 or n >= PROMPT_TOKENS

    @plain
    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens, choose which stay, and pack chosen tokens that left the tail.

        padding: int64 [B], leading positions of each row without a token.
        observed: votes, if `observed` says that they are needed.

        Raises:
            CacheError, UserError: values are not finite, or too large for the exact dtype or a
                scale. Nothing was added.
        """
        votes = observed.votes
        if votes is None and self.observed(keys.shape[2]):
            raise UserError(UNREADABLE)
        if self._only_grows(keys.shape[2]):  # nothing leaves the tail
            new = [tail.rounded(x) for tail, x in zip(self.tails, (keys, values), strict=True)]
            for tail, x in zip(self.tails, new, strict=True):
                tail.append(x)
            self.num_tokens += keys.shape[2]
            return
        new = [tail.rounded(x) for tail, x in zip(self.tails, (keys, values), strict=True)]
        before = [pool.mark() for pool in self.pools], {name: getattr(self, name) for name in self.STATE}
        if self.deferred and padding is not None and int(padding.max()) > 0:
            self.padding = padding
            for pool in self.pools:
                pool.padding = padding
        try:
            leave = self._add(new, votes)
        except Exception:
            for pool, mark in zip(self.pools, before[0], strict=True):
                pool.undo(mark)
            self.__dict__.update(before[1])
            for pool in self.pools:
                pool.padding = self.padding
            raise
        for tail, x in zip(self.tails, new, strict=True):  # last, because it is not undone
            tail.usual = self.tail_tokens + (0 if self.policy.evicts == "step" else self.flush_tokens)
            old = tail.tokens
            tail.drop_front(min(leave, old))
            tail.append(x[:, :, max(0, leave - old) :])

    def _only_grows(self, n: int) -> bool:
        """True if n generated tokens go into the tail and nothing else changes."""
        tail = self.tails[0]
        if self.policy.evicts == "step" or self._is_prompt(n) or self.deferred:
            return False
        usual = self.tail_tokens + self.flush_tokens
        return tail.usual == usual and tail.tokens + n < usual

    def _add(self, new: list[Tensor], votes: Tensor | None) -> int:
        """Update everything but the tail.

        Return how many of the oldest tokens of tail and `new` leave it.
        """
        n, t = new[0].shape[2], self.tails[0].tokens
        prompt = self._is_prompt(n)
        self.num_tokens += n
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
        t, n = self.tails[0].tokens, new[0].shape[2]
        leaving = [first_tokens(tail.data, x, leave) for tail, x in zip(self.tails, new, strict=True)]
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

    def is_whole(self, seen: int) -> bool:
        """Return False: after an interrupted append it is unknown which tokens are held."""
        return False

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless n tokens can be rolled back: all, or at most those of the tail.

        Tokens that were evicted because of them are lost.
        """
        held = self.tails[0].tokens
        if n > self.num_tokens:
            raise CacheError(f"cannot roll back {n} tokens, only {self.num_tokens} were seen")
        if held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens; a policy that evicts tokens can roll back the latest {held} (see its "
                "option recent) or all"
            )

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `check_crop`."""
        self.check_crop(n)
        if n == self.num_tokens:
            self._start(*(tail.data[:, :, :0] for tail in self.tails))
        else:
            self.num_tokens -= n
            self._crop_tail(n)

    def _crop_tail(self, n: int) -> None:
        for tail in self.tails:
            tail.drop_back(n)

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        rows = rows.to(self.device)
        for pool in self.pools:
            pool.select(rows)
        for tail in self.tails:
            tail.select(rows)
        self._map_state(lambda x: x.index_select(0, rows))

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        for pool in self.pools:
            pool.to(device)
        for tail in self.tails:
            tail.to(device)
        self._map_state(lambda x: x.to(device))

    def _map_state(self, fn: Callable[[Tensor], Tensor]) -> None:
        for name in self.STATE:
            value: Any = getattr(self, name)
            if isinstance(value, tuple):
                setattr(self, name, type(value)(*(fn(x) if isinstance(x, Tensor) else x for x in value)))
            elif isinstance(value, Tensor):
                setattr(self, name, fn(value))

    def tables(self) -> list[Tensor]:
        """Return the tables of both sides next to the packed tensors."""
        sides = [side for pool in self.pools for side in pool.sides]
        needed = self.plan.keys.needs_rope and any(len(side.packed) for side in sides)
        rope = self.rope.tables(self.device) if self.rope is not None and needed else []
        return [*rope, *(table for side in sides for table in side.tables())]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        rows = self.batch_size * self.kv_heads * self.num_tokens
        footprint = Footprint(self.num_tokens, rows * sum(side.head_dim for side in self.sides))
        footprint.coded = {self.plan.coded: 1}
        for pool in self.pools:
            loose = self._sinks(pool.positions[:, :, pool.packed_tokens :])
            pool.count(footprint, int(loose.sum(-1).max()) if loose.shape[2] else 0)
        for tail in self.tails:
            tail.count(footprint)
        return footprint
