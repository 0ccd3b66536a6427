"""Keeping elements apart as the Triton backend does it: what the kernels take, and their launches."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from tersekv.kernels.encode_sparse import BLOCK_TOKENS, MAX_CHANNELS, Entries, ranks_of
from tersekv.kernels.triton import on_own_device, why_not_usable

TILE = 4096
"""Elements of a block taken at a time."""

MOST_ENTRIES = 8192
"""Of a vector that one program sorts."""


def _kernels() -> ModuleType:
    return importlib.import_module("tersekv.kernels.triton.outliers")


def why_not_quantiles(vectors: Tensor, share: float) -> str | None:
    """Why `quantiles` does not take this call; None if it does."""
    if reason := why_not_usable(vectors.device) or _why_not_float32("vectors", vectors):
        return reason.replace("query", "vectors")
    if not 1 <= vectors.shape[-1] <= MOST_ENTRIES:
        return f"vectors have {vectors.shape[-1]} entries, not 1 to {MOST_ENTRIES}"
    return None


def why_not_pack_outliers(residual: Tensor, chosen: Tensor) -> str | None:
    """Why `pack_outliers` does not take this call; None if it does."""
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


@on_own_device
def quantiles(vectors: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.encode_sparse`: vectors [..., n] to two thresholds [...]. One launch."""
    n = vectors.shape[-1]
    low, high = (vectors.new_empty(vectors.shape[:-1]) for _ in range(2))
    first, second, part = ranks_of(share, n)
    if low.numel():
        # sums are not fused with products: the reference rounds in between
        _kernels().quantiles[(low.numel(),)](
            low, high, vectors.contiguous(), n, first, second, 1.0 - part, part, ENTRIES=_power(n), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return low, high


@on_own_device
def pack_outliers(residual: Tensor, chosen: Tensor) -> Entries:
    """See `tersekv.kernels.encode_sparse`: residual and chosen [B, H, T, D]. Two launches, and a wait for the number of
    entries between them."""
    B, H, T, D = residual.shape
    N, marks = T // BLOCK_TOKENS, chosen.view(torch.uint8)
    counts = residual.new_empty(N * B * H, dtype=torch.int32)
    options = {"TOKENS": min(BLOCK_TOKENS, TILE // _power(D)), "CHANNELS": _power(D), "num_warps": 4}
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


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
