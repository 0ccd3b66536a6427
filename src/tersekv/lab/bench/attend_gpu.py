"""Time decode attention over packed segments on a GPU and compare it with dense attention there.

The dense baselines are those of `dense_gpu.py`. Each implementation is first checked against the
reference. One that is wrong or cannot run here is not timed, and the reason is recorded.

Each implementation is captured in one CUDA graph per input, so that launches are not timed. The
graphs of all implementations run in turns on inputs larger than the L2 cache. CUDA events between
them measure each run. The floor is the time to read an implementation's bytes at the bandwidth of a
device copy measured in the same run.

For some formats the scores are also timed alone. That kernel reads only the keys and returns the
log-sum-exp of each row's scores. Encoding is timed separately, including kernel launches and host
synchronisation: the time of a block divided by its tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends
from tersekv.kernels.attend_packed import attend_packed
from tersekv.kernels.registry import NotTaken
from tersekv.lab.bench.attend import HeadCounts
from tersekv.lab.bench.clock import Spread
from tersekv.lab.bench.clock_gpu import Clock, Run
from tersekv.lab.bench.dense_gpu import Pair, dense_ways, own_attention, own_scores
from tersekv.lab.bench.formats import PackedPair, Packer, make_segment

LARGEST_ERROR = 1e-2
MAX_COPIES = 8
COLD_CACHES = 4
"""Size of all rotating inputs together, in multiples of the L2 cache."""
PROBE_BYTES = 4 << 30
ENCODE_SECONDS = 0.2
SCORES = ("grid4",)
"""Formats whose scores are also timed alone."""


class Row(NamedTuple):
    """Timing of one implementation.

    bits: None for dense ones. bytes: size of keys and values, which are read once. encode_us:
    microseconds to encode one token of all heads and batch rows, keys and values together.
    """

    what: str
    bits: float | None
    bytes: int
    time: Spread
    error: float = 0.0
    encode_us: float | None = None

    @property
    def of_scores(self) -> bool:
        """True if the implementation reads only keys."""
        return self.what.startswith("scores")


class Measured(NamedTuple):
    """Timings at one context length on one machine.

    bandwidth: bytes read and written by a device copy, in GB/s. missing: reason for each
    implementation that did not run.
    """

    machine: str
    heads: HeadCounts
    batch: int
    tokens: int
    bandwidth: float
    rows: list[Row]
    missing: dict[str, str]

    def baseline(self, of_scores: bool = False) -> float:
        """Return the milliseconds of the fastest dense bfloat16 implementation of attention, or of
        scores."""
        dense = [row for row in self.rows if row.bits is None and "bfloat16" in row.what]
        return min(row.time.ms for row in dense if row.of_scores == of_scores)

    def floor_ms(self, row: Row) -> float:
        """Return the time to read the implementation's bytes at the bandwidth of the copy."""
        return row.bytes / self.bandwidth / 1e6

    def results(self) -> list[dict[str, Any]]:
        """Return one record per implementation."""
        return [self._result(row) for row in self.rows]

    def _result(self, row: Row) -> dict[str, Any]:
        floor = self.floor_ms(row)
        return {
            "what": row.what, "shape": str(self.heads), "batch": self.batch, "T": self.tokens, "bits": row.bits,
            "bytes": row.bytes, "median_us": round(row.time.ms * 1e3, 2), "p10": round(row.time.p10 * 1e3, 2),
            "p90": round(row.time.p90 * 1e3, 2), "runs": row.time.runs, "copy_gb_per_s": round(self.bandwidth, 1),
            "floor_us": round(floor * 1e3, 2), "share_of_floor": round(floor / row.time.ms, 3),
            "speedup_bfloat16": round(self.baseline(row.of_scores) / row.time.ms, 3),
            "relative_error": float(f"{row.error:.3g}"),
            "encode_us_per_token": None if row.encode_us is None else round(row.encode_us, 2),
        }  # fmt: skip


