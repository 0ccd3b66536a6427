"""Encoding as the C++ backend does it: what the kernels take (`why_not_*`) and how they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels import cpu
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.encode_polar import stream_offsets
from tersekv.kernels.lanes import packed_shape

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _why_not(*tensors: tuple[str, Tensor | None]) -> str | None:
    """Of a call's tensors, by name."""
    if reason := cpu.why_not_built():
        return reason
    for name, tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_cpu:
            return f"{name} is on {tensor.device}, not on cpu"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
    return None


def _why_not_float32(*tensors: tuple[str, Tensor | None]) -> str | None:
    for name, tensor in tensors:
        if tensor is not None and tensor.dtype is not torch.float32:
            return f"{name} is {tensor.dtype}, not float32"
    return _why_not(*tensors)


def why_not_group_ranges(x: Tensor, place: GridPlace) -> str | None:
    """Why `group_ranges` does not take this call; None if it does."""
    return _why_not_float32(("x", x))


def why_not_encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> str | None:
    """Why `encode_grid` does not take this call; None if it does."""
    for name, plane in (("scale", scale), ("offset", offset)):
        if plane is not None and plane.dtype not in _FLOATS:
            return f"{name} is {plane.dtype}, not float32, float16 or bfloat16"
    return _why_not_float32(("x", x), ("table", table)) or _why_not(("scale", scale), ("offset", offset))


def why_not_pack_lanes(codes: Tensor, bits: int) -> str | None:
    """Why `pack_lanes` does not take this call; None if it does."""
    if codes.dtype not in _INTEGERS:
        return f"codes are {codes.dtype}, not integers of 8 to 64 bits"
    return _why_not(("codes", codes))


def why_not_encode_signs(x: Tensor, sketch: Tensor) -> str | None:
    """Why `encode_signs` does not take this call; None if it does."""
    return _why_not_float32(("x", x), ("sketch", sketch))


def why_not_encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> str | None:
    """Why `encode_polar` does not take this call; None if it does."""
    return _why_not_float32(("x", x), *(("a table", table) for table in tables))


def why_not_rotate_dense(x: Tensor, matrix: Tensor) -> str | None:
    """Why `rotate_dense` does not take this call; None if it does."""
    return _why_not_float32(("x", x), ("matrix", matrix))


def why_not_rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> str | None:
    """Why `rotate_hadamard` does not take this call; None if it does."""
    if order.dtype is not torch.int32:
        return f"order is {order.dtype}, not int32"
    return _why_not_float32(("x", x), ("matrix", matrix), ("signs", signs)) or _why_not(("order", order))


def why_not_encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> str | None:
    """Why `encode_trellis` does not take this call; None if it does."""
    floats = ("y", y), ("weight", weight), ("tables", tables)
    for name, x in floats:
        if not x.is_floating_point():
            return f"{name} is {x.dtype}, not a float"
    if bits.dtype is not torch.uint8:
        return f"bits is {bits.dtype}, not uint8"
    return _why_not(("bits", bits), *((name, x.detach()) for name, x in floats))


def _crossing(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


def _vectors(x: Tensor, last: str) -> Tensor:
    """x as [blocks, *last], contiguous."""
    axes = last.split(", ")
    if x.dim() < len(axes):
        raise ValueError(f"x: expected [..., {last}], got {list(x.shape)}")
    kept = x.shape[x.dim() - len(axes) :]
    return x.contiguous().view(math.prod(x.shape[: x.dim() - len(axes)]), *kept)


def _plane_shape(x: Tensor, place: GridPlace) -> tuple[int, int, int, int, int]:
    """What does not divide is for the kernel to name."""
    if x.dim() != 4:
        raise ValueError(f"x: expected [B, H, T, D], got {list(x.shape)}")
    if place.block_tokens < 1 or place.group < 1:
        raise ValueError(f"place: expected a group and block_tokens of at least 1, got {place}")
    B, H, T, D = x.shape
    return B, H, *place.plane(T, D)


def _plane(name: str, plane: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """float32, its sizes of 1 repeated."""
    if plane is None:
        return None
    own = (1,) * (len(shape) - plane.dim()) + tuple(plane.shape)
    if len(own) != len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=True)):
        raise ValueError(f"{name}: expected what broadcasts to {list(shape)}, got {list(plane.shape)}")
    return plane.float().expand(shape)


