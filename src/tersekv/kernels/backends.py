"""Which implementation of an op runs: the first whose `why_not` is None, in the order C++, Triton, torch reference.

`TERSEKV_BACKEND=auto|cpu|triton|reference` or `with forced("cpu")` takes the choice away: a forced backend runs or
raises.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.kernels import cpu, triton
from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.encode_grid import GridPlace
from tersekv.kernels.encode_sparse import Entries
from tersekv.kernels.implementations import BACKENDS

BACKEND_VARIABLE = "TERSEKV_BACKEND"
AUTO = "auto"

log = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()
"""Fallbacks to the reference that were logged, by op and reason."""
_forced: ContextVar[str | None] = ContextVar("tersekv_backend", default=None)


def _checked(name: str, origin: str) -> str:
    allowed = (AUTO, *BACKENDS)
    if name not in allowed:
        raise UserError(f"{origin}: got {name!r}, allowed are {', '.join(allowed)}")
    return name


@functools.cache
def _from_environment() -> str:
    """The variable's value, read once per process."""
    return _checked(os.environ.get(BACKEND_VARIABLE) or AUTO, BACKEND_VARIABLE)


def chosen() -> str:
    """The forced backend's name, or "auto"."""
    return _forced.get() or _from_environment()


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run ops on one backend ("auto" for the usual choice) in this thread or task."""
    token = _forced.set(_checked(name, "backend"))
    try:
        yield
    finally:
        _forced.reset(token)


def _choose(op: str, *call: Any) -> tuple[str, Callable[..., Any]]:
    """The backend that runs this call, and its function; UserError where a forced one cannot."""
    only = _forced.get() or _from_environment()
    reasons: list[str] = []
    for name, ops in BACKENDS.items():
        if only not in (AUTO, name) or (only == AUTO and name == "triton" and triton.interpreted()):
            continue
        reason = ops[op].why_not(*call) if op in ops else f"it has no {op}"
        if reason is None:
            if name == "reference" and only == AUTO:
                _log_fallback(op, "; ".join(reasons))
            return name, ops[op].run
        reasons.append(f"{name}: {reason}")
        if only == name:
            raise UserError(f"backend {only!r} is forced and cannot run {op}: {reason}")
    raise AssertionError(f"no backend takes {op}")


def _log_fallback(op: str, reasons: str) -> None:
    """Log each reason once; a warning where there are no kernels at all, which is many times slower."""
    missing = cpu.why_not_built()
    if missing is not None:
        op, reasons = "", missing
    if (op, reasons) in _logged:
        return
    _logged.add((op, reasons))
    if missing is not None:
        log.warning("the C++ kernels cannot be used, and torch does their work many times slower: %s", missing)
    else:
        log.info("%s runs on the torch reference (%s)", op, reasons)


def _run(op: str, *call: Any) -> Any:
    return _choose(op, *call)[1](*call)


def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over a packed segment, see `tersekv.kernels.attend_packed`: out [B, H, R, Dv] and lse [B, H, R]."""
    return _run("attend_packed", query, keys, values, mask, scaling, softcap)


