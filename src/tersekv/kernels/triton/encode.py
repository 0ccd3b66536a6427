"""Encoding on the Triton backend: checks of a call (`why_not_*`), which do no tensor work, and
launches. The kernels are imported at the first call, like those of attention."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import encode_grid as encode_grid_operators
from tersekv.kernels import encode_polar as encode_polar_operators
from tersekv.kernels import encode_signs as encode_signs_operators
from tersekv.kernels import encode_sparse as encode_sparse_operators
from tersekv.kernels import lanes as lanes_operators
from tersekv.kernels import rotate as rotate_operators
from tersekv.kernels import trellis as trellis_operators
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.encode_polar import stream_offsets
from tersekv.kernels.encode_sparse import BLOCK_TOKENS, MAX_CHANNELS, Entries, ranks_of
from tersekv.kernels.lanes import LANES, packed_shape
from tersekv.kernels.trellis_search import MOST_BITS, CostUnits, cost_units, first_search, scaled
from tersekv.kernels.triton import joins, on_own_device, why_not_usable

TILE = 128
"""Units of 32 codes, or entries of a range, that one program handles."""

BYTES = 8
"""Bytes of signs that one program computes for each token."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("tersekv.kernels.triton.encode_kernels")


def _why_not(x: Tensor, *more: Tensor | None) -> str | None:
    """Return the reason why no kernel runs on x and the other tensors of the call, or None."""
    if reason := why_not_usable(x.device):
        return reason.replace("query", "x")
    for other in more:
        if other is not None and other.device != x.device:
            return f"x is on {x.device}, another argument on {other.device}"
    for tensor in (x, *more):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            return "x needs a gradient"
    return None


def _why_not_blocks(x: Tensor, place: GridPlace) -> str | None:
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}, not float32, float16 or bfloat16"
    if x.dim() != 4 or x.shape[2] % place.block_tokens:
        return f"x is {list(x.shape)}, not [B, H, T, D] with T whole blocks of {place.block_tokens}"
    return None


def why_not_group_ranges(x: Tensor, place: GridPlace) -> str | None:
    """Return the reason why `group_ranges` does not support this call, or None."""
    return _why_not(x) or _why_not_blocks(x, place)


def why_not_encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> str | None:
    """Return the reason why `encode_grid` does not support this call, or None."""
    if reason := _why_not(x, scale, offset, table) or _why_not_blocks(x, place):
        return reason
    for name, plane in (("scale", scale), ("offset", offset)):
        if plane is not None and plane.dtype not in _FLOATS:
            return f"{name} is {plane.dtype}, not float32, float16 or bfloat16"
    if table is not None and table.dtype is not torch.float32:
        return f"table is {table.dtype}, not float32"
    return None


def why_not_pack_lanes(codes: Tensor, bits: int) -> str | None:
    """Return the reason why `pack_lanes` does not support this call, or None."""
    if codes.dtype not in _INTEGERS:
        return f"codes are {codes.dtype}, not integers of 8 to 64 bits"
    return _why_not(codes)


def why_not_encode_signs(x: Tensor, sketch: Tensor) -> str | None:
    """Return the reason why `encode_signs` does not support this call, or None."""
    for name, tensor in (("x", x), ("sketch", sketch)):
        if tensor.dtype is not torch.float32:
            return f"{name} is {tensor.dtype}, not float32"
    return _why_not(x, sketch)


def why_not_encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> str | None:
    """Return the reason why `encode_polar` does not support this call, or None."""
    for name, tensor in (("x", x), *(("a table", table) for table in tables)):
        if tensor.dtype is not torch.float32:
            return f"{name} is {tensor.dtype}, not float32"
    return _why_not(x, *tables)


def why_not_rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> str | None:
    """Return the reason why `rotate_hadamard` does not support this call, or None."""
    if x.dtype not in _FLOATS:
        return f"x is {x.dtype}, not float32, float16 or bfloat16"
    return _why_not(x, matrix, order, signs)


