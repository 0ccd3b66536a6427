"""Attention by the C++ extension: one call reads all segments of a layer and merges them.

The extension validates types, devices, shapes and strides. It raises `NotTaken` for inputs that it
does not support, and ValueError for inputs that contradict the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import attend as layer_operators
from tersekv.kernels import attend_packed as packed_operators
from tersekv.kernels import attend_pages as pages_operators
from tersekv.kernels import attend_segments as segments_operators
from tersekv.kernels import basis as basis_operators
from tersekv.kernels import cpu
from tersekv.kernels import decode as decode_operators
from tersekv.kernels import softmax as softmax_operators
from tersekv.kernels import write_tokens as token_operators
from tersekv.kernels.attend import PackedPages, Room, Table, Where, copy_tokens
from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.attend_packed import Operand, Packed, native_view
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.marks import Marks
from tersekv.kernels.registry import NotTaken
from tersekv.tensors import last_contiguous
from tersekv.threads import threads

NAME = "cpu"

MOST_VECTORS = 64
"""Largest number of vectors per head that the kernel of `basis_product` takes. For more of them torch's
matmul is faster, which needs a float32 copy of the basis."""


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _first(where: Where) -> int:
    """Return the position of the first token, or of the first bit. Listed positions have none."""
    return where.first if isinstance(where, Marks) else where if isinstance(where, int) else 0


def native_pages(pages: PackedPages) -> Any:
    """Return packed pages as an object of the extension, built at the first call and cached on
    them."""
    made = pages.made.get(NAME)
    if made is None:
        native, (keys, values) = cpu.loaded(), pages.maps
        shared = 0 if isinstance(pages.values[0], Tensor) else pages.shared  # floats need no decoding
        views = [native_view(native, operand) for operand in pages.keys]
        made = pages.made[NAME] = native.pages(
            keys=views,
            values=views if shared else [native_view(native, operand) for operand in pages.values],
            first=[_first(where) for where in pages.where],
            marks=[where.native if isinstance(where, Marks) else None for where in pages.where],
            key_rotation=_contiguous(keys.rotation),
            key_basis=keys.basis,
            key_channels=keys.channels,
            keeps_query=keys.keeps_query,
            value_rotation=_contiguous(values.rotation),
            value_basis=values.basis,
            value_channels=values.channels,
            value_mean=values.mean,
            corrections=[_contiguous(correction) for correction in pages.corrections],
            shared=shared,
        )
    return made


@layer_operators.attend.by(NAME)
def attend(
    query: Tensor,
    exact: tuple[tuple[Tensor, Tensor, Where | None], ...],
    pages: PackedPages | None,
    mask: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: bool = False,
    table: Table | None = None,
    room: Room | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a layer, see `kernels/attend.py`."""
    if room is not None:
        copy_tokens(exact, room)
    if query.requires_grad and not torch.is_grad_enabled():
        query = query.detach()
    mask = None if mask is None else last_contiguous(mask)
    native = cpu._module or cpu.loaded()
    packed = None if pages is None else pages.made.get(NAME) or native_pages(pages)
    B, Hq, q, _ = query.shape
    Dv = exact[0][1].shape[-1] if packed is None else packed.head_dim
    lse = None
    if parts:
        H = exact[0][0].shape[1] if pages is None else pages.heads
        out, lse = _parts(query, H, Hq // H * q, Dv)
    else:
        out = query.new_empty((B, q, Hq, Dv))
    where = None if pages is None else pages.listed
    rest = where, *(table or (None, 0)), mask, hidden, scaling, softcap or 0.0, sinks, out, lse, torch.get_num_threads()
    try:
        native.attend(query, exact, packed, *rest)
    except native.Moved:
        assert pages is not None
        pages.made.clear()
        native.attend(query, exact, native_pages(pages), *rest)
    return out if lse is None else (out, lse)


def _parts(query: Tensor, H: int, R: int, Dv: int) -> tuple[Tensor, Tensor]:
    """Allocate out [B, H, R, Dv] and lse [B, H, R]."""
    shape = len(query), H, R
    return query.new_empty((*shape, Dv), dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


@segments_operators.attend_segments.by(NAME)
def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over segments, see `kernels/attend_segments.py`: out float32 [B, H, R, Dv], lse
    float32 [B, H, R]."""
    native = cpu.loaded()
    keys = [native_view(native, segment.keys) for segment in segments]
    values = [native_view(native, segment.values) for segment in segments]
    where = tuple(0 if segment.mask is None else last_contiguous(segment.mask) for segment in segments)
    return _attend_views(query, keys, values, where, None, 0, scaling, softcap)


def check(query: Tensor, keys: Operand, values: Operand) -> None:
    """Raise `NotTaken` or ValueError, with the reason, if the kernels cannot read these."""
    native = cpu.loaded()
    if not query.is_floating_point() or query.dtype is torch.float64:
        raise NotTaken(f"query is {query.dtype}, not float32, float16 or bfloat16")
    _pages_of([native_view(native, keys)], [native_view(native, values)])


def _pages_of(keys: list[Any], values: list[Any]) -> Any:
    """Build pages without positions and maps."""
    return cpu.loaded().pages(
        keys=keys, values=values, first=[0] * len(keys), marks=[None] * len(keys), key_rotation=None, key_basis=None,
        key_channels=None, keeps_query=False, value_rotation=None, value_basis=None, value_channels=None,
        value_mean=None, corrections=[None] * len(keys),
    )  # fmt: skip


def _attend_views(
    query: Tensor, keys: list, values: list, where: tuple, table: Tensor | None, page_tokens: int, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pages = _pages_of(keys, values)
    if query.dim() != 4:
        raise ValueError(f"query: expected [B, H, R, D], got {list(query.shape)}")
    out, lse = _parts(query, query.shape[1], query.shape[2], pages.head_dim)
    cpu.loaded().attend(
        query, (), pages, where, table, page_tokens, None, None, scaling, softcap or 0.0, None, out, lse,
        threads(),
    )  # fmt: skip
    return out, lse


@packed_operators.attend_packed.by(NAME)
def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over a segment, see `kernels/attend_packed.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R]."""
    return attend_segments(query, [Segment(keys, values, mask)], scaling, softcap)


attend_exact = softmax_operators.attend_exact.by(NAME)(attend_packed)
"""`attend_packed` registered for unpacked tokens."""


@pages_operators.attend_pages.by(NAME)
def attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over a pool, see `kernels/attend_pages.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R]."""
    native = cpu.loaded()
    views = [native_view(native, keys)], [native_view(native, values)]
    return _attend_views(query, *views, (last_contiguous(mask),), pages.contiguous(), page_tokens, scaling, softcap)


@softmax_operators.merge_segments.by(NAME)
def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge segments, see `kernels/softmax.py`: outs [B, H, R, D], lses [B, H, R], float32, to one
    out and lse."""
    native = cpu.loaded()
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected equally many of both, at least one, got {len(outs)} and {len(lses)}")
    if len(outs) == 1:
        return outs[0].clone(), lses[0].clone()
    out = torch.empty_like(outs[0], memory_format=torch.contiguous_format)
    lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format)
    native.merge_segments([x.contiguous() for x in outs], [x.contiguous() for x in lses], out, lse)
    return out, lse


@decode_operators.decode.by(NAME)
def decode(operand: GridSide | Packed, dtype: torch.dtype) -> Tensor:
    """Decode packed tokens on torch's threads, see `kernels/decode.py`."""
    view, written = native_view(cpu.loaded(), operand), dtype if dtype == torch.bfloat16 else torch.float32
    out = torch.empty((view.batch, view.heads, view.tokens, view.head_dim), dtype=written)
    cpu.loaded().decode(view, out, threads())
    return out.to(dtype)


@basis_operators.basis_product.by(NAME)
def basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> Tensor:
    """Multiply with a quantised basis, see `kernels/basis.py`: x float32 [B, H, R, D] to float32
    [B, H, R, D]."""
    if x.shape[2] > MOST_VECTORS:
        product: Tensor = basis_operators.basis_product.reference(x, basis, channels, combine)
        return product
    x = x.contiguous()
    out = torch.empty_like(x)
    cpu.loaded().basis_product(x, basis.contiguous(), channels.contiguous(), combine, out, threads())
    return out


@basis_operators.basis_components.by(NAME)
def basis_components(x: Tensor, basis: Tensor, channels: Tensor) -> Tensor:
    """See `kernels/basis.py`: x float32 [B, H, R, D] to float32 [B, H, R, D]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    cpu.loaded().basis_components(x, basis.contiguous(), channels.contiguous(), out, threads())
    return out


@layer_operators.merge_chunk.by(NAME)
def merge_chunk(outs: list[Tensor], lses: list[Tensor], query: Tensor, sinks: Tensor | None) -> Tensor:
    """See `kernels/attend.py`."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses)):
        raise NotTaken("a segment needs a gradient")
    B, Hq, q, _ = query.shape
    out = query.new_empty((B, q, Hq, outs[0].shape[-1]))
    logits = None if sinks is None else sinks.float().contiguous()
    cpu.loaded().merge_chunk([last_contiguous(x) for x in outs], lses, logits, out, threads())
    return out


@token_operators.write_tokens.by(NAME)
def write_tokens(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, at: int) -> bool:
    """See `kernels/write_tokens.py`."""
    finite: bool = (cpu._module or cpu.loaded()).write_tokens(keys, values, key_buffer, value_buffer, at)
    return finite


@token_operators.all_finite.by(NAME)
def all_finite(x: Tensor) -> bool:
    """See `kernels/write_tokens.py`."""
    finite: bool = cpu.loaded().all_finite(last_contiguous(x))
    return finite
