"""The cache of one layer: exact sinks | packed blocks | exact recent window (tail).

The cache is append-only: packed tokens are never decoded and packed again. Tokens are rounded to
the exact dtype before they are packed, and blocks start at fixed positions. The packed bytes
therefore do not depend on how tokens were fed, unless a codec is fitted on the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersekv.cache.coding import own_sinks, without_padding
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer_checks import LAYER, layer_padding, layer_tokens
from tersekv.cache.pages import ROLLBACK_TOKENS, PageSizes, evicted_by
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.cache.rotary import Rotary
from tersekv.cache.segments import ExactSegment, PackedSegment, packed_pages_of
from tersekv.cache.side import SideStore, extents
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.codecs import Codec
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.codecs.transforms.rope import Rope
from tersekv.errors import CacheError
from tersekv.kernels.attend import PackedPages
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain


class LayerStore(Stateful):
    """Keys [B, H, n, Dk] and values [B, H, n, Dv] of one layer.

    keys, values: tensors with the shapes of the first tokens.
    window: the layer's sliding window in tokens, None for full attention. A sliding-window layer
        has no sinks and evicts packed tokens that no query can see any more.
    rope: RoPE of the layer's keys, needed if they are coded before RoPE.
    heads: this process's heads under tensor parallelism, or None.
    """

    STATE: ClassVar[Spec] = LAYER
    RULES: ClassVar[Rules] = (layer_tokens, layer_padding)
    PARTS: ClassVar[tuple[str, ...]] = ("sides", "rotary")
    MADE: ClassVar[tuple[str, ...]] = ("_pages",)
    context_parallel: ContextParallel | None = None
    """Processes that share the packed tokens (`cache/context_parallel.py`), or None."""
    packed_everywhere = True  # True if all processes have packed tokens, or none has
    estimates = False  # True if attention is estimated from weighted samples
    least_queries = 8
    """Calls with fewer queries are not observed: they would show too few of the tokens that later
    queries read."""

    @plain
    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        plan = plan._replace(keys=plan.keys.to(keys.device), values=plan.values.to(keys.device))
        self.plan, self.policy, self.window = plan, plan.policy, window
        blocks = plan.keys.layout(keys.shape[-1]).block_tokens, plan.values.layout(values.shape[-1]).block_tokens
        self.flush_tokens = math.lcm(*blocks)
        dtype = plan.policy.exact_dtype(keys.dtype)
        tail_tokens = plan.policy.recent + plan.policy.waiting_tokens(self.flush_tokens, window)
        self.rotary = Rotary(rope) if rope is not None and plan.keys.needs_rope else None
        sizes = PageSizes(self.flush_tokens, None if window is None else window + ROLLBACK_TOKENS)
        corrected = plan.policy.corrected_share
        self.keys = self._side(plan.keys, keys, dtype, sizes, tail_tokens, self.rotary, heads, corrected)
        self.values = self._side(plan.values, values, dtype, sizes, tail_tokens, None, heads)
        self.sides = self.keys, self.values
        self.padding: Tensor | None = None  # set while rows of a batch have sinks of their own
        self.deferred = True  # True while nothing is in sinks or packed: no tokens yet, or rows that are still short
        self.record_past = False  # True if a sliding window evicts at a crop only
        self.num_tokens = self.num_evicted = 0
        self.room = 0  # lower bound of the tokens that can be added before some are packed
        self._pages: PackedPages | None = None  # cached until packed blocks change

    def _side(self, codec: Codec, *arguments: Any) -> SideStore:
        return SideStore(codec, *arguments)

    @property
    def batch_size(self) -> int:
        """Number of batch rows."""
        return self.keys.sinks.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.keys.sinks.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.keys.sinks.device

    @property
    def latest_keys(self) -> Tensor:
        """Keys [B, H, n, D] of the latest tokens, which are exact."""
        return self.keys.tail.data

    @property
    def hidden(self) -> Tensor | None:
        """Number of leading positions per row, int64 [B], to mask for packed tokens and tail.

        These are the padding and the row's own sinks. None without padding.
        """
        return None if self.padding is None else self.padding + self.keys.sinks.shape[2]

    @plain
    def append(
        self,
        keys: Tensor,
        values: Tensor,
        padding: Tensor | None = None,
        losses: Sequence[TokenLoss | None] | None = None,
    ) -> None:
        """Append tokens and pack those that leave the recent window.

        padding: int64 [B], leading positions of each batch row without a token, known from the
            first mask. Each row's own first tokens become its sinks.
        losses: of errors in the keys and in the values of all tokens so far, see `observes`.

        Raises:
            CacheError, UserError: values are not finite, or too large for the exact dtype or a
                scale. Nothing was added.
        """
        n = keys.shape[2]
        if n <= self.room and not self.deferred:  # nothing is packed: all tokens go into the recent window
            own_keys, own_values = self.keys.rounded(keys), self.values.rounded(values)
            if self.rotary is not None and self.rotary.rope.varies:
                self.rotary.note(self.num_tokens, n)
            self.keys.tail.append(own_keys)
            self.values.tail.append(own_values)
            self.room -= n
            self.num_tokens += n
            return
        new = [side.rounded(x) for side, x in zip(self.sides, (keys, values), strict=True)]
        if self.deferred and padding is not None and int(padding.max()) > 0:
            self.padding = padding
        if self.rotary is not None:
            self.rotary.note(self.num_tokens, keys.shape[2], self.padding if self.deferred else None)
        if not self.deferred or self.padding is None:
            self._add(new, False, losses)
        elif self._some_row_is_short(keys.shape[2]):
            for side, x in zip(self.sides, new, strict=True):
                side.tail.append(x)
            self.num_tokens += keys.shape[2]
        else:  # start over with all tokens, as if they had come in one call
            new = [torch.cat([side.tail.data, x], dim=2) for side, x in zip(self.sides, new, strict=True)]
            sinks = self.policy.sink_tokens(self.window)
            new = [without_padding(x, self.padding, sinks) for x in new]
            self.padding = self.padding if sinks else None
            self._add(new, True, losses)

    def observes(self, n: int) -> bool:
        """True if appending n tokens fits a codec that observes queries. Nothing is packed yet then."""
        codecs = [side.codec for side in self.sides]
        if not any(codec.needs_fit == "prompt" and codec.observes for codec in codecs):
            return False
        waiting, seen = self.num_tokens + n - self.policy.sink_tokens(self.window), self.num_tokens + n
        return waiting > 0 and self._due(waiting, n, seen)[0] > 0

    def _some_row_is_short(self, n: int) -> bool:
        """True if, after n more tokens, a padded row cannot fill its sinks or is empty."""
        assert self.padding is not None
        return int(self.padding.max()) + max(1, self.policy.sink_tokens(self.window)) > self.num_tokens + n

    def _add(self, new: list[Tensor], restart: bool, losses: Sequence[TokenLoss | None] | None) -> None:
        """Distribute new tokens to sinks, packed blocks and tail.

        restart: `new` includes the tail's tokens.
        """
        n, held = new[0].shape[2], 0 if restart else self.keys.tail.tokens
        seen = n if restart else self.num_tokens + n
        sinks = min(self.policy.sink_tokens(self.window) - self.keys.sinks.shape[2], n)
        flush, forget, skip = self._due(held + n - sinks, n, seen)
        place = (0 if restart else self.num_tokens - held) + sinks
        own = self._own(skip, flush)
        hidden = None if self.padding is None else self.padding + self.policy.sink_tokens(self.window)
        prepared = [
            side.prepare(x, sinks, own, flush, restart, place, loss, hidden)
            for side, x, loss in zip(self.sides, new, losses or (None, None), strict=True)
        ]
        self.deferred, self.num_tokens = False, seen
        self._forget(forget)
        self.num_evicted += skip
        for side, changes in zip(self.sides, prepared, strict=True):
            side.commit(changes)
        if flush or forget:
            self._pages = None
            self._note(place, own, flush)
        self.room = self._room()

    def _due(self, waiting: int, n: int, seen: int) -> tuple[int, int, int]:
        """Return how many of `waiting` exact tokens leave the tail after a call of n tokens.

        Also return how many packed tokens, and how many of the leaving ones, are out of the window.
        """
        flush = self.policy.to_pack(waiting, self.flush_tokens, seen, self.window)
        return flush, *(self._unseen(seen, flush) if flush and not self.record_past else (0, 0))

    def _unseen(self, seen: int, leaving: int) -> tuple[int, int]:
        """Return what no query after `seen` tokens can see of packed tokens and `leaving` others."""
        return evicted_by(self.window, seen, self.num_evicted, self.packed_tokens, leaving, self.flush_tokens)

    def _room(self) -> int:
        """Return the number of tokens that can be added before some are packed.

        It is 0 while sinks are missing.
        """
        if self.keys.sinks.shape[2] < self.policy.sink_tokens(self.window):
            return 0
        held, n = self.keys.tail.tokens, 0
        while n < self.flush_tokens and not self.policy.to_pack(
            held + n + 1, self.flush_tokens, self.num_tokens + n + 1, self.window
        ):
            n += 1
        return n

    def _own(self, skip: int, flush: int) -> range:
        """Return the range of the `flush` tokens about to be packed that this process keeps.

        skip: number of them that are not needed.
        """
        return range(skip, flush)

    def _note(self, place: int, own: range, flush: int) -> None:
        """Record that `flush` tokens from `place` on were packed, those in `own` here."""

    def _forget(self, tokens: int) -> None:
        """Remove that many of the oldest packed tokens, whole blocks."""
        for side in self.sides:
            side.packed.drop_front(tokens // side.packed.layout.block_tokens)
        self.num_evicted += tokens

    def _own_sinks(self) -> Tensor:
        """Return positions [B, S] of each row's own sinks."""
        assert self.padding is not None
        return own_sinks(self.padding, self.keys.sinks.shape[2])

    @property
    def packed_tokens(self) -> int:
        """Number of packed tokens."""
        return self.keys.packed_tokens

    @property
    def packed_first(self) -> int:
        """Position of the first packed token."""
        return self.keys.sinks.shape[2] + self.num_evicted

    def exact_segments(self) -> list[ExactSegment]:
        """Return sinks and tail, without empty ones."""
        keys, values = self.sides
        segments = []
        if keys.sinks.shape[2]:
            segments.append(ExactSegment(keys.sinks, values.sinks, 0 if self.padding is None else self._own_sinks()))
        if n := keys.tail.tokens:
            segments.append(ExactSegment(keys.tail._data[:, :, :n], values.tail._data[:, :, :n], self.num_tokens - n))
        return segments

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Return packed tokens `first` to `first + tokens`, multiples of `flush_tokens`, or None.

        The segment is a copy if it spans several pages.
        """
        tokens = self.packed_tokens - first if tokens is None else min(tokens, self.packed_tokens - first)
        return self._packed(first, tokens) if tokens > 0 else None

    def packed_pages(self) -> Iterator[PackedSegment]:
        """Return packed tokens page by page, without copies."""
        return (self._packed(first, tokens) for first, tokens in extents(self.sides))

    def pages(self) -> PackedPages | None:
        """Return all packed tokens as attention reads them, None if there are none.

        The result is cached until packed blocks change.
        """
        if self._pages is None:
            pages = list(self.packed_pages())
            made = packed_pages_of(pages, self.kv_heads)
            if not all(page.keys.keeps and page.values.keeps for page in pages):
                return made
            self._pages = made
        return self._pages

    def _packed(self, first: int, tokens: int) -> PackedSegment:
        keys, values = (side.view(first, tokens, self.packed_first) for side in self.sides)
        return PackedSegment(keys, values, self.packed_first + first, tokens, None, self.keys.correction)

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all tokens held as [B, H, n, D], in order of position, sinks included."""
        keys, values = (self._in_order(side, dtype) for side in self.sides)
        if self.padding is not None:
            own = self._own_sinks()[:, None, :, None]
            keys, values = (
                x.scatter(2, own.expand(-1, x.shape[1], -1, x.shape[-1]), side.sinks.to(dtype))
                for x, side in zip((keys, values), self.sides, strict=True)
            )
        return keys, values

    def _in_order(self, side: SideStore, dtype: torch.dtype) -> Tensor:
        """Return sinks, packed tokens and tail of a side as [B, H, n, D]."""
        return side.decoded(dtype, self.packed_first)

    def check_crop(self, n: int) -> None:
        """Raise CacheError unless the n latest tokens can be rolled back."""
        left = self.num_tokens - n
        if left < 0:
            raise CacheError(f"cannot roll back {n} tokens, only {self.num_tokens} were seen")
        if self.padding is not None and 0 < left < int(self.padding.max()) + self.keys.sinks.shape[2]:
            raise CacheError(
                f"cannot roll back {n} of {self.num_tokens} tokens, rows of a left-padded batch would lose their first "
                "ones; reset the cache instead"
            )
        if self.window is not None and self.num_evicted > max(0, left - self.window + 1):
            raise CacheError(
                f"cannot roll back {n} tokens of a layer with sliding window {self.window}; "
                f"{ROLLBACK_TOKENS} are kept for that"
            )

    def is_whole(self, seen: int) -> bool:
        """True if, after an interrupted append, keys and values still hold the `seen` tokens."""
        held = {self.num_evicted + side.sinks.shape[2] + side.packed_tokens + side.tail.tokens for side in self.sides}
        return self.num_tokens == seen and held == {seen}

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens.

        Affected packed blocks are removed as a whole. Their remaining tokens return to the tail,
        decoded.

        Raises:
            CacheError: a sliding window, a padded batch or the cache holds too few tokens.
        """
        self.check_crop(n)
        self._pages, self.num_tokens, self.room = None, self.num_tokens - n, 0
        from_tail = min(n, self.keys.tail.tokens)
        from_packed = min(n - from_tail, self.packed_tokens)
        blocks = -(-from_packed // self.flush_tokens) * self.flush_tokens
        for side in self.sides:
            side.tail.drop_back(from_tail)
            if blocks:
                side.unpack_back(blocks, blocks - from_packed, self.packed_first)
            if n > from_tail + from_packed:
                side.sinks = side.sinks[:, :, : self.num_tokens].clone()
        if self.record_past and self.window is not None:
            self._forget(self._unseen(self.num_tokens, 0)[0])
        if self.num_tokens == 0:
            self.padding, self.deferred = None, True
            self.keys.codec, self.values.codec = self.plan.keys, self.plan.values  # to be fitted on the next prompt
            self.keys.lost = None
            if self.rotary is not None:
                self.rotary.clear()

    @plain
    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        rows, self._pages = rows.to(self.device), None
        for side in self.sides:
            side.select(rows)
        self.padding = None if self.padding is None else self.padding.index_select(0, rows)
        if self.rotary is not None:
            self.rotary.select(rows)

    @plain
    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        self._pages = None
        self.plan = self.plan._replace(keys=self.plan.keys.to(device), values=self.plan.values.to(device))
        for side in self.sides:
            side.to(device)
        self.padding = None if self.padding is None else self.padding.to(device)

    def tables(self) -> list[Tensor]:
        """Return the tables of both sides. Shared tables are the same objects in every layer.

        A codec that is fitted on the prompt has none before it has packed anything.
        """
        rope = []
        if self.rotary is not None and self.packed_tokens:
            rope = self.rotary.tables(self.device, self.keys.codec.centred, self.keys.head_dim)
        return [*rope, *(table for side in self.sides for table in side.tables())]

    def footprint(self) -> Footprint:
        """Return the bytes held, without tables."""
        rows = self.batch_size * self.kv_heads * min(self.num_tokens, self.window or self.num_tokens)
        footprint = Footprint(self.num_tokens, rows * sum(side.head_dim for side in self.sides))
        footprint.coded = {self.plan.coded: 1}
        for side in self.sides:
            side.count(footprint)
        return footprint
