"""Simulate the sizes of a layer's tail and pages, call by call, without tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tersekv.cache.pages import ENTRY_MARGIN, ROLLBACK_TOKENS, SPARE_ENTRIES, PageSizes
from tersekv.cache.placement import Placement
from tersekv.cache.tail import capacity_after_drop, tail_capacity
from tersekv.layouts.base import PlaneSpec
from tersekv.policies.base import TokenPolicy
from tersekv.policies.mixed import KEPT, Mixed


class Calls(NamedTuple):
    """Calls that feed tokens: a prompt, then single tokens.

    prompt: tokens of the prompt.
    piece: tokens per call of the prompt, 0 for one call.
    generated: tokens fed one by one after it.
    """

    prompt: int
    piece: int = 0
    generated: int = 0

    def sizes(self) -> Iterator[int]:
        """Return the number of tokens of each call."""
        step = self.piece or self.prompt
        for first in range(0, self.prompt, max(1, step)):
            yield min(step, self.prompt - first)
        yield from (1 for _ in range(self.generated))


@dataclass
class TailSize:
    """Tokens of a `TailBuffer`, in use and allocated.

    usual, grows: see `TailBuffer`.
    """

    usual: int
    tokens: int = 0
    capacity: int = 0
    grows: bool = False

    def change(self, leave: int, enter: int) -> None:
        """Remove the oldest `leave` tokens and add `enter`. Capacity beyond `usual` is freed."""
        self.tokens -= leave
        if leave:
            self.capacity = capacity_after_drop(self.tokens, self.capacity, self.usual)
        self.tokens += enter
        if self.tokens > self.capacity:
            self.capacity = tail_capacity(self.tokens, self.usual, self.grows)

    @property
    def slack(self) -> int:
        """Number of tokens allocated and not in use."""
        return self.capacity - self.tokens


class PageSize(NamedTuple):
    """Tokens of one page.

    forgotten: removed at its front.
    written: written in all, removed ones included.
    capacity: allocated.
    first: written when it was opened.
    """

    forgotten: int
    written: int
    capacity: int
    first: int


@dataclass
class PagesSize:
    """Sizes of a `BlockBuffer`'s pages, for sides whose pages end at the same tokens."""

    sizes: PageSizes
    pages: list[PageSize] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens in use."""
        return sum(page.written - page.forgotten for page in self.pages)

    def append(self, n: int) -> None:
        """Append n tokens, whole blocks."""
        while n:
            if not self.pages or self.pages[-1].written == self.pages[-1].capacity:
                size = self.sizes.next(n, self.tokens)
                self.pages.append(PageSize(0, 0, size, min(n, size)))
            last = self.pages[-1]
            taken = min(n, last.capacity - last.written)
            self.pages[-1] = last._replace(written=last.written + taken)
            n -= taken

    def drop_front(self, n: int) -> None:
        """Remove the n oldest tokens, and pages that become empty."""
        while n:
            page = self.pages[0]
            taken = min(n, page.written - page.forgotten)
            self.pages[0] = page = page._replace(forgotten=page.forgotten + taken)
            n -= taken
            if page.forgotten == page.written:
                del self.pages[0]

    def bytes(self, spec: PlaneSpec, block_tokens: int, heads: int, rows: int) -> tuple[float, float]:
        """Return the bytes of one packed tensor in use and of its slack, per head.

        rows: number of heads of all sequences, which share a page's spare entries.
        """
        per_token = spec.block_bytes(heads) / block_tokens
        used = self.tokens * per_token
        slack = 0.0
        for page in self.pages:
            held = float(page.capacity)
            if spec.ragged is not None and page.capacity > page.first:
                slack += SPARE_ENTRIES * spec.dtype.itemsize / rows
                held += (page.capacity - page.first) * ENTRY_MARGIN
            slack += (held - page.written + page.forgotten) * per_token
        return used, slack


@dataclass
class LayerSize:
    """Sizes of the parts of a `LayerStore`.

    rest: packed tokens of the lower rate, in a layer with two rates.
    queries: queries that are kept there.
    """

    sinks: int
    tail: TailSize
    pages: PagesSize
    rest: PagesSize
    queries: int = 0

    @staticmethod
    def after(
        calls: Iterable[int], policy: TokenPolicy, window: int | None, flush: int, mixes: bool = False
    ) -> LayerSize:
        """Return the sizes after these calls.

        flush: number of tokens that are packed together. mixes: the layer has two rates.
        """
        held = None if window is None else window + ROLLBACK_TOKENS
        tail = TailSize(policy.recent + policy.waiting_tokens(flush, window), grows=not policy.packs_generated)
        layer = LayerSize(0, tail, PagesSize(PageSizes(flush, held)), PagesSize(PageSizes(flush, held)))
        placement = Placement(policy, window, flush)
        for n in calls:
            move, old = placement.move(n), tail.tokens
            placement.add(n, move)
            layer.sinks = placement.sinks
            layer.pages.drop_front(move.forget)
            high = move.packed
            if mixes and isinstance(policy, Mixed):
                high = policy.chosen(move.leave, flush)
                layer.rest.append(move.leave - high)
                layer.queries = min(KEPT, layer.queries + len(policy.kept_queries(placement.tokens - n, n)))
            layer.pages.append(high)
            from_tail = min(move.leave, old)
            tail.change(from_tail, n - move.sinks - (move.leave - from_tail))
        return layer
