"""A layer's pool of pages: new tokens are coded into their slots, and queries read the packed bytes where they lie.

Every query reads every token from its slot, those of its own step included. So an answer does not depend on how a prompt was
cut into steps, on what else ran in them, or on pages that an earlier request had filled.

Shapes: T tokens of a step, H key-value heads, Hq query heads, D head dim, S pages, p tokens per page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.formats.base import BLOCK_TOKENS, View
from tersekv.ops import backends, softmax
from tersekv.serving.slots import Places, Slots, write

SPAN_TOKENS = 1024
"""Packed tokens decoded at a time for long chunks."""

QUERY_TILE = 256
"""Query positions of a long chunk at a time: bounds the scores that are held."""

KERNEL_ROWS = 64
"""Most query rows per KV head (grouped heads × positions) that read packed bytes directly."""


class Chunk(NamedTuple):
    """Queries first to last (exclusive) of a step are the last ones of a sequence of `seen` tokens in `pages` int32 [P]."""

    first: int
    last: int
    seen: int
    pages: Tensor


@dataclass(frozen=True)
class Step:
    """The requests of one step, for all layers. singles int64 [B]: queries of requests that have one each, with their pages
    int32 [B, P] and mask bool [B, 1, P·p]; chunks: the other requests; places: where the step's tokens go; tokens: of them
    that have a place, None for all."""

    singles: Tensor
    pages: Tensor
    mask: Tensor
    chunks: list[Chunk]
    places: Places
    tokens: Tensor | None

    @staticmethod
    def plan(starts: list[int], seen: list[int], pages: Tensor, slots: Tensor, page_tokens: int) -> Step:
        """Request i has queries starts[i] to starts[i + 1], the last of seen[i] tokens, which lie in pages[i] (int32, some
        entries of which may be unused); slots int64 [T]: where each token goes, −1 for none."""
        rows, chunks = [], []
        for i, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
            if last - first == 1:
                rows.append(i)
            elif last > first:
                chunks.append(Chunk(first, last, seen[i], pages[i, : -(-seen[i] // page_tokens)]))
        lengths = torch.tensor([seen[i] for i in rows], dtype=torch.int64)
        P = -(-max((seen[i] for i in rows), default=0) // page_tokens)
        used = torch.arange(P) * page_tokens < lengths[:, None]
        own = torch.where(used, pages[rows, :P], -1).to(torch.int32) if rows else pages.new_empty((0, 0))
        mask = (torch.arange(P * page_tokens) < lengths[:, None]).unsqueeze(1)
        tokens = None if bool((slots >= 0).all()) else (slots >= 0).nonzero()[:, 0]
        places = Places.of(slots if tokens is None else slots[tokens])
        return Step(torch.tensor([starts[i] for i in rows], dtype=torch.int64), own, mask, chunks, places, tokens)


class Pool:
    """The pages of one layer in memory uint8 [S, H, p, token_bytes], contiguous but for its first axis."""

    def __init__(self, slots: Slots, memory: Tensor) -> None:
        S, H, p, C = memory.shape
        if p % BLOCK_TOKENS or C != slots.token_bytes or not memory[0].is_contiguous():
            raise UserError(
                f"pages of {p} tokens with {C} bytes each do not fit: pages hold a multiple of {BLOCK_TOKENS} tokens, of "
                f"{slots.token_bytes} bytes per KV head, without gaps"
            )
        if memory.stride(0) != H * p * C:
            raise UserError("pages of several layers lie interleaved; use a cache layout that keeps a layer's together")
        self.slots, self.page_tokens, self.kv_heads = slots, p, H
        self.planes = slots.views(memory.view(S * p // BLOCK_TOKENS, H, BLOCK_TOKENS * C))
        self._views: dict[int, tuple[View, View]] = {}

    def write(self, keys: Tensor, values: Tensor, step: Step) -> None:
        """Code keys and values [T, H, D] of a step into their slots."""
        codecs = (self.slots.keys, self.slots.values)
        for codec, planes, specs, x in zip(codecs, self.planes, self.slots.planes, (keys, values), strict=True):
            x = x if step.tokens is None else x[step.tokens]
            if len(x):
                write(codec, planes, specs, x.float(), step.places)

    def attend(self, query: Tensor, step: Step, scaling: float, softcap: float | None = None) -> Tensor:
        """Attention of a step's queries [T, Hq, D], whose own tokens are written: float32 [T, Hq, D]."""
        T, Hq, D = query.shape
        rows = query.float().view(T, self.kv_heads, -1, D)  # [T, H, G, D]
        out = torch.zeros_like(rows)
        if len(step.singles):
            out[step.singles] = self._singles(rows[step.singles], step, scaling, softcap)
        for chunk in step.chunks:
            own = rows[chunk.first : chunk.last].permute(1, 2, 0, 3)[None]  # [1, H, G, q, D]
            out[chunk.first : chunk.last] = self._chunk(own, chunk, scaling, softcap)[0].permute(2, 0, 1, 3)
        return out.view(T, Hq, D)

    def _singles(self, rows: Tensor, step: Step, scaling: float, softcap: float | None) -> Tensor:
        """rows [B, H, G, D], one query of each request."""
        result = self._direct(rows, step.pages, step.mask, scaling, softcap)
        if result is not None:
            return result
        outs = []
        for b, row in enumerate(rows):
            seen = int(step.mask[b].sum())
            chunk = Chunk(0, 1, seen, step.pages[b, : -(-seen // self.page_tokens)])
            outs.append(self._decoded(row[None, :, :, None], chunk, scaling, softcap)[0, :, :, 0])
        return torch.stack(outs)

    def _chunk(self, query: Tensor, chunk: Chunk, scaling: float, softcap: float | None) -> Tensor:
        """query [1, H, G, q, D] to its output of the same shape."""
        G, q = query.shape[2:4]
        if G * q <= KERNEL_ROWS:
            mask = _causal(chunk, 0, len(chunk.pages) * self.page_tokens)
            result = self._direct(query.flatten(2, 3), chunk.pages[None], mask, scaling, softcap)
            if result is not None:
                return result.unflatten(2, (G, q))
        return self._decoded(query, chunk, scaling, softcap)

    def _direct(
        self, rows: Tensor, pages: Tensor, mask: Tensor, scaling: float, softcap: float | None
    ) -> Tensor | None:
        """Output of query rows [B, H, R, D] by a kernel that reads pages where they lie; None if none reads them."""
        keys, values = self._of_batch(rows.shape[0])
        call = (
            keys.query(rows), keys.inner.operand, values.inner.operand, pages, self.page_tokens, mask, scaling, softcap
        )  # fmt: skip
        run = backends.kernel("attend_pages", *call)
        return None if run is None else values.output(run(*call)[0])

    def _of_batch(self, B: int) -> tuple[View, View]:
        """Views of the whole pool for B rows, that of the last B kept."""
        if B not in self._views:
            codecs = (self.slots.keys, self.slots.values)
            keys, values = (
                codec.view({name: x.expand(B, *x.shape[1:]) for name, x in planes.items()}, self.slots.head_dim)
                for codec, planes in zip(codecs, self.planes, strict=True)
            )
            self._views = {B: (keys, values)}
        return self._views[B]

    def _decoded(self, query: Tensor, chunk: Chunk, scaling: float, softcap: float | None) -> Tensor:
        """The same for many rows: packed tokens are decoded SPAN_TOKENS at a time and multiplied as matrices."""
        q = query.shape[3]
        tiles = [slice(at, min(q, at + QUERY_TILE)) for at in range(0, q, QUERY_TILE)]
        results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tiles]
        per_page = self.page_tokens // BLOCK_TOKENS
        blocks = (chunk.pages.long()[:, None] * per_page + torch.arange(per_page)).flatten()
        for first in range(0, chunk.seen, SPAN_TOKENS):
            last = min(chunk.seen, first + SPAN_TOKENS)
            span = blocks[first // BLOCK_TOKENS : -(-last // BLOCK_TOKENS)]
            keys, values = (
                codec.view({name: x.index_select(2, span) for name, x in planes.items()}, self.slots.head_dim)
                for codec, planes in zip((self.slots.keys, self.slots.values), self.planes, strict=True)
            )
            key, value = (view.inner.decode()[:, :, : last - first] for view in (keys, values))
            rows = keys.query(query)
            for tile, parts in zip(tiles, results, strict=True):
                mask = _causal(chunk, first, last)[:, tile]
                if bool(mask.any()):
                    scores = rows[:, :, :, tile].flatten(2, 3) @ key.transpose(-1, -2)
                    parts.append(softmax.attend_scores(scores, value, mask, scaling, softcap))
        merged = [backends.merge_segments([o for o, _ in parts], [lse for _, lse in parts])[0] for parts in results]
        outs = [values.output(out).unflatten(2, (query.shape[2], -1)) for out in merged]
        return torch.cat(outs, dim=3)


def _causal(chunk: Chunk, first: int, last: int) -> Tensor:
    """Which tokens first to last (exclusive) each query of a chunk sees: bool [1, q, last − first]."""
    position = torch.arange(chunk.seen - (chunk.last - chunk.first), chunk.seen)
    return (torch.arange(first, last) <= position[:, None])[None]
