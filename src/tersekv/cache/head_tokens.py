"""Base class of tokens that differ by head, because a policy evicts some.

The recent window holds the same tokens for all heads. Those that leave it are evicted, or chosen. Chosen
tokens stay exact ("loose") until they fill a block, which is then packed in a tier of the layer. They keep
their original positions and RoPE.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.exact_tokens import ExactTokens, first_tokens
from tersekv.cache.filled import Stream
from tersekv.cache.footprint import Footprint
from tersekv.cache.parallel import HeadShard
from tersekv.cache.placement import Placement
from tersekv.cache.schema import per_row, positions, require, whole
from tersekv.cache.segments import ExactSegment, WeightedSegment
from tersekv.cache.slots import POSITIONS, Slots, in_front, in_turn
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.cache.tier import Tier
from tersekv.errors import CacheError, UserError
from tersekv.policies.base import PROMPT_TOKENS, Selection
from tersekv.recipe import LayerPlan
from tersekv.tensors import gathered
from tersekv.transforms.angles import Angles
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
    """Check that heads hold only tokens from before the window."""
    first = kept.num_tokens - kept.recent.tokens
    require(first >= 0, place, f"holds more tokens than the {kept.num_tokens} received")
    most = max(kept.num_tokens + kept.policy.recent + kept.flush_tokens, int(kept.policy.budget))
    fits = int(kept.budget.max()) <= most and bool((kept.latest <= kept.budget).all())
    require(fits, f"{place}.budget", f"keeps more than {most} tokens, or fewer than the latest")
    for i in range(len(kept.loose)):
        positions(kept.positions(i), first, f"{place}.loose.{i}.slots.0.positions")


class HeadTokens(Stateful, ABC):
    """Tokens of a full-attention layer that each KV head has kept under a `Selection`.

    tiers: those of the layer, in which this object packs tokens, and perhaps more.
    recent: the layer's window. placement: that of the layer, which counts tokens received.
    rope: RoPE of the keys, needed if they are coded before RoPE.
    heads: this process's heads under tensor parallelism, or None.
    loose: chosen tokens that are exact: those that are to be packed in each tier, and perhaps others.
    padding: int64 [B], leading positions of rows without a token, or None.
    tail_tokens: latest tokens that stay exact.
    budget: int64 [B], tokens kept per row. latest: int64 [B], of these, latest tokens that always stay.
    estimates, keeps_queries: see `Store`.
    """

    STATE: ClassVar[Spec] = SELECTIVE
    RULES: ClassVar[Rules] = (selective_tokens,)
    PARTS: ClassVar[tuple[str, ...]] = ("loose",)
    HELD: ClassVar[tuple[str, ...]] = ("padding",)

    estimates: ClassVar[bool] = False
    longest: Tensor | None = None

    def __init__(
        self,
        plan: LayerPlan,
        tiers: Sequence[Tier],
        recent: ExactTokens,
        placement: Placement,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        assert isinstance(plan.policy, Selection)
        self.plan, self.recent, self.placement, self.heads = plan, recent, placement, heads
        self.policy: Selection = plan.policy
        self.rope = rope if plan.keys.needs_rope else None
        self.tiers, self.dtype, self.flush_tokens = list(tiers), recent.buffers[0].dtype, placement.block
        placement.most_sinks = 0  # sinks are chosen, too
        self.restart()

    def restart(self) -> None:
        """Start over, without tokens."""
        self.recent.shrink()
        self.recent.usual = 0
        self.padding: Tensor | None = None
        self.tail_tokens = 0
        self.budget = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        self.latest = torch.zeros_like(self.budget)
        self._empty()

    def _empty(self) -> None:
        """Set `loose`, and give the tiers empty slots."""
        self.loose = [ExactTokens(self.recent.buffers, fields=self.fields()) for _ in self.tiers]
        for tier in self.tiers:  # heads with budgets of their own have different numbers of blocks
            tier.differ(Slots(self.recent.buffers[0], self.fields(), tier.block if self.policy.needs_scores else 0))

    def fields(self) -> dict[str, torch.dtype]:
        """Return the numbers that are kept of each token."""
        return {}

    @property
    def slots(self) -> list[Tier | ExactTokens]:
        """Chosen tokens in the order of their slots: packed and exact ones of each rate."""
        return [held for pair in zip(self.tiers, self.loose, strict=False) for held in pair]

    def positions(self, rate: int) -> Tensor:
        """Return the positions int32 [B, H, n] of the slots of one rate, packed ones first."""
        held: list[Tier | ExactTokens] = [*self.tiers[rate : rate + 1], self.loose[rate]]
        return torch.cat([one.slots.positions for one in held], dim=2)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.recent.buffers[0].device

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return self.recent.buffers[0].shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.recent.buffers[0].shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens received."""
        return self.placement.tokens

    @property
    def deferred(self) -> bool:
        """True while a row may still be all padding."""
        return self.num_tokens == 0 or (self.padding is not None and int(self.padding.max()) >= self.num_tokens)

    @abstractmethod
    def fill(self, stream: Stream, queries: Tensor) -> tuple[int, int]:
        """Hold what a stream leaves, without tokens, on the device meta. The window is full already.

        queries: those since the latest eviction.

        Returns:
            The number of sinks per head, and bytes of slack to add.
        """

    @property
    def keeps_queries(self) -> bool:
        """True if queries are needed after their call."""
        return False

    # ------------------------------------------------------------------ reading

    def exact_segments(self) -> list[ExactSegment]:
        """Return loose tokens of each rate, without empty segments."""
        return [segment for loose in self.loose for segment in loose.segment()]

    def weighted_segments(self) -> list[WeightedSegment]:
        """Return sampled tokens, see `Store`."""
        return []

    def angles(self, positions: Tensor, ends: Tensor | None = None) -> Angles | None:
        """Return the RoPE angles of keys at positions [B, H, n], if they are coded before RoPE.

        ends: of positions [1, 1, n] of one head after the other, see `PackedPages`.
        """
        if self.rope is None:
            return None
        if self.padding is not None and ends is not None:
            rows = ends[:, -1].diff(prepend=ends.new_zeros(1))
            positions = positions - torch.repeat_interleave(self.padding, rows)
        elif self.padding is not None:
            positions = positions - self.padding[:, None, None]
        return self.rope.angles_at(positions.clamp(min=0))

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
        usual = self.tail_tokens + self.flush_tokens
        if self.policy.evicts == "step" or self.deferred or self.recent.usual != usual:
            return 0
        return max(0, min(PROMPT_TOKENS - 1, usual - 1 - self.recent.tokens))

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
                self.padding = padding
            try:
                leave = self._add(new, votes)
            except Exception:
                self._undo(before)
                raise
        self.recent.usual = self.tail_tokens + (0 if self.policy.evicts == "step" else self.flush_tokens)
        old = self.recent.tokens
        self.recent.drop_front(min(leave, old))  # last, because it is not undone
        self.recent.append([x[:, :, max(0, leave - old) :] for x in new])
        self.placement.deferred = self.deferred

    def _add(self, new: list[Tensor], votes: Tensor | None) -> int:
        """Update everything but the window.

        Return how many of the oldest tokens of window and `new` leave it.
        """
        n, t = new[0].shape[2], self.recent.tokens
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
        """Choose the oldest `leave` tokens of the window and of `new`, or evict them."""

    def _mark(self) -> Any:
        return self.mark(), [tier.mark() for tier in self.tiers], self.num_tokens

    def _undo(self, before: Any) -> None:
        own, tiers, self.placement.tokens = before
        self.undo(own)
        for tier, mark in zip(self.tiers, tiers, strict=True):
            tier.undo(mark)

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
        """Return the oldest `leave` tokens [B, H, m, D] of window and `new`, and their positions.

        Positions are int32 [B, H, m]. Padding has position −1 and is replaced by the row's last
        token, so that it affects no scale or table.
        """
        t, n = self.recent.tokens, new[0].shape[2]
        leaving = [first_tokens(*both, leave) for both in zip(self.recent.data, new, strict=True)]
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

    def _pack(
        self,
        tier: Tier,
        loose: ExactTokens,
        movable: Tensor,
        samples: Sequence[Tensor],
        at: Tensor,
        most: Tensor | None = None,
    ) -> None:
        """Pack whole blocks of each head's movable loose tokens, oldest first.

        movable: bool [B, H, n], loose slots that may be packed.
        samples, at: tokens [B, H, n, D] of each side that codecs are fitted on, and their positions.
        most: allowed number of blocks, see `Tier.most_blocks`, or None. If some must be evicted, the field WEIGHT
            decides.

        Raises:
            UserError: a scale is too large for its dtype. Nothing has changed.
        """
        t = tier.block
        waiting = movable.sum(-1) // t
        blocks = int(waiting.max()) if movable.shape[2] else 0
        if blocks == 0:
            return
        order = in_front(movable, blocks * t)
        taken = torch.arange(blocks * t, device=order.device) < (waiting * t).unsqueeze(-1)
        order = torch.where(taken, order, order[:, :, :1])  # an empty slot repeats a token to keep the block's scales
        self._fit(tier, samples, at)
        positions, encoded = loose.slots.positions, []
        for i, (side, x) in enumerate(zip(tier.sides, loose.data, strict=True)):
            angles = None if i else lambda index: self.angles(positions.gather(2, index))
            encoded.append((side.codec, side.encoded(side.codec, coding.by_head(x, order, t, angles, taken))))
        fields = {name: x.gather(2, order) for name, x in loose.slots.fields.items()}
        tier.append(encoded, {POSITIONS: positions.gather(2, order).masked_fill(~taken, -1), **fields}, waiting)
        loose.keep(torch.zeros_like(positions).scatter_add(2, order, taken.to(torch.int32)) == 0)
        tier.compact(most)
        tier.give_back(most)

    def _fit(self, tier: Tier, samples: Sequence[Tensor], at: Tensor) -> None:
        """Fit the codecs that need the prompt and have not been fitted, see `_pack`. Position −1: padding, or none."""
        if all(side.codec.needs_fit != "prompt" for side in tier.sides):
            return
        order = in_turn(at >= 0)
        for i, (side, x) in enumerate(zip(tier.sides, samples, strict=True)):
            if side.codec.needs_fit == "prompt":
                angles = None if i or not x.shape[2] else self.angles(at.gather(2, order))
                tokens = Tokens(gathered(x, order), angles)
                side.codec = coding.fitted(side.codec, [tokens], heads=self.heads)

    # ------------------------------------------------------------------ changing

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless n tokens can be rolled back: all, or at most those of the window.

        Tokens that were evicted because of them are lost.
        """
        held = self.recent.tokens
        if held < n < self.num_tokens:
            raise CacheError(
                f"cannot roll back {n} tokens; a policy that evicts tokens can roll back the latest {held} (see its "
                "option recent) or all"
            )

    def crop(self) -> None:
        """Follow a rollback of tokens of the window, or of all."""
        if self.num_tokens == 0:
            self.restart()
        self.placement.deferred = self.deferred

    def tables(self) -> list[Tensor]:
        """Return the tables needed next to those of the layer's tiers."""
        return (
            self.rope.tables(self.device) if self.rope is not None and any(tier.tokens for tier in self.tiers) else []
        )

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`, without those of the layer's tiers and window."""
        for loose in self.loose:
            positions = loose.slots.positions
            counted = loose.tokens and not positions.is_meta
            loose.count(footprint, int(self._sinks(positions).sum(-1).max()) if counted else 0)
