"""Pool of pages of one layer: pages are packed when they are full, and queries read packed bytes.

`tersekv.serving.steps` says which pages get full in a step and which tokens a query reads packed.
Queries of a prompt read the tokens of their own step exactly, in one fused product with what is
unpacked of earlier pages. Kernels read packed bytes in place for requests with few queries.

Shapes: T tokens of a step, H key-value heads, Hq query heads, G = Hq/H, D head dim, S pages, p tokens per page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels.attend import PackedPages
from tersekv.layouts.base import BLOCK_TOKENS, PackedTensors, View
from tersekv.serving.by_page import attend_by_page, nothing
from tersekv.serving.dense import AttentionKind, DenseAttention, Lengths, attend_dense
from tersekv.serving.slots import Slots
from tersekv.serving.spans import SINKS
from tersekv.serving.steps import Chunk, EngineStep, Full, Singles
from tersekv.transforms.angles import Angles
from tersekv.transforms.rope import KEPT_ELEMENTS, Rope

PART_ELEMENTS = 1 << 20
"""Elements of one side encoded or decoded at a time, which bounds the memory of float32 copies."""

FEW_QUERIES = 8
"""Most queries of a request for which kernels read its packed bytes, instead of unpacking them."""

Exactness = Literal["step", "page"]
"""Tokens that a prompt's query reads exactly: those of its own step, or those of its own page.

