"""Encoding by the C++ extension. It raises `NotTaken` for inputs that it does not support."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels import cpu, lanes, rotate, trellis
from tersekv.kernels import encode_grid as grid
from tersekv.kernels import encode_polar as polar
from tersekv.kernels import encode_signs as signs
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.encode_polar import stream_offsets
from tersekv.kernels.lanes import packed_shape
from tersekv.kernels.registry import NotTaken
from tersekv.threads import threads

MOST_BLOCK_TOKENS = 1 << 20


def _vectors(x: Tensor, last: str) -> Tensor:
    """Return x as [blocks, *last], contiguous."""
    axes = last.split(", ")
    if x.dim() < len(axes):
        raise ValueError(f"x: expected [..., {last}], got {list(x.shape)}")
    kept = x.shape[x.dim() - len(axes) :]
    return x.contiguous().view(math.prod(x.shape[: x.dim() - len(axes)]), *kept)


def _plane_shape(x: Tensor, place: GridPlace) -> tuple[int, int, int, int, int]:
    """Return the shape of a scale. The kernel itself reports sizes that do not divide."""
    if x.dim() != 4:
        raise ValueError(f"x: expected [B, H, T, D], got {list(x.shape)}")
    if not 1 <= place.block_tokens <= MOST_BLOCK_TOKENS or place.group < 1:
        raise ValueError(
            f"place: expected a group of at least 1 and block_tokens of at least 1 and at most {MOST_BLOCK_TOKENS}, "
            f"got {place}"
        )
    B, H, T, D = x.shape
    return B, H, *place.plane(T, D)


def _plane(name: str, plane: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Expand a scale or offset to its full shape, float32."""
    if plane is None:
        return None
    if not plane.is_floating_point() or plane.dtype is torch.float64:
        raise NotTaken(f"{name} is {plane.dtype}, not float32, float16 or bfloat16")
    own = (1,) * (len(shape) - plane.dim()) + tuple(plane.shape)
    if len(own) != len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=True)):
        raise ValueError(f"{name}: expected a shape that broadcasts to {list(shape)}, got {list(plane.shape)}")
    return plane.float().expand(shape)


def _numbers(place: GridPlace) -> tuple[int, ...]:
    return place.side == "keys", place.bits, place.axis == "token", place.group, place.block_tokens


@grid.group_ranges.by("cpu")
def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """Compute the ranges of groups, see `kernels/encode_grid.py`: two planes, float32."""
    shape = _plane_shape(x, place)
    low, high = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    cpu.loaded().group_ranges(
        x, _numbers(place), low, high, threads()
    )  # fmt: skip
    return low, high


@grid.encode_grid.by("cpu")
def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """Encode to a grid, see `kernels/encode_grid.py`: int32 [B, H, N, lane groups, words, 16]."""
    shape = _plane_shape(x, place)
    planes = _plane("scale", scale, shape), _plane("offset", offset, shape)
    table = None if table is None else table.contiguous()
    t, D = place.block_tokens, x.shape[3]
    words = packed_shape(place.bits, *((D, t) if place.side == "keys" else (t, D)))
    out = x.new_empty((*shape[:3], *words), dtype=torch.int32)
    cpu.loaded().encode_grid(
        x, _numbers(place), *planes, table, out,
        threads(),
    )  # fmt: skip
    return out


