"""Who implements each op: C++ on the CPU, Triton on a GPU, and torch, the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tersekv.ops import attend_packed as packed_reference
from tersekv.ops import attend_pages as pages_reference
from tersekv.ops import attend_segments as segments_reference
from tersekv.ops import basis as basis_reference
from tersekv.ops import cpu, triton
from tersekv.ops import encode_grid as grid_reference
from tersekv.ops import encode_polar as polar_reference
from tersekv.ops import encode_signs as signs_reference
from tersekv.ops import encode_sparse as sparse_reference
from tersekv.ops import lanes as lanes_reference
from tersekv.ops import rotate as rotation_reference
from tersekv.ops import softmax as softmax_reference
from tersekv.ops import trellis as trellis_reference
from tersekv.ops.cpu import encode as cpu_encode
from tersekv.ops.triton import encode, encode_sparse
from tersekv.ops.triton import encode_trellis as trellis_triton


@dataclass(frozen=True)
class Implementation:
    """One op of one backend. `why_not` takes the call's arguments and says why `run` does not take them, or None."""

    run: Callable[..., Any]
    why_not: Callable[..., str | None]


def _never(*call: Any) -> None:
    """The reference takes every call."""


ENCODERS: dict[str, Callable[..., Any]] = {
    "group_ranges": grid_reference.group_ranges,
    "encode_grid": grid_reference.encode_grid,
    "pack_lanes": lanes_reference.pack_lanes,
    "encode_signs": signs_reference.encode_signs,
    "encode_polar": polar_reference.encode_polar,
    "rotate_hadamard": rotation_reference.rotate_hadamard,
    "quantiles": sparse_reference.quantiles,
    "pack_outliers": sparse_reference.pack_outliers,
}
"""Ops that encode, as torch does them."""


def _encoders(*modules: ModuleType) -> dict[str, Implementation]:
    """Every op that encodes, by the module that has it; by torch where none has."""
    found = {op: Implementation(run, _never) for op, run in ENCODERS.items()}
    for module in modules:
        own = [op for op in ENCODERS if hasattr(module, op)]
        found |= {op: Implementation(getattr(module, op), getattr(module, f"why_not_{op}")) for op in own}
    return found


BACKENDS: dict[str, dict[str, Implementation]] = {
    "cpu": {
        "attend_packed": Implementation(cpu.attend_packed, cpu.why_not_attend_packed),
        "attend_pages": Implementation(cpu.attend_pages, cpu.why_not_attend_pages),
        "attend_segments": Implementation(cpu.attend_segments, cpu.why_not_attend_segments),
        "attend_exact": Implementation(cpu.attend_exact, cpu.why_not_attend_exact),
        "merge_segments": Implementation(cpu.merge_segments, cpu.why_not_merge_segments),
        "encode_trellis": Implementation(cpu.encode_trellis, cpu.why_not_encode_trellis),
        "basis_product": Implementation(cpu.basis_product, cpu.why_not_basis_product),
        "rotate_dense": Implementation(cpu_encode.rotate_dense, cpu_encode.why_not_rotate_dense),
        **_encoders(cpu_encode),
    },
    "triton": {
        "attend_packed": Implementation(triton.attend_packed, triton.why_not_attend_packed),
        "attend_pages": Implementation(triton.attend_pages, triton.why_not_attend_pages),
        "attend_segments": Implementation(triton.attend_segments, triton.why_not_attend_segments),
        "attend_exact": Implementation(triton.attend_exact, triton.why_not_attend_exact),
        "merge_segments": Implementation(triton.merge_segments, triton.why_not_merge_segments),
        "encode_trellis": Implementation(trellis_triton.encode_trellis, trellis_triton.why_not_encode_trellis),
        "basis_product": Implementation(basis_reference.basis_product, _never),
        "rotate_dense": Implementation(rotation_reference.rotate_dense, _never),
        **_encoders(encode, encode_sparse),
    },
    "reference": {
        "attend_packed": Implementation(packed_reference.attend_packed, _never),
        "attend_pages": Implementation(pages_reference.attend_pages, _never),
        "attend_segments": Implementation(segments_reference.attend_segments, _never),
        "attend_exact": Implementation(softmax_reference.attend_exact, _never),
        "merge_segments": Implementation(softmax_reference.merge_segments, _never),
        "encode_trellis": Implementation(trellis_reference.encode_trellis, _never),
        "basis_product": Implementation(basis_reference.basis_product, _never),
        "rotate_dense": Implementation(rotation_reference.rotate_dense, _never),
        **_encoders(),
    },
}
