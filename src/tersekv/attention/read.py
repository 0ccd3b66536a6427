"""Attention of new queries over a layer's store and over a chunk's own exact tokens.

Each segment gives an output and a log-sum-exp; `merge_segments` combines them. With few query rows,
kernels read the packed bytes directly. With many rows, a part of the tokens at a time is decoded, and
a kernel for floats reads it. So the whole cache is never decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.cache.parallel import ContextParallel
from tersekv.cache.segments import PackedSegment
from tersekv.cache.store import Store
from tersekv.kernels import backends, softmax
from tersekv.kernels.attend import Masks, Room, Where, finished
from tersekv.kernels.attend import attend_floats as attend_floats
from tersekv.tensors import last_contiguous

MOST_READ, LEAST_READ_TOKENS = 1 << 22, 512
"""Elements of keys that are decoded at a time for long chunks, and the least number of tokens."""

QUERY_TILE = 256
"""Query positions read at a time if attention is estimated, which holds the scores of all of them."""

Estimate = tuple[Tensor | None, Tensor | None, Tensor | None]

KERNEL_ROWS = 64
"""Maximum number of query rows per KV head (grouped heads × positions) for the kernels."""

LATENT_ROWS = 1024
"""The same for latents, whose kernel multiplies tiles that it decoded once."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of the attention module.

    query: [B, Hq, q, D].
    mask: bool [B, q, tokens], True is visible, or None for causal.
    scaling: factor of the scores.
    softcap: soft cap of the scores, or None.
    sink_logits: [Hq], one logit per head that is added to the softmax denominator, or None.
    expand: function that makes keys and values of all heads from those of latent attention, [B, 1, T, ·],
        because the query is not absorbed; or None.
    """

    query: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def without_last(self, n: int) -> AttentionCall:
        """Return the call without its n last queries and tokens."""
        if not n:
            return self
        mask = None if self.mask is None else self.mask[:, :-n, :-n]
        return replace(self, query=self.query[:, :, :-n], mask=mask)


def attend_store(store: Store, call: AttentionCall) -> Tensor:
    """Return attention over all tokens in the store, the queries' own tokens included.

    The result is [B, q, Hq, Dv] in the query's dtype.
    """
    q = call.query.shape[2]
    mask = call.mask
    if mask is None and q > 1:
        mask = masks.causal(q, store.num_tokens, call.query.device).expand(call.query.shape[0], -1, -1)
    return _Reader(store, call, mask, None).attend()


def attend_new(store: Store, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor | None:
    """Return attention over the store and a new token [B, Hkv, 1, D], which a kernel also writes to the window's room.

    `LayerStore.append` then has nothing to copy. None if the token must be appended first.
    """
    few = call.query.shape[1] <= KERNEL_ROWS * store.kv_heads and call.expand is None
    if not few or store.latent or store.estimates or store.own is not None:
        return None
    if (room := store.spare_room(keys, values)) is None:
        return None
    out: Tensor | None = _Reader(store, call, call.mask, None, (keys, values, room))._direct()
    if out is not None:
        store.recent.written = keys, store.recent.tokens
    return out


def attend_chunk(store: Store | None, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
    """Return attention over the past in the store and, exactly, over the chunk's own tokens.

    store: the past, or None if there is none.
    keys, values: [B, Hkv, q, D], the chunk's tokens, which are not in the store yet.
    """
    past, n = 0 if store is None else store.num_tokens, keys.shape[2]
    mask, own = (None, None) if call.mask is None else call.mask[:, :, : past + n].split([past, n], dim=2)
    return _Reader(store, call, mask, (keys, values, own)).attend()


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """Group query heads by KV head: [B, Hq, q, D] -> float32 [B, Hkv, G, q, D]."""
    B, Hq, q, D = query.shape
    return query.float().reshape(B, kv_heads, Hq // kv_heads, q, D)


class _Reader:
    """One attention call over a store and the chunk's own tokens.

    A kernel reads the packed bytes if it can; otherwise tokens are decoded block by block.

    mask: bool [B, q, past tokens], or None if all are visible.
    own: keys, values and mask bool [B, q, n] of the chunk, None for the causal mask; or None.
    new: keys and values of a token after those of the store, and where to copy them; or None.
    """

    def __init__(
        self,
        store: Store | None,
        call: AttentionCall,
        mask: Tensor | None,
        own: tuple[Tensor, Tensor, Tensor | None] | None,
        new: tuple[Tensor, Tensor, Room] | None = None,
    ) -> None:
        self.store, self.call, self.mask, self.own, self.new = store, call, mask, own, new
        self.kv_heads = store.kv_heads if own is None else own[0].shape[1]  # type: ignore[union-attr]
        if call.expand is not None:
            self.kv_heads = call.query.shape[1]

    def attend(self) -> Tensor:
        """Return the attention output [B, q, Hq, Dv] in the query's dtype."""
        query, store = self.call.query, self.store
        if store is not None and store.estimates and query.shape[2] > QUERY_TILE:
            starts = range(0, query.shape[2], QUERY_TILE)
            return torch.cat([self._tile(slice(at, at + QUERY_TILE)).attend() for at in starts], dim=1)
        most = LATENT_ROWS if store is not None and store.latent else KERNEL_ROWS
        few = query.shape[1] * query.shape[2] <= most * self.kv_heads and self.call.expand is None
        if few or self._reads_tiles():
            if store is None or ((store.own is None or store.context_parallel is None) and not store.estimates):
                if (out := self._direct()) is not None:
                    return out
            elif (whole := self._direct_parts()) is not None:
                return self._finish([whole])
        return self._finish(None)

    def _reads_tiles(self) -> bool:
        """True if a kernel reads packed tokens with many rows, which decodes them in tiles."""
        call, store = self.call, self.store
        if call.expand is not None or store is None or store.latent or store.estimates:
            return False
        if not softmax.prefers_native(call.query, *(self.own or ())[:2]):
            return False
        if self.mask is not None and softmax.shows_all(self.mask):
            self.mask = None
        return True

    def _tile(self, tile: slice) -> _Reader:
        """Return the call of some of the queries."""
        mask = None if self.mask is None else self.mask[:, tile]
        own = None if self.own is None else (*self.own[:2], self._own_mask()[:, tile])
        return _Reader(self.store, replace(self.call, query=self.call.query[:, :, tile]), mask, own)

    def _direct(self, of_exact: bool = True, of_pages: bool = True, parts: bool = False) -> Any:
        """Compute attention over exact tokens, packed pages or both (`kernels/attend.py`).

        None if no kernel accepts the call, or if there are no tokens.
        """
        call, store = self.call, self.store
        exact: tuple[tuple[Tensor, Tensor, Where | None], ...] = ()
        pages, hidden = None, None
        if store is not None:
            exact = tuple(store.exact_segments()) if of_exact else ()
            pages, hidden = store.pages() if of_pages else None, store.hidden
            for found in store.found:
                pages = pages and found.without_copies(pages, Masks(self.mask, hidden), call.query.shape[2])
        if of_exact and self.own is not None:
            is_causal = self.mask is None and hidden is None and self._is_causal()
            exact = ((*self.own[:2], None if is_causal else self._own_mask()), *exact)
        if self.new is not None and store is not None:
            exact = (*exact, (*self.new[:2], store.num_tokens))
        if not exact and pages is None:
            return None
        sinks = None if parts else call.sink_logits
        limits = call.scaling, call.softcap, sinks, parts, None, self.new and self.new[2]
        return backends.attend.direct(call.query, exact, pages, self.mask, hidden, *limits)

    def _direct_parts(self) -> tuple[Tensor, Tensor] | None:
        """Return out [B, H, R, Dv] and lse [B, H, R] by kernels, without weighted samples."""
        store = self.store
        assert store is not None
        if store.context_parallel is None:
            return self._direct(parts=True)
        if not store.packed_everywhere or store.pages() is None:
            return None  # all processes must take the same path to get identical bits
        packed, beside = self._direct(of_exact=False, parts=True), self._direct(of_pages=False, parts=True)
        if packed is None or (beside is None and (self.own is not None or store.exact_segments())):
            return None
        packed = _of_all(store.context_parallel, *packed)
        return packed if beside is None else _merge(beside, packed)

    def _finish(self, whole: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        """Decode tokens and read them if no kernel did, merge, and reshape to [B, q, Hq, Dv]."""
        query = grouped(self.call.query, self.kv_heads)
        results = whole if whole is not None else self.decoded(query)
        results = results or self._nothing(query)
        if estimates := self.estimates(query):
            out, lse = _estimate(results, estimates, self.longest())
            return finished(out, lse, self.call.query, self.call.sink_logits)
        merged: Tensor = backends.merge_chunk(
            [out for out, _ in results], [lse for _, lse in results], self.call.query, self.call.sink_logits
        )
        return merged

    def _mask(self, positions: Where, tokens: int) -> Tensor | None:
        """Return the mask columns of a segment, see `Masks.at`."""
        return None if self.store is None else Masks(self.mask, self.store.hidden).at(positions, tokens)

    def decoded(self, query: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return out [B, Hkv, G·q, Dv] and lse [B, Hkv, G·q] over each segment of exact tokens, all
        packed tokens, and the chunk's own tokens.

        query: float32 [B, Hkv, G, q, D].
        """
        if self.mask is not None and softmax.shows_all(self.mask):
            self.mask = None
        query = query.to(softmax.dtype_of_products(self.call.query.dtype, query.device))
        results = []
        for segment in self.store.exact_segments() if self.store is not None else []:
            mask = self._mask(segment.positions, segment.keys.shape[2])
            results.append(self.dense(query, segment.keys, segment.values, mask))
        results += self.packed(query)
        if self.own is not None:
            keys, values, _ = self.own
            found = None
            if self.call.expand is None and query.shape[3] == keys.shape[2] and self._is_causal():
                limits = self.call.scaling, self.call.softcap
                found = attend_floats(query.flatten(1, 2), keys, values, None, *limits, parts=True)
                found = found or softmax.attend_causal(query, keys, values, *limits)
            results.append(found or self.dense(query, keys, values, self._own_mask()))
        return results

    def _is_causal(self) -> bool:
        """True if each of the chunk's own tokens sees those before it, and itself."""
        return self.own is not None and (self.own[2] is None or masks.is_causal(self.own[2]))

    def _own_mask(self) -> Tensor:
        """Return the mask of the chunk's own tokens, bool [B, q, n]."""
        assert self.own is not None
        keys, _, mask = self.own
        if mask is None:
            mask = masks.causal(self.call.query.shape[2], keys.shape[2], keys.device).expand(len(keys), -1, -1)
        return last_contiguous(mask)

    def dense(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and lse over unpacked tokens."""
        rows, limits = _rows(query), (self.call.scaling, self.call.softcap)
        if self.call.expand is not None:
            return self._expanded(rows, keys, mask)
        if rows.shape[2] <= KERNEL_ROWS:
            found: tuple[Tensor, Tensor] = backends.attend_exact(rows.float(), keys, values, mask, *limits)
            return found
        return softmax.attend_many(rows, keys, values, mask, *limits)

    def _expanded(self, rows: Tensor, keys: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and lse over keys of latent attention, of which a part at a time is expanded."""
        assert self.call.expand is not None
        found: tuple[Tensor, Tensor] | None = None
        step = max(LEAST_READ_TOKENS, MOST_READ // rows[:, :, 0].numel())
        for first in range(0, keys.shape[2], step):
            tile = slice(first, first + step)
            own = None if mask is None else mask[..., tile]
            if found is None or own is None or softmax.shows_any(own):
                key, value = (x.to(rows.dtype) for x in self.call.expand(keys[:, :, tile]))
                part = softmax.attend_many(rows, key, value, own, self.call.scaling, self.call.softcap)
                found = part if found is None else _merge(found, part)
        assert found is not None
        return found

    def estimates(self, query: Tensor) -> list[Estimate]:
        """Return the result of `softmax.attend_weighted` for each segment of weighted tokens."""
        results = []
        for segment in self.store.weighted_segments() if self.store is not None else []:
            mask = self._mask(segment.positions, segment.positions.shape[2])
            value = None if segment.values is None else segment.values.floats(torch.float32)
            scores, weights = segment.keys.scores(_rows(query)), (segment.numerator, segment.denominator)
            results.append(softmax.attend_weighted(scores, value, mask, self.call.scaling, self.call.softcap, *weights))
        return results

    def longest(self) -> Tensor:
        """Return the largest norm of a value, float32 [B, H], the chunk's own values included."""
        assert self.store is not None
        longest = self.store.longest_value
        assert longest is not None
        return longest if self.own is None else torch.maximum(longest, self.own[1].float().norm(dim=-1).amax(-1))

    def packed(self, query: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return out and lse over the packed tokens, decoded block by block.

        Packed tokens of other processes are included. Empty if nothing is packed.
        """
        own = self._packed(query)
        if self.store is None or self.store.context_parallel is None:
            return own
        return [_of_all(self.store.context_parallel, *part) for part in own or self._nothing(query)]

    def _nothing(self, query: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return out and lse over no tokens."""
        assert self.store is not None
        B, H, G, q, _ = query.shape
        out = query.new_zeros((B, H, G * q, self.store.value_dim), dtype=torch.float32)
        return [(out, out.new_full(out.shape[:3], float("-inf")))]

    def _packed(self, query: Tensor) -> list[tuple[Tensor, Tensor]]:
        if self.store is None:
            return []
        found: tuple[Tensor, Tensor] | None = None
        values = None
        of_token = len(query) * self.kv_heads * max(side.head_dim for side in self.store.sides)
        unit, first = self.store.flush_tokens, 0
        step = max(LEAST_READ_TOKENS, MOST_READ // of_token) // unit * unit or unit
        biases: dict[int, Tensor] = {}
        while (block := self.store.packed_segment(first, step)) is not None:
            first += block.tokens
            values = block.values
            if (part := self._block(block, query)) is None:
                continue
            if (correction := block.correction) is not None:
                if id(correction) not in biases:
                    mapped = block.keys.query(_rows(query).float())
                    biases[id(correction)] = softmax.score_bias(mapped, correction, self.call.scaling)
                part = part[0], part[1] + biases[id(correction)]
            found = part if found is None else _merge(found, part)
        if found is None or values is None:
            return []
        return [found if self.call.expand is not None else (values.output(found[0]), found[1])]

    def _block(self, block: PackedSegment, query: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return out and lse over one block, without the values' linear map; None if all tokens are hidden."""
        mask = self._mask(block.where, block.tokens)
        for found in self.store.found if self.store is not None else ():
            mask = found.shown(mask, block.where, block.tokens)
        if mask is not None and not softmax.shows_any(mask):
            return None
        rows, limits = _rows(query), (self.call.scaling, self.call.softcap)
        if self.call.expand is not None:
            return self._expanded(rows, block.keys.floats(query.dtype), mask)
        if self.store is not None and self.store.latent:  # decoded once, for both uses
            rows = block.keys.query(rows.float()).to(query.dtype)
            key = block.keys.inner.floats(query.dtype)
            return softmax.attend_many(rows, key, key[..., : self.store.value_dim], mask, *limits)
        if rows.shape[2] <= KERNEL_ROWS:  # mapping the queries is cheaper than mapping the keys back
            scores = block.keys.scores(rows.float())
            return softmax.attend_scores(scores, block.values.inner.floats(torch.float32), mask, *limits)
        value = block.values.inner.floats(query.dtype)
        return softmax.attend_many(rows, block.keys.floats(query.dtype), value, mask, *limits)


def _rows(query: Tensor) -> Tensor:
    """Flatten query groups: [B, H, G, q, D] -> [B, H, G·q, D], contiguous."""
    B, H, G, q, D = query.shape
    return query.reshape(B, H, G * q, D)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return backends.merge_segments([a[0], b[0]], [a[1], b[1]])


def _of_all(context_parallel: ContextParallel, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of all processes.

    Every process merges in the same order, so all get identical bits.
    """
    parts = context_parallel.gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1))
    outs, lses = ([part[..., :-1].contiguous() for part in parts], [part[..., -1].contiguous() for part in parts])
    return backends.merge_segments(outs, lses)


def _estimate(
    results: list[tuple[Tensor, Tensor]], estimates: list[Estimate], longest: Tensor
) -> tuple[Tensor, Tensor]:
    """Divide the estimated numerator by the estimated denominator; return it with the log
    denominator.

    The two estimates use different tokens. Attention is a mean of values, so its norm cannot exceed
    the largest norm of a value. A longer estimate is scaled down to that norm.
    """
    above = results + [(out, lse) for out, lse, _ in estimates if out is not None and lse is not None]
    below = [lse for _, lse in results] + [lse for *_, lse in estimates if lse is not None]
    out, top = softmax.merge_segments([out for out, _ in above], [lse for _, lse in above])
    bottom = torch.logsumexp(torch.stack(below), dim=0)
    most = longest.clamp(min=1e-30).log().unsqueeze(-1) - out.norm(dim=-1).clamp(min=1e-30).log()
    log_share = torch.where(bottom.isneginf(), most, torch.minimum(top - bottom, most))
    return out * torch.where(top.isneginf(), 0.0, log_share.exp()).unsqueeze(-1), bottom
