"""Packed layouts as kernel arguments. A *leaf* is one layout: compile-time constants, and tensors
with their strides.

The constants are a tuple of integers, because Triton before 3.7 supports no other tuples as
constants. Operands that the kernels cannot read raise `UnreadableError`, whose text is the reason
that `why_not` returns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.lanes import packed_words
from tersekv.kernels.triton.tables import aligned, first_entry

KIND: tl.constexpr = tl.constexpr(0)
CHANNELS: tl.constexpr = tl.constexpr(1)
"""Channels of the leaf's vectors, which its query or output has; for `signs` the rows of the
sketch."""
PADDED: tl.constexpr = tl.constexpr(2)
"""Channels with padding, a power of two."""
BLOCK: tl.constexpr = tl.constexpr(3)
"""Tokens per block."""
FIRST: tl.constexpr = tl.constexpr(4)
"""First channel. Keys with RoPE: the leaf's first channel in the head. Values: the first channel of
its output."""
MAPPED: tl.constexpr = tl.constexpr(5)
"""Padded channels of the vectors to which a matrix maps decoded ones before RoPE; 0: there is no
matrix."""

MAPPED_CHANNELS: tl.constexpr = tl.constexpr(6)
"""Number of those channels without padding."""

BITS: tl.constexpr = tl.constexpr(7)
GROUP: tl.constexpr = tl.constexpr(8)
PER_TOKEN: tl.constexpr = tl.constexpr(9)
HAS_OFFSET: tl.constexpr = tl.constexpr(10)
IS_INTEGER: tl.constexpr = tl.constexpr(11)
WORDS: tl.constexpr = tl.constexpr(12)
SCALES: tl.constexpr = tl.constexpr(13)
WIDE: tl.constexpr = tl.constexpr(14)
"""True if scales are bfloat16, which may exceed float16's range."""
HAS_FACTOR: tl.constexpr = tl.constexpr(15)
"""True if a grid has a second scale, see `GridSide.factor`."""
IS_SYMMETRIC: tl.constexpr = tl.constexpr(16)
"""True if the table is symmetric, see `GridSide.symmetric`."""

LEVELS: tl.constexpr = tl.constexpr(7)
LEVEL_BITS: tl.constexpr = tl.constexpr(8)
"""Bits of polar level 1; those of the other levels follow."""

STREAM_WORDS: tl.constexpr = tl.constexpr(7)
"""Number of 16-bit words of a trellis token's stream."""

PER_BLOCK: tl.constexpr = tl.constexpr(7)
"""Number of sparse entries of each block; 0: they are a list with starts."""

SKETCH_ROWS: tl.constexpr = tl.constexpr(7)
"""Rows of a sketch whose channels differ per block."""
PADDED_SKETCH_ROWS: tl.constexpr = tl.constexpr(8)
CHOSEN: tl.constexpr = tl.constexpr(9)
"""Number of channels that a block chooses."""
PADDED_CHOSEN: tl.constexpr = tl.constexpr(10)
OF_CHOSEN: tl.constexpr = tl.constexpr(11)
"""True if the sketch is of the chosen channels, False if it is of all others."""

ANGLES_KIND: tl.constexpr = tl.constexpr(7)
"""Source of the angles of a rotated mean, see `rope.py`."""

FLOAT32: tl.constexpr = tl.constexpr(7)
"""True if exact tokens are float32."""
FLOAT8: tl.constexpr = tl.constexpr(8)
"""True if exact tokens are float8."""

EXACT: tl.constexpr = tl.constexpr(0)
GRID: tl.constexpr = tl.constexpr(1)
SIGNS: tl.constexpr = tl.constexpr(2)
POLAR: tl.constexpr = tl.constexpr(3)
SPARSE: tl.constexpr = tl.constexpr(4)
TRELLIS: tl.constexpr = tl.constexpr(5)
ROTATED_MEAN: tl.constexpr = tl.constexpr(6)
"""The rotated mean: no tokens, but one vector that RoPE rotates."""
SKETCH: tl.constexpr = tl.constexpr(7)
"""Signs whose channels differ between blocks."""
LAYOUTS = {
    "exact": EXACT, "grid": GRID, "signs": SIGNS, "signs per block": SKETCH, "polar": POLAR, "sparse": SPARSE,
    "trellis": TRELLIS,
}  # fmt: skip

