"""Attention of new queries over a layer's store and, for a chunk, over the chunk's own exact tokens.

Each segment gives an output and a log-sum-exp; `merge_segments` joins them. A few query rows read packed bytes
through the kernels; many rows decode BLOCK_READ_TOKENS tokens at a time into a buffer, so that the cache is never
decoded as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.attention import masks
from tersekv.attention.dispatch import direct
from tersekv.attention.masks import Store
from tersekv.cache.parallel import Spread
from tersekv.cache.segments import PackedSegment
from tersekv.cache.selective import SelectiveStore
from tersekv.kernels import backends, softmax
from tersekv.kernels.attend_segments import Segment

BLOCK_READ_TOKENS = 1024
"""Packed tokens decoded at a time for long chunks."""

QUERY_TILE = 256
"""Query positions per tile of a long chunk: bounds the scores held at a time."""

Estimate = tuple[Tensor | None, Tensor | None, Tensor | None]

KERNEL_ROWS = 64
"""Most query rows per KV head (grouped heads × positions) that read packed bytes directly."""


@dataclass(frozen=True)
class Call:
    """What the attention module asks for.

    query [B, Hq, q, D]; mask bool [B, q, tokens seen] (True is visible) or None for causal; scaling; softcap or None;
    sink_logits [Hq], a logit per head that takes part in the softmax without a value, or None.
    """

    query: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


def attend_store(store: Store, call: Call) -> Tensor:
    """Attention over everything in the store (the queries' own tokens included): [B, q, Hq, Dv] in the query's type."""
    query = grouped(call.query, store.kv_heads)
    q = call.query.shape[2]
    mask = masks.padded(store, call.mask, q)
    if mask is None and q > 1:
        mask = masks.causal(q, store.seen, query.device).expand(query.shape[0], -1, -1)
    return _finish(_Reader(store, call, mask), None, query, call)


def attend_chunk(store: Store | None, keys: Tensor, values: Tensor, call: Call) -> Tensor:
    """Attention over the past in the store (None: no past) and, exactly, over the chunk's own keys and values
    [B, Hkv, q, D], which are not in the store yet."""
    query = grouped(call.query, keys.shape[1])
    B, q, n = query.shape[0], call.query.shape[2], keys.shape[2]
    past = 0 if store is None else store.seen
    mask = None if call.mask is None else call.mask[:, :, :past]
    own = masks.causal(q, n, query.device).expand(B, -1, -1) if call.mask is None else call.mask[:, :, past : past + n]
    reader = _Reader(store, call, masks.padded(store, mask, q) if store is not None else None)
    return _finish(reader, (keys, values, own), query, call)


def grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, q, D] -> float32 [B, Hkv, G, q, D]."""
    B, Hq, q, D = query.shape
    return query.float().reshape(B, kv_heads, Hq // kv_heads, q, D)


class _Reader:
    """The store's segments for one call: slices of the mask, and the choice between kernels and decoding."""

    def __init__(self, store: Store | None, call: Call, mask: Tensor | None) -> None:
        self.store, self.call, self.mask = store, call, mask

    def _mask(self, positions: Tensor | int, tokens: int) -> Tensor | None:
        """Mask columns of a segment, see `masks.at`."""
        return None if self.store is None else masks.at(self.store, self.mask, positions, tokens)

    def decoded(
        self,
        query: Tensor,
        tile: slice,
        packed: list[tuple[Tensor, Tensor]],
        own: tuple[Tensor, Tensor, Tensor] | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Out and lse of a tile of queries over each segment; `packed`: over packed tokens, already there."""
        results = self.exact(query, tile) + packed
        if own is not None:
            keys, values, mask = own
            results.append(self.dense(query, keys, values, mask[:, tile]))
        return results

    def exact(self, query: Tensor, tile: slice) -> list[tuple[Tensor, Tensor]]:
        """query [B, Hkv, G, q, D] -> out [B, Hkv, G·q, Dv] and lse [B, Hkv, G·q] over each segment of exact tokens."""
        results = []
        for segment in self.store.exact_segments() if self.store is not None else []:
            mask = self._mask(segment.positions, segment.keys.shape[2])
            results.append(self.dense(query, segment.keys, segment.values, _tile(mask, tile)))
        return results

    def dense(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Out and lse over unpacked tokens."""
        rows = _rows(query)
        op = backends.attend_exact if rows.shape[2] <= KERNEL_ROWS else softmax.attend_exact
        return op(rows, keys, values, mask, self.call.scaling, self.call.softcap)

    def estimates(self, query: Tensor, tile: slice) -> list[Estimate]:
        """What `softmax.attend_weighted` gives for each segment of tokens that stand for others."""
        results = []
        for segment in self.store.weighted_segments() if isinstance(self.store, SelectiveStore) else []:
            mask = _tile(self._mask(segment.positions, segment.positions.shape[2]), tile)
            value = None if segment.values is None else segment.values.decode()
            scores, weights = segment.keys.scores(_rows(query)), (segment.numerator, segment.denominator)
            results.append(softmax.attend_weighted(scores, value, mask, self.call.scaling, self.call.softcap, *weights))
        return results

    def longest(self, own: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """The largest norm of a value, float32 [B, H], the chunk's own included."""
        assert isinstance(self.store, SelectiveStore)
        longest = self.store.longest_value
        assert longest is not None
        return longest if own is None else torch.maximum(longest, own[1].float().norm(dim=-1).amax(-1))

    def direct(self, query: Tensor, own: tuple[Tensor, Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """Out and lse over all tokens but those that stand for others, by kernels; None where a kernel does not read
        some of them, or where there are too many query rows."""
        rows = _rows(query)
        if rows.shape[2] > KERNEL_ROWS:
            return None
        exact = [Segment(*own)] if own is not None else []
        pages = []
        if self.store is not None:
            of_store = self.store.exact_segments()
            exact += [Segment(s.keys, s.values, self._mask(s.positions, s.keys.shape[2])) for s in of_store]
            pages = list(self.store.packed_pages())
        spread = None if self.store is None else self.store.spread
        if self.store is not None and not self.store.packed_everywhere:
            return None  # where some process holds nothing, all go the same way, so that all get the same bits
        if not pages:
            return direct(rows, exact, self.call.scaling, self.call.softcap) if exact else None
        packed = [
            Segment(
                page.keys.inner.operand, page.values.inner.operand, self._mask(_place(page), page.tokens), page.kept
            )
            for page in pages
        ]
        if spread is None and pages[0].keys.inner is pages[0].keys and pages[0].values.inner is pages[0].values:
            return direct(rows, [*exact, *packed], self.call.scaling, self.call.softcap)
        beside = direct(rows, exact, self.call.scaling, self.call.softcap) if exact else None
        if exact and beside is None:
            return None
        result = direct(pages[0].keys.query(rows), packed, self.call.scaling, self.call.softcap)
        if result is None:
            return None
        result = pages[0].values.output(result[0]), result[1]
        if spread is not None:
            result = _of_all(spread, *result)
        return result if beside is None else _merge(beside, result)

    def packed(self, query: Tensor, tiles: list[slice]) -> list[tuple[Tensor, Tensor]]:
        """Out and lse over the packed tokens for each tile of queries, decoded a block at a time, those of other
        processes included; empty if nothing is packed."""
        own = self._packed(query, tiles)
        if self.store is None or self.store.spread is None:
            return own
        return [_of_all(self.store.spread, *part) for part in own or self._nothing(query, tiles)]

    def _nothing(self, query: Tensor, tiles: list[slice]) -> list[tuple[Tensor, Tensor]]:
        """Out and lse of this process where it holds no packed tokens, and others do."""
        assert self.store is not None
        rows = [_rows(query[:, :, :, tile]) for tile in tiles]
        dim = self.store.values.head_dim
        return [(x.new_zeros((*x.shape[:3], dim)), x.new_full(x.shape[:3], float("-inf"))) for x in rows]

    def _packed(self, query: Tensor, tiles: list[slice]) -> list[tuple[Tensor, Tensor]]:
        if self.store is None:
            return []
        results: list[tuple[Tensor, Tensor]] = []
        first, step = 0, max(1, BLOCK_READ_TOKENS // self.store.flush_tokens) * self.store.flush_tokens
        while (block := self.store.packed_segment(first, step)) is not None:
            parts, values = self._block(block, query, tiles), block.values
            results = parts if not results else [_merge(a, b) for a, b in zip(results, parts, strict=True)]
            first += step
        return [(values.output(out), lse) for out, lse in results]

    def _block(self, block: PackedSegment, query: Tensor, tiles: list[slice]) -> list[tuple[Tensor, Tensor]]:
        mask = self._mask(_place(block), block.tokens)
        value = block.values.inner.decode()
        parts = []
        for tile in tiles:
            scores = block.keys.scores(_rows(query[:, :, :, tile]))
            tile_mask = _tile(mask, tile)
            parts.append(softmax.attend_scores(scores, value, tile_mask, self.call.scaling, self.call.softcap))
        return parts


def _place(segment: PackedSegment) -> Tensor | int:
    return segment.first if segment.positions is None else segment.positions


def _tile(mask: Tensor | None, tile: slice) -> Tensor | None:
    """The tile's queries of a mask [B, q, T] or [B, H, q, T]; one for all queries stays as it is."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., tile, :]


def _rows(query: Tensor) -> Tensor:
    """[B, H, G, q, D] -> [B, H, G·q, D], contiguous."""
    B, H, G, q, D = query.shape
    return query.reshape(B, H, G * q, D)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return backends.merge_segments([a[0], b[0]], [a[1], b[1]])


def _of_all(spread: Spread, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join what each process has; all get the same bits, since they join it in the same order."""
    parts = spread.gather(torch.cat([out, lse.unsqueeze(-1)], dim=-1))
    outs, lses = ([part[..., :-1].contiguous() for part in parts], [part[..., -1].contiguous() for part in parts])
    return backends.merge_segments(outs, lses)


def _finish(reader: _Reader, own: tuple[Tensor, Tensor, Tensor] | None, query: Tensor, call: Call) -> Tensor:
    """Read all segments tile by tile, merge, and bring the result to [B, q, Hq, Dv]."""
    B, H, G, q, _ = query.shape
    tiles = [slice(start, min(q, start + QUERY_TILE)) for start in range(0, q, QUERY_TILE)]
    whole = reader.direct(query, own) if len(tiles) == 1 else None
    packed = reader.packed(query, tiles) if whole is None else []
    outs = []
    for i, tile in enumerate(tiles):
        part = query if len(tiles) == 1 else query[:, :, :, tile]
        results = [whole] if whole is not None else reader.decoded(part, tile, packed[i : i + 1], own)
        estimates = reader.estimates(part, tile)
        if estimates:
            out, lse = _estimate(results, estimates, reader.longest(own))
        else:
            out, lse = backends.merge_segments([r[0] for r in results], [r[1] for r in results])
        if call.sink_logits is not None:
            out = _with_sink_logits(out, lse, call.sink_logits, G)
        outs.append(out.reshape(B, H, G, -1, out.shape[-1]))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)
    if q == 1:
        return out.reshape(B, 1, H * G, -1).to(call.query.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(B, q, H * G, -1).to(call.query.dtype).contiguous()  # models call view


def _estimate(
    results: list[tuple[Tensor, Tensor]], estimates: list[Estimate], longest: Tensor
) -> tuple[Tensor, Tensor]:
    """Numerator over denominator, each with its own tokens, and the log of the denominator. Attention is a mean of
    values, so none is longer than the longest value; an estimate that is, is cut to that length."""
    above = results + [(out, lse) for out, lse, _ in estimates if out is not None and lse is not None]
    below = [lse for _, lse in results] + [lse for *_, lse in estimates if lse is not None]
    out, top = softmax.merge_segments([out for out, _ in above], [lse for _, lse in above])
    bottom = torch.logsumexp(torch.stack(below), dim=0)
    most = longest.clamp(min=1e-30).log().unsqueeze(-1) - out.norm(dim=-1).clamp(min=1e-30).log()
    log_share = torch.where(bottom.isneginf(), most, torch.minimum(top - bottom, most))
    return out * torch.where(top.isneginf(), 0.0, log_share.exp()).unsqueeze(-1), bottom


def _with_sink_logits(out: Tensor, lse: Tensor, logits: Tensor, G: int) -> Tensor:
    """Share of the softmax that is left beside a logit per query head."""
    per_row = logits.float().reshape(1, -1, G, 1)
    lse = lse.unflatten(2, (G, -1))
    share = torch.sigmoid(lse - per_row).flatten(2, 3)
    return out * share.unsqueeze(-1)
