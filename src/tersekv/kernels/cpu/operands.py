"""Operands of attention as the extension takes them: (kind, …), with tensors as (address, shape, strides).

`why_not` looks at what the extension cannot see (devices, dtypes, gradients) and at what it does not read; sizes and
strides are checked by the extension itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import Operand

MAX_BITS = 8
MOST_CHANNELS = 1 << 16
"""Of a head, as in the extension."""

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_HALVES = {torch.float16: 1, torch.bfloat16: 2}
_NO_TENSOR: tuple = (0, (), ())
_fitted = WeakTensorKeyDictionary()
_Tensors = dict[str, tuple[Tensor, Collection[torch.dtype]]]


class _Kind(NamedTuple):
    """How an operand of one kind is handed over. Functions of (name of the side, operand)."""

    why_not: Callable[[str, Any], str | None]
    pack: Callable[[str, Any], tuple]
    channels: Callable[[Any], int]


def why_not(name: str, operand: Operand) -> str | None:
    """Why the kernels do not read `operand` as "keys" or "values" (`name`); None if they do."""
    kind = _KINDS.get(kind_of(operand))
    if kind is None:
        return f"no kernel reads the format {getattr(operand, 'format', kind_of(operand))}"
    return kind.why_not(name, operand)


def pack(name: str, operand: Operand) -> tuple:
    """The operand as the extension takes it."""
    return _KINDS[kind_of(operand)].pack(name, operand)


def lasts(operand: Operand) -> bool:
    """Whether what `pack` makes may stay: it is no basis that is held in few bits, unpacked."""
    return kind_of(operand) != "roped" or not operand.before.unpacks  # type: ignore[union-attr]


def channels(operand: Operand) -> int:
    """D."""
    return _KINDS[kind_of(operand)].channels(operand)


def kind_of(operand: Operand) -> str:
    """Its layout's name."""
    return "exact" if isinstance(operand, Tensor) else "grid" if isinstance(operand, GridSide) else operand.kind


def _tensor(x: Tensor) -> tuple:
    return x.data_ptr(), x.shape, x.stride()


def _why_not_tensors(name: str, dtypes: _Tensors) -> str | None:
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
    if x.dim() != 4:
        return f"{name} have {x.dim()} axes, not 4"
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
    if any(view.kind == "roped" for view in parts.views) or sum(view.kind == "turned" for view in parts.views) > 1:
        return f"{name} have RoPE in several parts, or in one that is no constant vector"
    return next((reason for view in parts.views if (reason := why_not(name, view.operand))), None)


def _packer_of_parts(kind: int) -> Callable[[str, Any], tuple]:
    return lambda name, parts: (kind, *[pack(name, view.operand) for view in parts.views])


def _optional(x: Tensor | None) -> tuple:
    return _NO_TENSOR if x is None else _tensor(x)


def _why_not_signs(name: str, view: Any) -> str | None:
    for sketch in view.sketches:
        tensors: _Tensors = {"signs": (sketch.signs, {torch.uint8}), "norms": (sketch.norms, _HALVES.keys())}
        tensors["sketch"] = (sketch.sketch, {torch.float32})
        for what in ("channels", "dropped"):
            if (index := getattr(sketch, what)) is not None:
                tensors[what] = (index, {torch.int64})
        if reason := _why_not_tensors(name, tensors):
            return reason
    return None


def _pack_signs(name: str, view: Any) -> tuple:
    sketches = [
        (2, view.head_dim, _HALVES[s.norms.dtype], float(s.factor), *_tensor(s.signs), *_tensor(s.norms),
         *_tensor(s.sketch), *_optional(s.channels), *_optional(s.dropped))
        for s in view.sketches
    ]  # fmt: skip
    return sketches[0] if len(sketches) == 1 else (5, *sketches)


def _why_not_polar(name: str, view: Any) -> str | None:
    tensors: _Tensors = {"angles": (view.angles, {torch.uint8}), "radii": (view.radii, _HALVES.keys())}
    return _why_not_tensors(name, tensors | {f"table {i}": (t, {torch.float32}) for i, t in enumerate(view.tables)})


def _pack_polar(name: str, view: Any) -> tuple:
    polar = view.polar
    tables = [part for table in view.tables for part in _tensor(table)]
    return (
        3, polar.head_dim, _HALVES[view.radii.dtype], polar.radius_unit, polar.level_bits, *_tensor(view.angles),
        *_tensor(view.radii), *tables,
    )  # fmt: skip


def _why_not_sparse(name: str, view: Any) -> str | None:
    planes = {"starts": (view.starts, {torch.int32}), "places": (view.places, {torch.int16})}
    return _why_not_tensors(name, planes | {"values": (view.values, {torch.float16})})


def _pack_sparse(name: str, view: Any) -> tuple:
    return 4, view.head_dim, *_tensor(view.starts), *_tensor(view.places), *_tensor(view.values)


def _why_not_trellis(name: str, view: Any) -> str | None:
    dtypes = {"stream": torch.int16, "gain": torch.uint8, "bits": torch.uint8}
    tensors: _Tensors = {what: (getattr(view, what), {dtype}) for what, dtype in dtypes.items()}
    return _why_not_tensors(name, tensors | {"scale": (view.scale, _FLOATS), "tables": (view.tables, {torch.float32})})


