"""Time decode attention (one query position) over a packed segment and compare it with PyTorch's
dense attention.

Each kernel is first checked against float32 attention over the decoded segment. Then all
implementations run in turns on rotating inputs, so that caches are cold.

The dense baselines are:

- SDPA with `enable_gqa` in bfloat16, which transformers uses;
- the batched matrix product over each query group, in bfloat16 and in float32.

The floor is the time to read bfloat16 keys and values once at the memory bandwidth measured in the
same run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends
from tersekv.kernels.attend_packed import Operand, attend_packed
from tersekv.lab.bench.clock import Spread, read_bandwidth, take_turns
from tersekv.lab.bench.formats import PackedPair, make_segment

COLD_BYTES = 96 << 20
MAX_COPIES = 8
LARGEST_ERROR = 1e-2
"""Largest relative error of the output; the bound of kernels that multiply in bfloat16."""


class HeadCounts(NamedTuple):
    """Numbers of heads and the head dimension, written as query heads/KV heads/head dim."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @staticmethod
    def parse(text: str) -> HeadCounts:
        """Parse a text such as 32/8/128."""
        found = re.fullmatch(r"\s*(\d{1,4})/(\d{1,4})/(\d{1,4})\s*", text)
        heads = HeadCounts(*map(int, found.groups())) if found else HeadCounts(1, 0, 0)
        if not heads.kv or heads.query % heads.kv or not heads.dim or heads.dim % 32:
            raise UserError(
                f"--heads {text.strip()!r} is not valid: write query heads/KV heads/head dim, for example 32/8/128; "
                "query heads must be a multiple of KV heads, and the head dim a multiple of 32"
            )
        return heads


class Row(NamedTuple):
    """Timing of one attention implementation. bits: None for dense tensors."""

    what: str
    bits: float | None
    tokens: int
    heads: HeadCounts
    threads: int
    time: Spread
    bytes: int
    error: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return the row as a line of a records file."""
        return {
            "what": self.what, "shape": str(self.heads), "bits": self.bits, "T": self.tokens, "threads": self.threads,
            "median_us": round(self.time.ms * 1e3, 1), "p10": round(self.time.p10 * 1e3, 1),
            "p90": round(self.time.p90 * 1e3, 1), "runs": self.time.runs, "bytes": self.bytes,
            "gb_per_s": round(self.bytes / self.time.ms / 1e6, 2), "relative_error": float(f"{self.error:.3g}"),
        }  # fmt: skip


class Measured(NamedTuple):
    """Timings of all implementations at one context length. bandwidth: memory reads in GB/s."""

    rows: list[Row]
    bandwidth: float

    def dense(self, what: str) -> float:
        """Return the time in milliseconds of the fastest implementation whose name starts with
        `what`."""
        return min(row.time.ms for row in self.rows if row.what.startswith(what))

    def results(self) -> list[dict[str, Any]]:
        """Return one JSON document per packed format."""
        return [self._result(row) for row in self.rows if row.bits is not None]

    def _result(self, row: Row) -> dict[str, Any]:
        Hkv, D = row.heads.kv, row.heads.dim
        floor = 2 * Hkv * row.tokens * D * 2 / self.bandwidth / 1e6
        return {
            "format": row.what, "tokens": row.tokens, "heads": str(row.heads), "threads": row.threads,
            "ms": round(row.time.ms, 4), "ms_p10": round(row.time.p10, 4), "ms_p90": round(row.time.p90, 4),
            "speedup_sdpa": round(self.dense("sdpa") / row.time.ms, 2),
            "speedup_dense": round(self.dense("matmul") / row.time.ms, 2),
            "speedup_floor": round(floor / row.time.ms, 2),
            "gbps_packed": round(row.bytes / row.time.ms / 1e6, 2),
            "relative_error": float(f"{row.error:.3g}"),
        }  # fmt: skip


def measure(
    heads: HeadCounts, tokens: int, formats: Sequence[str], threads: int, seconds: float, seed: int = 0
) -> Measured:
    """Time all implementations at one context length.

    They run for about `seconds` in total, and each at least five times.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(heads, tokens, formats, threads, seconds, seed)
    finally:
        torch.set_num_threads(before)


