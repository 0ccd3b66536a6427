"""Pages of packed blocks and their sizes.

A page is allocated once and never grows, so appending does not move packed blocks. A prompt gets a
page of its own size. While decoding, a new page has room for a sixteenth of the packed tokens. On
average it is half full, so slack stays near 3 %, and attention reads few pages (`docs/design.md`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.schema import anything, of_spec, record, require, whole
from tersekv.cache.state import State
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec
from tersekv.tensors import TensorSpec

GROWTH = 16
MIN_PAGE_TOKENS = 128
SPARE_ENTRIES = 32
ENTRY_MARGIN = 1 / 8
"""Spare room of a page for ragged entries that are denser than those it was opened with."""

ROLLBACK_TOKENS = 128
"""Tokens kept beyond a sliding window, so that assisted decoding can roll back rejected tokens."""


def out_of_window(held: int, window: int, flush: int) -> int:
    """Return how many of the oldest of `held` tokens no query can see in a sliding window.

    The result allows for a rollback and is a multiple of `flush`.
    """
    return max(0, (held - window - ROLLBACK_TOKENS) // flush * flush)


def evicted_by(window: int | None, seen: int, evicted: int, packed: int, leaving: int, flush: int) -> tuple[int, int]:
    """Return how many packed tokens, and how many next ones, no query after `seen` tokens can see.

    evicted: tokens evicted before. packed: packed tokens. leaving: exact tokens that leave the tail.
    """
    if window is None:
        return 0, 0
    tokens = out_of_window(seen - evicted, window, flush)
    old = min(packed, tokens)
    return old, min(tokens - old, leaving)


@dataclass(frozen=True)
class PageSizes:
    """Sizes of a layer's pages in tokens.

    unit: divisor of all sizes, so that pages of keys and of values end at the same tokens.
    held: maximum number of tokens held at a time by a sliding window, or None. Pages of a sliding
        window are small, so that they can be freed one by one.
    """

    unit: int = BLOCK_TOKENS
    held: int | None = None

    def next(self, tokens: int, used: int) -> int:
        """Return the size of a new page for `tokens` that follow `used` others.

        In a sliding window the page can be too small for all of them.
        """
        most = math.inf if self.held is None else max(MIN_PAGE_TOKENS, self.held // GROWTH)
        size = min(max(tokens, MIN_PAGE_TOKENS, used // GROWTH), most)
        return math.ceil(size / self.unit) * self.unit

    def largest(self, tokens: int, used: int) -> int:
        """Return the size of the largest page that can hold `tokens` after `used` others.

        For a sliding window it is the largest size of all, because first tokens may have been
        evicted.
        """
        return self.next(tokens if self.held is None else max(tokens, self.held), used)

    def slack(self, tokens: int) -> int:
        """Return the tokens allocated beyond `tokens` that are appended in one call."""
        size = 0
        while size < tokens:
            size += self.next(tokens - size, size)
        return size - tokens


def blank(layout: Layout, B: int, H: int, blocks: int, device: torch.device | str) -> PackedTensors:
    """Return the tensors of so many blocks of B rows and H heads, without content.

    Ragged ones have the number of entries that estimates assume.
    """
    planes = {}
    for name, spec in layout.planes.items():
        shape: tuple[int, ...] = (B, 1 if spec.shared else H, blocks, *spec.shape)
        if spec.ragged is not None:
            shape = (round(blocks * B * H * spec.block_bytes(H) / spec.dtype.itemsize),)
        planes[name] = torch.empty(shape, dtype=spec.dtype, device=device)
    return planes


class Page:
    """Blocks in one allocation.

    Tensors are [B, H, capacity, *shape], ragged ones [capacity in entries]. Blocks `start` to
    `stop` are in use. `ends` holds the end of each block's ragged entries.
    """

    def __init__(self, layout: Layout, planes: PackedTensors, ends: list[int]) -> None:
        self.layout, self.planes = layout, planes
        self.start, self.stop, self.ends = 0, len(ends), ends

    @classmethod
    def of(cls, layout: Layout, planes: PackedTensors) -> Page:
        """Return a full page that uses these tensors."""
        blocks, entries = _extent(layout, planes)
        if layout.starts is None:
            return cls(layout, planes, [0] * blocks)
        starts = planes[layout.starts]
        begins = [entries * i // blocks for i in range(blocks)] if starts.is_meta else starts[0, 0].tolist()
        return cls(layout, planes, [*begins[1:], entries][:blocks])

    @classmethod
    def empty(cls, layout: Layout, like: PackedTensors, blocks: int, entries: int) -> Page:
        """Return an empty page for so many blocks and entries.

        like: tensors with the batch rows, heads and device.
        """
        planes = {}
        for name, spec in layout.planes.items():
            shape = (entries,) if spec.ragged is not None else (*like[name].shape[:2], blocks, *spec.shape)
            planes[name] = like[name].new_empty(shape)
        return cls(layout, planes, [])

    @classmethod
    def restored(cls, layout: Layout, like: PackedTensors, state: State, most_blocks: int) -> Page:
        """Return the page with this state, which `check_page` has accepted.

        Its capacity is that of the saved page, limited to the larger of `most_blocks` and the
        blocks in use. Tensors without spare capacity are used without a copy.
        """
        blocks = min(state["blocks"], max(state["stop"], most_blocks))
        elements = _most_entries(layout, like) * blocks
        page = cls.empty(layout, like, blocks, min(state["entries"], max(state["end"], elements)))
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

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a pickle, with copies of the tensors, see `Stateful.state`."""
        return vars(self) | {"planes": {name: plane.clone() for name, plane in self.planes.items()}}

    def live_state(self) -> State:
        """Return the blocks in use, as views, and the capacity."""
        blocks, entries = _extent(self.layout, self.planes)
        figures = {"blocks": blocks, "entries": entries, "start": self.start, "stop": self.stop}
        return {**figures, "end": self._end(self.stop), "planes": self.cut(0, len(self))}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        """Number of tokens in use."""
        return len(self) * self.layout.block_tokens

    @property
    def capacity(self) -> int:
        """Number of blocks allocated."""
        return _extent(self.layout, self.planes)[0]

    @property
    def entries(self) -> list[int]:
        """Number of ragged entries of each block in use."""
        if self.layout.starts is None:
            return [0] * len(self)
        return [b - a for a, b in itertools.pairwise([self._end(self.start), *self.ends[self.start : self.stop]])]

    def _end(self, block: int) -> int:
        """Return the number of ragged entries before a block."""
        return self.ends[block - 1] if block else 0

    def room(self, entries: list[int]) -> int:
        """Return how many of the coming blocks fit. entries: ragged entries of each block."""
        blocks, pool = _extent(self.layout, self.planes)
        ends = list(itertools.accumulate(entries[: blocks - self.stop], initial=self._end(self.stop)))
        return bisect_right(ends, pool) - 1

    def take(self, other: Page, first: int, n: int) -> None:
        """Append n blocks of another page from block `first` on, counted from its oldest in use."""
        begin, used = other._end(other.start + first), self._end(self.stop)
        for name, plane in other.cut(first, first + n).items():
            if plane.is_meta:  # shapes only
                continue
            if self.layout.planes[name].ragged is not None:
                self.planes[name][used : used + len(plane)] = plane
            else:
                shifted = plane + (used - begin) if name == self.layout.starts else plane
                self.planes[name][:, :, self.stop : self.stop + n] = shifted
        last = other.start + first + n
        self.ends += [end + used - begin for end in other.ends[last - n : last]]
        self.stop += n

    def cut(self, first: int, last: int) -> PackedTensors:
        """Return views of blocks `first` to `last`, counted from the oldest in use."""
        first, last = self.start + first, self.start + last
        entries = slice(self._end(first), self._end(last))
        return {
            name: plane[:, :, first:last] if self.layout.planes[name].ragged is None else plane[entries]
            for name, plane in self.planes.items()
        }

    def resize(self, start: int, stop: int) -> None:
        """Change the range of blocks in use. All of them must have been written."""
        self.start, self.stop = start, stop
        del self.ends[stop:]