def _pack_trellis(name: str, view: Any) -> tuple:
    head = [_last_packed(x) for x in (view.bits, _float32(view.scale))]
    tables = view.tables.contiguous()
    return (
        9, view.head_dim, *_tensor(view.stream), *_tensor(view.gain), *_tensor(head[0]), *_tensor(head[1]),
        *_tensor(tables), head, tables,
    )  # fmt: skip


def _float32(x: Tensor) -> Tensor:
    """A tensor that a codec fitted, once in float32 for all pages that hold it."""
    if x.dtype is torch.float32:
        return x
    if x not in _fitted:
        _fitted[x] = x.float()
    return _fitted[x]


def _last_packed(x: Tensor) -> Tensor:
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def _why_not_roped(name: str, view: Any) -> str | None:
    if name != "keys":
        return f"{name} have RoPE, which only keys have"
    before = view.before
    reason = _why_not_angles(name, view.angles) or (
        _why_not_rotated(name, before) if before.kind == "rotated" else why_not(name, before.operand)
    )
    if reason is None and view.rope.channels(_view_channels(before)) is None:
        return f"{name} have a RoPE that does not turn pairs of channels"
    return reason


def _why_not_angles(name: str, angles: Any) -> str | None:
    tensors: _Tensors = {"a table of angles": (angles.table, {torch.float32}), "places": (angles.places, {torch.int32})}
    return _why_not_tensors(name, tensors)


def _view_channels(view: Any) -> int:
    return view.rotation.shape[-1] if view.kind == "rotated" else channels(view.operand)


def _pack_roped(name: str, view: Any) -> tuple:
    before = view.before
    inner = _pack_rotated(name, before) if before.kind == "rotated" else pack(name, before.operand)
    D = _view_channels(before)
    turns = view.rope.turns(D) if view.angles.consecutive else None
    steps = None if turns is None else _tensor(turns)
    return 7, inner, steps, *_pack_rope(view.angles, view.rope.channels(D)), turns


def _pack_rope(angles: Any, channels: Tensor | None) -> tuple:
    table, places = angles.table.contiguous(), _last_packed(angles.places)
    # Keep references: another thread may replace the tables of the RoPE meanwhile.
    return *_tensor(table), *_tensor(places), *_optional(channels), table, places, channels


def _why_not_turned(name: str, view: Any) -> str | None:
    if name != "keys":
        return f"{name} have RoPE, which only keys have"
    if view.mean.dim() != 3:
        return f"{name} have a mean of {view.mean.dim()} axes, not 3"
    if reason := _why_not_angles(name, view.angles) or _why_not_tensors(name, {"mean": (view.mean, _FLOATS)}):
        return reason
    if view.rope.channels(view.mean.shape[-1]) is None:
        return f"{name} have a RoPE that does not turn pairs of channels"
    return None


def _pack_turned(name: str, view: Any) -> tuple:
    mean = _last_packed(_float32(view.mean))
    channels = view.rope.channels(mean.shape[-1])
    steps = _pack_steps(view, channels)
    return 10, view.tokens, steps, *_tensor(mean), *_pack_rope(view.angles, channels), mean


def _pack_steps(view: Any, channels: Tensor | None) -> tuple | None:
    """The terms of the next tokens, where angles of a block's first token are enough for all of it."""
    if not view.angles.consecutive or channels is None or not torch.equal(channels[:, 1], channels[:, 2]):
        return None
    steps = view.rope.steps()
    return *[part for x in steps for part in _tensor(x)], *steps


def _why_not_rotated(name: str, view: Any) -> str | None:
    reason = _why_not_tensors(name, {"rotation": (view.rotation, {torch.float32})})
    return reason or why_not(name, view.inner.operand)


def _pack_rotated(name: str, view: Any) -> tuple:
    return 8, pack(name, view.inner.operand), *_tensor(rotation := view.rotation.contiguous()), rotation


_KINDS: dict[str, _Kind] = {
    "exact": _Kind(_why_not_exact, _pack_exact, lambda x: x.shape[-1]),
    "grid": _Kind(_why_not_grid, _pack_grid, lambda grid: grid.head_dim),
    "added": _Kind(_why_not_parts, _packer_of_parts(5), lambda added: channels(added.views[0].operand)),
    "joined": _Kind(_why_not_parts, _packer_of_parts(6), lambda joined: sum(joined.dims)),
    "signs": _Kind(_why_not_signs, _pack_signs, lambda view: view.head_dim),
    "polar": _Kind(_why_not_polar, _pack_polar, lambda view: view.polar.head_dim),
    "sparse": _Kind(_why_not_sparse, _pack_sparse, lambda view: view.head_dim),
    "trellis": _Kind(_why_not_trellis, _pack_trellis, lambda view: view.head_dim),
    "turned": _Kind(_why_not_turned, _pack_turned, lambda view: view.mean.shape[-1]),
    "roped": _Kind(_why_not_roped, _pack_roped, lambda view: _view_channels(view.before)),
}
