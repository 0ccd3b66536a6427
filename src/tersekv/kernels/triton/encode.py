"""Encoding as the Triton backend does it: what the kernels take (`why_not_*`) and how they are launched, one launch per
op. Like those of attention they are loaded at the first call."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.encode_polar import stream_offsets
from tersekv.kernels.lanes import LANES, packed_shape
from tersekv.kernels.triton import on_own_device, why_not_usable

TILE = 128
"""Units of 32 codes, or entries of a range, that a program takes."""

BYTES = 8
"""Of signs that a program makes of each token."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@functools.cache
def _kernels(name: str = "quantise") -> ModuleType:
    return importlib.import_module(f"tersekv.kernels.triton.{name}")


def _why_not(x: Tensor, *more: Tensor | None) -> str | None:
    """Of x and what goes with it."""
    if reason := why_not_usable(x.device):
        return reason.replace("query", "x")
    for other in more:
        if other is not None and other.device != x.device:
            return f"x is on {x.device}, what goes with it on {other.device}"
    for tensor in (x, *more):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            return "x needs a gradient"
    return None


def _why_not_blocks(x: Tensor, place: GridPlace) -> str | None:
    if x.dtype is not torch.float32:
        return f"x is {x.dtype}, not float32"
    if x.dim() != 4 or x.shape[2] % place.block_tokens:
        return f"x is {list(x.shape)}, not [B, H, T, D] with T whole blocks of {place.block_tokens}"
    return None


def why_not_group_ranges(x: Tensor, place: GridPlace) -> str | None:
    """Why `group_ranges` does not take this call; None if it does."""
    return _why_not(x) or _why_not_blocks(x, place)


def why_not_encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> str | None:
    """Why `encode_grid` does not take this call; None if it does."""
    if reason := _why_not(x, scale, offset, table) or _why_not_blocks(x, place):
        return reason
    for name, plane in (("scale", scale), ("offset", offset)):
        if plane is not None and plane.dtype not in _FLOATS:
            return f"{name} is {plane.dtype}, not float32, float16 or bfloat16"
    if table is not None and table.dtype is not torch.float32:
        return f"table is {table.dtype}, not float32"
    return None


def why_not_pack_lanes(codes: Tensor, bits: int) -> str | None:
    """Why `pack_lanes` does not take this call; None if it does."""
    if codes.dtype not in _INTEGERS:
        return f"codes are {codes.dtype}, not integers of 8 to 64 bits"
    return _why_not(codes)


def why_not_encode_signs(x: Tensor, sketch: Tensor) -> str | None:
    """Why `encode_signs` does not take this call; None if it does."""
    for name, tensor in (("x", x), ("sketch", sketch)):
        if tensor.dtype is not torch.float32:
            return f"{name} is {tensor.dtype}, not float32"
    return _why_not(x, sketch)


def why_not_encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> str | None:
    """Why `encode_polar` does not take this call; None if it does."""
    for name, tensor in (("x", x), *(("a table", table) for table in tables)):
        if tensor.dtype is not torch.float32:
            return f"{name} is {tensor.dtype}, not float32"
    return _why_not(x, *tables)


def why_not_rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> str | None:
    """Why `rotate_hadamard` does not take this call; None if it does."""
    if x.dtype is not torch.float32:
        return f"x is {x.dtype}, not float32"
    return _why_not(x, matrix, order, signs)


