"""Operands of attention as the extension takes them: (kind, …), with tensors as (address, shape, strides).

`why_not` looks at what the extension cannot see (devices, dtypes, gradients) and at what it does not read; sizes and
strides are checked by the extension itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.ops.attend_grid import GridSide
from tersekv.ops.attend_packed import Operand

MAX_BITS = 4
_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_HALVES = {torch.float16: 1, torch.bfloat16: 2}
_NO_TENSOR: tuple = (0, (), ())


class _Kind(NamedTuple):
    """How an operand of one kind is handed over. Functions of (name of the side, operand)."""

    why_not: Callable[[str, Any], str | None]
    pack: Callable[[str, Any], tuple]
    channels: Callable[[Any], int]


def why_not(name: str, operand: Operand) -> str | None:
    """Why the kernels do not read `operand` as "keys" or "values" (`name`); None if they do."""
    kind = _KINDS.get(_kind(operand))
    if kind is None:
        return f"no kernel reads the format {getattr(operand, 'format', _kind(operand))}"
    return kind.why_not(name, operand)


def pack(name: str, operand: Operand) -> tuple:
    """The operand as the extension takes it."""
    return _KINDS[_kind(operand)].pack(name, operand)


def channels(operand: Operand) -> int:
    """D."""
    return _KINDS[_kind(operand)].channels(operand)


def _kind(operand: Operand) -> str:
    return "exact" if isinstance(operand, Tensor) else "grid" if isinstance(operand, GridSide) else operand.kind


def _tensor(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


def _why_not_tensors(name: str, dtypes: dict[str, tuple[Tensor, set[torch.dtype]]]) -> str | None:
    """Tensors by name, each with the dtypes that are read."""
    for what, (x, allowed) in dtypes.items():
        if not x.is_cpu:
            return f"{name} are not on cpu ({what} on {x.device})"
        if x.dtype not in allowed:
            readable = " or ".join(str(dtype).removeprefix("torch.") for dtype in sorted(allowed, key=str))
            return f"{name} have {what} of {x.dtype}, not {readable}"
        if x.requires_grad and torch.is_grad_enabled():
            return f"{name} need a gradient"
    return None


def _why_not_exact(name: str, x: Tensor) -> str | None:
    if not x.is_cpu:
        return f"{name} are on {x.device}, not on cpu"
    if x.dtype not in _FLOATS:
        return f"{name} are {x.dtype}, not float32, float16 or bfloat16"
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return f"{name} have stride {x.stride(-1)} along their last axis, not 1"
    if x.requires_grad and torch.is_grad_enabled():
        return f"{name} need a gradient"
    return None


def _pack_exact(name: str, x: Tensor) -> tuple:
    return 0, _FLOATS[x.dtype], *_tensor(x)


def _why_not_grid(name: str, grid: GridSide) -> str | None:
    codes, scale, offset, table = grid.codes, grid.scale, grid.offset, grid.table
    if not 1 <= grid.bits <= MAX_BITS:
        return f"{name} have {grid.bits} bits, the native kernels take 1 to {MAX_BITS}"
    if not (codes.is_cpu and scale.is_cpu and table.is_cpu and (offset is None or offset.is_cpu)):
        return f"{name} are not on cpu ({codes.device})"
    if codes.dtype is not torch.int32 or table.dtype is not torch.float32:
        return f"{name} have {codes.dtype} codes and a {table.dtype} table, not int32 and float32"
    if scale.dtype not in _HALVES:
        return f"{name} have a {scale.dtype} scale, not float16 or bfloat16"
    if offset is not None and offset.dtype is not scale.dtype:
        return f"{name} have a {scale.dtype} scale and a {offset.dtype} offset, not the same dtype"
    if grid.block_tokens % 16:
        return f"{name} have blocks of {grid.block_tokens} tokens, not a multiple of 16"
    if (grid.axis == "token") != (grid.side == "keys"):
        lanes = grid.block_tokens if grid.side == "keys" else grid.head_dim
        if grid.group % 16 and grid.group != lanes:
            return f"{name} have groups of {grid.group}, neither a multiple of 16 nor all {lanes}"
    if torch.is_grad_enabled() and (
        scale.requires_grad or table.requires_grad or (offset is not None and offset.requires_grad)
    ):
        return f"{name} need a gradient"
    return None


def _pack_grid(name: str, grid: GridSide) -> tuple:
    """A matrix of P packed codes on L lanes."""
    if grid.side != name:
        raise ValueError(f"{name}: expected a GridSide of {name}, got one of {grid.side}")
    t, D, offset = grid.block_tokens, grid.head_dim, grid.offset
    of_keys = name == "keys"
    return (
        1, grid.bits, of_keys, (grid.axis == "token") == of_keys, _HALVES[grid.scale.dtype], grid.group,
        *((D, t) if of_keys else (t, D)), *_tensor(grid.codes), *_tensor(grid.scale),
        *(_NO_TENSOR if offset is None else _tensor(offset)), *_tensor(grid.table),
    )  # fmt: skip


def _why_not_parts(name: str, parts: Any) -> str | None:
    return next((reason for view in parts.views if (reason := why_not(name, view.operand))), None)


def _packer_of_parts(kind: int) -> Callable[[str, Any], tuple]:
    return lambda name, parts: (kind, *[pack(name, view.operand) for view in parts.views])


_KINDS: dict[str, _Kind] = {
    "exact": _Kind(_why_not_exact, _pack_exact, lambda x: x.shape[-1]),
    "grid": _Kind(_why_not_grid, _pack_grid, lambda grid: grid.head_dim),
    "added": _Kind(_why_not_parts, _packer_of_parts(5), lambda added: channels(added.views[0].operand)),
    "joined": _Kind(_why_not_parts, _packer_of_parts(6), lambda joined: sum(joined.dims)),
}
