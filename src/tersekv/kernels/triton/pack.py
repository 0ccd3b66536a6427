"""Launches of `pack_kernels.py`: packing of trellis codes (`kernels/trellis.py`), and products with a
basis of 6-bit entries (`kernels/basis.py`)."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import basis as basis_operators
from tersekv.kernels import trellis as trellis_operators
from tersekv.kernels.trellis_search import CostUnits
from tersekv.kernels.triton import encode, joins, on_own_device, why_not_usable

VECTORS = 4
"""Vectors for which one program compares gains."""

WORDS = 16
"""Words of a stream that one program writes."""

ROWS, OUTPUTS = 4, 16
"""Vectors and results of one program of a product with a basis."""

MOST_ROWS, MOST_CHANNELS = 64, 512
"""Most vectors per head, and channels, of the kernel for products. For more, torch's matrix product is
fast."""

MOST_INVERTED = 128
"""Most channels of a basis that one program inverts in its registers."""


@functools.cache
def _kernels() -> ModuleType:
    return importlib.import_module("tersekv.kernels.triton.pack_kernels")


def why_not_pack_trellis(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int], enough: Tensor
) -> str | None:
    """Return the reason why `pack_trellis` does not support this call, or None."""
    if reason := encode.why_not_encode_trellis(y, weight, bits, tables):
        return reason
    return None if enough.device == y.device else f"y is on {y.device}, enough on {enough.device}"


def why_not_pack_vectors(x: Tensor, shift: Tensor, inverse: Tensor, of: Tensor, *rest: Any) -> str | None:
    """Return the reason why `pack_vectors` does not support this call, or None."""
    for name, other in (("shift", shift), ("inverse", inverse), ("of", of)):
        if other.device != x.device:
            return f"x is on {x.device}, {name} on {other.device}"
        if other.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
    return why_not_pack_trellis(x, *rest)


@joins(trellis_operators.pack_trellis, unless=why_not_pack_trellis)
@on_own_device
def pack_trellis(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int], enough: Tensor
) -> tuple[Tensor, Tensor]:
    """Pack vectors, see `kernels/trellis.py`: stream int16 [R, n, words] and gain codes uint8 [R, n]."""
    return _packed(y, weight, bits, tables, words, steps, enough)[:2]


@joins(trellis_operators.pack_vectors, unless=why_not_pack_vectors)
@on_own_device
def pack_vectors(x: Tensor, shift: Tensor, inverse: Tensor, of: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Pack vectors by their components, see `kernels/trellis.py`: stream int16 [R, n, words], gain
    codes uint8 and root mean squares float32 [R, n]."""
    return _packed((x - shift.unsqueeze(1)).double() @ inverse.double()[of], *rest)


