"""All operators with their kernels: C++ on the CPU, Triton on a GPU, and the torch reference; see
`registry`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import cpu, triton
from tersekv.kernels.attend import attend as attend
from tersekv.kernels.attend import merge_chunk as merge_chunk
from tersekv.kernels.attend_packed import attend_packed as attend_packed
from tersekv.kernels.attend_pages import attend_pages as attend_pages
from tersekv.kernels.attend_segments import attend_segments as attend_segments
from tersekv.kernels.basis import basis_components as basis_components
from tersekv.kernels.basis import basis_product as basis_product
from tersekv.kernels.basis import fitted_basis as fitted_basis
from tersekv.kernels.components import fitted_components as fitted_components
from tersekv.kernels.components import search_arguments as search_arguments
from tersekv.kernels.cpu import attend as cpu_attend  # registers its kernels
from tersekv.kernels.cpu import encode as cpu_encode  # noqa: F401 (registers its kernels)
from tersekv.kernels.cpu import fit as cpu_fit  # noqa: F401 (registers its kernels)
from tersekv.kernels.decode import decode as decode
from tersekv.kernels.encode_grid import encode_grid as encode_grid
from tersekv.kernels.encode_grid import group_ranges as group_ranges
from tersekv.kernels.encode_polar import encode_polar as encode_polar
from tersekv.kernels.encode_signs import encode_signs as encode_signs
from tersekv.kernels.encode_sparse import pack_outliers as pack_outliers
from tersekv.kernels.encode_sparse import quantiles as quantiles
from tersekv.kernels.lanes import pack_lanes as pack_lanes
from tersekv.kernels.observed_loss import observed_loss as observed_loss
from tersekv.kernels.observed_loss import squared_weights as squared_weights
from tersekv.kernels.registry import AUTO as AUTO
from tersekv.kernels.registry import BACKEND_VARIABLE as BACKEND_VARIABLE
from tersekv.kernels.registry import OPERATORS, REFERENCE, NotTaken
from tersekv.kernels.registry import chosen as chosen
from tersekv.kernels.registry import forced as forced
from tersekv.kernels.rotate import rotate_dense as rotate_dense
from tersekv.kernels.rotate import rotate_hadamard as rotate_hadamard
from tersekv.kernels.rotated_mean import rotated_sums as rotated_sums
from tersekv.kernels.rotated_mean import without_rotated_mean as without_rotated_mean
from tersekv.kernels.softmax import attend_exact as attend_exact
from tersekv.kernels.softmax import merge_segments as merge_segments
from tersekv.kernels.trellis import encode_trellis as encode_trellis
from tersekv.kernels.trellis import pack_trellis as pack_trellis
from tersekv.kernels.trellis import pack_vectors as pack_vectors
from tersekv.kernels.triton import encode as triton_encode  # noqa: F401 (registers its kernels)
from tersekv.kernels.triton import pack as triton_pack  # noqa: F401 (registers its kernels)
from tersekv.kernels.weighted_sums import relative_weights as relative_weights
from tersekv.kernels.weighted_sums import weighted_sums as weighted_sums
from tersekv.kernels.write_tokens import all_finite as all_finite
from tersekv.kernels.write_tokens import write_tokens as write_tokens


def explain(query: Tensor, keys: Any, values: Any) -> str:
    """Name the backend that attends over such operands: "cpu/avx512", "triton", or "reference:
    <reason>"."""
    only = chosen()
    if only == REFERENCE:
        return "reference: forced"
    name = only if only != AUTO else "cpu" if query.is_cpu else "triton"
    reason = _why_not(name, query, keys, values)
    if reason is None:
        return f"cpu/{cpu.isa()}" if name == "cpu" else name
    return f"reference: {reason}" if only == AUTO else f"{name} is forced and cannot run: {reason}"


def _why_not(name: str, query: Tensor, keys: Any, values: Any) -> str | None:
    if name == "triton":
        return triton.why_not_attend_packed(query, keys, values, None, 1.0, None)
    try:
        cpu_attend.check(query, keys, values)
    except NotTaken as reason:
        return str(reason)
    return None


def report() -> list[dict[str, Any]]:
    """Return rows {"backend", "op", "available", "detail"} for `tersekv doctor --all`."""
    chosen()  # raises if the variable is wrong
    details = {
        "cpu": (cpu.why_not_built() is None, _cpu_detail()),
        "triton": (triton.why_not_usable() is None, triton.detail()),
        REFERENCE: (True, f"torch {torch.__version__}"),
    }
    return [
        {"backend": name, "op": op, "available": available, "detail": detail}
        for name, (available, detail) in details.items()
        for op in OPERATORS
    ]


def _cpu_detail() -> str:
    """Describe the instruction set in use, and the features that better ones lack on this CPU."""
    if reason := cpu.why_not_built():
        return reason
    used, notes = cpu.isa(), []
    for name, missing in cpu.isas().items():
        if name == used:
            break
        notes.append(f"{name} needs {missing}" if missing else f"{name} is available but {used} is selected")
    return "; ".join([f"{used}, {torch.get_num_threads()} threads", *notes])