def check_page(layout: Layout, like: PackedTensors, unit: int, state: State, place: str) -> None:
    """Raise UserError unless a state is that of a page with tensors like those of `like`.

    unit: divisor of the block numbers.
    """
    figures = {name: whole() for name in ("blocks", "entries", "start", "stop", "end")}
    record({**figures, "planes": anything})(state, place)
    blocks, start, stop, entries, end = (state[name] for name in ("blocks", "start", "stop", "entries", "end"))
    require(start < stop <= blocks, place, f"uses blocks {start} to {stop} of {blocks}")
    require(
        start % unit == 0 == stop % unit, place, f"uses blocks {start} to {stop}, which are not multiples of {unit}"
    )
    planes = {
        name: anything if spec.ragged is not None else of_spec(_spec(spec, like[name], stop - start))
        for name, spec in layout.planes.items()
    }
    record(planes)(state["planes"], f"{place}.planes")
    for name, spec in layout.planes.items():
        if spec.ragged is None:
            _check_channels(spec, state["planes"][name], f"{place}.planes.{name}")
    if layout.starts is None:
        require(entries == 0 == end, place, f"has {entries} entries, and must have none")
        return
    starts = state["planes"][layout.starts].permute(2, 0, 1).flatten().long()  # in the order of the entries
    first, last = int(starts[0]), int(starts[-1])
    rises = bool((starts[1:] >= starts[:-1]).all()) and first >= 0 and last <= end <= entries
    require(rises and (start > 0 or first == 0), f"{place}.planes.{layout.starts}", "are not the starts of entries")
    for name, spec in layout.planes.items():
        if spec.ragged is not None:
            own = f"{place}.planes.{name}"
            of_spec(TensorSpec(spec.dtype, (end - first,)))(state["planes"][name], own)
            if spec.channels is not None:
                _check_channels(spec, state["planes"][name], own)
                _check_order(state["planes"][name], starts, end, own)


