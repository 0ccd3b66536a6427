"""Base classes of packed layouts: the packed tensors, and the views that attention reads.

Shapes: B batch, H key-value heads, N blocks, t tokens per block, T = N·t, R query rows per head, D
head dim.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.attend_grid import Side as Side
from tersekv.kernels.attend_packed import Operand, native_view
from tersekv.kernels.registry import NotTaken
from tersekv.layouts.linear_map import IDENTITY, LinearMap
from tersekv.tensors import chosen_tokens, plain

Kind = Literal["codes", "scales and norms"]
PackedTensors = dict[str, Tensor]

BLOCK_TOKENS = 32


def whole_share(share: float, elements: int) -> int:
    """Return the largest number of elements that is at most a share of them."""
    return int(share * elements + 1e-6)


@dataclass(frozen=True)
class PlaneSpec:
    """One packed tensor: its shape and dtype per block, and its part of the footprint.

    shared: one tensor for all heads of a layer, [B, 1, N, *shape].
    ragged: None, or the number of entries per block and head that estimated sizes assume. A ragged
        tensor is a list with a variable number of entries, [entries], ordered by block, batch row,
        head. A layout with ragged tensors also has one named `…_starts`, int32 [B, H, N], with the
        first entry of each block.
    share: (share, elements per head) if the entries are at most this share of each token's vector
        over all heads (`whole_share`).
    channels: number of channels, if the elements contain channel indices.
    channel_bits: number of low bits of an element that hold the channel index. None means all bits.
    token_axis: axis of `shape` with an element, or several, for each of the block's tokens. None if
        tokens share elements, so that none can be moved alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind
    shared: bool = False
    ragged: float | None = None
    share: tuple[float, int] | None = None
    channels: int | None = None
    channel_bits: int | None = None
    token_axis: int | None = None

    def block_bytes(self, heads: int = 1) -> float:
        """Return the bytes of one block per head, for a layer with `heads` heads."""
        per_block = math.prod(self.shape) if self.ragged is None else self.ragged
        if self.share is not None:
            share, elements = self.share
            per_block = BLOCK_TOKENS * whole_share(share, elements * heads) / heads
        return per_block * self.dtype.itemsize / (heads if self.shared else 1)


@dataclass(frozen=True)
class Layout:
    """Specifications of a packed segment's tensors.

    Tensors are [B, H, N, *shape], or [B, 1, N, *shape] if shared. Ragged tensors are
    one-dimensional.
    """

    block_tokens: int
    planes: dict[str, PlaneSpec]

    def block_bytes(self, heads: int = 1) -> float:
        """Return the bytes of one block per head, all tensors together.

        heads: number of heads of the layer.
        """
        return sum(spec.block_bytes(heads) for spec in self.planes.values())

    def bits(self, head_dim: int, heads: int = 1) -> float:
        """Return the stored bits per element."""
        return self.block_bytes(heads) * 8 / (self.block_tokens * head_dim)

    @property
    def starts(self) -> str | None:
        """Name of the tensor with the first ragged entry of each block, or None."""
        return next((name for name in self.planes if name.endswith("_starts")), None)

    @plain
    def join(self, parts: Sequence[PackedTensors]) -> PackedTensors:
        """Concatenate parts along the blocks.

        The result is a copy, unless there is only one part.
        """
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
        """Return the tensors of batch rows `rows` (int64, repeats allowed) in that order."""
        chosen = {n: p.index_select(0, rows) for n, p in planes.items() if self.planes[n].ragged is None}
        if self.starts is None:
            return chosen
        N, B, H = (planes[self.starts].shape[i] for i in (2, 0, 1))
        blocks = torch.arange(N * B * H, device=rows.device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, rows])

    def select_heads(self, planes: PackedTensors, first: int, count: int) -> PackedTensors:
        """Return the tensors of heads `first` to `first + count`. Shared tensors are unchanged."""
        heads = slice(first, first + count)
        fixed = {name: plane for name, plane in planes.items() if self.planes[name].ragged is None}
        chosen = {name: plane if self.planes[name].shared else plane[:, heads] for name, plane in fixed.items()}
        if self.starts is None:
            return chosen
        B, H, N = planes[self.starts].shape
        blocks = torch.arange(N * B * H, device=planes[self.starts].device).view(N, B, H)
        return chosen | self._select_entries(planes, blocks[:, :, heads])

    def select_blocks(self, planes: PackedTensors, index: Tensor) -> PackedTensors:
        """Return the tensors of blocks `index` (int64 [B, H, n]) of each head, in that order, see `take_blocks`."""
        B, H, _ = index.shape
        N = next(plane.shape[2] for name, plane in planes.items() if self.planes[name].ragged is None)
        return self.take_blocks(planes, index + torch.arange(B * H, device=index.device).view(B, H, 1) * N)

    def take_blocks(self, planes: PackedTensors, numbers: Tensor) -> PackedTensors:
        """Return the tensors of any blocks as those of [b, h, n] blocks. The layout must have no shared tensors.

        numbers: int64 [b, h, n], blocks counted in the order batch row, head, block.
        """
        fixed = {name: plane for name, plane in planes.items() if self.planes[name].ragged is None}
        B, H, N = next(iter(fixed.values())).shape[:3]
        head, block = numbers // max(N, 1), numbers % max(N, 1)
        place = head // H, head % H, block
        chosen = {name: plane[place] for name, plane in fixed.items()}
        if self.starts is None:
            return chosen
        return chosen | self._select_entries(planes, (block * (B * H) + head).permute(2, 0, 1))

    @property
    def moves_tokens(self) -> bool:
        """True if tokens can be moved between blocks as they are, by `select_tokens`."""
        return all(spec.token_axis is not None and not spec.shared for spec in self.planes.values())

    def select_tokens(self, planes: PackedTensors, index: Tensor) -> PackedTensors:
        """Return the tensors of tokens `index` (int64 [B, H, n], whole blocks) of each head, in that order."""
        return {name: chosen_tokens(plane, index, self.planes[name].token_axis) for name, plane in planes.items()}

    def _select_entries(self, planes: PackedTensors, blocks: Tensor) -> PackedTensors:
        """Return starts [B, H, n] and ragged entries of the chosen blocks.

        blocks: [n, B, H], indices that count blocks in the order block, batch row, head.
        """
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