def attend_segments(
    query: Tensor, segments: Sequence[Segment], scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over all segments, see `tersekv.kernels.attend_segments`: out [B, H, R, Dv] and lse [B, H, R]."""
    return _run("attend_segments", query, segments, scaling, softcap)


def attend_exact(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over unpacked tokens, see `tersekv.kernels.softmax`: out [B, H, R, Dv] and lse [B, H, R]."""
    return _run("attend_exact", query, key, value, mask, scaling, softcap)


def merge_segments(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint token sets, see `tersekv.kernels.softmax`: out [B, H, R, D] and lse [B, H, R]."""
    return _run("merge_segments", outs, lses)


def encode_trellis(y: Tensor, weight: Tensor, bits: Tensor, tables: Tensor) -> Tensor:
    """The nearest trellis codes, see `tersekv.kernels.trellis`: windows uint8 [R, n, D]."""
    return _run("encode_trellis", y, weight, bits, tables)


def basis_product(x: Tensor, basis: Tensor, channels: Tensor, combine: bool) -> Tensor:
    """Products with the rows of a basis, see `tersekv.kernels.basis`: float32 [B, H, R, D]."""
    return _run("basis_product", x, basis, channels, combine)


def group_ranges(x: Tensor, place: GridPlace) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group, see `tersekv.kernels.encode_grid`: two planes, float32."""
    return _run("group_ranges", x, place)


def encode_grid(
    x: Tensor, place: GridPlace, scale: Tensor | None, offset: Tensor | None, table: Tensor | None
) -> Tensor:
    """The nearest codes, packed, see `tersekv.kernels.encode_grid`: int32 [B, H, N, lane groups, words, 16]."""
    return _run("encode_grid", x, place, scale, offset, table)


def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """Codes to words, see `tersekv.kernels.lanes`: [..., P, L] to int32 [..., lane groups, words, 16]."""
    return _run("pack_lanes", codes, bits)


def encode_signs(x: Tensor, sketch: Tensor) -> Tensor:
    """Packed signs of a sketch, see `tersekv.kernels.encode_signs`: x [..., t, D] to uint8 [..., ceil(M/8), t]."""
    return _run("encode_signs", x, sketch)


def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Polar angles and radii, see `tersekv.kernels.encode_polar`: uint8 [..., bytes, t], float32 [..., D/2^L, t]."""
    return _run("encode_polar", x, level_bits, tables)


def rotate_dense(x: Tensor, matrix: Tensor) -> Tensor:
    """A rotation, see `tersekv.kernels.rotate`: x float32 [..., D] to its shape."""
    return _run("rotate_dense", x, matrix)


def quantiles(vectors: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Thresholds that keep a share apart, see `tersekv.kernels.encode_sparse`: [..., n] to two of [...]."""
    return _run("quantiles", vectors, share)


def pack_outliers(residual: Tensor, chosen: Tensor) -> Entries:
    """Entries of the sparse overlay, see `tersekv.kernels.encode_sparse`: residual and chosen [B, H, T, D]."""
    return _run("pack_outliers", residual, chosen)


def rotate_hadamard(x: Tensor, matrix: Tensor, order: Tensor, signs: Tensor) -> Tensor:
    """A random Hadamard rotation, see `tersekv.kernels.rotate`: x float32 [..., D] to its shape."""
    return _run("rotate_hadamard", x, matrix, order, signs)


def kernel(op: str, *call: Any) -> Callable[..., Any] | None:
    """What reads packed bytes directly for this call, or None where only the reference would do, which decodes first.
    Raises UserError where a forced kernel cannot."""
    name, run = _choose(op, *call)
    return None if name == "reference" else run


def explain(op: str, *call: Any) -> str:
    """Who would run this call: "cpu/avx512", "triton", or "reference: <why not the kernels>"."""
    only = chosen()
    if only == "reference":
        return "reference: forced"
    # of the kernels for this device
    name = only if only != AUTO else "cpu" if call[0].device.type == "cpu" else "triton"
    reason = BACKENDS[name][op].why_not(*call)
    if reason is None:
        return f"cpu/{cpu.isa()}" if name == "cpu" else name
    return f"reference: {reason}" if only == AUTO else f"{name} is forced and cannot: {reason}"


def report() -> list[dict[str, Any]]:
    """Rows {"backend", "op", "available", "detail"} for `tersekv env`."""
    chosen()  # a wrong variable is said here too
    details = {
        "cpu": (cpu.why_not_built() is None, _cpu_detail()),
        "triton": (triton.why_not_usable() is None, triton.detail()),
        "reference": (True, f"torch {torch.__version__}"),
    }
    return [
        {"backend": name, "op": op, "available": details[name][0], "detail": details[name][1]}
        for name, ops in BACKENDS.items()
        for op in ops
    ]


def _cpu_detail() -> str:
    reason = cpu.why_not_built()
    if reason is not None:
        return reason
    used, notes = cpu.isa(), []
    for name, missing in cpu.isas().items():
        if name == used:
            break
        notes.append(f"{name} needs {missing}" if missing else f"{name} is there but {used} was asked for")
    return "; ".join([f"{used}, {torch.get_num_threads()} threads", *notes])
