"""Plan of one engine step, for all layers: destinations of its tokens, and the tokens that each
query reads.

A query at position i reads the tokens of its own page, from position (i // p)·p on, exactly. It
reads all earlier tokens packed. Results therefore do not depend on how a prompt is split into
steps, or on pages that earlier requests filled. The exact copy of a partially filled page is in a
row outside the pool (`Rows`), one per running request. Once the page is full, only its packed
tokens remain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.serving.slots import Places

IDLE_STEPS = 32
"""Number of steps after which an unused row may be reused for another page.

A running request that a step leaves out normally returns earlier. If it does not, it reads its page
packed.
"""


class _Held(NamedTuple):
    """Row of a page. first, last: range of its tokens there, last exclusive. used: latest step that
    used it."""

    row: int
    first: int
    last: int
    used: int


class Rows:
    """Rows of the exact copies of partially filled pages, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.step = most, 0
        self._held: dict[int, _Held] = {}  # by page, the latest used last

    def __len__(self) -> int:
        return len(self._held)

    def of(self, page: int, tokens: int) -> _Held | None:
        """Return the row of a page that contains its tokens up to `tokens`; None if there is no
        such row."""
        held = self._held.get(page)
        if held is None or held.last < tokens:
            return None
        del self._held[page]  # reinsert it last, so that no other page of this step reuses the row
        self._held[page] = held._replace(used=self.step)
        return self._held[page]

    def put(self, page: int, first: int, last: int) -> _Held:
        """Return the row for tokens first to last (exclusive) of a page: its present row with its
        tokens, or a new one."""
        before = self.of(page, first) if first else None
        own = self._held.pop(page, None)
        oldest = next(iter(self._held.values()), None)
        if own is not None:
            row = own.row
        elif oldest is None or (len(self) < self.most and oldest.used >= self.step - IDLE_STEPS):
            row = len(self)
        else:
            row = self._held.pop(next(iter(self._held))).row
        self._held[page] = _Held(row, before.first if before else first, last, self.step)
        return self._held[page]


class Chunk(NamedTuple):
    """Queries first to last (exclusive) of a step, which end a sequence of `num_tokens` tokens in
    `pages` int32 [P].

    The page of the first query has exact tokens from position `exact` on; those before the chunk
    are in row `row`.
    """

    first: int
    last: int
    num_tokens: int
    pages: Tensor
    exact: int
    row: int

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.num_tokens - (self.last - self.first)

    def exact_from(self, page_tokens: int) -> Tensor:
        """Return the first position that each query reads exactly, int64 [q]."""
        position = torch.arange(self.start, self.num_tokens)
        page = position // page_tokens * page_tokens
        return torch.where(page < self.start, self.exact, page)


@dataclass(frozen=True)
class Singles:
    """Requests with one query each.

    tokens: token of each query, int64 [B]. pages: int32 [B, P]. packed: mask of packed tokens, bool
    [B, 1, P·p].
    rows: row of each request, int64 [B]. exact: mask of the row's tokens, bool [B, 1, p].
    reads_packed: True if any query reads a packed token.
    """

    tokens: Tensor
    pages: Tensor
    packed: Tensor
    rows: Tensor
    exact: Tensor
    reads_packed: bool


@dataclass(frozen=True)
class EngineStep:
    """Requests of one step, for all layers.

    places: destinations of the step's tokens. tokens: tokens that have a destination, or None for
    all.
    copied: tokens copied to rows, as token, row and position in the row, each int64 [n].
    rows: number of rows.
    """

    singles: Singles | None
    chunks: list[Chunk]
    places: Places
    tokens: Tensor | None
    copied: tuple[Tensor, Tensor, Tensor]
    rows: int

    def to(self, device: torch.device) -> EngineStep:
        """Return the step with its tensors on the device. Chunks stay on the CPU, where they are
        split by pages."""
        if device.type == "cpu":
            return self
        singles = self.singles
        if singles is not None:
            tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(singles).items() if isinstance(x, Tensor)}
            singles = replace(singles, **tensors)
        token, row, place = (x.to(device) for x in self.copied)
        tokens = None if self.tokens is None else self.tokens.to(device)
        places = Places(*(x.to(device) for x in self.places))
        return EngineStep(singles, self.chunks, places, tokens, (token, row, place), self.rows)

    @staticmethod
    def plan(
        starts: Sequence[int], seen: Sequence[int], pages: Tensor, slots: Tensor, p: int, rows: Rows
    ) -> EngineStep:
        """Plan a step. Request i has queries starts[i] to starts[i + 1], which are the last of its
        seen[i] tokens.

        pages: int32, on the CPU; pages[i] lists the pages of request i, of p tokens each. Trailing
        entries may be unused.
        slots: int64 [T], on the CPU; the slot of each token, or −1 for none.
        rows: rows of exact copies, which are updated.
        """
        rows.step += 1
        chunks: list[Chunk] = []
        copied: list[tuple[range, int, int]] = []
        for (first, last), tokens, table in zip(itertools.pairwise(starts), seen, pages, strict=True):
            if first == last:
                continue
            start, end = tokens - (last - first), (tokens - 1) // p * p  # of the queries; of the page of the last one
            before = rows.of(int(table[start // p]), start % p) if start % p else None
            exact = start - start % p + before.first if before else start
            chunks.append(Chunk(first, last, tokens, table[: -(-tokens // p)], exact, before.row if before else 0))
            held = rows.put(int(table[end // p]), max(start, end) - end, tokens - end)
            copied.append((range(last - (tokens - max(start, end)), last), held.row, max(start, end) - end))
            if last - first == 1:
                chunks[-1] = chunks[-1]._replace(exact=end + held.first, row=held.row)
        known = None if bool((slots >= 0).all()) else (slots >= 0).nonzero()[:, 0]
        single = [chunk for chunk in chunks if chunk.last - chunk.first == 1]
        return EngineStep(
            _singles(single, p) if single else None,
            [chunk for chunk in chunks if chunk.last - chunk.first > 1],
            Places.of(slots if known is None else slots[known]),
            known,
            _copies(copied),
            len(rows),
        )


def _copies(copied: list[tuple[range, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    triples = [(t, row, at + i) for tokens, row, at in copied for i, t in enumerate(tokens)]
    token, row, place = torch.tensor(triples, dtype=torch.int64).view(-1, 3).unbind(1)
    return token, row, place


def _singles(chunks: list[Chunk], p: int) -> Singles:
    exact, seen = (torch.tensor([getattr(c, name) for c in chunks]).unsqueeze(1) for name in ("exact", "num_tokens"))
    full = -(-exact // p)  # pages with packed tokens that are read
    P = max(1, int(full.max()))
    page, place = torch.arange(P), torch.arange(p)
    tables = torch.stack([torch.nn.functional.pad(c.pages[:P], (0, P - len(c.pages[:P])), value=-1) for c in chunks])
    base = (seen - 1) // p * p
    return Singles(
        torch.tensor([c.first for c in chunks]),
        torch.where(page < full, tables, -1).to(torch.int32),
        (torch.arange(P * p) < exact).unsqueeze(1),
        torch.tensor([c.row for c in chunks]),
        ((place + base >= exact) & (place + base < seen)).unsqueeze(1),
        bool((exact > 0).any()),
    )