class _Way(NamedTuple):
    """A function to time with its rotating inputs. row: the result without its time."""

    row: Row
    run: Callable[..., Any]
    inputs: list[tuple[Any, Any]]

    def turn(self, number: int) -> Any:
        """Run once on the next input of the rotation."""
        return self.run(*self.inputs[number % len(self.inputs)])


def _measure(
    heads: HeadCounts, tokens: int, formats: Sequence[str], threads: int, seconds: float, seed: int
) -> Measured:
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads.kv, heads.query // heads.kv, heads.dim, generator=g)
    empty = Row("", None, tokens, heads, threads, Spread(0, 0, 0, 0), 0)
    ways = [_packed(name, query, empty, seed + 1) for name in formats]
    ways += [
        _dense("sdpa bfloat16", torch.bfloat16, _sdpa, query, empty),
        _dense("matmul bfloat16", torch.bfloat16, _matmul, query, empty),
        _dense("matmul float32", torch.float32, _matmul, query, empty),
    ]
    times = take_turns({way.row.what: way.turn for way in ways}, seconds)
    return Measured([way.row._replace(time=times[way.row.what]) for way in ways], read_bandwidth(threads))


def _packed(name: str, query: Tensor, row: Row, seed: int) -> _Way:
    heads, tokens = row.heads, row.tokens
    scaling = heads.dim**-0.5
    segment = make_segment(name, heads.kv, tokens, heads.dim, seed)
    error = _error(name, query, segment, scaling)
    copies = [segment.copy() for _ in range(_copies(segment.bytes) - 1)]
    bits = round(segment.bytes * 8 / (2 * heads.kv * tokens * heads.dim), 3)

    def run(keys: Operand, values: Operand) -> Any:
        return backends.attend_packed(query, keys, values, None, scaling, None)

    return _Way(
        row._replace(what=name, bits=bits, bytes=segment.bytes, error=error),
        run,
        [made.operands() for made in (segment, *copies)],
    )


def _dense(what: str, dtype: torch.dtype, way: Callable[..., Tensor], query: Tensor, row: Row) -> _Way:
    shape = (1, row.heads.kv, row.tokens, row.heads.dim)
    size = 2 * math.prod(shape) * dtype.itemsize
    inputs = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(_copies(size))]
    q = query.to(dtype)
    return _Way(row._replace(what=what, bytes=size), lambda key, value: way(q, key, value, row.heads.dim**-0.5), inputs)


def _copies(size: int) -> int:
    """Return the number of inputs of `size` bytes to rotate over."""
    return max(1 if size > 1 << 30 else 2, min(MAX_COPIES, COLD_BYTES // size))


def _error(name: str, query: Tensor, segment: PackedPair, scaling: float) -> float:
    """Return the error of the kernel's output against the reference, relative to the reference's
    norm."""
    call = query, *segment.operands(), None, scaling, None
    found = backends.attend_packed.direct(*call)
    if found is None:
        raise UserError(f"{name} is not timed: {backends.explain(*call[:3])}")
    out, _ = found
    expected, _ = attend_packed.reference(*call)
    error = ((out - expected).norm() / expected.norm()).item()
    if not error < LARGEST_ERROR:
        raise CacheError(f"{name} is not timed: the relative error of its output is {error:.2g}")
    return error


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    _, Hkv, G, D = query.shape
    return F.scaled_dot_product_attention(query.reshape(1, Hkv * G, 1, D), key, value, scale=scaling, enable_gqa=True)


def _matmul(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend with one matrix product per KV head. query [1, Hkv, G, D] holds the query group as
    rows."""
    weights = torch.softmax(torch.matmul(query, key.transpose(-1, -2)) * scaling, dim=-1)
    return torch.matmul(weights, value)
