"""Attention of prompts that does not depend on how they are cut into steps.

A query reads the tokens of its own page exactly and all earlier pages packed, even if they are of
the same step. This is slower than reading the own step exactly, and loses a little quality.

Shapes: q queries, H key-value heads, Hq query heads, G = Hq/H, D head dim, p tokens per page.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tersekv.kernels import backends, softmax
from tersekv.serving.dense import AttentionKind
from tersekv.serving.steps import Chunk

SPAN_TOKENS = 4096
"""Number of packed tokens decoded at a time."""

PartialAttention = tuple[Tensor, Tensor]
"""Output [B, H, R, D] and log-sum-exp [B, H, R] of query rows over some tokens."""


class Pool(Protocol):
    """The pages of one layer, see `tersekv.serving.pages.PagePool`."""

    page_tokens: int
    kv_heads: int
    kind: AttentionKind
    rows: Any  # its exact rows

    def unpacked(
        self, pages: Tensor, numbers: Tensor, dtype: torch.dtype, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode pages, which are the pages `numbers` of their request: keys and values [n·p, H, D]."""


def nothing(rows: Tensor) -> PartialAttention:
    """Return the partial attention of query rows [B, H, R, D] over no tokens."""
    return torch.zeros_like(rows), rows.new_full(rows.shape[:-1], float("-inf"))


def attend_by_page(pool: Pool, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
    """Attend with the queries [q, Hq, D] of a chunk, whose own keys and values are [q, H, D].

    Returns float32 [q, Hq, D].
    """
    q, Hq, D = query.shape
    rows = query.float().view(q, pool.kv_heads, -1, D).permute(1, 2, 0, 3)[None]  # [1, H, G, q, D]
    parts = [_own_pages(pool, rows, keys, values, chunk)]
    last = (chunk.num_tokens - 1) // pool.page_tokens
    if last:
        parts.append(_earlier_pages(pool, rows, chunk, last, keys.dtype))
    out = pool.kind.with_sinks(*backends.merge_segments([out for out, _ in parts], [lse for _, lse in parts]))
    return out.unflatten(2, (-1, q))[0].permute(2, 0, 1, 3).reshape(q, Hq, D)


def _own_pages(pool: Pool, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> PartialAttention:
    """Attend with each query to the exact tokens of its own page."""
    outs, lses, p = [], [], pool.page_tokens
    key, value = (x.transpose(0, 1)[None] for x in (keys, values))  # [1, H, q, D]
    for page in range(chunk.start // p, (chunk.num_tokens - 1) // p + 1):
        first, last = max(chunk.start, page * p), min(chunk.num_tokens, (page + 1) * p)
        own = slice(first - chunk.start, last - chunk.start)
        sides = [key[:, :, own], value[:, :, own]]
        if first % p:
            assert pool.rows is not None
            held = pool.rows.data[:, chunk.row, None, :, : first % p]
            sides = [torch.cat([old.to(new.dtype), new], dim=2) for old, new in zip(held, sides, strict=True)]
        mask = pool.kind.visible(torch.arange(first, last), torch.arange(page * p, last)).to(query.device)
        rows = query[:, :, :, own].flatten(2, 3)
        out, lse = softmax.attend_exact.reference(rows, sides[0], sides[1], mask[None], *pool.kind[:2])
        outs.append(out.unflatten(2, (query.shape[2], -1)))
        lses.append(lse.unflatten(2, (query.shape[2], -1)))
    return torch.cat(outs, dim=3).flatten(2, 3), torch.cat(lses, dim=3).flatten(2, 3)


def _earlier_pages(pool: Pool, query: Tensor, chunk: Chunk, pages: int, dtype: torch.dtype) -> PartialAttention:
    """Attend with queries [1, H, G, q, D] to the packed pages before their own, of the first `pages`.

    Tokens are decoded SPAN_TOKENS at a time. dtype: of the model.
    """
    p = pool.page_tokens
    position = torch.arange(chunk.start, chunk.num_tokens, device=query.device)
    exact_from = position // p * p
    rows = query.flatten(2, 3)
    results: list[PartialAttention] = [nothing(rows)]
    rows = rows.to(softmax.dtype_of_products(dtype, rows.device))
    step = max(1, SPAN_TOKENS // p)
    for first in range(chunk.first_page(pool.kind.window, p), pages, step):
        last = min(pages, first + step)
        numbers = torch.arange(first, last, device=query.device)
        sinks = torch.tensor([chunk.sink] if first == 0 else [], dtype=torch.int64, device=query.device)
        decoded = pool.unpacked(chunk.pages[first:last].to(query.device), numbers, rows.dtype, sinks)
        key, value = (x.transpose(0, 1)[None] for x in decoded)
        place = torch.arange(first * p, last * p, device=query.device)
        mask = pool.kind.visible(position, place) & (place < exact_from[:, None])
        if softmax.shows_any(mask):
            results.append(softmax.attend_many(rows, key, value, mask[None], *pool.kind[:2]))
    return backends.merge_segments([out for out, _ in results], [lse for _, lse in results])
