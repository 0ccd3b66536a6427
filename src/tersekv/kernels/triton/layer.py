"""Attention of a few query rows over a layer in three launches: exact tokens and the queries of
packed ones, packed tokens, and the output. See `maps.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.attend import Map
from tersekv.kernels.triton import maps as kernels
from tersekv.kernels.triton.launch import Mapping, Work, launch
from tersekv.kernels.triton.leaves import power
from tersekv.kernels.triton.page_set import PageSet

MOST_ROWS = 64
"""Most query rows per key-value head. A program per row would read a linear map more often than
torch's matrix product."""

MOST_CHANNELS = 256
"""Most channels of a linear map, because a program holds all channels of its row."""

ELEMENTS = 4096
"""Elements of a linear map that a program holds."""


def attend_layer(
    query: Tensor, rows: Tensor, exact: PageSet | None, masks: Sequence[Tensor | None],
    packed: Sequence[tuple[PageSet, Sequence[Tensor | None], Tensor | None]], maps: tuple[Map, Map] | None,
    scaling: float, softcap: float | None, sinks: Tensor | None, parts: bool, written: Sequence[Tensor] = (),
) -> Tensor | tuple[Tensor, Tensor] | None:  # fmt: skip
    """Compute `attend` of `kernels/attend.py`; None if that takes torch's products or merges.

    query [B, Hq, q, D]. rows [B, H, R, D]: the same queries as rows of their key-value heads. exact:
    exact tokens with their masks, or None. packed: packed tokens, masks and correction. maps: linear
    maps of all packed keys and values, or None. written: new tokens and the place for their copy, of keys
    and then of values.
    """
    (B, H, R, D), (_, Hq, q, _) = rows.shape, query.shape
    groups = [] if exact is None else exact.groups
    inner = [group for of, *_ in packed for group in of.groups]
    channels = {group.values.channels for group in (*groups, *inner)}
    if R > MOST_ROWS or len(channels) > 1 or not all(group.values.plain for group in inner):
        return None
    if maps is not None and (max(D, *channels) > MOST_CHANNELS or maps[1].rest):
        return None
    rows, (Dv,) = rows.contiguous(), channels
    mapped, mapping = (rows, None) if maps is None else _mapped(rows, maps[0])
    works = [Work(rows, group, masks) for group in groups]
    for of, of_pages, correction in packed:
        works += [Work(mapped, group, of_pages, correction) for group in of.groups]
    if mapping is not None and not groups and rows.numel():
        _map_alone(rows, mapping)
        mapping = None
    outs, lses, counts = launch(works, scaling, softcap, (), mapping, written)
    out, lse = lses.new_empty((B, H, R, Dv)), lses.new_empty((B, H, R))
    strides = H * R * Dv, R * Dv, q * Dv, Dv
    if not parts:
        out = query.new_empty((B, q, Hq, Dv))
        strides = R * H * Dv, R // max(q, 1) * Dv, Dv, Hq * Dv
    if lse.numel():
        own = sum(counts[: len(groups)])
        _finish(out, strides, lse, outs, lses, own, None if maps is None else maps[1], sinks, q)
    return (out, lse) if parts else out


def _kind(of: Map) -> tuple[int, int, tuple[Any, ...]]:
    """Return the kind of a map, the number of its channels, and its arguments."""
    if of.basis is not None:
        assert of.channels is not None
        return kernels.BASIS.value, of.channels.shape[-1], (*_by_head(of.basis), *_by_head(of.channels))
    if of.rotation is None:
        return kernels.IDENTITY.value, 0, ()
    return kernels.ROTATION.value, of.rotation.shape[-1], _by_head(of.rotation)


def _by_head(x: Tensor) -> tuple[Tensor, int, int]:
    """Return a tensor, and its strides of batch row and head if it has more of them than one."""
    x = x.contiguous()
    if x.dim() == 2:
        return x, 0, 0
    return x, x.stride(0) if len(x) > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


def _tiles(width: int, channels: int) -> tuple[int, int, int]:
    """Return the number of tiles of outputs, the outputs of each, and padded channels of the map."""
    padded = power(channels)
    outputs = min(power(width), ELEMENTS // padded)
    return -(-width // outputs), outputs, padded


def _mapped(rows: Tensor, of: Map) -> tuple[Tensor, Mapping | None]:
    """Return the tensor of mapped queries, and what the first launch needs to write them."""
    kind, channels, arguments = _kind(of)
    if kind == kernels.IDENTITY.value and not of.keeps_query:
        return rows, None
    D = rows.shape[-1]
    mapped = rows.new_empty((*rows.shape[:3], D * (1 + of.keeps_query)), dtype=torch.float32)
    tiles, *sizes = _tiles(mapped.shape[-1], channels)
    return mapped, Mapping((mapped, mapped.shape[-1], arguments or (rows,), channels, rows, D), (tiles, kind, *sizes))


def _map_alone(rows: Tensor, mapping: Mapping) -> None:
    """Map queries in a launch of its own, because no exact tokens are read."""
    (B, H, R, _), (tiles, OF, OUTPUTS, CHANNELS) = rows.shape, mapping.constants
    kernels.map_queries[(tiles, B * H)](
        *mapping.arguments, H, R, OF=OF, OUTPUTS=OUTPUTS, CHANNELS=CHANNELS, num_warps=4
    )


def _finish(
    out: Tensor, strides: tuple[int, ...], lse: Tensor, outs: Tensor, lses: Tensor, first_mapped: int, of: Map | None,
    sinks: Tensor | None, q: int,
) -> None:  # fmt: skip
    """Merge splits; the maps and the mean are of those from `first_mapped` on. See `maps.finish`."""
    B, H, splits, R, Dv = outs.shape
    kind, _, arguments = (kernels.IDENTITY.value, 0, ()) if of is None else _kind(of)
    mean = None if of is None else of.mean
    tiles, outputs, padded = _tiles(Dv, Dv) if kind else (1, power(Dv), 32)
    kernels.finish[(B * H, R, tiles)](
        out, *strides, lse, outs, lses, first_mapped, splits, arguments or (outs,),
        *((outs, 0, 0) if mean is None else _by_head(mean)), outs if sinks is None else sinks.contiguous(), H, R, q, Dv,
        OF=kind, HAS_MEAN=mean is not None, HAS_SINKS=sinks is not None, SPLITS=16, OUTPUTS=outputs, CHANNELS=padded,
        num_warps=4,
    )  # fmt: skip
