"""The search for trellis codes as the Triton backend does it: what it takes, and its launches."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from tersekv.kernels.trellis import MOST_BITS, WARM_UP
from tersekv.kernels.triton import on_own_device, why_not_usable

VECTORS_AT_A_TIME = 4096
"""Of all rows together: what paths are kept for, 16 bytes per bit that there could be."""

VECTORS = 4
"""That a program takes."""


def why_not_encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> str | None:
    """Why `encode_trellis` does not take this call; None if it does."""
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


@on_own_device
def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """See `kernels/trellis.py`: y [R, n, D], weight and bits [R, D], tables [9, 256] to windows uint8 [R, n, D]. Four
    launches per 4,096 vectors: two searches, and the way back from each."""
    R, n, D = y.shape
    if not y.numel():
        return y.new_empty((R, n, D), dtype=torch.uint8)
    weight, tables = weight.float().contiguous(), tables.float().contiguous()
    bits = bits.contiguous()
    active = (bits > 0).int()
    behind = active.flip(1).cumsum(1).flip(1)  # of each component on
    warm_up = (behind <= WARM_UP).sum(1, dtype=torch.int32)
    at_a_time = max(1, VECTORS_AT_A_TIME // R)
    parts = [_windows(part, weight, bits, tables, warm_up) for part in y.float().split(at_a_time, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _windows(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor, warm_up: Tensor) -> Tensor:
    kernels = importlib.import_module("tersekv.kernels.triton.trellis_search")
    y, (R, n, D) = y.contiguous(), y.shape
    rounds = MOST_BITS * D
    taken = y.new_empty((R, n, rounds, kernels.ROUND_BYTES.value), dtype=torch.uint8)
    windows, ends = y.new_empty((R, n, D), dtype=torch.uint8), y.new_empty((R, n), dtype=torch.int32)
    grid = (-(-n // VECTORS), R)
    for closed in (False, True):
        options = {"CLOSED": closed, "VECTORS": VECTORS, "num_warps": VECTORS}
        # sums are not fused with products: the reference rounds in between
        kernels.search[grid](
            taken, ends, y, weight, bits, tables, warm_up, n, D, rounds, enable_fp_fusion=False, **options
        )  # fmt: skip
        kernels.trace[grid](windows, ends, taken, bits, n, D, rounds, **options)
    return windows