@on_own_device
def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.encode_grid`: two planes, float32."""
    B, H, T, D = x.shape
    N, rows, columns = place.plane(T, D)
    low, high = (x.new_empty((B, H, N, rows, columns)) for _ in range(2))
    if low.numel():
        _kernels().ranges[(B * H * N, -(-rows * columns // TILE))](
            low, high, x, *x.stride(), H, N, place.block_tokens, rows, columns, GROUP=place.group,
            PER_TOKEN=place.axis == "token", ENTRIES=TILE, num_warps=4,
        )  # fmt: skip
    return low, high


@on_own_device
def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """See `tersekv.kernels.encode_grid`: int32 [B, H, N, lane groups, words, 16]."""
    B, H, T, D = x.shape
    N, shape = T // place.block_tokens, (B, H, *place.plane(T, D))
    planes = [(x,) if p is None else _strided(p.expand(shape)) for p in (scale, offset)]
    kernels = _kernels()
    what = kernels.INTEGERS if table is None else kernels.TABLE
    options = {"HAS_SCALE": scale is not None, "HAS_OFFSET": offset is not None, "WHAT": what.value}
    out = _pack(x, place, (B, H, N), planes, x if table is None else table.contiguous(), options)
    return out.view(B, H, N, *out.shape[1:])


@on_own_device
def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """See `tersekv.kernels.lanes`: codes [..., P, L] to int32 [..., lane groups, words, 16]."""
    *lead, P, _ = codes.shape
    blocks = codes.reshape(math.prod(lead), 1, *codes.shape[-2:])
    place = GridPlace("values", bits, "token", 1, P)
    options = {"HAS_SCALE": False, "HAS_OFFSET": False, "WHAT": _kernels().CODES.value}
    out = _pack(blocks, place, (len(blocks), 1, 1), [(codes,), (codes,)], codes, options)
    return out.view(*lead, *out.shape[1:])


@on_own_device
def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """See `tersekv.kernels.encode_signs`: x [..., t, D] to uint8 [..., ceil(M/8), t]."""
    (*lead, t, D), M = x.shape, len(sketch)
    x, sketch, rows = x.contiguous(), sketch.contiguous(), -(-M // 8)
    out = x.new_empty((*lead, rows, t), dtype=torch.uint8)
    if out.numel():
        _kernels().signs[(math.prod(lead), -(-t // LANES), -(-rows // BYTES))](
            out, x, sketch, t, D, M, rows, TOKENS=LANES, BYTES=BYTES, num_warps=4
        )
    return out


@on_own_device
def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.encode_polar`: angles uint8 [B, ..., bytes, t], radii float32 [B, ..., D/2^L, t]. Two
    launches."""
    *lead, t, D = x.shape
    L, blocks, x = len(level_bits), math.prod(lead), x.contiguous()
    rows, entries = -(-stream_offsets(level_bits, D)[-1] // 8), D - (D >> L)
    angles = x.new_empty((*lead, rows, t), dtype=torch.uint8)
    codes = x.new_empty((*lead, entries, t), dtype=torch.uint8)
    radii = x.new_empty((*lead, D >> L, t))
    if blocks * t:
        kernels, options = _kernels("angles"), {"LEVEL_BITS": tuple(level_bits), "TOKENS": _power(t), "num_warps": 4}
        by_row = tuple((table, table.stride(0) if len(table.shape) == 2 and len(table) > 1 else 0) for table in tables)
        chunks = _power(min(D >> L, max(1, TILE >> L)))
        kernels.polar_codes[(blocks, -(-(D >> L) // chunks))](
            codes, radii, x, by_row, blocks // lead[0], t, D, entries, CHUNKS=chunks, **options
        )
        kernels.polar_pack[(blocks, -(-rows // BYTES))](angles, codes, t, D, entries, rows, BYTES=BYTES, **options)
    return angles, radii


@on_own_device
def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """See `tersekv.kernels.rotate`: x float32 [..., D] to its shape."""
    D, out = x.shape[-1], x.new_empty(x.shape)
    rows, block = math.prod(x.shape[:-1]), D & -D
    tile = max(1, TILE * 8 // block)
    if rows:
        _kernels("hadamard").hadamard[(-(-rows // tile), D // block)](
            out, x.contiguous(), matrix, order, signs, rows, D, ROWS=tile, BLOCK=block, LOG=block.bit_length() - 1,
            num_warps=4,
        )  # fmt: skip
    return out


def _strided(plane: Tensor) -> tuple[Any, ...]:
    return plane, *plane.stride()


def _pack(
    x: Tensor, place: GridPlace, blocks: tuple[int, int, int], planes: list[Any], table: Tensor, options: dict[str, Any]
) -> Tensor:
    """Launch over blocks [B, H, N] of x: int32 [B·H·N, lane groups, words, 16]."""
    t, D, keys = place.block_tokens, x.shape[-1], place.side == "keys"
    P, L = (D, t) if keys else (t, D)
    groups, W, _ = packed_shape(place.bits, P, L)
    _, H, N = blocks
    out = x.new_empty((math.prod(blocks), groups, W, LANES), dtype=torch.int32)
    if out.numel():
        units = _power(-(-P // 32))
        lanes = max(LANES, min(_power(L), TILE // units))
        _kernels().pack[(len(out), -(-groups * LANES // lanes))](
            out, x, *x.stride(), *planes, table, H, N, t, P, L, groups * LANES, W, BITS=place.bits, OF_KEYS=keys,
            GROUP=place.group, PER_TOKEN=place.axis == "token", LANES=lanes, UNITS=units, num_warps=4, **options,
        )  # fmt: skip
    return out


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