def _packed(
    y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, words: int, steps: list[int], enough: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return streams, gain codes and root mean squares. With three gains these are 18 launches per
    4,096 vectors, and the host waits for none but at the first call, see `tables.near`."""
    R, n, D = y.shape
    if not y.numel():
        empty = y.new_zeros((R, n, words), dtype=torch.int16)
        return empty, y.new_zeros((R, n), dtype=torch.uint8), y.new_zeros((R, n), dtype=torch.float32)
    weight, bits, tables, enough = (x.contiguous() for x in (weight.float(), bits, tables.float(), enough.float()))
    entries = y.new_empty(tables.shape, dtype=torch.int16)
    factor = y.new_empty((R, D), dtype=torch.int16)
    unit, limit, reach = (y.new_empty((R, D), dtype=torch.float32) for _ in range(3))
    place, stop = (y.new_empty(R, dtype=torch.int32) for _ in range(2))
    # No fused multiply-add, because the reference rounds in between.
    options = {"CHANNELS": encode.power(D), "num_warps": 4, "enable_fp_fusion": False}
    _kernels().units[(R,)](
        entries, factor, unit, limit, reach, place, stop, weight, bits, tables, D, **options
    )  # fmt: skip
    units = CostUnits(entries, factor, unit, limit)
    more = words, steps, enough
    parts = [
        _packed_part(part.float().contiguous(), weight, bits, tables, units, reach, place, stop, *more)
        for part in y.split(max(1, encode.VECTORS_AT_A_TIME // R), dim=1)
    ]
    if len(parts) == 1:
        return parts[0]
    stream, gain, length = (torch.cat(planes, dim=1) for planes in zip(*parts, strict=True))
    return stream, gain, length


def _packed_part(
    y: Tensor,
    weight: Tensor,
    bits: Tensor,
    tables: Tensor,
    units: CostUnits,
    reach: Tensor,
    place: Tensor,
    stop: Tensor,
    words: int,
    steps: list[int],
    enough: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels, (R, n, D) = _kernels(), y.shape
    scaled, paths = y.new_empty(y.shape, dtype=torch.int32), encode.stored_paths(y)
    windows, found = (y.new_empty(y.shape, dtype=torch.uint8) for _ in range(2))
    tried, middle, kept = (y.new_empty((R, n), dtype=torch.uint8) for _ in range(3))
    length, least, last = (y.new_empty((R, n)) for _ in range(3))
    grid, own = (-(-n // VECTORS), R), (units.unit, units.limit)
    options = {"CHANNELS": encode.power(D), "num_warps": 4, "enable_fp_fusion": False}
    kernels.first_gain[grid](
        scaled, length, tried, kept, least, last, y, bits, *own, reach, enough, n, D, VECTORS=VECTORS, **options
    )  # fmt: skip
    for i, step in enumerate([*steps, None]):
        unless = (least, last) if i else None
        encode.search_windows(found, paths, scaled, units, bits, place, stop, tables, unless)
        kernels.keep_better[grid](
            scaled, windows, tried, middle, kept, least, last, found, y, weight, bits, tables, *own, n, D, step or 0,
            FIRST=i == 0, NEXT=step is not None, VECTORS=VECTORS, **options,
        )  # fmt: skip
    stream = y.new_empty((R, n, words), dtype=torch.int16)
    if words:
        kernels.write_stream[(n, R, -(-words // WORDS))](
            stream, windows, bits, n, D, words, WORDS=WORDS, CHANNELS=encode.power(D), num_warps=1
        )  # fmt: skip
    return stream, kept, length


def why_not_basis_components(x: Tensor, basis: Tensor, channels: Tensor) -> str | None:
    """Return the reason why `basis_components` does not support this call, or None."""
    if reason := why_not_usable(x.device):
        return reason.replace("query", "x")
    for name, other in (("x", x), ("basis", basis), ("channels", channels)):
        if other.device != x.device:
            return f"x is on {x.device}, {name} on {other.device}"
        if other.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
    if x.dtype is not torch.float32 or basis.dtype is not torch.uint8 or not channels.is_floating_point():
        return f"x is {x.dtype}, basis {basis.dtype}, channels {channels.dtype}, not float32, uint8 and a float"
    (B, H, _, D), rows = x.shape, len(basis)
    shapes = (rows, H, 3 * -(-(D**2) // 4)), (rows, H, D)
    if rows not in (1, B) or (basis.shape, channels.shape) != shapes:
        return f"basis is {list(basis.shape)} and channels {list(channels.shape)}, not {shapes[0]} and {shapes[1]}"
    return None


def why_not_basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> str | None:
    """Return the reason why `basis_product` does not support this call, or None."""
    return why_not_basis_components(x, basis, channels)


@joins(basis_operators.basis_product, unless=why_not_basis_product)
@on_own_device
def basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> Tensor:
    """Multiply with a basis in one launch, see `kernels/basis.py`: x float32 [B, H, R, D] to its
    shape."""
    B, H, R, D = x.shape
    if R > MOST_ROWS or D > MOST_CHANNELS:
        product: Tensor = basis_operators.basis_product.reference(x, basis, channels, combine)
        return product
    out = x.new_empty(x.shape)
    if out.numel():
        _kernels().basis_product[(B * H, -(-D // OUTPUTS), -(-R // ROWS))](
            out, x, *x.stride(), *_by_head(basis), *_by_head(channels), H, R, D, COMBINE=combine, ROWS=ROWS,
            OUTPUTS=OUTPUTS, CHANNELS=encode.power(D), num_warps=4,
        )  # fmt: skip
    return out


@joins(basis_operators.basis_components, unless=why_not_basis_components)
@on_own_device
def basis_components(x: Tensor, basis: Tensor, channels: Tensor) -> Tensor:
    """Compute components in a basis, see `kernels/basis.py`: x float32 [B, H, R, D] to its shape. The
    inverse is one launch, because LU factors of a batch of small matrices are many."""
    D, (rows, H) = x.shape[-1], basis.shape[:2]
    if D > MOST_INVERTED or not x.numel():
        components: Tensor = basis_operators.basis_components.reference(x, basis, channels)
        return components
    inverse = x.new_full((rows, H, D, D), math.nan, dtype=torch.float64)  # of a singular basis rows stay as they are
    # 128 channels are 128 KiB, half of the registers of 16 warps.
    _kernels().basis_inverse[(rows * H,)](
        inverse, *_by_head(basis), *_by_head(channels), H, D, CHANNELS=encode.power(D), num_warps=16
    )
    return (x.double() @ inverse).float()


def _by_head(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor [1 or B, H, n] with its strides of batch row, 0 if there is one, and head."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0) if len(x) > 1 else 0, x.stride(1)
