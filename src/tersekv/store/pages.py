"""Pages of packed blocks: how large they are, and one of them.

A page is allocated once and never grows, so nothing that is packed moves when more is. A prompt makes a page of its own
size. While decoding, a page has room for a sixteenth of what is there: on average it is half full, so that slack stays
near 3 %, and the pages that attention reads one after the other stay few (`docs/design.md`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

from tersekv.formats.base import BLOCK_TOKENS, Layout, Planes
from tersekv.store.state import State

GROWTH = 16
MIN_PAGE_TOKENS = 128
SPARE_ENTRIES = 32
ENTRY_MARGIN = 1 / 8
"""Room of a page for ragged entries that are denser than those it was opened with."""


@dataclass(frozen=True)
class PageSizes:
    """Tokens that pages of a layer hold: multiples of `unit`, so that pages of keys and of values end at the same
    tokens. held: most tokens that are ever there at a time (a sliding window), or None; pages are then small enough to
    be given back one by one."""

    unit: int = BLOCK_TOKENS
    held: int | None = None

    def next(self, tokens: int, used: int) -> int:
        """Tokens of a new page, for `tokens` that come behind `used` others; fewer than come, where many would make it
        too large."""
        most = math.inf if self.held is None else max(MIN_PAGE_TOKENS, self.held // GROWTH)
        size = min(max(tokens, MIN_PAGE_TOKENS, used // GROWTH), most)
        return math.ceil(size / self.unit) * self.unit

    def slack(self, tokens: int) -> int:
        """Tokens allocated beyond `tokens` that come at once."""
        size = 0
        while size < tokens:
            size += self.next(tokens - size, size)
        return size - tokens


class Page:
    """Blocks in one allocation: planes [B, H, capacity, *shape], ragged ones [capacity in entries]. Blocks `start` to
    `stop` are in use; `ends` holds where the entries of each block end."""

    def __init__(self, layout: Layout, planes: Planes, ends: list[int]) -> None:
        self.layout, self.planes = layout, planes
        self.start, self.stop, self.ends = 0, len(ends), ends

    @classmethod
    def of(cls, layout: Layout, planes: Planes) -> Page:
        """The page that these planes are, full."""
        blocks, entries = _extent(layout, planes)
        if layout.starts is None:
            return cls(layout, planes, [0] * blocks)
        begins = planes[layout.starts][0, 0].tolist()
        return cls(layout, planes, [*begins[1:], entries][:blocks])

    @classmethod
    def empty(cls, layout: Layout, like: Planes, blocks: int, entries: int) -> Page:
        """Room for so many blocks and entries, in tensors like those of `like`."""
        planes = {}
        for name, spec in layout.planes.items():
            shape = (entries,) if spec.ragged is not None else (*like[name].shape[:2], blocks, *spec.shape)
            planes[name] = like[name].new_empty(shape)
        return cls(layout, planes, [])

    @classmethod
    def restored(cls, layout: Layout, like: Planes, state: State) -> Page:
        """The page that had this state, with as much room. Planes without room to spare are the state's tensors."""
        page = cls.empty(layout, like, state["blocks"], state["entries"])
        page.start, page.stop = state["start"], state["stop"]
        begins = state["planes"][layout.starts][0, 0].tolist() if layout.starts is not None else [0] * len(page)
        page.ends = [*begins[:1] * page.start, *begins[1:], state["end"]]
        for name, plane in page.cut(0, len(page)).items():
            held = state["planes"][name]
            if plane.shape == page.planes[name].shape:
                page.planes[name] = held
            else:
                plane.copy_(held)
        return page

    def state(self) -> State:
        """Blocks in use, and what was allocated."""
        blocks, entries = _extent(self.layout, self.planes)
        figures = {"blocks": blocks, "entries": entries, "start": self.start, "stop": self.stop}
        return {**figures, "end": self._end(self.stop), "planes": self.cut(0, len(self))}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def capacity(self) -> int:
        """Blocks allocated."""
        return _extent(self.layout, self.planes)[0]

    @property
    def entries(self) -> list[int]:
        """Ragged entries of each block in use."""
        return [b - a for a, b in itertools.pairwise([self._end(self.start), *self.ends[self.start : self.stop]])]

    def _end(self, block: int) -> int:
        """Entries in front of a block."""
        return self.ends[block - 1] if block else 0

    def room(self, entries: list[int]) -> int:
        """How many of coming blocks with so many entries fit."""
        blocks, pool = _extent(self.layout, self.planes)
        ends = list(itertools.accumulate(entries[: blocks - self.stop], initial=self._end(self.stop)))
        return bisect_right(ends, pool) - 1

    def take(self, other: Page, first: int, n: int) -> None:
        """Add n blocks of another page, counted from its oldest in use."""
        begin, used = other._end(other.start + first), self._end(self.stop)
        for name, plane in other.cut(first, first + n).items():
            if self.layout.planes[name].ragged is not None:
                self.planes[name][used : used + len(plane)] = plane
            else:
                shifted = plane + (used - begin) if name == self.layout.starts else plane
                self.planes[name][:, :, self.stop : self.stop + n] = shifted
        last = other.start + first + n
        self.ends += [end + used - begin for end in other.ends[last - n : last]]
        self.stop += n

    def cut(self, first: int, last: int) -> Planes:
        """Views of blocks `first` to `last`, counted from the oldest in use."""
        first, last = self.start + first, self.start + last
        entries = slice(self._end(first), self._end(last))
        return {
            name: plane[:, :, first:last] if self.layout.planes[name].ragged is None else plane[entries]
            for name, plane in self.planes.items()
        }

    def resize(self, start: int, stop: int) -> None:
        """Other blocks are in use, none that was not written."""
        self.start, self.stop = start, stop
        del self.ends[stop:]


def _extent(layout: Layout, planes: Planes) -> tuple[int, int]:
    """Blocks and entries that planes have room for."""
    blocks = next(planes[name].shape[2] for name, spec in layout.planes.items() if spec.ragged is None)
    entries = next((len(planes[name]) for name, spec in layout.planes.items() if spec.ragged is not None), 0)
    return blocks, entries
