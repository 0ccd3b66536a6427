"""Launch attention kernels: grids, splits and sizes of a call, and the buffers between two kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.registry import NotTaken
from tersekv.kernels.triton import attend_kernel as kernels
from tersekv.kernels.triton import leaves as constants
from tersekv.kernels.triton import maps
from tersekv.kernels.triton.leaves import Leaf, power
from tersekv.kernels.triton.page_set import Group, PageSet, joined_mask, part, prepare, strided
from tersekv.kernels.triton.tuning import key_of, plan, shrink
from tersekv.tensors import last_contiguous


def attend(
    query: Tensor, page_set: PageSet, masks: Sequence[Tensor | None], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over a page set; see `tersekv.kernels.triton.attend`."""
    return _attend(query, page_set.groups, masks, scaling, softcap)


def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over a segment, see `kernels/attend_packed.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R]. One launch, and one that merges if tokens are split. Queries of sketches and outputs
    of sums need further launches."""
    group = Group([part(keys, values, query.device)], [0], False, query.device)
    return _attend(query, [group], [mask], scaling, softcap)


def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend over segments, see `kernels/attend_segments.py`: out float32 [B, H, R, Dv], lse
    float32 [B, H, R]."""
    page_set = prepare(segments)
    return attend(query, page_set, [segment.mask for segment in segments], scaling, softcap)


def score_keys(query: Tensor, keys: Operand, scaling: float) -> Tensor:
    """Score keys, see `tersekv.kernels.triton.score_keys`: float32 [B, H, R]."""
    group = Group([part(keys, None, query.device)], [0], False, query.device)
    return _attend(query, [group], [None], scaling, None)[1]


def attend_pages(
    query: Tensor, keys: Operand, values: Operand, pages: Tensor, page_tokens: int, mask: Tensor, scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend over a pool, see `kernels/attend_pages.py`: out float32 [B, H, R, Dv], lse float32
    [B, H, R].

    Launches as in `attend_packed`. Invalid entries of `pages` are read as −1, because rejecting
    them would wait for the device.

    Raises:
        ValueError: pages are not whole blocks, or the mask has another number of tokens.
    """
    if page_tokens < 1 or page_tokens % 32:
        raise ValueError(f"page_tokens: expected a multiple of 32, got {page_tokens}")
    T = pages.shape[1] * page_tokens
    if mask.shape[-1] != T:
        raise ValueError(f"mask: expected T = {T} tokens like the pages, got {mask.shape[-1]}")
    pool = part(keys, values, query.device)
    for leaf in (*pool.keys.leaves, *pool.values.leaves):
        if page_tokens % (block := leaf.spec[constants.BLOCK.value]):
            raise ValueError(f"page_tokens: expected a multiple of {block} (the block size), got {page_tokens}")
    pages = pages.contiguous()
    where = pages, pages.stride(0), page_tokens, pool.tokens // page_tokens
    group = Group([pool._replace(tokens=T, most=T)], [0], False, query.device)
    return _attend(query, [group], [mask], scaling, softcap, where)


class Work(NamedTuple):
    """A group that a launch reads, its queries [B, H, R, D] of any float type, a mask or None per
    segment, and the correction of its scores, see `softmax.score_bias`."""

    query: Tensor
    group: Group
    masks: Sequence[Tensor | None]
    correction: Tensor | None = None


class Mapping(NamedTuple):
    """Arguments and constants with which the first launch maps queries, see `attend_kernel.attend`."""

    arguments: tuple[Any, ...]
    constants: tuple[int, ...]


def _attend(
    query: Tensor, groups: Sequence[Group], masks: Sequence[Tensor | None], scaling: float, softcap: float | None,
    pages: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch each group, and merge their splits. A group whose outputs need a linear map is merged
    separately first. pages: of a pool, see `attend_kernel.attend`."""
    query = query.contiguous().view(query.shape)  # an axis of size 1 gets the stride that kernels compute with, too
    plain = [group for group in groups if group.values.plain]
    alike = len({group.values.channels for group in plain}) <= 1
    together = ([plain] if plain else []) if alike else [[group] for group in plain]
    results = []
    for members in (*together, *([group] for group in groups if not group.values.plain)):
        outs, lses, counts = launch([Work(query, group, masks) for group in members], scaling, softcap, pages)
        out, lse = (outs[:, :, 0], lses[:, :, 0]) if sum(counts) == 1 else _merged(outs, lses)
        results.append((members[0].values.join(out), lse))
    return results[0] if len(results) == 1 else merge_segments([out for out, _ in results], [lse for _, lse in results])


def launch(works: Sequence[Work], *call: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Return outs [B, H, splits, R, channels] and lses [B, H, splits, R] of groups that have equally
    many channels, and the number of splits of each group. A kernel that does not fit the GPU is
    compiled again in smaller sizes.

    Raises:
        NotTaken: the kernel's smallest size does not fit the GPU.
    """
    while True:
        try:
            return _launched(works, *call)
        except OutOfResources as error:
            smaller = [_shrink(work.group, work.query.shape[2]) for work in works]
            if not any(smaller):
                raise NotTaken(str(error)) from error


def _shrink(group: Group, R: int) -> bool:
    group.forget_plans()
    return shrink(key_of(R, group.keys.leaves, group.values.leaves, group.device, bool(group.keys.roped)))


def _launched(
    works: Sequence[Work], scaling: float, softcap: float | None, pages: tuple[Any, ...] = (),
    mapping: Mapping | None = None, written: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, list[int]]:  # fmt: skip
    query, channels = works[0].query, works[0].group.values.channels
    B, H, R, _ = query.shape
    plans = [group.planned((B * H, R, *pages[2:3]), _planner(group, B * H, R, *pages[2:3])) for _, group, *_ in works]
    counts = [count for _, count, _ in plans]
    out, lse = (query.new_empty((B, H, sum(counts), R, *more), dtype=torch.float32) for more in ((channels,), ()))
    first = 0
    for work, (chosen, count, runs) in zip(works, plans, strict=True):
        query, group = work.query, work.group
        given, masked = _masks(group, work.masks, query)
        to_map = Mapping((query,), ()) if mapping is None or first else mapping
        to_write = () if first else written
        if B * H * R:
            more = sum(to_map.constants[:1]) + bool(to_write)
            kernels.attend[(count + more, B * H, -(-R // chosen.rows))](
                out, lse, tuple(_query(leaf, query) for leaf in group.keys.leaves),
                tuple(_matrix(leaf, query) for leaf in group.keys.leaves), _or(group.keys.pairs, query),
                group.segments, _or(group.table, query), 0 if group.table is None else group.table.shape[1],
                _or(runs, query), given, pages or (query,), to_map.arguments, tuple(map(_copied, to_write)),
                _correction(work), B, H, R, channels, first, sum(counts), chosen.split_tokens, float(scaling),
                float(softcap or 0.0), KEYS=group.key_specs, VALUES=group.value_specs,
                FIELDS=group.field_codes, ROPED=group.keys.roped,
                LATENT=group.values.latent, PAGED=bool(pages), MASKED=masked, MAPPING=to_map.constants,
                WRITES=power(max(x.shape[-1] for x in to_write)) if to_write else 0,
                CORRECTED=0 if work.correction is None else power(work.correction.shape[-1]),
                HAS_SOFTCAP=softcap is not None, ROWS=chosen.rows, NB=chosen.blocks, num_warps=chosen.warps,
                num_stages=chosen.stages,
            )  # fmt: skip
        first += count
    return out, lse, counts


def _copied(x: Tensor) -> tuple[Any, ...]:
    """Return new tokens [B, H, n, D], or the place for their copy, as arguments of `maps.write_tokens`."""
    return x, *x.stride()[:3], x.shape[3], x.shape[2]


def _correction(work: Work) -> tuple[Any, ...]:
    """Return the correction as kernel arguments; any tensor if there is none."""
    query, of = work.query, work.correction
    if of is None:
        return (query,)
    of = last_contiguous(of.float())
    return of, of.stride(0) if len(of) > 1 else 0, of.stride(1), of.shape[-1], query, query.stride(2)


def _planner(group: Group, heads: int, R: int, page_tokens: int | None = None) -> Any:
    """Return a function that makes the group's plan."""
    leaves = group.keys.leaves, group.values.leaves
    return lambda: plan(heads, R, group.tokens, *leaves, group.device, page_tokens, bool(group.keys.roped))


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Return `other` instead of None, because a kernel needs a tensor even if it does not read it."""
    return other if x is None else x


def _query(leaf: Leaf, query: Tensor) -> tuple[Any, ...]:
    """Return the leaf's query and its row stride."""
    assert leaf.query is not None
    own = leaf.query(query)
    return own, own.stride(2)


def _matrix(leaf: Leaf, query: Tensor) -> tuple[Any, ...]:
    """Return the leaf's matrix and its strides of batch row, head and row; any tensor if it has
    none."""
    if leaf.matrix is None:
        return query, 0, 0, 0
    m = leaf.matrix()
    m = m if m.dim() == 4 else m[None, None]
    m = last_contiguous(m)
    return m, m.stride(0) if m.shape[0] > 1 else 0, m.stride(1) if m.shape[1] > 1 else 0, m.stride(2)


def _masks(group: Group, masks: Sequence[Tensor | None], query: Tensor) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the masks as kernel arguments, and 1 for each mask that exists, else 0. A table of
    pages has one mask."""
    own = [masks[i] for i in group.numbers]
    if group.table is not None:
        own = [joined_mask(own, [part.tokens for part in group.parts])]
    nothing = query, 0, 0, 0, 0, 1
    return tuple(nothing if mask is None else strided(mask) for mask in own), tuple(int(m is not None) for m in own)


def _merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge outs [B, H, splits, R, D] and lses [B, H, splits, R] to one out and one lse."""
    B, H, splits, R, D = outs.shape
    out, lse = outs.new_empty((B, H, R, D)), lses.new_empty((B, H, R))
    if lse.numel():
        maps.finish[(B * H, R, 1)](
            out, H * R * D, R * D, 0, D, lse, outs, lses, splits, splits, (outs,), outs, 0, 0, outs, H, R, R, D,
            OF=maps.IDENTITY.value, HAS_MEAN=False, HAS_SINKS=False, SPLITS=16, OUTPUTS=power(D), CHANNELS=32,
            num_warps=4,
        )  # fmt: skip
    return out, lse


MAX_PARTS = 8
"""Most segments that one launch merges. A kernel is compiled for each number of them."""


def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge segments, see `kernels/softmax.py`: outs [B, H, R, D], lses [B, H, R], float32, to one
    out and lse."""
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs, lses: expected equally many of both, at least one, got {len(outs)} and {len(lses)}")
    if len(outs) == 1:
        return outs[0], lses[0]
    if len(outs) > MAX_PARTS:
        return _merged(torch.stack(outs, 2), torch.stack(lses, 2))
    shape = outs[0].shape
    if any(x.shape != shape for x in outs) or any(x.shape != shape[:3] for x in lses):
        raise ValueError(f"outs, lses: expected {tuple(shape)} and {tuple(shape[:3])} of each segment")
    out, lse = outs[0].new_empty(shape), outs[0].new_empty(shape[:3])
    if out.numel():
        kernels.merge_parts[(lse.numel(),)](
            out, lse, tuple(x.contiguous() for x in outs), tuple(x.contiguous() for x in lses), shape[-1],
            PARTS=len(outs), CHANNELS_=power(shape[-1]), num_warps=1,
        )  # fmt: skip
    return out, lse