class View(ABC):
    """A packed segment as attention reads it: x̂ = A·inner + mean.

    The `LinearMap` is applied outside the loop over tokens.
    """

    format: ClassVar[str]
    kind: str = "other"
    """Name of the layout for kernels, which read the packed tensors from the view's fields."""
    keeps: ClassVar[bool] = True
    """True if a store may cache the view, which then needs no memory that is not counted."""

    @property
    def operand(self) -> Operand:
        """Return the argument of `kernels/attend_packed.py` for this side."""
        return self

    @property
    def inner(self) -> View:
        """Return the view without the linear map."""
        return self

    @property
    def linear(self) -> LinearMap:
        """Return the map from inner vectors to the vectors that were coded."""
        return IDENTITY

    @property
    def uncoded(self) -> Tensor | None:
        """Return the part of each vector that is known without its code, [1 or B, H, T, D], or None."""
        return None

    def query(self, query: Tensor) -> Tensor:
        """Map queries [B, H, R, D] to the ones that inner vectors are multiplied with."""
        return self.linear.query(query)

    def output(self, out: Tensor) -> Tensor:
        """Return A·o + mean for a weighted mean of inner vectors [B, H, R, D]."""
        return self.linear.output(out)

    def native(self, native: ModuleType) -> Any:
        """Return the inner vectors as an object of the C++ extension, which validates the tensors.

        Raises:
            NotTaken: the extension does not read this layout.
            ValueError: the tensors do not fit the layout.
        """
        raise NotTaken(f"the C++ kernels do not read {self.format}")

    @abstractmethod
    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""

    def floats(self, dtype: torch.dtype) -> Tensor:
        """Return x̂ as [1 or B, H, T, D] of a dtype, decoded by kernels."""
        return backends.decode(self.operand, dtype)

    def scores(self, query: Tensor) -> Tensor:
        """Return unscaled q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T]."""
        return torch.matmul(query, self.decode().transpose(-1, -2))


class Mapped(View):
    """View of vectors that were mapped before coding: rotated, or with the mean removed."""

    def __init__(self, view: View, linear: LinearMap) -> None:
        self._inner, self._linear = view.inner, linear
        self.keeps = view.keeps and (linear.rotation is None or linear.rotation.dim() == 2)  # type: ignore[misc]
        self.format = f"mapped {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """Return the view of the coded vectors."""
        return self._inner

    @property
    def linear(self) -> LinearMap:
        return self._linear

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        return self.output(self._inner.decode())

    def floats(self, dtype: torch.dtype) -> Tensor:
        return self.output(self._inner.floats(torch.float32)).to(dtype)

    def scores(self, query: Tensor) -> Tensor:
        """Return unscaled q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T]."""
        if self.linear.mean is not None:
            return super().scores(query)
        return self._inner.scores(self.query(query))


class Rotated(Mapped):
    """View with x̂ = Rᵀ·inner, R orthogonal, float32 [D, D], or [B, H, D, D] if heads differ."""

    kind = "rotated"

    def __init__(self, view: View, rotation: Tensor) -> None:
        super().__init__(view, LinearMap(rotation))

    @property
    def rotation(self) -> Tensor:
        """Return the rows of the basis, float32 [D, D] or [1 or B, H, D, D]."""
        return self.linear.rows

    def native(self, native: ModuleType) -> Any:
        """Return the native object.

        Used only under RoPE, where the map must stay inside the loop over tokens.
        """
        return native.rotated(native_view(native, self.inner.operand), self.rotation.contiguous())


class Sum(View):
    """View of the sum of several views: x̂ = Σ x̂_i."""

    kind = "sum"

    def __init__(self, views: Sequence[View]) -> None:
        self.views = views
        self.format = " + ".join(view.format for view in views)  # type: ignore[misc]

    def native(self, native: ModuleType) -> Any:
        return native.sum([native_view(native, view.operand) for view in self.views])

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        return sum_of([view.decode() for view in self.views])

    def scores(self, query: Tensor) -> Tensor:
        """Return unscaled q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T]."""
        return sum_of([view.scores(query) for view in self.views])


class Concat(View):
    """View of several views with their channels concatenated.

    views: each with its number of channels.
    """

    kind = "concat"

    def __init__(self, views: Sequence[tuple[View, int]]) -> None:
        self.views = [view for view, _ in views]
        self.dims = [dim for _, dim in views]
        self.format = " | ".join(view.format for view in self.views)  # type: ignore[misc]

    def native(self, native: ModuleType) -> Any:
        return native.concat([native_view(native, view.operand) for view in self.views])

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D].

        A part that is equal in all batch rows may have only one.
        """
        parts = [view.decode() for view in self.views]
        rows = max(map(len, parts))
        return torch.cat([part.expand(rows, -1, -1, -1) for part in parts], dim=-1)

    def scores(self, query: Tensor) -> Tensor:
        """Return unscaled q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T]."""
        parts = zip(self.views, query.split(self.dims, dim=-1), strict=True)
        return sum_of([view.scores(part) for view, part in parts])


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    return functools.reduce(torch.add, parts)
