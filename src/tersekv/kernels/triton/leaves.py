"""Packed layouts as the kernels take them: constants, and tensors with their strides. What they do not read raises
`UnreadableError`, whose text `why_not` gives on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.lanes import packed_words
from tersekv.kernels.triton import rope, spec

_HALVES = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, *_HALVES, *_FLOAT8)


class UnreadableError(Exception):
    """Why the kernels do not read an operand."""


class Leaf(NamedTuple):
    """One packed layout: constants (`spec.py`), tensors and numbers; of keys the query [B, H, R, channels that it
    meets] and a matrix in front of RoPE (or none)."""

    spec: tuple[int, ...]
    fields: tuple[Any, ...]
    query: Tensor | None = None
    matrix: Tensor | None = None


def power(n: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, 1 << (n - 1).bit_length())


def _value(constant: Any) -> int:
    return int(constant.value)


def _spec(kind: Any, channels: int, padded: int, block: int, *more: int) -> tuple[int, ...]:
    return (_value(kind), channels, padded, block, 0, 0, 0, *map(int, more))


def changed(leaf: Leaf, constant: Any, value: int) -> Leaf:
    """With another constant."""
    at = _value(constant)
    return leaf._replace(spec=(*leaf.spec[:at], value, *leaf.spec[at + 1 :]))


class Readable:
    """Checks of one side's tensors. device: where they have to be."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device

    def plane(self, what: str, x: Tensor, dtypes: Sequence[torch.dtype], dense: int = 0) -> tuple[Any, ...]:
        """A tensor and the strides of its three leading axes, the last `dense` axes being contiguous."""
        if x.device != self.device:
            raise UnreadableError(f"{self.name} have {what} on {x.device}, the query is on {self.device}")
        if x.dtype not in dtypes:
            readable = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise UnreadableError(f"{self.name} have {what} of {x.dtype}, not {readable}")
        if x.requires_grad and torch.is_grad_enabled():
            raise UnreadableError(f"{self.name} need a gradient")
        step = 1
        for size, stride in zip(reversed(x.shape[x.dim() - dense :]), reversed(x.stride()), strict=False):
            if size > 1 and stride != step:
                raise UnreadableError(f"{self.name} have {what} with stride {stride}, not {step}, along an inner axis")
            step *= size
        return (x, *(0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)))

    def leaf(self, operand: Operand) -> Leaf:
        """An operand that is one layout, and no sketch."""
        if isinstance(operand, Tensor):
            return self._exact(operand)
        if isinstance(operand, GridSide):
            return self._grid(operand)
        read = {"polar": self._polar, "sparse": self._sparse, "trellis": self._trellis}.get(operand.kind)
        if read is None:
            raise UnreadableError(f"no kernel reads the format {getattr(operand, 'format', operand.kind)}")
        return read(operand)

    def _exact(self, x: Tensor) -> Leaf:
        fields = self.plane("tokens", x, _FLOATS, 1)
        D = x.shape[-1]
        constants = _spec(spec.EXACT, D, power(D), 32, x.dtype is torch.float32, x.dtype in _FLOAT8)
        return Leaf(constants, fields)

    def _grid(self, grid: GridSide) -> Leaf:
        if grid.side != self.name:
            raise ValueError(f"{self.name}: expected a GridSide of {self.name}, got one of {grid.side}")
        if not 1 <= grid.bits <= 8:
            raise UnreadableError(f"{self.name} have {grid.bits} bits, the kernels take 1 to 8")
        if grid.block_tokens % 32:
            raise UnreadableError(f"{self.name} have blocks of {grid.block_tokens} tokens, not a multiple of 32")
        D, t, offset = grid.head_dim, grid.block_tokens, grid.offset
        fields = (
            *self.plane("codes", grid.codes, (torch.int32,), 3),
            *self.plane("a scale", grid.scale, _HALVES, 2),
            *self.plane("an offset", grid.scale if offset is None else offset, _HALVES, 2),
            *self.plane("a table", grid.table, (torch.float32,), 1)[:1],
            grid.table.stride(0) if grid.table.dim() == 2 else 0,
        )
        words = packed_words(grid.bits, D if self.name == "keys" else t)
        more = grid.bits, grid.group, grid.axis == "token", offset is not None, grid.integers, words, _scales(grid)
        wide = grid.scale.dtype is torch.bfloat16
        return Leaf(_spec(spec.GRID, D, power(D, 32), t, *more, wide), fields)

    def _polar(self, view: Any) -> Leaf:
        polar, bits = view.polar, view.polar.level_bits
        angles = self.plane("angles", view.angles, (torch.uint8,), 2)
        radii = self.plane("radii", view.radii, _HALVES, 2)
        table = view.directions
        fields = (*angles, *radii, float(polar.radius_unit), table, table.stride(0) if len(table) > 1 else 0)
        D = polar.head_dim
        return Leaf(_spec(spec.POLAR, D, power(D), view.angles.shape[-1], len(bits), *bits), fields)

    def _sparse(self, view: Any) -> Leaf:
        fields = (
            *self.plane("starts", view.starts, (torch.int32,)),
            *self.plane("places", view.places, (torch.int16,), 1)[:1],
            *self.plane("outliers", view.values, (torch.float16,), 1)[:1],
            len(view.places),
        )
        return Leaf(_spec(spec.SPARSE, view.head_dim, power(view.head_dim), 32), fields)

    def _trellis(self, view: Any) -> Leaf:
        fields = (
            *self.plane("a stream", view.stream, (torch.int16,), 2),
            *self.plane("gains", view.gain, (torch.uint8,), 1),
            *self.plane("bits", view.bits, (torch.uint8,), 1),
            *self.plane("a scale", view.scale.float(), (torch.float32,), 1),
            *self.plane("tables", view.tables, (torch.float32,), 2)[:1],
        )
        D, (W, t) = view.head_dim, view.stream.shape[-2:]
        return Leaf(_spec(spec.TRELLIS, D, power(D), t, W), fields)

    def turned(self, view: Any, pairs: Tensor) -> Leaf:
        """A `turned` view; pairs int32 [D, 4]: `Rope.channels` on the device."""
        angles, kind = self.angles(view.angles, pairs)
        fields = (*self.plane("a mean", view.mean.float(), (torch.float32,), 1), *angles, pairs)
        D = view.mean.shape[-1]
        return Leaf(_spec(spec.TURNED, D, power(D), 32, kind), fields)

    def angles(self, angles: Any, pairs: Tensor) -> tuple[tuple[Any, ...], int]:
        """Fields of `Angles` (`rope.py`), and where they come from.

        Raises:
            UnreadableError: positions whose channels take cosines and sines of different columns.
        """
        table = self.plane("a table of angles", angles.table, (torch.float32,), 4)[0]
        places = self.plane("places", angles.places, (torch.int32,))
        kind = rope.GIVEN if angles.is_given else rope.CONSECUTIVE if angles.consecutive else rope.ANYWHERE
        if not angles.is_given and not angles.rope.has_one_angle_per_pair(len(pairs)):
            raise UnreadableError(f"{self.name} have a RoPE with cosines and sines of different columns")
        follows = int(angles.places.shape[-1] == 1)
        return (table, table.shape[-1], *places, follows), _value(kind)

    def signs(self, sketch: Any) -> Leaf:
        """One sketch of a `signs` view whose channels are the same in all blocks."""
        M = sketch.sketch.shape[0]
        return Leaf(_spec(spec.SIGNS, M, power(M), sketch.signs.shape[-1]), self._signed(sketch))

    def sketch(self, sketch: Any, head_dim: int, behind: int) -> Leaf:
        """One whose channels differ. behind: channels of the leaf's query in front of the query itself.

        Raises:
            UnreadableError: it both takes some channels and leaves some out.
        """
        if sketch.channels is not None and sketch.dropped is not None:
            raise UnreadableError(f"{self.name} have sketches that take some channels and leave some out")
        of_chosen = sketch.channels is not None
        chosen = self.plane("channels", sketch.channels if of_chosen else sketch.dropped, (torch.int64,), 1)
        M, n = sketch.sketch.shape[0], chosen[0].shape[-1]
        more = M, power(M), n, power(n), of_chosen
        fields = *self._signed(sketch), sketch.sketch, sketch.sketch.stride(0), *chosen, behind
        return Leaf(_spec(spec.SKETCH, head_dim, power(head_dim), sketch.signs.shape[-1], *more), fields)

    def _signed(self, sketch: Any) -> tuple[Any, ...]:
        signs = self.plane("signs", sketch.signs, (torch.uint8,), 2)
        norms = self.plane("norms", sketch.norms, _HALVES, 1)
        self.plane("a sketch", sketch.sketch, (torch.float32,), 1)
        return *signs, *norms, float(sketch.factor)


def _scales(grid: GridSide) -> int:
    """Where a grid's scales are multiplied, see `grid.py`."""
    packed = grid.axis == ("channel" if grid.side == "keys" else "token")
    lanes = 32  # of a tile: they share a scale of the packed axis
    if grid.axis == "token" and grid.group >= grid.head_dim:
        return int(spec.TO_PRODUCT.value)
    return int((spec.TO_COEFFICIENTS if packed and grid.group % lanes == 0 else spec.TO_ELEMENTS).value)
