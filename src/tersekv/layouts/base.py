"""What every packed layout states: its planes, and how attention reads them.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, R query rows per head, D head dim.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.attend_grid import Side as Side
from tersekv.kernels.attend_packed import Operand, native_view
from tersekv.kernels.basis import unpacked_basis
from tersekv.kernels.registry import NotTaken

Kind = Literal["codes", "scales and norms"]
PackedTensors = dict[str, Tensor]

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

    def join(self, parts: Sequence[PackedTensors]) -> PackedTensors:
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

    def select_rows(self, planes: PackedTensors, rows: Tensor) -> PackedTensors:
        """The planes of batch rows `rows` (int64, repeats allowed) in that order."""
        chosen = {n: p.index_select(0, rows) for n, p in planes.items() if self.planes[n].ragged is None}
        if self.starts is None:
            return chosen
        N, B, H = (planes[self.starts].shape[i] for i in (2, 0, 1))
        blocks = torch.arange(N * B * H, device=rows.device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, rows])

    def select_heads(self, planes: PackedTensors, first: int, count: int) -> PackedTensors:
        """The planes of heads `first` to `first + count`; what all heads share stays."""
        heads = slice(first, first + count)
        fixed = {name: plane for name, plane in planes.items() if self.planes[name].ragged is None}
        chosen = {name: plane if self.planes[name].shared else plane[:, heads] for name, plane in fixed.items()}
        if self.starts is None:
            return chosen
        B, H, N = planes[self.starts].shape
        blocks = torch.arange(N * B * H, device=planes[self.starts].device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, :, heads])

    def select_blocks(self, planes: PackedTensors, index: Tensor) -> PackedTensors:
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

    def _select_entries(self, planes: PackedTensors, blocks: Tensor) -> PackedTensors:
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

    def _ragged(self, planes: PackedTensors) -> PackedTensors:
        return {name: plane for name, plane in planes.items() if self.planes[name].ragged is not None}


class LinearMap(NamedTuple):
    """How vectors x̂ follow from the inner vectors that are coded: x̂ = A·inner + mean.

    Aᵀ, whose row d is what component d adds: `rotation` float32 [D, D] or [B, H, D, D], or held in few bits as `basis`
    and `channels` (`kernels/basis.py`), or the identity. mean: float [1 or B, H, D] or None; the weights of a softmax
    add up to one, so it is added to an output once. keeps_query: inner vectors have the channels of the mapped query
    and, behind them, those of the query itself.
    """

    rotation: Tensor | None = None
    basis: Tensor | None = None
    channels: Tensor | None = None
    mean: Tensor | None = None
    keeps_query: bool = False

    @property
    def rows(self) -> Tensor:
        """Aᵀ as float32 [D, D] or [1 or B, H, D, D]."""
        if self.basis is None:
            assert self.rotation is not None
            return self.rotation
        assert self.channels is not None
        return unpacked_basis(self.basis, self.channels).float()

    def query(self, query: Tensor) -> Tensor:
        """Aᵀ·q for queries float32 [B, H, R, D], and q itself where it is kept."""
        out = self._product(query, combine=False)
        return torch.cat([out, query], dim=-1) if self.keeps_query else out

    def output(self, out: Tensor) -> Tensor:
        """A·o + mean for weighted means of inner vectors, float32 [B, H, R, D]."""
        out = self._product(out, combine=True)
        return out if self.mean is None else out + self.mean.unsqueeze(2)

    def _product(self, x: Tensor, combine: bool) -> Tensor:
        if self.basis is not None:
            assert self.channels is not None
            return backends.basis_product(x, self.basis, self.channels, combine)
        if self.rotation is None:
            return x
        return torch.matmul(x, self.rotation if combine else self.rotation.transpose(-1, -2))


IDENTITY = LinearMap()


class View(ABC):
    """A packed segment as attention reads it: x̂ = A·inner + mean with a `LinearMap` that leaves the token loop."""

    format: ClassVar[str]
    kind: str = "other"
    """The layout's name for kernels, which find its planes in the view's fields."""
    keeps: ClassVar[bool] = True
    """True if a store may keep the view: it holds nothing but the planes and tables that are counted anyway."""

    @property
    def operand(self) -> Operand:
        """What `kernels/attend_packed.py` takes for this side."""
        return self

    @property
    def inner(self) -> View:
        """The view without the linear map."""
        return self

    @property
    def linear(self) -> LinearMap:
        """The map from inner vectors to those that were coded."""
        return IDENTITY

    def query(self, query: Tensor) -> Tensor:
        """What inner vectors are multiplied with, for queries [B, H, R, D]."""
        return self.linear.query(query)

    def output(self, out: Tensor) -> Tensor:
        """A·o + mean for a weighted mean of inner vectors [B, H, R, D]."""
        return self.linear.output(out)

    def native(self, native: ModuleType) -> Any:
        """The inner vectors as an object of the C++ extension, which checks the planes and keeps them.

        Raises:
            NotTaken: the extension does not read this layout.
            ValueError: planes that are not what the layout says.
        """
        raise NotTaken(f"the C++ kernels do not read {self.format}")

    @abstractmethod
    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return torch.matmul(query, self.decode().transpose(-1, -2))


class Mapped(View):
    """A view of vectors that were mapped before coding: in a rotated basis, or without their constant part."""

    def __init__(self, view: View, linear: LinearMap) -> None:
        self._inner, self._linear = view.inner, linear
        self.keeps = view.keeps and (linear.rotation is None or linear.rotation.dim() == 2)  # type: ignore[misc]
        self.format = f"mapped {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """The vectors that are coded."""
        return self._inner

    @property
    def linear(self) -> LinearMap:
        """See `View`."""
        return self._linear

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self.output(self._inner.decode())

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        if self.linear.mean is not None:
            return super().scores(query)
        return self._inner.scores(self.query(query))


class Rotated(Mapped):
    """x̂ = Rᵀ·inner, with R orthogonal, float32 [D, D], or [B, H, D, D] where heads differ."""

    kind = "rotated"

    def __init__(self, view: View, rotation: Tensor) -> None:
        super().__init__(view, LinearMap(rotation))

    @property
    def rotation(self) -> Tensor:
        """Rows of the basis, float32 [D, D] or [1 or B, H, D, D]."""
        return self.linear.rows

    def native(self, native: ModuleType) -> Any:
        """Under RoPE only, where the map cannot leave the token loop."""
        return native.rotated(native_view(native, self.inner.operand), self.rotation.contiguous())


class Sum(View):
    """A view of the sum of several: x̂ = Σ x̂_i."""

    kind = "sum"

    def __init__(self, views: Sequence[View]) -> None:
        self.views = views
        self.format = " + ".join(view.format for view in views)  # type: ignore[misc]

    def native(self, native: ModuleType) -> Any:
        """See `View`."""
        return native.sum([native_view(native, view.operand) for view in self.views])

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return sum_of([view.decode() for view in self.views])

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return sum_of([view.scores(query) for view in self.views])


class Concat(View):
    """A view of several with channels side by side, in this order; each with its number of channels."""

    kind = "concat"

    def __init__(self, views: Sequence[tuple[View, int]]) -> None:
        self.views = [view for view, _ in views]
        self.dims = [dim for _, dim in views]
        self.format = " | ".join(view.format for view in self.views)  # type: ignore[misc]

    def native(self, native: ModuleType) -> Any:
        """See `View`."""
        return native.concat([native_view(native, view.operand) for view in self.views])

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
