"""Who implements each op: C++ on the CPU, Triton on a GPU, and torch, the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tersekv.kernels import attend_packed as packed_reference
from tersekv.kernels import attend_pages as pages_reference
from tersekv.kernels import attend_segments as segments_reference
from tersekv.kernels import basis as basis_reference
from tersekv.kernels import cpu, triton
from tersekv.kernels import encode_grid as grid_reference
from tersekv.kernels import encode_polar as polar_reference
from tersekv.kernels import encode_signs as signs_reference
from tersekv.kernels import encode_sparse as sparse_reference
from tersekv.kernels import lanes as lanes_reference
from tersekv.kernels import rotate as rotation_reference
from tersekv.kernels import softmax as softmax_reference
from tersekv.kernels import trellis as trellis_reference
from tersekv.kernels.cpu import encode as cpu_encode
from tersekv.kernels.triton import encode


@dataclass(frozen=True)
class Implementation:
    """One op of one backend. `why_not` takes the call's arguments and says why `run` does not take them, or None."""

    run: Callable[..., Any]
    why_not: Callable[..., str | None]


def _never(*call: Any) -> None:
    """The reference takes every call."""


REFERENCE: dict[str, Callable[..., Any]] = {
    "attend_packed": packed_reference.attend_packed,
    "attend_pages": pages_reference.attend_pages,
    "attend_segments": segments_reference.attend_segments,
    "attend_exact": softmax_reference.attend_exact,
    "merge_segments": softmax_reference.merge_segments,
    "encode_trellis": trellis_reference.encode_trellis,
    "basis_product": basis_reference.basis_product,
    "rotate_dense": rotation_reference.rotate_dense,
    "rotate_hadamard": rotation_reference.rotate_hadamard,
    "group_ranges": grid_reference.group_ranges,
    "encode_grid": grid_reference.encode_grid,
    "pack_lanes": lanes_reference.pack_lanes,
    "encode_signs": signs_reference.encode_signs,
    "encode_polar": polar_reference.encode_polar,
    "quantiles": sparse_reference.quantiles,
    "pack_outliers": sparse_reference.pack_outliers,
}
"""Every op as torch does it."""


def _by(*modules: ModuleType) -> dict[str, Implementation]:
    """Every op, by the module that has it and a `why_not_` of it; by torch where none has."""
    found = {op: Implementation(run, _never) for op, run in REFERENCE.items()}
    for module in modules:
        own = [op for op in REFERENCE if hasattr(module, f"why_not_{op}")]
        found |= {op: Implementation(getattr(module, op), getattr(module, f"why_not_{op}")) for op in own}
    return found


BACKENDS: dict[str, dict[str, Implementation]] = {
    "cpu": _by(cpu, cpu_encode),
    "triton": _by(triton, encode),
    "reference": _by(),
}