def _numbers(place: GridPlace) -> tuple[int, ...]:
    return place.side == "keys", place.bits, place.axis == "token", place.group, place.block_tokens


def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.encode_grid`: two planes, float32."""
    low, high = x.new_empty((2, *_plane_shape(x, place))).unbind(0)
    cpu.loaded().group_ranges(
        _crossing(x), _numbers(place), _crossing(low), _crossing(high), torch.get_num_threads()
    )  # fmt: skip
    return low, high


def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """See `tersekv.kernels.encode_grid`: int32 [B, H, N, lane groups, words, 16]."""
    shape = _plane_shape(x, place)
    planes = _plane("scale", scale, shape), _plane("offset", offset, shape)
    table = None if table is None else table.contiguous()
    t, D = place.block_tokens, x.shape[3]
    words = packed_shape(place.bits, *((D, t) if place.side == "keys" else (t, D)))
    out = x.new_empty((*shape[:3], *words), dtype=torch.int32)
    cpu.loaded().encode_grid(
        _crossing(x), _numbers(place), *(None if p is None else _crossing(p) for p in (*planes, table)), _crossing(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """See `tersekv.kernels.lanes`: codes [..., P, L] to int32 [..., lane groups, words, 16]."""
    if codes.dim() < 2:
        raise ValueError(f"codes: expected [..., P, L], got {list(codes.shape)}")
    *lead, P, L = codes.shape
    blocks, shape = codes.reshape(math.prod(lead), P, L), packed_shape(bits, P, L)
    out = codes.new_empty((len(blocks), *shape), dtype=torch.int32)
    cpu.loaded().pack_lanes(_crossing(blocks), codes.element_size(), bits, _crossing(out), torch.get_num_threads())
    return out.view(*lead, *shape)


def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """See `tersekv.kernels.encode_signs`: x [..., t, D] to uint8 [..., ceil(M/8), t]."""
    blocks, sketch = _vectors(x, "t, D"), sketch.contiguous()
    out = x.new_empty((len(blocks), -(-len(sketch) // 8), blocks.shape[1]), dtype=torch.uint8)
    cpu.loaded().encode_signs(_crossing(blocks), _crossing(sketch), _crossing(out), torch.get_num_threads())
    return out.view(*x.shape[:-2], *out.shape[1:])


def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.encode_polar`: angles uint8 [B, ..., bytes, t], radii float32 [B, ..., D/2^L, t]."""
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
        _crossing(vectors), tuple(level_bits), tuple(map(_crossing, tables)), *map(_crossing, outs),
        torch.get_num_threads(),
    )  # fmt: skip
    return angles, radii


def rotate_dense(x: Tensor, matrix: Tensor) -> Tensor:
    """See `tersekv.kernels.rotate`: x float32 [..., D] to its shape."""
    vectors, matrix = _vectors(x, "D"), matrix.contiguous()
    out = vectors.new_empty(vectors.shape)
    cpu.loaded().rotate_dense(_crossing(vectors), _crossing(matrix), _crossing(out), torch.get_num_threads())
    return out.view(x.shape)


def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """See `tersekv.kernels.rotate`: x float32 [..., D] to its shape."""
    vectors, parts = _vectors(x, "D"), [part.contiguous() for part in (matrix, order, signs)]
    out = vectors.new_empty(vectors.shape)
    cpu.loaded().rotate_hadamard(
        _crossing(vectors), *map(_crossing, parts), _crossing(out), torch.get_num_threads()
    )  # fmt: skip
    return out.view(x.shape)


def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """See `kernels/trellis.py`: y [R, n, D], weight and bits [R, D], tables [9, 256] to windows uint8 [R, n, D]."""
    y, weight, tables = (x.detach().float() for x in (y, weight, tables))
    windows = torch.empty_like(y, dtype=torch.uint8, memory_format=torch.contiguous_format)
    call = y, weight.contiguous(), bits.contiguous(), tables.contiguous()
    cpu.loaded().encode_trellis(*map(_crossing, call), windows.data_ptr(), torch.get_num_threads())
    return windows