# Source of angles: rows per token, arbitrary positions, or consecutive positions.
GIVEN: tl.constexpr = tl.constexpr(1)
ANYWHERE: tl.constexpr = tl.constexpr(2)
CONSECUTIVE: tl.constexpr = tl.constexpr(3)

# Operand that scales are multiplied with (SCALES).
TO_COEFFICIENTS: tl.constexpr = tl.constexpr(0)
TO_PRODUCT: tl.constexpr = tl.constexpr(1)
TO_ELEMENTS: tl.constexpr = tl.constexpr(2)

# Types of the fields in a table of pages (`field_codes`). An odd code: the value is a multiple of
# 16 in every page.
ALIGNED: tl.constexpr = tl.constexpr(1)
INT32_FIELD: tl.constexpr = tl.constexpr(0)
INT64_FIELD: tl.constexpr = tl.constexpr(2)
FLOAT_FIELD: tl.constexpr = tl.constexpr(4)
ADDRESS_OF_UINT8: tl.constexpr = tl.constexpr(6)
ADDRESS_OF_INT16: tl.constexpr = tl.constexpr(8)
ADDRESS_OF_INT32: tl.constexpr = tl.constexpr(10)
ADDRESS_OF_INT64: tl.constexpr = tl.constexpr(12)
ADDRESS_OF_FLOAT16: tl.constexpr = tl.constexpr(14)
ADDRESS_OF_BFLOAT16: tl.constexpr = tl.constexpr(16)
ADDRESS_OF_FLOAT32: tl.constexpr = tl.constexpr(18)
ADDRESS_OF_FLOAT8E5: tl.constexpr = tl.constexpr(20)
ADDRESS_OF_FLOAT8E4: tl.constexpr = tl.constexpr(22)

_ADDRESSES = {
    torch.uint8: ADDRESS_OF_UINT8, torch.int16: ADDRESS_OF_INT16, torch.int32: ADDRESS_OF_INT32,
    torch.int64: ADDRESS_OF_INT64, torch.float16: ADDRESS_OF_FLOAT16, torch.bfloat16: ADDRESS_OF_BFLOAT16,
    torch.float32: ADDRESS_OF_FLOAT32, torch.float8_e5m2: ADDRESS_OF_FLOAT8E5,
    torch.float8_e4m3fn: ADDRESS_OF_FLOAT8E4,
}  # fmt: skip
_HALVES = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, *_HALVES, *_FLOAT8)


class UnreadableError(Exception):
    """The kernels cannot read an operand; the text is the reason."""


class Leaf(NamedTuple):
    """One packed layout.

    spec: the constants above. fields: tensors and numbers of one segment.

    Key leaves also have a function `query`. It maps the segment's queries float32 [B, H, R, D] to
    the queries that the leaf is multiplied with, [B, H, R, channels]. A function `matrix` returns
    the matrix before RoPE, if there is one. `origin` is equal for leaves whose two functions return
    the same.
    """

    spec: tuple[int, ...]
    fields: tuple[Any, ...]
    query: Callable[[Tensor], Tensor] | None = None
    matrix: Callable[[], Tensor] | None = None
    origin: tuple[Any, ...] = ()


def identity(x: Tensor | None) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that share memory, shape and strides."""
    return () if x is None else (x.data_ptr(), *x.shape, *x.stride())


def field_codes(pages: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Return the type of each field over all pages, which have equally many fields of the same
    types."""
    return tuple(_field_code(column) for column in zip(*pages, strict=True))


def _field_code(column: Sequence[Any]) -> int:
    first = column[0]
    if isinstance(first, float):
        return _value(FLOAT_FIELD)
    numbers = [number(field) for field in column]
    if isinstance(first, Tensor):
        code = _ADDRESSES[first.dtype]
    else:
        code = INT32_FIELD if all(abs(n) < 2**31 for n in numbers) else INT64_FIELD
    return _value(code) + all(n % 16 == 0 for n in numbers)


def number(field: Any) -> int:
    """Convert a field to the table's 64 bits: an address, an integer, or the bits of a float32."""
    if isinstance(field, Tensor):
        return field.data_ptr()
    return int.from_bytes(struct.pack("<f", field), "little") if isinstance(field, float) else int(field)


def power(n: int, least: int = 32) -> int:
    """Return the smallest power of two that is at least n and at least `least`.

    Products over 16 channels with 8 query rows were wrong on an H100, compiled by Triton 3.6
    (github.com/triton-lang/triton/issues/7830).
    """
    return max(least, 1 << (n - 1).bit_length())


def _value(constant: Any) -> int:
    return int(constant.value)


