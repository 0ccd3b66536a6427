"""Hashes of what a cache holds. Only `segments` knows how a store names its parts.

Shapes: B batch rows, H key-value heads, N positions, D channels of a key and of a value together.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from tersekv.kernels.marks import Marks

SIGNATURE = 4
"""Numbers that stand for the output of attention."""


def digest(*parts: Any) -> str:
    """Return 16 hex digits of the SHA-256 of tensors and of JSON values."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            part = part.detach()
            sha.update(f"{part.dtype} {tuple(part.shape)}".encode())
            sha.update(part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        else:
            sha.update(json.dumps(part, sort_keys=True).encode())
    return sha.hexdigest()[:16]


class Segment(NamedTuple):
    """Tokens of one kind: keys and values, or keys alone, and their positions int64 [B, H, T].

    Positions are −1 for what attention does not see.
    """

    kind: str
    sides: list[Any]
    places: Tensor


def segments(store: Any) -> Iterator[Segment]:
    """Return what attention reads, exact tokens last. Those that a policy samples are other kinds."""
    for page in store.packed_pages():
        yield Segment("tokens", [page.keys, page.values], _places(store, page.where, page.tokens))
    for exact in store.exact_segments():
        yield Segment("tokens", [exact.keys, exact.values], _places(store, exact.positions, exact.keys.shape[2]))
    for sample in store.weighted_segments() if store.estimates else ():
        sides = [side for side in (sample.keys, sample.values) if side is not None]
        places = _places(store, sample.positions, sample.positions.shape[2])
        yield Segment("samples" if len(sides) == 2 else "clusters", sides, places)


def positions(store: Any) -> dict[str, Tensor]:
    """Return which positions each head holds, bool [B, H, N], by kind of token."""
    found: dict[str, Tensor] = {}
    for kind, _, places in segments(store):
        B, H, _ = places.shape
        seen = found.setdefault(kind, torch.zeros(B, H, store.num_tokens + 1, dtype=torch.bool))
        seen.scatter_(2, places.where(places >= 0, store.num_tokens), True)
    return {kind: seen[:, :, :-1] for kind, seen in sorted(found.items())}


def tokens(store: Any) -> dict[str, Tensor]:
    """Return keys and values float32 [B, H, N, D] by kind of token, as attention reads them.

    Positions that a head does not hold are NaN. An exact token replaces its packed copy.
    """
    found: dict[str, Tensor] = {}
    for kind, sides, places in segments(store):
        x = torch.cat([(x if isinstance(x, Tensor) else x.decode()).float() for x in sides], dim=-1) + 0.0  # no −0.0
        out = found.setdefault(kind, x.new_full((*places.shape[:2], store.num_tokens + 1, x.shape[3]), torch.nan))
        out.scatter_(2, places.where(places >= 0, store.num_tokens).unsqueeze(-1).expand_as(x), x)
    return {kind: x[:, :, :-1] for kind, x in sorted(found.items())}


def _places(store: Any, where: Any, n: int) -> Tensor:
    """Return the positions [B, H, n] of a segment, −1 for padding."""
    hidden = store.hidden
    if isinstance(where, Tensor) and where.dim() > 1:  # rows or heads differ, and have no padding
        hidden, where = None, where.unsqueeze(1) if where.dim() == 2 else where
    elif isinstance(where, Marks):
        where = where.positions()
    elif not isinstance(where, Tensor):
        where = torch.arange(where, where + n)
    places = where.long().expand(store.batch_size, store.kv_heads, n)
    return places if hidden is None else places.masked_fill(places < hidden[:, None, None], -1)


def sizes(cache: Any) -> dict[str, Any]:
    """Return all numbers of a cache's footprint, without parts of no bytes."""
    footprint = cache.footprint()
    parts = {name: size for name, size in footprint.parts.items() if size}
    return {"tokens": footprint.tokens, "elements": footprint.elements, "coded": footprint.coded, "parts": parts}


@functools.lru_cache
def _signs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (SIGNATURE, 1 << 21), generator=generator, dtype=torch.int8) * 2 - 1


def signature(outputs: list[Tensor]) -> list[float] | None:
    """Return sums of all outputs with random signs, divided by the root of their number. None if one is not finite.

    A kernel that rounds in another order changes them by less than `golden.TOLERANCE`.
    """
    x = torch.cat([out.detach().flatten() for out in outputs]).double()
    sums = torch.stack([(signs[: len(x)] * x).sum() for signs in _signs()]) / len(x) ** 0.5
    return [round(s, 6) for s in sums.tolist()] if bool(sums.isfinite().all()) else None


def saved(path: Path) -> dict[str, list[str]]:
    """Return the sorted hashes of a file's tensors, by two parts. Empty ones do not count.

    Figures are float32 and float64 tensors, such as sums of attention weights. Every CPU rounds them
    in its own way.
    """
    found: dict[str, list[str]] = {"figures": [], "saved": []}
    for x in filter(Tensor.numel, load_file(path).values()):
        found["figures" if x.dtype in (torch.float32, torch.float64) else "saved"].append(digest(x))
    return {kind: sorted(hashes) for kind, hashes in found.items()}


def walk(cache: Any) -> Iterator[Any]:
    """Return the stores of the layers that hold tokens."""
    return (layer.store for layer in cache.layers if layer.store is not None)