With "page" results do not depend on how prompts are cut into steps.
"""


class ExactRows(NamedTuple):
    """Exact tokens [2, rows, H, t, D], keys and values. Heads of a token follow each other in memory, so that a token
    is written in one piece.

    sides: keys and values. flat: as tokens [rows·t, H, D], see `EngineStep.copied`.
    """

    data: Tensor
    sides: tuple[Tensor, ...]
    flat: tuple[Tensor, ...]

    @staticmethod
    def grown(held: ExactRows | None, rows: int, tokens: int, like: Tensor) -> ExactRows:
        """Return at least this many rows of `tokens` tokens like [T, H, D], which begin with the present ones."""
        have = 0 if held is None else held.data.shape[1]
        if held is not None and have >= rows:
            return held
        made = like.new_zeros((2, max(rows, 2 * have, 1), tokens, *like.shape[1:]))
        if held is not None:
            made[:, :have] = held.data.transpose(2, 3)
        return ExactRows(made.transpose(2, 3), tuple(made.transpose(2, 3)), tuple(made.flatten(1, 2)))


class PagePool:
    """Pages of one layer in contiguous memory uint8 [S, H, p, token_bytes].

    kind: how the layer attends. rope: of the keys, if their codec needs it. dense: attention over
    unpacked tokens.
    """

    def __init__(
        self,
        slots: Slots,
        memory: Tensor,
        kind: AttentionKind,
        rope: Rope | None = None,
        dense: DenseAttention = attend_dense,
        exactness: Exactness = "step",
    ) -> None:
        S, H, p, C = memory.shape
        if p % BLOCK_TOKENS or slots.token_bytes != C or not memory.is_contiguous():
            raise UserError(
                f"pages of {p} tokens with {C} bytes each do not fit: pages hold a multiple of {BLOCK_TOKENS} tokens, "
                f"of {slots.token_bytes} bytes per KV head, and a layer's pages are contiguous"
            )
        self.slots, self.page_tokens, self.kv_heads, self.kind = slots, p, H, kind
        self.rope, self.dense, self.exactness = rope if slots.keys.needs_rope else None, dense, exactness
        if slots.keys.needs_rope and (rope is None or rope.varies):
            raise UserError(
                f"{slots.keys.label} needs the RoPE of the keys' positions, and this model has none that "
                "depends on positions alone; use kivi"
            )
        self.codecs: tuple[Codec, Codec] = (slots.keys, slots.values)
        self.planes = slots.views(memory.view(S * p // BLOCK_TOKENS, H, BLOCK_TOKENS * C))
        self.rows: ExactRows | None = None
        """Exact copies of pages being filled."""
        self.sinks: ExactRows | None = None
        """Exact attention sinks of requests."""
        self._pool: PackedPages | None = None

    # ---------------------------------------------------------------- write

    def write(self, keys: Tensor, values: Tensor, step: EngineStep) -> None:
        """Copy the tokens [T, H, D] of pages being filled to their rows, and pack full pages."""
        self.rows = ExactRows.grown(self.rows, step.rows, self.page_tokens, keys)
        self.sinks = ExactRows.grown(self.sinks, step.sinks, SINKS, keys)
        token, place = step.copied
        if len(token):
            whole = len(token) == len(keys) and step.singles is not None and step.singles.tokens is None
            for x, rows in zip((keys, values), self.rows.flat, strict=True):
                rows.index_copy_(0, place, (x if whole else x.index_select(0, token)).to(rows.dtype))
        if step.full is not None:
            self._pack(keys, values, step.full, step.shared)

    def _pack(self, keys: Tensor, values: Tensor, full: Full, shared: dict[Any, Any]) -> None:
        """Encode the tokens of full pages and store their blocks."""
        for side, (codec, planes, x) in enumerate(zip(self.codecs, self.planes, (keys, values), strict=True)):
            parts = [x.index_select(0, full.tokens)] if len(full.tokens) else []
            if len(full.rows):
                assert self.rows is not None
                parts.append(self.rows.sides[side][full.rows].transpose(1, 2).flatten(0, 1))
            found = torch.cat(parts) if len(parts) > 1 else parts[0]
            tokens = found.transpose(0, 1)[None]  # [1, H, n, D]
            page, row = full.sinks
            if len(page):
                assert self.sinks is not None
                pages = tokens[0].unflatten(1, (-1, self.page_tokens))  # [H, pages, p, D]
                rows = self.sinks.sides[side]
                rows[row] = pages[:, page, :SINKS].transpose(0, 1).to(rows.dtype)
            for part, in_blocks in self._parts(tokens.shape[2]):
                angles = self._angles(side, full.positions, part, shared, "full")
                coded = coding.encode(codec, Tokens(tokens[:, :, part], angles))
                blocks = full.blocks[in_blocks]
                for name, plane in planes.items():
                    plane[0].index_copy_(1, blocks, coded[name][0])

    def _parts(self, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Split tokens of full pages: ranges of tokens, and of their blocks."""
        blocks = max(1, PART_ELEMENTS // (self.kv_heads * self.slots.head_dim * BLOCK_TOKENS))
        for first in range(0, tokens // BLOCK_TOKENS, blocks):
            yield slice(first * BLOCK_TOKENS, (first + blocks) * BLOCK_TOKENS), slice(first, first + blocks)

    def _angles(self, side: int, positions: Tensor, part: slice, shared: dict[Any, Any], name: str) -> Angles | None:
        """Return the RoPE angles of a part of tokens, for keys whose codec needs them. Layers share them."""
        if side or self.rope is None:
            return None
        own = positions[part]
        key = id(self.rope), name, part.start, len(own)  # layers with other heads have other parts
        if key not in shared:
            few = 2 * len(positions) * self.slots.head_dim <= KEPT_ELEMENTS
            shared[key] = self.rope.angles_at(own)._replace(kept={} if few else None)
        return cast(Angles, shared[key])

    # ---------------------------------------------------------------- read

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, step: EngineStep) -> Tensor:
        """Attend with a step's queries [T, Hq, D]; their keys and values [T, H, D] must be written
        already.

        Returns [T, Hq, D] in the query's type, on the device that queries, memory and step share.
        """
        singles = step.singles_within(self.kind.window)
        if singles is not None and singles.tokens is None:
            return self._singles(query, singles)
        if singles is None and self.exactness == "step" and _are_long(step.chunks, len(query)):
            return self._long(query, keys, values, list(step.chunks), step.shared)
        out = torch.zeros_like(query)
        if singles is not None and singles.tokens is not None:
            out[singles.tokens] = self._singles(query[singles.tokens], singles)
        long: list[Chunk] = []
        for chunk in step.chunks:
            own = slice(chunk.first, chunk.last)
            if self.exactness == "page":
                out[own] = attend_by_page(self, query[own], keys[own], values[own], chunk).to(out.dtype)
            elif chunk.last - chunk.first > FEW_QUERIES or chunk.start < self.page_tokens or not self._native(query):
                long.append(chunk)
            else:
                found = self._few(query[own], keys[own], values[own], chunk)
                if found is None:
                    long.append(chunk)
                else:
                    out[own] = found
        if long:
            tokens = torch.cat([torch.arange(c.first, c.last, device=out.device) for c in long])
            out[tokens] = self._long(query, keys, values, long, step.shared)
        return out

    def _native(self, query: Tensor) -> bool:
        return query.is_cpu and backends.chosen() in (backends.AUTO, "cpu")

    def pool(self, mask: Tensor) -> PackedPages:
        """Return all packed pages for kernels, read through a page table. Positions of RoPE count
        the tokens of a request."""
        if self._pool is None:
            angles = None if self.rope is None else self.rope.angles(0, 1)._replace(tokens=self._pool_tokens())
            views = [
                coding.view(codec, planes, self.slots.head_dim, of)
                for codec, planes, of in zip(self.codecs, self.planes, (angles, None), strict=True)
            ]
            keys, values = views
            maps = keys.linear, values.linear
            self._pool = PackedPages([keys.inner.operand], [values.inner.operand], [0], [0], maps, self.kv_heads)
        return self._pool.located([mask])

    def _pool_tokens(self) -> int:
        return next(iter(self.planes[0].values())).shape[2] * BLOCK_TOKENS

    def _singles(self, query: Tensor, of: Singles) -> Tensor:
        """Attend with queries [B, Hq, D], one per request."""
        assert self.rows is not None
        assert self.sinks is not None
        if self._native(query):
            pages = self.pool(of.packed) if of.reads_packed else None
            exact: tuple[Any, ...] = ((*self.rows.sides, of.exact, of.rows),)
            if of.reads_packed:
                exact = (*exact, (*self.sinks.sides, of.first, of.sinks))
            found = backends.attend.direct(
                query.unsqueeze(2), exact, pages, None, None, *self.kind[:2], self.kind.sink_logits, False,
                (of.pages, self.page_tokens) if of.reads_packed else None,
            )  # fmt: skip
            if found is not None:
                return found[:, 0]
        rows = query.float().unflatten(1, (self.kv_heads, -1))  # [B, H, G, D]
        key, value = (side[of.rows] for side in self.rows.sides)
        parts = [backends.attend_exact(rows, key, value, of.exact, *self.kind[:2])]
        if of.reads_packed:
            first = [side[of.sinks] for side in self.sinks.sides]
            parts.append(backends.attend_exact(rows, *first, of.first, *self.kind[:2]))
            parts.append(self._packed(rows, of))
        merged = backends.merge_segments([out for out, _ in parts], [lse for _, lse in parts])
        out = self.kind.with_sinks(*merged)
        return out.flatten(1, 2).to(query.dtype)

    def _packed(self, rows: Tensor, of: Singles) -> tuple[Tensor, Tensor]:
        """Attend with rows [B, H, G, D] to packed tokens by a kernel, else request by request."""
        if self.rope is None:
            B, D = len(rows), self.slots.head_dim
            keys, values = (
                codec.view({name: x.expand(B, *x.shape[1:]) for name, x in planes.items()}, D)
                for codec, planes in zip(self.codecs, self.planes, strict=True)
            )
            call = keys.query(rows), keys.inner.operand, values.inner.operand, of.pages, self.page_tokens, of.packed
            found = backends.attend_pages.direct(*call, *self.kind[:2])
            if found is not None:
                return values.output(found[0]), found[1]
        outs, lses = [], []
        for row, pages, seen in zip(rows, of.pages, of.packed, strict=True):
            numbers = (pages >= 0).nonzero()[:, 0]
            out, lse = nothing(row[None])
            if len(numbers):
                sides = (x.transpose(0, 1)[None] for x in self.unpacked(pages[numbers], numbers, torch.float32))
                mask = seen.unflatten(1, (-1, self.page_tokens))[:, numbers].flatten(1)
                out, lse = backends.attend_exact(row[None], *sides, mask[None], *self.kind[:2])
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def _few(self, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor | None:
        """Attend with a few queries [q, Hq, D] of one request in one kernel call; None if no kernel
        supports it."""
        whole = chunk.start // self.page_tokens
        place = torch.arange(chunk.num_tokens)
        visible = self.kind.visible(place[chunk.start :], place)[None]
        packed = whole * self.page_tokens
        own = visible[..., chunk.start :].contiguous()
        exact: list[tuple[Any, ...]] = [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], own)]
        if before := chunk.start % self.page_tokens:
            assert self.rows is not None
            held = self.rows.data[:, chunk.row, None, :, :before]
            exact.append((held[0], held[1], visible[..., packed : chunk.start].contiguous()))
        assert self.sinks is not None
        first = self.sinks.data[:, chunk.sink, None]
        exact.append((first[0], first[1], visible[..., :SINKS].contiguous()))
        visible[..., :SINKS] = False
        pages = self.pool(visible[..., :packed].contiguous())
        table = chunk.pages[None, :whole].clone()
        table[:, : chunk.first_page(self.kind.window, self.page_tokens)] = -1
        found = backends.attend.direct(
            query.transpose(0, 1)[None], tuple(exact), pages, None, None, *self.kind[:2], self.kind.sink_logits, False,
            (table, self.page_tokens),
        )  # fmt: skip
        return None if found is None else found[0]

    def _long(self, query: Tensor, keys: Tensor, values: Tensor, chunks: list[Chunk], shared: dict[Any, Any]) -> Tensor:
        """Attend with chunks of prompts to all their tokens at once. Returns [their queries, Hq, D]."""
        key = "long", len(chunks), self.kind.window
        if key not in shared:
            shared[key] = _Long.of(chunks, self.page_tokens, len(query), query.device, self.kind.window)
        plan: _Long = shared[key]
        if plan.from_start:
            sides = [x if plan.tokens is None else x.index_select(0, plan.tokens) for x in (keys, values)]
        else:
            sides = [x.new_empty((sum(plan.lengths.tokens), *x.shape[1:])) for x in (keys, values)]
            known = shared.setdefault(("angles", key), {})
            packed = self.unpacked(plan.pages, plan.numbers, keys.dtype, plan.sinks, known)
            place, held = plan.held
            for side, (to, x) in enumerate(zip(sides, (keys, values), strict=True)):
                to[plan.own] = x if plan.tokens is None else x.index_select(0, plan.tokens)
                if len(plan.packed):
                    to[plan.packed] = packed[side]
                if len(held):
                    assert self.rows is not None
                    to[held] = self.rows.flat[side].index_select(0, place).to(to.dtype)
        rows = query if plan.tokens is None else query.index_select(0, plan.tokens)
        return self.dense(rows, sides[0], sides[1], plan.lengths, self.kind)

    def unpacked(
        self,
        pages: Tensor,
        numbers: Tensor,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
        shared: dict[Any, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decode pages int64 [n], which are the pages `numbers` of their requests: keys and values
        [n·p, H, D]. sinks: rows of the sinks of those with the number 0, which replace their first tokens.
        """
        p, D = self.page_tokens, self.slots.head_dim
        place = torch.arange(p, device=pages.device)
        blocks = (pages.long()[:, None] * (p // BLOCK_TOKENS) + place[: p // BLOCK_TOKENS]).flatten()
        positions = (numbers[:, None] * p + place).flatten()
        made: list[Tensor] = []
        for side, (codec, planes) in enumerate(zip(self.codecs, self.planes, strict=True)):
            out = torch.empty((len(positions), self.kv_heads, D), dtype=dtype, device=blocks.device)
            known = {} if shared is None else shared
            for part, in_blocks in self._parts(len(positions)):
                angles = self._angles(side, positions, part, known, "read")
                view = _gathered(codec, planes, blocks[in_blocks], D, angles)
                out[part] = view.floats(dtype)[0].transpose(0, 1)
            if sinks is not None and len(sinks):
                assert self.sinks is not None
                starting = (numbers == 0).nonzero()[:, 0]
                out.unflatten(0, (-1, p))[starting, :SINKS] = self.sinks.sides[side][sinks].transpose(1, 2).to(dtype)
            made.append(out)
        return made[0], made[1]


def _are_long(chunks: Sequence[Chunk], T: int) -> bool:
    """True if these chunks are all T tokens of a step, in order, and each has many queries."""
    return sum(c.last - c.first for c in chunks) == T > 0 and all(c.last - c.first > FEW_QUERIES for c in chunks)


def _gathered(codec: Codec, planes: PackedTensors, blocks: Tensor, D: int, angles: Angles | None) -> View:
    return coding.view(codec, {name: x.index_select(2, blocks) for name, x in planes.items()}, D, angles)


class _Long(NamedTuple):
    """Chunks of prompts of a step, for all layers.

    tokens: their tokens in the step, int64, or None for all. from_start: True if no chunk has
    earlier tokens. pages, numbers: earlier full pages and their numbers in their requests, int64.
    own, packed: places of own and unpacked tokens among all tokens of the requests. held: places of
    tokens in rows, see `EngineStep.copied`, and among all tokens. sinks: rows of the sinks of earlier pages.
    """

    lengths: Lengths
    tokens: Tensor | None
    from_start: bool
    pages: Tensor
    numbers: Tensor
    own: Tensor
    packed: Tensor
    held: tuple[Tensor, Tensor]
    sinks: Tensor

    @staticmethod
    def of(chunks: Sequence[Chunk], p: int, T: int, device: torch.device, window: int | None) -> _Long:
        """Plan the reads of chunks in a step of T tokens, with pages of p tokens.

        Pages before the sliding window are left out of the requests, which then are shorter.
        """
        left_out = [c.first_page(window, p) for c in chunks]
        tokens_read = [c.num_tokens - skip * p for c, skip in zip(chunks, left_out, strict=True)]
        lengths = Lengths([c.last - c.first for c in chunks], tokens_read)
        begins = [0, *itertools.accumulate(lengths.tokens)]
        ranges = [torch.arange(c.first, c.last) for c in chunks]
        pages, numbers, own, packed, place, held = ([] for _ in range(6))
        for c, skip, after in zip(chunks, left_out, begins, strict=False):
            whole, rest = c.start // p, c.start % p
            begin = after - skip * p  # where the request would begin with all its tokens
            pages.append(c.pages[skip:whole].long())
            numbers.append(torch.arange(skip, whole))
            packed.append(torch.arange(after, begin + whole * p))
            place.append(c.row * p + torch.arange(rest))
            held.append(torch.arange(begin + whole * p, begin + c.start))
            own.append(torch.arange(begin + c.start, begin + c.num_tokens))
        parts = (torch.cat(x).to(device) for x in (pages, numbers, own, packed, place, held))
        pages_, numbers_, own_, packed_, place_, held_ = parts
        tokens = None if sum(lengths.queries) == T else torch.cat(ranges).to(device)
        from_start = all(c.start == 0 for c in chunks)
        firsts = [c.sink for c, skip in zip(chunks, left_out, strict=True) if c.start >= p and not skip]
        sinks = torch.tensor(firsts, dtype=torch.int64, device=device)
        return _Long(lengths, tokens, from_start, pages_, numbers_, own_, packed_, (place_, held_), sinks)
