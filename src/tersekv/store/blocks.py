"""Buffers that grow: packed blocks (append-only) and the exact tail.

Capacity grows by a thirty-second of what is there, at least two blocks, so that slack stays near 3 % and each byte is
moved about 32 times however long the sequence becomes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.formats.base import Layout, Planes
from tersekv.store.footprint import Footprint

GROWTH = 32
MIN_SPARE_BLOCKS = 2
MIN_SPARE_ENTRIES = 64


def spare_blocks(used: int) -> int:
    """Blocks allocated beyond `used` when a buffer grows."""
    return max(MIN_SPARE_BLOCKS, used // GROWTH)


class BlockBuffer:
    """Packed blocks of one side of a layer: planes [B, H, capacity, *shape], of which `start` to `stop` are in use.
    Ragged planes are [capacity in entries]; `_ends` holds where each block's entries end."""

    def __init__(self, layout: Layout, B: int, H: int, device: torch.device) -> None:
        self.layout = layout
        self.start = self.stop = 0
        self._planes: Planes = {}
        self._pools: Planes = {}
        for name, spec in layout.planes.items():
            if spec.ragged is None:
                shape = (B, 1 if spec.shared else H, 0, *spec.shape)
                self._planes[name] = torch.empty(shape, dtype=spec.dtype, device=device)
            else:
                self._pools[name] = torch.empty(0, dtype=spec.dtype, device=device)
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        """Packed tokens in use."""
        return len(self) * self.layout.block_tokens

    @property
    def capacity(self) -> int:
        """Blocks allocated."""
        return next(iter(self._planes.values())).shape[2]

    def _entries(self, block: int) -> int:
        """Ragged entries in front of `block` (counted with those that were dropped in front)."""
        return self._ends[block - 1] if block and self._pools else 0

    def append(self, planes: Planes) -> None:
        """Add blocks [B, H, n, ...] behind the last one."""
        n = blocks_of(self.layout, planes)
        self.reserve(n)
        used = self._entries(self.stop)
        for name, plane in self._planes.items():
            plane[:, :, self.stop : self.stop + n] = planes[name] + used if name == self.layout.starts else planes[name]
        if self._pools:
            self._append_entries(planes, used)
        self.stop += n

    def _append_entries(self, planes: Planes, used: int) -> None:
        assert self.layout.starts is not None
        more = len(planes[next(iter(self._pools))])
        for name, pool in self._pools.items():
            if used + more > len(pool):
                grown = pool.new_empty(used + more + max(MIN_SPARE_ENTRIES, (used + more) // GROWTH))
                grown[:used] = pool[:used]
                self._pools[name] = pool = grown
            pool[used : used + more] = planes[name]
        begins = planes[self.layout.starts][0, 0].tolist()
        self._ends[self.stop :] = [used + begin for begin in (*begins[1:], more)]

    def reserve(self, n: int) -> None:
        """Make room for n more blocks."""
        if self.stop + n > self.capacity:
            self._grow(n)

    def _grow(self, n: int) -> None:
        """Room for n more blocks and some spare; blocks that were dropped in front are given back."""
        used = len(self)
        capacity = used + n + spare_blocks(used + n)
        dropped, entries = self._entries(self.start), self._entries(self.stop)
        for name, plane in self._planes.items():
            grown = plane.new_empty((*plane.shape[:2], capacity, *plane.shape[3:]))
            kept = plane[:, :, self.start : self.stop]
            grown[:, :, :used] = kept - dropped if name == self.layout.starts else kept
            self._planes[name] = grown
        if dropped:
            self._pools = {name: pool[dropped:entries].clone() for name, pool in self._pools.items()}
        self._ends = [end - dropped for end in self._ends[self.start : self.stop]]
        self.start, self.stop = 0, used

    def drop_front(self, blocks: int) -> None:
        """Forget the oldest blocks; their memory is given back when half the buffer is unused."""
        self.start += blocks
        if self.start > max(MIN_SPARE_BLOCKS, self.capacity // 2):
            self._grow(0)

    def drop_back(self, blocks: int) -> None:
        """Forget the latest blocks."""
        self.stop -= blocks
        del self._ends[self.stop :]

    def keep(self, index: Tensor) -> None:
        """Keep blocks `index` (int64 [B, H, n], counted from the oldest in use) of each head, in that order."""
        chosen = self.layout.select_blocks(self.planes(), index)
        self._planes = {name: plane[:, :, :0] for name, plane in self._planes.items()}
        self._pools = {name: pool[:0] for name, pool in self._pools.items()}
        self.start, self.stop, self._ends = 0, 0, []
        self.append(chosen)

    def state(self) -> tuple[Any, ...]:
        """What `restore` goes back to, as long as blocks were only appended or kept since."""
        return self.start, self.stop, dict(self._planes), dict(self._pools), self._ends[: self.stop]

    def restore(self, state: tuple[Any, ...]) -> None:
        """Undo what was done since `state()`."""
        self.start, self.stop, self._planes, self._pools, self._ends = state

    def planes(self, first: int = 0, last: int | None = None) -> Planes:
        """Views of blocks `first` to `last` (counted from the oldest in use)."""
        start = self.start + first
        stop = self.stop if last is None else min(self.stop, self.start + last)
        views = {name: plane[:, :, start:stop] for name, plane in self._planes.items()}
        if self._pools:
            entries = slice(self._entries(start), self._entries(stop))
            views |= {name: pool[entries] for name, pool in self._pools.items()}
        return views

    def to(self, device: torch.device | str) -> None:
        """Move all planes."""
        self._planes = {name: plane.to(device) for name, plane in self._planes.items()}
        self._pools = {name: pool.to(device) for name, pool in self._pools.items()}

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        if not self._pools:
            self._planes = {name: plane.index_select(0, rows) for name, plane in self._planes.items()}
            return
        chosen = self.layout.select_rows(self.planes(), rows)
        B, H = len(rows), self._planes[self.layout.starts or ""].shape[1]
        fresh = BlockBuffer(self.layout, B, H, rows.device)
        if len(self):
            fresh.append(chosen)
        self.__dict__.update(fresh.__dict__)

    def count(self, footprint: Footprint) -> None:
        """Add the bytes allocated to `footprint`, unused blocks as slack."""
        for name, plane in self._planes.items():
            self._count(footprint, name, plane, len(self), self.capacity)
        for name, pool in self._pools.items():
            self._count(footprint, name, pool, self._entries(self.stop) - self._entries(self.start), len(pool))

    def _count(self, footprint: Footprint, name: str, plane: Tensor, used: int, capacity: int) -> None:
        allocated = plane.numel() * plane.element_size()
        in_use = allocated * used // capacity if capacity else 0
        footprint.parts[self.layout.planes[name].kind] += in_use
        footprint.parts["slack"] += allocated - in_use


def blocks_of(layout: Layout, planes: Planes) -> int:
    """Blocks that planes hold."""
    return next(planes[name].shape[2] for name, spec in layout.planes.items() if spec.ragged is None)


def tail_capacity(tokens: int, usual: int) -> int:
    """Tokens allocated for a tail of `tokens` that will usually grow to `usual`: doubling for short ones."""
    return max(tokens, min(usual, max(16, 2 * tokens)))


class TailBuffer:
    """Exact tokens [B, H, capacity, D], appended at the end and taken from the front; `usual`: most tokens it will hold
    but for a rollback."""

    def __init__(self, B: int, H: int, D: int, dtype: torch.dtype, device: torch.device, usual: int) -> None:
        self._data = torch.empty((B, H, 0, D), dtype=dtype, device=device)
        self.usual = usual
        self.tokens = 0

    @property
    def data(self) -> Tensor:
        """The tokens in use, a view."""
        return self._data[:, :, : self.tokens]

    def append(self, x: Tensor) -> None:
        """Add tokens [B, H, n, D]."""
        n = x.shape[2]
        if self.tokens + n > self._data.shape[2]:
            capacity = tail_capacity(self.tokens + n, self.usual)
            grown = self._data.new_empty((*self._data.shape[:2], capacity, self._data.shape[3]))
            grown[:, :, : self.tokens] = self.data
            self._data = grown
        self._data[:, :, self.tokens : self.tokens + n] = x
        self.tokens += n

    def drop_front(self, n: int) -> None:
        """Forget the n oldest tokens; the rest moves to the front."""
        if n == 0:
            return
        self._data[:, :, : self.tokens - n] = self.data[:, :, n:].clone()
        self.tokens -= n

    def drop_back(self, n: int) -> None:
        """Forget the n latest tokens."""
        self.tokens -= n

    def to(self, device: torch.device | str) -> None:
        """Move the buffer."""
        self._data = self._data.to(device)

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows."""
        self._data = self._data.index_select(0, rows)

    def count(self, footprint: Footprint) -> None:
        """Add the bytes allocated to `footprint`."""
        allocated = self._data.numel() * self._data.element_size()
        used = allocated * self.tokens // self._data.shape[2] if self._data.shape[2] else 0
        footprint.parts["exact window"] += used
        footprint.parts["slack"] += allocated - used
