"""The cache of one layer that finds attention sinks beyond the first tokens and keeps them exact.

Some tokens in the middle of a text are attention sinks, too. Their keys or values have unusual norms
(KVSink, arXiv 2508.04257), and their coding errors cost most. Each layer keeps the `found` tokens of
the most unusual norms exact. Their packed copies stay in place, so that blocks and positions do not
change, and are hidden from queries. A token that a more unusual one replaces is read packed again.

How unusual: |log |x|| − median|, in mean deviations of the tokens packed first; the larger one of
key and value, and the largest of all KV heads. So all heads of a layer keep the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.layer_checks import LAYER
from tersekv.cache.parallel import HeadShard
from tersekv.cache.pool import gathered
from tersekv.cache.schema import Check, require, tensor
from tersekv.cache.segments import ExactSegment
from tersekv.cache.side import exact_tokens
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.codecs.transforms.rope import Rope
from tersekv.kernels.attend import Masks, PackedPages, Where
from tersekv.policies.window import Window
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain

SMALLEST = 1e-30
"""Added to norms and deviations, so that logarithms and quotients are finite."""


def found_tokens(store: FoundSinksStore, place: str) -> None:
    """Check that found tokens are packed, different, and as many for keys and values."""
    n = store.found.shape[1]
    counts = {n, store.unusual.shape[1], store.found_keys.shape[2], store.found_values.shape[2]}
    require(
        len(counts) == 1 and n <= store.most_found, f"{place}.found", f"must name {store.most_found} tokens or fewer"
    )
    held, first = store.found, store.packed_first
    inside = ((held >= first) & (held < first + store.packed_tokens)) | (held == -1)
    require(bool(inside.all()), f"{place}.found", "names tokens that are not packed")
    ordered = held.sort(dim=1).values
    same = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(not bool(same.any()), f"{place}.found", "names a token twice")


def _exact(side: int) -> Callable[[Any], Check]:
    return lambda store: exact_tokens(store.sides[side])


def _usual(norms: Tensor) -> Tensor:
    """Return median and mean deviation [B, 4, H] of log norms [B, 2, H, n]. NaN marks tokens that do not count.

    They are 0 in a row in which no token counts.
    """
    middle = norms.nanmedian(-1).values
    return torch.cat([middle, (norms - middle.unsqueeze(-1)).abs().nanmean(-1)], dim=1).nan_to_num(0.0)


class FoundSinksStore(LayerStore):
    """Full-attention layer under the policy `window` with the option `found`.

    found: int32 [B, n], positions of found tokens, n = min(`most_found`, packed tokens); −1 for none.
    unusual: float32 [B, n], how unusual they are; −1 for none.
    found_keys, found_values: [B, H, n, D], exact.
    usual: float32 [B, 4, H], median and mean deviation of the log norms of keys and of values, without
        padding and sinks.
    """

    STATE = LAYER | {
        "found": lambda store: tensor(torch.int32, store.batch_size, None, low=-1),
        "unusual": lambda store: tensor(torch.float32, store.batch_size, None, low=-1),
        "found_keys": _exact(0),
        "found_values": _exact(1),
        "usual": lambda store: tensor(torch.float32, store.batch_size, 4, store.kv_heads),
    }
    RULES = (*LayerStore.RULES, found_tokens)
    MADE = (*LayerStore.MADE, "_located")

    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        assert isinstance(plan.policy, Window)
        assert window is None
        super().__init__(plan, keys, values, None, rope, heads)
        self.most_found, self.heads = plan.policy.found, heads
        self.usual = keys.new_zeros((keys.shape[0], 4, keys.shape[1]), dtype=torch.float32)
        self._located: tuple[PackedPages, PackedPages] | None = None  # pages, and the same with masks for a step
        self._forget_found(keys.shape[0])

    def _forget_found(self, rows: int) -> None:
        self.found = torch.empty((rows, 0), dtype=torch.int32, device=self.device)
        self.unusual = torch.empty((rows, 0), dtype=torch.float32, device=self.device)
        self.found_keys, self.found_values = (side.sinks[:, :, :0] for side in self.sides)

    # ------------------------------------------------------------------ growing

    def _add(self, new: list[Tensor], restart: bool, losses: Sequence[TokenLoss | None] | None) -> None:
        """Distribute new tokens, see `LayerStore`. Look for sinks among those that are packed."""
        tails = [side.tail.data[:, :, : 0 if restart else side.tail.tokens] for side in self.sides]
        tails, before = [tail.clone() for tail in tails], self.packed_tokens
        super()._add(new, restart, losses)
        packed = self.packed_tokens - before
        if packed:
            sinks = new[0].shape[2] + tails[0].shape[2] - packed - self.keys.tail.tokens
            both = [
                torch.cat([tail, x[:, :, sinks:]], dim=2)[:, :, :packed] for tail, x in zip(tails, new, strict=True)
            ]
            self._find(both, self.packed_first + before)

    def _find(self, packed: Sequence[Tensor], place: int) -> None:
        """Choose among the tokens found before and [B, H, n, D], packed from position `place` on."""
        n, self._located = packed[0].shape[2], None
        positions = torch.arange(place, place + n, dtype=torch.int32, device=self.device).expand(self.batch_size, -1)
        end = self.hidden
        hidden = None if end is None else positions < end[:, None]
        norms = torch.stack([(x.float().norm(dim=-1) + SMALLEST).log() for x in packed], dim=1)  # [B, 2, H, n]
        if end is not None and hidden is not None:  # rows whose tokens were all hidden before get their usual norms now
            new = _usual(norms.masked_fill(hidden[:, None, None], torch.nan))
            self.usual = torch.where((end >= place)[:, None, None], new, self.usual)
        elif not self.found.shape[1]:
            self.usual = _usual(norms)
        middle, spread = self.usual.unsqueeze(-1).split(2, dim=1)
        away = (norms - middle).abs() / (spread + SMALLEST)
        by_head = away.amax(1)
        if self.heads is not None:  # all processes choose the same tokens
            by_head = self.heads.gather(by_head.unsqueeze(-1)).squeeze(-1)
        unusual = by_head.amax(1)
        unusual = unusual if hidden is None else unusual.masked_fill(hidden, -1.0)
        everything = torch.cat([self.unusual, unusual], dim=1)
        chosen = everything.topk(min(self.most_found, everything.shape[1]), dim=1).indices
        self.unusual = everything.gather(1, chosen)
        self.found = torch.cat([self.found, positions], dim=1).gather(1, chosen)
        self.found = self.found.masked_fill(self.unusual < 0, -1)
        by_token = chosen.unsqueeze(1).expand(-1, self.kv_heads, -1)
        self.found_keys, self.found_values = (
            gathered(torch.cat([held, x], dim=2), by_token)
            for held, x in zip((self.found_keys, self.found_values), packed, strict=True)
        )

    # ------------------------------------------------------------------ reading

    def exact_segments(self) -> list[ExactSegment]:
        """Return sinks, found sinks and tail, without empty ones."""
        segments = super().exact_segments()
        if self.found.shape[1]:
            of_heads = self.found.unsqueeze(1).expand(-1, self.kv_heads, -1)
            segments.append(ExactSegment(self.found_keys, self.found_values, of_heads))
        return segments

    @property
    def hides_copies(self) -> bool:
        """True if there are found tokens."""
        return self.found.shape[1] > 0

    def without_copies(self, pages: PackedPages, masks: Masks, queries: int) -> PackedPages:
        """Return the pages with masks [B, queries, T] that hide the packed copies of found tokens."""
        plain_step = masks.mask is None and masks.hidden is None and queries == 1
        if plain_step and self._located is not None and self._located[0] is pages:
            return self._located[1]
        each = [self.shown(masks.at(at, n), at, n) for at, n in zip(pages.where, pages.tokens, strict=True)]
        located = pages.located([mask.expand(-1, queries, -1) for mask in each])
        if plain_step and self._pages is pages:
            self._located = pages, located
        return located

    def shown(self, mask: Tensor | None, where: Where, tokens: int) -> Tensor:
        """Return a segment's mask, bool [B, 1 or q, T], with the copies of found tokens hidden."""
        assert isinstance(where, int)
        at = torch.where(self.found < 0, tokens, self.found - where).long()
        at = torch.where((at < 0) | (at > tokens), tokens, at)  # the last column takes those of other pages
        shown = torch.ones((self.batch_size, tokens + 1), dtype=torch.bool, device=self.device)
        shown = shown.scatter_(1, at, False)[:, None, :tokens]
        return shown if mask is None else mask & shown

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all tokens held as [B, H, n, D], in order of position, found ones exact."""
        both = super().decoded(dtype)
        for x, held in zip(both, (self.found_keys, self.found_values), strict=True):
            self._put(x, held, 0)
        return both

    def _put(self, x: Tensor, held: Tensor, first: int) -> None:
        """Write found tokens into x [B, H, n, D], whose first token has position `first`."""
        for row, places in enumerate(self.found.tolist()):
            for i, place in enumerate(places):
                if first <= place < first + x.shape[2]:
                    x[row, :, place - first] = held[row, :, i].to(x.dtype)

    # ------------------------------------------------------------------ changing

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `LayerStore.crop`. Found tokens return to the tail exact."""
        super().crop(n)
        self._located = None
        if self.num_tokens == 0:
            return self._forget_found(self.batch_size)
        first = self.num_tokens - self.keys.tail.tokens
        for side, held in zip(self.sides, (self.found_keys, self.found_values), strict=True):
            self._put(side.tail.data, held, first)
        gone = self.found >= first
        self.found, self.unusual = self.found.masked_fill(gone, -1), self.unusual.masked_fill(gone, -1.0)
        return None

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        super().select(rows)
        self._map_found(lambda x: x.index_select(0, rows.to(x.device)))

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        super().to(device)
        self._map_found(lambda x: x.to(device))

    def _map_found(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._located = None
        for name in ("found", "unusual", "found_keys", "found_values", "usual"):
            setattr(self, name, fn(getattr(self, name)))

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        footprint = super().footprint()
        footprint.parts["exact sinks"] += self.found_keys.nbytes + self.found_values.nbytes
        footprint.parts["selection"] += self.found.nbytes + self.unusual.nbytes + self.usual.nbytes
        footprint.parts["selection"] += self.batch_size * self.packed_tokens  # masks of decode steps
        return footprint
