"""Packed blocks of one side of a layer, stored in pages. Appending never moves existing blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import ENTRY_MARGIN, SPARE_ENTRIES, Page, PageSizes, blank, check_page
from tersekv.cache.schema import Check, each
from tersekv.cache.state import State, Stateful
from tersekv.layouts.base import Layout, PackedTensors


class BlockBuffer(Stateful):
    """Blocks in order of arrival. Only the last page accepts new blocks.

    sizes: sizes of new pages.
    """

    def __init__(self, layout: Layout, B: int, H: int, device: torch.device, sizes: PageSizes | None = None) -> None:
        self.layout, self.sizes = layout, sizes or PageSizes(layout.block_tokens)
        self.pages: list[Page] = []
        self._nothing = blank(layout, B, H, 0, device)

    def __len__(self) -> int:
        return sum(len(page) for page in self.pages)

    @property
    def tokens(self) -> int:
        """Number of packed tokens in use."""
        return len(self) * self.layout.block_tokens

    @property
    def capacity(self) -> int:
        """Number of blocks allocated."""
        return sum(page.capacity for page in self.pages)

    @property
    def ends(self) -> list[int]:
        """End of each page, in tokens counted from the oldest in use."""
        return [n * self.layout.block_tokens for n in itertools.accumulate(map(len, self.pages))]

    def append(self, *parts: PackedTensors) -> None:
        """Append the blocks [B, H, n, ...] of each part."""
        sources = [Page.of(self.layout, part) for part in parts]
        unit = self.sizes.unit // self.layout.block_tokens
        assert all(len(source) % unit == 0 for source in sources)
        coming = [entries for source in sources for entries in source.entries]
        for source in sources:
            first = 0
            while first < len(source):
                n = self._room(coming[: len(source) - first])
                if n == 0:
                    self._open(coming)
                    continue
                self.pages[-1].take(source, first, n)
                first += n
                del coming[:n]

    def _room(self, coming: list[int]) -> int:
        """Return how many of the coming blocks fit into the last page.

        coming: ragged entries of each block.
        """
        unit = self.sizes.unit // self.layout.block_tokens
        return self.pages[-1].room(coming) // unit * unit if self.pages else 0

    def _open(self, coming: list[int]) -> None:
        """Open a new page.

        A page larger than the coming blocks gets spare ragged entries, with a margin. Their density
        is that of the coming blocks, or that of the page before if higher, but at most twice it.
        """
        t, n = self.layout.block_tokens, len(coming)
        blocks = self.sizes.next(n * t, self.tokens) // t
        entries = sum(coming[:blocks])
        if blocks > n and self.layout.starts is not None:
            before = self.pages[-1].entries if self.pages else coming
            density = sum(coming) / n
            density = max(density, min(2 * density, sum(before) / len(before)))
            entries += math.ceil((blocks - n) * density * (1 + ENTRY_MARGIN)) + SPARE_ENTRIES
        self.pages.append(Page.empty(self.layout, self._nothing, blocks, entries))

    def drop_front(self, blocks: int) -> None:
        """Remove the oldest blocks. A page is freed when all its blocks are removed."""
        while blocks:
            page = self.pages[0]
            n = min(blocks, len(page))
            page.resize(page.start + n, page.stop)
            blocks -= n
            if not len(page):
                del self.pages[0]

    def drop_back(self, blocks: int) -> None:
        """Remove the latest blocks, and pages that become empty."""
        while blocks:
            page = self.pages[-1]
            n = min(blocks, len(page))
            page.resize(page.start, page.stop - n)
            blocks -= n
            if not len(page):
                del self.pages[-1]

    def hold(self, planes: PackedTensors) -> None:
        """Replace the content by these blocks, without a copy if they fill one page exactly."""
        blocks = Page.of(self.layout, planes)
        tokens = len(blocks) * self.layout.block_tokens
        self.pages = []
        if tokens == self.sizes.next(tokens, 0):
            self.pages = [blocks]
        else:
            self.append(planes)

    def replace(self, first: int, planes: PackedTensors) -> None:
        """Replace the pages from number `first` on by one that uses these tensors; by none if they hold nothing."""
        page = Page.of(self.layout, planes)
        self.pages = [*self.pages[:first], *([page] if len(page) else [])]

    def keep(self, index: Tensor) -> None:
        """Keep blocks `index` (int64 [B, H, n], from the oldest in use) of each head, in that
        order.
        """
        self.hold(self.layout.select_blocks(self.planes(), index))

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self._nothing = self.layout.select_rows(self._nothing, rows)
        if self.pages:
            self.hold(self.layout.select_rows(self.planes(), rows))

    def mark(self) -> Any:
        """Return a mark for `undo`, valid as long as blocks are only appended or kept after it."""
        return [(page, page.start, page.stop) for page in self.pages]

    def undo(self, mark: Any) -> None:
        """Undo everything since `mark()`."""
        self.pages = [page for page, _, _ in mark]
        for page, start, stop in mark:
            page.resize(start, stop)

    def live_state(self) -> State:
        return {"pages": [page.live_state() for page in self.pages]}

    def schema(self) -> dict[str, Check]:
        unit = self.sizes.unit // self.layout.block_tokens
        return {"pages": each(lambda page, place: check_page(self.layout, self._nothing, unit, page, place))}

    def _hold(self, state: State, place: str) -> None:
        """Restore the pages. Full pages use the state's tensors without a copy."""
        self.pages = []
        for page in state["pages"]:
            most = self.sizes.largest(page["stop"] * self.layout.block_tokens, self.tokens) // self.layout.block_tokens
            self.pages.append(Page.restored(self.layout, self._nothing, page, most))

    def planes(self, first: int = 0, last: int | None = None) -> PackedTensors:
        """Return blocks `first` to `last`, counted from the oldest in use.

        The result is a view if they are in one page, otherwise a copy.
        """
        parts, before = [], 0
        last = len(self) if last is None else last
        for page in self.pages:
            begin, end = max(0, first - before), min(len(page), last - before)
            if begin < end:
                parts.append(page.cut(begin, end))
            before += len(page)
        return self.layout.join(parts) if parts else self._nothing

    def to(self, device: torch.device | str) -> None:
        """Move all packed tensors to a device."""
        for planes in (self._nothing, *(page.planes for page in self.pages)):
            planes.update({name: plane.to(device) for name, plane in planes.items()})

    def count(self, footprint: Footprint) -> None:
        """Add the allocated bytes to `footprint`; unused ones count as slack."""
        for page in self.pages:
            used = page.cut(0, len(page))
            for name, plane in page.planes.items():
                in_use = used[name].numel() * plane.element_size()
                footprint.parts[self.layout.planes[name].kind] += in_use
                footprint.parts["slack"] += plane.numel() * plane.element_size() - in_use
