"""The C++ kernels as a backend: what they take (`why_not_*`), how they are called, which instruction set they use.

The extension is loaded at the first call, never at import. Tensors cross as (address, shape, strides);
the extension checks sizes and strides against the contract and raises ValueError.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.cpu.operands import MOST_CHANNELS, channels, kind_of, lasts, pack, why_not

ISA_VARIABLE = "TERSEKV_CPU_ISA"
NAME = "cpu"

_module: ModuleType | None = None


def why_not_built() -> str | None:
    """None if the extension is there (and now loaded), else why it is not."""
    global _module
    if _module is not None:
        return None
    try:
        module = importlib.import_module("tersekv.kernels.cpu._native")
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


def loaded() -> ModuleType:
    """The extension; RuntimeError where it is not built."""
    reason = why_not_built()
    if _module is None:
        raise RuntimeError(reason)
    return _module


def isa() -> str:
    """The instruction set in use."""
    return loaded().isa()


def isas() -> dict[str, str | None]:
    """Instruction sets of this build, best first: None if this CPU has it, else the features that it lacks."""
    return {name: missing or None for name, missing in loaded().isas()}


def set_isa(name: str) -> None:
    """Use one instruction set, or "auto" for the best; ValueError names those that exist or what the CPU lacks."""
    loaded().set_isa(name)


def why_not_attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> str | None:
    """Why `attend_segments` does not take this call; None if it does."""
    if _module is None and (reason := why_not_built()):
        return reason
    for keys, values, mask, kept in segments:
        read = kept is not None and NAME in kept.of
        reason = _why_not_mask(mask) or (None if read else why_not("keys", keys) or why_not("values", values))
        if reason:
            return reason
    return _why_not_query(query)


def why_not_attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> str | None:
    """Why `attend_packed` does not take this call; None if it does."""
    return why_not_attend_segments(query, [Segment(keys, values, mask)], scaling, softcap)


def why_not_attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> str | None:  # fmt: skip
    """Why `attend_pages` does not take this call; None if it does."""
    reason = why_not_attend_packed(query, keys, values, mask, scaling, softcap)
    if reason is None and (not pages.is_cpu or pages.dtype is not torch.int32):
        reason = f"pages are {pages.dtype} on {pages.device}, not int32 on cpu"
    return reason or _why_not_in_pages("keys", keys) or _why_not_in_pages("values", values)


_IN_PAGES = ("exact", "grid", "signs", "polar", "added", "joined")


def _why_not_in_pages(name: str, operand: Operand) -> str | None:
    """Why the kernels do not read the tokens of `operand` in another order than they lie in; None if they do."""
    kind = kind_of(operand)
    if kind not in _IN_PAGES:
        return f"{name} are {kind}: their tokens have one order"
    parts = operand.views if kind in ("added", "joined") else []  # type: ignore[union-attr]
    return next((reason for view in parts if (reason := _why_not_in_pages(name, view.operand))), None)


why_not_attend_exact = why_not_attend_packed
"""The same, with unpacked tokens on both sides."""


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


def why_not_basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> str | None:
    """Why `basis_product` does not take this call; None if it does."""
    if _module is None and (reason := why_not_built()):
        return reason
    for name, t in (("x", x), ("basis", basis), ("channels", channels)):
        if not t.is_cpu:
            return f"{name} is on {t.device}, not on cpu"
        if t.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
    if x.dtype is not torch.float32 or basis.dtype is not torch.uint8:
        return f"x is {x.dtype} and basis {basis.dtype}, not float32 and uint8"
    return f"x has {x.shape[-1]} channels, not a multiple of 16" if x.shape[-1] % 16 else None


def _why_not_query(query: Tensor) -> str | None:
    if not query.is_cpu:
        return f"query is on {query.device}, not on cpu"
    if query.dtype is not torch.float32:
        return f"query is {query.dtype}, not float32"
    if query.requires_grad and torch.is_grad_enabled():
        return "query needs a gradient"
    return None


def _why_not_mask(mask: Tensor | None) -> str | None:
    if mask is not None:
        if not mask.is_cpu:
            return f"mask is on {mask.device}, not on cpu"
        if mask.dtype is not torch.bool:
            return f"mask is {mask.dtype}, not bool"
    return None


def _mask(mask: Tensor | None) -> tuple | None:
    if mask is None:
        return None
    if mask.dim() and mask.stride(-1) != 1:
        mask = mask.contiguous()
    # The tensor rides along so that a copy lives as long as the call.
    return mask.data_ptr(), mask.shape, mask.stride(), mask


def _outputs(query: Tensor, values: Operand) -> tuple[int, Tensor, Tensor]:
    """Dv, and room for out [B, H, R, Dv] and lse [B, H, R]."""
    Dv, rows = channels(values), query.shape[:3]
    if not 1 <= Dv <= MOST_CHANNELS:
        raise ValueError(f"values: expected head_dim 1 to {MOST_CHANNELS}, got {Dv}")
    return Dv, query.new_empty((*rows, Dv)), query.new_empty(rows)


def _packed(segment: Segment) -> tuple[tuple, tuple]:
    """Keys and values as the extension takes them, for segments that keep them made once."""
    keys, values, _, kept = segment
    if kept is not None and NAME in kept.of:
        return kept.of[NAME]
    packed = pack("keys", keys), pack("values", values)
    if kept is not None and lasts(keys):
        kept.of[NAME] = packed
    return packed


def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.attend_segments`: out float32 [B, H, R, Dv], lse float32 [B, H, R]."""
    native = _module or loaded()
    query = query.contiguous()
    shape, (Dv, out, lse) = query.shape, _outputs(query, segments[0].values)
    packed = tuple([(*_packed(segment), _mask(segment.mask)) for segment in segments])
    native.attend(
        (query.data_ptr(), shape, query.stride()), packed, scaling, softcap or 0.0, Dv, out.data_ptr(), lse.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.attend_packed`: out float32 [B, H, R, Dv], lse float32 [B, H, R]."""
    return attend_segments(query, [Segment(keys, values, mask)], scaling, softcap)


def attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `tersekv.kernels.attend_pages`: out float32 [B, H, R, Dv], lse float32 [B, H, R]."""
    native = _module or loaded()
    query, pages = query.contiguous(), pages.contiguous()
    shape, (Dv, out, lse) = query.shape, _outputs(query, values)
    where = pages.data_ptr(), pages.shape, pages.stride(), page_tokens
    native.attend(
        (query.data_ptr(), shape, query.stride()), ((pack("keys", keys), pack("values", values), _mask(mask), where),),
        scaling, softcap or 0.0, Dv, out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


attend_exact = attend_packed
"""See `tersekv.kernels.softmax`: the same, with unpacked tokens on both sides."""


def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.softmax`: outs [B, H, R, D] and lses [B, H, R], float32, to one out and one lse."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected as many of each and at least one, got {len(outs)} and {len(lses)}")
    if len(outs) == 1:
        return outs[0], lses[0]
    native, shape = _module or loaded(), outs[0].shape
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


def basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> Tensor:
    """See `tersekv.kernels.basis`: x float32 [B, H, R, D] to float32 [B, H, R, D]."""
    native, x = _module or loaded(), x.contiguous()
    basis, channels, out = basis.contiguous(), channels.float().contiguous(), torch.empty_like(x)
    native.basis_product(*[(t.data_ptr(), t.shape, t.stride()) for t in (x, basis, channels)], combine, out.data_ptr())
    return out