@joins(encode_grid_operators.group_ranges, unless=why_not_group_ranges)
@on_own_device
def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """Compute the ranges of groups, see `kernels/encode_grid.py`: two planes, float32."""
    B, H, T, D = x.shape
    N, rows, columns = place.plane(T, D)
    x = x.float()
    low, high = (x.new_empty((B, H, N, rows, columns)) for _ in range(2))
    if low.numel():
        _kernels().ranges[(B * H * N, -(-rows * columns // TILE))](
            low, high, x, *x.stride(), H, N, place.block_tokens, rows, columns, GROUP=place.group,
            PER_TOKEN=place.axis == "token", ENTRIES=TILE, num_warps=4,
        )  # fmt: skip
    return low, high


@joins(encode_grid_operators.encode_grid, unless=why_not_encode_grid)
@on_own_device
def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """Encode to a grid, see `kernels/encode_grid.py`: int32 [B, H, N, lane groups, words, 16]."""
    x, (B, H, T, D) = x.float(), x.shape
    N, shape = T // place.block_tokens, (B, H, *place.plane(T, D))
    planes = [(x,) if p is None else _strided(p.expand(shape)) for p in (scale, offset)]
    kernels = _kernels()
    what = kernels.INTEGERS if table is None else kernels.TABLE
    options = {"HAS_SCALE": scale is not None, "HAS_OFFSET": offset is not None, "WHAT": what.value}
    out = _pack(x, place, (B, H, N), planes, x if table is None else table.contiguous(), options)
    return out.view(B, H, N, *out.shape[1:])


@joins(lanes_operators.pack_lanes, unless=why_not_pack_lanes)
@on_own_device
def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, see `kernels/lanes.py`: codes [..., P, L] to int32 [..., lane groups, words, 16]."""
    *lead, P, _ = codes.shape
    blocks = codes.reshape(math.prod(lead), 1, *codes.shape[-2:])
    place = GridPlace("values", bits, "token", 1, P)
    options = {"HAS_SCALE": False, "HAS_OFFSET": False, "WHAT": _kernels().CODES.value}
    out = _pack(blocks, place, (len(blocks), 1, 1), [(codes,), (codes,)], codes, options)
    return out.view(*lead, *out.shape[1:])


@joins(encode_signs_operators.encode_signs, unless=why_not_encode_signs)
@on_own_device
def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """Encode signs, see `kernels/encode_signs.py`: x [..., t, D] to uint8 [..., ceil(M/8), t]."""
    (*lead, t, D), M = x.shape, len(sketch)
    x, sketch, rows = x.contiguous(), sketch.contiguous(), -(-M // 8)
    out = x.new_empty((*lead, rows, t), dtype=torch.uint8)
    if out.numel():
        _kernels().signs[(math.prod(lead), -(-t // LANES), -(-rows // BYTES))](
            out, x, sketch, t, D, M, rows, TOKENS=LANES, BYTES=BYTES, num_warps=4
        )
    return out


@joins(encode_polar_operators.encode_polar, unless=why_not_encode_polar)
@on_own_device
def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Encode to polar coordinates in two launches, see `kernels/encode_polar.py`: angles uint8
    [B, ..., bytes, t], radii float32 [B, ..., D/2^L, t]."""
    *lead, t, D = x.shape
    L, blocks, x = len(level_bits), math.prod(lead), x.contiguous()
    rows, entries = -(-stream_offsets(level_bits, D)[-1] // 8), D - (D >> L)
    angles = x.new_empty((*lead, rows, t), dtype=torch.uint8)
    codes = x.new_empty((*lead, entries, t), dtype=torch.uint8)
    radii = x.new_empty((*lead, D >> L, t))
    if blocks * t:
        kernels, options = _kernels(), {"LEVEL_BITS": tuple(level_bits), "TOKENS": power(t), "num_warps": 4}
        by_row = tuple((table, table.stride(0) if len(table.shape) == 2 and len(table) > 1 else 0) for table in tables)
        chunks = power(min(D >> L, max(1, TILE >> L)))
        kernels.polar_codes[(blocks, -(-(D >> L) // chunks))](
            codes, radii, x, by_row, blocks // lead[0], t, D, entries, CHUNKS=chunks, **options
        )
        kernels.polar_pack[(blocks, -(-rows // BYTES))](angles, codes, t, D, entries, rows, BYTES=BYTES, **options)
    return angles, radii


@joins(rotate_operators.rotate_hadamard, unless=why_not_rotate_hadamard)
@on_own_device
def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """Rotate by a random Hadamard rotation, see `kernels/rotate.py`: x [..., D] to float32 of its shape."""
    D, out = x.shape[-1], x.new_empty(x.shape, dtype=torch.float32)
    rows, block = math.prod(x.shape[:-1]), D & -D
    tile = max(1, TILE * 8 // block)
    if rows:
        _kernels().hadamard[(-(-rows // tile), D // block)](
            out, x.float().contiguous(), matrix, order, signs, rows, D, ROWS=tile, BLOCK=block,
            LOG=block.bit_length() - 1, num_warps=4,
        )  # fmt: skip
    return out


def _strided(plane: Tensor) -> tuple[Any, ...]:
    return plane, *plane.stride()


def _pack(
    x: Tensor, place: GridPlace, blocks: tuple[int, int, int], planes: list[Any], table: Tensor, options: dict[str, Any]
) -> Tensor:
    """Pack blocks [B, H, N] of x to int32 [B·H·N, lane groups, words, 16]."""
    t, D, keys = place.block_tokens, x.shape[-1], place.side == "keys"
    P, L = (D, t) if keys else (t, D)
    groups, W, _ = packed_shape(place.bits, P, L)
    _, H, N = blocks
    out = x.new_empty((math.prod(blocks), groups, W, LANES), dtype=torch.int32)
    if out.numel():
        units = power(-(-P // 32))
        lanes = max(LANES, min(power(L), TILE // units))
        _kernels().pack[(len(out), -(-groups * LANES // lanes))](
            out, x, *x.stride(), *planes, table, H, N, t, P, L, groups * LANES, W, BITS=place.bits, OF_KEYS=keys,
            GROUP=place.group, PER_TOKEN=place.axis == "token", LANES=lanes, UNITS=units, num_warps=4, **options,
        )  # fmt: skip
    return out


def power(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


OUTLIER_TILE = 4096
"""Elements of a block that a program handles at a time."""

MOST_ENTRIES = 8192
"""Most elements of a vector that one program sorts."""


def why_not_quantiles(vectors: Tensor, share: float) -> str | None:
    """Return the reason why `quantiles` does not support this call, or None."""
    if reason := why_not_usable(vectors.device) or _why_not_float32("vectors", vectors):
        return reason.replace("query", "vectors")
    if not 1 <= vectors.shape[-1] <= MOST_ENTRIES:
        return f"vectors have {vectors.shape[-1]} entries, not 1 to {MOST_ENTRIES}"
    return None


def why_not_pack_outliers(residual: Tensor, chosen: Tensor) -> str | None:
    """Return the reason why `pack_outliers` does not support this call, or None."""
    if reason := why_not_usable(residual.device) or _why_not_float32("residual", residual):
        return reason.replace("query", "residual")
    if chosen.device != residual.device or chosen.dtype is not torch.bool or chosen.shape != residual.shape:
        return f"chosen is {chosen.dtype} {list(chosen.shape)} on {chosen.device}, not bool like the residual"
    if residual.dim() != 4 or residual.shape[2] % BLOCK_TOKENS or residual.shape[3] > MAX_CHANNELS:
        return f"residual is {list(residual.shape)}, not [B, H, T, D] with T whole blocks and D at most {MAX_CHANNELS}"
    return None


def _why_not_float32(name: str, x: Tensor) -> str | None:
    if x.dtype is not torch.float32:
        return f"{name} is {x.dtype}, not float32"
    return f"{name} needs a gradient" if x.requires_grad and torch.is_grad_enabled() else None


@joins(encode_sparse_operators.quantiles, unless=why_not_quantiles)
@on_own_device
def quantiles(vectors: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Compute thresholds in one launch, see `kernels/encode_sparse.py`: vectors [..., n] to two
    thresholds [...]."""
    n = vectors.shape[-1]
    low, high = (vectors.new_empty(vectors.shape[:-1]) for _ in range(2))
    first, second, part = ranks_of(share, n)
    if low.numel():
        # No fused multiply-add, because the reference rounds in between.
        _kernels().quantiles[(low.numel(),)](
            low, high, vectors.contiguous(), n, first, second, 1.0 - part, part, ENTRIES=power(n), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return low, high


@joins(encode_sparse_operators.pack_outliers, unless=why_not_pack_outliers)
@on_own_device
def pack_outliers(residual: Tensor, chosen: Tensor) -> Entries:
    """Pack outliers, see `kernels/encode_sparse.py`: residual and chosen [B, H, T, D]. Two
    launches; between them the host waits for the number of entries."""
    B, H, T, D = residual.shape
    N, marks = T // BLOCK_TOKENS, chosen.view(torch.uint8)
    counts = residual.new_empty(N * B * H, dtype=torch.int32)
    options = {"TOKENS": min(BLOCK_TOKENS, OUTLIER_TILE // power(D)), "CHANNELS": power(D), "num_warps": 4}
    if len(counts):
        _kernels().count_outliers[(len(counts),)](counts, marks, *marks.stride(), B, H, D, **options)
    ends = counts.cumsum(0, dtype=torch.int32)
    starts, total = ends - counts, int(ends[-1]) if len(counts) else 0
    places, values = (residual.new_empty(total, dtype=dtype) for dtype in (torch.int16, torch.float16))
    if total:
        _kernels().pack_outliers[(len(counts),)](
            places, values, starts, marks, *marks.stride(), residual, *residual.stride(), B, H, D, **options
        )
    return Entries(starts.view(N, B, H).permute(1, 2, 0), places, values)


VECTORS_AT_A_TIME = 4096
"""Vectors of all rows that are searched at a time. The stored paths take 16 bytes per possible bit
of each vector."""

VECTORS = 1
"""Vectors, and warps, of one program. Warps of a program would wait for each other at every component."""


def why_not_encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> str | None:
    """Return the reason why `encode_trellis` does not support this call, or None."""
    if reason := why_not_usable(y.device):
        return reason.replace("query", "y")
    for name, x in (("y", y), ("weight", weight), ("bits", bits), ("tables", tables)):
        if x.device != y.device:
            return f"y is on {y.device}, {name} on {x.device}"
        if x.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
        if name != "bits" and not x.is_floating_point():
            return f"{name} is {x.dtype}, not a float"
    return None if bits.dtype is torch.uint8 else f"bits is {bits.dtype}, not uint8"


@joins(trellis_operators.encode_trellis, unless=why_not_encode_trellis)
@on_own_device
def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """Search trellis codes, see `kernels/trellis.py`: y [R, n, D], weight and bits [R, D], tables
    [9, 256] to windows uint8 [R, n, D]. Four launches per 4,096 vectors: two searches, each
    followed by a trace back."""
    R, n, D = y.shape
    if not y.numel():
        return y.new_empty((R, n, D), dtype=torch.uint8)
    units, bits = cost_units(weight.float(), bits, tables.float()), bits.contiguous()
    place, stop = (x.int() for x in first_search(bits))
    at_a_time = max(1, VECTORS_AT_A_TIME // R)
    parts = [
        _windows(scaled(part, units.unit.unsqueeze(1), units.limit.unsqueeze(1)), units, bits, place, stop, tables)
        for part in y.float().split(at_a_time, dim=1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _windows(y: Tensor, units: CostUnits, bits: Tensor, place: Tensor, stop: Tensor, tables: Tensor) -> Tensor:
    R, n, D = y.shape
    windows, taken = y.new_empty((R, n, D), dtype=torch.uint8), stored_paths(y)
    units = units._replace(factor=units.factor.contiguous())
    search_windows(windows, taken, y.contiguous(), units, bits, place, stop, tables)
    return windows


def stored_paths(y: Tensor) -> Tensor:
    """Allocate the paths of a search in vectors y [R, n, D]: 16 bytes per possible bit of a vector."""
    kernels, (R, n, D) = importlib.import_module("tersekv.kernels.triton.trellis"), y.shape
    return y.new_empty((R, n, MOST_BITS * D, kernels.ROUND_BYTES.value), dtype=torch.uint8)


def search_windows(
    windows: Tensor,
    taken: Tensor,
    y: Tensor,
    units: CostUnits,
    bits: Tensor,
    place: Tensor,
    stop: Tensor,
    tables: Tensor,
    unless: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Search windows uint8 [R, n, D] of scaled components int32 [R, n, D], in four launches.

    taken: see `stored_paths`. tables: [9, 256]. unless: errors and bounds float32 [R, n]. Programs are
    skipped if all their vectors have errors below the bounds; their windows are not written.
    """
    kernels, (R, n, D) = importlib.import_module("tersekv.kernels.triton.trellis"), y.shape
    near = importlib.import_module("tersekv.kernels.triton.tables").near(tables)
    ends, (least, enough) = y.new_empty((R, n), dtype=torch.int32), unless or (y, y)
    grid, sizes = (-(-n // VECTORS), R), (least, enough, n, D, MOST_BITS * D)
    for closed in (False, True):
        options = {"CLOSED": closed, "SOME": unless is not None, "VECTORS": VECTORS, "num_warps": VECTORS}
        kernels.search[grid](taken, ends, y, units.factor, bits, units.entries, near, place, stop, *sizes, **options)
        kernels.trace[grid](windows, ends, taken, bits, place, stop, *sizes, **options)
