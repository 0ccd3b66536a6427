"""Plan of one engine step, for all layers: pages that get full, and the tokens that each query reads.

A page is packed when its last token arrives. Until then its tokens are in a row outside the pool
(`Rows`), exactly, one row per running request. A query reads the page being filled exactly and full
pages packed, except that the first SINKS tokens of a request stay exact (attention sinks). Queries of a
prompt also read the tokens of their own step exactly.

The plan is made of whole arrays, without a loop over requests. What block tables of a model share is in
`tersekv.serving.spans`.

Shapes: T tokens of the step, n requests, P pages of the longest request, p tokens per page.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tersekv.errors import CacheError
from tersekv.layouts.base import BLOCK_TOKENS
from tersekv.serving.spans import Ints, Seen, Spans, tensor

IDLE_STEPS = 32
"""Number of steps after which the row of a page may be reused for another page.

Engines run every unfinished request at almost every step. A row that is idle for longer belongs to a
request that has ended.
"""


class Rows:
    """Rows of the exact copies of pages that are being filled.

    most: number of rows above which idle ones are reused.
    keeps_full: keep the row of a request's latest full page, whose last tokens may be taken back (speculation).
    """

    def __init__(self, most: int, keeps_full: bool = False) -> None:
        self.most, self.keeps_full, self.step = most, keeps_full, 0
        self._row = np.full(64, -1, np.int64)  # by page; −1: none
        self._page = np.zeros(0, np.int64)  # by row; −1: free
        self._tokens = np.zeros(0, np.int64)  # by row: number of its tokens, from the page's first on
        self._used = np.zeros(0, np.int64)  # by row: latest step
        self.sinks = SinkRows()

    def __len__(self) -> int:
        return len(self._page)

    def find(self, pages: Ints, tokens: Ints) -> Ints:
        """Return the rows of pages that have `tokens` tokens already.

        Raises:
            CacheError: a row lacks tokens, because it was reused.
        """
        self._row = _reaching(self._row, pages)
        rows = self._row[pages]
        if len(pages) and (rows.min() < 0 or bool((self._tokens[rows] < tokens).any())):
            raise CacheError(
                f"the exact tokens of a page being filled are gone, because its request paused for more than "
                f"{IDLE_STEPS} steps while {self.most} others began; allow fewer running requests"
            )
        self._used[rows] = self.step
        return rows

    def take(self, pages: Ints) -> Ints:
        """Return rows for pages that begin in this step: their present rows, or others."""
        self._row = _reaching(self._row, pages)
        rows = self._row[pages]
        self._used[rows[rows >= 0]] = self.step  # before idle rows are reused
        new = np.flatnonzero(rows < 0)
        if len(new):
            rows[new] = self._free(len(new))
            self._row[pages[new]] = rows[new]
            self._page[rows[new]] = pages[new]
            self._used[rows[new]] = self.step
        return rows

    def hold(self, rows: Ints, tokens: Ints) -> None:
        """Note that rows now have `tokens` tokens."""
        self._tokens[rows] = tokens

    def release(self, pages: Ints) -> None:
        """Free the rows of pages, if they have any."""
        if not len(pages):
            return
        self._row = _reaching(self._row, pages)
        rows = self._row[pages]
        rows = rows[rows >= 0]
        self._row[pages] = -1
        self._page[rows] = -1
        self._used[rows] = -1

    def _free(self, count: int) -> Ints:
        """Return the numbers of `count` rows without a page: free ones, idle ones, then new ones."""
        idle = np.flatnonzero(self._page < 0)
        if len(idle) < count and len(self) + count - len(idle) > self.most:
            old = np.flatnonzero((self._page >= 0) & (self._used < self.step - IDLE_STEPS))
            old = old[np.argsort(self._used[old], kind="stable")][: count - len(idle)]
            self._row[self._page[old]] = -1
            self._page[old] = -1
            idle = np.concatenate([idle, old])
        more = count - len(idle)
        if more <= 0:
            return idle[:count]
        first = len(self)
        self._page = np.concatenate([self._page, np.full(more, -1)])
        self._tokens, self._used = (np.concatenate([x, np.zeros(more, np.int64)]) for x in (self._tokens, self._used))
        return np.concatenate([idle, np.arange(first, first + more)])


class SinkRows:
    """Rows of the attention sinks of packed first pages. A row lasts until its page is written again."""

    def __init__(self) -> None:
        self._row = np.full(64, -1, np.int64)  # by page; −1: none
        self._free: list[int] = []
        self.count = 0

    def of(self, pages: Ints) -> Ints:
        """Return the rows of first pages; −1 for those that are not packed."""
        self._row = _reaching(self._row, pages)
        return self._row[pages]

    def begin(self, pages: Ints) -> None:
        """Free the rows of pages that are written anew."""
        if not len(pages):
            return
        rows = self.of(pages)
        self._free += rows[rows >= 0].tolist()
        self._row[pages] = -1

    def take(self, pages: Ints) -> Ints:
        """Return rows for first pages that get full."""
        for page in pages[self.of(pages) < 0]:
            if not self._free:
                self._free.append(self.count)
                self.count += 1
            self._row[page] = self._free.pop()
        return self._row[pages]


def _reaching(rows: Ints, pages: Ints) -> Ints:
    """Return an array by page that reaches all these pages, with −1 for new ones."""
    last = int(pages.max(initial=0))
    more = max(last + 1, 2 * len(rows)) - len(rows) if last >= len(rows) else 0
    return np.concatenate([rows, np.full(more, -1)]) if more else rows


class Chunk(NamedTuple):
    """Queries first to last (exclusive) of a step, which end a sequence of `num_tokens` tokens in
    `pages` int32 [P].

    row: row of the page of the first query, if tokens before the chunk are there; else −1.
    sink: row of the sinks, if the first page is packed; else −1.
    """

    first: int
    last: int
    num_tokens: int
    pages: Tensor
    row: int
    sink: int

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.num_tokens - (self.last - self.first)

    def first_page(self, window: int | None, p: int) -> int:
        """Return the number of the first page, of p tokens, that a query sees."""
        return 0 if window is None else max(0, self.start - window + 1) // p


@dataclass(frozen=True)
class Singles:
    """Requests with one query each.

    tokens: token of each query, int64 [B]; None if the step has no other tokens. pages: int32
    [B, P] of full pages, −1 for none. packed: mask of packed tokens, bool [B, 1, P·p].
    rows: row of each request, int64 [B]. exact: mask of the row's tokens, bool [B, 1, p].
    sinks: row of each request's sinks, int64 [B]. first: mask of them, bool [B, 1, SINKS].
    reads_packed: True if any query reads a packed token.
    """

    tokens: Tensor | None
    pages: Tensor
    packed: Tensor
    rows: Tensor
    exact: Tensor
    sinks: Tensor
    first: Tensor
    reads_packed: bool

    def seeing(self, seen: Seen) -> Singles:
        """Return the reads of a layer whose queries see other tokens."""
        pages = torch.where(seen.pages, self.pages, -1)
        return replace(self, pages=pages, packed=seen.packed, exact=seen.exact, first=seen.first)


@dataclass(frozen=True)
class Full:
    """Pages that get full in a step: first those whose tokens are all of the step, then others.

    tokens: the step's tokens of the first ones, int64 [F1·p]. rows: rows of the others, int64 [F2].
    blocks: blocks to write, int64 [F·p/32]. positions: of the tokens, int64 [F·p].
    sinks: index of the pages that are first ones, int64 [m], and their rows of sinks, int64 [m].
    """

    tokens: Tensor
    rows: Tensor
    blocks: Tensor
    positions: Tensor
    sinks: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EngineStep:
    """Requests of one step, for all layers.

    copied: tokens copied to rows in their order, int64 [n], and their places: row · p + position in the row.
    rows, sinks: numbers of rows, of pages and of sinks. spans: what block tables share.
    shared: room for what layers compute alike.
    """

    singles: Singles | None
    chunks: tuple[Chunk, ...]
    full: Full | None
    copied: tuple[Tensor, Tensor]
    rows: int
    sinks: int
    spans: Spans
    shared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def singles_within(self, window: int | None) -> Singles | None:
        """Return the reads of requests with one query in a layer with this sliding window, or none."""
        if window is None or self.singles is None:
            return self.singles
        key = "window", window
        if key not in self.shared:
            seen = self.spans.seen_by_singles(window, self.singles.pages.device)
            self.shared[key] = self.singles.seeing(seen)
        found: Singles = self.shared[key]
        return found

    def to(self, device: torch.device) -> EngineStep:
        """Return the step with its tensors on the device. Chunks stay on the CPU, where they are
        split by pages."""
        if device.type == "cpu":
            return self
        singles, full = (None if part is None else _moved(part, device) for part in (self.singles, self.full))
        token, place = (x.to(device) for x in self.copied)
        return EngineStep(singles, self.chunks, full, (token, place), self.rows, self.sinks, self.spans)

    @staticmethod
    def plan(starts: Any, seen: Any, pages: Tensor, p: int, rows: Rows) -> EngineStep:
        """Plan a step. Request i has queries starts[i] to starts[i + 1], which are the last of its
        seen[i] tokens.

        starts: n + 1 numbers. seen: n numbers.
        pages: int32, on the CPU; pages[i] lists the pages of request i, of p tokens each. Trailing
        entries may be unused.
        rows: rows of exact copies, which are updated.
        """
        rows.step += 1
        of = Spans.of(starts, seen, p)
        if len(of.requests) < len(pages):
            pages = pages[torch.from_numpy(of.requests)]
        table = pages.numpy()

        old_page = table[of.old, of.old_page].astype(np.int64)
        old_row = rows.find(old_page, of.old_held)
        new_page = table[of.new, of.new_page].astype(np.int64)
        own_page = table[of.owner, of.own_page].astype(np.int64)
        rows.release(own_page)
        rows.sinks.begin(np.concatenate([own_page, new_page]))
        new_row = rows.take(new_page)
        rows.hold(old_row, of.old_holds)
        rows.hold(new_row, of.new_holds)
        place = np.concatenate([old_row, new_row])[of.copied_row] * p + of.copied_place

        full, completed = None, of.completed
        if len(of.full_page):
            page = np.concatenate([own_page, old_page[completed]])
            blocks = page[:, None] * (p // BLOCK_TOKENS) + np.arange(p // BLOCK_TOKENS)
            sinks = tensor(of.starting), tensor(rows.sinks.take(page[of.starting]))
            full = Full(of.full_tokens, tensor(old_row[completed]), tensor(blocks), of.full_positions, sinks)
            if rows.keeps_full:  # but not of the page before: fewer tokens are taken back than a page has
                later = completed[of.old_page[completed] > 0]
                rows.release(table[of.old[later], of.old_page[later] - 1].astype(np.int64))
                after = of.seen[of.old[completed]] >= (of.old_page[completed] + 2) * p
                rows.release(old_page[completed[after]])
            else:
                rows.release(old_page[completed])

        row = np.full(len(of.requests), -1)
        row[of.old] = old_row
        sink = rows.sinks.of(table[:, 0].astype(np.int64))
        chunks = tuple(
            Chunk(
                int(of.first[i]), int(of.first[i] + of.queries[i]), int(of.seen[i]), pages[i], int(row[i]), int(sink[i])
            )
            for i in of.several
        )
        row[of.new] = new_row
        singles = None
        if len(of.single):
            seen = of.seen_by_singles(None, pages.device)
            singles = Singles(
                of.single_tokens,
                torch.from_numpy(np.where(of.reads, table[of.single, : of.reads.shape[1]], -1).astype(np.int32)),
                seen.packed,
                torch.from_numpy(row[of.single]),
                seen.exact,
                torch.from_numpy(np.maximum(sink[of.single], 0)),
                seen.first,
                bool(of.reads.any()),
            )
        return EngineStep(singles, chunks, full, (of.copied, tensor(place)), len(rows), rows.sinks.count, of)


def _moved(part: Any, device: torch.device) -> Any:
    """Return a dataclass with its tensors on the device."""
    moved = {f.name: getattr(part, f.name) for f in fields(part)}
    return type(part)(**{name: _to(x, device) for name, x in moved.items()})


def _to(x: Any, device: torch.device) -> Any:
    if isinstance(x, tuple):
        return tuple(_to(one, device) for one in x)
    return x.to(device) if isinstance(x, Tensor) else x
