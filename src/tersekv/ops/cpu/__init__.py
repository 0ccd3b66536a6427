"""The C++ kernels as a backend: what they take (`why_not_*`), how they are called, which instruction set they use.

The extension is loaded at the first call, never at import. Tensors cross as (address, shape, strides);
the extension checks sizes and strides against the contract and raises ValueError.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.ops.attend_grid import GridSide

MAX_BITS = 4
ISA_VARIABLE = "TERSEKV_CPU_ISA"

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_HALVES = {torch.float16: 1, torch.bfloat16: 2}
_NO_TENSOR: tuple = (0, (), ())
_module: ModuleType | None = None


def why_not_built() -> str | None:
    """None if the extension is there (and now loaded), else why it is not."""
    global _module
    if _module is not None:
        return None
    try:
        module = importlib.import_module("tersekv.ops.cpu._native")
    except ImportError as error:
        return f"native kernels are not built: {error} (build: pip install --no-build-isolation -e .)"
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        try:
            module.set_isa(forced)
        except ValueError as error:
            raise UserError(f"{ISA_VARIABLE}: {error}") from None
    _module = module
    return None


def _loaded() -> ModuleType:
    reason = why_not_built()
    if _module is None:
        raise RuntimeError(reason)
    return _module


def isa() -> str:
    """The instruction set in use."""
    return _loaded().isa()


def isas() -> dict[str, str | None]:
    """Instruction sets of this build, best first: None if this CPU has it, else the features that it lacks."""
    return {name: missing or None for name, missing in _loaded().isas()}


def set_isa(name: str) -> None:
    """Use one instruction set, or "auto" for the best; ValueError names those that exist or what the CPU lacks."""
    _loaded().set_isa(name)


def why_not_attend_grid(
    query: Tensor, keys: GridSide, values: GridSide, mask: Tensor | None, scaling: float, softcap: float | None
) -> str | None:
    """Why `attend_grid` does not take this call; None if it does."""
    if _module is None and (reason := why_not_built()):
        return reason
    return _why_not_side(keys) or _why_not_side(values) or _why_not_query(query, mask)


def why_not_attend_exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> str | None:
    """Why `attend_exact` does not take this call; None if it does."""
    if _module is None and (reason := why_not_built()):
        return reason
    for name, x in (("key", key), ("value", value)):
        if not x.is_cpu:
            return f"{name} is on {x.device}, not on cpu"
        if x.dtype not in _FLOATS:
            return f"{name} is {x.dtype}, not float32, float16 or bfloat16"
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            return f"{name} has stride {x.stride(-1)} along its last axis, not 1"
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return "keys or values need a gradient"
    return _why_not_query(query, mask)


def why_not_merge_segments(outs: list[Tensor], lses: list[Tensor]) -> str | None:
    """Why `merge_segments` does not take this call; None if it does."""
    if _module is None and (reason := why_not_built()):
        return reason
    for x in (*outs, *lses):
        if not x.is_cpu:
            return f"a segment is on {x.device}, not on cpu"
        if x.dtype is not torch.float32:
            return f"a segment is {x.dtype}, not float32"
        if x.requires_grad and torch.is_grad_enabled():
            return "a segment needs a gradient"
    return None


def _why_not_query(query: Tensor, mask: Tensor | None) -> str | None:
    if not query.is_cpu:
        return f"query is on {query.device}, not on cpu"
    if query.dtype is not torch.float32:
        return f"query is {query.dtype}, not float32"
    if query.requires_grad and torch.is_grad_enabled():
        return "query needs a gradient"
    if mask is not None:
        if not mask.is_cpu:
            return f"mask is on {mask.device}, not on cpu"
        if mask.dtype is not torch.bool:
            return f"mask is {mask.dtype}, not bool"
    return None


def _why_not_side(grid: GridSide) -> str | None:
    side, codes, scale, offset, table = grid.side, grid.codes, grid.scale, grid.offset, grid.table
    if not 1 <= grid.bits <= MAX_BITS:
        return f"{side} have {grid.bits} bits, the native kernels take 1 to {MAX_BITS}"
    if not (codes.is_cpu and scale.is_cpu and table.is_cpu and (offset is None or offset.is_cpu)):
        return f"{side} are not on cpu ({codes.device})"
    if codes.dtype is not torch.int32 or table.dtype is not torch.float32:
        return f"{side} have {codes.dtype} codes and a {table.dtype} table, not int32 and float32"
    if scale.dtype not in _HALVES:
        return f"{side} have a {scale.dtype} scale, not float16 or bfloat16"
    if offset is not None and offset.dtype is not scale.dtype:
        return f"{side} have a {scale.dtype} scale and a {offset.dtype} offset, not the same dtype"
    if grid.block_tokens % 16:
        return f"{side} have blocks of {grid.block_tokens} tokens, not a multiple of 16"
    if (grid.axis == "token") != (side == "keys"):
        lanes = grid.block_tokens if side == "keys" else grid.head_dim
        if grid.group % 16 and grid.group != lanes:
            return f"{side} have groups of {grid.group}, neither a multiple of 16 nor all {lanes}"
    if torch.is_grad_enabled() and (
        scale.requires_grad or table.requires_grad or (offset is not None and offset.requires_grad)
    ):
        return f"{side} need a gradient"
    return None


def _side(grid: GridSide, side: str) -> tuple:
    """A GridSide as the extension takes it: a matrix of P packed codes on L lanes."""
    if grid.side != side:
        raise ValueError(f"{side}: expected a GridSide of {side}, got one of {grid.side}")
    t, D, codes, scale, offset, table = (
        grid.block_tokens, grid.head_dim, grid.codes, grid.scale, grid.offset, grid.table,
    )  # fmt: skip
    of_keys = side == "keys"
    return (
        grid.bits, (grid.axis == "token") == of_keys, _HALVES[scale.dtype], grid.group,
        *((D, t) if of_keys else (t, D)),
        codes.data_ptr(), codes.shape, codes.stride(),
        scale.data_ptr(), scale.shape, scale.stride(),
        *(_NO_TENSOR if offset is None else (offset.data_ptr(), offset.shape, offset.stride())),
        table.data_ptr(), table.shape, table.stride(),
    )  # fmt: skip


def _mask(mask: Tensor | None) -> tuple | None:
    if mask is None:
        return None
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    # The tensor rides along so that a copy lives as long as the call.
    return mask.data_ptr(), mask.shape, mask.stride(), mask


def attend_grid(
    query: Tensor, keys: GridSide, values: GridSide, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See `tersekv.ops.attend_grid`: out float32 [B, H, R, Dv], lse float32 [B, H, R]."""
    native = _module or _loaded()
    query = query.contiguous()
    B, H, R, _ = shape = query.shape
    out = query.new_empty((B, H, R, values.head_dim))
    lse = query.new_empty((B, H, R))
    t = keys.block_tokens
    native.attend_grid(
        (query.data_ptr(), shape, query.stride()), _side(keys, "keys"), _side(values, "values"), keys.codes.shape[2], t,
        _mask(mask), scaling, softcap or 0.0, out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def attend_exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See `tersekv.ops.softmax`: out float32 [B, H, R, Dv], lse float32 [B, H, R]."""
    native = _module or _loaded()
    query = query.contiguous()
    B, H, R, _ = shape = query.shape
    out = query.new_empty((B, H, R, value.shape[-1]))
    lse = query.new_empty((B, H, R))
    native.attend_exact(
        (query.data_ptr(), shape, query.stride()),
        (_FLOATS[key.dtype], key.data_ptr(), key.shape, key.stride()),
        (_FLOATS[value.dtype], value.data_ptr(), value.shape, value.stride()),
        _mask(mask), scaling, softcap or 0.0, out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See `tersekv.ops.softmax`: outs [B, H, R, D] and lses [B, H, R], float32, to one out and one lse."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected as many of each and at least one, got {len(outs)} and {len(lses)}")
    if len(outs) == 1:
        return outs[0], lses[0]
    native, shape = _module or _loaded(), outs[0].shape
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ValueError(
                f"outs, lses: expected {list(shape)} and {list(shape[:-1])}, got {list(out.shape)}, {list(lse.shape)}"
            )
    outs, lses = [x.contiguous() for x in outs], [x.contiguous() for x in lses]
    out, lse = outs[0].new_empty(shape), lses[0].new_empty(shape[:-1])
    native.merge_segments(
        tuple([x.data_ptr() for x in outs]), tuple([x.data_ptr() for x in lses]), lse.numel(), shape[-1],
        out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return out, lse