@lanes.pack_lanes.by("cpu")
def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, see `kernels/lanes.py`: codes [..., P, L] to int32 [..., lane groups, words, 16]."""
    if codes.dim() < 2:
        raise ValueError(f"codes: expected [..., P, L], got {list(codes.shape)}")
    *lead, P, L = codes.shape
    blocks, shape = codes.reshape(math.prod(lead), P, L), packed_shape(bits, P, L)
    out = codes.new_empty((len(blocks), *shape), dtype=torch.int32)
    cpu.loaded().pack_lanes(blocks, bits, out, threads())
    return out.view(*lead, *shape)


@signs.encode_signs.by("cpu")
def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """Encode signs, see `kernels/encode_signs.py`: x [..., t, D] to uint8 [..., ceil(M/8), t]."""
    blocks, sketch = _vectors(x, "t, D"), sketch.contiguous()
    out = x.new_empty((len(blocks), -(-len(sketch) // 8), blocks.shape[1]), dtype=torch.uint8)
    cpu.loaded().encode_signs(blocks, sketch, out, threads())
    return out.view(*x.shape[:-2], *out.shape[1:])


@polar.encode_polar.by("cpu")
def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Encode to polar coordinates, see `kernels/encode_polar.py`: angles uint8 [B, ..., bytes, t],
    radii float32 [B, ..., D/2^L, t]."""
    blocks = _vectors(x, "t, D")
    _, t, D = blocks.shape
    if len(tables) != len(level_bits) or not all(1 <= bits <= 8 for bits in level_bits):
        raise ValueError(f"level_bits: expected 1 to 8 for each of {len(tables)} tables, got {list(level_bits)}")
    lead, rows = x.shape[:-2], x.shape[0] if x.dim() > 2 else 1
    tables = [table.contiguous() for table in tables]
    angles = x.new_empty((*lead, -(-stream_offsets(level_bits, D)[-1] // 8), t), dtype=torch.uint8)
    radii = x.new_empty((*lead, D >> len(level_bits), t))
    by_row = [(rows, len(blocks) // max(rows, 1), *part.shape[-2:]) for part in (blocks, angles, radii)]
    vectors, *outs = (part.view(shape) for part, shape in zip((blocks, angles, radii), by_row, strict=True))
    cpu.loaded().encode_polar(
        vectors, tuple(level_bits), tuple(tables), *outs,
        threads(),
    )  # fmt: skip
    return angles, radii


@rotate.rotate_dense.by("cpu")
def rotate_dense(x: Tensor, matrix: Tensor) -> Tensor:
    """Rotate by a dense matrix, see `kernels/rotate.py`: x [..., D] to float32 of its shape."""
    vectors, matrix = _vectors(x, "D"), matrix.contiguous()
    out = vectors.new_empty(vectors.shape, dtype=torch.float32)
    cpu.loaded().rotate_dense(vectors, matrix, out, threads())
    return out.view(x.shape)


@rotate.rotate_hadamard.by("cpu")
def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """Rotate by a random Hadamard rotation, see `kernels/rotate.py`: x [..., D] to float32 of its shape."""
    vectors, parts = _vectors(x, "D"), [part.contiguous() for part in (matrix, order, signs)]
    out = vectors.new_empty(vectors.shape, dtype=torch.float32)
    cpu.loaded().rotate_hadamard(
        vectors, *parts, out, threads()
    )  # fmt: skip
    return out.view(x.shape)


@trellis.encode_trellis.by("cpu")
def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """See `kernels/trellis.py`: y [R, n, D], weight and bits [R, D], tables [9, 256] to windows uint8 [R, n, D]."""
    call = _trellis_call(y, weight, bits, tables)
    windows = torch.empty_like(call[0], dtype=torch.uint8, memory_format=torch.contiguous_format)
    cpu.loaded().encode_trellis(*call, windows, threads())
    return windows


@trellis.pack_trellis.by("cpu")
def pack_trellis(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int], enough: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels/trellis.py`: stream int16 [R, n, words] and gain codes uint8 [R, n]."""
    call = _trellis_call(y, weight, bits, tables)
    R, n, _ = y.shape
    stream, gain = y.new_empty((R, n, words), dtype=torch.int16), y.new_empty((R, n), dtype=torch.uint8)
    cpu.loaded().pack_trellis(*call, steps, enough.float().contiguous(), stream, gain, threads())
    return stream, gain


@trellis.pack_vectors.by("cpu")
def pack_vectors(
    x: Tensor,
    shift: Tensor,
    inverse: Tensor,
    of: Tensor,
    weight: Tensor,
    bits: Tensor,
    tables: Tensor,
    words: int,
    steps: list[int],
    enough: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/trellis.py`: stream int16 [R, n, words], gain codes uint8 and lengths float32 [R, n]."""
    vectors, *rest = _trellis_call(x, weight, bits, tables)
    R, n, D = x.shape
    matrix = inverse.detach().float().contiguous()
    if D % lanes.LANES:
        matrix = torch.nn.functional.pad(matrix, (0, -D % lanes.LANES))
    stream, gain = x.new_empty((R, n, words), dtype=torch.int16), x.new_empty((R, n), dtype=torch.uint8)
    length = x.new_empty((R, n), dtype=torch.float32)
    cpu.loaded().pack_vectors(
        vectors, shift.detach().float().contiguous(), matrix, of.contiguous(), *rest, steps,
        enough.float().contiguous(), stream, gain, length, threads(),
    )  # fmt: skip
    return stream, gain, length


def _trellis_call(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments as the extension takes them."""
    for name, x in (("y", y), ("weight", weight), ("tables", tables)):
        if not x.is_floating_point():
            raise NotTaken(f"{name} is {x.dtype}, not a float")
    y, weight, tables = (x.detach().float() for x in (y, weight, tables))
    return y, weight.contiguous(), bits.contiguous(), tables.contiguous()
