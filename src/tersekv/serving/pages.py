"""Pool of pages of one layer: new tokens are encoded into their slots, and queries read the packed
bytes in place.

`tersekv.serving.steps` decides which tokens a query reads packed and which exact. Both parts are
merged by their log-sum-exp.

Shapes: T tokens of a step, H key-value heads, Hq query heads, G = Hq/H, D head dim, S pages, p tokens per page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.kernels import backends, softmax
from tersekv.kernels.attend import PackedPages
from tersekv.layouts.base import BLOCK_TOKENS, View
from tersekv.serving.slots import Slots, write
from tersekv.serving.steps import Chunk, EngineStep, Singles

SPAN_TOKENS = 1024
"""Number of packed tokens decoded at a time for long chunks."""

QUERY_TILE = 256
"""Query positions of a long chunk processed at a time, which bounds the memory for scores."""

KERNEL_ROWS = 64
"""Most query rows per KV head (grouped heads × positions) for kernels that read packed bytes."""

PartialAttention = tuple[Tensor, Tensor]
"""Output [B, H, R, D] and log-sum-exp [B, H, R] of query rows over some tokens."""


class PagePool:
    """Pages of one layer in contiguous memory uint8 [S, H, p, token_bytes]. scaling, softcap:
    applied to the scores."""

    def __init__(self, slots: Slots, memory: Tensor, scaling: float, softcap: float | None = None) -> None:
        S, H, p, C = memory.shape
        if p % BLOCK_TOKENS or slots.token_bytes != C or not memory.is_contiguous():
            raise UserError(
                f"pages of {p} tokens with {C} bytes each do not fit: pages hold a multiple of {BLOCK_TOKENS} tokens, "
                f"of {slots.token_bytes} bytes per KV head, and a layer's pages are contiguous"
            )
        self.slots, self.page_tokens, self.kv_heads, self.scaling, self.softcap = slots, p, H, scaling, softcap
        self.planes = slots.views(memory.view(S * p // BLOCK_TOKENS, H, BLOCK_TOKENS * C))
        self.rows: Tensor | None = None
        """Exact copies of partially filled pages: [2, rows, H, p, D], keys and values."""
        self._views: dict[int, tuple[View, View]] = {}
        self._pool: PackedPages | None = None

    def write(self, keys: Tensor, values: Tensor, step: EngineStep) -> None:
        """Encode keys and values [T, H, D] of a step into their slots; also copy those of partially
        filled pages."""
        codecs = (self.slots.keys, self.slots.values)
        for codec, planes, specs, x in zip(codecs, self.planes, self.slots.planes, (keys, values), strict=True):
            x = x if step.tokens is None else x[step.tokens]
            if len(x):
                write(codec, planes, specs, x.float(), step.places)
        have = 0 if self.rows is None else self.rows.shape[1]
        if have < step.rows:
            more = keys.new_zeros((2, max(step.rows, 2 * have) - have, self.kv_heads, self.page_tokens, keys.shape[-1]))
            self.rows = more if self.rows is None else torch.cat([self.rows, more], dim=1)
        assert self.rows is not None
        token, row, place = step.copied
        for side, x in enumerate((keys, values)):
            self.rows[side][row, :, place] = x[token].to(self.rows.dtype)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: EngineStep) -> Tensor:
        """Attend with a step's queries [T, Hq, D]; their keys and values [T, H, D] must be written
        already.

        Returns float32 [T, Hq, D], on the device that queries, memory and step share.
        """
        T, Hq, D = query.shape
        rows = query.float().view(T, self.kv_heads, -1, D)  # [T, H, G, D]
        out = torch.zeros_like(rows)
        if step.singles is not None:
            out[step.singles.tokens] = self._singles(rows[step.singles.tokens], step.singles)
        for chunk in step.chunks:
            own = slice(chunk.first, chunk.last)
            out[own] = self._chunk(rows[own].permute(1, 2, 0, 3)[None], keys[own], values[own], chunk)
        return out.view(T, Hq, D)

    def _singles(self, rows: Tensor, of: Singles) -> Tensor:
        """Attend with rows [B, H, G, D], one query per request."""
        assert self.rows is not None
        key, value = self.rows[0][of.rows], self.rows[1][of.rows]
        if of.reads_packed and rows.is_cpu and backends.chosen() in (backends.AUTO, "cpu"):
            out = self._in_one_call(rows, (key, value, of.exact), of)
            if out is not None:
                return out
        parts = [backends.attend_exact(rows, key, value, of.exact, self.scaling, self.softcap)]
        if of.reads_packed:
            packed = self._direct(rows, of.pages, of.packed)
            parts.append(self._one_by_one(rows, of) if packed is None else packed)
        return _merged(parts)

    def _in_one_call(self, rows: Tensor, exact: tuple[Tensor, Tensor, Tensor], of: Singles) -> Tensor | None:
        """Attend with rows [B, H, G, D] to exact and packed tokens by one kernel call; None if no
        kernel supports it."""
        if self._pool is None:
            keys, values = (
                codec.view(planes, self.slots.head_dim)
                for codec, planes in zip((self.slots.keys, self.slots.values), self.planes, strict=True)
            )
            sides, maps = ([keys.inner.operand], [values.inner.operand]), (keys.linear, values.linear)
            self._pool = PackedPages(*sides, [0], [0], maps, self.kv_heads)
        pool = self._pool.located([of.packed])
        out = backends.attend.direct(
            rows.flatten(1, 2).unsqueeze(2), (exact,), pool, None, None, self.scaling, self.softcap, None, False,
            (of.pages.contiguous(), self.page_tokens),
        )  # fmt: skip
        return None if out is None else out.view(rows.shape)

    def _one_by_one(self, rows: Tensor, of: Singles) -> PartialAttention:
        """Attend to the packed tokens request by request, for pages that no kernel supports."""
        parts = []
        for row, pages, mask in zip(rows, of.pages, of.packed, strict=True):
            first = mask.sum(-1)
            parts.append(self._decoded(row[None, :, :, None], pages, first) if int(first) else _nothing(row[None]))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
        """Attend with query [1, H, G, q, D], whose own keys and values are [q, H, D]. Returns [q,
        H, G, D]."""
        G, q = query.shape[2:4]
        exact_from, packed = chunk.exact_from(self.page_tokens), None
        if int(exact_from.max()):
            pages = chunk.pages.to(query.device)
            if G * q <= KERNEL_ROWS:
                mask = torch.arange(len(pages) * self.page_tokens) < exact_from[:, None]
                packed = self._direct(query.flatten(2, 3), pages[None], mask[None].to(query.device))
            packed = packed or self._decoded(query, pages, exact_from)
        parts = [self._own_pages(query, keys, values, chunk)] + ([] if packed is None else [packed])
        return _merged(parts).unflatten(2, (G, q))[0].permute(2, 0, 1, 3)

    def _own_pages(self, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> PartialAttention:
        """Attend with each query to the exact tokens of its own page."""
        outs, lses, p = [], [], self.page_tokens
        key, value = (x.transpose(0, 1)[None] for x in (keys, values))  # [1, H, q, D]
        for page in range(chunk.start // p, (chunk.num_tokens - 1) // p + 1):
            first, last = max(chunk.start, page * p), min(chunk.num_tokens, (page + 1) * p)
            own = slice(first - chunk.start, last - chunk.start)
            sides, begin = [key[:, :, own], value[:, :, own]], first
            if first % p and chunk.exact < first:
                assert self.rows is not None
                begin = chunk.exact
                held = self.rows[:, chunk.row, None, :, begin % p : first % p]
                sides = [torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(held, sides, strict=True)]
            mask = (torch.arange(begin, last) <= torch.arange(first, last)[:, None]).to(query.device)
            rows = query[:, :, :, own].flatten(2, 3)
            op = backends.attend_exact if rows.shape[2] <= KERNEL_ROWS else softmax.attend_exact.reference
            out, lse = op(rows, sides[0], sides[1], mask[None], self.scaling, self.softcap)
            outs.append(out.unflatten(2, (query.shape[2], -1)))
            lses.append(lse.unflatten(2, (query.shape[2], -1)))
        return torch.cat(outs, dim=3).flatten(2, 3), torch.cat(lses, dim=3).flatten(2, 3)

    def _direct(self, rows: Tensor, pages: Tensor, mask: Tensor) -> PartialAttention | None:
        """Attend with query rows [B, H, R, D] by a kernel that reads pages in place; None if no
        kernel supports them."""
        keys, values = self._of_batch(rows.shape[0])
        call = (
            keys.query(rows), keys.inner.operand, values.inner.operand, pages, self.page_tokens, mask, self.scaling,
            self.softcap,
        )  # fmt: skip
        found = backends.attend_pages.direct(*call)
        return None if found is None else (values.output(found[0]), found[1])

    def _of_batch(self, B: int) -> tuple[View, View]:
        """Return views of the whole pool for B rows. Those of the latest B are cached."""
        if B not in self._views:
            codecs = (self.slots.keys, self.slots.values)
            keys, values = (
                codec.view({name: x.expand(B, *x.shape[1:]) for name, x in planes.items()}, self.slots.head_dim)
                for codec, planes in zip(codecs, self.planes, strict=True)
            )
            self._views = {B: (keys, values)}
        return self._views[B]

    def _decoded(self, query: Tensor, pages: Tensor, exact_from: Tensor) -> PartialAttention:
        """Attend with queries [1, H, G, q, D] to packed tokens, query i to those before
        exact_from[i] (int64 [q]).

        Tokens are decoded SPAN_TOKENS at a time, and scores are dense matrix products.
        """
        q, tokens = query.shape[3], int(exact_from.max())
        tiles = [slice(at, min(q, at + QUERY_TILE)) for at in range(0, q, QUERY_TILE)]
        results: list[list[PartialAttention]] = [[_nothing(query[:, :, :, tile].flatten(2, 3))] for tile in tiles]
        per_page = self.page_tokens // BLOCK_TOKENS
        blocks = (pages.long()[:, None] * per_page + torch.arange(per_page, device=pages.device)).flatten()
        exact_from = exact_from.to(query.device)
        for first in range(0, tokens, SPAN_TOKENS):
            last = min(tokens, first + SPAN_TOKENS)
            span = blocks[first // BLOCK_TOKENS : -(-last // BLOCK_TOKENS)]
            keys, values = (
                codec.view({name: x.index_select(2, span) for name, x in planes.items()}, self.slots.head_dim)
                for codec, planes in zip((self.slots.keys, self.slots.values), self.planes, strict=True)
            )
            key, value = (view.inner.decode()[:, :, : last - first] for view in (keys, values))
            mask = torch.arange(first, last, device=query.device) < exact_from[:, None]
            rows = keys.query(query)
            for tile, parts in zip(tiles, results, strict=True):
                if bool(mask[tile].any()):
                    scores = rows[:, :, :, tile].flatten(2, 3) @ key.transpose(-1, -2)
                    out, lse = softmax.attend_scores(scores, value, mask[None, tile], self.scaling, self.softcap)
                    parts.append((values.output(out), lse))
        joined = [backends.merge_segments([o for o, _ in parts], [lse for _, lse in parts]) for parts in results]
        G = query.shape[2]
        out = torch.cat([out.unflatten(2, (G, -1)) for out, _ in joined], dim=3).flatten(2, 3)
        return out, torch.cat([lse.unflatten(2, (G, -1)) for _, lse in joined], dim=3).flatten(2, 3)


def _nothing(rows: Tensor) -> PartialAttention:
    """Return the partial attention of query rows [B, H, R, D] over no tokens."""
    return torch.zeros_like(rows), rows.new_full(rows.shape[:-1], float("-inf"))


def _merged(parts: list[PartialAttention]) -> Tensor:
    return backends.merge_segments([out for out, _ in parts], [lse for _, lse in parts])[0]