class _Way(NamedTuple):
    row: Row
    runs: list[Run]


def measure(
    clock: Clock, heads: HeadCounts, batch: int, tokens: int, formats: Sequence[str], seconds: float, seed: int = 0,
    stop: float = math.inf,
) -> Measured:  # fmt: skip
    """Time all implementations at one context length, in about `seconds` of device time.

    stop: value of `time.monotonic` after which no further format is started.
    """
    ways, missing = _dense(clock, heads, batch, tokens, seed)
    for name in formats:
        make = functools.partial(_packed, clock, name, heads, batch, tokens, seed + 1)
        if time.monotonic() >= stop:
            missing[name] = "no time was left"
        else:
            ways += _tried(make, name, missing)
    times = clock.turns({way.row.what: way.runs for way in ways}, seconds)
    rows = [way.row._replace(time=times[way.row.what]) for way in ways]
    return Measured(clock.name, heads, batch, tokens, copy_bandwidth(clock), rows, missing)


def _tried(make: Callable[[], list[_Way]], name: str, missing: dict[str, str]) -> list[_Way]:
    """Return the implementations that `make` builds. On failure, store the reason in `missing`."""
    try:
        return make()
    except _refusals() as reason:
        missing[name] = (str(reason) or type(reason).__name__).splitlines()[0]
        return []