def _spec(kind: Any, channels: int, padded: int, block: int, *more: int) -> tuple[int, ...]:
    return (_value(kind), channels, padded, block, 0, 0, 0, *map(int, more))


def changed(leaf: Leaf, constant: Any, value: int) -> Leaf:
    """Return the leaf with another value of one constant."""
    at = _value(constant)
    return leaf._replace(spec=(*leaf.spec[:at], value, *leaf.spec[at + 1 :]))


class Readable:
    """Check the tensors of keys or values and build leaves. device: where the tensors must be. dry:
    make no tensor; leaves are complete except for fields that hold a copy."""

    def __init__(self, name: str, device: torch.device, dry: bool = False) -> None:
        self.name, self.device, self.dry = name, device, dry

    def plane(self, what: str, x: Tensor, dtypes: Sequence[torch.dtype], dense: int = 0) -> tuple[Any, ...]:
        """Return a tensor and the strides of its first three axes; the last `dense` axes must be
        contiguous."""
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

    def single(self, what: str, x: Tensor) -> tuple[Any, ...]:
        """Return a tensor of any float type as float32 with one contiguous axis; see `plane`."""
        fields = self.plane(what, x, (*_FLOATS, torch.float64), 1)
        return fields if self.dry or x.dtype is torch.float32 else self.plane(what, x.float(), (torch.float32,), 1)

    def leaf(self, operand: Operand) -> Leaf:
        """Build the leaf of an operand that is one layout and not a sketch."""
        if isinstance(operand, Tensor):
            return self._exact(operand)
        if isinstance(operand, GridSide):
            return self._grid(operand)
        by_kind = {"polar": self._polar, "sparse": self._sparse, "trellis": self._trellis}
        read = (by_kind | {"sparse blocks": self._sparse_blocks}).get(operand.kind)
        if read is None:
            raise UnreadableError(f"no kernel reads the format {getattr(operand, 'format', operand.kind)}")
        return read(operand)

    def _exact(self, x: Tensor) -> Leaf:
        fields = self.plane("tokens", x, _FLOATS, 1)
        D = x.shape[-1]
        constants = _spec(EXACT, D, power(D), 32, x.dtype is torch.float32, x.dtype in _FLOAT8)
        return Leaf(constants, fields)

    def _grid(self, grid: GridSide) -> Leaf:
        if grid.side != self.name:
            raise ValueError(f"{self.name}: expected a GridSide of {self.name}, got one of {grid.side}")
        if not 1 <= grid.bits <= 8:
            raise UnreadableError(f"{self.name} have {grid.bits} bits, the kernels support 1 to 8")
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
        wide, factor = grid.scale.dtype is torch.bfloat16, grid.factor
        if factor is not None:
            fields += self.plane("a factor", factor, _HALVES, 1)
        return Leaf(_spec(GRID, D, power(D, 32), t, *more, wide, factor is not None, grid.symmetric), fields)

    def _polar(self, view: Any) -> Leaf:
        polar, bits = view.polar, view.polar.level_bits
        angles = self.plane("angles", view.angles, (torch.uint8,), 2)
        radii = self.plane("radii", view.radii, _HALVES, 2)
        table = view.tables[0]
        if not self.dry:
            levels = range(len(bits))
            places = [first_entry(bits, level) + i for level in levels for i in range(1 << bits[level])]
            shape = (len(view.directions), power(places[-1] + 1, 1), 2)
            table = aligned(view.directions, shape, (slice(None), places)).view(torch.int32).squeeze(-1)
        fields = (*angles, *radii, float(polar.radius_unit), table, table.stride(0) if len(table) > 1 else 0)
        D = polar.head_dim
        return Leaf(_spec(POLAR, D, power(D), view.angles.shape[-1], len(bits), *bits), fields)

    def _sparse(self, view: Any) -> Leaf:
        fields = (
            *self.plane("starts", view.starts, (torch.int32,)),
            *self.plane("places", view.places, (torch.int16,), 1)[:1],
            *self.plane("outliers", view.values, (torch.float16,), 1)[:1],
            len(view.places),
            view.starts.shape[2],
        )
        return Leaf(_spec(SPARSE, view.head_dim, power(view.head_dim), 32, 0), fields)

    def _sparse_blocks(self, view: Any) -> Leaf:
        places = self.plane("places", view.places, (torch.int16,), 1)
        values = self.plane("outliers", view.values, (torch.float16,), 1)
        if places[1:] != values[1:]:
            raise UnreadableError(f"{self.name} have outliers with other strides than their places")
        n = view.places.shape[-1]
        return Leaf(_spec(SPARSE, view.head_dim, power(view.head_dim), 32, n), (*places, places[0], values[0], 0, 0))

    def _trellis(self, view: Any) -> Leaf:
        fields = (
            *self.plane("a stream", view.stream, (torch.int16,), 2),
            *self.plane("gains", view.gain, (torch.uint8,), 1),
            *self.plane("bits", view.bits, (torch.uint8,), 1),
            *self.single("a scale", view.scale),
            *self.plane("tables", view.tables if self.dry else aligned(view.tables), (torch.float16, torch.float32), 2)[
                :1
            ],
        )
        D, (W, t) = view.head_dim, view.stream.shape[-2:]
        return Leaf(_spec(TRELLIS, D, power(D), t, W), fields)

    def rotated_mean(self, view: Any, pairs: Tensor) -> Leaf:
        """Build the leaf of a rotated mean; pairs int32 [D, 4]: `Rope.channels` on the device."""
        angles, kind = self.angles(view.angles, pairs)
        fields = (*self.single("a mean", view.mean), *angles, pairs)
        D = view.mean.shape[-1]
        return Leaf(_spec(ROTATED_MEAN, D, power(D), 32, kind), fields)

    def angles(self, angles: Any, pairs: Tensor) -> tuple[tuple[Any, ...], int]:
        """Return the fields of `Angles` (see `tiles.py`) and the source of the angles.

        Raises:
            UnreadableError: cosines and sines of a channel are in different columns.
        """
        table = self.plane("a table of angles", angles.table, (torch.float32,), 4)[0]
        places = self.plane("places", angles.places, (torch.int32,))
        kind = GIVEN if angles.is_given else CONSECUTIVE if angles.consecutive else ANYWHERE
        if not angles.is_given and not angles.rope.has_one_angle_per_pair(len(pairs)):
            raise UnreadableError(f"{self.name} have a RoPE whose cosines and sines are in different columns")
        follows = int(angles.places.shape[-1] == 1)
        return (table, table.shape[-1], *places, follows), _value(kind)

    def signs(self, sketch: Any) -> Leaf:
        """Build the leaf of one sketch of a `signs` view whose channels are the same in all blocks."""
        M = sketch.sketch.shape[0]
        return Leaf(_spec(SIGNS, M, power(M), sketch.signs.shape[-1]), self._signed(sketch))

    def sketch(self, sketch: Any, head_dim: int, behind: int) -> Leaf:
        """Build the leaf of a sketch whose channels differ between blocks.

        behind: number of channels before the query itself in the leaf's query.

        Raises:
            UnreadableError: the sketch both takes some channels and leaves some out.
        """
        if sketch.channels is not None and sketch.dropped is not None:
            raise UnreadableError(f"{self.name} have sketches that both take and leave out channels")
        of_chosen = sketch.channels is not None
        chosen = self.plane("channels", sketch.channels if of_chosen else sketch.dropped, (torch.int64,), 1)
        M, n = sketch.sketch.shape[0], chosen[0].shape[-1]
        more = M, power(M), n, power(n), of_chosen
        fields = *self._signed(sketch), sketch.sketch, sketch.sketch.stride(0), *chosen, behind
        return Leaf(_spec(SKETCH, head_dim, power(head_dim), sketch.signs.shape[-1], *more), fields)

    def _signed(self, sketch: Any) -> tuple[Any, ...]:
        signs = self.plane("signs", sketch.signs, (torch.uint8,), 2)
        norms = self.plane("norms", sketch.norms, _HALVES, 1)
        self.plane("a sketch", sketch.sketch, (torch.float32,), 1)
        return *signs, *norms, float(sketch.factor)


def _scales(grid: GridSide) -> int:
    """Return the operand that a grid's scales are multiplied with, see `grid.py`."""
    packed = grid.axis == ("channel" if grid.side == "keys" else "token")
    lanes = 32  # lanes of a tile, which share a scale of the packed axis
    if grid.axis == "token" and grid.factor is not None:
        return int(TO_ELEMENTS.value)  # a tile of values may have several blocks, with a factor each
    if grid.axis == "token" and grid.group >= grid.head_dim:
        return int(TO_PRODUCT.value)
    return int((TO_COEFFICIENTS if packed and grid.group % lanes == 0 else TO_ELEMENTS).value)
