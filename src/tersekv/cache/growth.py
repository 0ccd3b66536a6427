"""Simulate the sizes of a layer's tail and pages, call by call, without tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tersekv.cache.pages import ENTRY_MARGIN, ROLLBACK_TOKENS, SPARE_ENTRIES, PageSizes, out_of_window
from tersekv.cache.tail import capacity_after_drop, tail_capacity
from tersekv.layouts.base import PlaneSpec
from tersekv.policies.base import TokenPolicy


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

    usual: maximum number of tokens, except after a rollback.
    """

    usual: int
    tokens: int = 0
    capacity: int = 0

    def change(self, leave: int, enter: int) -> None:
        """Remove the oldest `leave` tokens and add `enter`. Capacity beyond `usual` is freed."""
        self.tokens -= leave
        if leave:
            self.capacity = capacity_after_drop(self.tokens, self.capacity, self.usual)
        self.tokens += enter
        if self.tokens > self.capacity:
            self.capacity = tail_capacity(self.tokens, self.usual)

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
    """Sizes of the parts of a `LayerStore`."""

    sinks: int
    tail: TailSize
    pages: PagesSize

    @staticmethod
    def after(calls: Iterable[int], policy: TokenPolicy, window: int | None, flush: int) -> LayerSize:
        """Return the sizes after these calls. flush: number of tokens that are packed together."""
        held = None if window is None else window + ROLLBACK_TOKENS
        layer = LayerSize(0, TailSize(policy.recent + flush), PagesSize(PageSizes(flush, held)))
        seen = dropped = 0
        for n in calls:
            seen += n
            sinks = min(policy.sink_tokens(window) - layer.sinks, n)
            layer.sinks += sinks
            old, enter = layer.tail.tokens, n - sinks
            packed = policy.to_pack(old + enter, flush, seen, window)
            if packed and window is not None:
                outside = out_of_window(seen - dropped, window, flush)
                forget = min(outside, layer.pages.tokens)
                skip = min(outside - forget, packed)
                layer.pages.drop_front(forget)
                dropped += forget + skip
                layer.pages.append(packed - skip)
            else:
                layer.pages.append(packed)
            leave = min(packed, old)
            layer.tail.change(leave, enter - (packed - leave))
        return layer
