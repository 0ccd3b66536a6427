"""What every packed layout states: its planes, and how attention reads them.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, R query rows per head, D head dim.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.kernels.attend_grid import Side as Side
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Kept as Kept

Kind = Literal["codes", "scales and norms"]
Planes = dict[str, Tensor]

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor of a packed block: `shape` and `dtype` per block, and the part of the footprint it counts to.

    shared: one for all heads of a layer, [B, 1, N, *shape]. ragged: a list of entries whose number varies, [entries] in
    the order block, batch row, head; the figure is the number per block and head that a declared size counts with. A
    layout with ragged planes has one named `…_starts`, int32 [B, H, N], that says where each block's entries begin.
    ends: (share, elements per head) where entries are what lies outside two quantiles of each token's vector over all
    heads: a whole number at each end, so that short vectors have more than the share.
    channels: of a plane whose elements name channels in their low `channel_bits` bits (None: all), how many there are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    shared: bool = False
    ragged: float | None = None
    ends: tuple[float, int] | None = None
    channels: int | None = None
    channel_bits: int | None = None

    def block_bytes(self, heads: int = 1) -> float:
        """Bytes of one block, per head of a layer with `heads` of them."""
        per_block = math.prod(self.shape) if self.ragged is None else self.ragged
        if self.ends is not None:
            share, elements = self.ends
            per_block = BLOCK_TOKENS * 2 * math.ceil(share / 2 * (elements * heads - 1)) / heads
        return per_block * self.dtype.itemsize / (heads if self.shared else 1)


@dataclass(frozen=True)
class Layout:
    """The planes of a packed segment; every plane but ragged ones is [B, H, N, *shape], or [B, 1, N, *shape]."""

    block_tokens: int
    planes: dict[str, PlaneSpec]

    def block_bytes(self, heads: int = 1) -> float:
        """Bytes of one block, all planes, per head of a layer with `heads` of them."""
        return sum(spec.block_bytes(heads) for spec in self.planes.values())

    def bits(self, head_dim: int, heads: int = 1) -> float:
        """Stored bits per element."""
        return self.block_bytes(heads) * 8 / (self.block_tokens * head_dim)

    @property
    def starts(self) -> str | None:
        """The plane that says where ragged entries begin."""
        return next((name for name in self.planes if name.endswith("_starts")), None)

    def join(self, parts: Sequence[Planes]) -> Planes:
        """The planes of all parts, one behind the other: a copy, unless there is one part only."""
        if len(parts) == 1:
            return parts[0]
        if self.starts is not None:
            shifted, entries = [], 0
            for part in parts:
                starts = part[self.starts]
                shifted.append(part | {self.starts: starts - starts[:1, :1, :1] + entries})
                entries += len(next(iter(self._ragged(part).values())))
            parts = shifted
        axis = {name: 2 if spec.ragged is None else 0 for name, spec in self.planes.items()}
        return {name: torch.cat([part[name] for part in parts], dim=axis[name]) for name in axis}

    def select_rows(self, planes: Planes, rows: Tensor) -> Planes:
        """The planes of batch rows `rows` (int64, repeats allowed) in that order."""
        chosen = {n: p.index_select(0, rows) for n, p in planes.items() if self.planes[n].ragged is None}
        if self.starts is None:
            return chosen
        N, B, H = (planes[self.starts].shape[i] for i in (2, 0, 1))
        blocks = torch.arange(N * B * H, device=rows.device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, rows])

    def select_heads(self, planes: Planes, first: int, count: int) -> Planes:
        """The planes of heads `first` to `first + count`; what all heads share stays."""
        heads = slice(first, first + count)
        fixed = {name: plane for name, plane in planes.items() if self.planes[name].ragged is None}
        chosen = {name: plane if self.planes[name].shared else plane[:, heads] for name, plane in fixed.items()}
        if self.starts is None:
            return chosen
        B, H, N = planes[self.starts].shape
        blocks = torch.arange(N * B * H, device=planes[self.starts].device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, :, heads])

    def select_blocks(self, planes: Planes, index: Tensor) -> Planes:
        """The planes of blocks `index` (int64 [B, H, n]) of each head, in that order; no plane is shared."""
        chosen = {}
        for name, plane in planes.items():
            if self.planes[name].ragged is None:
                own = index.reshape(*index.shape, *(1,) * (plane.dim() - 3)).expand(*index.shape, *plane.shape[3:])
                chosen[name] = plane.gather(2, own)
        if self.starts is None:
            return chosen
        B, H, _ = index.shape
        heads = torch.arange(B * H, device=index.device).view(B, H)
        return chosen | self._select_entries(planes, index.permute(2, 0, 1) * (B * H) + heads)

    def _select_entries(self, planes: Planes, blocks: Tensor) -> Planes:
        """Starts [B, H, n] and entries of `blocks` [n, B, H], which count in the order block, batch row, head."""
        assert self.starts is not None
        ragged = self._ragged(planes)
        order, total = planes[self.starts].permute(2, 0, 1).flatten().long(), len(next(iter(ragged.values())))
        base = order[0] if len(order) else 0
        counts = torch.cat([order[1:], order.new_full((1,), total) + base])[: len(order)] - order
        n = counts[blocks.flatten()]
        begin = n.cumsum(0) - n
        shift = torch.repeat_interleave(order[blocks.flatten()] - base - begin, n)
        entry = torch.arange(len(shift), device=shift.device) + shift
        starts = begin.view(blocks.shape).permute(1, 2, 0).to(planes[self.starts].dtype)
        return {self.starts: starts} | {name: plane[entry] for name, plane in ragged.items()}

    def _ragged(self, planes: Planes) -> Planes:
        return {name: plane for name, plane in planes.items() if self.planes[name].ragged is not None}


class View(ABC):
    """A packed segment as attention reads it.

    x̂ = A·inner with a linear map A that leaves the token loop: q·k̂ = (Aᵀq)·inner and Σp·v̂ = A·Σp·inner. `inner` is
    the view that holds the codes, `query` is Aᵀ and `output` is A; for most formats A is the identity.
    """

    format: ClassVar[str]
    kind: str = "other"
    """The layout's name for kernels, which find its planes in the view's fields."""
    keeps: ClassVar[bool] = True
    """Whether a store may keep the view: it holds nothing but the planes and tables that are counted anyway."""
    unpacks: ClassVar[bool] = False
    """Whether its map is held in few bits, so that what a kernel is handed of it is a copy that must not stay."""

    @property
    def operand(self) -> Operand:
        """What `kernels/attend_packed.py` takes for this side."""
        return self

    @property
    def inner(self) -> View:
        """The view without the linear map."""
        return self

    def query(self, query: Tensor) -> Tensor:
        """Aᵀq for query [..., D]."""
        return query

    def output(self, out: Tensor) -> Tensor:
        """A·o for a weighted sum of inner vectors [..., D]."""
        return out

    @abstractmethod
    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return torch.matmul(query, self.decode().transpose(-1, -2))


class Rotated(View):
    """A view of vectors that were rotated by R before coding: x̂ = Rᵀ·inner. R is orthogonal, float32 [D, D], or
    [B, H, D, D] where heads differ."""

    kind = "rotated"

    def __init__(self, view: View, rotation: Tensor) -> None:
        self._inner, self.rotation = view, rotation
        self.keeps = view.keeps and rotation.dim() == 2  # type: ignore[misc]
        self.format = f"rotated {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """The rotated vectors."""
        return self._inner

    def query(self, query: Tensor) -> Tensor:
        """R·q."""
        return torch.matmul(query, self.rotation.transpose(-1, -2))

    def output(self, out: Tensor) -> Tensor:
        """Rᵀ·o."""
        return torch.matmul(out, self.rotation)

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self.output(self._inner.decode())

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return self._inner.scores(self.query(query))


class Added(View):
    """A view of the sum of several: x̂ = Σ x̂_i."""

    kind = "added"

    def __init__(self, views: Sequence[View]) -> None:
        self.views = views
        self.format = " + ".join(view.format for view in views)  # type: ignore[misc]

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return sum_of([view.decode() for view in self.views])

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return sum_of([view.scores(query) for view in self.views])


class Joined(View):
    """A view of several with channels side by side, in this order; each with its number of channels."""

    kind = "joined"

    def __init__(self, views: Sequence[tuple[View, int]]) -> None:
        self.views = [view for view, _ in views]
        self.dims = [dim for _, dim in views]
        self.format = " | ".join(view.format for view in self.views)  # type: ignore[misc]

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]; a part that is the same in all rows may have one."""
        parts = [view.decode() for view in self.views]
        rows = max(map(len, parts))
        return torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-1)

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        parts = zip(self.views, query.split(self.dims, dim=-1), strict=True)
        return sum_of([view.scores(part) for view, part in parts])


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Sum of one or more tensors."""
    return functools.reduce(torch.add, parts)