def _spec(spec: PlaneSpec, like: Tensor, blocks: int) -> TensorSpec:
    return TensorSpec(spec.dtype, (*like.shape[:2], blocks, *spec.shape))


def _check_channels(spec: PlaneSpec, plane: Tensor, place: str) -> None:
    """Check channel indices in a tensor, because kernels address memory with them."""
    if spec.channels is None or not plane.numel():
        return
    named = plane.long() if spec.channel_bits is None else plane.long() & ((1 << spec.channel_bits) - 1)
    least, most = (int(bound) for bound in named.aminmax())
    require(least >= 0 and most < spec.channels, place, f"names channels {least} to {most} of {spec.channels}")


def _check_order(places: Tensor, starts: Tensor, end: int, place: str) -> None:
    """Check that the entries of a block ascend as unsigned 16-bit numbers."""
    counts = torch.diff(starts, append=starts.new_tensor([end]))
    block = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), counts)
    order = (block << 16) + (places.long() & 0xFFFF)
    require(bool((order[1:] > order[:-1]).all()), place, "are not in the order of tokens and channels")


def _most_entries(layout: Layout, like: PackedTensors) -> int:
    """Return the number of entries of a block if every element is an entry."""
    if layout.starts is None:
        return 0
    B, H = like[layout.starts].shape[:2]
    channels = max(spec.channels or 0 for spec in layout.planes.values())
    return B * H * layout.block_tokens * channels


def _extent(layout: Layout, planes: PackedTensors) -> tuple[int, int]:
    """Return the capacity of packed tensors in blocks and in ragged entries."""
    blocks = next(planes[name].shape[2] for name, spec in layout.planes.items() if spec.ragged is None)
    entries = next((len(planes[name]) for name, spec in layout.planes.items() if spec.ragged is not None), 0)
    return blocks, entries