@functools.cache
def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions of an implementation that cannot run here, our own errors included.

    Triton's errors are listed because they are not RuntimeErrors.
    """
    usual = ImportError, RuntimeError, ValueError, TypeError, NotTaken
    if importlib.util.find_spec("triton") is None:
        return usual
    return *usual, importlib.import_module("triton.runtime.errors").TritonError


def copy_bandwidth(clock: Clock, size: int = PROBE_BYTES) -> float:
    """Return the bandwidth of a copy within the device in GB/s, reads and writes together."""
    size = size if clock.device == "cuda" else 1 << 20
    here, there = (torch.ones(size // 4, device=clock.device) for _ in range(2))
    took = clock.turns({"copy": [clock.capture(lambda: there.copy_(here))]}, 0.2)["copy"]
    return 2 * here.numel() * 4 / took.ms / 1e6


def _copies(clock: Clock, size: int) -> int:
    return max(2, min(MAX_COPIES, math.ceil(COLD_CACHES * clock.cache_bytes / size)))


def _query(clock: Clock, heads: HeadCounts, batch: int, seed: int) -> Tensor:
    """Return random queries, bfloat16 [batch, Hkv, G, D]."""
    g = torch.Generator(clock.device).manual_seed(seed)
    shape = batch, heads.kv, heads.query // heads.kv, heads.dim
    return torch.randn(shape, generator=g, device=clock.device).bfloat16()


def _packed(clock: Clock, name: str, heads: HeadCounts, batch: int, tokens: int, seed: int) -> list[_Way]:
    """Build the timed functions of one packed format.

    The rows of the batch are laid out as heads of one row, because the kernels treat them alike.
    """
    rows, D = batch * heads.kv, heads.dim
    query = _query(clock, heads, batch, 0).float().flatten(0, 1)[None]
    segment = make_segment(name, rows, tokens, D, seed, clock.device)
    segments = [segment] + [segment.copy() for _ in range(_copies(clock, segment.bytes) - 1)]
    inputs = [made.operands() for made in segments]
    error = _error(name, query, *inputs[0], D**-0.5)
    bits = round(segment.bytes * 8 / (2 * rows * tokens * D), 3)
    row = Row(name, bits, segment.bytes, Spread(0, 0, 0, 0), error, _encode_us(clock, name, segment))
    run = functools.partial(own_attention, query, D**-0.5)
    ways = [_Way(row, [clock.capture(functools.partial(run, *pair)) for pair in inputs])]
    if name not in SCORES:
        return ways
    score = functools.partial(own_scores, query, D**-0.5)
    error = _off(score(*inputs[0]), attend_packed.reference(query, *inputs[0], None, D**-0.5, None)[1], LARGEST_ERROR)
    size = segment.keys.bytes
    row = Row(f"scores {name}", round(size * 8 / (rows * tokens * D), 3), size, Spread(0, 0, 0, 0), error)
    return [*ways, _Way(row, [clock.capture(functools.partial(score, *pair)) for pair in inputs])]


def _off(out: Tensor, expected: Tensor, most: float) -> float:
    """Return the error relative to the norm of `expected`.

    Raises:
        CacheError: the error is at least `most`.
    """
    error = ((out.reshape(expected.shape).float() - expected).norm() / expected.norm()).item()
    if not error < most:
        raise CacheError(f"the relative error of its output is {error:.2g}")
    return error


def _error(name: str, query: Tensor, keys: Any, values: Any, scaling: float) -> float:
    """Return the error of the kernel's output against the reference, relative to the reference's
    norm."""
    call = query, keys, values, None, scaling, None
    found = backends.attend_packed.direct(*call)
    if found is None:
        raise UserError(f"{name} is not timed: {backends.explain(*call[:3])}")
    return _off(found[0], attend_packed.reference(*call)[0], LARGEST_ERROR)


def _encode_us(clock: Clock, name: str, segment: PackedPair) -> float:
    """Return the microseconds per token to encode one block of keys and one of values for all
    heads."""
    return sum(_encode_side_us(clock, f"{name} {side}", getattr(segment, side)) for side in PackedPair._fields)


def _encode_side_us(clock: Clock, what: str, side: Packer) -> float:
    heads, t = next(iter(side.planes.values())).shape[1], side.codec.layout(side.head_dim).block_tokens
    x = torch.randn(1, heads, t, side.head_dim, device=clock.device)
    run = functools.partial(_encoded, side, x)
    run()  # compile first
    return clock.turns({f"encode {what}": [run]}, ENCODE_SECONDS)[f"encode {what}"].ms * 1e3 / t


def _encoded(side: Packer, x: Tensor) -> Tensor:
    return next(iter(side.codec.encode(x).values()))


def _dense(clock: Clock, heads: HeadCounts, batch: int, tokens: int, seed: int) -> tuple[list[_Way], dict[str, str]]:
    """Build the dense baselines on the same keys and values, with the reason for each that cannot
    run."""
    g = torch.Generator(clock.device).manual_seed(seed)
    shape = batch, heads.kv, tokens, heads.dim
    size = 2 * math.prod(shape) * 2
    query, scaling = _query(clock, heads, batch, 0), heads.dim**-0.5
    draw = functools.partial(torch.randn, shape, generator=g, device=clock.device, dtype=torch.bfloat16)
    inputs = [(draw(), draw()) for _ in range(_copies(clock, size))]
    expected, lse = attend_packed.reference(query.float(), *inputs[0], None, scaling, None)
    scores = query.float() @ inputs[0][0].float().mT
    made: list[_Way] = []
    missing: dict[str, str] = {}
    for name, (run, pairs) in dense_ways(clock.device, query, scaling, inputs).items():
        right = scores if "matmul" in name else lse if "scores" in name else expected
        row = Row(name, None, sum(x.nbytes for x in pairs[0]), Spread(0, 0, 0, 0))
        row = row._replace(bytes=row.bytes // 2) if row.of_scores else row
        made += _tried(functools.partial(_dense_way, clock, row, run, pairs, right), name, missing)
    return made, missing


def _dense_way(
    clock: Clock, row: Row, run: Callable[..., Tensor], pairs: Sequence[Pair], expected: Tensor
) -> list[_Way]:
    error = _off(run(*pairs[0]), expected, 0.1 if "float8" in row.what else LARGEST_ERROR)
    return [_Way(row._replace(error=error), [clock.capture(functools.partial(run, *pair)) for pair in pairs])]
