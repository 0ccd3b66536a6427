"""Launches: grids, splits and sizes of a call, and the buffers between two kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.triton import attend as kernels
from tersekv.kernels.triton import merge as merging
from tersekv.kernels.triton import spec, trees
from tersekv.kernels.triton.leaves import Leaf, power
from tersekv.kernels.triton.tuning import plan


def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """See `kernels/attend_packed.py`: out float32 [B, H, R, Dv], lse float32 [B, H, R]. One launch, and one to merge
    where tokens are split; the queries of sketches and the outputs of sums add theirs."""
    return _attend(query, keys, values, mask, scaling, softcap)


def score_keys(query: Tensor, keys: Operand, scaling: float) -> Tensor:
    """See `tersekv.kernels.triton`: float32 [B, H, R]."""
    return _attend(query, keys, None, None, scaling, None)[1]


def attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `kernels/attend_pages.py`: out float32 [B, H, R, Dv], lse float32 [B, H, R]. Launches as above. Entries of
    `pages` that are no page of the pool are read as −1: to refuse them would wait for the device.

    Raises:
        ValueError: pages are not whole blocks, or the mask is not one of their tokens.
    """
    if page_tokens < 1 or page_tokens % 32:
        raise ValueError(f"page_tokens: expected a multiple of 32, got {page_tokens}")
    T = pages.shape[1] * page_tokens
    if mask.shape[-1] != T:
        raise ValueError(f"mask: expected T = {T} tokens like the pages, got {mask.shape[-1]}")
    pages = pages.contiguous()
    where = pages, pages.stride(0), page_tokens, _tokens(keys) // page_tokens
    return _attend(query, keys, values, mask, scaling, softcap, where)


def _attend(
    query: Tensor, keys: Operand, values: Operand | None, mask: Tensor | None, scaling: float, softcap: float | None,
    pages: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """values: None for an output of no channels. pages: the table, the stride of its rows, tokens per page and pages in
    the pool; none: tokens in their order."""
    query = query.contiguous()
    B, H, R, _ = query.shape
    key = trees.keys(keys, query)
    value = trees.NO_VALUES if values is None else trees.values(values, query.device)
    T, page_tokens = _tokens(keys), pages[2] if pages else None
    if values is not None and _tokens(values) != T:
        raise ValueError(f"values: expected T = {T} tokens like the keys, got {_tokens(values)}")
    if page_tokens is not None:
        for leaf in (*key.leaves, *value.leaves):
            if page_tokens % (block := leaf.spec[spec.BLOCK.value]):
                raise ValueError(f"page_tokens: expected a multiple of {block}, a block's tokens, got {page_tokens}")
        T = pages[0].shape[1] * page_tokens
    chosen = plan(B * H, R, T, key.leaves, value.leaves, query.device, page_tokens, bool(key.turn))
    splits = chosen.splits
    out = query.new_empty((B, H, splits, R, value.channels))
    lse = query.new_empty((B, H, splits, R))
    mask_fields, positions = _mask(mask, query)
    if B * H * R:
        kernels.attend[(splits, B * H, -(-R // chosen.rows))](
            out, lse, tuple(_query(leaf) for leaf in key.leaves), tuple(_matrix(leaf, query) for leaf in key.leaves),
            tuple(leaf.fields for leaf in key.leaves), tuple(leaf.fields for leaf in value.leaves),
            key.turn or (query,), pages or (query,), *mask_fields, B, H, R, T, value.channels, positions,
            chosen.split_tokens, float(scaling), float(softcap or 0.0), KEYS=tuple(leaf.spec for leaf in key.leaves),
            VALUES=tuple(leaf.spec for leaf in value.leaves), ROPED=key.roped, PAGED=bool(pages),
            HAS_MASK=mask is not None, HAS_SOFTCAP=softcap is not None, ROWS=chosen.rows, NB=chosen.blocks,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    out, lse = (out[:, :, 0], lse[:, :, 0]) if splits == 1 else _merged(out, lse)
    return value.join(out), lse


def _query(leaf: Leaf) -> tuple[Any, ...]:
    """The leaf's query and the distance of its rows."""
    assert leaf.query is not None
    return leaf.query, leaf.query.stride(2)


def _matrix(leaf: Leaf, query: Tensor) -> tuple[Any, ...]:
    """The leaf's matrix and its strides of batch row, head and row; anything where it has none."""
    m = leaf.matrix
    if m is None:
        return query, 0, 0, 0
    m = m if m.stride(-1) == 1 else m.contiguous()
    return m, m.stride(0) if m.shape[0] > 1 else 0, m.stride(1) if m.shape[1] > 1 else 0, m.stride(2)


def _mask(mask: Tensor | None, query: Tensor) -> tuple[tuple[Any, ...], int]:
    """The mask as bytes with its strides [batch row, head, position, token], and the positions that it has."""
    if mask is None:
        return (query, 0, 0, 0, 0), 1
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    q = mask.shape[2]
    strides = (0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True))
    return (mask.view(torch.uint8), *strides), q


def _tokens(operand: Operand) -> int:
    """T."""
    if isinstance(operand, Tensor):
        return operand.shape[2]
    kind = getattr(operand, "kind", "grid")
    view: Any = operand
    if kind == "grid":
        return view.codes.shape[2] * view.block_tokens
    if kind in ("added", "joined"):
        return _tokens(view.views[0].operand)
    if kind == "roped":
        return _tokens((view.before.inner if view.before.kind == "rotated" else view.before).operand)
    if kind == "turned":
        return view.tokens
    blocks = {"signs": lambda: view.sketches[0].norms, "polar": lambda: view.radii, "trellis": lambda: view.gain}
    if kind == "sparse":
        return view.starts.shape[2] * 32
    plane = blocks[kind]()
    return plane.shape[2] * plane.shape[-1]


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [B, H, splits, R, D] and lses [B, H, splits, R] to one."""
    B, H, splits, R, D = outs.shape
    out, lse = outs.new_empty((B, H, R, D)), lses.new_empty((B, H, R))
    if lse.numel():
        merging.merge[(B * H, R)](out, lse, outs, lses, splits, R, D, SPLITS=16, CHANNELS_=power(D), num_warps=4)
    return out, lse


MAX_PARTS = 8
"""Segments that one launch merges; a kernel is compiled for each number of them."""


def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See `tersekv.kernels.softmax`: outs [B, H, R, D] and lses [B, H, R], float32, to one out and one lse."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected as many of each and at least one, got {len(outs)} and {len(lses)}")
    if len(outs) == 1:
        return outs[0], lses[0]
    if len(outs) > MAX_PARTS:
        return _merged(torch.stack(outs, 2), torch.stack(lses, 2))
    shape = outs[0].shape
    if any(x.shape != shape for x in outs) or any(x.shape != shape[:3] for x in lses):
        raise ValueError(f"outs, lses: expected {tuple(shape)} and {tuple(shape[:3])} of each segment")
    out, lse = outs[0].new_empty(shape), outs[0].new_empty(shape[:3])
    if out.numel():
        merging.merge_parts[(lse.numel(),)](
            out, lse, tuple(x.contiguous() for x in outs), tuple(x.contiguous() for x in lses), shape[-1],
            PARTS=len(outs), CHANNELS_=power(shape[-1]), num_warps=1,
        )  # fmt: skip
    return out, lse
